"""Computes rows of a vocabulary shard on a GPU: the functions of `distributed/shard_rows.py`.

Maxima and log-sum-exps are in log2 units, as in `rows.py`; the label's y is in its own unit.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from torch_streamkl.kernels.arguments import Form, State
from torch_streamkl.kernels.pointwise import helper
from torch_streamkl.kernels.row_state import LN2, LOG2E, LOW, finish, merge
from torch_streamkl.kernels.row_state import empty_state as no_vocab
from torch_streamkl.kernels.tiles import ceil_div
from torch_streamkl.linear.problem import LinearProblem, RowValues
from torch_streamkl.linear.triton.launches import arguments_of, config_of, gradient, row_args
from torch_streamkl.linear.triton.rows import label_score, pointwise_sums, rest_of, state_of_row
from torch_streamkl.runtime.launch import launch

__all__ = ["empty_state", "gradient", "merged", "state", "sums"]

MERGED_ROWS = 128  # of a program


def state(problem: LinearProblem, student: Tensor, teacher: Tensor, parts: Tensor) -> None:
    """Writes the state of rows from both sides' logits of the rank's vocabulary shard."""
    config, options = config_of(problem, student, teacher)
    arguments = arguments_of(problem, student, teacher, RowValues(parts, parts, parts))
    constants = Form.of(problem.functional.bilinear), config
    launch(state_kernel, (problem.num_tokens, 1, 1), arguments, constants, options)


def empty_state(parts: Tensor) -> None:
    """Writes the state of rows of a rank without vocabulary entries."""
    low = LOW.value
    fields = [low, 0.0, low, 0.0, 0.0, 0.0, -math.inf, -math.inf]
    for row, value in zip(parts, fields, strict=False):
        row.fill_(value)


def merged(problem: LinearProblem, parts: Tensor, vocab_size: int, out: RowValues) -> None:
    """Merges states to statistics of whole rows, cross-entropies, and values of the state."""
    config, _ = config_of(problem, parts, parts)
    arguments = (
        parts, parts.stride(0), parts.stride(1), parts.shape[0],
        row_args(problem, out), problem.num_tokens, vocab_size,
    )  # fmt: skip
    constants = Form.of(problem.functional.bilinear), config, MERGED_ROWS
    grid = (ceil_div(problem.num_tokens, MERGED_ROWS), 1, 1)
    launch(merge_kernel, grid, arguments, constants, {"num_warps": 4})


def sums(
    problem: LinearProblem, student: Tensor, teacher: Tensor, out: RowValues, totals: Tensor
) -> None:
    """Writes value and deltas over the rank's shard [3, num_tokens], from merged log-sum-exps."""
    config, options = config_of(problem, student, teacher)
    arguments = (*arguments_of(problem, student, teacher, out), totals, totals.stride(0))
    constants = helper(problem.functional.text), config
    launch(sums_kernel, (problem.num_tokens, 1, 1), arguments, constants, options)


@triton.jit
def state_kernel(student, teacher, rows, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr):
    """Computes the state of one row; ``rows.statistics`` is ``parts``."""
    row = tl.program_id(0).to(tl.int64)
    unit = rows.inv_temperature * LOG2E
    temperature = 1.0 / rows.inv_temperature
    total, hard_high, hard_row_sum = state_of_row(
        student, teacher, row, unit, temperature, COEFFICIENTS, CONFIG
    )
    stride = tl.cast(rows.statistics_stride, tl.int64)
    out = rows.statistics + row
    for i in tl.static_range(6):
        tl.store(out + i * stride, total[i])
    if CONFIG.HARD:
        high = total.m_s
        row_sum = total.l_s
        if CONFIG.TEMPERED:
            high = tl.max(hard_high, 0)
            row_sum = tl.sum(hard_row_sum * tl.math.exp2(hard_high - high), 0)
        tl.store(out + 6 * stride, high + tl.math.log2(row_sum))
        place = out + 7 * stride
        y, is_in_vocab, _ = label_score(student, rows, row, CONFIG)
        # another rank has a label that is none of the given vocabulary entries
        tl.store(place, tl.where(is_in_vocab, y, -float("inf")))


@triton.jit
def merge_kernel(
    parts, rank_stride, field_stride, num_ranks, rows, num_rows, vocab_size,
    COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merges all ranks' states, in their order, to statistics and values of a block of rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    total = no_vocab(BLOCK)
    hard_high = tl.full([BLOCK], LOW, tl.float32)
    hard_row_sum = tl.zeros([BLOCK], tl.float32)
    y = tl.full([BLOCK], -float("inf"), tl.float32)
    for rank in range(num_ranks):
        part = parts + rank * rank_stride + row
        other = no_vocab(BLOCK)
        other = State(
            tl.load(part, mask=inside, other=0.0),
            tl.load(part + field_stride, mask=inside, other=0.0),
            tl.load(part + 2 * field_stride, mask=inside, other=0.0),
            tl.load(part + 3 * field_stride, mask=inside, other=0.0),
            tl.load(part + 4 * field_stride, mask=inside, other=0.0),
            tl.load(part + 5 * field_stride, mask=inside, other=0.0),
            other.low_t,
            other.low_s,
            other.count,
        )
        total = merge(total, other, COEFFICIENTS)
        if CONFIG.HARD:
            lse = tl.load(part + 6 * field_stride, mask=inside, other=0.0)
            high = tl.maximum(hard_high, lse)
            hard_row_sum = hard_row_sum * tl.math.exp2(hard_high - high) + tl.math.exp2(lse - high)
            hard_high = high
            y = tl.maximum(y, tl.load(part + 7 * field_stride, mask=inside, other=0.0))
    lse_t, lse_s, value, student_delta, teacher_delta = finish(
        total, 0.0, 0.0, COEFFICIENTS, CONFIG
    )
    stride = tl.cast(rows.statistics_stride, tl.int64)
    hard_lse = lse_s
    if CONFIG.HARD:
        hard_lse = hard_high + tl.math.log2(hard_row_sum)
        label = tl.load(rows.labels + row, mask=inside, other=0).to(tl.int64)
        hard = (hard_lse - y * LOG2E) * LN2
        hard = tl.where((label >= 0) & (label < vocab_size), hard, float("nan"))
        tl.store(rows.hard + row, tl.where(label != rows.ignore_index, hard, 0.0), mask=inside)
    tl.store(rows.value + row, value, mask=inside)
    stored = (lse_s, lse_t, student_delta, teacher_delta, hard_lse)
    for i in tl.static_range(5):
        tl.store(rows.statistics + i * stride + row, stored[i], mask=inside)
    rest_s = rest_of(total.m_s, total.l_s, lse_s)
    rest_t = rest_of(total.m_t, total.l_t, lse_t)
    tl.store(rows.statistics + 5 * stride + row, rest_s, mask=inside)
    tl.store(rows.statistics + 6 * stride + row, rest_t, mask=inside)


@triton.jit
def sums_kernel(
    student, teacher, rows, totals, totals_stride, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr
):
    """Computes value and deltas of a row over the given vocabulary entries, of any functional."""
    row = tl.program_id(0).to(tl.int64)
    stride = tl.cast(rows.statistics_stride, tl.int64)
    lse_s = tl.load(rows.statistics + row)
    lse_t = tl.load(rows.statistics + stride + row)
    rest_s = tl.load(rows.statistics + 5 * stride + row)
    rest_t = tl.load(rows.statistics + 6 * stride + row)
    vocab_size = tl.maximum(student.vocab_size, teacher.vocab_size)
    value, student_delta, teacher_delta = pointwise_sums(
        student, teacher, row, vocab_size, rows.inv_temperature * LOG2E, lse_s, lse_t, rest_s,
        rest_t, POINTWISE_FN, CONFIG,
    )  # fmt: skip
    step = tl.cast(totals_stride, tl.int64)
    stored = (value, student_delta, teacher_delta)
    for i in tl.static_range(3):
        tl.store(totals + i * step + row, stored[i])
