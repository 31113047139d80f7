"""Builds the tile table of packed sequences, the longest blocks first, in one small kernel.

NOTE [Blocks of packed sequences]
The lengths of packed sequences are on the device. If every sequence had as many blocks as the
longest one, programs would start beyond the ends of the others, and each would take a
multiprocessor from those that have work. The CPU knows the sum of the lengths, and with it a bound
on the number of blocks: the size of the grid. The table gives each program its sequence and its
block there. It is sorted by the number of keys (of rows, for dK) that a block's rows see, because
programs start in that order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_streamkl.attention.plans import Plan
from torch_streamkl.attention.problem import AttentionProblem
from torch_streamkl.kernels.row_state import tile_coordinates
from torch_streamkl.kernels.tiles import ceil_div

ENTRIES = 32  # of a program of the table's kernel
NOWHERE = gl.constexpr(1 << 20)  # the place of a block that is none: after every sequence
CHUNK = tl.constexpr(64)  # entries that these are compared with, and sequences, at a time


def num_entries(problem: AttentionProblem, plan: Plan, size: int, rows: bool) -> int:
    """Bounds the number of blocks of ``size`` rows (or keys) of all sequences."""
    total, longest = (
        (problem.seqlen_q, problem.max_seqlen_q)
        if rows
        else (problem.seqlen_k, problem.max_seqlen_k)
    )
    sequences = plan.num_sequences
    return max(1, min(total // size + sequences, ceil_div(longest, size) * sequences))


def new_table(problem: AttentionProblem, plan: Plan, size: int, rows: bool) -> Tensor:
    """Allocates [2, entries], int32: sequences (-1 after the last), and block numbers in them."""
    assert problem.cu_seqlens_q is not None and problem.cu_seqlens_k is not None
    entries = num_entries(problem, plan, size, rows)
    table = problem.cu_seqlens_q.new_empty((2, entries))
    bounds = (problem.window_left, problem.window_right)
    plan.run(
        ("table", size, rows),
        table_kernel,
        (ceil_div(entries, ENTRIES), 1, 1),
        (
            problem.cu_seqlens_q, problem.cu_seqlens_k, table, entries, plan.num_sequences,
            *(x or 0 for x in bounds),
        ),
        (ENTRIES, size, rows, *(x is not None for x in bounds)),
        {"num_warps": 4},
        (problem.cu_seqlens_q, problem.cu_seqlens_k),
    )  # fmt: skip
    return table


@triton.jit
def block_of_entry(entry, cu_seqlens, num_sequences, SIZE: tl.constexpr):
    """Finds the sequence of a block, its number there, and whether such a block exists."""
    sequence = entry * 0
    before = entry * 0
    total = 0
    for first in range(0, num_sequences, CHUNK):
        i = first + tl.arange(0, CHUNK)
        inside = i < num_sequences
        start = tl.load(cu_seqlens + i, mask=inside, other=0)
        stop = tl.load(cu_seqlens + i + 1, mask=inside, other=0)
        blocks = (stop - start + SIZE - 1) // SIZE
        ends = total + tl.cumsum(blocks, 0)
        is_past = (ends[None, :] <= entry[:, None]) & inside[None, :]
        sequence += tl.sum(is_past.to(tl.int32), 1)
        before += tl.sum(tl.where(is_past, blocks[None, :], 0), 1)
        total += tl.sum(blocks, 0)
    return sequence, entry - before, entry < total


@triton.jit
def work_of_entry(
    entry, cu_seqlens_q, cu_seqlens_k, num_sequences, left, right,
    SIZE: tl.constexpr, ROWS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Counts the keys that a block meets (rows, of a key block; -1 without a block), and its
    place.
    """
    own = cu_seqlens_q if ROWS else cu_seqlens_k
    sequence, place, exists = block_of_entry(entry, own, num_sequences, SIZE)
    at = tl.where(exists, sequence, 0)
    num_rows = tl.load(cu_seqlens_q + at + 1) - tl.load(cu_seqlens_q + at)
    num_keys = tl.load(cu_seqlens_k + at + 1) - tl.load(cu_seqlens_k + at)
    offset = num_keys - num_rows
    first = place * SIZE
    start = first * 0
    if ROWS:
        stop = num_keys
        if HAS_LEFT:
            start = tl.maximum(start, first + offset - left)
        if HAS_RIGHT:
            stop = tl.minimum(stop, first + SIZE + offset + right)
    else:
        stop = num_rows
        if HAS_RIGHT:
            start = tl.maximum(start, first - offset - right)
        if HAS_LEFT:
            stop = tl.minimum(stop, first + SIZE - offset + left)
    return tl.where(exists, tl.maximum(stop - start, 0), -1), sequence, place


@triton.jit(do_not_specialize=["num_entries", "num_sequences", "left", "right"])
def table_kernel(
    cu_seqlens_q, cu_seqlens_k, table, num_entries, num_sequences, left, right,
    ENTRIES: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Ranks each entry among all: the rank is its place in the table."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    work, sequence, place = work_of_entry(
        entry, cu_seqlens_q, cu_seqlens_k, num_sequences, left, right,
        SIZE, ROWS, HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    rank = entry * 0
    for first in range(0, num_entries, CHUNK):
        other = first + tl.arange(0, CHUNK)
        others_work, _, _ = work_of_entry(
            other, cu_seqlens_q, cu_seqlens_k, num_sequences, left, right,
            SIZE, ROWS, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        more = others_work[None, :] > work[:, None]
        more |= (others_work[None, :] == work[:, None]) & (other[None, :] < entry[:, None])
        more &= other[None, :] < num_entries
        rank += tl.sum(more.to(tl.int32), 1)
    inside = entry < num_entries
    tl.store(table + rank, tl.where(work < 0, -1, sequence), mask=inside)
    tl.store(table + num_entries + rank, place, mask=inside)


@gluon.jit
def packed_block(pid, table, num_entries):
    """Looks up a program's sequence, block and head: NOTE [Blocks of packed sequences]."""
    entry, head = tile_coordinates(pid, num_entries, True)
    sequence = gl.load(table + entry)
    position = gl.where(sequence < 0, NOWHERE, gl.load(table + num_entries + entry))
    return gl.maximum(sequence, 0), position, head
