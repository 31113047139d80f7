"""Reduces tiles of keys in one warp group of a persistent Hopper forward.

Which tiles: NOTE [Tiles of rows] in tile_scheduler.py. Clamps: NOTE in frozen_max.py.

NOTE [Code]
Every warp group has its own code, and the instruction caches hold 128 KB, 8192 instructions. If
the code does not fit, a block of few tiles takes twice as long. So there is one loop for masked
tiles, which runs before the main loop and again after it, and no running maxima.

NOTE [Row max of the first tile]
Sums are relative to the largest scores of the first tile: no maxima, no rescaling, no exchange
between threads. A row may not even see the key of that score. NOTE [Frozen row max] in
frozen_max.py says which sums are exact enough all the same; the others are recomputed. Rows that
see no key are known from their number, or from the bits of a mask.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from torch_streamkl.attention.hopper.frozen_max import step
from torch_streamkl.attention.hopper.masks import load_bits, where_admitted
from torch_streamkl.attention.hopper.pipeline import release, wait_for
from torch_streamkl.attention.hopper.softmax import (
    FAR,
    add_other,
    add_weight,
    start_sums,
    state_of,
    with_row_sums,
)
from torch_streamkl.attention.hopper.tile_scheduler import sees_keys
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
from torch_streamkl.kernels.scores import in_window


@gluon.jit
def start_at(q, keys, place, t, zero, SLOTS: gl.constexpr):
    """Issues q @ tile t of a block, counted from its last."""
    return start_half(q, keys, place.used + t // 2, 1 - (t & 1), zero, SLOTS)


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
def relative(x, t, place, base, scale, bits, is_full, CONFIG: gl.constexpr):
    """Returns scores of tile t less the frozen row max, FAR where rows see no keys."""
    return masked(x * scale - gl.expand_dims(base, 1), t, place, bits, is_full, CONFIG)


@gluon.jit
def sum_pairs(o, sums, tiles, place, start, stop, zero, TASK: gl.constexpr):
    """Sums over the pairs from start to stop, which need no mask.

    One matmul is in flight at a time, so that the registers are enough for three warp groups.
    """
    for i in range(place.used + start, place.used + stop):
        more = 2 * (i + 1 - place.used) < place.end
        o, _, sums = step(o, 0.0, sums, i, more, tiles, place, zero, 1, TASK)
        o, _, sums = step(o, 0.0, sums, i, more, tiles, place, zero, 0, TASK)
    return o, sums


@gluon.jit
def masked_step(o, sums, t, tiles, place, zero, TASK: gl.constexpr, bits=0, is_full=True):
    """Adds tile t, whose products of `other` are o, and returns those of the next tile.

    With a mask tensor, `bits` are its bits of the tile, and nothing else masks it.
    """
    CONFIG: gl.constexpr = TASK.CONFIG
    sides = place.sides
    w = start_at(place.wq, tiles.weight_k, place, t, zero, TASK.SLOTS)
    o = relative(o, t, place, sums.base_o, sides.other.scale, bits, is_full, CONFIG)
    sum_o, low_o = add_other(o, sums, True, TASK)
    w = warpgroup_mma_wait(0, deps=[w])
    following = start_following(tiles, place, t, zero, TASK.SLOTS)
    w = relative(w, t, place, sums.base_w, sides.weight.scale, bits, is_full, CONFIG)
    sums = add_weight(o, w, sum_o, low_o, sums, True, TASK)
    o = warpgroup_mma_wait(0, deps=[following])
    return o, sums


@gluon.jit
def reduce_tiles(tiles, place, begin, whole, edge, zero, TASK: gl.constexpr):
    """Returns the state after every tile that some row of the warp group sees."""
    CONFIG: gl.constexpr = TASK.CONFIG
    block, end = place.block, place.end
    wait_for(tiles, place.used + begin // 2, True, TASK.SLOTS)
    o = start_at(place.oq, tiles.other_k, place, begin, zero, TASK.SLOTS)
    w = start_at(place.wq, tiles.weight_k, place, begin, zero, TASK.SLOTS)
    o, w = warpgroup_mma_wait(0, deps=[o, w])
    keys = keys_of_tile(block, begin, zero) < block.seq.num_valid
    sums = start_sums(o, w, keys, place.sides, zero)
    start, stop = begin, whole
    for _ in range(2):  # NOTE [Code]
        for t in range(start, stop):
            o, sums = masked_step(o, sums, t, tiles, place, zero, TASK)
        last = gl.where(stop == whole, edge, stop) // 2
        o, sums = sum_pairs(o, sums, tiles, place, stop // 2, last, zero, TASK)
        start, stop = edge, end
    if end % 2 == 1:  # of the last pair the second tile is seen by other warp groups only
        release(tiles, place.used + end // 2, TASK.SLOTS)
    return state_of(sums, place.rows, sees_keys(block, place.rows, CONFIG), TASK)


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
    sides = place.sides
    o = relative(o, t, place, sums.base_o, sides.other.scale, 0, True, CONFIG)
    w = relative(w, t, place, sums.base_w, sides.weight.scale, 0, True, CONFIG)
    return with_row_sums(sums, sums.other + lane_sum(exp2(o)), sums.weight + lane_sum(exp2(w)))


@gluon.jit
def row_sums_step(o, sums, i, more, tiles, place, zeros, SLOTS: gl.constexpr):
    """Adds pair i, whose products of `other` are o, to the sums of 2^x; returns the next ones."""
    w = start_pair(place.wq, tiles.weight_k, i, zeros, SLOTS)
    o = o * place.sides.other.scale - column_of(sums.base_o, zeros)
    sum_o = before_wait(add(sums.other, lane_sum(exp2(o))))
    w = warpgroup_mma_wait(0, deps=[w])
    wait_for(tiles, i + 1, more, SLOTS)
    following = start_pair(place.oq, tiles.other_k, i + 1, zeros, SLOTS)
    # Only now: the arrive and the bar.sync before it are then off the path from a finished
    # matmul to the next.
    release(tiles, i, SLOTS)
    w = w * place.sides.weight.scale - column_of(sums.base_w, zeros)
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
def reduce_row_sums(tiles, place, begin, whole, edge, zero, TASK: gl.constexpr):
    """Reduces all tiles to row sums alone: NOTE [Pairs at once] in warp_groups.py."""
    CONFIG: gl.constexpr = TASK.CONFIG
    SLOTS: gl.constexpr = TASK.SLOTS
    block, end = place.block, place.end
    zeros = zero_of_pair(zero)
    o, w = products_of(begin, tiles, place, zero, SLOTS)
    keys = keys_of_tile(block, begin, zero) < block.seq.num_valid
    sums = start_sums(o, w, keys, place.sides, zero)
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
    return state_of(sums, place.rows, sees_keys(block, place.rows, CONFIG), TASK)


@gluon.jit
def reduce_listed(tiles, place, blocks, zero, TASK: gl.constexpr):
    """Returns the state after the pairs of a mask's list: NOTE [Blocks of a mask] in masks.py."""
    CONFIG: gl.constexpr = TASK.CONFIG
    SLOTS: gl.constexpr = TASK.SLOTS
    block = place.block
    entity = block.seq.mask_offset
    row_tile = place.first_row // CONFIG.BLOCK_M
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
    sums = start_sums(o, w, keys, place.sides, zero)
    seen_keys = (none * 0.0).to(gl.int32)
    for i in range(block.num_pairs):
        is_full = entry % 2 == 1
        next_1 = load_bits(blocks, entity, row_tile, following // 2 * 2 + 1, none)
        next_0 = load_bits(blocks, entity, row_tile, following // 2 * 2, none)
        entry = following
        following = gl.load(block.list + 1 + gl.minimum(i + 2, last))
        o, sums = masked_step(o, sums, 2 * i, tiles, place, zero, TASK, bits_1, is_full)
        o, sums = masked_step(o, sums, 2 * i + 1, tiles, place, zero, TASK, bits_0, is_full)
        seen_keys = seen_keys | bits_1 | bits_0
        bits_1 = next_1
        bits_0 = next_0
    some = gl.max((seen_keys != 0).to(gl.int32), 1)
    some = gl.convert_layout(some, place.rows.type.layout) > 0
    return state_of(sums, place.rows, some, TASK)
