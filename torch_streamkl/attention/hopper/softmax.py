"""Sums rows in the Hopper forward, relative to a frozen row max: NOTE in frozen_max.py.

Each thread of a warp group sums its columns of a tile; threads exchange nothing before a row ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_streamkl.attention.hopper.forward_config import Sums
from torch_streamkl.attention.hopper.warp_groups import (
    before_wait,
    before_wait_pair,
    before_wait_three,
    exp2,
    lane_lowest,
    lane_sum,
)
from torch_streamkl.kernels.arguments import State
from torch_streamkl.kernels.row_state import LOW, moment, rebased_squares, row_sum_ratio

SMALLEST_SUM = gl.constexpr(2.0**-80)
LARGEST = gl.constexpr(2.0**100)  # of a sum and of a moment
SMALLEST_SQUARED = gl.constexpr(2.0**-20)  # sums whose terms are squared
LARGEST_SQUARED = gl.constexpr(2.0**40)
MOST_CANCELLED = gl.constexpr(16.0)  # times what is left of a sum of squares
FAR = gl.constexpr(-1.0e30)  # what a key that a row does not see has for a score


@gluon.jit
def empty(BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """Returns row_state.empty_state in a layout."""
    low = gl.full([BLOCK_M], LOW, gl.float32, layout=layout)
    zero = gl.full([BLOCK_M], 0.0, gl.float32, layout=layout)
    return State(low, zero, low, zero, zero, zero, -low, -low, zero)


@gluon.jit
def per_thread(x, none):
    """Broadcasts x of a row to each thread that shares it; `none` (zeros) gives the shape."""
    rows = gl.convert_layout(x, gl.SliceLayout(1, none.type.layout))
    return none + gl.expand_dims(rows, 1)


@gluon.jit
def start_sums(o, w, keys, sides, zero):
    """Returns empty sums relative to the largest of the first scores; `keys` are the existing
    ones.
    """
    none = lane_sum(zero)
    base_o = gl.max(gl.where(keys, o * sides.other.scale, -float("inf")), 1)
    base_w = gl.max(gl.where(keys, w * sides.weight.scale, -float("inf")), 1)
    return Sums(none, none, none, none, none, base_o, base_w, base_o)


@gluon.jit
def sums_of_state(state, zero, TASK: gl.constexpr):
    """Returns empty sums relative to a state's running maxima, which they freeze."""
    m_o = state.m_s if TASK.WEIGHT_IS_TEACHER else state.m_t
    m_w = state.m_t if TASK.WEIGHT_IS_TEACHER else state.m_s
    base_o = gl.where(m_o == LOW, 0.0, m_o)
    base_w = gl.where(m_w == LOW, 0.0, m_w)
    none = lane_sum(zero)
    low_o = state.low_s if TASK.WEIGHT_IS_TEACHER else state.low_t
    low_w = state.low_t if TASK.WEIGHT_IS_TEACHER else state.low_s
    low_o = per_thread(low_o - base_o, none)
    low_w = per_thread(low_w - base_w, none)
    ratio = base_o
    if TASK.SQUARES:
        low_o = none
        low_w = none
        ratio = row_sum_ratio(state.l_t, state.l_s)
    return Sums(none, none, none, low_o, low_w, base_o, base_w, ratio)


@gluon.jit
def add_other(o, sums, MASKED: gl.constexpr, TASK: gl.constexpr):
    """Returns the sum of `other` with a tile's scores, and the lowest; MASKED ones are FAR."""
    sum_o = sums.other + lane_sum(exp2(o))
    if TASK.OTHER.CLAMPED and MASKED:
        return before_wait(sum_o), before_wait(lane_lowest(sums.low_o, gl.where(o == FAR, 0.0, o)))
    elif TASK.OTHER.CLAMPED:
        return before_wait_pair(sum_o, lane_lowest(sums.low_o, o))
    else:
        return before_wait(sum_o), sums.low_o


@gluon.jit
def add_weight(o, w, sum_o, low_o, sums, MASKED: gl.constexpr, TASK: gl.constexpr):
    """Adds a tile's scores of `weight` and its moment, and returns the sums."""
    low_w = sums.low_w
    if TASK.WEIGHT.CLAMPED:
        low_w = lane_lowest(low_w, gl.where(w == FAR, 0.0, w) if MASKED else w)
    if TASK.WEIGHT.CLAMPED and MASKED:
        low_w = before_wait(low_w)
    ew = exp2(w)
    sum_w = sums.weight + lane_sum(ew)
    if TASK.SQUARES:  # the student is `weight`
        d = exp2(o) - gl.expand_dims(sums.ratio, 1) * ew
        mom = sums.moment + lane_sum(d * d)
        low_o, low_w = before_wait_pair(low_o + lane_sum(d * ew), low_w + lane_sum(ew * ew))
    else:
        terms = moment(w, o, TASK.WEIGHT.COEFFICIENT, TASK.OTHER.COEFFICIENT)
        mom = sums.moment + lane_sum(ew * terms)
    if TASK.WEIGHT.CLAMPED and not MASKED:
        mom, sum_w, low_w = before_wait_three(mom, sum_w, low_w)
    else:
        mom, sum_w = before_wait_pair(mom, sum_w)
    return Sums(sum_o, sum_w, mom, low_o, low_w, sums.base_o, sums.base_w, sums.ratio)


@gluon.jit
def with_row_sums(sums, other, weight):
    """Returns the sums with these sums of 2^x."""
    return Sums(
        other, weight, sums.moment, sums.low_o, sums.low_w, sums.base_o, sums.base_w, sums.ratio
    )


@gluon.jit
def with_sums(state, sums, TASK: gl.constexpr):
    """Adds sums relative to its own maxima to a state."""
    row_layout: gl.constexpr = state.l_t.type.layout
    sum_o = gl.convert_layout(gl.sum(sums.other, 1), row_layout)
    sum_w = gl.convert_layout(gl.sum(sums.weight, 1), row_layout)
    mom = gl.convert_layout(gl.sum(sums.moment, 1), row_layout)
    if TASK.SQUARES:
        cross = gl.convert_layout(gl.sum(sums.low_o, 1), row_layout)
        square = gl.convert_layout(gl.sum(sums.low_w, 1), row_layout)
        l_t = state.l_t + sum_o
        l_s = state.l_s + sum_w
        ratio = row_sum_ratio(l_t, l_s)
        a, b, c = rebased_squares(
            state.a + mom, state.b + cross, state.count + square, 1.0, 1.0, sums.ratio, ratio
        )
        delta = sums.ratio - ratio
        a = gl.where(delta * delta * c <= MOST_CANCELLED * a, a, float("nan"))
        return State(
            sums.base_o, l_t, sums.base_w, l_s, a, b, state.low_t, state.low_s, c
        )  # fmt: skip
    # row_min <= frozen max, except for rows with no key yet (max = 0); hence the min().
    low_o = gl.minimum(gl.convert_layout(gl.min(sums.low_o, 1), row_layout), 0.0) + sums.base_o
    low_w = gl.minimum(gl.convert_layout(gl.min(sums.low_w, 1), row_layout), 0.0) + sums.base_w
    if TASK.WEIGHT_IS_TEACHER:
        return State(
            sums.base_w, state.l_t + sum_w, sums.base_o, state.l_s + sum_o, state.a + mom,
            state.b, low_w, low_o, state.count,
        )  # fmt: skip
    else:
        return State(
            sums.base_o, state.l_t + sum_o, sums.base_w, state.l_s + sum_w, state.a,
            state.b + mom, low_o, low_w, state.count,
        )  # fmt: skip


@gluon.jit
def is_good(state, SQUARES: gl.constexpr):
    """Marks rows whose sums relative to a frozen row max are good: NOTE [Frozen row max]."""
    smallest = SMALLEST_SQUARED if SQUARES else SMALLEST_SUM
    largest = LARGEST_SQUARED if SQUARES else LARGEST
    good = (state.l_t >= smallest) & (state.l_t <= largest)
    good &= (state.l_s >= smallest) & (state.l_s <= largest)
    return good & ((gl.abs(state.a) <= LARGEST) & (gl.abs(state.b) <= LARGEST))


@gluon.jit
def without_doubtful(state, TASK: gl.constexpr):
    """Puts NaN into rows whose sums may be wrong."""
    good = is_good(state, TASK.SQUARES)
    return State(
        state.m_t, gl.where(good, state.l_t, float("nan")), state.m_s, state.l_s,
        state.a, state.b, state.low_t, state.low_s, state.count,
    )  # fmt: skip


@gluon.jit
def state_of(sums, rows, some, TASK: gl.constexpr):
    """Returns the state of rows with these sums, with NaN where they may be wrong.

    Rows without `some` key have sums of 0.
    """
    layout: gl.constexpr = rows.type.layout
    state = with_sums(empty(TASK.CONFIG.BLOCK_M, layout), sums, TASK)
    l_t = gl.where(is_good(state, False), state.l_t, float("nan"))
    return State(
        gl.where(some, state.m_t, LOW), gl.where(some, l_t, 0.0),
        gl.where(some, state.m_s, LOW), gl.where(some, state.l_s, 0.0),
        gl.where(some, state.a, 0.0), gl.where(some, state.b, 0.0),
        state.low_t, state.low_s, state.count,
    )  # fmt: skip
