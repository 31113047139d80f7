"""Reduces tiles of keys in one warp group of the persistent Hopper forward.

NOTE [Tiles of rows]
Pipeline stages hold pairs of tiles, which all warp groups of a block read. The tiles that some row
of a warp group sees begin and end anywhere in a pair. A warp group skips pairs without any. The
main loop takes the pairs that every row sees whole; the tiles before and after them are masked,
one at a time.

NOTE [Code]
Every warp group has its own code, and the instruction caches hold 128 KB, 8192 instructions. If
the code does not fit, a block of few tiles takes twice as long. So there is one loop for masked
tiles, which runs before the main loop and again after it, and no running maxima.

NOTE [Row max of the first tile]
Sums are relative to the largest scores of the first tile: no maxima, no rescaling, no exchange
between threads. A row may not even see the key of that score. NOTE [Frozen row max] in forward.py
says which sums are exact enough all the same; the others are recomputed. Rows that see no key are
known from their number, or from the bits of a mask.

NOTE [Clamps]
COEFFICIENTS is what a clamped divergence is for a row without a probability below a clamp (NOTE
[One pass or two] in divergences.py). So the lowest scores of a clamped side are kept, and a row
with a probability below its clamp gets NaN, as a row that fails does.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from torch_streamkl.attention.hopper.masks import load_bits, where_admitted
from torch_streamkl.attention.hopper.tile_scheduler import sees_keys
from torch_streamkl.attention.hopper.warp_groups import (
    add,
    before_wait,
    before_wait_pair,
    column_of,
    exp2,
    lane_lowest,
    lane_sum,
    phase_of,
    stage_of,
    start_half,
    start_pair,
    zero_of_pair,
)
from torch_streamkl.kernels.arguments import State
from torch_streamkl.kernels.row_state import LOW, moment
from torch_streamkl.kernels.scores import in_window

SMALLEST_SUM = gl.constexpr(2.0**-80)
LARGEST = gl.constexpr(2.0**100)  # of a sum and of a moment
FAR = gl.constexpr(-1.0e30)  # what a key that a row does not see has for a score


class Tiles(NamedTuple):
    """Holds shared memory: queries of each warp group, stages of pairs of key tiles, barriers."""

    other_q: Any
    weight_q: Any
    other_k: Any
    weight_k: Any
    q_full: Any  # by warp group
    q_empty: Any
    full: Any  # by stage, for both sides
    empty: Any


class Sums(NamedTuple):
    """Holds sums per thread relative to the frozen row max: sums of 2^x, moment, lowest scores."""

    other: Any
    weight: Any
    moment: Any
    low_o: Any  # kept for a side with a clamp only
    low_w: Any
    base_o: Any
    base_w: Any


class Place(NamedTuple):
    """Holds the state of a warp group: its queries, block and rows, and the pairs it has read."""

    oq: Any
    wq: Any
    block: Any  # tile_scheduler.Block
    rows: Any
    used: Any  # pairs of the program's blocks before
    end: Any  # after the last tile that its rows see
    other_scale: Any
    weight_scale: Any


@gluon.jit
def start_at(q, keys, place, t, zero, SLOTS: gl.constexpr):
    """Issues q @ tile t of a block, counted from its last."""
    return start_half(q, keys, place.used + t // 2, 1 - (t & 1), zero, SLOTS)


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
def skip_stages(tiles, start, stop, SLOTS: gl.constexpr):
    """Waits for and releases the stages of pairs that none of the warp group's rows sees."""
    for i in range(start, stop):
        wait_for(tiles, i, True, SLOTS)
        release(tiles, i, SLOTS)


@gluon.jit
def start_following(tiles, place, t, zero, SLOTS: gl.constexpr):
    """Issues `other`'s matmul of tile t + 1, and releases the pair whose last tile is t."""
    is_last = (t & 1) == 1
    pair = place.used + t // 2
    wait_for(tiles, pair + 1, is_last & (t + 1 < place.end), SLOTS)
    following = start_at(place.oq, tiles.other_k, place, t + 1, zero, SLOTS)
    # Only now: the arrive and the bar.sync before it are then off the path from a finished
    # matmul to the next.
    if is_last & (t < place.end):
        release(tiles, pair, SLOTS)
    return following


@gluon.jit
def keys_of_tile(block, t, zero):
    """Returns the keys of tile t, along the columns of an accumulator."""
    BLOCK_N: gl.constexpr = zero.shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    first = (2 * block.stop_pair - 1 - t) * BLOCK_N
    return gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=columns), 0)


@gluon.jit
def seen(place, t, like, CONFIG: gl.constexpr):
    """Marks which rows see which keys of tile t."""
    block = place.block
    keys = keys_of_tile(block, t, like)
    return in_window(
        keys < block.seq.num_valid, block.window, block.seq, gl.expand_dims(place.rows, 1), keys,
        CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT,
    )  # fmt: skip


@gluon.jit
def masked(x, t, place, bits, is_full, CONFIG: gl.constexpr):
    """Keeps x of tile t where rows see keys; FAR elsewhere."""
    if CONFIG.HAS_MASK:
        if not is_full:
            x = where_admitted(bits, x, FAR)
        return x
    else:
        return gl.where(seen(place, t, x, CONFIG), x, FAR)


@gluon.jit
def step(
    o, sums, i, more, tiles, place, zero, HALF: gl.constexpr,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr,
    CLAMP_OTHER: gl.constexpr, CLAMP_WEIGHT: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Adds a half of pair i, whose products of `other` are o; returns those of the next half."""
    w = start_half(place.wq, tiles.weight_k, i, HALF, zero, SLOTS)
    o = o * place.other_scale - gl.expand_dims(sums.base_o, 1)
    sum_o = before_wait(sums.other + lane_sum(exp2(o)))
    low_o = sums.low_o
    if CLAMP_OTHER:
        low_o = before_wait(lane_lowest(low_o, o))
    w = warpgroup_mma_wait(0, deps=[w])
    if HALF == 1:
        following = start_half(place.oq, tiles.other_k, i, 0, zero, SLOTS)
    else:
        wait_for(tiles, i + 1, more, SLOTS)
        following = start_half(place.oq, tiles.other_k, i + 1, 1, zero, SLOTS)
        # Only now: the arrive and the bar.sync before it are then off the path from a finished
        # matmul to the next.
        release(tiles, i, SLOTS)
    w = w * place.weight_scale - gl.expand_dims(sums.base_w, 1)
    low_w = sums.low_w
    if CLAMP_WEIGHT:
        low_w = before_wait(lane_lowest(low_w, w))
    ew = exp2(w)
    sum_w = sums.weight + lane_sum(ew)
    mom = sums.moment + lane_sum(ew * moment(w, o, C_WEIGHT, C_OTHER))
    mom, sum_w = before_wait_pair(mom, sum_w)
    o = warpgroup_mma_wait(0, deps=[following])
    return o, Sums(sum_o, sum_w, mom, low_o, low_w, sums.base_o, sums.base_w)


@gluon.jit
def sum_pairs(
    o, sums, tiles, place, start, stop, zero,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr,
    CLAMP_OTHER: gl.constexpr, CLAMP_WEIGHT: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Sums over the pairs from start to stop, which need no mask.

    One matmul is in flight at a time, so that the registers are enough for three warp groups.
    """
    for i in range(place.used + start, place.used + stop):
        more = 2 * (i + 1 - place.used) < place.end
        o, sums = step(
            o, sums, i, more, tiles, place, zero, 1,
            C_WEIGHT, C_OTHER, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS,
        )  # fmt: skip
        o, sums = step(
            o, sums, i, more, tiles, place, zero, 0,
            C_WEIGHT, C_OTHER, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS,
        )  # fmt: skip
    return o, sums


@gluon.jit
def masked_step(
    o, sums, t, tiles, place, zero,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr,
    CLAMP_OTHER: gl.constexpr, CLAMP_WEIGHT: gl.constexpr, SLOTS: gl.constexpr,
    CONFIG: gl.constexpr, bits=0, is_full=True,
):  # fmt: skip
    """Adds tile t, whose products of `other` are o, and returns those of the next tile.

    With a mask tensor, `bits` are its bits of the tile, and nothing else masks it.
    """
    w = start_at(place.wq, tiles.weight_k, place, t, zero, SLOTS)
    o = masked(
        o * place.other_scale - gl.expand_dims(sums.base_o, 1), t, place, bits, is_full, CONFIG
    )
    sum_o = before_wait(sums.other + lane_sum(exp2(o)))
    low_o = sums.low_o
    if CLAMP_OTHER:
        low_o = before_wait(lane_lowest(low_o, gl.where(o == FAR, 0.0, o)))
    w = warpgroup_mma_wait(0, deps=[w])
    following = start_following(tiles, place, t, zero, SLOTS)
    w = masked(
        w * place.weight_scale - gl.expand_dims(sums.base_w, 1), t, place, bits, is_full, CONFIG
    )
    low_w = sums.low_w
    if CLAMP_WEIGHT:
        low_w = before_wait(lane_lowest(low_w, gl.where(w == FAR, 0.0, w)))
    ew = exp2(w)
    sum_w = sums.weight + lane_sum(ew)
    mom = sums.moment + lane_sum(ew * moment(w, o, C_WEIGHT, C_OTHER))
    mom, sum_w = before_wait_pair(mom, sum_w)
    o = warpgroup_mma_wait(0, deps=[following])
    return o, Sums(sum_o, sum_w, mom, low_o, low_w, sums.base_o, sums.base_w)


@gluon.jit
def with_sums(sums, rows, WEIGHT_IS_TEACHER: gl.constexpr):
    """Returns the state of rows with these sums."""
    layout: gl.constexpr = rows.type.layout
    sum_o = gl.convert_layout(gl.sum(sums.other, 1), layout)
    sum_w = gl.convert_layout(gl.sum(sums.weight, 1), layout)
    mom = gl.convert_layout(gl.sum(sums.moment, 1), layout)
    zero = mom * 0.0
    # where no score is below the base, the base
    low_o = gl.minimum(gl.convert_layout(gl.min(sums.low_o, 1), layout), 0.0) + sums.base_o
    low_w = gl.minimum(gl.convert_layout(gl.min(sums.low_w, 1), layout), 0.0) + sums.base_w
    if WEIGHT_IS_TEACHER:
        return State(sums.base_w, sum_w, sums.base_o, sum_o, mom, zero, low_w, low_o, zero)
    else:
        return State(sums.base_o, sum_o, sums.base_w, sum_w, zero, mom, low_o, low_w, zero)


@gluon.jit
def without_doubtful(state, some):
    """Puts NaN into rows whose sums relative to a frozen row max may be wrong.

    Rows without `some` key have sums of 0.
    """
    good = (state.l_t >= SMALLEST_SUM) & (state.l_t <= LARGEST)
    good &= (state.l_s >= SMALLEST_SUM) & (state.l_s <= LARGEST)
    good &= (gl.abs(state.a) <= LARGEST) & (gl.abs(state.b) <= LARGEST)
    l_t = gl.where(good, state.l_t, float("nan"))
    return State(
        gl.where(some, state.m_t, LOW), gl.where(some, l_t, 0.0),
        gl.where(some, state.m_s, LOW), gl.where(some, state.l_s, 0.0),
        gl.where(some, state.a, 0.0), gl.where(some, state.b, 0.0),
        state.low_t, state.low_s, state.count,
    )  # fmt: skip


@gluon.jit
def empty(BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """Returns row_state.empty_state in a layout."""
    low = gl.full([BLOCK_M], LOW, gl.float32, layout=layout)
    zero = gl.full([BLOCK_M], 0.0, gl.float32, layout=layout)
    return State(low, zero, low, zero, zero, zero, -low, -low, zero)


@gluon.jit
def start_sums(o, w, keys, other_scale, weight_scale, zero):
    """Returns empty sums relative to the largest of the first scores; `keys` are the existing
    ones.
    """
    none = lane_sum(zero)
    base_o = gl.max(gl.where(keys, o * other_scale, -float("inf")), 1)
    base_w = gl.max(gl.where(keys, w * weight_scale, -float("inf")), 1)
    return Sums(none, none, none, none, none, base_o, base_w)


@gluon.jit
def reduce_tiles(
    tiles, place, begin, whole, edge, zero,
    WEIGHT_IS_TEACHER: gl.constexpr,
    SLOTS: gl.constexpr, COEFFICIENTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Returns the state after every tile that some row of the warp group sees.

    NOTE [Tiles of rows].
    """
    C_WEIGHT: gl.constexpr = COEFFICIENTS.TT if WEIGHT_IS_TEACHER else COEFFICIENTS.SS
    C_OTHER: gl.constexpr = COEFFICIENTS.TS if WEIGHT_IS_TEACHER else COEFFICIENTS.ST
    CLAMP_T: gl.constexpr = CONFIG.GUARDED and -float("inf") < CONFIG.T_FLOOR
    CLAMP_S: gl.constexpr = CONFIG.GUARDED and -float("inf") < CONFIG.S_FLOOR
    CLAMP_WEIGHT: gl.constexpr = CLAMP_T if WEIGHT_IS_TEACHER else CLAMP_S
    CLAMP_OTHER: gl.constexpr = CLAMP_S if WEIGHT_IS_TEACHER else CLAMP_T
    block, end = place.block, place.end
    wait_for(tiles, place.used + begin // 2, True, SLOTS)
    o = start_at(place.oq, tiles.other_k, place, begin, zero, SLOTS)
    w = start_at(place.wq, tiles.weight_k, place, begin, zero, SLOTS)
    o, w = warpgroup_mma_wait(0, deps=[o, w])
    keys = keys_of_tile(block, begin, zero) < block.seq.num_valid
    sums = start_sums(o, w, keys, place.other_scale, place.weight_scale, zero)
    start, stop = begin, whole
    for _ in range(2):  # NOTE [Code]
        for t in range(start, stop):
            o, sums = masked_step(
                o, sums, t, tiles, place, zero,
                C_WEIGHT, C_OTHER, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS, CONFIG,
            )  # fmt: skip
        o, sums = sum_pairs(
            o, sums, tiles, place, stop // 2, gl.where(stop == whole, edge, stop) // 2, zero,
            C_WEIGHT, C_OTHER, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS,
        )  # fmt: skip
        start, stop = edge, end
    if end % 2 == 1:  # of the last pair the second tile is seen by other warp groups only
        release(tiles, place.used + end // 2, SLOTS)
    state = with_sums(sums, place.rows, WEIGHT_IS_TEACHER)
    return without_doubtful(state, sees_keys(block, place.rows, CONFIG))


@gluon.jit
def products_of(t, tiles, place, zero, SLOTS: gl.constexpr):
    """Returns the products of tile t of both sides."""
    wait_for(tiles, place.used + t // 2, True, SLOTS)
    o = start_at(place.oq, tiles.other_k, place, t, zero, SLOTS)
    w = start_at(place.wq, tiles.weight_k, place, t, zero, SLOTS)
    return warpgroup_mma_wait(0, deps=[o, w])


@gluon.jit
def release_after(t, tiles, place, SLOTS: gl.constexpr):
    """Releases the pair whose last tile is t."""
    if (t & 1) == 1:
        release(tiles, place.used + t // 2, SLOTS)


@gluon.jit
def masked_row_sums(sums, o, w, t, place, CONFIG: gl.constexpr):
    """Adds tile t, whose products are o and w, to the sums of 2^x."""
    o = masked(o * place.other_scale - gl.expand_dims(sums.base_o, 1), t, place, 0, True, CONFIG)
    w = masked(w * place.weight_scale - gl.expand_dims(sums.base_w, 1), t, place, 0, True, CONFIG)
    return with_row_sums(sums, sums.other + lane_sum(exp2(o)), sums.weight + lane_sum(exp2(w)))


@gluon.jit
def with_row_sums(sums, other, weight):
    """Adds to the sums of 2^x."""
    return Sums(
        other, weight, sums.moment, sums.low_o, sums.low_w, sums.base_o, sums.base_w
    )  # fmt: skip


@gluon.jit
def row_sums_step(o, sums, i, more, tiles, place, zeros, SLOTS: gl.constexpr):
    """Adds pair i, whose products of `other` are o, to the sums of 2^x; returns the next ones."""
    w = start_pair(place.wq, tiles.weight_k, i, zeros, SLOTS)
    o = o * place.other_scale - column_of(sums.base_o, zeros)
    sum_o = before_wait(add(sums.other, lane_sum(exp2(o))))
    w = warpgroup_mma_wait(0, deps=[w])
    wait_for(tiles, i + 1, more, SLOTS)
    following = start_pair(place.oq, tiles.other_k, i + 1, zeros, SLOTS)
    # Only now: the arrive and the bar.sync before it are then off the path from a finished
    # matmul to the next.
    release(tiles, i, SLOTS)
    w = w * place.weight_scale - column_of(sums.base_w, zeros)
    sum_w = before_wait(add(sums.weight, lane_sum(exp2(w))))
    o = warpgroup_mma_wait(0, deps=[following])
    return o, with_row_sums(sums, sum_o, sum_w)


@gluon.jit
def sum_of_row_sums(sums, tiles, place, start, stop, zeros, SLOTS: gl.constexpr):
    """Adds the pairs from start to stop, which need no mask, to the sums of 2^x alone."""
    if start < stop:
        wait_for(tiles, start, True, SLOTS)
        o = start_pair(place.oq, tiles.other_k, start, zeros, SLOTS)
        o = warpgroup_mma_wait(0, deps=[o])
        for i in range(start, stop):
            o, sums = row_sums_step(o, sums, i, i + 1 < stop, tiles, place, zeros, SLOTS)
    return sums


@gluon.jit
def reduce_row_sums(
    tiles, place, begin, whole, edge, zero,
    WEIGHT_IS_TEACHER: gl.constexpr, SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Reduces all tiles to row sums alone: NOTE [Pairs at once] in warp_groups.py."""
    block, end = place.block, place.end
    zeros = zero_of_pair(zero)
    o, w = products_of(begin, tiles, place, zero, SLOTS)
    keys = keys_of_tile(block, begin, zero) < block.seq.num_valid
    sums = start_sums(o, w, keys, place.other_scale, place.weight_scale, zero)
    start, stop = begin, whole
    if begin < whole:
        sums = masked_row_sums(sums, o, w, begin, place, CONFIG)
        release_after(begin, tiles, place, SLOTS)
        start = begin + 1
    for _ in range(2):  # NOTE [Code]
        for t in range(start, stop):
            o, w = products_of(t, tiles, place, zero, SLOTS)
            release_after(t, tiles, place, SLOTS)
            sums = masked_row_sums(sums, o, w, t, place, CONFIG)
        first = place.used + stop // 2
        last = place.used + gl.where(stop == whole, edge, stop) // 2
        sums = sum_of_row_sums(sums, tiles, place, first, last, zeros, SLOTS)
        start, stop = edge, end
    if end % 2 == 1:  # of the last pair the second tile is seen by other warp groups only
        release(tiles, place.used + end // 2, SLOTS)
    state = with_sums(sums, place.rows, WEIGHT_IS_TEACHER)
    return without_doubtful(state, sees_keys(block, place.rows, CONFIG))


@gluon.jit
def reduce_listed(
    tiles, place, first_row, blocks, zero,
    WEIGHT_IS_TEACHER: gl.constexpr,
    SLOTS: gl.constexpr, COEFFICIENTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Returns the state after the pairs of a mask's list: NOTE [Blocks of a mask]."""
    C_WEIGHT: gl.constexpr = COEFFICIENTS.TT if WEIGHT_IS_TEACHER else COEFFICIENTS.SS
    C_OTHER: gl.constexpr = COEFFICIENTS.TS if WEIGHT_IS_TEACHER else COEFFICIENTS.ST
    CLAMP_T: gl.constexpr = CONFIG.GUARDED and -float("inf") < CONFIG.T_FLOOR
    CLAMP_S: gl.constexpr = CONFIG.GUARDED and -float("inf") < CONFIG.S_FLOOR
    CLAMP_WEIGHT: gl.constexpr = CLAMP_T if WEIGHT_IS_TEACHER else CLAMP_S
    CLAMP_OTHER: gl.constexpr = CLAMP_S if WEIGHT_IS_TEACHER else CLAMP_T
    block = place.block
    entity = block.seq.mask_offset
    row_tile = first_row // CONFIG.BLOCK_M
    last = block.num_pairs - 1
    none = lane_sum(zero)
    wait_for(tiles, place.used, True, SLOTS)
    o = start_at(place.oq, tiles.other_k, place, 0, zero, SLOTS)
    w = start_at(place.wq, tiles.weight_k, place, 0, zero, SLOTS)
    entry = gl.load(block.list + 1)
    following = gl.load(block.list + 1 + gl.minimum(1, last))
    bits_1 = load_bits(blocks, entity, row_tile, entry // 2 * 2 + 1, none)
    bits_0 = load_bits(blocks, entity, row_tile, entry // 2 * 2, none)
    o, w = warpgroup_mma_wait(0, deps=[o, w])
    column = gl.arange(0, CONFIG.BLOCK_N, layout=gl.SliceLayout(0, zero.type.layout))
    keys = gl.expand_dims((entry // 2 * 2 + 1) * CONFIG.BLOCK_N + column, 0)
    # the last tile of the keys may lie beyond them: then every base is 0
    keys = (keys < block.seq.num_valid) | (entry // 2 * 128 + 64 >= block.seq.num_valid)
    sums = start_sums(o, w, keys, place.other_scale, place.weight_scale, zero)
    seen_keys = (none * 0.0).to(gl.int32)
    for i in range(block.num_pairs):
        is_full = entry % 2 == 1
        next_1 = load_bits(blocks, entity, row_tile, following // 2 * 2 + 1, none)
        next_0 = load_bits(blocks, entity, row_tile, following // 2 * 2, none)
        entry = following
        following = gl.load(block.list + 1 + gl.minimum(i + 2, last))
        o, sums = masked_step(
            o, sums, 2 * i, tiles, place, zero,
            C_WEIGHT, C_OTHER, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS, CONFIG, bits_1, is_full,
        )  # fmt: skip
        o, sums = masked_step(
            o, sums, 2 * i + 1, tiles, place, zero,
            C_WEIGHT, C_OTHER, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS, CONFIG, bits_0, is_full,
        )  # fmt: skip
        seen_keys = seen_keys | bits_1 | bits_0
        bits_1 = next_1
        bits_0 = next_0
    state = with_sums(sums, place.rows, WEIGHT_IS_TEACHER)
    some = gl.max((seen_keys != 0).to(gl.int32), 1)
    return without_doubtful(state, gl.convert_layout(some, place.rows.type.layout) > 0)
