"""Launches the row kernel: the functions of `linear/rows.py` for a GPU.

The log-sum-exps that `values` stores and `gradient` reads are in log2 units.
"""

from __future__ import annotations

from torch import Tensor

from torch_streamkl.kernels.arguments import Form
from torch_streamkl.kernels.pointwise import helper
from torch_streamkl.linear.problem import Head, LinearProblem, NeedsGrad, RowValues, RowWeights
from torch_streamkl.linear.triton.rows import (
    Config,
    HeadArgs,
    HeadConfig,
    RowArgs,
    row_kernel,
)
from torch_streamkl.program.divergence_forms import Bilinear
from torch_streamkl.runtime.devices import is_interpreted
from torch_streamkl.runtime.launch import launch

TILE_VOCAB = 4096  # of a row at once: 32 KiB of bfloat16 logits of both sides in flight
FEW_ROWS = 384  # that do not give every multiprocessor of an H200 three
TILE_WIDTH = 8  # vocabulary entries of a lane: 16 bytes of bfloat16
NO_WEIGHTS = RowWeights(None, None)


def values(problem: LinearProblem, student: Tensor, teacher: Tensor, out: RowValues) -> None:
    """Computes values and statistics of rows from their whole logits."""
    _launch(problem, student, teacher, out, NO_WEIGHTS, NeedsGrad(), compute_values=True)


def values_and_gradient(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    out: RowValues,
    weights: RowWeights,
    needs_grad: NeedsGrad,
) -> None:
    """Computes both in one launch: a row's second pass finds part of the logits in the cache."""
    _launch(problem, student, teacher, out, weights, needs_grad, compute_values=True)


def gradient(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    rows: RowValues,
    weights: RowWeights,
    needs_grad: NeedsGrad,
) -> None:
    """Overwrites logits by their gradients; the teacher's only if it needs one."""
    _launch(problem, student, teacher, rows, weights, needs_grad, compute_values=False)


def _launch(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    out: RowValues,
    weights: RowWeights,
    needs_grad: NeedsGrad,
    compute_values: bool,
) -> None:
    form = problem.functional.bilinear
    config, num_warps = config_of(problem, student, teacher, weights, needs_grad, compute_values)
    arguments = (
        head_args(problem.student, student), head_args(problem.teacher, teacher),
        row_args(problem, out, weights),
    )  # fmt: skip
    constants = (form_args(form or Bilinear()), helper(problem.functional.text), config)
    options = {"num_warps": num_warps}
    launch(row_kernel, (problem.num_tokens, 1, 1), arguments, constants, options)


def config_of(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    weights: RowWeights,
    needs_grad: NeedsGrad,
    compute_values: bool,
) -> tuple[Config, int]:
    """Returns compile-time choices of a kernel on these rows, and its number of warps."""
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
    return config, num_warps


def _head_config(head: Head, needs_grad: bool) -> HeadConfig:
    return HeadConfig(SOFTCAP=head.softcap != 0.0, BIAS=head.bias is not None, GRAD=needs_grad)


def tile_of(num_rows: int, item_size: int) -> tuple[int, int, int]:
    """Returns the lanes of a tile, its stages, and the warps of a program."""
    # few rows take more threads each, and more loads ahead: the kernel waits for memory
    num_warps, num_stages = (8, 3) if num_rows > FEW_ROWS else (16, 4)
    lanes = 8 if is_interpreted() else TILE_VOCAB // TILE_WIDTH
    return lanes, num_stages if item_size == 2 else 1, num_warps


def row_args(problem: LinearProblem, out: RowValues, weights: RowWeights) -> RowArgs:
    """Groups a kernel's per-row arguments."""
    return RowArgs(
        value=out.value,
        hard=out.hard,
        statistics=out.statistics,
        statistics_stride=out.statistics.stride(0),
        value_weight=_dense(weights.value),
        hard_weight=_dense(weights.hard),
        labels=_dense(problem.labels),
        vocab_start=problem.vocab_start,
        ignore_index=problem.ignore_index,
        inv_temperature=1.0 / problem.temperature,
    )


def _dense(x: Tensor | None) -> Tensor | None:
    # the gradient of a sum is one number with stride 0
    return None if x is None else x.contiguous()


def head_args(head: Head, logits: Tensor) -> HeadArgs:
    """Groups a kernel's arguments of one side."""
    return HeadArgs(
        logits, logits.stride(0), head.bias, head.vocab_size, head.scale, head.softcap or 1.0
    )


def form_args(form: Bilinear) -> Form:
    """Converts a bilinear form to compile-time coefficients."""
    return Form(form.tt, form.ts, form.st, form.ss, form.t, form.s)
