"""Converts boolean masks for Hopper to bit masks in accumulator order and block-sparse indices.

NOTE [Bits of a tile]
A thread of a warp group holds, of two rows of a tile [64, 64], the 16 columns 8 k + 2 l + e of its
lane l. Their bits, numbered 2 k + e, are one int16 of the bit mask for each of the two rows. One
small kernel reads a mask once and writes the bits of all tiles, for tiles with queries as rows and
for tiles with keys as rows. A window and key lengths are in the bits, too.

NOTE [Blocks of a mask]
For blocks of 128 queries and 128 keys the kernel also tells whether none or all of their pairs are
admitted. A second kernel lists the key blocks that each query block needs, and the query blocks
that each key block needs. The main kernels load only those, and test bits in blocks that are not
full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_streamkl.attention.hopper.warp_groups import by_lane
from torch_streamkl.attention.plans import Plan, config_of
from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.kernels.scores import allowed_tile, bind_sequence
from torch_streamkl.kernels.tiles import TritonLaunch, ceil_div

TILE = tl.constexpr(64)
MASK_BLOCK = tl.constexpr(128)
BITS = tl.constexpr(256)  # of a tile: 64 rows of 4 lanes
MASK_TILES = TritonLaunch(64, 64, 4, 1)


class MaskBlocks(NamedTuple):
    """Holds what a main kernel reads of a mask. Entities are the heads whose masks differ."""

    bits: Any  # [entities, row tiles, column tiles, BITS], rows being those of the accumulator
    lists: Any  # [entities, row blocks, 1 + column blocks]: how many, then 2 * block + is full
    num_row_blocks: Any
    num_column_blocks: Any


@dataclass(frozen=True)
class PreparedMask:
    """Holds the bits and block lists of a mask, and the strides of its entities."""

    by_rows: tuple[Tensor, Tensor, int, int]
    by_keys: tuple[Tensor, Tensor, int, int]
    stride_b: int
    stride_h: int


def prepare(problem: AttentionProblem, plan: Plan) -> PreparedMask:
    """Launches two kernels: one for bits and block kinds, and one for block lists."""
    mask = problem.mask
    assert mask is not None
    batch = problem.batch if mask.shape[0] > 1 or problem.key_lengths is not None else 1
    heads = mask.shape[1]
    rows, columns = (ceil_div(n, MASK_BLOCK.value) for n in (problem.seqlen_q, problem.seqlen_k))
    entities = batch * heads
    new = mask.new_empty
    bits = [new((entities, 4 * rows * columns * BITS.value), dtype=torch.int16) for _ in "qk"]
    classes = new((entities, rows, columns), dtype=torch.int8)
    of_rows = new((entities, rows, 1 + columns), dtype=torch.int32)
    of_keys = new((entities, columns, 1 + rows), dtype=torch.int32)
    config = plan.kept("mask config", lambda: config_of(problem, MASK_TILES))
    masks = plan.arguments(problem)[2]
    plan.run(
        "mask bits",
        bit_mask_kernel,
        (columns, rows, entities),
        (masks, *bits, classes, rows, columns, heads),
        (config,),
        {"num_warps": 4},
        (mask, problem.key_lengths),
    )
    plan.run(
        "mask lists",
        lists_kernel,
        (rows + columns, entities, 1),
        (classes, of_rows, of_keys, rows, columns),
        (triton.next_power_of_2(max(rows, columns)),),
        {"num_warps": 4},
        (),
    )
    return PreparedMask(
        (bits[0], of_rows, rows, columns),
        (bits[1], of_keys, columns, rows),
        heads if batch > 1 else 0,
        1 if heads > 1 else 0,
    )


@triton.jit
def bits_of(tile):
    """Packs [64, 64] of 0 and 1 into [64, 4] bits: NOTE [Bits of a tile]."""
    x = tl.reshape(tile, [64, 8, 4, 2])
    k = tl.arange(0, 8)[None, :, None, None]
    e = tl.arange(0, 2)[None, None, None, :]
    return tl.sum(tl.sum(x << (2 * k + e), 3), 1)


@triton.jit
def bits_at(tile):
    """Returns the address of the bits of a tile."""
    bit = tl.arange(0, 64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tile.to(tl.int64) * BITS + bit


@triton.jit(do_not_specialize=["num_row_blocks", "num_key_blocks", "num_heads"])
def bit_mask_kernel(
    masks, bits_by_rows, bits_by_keys, classes, num_row_blocks, num_key_blocks, num_heads,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Computes bits and kind of a block: 0 if no pair is admitted, 2 if all are, else 1."""
    key_block = tl.program_id(0)
    row_block = tl.program_id(1)
    entity = tl.program_id(2)
    seq = bind_sequence(masks, entity // num_heads, entity % num_heads, CONFIG)
    some = 0
    every = 1
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            row_tile = 2 * row_block + i
            key_tile = 2 * key_block + j
            rows = (row_tile * TILE + tl.arange(0, TILE))[:, None]
            keys = (key_tile * TILE + tl.arange(0, TILE))[None, :]
            inside = (rows < seq.num_rows) & (keys < seq.num_keys)
            allowed = allowed_tile(masks, seq, rows, keys, inside, CONFIG)
            # rows beyond the last are not stored, and have no gradient
            whole = allowed | ((rows >= seq.num_rows) & (keys < seq.num_valid))
            some = tl.maximum(some, tl.max(tl.max(allowed.to(tl.int32), 1), 0))
            every = tl.minimum(every, tl.min(tl.min(whole.to(tl.int32), 1), 0))
            tile = allowed.to(tl.int32)
            by_rows = (entity * 2 * num_row_blocks + row_tile) * 2 * num_key_blocks + key_tile
            by_keys = (entity * 2 * num_key_blocks + key_tile) * 2 * num_row_blocks + row_tile
            tl.store(bits_by_rows + bits_at(by_rows), bits_of(tile).to(tl.int16))
            tl.store(bits_by_keys + bits_at(by_keys), bits_of(tl.trans(tile)).to(tl.int16))
    block = (entity * num_row_blocks + row_block) * num_key_blocks + key_block
    tl.store(classes + block, (some + some * every).to(tl.int8))


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def lists_kernel(classes, of_rows, of_keys, num_rows, num_columns, SIZE: tl.constexpr):
    """Lists the blocks that are not empty, for a row or a column of blocks."""
    line = tl.program_id(0)
    entity = tl.program_id(1)
    offs = tl.arange(0, SIZE)
    classes += entity * num_rows * num_columns
    if line < num_rows:
        found = tl.load(classes + line * num_columns + offs, mask=offs < num_columns, other=0)
        out = of_rows + (entity * num_rows + line) * (1 + num_columns)
    else:
        column = line - num_rows
        found = tl.load(classes + offs * num_columns + column, mask=offs < num_rows, other=0)
        out = of_keys + (entity * num_columns + column) * (1 + num_rows)
    kept = (found > 0).to(tl.int32)
    place = tl.cumsum(kept, 0)  # from 1 on, after the number
    tl.store(out + place, 2 * offs + (found == 2).to(tl.int32), mask=kept > 0)
    tl.store(out, tl.sum(kept, 0))


@gluon.jit
def list_at(blocks, entity, row_block):
    """Returns the list of a block of rows: its length, then its entries."""
    line = entity * blocks.num_row_blocks + row_block
    return blocks.lists + line * (1 + blocks.num_column_blocks)


@gluon.jit
def load_bits(blocks, entity, row_tile, column_tile, none):
    """Returns the bits [64, lanes] of a tile; `none` (lane_sum's result) gives the layout."""
    layout: gl.constexpr = none.type.layout
    rows = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
    lanes = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, layout)), 0)
    tile = (entity * 2 * blocks.num_row_blocks + row_tile) * 2 * blocks.num_column_blocks
    tile = (tile + column_tile).to(gl.int64)
    return gl.load(blocks.bits + tile * BITS + (rows * 4 + lanes)).to(gl.int32)


@gluon.jit
def admitted(bits, like):
    """Marks the admitted pairs of a tile, [64, lanes, 16] as by_lane; `like` is in its layout."""
    layout: gl.constexpr = like.type.layout
    bit = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    bit = gl.expand_dims(gl.expand_dims(bit, 0), 1)
    return ((gl.expand_dims(bits, 2) >> bit) & 1) != 0


@gluon.jit
def where_admitted(bits, x, other):
    """Keeps x [64, 64] of an accumulator where a pair is admitted; elsewhere it is a number."""
    layout: gl.constexpr = x.type.layout
    y = by_lane(x)
    y = gl.where(admitted(bits, y), y, other)
    y = gl.permute(gl.reshape(y, [64, 4, 8, 2]), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(y, [64, 64]), layout)
