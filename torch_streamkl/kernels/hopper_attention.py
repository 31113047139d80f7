"""Launchers of the Hopper kernels: an AttentionProblem to descriptors, grid and arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torch_streamkl.kernels import attention_forward as portable
from torch_streamkl.kernels import hopper_backward as bwd
from torch_streamkl.kernels import hopper_forward as fwd
from torch_streamkl.kernels.plans import LOG2E, Plan, config_of, plan_of
from torch_streamkl.launch import (
    HOPPER_AGAIN,
    HopperLaunch,
    hopper_backward_launch,
    hopper_launch,
)
from torch_streamkl.problem import AttentionProblem, RowStatistics, Side
from torch_streamkl.streaming import Wanted

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def forward(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
    """Per-row values and statistics, float32."""
    value, stats = RowStatistics.allocate(problem)
    plan, launch = plan_of(problem), hopper_launch(problem)
    num_flags = triton.cdiv(problem.seqlen_q, launch.block_m)
    programs = num_flags * problem.num_heads * problem.batch
    again = torch.zeros(programs, dtype=torch.int32, device=value.device)
    if plan.device_index is None or torch.cuda.current_device() == plan.device_index:
        _launch(problem, plan, launch, value, stats, again, num_flags)
    else:
        with torch.cuda.device(plan.device_index):  # Triton launches on the current device
            _launch(problem, plan, launch, value, stats, again, num_flags)
    return value, stats


def _launch(
    problem: AttentionProblem,
    plan: Plan,
    launch: HopperLaunch,
    value: Tensor,
    stats: RowStatistics,
    again: Tensor,
    num_flags: int,
) -> None:
    form = plan.form
    by_teacher = form.TT != 0.0 or form.TS != 0.0
    student, teacher = problem.student, problem.teacher
    other, weight = (student, teacher) if by_teacher else (teacher, student)
    blocks = triton.cdiv(num_flags, launch.groups)
    outputs = (value, stats.student, stats.teacher, plan.stats_stride)
    fwd.forward_kernel[(blocks * problem.num_heads * problem.batch,)](
        descriptor(other.q, launch.block_m), descriptor(other.k, launch.block_n),
        descriptor(weight.q, launch.block_m), descriptor(weight.k, launch.block_n),
        *outputs, again, num_flags,
        blocks, problem.num_heads, _group(other), _group(weight),
        problem.seqlen_q, problem.seqlen_k,
        _log2_scale(problem, other), _log2_scale(problem, weight),
        WEIGHT_IS_TEACHER=by_teacher, CAUSAL=problem.window_right is not None,
        GROUPS=launch.groups, SLOTS=launch.slots,
        FORM=form, CONFIG=config_of(problem, launch), num_warps=4,
    )  # fmt: skip
    portable.forward_again_kernel[(again.shape[0],)](
        again, *plan.arguments(problem), *outputs,
        num_flags, problem.num_heads, plan.inv_temperature, plan.fill,
        FORM=form, HELPER=None, CONFIG=config_of(problem, HOPPER_AGAIN), **HOPPER_AGAIN.options(),
    )  # fmt: skip


def backward(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The wanted gradients, each summed in a fixed order."""
    grad = grad.to(torch.float32).contiguous()
    plan = plan_of(problem)

    def gradient(student: bool, rows: bool) -> Tensor:
        return _gradient(problem, plan, stats, grad, student, rows)

    if plan.device_index is not None and torch.cuda.current_device() != plan.device_index:
        with torch.cuda.device(plan.device_index):  # Triton launches on the current device
            return backward(problem, stats, grad, wanted)
    return (
        gradient(student=True, rows=True) if wanted.student_q else None,
        gradient(student=True, rows=False) if wanted.student_k else None,
        gradient(student=False, rows=True) if wanted.teacher_q else None,
        gradient(student=False, rows=False) if wanted.teacher_k else None,
    )


def _gradient(
    problem: AttentionProblem,
    plan: Plan,
    stats: RowStatistics,
    grad: Tensor,
    student: bool,
    rows: bool,
) -> Tensor:
    """dQ (rows) or dK of one side."""
    sides = (problem.student, problem.teacher)
    statistics = (stats.student, stats.teacher)
    own, other = sides if student else sides[::-1]
    own_stats, other_stats = statistics if student else statistics[::-1]
    form, group = plan.form, _group(own)
    plain = student and form.ST == form.SS == form.S == 0.0
    launch = hopper_backward_launch(problem, "dq" if rows else "dk", not plain)
    x, blocks_of = (own.q, problem.seqlen_q) if rows else (own.k, problem.seqlen_k)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outer = (own.q, other.q) if rows else (own.k, other.k)
    inner = (own.k, other.k) if rows else (own.q, other.q)
    task = bwd.Task(
        ROWS=rows,
        STUDENT=student,
        CAUSAL=problem.window_right is not None,
        PLAIN=plain,
        FORM=form,
        GROUP_SIZE=group,
        HEAD_DIM=own.head_dim,
        BLOCK=launch.block_m,
        INNER=launch.block_n,
        GROUPS=launch.groups,
        REGISTERS=launch.registers,
        SLOTS=launch.slots,
        PINNED=launch.pinned,
    )
    num_blocks = triton.cdiv(blocks_of, launch.groups * launch.block_m)
    bwd.backward_kernel[(num_blocks * x.shape[1] * problem.batch,)](
        *(descriptor(t, launch.block_m) for t in outer),
        *(descriptor(t, launch.block_n) for t in inner),
        grad, own_stats, other_stats, plan.stats_stride,
        out, *out.stride()[:3], own.scale / problem.temperature,
        num_blocks, problem.num_heads, problem.seqlen_q, problem.seqlen_k,
        _log2_scale(problem, own), _log2_scale(problem, other),
        TASK=task, num_warps=4,
    )  # fmt: skip
    return out


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles [1, 1, rows, head_dim] of [batch, heads, seqlen, head_dim]; 0 past its end."""
    block = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), _strides(x.shape, x.stride()), block, layout)


def _strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    # the stride of a dimension of size 1 means nothing, but must be a multiple of 16 bytes
    outer = zip(shape[:3], strides[:3], strict=True)
    return [*(shape[3] if size == 1 else stride for size, stride in outer), 1]


def _group(side: Side) -> int:
    return side.num_heads // side.num_kv_heads


def _log2_scale(problem: AttentionProblem, side: Side) -> float:
    return side.scale * LOG2E / problem.temperature
