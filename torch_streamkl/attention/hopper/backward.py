"""Implements the Hopper backward: one warp loads tiles, and warp groups accumulate gradients.

dQ and dK are one kernel. Its `outer` tiles stay in shared memory (queries for dQ, keys for dK:
TASK.ROWS says which), and its `inner` tiles (keys, queries) stream. Each warp group has 64 outer
rows, and sums dscore @ inner over the inner tiles in registers, in a fixed order.

A program computes one block, whose warp groups need each inner tile. If TASK.PERSISTENT, a program
may compute several blocks (NOTE [Persistent kernels] in tile_scheduler.py): it loads the outer
tiles of a warp group again when the group is done with them, and each warp group skips inner tiles
outside of its range. That is faster for windows and short rows, and the only form with mask
tensors and two passes.

NOTE [A matmul always in flight]
While a warp group makes gradients of scores, the tensor cores run its next matmul: own scores of
the next tile during the second half of a tile, its other scores and the sum during the first. At
the loop's back edge nothing is in flight: NOTE [Matmuls under arithmetic] in warp_groups.py. The
compiler moves the first half below the wait for the matmuls that it should overlap; `pinned` keeps
it above, which takes an instruction for every eight elements. The loop is unrolled by two; odd
counts are handled by a tail if TASK.PERSISTENT, and else by the last tile once more.

NOTE [Overlapping kernels]
A backward launches one kernel per gradient, and none reads what another writes. The last programs
of a kernel leave multiprocessors idle. So each kernel lets the next one begin when its own last
programs have begun (programmatic dependent launch), and ends after the one before it: waiting for
the last kernel waits for all.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_streamkl.attention.hopper.atomic import add_queries, hand_over, new_handover
from torch_streamkl.attention.hopper.backward_config import (
    NUM_STATISTICS,
    Launch,
    Output,
    Place,
    Side,
    Sides,
    Statistics,
    Tiles,
)
from torch_streamkl.attention.hopper.backward_loader import (
    load_all,
    load_statistics,
    marks_of,
)
from torch_streamkl.attention.hopper.backward_scheduler import (
    bound,
    place_of_program,
    tiles_seen,
    tiles_without_mask,
    work_at,
    work_of_program,
)
from torch_streamkl.attention.hopper.masks import MaskBlocks
from torch_streamkl.attention.hopper.score_gradients import (
    biases_of_tile,
    bits_of_tile,
    first_half,
    score_gradients,
)
from torch_streamkl.attention.hopper.tile_scheduler import (
    Grid,
    num_steps_of_program,
    tile_of_step,
)
from torch_streamkl.attention.hopper.warp_groups import (
    GROUP_REGISTERS,
    NUM_WARPS,
    anew,
    flat,
    phase_of,
    pinned,
    stage_of,
    start_scores,
)
from torch_streamkl.kernels.arguments import MaskArgs

LOADER_REGISTERS = gl.constexpr(32)
ADDER_REGISTERS = gl.constexpr(96)


@gluon.jit
def skip_stages(tiles, start, stop, TASK: gl.constexpr):
    """Waits for and releases the stages of inner tiles that the warp group does not need."""
    for i in range(start, stop):
        mbarrier.wait(tiles.full.index(stage_of(i, TASK.SLOTS)), phase_of(i, TASK.SLOTS))
        mbarrier.arrive(tiles.empty.index(stage_of(i, TASK.SLOTS)), count=1)


@gluon.jit
def outer_tiles(place, tiles, GROUP: gl.constexpr, TASK: gl.constexpr):
    """Returns the outer tiles: descriptors of many columns take more registers than there are."""
    if TASK.HEAD_DIM + TASK.OTHER_DIM > 256:
        group = anew(gl.to_tensor(GROUP))
        return flat(tiles.own_outer.index(group)), flat(tiles.other_outer.index(group))
    else:
        return place.own_outer, place.other_outer


@gluon.jit
def wait_for_following(tiles, place, i, TASK: gl.constexpr):
    """Waits for inner tile i + 1 and returns its stage.

    Past the end, matmuls read what some stage still holds, and nobody reads the result.
    """
    following = i + 1
    if TASK.PERSISTENT:
        following = gl.minimum(i + 1, place.end - 1)
    slot = stage_of(place.used + following, TASK.SLOTS)
    mbarrier.wait(
        tiles.full.index(slot), phase_of(place.used + i + 1, TASK.SLOTS), pred=i + 1 < place.end
    )
    return slot


@gluon.jit
def accumulate_tile(
    x, other, acc, biases, place, i, launch, work, zero,
    GROUP: gl.constexpr, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Adds inner tile i to the gradient.

    `x` and `other` are its first half and its products of `other`; returns those of the next tile.
    """
    tiles, sides = launch.tiles, launch.sides
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    slot = stage_of(place.used + i, TASK.SLOTS)
    following = wait_for_following(tiles, place, i, TASK)
    own_outer, other_outer = outer_tiles(place, tiles, GROUP, TASK)
    own = start_scores(own_outer, tiles.own_inner.index(following), zero)
    # biases of the next tile are loaded under this one's arithmetic
    next_biases = biases_of_tile(sides, work, place.first, i + 1, zero, TASK)
    bits, is_full = bits_of_tile(work, launch.blocks, place.first, i, zero, TASK)
    d = score_gradients(
        x, other, biases[1], bits, is_full, place, tiles, work, sides, i, POINTWISE_FN, TASK
    )
    if TASK.ADDS:
        hand_over(d, launch.handover, i, GROUP, TASK)
    d = gl.convert_layout(d, operand)
    acc = warpgroup_mma(d, flat(tiles.own_inner.index(slot)), acc, is_async=True)
    own = warpgroup_mma_wait(1, deps=[own])
    other = start_scores(other_outer, tiles.other_inner.index(following), zero)
    x = first_half(own, place, tiles, following, sides, next_biases[0], TASK)
    if TASK.PINNED:
        x = pinned(x)
    other, acc = warpgroup_mma_wait(0, deps=[other, acc])
    mbarrier.arrive(tiles.empty.index(slot), count=1)
    return x, other, acc, next_biases


@gluon.jit
def accumulate_last(
    x, other, acc, place, launch, work, zero, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr
):
    """Adds the last inner tile of an odd number to the gradient, and returns this."""
    tiles = launch.tiles
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    i = place.end - 1
    slot = stage_of(place.used + place.end - 1, TASK.SLOTS)
    bits, is_full = bits_of_tile(work, launch.blocks, place.first, i, zero, TASK)
    d = score_gradients(
        x, other, 0.0, bits, is_full, place, tiles, work, launch.sides, i, POINTWISE_FN, TASK
    )
    d = gl.convert_layout(d, operand)
    acc = warpgroup_mma(d, flat(tiles.own_inner.index(slot)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(tiles.empty.index(slot), count=1)
    return acc


@gluon.jit
def place_of(launch, work, used, GROUP: gl.constexpr, layout: gl.constexpr, TASK: gl.constexpr):
    """Returns the state of a warp group at the start of a block, and its first inner tile."""
    tiles = launch.tiles
    first = work.start + GROUP * TASK.BLOCK
    outer = first + gl.arange(0, TASK.BLOCK, layout=gl.SliceLayout(1, layout))
    if TASK.PERSISTENT:
        begin, start_whole, stop_whole, end = tiles_seen(work, first, TASK)
    else:
        start_whole, stop_whole = tiles_without_mask(work, first, TASK)
        begin, end = 0, work.num_loads
    if TASK.ROWS:
        kept = load_statistics(work.stats, 0, outer, work, TASK)
        marks = marks_of(kept, TASK)
    else:
        kept = (0, 0, 0, 0, 0)  # they come with the tiles
        marks = 0
    own_outer, other_outer = tiles.own_outer.index(GROUP), tiles.other_outer.index(GROUP)
    return begin, Place(
        flat(own_outer), flat(other_outer), first, outer, kept, marks, used,
        start_whole, stop_whole, end,
    )  # fmt: skip


@gluon.jit
def accumulate(
    launch, work, used, done, GROUP: gl.constexpr, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr
):
    """Sums the gradient of a warp group's outer rows of a block.

    ``used`` counts the inner tiles of the program's blocks before, and ``done`` these blocks.
    """
    tiles, sides = launch.tiles, launch.sides
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, TASK.INNER, 16]
    )
    out_mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, TASK.HEAD_DIM, 16]
    )
    begin, place = place_of(launch, work, used, GROUP, mma, TASK)
    end = place.end
    zero = gl.full([TASK.BLOCK, TASK.INNER], 0.0, gl.float32, layout=mma)
    acc = gl.full([TASK.BLOCK, TASK.HEAD_DIM], 0.0, gl.float32, layout=out_mma)
    if TASK.PERSISTENT:
        mbarrier.wait(tiles.outer_full.index(GROUP), done & 1)
        skip_stages(tiles, used, used + begin, TASK)
    else:
        mbarrier.wait(tiles.outer_full, 0)
    if begin < (end if TASK.PERSISTENT else work.num_tiles):
        slot = stage_of(used + begin, TASK.SLOTS)
        mbarrier.wait(tiles.full.index(slot), phase_of(used + begin, TASK.SLOTS))
        own = start_scores(place.own_outer, tiles.own_inner.index(slot), zero)
        other = start_scores(place.other_outer, tiles.other_inner.index(slot), zero)
        biases = biases_of_tile(sides, work, place.first, begin, zero, TASK)
        own, other = warpgroup_mma_wait(0, deps=[own, other])
        x = first_half(own, place, tiles, slot, sides, biases[0], TASK)
        for pair in range(begin, end - 1 if TASK.PERSISTENT else end, 2):
            for step in gl.static_range(2):
                x, other, acc, biases = accumulate_tile(
                    x, other, acc, biases, place, pair + step, launch, work, zero,
                    GROUP, POINTWISE_FN, TASK,
                )  # fmt: skip
        if TASK.PERSISTENT:
            if (end - begin) % 2 == 1:
                acc = accumulate_last(x, other, acc, place, launch, work, zero, POINTWISE_FN, TASK)
    if TASK.PERSISTENT:
        skip_stages(tiles, used + end, used + work.num_tiles, TASK)
        mbarrier.arrive(tiles.outer_empty.index(GROUP), count=1)
    store(acc, work, place.first, launch.output, TASK)


@gluon.jit
def store(acc, work, first, output, TASK: gl.constexpr):
    """Writes the gradient of a warp group's outer rows (epilogue)."""
    layout: gl.constexpr = acc.type.layout
    rows = first + gl.arange(0, TASK.BLOCK, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, TASK.HEAD_DIM, layout=gl.SliceLayout(0, layout))
    factor = output.scale
    if TASK.PLAIN:
        factor = factor * TASK.COEFFICIENTS.TS
    if TASK.ROWS:
        inside = rows < work.seq.num_rows
        first_row = work.seq.start_q
        grad = gl.load(work.stats.grad + (work.stats.head_row + rows), mask=inside, other=0.0)
        acc = acc * gl.expand_dims(grad * factor, 1)
    else:
        inside = rows < work.seq.num_keys
        first_row = work.seq.start_k
        acc = acc * factor
    out = output.ptr + work.b.to(gl.int64) * output.stride_b
    out += work.out_head.to(gl.int64) * output.stride_h
    rows = (first_row + rows).to(gl.int64)
    out = out + gl.expand_dims(rows * output.stride_n, 1) + gl.expand_dims(dims, 0)
    inside = gl.expand_dims(inside, 1)
    if TASK.DIM < TASK.HEAD_DIM:
        inside = inside & (gl.expand_dims(dims, 0) < TASK.DIM)
    gl.store(out, acc.to(output.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def accumulate_all(
    launch, work, GROUP: gl.constexpr, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr
):
    """Runs one warp group (consumer): sums the gradient of its outer rows of every block."""
    if TASK.PERSISTENT:
        used = 0
        done = 0
        for step_of_program in range(num_steps_of_program(launch.grid)):
            number = tile_of_step(step_of_program, launch.grid)
            if number < launch.grid.num_works:
                block = work_at(number, launch, TASK)
                accumulate(launch, block, used, done, GROUP, POINTWISE_FN, TASK)
                used += block.num_tiles
                done += 1
    else:
        accumulate(launch, work, 0, 0, GROUP, POINTWISE_FN, TASK)
    gdc_wait()  # NOTE [Overlapping kernels]


@gluon.jit
def new_tiles(own, other, TASK: gl.constexpr):
    """Allocates shared memory, and initialises the barriers."""
    GROUPS: gl.constexpr = TASK.GROUPS
    SLOTS: gl.constexpr = TASK.SLOTS
    own_tiles: gl.constexpr = [GROUPS, 1, 1, TASK.BLOCK, TASK.HEAD_DIM]
    other_tiles: gl.constexpr = [GROUPS, 1, 1, TASK.BLOCK, TASK.OTHER_DIM]
    own_slots: gl.constexpr = [SLOTS, 1, 1, TASK.INNER, TASK.HEAD_DIM]
    other_slots: gl.constexpr = [SLOTS, 1, 1, TASK.INNER, TASK.OTHER_DIM]
    rows: gl.constexpr = [1 if TASK.ROWS else SLOTS * NUM_STATISTICS, TASK.INNER]
    outer_bars: gl.constexpr = [GROUPS, 1] if TASK.PERSISTENT else [1]
    vectors: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = Tiles(
        gl.allocate_shared_memory(own.outer.dtype, own_tiles, own.outer.layout),
        gl.allocate_shared_memory(other.outer.dtype, other_tiles, other.outer.layout),
        gl.allocate_shared_memory(own.inner.dtype, own_slots, own.inner.layout),
        gl.allocate_shared_memory(other.inner.dtype, other_slots, other.inner.layout),
        gl.allocate_shared_memory(gl.float32, rows, vectors),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 1], vectors),
        gl.allocate_shared_memory(gl.int64, outer_bars, bars),
        gl.allocate_shared_memory(gl.int64, outer_bars, bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], bars),
    )
    if TASK.PERSISTENT:
        for group in gl.static_range(GROUPS):
            mbarrier.init(tiles.outer_full.index(group), count=1)
            mbarrier.init(tiles.outer_empty.index(group), count=1)
    else:
        mbarrier.init(tiles.outer_full, count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1 if TASK.ROWS else 2)
        mbarrier.init(tiles.empty.index(slot), count=GROUPS)
    return tiles


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(
    do_not_specialize=[
        "num_works", "num_blocks", "num_heads", "batch", "seqlen_q", "seqlen_k",
        "window_left", "window_right",
        "mask_outer_blocks", "mask_inner_blocks", "mask_b", "mask_h",
    ]
)  # fmt: skip
def backward_kernel(
    own_outer, other_outer, own_inner, other_inner,
    grad_ptr, own_stats, other_stats, stats_stride,
    out_ptr, out_b, out_h, out_n, out_scale, sums,
    num_works, num_blocks, num_heads, batch, own_group, other_group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right, cu_seqlens_q, cu_seqlens_k, table,
    mask_bits, mask_lists, mask_outer_blocks, mask_inner_blocks, mask_b, mask_h,
    own_scale, other_scale, own_bias, other_bias, bias_scale,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Computes dQ (ROWS) or dK of blocks of rows or keys of one head each.

    num_heads counts query heads. If TASK.ADDS, the kernel also adds the block's part of dQ to
    `sums`, without its factor. If TASK.COEFFICIENTS does not hold, POINTWISE_FN computes the
    gradient of one key (pointwise.py).
    """
    gdc_launch_dependents()  # NOTE [Overlapping kernels]
    own = Side(own_outer, own_inner, own_group, own_scale, own_bias)
    other = Side(other_outer, other_inner, other_group, other_scale, other_bias)
    sides = Sides(own, other, bias_scale)
    grid = Grid(gl.program_id(0), gl.num_programs(0), num_works, num_blocks, num_heads, batch)
    masks = MaskArgs(
        None, mask_b, mask_h, 0, 0, key_lengths, window_left, window_right,
        cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k,
    )  # fmt: skip
    blocks = MaskBlocks(mask_bits, mask_lists, mask_outer_blocks, mask_inner_blocks)
    stats = Statistics(own_stats, other_stats, own_stats + stats_stride, grad_ptr, 0)
    output = Output(out_ptr, out_b, out_h, out_n, out_scale)
    handover = None
    work = 0  # a persistent program finds its blocks itself
    if not TASK.PERSISTENT:
        b, position, out_head, share = place_of_program(grid, table, TASK)
        start = position * (TASK.GROUPS * TASK.BLOCK)
        first_head = out_head * TASK.GROUP_SIZE
        seq, bounds, stats = bound(b, first_head, grid, masks, stats, TASK)
        if cu_seqlens_q is not None:
            if start >= (seq.num_rows if TASK.ROWS else seq.num_keys):
                gdc_wait()
                return
            b = b * 0
        work = work_of_program(b, start, out_head, share, seq, bounds, stats, sides, TASK)
        if TASK.ADDS:
            handover = new_handover(own_inner.dtype, TASK)
            tiles_of_head = (seqlen_q + TASK.INNER - 1) // TASK.INNER
            tile_size: gl.constexpr = TASK.INNER * TASK.HEAD_DIM
            sums += (b * num_heads + first_head).to(gl.int64) * tiles_of_head * tile_size
    tiles = new_tiles(own, other, TASK)
    launch = Launch(tiles, handover, sides, grid, masks, blocks, stats, output)
    ADDERS: gl.constexpr = 1 if TASK.ADDS else 0
    REGISTERS: gl.constexpr = (GROUP_REGISTERS - ADDERS * ADDER_REGISTERS) // TASK.GROUPS
    LOADER: gl.constexpr = 24 if TASK.HEAD_DIM + TASK.OTHER_DIM > 256 else LOADER_REGISTERS
    THIRD: gl.constexpr = ADDER_REGISTERS if TASK.ADDS else REGISTERS
    CONSUMERS: gl.constexpr = TASK.GROUPS + ADDERS  # two or three
    gl.warp_specialize(
        [
            (accumulate_all, (launch, work, gl.constexpr(0), POINTWISE_FN, TASK)),
            (accumulate_all, (launch, work, gl.constexpr(1), POINTWISE_FN, TASK)),
            (load_all, (launch, work, TASK)) if CONSUMERS == 2 else
            (add_queries, (launch, work, sums, TASK)) if TASK.ADDS else
            (accumulate_all, (launch, work, gl.constexpr(2), POINTWISE_FN, TASK)),
            (load_all, (launch, work, TASK)),
        ][: CONSUMERS + 1],
        [NUM_WARPS, 1 if CONSUMERS == 2 else NUM_WARPS, 1][:CONSUMERS],
        [REGISTERS, LOADER if CONSUMERS == 2 else THIRD, LOADER][:CONSUMERS],
    )  # fmt: skip
