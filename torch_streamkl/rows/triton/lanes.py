"""Sums and maxima over the keys of a tile, kept apart for groups of its columns.

A row of a tile is spread over threads. With LANES partial results for a row, one for the columns
that a thread has, no threads meet inside of a loop over tiles; they are merged once after it.
Column n belongs to lane n // WIDTH % LANES, of WIDTH neighbours.
"""

import triton
import triton.language as tl


@triton.jit
def in_lanes(x, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """A tile as [rows, groups, LANES, WIDTH]."""
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
    """Maxima [rows, LANES] of a tile."""
    if LANES == 1:
        return tl.max(x, 1)[:, None]
    else:
        return tl.max(tl.max(in_lanes(x, LANES, WIDTH), 3), 1)


@triton.jit
def over_lanes(state, TILE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Values [rows, LANES] for every element of their lane in a tile of TILE columns."""
    if LANES == 1:
        return state
    else:
        groups: tl.constexpr = TILE // (LANES * WIDTH)
        whole = tl.broadcast_to(state[:, None, :, None], [state.shape[0], groups, LANES, WIDTH])
        return tl.reshape(whole, [state.shape[0], TILE])


@triton.jit
def merged_lanes(peak, mass):
    """Largest element [rows] and sum of exponentials relative to it, of lanes in nats."""
    top = tl.max(peak, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(mass * tl.exp(peak - base[:, None]), 1)
