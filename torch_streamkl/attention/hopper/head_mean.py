"""Computes a head-averaged teacher on Hopper: log-sum-exps of its heads, and the mean in memory.

It computes what triton/head_mean.py computes, for the same readers. One warp loads by TMA, and
three warp groups of 64 rows (two for the mean) multiply. Queries and keys come in chunks of 64
columns, so that a head_dim of 192 takes three chunks and not 256 columns. A program of the mean
loads the queries and keys of every head for one tile, which is more than the L2 cache delivers to
small tiles. So a tile is 128 x 128, and loads overlap its arithmetic.

NOTE [Small means]
The portable kernel keeps a sum of probabilities relative to the largest of them: two exponentials
a head. Here it is the plain sum. Terms below 2^-126 are 0, which does not change the logarithm of
a sum above SMALLEST_MEAN: 128 of them are 2^-29 of it. The kernel writes the smallest sum of every
row and tile of keys. If one is smaller, the portable kernel computes that tile again. Sums of keys
that a row does not see may be anything: their readers mask them.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_streamkl.attention.hopper.forward import LOADER_REGISTERS
from torch_streamkl.attention.hopper.pipeline import async_load
from torch_streamkl.attention.hopper.tile_scheduler import (
    Block,
    bounds_of,
    steps_met,
    steps_without_mask,
)
from torch_streamkl.attention.hopper.warp_groups import (
    GROUP_REGISTERS,
    NUM_WARPS,
    exp2,
    flat,
    without_offset,
)
from torch_streamkl.attention.triton.forward import finite_lse
from torch_streamkl.kernels.arguments import MaskArgs
from torch_streamkl.kernels.row_state import LOW, tile_coordinates
from torch_streamkl.kernels.scores import bind_sequence, in_window, keys_of_rows

CHUNK = gl.constexpr(64)  # columns of a matmul's operands


class Tiles(NamedTuple):
    """Holds shared memory in chunks of columns: queries, keys, and barriers of their stages."""

    q: Any
    k: Any
    q_bar: Any  # of queries that stay
    full: Any  # by stage
    empty: Any


@gluon.jit
def slot_and_phase(i, SLOTS: gl.constexpr):
    """Returns stage and phase of load i: NOTE [Pipeline stages] in pipeline.py."""
    return i % SLOTS, i // SLOTS & 1


@gluon.jit
def multiply(a, keys, x, IS_FIRST: gl.constexpr):
    """Issues x + a @ keys^T of one chunk."""
    b = flat(keys).permute((1, 0))
    return warpgroup_mma(flat(a), b, x, use_acc=not IS_FIRST, is_async=True)


# ------------------------------------------------------------------------------ log-sum-exps first
@gluon.jit
def load_keys(
    q, k, tiles, block, kv,
    GROUPS: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp: queries once, then every tile of keys into an empty stage."""
    mbarrier.expect(tiles.q_bar, GROUPS * CHUNKS * q.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        for chunk in gl.static_range(CHUNKS):
            place = [block.b, block.h, block.m0 + group * CONFIG.BLOCK_M, chunk * CHUNK]
            async_load(q, place, tiles.q_bar, tiles.q.index(group * CHUNKS + chunk))
    for i in range(block.num_pairs):
        slot, phase = slot_and_phase(i, SLOTS)
        full = tiles.full.index(slot)
        row = (block.stop_pair - 1 - i) * CONFIG.BLOCK_N
        mbarrier.wait(tiles.empty.index(slot), phase ^ 1)
        mbarrier.expect(full, CHUNKS * k.block_type.nbytes)
        for chunk in gl.static_range(CHUNKS):
            place = [block.b, kv, row, chunk * CHUNK]
            async_load(k, place, full, tiles.k.index(slot * CHUNKS + chunk))


@gluon.jit
def add_tiles(
    top, row_sum, tiles, block, rows, start, stop, scale, zero,
    GROUP: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr,
    MASKED: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Updates the largest score of each row, and the sum relative to it, by some tiles."""
    col_layout: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    seq = block.seq
    for i in range(start, stop):
        slot, phase = slot_and_phase(i, SLOTS)
        mbarrier.wait(tiles.full.index(slot), phase)
        x = multiply(tiles.q.index(GROUP * CHUNKS), tiles.k.index(slot * CHUNKS), zero, True)
        for chunk in gl.static_range(1, CHUNKS):
            queries = tiles.q.index(GROUP * CHUNKS + chunk)
            x = multiply(queries, tiles.k.index(slot * CHUNKS + chunk), x, False)
        x = warpgroup_mma_wait(0, deps=[x])
        mbarrier.arrive(tiles.empty.index(slot), count=1)
        x = x * scale
        if MASKED:
            first = (block.stop_pair - 1 - i) * CONFIG.BLOCK_N
            cols = gl.expand_dims(first + gl.arange(0, CONFIG.BLOCK_N, layout=col_layout), 0)
            allowed = in_window(
                cols < seq.num_valid, block.window, seq, gl.expand_dims(rows, 1), cols,
                CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT,
            )  # fmt: skip
            x = gl.where(allowed, x, -float("inf"))
        higher = gl.maximum(top, gl.max(x, 1))
        row_sum = row_sum * exp2(top - higher) + gl.sum(exp2(x - gl.expand_dims(higher, 1)), 1)
        top = higher
    return top, row_sum


@gluon.jit
def log_sum_exps(
    tiles, block, lse_ptr, scale,
    GROUP: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs one warp group: computes log-sum-exps of its rows."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, CONFIG.BLOCK_N, 16]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    zero = gl.full([BLOCK_M, CONFIG.BLOCK_N], 0.0, gl.float32, layout=mma)
    first = block.m0 + GROUP * BLOCK_M
    rows = first + gl.arange(0, BLOCK_M, layout=row_layout)
    start, stop = steps_without_mask(block, first, CONFIG.BLOCK_N, CONFIG)
    top = gl.full([BLOCK_M], LOW, gl.float32, layout=row_layout)
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, layout=row_layout)
    mbarrier.wait(tiles.q_bar, 0)
    top, row_sum = add_tiles(
        top, row_sum, tiles, block, rows, 0, start, scale, zero, GROUP, CHUNKS, SLOTS, True, CONFIG
    )
    top, row_sum = add_tiles(
        top, row_sum, tiles, block, rows, start, stop, scale, zero,
        GROUP, CHUNKS, SLOTS, False, CONFIG,
    )  # fmt: skip
    if CONFIG.HAS_LEFT:
        top, row_sum = add_tiles(
            top, row_sum, tiles, block, rows, stop, block.num_pairs, scale, zero,
            GROUP, CHUNKS, SLOTS, True, CONFIG,
        )  # fmt: skip
    empty = row_sum == 0.0
    lse = gl.where(empty, -float("inf"), top + tl.math.log2(gl.where(empty, 1.0, row_sum)))
    gl.store(lse_ptr + rows, lse, mask=rows < block.seq.num_rows)


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(do_not_specialize=["num_blocks", "seqlen_q", "seqlen_k", "window_left", "window_right"])
def heads_lse_kernel(
    q, k, stats_ptr, num_blocks, num_heads, group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right, scale,
    GROUPS: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Computes log-sum-exps of a block of rows of one head."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    position, bh = tile_coordinates(gl.program_id(0), num_blocks, CONFIG.HAS_RIGHT)
    if CONFIG.HAS_RIGHT:
        position = num_blocks - 1 - position  # causal rows grow: the longest first
    b = bh // num_heads
    h = bh % num_heads
    m0 = position * (GROUPS * BLOCK_M)
    masks = MaskArgs(
        None, 0, 0, 0, 0, key_lengths, window_left, window_right, None, None, seqlen_q, seqlen_k
    )
    seq = bind_sequence(masks, b, h, CONFIG)
    window = bounds_of(masks, seq)
    seq = without_offset(seq)
    first_met, num_tiles = steps_met(window, seq, m0, GROUPS * BLOCK_M, BLOCK_N, CONFIG)
    block = Block(b, h, bh, m0, num_tiles, first_met + num_tiles, window, seq, 0, 0)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = Tiles(
        gl.allocate_shared_memory(q.dtype, [GROUPS * CHUNKS, 1, 1, BLOCK_M, CHUNK], q.layout),
        gl.allocate_shared_memory(k.dtype, [SLOTS * CHUNKS, 1, 1, BLOCK_N, CHUNK], k.layout),
        gl.allocate_shared_memory(gl.int64, [1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
    )
    mbarrier.init(tiles.q_bar, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1)
        mbarrier.init(tiles.empty.index(slot), count=GROUPS)
    lse_ptr = stats_ptr + bh.to(gl.int64) * seqlen_q
    REGISTERS: gl.constexpr = GROUP_REGISTERS // GROUPS
    gl.static_assert(GROUPS == 3)
    gl.warp_specialize(
        [
            (log_sum_exps, (
                tiles, block, lse_ptr, scale, gl.constexpr(0), CHUNKS, SLOTS, CONFIG,
            )),
            (load_keys, (q, k, tiles, block, h // group, GROUPS, CHUNKS, SLOTS, CONFIG)),
            (log_sum_exps, (
                tiles, block, lse_ptr, scale, gl.constexpr(1), CHUNKS, SLOTS, CONFIG,
            )),
            (log_sum_exps, (
                tiles, block, lse_ptr, scale, gl.constexpr(2), CHUNKS, SLOTS, CONFIG,
            )),
        ],
        [1, NUM_WARPS, NUM_WARPS],
        [LOADER_REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- the mean
@gluon.jit
def load_heads(
    q, k, tiles, b, h, m0, n0, ratio, group,
    GROUPS: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp: queries and keys of every head, chunk by chunk, into an empty
    stage.
    """
    for r in range(ratio):
        for chunk in gl.static_range(CHUNKS):
            slot, phase = slot_and_phase(r * CHUNKS + chunk, SLOTS)
            full = tiles.full.index(slot)
            mbarrier.wait(tiles.empty.index(slot), phase ^ 1)
            mbarrier.expect(full, GROUPS * q.block_type.nbytes + k.block_type.nbytes)
            for part in gl.static_range(GROUPS):
                place = [b, h + r, m0 + part * CONFIG.BLOCK_M, chunk * CHUNK]
                async_load(q, place, full, tiles.q.index(slot * GROUPS + part))
            place = [b, (h + r) // group, n0, chunk * CHUNK]
            async_load(k, place, full, tiles.k.index(slot))


@gluon.jit
def add_heads(
    tiles, mean_ptr, stride, small_ptr, lse_ptr, m0, n0, num_rows, ratio, scale,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs one warp group: computes log2 of the mean of its rows, and each row's smallest sum."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=mma)
    place = GROUP * BLOCK_M + gl.arange(0, BLOCK_M, layout=row_layout)
    rows = m0 + place
    inside = rows < num_rows
    row_sum = zero
    for r in range(ratio):
        lse = gl.load(lse_ptr + r.to(gl.int64) * num_rows + rows, mask=inside, other=0.0)
        x = zero
        for chunk in gl.static_range(CHUNKS):
            slot, phase = slot_and_phase(r * CHUNKS + chunk, SLOTS)
            mbarrier.wait(tiles.full.index(slot), phase)
            queries = tiles.q.index(slot * GROUPS + GROUP)
            x = multiply(queries, tiles.k.index(slot), x, chunk == 0)
        x = warpgroup_mma_wait(0, deps=[x])
        for chunk in gl.static_range(CHUNKS):
            slot, _ = slot_and_phase(r * CHUNKS + chunk, SLOTS)
            mbarrier.arrive(tiles.empty.index(slot), count=1)
        row_sum += exp2(x * scale - gl.expand_dims(finite_lse(lse), 1))
    gl.store(small_ptr + place, gl.min(row_sum, 1))
    cols = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, mma))
    places = gl.expand_dims(place, 1).to(gl.int64) * stride + gl.expand_dims(n0 + cols, 0)
    gl.store(mean_ptr + places, tl.math.log2(row_sum) - tl.math.log2(ratio.to(gl.float32)))


@gluon.jit(
    do_not_specialize=[
        "first_block", "num_blocks", "num_rows_kept", "ratio",
        "seqlen_q", "seqlen_k", "window_left", "window_right",
    ]
)  # fmt: skip
def heads_mean_kernel(
    q, k, mean, small_ptr, first_block, stats_ptr, num_blocks, num_key_blocks, num_rows_kept,
    num_heads, ratio, group, seqlen_q, seqlen_k, key_lengths, window_left, window_right, scale,
    GROUPS: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Computes log2 of the mean over the teachers of a student head, for one tile.

    Readers apply masks. NOTE [Small means]: small_ptr has the smallest sums of the rows of a tile
    together.
    """
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    ROWS: gl.constexpr = GROUPS * BLOCK_M
    # the longest blocks of causal rows first: every tile takes as long
    kept = gl.program_id(0) // num_key_blocks
    tile = gl.program_id(0) % num_key_blocks
    n0 = tile * BLOCK_N
    block = first_block + kept
    bh = block // num_blocks
    b = bh // num_heads
    h = bh % num_heads
    m0 = (block % num_blocks) * ROWS
    masks = MaskArgs(
        None, 0, 0, 0, 0, key_lengths, window_left, window_right, None, None, seqlen_q, seqlen_k
    )
    seq = bind_sequence(masks, b, h, CONFIG)
    first, _, _, stop = keys_of_rows(
        masks, seq, m0, ROWS, BLOCK_N, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, False
    )
    if (m0 >= seq.num_rows) | (n0 < first) | (n0 >= stop):
        return
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = Tiles(
        gl.allocate_shared_memory(q.dtype, [SLOTS * GROUPS, 1, 1, BLOCK_M, CHUNK], q.layout),
        gl.allocate_shared_memory(k.dtype, [SLOTS, 1, 1, BLOCK_N, CHUNK], k.layout),
        gl.allocate_shared_memory(gl.int64, [1], bars),  # nobody waits for it
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
    )
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1)
        mbarrier.init(tiles.empty.index(slot), count=GROUPS)
    head = h * ratio
    lse_ptr = stats_ptr + (b * num_heads * ratio + head).to(gl.int64) * seqlen_q
    mean_ptr = mean.ptr + (kept * ROWS).to(gl.int64) * mean.stride
    small_ptr += tile * num_rows_kept + kept * ROWS
    REGISTERS: gl.constexpr = GROUP_REGISTERS // GROUPS
    gl.static_assert(GROUPS == 2)
    gl.warp_specialize(
        [
            (add_heads, (
                tiles, mean_ptr, mean.stride, small_ptr, lse_ptr, m0, n0, seqlen_q, ratio,
                scale, gl.constexpr(0), GROUPS, CHUNKS, SLOTS, CONFIG,
            )),
            (load_heads, (
                q, k, tiles, b, head, m0, n0, ratio, group, GROUPS, CHUNKS, SLOTS, CONFIG,
            )),
            (add_heads, (
                tiles, mean_ptr, mean.stride, small_ptr, lse_ptr, m0, n0, seqlen_q, ratio,
                scale, gl.constexpr(1), GROUPS, CHUNKS, SLOTS, CONFIG,
            )),
        ],
        [1, NUM_WARPS],
        [LOADER_REGISTERS, REGISTERS],
    )  # fmt: skip
