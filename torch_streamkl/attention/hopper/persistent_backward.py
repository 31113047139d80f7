"""Implements the persistent Hopper backward: windows, mask tensors, two passes, short rows.

Structure and most functions are those of backward.py, which is as fast or faster for other
problems. Here a program may compute several blocks (NOTE [Persistent kernels] in
tile_scheduler.py), so it loads the outer tiles of a warp group again when the group is done with
them. Each warp group skips inner tiles outside of its range. The loop is unrolled by two; a tail
handles odd counts.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_streamkl.attention.hopper.backward import (
    CLAMP,
    DELTA,
    GRAD,
    LOADER_REGISTERS,
    NEGATIVE,
    NUM_STATISTICS,
    OTHER_LSE,
    OWN_LSE,
    Output,
    Statistics,
    along,
    first_half,
    load_statistics,
    marks_in,
    marks_of,
    second_half,
    tiles_met,
    visible,
)
from torch_streamkl.attention.hopper.masks import (
    MaskBlocks,
    list_at,
    load_bits,
    where_admitted,
)
from torch_streamkl.attention.hopper.tile_scheduler import (
    num_steps_of_program,
    place_among,
    tile_of_step,
)
from torch_streamkl.attention.hopper.warp_groups import (
    GROUP_REGISTERS,
    NUM_WARPS,
    async_load,
    flat,
    lane_sum,
    phase_of,
    pinned,
    stage_of,
    start_scores,
    without_offset,
)
from torch_streamkl.attention.triton.forward import row_offset
from torch_streamkl.kernels.arguments import MaskArgs
from torch_streamkl.kernels.row_state import SWIZZLE_HEADS
from torch_streamkl.kernels.scores import bind_sequence, keys_of_rows, rows_of_keys


class Tiles(NamedTuple):
    """Extends backward.Tiles by barriers for the outer tiles of every warp group."""

    own_outer: Any
    other_outer: Any
    own_inner: Any
    other_inner: Any
    statistics: Any  # of the inner rows, by stage
    marks: Any  # by stage: NEGATIVE and CLAMPED, of dK's inner rows
    outer_full: Any  # by warp group
    outer_empty: Any
    full: Any
    empty: Any


class Sizes(NamedTuple):
    """Holds the counts of all blocks of a launch, and of the programs that compute them."""

    program: Any
    num_programs: Any
    num_works: Any
    num_blocks: Any  # of a head
    num_heads: Any  # of the queries
    batch: Any
    own_group: Any
    other_group: Any


class Bounds(NamedTuple):
    """Holds the part of arguments.MaskArgs that the functions of backward.py read."""

    window_left: Any  # these with the sequence's offset in them
    window_right: Any
    seqlen_q: Any


class Work(NamedTuple):
    """Holds an outer block of a program, and the range of inner tiles that it meets."""

    b: Any
    first_head: Any  # of the queries: the head of dQ, the first that shares the keys of dK
    own_key_head: Any
    other_key_head: Any
    start: Any  # first row or key of the block
    length: Any  # rows or keys
    first_tile: Any  # of the inner tiles
    num_tiles: Any  # of all heads together
    masks: Any  # Bounds
    seq: Any  # arguments.Sequence
    stats: Any  # backward.Statistics
    list: Any  # of a mask's inner blocks: masks.list_at


@gluon.jit
def work_at(number, sizes, masks, blocks, stats, TASK: gl.constexpr):
    """Returns the outer block with this number."""
    num_groups = sizes.num_heads // TASK.GROUP_SIZE
    position, group = place_among(
        number, sizes.num_blocks, num_groups * sizes.batch, SWIZZLE_HEADS, TASK.HAS_RIGHT
    )
    if TASK.ROWS and TASK.HAS_RIGHT:
        position = sizes.num_blocks - 1 - position  # causal rows grow: the longest first
    start = position * (TASK.GROUPS * TASK.BLOCK)
    b = group // num_groups
    first_head = group % num_groups * TASK.GROUP_SIZE
    seq = bind_sequence(masks, b, first_head, TASK)
    bounds = Bounds(
        masks.window_left - seq.offset, masks.window_right + seq.offset, masks.seqlen_q
    )
    seq = without_offset(seq)
    head_row = row_offset(b * sizes.num_heads + first_head, first_head, seq, masks)
    entries = 0
    if TASK.HAS_MASK:
        entries = list_at(blocks, seq.mask_offset, position)
        first_tile = 0
        num_tiles = gl.load(entries) * (2 * TASK.GROUP_SIZE)
    else:
        first_tile, num_tiles = tiles_met(bounds, seq, start, TASK)
    length = seq.num_rows if TASK.ROWS else seq.num_keys
    return Work(
        b, first_head, first_head // sizes.own_group, first_head // sizes.other_group, start,
        length, first_tile, num_tiles, bounds, seq,
        Statistics(stats.own, stats.other, stats.delta, stats.grad, head_row), entries,
    )  # fmt: skip


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
def load_all(
    own_outer, other_outer, own_inner, other_inner, tiles, sizes, masks, blocks, stats,
    TASK: gl.constexpr,
):  # fmt: skip
    """Runs the loading warp: loads each block's outer tiles, and inner tiles into empty stages.

    It waits until the warp groups are done with the outer tiles of the block before.
    """
    used = 0
    done = 0
    for step_of_program in range(num_steps_of_program(sizes)):
        number = tile_of_step(step_of_program, sizes)
        if number < sizes.num_works:
            work = work_at(number, sizes, masks, blocks, stats, TASK)
            for i in range(gl.minimum(work.num_tiles, 1)):
                load_inner(own_inner, other_inner, tiles, work, i, used, TASK)
            load_outer(own_outer, other_outer, tiles, work, done, TASK)
            for i in range(1, work.num_tiles):
                load_inner(own_inner, other_inner, tiles, work, i, used, TASK)
            used += work.num_tiles
            done += 1


@gluon.jit
def load_outer(own_outer, other_outer, tiles, work, done, TASK: gl.constexpr):
    """Loads the outer tiles of every warp group, when it is done with the block before."""
    own_head = work.first_head if TASK.ROWS else work.own_key_head
    other_head = work.first_head if TASK.ROWS else work.other_key_head
    start = work.start
    GROUPS: gl.constexpr = TASK.GROUPS
    for group in gl.static_range(GROUPS):
        full = tiles.outer_full.index(group)
        mbarrier.wait(tiles.outer_empty.index(group), (done & 1) ^ 1)
        mbarrier.expect(full, own_outer.block_type.nbytes + other_outer.block_type.nbytes)
        row = start + group * TASK.BLOCK
        async_load(own_outer, [work.b, own_head, row, 0], full, tiles.own_outer.index(group))
        async_load(other_outer, [work.b, other_head, row, 0], full, tiles.other_outer.index(group))


@gluon.jit
def load_inner(own_inner, other_inner, tiles, work, i, used, TASK: gl.constexpr):
    """Loads inner tile i of a block."""
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    slot = stage_of(used + i, TASK.SLOTS)
    member = i % TASK.GROUP_SIZE
    if TASK.ROWS:
        own_head = work.own_key_head
        other_head = work.other_key_head
    else:
        own_head = work.first_head + member
        other_head = work.first_head + member
    row = inner_tile(work, i, TASK) * TASK.INNER
    full = tiles.full.index(slot)
    if not TASK.ROWS:  # they arrive while the stage is not empty yet
        rows = row + gl.arange(0, TASK.INNER, layout=lanes)
        found = load_statistics(work.stats, member, rows, work, TASK)
    mbarrier.wait(tiles.empty.index(slot), phase_of(used + i, TASK.SLOTS) ^ 1)
    mbarrier.expect(full, own_inner.block_type.nbytes + other_inner.block_type.nbytes)
    row += work.seq.start_k if TASK.ROWS else work.seq.start_q
    async_load(own_inner, [work.b, own_head, row, 0], full, tiles.own_inner.index(slot))
    async_load(other_inner, [work.b, other_head, row, 0], full, tiles.other_inner.index(slot))
    if not TASK.ROWS:
        statistics = slot * NUM_STATISTICS
        tiles.statistics.index(statistics + OWN_LSE).store(found[OWN_LSE])
        tiles.statistics.index(statistics + OTHER_LSE).store(found[OTHER_LSE])
        tiles.statistics.index(statistics + GRAD).store(found[GRAD])
        if not TASK.PLAIN or TASK.CLAMP > 0.0:
            tiles.statistics.index(statistics + DELTA).store(found[DELTA])
        if TASK.FOLDED:
            if TASK.CLAMP > 0.0:
                tiles.statistics.index(statistics + CLAMP).store(found[CLAMP])
            one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            marks = marks_of(found, TASK)
            tiles.marks.index(slot).store(gl.full([1], marks, gl.int32, layout=one))
        mbarrier.arrive(full, count=1)


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
    end = gl.maximum(gl.minimum(end, work.num_tiles), 0)
    end = gl.where(first < work.length, end, 0)
    if TASK.HAS_MASK:
        begin = 0
        end = work.num_tiles
    return gl.minimum(gl.maximum(begin, 0), end), start, gl.minimum(stop, end), end


@gluon.jit
def skip_stages(tiles, start, stop, TASK: gl.constexpr):
    """Waits for and releases the stages of inner tiles that the warp group does not need."""
    for i in range(start, stop):
        mbarrier.wait(tiles.full.index(stage_of(i, TASK.SLOTS)), phase_of(i, TASK.SLOTS))
        mbarrier.arrive(tiles.empty.index(stage_of(i, TASK.SLOTS)), count=1)


@gluon.jit
def score_gradients(
    x, other, kept, marks_of_rows, tiles, work, outer, i, used, other_scale,
    start_whole, stop_whole, bits, is_full,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Returns dscore of inner tile i, in the inputs' dtype."""
    layout: gl.constexpr = other.type.layout
    slot = stage_of(used + i, TASK.SLOTS)
    marks = marks_in(tiles, slot, marks_of_rows, TASK)
    d = second_half(x, other, kept, tiles, slot, marks, other_scale, POINTWISE_FN, TASK)
    if TASK.HAS_MASK:
        if (marks & NEGATIVE) != 0:
            d = d * along(kept, tiles, slot, GRAD, layout, TASK)
        if not is_full:
            d = where_admitted(bits, d, 0.0)
    elif (i < start_whole) | (i >= stop_whole) | ((marks & NEGATIVE) != 0):
        d = visible(d, work, outer, i, TASK)
        if TASK.FOLDED:
            d = d * along(kept, tiles, slot, GRAD, layout, TASK)
    return d.to(tiles.own_inner.dtype)


@gluon.jit
def bits_of_tile(work, blocks, first, i, zero, TASK: gl.constexpr):
    """Returns a mask's bits of inner tile i, and whether it admits all of its block."""
    if TASK.HAS_MASK:
        tile = i // TASK.GROUP_SIZE
        entry = gl.load(work.list + 1 + tile // 2)
        bits = load_bits(
            blocks, work.seq.mask_offset, first // TASK.BLOCK, entry // 2 * 2 + tile % 2,
            lane_sum(zero),
        )  # fmt: skip
        return bits, entry % 2 == 1
    else:
        return 0, True


@gluon.jit
def accumulate_all(
    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
    GROUP: gl.constexpr, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Runs one warp group: sums the gradient of its outer rows of every block."""
    used = 0
    done = 0
    for step_of_program in range(num_steps_of_program(sizes)):
        number = tile_of_step(step_of_program, sizes)
        if number < sizes.num_works:
            work = work_at(number, sizes, masks, blocks, stats, TASK)
            accumulate(
                tiles, work, blocks, output, own_scale, other_scale, used, done,
                GROUP, POINTWISE_FN, TASK,
            )  # fmt: skip
            used += work.num_tiles
            done += 1
    gdc_wait()  # NOTE [Overlapping kernels] in backward.py


@gluon.jit
def accumulate(
    tiles, work, blocks, output, own_scale, other_scale, used, done,
    GROUP: gl.constexpr, POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Accumulates the gradient of a warp group's outer rows of a block.

    ``used`` counts the tiles of the blocks before.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, TASK.INNER, 16]
    )
    out_mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, TASK.HEAD_DIM, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    first = work.start + GROUP * TASK.BLOCK
    outer = first + gl.arange(0, TASK.BLOCK, layout=gl.SliceLayout(1, mma))
    begin, start_whole, stop_whole, end = tiles_seen(work, first, TASK)
    if TASK.ROWS:
        kept = load_statistics(work.stats, 0, outer, work, TASK)
        marks_of_rows = marks_of(kept, TASK)
    else:
        kept = (0, 0, 0, 0, 0)  # they come with the tiles
        marks_of_rows = 0
    zero = gl.full([TASK.BLOCK, TASK.INNER], 0.0, gl.float32, layout=mma)
    acc = gl.full([TASK.BLOCK, TASK.HEAD_DIM], 0.0, gl.float32, layout=out_mma)
    own_outer = flat(tiles.own_outer.index(GROUP))
    other_outer = flat(tiles.other_outer.index(GROUP))
    mbarrier.wait(tiles.outer_full.index(GROUP), done & 1)
    skip_stages(tiles, used, used + begin, TASK)
    if begin < end:
        slot = stage_of(used + begin, TASK.SLOTS)
        mbarrier.wait(tiles.full.index(slot), phase_of(used + begin, TASK.SLOTS))
        own = start_scores(own_outer, tiles.own_inner.index(slot), zero)
        other = start_scores(other_outer, tiles.other_inner.index(slot), zero)
        own, other = warpgroup_mma_wait(0, deps=[own, other])
        x = first_half(own, kept, tiles, slot, own_scale, TASK)
        for pair in range(begin, end - 1, 2):
            for step in gl.static_range(2):
                i = pair + step
                slot = stage_of(used + i, TASK.SLOTS)
                # after the last matmuls read its stage again, and nobody reads them
                following = stage_of(used + gl.minimum(i + 1, end - 1), TASK.SLOTS)
                mbarrier.wait(
                    tiles.full.index(following), phase_of(used + i + 1, TASK.SLOTS),
                    pred=i + 1 < end,
                )  # fmt: skip
                own = start_scores(own_outer, tiles.own_inner.index(following), zero)
                bits, is_full = bits_of_tile(work, blocks, first, i, zero, TASK)
                d = score_gradients(
                    x, other, kept, marks_of_rows, tiles, work, outer, i, used, other_scale,
                    start_whole, stop_whole, bits, is_full, POINTWISE_FN, TASK,
                )  # fmt: skip
                d = gl.convert_layout(d, operand)
                acc = warpgroup_mma(d, flat(tiles.own_inner.index(slot)), acc, is_async=True)
                own = warpgroup_mma_wait(1, deps=[own])
                other = start_scores(other_outer, tiles.other_inner.index(following), zero)
                x = first_half(own, kept, tiles, following, own_scale, TASK)
                if TASK.PINNED:
                    x = pinned(x)
                other, acc = warpgroup_mma_wait(0, deps=[other, acc])
                mbarrier.arrive(tiles.empty.index(slot), count=1)
        if (end - begin) % 2 == 1:
            slot = stage_of(used + end - 1, TASK.SLOTS)
            bits, is_full = bits_of_tile(work, blocks, first, end - 1, zero, TASK)
            d = score_gradients(
                x, other, kept, marks_of_rows, tiles, work, outer, end - 1, used, other_scale,
                start_whole, stop_whole, bits, is_full, POINTWISE_FN, TASK,
            )  # fmt: skip
            d = gl.convert_layout(d, operand)
            acc = warpgroup_mma(d, flat(tiles.own_inner.index(slot)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(tiles.empty.index(slot), count=1)
    skip_stages(tiles, used + end, used + work.num_tiles, TASK)
    mbarrier.arrive(tiles.outer_empty.index(GROUP), count=1)
    rows = first + gl.arange(0, TASK.BLOCK, layout=gl.SliceLayout(1, out_mma))
    dims = gl.arange(0, TASK.HEAD_DIM, layout=gl.SliceLayout(0, out_mma))
    factor = output.scale
    if TASK.PLAIN:
        factor = factor * TASK.COEFFICIENTS.TS
    if TASK.ROWS:
        inside = rows < work.seq.num_rows
        first_row = work.seq.start_q
        grad = gl.load(work.stats.grad + (work.stats.head_row + rows), mask=inside, other=0.0)
        acc = acc * gl.expand_dims(grad * factor, 1)
        head = work.first_head
    else:
        inside = rows < work.seq.num_keys
        first_row = work.seq.start_k
        acc = acc * factor
        head = work.first_head // TASK.GROUP_SIZE  # shares are heads of their own
    out = output.ptr + work.b.to(gl.int64) * output.stride_b + head.to(gl.int64) * output.stride_h
    rows = (first_row + rows).to(gl.int64)
    out = out + gl.expand_dims(rows * output.stride_n, 1) + gl.expand_dims(dims, 0)
    inside = gl.expand_dims(inside, 1)
    if TASK.DIM < TASK.HEAD_DIM:
        inside = inside & (gl.expand_dims(dims, 0) < TASK.DIM)
    gl.store(out, acc.to(output.ptr.dtype.element_ty), mask=inside)


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(
    do_not_specialize=[
        "num_works", "num_blocks", "num_heads", "batch", "seqlen_q", "seqlen_k",
        "window_left", "window_right",
        "mask_outer_blocks", "mask_inner_blocks", "mask_b", "mask_h",
    ]
)  # fmt: skip
def persistent_backward_kernel(
    own_outer, other_outer, own_inner, other_inner,
    grad_ptr, own_stats, other_stats, stats_stride,
    out_ptr, out_b, out_h, out_n, out_scale,
    num_works, num_blocks, num_heads, batch, own_group, other_group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right,
    mask_bits, mask_lists, mask_outer_blocks, mask_inner_blocks, mask_b, mask_h,
    own_scale, other_scale,
    POINTWISE_FN: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """Computes what backward.backward_kernel does, except atomic sums and packed sequences."""
    gdc_launch_dependents()  # NOTE [Overlapping kernels] in backward.py
    sizes = Sizes(
        gl.program_id(0), gl.num_programs(0), num_works, num_blocks, num_heads, batch,
        own_group, other_group,
    )  # fmt: skip
    blocks = MaskBlocks(mask_bits, mask_lists, mask_outer_blocks, mask_inner_blocks)
    masks = MaskArgs(
        None, mask_b, mask_h, 0, 0, key_lengths, window_left, window_right,
        None, None, seqlen_q, seqlen_k,
    )  # fmt: skip
    stats = Statistics(own_stats, other_stats, own_stats + stats_stride, grad_ptr, 0)
    output = Output(out_ptr, out_b, out_h, out_n, out_scale)

    GROUPS: gl.constexpr = TASK.GROUPS
    SLOTS: gl.constexpr = TASK.SLOTS
    own_tiles: gl.constexpr = [TASK.GROUPS, 1, 1, TASK.BLOCK, TASK.HEAD_DIM]
    other_tiles: gl.constexpr = [TASK.GROUPS, 1, 1, TASK.BLOCK, TASK.OTHER_DIM]
    own_slots: gl.constexpr = [TASK.SLOTS, 1, 1, TASK.INNER, TASK.HEAD_DIM]
    other_slots: gl.constexpr = [TASK.SLOTS, 1, 1, TASK.INNER, TASK.OTHER_DIM]
    rows: gl.constexpr = [1 if TASK.ROWS else TASK.SLOTS * NUM_STATISTICS, TASK.INNER]
    vectors: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    tiles = Tiles(
        gl.allocate_shared_memory(own_outer.dtype, own_tiles, own_outer.layout),
        gl.allocate_shared_memory(other_outer.dtype, other_tiles, other_outer.layout),
        gl.allocate_shared_memory(own_inner.dtype, own_slots, own_inner.layout),
        gl.allocate_shared_memory(other_inner.dtype, other_slots, other_inner.layout),
        gl.allocate_shared_memory(gl.float32, rows, vectors),
        gl.allocate_shared_memory(gl.int32, [TASK.SLOTS, 1], vectors),
        gl.allocate_shared_memory(gl.int64, [TASK.GROUPS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [TASK.GROUPS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [TASK.SLOTS, 1], bars),
        gl.allocate_shared_memory(gl.int64, [TASK.SLOTS, 1], bars),
    )
    for group in gl.static_range(GROUPS):
        mbarrier.init(tiles.outer_full.index(group), count=1)
        mbarrier.init(tiles.outer_empty.index(group), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1 if TASK.ROWS else 2)
        mbarrier.init(tiles.empty.index(slot), count=TASK.GROUPS)
    REGISTERS: gl.constexpr = GROUP_REGISTERS // TASK.GROUPS
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(0), POINTWISE_FN, TASK,
                )),
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(1), POINTWISE_FN, TASK,
                )),
                (load_all, (
                    own_outer, other_outer, own_inner, other_inner, tiles, sizes, masks, blocks,
                    stats, TASK,
                )),
            ],
            [NUM_WARPS, 1],
            [REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(0), POINTWISE_FN, TASK,
                )),
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(1), POINTWISE_FN, TASK,
                )),
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(2), POINTWISE_FN, TASK,
                )),
                (load_all, (
                    own_outer, other_outer, own_inner, other_inner, tiles, sizes, masks, blocks,
                    stats, TASK,
                )),
            ],
            [NUM_WARPS, NUM_WARPS, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
