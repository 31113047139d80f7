"""Computes values and log-sum-exps of queries, one program each."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_streamkl.attention_topk.triton.tiles import (
    bind,
    chosen,
    first_teacher_queries,
    gathered,
    queries,
    student_queries,
    student_scores,
    teacher_heads,
    teacher_mass,
    teacher_products,
)
from torch_streamkl.checks import SMALLEST as SMALLEST_FLOAT32
from torch_streamkl.kernels.row_state import LN2, LOG2E, LOW

SMALLEST = tl.constexpr(SMALLEST_FLOAT32)  # one over a smaller number may be infinite


@triton.jit
def teacher_lse_kernel(rows, teacher, CONFIG: tl.constexpr):
    """Writes the log-sum-exps of a tile of teacher heads over a query's chosen keys; 0 for none.

    The tile is the program's second coordinate.
    """
    _, b, i, first, end = bind(rows)
    tile = tl.program_id(1)
    _, heads, exists = teacher_heads(tile, CONFIG)
    ONE: tl.constexpr = CONFIG.T_DIM <= CONFIG.T_BLOCK_D
    high = tl.full([CONFIG.T_BLOCK_H], LOW, tl.float32)
    total = tl.full([CONFIG.T_BLOCK_H], 0.0, tl.float32)
    scale = teacher.scale * LOG2E
    q_ptr = teacher.q + b * teacher.q_b + i * teacher.q_n
    q = queries(q_ptr, teacher.q_h, heads, exists, 0, CONFIG.T_DIM, CONFIG.T_BLOCK_D)
    for start in tl.range(0, rows.topk, CONFIG.BLOCK_N):
        ids, inside = chosen(rows, b, i, first, end, start, CONFIG)
        x = teacher_products(teacher, b, i, ids, inside, tile, q, False, ONE, CONFIG)
        x = tl.where(inside[None, :], x * scale, -float("inf"))
        new = tl.maximum(high, tl.max(x, 1))
        total = total * tl.math.exp2(high - new)
        total += tl.sum(tl.math.exp2(x - new[:, None]), 1)
        high = new
    lse = tl.where(high == LOW, 0.0, (high + tl.math.log2(total)) * LN2)
    ptrs = teacher.lse + b * teacher.lse_b + heads.to(tl.int64) * teacher.lse_h
    tl.store(ptrs + i * teacher.lse_n, lse, mask=exists)


@triton.jit
def value_kernel(rows, teacher, student, value, stats, stats_stride, CONFIG: tl.constexpr):
    """Writes a query's value and statistics: `problem.RowStats`.

    The sum over keys of p (log p - s), with p before it is normalised and s relative to the
    largest score so far, changes by the sum of p times the change of that score.
    """
    row, b, i, first, end = bind(rows)
    t_q = first_teacher_queries(teacher, b, i, CONFIG)
    s_q, weights = student_queries(student, b, i, CONFIG)
    k_ptr = student.k + b * student.k_b
    high = LOW
    total = 0.0
    mass = 0.0
    sum_ = 0.0
    wrong = 0
    for start in tl.range(0, rows.topk, CONFIG.BLOCK_N):
        ids, inside = chosen(rows, b, i, first, end, start, CONFIG)
        k = gathered(k_ptr, student.k_n, ids, inside, 0, CONFIG.S_DIM, CONFIG.S_BLOCK_D)
        s, _ = student_scores(student, s_q, weights, k, CONFIG)
        p = teacher_mass(teacher, b, i, ids, inside, t_q, CONFIG)
        s = tl.where(inside, s, -float("inf"))
        new = tl.maximum(high, tl.max(s, 0))
        s -= new
        total = total * tl.math.exp2((high - new) * LOG2E) + tl.sum(tl.math.exp2(s * LOG2E), 0)
        log_p = tl.math.log2(tl.where(p == 0.0, 1.0, p)) * LN2
        term = tl.where(p == 0.0, 0.0, p * (log_p - s))
        sum_ += mass * (new - high) + tl.sum(term, 0)
        mass += tl.sum(p, 0)
        wrong = tl.maximum(wrong, tl.max(((ids >= rows.num_keys) & (end > first)).to(tl.int32), 0))
        high = new
    is_empty = mass < SMALLEST
    log_mass = tl.math.log2(tl.where(is_empty, 1.0, mass)) * LN2
    log_sum = tl.math.log2(tl.where(is_empty, 1.0, total)) * LN2
    result = sum_ / tl.where(is_empty, 1.0, mass) - log_mass + log_sum
    is_wrong = wrong != 0
    nan = float("nan")
    tl.store(value + row, tl.where(is_wrong, nan, tl.where(is_empty, 0.0, result)))
    tl.store(stats + row, tl.where(is_empty, 0.0, high))
    log_sum = tl.where(is_empty, float("inf"), log_sum)
    tl.store(stats + stats_stride + row, tl.where(is_wrong, nan, log_sum))
    tl.store(stats + 2 * stats_stride + row, log_mass)
