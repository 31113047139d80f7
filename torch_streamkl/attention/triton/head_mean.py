"""Computes a teacher that is the mean over a group of heads (head_reduction="mean").

The mean is over probabilities, so `lse_kernel` first computes the log-sum-exps of all heads. Then
`mean_kernel` writes the mean of some blocks of rows to memory. Every other kernel reads it there,
before the next blocks replace it: one pass over all heads serves the sums, or all gradients.
Everything is in log2 units, as in the other kernels. The gradient to one teacher head needs its
share of the mean, P_r / (num_heads mean).

Blocks of rows are numbered through all sequences and heads of the student. ``first_block`` is the
first one whose mean is in memory, in blocks of the kernel that reads it.
"""

import triton
import triton.language as tl

from torch_streamkl.attention.triton.forward import finite_lse, row_offset
from torch_streamkl.kernels.row_state import LOW, masked_fill_value
from torch_streamkl.kernels.scores import (
    allowed_tile,
    bind_rows,
    bind_side,
    key_range,
    key_tile,
    query_tile,
    transformed,
)

SMALLEST_MEAN = tl.constexpr(2.0**-90)  # of a sum of probabilities: NOTE [Small means]


@triton.jit
def scores_of(
    q, side, bound, seq, offs_m, offs_n, allowed, inv_temperature,
    STUDENT: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns scores of one head (-inf where not allowed), d(score)/d(dot), and the tile of k."""
    i = offs_m[:, None]
    j = offs_n[None, :]
    inside = (i < seq.num_rows) & (j < seq.num_keys)
    k = key_tile(side, bound, offs_n, seq, True, STUDENT, CONFIG)
    dot = tl.dot(q, tl.trans(k), input_precision=CONFIG.PRECISION)
    x, slope = transformed(dot, side, bound, seq, i, j, inside, inv_temperature, STUDENT, CONFIG)
    return tl.where(allowed, x, -float("inf")), slope, k


@triton.jit
def side_tile(
    side, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature,
    STUDENT: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns scores of one head (-inf where not allowed), d(score)/d(dot), and the tiles of q and
    k.
    """
    bound = bind_side(side, masks, seq, b, head, inv_temperature, STUDENT, CONFIG)
    q = query_tile(side, bound, offs_m, seq, True, STUDENT, CONFIG)
    x, slope, k = scores_of(
        q, side, bound, seq, offs_m, offs_n, allowed, inv_temperature, STUDENT, CONFIG
    )
    return x, slope, q, k


@triton.jit
def tile_mask(masks, seq, offs_m, offs_n, CONFIG: tl.constexpr):
    """Marks the allowed pairs of a tile."""
    i = offs_m[:, None]
    j = offs_n[None, :]
    inside = (i < seq.num_rows) & (j < seq.num_keys)
    return allowed_tile(masks, seq, i, j, inside, CONFIG)


@triton.jit
def load_lse(lse_ptr, masks, seq, b, head, num_heads, offs_m):
    """Returns log-sum-exps of a block of rows of one head, 0 for a row without keys."""
    row = row_offset(b * num_heads + head, head, seq, masks) + offs_m
    return finite_lse(tl.load(lse_ptr + row, mask=offs_m < seq.num_rows, other=0.0))


# ------------------------------------------------------------------------------ log-sum-exps first
@triton.jit
def lse_kernel(
    side, masks, stats_ptr, num_blocks, num_heads, ratio, inv_temperature, fill,
    STUDENT: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes the log-sum-exp of a block of rows of one head; ``ratio`` heads share a student
    head's mask.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    pid = tl.program_id(0)
    bh = pid // num_blocks
    b, head, m0, seq = bind_rows(masks, pid % num_blocks, bh, num_heads, ratio, CONFIG)
    if m0 >= seq.num_rows:
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    bound = bind_side(side, masks, seq, b, head, inv_temperature, STUDENT, CONFIG)
    q = query_tile(side, bound, offs_m, seq, True, STUDENT, CONFIG)
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    top = tl.full([BLOCK_M], LOW, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.float32)
    for n0 in tl.range(first, stop, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        allowed = tile_mask(masks, seq, offs_m, offs_n, CONFIG)
        x = scores_of(
            q, side, bound, seq, offs_m, offs_n, allowed, inv_temperature, STUDENT, CONFIG
        )[0]
        higher = tl.maximum(top, tl.max(x, 1))
        row_sum = row_sum * tl.math.exp2(top - higher) + tl.sum(
            tl.math.exp2(x - higher[:, None]), 1
        )
        count += tl.sum(allowed.to(tl.float32), 1)
        top = higher
    if CONFIG.FILLED:
        absent = seq.num_keys - count
        level = tl.where(absent > 0.0, masked_fill_value(count, fill, SIDE.SINK), LOW)
        higher = tl.maximum(top, level)
        row_sum = row_sum * tl.math.exp2(top - higher) + absent * tl.math.exp2(level - higher)
        top = higher
    if SIDE.SINK:
        higher = tl.maximum(top, bound.sink)
        row_sum = row_sum * tl.math.exp2(top - higher) + tl.math.exp2(bound.sink - higher)
        top = higher
    empty = row_sum == 0.0
    lse = tl.where(empty, -float("inf"), top + tl.math.log2(tl.where(empty, 1.0, row_sum)))
    out = stats_ptr + row_offset(bh, head, seq, masks) + offs_m
    tl.store(out, lse, mask=offs_m < seq.num_rows)


# ---------------------------------------------------------------------------------------- the mean
@triton.jit
def add_head(top, row_sum, x):
    """Adds probabilities exp2(x) to a sum kept as row_sum * exp2(top), so that none underflows."""
    higher = tl.maximum(top, x)
    return higher, row_sum * tl.math.exp2(top - higher) + tl.math.exp2(x - higher)


@triton.jit
def log_of_mean(top, row_sum, ratio):
    """Returns log2 of a mean over ``ratio`` heads, -inf where their sum is 0."""
    none = row_sum == 0.0
    return tl.where(none, -float("inf"), top + tl.math.log2(tl.where(none, 1.0, row_sum) / ratio))


@triton.jit(do_not_specialize=["first_block", "rows_in_memory"])
def mean_kernel(
    teacher, masks, mean, first_block, t_stats_ptr, num_blocks, num_key_blocks, num_heads, ratio,
    inv_temperature, small_ptr, rows_in_memory,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes log2 of the mean over the teachers of a student head, one tile; -inf where not
    allowed.

    With small_ptr of tiles with a small sum only: NOTE [Small means] in hopper/head_mean.py.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    if small_ptr is not None:
        row = (tl.program_id(0) // num_key_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        small = tl.load(small_ptr + (tl.program_id(0) % num_key_blocks) * rows_in_memory + row)
        if tl.sum((small < SMALLEST_MEAN).to(tl.int32), 0) == 0:
            return
    block = first_block + tl.program_id(0) // num_key_blocks
    n0 = (tl.program_id(0) % num_key_blocks) * BLOCK_N
    bh = block // num_blocks
    b, h, m0, seq = bind_rows(masks, block % num_blocks, bh, num_heads, 1, CONFIG)
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    if (m0 >= seq.num_rows) | (n0 < first) | (n0 >= stop):
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    offs_n = n0 + tl.arange(0, BLOCK_N)
    allowed = tile_mask(masks, seq, offs_m, offs_n, CONFIG)
    top = tl.full([BLOCK_M, BLOCK_N], LOW, tl.float32)
    row_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for r in tl.range(0, ratio):
        head = h * ratio + r
        x = side_tile(
            teacher, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature,
            False, CONFIG,
        )[0]  # fmt: skip
        lse = load_lse(t_stats_ptr, masks, seq, b, head, num_heads * ratio, offs_m)
        top, row_sum = add_head(top, row_sum, x - lse[:, None])
    ptrs = mean_tile(mean, block - first_block, offs_n, CONFIG)
    tl.store(ptrs, log_of_mean(top, row_sum, ratio))


@triton.jit
def mean_tile(mean, block, offs_n, CONFIG: tl.constexpr):
    """Returns pointers to a tile of the materialized mean; ``block`` numbers the row blocks."""
    row = tl.cast(block, tl.int64) * CONFIG.BLOCK_M + tl.arange(0, CONFIG.BLOCK_M)
    return mean.ptr + row[:, None] * mean.stride + offs_n[None, :]


@triton.jit
def load_mean(mean, block, offs_n, allowed, CONFIG: tl.constexpr):
    """Loads a tile of the mean, -inf where not allowed."""
    ptrs = mean_tile(mean, block, offs_n, CONFIG)
    return tl.load(ptrs, mask=allowed, other=-float("inf"))


@triton.jit
def split_of_mean(log_head, log_mean, ratio):
    """Computes P_r / (num_heads * mean): the share of one head in the logarithm of the mean."""
    return tl.math.exp2(log_head - tl.maximum(log_mean, LOW)) / ratio
