"""Schedules tiles statically for persistent kernels, and finds the KV range of each tile of rows.

NOTE [Persistent kernels]
A program of a persistent kernel computes several blocks, one after the other. While its last warp
group is busy with one block, its loading warp and other warp groups work on the next. Nothing
waits for a program to start or for queries to arrive, and warp groups whose rows see different
keys do not wait for each other at the end of a block. Blocks are ordered from the longest to the
shortest, and every second step assigns them to the programs in reverse order, so that no program
gets the longest block of every step.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_streamkl.attention.hopper.forward import pairs_met
from torch_streamkl.attention.hopper.masks import list_at
from torch_streamkl.attention.hopper.warp_groups import without_offset
from torch_streamkl.kernels.row_state import SWIZZLE_HEADS
from torch_streamkl.kernels.scores import bind_sequence, keys_of_rows


class Window(NamedTuple):
    """Holds the bounds of a window, with the sequence's offset in them: a register less in the
    loops.
    """

    window_left: Any
    window_right: Any


class Work(NamedTuple):
    """Holds the counts of all blocks of a launch, and the number of the program that runs."""

    program: Any
    num_programs: Any
    num_works: Any
    num_blocks: Any  # of a head
    num_heads: Any
    batch: Any


class Block(NamedTuple):
    """Holds a block of rows, and the range of key tiles that its rows see."""

    b: Any
    h: Any
    bh: Any
    m0: Any
    num_pairs: Any  # of tiles
    stop_pair: Any  # after the last of them
    window: Any
    seq: Any  # arguments.Sequence
    list: Any  # of a mask's blocks of keys: masks.list_at


@gluon.jit
def tile_of_step(step_of_program, work):
    """Returns the number of the program's block in a step: NOTE [Persistent kernels]."""
    place = gl.where(step_of_program % 2 == 0, work.program, work.num_programs - 1 - work.program)
    return step_of_program * work.num_programs + place


@gluon.jit
def num_steps_of_program(work):
    """Counts the blocks that a program computes, one a step."""
    return (work.num_works + work.num_programs - 1) // work.num_programs


@gluon.jit
def place_among(number, num_blocks, num_heads, at_once, INTERLEAVED: gl.constexpr):
    """Maps a number below num_blocks * num_heads to block and head, as tile_coordinates does."""
    if INTERLEAVED:
        first = number // (num_blocks * at_once) * at_once
        num_heads = gl.minimum(num_heads - first, at_once)
        inside = number - first * num_blocks
        return inside // num_heads, first + inside % num_heads
    else:
        return number % num_blocks, number // num_blocks


@gluon.jit
def block_at(number, work, masks, blocks, GROUPS: gl.constexpr, CONFIG: gl.constexpr):
    """Returns the block with this number."""
    position, bh = place_among(
        number, work.num_blocks, work.num_heads * work.batch, SWIZZLE_HEADS, CONFIG.HAS_RIGHT
    )
    if CONFIG.HAS_RIGHT:
        position = work.num_blocks - 1 - position  # causal rows grow: the longest first
    b = bh // work.num_heads
    h = bh % work.num_heads
    m0 = position * (GROUPS * CONFIG.BLOCK_M)
    seq = bind_sequence(masks, b, h, CONFIG)
    window = Window(masks.window_left - seq.offset, masks.window_right + seq.offset)
    seq = without_offset(seq)
    entries = 0
    if CONFIG.HAS_MASK:
        entries = list_at(blocks, seq.mask_offset, position)
        first_met = 0
        num_pairs = gl.load(entries)
    else:
        first_met, num_pairs = pairs_met(window, seq, m0, GROUPS * CONFIG.BLOCK_M, CONFIG)
    return Block(b, h, bh, m0, num_pairs, first_met + num_pairs, window, seq, entries)


@gluon.jit
def pair_at(block, i, CONFIG: gl.constexpr):
    """Returns the index along the keys of a block's i-th pair of tiles."""
    if CONFIG.HAS_MASK:
        return gl.load(block.list + 1 + i) // 2
    else:
        return block.stop_pair - 1 - i


@gluon.jit
def tiles_seen(block, first_row, CONFIG: gl.constexpr):
    """Finds the tiles that a warp group's rows see: NOTE [Tiles of rows] in tiles.py.

    Returns, counted from the block's last tile: the first tile that any of the rows sees, the
    first and the end of the pairs that all of them see whole, and the end of all.
    """
    last = 2 * block.stop_pair
    first_key, left, right, stop_key = keys_of_rows(
        block.window, block.seq, first_row, CONFIG.BLOCK_M, CONFIG.BLOCK_N,
        CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, False,
    )  # fmt: skip
    stop_tile = (stop_key + CONFIG.BLOCK_N - 1) // CONFIG.BLOCK_N
    end = gl.minimum(last - first_key // CONFIG.BLOCK_N, 2 * block.num_pairs)
    end = gl.maximum(end, 0)
    end = gl.where(first_row < block.seq.num_rows, end, 0)
    begin = gl.maximum(last - stop_tile, 0)
    end = gl.where(begin < end, end, 0)
    begin = gl.minimum(begin, end)
    whole = gl.minimum(gl.maximum(last - right // CONFIG.BLOCK_N, begin), end)
    edge = gl.minimum(gl.maximum(last - left // CONFIG.BLOCK_N, whole), end)
    whole = (whole + 1) // 2 * 2
    edge = edge // 2 * 2
    whole = gl.where(whole < edge, whole, end)
    edge = gl.where(whole < edge, edge, end)
    return begin, whole, edge, end


@gluon.jit
def sees_keys(block, rows, CONFIG: gl.constexpr):
    """Marks the rows that see any key at all."""
    first = rows * 0
    last = rows * 0 + block.seq.num_valid - 1
    if CONFIG.HAS_LEFT:
        first = gl.maximum(first, rows - block.window.window_left)
    if CONFIG.HAS_RIGHT:
        last = gl.minimum(last, rows + block.window.window_right)
    return first <= last
