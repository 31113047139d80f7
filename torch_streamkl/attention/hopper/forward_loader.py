"""Runs the loading warp (producer) of the Hopper forward: queries, and key tiles into stages.

Tiles of keys are loaded in pairs, which halves the barriers. They come from the last key to the
first, so that those that need a mask come first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_streamkl.attention.hopper.pipeline import async_load
from torch_streamkl.attention.hopper.tile_scheduler import (
    block_at,
    num_steps_of_program,
    pair_at,
    tile_of_step,
)
from torch_streamkl.attention.hopper.warp_groups import phase_of, stage_of


@gluon.jit
def load_queries(launch, block, full, GROUP: gl.constexpr, TASK: gl.constexpr):
    """Loads the queries of a warp group."""
    tiles, other, weight = launch.tiles, launch.sides.other.q, launch.sides.weight.q
    row = block.seq.start_q + block.m0 + GROUP * TASK.CONFIG.BLOCK_M
    async_load(other, [block.b, block.h, row, 0], full, tiles.other_q.index(GROUP))
    async_load(weight, [block.b, block.h, row, 0], full, tiles.weight_q.index(GROUP))


@gluon.jit
def load_queries_when_empty(launch, block, done, GROUP: gl.constexpr, TASK: gl.constexpr):
    """Loads the queries of a warp group, when it is done with those of the block before."""
    tiles, sides = launch.tiles, launch.sides
    full = tiles.q_full.index(GROUP)
    mbarrier.wait(tiles.q_empty.index(GROUP), (done & 1) ^ 1)
    mbarrier.expect(full, sides.other.q.block_type.nbytes + sides.weight.q.block_type.nbytes)
    load_queries(launch, block, full, GROUP, TASK)


@gluon.jit
def load_side(x, at, keys, i, full, SLOTS: gl.constexpr):
    """Loads pair i of a side's key tiles, whose first key is `at`: [batch, heads, seqlen]."""
    b, h, row = at
    ROWS: gl.constexpr = x.block_type.shape[2]
    TILES: gl.constexpr = 128 // ROWS
    for tile in gl.static_range(TILES):
        place = stage_of(i, SLOTS) * TILES + tile
        async_load(x, [b, h, row + tile * ROWS, 0], full, keys.index(place))


@gluon.jit
def load_pair(launch, block, i, used, TASK: gl.constexpr):
    """Loads pair i of a block, counted from its last, into an empty stage."""
    CONFIG: gl.constexpr = TASK.CONFIG
    tiles, other, weight = launch.tiles, launch.sides.other, launch.sides.weight
    other_h, weight_h = block.h // other.group, block.h // weight.group
    slot = stage_of(used + i, TASK.SLOTS)
    full = tiles.full.index(slot)
    pair = pair_at(block, i, CONFIG)
    mbarrier.wait(tiles.empty.index(slot), phase_of(used + i, TASK.SLOTS) ^ 1)
    TILES: gl.constexpr = 2 * CONFIG.BLOCK_N // other.k.block_type.shape[2]
    mbarrier.expect(full, TILES * (other.k.block_type.nbytes + weight.k.block_type.nbytes))
    row = block.seq.start_k + 2 * pair * CONFIG.BLOCK_N
    load_side(other.k, (block.b, other_h, row), tiles.other_k, used + i, full, TASK.SLOTS)
    load_side(weight.k, (block.b, weight_h, row), tiles.weight_k, used + i, full, TASK.SLOTS)


@gluon.jit
def load_tile(side, keys, tiles, block, row, load, TASK: gl.constexpr):
    """Loads a tile of a side into an empty stage: NOTE [Wide tiles] in frozen_max.py."""
    slot = load % TASK.SLOTS
    full = tiles.full.index(slot)
    mbarrier.wait(tiles.empty.index(slot), load // TASK.SLOTS & 1 ^ 1)
    mbarrier.expect(full, side.k.block_type.nbytes)
    async_load(side.k, [block.b, block.h // side.group, row, 0], full, keys.index(slot))


@gluon.jit
def load_block(launch, block, TASK: gl.constexpr):
    """Loads the only block of a program: queries once, then every pair, or tile if WIDE."""
    tiles, other, weight = launch.tiles, launch.sides.other, launch.sides.weight
    GROUPS: gl.constexpr = TASK.GROUPS
    NBYTES: gl.constexpr = other.q.block_type.nbytes + weight.q.block_type.nbytes
    mbarrier.expect(tiles.q_full, GROUPS * NBYTES)
    for group in gl.static_range(GROUPS):
        load_queries(launch, block, tiles.q_full, group, TASK)
    for i in range(block.num_pairs):
        if TASK.WIDE:
            row = block.seq.start_k + (block.stop_pair - 1 - i) * TASK.CONFIG.BLOCK_N
            load_tile(other, tiles.other_k, tiles, block, row, 2 * i, TASK)
            load_tile(weight, tiles.weight_k, tiles, block, row, 2 * i + 1, TASK)
        else:
            load_pair(launch, block, i, 0, TASK)


@gluon.jit
def load_next_block(launch, block, used, done, TASK: gl.constexpr):
    """Loads a block of a persistent program, and returns how many pairs it has read by then.

    The last warp group finishes a block first, and sees the next one's first pair.
    """
    LAST: gl.constexpr = TASK.GROUPS - 1
    load_queries_when_empty(launch, block, done, LAST, TASK)
    for i in range(gl.minimum(block.num_pairs, 1)):
        load_pair(launch, block, i, used, TASK)
    for group in gl.static_range(1, LAST + 1):
        load_queries_when_empty(launch, block, done, LAST - group, TASK)
    for i in range(1, block.num_pairs):
        load_pair(launch, block, i, used, TASK)
    used += block.num_pairs
    if TASK.SECOND:
        for i in range(block.num_pairs):
            load_pair(launch, block, i, used, TASK)
        used += block.num_pairs
    return used


@gluon.jit
def load_all(launch, block, TASK: gl.constexpr):
    """Runs the loading warp."""
    if TASK.PERSISTENT:
        used = 0
        done = 0
        for step_of_program in range(num_steps_of_program(launch.grid)):
            number = tile_of_step(step_of_program, launch.grid)
            if number < launch.grid.num_works:
                found = block_at(number, launch, TASK)
                if found.m0 < found.seq.num_rows:
                    used = load_next_block(launch, found, used, done, TASK)
                    done += 1
    else:
        load_block(launch, block, TASK)
