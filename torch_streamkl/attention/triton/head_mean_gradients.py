"""Computes gradients of a divergence with a head-averaged teacher (head_mean.py)."""

import triton
import triton.language as tl

from torch_streamkl.attention.triton.forward import row_offset
from torch_streamkl.attention.triton.head_mean import (
    load_lse,
    load_mean,
    side_tile,
    split_of_mean,
    tile_mask,
)
from torch_streamkl.kernels.row_state import LN2
from torch_streamkl.kernels.scores import (
    bind_rows,
    bind_sequence,
    gradient_ptrs,
    key_range,
    row_range,
)


@triton.jit
def gradient_tile(
    student, teacher, masks, mean, block, seq, b, h, head, ratio, num_heads, offs_m, offs_n,
    s_stats_ptr, t_stats_ptr, sum_ptr, inv_temperature,
    STUDENT: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns d(value)/d(q.k) up to the scale, with the tiles of q and k that it belongs to.

    It is that of student head h, or of teacher head ``head`` of its group.
    """
    inside = offs_m < seq.num_rows
    allowed = tile_mask(masks, seq, offs_m, offs_n, CONFIG)
    s, s_slope, qs, ks = side_tile(
        student, masks, seq, b, h, offs_m, offs_n, allowed, inv_temperature, True, CONFIG
    )
    log_s = s - load_lse(s_stats_ptr, masks, seq, b, h, num_heads, offs_m)[:, None]
    log_t = load_mean(mean, block, offs_n, allowed, CONFIG)
    _f, dh, dg = POINTWISE_FN(tl.math.exp2(log_t), tl.math.exp2(log_s), log_t * LN2, log_s * LN2)
    if STUDENT:
        row = row_offset(b * num_heads + h, h, seq, masks) + offs_m
        delta = tl.load(sum_ptr + row, mask=inside, other=0.0)
        d = tl.where(allowed, dh - tl.math.exp2(log_s) * delta[:, None], 0.0)
        if CONFIG.STUDENT.SOFTCAP:
            d *= s_slope
        return d, qs, ks
    else:
        x, t_slope, qt, kt = side_tile(
            teacher, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature,
            False, CONFIG,
        )  # fmt: skip
        teacher_heads = num_heads * ratio
        log_head = x - load_lse(t_stats_ptr, masks, seq, b, head, teacher_heads, offs_m)[:, None]
        row = row_offset(b * teacher_heads + head, head, seq, masks) + offs_m
        delta = tl.load(sum_ptr + row, mask=inside, other=0.0)
        d = split_of_mean(log_head, log_t, ratio) * dg - tl.math.exp2(log_head) * delta[:, None]
        d = tl.where(allowed, d, 0.0)
        if CONFIG.TEACHER.SOFTCAP:
            d *= t_slope
        return d, qt, kt


@triton.jit(do_not_specialize=["first_block"])
def mean_dq_kernel(
    student, teacher, masks, mean, first_block, grad_ptr, s_stats_ptr, t_stats_ptr, sum_ptr,
    dq, num_blocks, num_heads, ratio, keys_of_split, inv_temperature,
    STUDENT: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes dQ of a block of rows of one head of one side, from one share of the keys."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    BLOCK_D: tl.constexpr = SIDE.BLOCK_D
    own_ratio = 1
    if not STUDENT:
        own_ratio = ratio
    pid = tl.program_id(0) // own_ratio
    split = tl.program_id(1)
    block = first_block + pid
    bh = block // num_blocks
    b, h, m0, seq = bind_rows(masks, block % num_blocks, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    head = h * own_ratio + tl.program_id(0) % own_ratio
    offs_m = m0 + tl.arange(0, BLOCK_M)
    inside = offs_m < seq.num_rows
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    first = tl.maximum(first, split * keys_of_split)
    stop = tl.minimum(stop, (split + 1) * keys_of_split)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n0 in tl.range(first, stop, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        d, _q, k = gradient_tile(
            student, teacher, masks, mean, pid, seq, b, h, head, ratio, num_heads, offs_m, offs_n,
            s_stats_ptr, t_stats_ptr, sum_ptr, inv_temperature, STUDENT, POINTWISE_FN, CONFIG,
        )  # fmt: skip
        acc = tl.dot(d.to(k.dtype), k, acc, input_precision=CONFIG.PRECISION)
    row = row_offset(bh, h, seq, masks) + offs_m
    grad = tl.load(grad_ptr + row, mask=inside, other=0.0)
    # a row that does not count adds nothing, even where its own gradient is not finite
    acc = tl.where((grad == 0.0)[:, None], 0.0, acc * (grad * dq.scale)[:, None])
    out = gradient_ptrs(dq, masks, split, b, head, seq.start_q + offs_m, BLOCK_D)
    inside = inside[:, None] & (tl.arange(0, BLOCK_D)[None, :] < SIDE.DIM)
    tl.store(out, acc.to(dq.ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_block", "stop_block"])
def mean_dk_kernel(
    student, teacher, masks, mean, first_block, stop_block, grad_ptr, s_stats_ptr, t_stats_ptr,
    sum_ptr, dk, num_blocks, num_key_blocks, num_heads, ratio, num_kv_heads, group,
    rows_of_split, inv_temperature,
    STUDENT: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes dK of a block of keys of one key head, from one share of the rows of its query
    heads.

    Only rows whose mean is in memory count. What those before them gave is in dk.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    SIDE: tl.constexpr = CONFIG.STUDENT if STUDENT else CONFIG.TEACHER
    BLOCK_D: tl.constexpr = SIDE.BLOCK_D
    own_ratio = 1
    if not STUDENT:
        own_ratio = ratio
    pid = tl.program_id(0)
    split = tl.program_id(1)
    b = (pid // num_key_blocks) // num_kv_heads
    kv = (pid // num_key_blocks) % num_kv_heads
    n0 = (pid % num_key_blocks) * BLOCK_N
    sizes = bind_sequence(masks, b, (kv * group) // own_ratio, CONFIG)
    if n0 >= sizes.num_keys:
        return
    offs_n = n0 + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in tl.range(0, group):
        head = kv * group + member
        h = head // own_ratio
        seq = bind_sequence(masks, b, h, CONFIG)
        in_memory = first_block - (b * num_heads + h) * num_blocks  # block of this head's rows
        end = in_memory + stop_block - first_block
        first, _left, _right, stop = row_range(masks, seq, n0, CONFIG)
        first = tl.maximum(first, tl.maximum(split * rows_of_split, in_memory * BLOCK_M))
        stop = tl.minimum(stop, tl.minimum((split + 1) * rows_of_split, end * BLOCK_M))
        if n0 >= seq.num_valid:
            stop = first
        for m0 in tl.range(first, stop, BLOCK_M):
            offs_m = m0 + tl.arange(0, BLOCK_M)
            d, q, _k = gradient_tile(
                student, teacher, masks, mean, m0 // BLOCK_M - in_memory, seq, b, h, head, ratio,
                num_heads, offs_m, offs_n, s_stats_ptr, t_stats_ptr, sum_ptr, inv_temperature,
                STUDENT, POINTWISE_FN, CONFIG,
            )  # fmt: skip
            row = row_offset(b * num_heads + h, h, seq, masks) + offs_m
            grad = tl.load(grad_ptr + row, mask=offs_m < seq.num_rows, other=0.0)
            d = tl.where((grad == 0.0)[:, None], 0.0, d * grad[:, None])
            acc = tl.dot(tl.trans(d.to(q.dtype)), q, acc, input_precision=CONFIG.PRECISION)
    out = gradient_ptrs(dk, masks, split, b, kv, sizes.start_k + offs_n, BLOCK_D)
    inside = (offs_n[:, None] < sizes.num_keys) & (tl.arange(0, BLOCK_D)[None, :] < SIDE.DIM)
    acc *= dk.scale
    if first_block > 0:
        acc += tl.load(out, mask=inside, other=0.0)
    tl.store(out, acc.to(dk.ptr.dtype.element_ty), mask=inside)
