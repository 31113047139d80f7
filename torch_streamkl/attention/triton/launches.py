"""Launches the portable attention kernels: builds grids and arguments from an AttentionProblem.

The host never waits for the GPU: kernels read lengths, guards and packed offsets on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_streamkl.attention import head_mean_launches
from torch_streamkl.attention.heuristics import key_splits
from torch_streamkl.attention.pack_gqa import pack_gqa_heads
from torch_streamkl.attention.plans import (
    NUM_STATE_FIELDS,
    NUM_SUMS,
    Plan,
    Stage,
    plan_of,
    tensors_of,
)
from torch_streamkl.attention.problem import AttentionProblem, NeedsGrad, RowStatistics
from torch_streamkl.attention.triton import backward as bwd
from torch_streamkl.attention.triton import forward as fwd
from torch_streamkl.attention.triton import forward_splits as splits_of_keys
from torch_streamkl.kernels.splits import combine_splits, new_splits, split_strides


def forward(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
    """Returns per-row values and statistics, float32."""
    if problem.head_mean:
        return head_mean_launches.forward(problem)
    rows = pack_gqa_heads(problem)
    if rows is not None:
        value, stats = forward(rows)
        shape = problem.student.q.shape[:3]
        return value.view(shape), stats.viewed(shape)
    value, stats = RowStatistics.allocate(problem)
    plan = plan_of(problem)
    stage = plan.stage(problem, "forward")
    if stage.launch.num_splits > 1:
        _split_forward(problem, plan, stage, value, stats)
    else:
        plan.run(
            "forward",
            fwd.forward_kernel,
            (stage.programs, 1, 1),
            (
                *plan.arguments(problem), value, stats.student, stats.teacher, plan.stats_stride,
                stage.num_blocks, problem.num_heads, plan.inv_temperature, plan.fill,
            ),
            (plan.form, plan.helper, stage.config),
            stage.options,
            tensors_of(problem),
        )  # fmt: skip
    return value, stats


def _split_forward(
    problem: AttentionProblem, plan: Plan, stage: Stage, value: Tensor, stats: RowStatistics
) -> None:
    config, splits, programs = stage.config, stage.launch.num_splits, stage.programs
    arguments = plan.arguments(problem)
    aligned = tensors_of(problem)
    state = value.new_empty((splits, NUM_STATE_FIELDS, *value.shape))
    state_strides = (state.stride(1), state.stride(0))
    again = (
        torch.empty(programs, dtype=torch.int32, device=value.device) if config.GUARDED else None
    )
    heads = (stage.num_blocks, problem.num_heads)
    outputs = (value, stats.student, stats.teacher, plan.stats_stride)
    one_warp_group = {"num_warps": 4}
    plan.run(
        "state",
        splits_of_keys.state_kernel,
        (programs, splits, 1),
        (*arguments, state, *state_strides, *heads, stage.keys_per_split, plan.inv_temperature),
        (plan.form, config),
        stage.options,
        aligned,
    )
    plan.run(
        "merge",
        splits_of_keys.merge_kernel,
        (programs, 1, 1),
        (*arguments, state, *state_strides, splits, *outputs, again, *heads, plan.fill),
        (plan.form, config),
        one_warp_group,
        aligned,
    )
    if not config.TWO_PASS:
        return
    sums = value.new_empty((splits, NUM_SUMS, *value.shape))
    sums_strides = (sums.stride(1), sums.stride(0))
    plan.run(
        "sums",
        splits_of_keys.sums_kernel,
        (programs, splits, 1),
        (
            *arguments, stats.student, stats.teacher, again, sums, *sums_strides,
            *heads, stage.keys_per_split, plan.inv_temperature,
        ),
        (plan.helper, config),
        stage.options,
        aligned,
    )  # fmt: skip
    plan.run(
        "merge_sums",
        splits_of_keys.merge_sums_kernel,
        (programs, 1, 1),
        (arguments[2], sums, *sums_strides, splits, again, *outputs, *heads, plan.fill),
        (plan.helper, config),
        one_warp_group,
        aligned,
    )


def backward(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, needs_grad: NeedsGrad
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the needed gradients, each summed in a fixed order."""
    if problem.head_mean:
        return head_mean_launches.backward(problem, stats, grad, needs_grad)
    grad = grad.to(torch.float32).contiguous()
    rows = pack_gqa_heads(problem)
    if rows is not None:
        shape = rows.student.q.shape[:3]
        found = backward(rows, stats.viewed(shape), grad.view(shape), needs_grad)
        dq, dk, teacher_dq, teacher_dk = found
        return (
            None if dq is None else dq.view(problem.student.q.shape),
            dk,
            None if teacher_dq is None else teacher_dq.view(problem.teacher.q.shape),
            teacher_dk,
        )
    plan = plan_of(problem)
    shared = Shared(
        (*plan.arguments(problem), grad, stats.student, stats.teacher, plan.stats_stride),
        (*tensors_of(problem), grad, stats.student, stats.teacher),
    )
    sides = (
        (needs_grad.student_q, needs_grad.student_k),
        (needs_grad.teacher_q, needs_grad.teacher_k),
    )
    found = [
        _gradients(problem, plan, shared, of_q, of_k, student)
        for (of_q, of_k), student in zip(sides, (True, False), strict=True)
    ]
    return *found[0], *found[1]


class Shared(NamedTuple):
    """Holds what the launches of one backward pass have in common."""

    arguments: tuple[Any, ...]  # the first ones of the kernels
    tensors: tuple[Tensor | None, ...]  # of Plan.run


def _gradients(
    problem: AttentionProblem, plan: Plan, shared: Shared, of_q: bool, of_k: bool, student: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the gradients of one side."""
    return (
        _dq(problem, plan, shared, student) if of_q else None,
        _dk(problem, plan, shared, student) if of_k else None,
    )


def _dq(problem: AttentionProblem, plan: Plan, shared: Shared, student: bool) -> Tensor:
    side = problem.student if student else problem.teacher
    stage = plan.stage(problem, "dq")
    splits = stage.launch.num_splits
    partials = new_splits(side.q, splits)
    plan.run(
        ("dq", student),
        bwd.dq_kernel,
        (stage.programs, splits, 1),
        (
            *shared.arguments, partials, *split_strides(partials),
            side.scale / problem.temperature,
            stage.num_blocks, problem.num_heads, stage.keys_per_split, plan.inv_temperature,
        ),
        (student, plan.form, plan.helper, stage.config),
        stage.options,
        shared.tensors,
    )  # fmt: skip
    return combine_splits(partials, side.q)


def _dk(problem: AttentionProblem, plan: Plan, shared: Shared, student: bool) -> Tensor:
    side = problem.student if student else problem.teacher
    stage = plan.stage(problem, "dk")
    programs = stage.num_key_blocks * side.num_kv_heads * plan.num_sequences
    group = problem.num_heads // side.num_kv_heads
    num_splits = key_splits(problem, group, programs, resident=2)
    partials = new_splits(side.k, num_splits)
    plan.run(
        ("dk", student),
        bwd.dk_kernel,
        (programs * num_splits, 1, 1),
        (
            *shared.arguments, partials, *split_strides(partials),
            side.scale / problem.temperature,
            stage.num_key_blocks, problem.num_heads, group, group // num_splits,
            plan.inv_temperature,
        ),
        (student, plan.form, plan.helper, stage.config),
        stage.options,
        shared.tensors,
    )  # fmt: skip
    return combine_splits(partials, side.k)
