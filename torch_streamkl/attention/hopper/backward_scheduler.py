"""Finds the blocks of a program of the Hopper backward, and the inner tiles that each meets.

`keys_of_rows` and `rows_of_keys` (scores.py) find the inner tiles of a block, and those of them
that need no mask. dQ goes through keys from the last to the first, dK through rows from the first
to the last, and through the heads that share its keys one by one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_streamkl.attention.hopper.backward_config import Statistics, Work
from torch_streamkl.attention.hopper.masks import list_at
from torch_streamkl.attention.hopper.packed import packed_block
from torch_streamkl.attention.hopper.tile_scheduler import bounds_of, place_among
from torch_streamkl.attention.hopper.warp_groups import without_offset
from torch_streamkl.attention.triton.forward import row_offset
from torch_streamkl.kernels.row_state import SWIZZLE_HEADS, tile_coordinates
from torch_streamkl.kernels.scores import bind_sequence, keys_of_rows, rows_of_keys


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
def tiles_seen(work, first, TASK: gl.constexpr):
    """Finds the inner tiles that the warp group with this first outer row needs.

    Returns the first one, the first without a mask, the first after those, and the end.
    """
    if TASK.ROWS:
        first_key, left, right, stop_key = keys_of_rows(
            work.masks, work.seq, first, TASK.BLOCK, TASK.INNER,
            TASK.HAS_LEFT, TASK.HAS_RIGHT, False,
        )  # fmt: skip
        behind = work.first_tile + 1  # from the last to the first
        begin = behind - (stop_key + TASK.INNER - 1) // TASK.INNER
        start = behind - right // TASK.INNER
        stop = behind - left // TASK.INNER
        end = behind - first_key // TASK.INNER
        length = work.seq.num_rows
    else:
        first_row, left, right, stop_row = rows_of_keys(
            work.masks, work.seq, first, TASK.BLOCK, TASK.INNER,
            TASK.HAS_LEFT, TASK.HAS_RIGHT, False,
        )  # fmt: skip
        stop_tile = (stop_row + TASK.INNER - 1) // TASK.INNER
        begin = (first_row // TASK.INNER - work.first_tile) * TASK.GROUP_SIZE
        start = (left // TASK.INNER - work.first_tile) * TASK.GROUP_SIZE
        stop = (right // TASK.INNER - work.first_tile) * TASK.GROUP_SIZE
        end = (stop_tile - work.first_tile) * TASK.GROUP_SIZE
        length = work.seq.num_keys
    end = gl.maximum(gl.minimum(end, work.num_tiles), 0)
    end = gl.where(first < length, end, 0)
    if TASK.HAS_MASK:
        begin = 0
        end = work.num_tiles
    return gl.minimum(gl.maximum(begin, 0), end), start, gl.minimum(stop, end), end


@gluon.jit
def inner_tile(work, i, TASK: gl.constexpr):
    """Returns the index of a block's i-th inner tile; for dK heads of a group come one by one."""
    if TASK.HAS_MASK:
        tile = i // TASK.GROUP_SIZE
        return gl.load(work.list + 1 + tile // 2) // 2 * 2 + tile % 2
    elif TASK.ROWS:
        return work.first_tile - i
    else:
        return work.first_tile + i // TASK.GROUP_SIZE


@gluon.jit
def work_at(number, launch, TASK: gl.constexpr):
    """Returns the outer block of a persistent kernel with this number."""
    grid, masks = launch.grid, launch.masks
    num_groups = grid.num_heads // TASK.GROUP_SIZE
    position, group = place_among(
        number, grid.num_blocks, num_groups * grid.batch, SWIZZLE_HEADS, TASK.HAS_RIGHT
    )
    if TASK.ROWS and TASK.HAS_RIGHT:
        position = grid.num_blocks - 1 - position  # causal rows grow: the longest first
    start = position * (TASK.GROUPS * TASK.BLOCK)
    b = group // num_groups
    out_head = group % num_groups
    first_head = out_head * TASK.GROUP_SIZE
    seq, bounds, stats = bound(b, first_head, grid, masks, launch.stats, TASK)
    entries = 0
    if TASK.HAS_MASK:
        entries = list_at(launch.blocks, seq.mask_offset, position)
        first_tile = 0
        num_tiles = gl.load(entries) * (2 * TASK.GROUP_SIZE)
    else:
        first_tile, num_tiles = tiles_met(bounds, seq, start, TASK)
    sides = launch.sides
    return Work(
        b, first_head, first_head // sides.own.group, first_head // sides.other.group, out_head,
        start, first_tile, num_tiles, num_tiles, bounds, seq, stats, entries,
    )  # fmt: skip


@gluon.jit
def bound(b, first_head, grid, masks, stats, TASK: gl.constexpr):
    """Returns the sequence of a block, its window, and where its row statistics are.

    The window's bounds have the sequence's offset in them: a register less in the loops.
    """
    seq = bind_sequence(masks, b, first_head, TASK)
    bounds = bounds_of(masks, seq)
    seq = without_offset(seq)
    head_row = row_offset(b * grid.num_heads + first_head, first_head, seq, masks)
    stats = Statistics(stats.own, stats.other, stats.delta, stats.grad, head_row)
    return seq, bounds, stats


@gluon.jit
def place_of_program(grid, table, TASK: gl.constexpr):
    """Returns sequence, position, head of the gradient and share of a program's only block."""
    # heads may share a bias: those that run at once read the same rows of it
    INTERLEAVED: gl.constexpr = TASK.HAS_RIGHT or TASK.OWN_BIAS or TASK.OTHER_BIAS
    position, sequence = tile_coordinates(grid.program, grid.num_blocks, INTERLEAVED)
    if TASK.ROWS and TASK.HAS_RIGHT:
        position = grid.num_blocks - 1 - position  # causal rows grow: the longest first
    num_groups = grid.num_heads // TASK.GROUP_SIZE
    share = 0
    if TASK.ROWS and TASK.SPLITS > 1:
        share = sequence % TASK.SPLITS
        sequence = sequence // TASK.SPLITS
    b = sequence // num_groups
    out_head = sequence % num_groups
    if table is not None:
        b, position, out_head = packed_block(grid.program, table, grid.num_blocks)
    return b, position, out_head, share


@gluon.jit
def work_of_program(b, start, out_head, share, seq, bounds, stats, sides, TASK: gl.constexpr):
    """Returns a program's only block; of dQ in SPLITS, its share of the inner tiles."""
    first_head = out_head * TASK.GROUP_SIZE
    first_tile, num_tiles = tiles_met(bounds, seq, start, TASK)
    if TASK.ROWS and TASK.SPLITS > 1:
        most = (num_tiles + TASK.SPLITS - 1) // TASK.SPLITS
        first_tile -= share * most
        num_tiles = gl.maximum(gl.minimum(num_tiles - share * most, most), 0)
        out_head = out_head * TASK.SPLITS + share
    return Work(
        b, first_head, first_head // sides.own.group, first_head // sides.other.group, out_head,
        start, first_tile, num_tiles, num_tiles + (num_tiles & 1), bounds, seq, stats, 0,
    )  # fmt: skip
