"""Implements the portable forward: each program streams tiles of keys past a block of query rows.

`forward_kernel` does everything for its rows. If there are too few query rows to fill the GPU, the
keys are split: `state_kernel` writes the row state of each split, and `merge_kernel` combines
them. For functionals with a second pass, `sums_kernel` and `merge_sums_kernel` do the same for its
sums.
"""

import triton
import triton.language as tl

from torch_streamkl.kernels.arguments import Problem, Rows, Sums
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
    bind_side,
    key_range,
    key_tile,
    query_tile,
    transformed,
)


@triton.jit
def score_tile(rows, n0, problem, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """Returns teacher and student scores [BLOCK_M, BLOCK_N] in log2 units, and which keys take
    part.
    """
    student, teacher, masks, seq, inv_temperature = problem
    offs_n = n0 + tl.arange(0, CONFIG.BLOCK_N)
    ks = key_tile(student, rows.student, offs_n, seq, MASKED, True, CONFIG)
    kt = key_tile(teacher, rows.teacher, offs_n, seq, MASKED, False, CONFIG)
    dot_s = tl.dot(rows.qs, tl.trans(ks), input_precision=CONFIG.PRECISION)
    dot_t = tl.dot(rows.qt, tl.trans(kt), input_precision=CONFIG.PRECISION)
    i = rows.offs[:, None]
    j = offs_n[None, :]
    inside = (i < seq.num_rows) & (j < seq.num_keys)
    s, _ = transformed(
        dot_s, student, rows.student, seq, i, j, inside, inv_temperature, True, CONFIG
    )
    t, _ = transformed(
        dot_t, teacher, rows.teacher, seq, i, j, inside, inv_temperature, False, CONFIG
    )
    allowed = inside
    if MASKED:
        allowed = allowed_tile(masks, seq, i, j, inside, CONFIG)
        s = tl.where(allowed, s, -float("inf"))
        t = tl.where(allowed, t, -float("inf"))
    return t, s, allowed


@triton.jit
def bind_sides(problem, b, h, CONFIG: tl.constexpr):
    """Moves the pointers of both sides to query head h."""
    student, teacher, masks, seq, inv_temperature = problem
    return (
        bind_side(student, masks, seq, b, h, inv_temperature, True, CONFIG),
        bind_side(teacher, masks, seq, b, h, inv_temperature, False, CONFIG),
    )


@triton.jit
def load_queries(problem, s_bound, t_bound, offs, CHECK: tl.constexpr, CONFIG: tl.constexpr):
    """Returns a block of rows: queries of both sides and all that no key changes."""
    qs = query_tile(problem.student, s_bound, offs, problem.seq, CHECK, True, CONFIG)
    qt = query_tile(problem.teacher, t_bound, offs, problem.seq, CHECK, False, CONFIG)
    return Rows(qs, qt, s_bound, t_bound, offs)


@triton.jit
def load_rows(problem, b, h, m0, CONFIG: tl.constexpr):
    """Returns the block of rows of a head that starts at m0."""
    s_bound, t_bound = bind_sides(problem, b, h, CONFIG)
    offs = m0 + tl.arange(0, CONFIG.BLOCK_M)
    return load_queries(problem, s_bound, t_bound, offs, True, CONFIG)


@triton.jit
def state_over(
    state, start, stop, rows, problem,
    MASKED: tl.constexpr, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Returns the row state after the tiles in [start, stop)."""
    for n0 in tl.range(start, stop, CONFIG.BLOCK_N):
        t, s, allowed = score_tile(rows, n0, problem, MASKED, CONFIG)
        state = update(state, t, s, allowed, MASKED, COEFFICIENTS, CONFIG)
    return state


@triton.jit
def state_between(lo, hi, m0, rows, problem, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr):
    """Returns the row state over the keys in [lo, hi), masks applied only to the tiles that need
    them.
    """
    first, left, right, stop = key_range(problem.masks, problem.seq, m0, CONFIG)
    state = empty_state(CONFIG.BLOCK_M)
    if not CONFIG.DENSE:
        if CONFIG.HAS_LEFT or CONFIG.KEY_MASK:
            state = state_over(
                state, tl.maximum(first, lo), tl.minimum(left, hi), rows, problem,
                True, COEFFICIENTS, CONFIG,
            )  # fmt: skip
        state = state_over(
            state, tl.maximum(left, lo), tl.minimum(right, hi), rows, problem,
            False, COEFFICIENTS, CONFIG,
        )  # fmt: skip
    return state_over(
        state, tl.maximum(right, lo), tl.minimum(stop, hi), rows, problem,
        True, COEFFICIENTS, CONFIG,
    )  # fmt: skip


@triton.jit
def sums_between(
    lo, hi, m0, lse_t, lse_s, rows, problem, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr
):
    """Runs the second pass: f, h and g summed over the keys in [lo, hi)."""
    BLOCK_M: tl.constexpr = CONFIG.BLOCK_M
    first, _, _, stop = key_range(problem.masks, problem.seq, m0, CONFIG)
    value = tl.zeros([BLOCK_M], tl.float32)
    student_delta = tl.zeros([BLOCK_M], tl.float32)
    teacher_delta = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.float32)
    for n0 in tl.range(tl.maximum(first, lo), tl.minimum(stop, hi), CONFIG.BLOCK_N):
        t, s, allowed = score_tile(rows, n0, problem, True, CONFIG)
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
    log_t = masked_fill_value(sums.count, fill, CONFIG.TEACHER.SINK) - lse_t
    log_s = masked_fill_value(sums.count, fill, CONFIG.STUDENT.SINK) - lse_s
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
    above = (state.low_t - lse_t) * LN2 >= CONFIG.TEACHER.FLOOR
    above &= (state.low_s - lse_s) * LN2 >= CONFIG.STUDENT.FLOOR
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
def store_rows(outputs, row, inside, lse_t, lse_s, value, student_delta, teacher_delta):
    """Writes values and statistics of a block of rows."""
    tl.store(outputs.value + row, value, mask=inside)
    tl.store(outputs.s_stats + row, lse_s, mask=inside)
    tl.store(outputs.s_stats + outputs.stats_stride + row, student_delta, mask=inside)
    tl.store(outputs.t_stats + row, lse_t, mask=inside)
    tl.store(outputs.t_stats + outputs.stats_stride + row, teacher_delta, mask=inside)


@triton.jit
def forward_kernel(
    student, teacher, masks, outputs, num_blocks, num_heads, inv_temperature, fill,
    COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes values and statistics of a block of rows."""
    block, bh = tile_coordinates(tl.program_id(0), num_blocks, CONFIG.HAS_RIGHT)
    if CONFIG.HAS_RIGHT:
        block = num_blocks - 1 - block  # causal rows grow: the longest first
    forward_block(
        block, bh, student, teacher, masks, outputs, num_heads, inv_temperature, fill,
        COEFFICIENTS, POINTWISE_FN, CONFIG,
    )  # fmt: skip


@triton.jit
def recompute_kernel(
    student, teacher, masks, outputs, num_blocks, num_heads, num_works, inv_temperature, fill,
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
        values = outputs.value + row_offset(at // num_blocks, h, seq, masks) + rows
        stop = tl.where(work < num_works, seq.num_rows, 0)
        value = tl.load(values, mask=rows < stop, other=0.0)
        found |= tl.max((value != value).to(tl.int32), 0) << i
    if found == 0:
        return
    for i in range(EACH):
        if (found >> i) & 1 != 0:
            work = tl.program_id(0) + i * tl.num_programs(0)
            forward_block(
                work % num_blocks, work // num_blocks, student, teacher, masks, outputs,
                num_heads, inv_temperature, fill, COEFFICIENTS, POINTWISE_FN, CONFIG,
            )  # fmt: skip


@triton.jit
def forward_block(
    block, bh, student, teacher, masks, outputs, num_heads, inv_temperature, fill,
    COEFFICIENTS: tl.constexpr, POINTWISE_FN: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes values and statistics of one block of query rows."""
    b, h, m0, seq = bind_rows(masks, block, bh, num_heads, 1, CONFIG)
    if m0 >= seq.num_rows:
        return
    problem = Problem(student, teacher, masks, seq, inv_temperature)
    rows = load_rows(problem, b, h, m0, CONFIG)
    inside = rows.offs < seq.num_rows
    state = state_between(0, seq.num_keys, m0, rows, problem, COEFFICIENTS, CONFIG)
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
                0, seq.num_keys, m0, finite_lse(lse_t), finite_lse(lse_s), rows, problem,
                POINTWISE_FN, CONFIG,
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
    store_rows(outputs, out, inside, lse_t, lse_s, value, student_delta, teacher_delta)


@triton.jit
def store_fields(ptr, field_stride, fields, inside, NUM: tl.constexpr):
    """Writes what there is of rows, one field after the other."""
    for i in tl.static_range(NUM):
        tl.store(ptr + i * field_stride, fields[i], mask=inside)
