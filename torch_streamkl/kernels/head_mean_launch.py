"""Launchers of the kernels for a head-averaged teacher (head_mean.py)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from torch_streamkl.kernels import head_mean as kernels
from torch_streamkl.kernels.plans import LOG2E, plan_of, tensors_of
from torch_streamkl.kernels.shares import new_shares, share_strides, sum_of_shares
from torch_streamkl.launch import ceil_div, head_mean_splits
from torch_streamkl.problem import AttentionProblem, RowStatistics
from torch_streamkl.streaming import Wanted


def forward(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
    """Per-row values and statistics, float32."""
    value, stats = RowStatistics.allocate(problem)
    plan = plan_of(problem)
    stage = plan.stage(problem, "forward")
    tensors = tensors_of(problem)
    student, teacher, masks = plan.arguments(problem)
    ratio = problem.teacher.num_heads // problem.num_heads
    sides = [("student", student, stats.student, 1)]
    if problem.teacher_lse is None:
        sides.append(("teacher", teacher, stats.teacher, ratio))
    else:
        torch.mul(problem.teacher_lse, LOG2E, out=stats.teacher_lse)
    for name, side, out, side_ratio in sides:
        plan.run(
            (name, "lse"),
            kernels.lse_kernel,
            (stage.programs * side_ratio, 1, 1),
            (
                side, masks, out, stage.num_blocks, problem.num_heads * side_ratio, side_ratio,
                plan.inv_temperature, plan.fill,
            ),
            (name == "student", stage.config),
            stage.options,
            tensors,
        )  # fmt: skip
    splits, keys = _shares(problem, stage.programs, stage.num_key_blocks, stage.launch.block_n)
    sums = (value, stats.student_sum)
    partial = value.new_empty((2, splits, *value.shape)) if splits > 1 else sums
    plan.run(
        "mean_sums",
        kernels.mean_sums_kernel,
        (stage.programs, splits, 1),
        (
            student, teacher, masks, *partial, stats.student, stats.teacher, value.numel(),
            stage.num_blocks, problem.num_heads, ratio, keys, plan.inv_temperature, plan.fill,
        ),
        (plan.helper, stage.config),
        stage.options,
        (*tensors, *partial),
    )  # fmt: skip
    if splits > 1:
        for out, shares in zip(sums, partial, strict=True):
            torch.sum(shares, 0, out=out)
    if problem.teacher.sink is not None:  # whose gradient is computed from the statistics
        _group_sums(problem, stats, stats.teacher_sum)
    else:  # it costs as much as all the rest, and few teachers have gradients
        stats.teacher_sum.zero_()
    return value, stats


def backward(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The wanted gradients, each summed in a fixed order."""
    grad = grad.to(torch.float32).contiguous()
    own, group = stats.student_sum, stats.teacher_sum
    if wanted.teacher and problem.teacher.sink is None:
        group = _group_sums(problem, stats, torch.empty_like(group))
    return (
        _dq(problem, stats, own, grad, student=True) if wanted.student_q else None,
        _dk(problem, stats, own, grad, student=True) if wanted.student_k else None,
        _dq(problem, stats, group, grad, student=False) if wanted.teacher_q else None,
        _dk(problem, stats, group, grad, student=False) if wanted.teacher_k else None,
    )


def _group_sums(problem: AttentionProblem, stats: RowStatistics, sums: Tensor) -> Tensor:
    """Write G of the rows of all teacher heads."""
    plan = plan_of(problem)
    stage = plan.stage(problem, "forward")
    ratio = problem.teacher.num_heads // problem.num_heads
    plan.run(
        "group_sums",
        kernels.group_sums_kernel,
        (stage.programs, 1, 1),
        (
            *plan.arguments(problem), sums, stats.student, stats.teacher,
            stage.num_blocks, problem.num_heads, ratio, plan.inv_temperature, plan.fill,
        ),
        (triton.next_power_of_2(ratio), plan.helper, stage.config),
        stage.options,
        (*tensors_of(problem), stats.student, stats.teacher, sums),
    )  # fmt: skip
    return sums


def _dq(
    problem: AttentionProblem, stats: RowStatistics, sums: Tensor, grad: Tensor, student: bool
) -> Tensor:
    plan = plan_of(problem)
    stage = plan.stage(problem, "dq")
    side = problem.student if student else problem.teacher
    ratio = problem.teacher.num_heads // problem.num_heads
    programs = stage.programs * (1 if student else ratio)
    splits, keys = _shares(problem, programs, stage.num_key_blocks, stage.launch.block_n)
    shares = new_shares(side.q, splits)
    plan.run(
        ("dq", student),
        kernels.mean_dq_kernel,
        (programs, splits, 1),
        (
            *plan.arguments(problem), grad, stats.student, stats.teacher, sums,
            shares, *share_strides(shares), side.scale / problem.temperature,
            stage.num_blocks, problem.num_heads, ratio, keys, plan.inv_temperature,
        ),
        (student, plan.helper, stage.config),
        stage.options,
        (*tensors_of(problem), grad, stats.student, stats.teacher, sums),
    )  # fmt: skip
    return sum_of_shares(shares, side.q)


def _dk(
    problem: AttentionProblem, stats: RowStatistics, sums: Tensor, grad: Tensor, student: bool
) -> Tensor:
    plan = plan_of(problem)
    stage = plan.stage(problem, "dk")
    side = problem.student if student else problem.teacher
    ratio = problem.teacher.num_heads // problem.num_heads
    programs = stage.num_key_blocks * side.num_kv_heads * plan.num_sequences
    splits, rows = _shares(problem, programs, stage.num_blocks, stage.launch.block_m)
    shares = new_shares(side.k, splits)
    plan.run(
        ("dk", student),
        kernels.mean_dk_kernel,
        (programs, splits, 1),
        (
            *plan.arguments(problem), grad, stats.student, stats.teacher, sums,
            shares, *share_strides(shares), side.scale / problem.temperature,
            stage.num_key_blocks, problem.num_heads, ratio, side.num_kv_heads,
            side.num_heads // side.num_kv_heads, rows, plan.inv_temperature,
        ),
        (student, plan.helper, stage.config),
        stage.options,
        (*tensors_of(problem), grad, stats.student, stats.teacher, sums),
    )  # fmt: skip
    return sum_of_shares(shares, side.k)


def _shares(problem: AttentionProblem, programs: int, tiles: int, block: int) -> tuple[int, int]:
    """Programs that share the tiles of a block, and the keys or rows of each."""
    splits = head_mean_splits(problem, programs, tiles)
    return splits, ceil_div(tiles, splits) * block
