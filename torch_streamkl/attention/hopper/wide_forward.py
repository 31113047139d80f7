"""Implements the Hopper forward for head_dims above 128: stages of single tiles, two warp groups.

The schedule is that of forward.py, whose NOTEs on the frozen row max and on clamps hold here. But
shared memory has no room for pairs of tiles: a stage holds one tile of one side, and stages of the
two sides alternate. A warp group has one matmul in flight, which needs one tile.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from torch_streamkl.attention.hopper.forward import (
    LOADER_REGISTERS,
    Sums,
    empty,
    keys_met,
    per_thread,
    with_sums,
    without_doubtful,
)
from torch_streamkl.attention.hopper.split_kv import finish_rows
from torch_streamkl.attention.hopper.warp_groups import (
    GROUP_REGISTERS,
    NUM_WARPS,
    async_load,
    before_wait,
    before_wait_pair,
    exp2,
    flat,
    lane_lowest,
    lane_sum,
    start_scores,
    without_offset,
)
from torch_streamkl.attention.triton.forward import row_offset
from torch_streamkl.kernels.arguments import MaskArgs
from torch_streamkl.kernels.row_state import LOW, moment, tile_coordinates, update
from torch_streamkl.kernels.scores import bind_sequence, in_window, keys_of_rows

GROUPS = gl.constexpr(2)  # warp groups: more of their queries do not fit


class Tiles(NamedTuple):
    """Holds shared memory: queries of each warp group, stages of key tiles, barriers."""

    other_q: Any
    weight_q: Any
    keys: Any  # of either side: tile i of `other` is load 2 i, that of `weight` load 2 i + 1
    q_bar: Any
    full: Any  # by stage
    empty: Any


class Block(NamedTuple):
    """Holds the block of rows of a program, and the key tiles that it meets, from the last on."""

    b: Any  # in the tensors: packed ones have one batch element
    h: Any
    bh: Any
    m0: Any
    num_tiles: Any
    stop_tile: Any  # after the last of them
    masks: Any  # arguments.MaskArgs
    seq: Any  # arguments.Sequence
    other_scale: Any
    weight_scale: Any


class Outputs(NamedTuple):
    """Holds pointers to values and statistics."""

    value: Any
    s_stats: Any
    t_stats: Any
    stats_stride: Any


@gluon.jit
def wait_for(tiles, load, more, SLOTS: gl.constexpr):
    """Waits until a load is in its stage; `more` is false past the end, where nobody reads it."""
    mbarrier.wait(tiles.full.index(load % SLOTS), load // SLOTS & 1, pred=more)


@gluon.jit
def release(tiles, load, SLOTS: gl.constexpr):
    """Releases the stage of a tile that this warp group has read."""
    mbarrier.arrive(tiles.empty.index(load % SLOTS), count=1)


@gluon.jit
def load_all(
    other_q, other_k, weight_q, weight_k, tiles, block, other_h, weight_h,
    SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp: queries once, then every tile into an empty stage."""
    mbarrier.expect(tiles.q_bar, GROUPS * (other_q.block_type.nbytes + weight_q.block_type.nbytes))
    for group in gl.static_range(GROUPS):
        row = block.seq.start_q + block.m0 + group * CONFIG.BLOCK_M
        async_load(other_q, [block.b, block.h, row, 0], tiles.q_bar, tiles.other_q.index(group))
        async_load(weight_q, [block.b, block.h, row, 0], tiles.q_bar, tiles.weight_q.index(group))
    for i in range(block.num_tiles):
        row = block.seq.start_k + (block.stop_tile - 1 - i) * CONFIG.BLOCK_N
        for is_weight in gl.static_range(2):
            slot = (2 * i + is_weight) % SLOTS
            full = tiles.full.index(slot)
            mbarrier.wait(tiles.empty.index(slot), (2 * i + is_weight) // SLOTS & 1 ^ 1)
            if is_weight:
                mbarrier.expect(full, weight_k.block_type.nbytes)
                async_load(weight_k, [block.b, weight_h, row, 0], full, tiles.keys.index(slot))
            else:
                mbarrier.expect(full, other_k.block_type.nbytes)
                async_load(other_k, [block.b, other_h, row, 0], full, tiles.keys.index(slot))


@gluon.jit
def update_tiles(
    state, oq, wq, tiles, block, first_row, rows, start, stop, zero,
    WEIGHT_IS_TEACHER: gl.constexpr,
    SLOTS: gl.constexpr, COEFFICIENTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Returns the running state after the tiles from start to stop, masked element by element."""
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    col_layout: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    masks, seq = block.masks, block.seq
    first_key, stop_key = keys_met(masks, seq, first_row, CONFIG)
    for i in range(start, stop):
        wait_for(tiles, 2 * i, True, SLOTS)
        wait_for(tiles, 2 * i + 1, True, SLOTS)
        first = (block.stop_tile - 1 - i) * BLOCK_N
        if (first < stop_key) & (first + BLOCK_N > first_key):
            o = start_scores(oq, tiles.keys.index(2 * i % SLOTS), zero)
            w = start_scores(wq, tiles.keys.index((2 * i + 1) % SLOTS), zero)
            o, w = warpgroup_mma_wait(0, deps=[o, w])
            cols = gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=col_layout), 0)
            allowed = in_window(
                cols < seq.num_valid, masks, seq, gl.expand_dims(rows, 1), cols,
                CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT,
            )  # fmt: skip
            o = gl.where(allowed, o * block.other_scale, -float("inf"))
            w = gl.where(allowed, w * block.weight_scale, -float("inf"))
            if WEIGHT_IS_TEACHER:
                state = update(state, w, o, allowed, True, COEFFICIENTS, CONFIG)
            else:
                state = update(state, o, w, allowed, True, COEFFICIENTS, CONFIG)
        release(tiles, 2 * i, SLOTS)
        release(tiles, 2 * i + 1, SLOTS)
    return state


@gluon.jit
def sum_tiles(
    sums, oq, wq, tiles, block, start, stop, zero,
    C_WEIGHT: gl.constexpr, C_OTHER: gl.constexpr,
    CLAMP_OTHER: gl.constexpr, CLAMP_WEIGHT: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Sums over the tiles from start to stop, which need no mask."""
    wait_for(tiles, 2 * start, True, SLOTS)
    o = start_scores(oq, tiles.keys.index(2 * start % SLOTS), zero)
    o = warpgroup_mma_wait(0, deps=[o])
    for i in range(start, stop):
        wait_for(tiles, 2 * i + 1, True, SLOTS)
        w = start_scores(wq, tiles.keys.index((2 * i + 1) % SLOTS), zero)
        # Only now: the arrive and the bar.sync before it are then off the path from a finished
        # matmul to the next.
        release(tiles, 2 * i, SLOTS)
        o = o * block.other_scale - gl.expand_dims(sums.base_o, 1)
        sum_o = before_wait(sums.other + lane_sum(exp2(o)))
        low_o = sums.low_o
        if CLAMP_OTHER:
            low_o = before_wait(lane_lowest(low_o, o))
        w = warpgroup_mma_wait(0, deps=[w])
        wait_for(tiles, 2 * i + 2, i + 1 < stop, SLOTS)
        next_o = start_scores(oq, tiles.keys.index((2 * i + 2) % SLOTS), zero)
        release(tiles, 2 * i + 1, SLOTS)
        w = w * block.weight_scale - gl.expand_dims(sums.base_w, 1)
        low_w = sums.low_w
        if CLAMP_WEIGHT:
            low_w = before_wait(lane_lowest(low_w, w))
        ew = exp2(w)
        sum_w = sums.weight + lane_sum(ew)
        mom = sums.moment + lane_sum(ew * moment(w, o, C_WEIGHT, C_OTHER))
        mom, sum_w = before_wait_pair(mom, sum_w)
        o = warpgroup_mma_wait(0, deps=[next_o])
        sums = Sums(sum_o, sum_w, mom, low_o, low_w, sums.base_o, sums.base_w, sums.ratio)
    return sums


@gluon.jit
def tiles_without_mask(block, first_row, CONFIG: gl.constexpr):
    """Finds the tiles, never the first, that all rows of the warp group see whole."""
    _, left, right, _ = keys_of_rows(
        block.masks, block.seq, first_row, CONFIG.BLOCK_M, CONFIG.BLOCK_N,
        CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, False,
    )  # fmt: skip
    start = gl.maximum(block.stop_tile - right // CONFIG.BLOCK_N, 1)
    start = gl.minimum(start, block.num_tiles)
    stop = block.num_tiles
    if CONFIG.HAS_LEFT:
        stop = gl.maximum(gl.minimum(stop, block.stop_tile - left // CONFIG.BLOCK_N), start)
    return start, stop


@gluon.jit
def reduce_rows(
    tiles, block, outputs, GROUP: gl.constexpr, WEIGHT_IS_TEACHER: gl.constexpr,
    SLOTS: gl.constexpr, COEFFICIENTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs one warp group: values and statistics of its rows."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    C_WEIGHT: gl.constexpr = COEFFICIENTS.TT if WEIGHT_IS_TEACHER else COEFFICIENTS.SS
    C_OTHER: gl.constexpr = COEFFICIENTS.TS if WEIGHT_IS_TEACHER else COEFFICIENTS.ST
    CLAMP_T: gl.constexpr = CONFIG.GUARDED and -float("inf") < CONFIG.T_FLOOR
    CLAMP_S: gl.constexpr = CONFIG.GUARDED and -float("inf") < CONFIG.S_FLOOR
    CLAMP_WEIGHT: gl.constexpr = CLAMP_T if WEIGHT_IS_TEACHER else CLAMP_S
    CLAMP_OTHER: gl.constexpr = CLAMP_S if WEIGHT_IS_TEACHER else CLAMP_T
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, CONFIG.BLOCK_N, 16]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    first = block.m0 + GROUP * BLOCK_M
    rows = first + gl.arange(0, BLOCK_M, layout=row_layout)
    zero = gl.full([BLOCK_M, CONFIG.BLOCK_N], 0.0, gl.float32, layout=mma)
    start, stop = tiles_without_mask(block, first, CONFIG)
    oq = flat(tiles.other_q.index(GROUP))
    wq = flat(tiles.weight_q.index(GROUP))
    mbarrier.wait(tiles.q_bar, 0)
    state = update_tiles(
        empty(BLOCK_M, row_layout), oq, wq, tiles, block, first, rows, 0, start, zero,
        WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, CONFIG,
    )  # fmt: skip
    if start < stop:
        m_o = state.m_s if WEIGHT_IS_TEACHER else state.m_t
        m_w = state.m_t if WEIGHT_IS_TEACHER else state.m_s
        base_o = gl.where(m_o == LOW, 0.0, m_o)
        base_w = gl.where(m_w == LOW, 0.0, m_w)
        none = lane_sum(zero)
        low_o = state.low_s if WEIGHT_IS_TEACHER else state.low_t
        low_w = state.low_t if WEIGHT_IS_TEACHER else state.low_s
        low_o = per_thread(low_o - base_o, none)
        low_w = per_thread(low_w - base_w, none)
        sums = Sums(none, none, none, low_o, low_w, base_o, base_w, base_o)
        sums = sum_tiles(
            sums, oq, wq, tiles, block, start, stop, zero,
            C_WEIGHT, C_OTHER, CLAMP_OTHER, CLAMP_WEIGHT, SLOTS,
        )  # fmt: skip
        state = without_doubtful(with_sums(state, sums, WEIGHT_IS_TEACHER, False), False)
    if CONFIG.HAS_LEFT:
        state = update_tiles(
            state, oq, wq, tiles, block, first, rows, stop, block.num_tiles, zero,
            WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, CONFIG,
        )  # fmt: skip
    finish_rows(
        state, row_offset(block.bh, block.h, block.seq, block.masks) + rows,
        rows < block.seq.num_rows,
        outputs.value, outputs.s_stats, outputs.t_stats, outputs.stats_stride, COEFFICIENTS,
        CONFIG,
    )  # fmt: skip


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(do_not_specialize=["num_blocks", "seqlen_q", "seqlen_k", "window_left", "window_right"])
def wide_forward_kernel(
    other_q, other_k, weight_q, weight_k, value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
    num_blocks, num_heads, other_group, weight_group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    other_scale, weight_scale,
    WEIGHT_IS_TEACHER: gl.constexpr, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr,
    COEFFICIENTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Computes a block of rows of one head; tiles of both sides have HEAD_DIM columns."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    position, bh = tile_coordinates(gl.program_id(0), num_blocks, CONFIG.HAS_RIGHT)
    if CONFIG.HAS_RIGHT:
        position = num_blocks - 1 - position  # causal rows grow: the longest first
    b = bh // num_heads
    h = bh % num_heads
    m0 = position * (GROUPS * BLOCK_M)
    masks = MaskArgs(
        None, 0, 0, 0, 0, key_lengths, 0, 0, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
    )
    seq = bind_sequence(masks, b, h, CONFIG)
    # the bounds of the window with the offset in them: a register less in the loops
    left, right = window_left - seq.offset, window_right + seq.offset
    seq = without_offset(seq)
    masks = MaskArgs(
        None, 0, 0, 0, 0, key_lengths, left, right, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
    )
    if cu_seqlens_q is not None:
        if m0 >= seq.num_rows:
            return
        b = b * 0
    first_key, _, _, stop_key = keys_of_rows(
        masks, seq, m0, GROUPS * BLOCK_M, BLOCK_N, CONFIG.HAS_LEFT, CONFIG.HAS_RIGHT, False
    )
    num_tiles = (stop_key - first_key + BLOCK_N - 1) // BLOCK_N
    stop_tile = first_key // BLOCK_N + num_tiles
    block = Block(b, h, bh, m0, num_tiles, stop_tile, masks, seq, other_scale, weight_scale)

    bars: gl.constexpr = mbarrier.MBarrierLayout()
    queries: gl.constexpr = [GROUPS, 1, 1, BLOCK_M, HEAD_DIM]
    tiles = Tiles(
        gl.allocate_shared_memory(other_q.dtype, queries, other_q.layout),
        gl.allocate_shared_memory(weight_q.dtype, queries, weight_q.layout),
        gl.allocate_shared_memory(other_k.dtype, [SLOTS, 1, 1, BLOCK_N, HEAD_DIM], other_k.layout),
        gl.allocate_shared_memory(gl.int64, [1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
    )
    mbarrier.init(tiles.q_bar, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1)
        mbarrier.init(tiles.empty.index(slot), count=GROUPS)
    outputs = Outputs(value_ptr, s_stats_ptr, t_stats_ptr, stats_stride)
    REGISTERS: gl.constexpr = GROUP_REGISTERS // GROUPS
    gl.warp_specialize(
        [
            (reduce_rows, (
                tiles, block, outputs, gl.constexpr(0), WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS,
                CONFIG,
            )),
            (load_all, (
                other_q, other_k, weight_q, weight_k, tiles, block,
                h // other_group, h // weight_group, SLOTS, CONFIG,
            )),
            (reduce_rows, (
                tiles, block, outputs, gl.constexpr(1), WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS,
                CONFIG,
            )),
        ],
        [1, NUM_WARPS],
        [LOADER_REGISTERS, REGISTERS],
    )  # fmt: skip
