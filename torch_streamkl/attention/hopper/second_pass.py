"""Implements the second pass of the Hopper forward: sums a pointwise functional over a row's keys.

JS, TV and an epsilon are no sums of products of a probability and a logarithm, so they need the
log-sum-exps of their row first. The program that found these reads the same tiles once more, while
the queries are still in shared memory, and passes every key to the functional's helper
(pointwise.py).

NOTE [Sums of known functionals]
Some functionals are known by their form, and have fewer sums of fewer instructions. Logarithms are
in base 2 until a row is done. With p and s the probabilities of a key:

- JS with M = b P + c S: the sums of p (log p - log M) and s (log s - log M) are its derivatives,
  up to their factors, and their sum is the value.
- c |P - S|: the sums of |d| and of sign(d) s with d = p - s. Its derivatives are c sign(d) p and
  -c sign(d) s, whose sum is the value again.
- P (log(P + e) - log(S + f)), or with both sides exchanged: one logarithm of the quotient, with an
  error of 2^-22, and one reciprocal, of the product (P + e) (S + f). The derivatives are the
  value's term and P - P e / (P + e), and -P + P f / (S + f). The sum of P is 1.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from torch_streamkl.attention.hopper.pipeline import release, wait_for
from torch_streamkl.attention.hopper.tiles import masked, products_of, release_after, seen
from torch_streamkl.attention.hopper.warp_groups import (
    add,
    column_of,
    exp2,
    lane_signed_sum,
    lane_sum,
    log2,
    reciprocal,
    start_pair,
    zero_of_pair,
)
from torch_streamkl.kernels.row_state import LN2

SMALLEST = gl.constexpr(2.0**-126)


class Specialized(NamedTuple):
    """Holds the numbers of a specialised divergence: NOTE [Sums of known functionals].

    They are 0 for a form that the functional does not have.
    """

    B: float  # of JS
    C: float
    VARIATION: float  # c of c |P - S|
    OWN_EPS: float  # added to the weighting probability
    OTHER_EPS: float
    BY_TEACHER: bool  # which is the teacher's


class KeySums(NamedTuple):
    """Holds sums over keys per thread: f, h and g of a functional, or the sums of a known one."""

    value: Any
    h: Any
    g: Any


@gluon.jit
def with_terms(
    sums, log_o, log_w, eo, ew, t, place, MASKED: gl.constexpr,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Adds the terms of a tile or pair to the sums, from log-probabilities and probabilities."""
    CONFIG: gl.constexpr = TASK.CONFIG
    SPECIALIZED: gl.constexpr = TASK.SPECIALIZED
    log_t = log_w if TASK.WEIGHT_IS_TEACHER else log_o
    log_s = log_o if TASK.WEIGHT_IS_TEACHER else log_w
    p = ew if TASK.WEIGHT_IS_TEACHER else eo
    s = eo if TASK.WEIGHT_IS_TEACHER else ew
    value, h, g = sums.value, sums.h, sums.g
    if SPECIALIZED.B != 0.0:
        log_m = log2(SPECIALIZED.B * p + (SPECIALIZED.C * s + SMALLEST))
        h = add(h, lane_sum(s * (log_s - log_m)))
        g = add(g, lane_sum(p * (log_t - log_m)))
    elif SPECIALIZED.VARIATION != 0.0:
        d = p - s
        value = add(value, lane_sum(gl.abs(d)))
        h = lane_signed_sum(h, d, s)
    elif SPECIALIZED.OWN_EPS != 0.0:
        own = p if SPECIALIZED.BY_TEACHER else s
        other = s if SPECIALIZED.BY_TEACHER else p
        a = own + SPECIALIZED.OWN_EPS
        b = other + SPECIALIZED.OTHER_EPS
        inverse = reciprocal(a * b)
        of_b = inverse * a
        value = add(value, lane_sum(own * log2(a * of_b)))
        h = add(h, lane_sum(own * of_b))
        g = add(g, lane_sum(own * (inverse * b)))
    else:
        f, dh, dg = POINTWISE_FN(p, s, log_t * LN2, log_s * LN2)
        if MASKED:
            allowed = seen(place, t, eo, CONFIG)
            f = gl.where(allowed, f, 0.0)
            dh = gl.where(allowed, dh, 0.0)
            dg = gl.where(allowed, dg, 0.0)
        value = add(value, lane_sum(f))
        h = add(h, lane_sum(dh))
        g = add(g, lane_sum(dg))
    return KeySums(value, h, g)


@gluon.jit
def pair_of_keys(
    sums, lse_o, lse_w, i, tiles, place, zeros,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Adds pair i to the sums."""
    wait_for(tiles, i, True, TASK.SLOTS)
    o = start_pair(place.oq, tiles.other_k, i, zeros, TASK.SLOTS)
    w = start_pair(place.wq, tiles.weight_k, i, zeros, TASK.SLOTS)
    o = warpgroup_mma_wait(1, deps=[o])
    log_o = o * place.sides.other.scale - column_of(lse_o, zeros)
    w = warpgroup_mma_wait(0, deps=[w])
    release(tiles, i, TASK.SLOTS)
    log_w = w * place.sides.weight.scale - column_of(lse_w, zeros)
    return with_terms(
        sums, log_o, log_w, exp2(log_o), exp2(log_w), 0, place, False,
        POINTWISE_FN, TASK,
    )  # fmt: skip


@gluon.jit
def masked_keys(
    sums, lse_o, lse_w, t, tiles, place, zero,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Adds tile t, masked, to the sums."""
    CONFIG: gl.constexpr = TASK.CONFIG
    SPECIALIZED: gl.constexpr = TASK.SPECIALIZED
    IS_KNOWN: gl.constexpr = SPECIALIZED.B + SPECIALIZED.VARIATION + SPECIALIZED.OWN_EPS != 0.0
    o, w = products_of(t, tiles, place, zero, TASK.SLOTS)
    release_after(t, tiles, place, TASK.SLOTS)
    log_o = o * place.sides.other.scale - gl.expand_dims(lse_o, 1)
    log_w = w * place.sides.weight.scale - gl.expand_dims(lse_w, 1)
    if IS_KNOWN:
        log_o = masked(log_o, t, place, 0, True, CONFIG)
        log_w = masked(log_w, t, place, 0, True, CONFIG)
    return with_terms(
        sums, log_o, log_w, exp2(log_o), exp2(log_w), t, place, True,
        POINTWISE_FN, TASK,
    )  # fmt: skip


@gluon.jit
def of_rows(sums, row_sum, SPECIALIZED: gl.constexpr):
    """Computes f, h and g of rows from their threads' sums, in nats.

    `row_sum` is 1, or 0 for a row without keys.
    """
    layout: gl.constexpr = row_sum.type.layout
    value = gl.convert_layout(gl.sum(sums.value, 1), layout)
    h = gl.convert_layout(gl.sum(sums.h, 1), layout)
    g = gl.convert_layout(gl.sum(sums.g, 1), layout)
    if SPECIALIZED.B != 0.0:
        h = h * (SPECIALIZED.C * LN2)
        g = g * (SPECIALIZED.B * LN2)
        value = h + g
    elif SPECIALIZED.VARIATION != 0.0:
        value = value * SPECIALIZED.VARIATION
        h = h * -SPECIALIZED.VARIATION
        g = value - h
    elif SPECIALIZED.OWN_EPS != 0.0:
        value = value * LN2
        of_other = h * SPECIALIZED.OTHER_EPS - row_sum
        of_own = value + (row_sum - g * SPECIALIZED.OWN_EPS)
        h = of_other if SPECIALIZED.BY_TEACHER else of_own
        g = of_own if SPECIALIZED.BY_TEACHER else of_other
    return value, h, g


@gluon.jit
def sum_keys(
    lse_o, lse_w, tiles, place, begin, whole, edge, zero,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Runs the second pass over every tile that some row of the warp group sees."""
    end = place.end
    none = lane_sum(zero)
    zeros = zero_of_pair(zero)
    sums = KeySums(none, none, none)
    start, stop = begin, whole
    for _ in range(2):  # NOTE [Code] in tiles.py
        for t in range(start, stop):
            sums = masked_keys(
                sums, lse_o, lse_w, t, tiles, place, zero,
                POINTWISE_FN, TASK,
            )  # fmt: skip
        first = place.used + stop // 2
        last = place.used + gl.where(stop == whole, edge, stop) // 2
        for i in range(first, last):
            sums = pair_of_keys(
                sums, lse_o, lse_w, i, tiles, place, zeros,
                POINTWISE_FN, TASK,
            )  # fmt: skip
        start, stop = edge, end
    if end % 2 == 1:
        release(tiles, place.used + end // 2, TASK.SLOTS)
    return sums
