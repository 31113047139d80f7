"""Launcher of the Hopper forward: an AttentionProblem to descriptors, grid and arguments.

The backward is the portable one, which reads the same row statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torch_streamkl.kernels import attention
from torch_streamkl.kernels import attention_forward as portable
from torch_streamkl.kernels import hopper_forward as fwd
from torch_streamkl.kernels.plans import LOG2E, Plan, config_of, plan_of
from torch_streamkl.launch import HOPPER_AGAIN, HopperLaunch, hopper_launch
from torch_streamkl.problem import AttentionProblem, RowStatistics, Side

backward = attention.backward
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
        SCHEDULE=_schedule(launch), FORM=form, CONFIG=config_of(problem, launch),
        num_warps=4,
    )  # fmt: skip
    portable.forward_again_kernel[(again.shape[0],)](
        again, *plan.arguments(problem), *outputs,
        num_flags, problem.num_heads, plan.inv_temperature, plan.fill,
        FORM=form, HELPER=None, CONFIG=config_of(problem, HOPPER_AGAIN), **HOPPER_AGAIN.options(),
    )  # fmt: skip


def _schedule(launch: HopperLaunch) -> fwd.Schedule:
    return fwd.Schedule(
        GROUPS=launch.groups,
        SLOTS=launch.slots,
        PAIRS=launch.pairs,
        OTHER_IN_REGISTERS=launch.q_in_registers in ("other", "both"),
        WEIGHT_IN_REGISTERS=launch.q_in_registers in ("weight", "both"),
        ONE_BARRIER=launch.one_barrier,
        LATE_RELEASE=launch.late_release,
        AFTER_ISSUE=launch.after_issue,
    )


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
