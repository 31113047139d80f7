"""Implements the portable forward of split keys: states of the splits, and the kernels that
combine them.
"""

import triton
import triton.language as tl

from torch_streamkl.attention.triton.forward import (
    bind_sides,
    clamps_reached,
    finite_lse,
    load_rows,
    row_offset,
    state_between,
    store_fields,
    store_rows,
    sums_between,
    with_masked_sums,
)
from torch_streamkl.kernels.arguments import Problem, State, Sums
from torch_streamkl.kernels.row_state import empty_state, finish, merge, with_masked_keys
from torch_streamkl.kernels.scores import bind_rows


@triton.jit
def state_kernel(
    student, teacher, masks, state_ptr, field_stride, split_stride,
    num_blocks, num_heads, keys_per_split, inv_temperature,
    COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes the state of one split of the keys, written as nine fields of state_ptr."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    bh = pid // num_blocks
    b, h, m0, seq = bind_rows(masks, pid % num_blocks, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    problem = Problem(student, teacher, masks, seq, inv_temperature)
    rows = load_rows(problem, b, h, m0, CONFIG)
    inside = rows.offs < seq.num_rows
    lo = split * keys_per_split
    state = state_between(lo, lo + keys_per_split, m0, rows, problem, COEFFICIENTS, CONFIG)
    out = state_ptr + split.to(tl.int64) * split_stride + row_offset(bh, h, seq, masks) + rows.offs
    store_fields(out, field_stride, state, inside, 9)


@triton.jit
def load_state(ptr, field_stride, inside):
    """Loads the state of rows that `store_fields` wrote."""
    return State(
        tl.load(ptr, mask=inside, other=0.0),
        tl.load(ptr + field_stride, mask=inside, other=0.0),
        tl.load(ptr + 2 * field_stride, mask=inside, other=0.0),
        tl.load(ptr + 3 * field_stride, mask=inside, other=0.0),
        tl.load(ptr + 4 * field_stride, mask=inside, other=0.0),
        tl.load(ptr + 5 * field_stride, mask=inside, other=0.0),
        tl.load(ptr + 6 * field_stride, mask=inside, other=0.0),
        tl.load(ptr + 7 * field_stride, mask=inside, other=0.0),
        tl.load(ptr + 8 * field_stride, mask=inside, other=0.0),
    )


@triton.jit
def merge_kernel(
    student, teacher, masks, state_ptr, field_stride, split_stride, num_splits,
    outputs, recompute_ptr, num_blocks, num_heads, fill,
    COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Combines the splits of a block of rows; recompute_ptr marks blocks that need a second
    pass.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    pid = tl.program_id(0)
    bh = pid // num_blocks
    b, h, m0, seq = bind_rows(masks, pid % num_blocks, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    problem = Problem(student, teacher, masks, seq, 1.0)
    s_bound, t_bound = bind_sides(problem, b, h, CONFIG)
    offs = m0 + tl.arange(0, BLOCK_M)
    inside = offs < seq.num_rows
    out = row_offset(bh, h, seq, masks) + offs
    state = empty_state(BLOCK_M)
    split_ptr = state_ptr + out
    for _ in range(num_splits):
        state = merge(state, load_state(split_ptr, field_stride, inside), COEFFICIENTS)
        split_ptr += split_stride
    if CONFIG.FILLED:
        state = with_masked_keys(state, seq.num_keys, fill, COEFFICIENTS, CONFIG)
    lse_t, lse_s, value, student_delta, teacher_delta = finish(
        state, t_bound.sink, s_bound.sink, COEFFICIENTS, CONFIG
    )
    if CONFIG.GUARDED:
        again = clamps_reached(state, finite_lse(lse_t), finite_lse(lse_s), inside, CONFIG)
        tl.store(recompute_ptr + pid, again.to(tl.int32))
    store_rows(outputs, out, inside, lse_t, lse_s, value, student_delta, teacher_delta)


@triton.jit
def sums_kernel(
    student, teacher, masks, s_stats_ptr, t_stats_ptr, recompute_ptr, sums_ptr, field_stride,
    split_stride, num_blocks, num_heads, keys_per_split, inv_temperature,
    POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Runs the second pass over one split: writes f, h, g and the count of keys to sums_ptr."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    if CONFIG.GUARDED:
        if tl.load(recompute_ptr + pid) == 0:
            return
    bh = pid // num_blocks
    b, h, m0, seq = bind_rows(masks, pid % num_blocks, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    problem = Problem(student, teacher, masks, seq, inv_temperature)
    rows = load_rows(problem, b, h, m0, CONFIG)
    inside = rows.offs < seq.num_rows
    row = row_offset(bh, h, seq, masks) + rows.offs
    lse_t = finite_lse(tl.load(t_stats_ptr + row, mask=inside, other=0.0))
    lse_s = finite_lse(tl.load(s_stats_ptr + row, mask=inside, other=0.0))
    lo = split * keys_per_split
    sums = sums_between(
        lo, lo + keys_per_split, m0, lse_t, lse_s, rows, problem, POINTWISE_FN, CONFIG
    )
    out = sums_ptr + split.to(tl.int64) * split_stride + row
    store_fields(out, field_stride, sums, inside, 4)


@triton.jit
def merge_sums_kernel(
    masks, sums_ptr, field_stride, split_stride, num_splits, recompute_ptr, outputs,
    num_blocks, num_heads, fill, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of the second pass."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    pid = tl.program_id(0)
    if CONFIG.GUARDED:
        if tl.load(recompute_ptr + pid) == 0:
            return
    bh = pid // num_blocks
    _b, h, m0, seq = bind_rows(masks, pid % num_blocks, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    offs = m0 + tl.arange(0, BLOCK_M)
    inside = offs < seq.num_rows
    out = row_offset(bh, h, seq, masks) + offs
    zero = tl.zeros([BLOCK_M], tl.float32)
    sums = Sums(zero, zero, zero, zero)
    share = sums_ptr + out
    for _ in range(num_splits):
        sums = Sums(
            sums.value + tl.load(share, mask=inside, other=0.0),
            sums.h + tl.load(share + field_stride, mask=inside, other=0.0),
            sums.g + tl.load(share + 2 * field_stride, mask=inside, other=0.0),
            sums.count + tl.load(share + 3 * field_stride, mask=inside, other=0.0),
        )
        share += split_stride
    if CONFIG.FILLED:
        lse_t = tl.load(outputs.t_stats + out, mask=inside, other=0.0)
        lse_s = tl.load(outputs.s_stats + out, mask=inside, other=0.0)
        sums = with_masked_sums(sums, lse_t, lse_s, seq.num_keys, fill, POINTWISE_FN, CONFIG)
    tl.store(outputs.value + out, sums.value, mask=inside)
    tl.store(outputs.s_stats + outputs.stats_stride + out, sums.h, mask=inside)
    tl.store(outputs.t_stats + outputs.stats_stride + out, sums.g, mask=inside)
