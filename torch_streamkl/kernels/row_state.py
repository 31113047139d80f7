"""Implements row states and their closed form in Triton: divergences/row_state.py, in base 2.

Scores arrive multiplied by log2(e), so that exponentials are exp2. Moments are in the same unit,
and `finish` returns values in nats. ``LOW`` replaces -inf in maxima: differences to it stay
finite, so a row that has met no key yet needs no special case.
"""

import triton
import triton.language as tl

from torch_streamkl.kernels.arguments import State

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1.0e30)
FAR = tl.constexpr(1.0e3)  # nats, as in divergences/row_state.py

# NOTE [Squares]
# Of SQUARES the state has the sums of D^2, D e_s and e_s^2 over keys, with e_t and e_s the
# exponentials relative to the maxima and D = e_t - ratio e_s. The ratio is that of the row sums,
# l_t to l_s, so that in the end D is P - S times the teacher's row sum. Another ratio or other
# maxima are another linear combination of e_t and e_s. Sums of e_t^2, e_t e_s and e_s^2 would do
# as well, but for a student near its teacher the rest of their difference is rounding.

# NOTE [Order of programs]
# LPT order with an L2 swizzle: under a causal mask blocks differ in work, and programs start in
# the order of their number. The longest blocks of all heads come first, so that short ones fill
# the end; but only of SWIZZLE_HEADS heads at a time, whose keys stay in the L2 cache together.
SWIZZLE_HEADS = tl.constexpr(8)


@triton.jit
def tile_coordinates(pid, num_blocks, INTERLEAVED: tl.constexpr):
    """Returns block, batch and head of a program: NOTE [Order of programs] if INTERLEAVED."""
    if INTERLEAVED:
        first = pid // (num_blocks * SWIZZLE_HEADS) * SWIZZLE_HEADS
        num_heads = tl.minimum(tl.num_programs(0) // num_blocks - first, SWIZZLE_HEADS)
        inside = pid - first * num_blocks
        return inside // num_heads, first + inside % num_heads
    else:
        return pid % num_blocks, pid // num_blocks


@triton.jit
def moment(dt, ds, CT: tl.constexpr, CS: tl.constexpr):
    """Returns CT dt + CS ds, with the common cases spelled out."""
    if CT == -CS:
        return (dt - ds) * CT
    elif CT == 0.0:
        return ds * CS
    elif CS == 0.0:
        return dt * CT
    else:
        return dt * CT + ds * CS


@triton.jit
def weighted_sum(weight, x, MASKED: tl.constexpr):
    """Sums weight * x over keys; a weight of 0 times an infinite x counts 0."""
    product = weight * x
    if MASKED:
        product = tl.where(weight > 0.0, product, 0.0)
    return tl.sum(product, 1)


@triton.jit
def rebased(mom, row_sum, alpha, shift_t, shift_s, CT: tl.constexpr, CS: tl.constexpr):
    """Returns a moment after its maxima moved by -shift; alpha = exp2(shift) of its weighting
    side.
    """
    moved = (mom + row_sum * moment(shift_t, shift_s, CT, CS)) * alpha
    return tl.where(alpha == 0.0, 0.0, moved)


@triton.jit
def row_sum_ratio(l_t, l_s):
    """Returns l_t / l_s; rows without keys have none."""
    return l_t / tl.where(l_s == 0.0, 1.0, l_s)


@triton.jit
def rebased_squares(a, b, c, alpha_t, alpha_s, ratio, to_ratio):
    """Moves the sums of squares to new row maxima (factors alpha) and a new ratio of row sums."""
    delta = alpha_t * ratio - to_ratio * alpha_s
    return (
        alpha_t * (alpha_t * a + 2.0 * delta * b) + delta * delta * c,
        alpha_s * (alpha_t * b + delta * c),
        alpha_s * alpha_s * c,
    )


@triton.jit
def empty_state(BLOCK: tl.constexpr):
    """Returns the state of rows that have met no key."""
    low = tl.full([BLOCK], LOW, tl.float32)
    zero = tl.zeros([BLOCK], tl.float32)
    high = tl.full([BLOCK], float("inf"), tl.float32)
    return State(low, zero, low, zero, zero, zero, high, high, zero)


@triton.jit
def update(
    state, t, s, allowed, MASKED: tl.constexpr, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr
):
    """Returns the state after one tile of scores t, s [BLOCK_M, BLOCK_N] (-inf where not
    allowed).
    """
    m_t = tl.maximum(state.m_t, tl.max(t, 1))
    m_s = tl.maximum(state.m_s, tl.max(s, 1))
    dt = t - m_t[:, None]
    ds = s - m_s[:, None]
    et = tl.math.exp2(dt)
    es = tl.math.exp2(ds)
    shift_t = state.m_t - m_t
    shift_s = state.m_s - m_s
    alpha_t = tl.math.exp2(shift_t)
    alpha_s = tl.math.exp2(shift_s)
    a = state.a
    b = state.b
    if COEFFICIENTS.TT != 0.0 or COEFFICIENTS.TS != 0.0:
        a = rebased(a, state.l_t, alpha_t, shift_t, shift_s, COEFFICIENTS.TT, COEFFICIENTS.TS)
        a += weighted_sum(et, moment(dt, ds, COEFFICIENTS.TT, COEFFICIENTS.TS), MASKED)
    if COEFFICIENTS.ST != 0.0 or COEFFICIENTS.SS != 0.0:
        b = rebased(b, state.l_s, alpha_s, shift_t, shift_s, COEFFICIENTS.ST, COEFFICIENTS.SS)
        b += weighted_sum(es, moment(dt, ds, COEFFICIENTS.ST, COEFFICIENTS.SS), MASKED)
    l_t = state.l_t * alpha_t + tl.sum(et, 1)
    l_s = state.l_s * alpha_s + tl.sum(es, 1)
    low_t = state.low_t
    low_s = state.low_s
    count = state.count
    if CONFIG.GUARDED:
        if MASKED:
            low_t = tl.minimum(low_t, tl.min(tl.where(allowed, t, float("inf")), 1))
            low_s = tl.minimum(low_s, tl.min(tl.where(allowed, s, float("inf")), 1))
        else:
            low_t = tl.minimum(low_t, tl.min(t, 1))
            low_s = tl.minimum(low_s, tl.min(s, 1))
    if CONFIG.FILLED:
        if MASKED:
            count += tl.sum(allowed.to(tl.float32), 1)
        else:
            count += t.shape[1]
    if COEFFICIENTS.SQUARES != 0.0:
        ratio = row_sum_ratio(l_t, l_s)
        before = row_sum_ratio(state.l_t, state.l_s)
        a, b, count = rebased_squares(a, b, count, alpha_t, alpha_s, before, ratio)
        d = et - ratio[:, None] * es
        a += tl.sum(d * d, 1)
        b += tl.sum(d * es, 1)
        count += tl.sum(es * es, 1)
    return State(m_t, l_t, m_s, l_s, a, b, low_t, low_s, count)


@triton.jit
def merge(x, y, COEFFICIENTS: tl.constexpr):
    """Returns the state of the union of two disjoint sets of keys."""
    m_t = tl.maximum(x.m_t, y.m_t)
    m_s = tl.maximum(x.m_s, y.m_s)
    xt = x.m_t - m_t
    xs = x.m_s - m_s
    yt = y.m_t - m_t
    ys = y.m_s - m_s
    ext = tl.math.exp2(xt)
    exs = tl.math.exp2(xs)
    eyt = tl.math.exp2(yt)
    eys = tl.math.exp2(ys)
    if COEFFICIENTS.SQUARES != 0.0:
        l_t = x.l_t * ext + y.l_t * eyt
        l_s = x.l_s * exs + y.l_s * eys
        ratio = row_sum_ratio(l_t, l_s)
        xa, xb, xc = rebased_squares(
            x.a, x.b, x.count, ext, exs, row_sum_ratio(x.l_t, x.l_s), ratio
        )
        ya, yb, yc = rebased_squares(
            y.a, y.b, y.count, eyt, eys, row_sum_ratio(y.l_t, y.l_s), ratio
        )
        return State(m_t, l_t, m_s, l_s, xa + ya, xb + yb, x.low_t, x.low_s, xc + yc)
    return State(
        m_t,
        x.l_t * ext + y.l_t * eyt,
        m_s,
        x.l_s * exs + y.l_s * eys,
        rebased(x.a, x.l_t, ext, xt, xs, COEFFICIENTS.TT, COEFFICIENTS.TS)
        + rebased(y.a, y.l_t, eyt, yt, ys, COEFFICIENTS.TT, COEFFICIENTS.TS),
        rebased(x.b, x.l_s, exs, xt, xs, COEFFICIENTS.ST, COEFFICIENTS.SS)
        + rebased(y.b, y.l_s, eys, yt, ys, COEFFICIENTS.ST, COEFFICIENTS.SS),
        tl.minimum(x.low_t, y.low_t),
        tl.minimum(x.low_s, y.low_s),
        x.count + y.count,
    )  # fmt: skip


@triton.jit
def masked_fill_value(count, fill, HAS_SINK: tl.constexpr):
    """Returns the score (log2 units) of the keys a row may not see.

    Without a sink, a row that sees none may as well have 0 (reference.py).
    """
    level = count * 0.0 + fill * LOG2E
    if not HAS_SINK:
        level = tl.where(count > 0.0, level, 0.0)
    return level


@triton.jit
def with_masked_keys(state, num_keys, fill, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr):
    """Adds the keys that are not allowed to a state, at the score they were filled with."""
    absent = num_keys - state.count
    fill_t = masked_fill_value(state.count, fill, CONFIG.TEACHER.SINK)
    fill_s = masked_fill_value(state.count, fill, CONFIG.STUDENT.SINK)
    if CONFIG.FILL_VANISHES:  # NOTE [Masked keys far below] in divergences/row_state.py
        far = ((state.m_t - fill_t) * LN2 >= FAR) & ((state.m_s - fill_s) * LN2 >= FAR)
        absent = tl.where(far, 0.0, absent)
    present = absent > 0.0
    m_t = tl.where(present, fill_t, LOW)
    m_s = tl.where(present, fill_s, LOW)
    zero = state.count * 0.0
    low = tl.where(present, -float("inf"), float("inf"))
    return merge(state, State(m_t, absent, m_s, absent, zero, zero, low, low, zero), COEFFICIENTS)


@triton.jit
def denominator(row_sum, m, sink, HAS_SINK: tl.constexpr):
    """Returns the denominator relative to the maximum, its log2, and the lse in log2 units."""
    total = row_sum
    if HAS_SINK:
        total = row_sum + tl.math.exp2(sink - m)
    empty = total == 0.0
    log_normalizer = tl.where(empty, 0.0, tl.math.log2(tl.where(empty, 1.0, total)))
    return total, log_normalizer, tl.where(empty, -float("inf"), m + log_normalizer)


@triton.jit
def finish(state, sink_t, sink_s, COEFFICIENTS: tl.constexpr, CONFIG: tl.constexpr):
    """Returns lse_t and lse_s in log2 units, and value and deltas in nats, as the torch twin."""
    if CONFIG.TEACHER.SINK or CONFIG.STUDENT.SINK:
        # a sink above every key becomes the maximum: exp2(sink - m) must not overflow
        zero = state.l_t * 0.0
        fill_t = zero + LOW
        fill_s = zero + LOW
        # one of -inf is none: 0 keys at a distance of -inf would be NaN
        if CONFIG.TEACHER.SINK:
            fill_t = tl.maximum(zero + sink_t, LOW)
        if CONFIG.STUDENT.SINK:
            fill_s = tl.maximum(zero + sink_s, LOW)
        state = merge(
            state,
            State(fill_t, zero, fill_s, zero, zero, zero, state.low_t, state.low_s, zero),
            COEFFICIENTS,
        )
    total_t, log_normalizer_t, lse_t = denominator(
        state.l_t, state.m_t, sink_t, CONFIG.TEACHER.SINK
    )
    total_s, log_normalizer_s, lse_s = denominator(
        state.l_s, state.m_s, sink_s, CONFIG.STUDENT.SINK
    )
    # Where P is nearly S, one logarithm: two that are nearly equal would leave their roundings.
    # Elsewhere a ratio may overflow, and their difference is good.
    ratio = total_t / tl.where(total_s == 0.0, 1.0, total_s)
    near = (ratio > 0.5) & (ratio < 2.0) & (total_s > 0.0)
    log_normalizer_diff = tl.where(
        near, tl.math.log2(tl.where(near, ratio, 1.0)), log_normalizer_t - log_normalizer_s
    )
    scale_t = tl.math.exp2(-log_normalizer_t)
    scale_s = tl.math.exp2(-log_normalizer_s)
    row_sum_t = total_row_sum(state.l_t, scale_t, CONFIG.TEACHER.SINK)
    row_sum_s = total_row_sum(state.l_s, scale_s, CONFIG.STUDENT.SINK)
    e_t = row_sum_t * 0.0
    e_s = row_sum_s * 0.0
    if COEFFICIENTS.TT != 0.0 or COEFFICIENTS.TS != 0.0:
        e_t = expectation(
            state.a,
            state.l_t,
            state.l_s,
            scale_t,
            log_normalizer_t,
            log_normalizer_s,
            log_normalizer_diff,
            COEFFICIENTS.TT,
            COEFFICIENTS.TS,
        )
    if COEFFICIENTS.ST != 0.0 or COEFFICIENTS.SS != 0.0:
        e_s = expectation(
            state.b,
            state.l_s,
            state.l_t,
            scale_s,
            log_normalizer_t,
            log_normalizer_s,
            log_normalizer_diff,
            COEFFICIENTS.ST,
            COEFFICIENTS.SS,
        )
    value = e_t + e_s + COEFFICIENTS.T * row_sum_t + COEFFICIENTS.S * row_sum_s
    h = e_s + COEFFICIENTS.TS * row_sum_t + (COEFFICIENTS.SS + COEFFICIENTS.S) * row_sum_s
    g = e_t + (COEFFICIENTS.TT + COEFFICIENTS.T) * row_sum_t + COEFFICIENTS.ST * row_sum_s
    if COEFFICIENTS.SQUARES != 0.0:  # sums of D^2 and D S with D = P - S
        value = COEFFICIENTS.SQUARES * state.a * scale_t * scale_t
        h = -2.0 * COEFFICIENTS.SQUARES * state.b * scale_t * scale_s
        g = 2.0 * value - h
    return lse_t, lse_s, value, h, g


@triton.jit
def total_row_sum(row_sum, scale, HAS_SINK: tl.constexpr):
    """Sums a row's probabilities: without a sink 1 to the bit, or 0 without keys."""
    if HAS_SINK:
        return row_sum * scale
    else:
        return tl.where(row_sum > 0.0, 1.0, row_sum)  # NaN stays


@triton.jit
def expectation(
    mom,
    row_sum,
    other_row_sum,
    scale,
    log_normalizer_t,
    log_normalizer_s,
    log_normalizer_diff,
    CT: tl.constexpr,
    CS: tl.constexpr,
):
    """Returns E[CT logP + CS logS] in nats under the side whose moment this is.

    ``log_normalizer_diff`` is log_normalizer_t - log_normalizer_s, which is known better than its
    terms.
    """
    if CT == 0.0 or CS == 0.0:
        log_normalizer = moment(log_normalizer_t, log_normalizer_s, CT, CS)
    elif CT == -CS:
        log_normalizer = log_normalizer_diff * CT
    else:
        log_normalizer = log_normalizer_diff * CT + log_normalizer_s * (CT + CS)
    e = LN2 * (mom - row_sum * log_normalizer) * scale
    # An infinite moment times an exponential that underflowed is NaN where the row is infinite.
    # Scores that are NaN themselves leave NaN in the row sums too.
    lost = (mom != mom) & (row_sum == row_sum) & (other_row_sum == other_row_sum)
    e = tl.where(lost, float("inf"), e)
    return tl.where(row_sum == 0.0, 0.0, e)


@triton.jit
def score_gradient(
    log_t, log_s, delta,
    STUDENT: tl.constexpr, POINTWISE: tl.constexpr, COEFFICIENTS: tl.constexpr,
    POINTWISE_FN: tl.constexpr,
):  # fmt: skip
    """Returns d(value)/d(score) of one side from log2-probabilities."""
    P = tl.math.exp2(log_t)
    S = tl.math.exp2(log_s)
    own = S if STUDENT else P
    if POINTWISE:
        _, h, g = POINTWISE_FN(P, S, log_t * LN2, log_s * LN2)
        return (h if STUDENT else g) - own * delta
    gain = -delta
    if STUDENT:
        if COEFFICIENTS.ST != 0.0 or COEFFICIENTS.SS != 0.0:
            gain += weighted_logs(S, log_t, log_s, COEFFICIENTS.ST, COEFFICIENTS.SS) + (
                COEFFICIENTS.SS + COEFFICIENTS.S
            )
        d = own * gain
        if COEFFICIENTS.TS != 0.0:
            d += COEFFICIENTS.TS * P
    else:
        if COEFFICIENTS.TT != 0.0 or COEFFICIENTS.TS != 0.0:
            gain += weighted_logs(P, log_t, log_s, COEFFICIENTS.TT, COEFFICIENTS.TS) + (
                COEFFICIENTS.TT + COEFFICIENTS.T
            )
        d = own * gain
        if COEFFICIENTS.ST != 0.0:
            d += COEFFICIENTS.ST * S
    return d


@triton.jit
def weighted_logs(weight, log_t, log_s, CT: tl.constexpr, CS: tl.constexpr):
    """Returns weighted log-probabilities."""
    # CT logP + CS logS in nats, and 0 where the weight before it is 0
    if CT == -CS:
        x = (log_t - log_s) * (CT * LN2)
    else:
        x = log_t * (CT * LN2) + log_s * (CS * LN2)
    return tl.where(weight == 0.0, 0.0, x)
