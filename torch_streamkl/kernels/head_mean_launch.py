"""Launchers of the kernels for a head-averaged teacher (head_mean.py)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from torch_streamkl.kernels import head_mean as kernels
from torch_streamkl.kernels.plans import LOG2E, Stage, plan_of, tensors_of
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
            _options(stage),
            tensors,
        )  # fmt: skip
    plan.run(
        "mean_sums",
        kernels.mean_sums_kernel,
        (stage.programs, 1, 1),
        (
            student, teacher, masks, value, stats.student, stats.teacher, *_strides(stats),
            stage.num_blocks, problem.num_heads, ratio, plan.inv_temperature, plan.fill,
        ),
        (triton.next_power_of_2(ratio), plan.helper, stage.config),
        _options(stage),
        tensors,
    )  # fmt: skip
    return value, stats


def backward(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The wanted gradients, each summed in a fixed order."""
    grad = grad.to(torch.float32).contiguous()
    return (
        _dq(problem, stats, grad, student=True) if wanted.student_q else None,
        _dk(problem, stats, grad, student=True) if wanted.student_k else None,
        _dq(problem, stats, grad, student=False) if wanted.teacher_q else None,
        _dk(problem, stats, grad, student=False) if wanted.teacher_k else None,
    )


def _dq(problem: AttentionProblem, stats: RowStatistics, grad: Tensor, student: bool) -> Tensor:
    plan = plan_of(problem)
    stage = plan.stage(problem, "dq")
    side = problem.student if student else problem.teacher
    ratio = problem.teacher.num_heads // problem.num_heads
    dq = torch.empty_like(side.q, memory_format=torch.contiguous_format)
    plan.run(
        ("dq", student),
        kernels.mean_dq_kernel,
        (stage.programs * (1 if student else ratio), 1, 1),
        (
            *plan.arguments(problem), grad, stats.student, stats.teacher, *_strides(stats),
            dq, *dq.stride()[:3], side.scale / problem.temperature,
            stage.num_blocks, problem.num_heads, ratio, plan.inv_temperature,
        ),
        (student, plan.helper, stage.config),
        _options(stage),
        (*tensors_of(problem), grad, stats.student, stats.teacher),
    )  # fmt: skip
    return dq


def _dk(problem: AttentionProblem, stats: RowStatistics, grad: Tensor, student: bool) -> Tensor:
    plan = plan_of(problem)
    stage = plan.stage(problem, "dk")
    side = problem.student if student else problem.teacher
    ratio = problem.teacher.num_heads // problem.num_heads
    dk = torch.empty_like(side.k, memory_format=torch.contiguous_format)
    plan.run(
        ("dk", student),
        kernels.mean_dk_kernel,
        (stage.num_key_blocks * side.num_kv_heads * plan.num_sequences, 1, 1),
        (
            *plan.arguments(problem), grad, stats.student, stats.teacher, *_strides(stats),
            dk, *dk.stride()[:3], side.scale / problem.temperature,
            stage.num_key_blocks, problem.num_heads, ratio, side.num_kv_heads,
            side.num_heads // side.num_kv_heads, plan.inv_temperature,
        ),
        (student, plan.helper, stage.config),
        _options(stage),
        (*tensors_of(problem), grad, stats.student, stats.teacher),
    )  # fmt: skip
    return dk


def _strides(stats: RowStatistics) -> tuple[int, int]:
    return stats.student.stride(0), stats.teacher.stride(0)


def _options(stage: Stage) -> dict[str, Any]:
    # two sides and a loop over heads: prefetching more tiles would not fit shared memory
    return {"num_warps": stage.launch.num_warps, "num_stages": 1}
