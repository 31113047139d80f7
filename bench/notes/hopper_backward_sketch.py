"""Sketch, not in the package: the backward on Hopper, one warp group a program.

dQ ran on an H200 at D=64: right, 2.58 ms full and 1.28 causal at B=1 H=32 N=8192, slower than the
portable kernel. dQ at D=128 and dK compile without serialised wgmma and have not run. `own` is the
side whose gradient a launch computes; tiles that need a mask come first; the arguments are those
of the portable kernels with tensor descriptors of [1, 1, 64, head_dim] tiles for q and k.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_streamkl.kernels.attention_forward import finite_lse
from torch_streamkl.kernels.hopper import NUM_WARPS, async_load, flat, start_scores
from torch_streamkl.kernels.rows import score_gradient

barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def later_zero(i):
    """0 for a loop counter below 2^30, which the compiler does not know.

    Tiles indexed with it have addresses that depend on the iteration: otherwise the compiler
    computes every matmul descriptor before the loop and spills them.
    """
    return i >> 30


@gluon.jit
def hold(a, b):
    """a and b, which the compiler cannot know before this point (unless one is NaN)."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.nan.f32 p, $4, $4; vote.sync.any.pred q, p, 0xffffffff; "
        "selp.f32 $0, 0f7FFFFFFF, $4, q; selp.f32 $1, 0f7FFFFFFF, $5, q; "
        "selp.f32 $2, 0f7FFFFFFF, $6, q; selp.f32 $3, 0f7FFFFFFF, $7, q; }",
        "=f,=f,=f,=f,f,f,f,f", [a, b], dtype=(gl.float32, gl.float32), is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def start_load(
    first, second, first_tiles, second_tiles, bars, slot, b, first_h, second_h, row, pred
):
    """Copy one tile of both sides into a slot; its barrier completes when both are there."""
    bar = bars.index(slot)
    mbarrier.expect(bar, first.block_type.nbytes + second.block_type.nbytes, pred=pred)
    async_load(first, [b, first_h, row, 0], bar, first_tiles.index(slot), pred=pred)
    async_load(second, [b, second_h, row, 0], bar, second_tiles.index(slot), pred=pred)


NUM_STATISTICS = gl.constexpr(4)  # of a row: own lse, other lse, key sum, incoming gradient


class Inner(NamedTuple):
    """The streamed side: descriptors, two slots of shared memory, and which tiles there are."""

    own: Any
    other: Any
    own_tiles: Any
    other_tiles: Any
    bars: Any
    b: Any
    own_h: Any
    other_h: Any
    num_tiles: Any
    num_loads: Any  # the last tile is loaded once more to make the number even
    first_row: Any  # of tile 0
    step: Any  # rows from one tile to the next


class Statistics(NamedTuple):
    """Pointers to the row statistics of batch element b, and the scales of both sides' scores."""

    own_lse: Any
    other_lse: Any
    key_sum: Any
    grad: Any
    seqlen_q: Any
    own_scale: Any
    other_scale: Any


@gluon.jit
def load_tile(inner, i, slot, GROUP: gl.constexpr):
    """Start to load inner tile i; GROUP heads take turns for every tile."""
    tile = gl.minimum(i, inner.num_tiles - 1)
    start_load(
        inner.own, inner.other, inner.own_tiles, inner.other_tiles, inner.bars, slot,
        inner.b, inner.own_h + tile % GROUP, inner.other_h + tile % GROUP,
        inner.first_row + (tile // GROUP) * inner.step, i < inner.num_loads,
    )  # fmt: skip


@gluon.jit
def own_gradient(own_log, other_log, key_sum, STUDENT: gl.constexpr, FORM: gl.constexpr):
    """rows.score_gradient with sides named by whose gradient it is."""
    if STUDENT:
        return score_gradient(other_log, own_log, key_sum, True, False, FORM, None)
    else:
        return score_gradient(own_log, other_log, key_sum, False, False, FORM, None)


@gluon.jit
def row_statistics(stats, head_row, rows, STUDENT: gl.constexpr, FORM: gl.constexpr):
    """Statistics of rows of one head; rows past the end have gradient 0."""
    inside = rows < stats.seqlen_q
    row = head_row + rows
    own = finite_lse(gl.load(stats.own_lse + row, mask=inside, other=0.0))
    other = finite_lse(gl.load(stats.other_lse + row, mask=inside, other=0.0))
    key_sum = gl.load(stats.key_sum + row, mask=inside, other=0.0)
    return own, other, key_sum, gl.load(stats.grad + row, mask=inside, other=0.0)


@gluon.jit
def dq_operand(
    own, other, own_lse, other_lse, key_sum, stats, dtype: gl.constexpr, operand: gl.constexpr,
    STUDENT: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """dscore [rows, keys], up to the row's factor, as the left operand of a matmul."""
    d = own_gradient(
        own * stats.own_scale - gl.expand_dims(own_lse, 1),
        other * stats.other_scale - gl.expand_dims(other_lse, 1),
        gl.expand_dims(key_sum, 1), STUDENT, FORM,
    )  # fmt: skip
    return d


@gluon.jit
def dq_kernel(
    own_q, own_k, other_q, other_k, grad_ptr, own_stats, other_stats, stats_stride,
    dq_ptr, dq_b, dq_h, dq_m, dq_scale, num_blocks, num_heads, own_group, other_group,
    seqlen_q, seqlen_k, own_scale, other_scale,
    STUDENT: gl.constexpr, CAUSAL: gl.constexpr, FORM: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    HEAD_DIM: gl.constexpr = CONFIG.S_DIM
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    out_mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)
    col_layout: gl.constexpr = gl.SliceLayout(0, mma)
    pid = gl.program_id(0)
    block = pid % num_blocks
    bh = pid // num_blocks
    if CAUSAL:
        block = num_blocks - 1 - block
    b = bh // num_heads
    h = bh % num_heads
    m0 = block * BLOCK_M
    offset = seqlen_k - seqlen_q
    num_tiles = (seqlen_k + BLOCK_N - 1) // BLOCK_N
    complete = seqlen_k
    if CAUSAL:
        stop = gl.minimum(m0 + BLOCK_M, seqlen_q) + offset
        num_tiles = gl.maximum(gl.minimum(num_tiles, (stop + BLOCK_N - 1) // BLOCK_N), 0)
        complete = gl.maximum(gl.minimum(seqlen_k, m0 + offset + 1), 0)
    num_masked = num_tiles - gl.minimum(complete // BLOCK_N, num_tiles)
    num_masked = gl.minimum(num_masked + ((num_tiles - num_masked) & 1), num_tiles)

    outer: gl.constexpr = [1, 1, 1, BLOCK_M, HEAD_DIM]
    slots: gl.constexpr = [2, 1, 1, BLOCK_N, HEAD_DIM]
    own_q_tile = gl.allocate_shared_memory(own_q.dtype, outer, own_q.layout)
    other_q_tile = gl.allocate_shared_memory(other_q.dtype, outer, other_q.layout)
    own_tiles = gl.allocate_shared_memory(own_k.dtype, slots, own_k.layout)
    other_tiles = gl.allocate_shared_memory(other_k.dtype, slots, other_k.layout)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(3):
        mbarrier.init(bars.index(n), count=1)
    q_bar = bars.index(2)
    mbarrier.expect(q_bar, own_q.block_type.nbytes + other_q.block_type.nbytes)
    async_load(own_q, [b, h, m0, 0], q_bar, own_q_tile.index(0))
    async_load(other_q, [b, h, m0, 0], q_bar, other_q_tile.index(0))
    inner = Inner(
        own_k, other_k, own_tiles, other_tiles, bars, b, h // own_group, h // other_group,
        num_tiles, num_tiles, (num_tiles - 1) * BLOCK_N, -BLOCK_N,
    )  # fmt: skip
    first_slot = num_tiles & 1
    load_tile(inner, 0, first_slot, 1)
    load_tile(inner, 1, 1 - first_slot, 1)

    stats = Statistics(
        own_stats,
        other_stats,
        own_stats + stats_stride,
        grad_ptr,
        seqlen_q,
        own_scale,
        other_scale,
    )
    head_row = bh.to(gl.int64) * seqlen_q
    rows = m0 + gl.arange(0, BLOCK_M, layout=row_layout)
    own_lse, other_lse, key_sum, _ = row_statistics(stats, head_row, rows, STUDENT, FORM)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=mma)
    acc = gl.full([BLOCK_M, HEAD_DIM], 0.0, gl.float32, layout=out_mma)
    mbarrier.wait(q_bar, 0)
    for i in range(num_masked):
        slot = (i + first_slot) & 1
        mbarrier.wait(bars.index(slot), (i // 2) & 1)
        own = start_scores(flat(own_q_tile.index(0)), own_tiles.index(slot), zero)
        other = start_scores(flat(other_q_tile.index(0)), other_tiles.index(slot), zero)
        own, other = warpgroup_mma_wait(0, deps=[own, other])
        cols = (num_tiles - 1 - i) * BLOCK_N + gl.arange(0, BLOCK_N, layout=col_layout)
        allowed = gl.expand_dims(cols, 0) < seqlen_k
        if CAUSAL:
            allowed &= gl.expand_dims(cols, 0) <= gl.expand_dims(rows + offset, 1)
        d = dq_operand(
            own, other, own_lse, other_lse, key_sum, stats, own_k.dtype, operand, STUDENT, FORM
        )
        d = gl.convert_layout(gl.where(allowed, d, 0.0).to(own_k.dtype), operand)
        acc = warpgroup_mma(d, flat(own_tiles.index(slot)), acc)
        barrier()
        load_tile(inner, i + 2, slot, 1)
    if num_masked < num_tiles:
        bar_0 = bars.index(0)
        bar_1 = bars.index(1)
        mbarrier.wait(bar_0, (num_masked // 2) & 1)
        own0 = start_scores(flat(own_q_tile.index(0)), own_tiles.index(0), zero)
        other0 = start_scores(flat(other_q_tile.index(0)), other_tiles.index(0), zero)
        own, other = warpgroup_mma_wait(0, deps=[own0, other0])
        for i in range(num_masked, num_tiles, 2):
            slot_0 = later_zero(i)
            slot_1 = slot_0 + 1
            phase = ((i + 1) // 2) & 1
            mbarrier.wait(bar_1, phase)
            own1 = start_scores(flat(own_q_tile.index(slot_0)), own_tiles.index(slot_1), zero)
            other1 = start_scores(
                flat(other_q_tile.index(slot_0)), other_tiles.index(slot_1), zero
            )
            mbarrier.wait(bar_1, phase)  # done already: it ends the block of instructions
            own_lse, other_lse = hold(own_lse, other_lse)
            d = dq_operand(
                own, other, own_lse, other_lse, key_sum, stats, own_k.dtype, operand, STUDENT, FORM
            )
            d = gl.convert_layout(d.to(own_k.dtype), operand)
            acc0 = warpgroup_mma(d, flat(own_tiles.index(slot_0)), acc, is_async=True)
            own, other, acc = warpgroup_mma_wait(0, deps=[own1, other1, acc0])
            barrier()
            load_tile(inner, i + 2, 0, 1)
            # past the end the matmuls read what slot 0 still holds, and nobody reads them
            more = i + 2 < num_tiles
            phase = ((i + 2) // 2) & 1
            mbarrier.wait(bar_0, phase, pred=more)
            own0 = start_scores(flat(own_q_tile.index(slot_0)), own_tiles.index(slot_0), zero)
            other0 = start_scores(
                flat(other_q_tile.index(slot_0)), other_tiles.index(slot_0), zero
            )
            mbarrier.wait(bar_0, phase, pred=more)
            own_lse, other_lse = hold(own_lse, other_lse)
            d = dq_operand(
                own, other, own_lse, other_lse, key_sum, stats, own_k.dtype, operand, STUDENT, FORM
            )
            d = gl.convert_layout(d.to(own_k.dtype), operand)
            acc1 = warpgroup_mma(d, flat(own_tiles.index(slot_1)), acc, is_async=True)
            own, other, acc = warpgroup_mma_wait(0, deps=[own0, other0, acc1])
            barrier()
            load_tile(inner, i + 3, 1, 1)
    rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, out_mma))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_mma))
    inside = rows < seqlen_q
    grad = gl.load(grad_ptr + head_row + rows, mask=inside, other=0.0)
    acc = acc * gl.expand_dims(grad * dq_scale, 1)
    out = dq_ptr + b.to(gl.int64) * dq_b + h * dq_h
    out = out + gl.expand_dims(rows.to(gl.int64) * dq_m, 1) + gl.expand_dims(dims, 0)
    gl.store(out, acc.to(dq_ptr.dtype.element_ty), mask=gl.expand_dims(inside, 1))
    for n in gl.static_range(3):
        mbarrier.invalidate(bars.index(n))


@gluon.jit
def stage_statistics(
    stats, head_row, tile, BLOCK: gl.constexpr, STUDENT: gl.constexpr, FORM: gl.constexpr
):
    """Statistics of a tile of rows, one row a thread, to be stored in a slot."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    rows = tile * BLOCK + gl.arange(0, BLOCK, layout=layout)
    return row_statistics(stats, head_row, rows, STUDENT, FORM)


@gluon.jit
def store_statistics(slots, slot, own, other, key_sum, grad):
    slots.index(slot * NUM_STATISTICS).store(own)
    slots.index(slot * NUM_STATISTICS + 1).store(other)
    slots.index(slot * NUM_STATISTICS + 2).store(key_sum)
    slots.index(slot * NUM_STATISTICS + 3).store(grad)


@gluon.jit
def dk_operand(
    own, other, slots, slot, stats, layout: gl.constexpr, STUDENT: gl.constexpr, FORM: gl.constexpr
):
    """dscore^T [keys, rows]."""
    own_lse = slots.index(slot * NUM_STATISTICS).load(layout)
    other_lse = slots.index(slot * NUM_STATISTICS + 1).load(layout)
    grad = slots.index(slot * NUM_STATISTICS + 3).load(layout)
    PLAIN: gl.constexpr = STUDENT and FORM.ST == 0.0 and FORM.SS == 0.0 and FORM.S == 0.0
    if PLAIN:
        key_sum: gl.constexpr = FORM.TS  # times the probabilities of the teacher, which sum to 1
        d = own_gradient(
            own * stats.own_scale - gl.expand_dims(own_lse, 0),
            other * stats.other_scale - gl.expand_dims(other_lse, 0), key_sum, STUDENT, FORM,
        )  # fmt: skip
    else:
        key_sums = slots.index(slot * NUM_STATISTICS + 2).load(layout)
        d = own_gradient(
            own * stats.own_scale - gl.expand_dims(own_lse, 0),
            other * stats.other_scale - gl.expand_dims(other_lse, 0),
            gl.expand_dims(key_sums, 0), STUDENT, FORM,
        )  # fmt: skip
    return d * gl.expand_dims(grad, 0)


@gluon.jit
def masked(d, keys, i, num_tiles, first_limit, CAUSAL: gl.constexpr):
    """dscore^T of tile i without the keys that its rows do not see, and 0 past the last tile."""
    allowed = gl.expand_dims(keys, 1) >= gl.where(i < num_tiles, 0, 1 << 30)
    if CAUSAL:
        limits = first_limit + gl.arange(0, d.shape[1], layout=gl.SliceLayout(0, d.type.layout))
        allowed &= gl.expand_dims(keys, 1) <= gl.expand_dims(limits, 0)
    return gl.where(allowed, d, 0.0)


@gluon.jit
def dk_kernel(
    own_q, own_k, other_q, other_k, grad_ptr, own_stats, other_stats, stats_stride,
    dk_ptr, dk_b, dk_h, dk_n, dk_scale, num_blocks, num_heads, num_kv_heads,
    seqlen_q, seqlen_k, own_scale, other_scale,
    GROUP: gl.constexpr, STUDENT: gl.constexpr, CAUSAL: gl.constexpr,
    FORM: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = CONFIG.BLOCK_M
    BLOCK_N: gl.constexpr = CONFIG.BLOCK_N
    HEAD_DIM: gl.constexpr = CONFIG.S_DIM
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    out_mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, out_mma, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, mma)  # keys
    col_layout: gl.constexpr = gl.SliceLayout(0, mma)  # queries
    pid = gl.program_id(0)
    block = pid % num_blocks
    b = (pid // num_blocks) // num_kv_heads
    kv = (pid // num_blocks) % num_kv_heads
    n0 = block * BLOCK_N
    offset = seqlen_k - seqlen_q
    first_tile = block * 0
    num_row_tiles = (seqlen_q + BLOCK_M - 1) // BLOCK_M
    masked_tiles = block * 0
    if CAUSAL:
        # row i sees key j where j <= i + offset; a tile is complete where row 0 sees its last key
        first_tile = gl.minimum(gl.maximum(n0 - offset, 0) // BLOCK_M, num_row_tiles)
        last_key = gl.minimum(n0 + BLOCK_N, seqlen_k) - 1
        complete = (gl.maximum(last_key - offset, 0) + BLOCK_M - 1) // BLOCK_M
        masked_tiles = gl.minimum(complete, num_row_tiles) - first_tile
    num_tiles = (num_row_tiles - first_tile) * GROUP
    num_masked = masked_tiles * GROUP
    num_loads = num_tiles + (num_tiles & 1)

    outer: gl.constexpr = [1, 1, 1, BLOCK_N, HEAD_DIM]
    slots: gl.constexpr = [2, 1, 1, BLOCK_M, HEAD_DIM]
    own_k_tile = gl.allocate_shared_memory(own_k.dtype, outer, own_k.layout)
    other_k_tile = gl.allocate_shared_memory(other_k.dtype, outer, other_k.layout)
    own_tiles = gl.allocate_shared_memory(own_q.dtype, slots, own_q.layout)
    other_tiles = gl.allocate_shared_memory(other_q.dtype, slots, other_q.layout)
    vectors: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    row_slots = gl.allocate_shared_memory(gl.float32, [2 * NUM_STATISTICS, BLOCK_M], vectors)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(3):
        mbarrier.init(bars.index(n), count=1)
    k_bar = bars.index(2)
    mbarrier.expect(k_bar, own_k.block_type.nbytes + other_k.block_type.nbytes)
    async_load(own_k, [b, kv, n0, 0], k_bar, own_k_tile.index(0))
    async_load(other_k, [b, kv, n0, 0], k_bar, other_k_tile.index(0))
    inner = Inner(
        own_q, other_q, own_tiles, other_tiles, bars, b, kv * GROUP, kv * GROUP,
        num_tiles, num_loads, first_tile * BLOCK_M, BLOCK_M,
    )  # fmt: skip
    load_tile(inner, 0, 0, GROUP)
    load_tile(inner, 1, 1, GROUP)

    stats = Statistics(
        own_stats,
        other_stats,
        own_stats + stats_stride,
        grad_ptr,
        seqlen_q,
        own_scale,
        other_scale,
    )
    head = (b * num_heads + kv * GROUP).to(gl.int64)
    keys = n0 + gl.arange(0, BLOCK_N, layout=row_layout)
    zero = gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, layout=mma)
    acc = gl.full([BLOCK_N, HEAD_DIM], 0.0, gl.float32, layout=out_mma)
    mbarrier.wait(k_bar, 0)
    if num_tiles > 0:
        bar_0 = bars.index(0)
        bar_1 = bars.index(1)
        own_lse, other_lse, key_sum, grad = stage_statistics(
            stats, head * seqlen_q, first_tile, BLOCK_M, STUDENT, FORM
        )
        store_statistics(row_slots, 0, own_lse, other_lse, key_sum, grad)
        mbarrier.wait(bar_0, 0)
        own0 = start_scores(flat(own_k_tile.index(0)), own_tiles.index(0), zero)
        other0 = start_scores(flat(other_k_tile.index(0)), other_tiles.index(0), zero)
        own, other = warpgroup_mma_wait(0, deps=[own0, other0])
        for i in range(0, num_tiles, 2):
            slot_0 = later_zero(i)
            slot_1 = slot_0 + 1
            own_lse, other_lse, key_sum, grad = stage_statistics(
                stats,
                (head + (i + 1) % GROUP) * seqlen_q,
                first_tile + (i + 1) // GROUP,
                BLOCK_M,
                STUDENT,
                FORM,
            )
            phase = (i // 2) & 1
            mbarrier.wait(bar_1, phase)
            own1 = start_scores(flat(own_k_tile.index(slot_0)), own_tiles.index(slot_1), zero)
            other1 = start_scores(
                flat(other_k_tile.index(slot_0)), other_tiles.index(slot_1), zero
            )
            mbarrier.wait(bar_1, phase)  # done already: it ends the block of instructions
            d = dk_operand(own, other, row_slots, 0, stats, col_layout, STUDENT, FORM)
            if (i < num_masked) | (i >= num_tiles):
                d = masked(
                    d, keys, i, num_tiles, (first_tile + i // GROUP) * BLOCK_M + offset, CAUSAL
                )
            d = gl.convert_layout(d.to(own_q.dtype), operand)
            acc0 = warpgroup_mma(d, flat(own_tiles.index(slot_0)), acc, is_async=True)
            own, other, acc = warpgroup_mma_wait(0, deps=[own1, other1, acc0])
            store_statistics(row_slots, 1, own_lse, other_lse, key_sum, grad)
            barrier()
            load_tile(inner, i + 2, 0, GROUP)
            own_lse, other_lse, key_sum, grad = stage_statistics(
                stats,
                (head + (i + 2) % GROUP) * seqlen_q,
                first_tile + (i + 2) // GROUP,
                BLOCK_M,
                STUDENT,
                FORM,
            )
            # past the end the matmuls read what slot 0 still holds, and nobody reads them
            more = i + 2 < num_loads
            phase = ((i + 2) // 2) & 1
            mbarrier.wait(bar_0, phase, pred=more)
            own0 = start_scores(flat(own_k_tile.index(slot_0)), own_tiles.index(slot_0), zero)
            other0 = start_scores(
                flat(other_k_tile.index(slot_0)), other_tiles.index(slot_0), zero
            )
            mbarrier.wait(bar_0, phase, pred=more)
            d = dk_operand(own, other, row_slots, 1, stats, col_layout, STUDENT, FORM)
            if (i + 1 < num_masked) | (i + 1 >= num_tiles):
                d = masked(
                    d,
                    keys,
                    i + 1,
                    num_tiles,
                    (first_tile + (i + 1) // GROUP) * BLOCK_M + offset,
                    CAUSAL,
                )
            d = gl.convert_layout(d.to(own_q.dtype), operand)
            acc1 = warpgroup_mma(d, flat(own_tiles.index(slot_1)), acc, is_async=True)
            own, other, acc = warpgroup_mma_wait(0, deps=[own0, other0, acc1])
            store_statistics(row_slots, 0, own_lse, other_lse, key_sum, grad)
            barrier()
            load_tile(inner, i + 3, 1, GROUP)
    keys = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, out_mma))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_mma))
    out = dk_ptr + b.to(gl.int64) * dk_b + kv * dk_h
    out = out + gl.expand_dims(keys.to(gl.int64) * dk_n, 1) + gl.expand_dims(dims, 0)
    gl.store(
        out, (acc * dk_scale).to(dk_ptr.dtype.element_ty), mask=gl.expand_dims(keys < seqlen_k, 1)
    )
    for n in gl.static_range(3):
        mbarrier.invalidate(bars.index(n))
