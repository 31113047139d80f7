"""Implements the portable forward: each program streams tiles of keys past a block of query rows.

`forward_kernel` does everything for its rows. If there are too few query rows to fill the GPU, the
keys are split: `state_kernel` writes the row state of each split, and `merge_kernel` combines
them. For functionals with a second pass, `sums_kernel` and `merge_sums_kernel` do the same for its
sums.
"""

import triton
import triton.language as tl

from torch_streamkl.kernels.arguments import Rows, Sums
from torch_streamkl.kernels.row_state import (
    LN2,
    empty_state,
    finish,
    masked_fill_value,
    tile_coordinates,
    update,
    with_masked_keys,
)
from torch_streamkl.kernels.scores import (
    allowed_tile,
    bind_rows,
    bind_student,
    bind_teacher,
    key_range,
    student_scores,
    student_tile,
    teacher_scores,
    teacher_tile,
)


@triton.jit
def score_tile(
    rows,
    n0,
    student,
    teacher,
    masks,
    seq,
    inv_temperature,
    MASKED: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Returns teacher and student scores [BLOCK_M, BLOCK_N] in log2 units, and which keys take
    part.
    """
    offs_n = n0 + tl.arange(0, CONFIG.BLOCK_N)
    ks = student_tile(
        rows.student.k, offs_n, seq.num_keys, student.k_n, student.k_d, MASKED, CONFIG
    )
    kt = teacher_tile(
        rows.teacher.k, offs_n, seq.num_keys, teacher.k_n, teacher.k_d, MASKED, CONFIG
    )
    dot_s = tl.dot(rows.qs, tl.trans(ks), input_precision=CONFIG.PRECISION)
    dot_t = tl.dot(rows.qt, tl.trans(kt), input_precision=CONFIG.PRECISION)
    i = rows.offs[:, None]
    j = offs_n[None, :]
    inside = (i < seq.num_rows) & (j < seq.num_keys)
    s, _ = student_scores(dot_s, student, rows.student, seq, i, j, inside, inv_temperature, CONFIG)
    t, _ = teacher_scores(dot_t, teacher, rows.teacher, seq, i, j, inside, inv_temperature, CONFIG)
    allowed = inside
    if MASKED:
        allowed = allowed_tile(masks, seq, i, j, inside, CONFIG)
        s = tl.where(allowed, s, -float("inf"))
        t = tl.where(allowed, t, -float("inf"))
    return t, s, allowed


@triton.jit
def load_rows(student, teacher, masks, seq, b, h, m0, inv_temperature, CONFIG: tl.constexpr):
    """Returns the block of rows that starts at m0: queries of both sides and all that no key
    changes.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    s_bound = bind_student(student, masks, seq, b, h, inv_temperature, CONFIG)
    t_bound = bind_teacher(teacher, masks, seq, b, h, inv_temperature, CONFIG)
    offs = m0 + tl.arange(0, BLOCK_M)
    qs = student_tile(s_bound.q, offs, seq.num_rows, student.q_m, student.q_d, True, CONFIG)
    qt = teacher_tile(t_bound.q, offs, seq.num_rows, teacher.q_m, teacher.q_d, True, CONFIG)
    return Rows(qs, qt, s_bound, t_bound, offs)


@triton.jit
def state_over(
    state, start, stop, rows, student, teacher, masks, seq, inv_temperature,
    MASKED: tl.constexpr, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns the row state after the tiles in [start, stop)."""
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    for n0 in tl.range(start, stop, BLOCK_N):
        t, s, allowed = score_tile(
            rows, n0, student, teacher, masks, seq, inv_temperature, MASKED, CONFIG
        )
        state = update(state, t, s, allowed, MASKED, COEFFICIENTS, CONFIG)
    return state


@triton.jit
def state_between(
    lo,
    hi,
    m0,
    rows,
    student,
    teacher,
    masks,
    seq,
    inv_temperature,
    COEFFICIENTS: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """Returns the row state over the keys in [lo, hi), masks applied only to the tiles that need
    them.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    first, left, right, stop = key_range(masks, seq, m0, CONFIG)
    state = empty_state(BLOCK_M)
    if not CONFIG.DENSE:
        if CONFIG.HAS_LEFT or CONFIG.KEY_MASK:
            state = state_over(
                state, tl.maximum(first, lo), tl.minimum(left, hi), rows, student, teacher, masks,
                seq, inv_temperature, True, COEFFICIENTS, CONFIG,
            )  # fmt: skip
        state = state_over(
            state, tl.maximum(left, lo), tl.minimum(right, hi), rows, student, teacher, masks, seq,
            inv_temperature, False, COEFFICIENTS, CONFIG,
        )  # fmt: skip
    return state_over(
        state, tl.maximum(right, lo), tl.minimum(stop, hi), rows, student, teacher, masks, seq,
        inv_temperature, True, COEFFICIENTS, CONFIG,
    )  # fmt: skip


@triton.jit
def sums_between(
    lo, hi, m0, lse_t, lse_s, rows, student, teacher, masks, seq, inv_temperature,
    POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Runs the second pass: f, h and g summed over the keys in [lo, hi)."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: tl.constexpr = CONFIG.BLOCK_N
    first, _, _, stop = key_range(masks, seq, m0, CONFIG)
    value = tl.zeros([BLOCK_M], tl.float32)
    student_delta = tl.zeros([BLOCK_M], tl.float32)
    teacher_delta = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.float32)
    for n0 in tl.range(tl.maximum(first, lo), tl.minimum(stop, hi), BLOCK_N):
        t, s, allowed = score_tile(
            rows, n0, student, teacher, masks, seq, inv_temperature, True, CONFIG
        )
        f, h, g = deltas(t - lse_t[:, None], s - lse_s[:, None], POINTWISE_FN)
        value += tl.sum(tl.where(allowed, f, 0.0), 1)
        student_delta += tl.sum(tl.where(allowed, h, 0.0), 1)
        teacher_delta += tl.sum(tl.where(allowed, g, 0.0), 1)
        count += tl.sum(allowed.to(tl.float32), 1)
    return Sums(value, student_delta, teacher_delta, count)


@triton.jit
def deltas(log_t, log_s, POINTWISE_FN: tl.constexpr):
    """Returns f, h and g of every key from its log2-probabilities."""
    return POINTWISE_FN(tl.math.exp2(log_t), tl.math.exp2(log_s), log_t * LN2, log_s * LN2)


@triton.jit
def finite_lse(lse):
    """Replaces -inf by 0."""
    # a row without keys has -inf: its tiles hold nothing, and 0 keeps their arithmetic defined
    return tl.where(lse == -float("inf"), 0.0, lse)


@triton.jit
def with_masked_sums(
    sums, lse_t, lse_s, num_keys, fill, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr
):
    """Adds the keys that are not allowed to the second pass's sums: they all have one score."""
    log_t = masked_fill_value(sums.count, fill, CONFIG.T_SINK) - lse_t
    log_s = masked_fill_value(sums.count, fill, CONFIG.S_SINK) - lse_s
    f, h, g = sums_of_equal_keys(log_t, log_s, num_keys - sums.count, POINTWISE_FN)
    return Sums(sums.value + f, sums.h + h, sums.g + g, sums.count)


@triton.jit
def sums_of_equal_keys(log_t, log_s, count, POINTWISE_FN: tl.constexpr):
    """Returns f, h and g summed over ``count`` keys of each row with these log2-probabilities."""
    f, h, g = deltas(log_t, log_s, POINTWISE_FN)
    some = count > 0.0
    return (
        tl.where(some, f * count, 0.0), tl.where(some, h * count, 0.0),
        tl.where(some, g * count, 0.0),
    )  # fmt: skip


@triton.jit
def below_clamps(state, lse_t, lse_s, CONFIG: tl.constexpr):
    """Marks rows with a probability below a clamp, for which the closed form does not hold."""
    above = (state.low_t - lse_t) * LN2 >= CONFIG.T_FLOOR
    above &= (state.low_s - lse_s) * LN2 >= CONFIG.S_FLOOR
    empty = (state.l_t == 0.0) & (state.l_s == 0.0)
    return (above == 0) & (empty == 0)


@triton.jit
def clamps_reached(state, lse_t, lse_s, inside, CONFIG: tl.constexpr):
    """Returns whether a row inside has a probability below a clamp."""
    reached = inside & below_clamps(state, lse_t, lse_s, CONFIG)
    return tl.max(reached.to(tl.int32), 0) > 0


@triton.jit
def row_offset(bh, h, seq, masks):
    """Returns where the program's rows start in a [batch, num_heads, seqlen_q] tensor."""
    if masks.cu_seqlens_q is not None:
        return h.to(tl.int64) * masks.seqlen_q + seq.start_q
    else:
        return bh.to(tl.int64) * masks.seqlen_q


@triton.jit
def store_rows(
    value_ptr,
    s_stats_ptr,
    t_stats_ptr,
    stats_stride,
    row,
    inside,
    lse_t,
    lse_s,
    value,
    student_delta,
    teacher_delta,
):
    """Writes values and statistics of a block of rows."""
    tl.store(value_ptr + row, value, mask=inside)
    tl.store(s_stats_ptr + row, lse_s, mask=inside)
    tl.store(s_stats_ptr + stats_stride + row, student_delta, mask=inside)
    tl.store(t_stats_ptr + row, lse_t, mask=inside)
    tl.store(t_stats_ptr + stats_stride + row, teacher_delta, mask=inside)


@triton.jit
def forward_kernel(
    student, teacher, masks, value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
    num_blocks, num_heads, inv_temperature, fill,
    COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes values and statistics of a block of rows."""
    block, bh = tile_coordinates(tl.program_id(0), num_blocks, CONFIG.HAS_RIGHT)
    if CONFIG.HAS_RIGHT:
        block = num_blocks - 1 - block  # causal rows grow: the longest first
    forward_block(
        block, bh, student, teacher, masks, value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
        num_heads, inv_temperature, fill, COEFFICIENTS, POINTWISE_FN, CONFIG,
    )  # fmt: skip


@triton.jit
def recompute_kernel(
    student, teacher, masks, value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
    num_blocks, num_heads, num_works, inv_temperature, fill,
    EACH: tl.constexpr, COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Runs `forward_kernel` for the blocks [sequences, heads, num_blocks] that have a NaN value.

    A program checks EACH blocks: most have no NaN, and two programs fit a multiprocessor.
    """
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    found = 0
    for i in tl.static_range(EACH):
        work = tl.program_id(0) + i * tl.num_programs(0)
        at = tl.minimum(work, num_works - 1)
        _b, h, m0, seq = bind_rows(masks, at % num_blocks, at // num_blocks, num_heads, 1, CONFIG)
        rows = m0 + tl.arange(0, BLOCK_M)
        values = value_ptr + row_offset(at // num_blocks, h, seq, masks) + rows
        stop = tl.where(work < num_works, seq.num_rows, 0)
        value = tl.load(values, mask=rows < stop, other=0.0)
        found |= tl.max((value != value).to(tl.int32), 0) << i
    if found == 0:
        return
    for i in range(EACH):
        if (found >> i) & 1 != 0:
            work = tl.program_id(0) + i * tl.num_programs(0)
            forward_block(
                work % num_blocks, work // num_blocks, student, teacher, masks,
                value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
                num_heads, inv_temperature, fill, COEFFICIENTS, POINTWISE_FN, CONFIG,
            )  # fmt: skip


@triton.jit
def forward_block(
    block, bh, student, teacher, masks, value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
    num_heads, inv_temperature, fill,
    COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes values and statistics of one block of query rows."""
    b, h, m0, seq = bind_rows(masks, block, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    rows = load_rows(student, teacher, masks, seq, b, h, m0, inv_temperature, CONFIG)
    inside = rows.offs < seq.num_rows
    state = state_between(
        0,
        seq.num_keys,
        m0,
        rows,
        student,
        teacher,
        masks,
        seq,
        inv_temperature,
        COEFFICIENTS,
        CONFIG,
    )
    if CONFIG.FILLED:
        state = with_masked_keys(state, seq.num_keys, fill, COEFFICIENTS, CONFIG)
    lse_t, lse_s, value, student_delta, teacher_delta = finish(
        state, rows.teacher.sink, rows.student.sink, COEFFICIENTS, CONFIG
    )
    if CONFIG.TWO_PASS:
        again = True
        if CONFIG.GUARDED:
            again = clamps_reached(state, finite_lse(lse_t), finite_lse(lse_s), inside, CONFIG)
        if again:
            sums = sums_between(
                0, seq.num_keys, m0, finite_lse(lse_t), finite_lse(lse_s), rows,
                student, teacher, masks, seq, inv_temperature, POINTWISE_FN, CONFIG,
            )  # fmt: skip
            if CONFIG.FILLED:
                sums = with_masked_sums(
                    sums, lse_t, lse_s, seq.num_keys, fill, POINTWISE_FN, CONFIG
                )
            value = sums.value
            student_delta = sums.h
            teacher_delta = sums.g
            if (
                CONFIG.GUARDED
            ):  # NOTE [Rows without a clamped key] in attention/hopper/score_gradients.py
                student_delta = tl.where(
                    student_delta == COEFFICIENTS.TS,
                    COEFFICIENTS.TS * (1.0 - 2.0**-23),
                    student_delta,
                )
    out = row_offset(bh, h, seq, masks) + rows.offs
    store_rows(
        value_ptr,
        s_stats_ptr,
        t_stats_ptr,
        stats_stride,
        out,
        inside,
        lse_t,
        lse_s,
        value,
        student_delta,
        teacher_delta,
    )


@triton.jit
def store_state(ptr, field_stride, state, inside):
    """Writes the nine fields of the state of rows."""
    tl.store(ptr, state.m_t, mask=inside)
    tl.store(ptr + field_stride, state.l_t, mask=inside)
    tl.store(ptr + 2 * field_stride, state.m_s, mask=inside)
    tl.store(ptr + 3 * field_stride, state.l_s, mask=inside)
    tl.store(ptr + 4 * field_stride, state.a, mask=inside)
    tl.store(ptr + 5 * field_stride, state.b, mask=inside)
    tl.store(ptr + 6 * field_stride, state.low_t, mask=inside)
    tl.store(ptr + 7 * field_stride, state.low_s, mask=inside)
    tl.store(ptr + 8 * field_stride, state.count, mask=inside)
