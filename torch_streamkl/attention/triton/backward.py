"""Implements the portable backward: dQ by blocks of rows, and dK by blocks of keys.

Both recompute scores.

Two kernels and not one with atomics: every gradient is summed by one program in a fixed order, so
the bits are the same on every run. STUDENT chooses whose gradient a launch computes.
"""

import triton
import triton.language as tl

from torch_streamkl.attention.triton.forward import (
    bind_sides,
    finite_lse,
    load_queries,
    load_rows,
    row_offset,
)
from torch_streamkl.kernels.arguments import Problem
from torch_streamkl.kernels.row_state import score_gradient, tile_coordinates
from torch_streamkl.kernels.scores import (
    admitted,
    allowed_pairs,
    allowed_tile,
    bind_rows,
    bind_sequence,
    gradient_ptrs,
    key_range,
    key_tile,
    row_range,
    transformed,
)


@triton.jit
def gradient_tile(
    rows, offs_n, ks_trans, kt_trans, lse_t, lse_s, delta, problem,
    STUDENT: tl.constexpr, MASKED: tl.constexpr, COEFFICIENTS: tl.constexpr,
    POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr, KEYS: tl.constexpr = True,
):  # fmt: skip
    """Computes d(value)/d(q.k) of one side for a tile [BLOCK_M, BLOCK_N], up to the scale.

    Without ``KEYS`` it is undefined at keys that a mask of keys removes.
    """
    student, teacher, masks, seq, inv_temperature = problem
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    i = rows.offs[:, None]
    j = offs_n[None, :]
    inside = (i < seq.num_rows) & (j < seq.num_keys)
    dot_s = tl.dot(rows.qs, ks_trans, input_precision=CONFIG.PRECISION)
    dot_t = tl.dot(rows.qt, kt_trans, input_precision=CONFIG.PRECISION)
    s, s_slope = transformed(
        dot_s, student, rows.student, seq, i, j, inside, inv_temperature, True, CONFIG
    )
    t, t_slope = transformed(
        dot_t, teacher, rows.teacher, seq, i, j, inside, inv_temperature, False, CONFIG
    )
    d = score_gradient(
        t - lse_t[:, None],
        s - lse_s[:, None],
        delta[:, None],
        STUDENT,
        CONFIG.TWO_PASS,
        COEFFICIENTS,
        POINTWISE_FN,
    )
    if MASKED:
        if KEYS:
            allowed = allowed_tile(masks, seq, i, j, inside, CONFIG)
        else:
            allowed = allowed_pairs(masks, seq, i, j, inside, CONFIG)
        d = tl.where(allowed, d, 0.0)
    if SIDE.SOFTCAP:
        d *= s_slope if STUDENT else t_slope
    return d


@triton.jit
def load_statistics(
    grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride, row, inside, STUDENT: tl.constexpr
):
    """Loads lse_t, lse_s, the wanted side's delta and the incoming gradient of a block of rows.

    Rows that do not count get probabilities of 0, because their own gradients may be infinite.
    """
    lse_t = finite_lse(tl.load(t_stats_ptr + row, mask=inside, other=0.0))
    lse_s = finite_lse(tl.load(s_stats_ptr + row, mask=inside, other=0.0))
    sums_ptr = (s_stats_ptr if STUDENT else t_stats_ptr) + stats_stride
    delta = tl.load(sums_ptr + row, mask=inside, other=0.0)
    grad = tl.load(grad_ptr + row, mask=inside, other=0.0)
    left_out = grad == 0.0
    lse_t = tl.where(left_out, float("inf"), lse_t)
    lse_s = tl.where(left_out, float("inf"), lse_s)
    return lse_t, lse_s, tl.where(left_out, 0.0, delta), grad


@triton.jit
def dq_over(
    acc, start, stop, rows, lse_t, lse_s, delta, problem,
    STUDENT: tl.constexpr, MASKED: tl.constexpr,
    COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Accumulates sum_j dscore_j k_j over the tiles in [start, stop)."""
    for n0 in tl.range(start, stop, CONFIG.BLOCK_N):
        offs_n = n0 + tl.arange(0, CONFIG.BLOCK_N)
        ks = key_tile(problem.student, rows.student, offs_n, problem.seq, MASKED, True, CONFIG)
        kt = key_tile(problem.teacher, rows.teacher, offs_n, problem.seq, MASKED, False, CONFIG)
        d = gradient_tile(
            rows, offs_n, tl.trans(ks), tl.trans(kt), lse_t, lse_s, delta, problem,
            STUDENT, MASKED, COEFFICIENTS, POINTWISE_FN, CONFIG,
        )  # fmt: skip
        k = ks if STUDENT else kt
        acc = tl.dot(d.to(k.dtype), k, acc, input_precision=CONFIG.PRECISION)
    return acc


@triton.jit
def dq_kernel(
    student, teacher, masks, grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride, dq,
    num_blocks, num_heads, keys_per_split, inv_temperature,
    STUDENT: tl.constexpr, COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes dQ of a block of rows over one split of the keys."""
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    split = tl.program_id(1)
    block, bh = tile_coordinates(tl.program_id(0), num_blocks, CONFIG.HAS_RIGHT)
    if CONFIG.HAS_RIGHT:
        block = num_blocks - 1 - block
    b, h, m0, seq = bind_rows(masks, block, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    problem = Problem(student, teacher, masks, seq, inv_temperature)
    rows = load_rows(problem, b, h, m0, CONFIG)
    inside = rows.offs < seq.num_rows
    row = row_offset(bh, h, seq, masks) + rows.offs
    lse_t, lse_s, delta, grad = load_statistics(
        grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride, row, inside, STUDENT
    )
    first, left, right, stop = key_range(masks, seq, m0, CONFIG)
    lo = split * keys_per_split
    hi = lo + keys_per_split
    acc = tl.full([CONFIG.BLOCK_M, SIDE.BLOCK_D], 0.0, tl.float32)
    if not CONFIG.DENSE:
        if CONFIG.HAS_LEFT or CONFIG.KEY_MASK:
            acc = dq_over(
                acc, tl.maximum(first, lo), tl.minimum(left, hi), rows, lse_t, lse_s, delta,
                problem, STUDENT, True, COEFFICIENTS, POINTWISE_FN, CONFIG,
            )  # fmt: skip
        acc = dq_over(
            acc, tl.maximum(left, lo), tl.minimum(right, hi), rows, lse_t, lse_s, delta,
            problem, STUDENT, False, COEFFICIENTS, POINTWISE_FN, CONFIG,
        )  # fmt: skip
    acc = dq_over(
        acc, tl.maximum(right, lo), tl.minimum(stop, hi), rows, lse_t, lse_s, delta,
        problem, STUDENT, True, COEFFICIENTS, POINTWISE_FN, CONFIG,
    )  # fmt: skip
    acc *= (grad * dq.scale)[:, None]
    out = gradient_ptrs(dq, masks, split, b, h, seq.start_q + rows.offs, SIDE.BLOCK_D)
    inside = inside[:, None] & (tl.arange(0, SIDE.BLOCK_D)[None, :] < SIDE.DIM)
    tl.store(out, acc.to(dq.ptr.dtype.element_ty), mask=inside)


@triton.jit
def dk_over(
    acc, start, stop, offs_n, ks_trans, kt_trans, s_bound, t_bound, problem, first_row,
    grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
    STUDENT: tl.constexpr, MASKED: tl.constexpr,
    COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Accumulates sum_i dscore_i q_i over the row tiles in [start, stop)."""
    for m0 in tl.range(start, stop, CONFIG.BLOCK_M):
        offs_m = m0 + tl.arange(0, CONFIG.BLOCK_M)
        rows = load_queries(problem, s_bound, t_bound, offs_m, MASKED, CONFIG)
        lse_t, lse_s, delta, grad = load_statistics(
            grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride, first_row + offs_m,
            offs_m < problem.seq.num_rows, STUDENT,
        )  # fmt: skip
        d = gradient_tile(
            rows, offs_n, ks_trans, kt_trans, lse_t, lse_s, delta, problem,
            STUDENT, MASKED, COEFFICIENTS, POINTWISE_FN, CONFIG, False,
        )  # fmt: skip
        q = rows.qs if STUDENT else rows.qt
        weighted = tl.trans((d * grad[:, None]).to(q.dtype))
        acc = tl.dot(weighted, q, acc, input_precision=CONFIG.PRECISION)
    return acc


@triton.jit
def store_keys(acc, dk, masks, seq, share, b, head, n0, DIM: tl.constexpr):
    """Writes the gradient of the keys at n0."""
    offs_n = n0 + tl.arange(0, acc.shape[0])
    out = gradient_ptrs(dk, masks, share, b, head, seq.start_k + offs_n, acc.shape[1])
    inside = (offs_n[:, None] < seq.num_keys) & (tl.arange(0, acc.shape[1])[None, :] < DIM)
    tl.store(out, acc.to(dk.ptr.dtype.element_ty), mask=inside)


@triton.jit
def dk_kernel(
    student, teacher, masks, grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride, dk,
    num_blocks, num_heads, group, heads_of_split, inv_temperature,
    STUDENT: tl.constexpr, COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes dK of a block of keys of one key head, summed over (a split of) its query heads."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    block, sequence = tile_coordinates(tl.program_id(0), num_blocks, CONFIG.HAS_RIGHT)
    num_splits = num_heads // heads_of_split  # of all key heads
    b = sequence // num_splits
    first_head = sequence % num_splits * heads_of_split
    kv = first_head // group
    share = first_head % group // heads_of_split
    n0 = block * BLOCK_N
    sizes = bind_sequence(masks, b, first_head, CONFIG)
    if n0 >= sizes.num_keys:
        return
    offs_n = n0 + tl.arange(0, BLOCK_N)
    acc = tl.full([CONFIG.BLOCK_N, SIDE.BLOCK_D], 0.0, tl.float32)
    if CONFIG.KEY_MASK:
        if tl.max(admitted(masks, sizes, offs_n).to(tl.int32), 0) == 0:
            store_keys(acc, dk, masks, sizes, share, b, kv, n0, SIDE.DIM)
            return
    # without the option address arithmetic is hoisted out of this loop until registers spill
    for member in tl.range(0, heads_of_split, num_stages=1, disable_licm=True):
        h = first_head + member
        seq = bind_sequence(masks, b, h, CONFIG)
        problem = Problem(student, teacher, masks, seq, inv_temperature)
        s_bound, t_bound = bind_sides(problem, b, h, CONFIG)
        # transposed out here: inside the loop over rows they would go to shared memory every time
        ks_trans = tl.trans(key_tile(student, s_bound, offs_n, seq, True, True, CONFIG))
        kt_trans = tl.trans(key_tile(teacher, t_bound, offs_n, seq, True, False, CONFIG))
        first_row = row_offset(b * num_heads + h, h, seq, masks)
        first, left, right, stop = row_range(masks, seq, n0, CONFIG)
        if CONFIG.KEY_MASK:
            right = first  # one loop, whose mask is where rows end: fewer registers than two
        elif not CONFIG.DENSE:
            if CONFIG.HAS_RIGHT or CONFIG.HAS_LEFT:
                acc = dk_over(
                    acc, first, left, offs_n, ks_trans, kt_trans, s_bound, t_bound, problem,
                    first_row, grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
                    STUDENT, True, COEFFICIENTS, POINTWISE_FN, CONFIG,
                )  # fmt: skip
            acc = dk_over(
                acc, left, right, offs_n, ks_trans, kt_trans, s_bound, t_bound, problem,
                first_row, grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
                STUDENT, False, COEFFICIENTS, POINTWISE_FN, CONFIG,
            )  # fmt: skip
        acc = dk_over(
            acc, right, stop, offs_n, ks_trans, kt_trans, s_bound, t_bound, problem,
            first_row, grad_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
            STUDENT, True, COEFFICIENTS, POINTWISE_FN, CONFIG,
        )  # fmt: skip
    acc *= dk.scale
    if CONFIG.KEY_MASK:  # a key's sums are of that key alone
        acc = tl.where(admitted(masks, sizes, offs_n)[:, None], acc, 0.0)
    store_keys(acc, dk, masks, sizes, share, b, kv, n0, SIDE.DIM)
