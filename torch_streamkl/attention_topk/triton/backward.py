"""Computes the student's gradients, one program a query.

With S and P of a chosen key, the gradient to its score is ``d = grad (S - P)``. That to the
product with head h is ``weight_h d`` where the product is positive, so that

- the query of a head gets ``weight_h`` times a sum ``a_h`` of ``d k`` over such keys, and its
  weight ``q_h a_h``;
- the key gets the sum of ``weight_h d q_h`` over such heads, added to what other queries give it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from torch_streamkl.attention_topk.triton.tiles import (
    bind,
    chosen,
    first_teacher_queries,
    gathered,
    student_queries,
    student_scores,
    teacher_mass,
)
from torch_streamkl.kernels.row_state import LOG2E


class Needs(NamedTuple):
    """Says at compile time which gradients are written, and how those of keys are summed."""

    Q: bool
    K: bool
    WEIGHTS: bool
    FIXED: bool  # keys in 64-bit integers, whose sums have no order
    HALF_SCALE: float  # of d before it is rounded to float16, whose range it would leave


@triton.jit
def gradient_kernel(
    rows, teacher, student, grad, stats, stats_stride, q_grad, k_grad, weights_grad, k_unit,
    CONFIG: tl.constexpr, NEEDS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients to a query and its weights, and adds those to its keys.

    Those of FIXED keys are multiplied by k_unit, and become integers. Gradients are contiguous:
    q [batch, num_heads, seqlen_q, head_dim] and weights [batch, num_heads, seqlen_q].
    """
    row, b, i, first, end = bind(rows)
    factor = tl.load(grad + row).to(tl.float32)
    topk = tl.where(factor == 0.0, 0, rows.topk)  # a row without a gradient reads no key
    t_q = first_teacher_queries(teacher, b, i, CONFIG)
    q, weights = student_queries(student, b, i, CONFIG)
    largest = tl.max(tl.abs(weights), 0)
    largest = tl.where(largest == 0.0, 1.0, largest)
    relative = weights / largest
    high = tl.load(stats + row)
    log_sum = tl.load(stats + stats_stride + row)
    inv_mass = tl.math.exp2(tl.load(stats + 2 * stats_stride + row) * -LOG2E)
    k_ptr = student.k + b * student.k_b
    d_range = tl.arange(0, CONFIG.S_BLOCK_D)
    unit = 1.0
    if NEEDS.FIXED:
        unit = tl.load(k_unit)
    scale = factor * student.scale * (1.0 / NEEDS.HALF_SCALE)
    k_scale = scale * largest
    of_q = tl.full([CONFIG.S_BLOCK_H, CONFIG.S_BLOCK_D], 0.0, tl.float32)
    for start in tl.range(0, topk, CONFIG.BLOCK_N):
        ids, inside = chosen(rows, b, i, first, end, start, CONFIG)
        k = gathered(k_ptr, student.k_n, ids, inside, 0, CONFIG.S_DIM, CONFIG.S_BLOCK_D)
        p = teacher_mass(teacher, b, i, ids, inside, t_q, CONFIG)
        s, x = student_scores(student, q, weights, k, CONFIG)
        d = tl.math.exp2(((s - high) - log_sum) * LOG2E) - p * inv_mass
        d = tl.where(inside, d * NEEDS.HALF_SCALE, 0.0)
        of_x = tl.broadcast_to(d[:, None], [CONFIG.BLOCK_N, CONFIG.S_BLOCK_H])
        if student.weights is not None:
            of_x = tl.where(x > 0.0, of_x, 0.0)
        if NEEDS.Q or NEEDS.WEIGHTS:
            of_q = tl.dot(tl.trans(of_x.to(k.dtype)), k, of_q, input_precision=CONFIG.PRECISION)
        if NEEDS.K:
            weighted = (of_x * relative[None, :]).to(k.dtype)
            of_k = tl.dot(weighted, q, input_precision=CONFIG.PRECISION) * k_scale
            ptrs = k_grad + (b * rows.num_keys + ids.to(tl.int64))[:, None] * CONFIG.S_DIM
            ptrs += d_range[None, :]
            mask = inside[:, None]
            if CONFIG.S_DIM != CONFIG.S_BLOCK_D:
                mask = mask & (d_range < CONFIG.S_DIM)[None, :]
            if NEEDS.FIXED:
                tl.atomic_add(ptrs, (of_k * unit).to(tl.int64), mask=mask, sem="relaxed")
            else:
                tl.atomic_add(ptrs, of_k, mask=mask, sem="relaxed")
    heads = tl.arange(0, CONFIG.S_BLOCK_H)
    exists = heads < CONFIG.S_HEADS
    rows_out = (b * CONFIG.S_HEADS + heads) * rows.num_queries + i
    if NEEDS.Q:
        ptrs = q_grad + rows_out[:, None] * CONFIG.S_DIM + d_range[None, :]
        result = tl.where(of_q == 0.0, 0.0, of_q * (weights * scale)[:, None])
        mask = exists[:, None] & (d_range < CONFIG.S_DIM)[None, :]
        tl.store(ptrs, result.to(q_grad.dtype.element_ty), mask=mask)
    if NEEDS.WEIGHTS:
        # operands of a query without keys need not be finite
        result = tl.sum(tl.where(of_q == 0.0, 0.0, of_q * q.to(tl.float32)), 1) * scale
        tl.store(weights_grad + rows_out, result.to(weights_grad.dtype.element_ty), mask=exists)
