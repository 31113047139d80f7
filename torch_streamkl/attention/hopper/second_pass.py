"""The second pass of the Hopper forward: a pointwise functional, summed over the keys of a row.

A divergence that is no sum of products of a probability and a logarithm (JS, TV, an epsilon) needs
the log-sum-exps of its row first. The program that found them reads the same tiles once more,
while the queries are still in shared memory, and gives every key to the functional's helper
(pointwise.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from torch_streamkl.attention.hopper.tiles import (
    release,
    seen,
    start_following,
    tile_at,
    wait_for,
)
from torch_streamkl.attention.hopper.warp_groups import (
    before_wait,
    before_wait_pair,
    exp2,
    lane_sum,
    start_scores,
)
from torch_streamkl.kernels.row_state import LN2


class KeySums(NamedTuple):
    """Per thread: f, h and g of a pointwise functional, summed over the keys."""

    value: Any
    h: Any
    g: Any


@gluon.jit
def key_step(
    o, sums, lse_o, lse_w, t, tiles, place, zero, MASKED: gl.constexpr,
    WEIGHT_IS_TEACHER: gl.constexpr, HELPER: gl.constexpr, SLOTS: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """The sums with tile t, whose products of `other` are o, and those of the next."""
    w = start_scores(place.wq, tile_at(tiles.weight_k, place, t, SLOTS), zero)
    log_o = o * place.other_scale - gl.expand_dims(lse_o, 1)
    w = warpgroup_mma_wait(0, deps=[w])
    following = start_following(tiles, place, t, zero, SLOTS)
    log_w = w * place.weight_scale - gl.expand_dims(lse_w, 1)
    log_t = log_w if WEIGHT_IS_TEACHER else log_o
    log_s = log_o if WEIGHT_IS_TEACHER else log_w
    f, h, g = HELPER(exp2(log_t), exp2(log_s), log_t * LN2, log_s * LN2)
    if MASKED:
        allowed = seen(place, t, zero, CONFIG)
        f = gl.where(allowed, f, 0.0)
        h = gl.where(allowed, h, 0.0)
        g = gl.where(allowed, g, 0.0)
    value, h = before_wait_pair(sums.value + lane_sum(f), sums.h + lane_sum(h))
    g = before_wait(sums.g + lane_sum(g))
    o = warpgroup_mma_wait(0, deps=[following])
    return o, KeySums(value, h, g)


@gluon.jit
def sum_keys(
    lse_o, lse_w, tiles, place, begin, whole, edge, zero,
    WEIGHT_IS_TEACHER: gl.constexpr, HELPER: gl.constexpr, SLOTS: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """The second pass over every tile that some row of the warp group sees."""
    end = place.end
    none = lane_sum(zero)
    sums = KeySums(none, none, none)
    wait_for(tiles, place.used + begin // 2, True, SLOTS)
    o = start_scores(place.oq, tile_at(tiles.other_k, place, begin, SLOTS), zero)
    o = warpgroup_mma_wait(0, deps=[o])
    start, stop = begin, whole
    for _ in range(2):  # NOTE [Code] in tiles.py
        for t in range(start, stop):
            o, sums = key_step(
                o, sums, lse_o, lse_w, t, tiles, place, zero, True,
                WEIGHT_IS_TEACHER, HELPER, SLOTS, CONFIG,
            )  # fmt: skip
        for t in range(stop, gl.where(stop == whole, edge, stop), 2):
            for half in gl.static_range(2):
                o, sums = key_step(
                    o, sums, lse_o, lse_w, t // 2 * 2 + half, tiles, place, zero, False,
                    WEIGHT_IS_TEACHER, HELPER, SLOTS, CONFIG,
                )  # fmt: skip
        start, stop = edge, end
    if end % 2 == 1:
        release(tiles, place.used + end // 2, SLOTS)
    return sums
