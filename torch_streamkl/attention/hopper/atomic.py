"""Adds dQ to memory atomically inside of the dK kernel on Hopper, by an extra warp group.

NOTE [dQ by atomics]
dQ and dK in two kernels take six matmuls, four of which compute the same scores. A program of dK
has every dscore that dQ needs of its keys. So its warp groups pass their tiles to another warp
group, which multiplies them by the keys and adds the product to dQ in memory. Programs add in the
order in which they arrive, so the last bits of dQ differ from run to run: this path is opt-in
(``deterministic=False``).

NOTE [Order of sums]
The float32 tiles [INNER, head_dim] lie in memory in the order of the accumulator's registers, so
that a warp adds 512 consecutive bytes. In the tile's own order it would add 32 bytes to each of 8
rows, and take three times as long. `gradient_kernel` reorders them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_streamkl.attention.hopper.warp_groups import NUM_WARPS, flat, phase_of, stage_of
from torch_streamkl.kernels.tiles import ceil_div

HANDS = gl.constexpr(2)  # stages of dscore tiles in shared memory
ROWS_OF_WARP = tl.constexpr(16)  # of a wgmma accumulator


class Handover(NamedTuple):
    """Holds dscore tiles [keys, queries] of every warp group by stage, and their barriers."""

    tiles: Any
    full: Any
    empty: Any


def new_sums(q: Tensor, inner: int) -> Tensor:
    """Returns zeros for `add_queries`, [tiles of all heads, inner * head_dim]."""
    batch, num_heads, seqlen, head_dim = q.shape
    num_tiles = batch * num_heads * ceil_div(seqlen, inner)
    return q.new_zeros((num_tiles, inner * head_dim), dtype=torch.float32)


@gluon.jit
def new_handover(dtype: gl.constexpr, TASK: gl.constexpr):
    """Allocates shared memory and barriers for dscore tiles."""
    tile: gl.constexpr = [TASK.BLOCK, TASK.INNER]
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    handover = Handover(
        gl.allocate_shared_memory(
            dtype, [HANDS * TASK.GROUPS, TASK.BLOCK, TASK.INNER],
            gl.NVMMASharedLayout.get_default_for(tile, dtype),
        ),
        gl.allocate_shared_memory(gl.int64, [HANDS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [HANDS, 1], bars),
    )  # fmt: skip
    for hand in gl.static_range(HANDS):
        mbarrier.init(handover.full.index(hand), count=TASK.GROUPS)
        mbarrier.init(handover.empty.index(hand), count=1)
    return handover


@gluon.jit
def hand_over(d, handover, i, GROUP: gl.constexpr, TASK: gl.constexpr):
    """Passes dscore tile i of a warp group to `add_queries`."""
    hand = stage_of(i, HANDS)
    mbarrier.wait(handover.empty.index(hand), phase_of(i, HANDS) ^ 1)
    handover.tiles.index(hand * TASK.GROUPS + GROUP).store(d)
    fence_async_shared()
    mbarrier.arrive(handover.full.index(hand), count=1)


@gluon.jit
def add_queries(launch, work, sums, TASK: gl.constexpr):
    """Runs the warp group of dQ: adds dscore^T @ own keys to the sums of a query tile."""
    tiles, handover = launch.tiles, launch.handover
    GROUPS: gl.constexpr = TASK.GROUPS
    SIZE: gl.constexpr = TASK.INNER * TASK.HEAD_DIM
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, TASK.HEAD_DIM, 16]
    )
    zero = gl.full([TASK.INNER, TASK.HEAD_DIM], 0.0, gl.float32, layout=mma)
    tiles_of_head = (work.masks.seqlen_q + TASK.INNER - 1) // TASK.INNER
    mbarrier.wait(tiles.outer_full, 0)
    # the tile that comes twice is handed over, too, but nobody needs it
    for i in range(work.num_tiles):
        hand = stage_of(i, HANDS)
        mbarrier.wait(handover.full.index(hand), phase_of(i, HANDS))
        acc = zero
        for group in gl.static_range(GROUPS):
            d = handover.tiles.index(hand * GROUPS + group).permute((1, 0))
            keys = flat(tiles.own_outer.index(group))
            acc = warpgroup_mma(d, keys, acc, use_acc=group > 0, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(handover.empty.index(hand), count=1)
        tile = i % TASK.GROUP_SIZE * tiles_of_head + work.first_tile + i // TASK.GROUP_SIZE
        # NOTE [Order of sums]
        acc = gl.reshape(acc, [TASK.INNER // 16, 2, 8, TASK.HEAD_DIM // 8, 4, 2])
        acc = gl.reshape(gl.permute(acc, (0, 3, 2, 4, 1, 5)), [SIZE])
        offsets = gl.arange(0, SIZE, layout=acc.type.layout)
        gl.atomic_add(sums + tile.to(gl.int64) * SIZE + offsets, acc, sem="relaxed")


@triton.jit(do_not_specialize=["seqlen"])
def gradient_kernel(
    sums, out_ptr, stride_h, stride_n, scale, seqlen,
    INNER: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Computes a tile of a gradient [batch * heads, seqlen, head_dim] from its sums."""
    tiles_of_head = tl.cdiv(seqlen, INNER)
    head = tl.program_id(0) // tiles_of_head
    row = tl.arange(0, INNER)[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    of_warp = row % ROWS_OF_WARP
    place = row // ROWS_OF_WARP * (ROWS_OF_WARP * HEAD_DIM) + dim // 8 * 128
    place += of_warp % 8 * 16 + dim % 8 // 2 * 4 + of_warp // 8 * 2 + dim % 2
    total = tl.load(sums + tl.program_id(0).to(tl.int64) * (INNER * HEAD_DIM) + place)
    row += tl.program_id(0) % tiles_of_head * INNER
    out = out_ptr + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_n + dim
    tl.store(out, (total * scale).to(out_ptr.dtype.element_ty), mask=row < seqlen)
