"""The backward on Hopper: one warp loads, warp groups of 64 rows or keys each accumulate.

dQ and dK are one kernel. Its `outer` tiles stay (queries for dQ, keys for dK: TASK.ROWS says
which), its `inner` tiles stream by (keys, queries), and every warp group sums dscore @ inner over
them in registers, in a fixed order. `own` is the side whose gradient is computed, `other` the
other one. `keys_of_rows` and `rows_of_keys` (scores.py) find which inner tiles a block meets, and
which of them need no mask.

NOTE [A matmul always in flight]
While a warp group turns scores into gradients, the tensor cores have its next matmul: own scores
of the next tile under the second half of a tile, its other scores and the sum under the first. At
the loop's back edge nothing is in flight, see NOTE [Matmuls under arithmetic] in hopper.py. The
compiler moves the first half below the wait for the matmuls it should run under; `pinned` keeps
it above, which takes an instruction for every eight elements.

NOTE [Statistics of streamed rows]
For dK the row statistics lie along the columns of a tile, 16 columns a thread. The loading warp
puts them into shared memory beside the tile; there the lse = -inf of rows without keys is 0.

NOTE [Folded gradients]
For a plain dK the loading warp takes log2 |incoming gradient| off both log-sum-exps of a row, so
that the probabilities come multiplied by it (2^-inf = 0 where it is 0), and so does the clamp that
they are compared with. Signs are kept beside, and a tile with a negative one multiplies by them;
the gradients of a mean or of a sum have none.

NOTE [Rows without a clamped key]
A clamp takes three instructions for every pair of query and key, and most rows have no probability
below it. Their key sum is FORM.TS, to the bit (`finish` in rows.py), and that of a row which was
computed again is not (`forward_block`): a tile whose rows all have it leaves the clamp out.

NOTE [One gradient beside the next]
A backward launches one kernel per gradient, and none reads what another writes. The last programs
of a kernel leave multiprocessors idle, so each kernel lets the next one begin when its own last
programs have begun, and ends after the one before it: whoever waits for the last waits for all.
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

from torch_streamkl.kernels.arguments import MaskArgs
from torch_streamkl.kernels.attention_forward import finite_lse, row_offset
from torch_streamkl.kernels.hopper import (
    GROUP_REGISTERS,
    NUM_WARPS,
    async_load,
    exp2,
    flat,
    lane_sum,
    phase_of,
    pinned,
    slot_of,
    start_scores,
    without_offset,
)
from torch_streamkl.kernels.hopper_atomic import add_queries, hand_over, new_handover
from torch_streamkl.kernels.hopper_masks import (
    MaskBlocks,
    list_at,
    load_words,
    where_admitted,
)
from torch_streamkl.kernels.hopper_work import Window, num_turns, of_sequences, work_of_turn
from torch_streamkl.kernels.rows import HEADS_AT_ONCE, place_among, score_gradient
from torch_streamkl.kernels.scores import bind_sequence, in_window, keys_of_rows, rows_of_keys

LOADER_REGISTERS = gl.constexpr(32)
ADDER_REGISTERS = gl.constexpr(96)
# what `along` finds of a row, in this order
OWN_LSE, OTHER_LSE, KEY_SUM, GRAD, CLAMP = (gl.constexpr(i) for i in range(5))
NUM_STATISTICS = gl.constexpr(5)
# what some row of a tile has: a negative incoming gradient (FOLDED), a probability below the clamp
NEGATIVE, CLAMPED = gl.constexpr(1), gl.constexpr(2)


class Task(NamedTuple):
    """Compile-time choices of a launch; TASK inside the kernel."""

    ROWS: bool  # dQ, otherwise dK
    STUDENT: bool  # own is the student
    HAS_LEFT: bool  # these as in arguments.Config
    HAS_RIGHT: bool
    HAS_MASK: bool
    IS_PACKED: bool
    PLAIN: bool  # the gradient is FORM.TS (P - S): no logarithms, and the teacher's mass is 1
    CLAMP: float  # where PLAIN: P counts for keys with S >= CLAMP only, as in its mass; 0 is none
    FOLDED: bool  # NOTE [Folded gradients]
    FORM: Any
    GROUP_SIZE: int  # of dK: query heads of one of its SHARES, which share a key head on each side
    SHARES: int  # of dK: programs that share the query heads of a block of keys
    HEAD_DIM: int  # of own
    OTHER_DIM: int
    BLOCK: int  # outer rows of a warp group
    INNER: int  # rows of an inner tile
    GROUPS: int  # warp groups that accumulate
    SLOTS: int  # of inner tiles in shared memory, a power of two
    PINNED: bool  # NOTE [A matmul always in flight]
    ADDS: bool  # dK, and dQ beside it: NOTE [dQ by atomics] in hopper_atomic.py


class Tiles(NamedTuple):
    """Shared memory: outer tiles of each warp group, slots of inner tiles, barriers."""

    own_outer: Any
    other_outer: Any
    own_inner: Any
    other_inner: Any
    statistics: Any  # of the inner rows, by slot
    marks: Any  # by slot: NEGATIVE and CLAMPED, of dK's inner rows
    outer_full: Any  # by warp group
    outer_empty: Any
    full: Any
    empty: Any
    handover: Any  # hopper_atomic.Handover where TASK.ADDS


class Sizes(NamedTuple):
    """All blocks of a launch, and who computes them."""

    program: Any
    num_programs: Any
    num_works: Any
    num_blocks: Any  # of the longest sequence
    num_heads: Any  # of the queries
    num_sequences: Any
    own_group: Any
    other_group: Any


class Work(NamedTuple):
    """An outer block of a program, and the inner tiles it meets."""

    b: Any  # in the tensors: packed ones have one batch element
    query_head: Any  # the next, counted over the batch
    first_head: Any  # of the queries: the head of dQ, the first that shares the keys of dK
    own_key_head: Any
    other_key_head: Any
    start: Any  # first row or key of the block
    length: Any  # rows or keys of the sequence
    first_tile: Any  # of the inner tiles
    num_tiles: Any  # of all heads together
    head_row: Any  # where the statistics of the first head begin
    window: Any  # hopper_work.Window
    seq: Any  # arguments.Sequence
    list: Any  # of a mask's inner blocks: hopper_masks.list_at


class Statistics(NamedTuple):
    """Pointers to the row statistics; rows of a head."""

    own: Any
    other: Any
    key_sum: Any
    grad: Any
    num_rows: Any


class Output(NamedTuple):
    """The gradient, or the program's share of it: pointer, strides and factor."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    scale: Any


@gluon.jit
def load_statistics(stats, member, row, work, TASK: gl.constexpr):
    """own lse, other lse, key sum, incoming gradient and clamp of rows of a head.

    Where FOLDED, the gradient's size is in both lse and in the clamp, and only its sign is left.
    With a clamp, the key sum is that of P where S is not below it.
    """
    inside = row < work.seq.num_rows
    row = row + (work.head_row + member * stats.num_rows)
    own = finite_lse(gl.load(stats.own + row, mask=inside, other=0.0))
    other = finite_lse(gl.load(stats.other + row, mask=inside, other=0.0))
    grad = gl.load(stats.grad + row, mask=inside, other=0.0)
    key_sum = grad  # nobody reads it
    clamp = TASK.CLAMP
    if not TASK.PLAIN or TASK.CLAMP > 0.0:
        key_sum = gl.load(stats.key_sum + row, mask=inside, other=TASK.FORM.TS)
    if TASK.FOLDED:
        size = gl.abs(grad)
        clamp = size * TASK.CLAMP
        own = own - gl.log2(size)
        other = other - gl.log2(size)
        grad = gl.where(grad < 0.0, -1.0, 1.0)
    return own, other, key_sum, grad, clamp


@gluon.jit
def marks_of(kept, TASK: gl.constexpr):
    """NEGATIVE and CLAMPED of rows with these statistics."""
    marks = gl.to_tensor(0)
    if TASK.FOLDED:
        marks = marks | gl.max((kept[GRAD] < 0.0).to(gl.int32), 0) * NEGATIVE
    if TASK.CLAMP > 0.0:
        marks = marks | gl.max((kept[KEY_SUM] != TASK.FORM.TS).to(gl.int32), 0) * CLAMPED
    return marks


@gluon.jit
def work_at(number, sizes, masks, blocks, TASK: gl.constexpr):
    """The outer block with this number; its sequence may have no such rows or keys."""
    num_groups = sizes.num_heads // TASK.GROUP_SIZE
    at_once = HEADS_AT_ONCE
    if masks.cu_seqlens_q is not None:
        at_once = of_sequences(sizes.num_sequences)
    position, group = place_among(
        number, sizes.num_blocks, num_groups * sizes.num_sequences, at_once, TASK.HAS_RIGHT
    )
    if TASK.ROWS and TASK.HAS_RIGHT:
        position = sizes.num_blocks - 1 - position  # causal rows grow: the longest first
    start = position * (TASK.GROUPS * TASK.BLOCK)
    if masks.cu_seqlens_q is not None:  # NOTE [Order of packed blocks] in hopper_work.py
        b = group % sizes.num_sequences
        first_head = group // sizes.num_sequences * TASK.GROUP_SIZE
    else:
        b = group // num_groups
        first_head = group % num_groups * TASK.GROUP_SIZE
    seq = bind_sequence(masks, b, first_head, TASK)
    window = Window(masks.window_left - seq.offset, masks.window_right + seq.offset)
    seq = without_offset(seq)
    query_head = b * sizes.num_heads + first_head
    head_row = row_offset(query_head, first_head, seq, masks)
    if masks.cu_seqlens_q is not None:
        b = b * 0
    entries = 0
    if TASK.HAS_MASK:
        entries = list_at(blocks, seq.mask_offset, position)
        first_tile = 0
        num_tiles = gl.load(entries) * (2 * TASK.GROUP_SIZE)
    else:
        first_tile, num_tiles = tiles_met(window, seq, start, TASK)
    length = seq.num_rows if TASK.ROWS else seq.num_keys
    return Work(
        b, query_head, first_head, first_head // sizes.own_group,
        first_head // sizes.other_group, start, length,
        first_tile, num_tiles, head_row, window, seq, entries,
    )  # fmt: skip


@gluon.jit
def inner_tile(work, i, TASK: gl.constexpr):
    """Which of the inner tiles is tile i of a block; for dK heads of a group come one by one."""
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
    """The loading warp: of every block its outer tiles, when the warp groups are done with those
    before, and every inner tile into a slot that is empty.
    """
    used = 0
    done = 0
    for turn in range(num_turns(sizes)):
        number = work_of_turn(turn, sizes)
        if number < sizes.num_works:
            work = work_at(number, sizes, masks, blocks, TASK)
            if work.start < work.length:
                for i in range(gl.minimum(work.num_tiles, 1)):
                    load_inner(own_inner, other_inner, tiles, work, stats, i, used, TASK)
                load_outer(own_outer, other_outer, tiles, work, done, TASK)
                for i in range(1, work.num_tiles):
                    load_inner(own_inner, other_inner, tiles, work, stats, i, used, TASK)
                used += work.num_tiles
                done += 1


@gluon.jit
def load_outer(own_outer, other_outer, tiles, work, done, TASK: gl.constexpr):
    own_head = work.first_head if TASK.ROWS else work.own_key_head
    other_head = work.first_head if TASK.ROWS else work.other_key_head
    start = work.start + (work.seq.start_q if TASK.ROWS else work.seq.start_k)
    GROUPS: gl.constexpr = TASK.GROUPS
    for group in gl.static_range(GROUPS):
        full = tiles.outer_full.index(group)
        mbarrier.wait(tiles.outer_empty.index(group), (done & 1) ^ 1)
        mbarrier.expect(full, own_outer.block_type.nbytes + other_outer.block_type.nbytes)
        row = start + group * TASK.BLOCK
        async_load(own_outer, [work.b, own_head, row, 0], full, tiles.own_outer.index(group))
        async_load(other_outer, [work.b, other_head, row, 0], full, tiles.other_outer.index(group))


@gluon.jit
def load_inner(own_inner, other_inner, tiles, work, stats, i, used, TASK: gl.constexpr):
    """Inner tile i of a block."""
    lanes: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    slot = slot_of(used + i, TASK.SLOTS)
    member = i % TASK.GROUP_SIZE
    if TASK.ROWS:
        own_head = work.own_key_head
        other_head = work.other_key_head
    else:
        own_head = work.first_head + member
        other_head = work.first_head + member
    row = inner_tile(work, i, TASK) * TASK.INNER
    full = tiles.full.index(slot)
    if not TASK.ROWS:  # they arrive while the slot is not empty yet
        rows = row + gl.arange(0, TASK.INNER, layout=lanes)
        found = load_statistics(stats, member, rows, work, TASK)
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
            tiles.statistics.index(statistics + KEY_SUM).store(found[KEY_SUM])
        if TASK.FOLDED:
            if TASK.CLAMP > 0.0:
                tiles.statistics.index(statistics + CLAMP).store(found[CLAMP])
            one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            marks = marks_of(found, TASK)
            tiles.marks.index(slot).store(gl.full([1], marks, gl.int32, layout=one))
        mbarrier.arrive(full, count=1)


@gluon.jit
def along(kept, tiles, slot, WHICH: gl.constexpr, layout: gl.constexpr, TASK: gl.constexpr):
    """A statistic of the rows of a tile: along its rows for dQ, along its columns for dK."""
    if TASK.ROWS:
        return gl.expand_dims(kept[WHICH], 1)
    else:
        rows = tiles.statistics.index(slot * NUM_STATISTICS + WHICH)
        return gl.expand_dims(rows.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def marks_in(tiles, slot, marks, TASK: gl.constexpr):
    """NEGATIVE and CLAMPED of a tile; for dQ they are those of the warp group's rows."""
    if TASK.FOLDED:
        every: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        return gl.max(tiles.marks.index(slot).load(every), 0)
    else:
        return marks


@gluon.jit
def first_half(own, kept, tiles, slot, scale, TASK: gl.constexpr):
    """From own scores: probabilities, or their logarithms where those are needed too."""
    layout: gl.constexpr = own.type.layout
    x = own * scale - along(kept, tiles, slot, OWN_LSE, layout, TASK)
    if TASK.PLAIN:
        x = exp2(x)
    return x


@gluon.jit
def second_half(
    x, other, kept, tiles, slot, marks, scale, HELPER: gl.constexpr, TASK: gl.constexpr
):
    """d(value)/d(own score) without FORM.TS if PLAIN, for dK times the incoming gradient (its size
    where FOLDED).
    """
    layout: gl.constexpr = other.type.layout
    y = other * scale - along(kept, tiles, slot, OTHER_LSE, layout, TASK)
    if TASK.PLAIN:
        d = exp2(y)
        if TASK.CLAMP > 0.0:  # NOTE [Rows without a clamped key]
            if (marks & CLAMPED) != 0:
                mass = along(kept, tiles, slot, KEY_SUM, layout, TASK) * (1.0 / TASK.FORM.TS)
                clamp = TASK.CLAMP
                if TASK.FOLDED:
                    clamp = along(kept, tiles, slot, CLAMP, layout, TASK)
                d = gl.where(x >= clamp, d, 0.0) - x * mass
            else:
                d = d - x
        else:
            d = d - x
    else:
        log_t = y if TASK.STUDENT else x
        log_s = x if TASK.STUDENT else y
        key_sum = along(kept, tiles, slot, KEY_SUM, layout, TASK)
        FORM: gl.constexpr = TASK.FORM
        POINTWISE: gl.constexpr = HELPER is not None
        d = score_gradient(log_t, log_s, key_sum, TASK.STUDENT, POINTWISE, FORM, HELPER)
    if not TASK.ROWS and not TASK.FOLDED:
        d = d * along(kept, tiles, slot, GRAD, layout, TASK)
    return d


@gluon.jit
def visible(d, work, outer, i, TASK: gl.constexpr):
    """d of inner tile i where rows see keys, 0 elsewhere."""
    inner = gl.arange(0, TASK.INNER, layout=gl.SliceLayout(0, d.type.layout))
    if TASK.ROWS:
        rows = gl.expand_dims(outer, 1)
        keys = gl.expand_dims(inner + (work.first_tile - i) * TASK.INNER, 0)
    else:
        row = (work.first_tile + i // TASK.GROUP_SIZE) * TASK.INNER
        rows = gl.expand_dims(inner + row, 0)
        keys = gl.expand_dims(outer, 1)
    allowed = keys < work.seq.num_valid
    if not TASK.ROWS and TASK.IS_PACKED:  # behind them is another sequence
        allowed = allowed & (rows < work.seq.num_rows)
    allowed = in_window(allowed, work.window, work.seq, rows, keys, TASK.HAS_LEFT, TASK.HAS_RIGHT)
    return gl.where(allowed, d, 0.0)


@gluon.jit
def tiles_met(window, seq, start, TASK: gl.constexpr):
    """First and number of the inner tiles of the block of outer rows at start."""
    ROWS_OF_BLOCK: gl.constexpr = TASK.GROUPS * TASK.BLOCK
    if TASK.ROWS:
        first, _, _, stop = keys_of_rows(
            window, seq, start, ROWS_OF_BLOCK, TASK.INNER, TASK.HAS_LEFT, TASK.HAS_RIGHT, False
        )
        num_tiles = (stop - first + TASK.INNER - 1) // TASK.INNER
        first_tile = first // TASK.INNER + num_tiles - 1  # from the last to the first
    else:
        first, _, _, stop = rows_of_keys(
            window, seq, start, ROWS_OF_BLOCK, TASK.INNER, TASK.HAS_LEFT, TASK.HAS_RIGHT, False
        )
        num_tiles = (stop - first + TASK.INNER - 1) // TASK.INNER * TASK.GROUP_SIZE
        first_tile = first // TASK.INNER
    return first_tile, num_tiles


@gluon.jit
def tiles_seen(work, first, TASK: gl.constexpr):
    """Of the warp group with this first outer row: the first inner tile that it needs, the first
    without a mask, the first behind those, and the end.
    """
    if TASK.ROWS:
        first_key, left, right, stop_key = keys_of_rows(
            work.window, work.seq, first, TASK.BLOCK, TASK.INNER,
            TASK.HAS_LEFT, TASK.HAS_RIGHT, False,
        )  # fmt: skip
        behind = work.first_tile + 1  # from the last to the first
        begin = behind - (stop_key + TASK.INNER - 1) // TASK.INNER
        start = behind - right // TASK.INNER
        stop = behind - left // TASK.INNER
        end = behind - first_key // TASK.INNER
    else:
        first_row, left, right, stop_row = rows_of_keys(
            work.window, work.seq, first, TASK.BLOCK, TASK.INNER,
            TASK.HAS_LEFT, TASK.HAS_RIGHT, False,
        )  # fmt: skip
        stop_tile = (stop_row + TASK.INNER - 1) // TASK.INNER
        begin = (first_row // TASK.INNER - work.first_tile) * TASK.GROUP_SIZE
        start = (left // TASK.INNER - work.first_tile) * TASK.GROUP_SIZE
        stop = (right // TASK.INNER - work.first_tile) * TASK.GROUP_SIZE
        end = (stop_tile - work.first_tile) * TASK.GROUP_SIZE
    end = gl.maximum(gl.minimum(end, work.num_tiles), 0)
    end = gl.where(first < work.length, end, 0)
    if TASK.ADDS or TASK.HAS_MASK:  # the warp group of dQ takes a tile of each
        begin = 0
        end = work.num_tiles
    return gl.minimum(gl.maximum(begin, 0), end), start, gl.minimum(stop, end), end


@gluon.jit
def pass_by(tiles, start, stop, TASK: gl.constexpr):
    """Inner tiles that the warp group does not need."""
    for i in range(start, stop):
        mbarrier.wait(tiles.full.index(slot_of(i, TASK.SLOTS)), phase_of(i, TASK.SLOTS))
        mbarrier.arrive(tiles.empty.index(slot_of(i, TASK.SLOTS)), count=1)


@gluon.jit
def score_gradients(
    x, other, kept, marks_of_rows, tiles, work, outer, i, used, other_scale,
    start_whole, stop_whole, words, is_full,
    GROUP: gl.constexpr, HELPER: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """dscore of inner tile i, in the inputs' dtype, handed to dQ where TASK.ADDS."""
    layout: gl.constexpr = other.type.layout
    slot = slot_of(used + i, TASK.SLOTS)
    marks = marks_in(tiles, slot, marks_of_rows, TASK)
    d = second_half(x, other, kept, tiles, slot, marks, other_scale, HELPER, TASK)
    if TASK.HAS_MASK:
        if (marks & NEGATIVE) != 0:
            d = d * along(kept, tiles, slot, GRAD, layout, TASK)
        if not is_full:
            d = where_admitted(words, d, 0.0)
    elif (i < start_whole) | (i >= stop_whole) | ((marks & NEGATIVE) != 0):
        d = visible(d, work, outer, i, TASK)
        if TASK.FOLDED:
            d = d * along(kept, tiles, slot, GRAD, layout, TASK)
    d = d.to(tiles.own_inner.dtype)
    if TASK.ADDS:
        hand_over(d, tiles.handover, used + i, GROUP, TASK)
    return d


@gluon.jit
def words_of_tile(work, blocks, first, i, zero, TASK: gl.constexpr):
    """A mask's words of inner tile i, and whether it admits all of its block."""
    if TASK.HAS_MASK:
        tile = i // TASK.GROUP_SIZE
        entry = gl.load(work.list + 1 + tile // 2)
        words = load_words(
            blocks, work.seq.mask_offset, first // TASK.BLOCK, entry // 2 * 2 + tile % 2,
            lane_sum(zero),
        )  # fmt: skip
        return words, entry % 2 == 1
    else:
        return 0, True


@gluon.jit
def accumulate_all(
    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
    GROUP: gl.constexpr, HELPER: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """One warp group: the gradient of its outer rows of every block."""
    used = 0
    done = 0
    for turn in range(num_turns(sizes)):
        number = work_of_turn(turn, sizes)
        if number < sizes.num_works:
            work = work_at(number, sizes, masks, blocks, TASK)
            if work.start < work.length:
                accumulate(
                    tiles, work, blocks, stats, output, own_scale, other_scale, used, done,
                    GROUP, HELPER, TASK,
                )  # fmt: skip
                used += work.num_tiles
                done += 1
    gdc_wait()  # NOTE [One gradient beside the next]


@gluon.jit
def accumulate(
    tiles, work, blocks, stats, output, own_scale, other_scale, used, done,
    GROUP: gl.constexpr, HELPER: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """The gradient of a block's outer rows of a warp group; ``used``: tiles of blocks before."""
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
        kept = load_statistics(stats, 0, outer, work, TASK)
        marks_of_rows = marks_of(kept, TASK)
    else:
        kept = (0, 0, 0, 0, 0)  # they come with the tiles
        marks_of_rows = 0
    zero = gl.full([TASK.BLOCK, TASK.INNER], 0.0, gl.float32, layout=mma)
    acc = gl.full([TASK.BLOCK, TASK.HEAD_DIM], 0.0, gl.float32, layout=out_mma)
    own_outer = flat(tiles.own_outer.index(GROUP))
    other_outer = flat(tiles.other_outer.index(GROUP))
    mbarrier.wait(tiles.outer_full.index(GROUP), done & 1)
    pass_by(tiles, used, used + begin, TASK)
    if begin < end:
        slot = slot_of(used + begin, TASK.SLOTS)
        mbarrier.wait(tiles.full.index(slot), phase_of(used + begin, TASK.SLOTS))
        own = start_scores(own_outer, tiles.own_inner.index(slot), zero)
        other = start_scores(other_outer, tiles.other_inner.index(slot), zero)
        own, other = warpgroup_mma_wait(0, deps=[own, other])
        x = first_half(own, kept, tiles, slot, own_scale, TASK)
        for pair in range(begin, end - 1, 2):
            for step in gl.static_range(2):
                i = pair + step
                slot = slot_of(used + i, TASK.SLOTS)
                # behind the last matmuls read its slot again, and nobody reads them
                following = slot_of(used + gl.minimum(i + 1, end - 1), TASK.SLOTS)
                mbarrier.wait(
                    tiles.full.index(following), phase_of(used + i + 1, TASK.SLOTS),
                    pred=i + 1 < end,
                )  # fmt: skip
                own = start_scores(own_outer, tiles.own_inner.index(following), zero)
                words, is_full = words_of_tile(work, blocks, first, i, zero, TASK)
                d = score_gradients(
                    x, other, kept, marks_of_rows, tiles, work, outer, i, used, other_scale,
                    start_whole, stop_whole, words, is_full, GROUP, HELPER, TASK,
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
            slot = slot_of(used + end - 1, TASK.SLOTS)
            words, is_full = words_of_tile(work, blocks, first, end - 1, zero, TASK)
            d = score_gradients(
                x, other, kept, marks_of_rows, tiles, work, outer, end - 1, used, other_scale,
                start_whole, stop_whole, words, is_full, GROUP, HELPER, TASK,
            )  # fmt: skip
            d = gl.convert_layout(d, operand)
            acc = warpgroup_mma(d, flat(tiles.own_inner.index(slot)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(tiles.empty.index(slot), count=1)
    pass_by(tiles, used + end, used + work.num_tiles, TASK)
    mbarrier.arrive(tiles.outer_empty.index(GROUP), count=1)
    rows = first + gl.arange(0, TASK.BLOCK, layout=gl.SliceLayout(1, out_mma))
    dims = gl.arange(0, TASK.HEAD_DIM, layout=gl.SliceLayout(0, out_mma))
    factor = output.scale
    if TASK.PLAIN:
        factor = factor * TASK.FORM.TS
    if TASK.ROWS:
        inside = rows < work.seq.num_rows
        first_row = work.seq.start_q
        grad = gl.load(stats.grad + (work.head_row + rows), mask=inside, other=0.0)
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
    gl.store(out, acc.to(output.ptr.dtype.element_ty), mask=gl.expand_dims(inside, 1))


@gluon.jit
def add_all(tiles, sizes, masks, blocks, sums, TASK: gl.constexpr):
    """The warp group that adds what dQ gets from the keys of every block."""
    tiles_of_head = (masks.seqlen_q + TASK.INNER - 1) // TASK.INNER
    used = 0
    done = 0
    for turn in range(num_turns(sizes)):
        number = work_of_turn(turn, sizes)
        if number < sizes.num_works:
            work = work_at(number, sizes, masks, blocks, TASK)
            if work.start < work.length:
                add_queries(tiles, work, sums, tiles_of_head, used, done, TASK)
                used += work.num_tiles
                done += 1


# A length of 1 made a compile-time constant breaks Triton 3.6's compiler.
@gluon.jit(
    do_not_specialize=[
        "num_works", "num_blocks", "num_heads", "num_sequences", "seqlen_q", "seqlen_k",
        "window_left", "window_right",
        "mask_outer_blocks", "mask_inner_blocks", "mask_b", "mask_h",
    ]
)  # fmt: skip
def backward_kernel(
    own_outer, other_outer, own_inner, other_inner,
    grad_ptr, own_stats, other_stats, stats_stride,
    out_ptr, out_b, out_h, out_n, out_scale, sums,
    num_works, num_blocks, num_heads, num_sequences, own_group, other_group,
    seqlen_q, seqlen_k, key_lengths, window_left, window_right, cu_seqlens_q, cu_seqlens_k,
    mask_words, mask_lists, mask_outer_blocks, mask_inner_blocks, mask_b, mask_h,
    own_scale, other_scale,
    HELPER: gl.constexpr, TASK: gl.constexpr,
):  # fmt: skip
    """dQ (ROWS) or dK of blocks of rows or keys of one head; num_heads counts query heads.

    Where TASK.ADDS, what dQ gets from a block's keys is added to `sums`, without its factor.
    HELPER computes the gradient of one key (pointwise.py) where TASK.FORM does not hold.
    """
    gdc_launch_dependents()  # NOTE [One gradient beside the next]
    sizes = Sizes(
        gl.program_id(0), gl.num_programs(0), num_works, num_blocks, num_heads, num_sequences,
        own_group, other_group,
    )  # fmt: skip
    blocks = MaskBlocks(mask_words, mask_lists, mask_outer_blocks, mask_inner_blocks)
    masks = MaskArgs(
        None, mask_b, mask_h, 0, 0, key_lengths, window_left, window_right,
        cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k,
    )  # fmt: skip
    stats = Statistics(own_stats, other_stats, own_stats + stats_stride, grad_ptr, seqlen_q)
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
    handover = None
    if TASK.ADDS:
        handover = new_handover(own_inner.dtype, TASK)
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
        handover,
    )
    for group in gl.static_range(GROUPS):
        mbarrier.init(tiles.outer_full.index(group), count=1)
        # dK's loads of its keys wait for the warp group of dQ too
        mbarrier.init(tiles.outer_empty.index(group), count=2 if TASK.ADDS else 1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(tiles.full.index(slot), count=1 if TASK.ROWS else 2)
        mbarrier.init(tiles.empty.index(slot), count=TASK.GROUPS)
    REGISTERS: gl.constexpr = (
        GROUP_REGISTERS - (ADDER_REGISTERS if TASK.ADDS else 0)
    ) // TASK.GROUPS
    if TASK.GROUPS == 2 and not TASK.ADDS:
        gl.warp_specialize(
            [
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(0), HELPER, TASK,
                )),
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(1), HELPER, TASK,
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
                    gl.constexpr(0), HELPER, TASK,
                )),
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(1), HELPER, TASK,
                )),
                (add_all, (tiles, sizes, masks, blocks, sums, TASK)) if TASK.ADDS else
                (accumulate_all, (
                    tiles, sizes, masks, blocks, stats, output, own_scale, other_scale,
                    gl.constexpr(2), HELPER, TASK,
                )),
                (load_all, (
                    own_outer, other_outer, own_inner, other_inner, tiles, sizes, masks, blocks,
                    stats, TASK,
                )),
            ],
            [NUM_WARPS, NUM_WARPS, 1],
            [REGISTERS, ADDER_REGISTERS if TASK.ADDS else REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
