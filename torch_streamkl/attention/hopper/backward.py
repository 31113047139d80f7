"""Implements the Hopper backward: one warp loads tiles, and warp groups accumulate gradients.

dQ and dK are one kernel. Its `outer` tiles stay in shared memory (queries for dQ, keys for dK:
TASK.ROWS says which), and its `inner` tiles (keys, queries) stream. Each warp group has 64 outer
rows, and sums dscore @ inner over the inner tiles in registers, in a fixed order. `own` is the
side whose gradient is computed, and `other` the other one. `keys_of_rows` and `rows_of_keys`
(scores.py) find the inner tiles of a block, and those of them that need no mask.

NOTE [A matmul always in flight]
While a warp group turns scores into gradients, the tensor cores run its next matmul: own scores of
the next tile during the second half of a tile, its other scores and the sum during the first. At
the loop's back edge nothing is in flight: NOTE [Matmuls under arithmetic] in warp_groups.py. The
compiler moves the first half below the wait for the matmuls that it should overlap; `pinned` keeps
it above, which takes an instruction for every eight elements.

NOTE [Statistics of streamed rows]
For dK the row statistics lie along the columns of a tile, 16 columns a thread. The loading warp
puts them into shared memory next to the tile. There it replaces the lse = -inf of rows without
keys by 0.

NOTE [Folded gradients]
For a plain dK the loading warp subtracts log2 |incoming gradient| from both log-sum-exps of a row.
So the probabilities, and the clamp that they are compared with, come multiplied by it (2^-inf = 0
if it is 0). Signs are kept as well, and a tile with a negative one multiplies by them; the
gradients of a mean or of a sum have no negative sign.

NOTE [Rows without a clamped key]
A clamp takes three instructions for every pair of query and key, and most rows have no probability
below it. The delta of such a row is COEFFICIENTS.TS, to the bit (`finish` in
kernels/row_state.py); that of a recomputed row is not (`forward_block`). If all rows of a tile
have it, the tile skips the clamp.

NOTE [Overlapping kernels]
A backward launches one kernel per gradient, and none reads what another writes. The last programs
of a kernel leave multiprocessors idle. So each kernel lets the next one begin when its own last
programs have begun (programmatic dependent launch), and ends after the one before it: waiting for
the last kernel waits for all.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_streamkl.attention.hopper.atomic import add_queries, hand_over, new_handover
from torch_streamkl.attention.hopper.biases import bias_of_keys, bias_of_rows
from torch_streamkl.attention.hopper.packed import packed_block
from torch_streamkl.attention.hopper.warp_groups import (
    GROUP_REGISTERS,
    NUM_WARPS,
    anew,
    async_load,
    exp2,
    flat,
    phase_of,
    pinned,
    stage_of,
    start_scores,
    without_offset,
)
from torch_streamkl.attention.triton.forward import finite_lse, row_offset
from torch_streamkl.kernels.arguments import MaskArgs
from torch_streamkl.kernels.row_state import score_gradient, tile_coordinates
from torch_streamkl.kernels.scores import bind_sequence, in_window, keys_of_rows, rows_of_keys

LOADER_REGISTERS = gl.constexpr(32)
ADDER_REGISTERS = gl.constexpr(96)
# what `along` finds of a row, in this order
OWN_LSE, OTHER_LSE, DELTA, GRAD, CLAMP = (gl.constexpr(i) for i in range(5))
NUM_STATISTICS = gl.constexpr(5)
# log-sum-exp of rows without an incoming gradient: log-probabilities stay finite, since formulas
# such as logaddexp of two infinities are NaN, and 0 times that is
LEFT_OUT = gl.constexpr(1e30)
# what some row of a tile has: a negative incoming gradient (FOLDED), a probability below the clamp
NEGATIVE, CLAMPED = gl.constexpr(1), gl.constexpr(2)


class Task(NamedTuple):
    """Holds the compile-time choices of a launch; TASK inside of the kernel."""

    ROWS: bool  # dQ, otherwise dK
    STUDENT: bool  # own is the student
    HAS_LEFT: bool  # these as in arguments.Config
    HAS_RIGHT: bool
    HAS_MASK: bool
    IS_PACKED: bool
    # the gradient is COEFFICIENTS.TS (P - S): no logarithms, and the teacher's row sum is 1
    PLAIN: bool
    CLAMP: float  # if PLAIN: P counts for keys with S >= CLAMP only, as in its row sum; 0 is none
    SQUARES: float  # the gradient is own (SQUARES (other - own) - delta) if not 0: no logarithms
    FOLDED: bool  # NOTE [Folded gradients]
    COEFFICIENTS: Any
    GROUP_SIZE: int  # of dK: query heads of one of its SPLITS, which share a key head on each side
    SPLITS: int  # programs of an outer block: of dK for some of its heads each, of dQ of its tiles
    DIM: int  # head_dim of own
    HEAD_DIM: int  # columns of a tile of own: head_dim or, where that is none, a power of two
    OTHER_DIM: int
    BLOCK: int  # outer rows of a warp group
    INNER: int  # rows of an inner tile
    GROUPS: int  # warp groups that accumulate
    SLOTS: int  # of inner tiles in shared memory, a power of two
    PINNED: bool  # NOTE [A matmul always in flight]
    OWN_BIAS: bool  # scores of the side have a bias
    OTHER_BIAS: bool
    SAME_BIAS: bool  # one bias for both sides: read once
    WHOLE_TILES: bool  # of a bias: no inner tile ends beyond it
    ADDS: bool  # dK, and dQ in the same kernel: NOTE [dQ by atomics] in attention/hopper/atomic.py


class Tiles(NamedTuple):
    """Holds shared memory: outer tiles of each warp group, stages of inner tiles, barriers."""

    own_outer: Any
    other_outer: Any
    own_inner: Any
    other_inner: Any
    statistics: Any  # of the inner rows, by stage
    marks: Any  # by stage: NEGATIVE and CLAMPED, of dK's inner rows
    outer_bar: Any
    full: Any
    empty: Any
    handover: Any  # atomic.Handover where TASK.ADDS


class Work(NamedTuple):
    """Holds the outer block of a program, and the range of inner tiles that it meets."""

    b: Any  # in the tensors: packed ones have one batch element
    first_head: Any  # of the queries: the head of dQ, the first that shares the keys of dK
    own_key_head: Any
    other_key_head: Any
    out_head: Any  # of the gradient, whose shares are heads of their own
    start: Any  # first row or key of the block
    first_tile: Any  # of the inner tiles
    num_tiles: Any  # of all heads together
    num_loads: Any  # an even number: the last tile may come twice
    masks: Any  # arguments.MaskArgs
    seq: Any  # arguments.Sequence
    own_scale: Any
    other_scale: Any
    own_bias: Any  # biases.Bias
    other_bias: Any
    bias_scale: Any


class Statistics(NamedTuple):
    """Holds pointers to the row statistics, and where those of the first head begin."""

    own: Any
    other: Any
    delta: Any
    grad: Any
    head_row: Any


class Output(NamedTuple):
    """Holds the gradient, or the program's share of it: pointer, strides and factor."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    scale: Any


@gluon.jit
def load_statistics(stats, member, row, work, TASK: gl.constexpr):
    """Loads own lse, other lse, delta, incoming gradient and clamp of rows of a head.

    If FOLDED, the gradient's size is in both lse and in the clamp, and only its sign is left. With
    a clamp, the delta is that of P for keys at which S is not below it.
    """
    inside = row < work.seq.num_rows
    row = row + (stats.head_row + member * work.masks.seqlen_q)
    own = finite_lse(gl.load(stats.own + row, mask=inside, other=0.0))
    other = finite_lse(gl.load(stats.other + row, mask=inside, other=0.0))
    grad = gl.load(stats.grad + row, mask=inside, other=0.0)
    delta = grad  # nobody reads it
    clamp = TASK.CLAMP
    if not TASK.PLAIN or TASK.CLAMP > 0.0:
        delta = gl.load(stats.delta + row, mask=inside, other=TASK.COEFFICIENTS.TS)
    if TASK.FOLDED:
        size = gl.abs(grad)
        clamp = size * TASK.CLAMP
        own = own - gl.log2(size)
        other = other - gl.log2(size)
        grad = gl.where(grad < 0.0, -1.0, 1.0)
    elif not TASK.PLAIN:
        # rows that do not count get probabilities of 0: their own gradients may be infinite
        left_out = grad == 0.0
        own = gl.where(left_out, LEFT_OUT, own)
        other = gl.where(left_out, LEFT_OUT, other)
        delta = gl.where(left_out, 0.0, delta)
    return own, other, delta, grad, clamp


@gluon.jit
def marks_of(kept, TASK: gl.constexpr):
    """Tells whether rows with these statistics are NEGATIVE and CLAMPED."""
    marks = gl.to_tensor(0)
    if TASK.FOLDED:
        marks = marks | gl.max((kept[GRAD] < 0.0).to(gl.int32), 0) * NEGATIVE
    if TASK.CLAMP > 0.0:
        marks = marks | gl.max((kept[DELTA] != TASK.COEFFICIENTS.TS).to(gl.int32), 0) * CLAMPED
    return marks


@gluon.jit
def load_all(
    own_outer, other_outer, own_inner, other_inner, tiles, work, stats, TASK: gl.constexpr
):
    """Runs the loading warp (producer): loads outer tiles once, then inner tiles into empty
    stages.
    """
    GROUPS: gl.constexpr = TASK.GROUPS
    own_head = work.first_head if TASK.ROWS else work.own_key_head
    other_head = work.first_head if TASK.ROWS else work.other_key_head
    mbarrier.expect(
        tiles.outer_bar,
        GROUPS * (own_outer.block_type.nbytes + other_outer.block_type.nbytes),
    )
    start = work.start + (work.seq.start_q if TASK.ROWS else work.seq.start_k)
    for group in gl.static_range(GROUPS):
        row = start + group * TASK.BLOCK
        async_load(
            own_outer, [work.b, own_head, row, 0], tiles.outer_bar, tiles.own_outer.index(group)
        )
        async_load(
            other_outer, [work.b, other_head, row, 0],
            tiles.outer_bar, tiles.other_outer.index(group),
        )  # fmt: skip
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    for i in range(work.num_loads):
        slot = stage_of(i, TASK.SLOTS)
        tile = gl.minimum(i, work.num_tiles - 1)
        member = tile % TASK.GROUP_SIZE
        if TASK.ROWS:
            own_head = work.own_key_head
            other_head = work.other_key_head
            row = (work.first_tile - tile) * TASK.INNER
        else:
            own_head = work.first_head + member
            other_head = work.first_head + member
            row = (work.first_tile + tile // TASK.GROUP_SIZE) * TASK.INNER
        full = tiles.full.index(slot)
        if not TASK.ROWS:  # they arrive while the stage is not empty yet
            rows = row + gl.arange(0, TASK.INNER, layout=lanes)
            found = load_statistics(stats, member, rows, work, TASK)
        mbarrier.wait(tiles.empty.index(slot), phase_of(i, TASK.SLOTS) ^ 1)
        mbarrier.expect(full, own_inner.block_type.nbytes + other_inner.block_type.nbytes)
        row += work.seq.start_k if TASK.ROWS else work.seq.start_q
        async_load(own_inner, [work.b, own_head, row, 0], full, tiles.own_inner.index(slot))
        async_load(other_inner, [work.b, other_head, row, 0], full, tiles.other_inner.index(slot))
        if not TASK.ROWS:
            statistics = slot * NUM_STATISTICS
            tiles.statistics.index(statistics + OWN_LSE).store(found[OWN_LSE])
            tiles.statistics.index(statistics + OTHER_LSE).store(found[OTHER_LSE])
            tiles.statistics.index(statistics + GRAD).store(found[GRAD])
            if not TASK.PLAIN or TASK.CLAMP > 0.0:
                tiles.statistics.index(statistics + DELTA).store(found[DELTA])
            if TASK.FOLDED:
                if TASK.CLAMP > 0.0:
                    tiles.statistics.index(statistics + CLAMP).store(found[CLAMP])
                one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
                marks = marks_of(found, TASK)
                tiles.marks.index(slot).store(gl.full([1], marks, gl.int32, layout=one))
            mbarrier.arrive(full, count=1)


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
def first_half(own, kept, tiles, slot, scale, TASK: gl.constexpr, bias=0.0, bias_scale=0.0):
    """Computes probabilities from own scores, or also their logarithms if they are needed."""
    layout: gl.constexpr = own.type.layout
    x = own * scale
    if TASK.OWN_BIAS:
        x += bias.to(gl.float32) * bias_scale
    x = x - along(kept, tiles, slot, OWN_LSE, layout, TASK)
    if TASK.PLAIN or TASK.SQUARES != 0.0:
        x = exp2(x)
    return x


@gluon.jit
def second_half(
    x, other, kept, tiles, slot, marks, scale, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
    bias=0.0, bias_scale=0.0,
):  # fmt: skip
    """Computes d(value)/d(own score), without COEFFICIENTS.TS if PLAIN.

    For dK it is multiplied by the incoming gradient, or if FOLDED by its size alone.
    """
    layout: gl.constexpr = other.type.layout
    y = other * scale
    if TASK.OTHER_BIAS:
        y += bias.to(gl.float32) * bias_scale
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
def tiles_met(masks, seq, start, TASK: gl.constexpr):
    """Finds the first inner tile, and the number of them, that the block at start meets."""
    ROWS_OF_BLOCK: gl.constexpr = TASK.GROUPS * TASK.BLOCK
    if TASK.ROWS:
        first, _, _, stop = keys_of_rows(
            masks, seq, start, ROWS_OF_BLOCK, TASK.INNER, TASK.HAS_LEFT, TASK.HAS_RIGHT, False
        )
        num_tiles = (stop - first + TASK.INNER - 1) // TASK.INNER
        first_tile = first // TASK.INNER + num_tiles - 1  # from the last to the first
    else:
        first, _, _, stop = rows_of_keys(
            masks, seq, start, ROWS_OF_BLOCK, TASK.INNER, TASK.HAS_LEFT, TASK.HAS_RIGHT, False
        )
        num_tiles = (stop - first + TASK.INNER - 1) // TASK.INNER * TASK.GROUP_SIZE
        first_tile = first // TASK.INNER
    return first_tile, num_tiles


@gluon.jit
def tiles_without_mask(work, first, TASK: gl.constexpr):
    """Finds the inner tiles, from start to stop, in which this warp group needs no mask."""
    if TASK.ROWS:
        _, left, right, _ = keys_of_rows(
            work.masks, work.seq, first, TASK.BLOCK, TASK.INNER,
            TASK.HAS_LEFT, TASK.HAS_RIGHT, False,
        )  # fmt: skip
        behind = work.first_tile + 1  # from the last to the first
        start = behind - right // TASK.INNER
        stop = behind - left // TASK.INNER
    else:
        _, left, right, _ = rows_of_keys(
            work.masks, work.seq, first, TASK.BLOCK, TASK.INNER,
            TASK.HAS_LEFT, TASK.HAS_RIGHT, False,
        )  # fmt: skip
        start = (left // TASK.INNER - work.first_tile) * TASK.GROUP_SIZE
        stop = (right // TASK.INNER - work.first_tile) * TASK.GROUP_SIZE
    return start, gl.minimum(stop, work.num_tiles)


@gluon.jit
def accumulate(
    tiles, work, stats, output, GROUP: gl.constexpr, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr
):
    """Runs one warp group, which sums the gradient of its outer rows."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, TASK.INNER, 16]
    )
    out_mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, TASK.HEAD_DIM, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    # descriptors of outer tiles of more columns take more registers than there are
    WIDE: gl.constexpr = TASK.HEAD_DIM + TASK.OTHER_DIM > 256
    dtype: gl.constexpr = tiles.own_inner.dtype
    first = work.start + GROUP * TASK.BLOCK
    outer = first + gl.arange(0, TASK.BLOCK, layout=gl.SliceLayout(1, mma))
    start_whole, stop_whole = tiles_without_mask(work, first, TASK)
    if TASK.ROWS:
        kept = load_statistics(stats, 0, outer, work, TASK)
        marks_of_rows = marks_of(kept, TASK)
    else:
        kept = (0, 0, 0, 0, 0)  # they come with the tiles
        marks_of_rows = 0
    zero = gl.full([TASK.BLOCK, TASK.INNER], 0.0, gl.float32, layout=mma)
    acc = gl.full([TASK.BLOCK, TASK.HEAD_DIM], 0.0, gl.float32, layout=out_mma)
    own_outer = flat(tiles.own_outer.index(GROUP))
    other_outer = flat(tiles.other_outer.index(GROUP))
    mbarrier.wait(tiles.outer_bar, 0)
    if work.num_tiles > 0:
        mbarrier.wait(tiles.full.index(0), 0)
        own = start_scores(own_outer, tiles.own_inner.index(0), zero)
        other = start_scores(other_outer, tiles.other_inner.index(0), zero)
        own_bias = bias_of_tile(work.own_bias, work, first, 0, zero, TASK.OWN_BIAS, TASK)
        if TASK.SAME_BIAS:
            other_bias = own_bias
        else:
            other_bias = bias_of_tile(work.other_bias, work, first, 0, zero, TASK.OTHER_BIAS, TASK)
        own, other = warpgroup_mma_wait(0, deps=[own, other])
        x = first_half(own, kept, tiles, 0, work.own_scale, TASK, own_bias, work.bias_scale)
        for pair in range(0, work.num_loads, 2):
            for step in gl.static_range(2):
                i = pair + step
                slot = stage_of(i, TASK.SLOTS)
                following = stage_of(i + 1, TASK.SLOTS)
                # past the end matmuls read what the stage still holds, and nobody reads them
                mbarrier.wait(
                    tiles.full.index(following),
                    phase_of(i + 1, TASK.SLOTS),
                    pred=i + 1 < work.num_loads,
                )
                if WIDE:
                    group = anew(gl.to_tensor(GROUP))
                    own_outer = flat(tiles.own_outer.index(group))
                    other_outer = flat(tiles.other_outer.index(group))
                own = start_scores(own_outer, tiles.own_inner.index(following), zero)
                bias = other_bias  # of the next tile both are loaded under this one's arithmetic
                own_bias = bias_of_tile(
                    work.own_bias, work, first, i + 1, zero, TASK.OWN_BIAS, TASK
                )
                if TASK.SAME_BIAS:
                    other_bias = own_bias
                else:
                    other_bias = bias_of_tile(
                        work.other_bias, work, first, i + 1, zero, TASK.OTHER_BIAS, TASK
                    )
                marks = marks_in(tiles, slot, marks_of_rows, TASK)
                scale = work.other_scale
                d = second_half(
                    x,
                    other,
                    kept,
                    tiles,
                    slot,
                    marks,
                    scale,
                    POINTWISE_FN,
                    TASK,
                    bias,
                    work.bias_scale,
                )
                if (i < start_whole) | (i >= stop_whole) | ((marks & NEGATIVE) != 0):
                    d = visible(d, work, outer, i, TASK)
                    if TASK.FOLDED:
                        d = d * along(kept, tiles, slot, GRAD, mma, TASK)
                d = d.to(dtype)
                if TASK.ADDS:
                    hand_over(d, tiles.handover, i, GROUP, TASK)
                d = gl.convert_layout(d, operand)
                acc = warpgroup_mma(d, flat(tiles.own_inner.index(slot)), acc, is_async=True)
                own = warpgroup_mma_wait(1, deps=[own])
                other = start_scores(other_outer, tiles.other_inner.index(following), zero)
                x = first_half(
                    own, kept, tiles, following, work.own_scale, TASK, own_bias, work.bias_scale
                )
                if TASK.PINNED:
                    x = pinned(x)
                other, acc = warpgroup_mma_wait(0, deps=[other, acc])
                mbarrier.arrive(tiles.empty.index(slot), count=1)
    rows = first + gl.arange(0, TASK.BLOCK, layout=gl.SliceLayout(1, out_mma))
    dims = gl.arange(0, TASK.HEAD_DIM, layout=gl.SliceLayout(0, out_mma))
    factor = output.scale
    if TASK.PLAIN:
        factor = factor * TASK.COEFFICIENTS.TS
    if TASK.ROWS:
        inside = rows < work.seq.num_rows
        first_row = work.seq.start_q
        grad = gl.load(stats.grad + (stats.head_row + rows), mask=inside, other=0.0)
        acc = acc * gl.expand_dims(grad * factor, 1)
    else:
        inside = rows < work.seq.num_keys
        first_row = work.seq.start_k
        acc = acc * factor
    out = output.ptr + work.b.to(gl.int64) * output.stride_b
    out += work.out_head.to(gl.int64) * output.stride_h
    rows = (first_row + rows).to(gl.int64)
    out = out + gl.expand_dims(rows * output.stride_n, 1) + gl.expand_dims(dims, 0)
    inside = gl.expand_dims(inside, 1)
    if TASK.DIM < TASK.HEAD_DIM:
        inside = inside & (gl.expand_dims(dims, 0) < TASK.DIM)
    gl.store(out, acc.to(output.ptr.dtype.element_ty), mask=inside)
    gdc_wait()  # NOTE [Overlapping kernels]


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(do_not_specialize=["num_blocks", "seqlen_q", "seqlen_k", "window_left", "window_right"])
def backward_kernel(
    own_outer, other_outer, own_inner, other_inner,
    grad_ptr, own_stats, other_stats, stats_stride,
    out_ptr, out_b, out_h, out_n, out_scale, sums,
    num_blocks, num_heads, own_group, other_group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right, cu_seqlens_q, cu_seqlens_k, table,
    own_scale, other_scale, own_bias, other_bias, bias_scale,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Computes dQ (ROWS) or dK of a block of rows or keys of one head.

    num_heads counts query heads. If TASK.ADDS, the kernel also adds the block's part of dQ to
    `sums`, without its factor. If TASK.COEFFICIENTS does not hold, POINTWISE_FN computes the
    gradient of one key (pointwise.py).
    """
    gdc_launch_dependents()  # NOTE [Overlapping kernels]
    # heads may share a bias: those that run at once read the same rows of it
    INTERLEAVED: gl.constexpr = TASK.HAS_RIGHT or TASK.OWN_BIAS or TASK.OTHER_BIAS
    position, sequence = tile_coordinates(gl.program_id(0), num_blocks, INTERLEAVED)
    if TASK.ROWS and TASK.HAS_RIGHT:
        position = num_blocks - 1 - position  # causal rows grow: the longest first
    start = position * (TASK.GROUPS * TASK.BLOCK)
    num_groups = num_heads // TASK.GROUP_SIZE
    share = 0
    if TASK.ROWS and TASK.SPLITS > 1:
        share = sequence % TASK.SPLITS
        sequence = sequence // TASK.SPLITS
    b = sequence // num_groups
    out_head = sequence % num_groups
    if table is not None:
        b, position, out_head = packed_block(gl.program_id(0), table, num_blocks)
        start = position * (TASK.GROUPS * TASK.BLOCK)
    first_head = out_head * TASK.GROUP_SIZE
    masks = MaskArgs(
        None, 0, 0, 0, 0, key_lengths, 0, 0, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
    )
    seq = bind_sequence(masks, b, first_head, TASK)
    # the bounds of the window with the offset in them: a register less in the loops
    left, right = window_left - seq.offset, window_right + seq.offset
    seq = without_offset(seq)
    masks = MaskArgs(
        None, 0, 0, 0, 0, key_lengths, left, right, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
    )
    head_row = row_offset(b * num_heads + first_head, first_head, seq, masks)
    if cu_seqlens_q is not None:
        if start >= (seq.num_rows if TASK.ROWS else seq.num_keys):
            gdc_wait()
            return
        b = b * 0
    first_tile, num_tiles = tiles_met(masks, seq, start, TASK)
    if TASK.ROWS and TASK.SPLITS > 1:
        most = (num_tiles + TASK.SPLITS - 1) // TASK.SPLITS
        first_tile -= share * most
        num_tiles = gl.maximum(gl.minimum(num_tiles - share * most, most), 0)
        out_head = out_head * TASK.SPLITS + share
    work = Work(
        b, first_head, first_head // own_group, first_head // other_group, out_head, start,
        first_tile, num_tiles, num_tiles + (num_tiles & 1), masks, seq, own_scale, other_scale,
        own_bias, other_bias, bias_scale,
    )  # fmt: skip
    stats = Statistics(own_stats, other_stats, own_stats + stats_stride, grad_ptr, head_row)
    output = Output(out_ptr, out_b, out_h, out_n, out_scale)

    SLOTS: gl.constexpr = TASK.SLOTS
    own_tiles: gl.constexpr = [TASK.GROUPS, 1, 1, TASK.BLOCK, TASK.HEAD_DIM]
    other_tiles: gl.constexpr = [TASK.GROUPS, 1, 1, TASK.BLOCK, TASK.OTHER_DIM]
    own_slots: gl.constexpr = [TASK.SLOTS, 1, 1, TASK.INNER, TASK.HEAD_DIM]
    other_slots: gl.constexpr = [TASK.SLOTS, 1, 1, TASK.INNER, TASK.OTHER_DIM]
    rows: gl.constexpr = [1 if TASK.ROWS else TASK.SLOTS * NUM_STATISTICS, TASK.INNER]
    vectors: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    handover = None
    if TASK.ADDS:
        handover = new_handover(own_inner.dtype, TASK)
        tiles_of_head = (seqlen_q + TASK.INNER - 1) // TASK.INNER
        tile_size: gl.constexpr = TASK.INNER * TASK.HEAD_DIM
        sums += (b * num_heads + first_head).to(gl.int64) * tiles_of_head * tile_size
    tiles = Tiles(
        gl.allocate_shared_memory(own_outer.dtype, own_tiles, own_outer.layout),
        gl.allocate_shared_memory(other_outer.dtype, other_tiles, other_outer.layout),
        gl.allocate_shared_memory(own_inner.dtype, own_slots, own_inner.layout),
        gl.allocate_shared_memory(other_inner.dtype, other_slots, other_inner.layout),
        gl.allocate_shared_memory(gl.float32, rows, vectors),
        gl.allocate_shared_memory(gl.int32, [TASK.SLOTS, 1], vectors),
        gl.allocate_shared_memory(gl.int64, [1], bars),
        gl.allocate_shared_memory(gl.int64, [TASK.SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [TASK.SLOTS, 1], bars),
        handover,
    )
    mbarrier.init(tiles.outer_bar, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1 if TASK.ROWS else 2)
        mbarrier.init(tiles.empty.index(slot), count=TASK.GROUPS)
    REGISTERS: gl.constexpr = (
        GROUP_REGISTERS - (ADDER_REGISTERS if TASK.ADDS else 0)
    ) // TASK.GROUPS
    if TASK.GROUPS == 2 and not TASK.ADDS:
        gl.warp_specialize(
            [
                (accumulate, (tiles, work, stats, output, gl.constexpr(0), POINTWISE_FN, TASK)),
                (accumulate, (tiles, work, stats, output, gl.constexpr(1), POINTWISE_FN, TASK)),
                (load_all, (
                    own_outer, other_outer, own_inner, other_inner, tiles, work, stats, TASK,
                )),
            ],
            [NUM_WARPS, 1],
            [REGISTERS, 24 if TASK.HEAD_DIM + TASK.OTHER_DIM > 256 else LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (accumulate, (tiles, work, stats, output, gl.constexpr(0), POINTWISE_FN, TASK)),
                (accumulate, (tiles, work, stats, output, gl.constexpr(1), POINTWISE_FN, TASK)),
                (add_queries, (tiles, work, sums, TASK)) if TASK.ADDS else
                (accumulate, (tiles, work, stats, output, gl.constexpr(2), POINTWISE_FN, TASK)),
                (load_all, (
                    own_outer, other_outer, own_inner, other_inner, tiles, work, stats, TASK,
                )),
            ],
            [NUM_WARPS, NUM_WARPS, 1],
            [REGISTERS, ADDER_REGISTERS if TASK.ADDS else REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
