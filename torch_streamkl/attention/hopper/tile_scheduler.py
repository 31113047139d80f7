"""Finds the blocks of a program of the Hopper forward, and the key tiles that rows meet.

NOTE [Persistent kernels]
A program of a persistent kernel computes several blocks, one after the other. While its last warp
group is busy with one block, its loading warp and other warp groups work on the next. Nothing
waits for a program to start or for queries to arrive, and warp groups whose rows see different
keys do not wait for each other at the end of a block. Blocks are ordered from the longest to the
shortest, and every second step assigns them to the programs in reverse order, so that no program
gets the longest block of every step.

NOTE [Pairs of a block]
Key lengths, a causal mask and a window decide which pairs of tiles a block meets, and which of
them every row of a warp group sees whole. `scores.keys_of_rows` finds both ranges once. The first
pair and all pairs outside of the second range are masked element by element: those at the right
edge come first, and those at the left edge of a window last. A wide kernel has single tiles in the
place of pairs.

NOTE [Tiles of rows]
Pipeline stages hold pairs of tiles, which all warp groups of a block read. The tiles that some row
of a warp group sees begin and end anywhere in a pair. A warp group of a persistent kernel skips
pairs without any. Its main loop takes the pairs that every row sees whole; the tiles before and
after them are masked, one at a time.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_streamkl.attention.hopper.masks import list_at
from torch_streamkl.attention.hopper.packed import packed_block
from torch_streamkl.attention.hopper.split_kv import block_of
from torch_streamkl.attention.hopper.warp_groups import without_offset
from torch_streamkl.kernels.row_state import SWIZZLE_HEADS, tile_coordinates
from torch_streamkl.kernels.scores import bind_sequence, keys_of_rows


class Bounds(NamedTuple):
    """Holds the bounds of a window, with the sequence's offset in them: a register less in the
    loops; and how long the queries are.
    """

    window_left: Any
    window_right: Any
    seqlen_q: Any


class Grid(NamedTuple):
    """Holds the counts of all blocks of a launch, and the number of the program that runs."""

    program: Any
    num_programs: Any
    num_works: Any
    num_blocks: Any  # of a head; entries of the table of packed sequences
    num_heads: Any  # of the queries
    batch: Any


class Block(NamedTuple):
    """Holds a block of rows, and the range of key tiles that its rows see."""

    b: Any  # in the tensors: packed ones have one batch element
    h: Any
    bh: Any
    m0: Any
    num_pairs: Any  # of tiles of the program; of single tiles if WIDE
    stop_pair: Any  # after the last of them
    window: Any  # Bounds
    seq: Any  # arguments.Sequence
    list: Any  # of a mask's blocks of keys: masks.list_at
    beyond: Any  # number of the program among those that are parts, negative before them


@gluon.jit
def tile_of_step(step_of_program, grid):
    """Returns the number of the program's block in a step: NOTE [Persistent kernels]."""
    place = gl.where(step_of_program % 2 == 0, grid.program, grid.num_programs - 1 - grid.program)
    return step_of_program * grid.num_programs + place


@gluon.jit
def num_steps_of_program(grid):
    """Counts the blocks that a program computes, one a step."""
    return (grid.num_works + grid.num_programs - 1) // grid.num_programs


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
def bounds_of(masks, seq):
    """Returns a window's bounds for a sequence without its offset."""
    return Bounds(masks.window_left - seq.offset, masks.window_right + seq.offset, masks.seqlen_q)


@gluon.jit
def block_at(number, launch, TASK: gl.constexpr):
    """Returns the block of a persistent kernel with this number."""
    grid, masks = launch.grid, launch.masks
    CONFIG: gl.constexpr = TASK.CONFIG
    position, bh = place_among(
        number, grid.num_blocks, grid.num_heads * grid.batch, SWIZZLE_HEADS, CONFIG.HAS_RIGHT
    )
    if CONFIG.HAS_RIGHT:
        position = grid.num_blocks - 1 - position  # causal rows grow: the longest first
    b = bh // grid.num_heads
    h = bh % grid.num_heads
    m0 = position * (TASK.GROUPS * CONFIG.BLOCK_M)
    seq = bind_sequence(masks, b, h, CONFIG)
    window = bounds_of(masks, seq)
    seq = without_offset(seq)
    entries = 0
    if CONFIG.HAS_MASK:
        entries = list_at(launch.blocks, seq.mask_offset, position)
        first_met = 0
        num_pairs = gl.load(entries)
    else:
        first_met, num_pairs = pairs_met(window, seq, m0, TASK.GROUPS * CONFIG.BLOCK_M, CONFIG)
    return Block(b, h, bh, m0, num_pairs, first_met + num_pairs, window, seq, entries, -1)


@gluon.jit
def place_of_program(beyond, num_whole, grid, table, TASK: gl.constexpr):
    """Returns batch element, head and first row of a program's only block."""
    CONFIG: gl.constexpr = TASK.CONFIG
    # heads may share a bias: those that run at once read the same rows of it
    INTERLEAVED: gl.constexpr = CONFIG.HAS_RIGHT or CONFIG.STUDENT.BIAS or CONFIG.TEACHER.BIAS
    number = grid.program
    if TASK.PARTS > 1:
        number = block_of(beyond, num_whole, TASK.PARTS)
    position, bh = tile_coordinates(number, grid.num_blocks, INTERLEAVED)
    if CONFIG.HAS_RIGHT:
        position = grid.num_blocks - 1 - position  # causal rows grow: the longest first
    b = bh // grid.num_heads
    h = bh % grid.num_heads
    if table is not None:
        b, position, h = packed_block(grid.program, table, grid.num_blocks)
        bh = b * grid.num_heads + h
    return b, h, bh, position * (TASK.GROUPS * CONFIG.BLOCK_M)


@gluon.jit
def pair_at(block, i, CONFIG: gl.constexpr):
    """Returns the index along the keys of a block's i-th pair of tiles."""
    if CONFIG.HAS_MASK:
        return gl.load(block.list + 1 + i) // 2
    else:
        return block.stop_pair - 1 - i


@gluon.jit
def steps_met(window, seq, m0, ROWS: gl.constexpr, STEP: gl.constexpr, CONFIG: gl.constexpr):
    """Finds the first STEP keys, and their number, with one that some of the ROWS from m0 sees."""
    first_key, _, _, stop_key = keys_of_rows(
        window, seq, m0, ROWS, STEP, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, False
    )
    return first_key // STEP, (stop_key - first_key + STEP - 1) // STEP


@gluon.jit
def pairs_met(window, seq, m0, ROWS: gl.constexpr, CONFIG: gl.constexpr):
    """Finds the first pair, and their number, with a key that one of the ROWS from m0 sees."""
    return steps_met(window, seq, m0, ROWS, 2 * CONFIG.BLOCK_N, CONFIG)


@gluon.jit
def keys_met(window, seq, first_row, CONFIG: gl.constexpr):
    """Finds the range of keys that some row of the warp group at first_row sees."""
    first_key = seq.num_valid * 0
    stop_key = seq.num_valid
    if CONFIG.HAS_LEFT:
        first_key = first_row + seq.offset - window.window_left
    if CONFIG.HAS_RIGHT:
        last_row = first_row + CONFIG.BLOCK_M - 1
        stop_key = gl.minimum(stop_key, last_row + seq.offset + window.window_right + 1)
    return first_key, stop_key


@gluon.jit
def steps_without_mask(block, first_row, STEP: gl.constexpr, CONFIG: gl.constexpr):
    """Finds the steps of STEP keys, never the first, that all rows of the warp group see whole."""
    _, left, right, _ = keys_of_rows(
        block.window, block.seq, first_row, CONFIG.BLOCK_M, STEP,
        CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, False,
    )  # fmt: skip
    start = gl.minimum(gl.maximum(block.stop_pair - right // STEP, 1), block.num_pairs)
    stop = block.num_pairs
    if CONFIG.HAS_LEFT:
        stop = gl.maximum(gl.minimum(stop, block.stop_pair - left // STEP), start)
    return start, stop


@gluon.jit
def tiles_seen(block, first_row, CONFIG: gl.constexpr):
    """Finds the tiles that a warp group's rows see: NOTE [Tiles of rows].

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
