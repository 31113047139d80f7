"""Implements the Hopper forward: one warp loads, two to four warp groups of 64 rows each reduce.

`weight` is the weighting distribution, whose probabilities weight the moment, and `other` is the
reference distribution: the teacher and the student of forward KL. Every warp group runs on its
own; only the barriers of the stages synchronise them. There are two main loops:

- A program computes one block (frozen_max.py). That is the fastest if all rows of a block see most
  of its tiles whole. The last blocks are split along the keys if that helps: NOTE [Split-KV] in
  split_kv.py.
- A program may compute several blocks, and a warp group only the tiles that its own rows see
  (tiles.py): windows, mask tensors, two passes, short rows.

Roles have files of their own: loader, tile scheduler, main loops, sums of rows (softmax.py), the
second pass, and what writes rows (split_kv.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_streamkl.attention.hopper.forward_config import (
    Launch,
    Outputs,
    Place,
    Side,
    Sides,
    Tiles,
)
from torch_streamkl.attention.hopper.forward_loader import load_all
from torch_streamkl.attention.hopper.frozen_max import reduce_block
from torch_streamkl.attention.hopper.masks import MaskBlocks
from torch_streamkl.attention.hopper.pipeline import skip_stages
from torch_streamkl.attention.hopper.second_pass import of_rows, sum_keys
from torch_streamkl.attention.hopper.softmax import empty
from torch_streamkl.attention.hopper.split_kv import finish_rows, tiles_of_split
from torch_streamkl.attention.hopper.tile_scheduler import (
    Block,
    Grid,
    block_at,
    bounds_of,
    num_steps_of_program,
    place_of_program,
    steps_met,
    tile_of_step,
    tiles_seen,
)
from torch_streamkl.attention.hopper.tiles import reduce_listed, reduce_row_sums, reduce_tiles
from torch_streamkl.attention.hopper.warp_groups import (
    GROUP_REGISTERS,
    NUM_WARPS,
    flat,
    slots_of_pairs,
    without_offset,
)
from torch_streamkl.attention.triton.forward import (
    finite_lse,
    row_offset,
    store_fields,
    store_rows,
)
from torch_streamkl.kernels.arguments import MaskArgs
from torch_streamkl.kernels.row_state import finish
from torch_streamkl.kernels.scores import bind_sequence

LOADER_REGISTERS = gl.constexpr(24)
PERSISTENT_LOADER_REGISTERS = gl.constexpr(32)


@gluon.jit
def store(state, launch, block, rows, TASK: gl.constexpr):
    """Writes values and statistics of a warp group's rows; the state, if the program is a part."""
    outputs = launch.outputs
    inside = rows < block.seq.num_rows
    if TASK.PARTS == 1 or block.beyond < 0:
        COEFFICIENTS: gl.constexpr = TASK.COEFFICIENTS
        CONFIG: gl.constexpr = TASK.CONFIG
        row = row_offset(block.bh, block.h, block.seq, launch.masks) + rows
        finish_rows(state, row, inside, outputs, COEFFICIENTS, CONFIG)
    else:
        store_fields(outputs.state + rows, outputs.field_stride, state, inside, 9)


@gluon.jit
def pass_twice(state, launch, place, bounds, zero, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr):
    """Returns what a second pass finds of a warp group's rows, whose sums are in the state.

    Returns whether rows have to be computed again, log-sum-exps, values, and deltas.
    """
    COEFFICIENTS: gl.constexpr = TASK.COEFFICIENTS
    CONFIG: gl.constexpr = TASK.CONFIG
    SPECIALIZED: gl.constexpr = TASK.SPECIALIZED
    begin, whole, edge = bounds
    lse_t, lse_s, value, student_delta, teacher_delta = finish(
        state, 0.0, 0.0, COEFFICIENTS, CONFIG
    )
    again = state.l_t != state.l_t
    if begin < place.end:
        skip_stages(launch.tiles, place.used, place.used + begin // 2, TASK.SLOTS)
        lse_o = finite_lse(lse_s if TASK.WEIGHT_IS_TEACHER else lse_t)
        lse_w = finite_lse(lse_t if TASK.WEIGHT_IS_TEACHER else lse_s)
        sums = sum_keys(
            lse_o, lse_w, launch.tiles, place, begin, whole, edge, zero, POINTWISE_FN, TASK
        )
        row_sum = gl.where(lse_t == -float("inf"), 0.0, 1.0)
        value, student_delta, teacher_delta = of_rows(sums, row_sum, SPECIALIZED)
    return again, lse_t, lse_s, value, student_delta, teacher_delta


@gluon.jit
def reduce_next_block(
    launch, block, used, done, zero,
    GROUP: gl.constexpr, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Reduces and writes a warp group's rows of a block of a persistent program.

    ``used`` counts the pairs of the program's blocks before, and ``done`` these blocks; returns
    the pairs that it has read by then.
    """
    tiles, outputs = launch.tiles, launch.outputs
    CONFIG: gl.constexpr = TASK.CONFIG
    row_layout: gl.constexpr = gl.SliceLayout(1, zero.type.layout)
    oq = flat(tiles.other_q.index(GROUP))
    wq = flat(tiles.weight_q.index(GROUP))
    first = block.m0 + GROUP * CONFIG.BLOCK_M
    rows = first + gl.arange(0, CONFIG.BLOCK_M, layout=row_layout)
    if CONFIG.HAS_MASK:
        begin, whole, edge, end = 0, 0, 0, 2 * block.num_pairs
    else:
        begin, whole, edge, end = tiles_seen(block, first, CONFIG)
    place = Place(oq, wq, block, first, rows, used, end, launch.sides)
    state = empty(CONFIG.BLOCK_M, row_layout)
    mbarrier.wait(tiles.q_full.index(GROUP), done & 1)
    skip_stages(tiles, used, used + begin // 2, TASK.SLOTS)
    if CONFIG.HAS_MASK:
        if end > 0:
            state = reduce_listed(tiles, place, launch.blocks, zero, TASK)
    elif begin < end:
        if TASK.SECOND:
            state = reduce_row_sums(tiles, place, begin, whole, edge, zero, TASK)
        else:
            state = reduce_tiles(tiles, place, begin, whole, edge, zero, TASK)
    skip_stages(tiles, used + (end + 1) // 2, used + block.num_pairs, TASK.SLOTS)
    used += block.num_pairs
    if TASK.SECOND:
        place = Place(oq, wq, block, first, rows, used, end, launch.sides)
        again, lse_t, lse_s, value, student_delta, teacher_delta = pass_twice(
            state, launch, place, (begin, whole, edge), zero, POINTWISE_FN, TASK
        )
        mbarrier.arrive(tiles.q_empty.index(GROUP), count=1)
        skip_stages(tiles, used + (end + 1) // 2, used + block.num_pairs, TASK.SLOTS)
        used += block.num_pairs
        store_rows(
            outputs, row_offset(block.bh, block.h, block.seq, launch.masks) + rows,
            rows < block.seq.num_rows, lse_t, lse_s, gl.where(again, float("nan"), value),
            student_delta, teacher_delta,
        )  # fmt: skip
    else:
        mbarrier.arrive(tiles.q_empty.index(GROUP), count=1)
        store(state, launch, block, rows, TASK)
    return used


@gluon.jit
def reduce_all(launch, block, GROUP: gl.constexpr, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr):
    """Runs one warp group (consumer): values and statistics of its rows of every block."""
    tiles = launch.tiles
    CONFIG: gl.constexpr = TASK.CONFIG
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, CONFIG.BLOCK_N, 16]
    )
    zero = gl.full([CONFIG.BLOCK_M, CONFIG.BLOCK_N], 0.0, gl.float32, layout=mma)
    if TASK.PERSISTENT:
        used = 0
        done = 0
        for step_of_program in range(num_steps_of_program(launch.grid)):
            number = tile_of_step(step_of_program, launch.grid)
            if number < launch.grid.num_works:
                found = block_at(number, launch, TASK)
                if found.m0 < found.seq.num_rows:
                    used = reduce_next_block(
                        launch, found, used, done, zero, GROUP, POINTWISE_FN, TASK
                    )
                    done += 1
    else:
        first = block.m0 + GROUP * CONFIG.BLOCK_M
        rows = first + gl.arange(0, CONFIG.BLOCK_M, layout=gl.SliceLayout(1, mma))
        oq = flat(tiles.other_q.index(GROUP))
        wq = flat(tiles.weight_q.index(GROUP))
        place = Place(oq, wq, block, first, rows, 0, 2 * block.num_pairs, launch.sides)
        mbarrier.wait(tiles.q_full, 0)
        store(reduce_block(tiles, place, zero, TASK), launch, block, rows, TASK)


@gluon.jit
def new_tiles(other, weight, TASK: gl.constexpr):
    """Allocates shared memory, and initialises the barriers."""
    GROUPS: gl.constexpr = TASK.GROUPS
    SLOTS: gl.constexpr = TASK.SLOTS
    BLOCK_M: gl.constexpr = TASK.CONFIG.BLOCK_M
    other_q: gl.constexpr = [GROUPS, 1, 1, BLOCK_M, TASK.OTHER.DIM]
    weight_q: gl.constexpr = [GROUPS, 1, 1, BLOCK_M, TASK.WEIGHT.DIM]
    q_bars: gl.constexpr = [GROUPS, 1] if TASK.PERSISTENT else [1]
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    other_queries = gl.allocate_shared_memory(other.q.dtype, other_q, other.q.layout)
    weight_queries = gl.allocate_shared_memory(weight.q.dtype, weight_q, weight.q.layout)
    if TASK.WIDE:
        keys: gl.constexpr = [SLOTS, 1, 1, TASK.CONFIG.BLOCK_N, TASK.OTHER.DIM]
        other_keys = gl.allocate_shared_memory(other.k.dtype, keys, other.k.layout)
        weight_keys = other_keys
    else:
        other_keys = slots_of_pairs(other.k, TASK.OTHER.DIM, SLOTS)
        weight_keys = slots_of_pairs(weight.k, TASK.WEIGHT.DIM, SLOTS)
    tiles = Tiles(
        other_queries, weight_queries, other_keys, weight_keys,
        gl.allocate_shared_memory(gl.int64, q_bars, bars),
        gl.allocate_shared_memory(gl.int64, q_bars, bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
    )  # fmt: skip
    if TASK.PERSISTENT:
        for group in gl.static_range(GROUPS):
            mbarrier.init(tiles.q_full.index(group), count=1)
            mbarrier.init(tiles.q_empty.index(group), count=1)
    else:
        mbarrier.init(tiles.q_full, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1)
        mbarrier.init(tiles.empty.index(slot), count=GROUPS)
    return tiles


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(
    do_not_specialize=[
        "num_whole", "first_row", "num_works", "num_blocks", "num_heads", "batch",
        "seqlen_q", "seqlen_k", "window_left", "window_right",
        "mask_row_blocks", "mask_key_blocks", "mask_b", "mask_h",
    ]
)  # fmt: skip
def forward_kernel(
    other_q, other_k, weight_q, weight_k, value_ptr, s_stats_ptr, t_stats_ptr, stats_stride,
    state_ptr, field_stride, split_stride, first_row, num_whole,
    num_works, num_blocks, num_heads, batch, other_group, weight_group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right, cu_seqlens_q, cu_seqlens_k, table,
    mask_bits, mask_lists, mask_row_blocks, mask_key_blocks, mask_b, mask_h,
    other_scale, weight_scale, other_bias, weight_bias, bias_scale,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Computes values and statistics of blocks of rows.

    Blocks from num_whole on have PARTS programs each.
    """
    CONFIG: gl.constexpr = TASK.CONFIG
    other = Side(other_q, other_k, other_group, other_scale, other_bias)
    weight = Side(weight_q, weight_k, weight_group, weight_scale, weight_bias)
    sides = Sides(other, weight, bias_scale)
    grid = Grid(gl.program_id(0), gl.num_programs(0), num_works, num_blocks, num_heads, batch)
    masks = MaskArgs(
        None, mask_b, mask_h, 0, 0, key_lengths, window_left, window_right,
        cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k,
    )  # fmt: skip
    blocks = MaskBlocks(mask_bits, mask_lists, mask_row_blocks, mask_key_blocks)
    block = 0  # a persistent program finds its blocks itself
    if not TASK.PERSISTENT:
        beyond = grid.program - num_whole
        b, h, bh, m0 = place_of_program(beyond, num_whole, grid, table, TASK)
        seq = bind_sequence(masks, b, h, CONFIG)
        window = bounds_of(masks, seq)
        seq = without_offset(seq)
        if cu_seqlens_q is not None:
            if m0 >= seq.num_rows:
                return
            b = b * 0
        STEP: gl.constexpr = CONFIG.BLOCK_N if TASK.WIDE else 2 * CONFIG.BLOCK_N
        ROWS: gl.constexpr = TASK.GROUPS * CONFIG.BLOCK_M
        first_met, num_pairs = steps_met(window, seq, m0, ROWS, STEP, CONFIG)
        first_pair = 0
        stop_pair = num_pairs
        if TASK.PARTS > 1:
            first_pair, stop_pair = tiles_of_split(num_pairs, beyond, TASK.PARTS)
            first_field = bh.to(gl.int64) * seqlen_q - first_row
            state_ptr += first_field + beyond % TASK.PARTS * split_stride
        block = Block(
            b, h, bh, m0, stop_pair - first_pair, first_met + stop_pair, window, seq, 0, beyond
        )
    outputs = Outputs(
        value_ptr, s_stats_ptr, t_stats_ptr, stats_stride, state_ptr, field_stride
    )  # fmt: skip
    launch = Launch(new_tiles(other, weight, TASK), sides, grid, masks, blocks, outputs)
    GROUPS: gl.constexpr = TASK.GROUPS
    REGISTERS: gl.constexpr = GROUP_REGISTERS // GROUPS
    LOADER: gl.constexpr = PERSISTENT_LOADER_REGISTERS if TASK.PERSISTENT else LOADER_REGISTERS
    gl.warp_specialize(
        [
            (reduce_all, (launch, block, gl.constexpr(0), POINTWISE_FN, TASK)),
            (load_all, (launch, block, TASK)),
            (reduce_all, (launch, block, gl.constexpr(1), POINTWISE_FN, TASK)),
            (reduce_all, (launch, block, gl.constexpr(2), POINTWISE_FN, TASK)),
            (reduce_all, (launch, block, gl.constexpr(3), POINTWISE_FN, TASK)),
        ][: GROUPS + 1],
        [1, NUM_WARPS, NUM_WARPS, NUM_WARPS][:GROUPS],
        [LOADER, REGISTERS, REGISTERS, REGISTERS][:GROUPS],
    )  # fmt: skip
