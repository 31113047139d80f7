"""Keeps sums and maxima over a tile's keys separately for groups of its columns.

A row of a tile is spread over threads. With LANES partial results for a row, one for the columns
of each thread, no threads synchronise inside of a loop over tiles; the results are merged once
after it. Column n belongs to lane n // WIDTH % LANES, of WIDTH neighbours. Sums over blocks of
keys have one result for each block instead.
"""

import triton
import triton.language as tl


@triton.jit
def in_lanes(x, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Returns a tile as [rows, groups, LANES, WIDTH]."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // (LANES * WIDTH), LANES, WIDTH])


@triton.jit
def lane_sums(x, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Sums [rows, LANES] of a tile."""
    if LANES == 1:
        return tl.sum(x, 1)[:, None]
    else:
        return tl.sum(tl.sum(in_lanes(x, LANES, WIDTH), 3), 1)


@triton.jit
def lane_maxima(x, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Returns maxima [rows, LANES] of a tile."""
    if LANES == 1:
        return tl.max(x, 1)[:, None]
    else:
        return tl.max(tl.max(in_lanes(x, LANES, WIDTH), 3), 1)


@triton.jit
def over_lanes(state, TILE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Returns values [rows, LANES] for every element of their lane in a tile of TILE columns."""
    if LANES == 1:
        return state
    else:
        groups: tl.constexpr = TILE // (LANES * WIDTH)
        whole = tl.broadcast_to(state[:, None, :, None], [state.shape[0], groups, LANES, WIDTH])
        return tl.reshape(whole, [state.shape[0], TILE])


@triton.jit
def first_largest(best, place, x, n):
    """Returns the largest elements [rows] and their first places, those of a tile at n included.

    Elements are compared as integers of the same order, in which NaN is the largest, as for torch.
    """
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 is as large
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    top = tl.max(order, 1)
    at = tl.min(tl.where(order == top[:, None], n, 0x7FFFFFFF), 1)
    return tl.maximum(best, top), tl.where(top > best, at, place)


@triton.jit
def merged_lanes(peak, row_sum):
    """Returns the largest element [rows] and sum of exponentials relative to it, of lanes in
    nats.
    """
    top = tl.max(peak, 1)
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)  # inf - inf is NaN
    return top, tl.sum(row_sum * tl.exp(peak - base[:, None]), 1)


# NOTE [Sums over blocks, written once]
# A program walks the keys of its rows from left to right and writes the sum of a block where the
# block ends, once: two writes to one place may be by different threads, which nothing orders. What
# a block has of earlier tiles is carried, [rows]. Blocks of which no tile is visited stay 0.


@triton.jit
def store_blocks(to, x, carried, in_rows, j, num_keys, SIZE: tl.constexpr):
    """Writes the sums of the blocks of SIZE keys that end in a tile from key j on; returns the
    unfinished sum.
    """
    TILE: tl.constexpr = x.shape[1]
    GROUPS: tl.constexpr = TILE // SIZE
    if GROUPS * SIZE == TILE:
        n = j // SIZE + tl.arange(0, GROUPS)
        sums = tl.sum(tl.reshape(x, [x.shape[0], GROUPS, SIZE]), 2)
        inside = in_rows[:, None] & (n * SIZE < num_keys)[None, :]
        tl.store(to[:, None] + n[None, :], sums, mask=inside)
    elif SIZE // TILE * TILE == SIZE:
        carried = _end_block(
            to, carried + tl.sum(x, 1), in_rows, j // SIZE, j + TILE, num_keys, SIZE
        )
    else:
        block = (j + tl.arange(0, TILE)) // SIZE
        for n in tl.range(j // SIZE, (j + TILE - 1) // SIZE + 1):
            carried += tl.sum(tl.where((block == n)[None, :], x, 0.0), 1)
            carried = _end_block(to, carried, in_rows, n, j + TILE, num_keys, SIZE)
    return carried


@triton.jit
def _end_block(to, total, in_rows, n, stop, num_keys, SIZE: tl.constexpr):
    """Write block n if it ends before ``stop``, and begin the next one."""
    block = n + tl.zeros([total.shape[0]], tl.int32)
    ends = (block + 1) * SIZE <= stop
    tl.store(to + block, total, mask=in_rows & ends & (block * SIZE < num_keys))
    return tl.where(ends, 0.0, total)


@triton.jit
def store_last_block(to, carried, in_rows, stop, num_keys, TILE: tl.constexpr, SIZE: tl.constexpr):
    """Write the block that the last tile, of the key before ``stop``, has begun."""
    if TILE // SIZE * SIZE != TILE:
        end = tl.cdiv(stop, TILE) * TILE
        block = end // SIZE + tl.zeros([carried.shape[0]], tl.int32)
        has_begun = (block * SIZE < end) & (block * SIZE < num_keys)
        tl.store(to + block, carried, mask=in_rows & has_begun)
