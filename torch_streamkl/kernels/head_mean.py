"""Kernels for a teacher that is the mean over a group of heads (head_reduction="mean").

The mean is over probabilities, so the log-sum-exps of all heads come first (`lse_kernel`); every
other kernel rebuilds the mean tile by tile from the heads of a group. Everything is in log2 units,
as elsewhere. A gradient to one teacher head needs its share of the mean, P_r / (num_heads mean).
"""

import triton
import triton.language as tl

from torch_streamkl.kernels.attention_forward import (
    finite_lse,
    key_sums,
    row_offset,
    sums_of_equal_keys,
)
from torch_streamkl.kernels.rows import LN2, LOW, masked_level
from torch_streamkl.kernels.scores import (
    allowed_tile,
    bind_rows,
    bind_sequence,
    bind_student,
    bind_teacher,
    key_range,
    row_range,
    student_scores,
    student_tile,
    teacher_scores,
    teacher_tile,
)


@triton.jit
def side_tile(
    side, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature,
    STUDENT: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Scores of one head (-inf where not allowed), d(score)/d(dot), and the tiles of q and k."""
    i = offs_m[:, None]
    j = offs_n[None, :]
    inside = (i < seq.num_rows) & (j < seq.num_keys)
    if STUDENT:
        bound = bind_student(side, masks, seq, b, head, inv_temperature, CONFIG)
        q = student_tile(bound.q, offs_m, seq.num_rows, side.q_m, side.q_d, True, CONFIG)
        k = student_tile(bound.k, offs_n, seq.num_keys, side.k_n, side.k_d, True, CONFIG)
        dot = tl.dot(q, tl.trans(k), input_precision=CONFIG.PRECISION)
        x, slope = student_scores(dot, side, bound, seq, i, j, inside, inv_temperature, CONFIG)
    else:
        bound = bind_teacher(side, masks, seq, b, head, inv_temperature, CONFIG)
        q = teacher_tile(bound.q, offs_m, seq.num_rows, side.q_m, side.q_d, True, CONFIG)
        k = teacher_tile(bound.k, offs_n, seq.num_keys, side.k_n, side.k_d, True, CONFIG)
        dot = tl.dot(q, tl.trans(k), input_precision=CONFIG.PRECISION)
        x, slope = teacher_scores(dot, side, bound, seq, i, j, inside, inv_temperature, CONFIG)
    return tl.where(allowed, x, -float("inf")), slope, q, k


@triton.jit
def tile_mask(masks, seq, offs_m, offs_n, CONFIG: tl.constexpr):
    i = offs_m[:, None]
    j = offs_n[None, :]
    inside = (i < seq.num_rows) & (j < seq.num_keys)
    return allowed_tile(masks, seq, i, j, inside, CONFIG)


@triton.jit
def load_lse(lse_ptr, masks, seq, b, head, num_heads, offs_m):
    """Log-sum-exps of a block of rows of one head, 0 for a row without keys."""
    row = row_offset(b * num_heads + head, head, seq, masks) + offs_m
    return finite_lse(tl.load(lse_ptr + row, mask=offs_m < seq.num_rows, other=0.0))


# ------------------------------------------------------------------------------ log-sum-exps first
@triton.jit
def lse_kernel(
    side, masks, stats_ptr, num_blocks, num_heads, ratio, inv_temperature, fill,
    STUDENT: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a block of rows of one head; ``ratio`` heads share a student head's mask."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    HAS_SINK: tl.constexpr = CONFIG.S_SINK if STUDENT else CONFIG.T_SINK
    pid = tl.program_id(0)
    bh = pid // num_blocks
    b, head, m0, seq = bind_rows(masks, pid % num_blocks, bh, num_heads, ratio, CONFIG)
    if m0 >= seq.num_rows:
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    top = tl.full([BLOCK_M], LOW, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.float32)
    for n0 in tl.range(first, stop, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        allowed = tile_mask(masks, seq, offs_m, offs_n, CONFIG)
        x = side_tile(
            side, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature, STUDENT, CONFIG
        )[0]
        higher = tl.maximum(top, tl.max(x, 1))
        mass = mass * tl.math.exp2(top - higher) + tl.sum(tl.math.exp2(x - higher[:, None]), 1)
        count += tl.sum(allowed.to(tl.float32), 1)
        top = higher
    if CONFIG.FILLED:
        absent = seq.num_keys - count
        level = tl.where(absent > 0.0, masked_level(count, fill, HAS_SINK), LOW)
        higher = tl.maximum(top, level)
        mass = mass * tl.math.exp2(top - higher) + absent * tl.math.exp2(level - higher)
        top = higher
    if HAS_SINK:
        if STUDENT:
            sink = bind_student(side, masks, seq, b, head, inv_temperature, CONFIG).sink
        else:
            sink = bind_teacher(side, masks, seq, b, head, inv_temperature, CONFIG).sink
        higher = tl.maximum(top, sink)
        mass = mass * tl.math.exp2(top - higher) + tl.math.exp2(sink - higher)
        top = higher
    empty = mass == 0.0
    lse = tl.where(empty, -float("inf"), top + tl.math.log2(tl.where(empty, 1.0, mass)))
    out = stats_ptr + row_offset(bh, head, seq, masks) + offs_m
    tl.store(out, lse, mask=offs_m < seq.num_rows)


# ---------------------------------------------------------------------------------------- the mean
@triton.jit
def add_head(top, mass, x):
    """Add probabilities exp2(x) to a sum kept as mass * exp2(top): none of them may underflow."""
    higher = tl.maximum(top, x)
    return higher, mass * tl.math.exp2(top - higher) + tl.math.exp2(x - higher)


@triton.jit
def log_of_mean(top, mass, ratio):
    none = mass == 0.0
    return tl.where(none, -float("inf"), top + tl.math.log2(tl.where(none, 1.0, mass) / ratio))


@triton.jit
def mean_tile(
    teacher, masks, seq, b, h, ratio, num_heads, lse_ptr, offs_m, offs_n, allowed, inv_temperature,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """log2 of the teacher's mean probabilities [BLOCK_M, BLOCK_N] for student head h."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    top = tl.full([BLOCK_M, BLOCK_N], LOW, tl.float32)
    mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for r in tl.range(0, ratio):
        head = h * ratio + r
        x = side_tile(
            teacher, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature, False, CONFIG
        )[0]
        lse = load_lse(lse_ptr, masks, seq, b, head, num_heads, offs_m)
        top, mass = add_head(top, mass, x - lse[:, None])
    return log_of_mean(top, mass, ratio)


@triton.jit
def share_of_mean(log_head, log_mean, ratio):
    """P_r / (num_heads * mean): what one head's probability adds to the mean's logarithm."""
    return tl.math.exp2(log_head - tl.maximum(log_mean, LOW)) / ratio


# ---------------------------------------------------------------------------------------- row sums
@triton.jit
def terms_of_tile(
    student, teacher, masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, lse_s, offs_m, offs_n,
    inv_temperature, HELPER: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """f, h and g of every key (0 where not allowed), log2 of the mean, and which are allowed."""
    allowed = tile_mask(masks, seq, offs_m, offs_n, CONFIG)
    s = side_tile(
        student, masks, seq, b, h, offs_m, offs_n, allowed, inv_temperature, True, CONFIG
    )[0]
    log_t = mean_tile(
        teacher, masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, offs_m, offs_n, allowed,
        inv_temperature, CONFIG,
    )  # fmt: skip
    f, dh, dg = key_sums(log_t, s - lse_s[:, None], HELPER)
    return (
        tl.where(allowed, f, 0.0), tl.where(allowed, dh, 0.0), tl.where(allowed, dg, 0.0),
        log_t, allowed,
    )  # fmt: skip


@triton.jit
def terms_of_masked(
    masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, lse_s, offs_m, count, fill,
    HELPER: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """f, h and g summed over the keys that are not allowed, log2 of their mean, their level."""
    level_t = masked_level(count, fill, CONFIG.T_SINK)
    top = tl.zeros_like(count) + LOW
    mass = tl.zeros_like(count)
    for r in tl.range(0, ratio):
        lse = load_lse(t_stats_ptr, masks, seq, b, h * ratio + r, teacher_heads, offs_m)
        top, mass = add_head(top, mass, level_t - lse)
    log_t = log_of_mean(top, mass, ratio)
    log_s = masked_level(count, fill, CONFIG.S_SINK) - lse_s
    f, dh, dg = sums_of_equal_keys(log_t, log_s, seq.num_keys - count, HELPER)
    return f, dh, dg, log_t, level_t


@triton.jit
def mean_sums_kernel(
    student, teacher, masks, value_ptr, h_ptr, s_stats_ptr, t_stats_ptr, split_stride,
    num_blocks, num_heads, ratio, keys_of_split, inv_temperature, fill,
    HELPER: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Value and H of a block of rows of a student head, over one share of the keys."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    pid = tl.program_id(0)
    split = tl.program_id(1)
    bh = pid // num_blocks
    b, h, m0, seq = bind_rows(masks, pid % num_blocks, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    teacher_heads = num_heads * ratio
    lse_s = load_lse(s_stats_ptr, masks, seq, b, h, num_heads, offs_m)
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    first = tl.maximum(first, split * keys_of_split)
    stop = tl.minimum(stop, (split + 1) * keys_of_split)
    value = tl.zeros([BLOCK_M], tl.float32)
    h_sum = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.float32)
    for n0 in tl.range(first, stop, BLOCK_N):
        f, dh, _dg, _log_t, allowed = terms_of_tile(
            student, teacher, masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, lse_s,
            offs_m, n0 + tl.arange(0, BLOCK_N), inv_temperature, HELPER, CONFIG,
        )  # fmt: skip
        value += tl.sum(f, 1)
        h_sum += tl.sum(dh, 1)
        count += tl.sum(allowed.to(tl.float32), 1)
    if CONFIG.FILLED:  # one share: the count is that of all keys
        f, dh, _dg, _log_t, _level = terms_of_masked(
            masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, lse_s, offs_m, count, fill,
            HELPER, CONFIG,
        )  # fmt: skip
        value += f
        h_sum += dh
    row = row_offset(bh, h, seq, masks) + offs_m + split.to(tl.int64) * split_stride
    tl.store(value_ptr + row, value, mask=offs_m < seq.num_rows)
    tl.store(h_ptr + row, h_sum, mask=offs_m < seq.num_rows)


@triton.jit
def group_sums_kernel(
    student, teacher, masks, g_ptr, s_stats_ptr, t_stats_ptr,
    num_blocks, num_heads, ratio, inv_temperature, fill,
    RATIO_BLOCK: tl.constexpr, HELPER: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """G of a block of rows of each teacher head of a student head's group."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    pid = tl.program_id(0)
    bh = pid // num_blocks
    b, h, m0, seq = bind_rows(masks, pid % num_blocks, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    inside = offs_m < seq.num_rows
    teacher_heads = num_heads * ratio
    lse_s = load_lse(s_stats_ptr, masks, seq, b, h, num_heads, offs_m)
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    members = tl.arange(0, RATIO_BLOCK)
    count = tl.zeros([BLOCK_M], tl.float32)
    g_sums = tl.zeros([BLOCK_M, RATIO_BLOCK], tl.float32)
    for n0 in tl.range(first, stop, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        _f, _dh, dg, log_t, allowed = terms_of_tile(
            student, teacher, masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, lse_s,
            offs_m, offs_n, inv_temperature, HELPER, CONFIG,
        )  # fmt: skip
        count += tl.sum(allowed.to(tl.float32), 1)
        for r in tl.range(0, ratio):
            head = h * ratio + r
            x = side_tile(
                teacher, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature,
                False, CONFIG,
            )[0]  # fmt: skip
            lse = load_lse(t_stats_ptr, masks, seq, b, head, teacher_heads, offs_m)
            share = tl.sum(share_of_mean(x - lse[:, None], log_t, ratio) * dg, 1)
            g_sums += tl.where(members[None, :] == r, share[:, None], 0.0)
    if CONFIG.FILLED:
        _f, _dh, dg, log_t, level_t = terms_of_masked(
            masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, lse_s, offs_m, count, fill,
            HELPER, CONFIG,
        )  # fmt: skip
        for r in tl.range(0, ratio):
            lse = load_lse(t_stats_ptr, masks, seq, b, h * ratio + r, teacher_heads, offs_m)
            share = share_of_mean(level_t - lse, log_t, ratio) * dg
            g_sums += tl.where(members[None, :] == r, share[:, None], 0.0)
    heads = h * ratio + members
    base = row_offset(b * teacher_heads + heads, heads, seq, masks)
    out = g_ptr + base[None, :] + offs_m[:, None]
    tl.store(out, g_sums, mask=inside[:, None] & (members[None, :] < ratio))


# --------------------------------------------------------------------------------------- gradients
@triton.jit
def mean_gradient_tile(
    student, teacher, masks, seq, b, h, head, ratio, num_heads, offs_m, offs_n,
    s_stats_ptr, t_stats_ptr, sum_ptr, inv_temperature,
    STUDENT: tl.constexpr, HELPER: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """d(value)/d(q.k) up to the scale, with the tiles of q and k that it belongs to.

    It is that of student head h, or of teacher head ``head`` of its group.
    """
    teacher_heads = num_heads * ratio
    inside = offs_m < seq.num_rows
    allowed = tile_mask(masks, seq, offs_m, offs_n, CONFIG)
    s, s_slope, qs, ks = side_tile(
        student, masks, seq, b, h, offs_m, offs_n, allowed, inv_temperature, True, CONFIG
    )
    log_s = s - load_lse(s_stats_ptr, masks, seq, b, h, num_heads, offs_m)[:, None]
    log_t = mean_tile(
        teacher, masks, seq, b, h, ratio, teacher_heads, t_stats_ptr, offs_m, offs_n, allowed,
        inv_temperature, CONFIG,
    )  # fmt: skip
    _f, dh, dg = HELPER(tl.math.exp2(log_t), tl.math.exp2(log_s), log_t * LN2, log_s * LN2)
    if STUDENT:
        row = row_offset(b * num_heads + h, h, seq, masks) + offs_m
        key_sum = tl.load(sum_ptr + row, mask=inside, other=0.0)
        d = tl.where(allowed, dh - tl.math.exp2(log_s) * key_sum[:, None], 0.0)
        if CONFIG.S_SOFTCAP:
            d *= s_slope
        return d, qs, ks
    else:
        x, t_slope, qt, kt = side_tile(
            teacher, masks, seq, b, head, offs_m, offs_n, allowed, inv_temperature, False, CONFIG
        )
        log_head = x - load_lse(t_stats_ptr, masks, seq, b, head, teacher_heads, offs_m)[:, None]
        row = row_offset(b * teacher_heads + head, head, seq, masks) + offs_m
        key_sum = tl.load(sum_ptr + row, mask=inside, other=0.0)
        d = share_of_mean(log_head, log_t, ratio) * dg - tl.math.exp2(log_head) * key_sum[:, None]
        d = tl.where(allowed, d, 0.0)
        if CONFIG.T_SOFTCAP:
            d *= t_slope
        return d, qt, kt


@triton.jit
def mean_dq_kernel(
    student, teacher, masks, grad_ptr, s_stats_ptr, t_stats_ptr, sum_ptr,
    dq_ptr, dq_split, dq_b, dq_h, dq_m, dq_scale, num_blocks, num_heads, ratio, keys_of_split,
    inv_temperature,
    STUDENT: tl.constexpr, HELPER: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """dQ of a block of rows of one head of one side, from one share of the keys."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    DIM: tl.constexpr = CONFIG.S_DIM if STUDENT else CONFIG.T_DIM
    BLOCK_D: tl.constexpr = CONFIG.S_BLOCK_D if STUDENT else CONFIG.T_BLOCK_D
    side_heads = num_heads
    own_ratio = 1
    if not STUDENT:
        side_heads = num_heads * ratio
        own_ratio = ratio
    pid = tl.program_id(0)
    split = tl.program_id(1)
    bh = pid // num_blocks
    b, head, m0, seq = bind_rows(masks, pid % num_blocks, bh, side_heads, own_ratio, CONFIG)
    h = head // own_ratio
    if m0 >= seq.num_rows:
        return
    offs_m = m0 + tl.arange(0, BLOCK_M)
    inside = offs_m < seq.num_rows
    first, _left, _right, stop = key_range(masks, seq, m0, CONFIG)
    first = tl.maximum(first, split * keys_of_split)
    stop = tl.minimum(stop, (split + 1) * keys_of_split)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n0 in tl.range(first, stop, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        d, _q, k = mean_gradient_tile(
            student, teacher, masks, seq, b, h, head, ratio, num_heads, offs_m, offs_n,
            s_stats_ptr, t_stats_ptr, sum_ptr, inv_temperature, STUDENT, HELPER, CONFIG,
        )  # fmt: skip
        acc = tl.dot(d.to(k.dtype), k, acc, input_precision=CONFIG.PRECISION)
    row = row_offset(b * num_heads + h, h, seq, masks) + offs_m
    grad = tl.load(grad_ptr + row, mask=inside, other=0.0)
    acc *= (grad * dq_scale)[:, None]
    offs_d = tl.arange(0, BLOCK_D)
    if masks.cu_seqlens_q is not None:
        b = b * 0
    out = dq_ptr + split.to(tl.int64) * dq_split
    out += b.to(tl.int64) * dq_b + head.to(tl.int64) * dq_h
    out += (seq.start_q + offs_m).to(tl.int64)[:, None] * dq_m + offs_d[None, :]
    tl.store(out, acc.to(dq_ptr.dtype.element_ty), mask=inside[:, None] & (offs_d[None, :] < DIM))


@triton.jit
def mean_dk_kernel(
    student, teacher, masks, grad_ptr, s_stats_ptr, t_stats_ptr, sum_ptr,
    dk_ptr, dk_split, dk_b, dk_h, dk_n, dk_scale, num_blocks, num_heads, ratio, num_kv_heads,
    group, rows_of_split, inv_temperature,
    STUDENT: tl.constexpr, HELPER: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys of one key head, from one share of the rows of its query heads."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    DIM: tl.constexpr = CONFIG.S_DIM if STUDENT else CONFIG.T_DIM
    BLOCK_D: tl.constexpr = CONFIG.S_BLOCK_D if STUDENT else CONFIG.T_BLOCK_D
    own_ratio = 1
    if not STUDENT:
        own_ratio = ratio
    pid = tl.program_id(0)
    split = tl.program_id(1)
    b = (pid // num_blocks) // num_kv_heads
    kv = (pid // num_blocks) % num_kv_heads
    n0 = (pid % num_blocks) * BLOCK_N
    sizes = bind_sequence(masks, b, (kv * group) // own_ratio, CONFIG)
    if n0 >= sizes.num_keys:
        return
    offs_n = n0 + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in tl.range(0, group):
        head = kv * group + member
        h = head // own_ratio
        seq = bind_sequence(masks, b, h, CONFIG)
        first, _left, _right, stop = row_range(masks, seq, n0, CONFIG)
        first = tl.maximum(first, split * rows_of_split)
        stop = tl.minimum(stop, (split + 1) * rows_of_split)
        if n0 >= seq.num_valid:
            stop = first
        for m0 in tl.range(first, stop, BLOCK_M):
            offs_m = m0 + tl.arange(0, BLOCK_M)
            d, q, _k = mean_gradient_tile(
                student, teacher, masks, seq, b, h, head, ratio, num_heads, offs_m, offs_n,
                s_stats_ptr, t_stats_ptr, sum_ptr, inv_temperature,
                STUDENT, HELPER, CONFIG,
            )  # fmt: skip
            row = row_offset(b * num_heads + h, h, seq, masks) + offs_m
            grad = tl.load(grad_ptr + row, mask=offs_m < seq.num_rows, other=0.0)
            acc = tl.dot(
                tl.trans((d * grad[:, None]).to(q.dtype)), q, acc, input_precision=CONFIG.PRECISION
            )
    acc *= dk_scale
    offs_d = tl.arange(0, BLOCK_D)
    if masks.cu_seqlens_q is not None:
        b = b * 0
    out = dk_ptr + split.to(tl.int64) * dk_split
    out += b.to(tl.int64) * dk_b + kv.to(tl.int64) * dk_h
    out += (sizes.start_k + offs_n).to(tl.int64)[:, None] * dk_n + offs_d[None, :]
    inside = (offs_n[:, None] < sizes.num_keys) & (offs_d[None, :] < DIM)
    tl.store(out, acc.to(dk_ptr.dtype.element_ty), mask=inside)
