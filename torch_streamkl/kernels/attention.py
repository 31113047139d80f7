"""Launchers of the portable attention kernels: an AttentionProblem to grids and arguments.

No host synchronisation: lengths, guards and packed offsets are read on the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from torch_streamkl.functional import Bilinear
from torch_streamkl.kernels import attention_backward as bwd
from torch_streamkl.kernels import attention_forward as fwd
from torch_streamkl.kernels.arguments import Config, Form, MaskArgs, SideArgs
from torch_streamkl.kernels.pointwise import helper
from torch_streamkl.launch import TritonLaunch, dot_precision, triton_launch
from torch_streamkl.problem import AttentionProblem, RowStatistics, Side
from torch_streamkl.streaming import Wanted

LOG2E = 1.4426950408889634
NUM_STATE_FIELDS = 9  # of arguments.State
NUM_SUMS = 4  # f, h, g and the count of allowed keys


def forward(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
    """Per-row values and statistics, float32."""
    value, stats = RowStatistics.allocate(problem)
    launch = triton_launch(problem, "forward")
    if launch.num_splits > 1:
        _split_forward(problem, launch, value, stats)
    else:
        config, num_blocks, rows = _rows_grid(problem, launch)
        fwd.forward_kernel[(rows,)](
            *_sides(problem), value, stats.student, stats.teacher, stats.student.stride(0),
            num_blocks, problem.num_heads, _log2e_over_temperature(problem), _fill(problem),
            FORM=_form(problem), HELPER=_helper(problem), CONFIG=config, **launch.options(),
        )  # fmt: skip
    return value, stats


def _split_forward(
    problem: AttentionProblem, launch: TritonLaunch, value: Tensor, stats: RowStatistics
) -> None:
    config, num_blocks, rows = _rows_grid(problem, launch)
    form, inv_temperature = _form(problem), _log2e_over_temperature(problem)
    student, teacher, masks = _sides(problem)
    keys_per_split = _keys_per_split(problem, launch, config.BLOCK_N)
    heads = (num_blocks, problem.num_heads)
    state = value.new_empty((launch.num_splits, NUM_STATE_FIELDS, *value.shape))
    again = torch.empty(rows, dtype=torch.int32, device=value.device) if config.GUARDED else None
    fwd.state_kernel[(rows, launch.num_splits)](
        student, teacher, masks, state, state.stride(1), state.stride(0), *heads, keys_per_split, inv_temperature,
        FORM=form, CONFIG=config, **launch.options(),
    )  # fmt: skip
    outputs = (value, stats.student, stats.teacher, stats.student.stride(0))
    fwd.merge_kernel[(rows,)](
        student, teacher, masks, state, state.stride(1), state.stride(0), launch.num_splits, *outputs, again, *heads, _fill(problem),
        FORM=form, CONFIG=config, num_warps=4,
    )  # fmt: skip
    if not config.TWO_PASS:
        return
    sums = value.new_empty((launch.num_splits, NUM_SUMS, *value.shape))
    fwd.sums_kernel[(rows, launch.num_splits)](
        student, teacher, masks, stats.student, stats.teacher, again, sums, sums.stride(1), sums.stride(0),
        *heads, keys_per_split, inv_temperature, HELPER=_helper(problem), CONFIG=config, **launch.options(),
    )  # fmt: skip
    fwd.merge_sums_kernel[(rows,)](
        masks, sums, sums.stride(1), sums.stride(0), launch.num_splits, again, *outputs, *heads, _fill(problem),
        HELPER=_helper(problem), CONFIG=config, num_warps=4,
    )  # fmt: skip


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
    side = problem.student if student else problem.teacher
    launch = triton_launch(problem, "dq")
    config, num_blocks, rows = _rows_grid(problem, launch)
    if launch.num_splits == 1:
        dq, split_stride = torch.empty(side.q.shape, dtype=side.q.dtype, device=side.q.device), 0
    else:
        dq = torch.empty(
            (launch.num_splits, *side.q.shape), dtype=torch.float32, device=side.q.device
        )
        split_stride = dq.stride(0)
    bwd.dq_kernel[(rows, launch.num_splits)](
        *_sides(problem), grad, stats.student, stats.teacher, stats.student.stride(0),
        dq, *dq.stride()[-4:-1], side.scale / problem.temperature,
        num_blocks, problem.num_heads, _keys_per_split(problem, launch, config.BLOCK_N),
        split_stride, _log2e_over_temperature(problem),
        STUDENT=student, FORM=_form(problem), HELPER=_helper(problem), CONFIG=config, **launch.options(),
    )  # fmt: skip
    return dq if launch.num_splits == 1 else dq.sum(0).to(side.q.dtype)


def _dk(problem: AttentionProblem, stats: RowStatistics, grad: Tensor, student: bool) -> Tensor:
    side = problem.student if student else problem.teacher
    launch = triton_launch(problem, "dk")
    config = _config(problem, launch)
    num_blocks = triton.cdiv(_longest_keys(problem), config.BLOCK_N)
    programs = num_blocks * side.num_kv_heads * _num_sequences(problem)
    dk = torch.empty(side.k.shape, dtype=side.k.dtype, device=side.k.device)
    bwd.dk_kernel[(programs,)](
        *_sides(problem), grad, stats.student, stats.teacher, stats.student.stride(0),
        dk, *dk.stride()[:3], side.scale / problem.temperature,
        num_blocks, problem.num_heads, side.num_kv_heads, problem.num_heads // side.num_kv_heads,
        _log2e_over_temperature(problem),
        STUDENT=student, FORM=_form(problem), HELPER=_helper(problem), CONFIG=config, **launch.options(),
    )  # fmt: skip
    return dk


def _rows_grid(problem: AttentionProblem, launch: TritonLaunch) -> tuple[Config, int, int]:
    config = _config(problem, launch)
    longest = problem.max_seqlen_q if problem.is_packed else problem.seqlen_q
    num_blocks = triton.cdiv(longest, config.BLOCK_M)
    return config, num_blocks, num_blocks * problem.num_heads * _num_sequences(problem)


def _num_sequences(problem: AttentionProblem) -> int:
    return problem.cu_seqlens_q.shape[0] - 1 if problem.cu_seqlens_q is not None else problem.batch


def _longest_keys(problem: AttentionProblem) -> int:
    return problem.max_seqlen_k if problem.is_packed else problem.seqlen_k


def _keys_per_split(problem: AttentionProblem, launch: TritonLaunch, block_n: int) -> int:
    blocks = triton.cdiv(_longest_keys(problem), block_n)
    return triton.cdiv(blocks, launch.num_splits) * block_n


def _log2e_over_temperature(problem: AttentionProblem) -> float:
    return LOG2E / problem.temperature


def _fill(problem: AttentionProblem) -> float:
    return problem.mask_value if problem.mask_value != -math.inf else 0.0


def _helper(problem: AttentionProblem) -> Any:
    return helper(problem.functional.text) if problem.functional.bilinear is None else None


def _form(problem: AttentionProblem) -> Form:
    functional = problem.functional
    form = functional.bilinear or (functional.guarded.form if functional.guarded else Bilinear())
    return Form(form.tt, form.ts, form.st, form.ss, form.t, form.s)


def _sides(problem: AttentionProblem) -> tuple[SideArgs, SideArgs, MaskArgs]:
    return _side(problem, problem.student), _side(problem, problem.teacher), _masks(problem)


def _side(problem: AttentionProblem, side: Side) -> SideArgs:
    scale = side.scale if side.softcap else side.scale * _log2e_over_temperature(problem)
    return SideArgs(
        side.q, *side.q.stride(), side.k, *side.k.stride(), *_broadcast(side.bias),
        side.alibi_slopes, side.sink, scale, side.softcap, side.num_heads // side.num_kv_heads,
    )  # fmt: skip


def _masks(problem: AttentionProblem) -> MaskArgs:
    mask = None if problem.mask is None else problem.mask.view(torch.uint8)
    return MaskArgs(
        *_broadcast(mask), problem.key_lengths,
        _bound(problem.window_left), _bound(problem.window_right),
        problem.cu_seqlens_q, problem.cu_seqlens_k, problem.seqlen_q, problem.seqlen_k,
    )  # fmt: skip


def _bound(window: int | None) -> int:
    return 0 if window is None else window


def _broadcast(x: Tensor | None) -> tuple[Any, ...]:
    """A tensor and its strides, 0 where it has size 1: it is never expanded."""
    if x is None:
        return (None, 0, 0, 0, 0)
    return (
        x,
        *(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)),
    )


def _config(problem: AttentionProblem, launch: TritonLaunch) -> Config:
    functional, student, teacher = problem.functional, problem.student, problem.teacher
    guarded = functional.guarded
    return Config(
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        S_DIM=student.head_dim,
        S_BLOCK_D=max(16, triton.next_power_of_2(student.head_dim)),
        T_DIM=teacher.head_dim,
        T_BLOCK_D=max(16, triton.next_power_of_2(teacher.head_dim)),
        S_SOFTCAP=student.softcap != 0.0,
        T_SOFTCAP=teacher.softcap != 0.0,
        S_BIAS=student.bias is not None,
        T_BIAS=teacher.bias is not None,
        S_ALIBI=student.alibi_slopes is not None,
        T_ALIBI=teacher.alibi_slopes is not None,
        S_SINK=student.sink is not None,
        T_SINK=teacher.sink is not None,
        HAS_MASK=problem.mask is not None,
        HAS_LEFT=problem.window_left is not None,
        HAS_RIGHT=problem.window_right is not None,
        DENSE=any(x is not None for x in (problem.mask, student.bias, teacher.bias)),
        FILLED=problem.mask_value != -math.inf,
        TWO_PASS=functional.bilinear is None,
        GUARDED=guarded is not None,
        T_FLOOR=guarded.teacher_floor if guarded else 0.0,
        S_FLOOR=guarded.student_floor if guarded else 0.0,
        PRECISION=dot_precision(student.q.dtype),
    )
