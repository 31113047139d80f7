"""Launches the row kernel: the functions of `linear/rows.py` for a GPU.

The log-sum-exps that `values` stores and `gradient` reads are in log2 units.
"""

from __future__ import annotations

import functools

from torch import Tensor

from torch_streamkl.kernels.arguments import Form
from torch_streamkl.kernels.pointwise import helper
from torch_streamkl.linear.problem import (
    NO_WEIGHTS,
    NOTHING,
    Head,
    LinearProblem,
    NeedsGrad,
    RowValues,
    RowWeights,
)
from torch_streamkl.linear.triton.rows import (
    Config,
    HeadArgs,
    HeadConfig,
    RowArgs,
    row_kernel,
)
from torch_streamkl.runtime.devices import is_interpreted
from torch_streamkl.runtime.launch import launch

TILE_VOCAB = 4096  # of a row at once: 32 KiB of bfloat16 logits of both sides in flight
FEW_ROWS = 384  # that do not give every multiprocessor of an H200 three
TILE_WIDTH = 8  # vocabulary entries of a lane: 16 bytes of bfloat16


def _launch(
    compute_values: bool,
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    out: RowValues,
    weights: RowWeights = NO_WEIGHTS,
    needs_grad: NeedsGrad = NOTHING,
) -> None:
    config, options = config_of(problem, student, teacher, weights, needs_grad, compute_values)
    arguments = arguments_of(problem, student, teacher, out, weights)
    constants = Form.of(problem.functional.bilinear), helper(problem.functional.text), config
    launch(row_kernel, (problem.num_tokens, 1, 1), arguments, constants, options)


# as in linear/rows.py; values and gradients take one launch, in which a row's second pass finds
# part of the logits in the cache
values, gradient = (functools.partial(_launch, x) for x in (True, False))


def config_of(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    weights: RowWeights = NO_WEIGHTS,
    needs_grad: NeedsGrad = NOTHING,
    compute_values: bool = True,
) -> tuple[Config, dict[str, int]]:
    """Returns compile-time choices of a kernel on these rows, and the compiler's options."""
    item_size = max(student.element_size(), teacher.element_size())
    lanes, num_stages, num_warps = tile_of(problem.num_tokens, item_size)
    config = Config(
        LANES=lanes,
        WIDTH=TILE_WIDTH,
        NUM_STAGES=num_stages,
        STUDENT=_head_config(problem.student, needs_grad.student),
        TEACHER=_head_config(problem.teacher, needs_grad.teacher),
        VALUES=compute_values,
        BILINEAR=problem.functional.bilinear is not None,
        HARD=problem.labels is not None,
        TEMPERED=problem.temperature != 1.0,
        VALUE_GRAD=weights.value is not None,
        HARD_GRAD=weights.hard is not None,
    )
    return config, {"num_warps": num_warps}


def _head_config(head: Head, needs_grad: bool) -> HeadConfig:
    return HeadConfig(SOFTCAP=head.softcap != 0.0, BIAS=head.bias is not None, GRAD=needs_grad)


def tile_of(num_rows: int, item_size: int) -> tuple[int, int, int]:
    """Returns the lanes of a tile, its stages, and the warps of a program."""
    # few rows take more threads each, and more loads ahead: the kernel waits for memory
    num_warps, num_stages = (8, 3) if num_rows > FEW_ROWS else (16, 4)
    lanes = 8 if is_interpreted() else TILE_VOCAB // TILE_WIDTH
    return lanes, num_stages if item_size == 2 else 1, num_warps


def arguments_of(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    out: RowValues,
    weights: RowWeights = NO_WEIGHTS,
) -> tuple[HeadArgs, HeadArgs, RowArgs]:
    """Groups a kernel's arguments: both sides, and what there is per row."""
    return (
        _head_args(problem.student, student),
        _head_args(problem.teacher, teacher),
        row_args(problem, out, weights),
    )


def row_args(problem: LinearProblem, out: RowValues, weights: RowWeights = NO_WEIGHTS) -> RowArgs:
    """Groups a kernel's per-row arguments."""
    return RowArgs(
        value=out.value,
        hard=out.hard,
        statistics=out.statistics,
        statistics_stride=out.statistics.stride(0),
        value_weight=dense(weights.value),
        hard_weight=dense(weights.hard),
        labels=dense(problem.labels),
        vocab_start=problem.vocab_start,
        ignore_index=problem.ignore_index,
        inv_temperature=1.0 / problem.temperature,
    )


def dense(x: Tensor | None) -> Tensor | None:
    """Returns a contiguous vector: kernels have no strides for it.

    The gradient of a sum is one number with stride 0.
    """
    return None if x is None else x.contiguous()


def _head_args(head: Head, logits: Tensor) -> HeadArgs:
    bias = dense(head.bias)
    return HeadArgs(
        logits, logits.stride(0), bias, head.vocab_size, head.scale, head.softcap or 1.0
    )
