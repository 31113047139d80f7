"""Implements the persistent Hopper forward: windows, mask tensors, two passes, short rows.

One warp loads, and two or three warp groups of 64 rows reduce, as in forward.py, which is faster
if all rows of a block see most of its tiles whole. Here a program may compute several blocks (NOTE
[Persistent kernels] in tile_scheduler.py), and a warp group computes only the tiles that its own
rows see (tiles.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_streamkl.attention.hopper.masks import MaskBlocks
from torch_streamkl.attention.hopper.second_pass import of_rows, sum_keys
from torch_streamkl.attention.hopper.split_kv import finish_rows
from torch_streamkl.attention.hopper.tile_scheduler import (
    Work,
    block_at,
    num_steps_of_program,
    pair_at,
    tile_of_step,
    tiles_seen,
)
from torch_streamkl.attention.hopper.tiles import (
    Place,
    Tiles,
    empty,
    reduce_listed,
    reduce_row_sums,
    reduce_tiles,
    skip_stages,
)
from torch_streamkl.attention.hopper.warp_groups import (
    GROUP_REGISTERS,
    NUM_WARPS,
    async_load,
    flat,
    phase_of,
    slots_of_pairs,
    stage_of,
)
from torch_streamkl.attention.triton.forward import finite_lse, row_offset, store_rows
from torch_streamkl.kernels.arguments import MaskArgs
from torch_streamkl.kernels.row_state import finish

LOADER_REGISTERS = gl.constexpr(32)


class Outputs(NamedTuple):
    """Holds pointers to values and statistics."""

    value: Any
    s_stats: Any
    t_stats: Any
    stats_stride: Any


@gluon.jit
def load_all(
    other_q, other_k, weight_q, weight_k, tiles, work, masks, blocks, other_group, weight_group,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp: loads each block's queries, and every pair into an empty stage.

    The last warp group finishes a block first, and sees the next one's first pair.
    """
    SECOND: gl.constexpr = CONFIG.TWO_PASS and not CONFIG.GUARDED
    used = 0
    done = 0
    for step_of_program in range(num_steps_of_program(work)):
        number = tile_of_step(step_of_program, work)
        if number < work.num_works:
            block = block_at(number, work, masks, blocks, GROUPS, CONFIG)
            if block.m0 < block.seq.num_rows:
                other_h = block.h // other_group
                weight_h = block.h // weight_group
                load_queries(other_q, weight_q, tiles, block, done, GROUPS - 1, CONFIG)
                for i in range(gl.minimum(block.num_pairs, 1)):
                    load_pair(
                        other_k, weight_k, tiles, block, i, used, other_h, weight_h, SLOTS, CONFIG
                    )
                for group in gl.static_range(1, GROUPS):
                    load_queries(other_q, weight_q, tiles, block, done, GROUPS - 1 - group, CONFIG)
                for i in range(1, block.num_pairs):
                    load_pair(
                        other_k, weight_k, tiles, block, i, used, other_h, weight_h, SLOTS, CONFIG
                    )
                used += block.num_pairs
                if SECOND:
                    for i in range(block.num_pairs):
                        load_pair(
                            other_k, weight_k, tiles, block, i, used, other_h, weight_h,
                            SLOTS, CONFIG,
                        )  # fmt: skip
                    used += block.num_pairs
                done += 1


@gluon.jit
def load_queries(other_q, weight_q, tiles, block, done, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """Loads the queries of a warp group, when it is done with those of the block before."""
    full = tiles.q_full.index(GROUP)
    mbarrier.wait(tiles.q_empty.index(GROUP), (done & 1) ^ 1)
    mbarrier.expect(full, other_q.block_type.nbytes + weight_q.block_type.nbytes)
    row = block.seq.start_q + block.m0 + GROUP * CONFIG.BLOCK_M
    async_load(other_q, [block.b, block.h, row, 0], full, tiles.other_q.index(GROUP))
    async_load(weight_q, [block.b, block.h, row, 0], full, tiles.weight_q.index(GROUP))


@gluon.jit
def load_pair(
    other_k, weight_k, tiles, block, i, used, other_h, weight_h,
    SLOTS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Loads pair i of a block, counted from its last."""
    full = tiles.full.index(stage_of(used + i, SLOTS))
    pair = pair_at(block, i, CONFIG)
    mbarrier.wait(tiles.empty.index(stage_of(used + i, SLOTS)), phase_of(used + i, SLOTS) ^ 1)
    ROWS: gl.constexpr = other_k.block_type.shape[2]
    TILES: gl.constexpr = 2 * CONFIG.BLOCK_N // ROWS
    mbarrier.expect(full, TILES * (other_k.block_type.nbytes + weight_k.block_type.nbytes))
    for tile in gl.static_range(TILES):
        row = block.seq.start_k + 2 * pair * CONFIG.BLOCK_N + tile * ROWS
        place = stage_of(used + i, SLOTS) * TILES + tile
        async_load(other_k, [block.b, other_h, row, 0], full, tiles.other_k.index(place))
        async_load(weight_k, [block.b, weight_h, row, 0], full, tiles.weight_k.index(place))


@gluon.jit
def reduce_rows(
    tiles, work, masks, blocks, outputs, other_scale, weight_scale,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, WEIGHT_IS_TEACHER: gl.constexpr,
    SLOTS: gl.constexpr, COEFFICIENTS: gl.constexpr, POINTWISE_FN: gl.constexpr,
    SPECIALIZED: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Runs one warp group: values and statistics of its rows of every block."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    SECOND: gl.constexpr = CONFIG.TWO_PASS and not CONFIG.GUARDED
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=mma)
    oq = flat(tiles.other_q.index(GROUP))
    wq = flat(tiles.weight_q.index(GROUP))
    used = 0
    done = 0
    for step_of_program in range(num_steps_of_program(work)):
        number = tile_of_step(step_of_program, work)
        if number < work.num_works:
            block = block_at(number, work, masks, blocks, GROUPS, CONFIG)
            if block.m0 < block.seq.num_rows:
                first = block.m0 + GROUP * BLOCK_M
                rows = first + gl.arange(0, BLOCK_M, layout=row_layout)
                if CONFIG.HAS_MASK:
                    begin, whole, edge, end = 0, 0, 0, 2 * block.num_pairs
                else:
                    begin, whole, edge, end = tiles_seen(block, first, CONFIG)
                place = Place(oq, wq, block, rows, used, end, other_scale, weight_scale)
                inside = rows < block.seq.num_rows
                state = empty(BLOCK_M, row_layout)
                mbarrier.wait(tiles.q_full.index(GROUP), done & 1)
                skip_stages(tiles, used, used + begin // 2, SLOTS)
                if CONFIG.HAS_MASK:
                    if end > 0:
                        state = reduce_listed(
                            tiles, place, first, blocks, zero,
                            WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, CONFIG,
                        )  # fmt: skip
                elif begin < end:
                    if SECOND:
                        state = reduce_row_sums(
                            tiles, place, begin, whole, edge, zero,
                            WEIGHT_IS_TEACHER, SLOTS, CONFIG,
                        )  # fmt: skip
                    else:
                        state = reduce_tiles(
                            tiles, place, begin, whole, edge, zero,
                            WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, CONFIG,
                        )  # fmt: skip
                skip_stages(tiles, used + (end + 1) // 2, used + block.num_pairs, SLOTS)
                used += block.num_pairs
                if SECOND:
                    lse_t, lse_s, value, student_delta, teacher_delta = finish(
                        state, 0.0, 0.0, COEFFICIENTS, CONFIG
                    )
                    again = state.l_t != state.l_t
                    if begin < end:
                        place = Place(oq, wq, block, rows, used, end, other_scale, weight_scale)
                        skip_stages(tiles, used, used + begin // 2, SLOTS)
                        lse_o = finite_lse(lse_s if WEIGHT_IS_TEACHER else lse_t)
                        lse_w = finite_lse(lse_t if WEIGHT_IS_TEACHER else lse_s)
                        sums = sum_keys(
                            lse_o, lse_w, tiles, place, begin, whole, edge, zero,
                            WEIGHT_IS_TEACHER, POINTWISE_FN, SPECIALIZED, SLOTS, CONFIG,
                        )  # fmt: skip
                        row_sum = gl.where(lse_t == -float("inf"), 0.0, 1.0)
                        value, student_delta, teacher_delta = of_rows(sums, row_sum, SPECIALIZED)
                    mbarrier.arrive(tiles.q_empty.index(GROUP), count=1)
                    skip_stages(tiles, used + (end + 1) // 2, used + block.num_pairs, SLOTS)
                    used += block.num_pairs
                    row = row_offset(block.bh, block.h, block.seq, masks) + rows
                    store_rows(
                        outputs.value, outputs.s_stats, outputs.t_stats, outputs.stats_stride,
                        row, inside, lse_t, lse_s, gl.where(again, float("nan"), value),
                        student_delta, teacher_delta,
                    )  # fmt: skip
                else:
                    mbarrier.arrive(tiles.q_empty.index(GROUP), count=1)
                    finish_rows(
                        state, row_offset(block.bh, block.h, block.seq, masks) + rows, inside,
                        outputs.value, outputs.s_stats, outputs.t_stats, outputs.stats_stride,
                        COEFFICIENTS, CONFIG,
                    )  # fmt: skip
                done += 1


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(
    do_not_specialize=[
        "num_works", "num_blocks", "num_heads", "batch",
        "seqlen_q", "seqlen_k", "window_left", "window_right",
        "mask_row_blocks", "mask_key_blocks", "mask_b", "mask_h",
    ]
)  # fmt: skip
def persistent_forward_kernel(
    other_q, other_k, weight_q, weight_k, value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
    num_works, num_blocks, num_heads, batch, other_group, weight_group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right,
    mask_bits, mask_lists, mask_row_blocks, mask_key_blocks, mask_b, mask_h,
    other_scale, weight_scale,
    WEIGHT_IS_TEACHER: gl.constexpr,
    GROUPS: gl.constexpr, SLOTS: gl.constexpr,
    COEFFICIENTS: gl.constexpr, POINTWISE_FN: gl.constexpr, SPECIALIZED: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Computes values and statistics of blocks of rows."""
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    OTHER_DIM: gl.constexpr = CONFIG.S_DIM if WEIGHT_IS_TEACHER else CONFIG.T_DIM
    WEIGHT_DIM: gl.constexpr = CONFIG.T_DIM if WEIGHT_IS_TEACHER else CONFIG.S_DIM
    work = Work(
        gl.program_id(0), gl.num_programs(0), num_works, num_blocks, num_heads, batch
    )  # fmt: skip
    blocks = MaskBlocks(mask_bits, mask_lists, mask_row_blocks, mask_key_blocks)
    masks = MaskArgs(
        None, mask_b, mask_h, 0, 0, key_lengths, window_left, window_right,
        None, None, seqlen_q, seqlen_k,
    )  # fmt: skip
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = Tiles(
        gl.allocate_shared_memory(
            other_q.dtype, [GROUPS, 1, 1, BLOCK_M, OTHER_DIM], other_q.layout
        ),
        gl.allocate_shared_memory(
            weight_q.dtype, [GROUPS, 1, 1, BLOCK_M, WEIGHT_DIM], weight_q.layout
        ),
        slots_of_pairs(other_k, OTHER_DIM, SLOTS),
        slots_of_pairs(weight_k, WEIGHT_DIM, SLOTS),
        gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [GROUPS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
    )
    for group in gl.static_range(GROUPS):
        mbarrier.init(tiles.q_full.index(group), count=1)
        mbarrier.init(tiles.q_empty.index(group), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1)
        mbarrier.init(tiles.empty.index(slot), count=GROUPS)
    outputs = Outputs(
        value_ptr, s_stats_ptr, t_stats_ptr, stats_stride
    )  # fmt: skip
    REGISTERS: gl.constexpr = GROUP_REGISTERS // GROUPS
    gl.warp_specialize(
        [
            (reduce_rows, (
                tiles, work, masks, blocks, outputs, other_scale, weight_scale, gl.constexpr(0),
                GROUPS, WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, POINTWISE_FN, SPECIALIZED, CONFIG,
            )),
            (load_all, (
                other_q, other_k, weight_q, weight_k, tiles, work, masks, blocks,
                other_group, weight_group, GROUPS, SLOTS, CONFIG,
            )),
            (reduce_rows, (
                tiles, work, masks, blocks, outputs, other_scale, weight_scale, gl.constexpr(1),
                GROUPS, WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, POINTWISE_FN, SPECIALIZED, CONFIG,
            )),
            (reduce_rows, (
                tiles, work, masks, blocks, outputs, other_scale, weight_scale, gl.constexpr(2),
                GROUPS, WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, POINTWISE_FN, SPECIALIZED, CONFIG,
            )),
            (reduce_rows, (
                tiles, work, masks, blocks, outputs, other_scale, weight_scale, gl.constexpr(3),
                GROUPS, WEIGHT_IS_TEACHER, SLOTS, COEFFICIENTS, POINTWISE_FN, SPECIALIZED, CONFIG,
            )),
        ][: GROUPS + 1],
        [1, NUM_WARPS, NUM_WARPS, NUM_WARPS][:GROUPS],
        [LOADER_REGISTERS, REGISTERS, REGISTERS, REGISTERS][:GROUPS],
    )  # fmt: skip
