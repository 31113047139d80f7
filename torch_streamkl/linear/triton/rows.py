"""Implements the row kernel: values and statistics of rows of logits, or gradients over them.

A program reads a row in tiles [LANES, WIDTH] of consecutive vocabulary entries. Each lane (one
thread) keeps a row state of the entries that it sees, so the loop has no reduction across threads.
The lanes are merged once at the end. Scores and the stored log-sum-exps are in log2 units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_streamkl.kernels.arguments import State
from torch_streamkl.kernels.row_state import (
    LN2,
    LOG2E,
    LOW,
    empty_state,
    finish,
    rebased,
    score_gradient,
    update,
)
from torch_streamkl.kernels.scores import tanh


class HeadArgs(NamedTuple):
    """Holds one side's logits [rows, vocab], and how they become scores."""

    logits: Any
    stride: Any
    bias: Any
    vocab_size: Any
    scale: Any
    softcap: Any


class RowArgs(NamedTuple):
    """Holds inputs and outputs per row; ``statistics`` is [7, rows] (RowValues,
    linear/problem.py).
    """

    value: Any
    hard: Any
    statistics: Any
    statistics_stride: Any
    value_weight: Any
    hard_weight: Any
    labels: Any
    vocab_start: Any
    ignore_index: Any
    inv_temperature: Any


class RowStats(NamedTuple):
    """Holds what the gradient of a row needs besides its logits."""

    lse_s: Any
    lse_t: Any
    student_delta: Any
    teacher_delta: Any
    hard_lse: Any
    weight: Any
    hard_weight: Any
    vocab_entry: Any  # of the label
    rest_s: Any  # what rounding has taken from the log-sum-exps
    rest_t: Any


class HeadConfig(NamedTuple):
    """Holds the compile-time choices of one side; `finish` reads the last one."""

    SOFTCAP: bool
    BIAS: bool
    GRAD: bool
    SINK: bool = False


class Config(NamedTuple):
    """Holds compile-time choices; the helpers of row_state.py read the last two."""

    LANES: int
    WIDTH: int  # consecutive vocabulary entries of a lane
    NUM_STAGES: int
    STUDENT: HeadConfig
    TEACHER: HeadConfig
    VALUES: bool  # compute values and statistics; else statistics are read
    BILINEAR: bool  # the values come from the row state; else from a second pass
    HARD: bool  # labels are given
    TEMPERED: bool  # the temperature is not 1: labels have a log-sum-exp of their own
    VALUE_GRAD: bool  # the values carry a gradient
    HARD_GRAD: bool
    GUARDED: bool = False
    FILLED: bool = False


@triton.jit
def scores_of(
    head, row, start, unit, MASKED: tl.constexpr, STUDENT: tl.constexpr, CONFIG: tl.constexpr
):
    """Computes a tile's scores [LANES, WIDTH] (-inf without an entry), d(y)/d(logit), which
    entries exist, and their indices.
    """
    HEAD: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    lanes = tl.arange(0, CONFIG.LANES)
    vocab = start + lanes[:, None] * CONFIG.WIDTH + tl.arange(0, CONFIG.WIDTH)[None, :]
    inside = vocab < head.vocab_size
    ptrs = head.logits + row * head.stride + vocab
    if MASKED:
        z = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
        if HEAD.BIAS:
            z += tl.load(head.bias + vocab, mask=inside, other=0.0).to(tl.float32)
    else:
        z = tl.load(ptrs).to(tl.float32)
        if HEAD.BIAS:
            z += tl.load(head.bias + vocab).to(tl.float32)
    if HEAD.SOFTCAP:
        capped = tanh(z * (head.scale / head.softcap))
        score = capped * (head.softcap * unit)
        slope = head.scale * (1.0 - capped * capped)
    else:
        score = z * (head.scale * unit)
        slope = head.scale
    if MASKED:
        score = tl.where(inside, score, -float("inf"))
    return score, slope, inside, vocab


@triton.jit
def state_of_vocab(
    state, hard_high, hard_row_sum, student, teacher, row, start, unit, temperature,
    MASKED: tl.constexpr, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns the row state, and (maximum, sum) of the student's y, after one tile."""
    s, _, in_s, _ = scores_of(student, row, start, unit, MASKED, True, CONFIG)
    t, _, _, _ = scores_of(teacher, row, start, unit, MASKED, False, CONFIG)
    state = update(
        state,
        t,
        s,
        in_s,
        MASKED or CONFIG.STUDENT.BIAS or CONFIG.TEACHER.BIAS,
        COEFFICIENTS,
        CONFIG,
    )
    if CONFIG.HARD and CONFIG.TEMPERED:
        y = s * temperature
        high = tl.maximum(hard_high, tl.max(y, 1))
        hard_row_sum = hard_row_sum * tl.math.exp2(hard_high - high) + tl.sum(
            tl.math.exp2(y - high[:, None]), 1
        )
        hard_high = high
    return state, hard_high, hard_row_sum


@triton.jit
def merged_lanes(state, COEFFICIENTS: tl.constexpr):
    """Returns one state of all lanes; every field becomes a scalar."""
    m_t = tl.max(state.m_t, 0)
    m_s = tl.max(state.m_s, 0)
    shift_t = state.m_t - m_t
    shift_s = state.m_s - m_s
    w_t = tl.math.exp2(shift_t)
    w_s = tl.math.exp2(shift_s)
    return State(
        m_t,
        tl.sum(state.l_t * w_t, 0),
        m_s,
        tl.sum(state.l_s * w_s, 0),
        tl.sum(
            rebased(state.a, state.l_t, w_t, shift_t, shift_s, COEFFICIENTS.TT, COEFFICIENTS.TS), 0
        ),
        tl.sum(
            rebased(state.b, state.l_s, w_s, shift_t, shift_s, COEFFICIENTS.ST, COEFFICIENTS.SS), 0
        ),
        tl.min(state.low_t, 0),
        tl.min(state.low_s, 0),
        tl.sum(state.count, 0),
    )


@triton.jit
def label_of(rows, row):
    """Returns the label's index among the given vocabulary entries, and whether the row
    counts.
    """
    label = tl.load(rows.labels + row).to(tl.int64)
    return label - rows.vocab_start, label != rows.ignore_index


@triton.jit
def label_score(student, rows, row, CONFIG: tl.constexpr):
    """Returns y of the row's label, whether that is one of the given vocabulary entries, and
    whether the row counts.
    """
    vocab_entry, counted = label_of(rows, row)
    is_in_vocab = (vocab_entry >= 0) & (vocab_entry < student.vocab_size)
    z = tl.load(
        student.logits + row * student.stride + vocab_entry, mask=is_in_vocab, other=0.0
    ).to(tl.float32)
    if CONFIG.STUDENT.BIAS:
        z += tl.load(student.bias + vocab_entry, mask=is_in_vocab, other=0.0).to(tl.float32)
    y = z * student.scale
    if CONFIG.STUDENT.SOFTCAP:
        y = tanh(y / student.softcap) * student.softcap
    return y, is_in_vocab, counted


@triton.jit
def hard_value(student, rows, row, hard_lse, CONFIG: tl.constexpr):
    """Returns the cross-entropy of the label in nats; 0 where it is ignored, NaN where it is no
    vocabulary entry.
    """
    y, is_in_vocab, counted = label_score(student, rows, row, CONFIG)
    value = tl.where(is_in_vocab, (hard_lse - y * LOG2E) * LN2, float("nan"))
    return tl.where(counted, value, 0.0)


@triton.jit
def state_of_row(
    student, teacher, row, unit, temperature, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr
):
    """Returns the state of a row's given vocabulary entries, and maximum and sum of the student's
    y in every lane.
    """
    LANES: tl.constexpr = CONFIG.LANES
    TILE: tl.constexpr = CONFIG.LANES * CONFIG.WIDTH
    vocab_size = tl.maximum(student.vocab_size, teacher.vocab_size)
    whole = tl.minimum(student.vocab_size, teacher.vocab_size) // TILE * TILE
    state = empty_state(LANES)
    hard_high = tl.full([LANES], LOW, tl.float32)
    hard_row_sum = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, whole, TILE, num_stages=CONFIG.NUM_STAGES):
        state, hard_high, hard_row_sum = state_of_vocab(
            state, hard_high, hard_row_sum, student, teacher, row, start, unit, temperature,
            False, COEFFICIENTS, CONFIG,
        )  # fmt: skip
    for start in range(whole, vocab_size, TILE):
        state, hard_high, hard_row_sum = state_of_vocab(
            state, hard_high, hard_row_sum, student, teacher, row, start, unit, temperature,
            True, COEFFICIENTS, CONFIG,
        )  # fmt: skip
    return merged_lanes(state, COEFFICIENTS), hard_high, hard_row_sum


@triton.jit
def row_kernel(
    student, teacher, rows,
    COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes values and statistics of a row if VALUES, then its gradients over its logits."""
    row = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = CONFIG.LANES * CONFIG.WIDTH
    unit = rows.inv_temperature * LOG2E
    temperature = 1.0 / rows.inv_temperature
    vocab_size = tl.maximum(student.vocab_size, teacher.vocab_size)
    whole = tl.minimum(student.vocab_size, teacher.vocab_size) // TILE * TILE
    stats = rows.statistics + row
    stride = tl.cast(rows.statistics_stride, tl.int64)
    if CONFIG.VALUES:
        total, hard_high, hard_row_sum = state_of_row(
            student, teacher, row, unit, temperature, COEFFICIENTS, CONFIG
        )
        lse_t, lse_s, value, student_delta, teacher_delta = finish(
            total, 0.0, 0.0, COEFFICIENTS, CONFIG
        )
        rest_t = rest_of(total.m_t, total.l_t, lse_t)
        rest_s = rest_of(total.m_s, total.l_s, lse_s)
        if not CONFIG.BILINEAR:
            value, student_delta, teacher_delta = pointwise_sums(
                student, teacher, row, vocab_size, unit, lse_s, lse_t, rest_s, rest_t,
                POINTWISE_FN,
                CONFIG,
            )  # fmt: skip
        hard_lse = lse_s
        if CONFIG.HARD:
            if CONFIG.TEMPERED:
                high = tl.max(hard_high, 0)
                hard_lse = high + tl.math.log2(
                    tl.sum(hard_row_sum * tl.math.exp2(hard_high - high), 0)
                )
            tl.store(rows.hard + row, hard_value(student, rows, row, hard_lse, CONFIG))
        tl.store(rows.value + row, value)
        stored = (lse_s, lse_t, student_delta, teacher_delta, hard_lse, rest_s, rest_t)
        for i in tl.static_range(7):
            tl.store(stats + i * stride, stored[i])
    else:
        lse_s = tl.load(stats)
        lse_t = tl.load(stats + stride)
        student_delta = tl.load(stats + 2 * stride)
        teacher_delta = tl.load(stats + 3 * stride)
        hard_lse = tl.load(stats + 4 * stride)
        rest_s = tl.load(stats + 5 * stride)
        rest_t = tl.load(stats + 6 * stride)
    if CONFIG.STUDENT.GRAD or CONFIG.TEACHER.GRAD:
        if CONFIG.VALUES:
            # the label's logit is read by every thread before any of them overwrites it
            tl.debug_barrier()
        # a side without any vocabulary entry has the log-sum-exp -inf
        lse_s = tl.where(lse_s == -float("inf"), 0.0, lse_s)
        lse_t = tl.where(lse_t == -float("inf"), 0.0, lse_t)
        weight = 0.0
        if CONFIG.VALUE_GRAD:
            weight = tl.load(rows.value_weight + row).to(tl.float32)
        vocab_entry = vocab_size.to(tl.int64)
        hard_weight = 0.0
        if CONFIG.HARD_GRAD:
            vocab_entry, counted = label_of(rows, row)
            hard_weight = tl.where(counted, tl.load(rows.hard_weight + row).to(tl.float32), 0.0)
        row_stats = RowStats(
            lse_s, lse_t, student_delta, teacher_delta, hard_lse, weight, hard_weight,
            vocab_entry, rest_s, rest_t
        )  # fmt: skip
        # from the last vocabulary entry to the first: what was read last is still in the cache
        for start in range(whole, vocab_size, TILE):
            store_gradient(
                student, teacher, row, start, unit, rows.inv_temperature, temperature, row_stats,
                True, COEFFICIENTS, POINTWISE_FN, CONFIG,
            )  # fmt: skip
        for done in tl.range(0, whole, TILE, num_stages=CONFIG.NUM_STAGES):
            store_gradient(
                student, teacher, row, whole - TILE - done, unit, rows.inv_temperature,
                temperature, row_stats, False, COEFFICIENTS, POINTWISE_FN, CONFIG,
            )  # fmt: skip


@triton.jit
def rest_of(high, row_sum, lse):
    """Computes the rounding error of a log-sum-exp (NOTE in linear/problem.py), or 0."""
    empty = row_sum == 0.0
    rest = (high - lse) + tl.math.log2(tl.where(empty, 1.0, row_sum))
    return tl.where(empty, 0.0, rest)


@triton.jit
def pointwise_sums(
    student, teacher, row, vocab_size, unit, lse_s, lse_t, rest_s, rest_t,
    POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Sums f, h and g of a functional without a row state over the vocabulary."""
    LANES: tl.constexpr = CONFIG.LANES
    TILE: tl.constexpr = LANES * CONFIG.WIDTH
    lse_s = tl.where(lse_s == -float("inf"), 0.0, lse_s)
    lse_t = tl.where(lse_t == -float("inf"), 0.0, lse_t)
    f_lanes = tl.zeros([LANES], tl.float32)
    h_lanes = tl.zeros([LANES], tl.float32)
    g_lanes = tl.zeros([LANES], tl.float32)
    for start in range(0, vocab_size, TILE):
        s, _, in_s, _ = scores_of(student, row, start, unit, True, True, CONFIG)
        t, _, in_t, _ = scores_of(teacher, row, start, unit, True, False, CONFIG)
        log_s = (s - lse_s) - rest_s
        log_t = (t - lse_t) - rest_t
        f, h, g = POINTWISE_FN(tl.math.exp2(log_t), tl.math.exp2(log_s), log_t * LN2, log_s * LN2)
        exists = in_s | in_t
        f_lanes += tl.sum(tl.where(exists, f, 0.0), 1)
        h_lanes += tl.sum(tl.where(exists, h, 0.0), 1)
        g_lanes += tl.sum(tl.where(exists, g, 0.0), 1)
    return tl.sum(f_lanes, 0), tl.sum(h_lanes, 0), tl.sum(g_lanes, 0)


@triton.jit
def store_gradient(
    student, teacher, row, start, unit, inv_temperature, temperature, stats,
    MASKED: tl.constexpr, COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Overwrites a tile of the row's logits by the gradient to them."""
    s, s_slope, in_s, vocab = scores_of(student, row, start, unit, MASKED, True, CONFIG)
    t, t_slope, in_t, _ = scores_of(teacher, row, start, unit, MASKED, False, CONFIG)
    POINTWISE: tl.constexpr = not CONFIG.BILINEAR
    log_s = (s - stats.lse_s) - stats.rest_s
    log_t = (t - stats.lse_t) - stats.rest_t
    factor = stats.weight * inv_temperature
    # a row that does not count adds nothing, even where its own gradient is not finite
    if CONFIG.STUDENT.GRAD:
        d = tl.zeros_like(s)
        if CONFIG.VALUE_GRAD:
            d = score_gradient(
                log_t, log_s, stats.student_delta, True, POINTWISE, COEFFICIENTS, POINTWISE_FN
            )
            d = tl.where(stats.weight == 0.0, 0.0, d * (factor * s_slope))
        if CONFIG.HARD_GRAD:
            if CONFIG.TEMPERED:
                p = tl.math.exp2(s * temperature - stats.hard_lse)
            else:
                p = tl.math.exp2(log_s)
            p = (p - tl.where(vocab == stats.vocab_entry, 1.0, 0.0)) * (
                stats.hard_weight * s_slope
            )
            d += tl.where(stats.hard_weight == 0.0, 0.0, p)
        store_vocab(student, row, vocab, d, in_s, MASKED)
    if CONFIG.TEACHER.GRAD:
        d = score_gradient(
            log_t, log_s, stats.teacher_delta, False, POINTWISE, COEFFICIENTS, POINTWISE_FN
        )
        d = tl.where(stats.weight == 0.0, 0.0, d * (factor * t_slope))
        store_vocab(teacher, row, vocab, d, in_t, MASKED)


@triton.jit
def store_vocab(head, row, vocab, d, inside, MASKED: tl.constexpr):
    """Writes gradients over a tile of logits."""
    ptrs = head.logits + row * head.stride + vocab
    d = d.to(head.logits.dtype.element_ty)
    if MASKED:
        tl.store(ptrs, d, mask=inside)
    else:
        tl.store(ptrs, d)
