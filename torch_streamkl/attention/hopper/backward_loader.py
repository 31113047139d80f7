"""Loads for the Hopper backward: outer tiles, inner tiles, and the statistics of inner rows.

NOTE [Statistics of streamed rows]
For dK the row statistics lie along the columns of a tile, 16 columns a thread. The loading warp
puts them into shared memory next to the tile. There it replaces the lse = -inf of rows without
keys by 0.

NOTE [Folded gradients]
For a plain dK the loading warp subtracts log2 |incoming gradient| from both log-sum-exps of a row.
So the probabilities, and the clamp that they are compared with, come multiplied by it (2^-inf = 0
if it is 0). Signs are kept as well, and a tile with a negative one multiplies by them; the
gradients of a mean or of a sum have no negative sign.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

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
from torch_streamkl.attention.hopper.backward_scheduler import inner_tile, work_at
from torch_streamkl.attention.hopper.pipeline import async_load
from torch_streamkl.attention.hopper.tile_scheduler import num_steps_of_program, tile_of_step
from torch_streamkl.attention.hopper.warp_groups import phase_of, stage_of
from torch_streamkl.attention.triton.forward import finite_lse

# log-sum-exp of rows without an incoming gradient: log-probabilities stay finite, since formulas
# such as logaddexp of two infinities are NaN, and 0 times that is
LEFT_OUT = gl.constexpr(1e30)


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
def store_statistics(found, tiles, slot, full, TASK: gl.constexpr):
    """Puts the statistics of an inner tile's rows into its stage."""
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
def load_outer(own, other, tiles, work, done, TASK: gl.constexpr):
    """Loads the outer tiles of every warp group.

    If PERSISTENT, those of a warp group when it is done with the block before.
    """
    own_head = work.first_head if TASK.ROWS else work.own_key_head
    other_head = work.first_head if TASK.ROWS else work.other_key_head
    GROUPS: gl.constexpr = TASK.GROUPS
    NBYTES: gl.constexpr = own.outer.block_type.nbytes + other.outer.block_type.nbytes
    full = tiles.outer_full
    if not TASK.PERSISTENT:
        mbarrier.expect(full, GROUPS * NBYTES)
    start = work.start + (work.seq.start_q if TASK.ROWS else work.seq.start_k)
    for group in gl.static_range(GROUPS):
        if TASK.PERSISTENT:
            full = tiles.outer_full.index(group)
            mbarrier.wait(tiles.outer_empty.index(group), (done & 1) ^ 1)
            mbarrier.expect(full, NBYTES)
        row = start + group * TASK.BLOCK
        async_load(own.outer, [work.b, own_head, row, 0], full, tiles.own_outer.index(group))
        async_load(other.outer, [work.b, other_head, row, 0], full, tiles.other_outer.index(group))


@gluon.jit
def load_inner(own, other, tiles, work, i, used, TASK: gl.constexpr):
    """Loads inner tile i of a block; those after the last are the last one again."""
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    slot = stage_of(used + i, TASK.SLOTS)
    tile = i if TASK.PERSISTENT else gl.minimum(i, work.num_tiles - 1)
    member = tile % TASK.GROUP_SIZE
    if TASK.ROWS:
        own_head = work.own_key_head
        other_head = work.other_key_head
    else:
        own_head = work.first_head + member
        other_head = work.first_head + member
    row = inner_tile(work, tile, TASK) * TASK.INNER
    full = tiles.full.index(slot)
    if not TASK.ROWS:  # they arrive while the stage is not empty yet
        rows = row + gl.arange(0, TASK.INNER, layout=lanes)
        found = load_statistics(work.stats, member, rows, work, TASK)
    mbarrier.wait(tiles.empty.index(slot), phase_of(used + i, TASK.SLOTS) ^ 1)
    mbarrier.expect(full, own.inner.block_type.nbytes + other.inner.block_type.nbytes)
    row += work.seq.start_k if TASK.ROWS else work.seq.start_q
    async_load(own.inner, [work.b, own_head, row, 0], full, tiles.own_inner.index(slot))
    async_load(other.inner, [work.b, other_head, row, 0], full, tiles.other_inner.index(slot))
    if not TASK.ROWS:
        store_statistics(found, tiles, slot, full, TASK)


@gluon.jit
def load_all(launch, work, TASK: gl.constexpr):
    """Runs the loading warp (producer).

    In a persistent kernel, a block's first inner tile does not wait for its outer tiles' memory.
    """
    own, other, tiles = launch.sides.own, launch.sides.other, launch.tiles
    if TASK.PERSISTENT:
        used = 0
        done = 0
        for step_of_program in range(num_steps_of_program(launch.grid)):
            number = tile_of_step(step_of_program, launch.grid)
            if number < launch.grid.num_works:
                block = work_at(number, launch, TASK)
                for i in range(gl.minimum(block.num_tiles, 1)):
                    load_inner(own, other, tiles, block, i, used, TASK)
                load_outer(own, other, tiles, block, done, TASK)
                for i in range(1, block.num_tiles):
                    load_inner(own, other, tiles, block, i, used, TASK)
                used += block.num_tiles
                done += 1
    else:
        load_outer(own, other, tiles, work, 0, TASK)
        for i in range(work.num_loads):
            load_inner(own, other, tiles, work, i, 0, TASK)
