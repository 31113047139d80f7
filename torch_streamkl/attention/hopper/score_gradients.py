"""Converts a tile's scores into gradients for the Hopper backward: dscore, its masks and biases.

NOTE [Rows without a clamped key]
A clamp takes three instructions for every pair of query and key, and most rows have no probability
below it. The delta of such a row is COEFFICIENTS.TS, to the bit (`finish` in
kernels/row_state.py); that of a recomputed row is not (`forward_block`). If all rows of a tile
have it, the tile skips the clamp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_streamkl.attention.hopper.backward_config import (
    CLAMP,
    CLAMPED,
    DELTA,
    GRAD,
    NEGATIVE,
    NUM_STATISTICS,
    OTHER_LSE,
    OWN_LSE,
)
from torch_streamkl.attention.hopper.biases import bias_of_keys, bias_of_rows
from torch_streamkl.attention.hopper.masks import load_bits, where_admitted
from torch_streamkl.attention.hopper.warp_groups import NUM_WARPS, exp2, lane_sum, stage_of
from torch_streamkl.kernels.row_state import score_gradient
from torch_streamkl.kernels.scores import in_window


@gluon.jit
def along(kept, tiles, slot, WHICH: gl.constexpr, layout: gl.constexpr, TASK: gl.constexpr):
    """Returns a statistic of the rows of a tile: along its rows for dQ, along its columns for
    dK.
    """
    if TASK.ROWS:
        return gl.expand_dims(kept[WHICH], 1)
    else:
        rows = tiles.statistics.index(slot * NUM_STATISTICS + WHICH)
        return gl.expand_dims(rows.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def marks_in(tiles, slot, marks, TASK: gl.constexpr):
    """Returns NEGATIVE and CLAMPED of a tile; for dQ they are those of the warp group's rows."""
    if TASK.FOLDED:
        every: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        return gl.max(tiles.marks.index(slot).load(every), 0)
    else:
        return marks


@gluon.jit
def bias_of_tile(bias, work, first, i, like, HAS_BIAS: gl.constexpr, TASK: gl.constexpr):
    """Returns the bias of inner tile i and the outer rows from first on, as it lies in memory."""
    if HAS_BIAS:
        tile = gl.minimum(i, work.num_tiles - 1)
        num_rows, num_keys = work.seq.num_rows, work.seq.num_keys
        if TASK.ROWS:
            first_key = (work.first_tile - tile) * TASK.INNER
            return bias_of_rows(
                bias, work.b, work.first_head, first, first_key, num_rows, num_keys, like,
                not TASK.WHOLE_TILES,
            )  # fmt: skip
        else:
            first_row = (work.first_tile + tile // TASK.GROUP_SIZE) * TASK.INNER
            head = work.first_head + tile % TASK.GROUP_SIZE
            return bias_of_keys(
                bias, work.b, head, first_row, first, num_rows, num_keys, like,
                not TASK.WHOLE_TILES,
            )  # fmt: skip
    else:
        return 0.0


@gluon.jit
def biases_of_tile(sides, work, first, i, like, TASK: gl.constexpr):
    """Returns the biases of both sides of inner tile i; if both have the same, it is read once."""
    own = bias_of_tile(sides.own.bias, work, first, i, like, TASK.OWN_BIAS, TASK)
    if TASK.SAME_BIAS:
        other = own
    else:
        other = bias_of_tile(sides.other.bias, work, first, i, like, TASK.OTHER_BIAS, TASK)
    return own, other


@gluon.jit
def bits_of_tile(work, blocks, first, i, zero, TASK: gl.constexpr):
    """Returns a mask's bits of inner tile i, and whether it admits all of its block."""
    if TASK.HAS_MASK:
        tile = i // TASK.GROUP_SIZE
        entry = gl.load(work.list + 1 + tile // 2)
        bits = load_bits(
            blocks, work.seq.mask_offset, first // TASK.BLOCK, entry // 2 * 2 + tile % 2,
            lane_sum(zero),
        )  # fmt: skip
        return bits, entry % 2 == 1
    else:
        return 0, True


@gluon.jit
def first_half(own, place, tiles, slot, sides, bias, TASK: gl.constexpr):
    """Computes probabilities from own scores, or also their logarithms if they are needed."""
    layout: gl.constexpr = own.type.layout
    x = own * sides.own.scale
    if TASK.OWN_BIAS:
        x += bias.to(gl.float32) * sides.bias_scale
    x = x - along(place.kept, tiles, slot, OWN_LSE, layout, TASK)
    if TASK.PLAIN or TASK.SQUARES != 0.0:
        x = exp2(x)
    return x


@gluon.jit
def second_half(
    x, other, place, tiles, slot, marks, sides, bias,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Computes d(value)/d(own score), without COEFFICIENTS.TS if PLAIN.

    For dK it is multiplied by the incoming gradient, or if FOLDED by its size alone.
    """
    layout: gl.constexpr = other.type.layout
    kept = place.kept
    y = other * sides.other.scale
    if TASK.OTHER_BIAS:
        y += bias.to(gl.float32) * sides.bias_scale
    y = y - along(kept, tiles, slot, OTHER_LSE, layout, TASK)
    if TASK.PLAIN:
        d = exp2(y)
        if TASK.CLAMP > 0.0:  # NOTE [Rows without a clamped key]
            if (marks & CLAMPED) != 0:
                row_sum = along(kept, tiles, slot, DELTA, layout, TASK) * (
                    1.0 / TASK.COEFFICIENTS.TS
                )
                clamp = TASK.CLAMP
                if TASK.FOLDED:
                    clamp = along(kept, tiles, slot, CLAMP, layout, TASK)
                d = gl.where(x >= clamp, d, 0.0) - x * row_sum
            else:
                d = d - x
        else:
            d = d - x
    elif TASK.SQUARES != 0.0:
        d = x * ((exp2(y) - x) * TASK.SQUARES - along(kept, tiles, slot, DELTA, layout, TASK))
    else:
        log_t = y if TASK.STUDENT else x
        log_s = x if TASK.STUDENT else y
        delta = along(kept, tiles, slot, DELTA, layout, TASK)
        COEFFICIENTS: gl.constexpr = TASK.COEFFICIENTS
        POINTWISE: gl.constexpr = POINTWISE_FN is not None
        d = score_gradient(
            log_t, log_s, delta, TASK.STUDENT, POINTWISE, COEFFICIENTS, POINTWISE_FN
        )
    if not TASK.ROWS and not TASK.FOLDED:
        d = d * along(kept, tiles, slot, GRAD, layout, TASK)
    return d


@gluon.jit
def visible(d, work, outer, i, TASK: gl.constexpr):
    """Keeps d of inner tile i where rows see keys; 0 elsewhere, and in a tile that comes twice."""
    inner = gl.arange(0, TASK.INNER, layout=gl.SliceLayout(0, d.type.layout))
    if TASK.ROWS:
        rows = gl.expand_dims(outer, 1)
        keys = gl.expand_dims(inner + (work.first_tile - i) * TASK.INNER, 0)
    else:
        row = (work.first_tile + i // TASK.GROUP_SIZE) * TASK.INNER
        rows = gl.expand_dims(inner + row, 0)
        keys = gl.expand_dims(outer, 1)
    allowed = keys < gl.where(i < work.num_tiles, work.seq.num_valid, -(1 << 30))
    if not TASK.ROWS and TASK.IS_PACKED:  # after them is another sequence
        allowed = allowed & (rows < work.seq.num_rows)
    allowed = in_window(allowed, work.masks, work.seq, rows, keys, TASK.HAS_LEFT, TASK.HAS_RIGHT)
    return gl.where(allowed, d, 0.0)


@gluon.jit
def score_gradients(
    x, other, bias, bits, is_full, place, tiles, work, sides, i,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Returns dscore of inner tile i, in the inputs' dtype."""
    layout: gl.constexpr = other.type.layout
    slot = stage_of(place.used + i, TASK.SLOTS)
    marks = marks_in(tiles, slot, place.marks, TASK)
    d = second_half(x, other, place, tiles, slot, marks, sides, bias, POINTWISE_FN, TASK)
    if TASK.HAS_MASK:
        if (marks & NEGATIVE) != 0:
            d = d * along(place.kept, tiles, slot, GRAD, layout, TASK)
        if not is_full:
            d = where_admitted(bits, d, 0.0)
    elif (i < place.start_whole) | (i >= place.stop_whole) | ((marks & NEGATIVE) != 0):
        d = visible(d, work, place.outer, i, TASK)
        if TASK.FOLDED:
            d = d * along(place.kept, tiles, slot, GRAD, layout, TASK)
    return d.to(tiles.own_inner.dtype)
