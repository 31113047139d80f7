"""Explains which problems the Triton and Hopper kernels cannot run, in the user's terms."""

from __future__ import annotations

import functools
import importlib
import math

import torch

from torch_streamkl.attention.hopper_tiles import (
    MAX_NARROW_HEAD_DIM,
    has_bias,
    is_prepared,
    is_wide,
)
from torch_streamkl.attention.problem import AttentionProblem, Side
from torch_streamkl.runtime.devices import gpu_of, kernel_limit, matmul_limit

MOST_BIAS_STRIDE = 2**24  # of rows: offsets in a tile of 64 rows are 32-bit

MOST_SPLITS = 128  # of a block of rows or keys: their results are in memory side by side

MAX_TRITON_HEAD_DIM = 256

HEAD_MEAN_DIMS = (64, 128, 192, 256)  # of the teacher's heads: whole chunks of 64 columns


def triton_limit(problem: AttentionProblem) -> str | None:
    """Explains why the Triton kernels cannot run a problem; None if they can."""
    device, dtype = problem.device, problem.student.q.dtype
    limit = kernel_limit(device, dtype)
    if limit is not None:
        return limit
    widest = max(problem.student.head_dim, problem.teacher.head_dim)
    if widest > MAX_TRITON_HEAD_DIM:
        return f"takes head_dim up to {MAX_TRITON_HEAD_DIM}, got {widest}"
    return matmul_limit(device, dtype, widest) if device.type == "cuda" else None


def hopper_limit(problem: AttentionProblem) -> str | None:
    """Explains why the kernels for Hopper GPUs cannot run a problem; None if they can."""
    student, teacher = problem.student, problem.teacher
    q = student.q
    if q.device.type != "cuda" or not gpu_of(q.device).is_hopper:
        return f"needs an NVIDIA GPU of compute capability 9.0, got device {q.device}"
    if not _has_gluon():
        return "needs Triton with Gluon for Hopper"
    if str(q.dtype) not in ("torch.float16", "torch.bfloat16"):
        return f"takes float16 and bfloat16, got {q.dtype}"
    if problem.head_mean:
        return _head_mean_limit(problem)
    dims = (student.head_dim, teacher.head_dim)
    if max(dims) > MAX_TRITON_HEAD_DIM or any(dim % 8 for dim in dims):
        return f"takes head_dims up to {MAX_TRITON_HEAD_DIM}, multiples of 8, got {dims}"
    if is_wide(problem) and (is_prepared(problem) or has_bias(problem)):
        most = MAX_NARROW_HEAD_DIM
        return f"takes head_dims up to {most} with a mask tensor, a bias or two passes, got {dims}"
    for side in (student, teacher):
        limit = None if side.bias is None else _bias_limit(problem, side.bias)
        if limit is not None:
            return limit
    if student.num_heads != teacher.num_heads:
        return "takes as many heads on both sides"
    least = _least_splits(student, teacher)
    if least > MOST_SPLITS:
        return f"takes key heads whose gradients have at most {MOST_SPLITS} shares, got {least}"
    functional = problem.functional
    form = functional.closed_form
    if form is None and problem.is_packed:
        return f"takes packed sequences with divergences of one pass, got {functional.text}"
    if form is not None and form.has_teacher_moment == form.has_student_moment:
        text = functional.text
        return f"takes a divergence with logarithms under one of P and S, got {text}"
    if problem.has_masked_keys and problem.mask_value != -math.inf:
        return f"takes masks that remove keys, got mask_value {problem.mask_value}"
    if problem.mask is not None:
        limit = _mask_limit(problem)
        if limit is not None:
            return limit
    other = (
        problem.teacher_lse,
        student.alibi_slopes, teacher.alibi_slopes,
        student.sink, teacher.sink,
    )  # fmt: skip
    if any(x is not None for x in other) or student.softcap or teacher.softcap:
        return "takes no alibi, sink, softcap, known lse"
    if problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return "takes at least one query and one key"
    return _layout_limit(student.q, student.k, teacher.q, teacher.k)


def _layout_limit(*tensors: torch.Tensor) -> str | None:
    """Explains why TMA cannot load one of the tensors, or None."""
    for x in tensors:
        *outer, (_, last) = zip(x.shape, x.stride(), strict=True)
        is_odd = any(size > 1 and (n <= 0 or n % 8) for size, n in outer)
        if last != 1 or is_odd or not _aligned_to_16(x):
            return f"takes tensors aligned to 16 bytes in every row, got strides {x.stride()}"
    return None


def _head_mean_limit(problem: AttentionProblem) -> str | None:
    """Explains why the kernels of a head-averaged teacher (hopper/head_mean.py) cannot run, or
    None.

    The portable kernels compute the student, and read the mean.
    """
    teacher = problem.teacher
    if teacher.head_dim not in HEAD_MEAN_DIMS or problem.student.head_dim > MAX_TRITON_HEAD_DIM:
        dims = (problem.student.head_dim, teacher.head_dim)
        return f"takes a head-averaged teacher of head_dim {HEAD_MEAN_DIMS}, got {dims}"
    others = (teacher.bias, teacher.alibi_slopes, teacher.sink, problem.mask)
    if any(x is not None for x in others) or teacher.softcap or problem.is_packed:
        return (
            "takes a head-averaged teacher without bias, alibi, sink, softcap, "
            "mask tensor, packed sequences"
        )
    if problem.has_masked_keys and problem.mask_value != -math.inf:
        return f"takes masks that remove keys, got mask_value {problem.mask_value}"
    if problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return "takes at least one query and one key"
    return _layout_limit(teacher.q, teacher.k)


def _mask_limit(problem: AttentionProblem) -> str | None:
    """Explains why a problem with a mask tensor cannot run, or None."""
    mask = problem.mask
    assert mask is not None
    if problem.is_packed:
        return "takes no mask tensor next to packed sequences"
    if problem.functional.closed_form is None:
        return "takes no mask tensor with a divergence of two passes"
    groups = [x.group for x in problem.sides]
    if mask.shape[1] > 1 and max(groups) > 1:
        return "takes a mask per head with as many key heads as heads"
    return None


def _bias_limit(problem: AttentionProblem, bias: torch.Tensor) -> str | None:
    """Explains why a problem with this bias cannot run, or None."""
    if is_prepared(problem):
        return "takes no bias next to a mask tensor or with a divergence of two passes"
    if str(bias.dtype) not in ("torch.float16", "torch.bfloat16", "torch.float32"):
        return f"takes a bias of float16, bfloat16 or float32, got {bias.dtype}"
    if bias.shape[3] == 1 or bias.stride(3) != 1 or bias.stride(2) >= MOST_BIAS_STRIDE:
        strides = bias.stride()
        return f"takes a bias whose keys are neighbours, got {tuple(bias.shape)} of {strides}"
    return None


def _least_splits(student: Side, teacher: Side) -> int:
    """Counts the splits of dK on the side that needs more: a program has one key head per side."""
    groups = [side.group for side in (student, teacher)]
    return max(groups) // math.gcd(*groups)


def _aligned_to_16(x: torch.Tensor) -> bool:
    # a fake tensor has no address
    return type(x) not in (torch.Tensor, torch.nn.Parameter) or x.data_ptr() % 16 == 0


@functools.cache
def _has_gluon() -> bool:
    try:
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    except ImportError:
        return False
    return True
