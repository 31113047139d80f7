"""Implements the Hopper forward: one warp loads, two to four warp groups of 64 rows each reduce.

`weight` is the weighting distribution, whose probabilities weight the moment, and `other` is the
reference distribution: the teacher and the student of forward KL. Tiles of keys are loaded in
pairs, which halves the barriers. They come from the last key to the first, so that those that need
a mask come first. Every warp group runs on its own; only the barriers of the stages synchronise
them. The last blocks are split along the keys if that helps: NOTE [Split-KV] in split_kv.py.

NOTE [Pairs of a block]
Key lengths, a causal mask and a window decide which pairs of tiles a block meets, and which of
them every row of a warp group sees whole. `scores.keys_of_rows` finds both ranges once. The first
pair and all pairs outside of the second range are masked element by element: those at the right
edge come first, and those at the left edge of a window last.

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
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from torch_streamkl.attention.hopper.biases import bias_of_rows
from torch_streamkl.attention.hopper.packed import packed_block
from torch_streamkl.attention.hopper.split_kv import block_of, finish_rows, tiles_of_split
from torch_streamkl.attention.hopper.warp_groups import (
    GROUP_REGISTERS,
    NUM_WARPS,
    add,
    async_load,
    before_wait,
    before_wait_pair,
    before_wait_three,
    column_of,
    exp2,
    flat,
    lane_lowest,
    lane_sum,
    load_pair,
    phase_of,
    slots_of_pairs,
    stage_of,
    start_half,
    start_pair,
    without_offset,
    zero_of_pair,
)
from torch_streamkl.attention.triton.forward import row_offset, store_state
from torch_streamkl.kernels.arguments import MaskArgs, State
from torch_streamkl.kernels.row_state import (
    LOW,
    moment,
    rebased_squares,
    row_sum_ratio,
    tile_coordinates,
    update,
)
from torch_streamkl.kernels.scores import bind_sequence, in_window, keys_of_rows

SMALLEST_SUM = gl.constexpr(2.0**-80)
LARGEST = gl.constexpr(2.0**100)  # of a sum and of a moment
SMALLEST_SQUARED = gl.constexpr(2.0**-20)  # sums whose terms are squared
LARGEST_SQUARED = gl.constexpr(2.0**40)
MOST_CANCELLED = gl.constexpr(16.0)  # times what is left of a sum of squares
LOADER_REGISTERS = gl.constexpr(24)
USUAL = gl.constexpr(-512.0)  # maxima below may be those of keys that a bias masks
SMALLEST_BIAS = gl.constexpr(-1.0e20)


class Tiles(NamedTuple):
    """Holds shared memory: queries of each warp group, stages of pairs of key tiles, barriers."""

    other_q: Any
    weight_q: Any
    other_k: Any
    weight_k: Any
    q_bar: Any
    full: Any  # by stage, for both sides
    empty: Any


class Block(NamedTuple):
    """Holds the block of rows of a program, and the range of key tiles that it meets."""

    b: Any  # in the tensors: packed ones have one batch element
    h: Any
    bh: Any
    m0: Any
    num_pairs: Any  # of tiles of the program
    stop_pair: Any  # after the last of them
    beyond: Any  # number of the program among those that are parts, negative before them
    masks: Any  # arguments.MaskArgs
    seq: Any  # arguments.Sequence
    other_scale: Any
    weight_scale: Any
    other_bias: Any  # biases.Bias
    weight_bias: Any
    bias_scale: Any


class Outputs(NamedTuple):
    """Holds pointers to values, statistics and the states of splits."""

    value: Any
    s_stats: Any
    t_stats: Any
    stats_stride: Any
    state: Any  # where a part writes the state of its head's row 0, fields apart by field_stride
    field_stride: Any


class Sums(NamedTuple):
    """Holds sums per thread, relative to the frozen row max: sums of 2^x, moment, lowest scores.

    For squares, the sum of D^2 takes the place of the moment, and the sums of D e_s and e_s^2 the
    place of the lowest scores.
    """

    other: Any
    weight: Any
    moment: Any
    low_o: Any  # kept for a side with a clamp only
    low_w: Any
    base_o: Any
    base_w: Any
    ratio: Any  # of the row sums, of squares


@gluon.jit
def load_all(
    other_q, other_k, weight_q, weight_k, tiles, block, other_h, weight_h,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp (producer): queries once, then every pair into an empty stage."""
    mbarrier.expect(tiles.q_bar, GROUPS * (other_q.block_type.nbytes + weight_q.block_type.nbytes))
    for group in gl.static_range(GROUPS):
        row = block.seq.start_q + block.m0 + group * CONFIG.BLOCK_M
        async_load(other_q, [block.b, block.h, row, 0], tiles.q_bar, tiles.other_q.index(group))
        async_load(weight_q, [block.b, block.h, row, 0], tiles.q_bar, tiles.weight_q.index(group))
    for i in range(block.num_pairs):
        slot = stage_of(i, SLOTS)
        full = tiles.full.index(slot)
        mbarrier.wait(tiles.empty.index(slot), phase_of(i, SLOTS) ^ 1)
        TILES: gl.constexpr = 2 * CONFIG.BLOCK_N // other_k.block_type.shape[2]
        mbarrier.expect(full, TILES * (other_k.block_type.nbytes + weight_k.block_type.nbytes))
        row = block.seq.start_k + 2 * (block.stop_pair - 1 - i) * CONFIG.BLOCK_N
        load_pair(other_k, (block.b, other_h, row), tiles.other_k, i, full, SLOTS)
        load_pair(weight_k, (block.b, weight_h, row), tiles.weight_k, i, full, SLOTS)


@gluon.jit
def wait_for(tiles, i, more, SLOTS: gl.constexpr):
    """Waits until pair i is in its stage; `more` is false past the end.

    Past the end, matmuls read whatever the stage holds, and nobody reads the result.
    """
    mbarrier.wait(tiles.full.index(stage_of(i, SLOTS)), phase_of(i, SLOTS), pred=more)


@gluon.jit
def release(tiles, i, SLOTS: gl.constexpr):
    """Releases the stage of pair i: this warp group has read both sides."""
    mbarrier.arrive(tiles.empty.index(stage_of(i, SLOTS)), count=1)


@gluon.jit
def pairs_met(masks, seq, m0, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Finds the first pair, and their number, with a key that one of the ROWS from m0 sees."""
    PAIR: gl.constexpr = 2 * CONFIG.BLOCK_N
    first_key, _, _, stop_key = keys_of_rows(
        masks, seq, m0, ROWS, PAIR, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, False
    )
    return first_key // PAIR, (stop_key - first_key + PAIR - 1) // PAIR


@gluon.jit
def keys_met(masks, seq, first_row, CONFIG: gl.constexpr):
    """Finds the range of keys that some row of the warp group at first_row sees."""
    first_key = seq.num_valid * 0
    stop_key = seq.num_valid
    if CONFIG.HAS_LEFT:
        first_key = first_row + seq.offset - masks.window_left
    if CONFIG.HAS_RIGHT:
        last_row = first_row + CONFIG.BLOCK_M - 1
        stop_key = gl.minimum(stop_key, last_row + seq.offset + masks.window_right + 1)
    return first_key, stop_key


@gluon.jit
def update_pairs(
    state, oq, wq, tiles, block, first_row, rows, start, stop, zero,
    WEIGHT_IS_TEACHER: gl.constexpr,
    SLOTS: gl.constexpr, COEFFICIENTS: gl.constexpr, CONFIG: gl.constexpr,
    MASKED: gl.constexpr = True,
):  # fmt: skip
    """Updates the running state by the pairs from start to stop, MASKED element by element."""
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    OTHER_BIAS: gl.constexpr = CONFIG.S_BIAS if WEIGHT_IS_TEACHER else CONFIG.T_BIAS
    WEIGHT_BIAS: gl.constexpr = CONFIG.T_BIAS if WEIGHT_IS_TEACHER else CONFIG.S_BIAS
    col_layout: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    masks, seq = block.masks, block.seq
    first_key, stop_key = keys_met(masks, seq, first_row, CONFIG)
    for i in range(start, stop):
        wait_for(tiles, i, True, SLOTS)
        for second in range(2):
            half = 1 - second
            first = (2 * (block.stop_pair - 1 - i) + half) * BLOCK_N
            if (first < stop_key) & (first + BLOCK_N > first_key):
                o = start_half(oq, tiles.other_k, i, half, zero, SLOTS)
                w = start_half(wq, tiles.weight_k, i, half, zero, SLOTS)
                if OTHER_BIAS:
                    other_bias = bias_of_rows(
                        block.other_bias, block.b, block.h, first_row, first,
                        seq.num_rows, seq.num_keys, zero, MASKED,
                    )  # fmt: skip
                if WEIGHT_BIAS:
                    weight_bias = bias_of_rows(
                        block.weight_bias, block.b, block.h, first_row, first,
                        seq.num_rows, seq.num_keys, zero, MASKED,
                    )  # fmt: skip
                o, w = warpgroup_mma_wait(0, deps=[o, w])
                o = o * block.other_scale
                w = w * block.weight_scale
                if OTHER_BIAS:
                    o += other_bias.to(gl.float32) * block.bias_scale
                if WEIGHT_BIAS:
                    w += weight_bias.to(gl.float32) * block.bias_scale
                cols = gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=col_layout), 0)
                allowed = cols < seq.num_valid
                if MASKED:
                    allowed = in_window(
                        allowed, masks, seq, gl.expand_dims(rows, 1), cols,
                        CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT,
                    )  # fmt: skip
                    o = gl.where(allowed, o, -float("inf"))
                    w = gl.where(allowed, w, -float("inf"))
                if WEIGHT_IS_TEACHER:
                    state = update(state, w, o, allowed, True, COEFFICIENTS, CONFIG)
                else:
                    state = update(state, o, w, allowed, True, COEFFICIENTS, CONFIG)
        release(tiles, i, SLOTS)
    return state


@gluon.jit
def pair_step(
    sums, i, oq, wq, tiles, block, zeros,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Adds pair i to the sums."""
    wait_for(tiles, i, True, SLOTS)
    o = start_pair(oq, tiles.other_k, i, zeros, SLOTS)
    w = start_pair(wq, tiles.weight_k, i, zeros, SLOTS)
    o = warpgroup_mma_wait(1, deps=[o])
    o = o * block.other_scale - column_of(sums.base_o, zeros)
    sum_o = before_wait(add(sums.other, lane_sum(exp2(o))))
    w = warpgroup_mma_wait(0, deps=[w])
    release(tiles, i, SLOTS)
    w = w * block.weight_scale - column_of(sums.base_w, zeros)
    ew = exp2(w)
    sum_w = add(sums.weight, lane_sum(ew))
    mom = add(sums.moment, lane_sum(ew * moment(w, o, C_WEIGHT, C_OTHER)))
    return Sums(
        sum_o, sum_w, mom, sums.low_o, sums.low_w, sums.base_o, sums.base_w, sums.ratio
    )  # fmt: skip


@gluon.jit
def sum_pairs(
    sums, oq, wq, tiles, block, start, stop, zero,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Sums over the pairs from start to stop, which need no mask: NOTE [Pairs at once]."""
    zeros = zero_of_pair(zero)
    for i in range(start, stop):
        sums = pair_step(sums, i, oq, wq, tiles, block, zeros, C_WEIGHT, C_OTHER, SLOTS)
    return sums


@gluon.jit
def bias_of_half(block, first_row, i, zero, HALF: gl.constexpr, BIASED: gl.constexpr):
    """Loads the bias of both sides for a half of pair i, whose keys exist; past the end, any."""
    if BIASED:
        first = (2 * (block.stop_pair - 1 - i) + HALF) * zero.shape[1]
        return bias_of_rows(
            block.other_bias, block.b, block.h, first_row, gl.maximum(first, 0),
            block.seq.num_rows, block.seq.num_keys, zero, False,
        )  # fmt: skip
    else:
        return 0.0


@gluon.jit
def step(
    o, bias, sums, i, more, oq, wq, tiles, block, first_row, zero, HALF: gl.constexpr,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr, SQUARES: gl.constexpr,
    CLAMP_OTHER: gl.constexpr, CLAMP_WEIGHT: gl.constexpr, SLOTS: gl.constexpr,
    BIASED: gl.constexpr,
):  # fmt: skip
    """Adds a half of pair i, whose products of `other` are o, and returns those of the next half.

    Its bias is `bias`; the next one's is read under this one's arithmetic.
    """
    w = start_half(wq, tiles.weight_k, i, HALF, zero, SLOTS)
    next_bias = bias_of_half(
        block, first_row, i if HALF == 1 else i + 1, zero, 1 - HALF, BIASED
    )  # fmt: skip
    base_o = gl.expand_dims(sums.base_o, 1)
    base_w = gl.expand_dims(sums.base_w, 1)
    if BIASED:
        bias = gl.maximum(bias.to(gl.float32), SMALLEST_BIAS)
        o = o * block.other_scale + (bias * block.bias_scale - base_o)
    else:
        o = o * block.other_scale - base_o
    eo = exp2(o)
    sum_o = sums.other + lane_sum(eo)
    low_o = sums.low_o
    if CLAMP_OTHER:
        sum_o, low_o = before_wait_pair(sum_o, lane_lowest(low_o, o))
    else:
        sum_o = before_wait(sum_o)
    w = warpgroup_mma_wait(0, deps=[w])
    if HALF == 1:
        next_o = start_half(oq, tiles.other_k, i, 0, zero, SLOTS)
    else:
        wait_for(tiles, i + 1, more, SLOTS)
        next_o = start_half(oq, tiles.other_k, i + 1, 1, zero, SLOTS)
        # Only now: the arrive and the bar.sync before it are then off the path from a finished
        # matmul to the next.
        release(tiles, i, SLOTS)
    if BIASED:
        w = w * block.weight_scale + (bias * block.bias_scale - base_w)
    else:
        w = w * block.weight_scale - base_w
    low_w = sums.low_w
    if CLAMP_WEIGHT:
        low_w = lane_lowest(low_w, w)
    ew = exp2(w)
    sum_w = sums.weight + lane_sum(ew)
    if SQUARES:  # the student is `weight`
        d = eo - gl.expand_dims(sums.ratio, 1) * ew
        mom = sums.moment + lane_sum(d * d)
        low_o, low_w = before_wait_pair(
            sums.low_o + lane_sum(d * ew), sums.low_w + lane_sum(ew * ew)
        )
    else:
        mom = sums.moment + lane_sum(ew * moment(w, o, C_WEIGHT, C_OTHER))
    if CLAMP_WEIGHT:
        mom, sum_w, low_w = before_wait_three(mom, sum_w, low_w)
    else:
        mom, sum_w = before_wait_pair(mom, sum_w)
    o = warpgroup_mma_wait(0, deps=[next_o])
    sums = Sums(sum_o, sum_w, mom, low_o, low_w, sums.base_o, sums.base_w, sums.ratio)
    return o, next_bias, sums


@gluon.jit
def sum_halves(
    sums, oq, wq, tiles, block, first_row, start, stop, zero,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr, SQUARES: gl.constexpr,
    CLAMP_OTHER: gl.constexpr, CLAMP_WEIGHT: gl.constexpr, SLOTS: gl.constexpr,
    BIASED: gl.constexpr,
):  # fmt: skip
    """Sums over the pairs from start to stop, which need no mask, a half at a time.

    One matmul is in flight at a time, so that the registers are enough for three warp groups.
    """
    wait_for(tiles, start, True, SLOTS)
    o = start_half(oq, tiles.other_k, start, 1, zero, SLOTS)
    bias = bias_of_half(block, first_row, start, zero, 1, BIASED)
    o = warpgroup_mma_wait(0, deps=[o])
    for i in range(start, stop):
        more = i + 1 < stop
        o, bias, sums = step(
            o, bias, sums, i, more, oq, wq, tiles, block, first_row, zero, 1,
            C_WEIGHT, C_OTHER, SQUARES, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS, BIASED,
        )  # fmt: skip
        o, bias, sums = step(
            o, bias, sums, i, more, oq, wq, tiles, block, first_row, zero, 0,
            C_WEIGHT, C_OTHER, SQUARES, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS, BIASED,
        )  # fmt: skip
    return sums


@gluon.jit
def per_thread(x, none):
    """Broadcasts x of a row to each thread that shares it; `none` (zeros) gives the shape."""
    rows = gl.convert_layout(x, gl.SliceLayout(1, none.type.layout))
    return none + gl.expand_dims(rows, 1)


@gluon.jit
def with_sums(state, sums, WEIGHT_IS_TEACHER: gl.constexpr, SQUARES: gl.constexpr):
    """Adds sums relative to its own maxima to a state."""
    row_layout: gl.constexpr = state.l_t.type.layout
    sum_o = gl.convert_layout(gl.sum(sums.other, 1), row_layout)
    sum_w = gl.convert_layout(gl.sum(sums.weight, 1), row_layout)
    mom = gl.convert_layout(gl.sum(sums.moment, 1), row_layout)
    if SQUARES:
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
    if WEIGHT_IS_TEACHER:
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
def without_doubtful(state, SQUARES: gl.constexpr):
    """Puts NaN into rows whose sums relative to a frozen row max may be wrong."""
    smallest = SMALLEST_SQUARED if SQUARES else SMALLEST_SUM
    largest = LARGEST_SQUARED if SQUARES else LARGEST
    good = (state.l_t >= smallest) & (state.l_t <= largest)
    good &= (state.l_s >= smallest) & (state.l_s <= largest)
    good &= (gl.abs(state.a) <= LARGEST) & (gl.abs(state.b) <= LARGEST)
    return State(
        state.m_t, gl.where(good, state.l_t, float("nan")), state.m_s, state.l_s,
        state.a, state.b, state.low_t, state.low_s, state.count,
    )  # fmt: skip


@gluon.jit
def empty(BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """Returns row_state.empty_state in a layout."""
    low = gl.full([BLOCK_M], LOW, gl.float32, layout=layout)
    zero = gl.full([BLOCK_M], 0.0, gl.float32, layout=layout)
    return State(low, zero, low, zero, zero, zero, -low, -low, zero)


@gluon.jit
def pairs_without_mask(block, first_row, CONFIG: gl.constexpr):
    """Finds the pairs, never the first, that all rows of the warp group see whole."""
    PAIR: gl.constexpr = 2 * CONFIG.BLOCK_N
    _, left, right, _ = keys_of_rows(
        block.masks, block.seq, first_row, CONFIG.BLOCK_M, PAIR,
        CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, False,
    )  # fmt: skip
    start = gl.minimum(gl.maximum(block.stop_pair - right // PAIR, 1), block.num_pairs)
    stop = block.num_pairs
    if CONFIG.HAS_LEFT:
        stop = gl.maximum(gl.minimum(stop, block.stop_pair - left // PAIR), start)
    return start, stop


@gluon.jit
def has_bases(state, rows, num_rows):
    """Returns whether every row has met a score of a usual size.

    NOTE [Frozen row max with a bias].
    """
    lowest = gl.where(rows < num_rows, gl.minimum(state.m_t, state.m_s), 0.0)
    return gl.min(lowest, 0) > USUAL


@gluon.jit
def reduce_rows(
    tiles, block, outputs, GROUP: gl.constexpr, WEIGHT_IS_TEACHER: gl.constexpr,
    SLOTS: gl.constexpr, PARTS: gl.constexpr, SAME_BIAS: gl.constexpr,
    COEFFICIENTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs one warp group (consumer): values and statistics of its rows."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    C_WEIGHT: gl.constexpr = COEFFICIENTS.TT if WEIGHT_IS_TEACHER else COEFFICIENTS.SS
    C_OTHER: gl.constexpr = COEFFICIENTS.TS if WEIGHT_IS_TEACHER else COEFFICIENTS.ST
    SQUARES: gl.constexpr = COEFFICIENTS.SQUARES != 0.0
    CLAMP_T: gl.constexpr = CONFIG.GUARDED and -float("inf") < CONFIG.T_FLOOR
    CLAMP_S: gl.constexpr = CONFIG.GUARDED and -float("inf") < CONFIG.S_FLOOR
    CLAMP_WEIGHT: gl.constexpr = CLAMP_T if WEIGHT_IS_TEACHER else CLAMP_S
    CLAMP_OTHER: gl.constexpr = CLAMP_S if WEIGHT_IS_TEACHER else CLAMP_T
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    first = block.m0 + GROUP * BLOCK_M
    rows = first + gl.arange(0, BLOCK_M, layout=row_layout)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=mma)
    start, stop = pairs_without_mask(block, first, CONFIG)
    oq = flat(tiles.other_q.index(GROUP))
    wq = flat(tiles.weight_q.index(GROUP))
    mbarrier.wait(tiles.q_bar, 0)
    state = update_pairs(
        empty(BLOCK_M, row_layout), oq, wq, tiles, block, first, rows, 0, start, zero,
        WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, CONFIG,
    )  # fmt: skip
    if (CONFIG.S_BIAS or CONFIG.T_BIAS) and not SAME_BIAS:
        state = update_pairs(
            state, oq, wq, tiles, block, first, rows, start, stop, zero,
            WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, CONFIG, False,
        )  # fmt: skip
        start = stop
    if SAME_BIAS:
        is_ready = has_bases(state, rows, block.seq.num_rows)
        while (start < stop) & (is_ready == 0):
            state = update_pairs(
                state, oq, wq, tiles, block, first, rows, start, start + 1, zero,
                WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, CONFIG, False,
            )  # fmt: skip
            start += 1
            is_ready = has_bases(state, rows, block.seq.num_rows)
    if ((not (CONFIG.S_BIAS or CONFIG.T_BIAS)) or SAME_BIAS) and start < stop:
        m_o = state.m_s if WEIGHT_IS_TEACHER else state.m_t
        m_w = state.m_t if WEIGHT_IS_TEACHER else state.m_s
        base_o = gl.where(m_o == LOW, 0.0, m_o)
        base_w = gl.where(m_w == LOW, 0.0, m_w)
        none = lane_sum(zero)
        low_o = state.low_s if WEIGHT_IS_TEACHER else state.low_t
        low_w = state.low_t if WEIGHT_IS_TEACHER else state.low_s
        low_o = per_thread(low_o - base_o, none)
        low_w = per_thread(low_w - base_w, none)
        ratio = base_o
        if SQUARES:
            low_o = none
            low_w = none
            ratio = row_sum_ratio(state.l_t, state.l_s)
        sums = Sums(none, none, none, low_o, low_w, base_o, base_w, ratio)
        if tiles.other_k.shape[3] == 2 * BLOCK_N:  # of divergences without clamps
            sums = sum_pairs(
                sums, oq, wq, tiles, block, start, stop, zero, C_WEIGHT, C_OTHER, SLOTS
            )
        else:
            sums = sum_halves(
                sums, oq, wq, tiles, block, first, start, stop, zero,
                C_WEIGHT, C_OTHER, SQUARES, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS, SAME_BIAS,
            )  # fmt: skip
        state = without_doubtful(with_sums(state, sums, WEIGHT_IS_TEACHER, SQUARES), SQUARES)
    if CONFIG.HAS_LEFT:
        state = update_pairs(
            state, oq, wq, tiles, block, first, rows, stop, block.num_pairs, zero,
            WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, CONFIG,
        )  # fmt: skip
    inside = rows < block.seq.num_rows
    if PARTS == 1 or block.beyond < 0:
        finish_rows(
            state, row_offset(block.bh, block.h, block.seq, block.masks) + rows, inside,
            outputs.value, outputs.s_stats, outputs.t_stats, outputs.stats_stride, COEFFICIENTS,
            CONFIG,
        )  # fmt: skip
    else:
        store_state(outputs.state + rows, outputs.field_stride, state, inside)


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(
    do_not_specialize=[
        "num_blocks", "num_whole", "first_row", "seqlen_q", "seqlen_k",
        "window_left", "window_right",
    ]
)  # fmt: skip
def forward_kernel(
    other_q, other_k, weight_q, weight_k, value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
    state_ptr, field_stride, split_stride, first_row,
    num_whole, num_blocks, num_heads, other_group, weight_group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right, cu_seqlens_q, cu_seqlens_k, table,
    other_scale, weight_scale, other_bias, weight_bias, bias_scale,
    WEIGHT_IS_TEACHER: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, PARTS: gl.constexpr,
    SAME_BIAS: gl.constexpr, COEFFICIENTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Computes values and statistics of a block; blocks from num_whole on have PARTS programs
    each.
    """
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    OTHER_DIM: gl.constexpr = CONFIG.S_DIM if WEIGHT_IS_TEACHER else CONFIG.T_DIM
    WEIGHT_DIM: gl.constexpr = CONFIG.T_DIM if WEIGHT_IS_TEACHER else CONFIG.S_DIM
    beyond = gl.program_id(0) - num_whole
    # heads may share a bias: those that run at once read the same rows of it
    INTERLEAVED: gl.constexpr = CONFIG.HAS_RIGHT or CONFIG.S_BIAS or CONFIG.T_BIAS
    position, bh = tile_coordinates(block_of(beyond, num_whole, PARTS), num_blocks, INTERLEAVED)
    if CONFIG.HAS_RIGHT:
        position = num_blocks - 1 - position  # causal rows grow: the longest first
    b = bh // num_heads
    h = bh % num_heads
    if table is not None:
        b, position, h = packed_block(gl.program_id(0), table, num_blocks)
        bh = b * num_heads + h
    m0 = position * (GROUPS * BLOCK_M)
    masks = MaskArgs(
        None, 0, 0, 0, 0, key_lengths, 0, 0, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
    )
    seq = bind_sequence(masks, b, h, CONFIG)
    # the bounds of the window with the offset in them: a register less in the loops
    left, right = window_left - seq.offset, window_right + seq.offset
    seq = without_offset(seq)
    masks = MaskArgs(
        None, 0, 0, 0, 0, key_lengths, left, right, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
    )
    if cu_seqlens_q is not None:
        if m0 >= seq.num_rows:
            return
        b = b * 0
    first_met, num_pairs = pairs_met(masks, seq, m0, GROUPS * BLOCK_M, CONFIG)
    first_pair, stop_pair = tiles_of_split(num_pairs, beyond, PARTS)
    block = Block(
        b, h, bh, m0, stop_pair - first_pair, first_met + stop_pair, beyond,
        masks, seq, other_scale, weight_scale, other_bias, weight_bias, bias_scale,
    )  # fmt: skip

    bars: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = Tiles(
        gl.allocate_shared_memory(
            other_q.dtype, [GROUPS, 1, 1, BLOCK_M, OTHER_DIM], other_q.layout
        ),
        gl.allocate_shared_memory(
            weight_q.dtype, [GROUPS, 1, 1, BLOCK_M, WEIGHT_DIM], weight_q.layout
        ),
        slots_of_pairs(other_k, OTHER_DIM, SLOTS),
        slots_of_pairs(weight_k, WEIGHT_DIM, SLOTS),
        gl.allocate_shared_memory(gl.int64, [1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
    )
    mbarrier.init(tiles.q_bar, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1)
        mbarrier.init(tiles.empty.index(slot), count=GROUPS)
    if PARTS > 1:
        first_field = bh.to(gl.int64) * seqlen_q - first_row
        state_ptr += first_field + beyond % PARTS * split_stride
    outputs = Outputs(
        value_ptr, s_stats_ptr, t_stats_ptr, stats_stride, state_ptr, field_stride
    )  # fmt: skip
    REGISTERS: gl.constexpr = GROUP_REGISTERS // GROUPS
    gl.warp_specialize(
        [
            (reduce_rows, (
                tiles, block, outputs, gl.constexpr(0),
                WEIGHT_IS_TEACHER, SLOTS, PARTS, SAME_BIAS, COEFFICIENTS, CONFIG,
            )),
            (load_all, (
                other_q, other_k, weight_q, weight_k, tiles, block,
                h // other_group, h // weight_group, GROUPS, SLOTS, CONFIG,
            )),
            (reduce_rows, (
                tiles, block, outputs, gl.constexpr(1),
                WEIGHT_IS_TEACHER, SLOTS, PARTS, SAME_BIAS, COEFFICIENTS, CONFIG,
            )),
            (reduce_rows, (
                tiles, block, outputs, gl.constexpr(2),
                WEIGHT_IS_TEACHER, SLOTS, PARTS, SAME_BIAS, COEFFICIENTS, CONFIG,
            )),
            (reduce_rows, (
                tiles, block, outputs, gl.constexpr(3),
                WEIGHT_IS_TEACHER, SLOTS, PARTS, SAME_BIAS, COEFFICIENTS, CONFIG,
            )),
        ][: GROUPS + 1],
        [1, NUM_WARPS, NUM_WARPS, NUM_WARPS][:GROUPS],
        [LOADER_REGISTERS, REGISTERS, REGISTERS, REGISTERS][:GROUPS],
    )  # fmt: skip
