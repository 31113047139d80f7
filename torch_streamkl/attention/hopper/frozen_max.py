"""Reduces tiles of keys in one warp group of the Hopper forward whose programs have one block.

NOTE [Frozen row max]
The tiles that need a mask, and at least one tile, go through `row_state.update` with running
maxima. The others are summed relative to the maxima found before them (the bases), which are
frozen: no maxima, no rescaling, no exchange between threads. With x the score less the base, a sum
of 2^x over at most 2^23 keys is as good as one relative to the true maximum if it is from 2^-80 to
2^100: no term overflowed, nor does the sum times its logarithm, and what terms below 2^-126 lose
is less than 2^23 2^-126 in all, 2^-23 of the sum. The moment, a sum of 2^x times a difference d of
scores, then loses at most 2^-23 max|d|, as much as rounding d itself does, and is good if it is
not above 2^100 either. A row that fails gets NaN for its value, and the launch that follows
(`triton.forward.recompute_kernel`) recomputes the blocks with such rows, and no others.

The sums of squares are those of `row_state`, NOTE [Squares], with a frozen ratio of the row sums.
Squares need row sums closer to 1, and a ratio not far above the final one: the sum of (D + delta
e_s)^2 is what remains of numbers as large as delta^2 times the sum of e_s^2, and loses 2^-24 of
these. A row in which they are more than 16 times what remains is recomputed.

NOTE [Frozen row max with a bias]
A bias may hold a mask, so the first pairs of tiles may hold nothing that a row sees. Running
maxima therefore go on until every row of the warp group has met a score of a usual size. From then
on a bias is cut off at SMALLEST_BIAS, so that 0 times the difference of two scores is 0. That is
right if both sides have one bias (SAME_BIAS), because a key far below on one side is so on the
other; the bias is then read once for both. Two different biases keep running maxima.

NOTE [Clamps]
COEFFICIENTS is what a clamped divergence is for a row without a probability below a clamp (NOTE
[One pass or two] in program/divergences.py). So the lowest scores of a clamped side are kept,
and a row with a probability below its clamp gets NaN, as a row that fails does.

NOTE [Wide tiles]
With head_dims above 128 shared memory has no room for pairs of tiles: a stage holds one tile of
one side, and stages of the two sides alternate. A warp group has one matmul in flight, which needs
one tile. The schedule is the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from torch_streamkl.attention.hopper.biases import bias_of_rows
from torch_streamkl.attention.hopper.forward_config import Sums
from torch_streamkl.attention.hopper.pipeline import (
    release,
    release_load,
    start_load,
    wait_for,
    wait_for_load,
)
from torch_streamkl.attention.hopper.softmax import (
    add_other,
    add_weight,
    empty,
    sums_of_state,
    with_sums,
    without_doubtful,
)
from torch_streamkl.attention.hopper.tile_scheduler import keys_met, steps_without_mask
from torch_streamkl.attention.hopper.warp_groups import (
    add,
    before_wait,
    column_of,
    exp2,
    lane_sum,
    start_half,
    start_pair,
    zero_of_pair,
)
from torch_streamkl.kernels.row_state import moment, update
from torch_streamkl.kernels.scores import in_window

USUAL = gl.constexpr(-512.0)  # maxima below may be those of keys that a bias masks
SMALLEST_BIAS = gl.constexpr(-1.0e20)


@gluon.jit
def bias_of_tile(bias, place, first, zero, MASKED: gl.constexpr, BIASED: gl.constexpr):
    """Loads a side's bias of the tile whose first key is `first`."""
    if BIASED:
        block = place.block
        return bias_of_rows(
            bias, block.b, block.h, place.first_row, first,
            block.seq.num_rows, block.seq.num_keys, zero, MASKED,
        )  # fmt: skip
    else:
        return 0.0


@gluon.jit
def update_by_tile(state, o, w, first, place, zero, MASKED: gl.constexpr, TASK: gl.constexpr):
    """Updates the running state by a tile, whose matmuls are in flight, if MASKED by elements."""
    block, sides = place.block, place.sides
    CONFIG: gl.constexpr = TASK.CONFIG
    COEFFICIENTS: gl.constexpr = TASK.COEFFICIENTS
    other_bias = bias_of_tile(sides.other.bias, place, first, zero, MASKED, TASK.OTHER.BIASED)
    weight_bias = bias_of_tile(sides.weight.bias, place, first, zero, MASKED, TASK.WEIGHT.BIASED)
    o, w = warpgroup_mma_wait(0, deps=[o, w])
    o = o * sides.other.scale
    w = w * sides.weight.scale
    if TASK.OTHER.BIASED:
        o += other_bias.to(gl.float32) * sides.bias_scale
    if TASK.WEIGHT.BIASED:
        w += weight_bias.to(gl.float32) * sides.bias_scale
    columns: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    cols = gl.expand_dims(first + gl.arange(0, CONFIG.BLOCK_N, layout=columns), 0)
    allowed = cols < block.seq.num_valid
    if MASKED:
        allowed = in_window(
            allowed, block.window, block.seq, gl.expand_dims(place.rows, 1), cols,
            CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT,
        )  # fmt: skip
        o = gl.where(allowed, o, -float("inf"))
        w = gl.where(allowed, w, -float("inf"))
    if TASK.WEIGHT_IS_TEACHER:
        return update(state, w, o, allowed, True, COEFFICIENTS, CONFIG)
    else:
        return update(state, o, w, allowed, True, COEFFICIENTS, CONFIG)


@gluon.jit
def update_pairs(
    state, tiles, place, start, stop, zero, TASK: gl.constexpr, MASKED: gl.constexpr = True
):
    """Updates the running state by the pairs from start to stop, MASKED element by element."""
    CONFIG: gl.constexpr = TASK.CONFIG
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    block = place.block
    first_key, stop_key = keys_met(block.window, block.seq, place.first_row, CONFIG)
    for i in range(start, stop):
        wait_for(tiles, i, True, TASK.SLOTS)
        for second in range(2):
            half = 1 - second
            first = (2 * (block.stop_pair - 1 - i) + half) * BLOCK_N
            if (first < stop_key) & (first + BLOCK_N > first_key):
                o = start_half(place.oq, tiles.other_k, i, half, zero, TASK.SLOTS)
                w = start_half(place.wq, tiles.weight_k, i, half, zero, TASK.SLOTS)
                state = update_by_tile(state, o, w, first, place, zero, MASKED, TASK)
        release(tiles, i, TASK.SLOTS)
    return state


@gluon.jit
def update_wide(state, tiles, place, start, stop, zero, TASK: gl.constexpr):
    """Updates the running state by the tiles from start to stop: NOTE [Wide tiles]."""
    CONFIG: gl.constexpr = TASK.CONFIG
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    block = place.block
    first_key, stop_key = keys_met(block.window, block.seq, place.first_row, CONFIG)
    for i in range(start, stop):
        wait_for_load(tiles, 2 * i, True, TASK.SLOTS)
        wait_for_load(tiles, 2 * i + 1, True, TASK.SLOTS)
        first = (block.stop_pair - 1 - i) * BLOCK_N
        if (first < stop_key) & (first + BLOCK_N > first_key):
            o = start_load(place.oq, tiles.other_k, 2 * i, zero, TASK.SLOTS)
            w = start_load(place.wq, tiles.weight_k, 2 * i + 1, zero, TASK.SLOTS)
            state = update_by_tile(state, o, w, first, place, zero, True, TASK)
        release_load(tiles, 2 * i, TASK.SLOTS)
        release_load(tiles, 2 * i + 1, TASK.SLOTS)
    return state


@gluon.jit
def update_steps(state, tiles, place, start, stop, zero, TASK: gl.constexpr):
    """Updates the running state by some pairs, or tiles if WIDE, masked element by element."""
    if TASK.WIDE:
        return update_wide(state, tiles, place, start, stop, zero, TASK)
    else:
        return update_pairs(state, tiles, place, start, stop, zero, TASK)


@gluon.jit
def sum_pairs(sums, tiles, place, start, stop, zero, TASK: gl.constexpr):
    """Sums over the pairs from start to stop, which need no mask: NOTE [Pairs at once]."""
    zeros = zero_of_pair(zero)
    sides = place.sides
    for i in range(start, stop):
        wait_for(tiles, i, True, TASK.SLOTS)
        o = start_pair(place.oq, tiles.other_k, i, zeros, TASK.SLOTS)
        w = start_pair(place.wq, tiles.weight_k, i, zeros, TASK.SLOTS)
        o = warpgroup_mma_wait(1, deps=[o])
        o = o * sides.other.scale - column_of(sums.base_o, zeros)
        sum_o = before_wait(add(sums.other, lane_sum(exp2(o))))
        w = warpgroup_mma_wait(0, deps=[w])
        release(tiles, i, TASK.SLOTS)
        w = w * sides.weight.scale - column_of(sums.base_w, zeros)
        ew = exp2(w)
        terms = moment(w, o, TASK.WEIGHT.COEFFICIENT, TASK.OTHER.COEFFICIENT)
        sum_w = add(sums.weight, lane_sum(ew))
        mom = add(sums.moment, lane_sum(ew * terms))
        sums = Sums(
            sum_o, sum_w, mom, sums.low_o, sums.low_w, sums.base_o, sums.base_w, sums.ratio
        )  # fmt: skip
    return sums


@gluon.jit
def bias_of_half(place, i, zero, HALF: gl.constexpr, TASK: gl.constexpr):
    """Loads the bias of both sides for a half of pair i, whose keys exist; past the end, any."""
    if TASK.SAME_BIAS:
        first = (2 * (place.block.stop_pair - 1 - i) + HALF) * zero.shape[1]
        bias = place.sides.other.bias
        return bias_of_tile(bias, place, gl.maximum(first, 0), zero, False, True)
    else:
        return 0.0


@gluon.jit
def relative(x, bias, scale, base, sides, TASK: gl.constexpr):
    """Returns scores less the frozen row max, from products."""
    base = gl.expand_dims(base, 1)
    if TASK.SAME_BIAS:
        return x * scale + (bias * sides.bias_scale - base)
    else:
        return x * scale - base


@gluon.jit
def step(o, bias, sums, i, more, tiles, place, zero, HALF: gl.constexpr, TASK: gl.constexpr):
    """Adds a half of pair i, whose products of `other` are o, and returns those of the next half.

    Its bias is `bias`; the next one's is read under this one's arithmetic.
    """
    sides = place.sides
    w = start_half(place.wq, tiles.weight_k, i, HALF, zero, TASK.SLOTS)
    next_bias = bias_of_half(place, i if HALF == 1 else i + 1, zero, 1 - HALF, TASK)
    if TASK.SAME_BIAS:
        bias = gl.maximum(bias.to(gl.float32), SMALLEST_BIAS)
    o = relative(o, bias, sides.other.scale, sums.base_o, sides, TASK)
    sum_o, low_o = add_other(o, sums, False, TASK)
    w = warpgroup_mma_wait(0, deps=[w])
    if HALF == 1:
        next_o = start_half(place.oq, tiles.other_k, i, 0, zero, TASK.SLOTS)
    else:
        wait_for(tiles, i + 1, more, TASK.SLOTS)
        next_o = start_half(place.oq, tiles.other_k, i + 1, 1, zero, TASK.SLOTS)
        # Only now: the arrive and the bar.sync before it are then off the path from a finished
        # matmul to the next.
        release(tiles, i, TASK.SLOTS)
    w = relative(w, bias, sides.weight.scale, sums.base_w, sides, TASK)
    sums = add_weight(o, w, sum_o, low_o, sums, False, TASK)
    o = warpgroup_mma_wait(0, deps=[next_o])
    return o, next_bias, sums


@gluon.jit
def sum_halves(sums, tiles, place, start, stop, zero, TASK: gl.constexpr):
    """Sums over the pairs from start to stop, which need no mask, a half at a time.

    One matmul is in flight at a time, so that the registers are enough for three warp groups.
    """
    wait_for(tiles, start, True, TASK.SLOTS)
    o = start_half(place.oq, tiles.other_k, start, 1, zero, TASK.SLOTS)
    bias = bias_of_half(place, start, zero, 1, TASK)
    o = warpgroup_mma_wait(0, deps=[o])
    for i in range(start, stop):
        more = i + 1 < stop
        o, bias, sums = step(o, bias, sums, i, more, tiles, place, zero, 1, TASK)
        o, bias, sums = step(o, bias, sums, i, more, tiles, place, zero, 0, TASK)
    return sums


@gluon.jit
def sum_wide(sums, tiles, place, start, stop, zero, TASK: gl.constexpr):
    """Sums over the tiles from start to stop, which need no mask: NOTE [Wide tiles]."""
    sides = place.sides
    wait_for_load(tiles, 2 * start, True, TASK.SLOTS)
    o = start_load(place.oq, tiles.other_k, 2 * start, zero, TASK.SLOTS)
    o = warpgroup_mma_wait(0, deps=[o])
    for i in range(start, stop):
        wait_for_load(tiles, 2 * i + 1, True, TASK.SLOTS)
        w = start_load(place.wq, tiles.weight_k, 2 * i + 1, zero, TASK.SLOTS)
        # Only now: as in `step`
        release_load(tiles, 2 * i, TASK.SLOTS)
        o = relative(o, 0.0, sides.other.scale, sums.base_o, sides, TASK)
        sum_o, low_o = add_other(o, sums, False, TASK)
        w = warpgroup_mma_wait(0, deps=[w])
        wait_for_load(tiles, 2 * i + 2, i + 1 < stop, TASK.SLOTS)
        next_o = start_load(place.oq, tiles.other_k, 2 * i + 2, zero, TASK.SLOTS)
        release_load(tiles, 2 * i + 1, TASK.SLOTS)
        w = relative(w, 0.0, sides.weight.scale, sums.base_w, sides, TASK)
        sums = add_weight(o, w, sum_o, low_o, sums, False, TASK)
        o = warpgroup_mma_wait(0, deps=[next_o])
    return sums


@gluon.jit
def has_bases(state, rows, num_rows):
    """Returns whether every row has met a score of a usual size.

    NOTE [Frozen row max with a bias].
    """
    lowest = gl.where(rows < num_rows, gl.minimum(state.m_t, state.m_s), 0.0)
    return gl.min(lowest, 0) > USUAL


@gluon.jit
def reduce_block(tiles, place, zero, TASK: gl.constexpr):
    """Returns the state of a warp group's rows after every tile of a block."""
    CONFIG: gl.constexpr = TASK.CONFIG
    BIASED: gl.constexpr = CONFIG.STUDENT.BIAS or CONFIG.TEACHER.BIAS
    block, rows = place.block, place.rows
    STEP: gl.constexpr = CONFIG.BLOCK_N if TASK.WIDE else 2 * CONFIG.BLOCK_N
    start, stop = steps_without_mask(block, place.first_row, STEP, CONFIG)
    layout: gl.constexpr = rows.type.layout
    state = empty(CONFIG.BLOCK_M, layout)
    state = update_steps(state, tiles, place, 0, start, zero, TASK)
    if BIASED and not TASK.SAME_BIAS:
        state = update_pairs(state, tiles, place, start, stop, zero, TASK, False)
        start = stop
    if TASK.SAME_BIAS:
        is_ready = has_bases(state, rows, block.seq.num_rows)
        while (start < stop) & (is_ready == 0):
            state = update_pairs(state, tiles, place, start, start + 1, zero, TASK, False)
            start += 1
            is_ready = has_bases(state, rows, block.seq.num_rows)
    if (not BIASED or TASK.SAME_BIAS) and start < stop:
        sums = sums_of_state(state, zero, TASK)
        if TASK.WIDE:
            sums = sum_wide(sums, tiles, place, start, stop, zero, TASK)
        elif TASK.PAIRS:  # of divergences without clamps
            sums = sum_pairs(sums, tiles, place, start, stop, zero, TASK)
        else:
            sums = sum_halves(sums, tiles, place, start, stop, zero, TASK)
        state = without_doubtful(with_sums(state, sums, TASK), TASK)
    if CONFIG.HAS_LEFT:
        state = update_steps(state, tiles, place, stop, block.num_pairs, zero, TASK)
    return state
