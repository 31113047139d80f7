"""Computes row sums of a divergence with a head-averaged teacher (head_mean.py).

The value and the student's delta belong to a student head. The teacher's delta belongs to each
teacher head of its group.
"""

import triton
import triton.language as tl

from torch_streamkl.attention.triton.forward import deltas, row_offset, sums_of_equal_keys
from torch_streamkl.attention.triton.head_mean import (
    add_head,
    load_lse,
    load_mean,
    log_of_mean,
    side_tile,
    split_of_mean,
    tile_mask,
)
from torch_streamkl.kernels.row_state import LOW, masked_fill_value
from torch_streamkl.kernels.scores import bind_rows, key_range


@triton.jit
def terms_of_tile(
    student, masks, mean, block, seq, b, h, lse_s, offs_m, offs_n, inv_temperature,
    POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns f, h and g of every key (0 where not allowed), log2 of the mean, and which are
    allowed.
    """
    allowed = tile_mask(masks, seq, offs_m, offs_n, CONFIG)
    s = side_tile(
        student, masks, seq, b, h, offs_m, offs_n, allowed, inv_temperature, True, CONFIG
    )[0]
    log_t = load_mean(mean, block, offs_n, allowed, CONFIG)
    f, dh, dg = deltas(log_t, s - lse_s[:, None], POINTWISE_FN)
    return (
        tl.where(allowed, f, 0.0), tl.where(allowed, dh, 0.0), tl.where(allowed, dg, 0.0),
        log_t, allowed,
    )  # fmt: skip


@triton.jit
def terms_of_masked(
    masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, lse_s, offs_m, count, fill,
    POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns f, h and g summed over the keys that are not allowed, log2 of their mean, their
    level.
    """
    fill_t = masked_fill_value(count, fill, CONFIG.TEACHER.SINK)
    top = tl.zeros_like(count) + LOW
    row_sum = tl.zeros_like(count)
    for r in tl.range(0, ratio):
        lse = load_lse(t_stats_ptr, masks, seq, b, h * ratio + r, teacher_heads, offs_m)
        top, row_sum = add_head(top, row_sum, fill_t - lse)
    log_t = log_of_mean(top, row_sum, ratio)
    log_s = masked_fill_value(count, fill, CONFIG.STUDENT.SINK) - lse_s
    f, dh, dg = sums_of_equal_keys(log_t, log_s, seq.num_keys - count, POINTWISE_FN)
    return f, dh, dg, log_t, fill_t


@triton.jit(do_not_specialize=["first_block"])
def mean_sums_kernel(
    student, masks, mean, first_block, value_ptr, h_ptr, s_stats_ptr, t_stats_ptr, split_stride,
    num_blocks, num_heads, ratio, keys_of_split, inv_temperature, fill,
    POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes value and student's delta of a block of rows of a student head, over one split."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    pid = tl.program_id(0)
    split = tl.program_id(1)
    block = first_block + pid
    bh = block // num_blocks
    b, h, m0, seq = bind_rows(masks, block % num_blocks, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    lse_s = load_lse(s_stats_ptr, masks, seq, b, h, num_heads, offs_m)
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    first = tl.maximum(first, split * keys_of_split)
    stop = tl.minimum(stop, (split + 1) * keys_of_split)
    value = tl.zeros([BLOCK_M], tl.float32)
    student_delta = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.float32)
    for n0 in tl.range(first, stop, BLOCK_N):
        f, dh, _dg, _log_t, allowed = terms_of_tile(
            student, masks, mean, pid, seq, b, h, lse_s, offs_m, n0 + tl.arange(0, BLOCK_N),
            inv_temperature, POINTWISE_FN, CONFIG,
        )  # fmt: skip
        value += tl.sum(f, 1)
        student_delta += tl.sum(dh, 1)
        count += tl.sum(allowed.to(tl.float32), 1)
    if CONFIG.FILLED:  # one share: the count is that of all keys
        f, dh, _dg, _log_t, _level = terms_of_masked(
            masks, seq, b, h, ratio, num_heads * ratio, t_stats_ptr, lse_s, offs_m, count, fill,
            POINTWISE_FN, CONFIG,
        )  # fmt: skip
        value += f
        student_delta += dh
    row = row_offset(bh, h, seq, masks) + offs_m + split.to(tl.int64) * split_stride
    tl.store(value_ptr + row, value, mask=offs_m < seq.num_rows)
    tl.store(h_ptr + row, student_delta, mask=offs_m < seq.num_rows)


@triton.jit(do_not_specialize=["first_block"])
def group_sums_kernel(
    student, teacher, masks, mean, first_block, g_ptr, s_stats_ptr, t_stats_ptr,
    num_blocks, num_heads, ratio, inv_temperature, fill,
    POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes the teacher's delta of a block of rows of one teacher head of a group."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    pid = tl.program_id(0) // ratio
    block = first_block + pid
    b, h, m0, seq = bind_rows(masks, block % num_blocks, block // num_blocks, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    head = h * ratio + tl.program_id(0) % ratio
    offs_m = m0 + tl.arange(0, BLOCK_M)
    teacher_heads = num_heads * ratio
    lse_s = load_lse(s_stats_ptr, masks, seq, b, h, num_heads, offs_m)
    lse_t = load_lse(t_stats_ptr, masks, seq, b, head, teacher_heads, offs_m)
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    count = tl.zeros([BLOCK_M], tl.float32)
    teacher_delta = tl.zeros([BLOCK_M], tl.float32)
    for n0 in tl.range(first, stop, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        _f, _dh, dg, log_t, allowed = terms_of_tile(
            student, masks, mean, pid, seq, b, h, lse_s, offs_m, offs_n, inv_temperature,
            POINTWISE_FN, CONFIG,
        )  # fmt: skip
        x = side_tile(
            teacher, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature,
            False, CONFIG,
        )[0]  # fmt: skip
        teacher_delta += tl.sum(split_of_mean(x - lse_t[:, None], log_t, ratio) * dg, 1)
        count += tl.sum(allowed.to(tl.float32), 1)
    if CONFIG.FILLED:
        _f, _dh, dg, log_t, fill_t = terms_of_masked(
            masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, lse_s, offs_m, count, fill,
            POINTWISE_FN, CONFIG,
        )  # fmt: skip
        teacher_delta += split_of_mean(fill_t - lse_t, log_t, ratio) * dg
    row = row_offset(b * teacher_heads + head, head, seq, masks) + offs_m
    tl.store(g_ptr + row, teacher_delta, mask=offs_m < seq.num_rows)
