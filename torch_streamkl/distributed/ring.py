"""Runs attention with keys that travel around a ring of ranks: no rank ever holds all of them.

A rank computes its rows against the keys that it has, while these already travel to the next rank.
After as many steps as there are ranks, every row has met every key. The results of steps are
merged as the states of key blocks are (divergences/row_state.py): a call's statistics are such a
state, with its log-sum-exps as maxima. In the backward the keys go around once more, together with
their gradients in float32, which arrive at their rank with the last step.

Values of steps merge only if the divergence is linear in log-probabilities. Any other needs the
log-sum-exps of whole rows before its first term, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.attention import ops
from torch_streamkl.attention.heuristics import LSE_UNIT, select_implementation
from torch_streamkl.attention.problem import AttentionProblem, RowStatistics
from torch_streamkl.distributed import collectives
from torch_streamkl.distributed.sequence import HEAD_TAIL, chunks_of
from torch_streamkl.divergences.row_state import DELTAS, LSES, RowState, finish, merge
from torch_streamkl.program.divergence_forms import Bilinear
from torch_streamkl.program.divergences import Functional


@dataclass(frozen=True)
class Block:
    """Describes a block of this rank's rows and another rank's keys that see each other at least
    in part.
    """

    rows: slice  # of this rank's rows
    keys: slice  # of the rows of the rank whose keys they are
    first_row: int  # their positions in the sequence
    first_key: int
    left: int | None  # bounds as `attention_kl` counts them, from the last row and key
    right: int | None


@dataclass(frozen=True)
class Ring:
    """Holds a call: this rank's part as a problem, with ``cu_seqlens`` and lengths of the
    sequence.
    """

    problem: AttentionProblem
    cu_seqlens: Tensor | None
    max_seqlen: int
    group_name: str
    is_head_tail: bool

    def blocks(self, rank: int, owner: int, num_ranks: int) -> Iterator[Block]:
        """Yields what this rank computes with the keys of ``owner``."""
        balance = HEAD_TAIL if self.is_head_tail else None
        mine, theirs = (chunks_of(r, num_ranks, balance) for r in (rank, owner))
        size = self.problem.seqlen_q // len(mine)
        for i, chunk in enumerate(mine):
            for j, other in enumerate(theirs):
                block = _block(
                    chunk * size,
                    other * size,
                    size,
                    self.problem.window_left,
                    self.problem.window_right,
                )
                if block is not None:
                    yield replace(
                        block, rows=_shifted(block.rows, i * size),
                        keys=_shifted(block.keys, j * size),
                    )  # fmt: skip

    def call(self, block: Block, keys: tuple[Tensor, Tensor]) -> tuple[AttentionProblem, float]:
        """Returns the problem of a block, and the unit of its log-sum-exps."""
        p, rows = self.problem, block.rows
        num_rows, num_keys = rows.stop - rows.start, block.keys.stop - block.keys.start
        changes: dict[str, Any] = {"window_left": block.left, "window_right": block.right}
        if p.key_lengths is not None:
            changes["key_lengths"] = (p.key_lengths - block.first_key).clamp(0, num_keys)
        if self.cu_seqlens is not None:
            for name, first, size in (
                ("q", block.first_row, num_rows), ("k", block.first_key, num_keys)
            ):  # fmt: skip
                changes[f"cu_seqlens_{name}"] = within(self.cu_seqlens, first, size)
                changes[f"max_seqlen_{name}"] = min(self.max_seqlen, size)
        student, teacher = (
            replace(side, q=side.q[:, :, rows], k=k[:, :, block.keys])
            for side, k in zip(p.sides, keys, strict=True)
        )
        problem = replace(p, student=student, teacher=teacher, **changes)
        return problem, LSE_UNIT[select_implementation(problem, problem.impl)]


def form_of(functional: Functional, given: str = "") -> Bilinear:
    """Returns the bilinear form of a functional, or raises if it has none.

    ``given`` are the arguments that it comes from, if they are known.
    """
    form = functional.bilinear
    if form is None:
        raise NotImplementedError(
            "method='ring' merges values of blocks of keys, which takes a divergence that is "
            f"linear in log-probabilities, got {given or functional.text}; method='gather' takes "
            "any"
        )
    return form


def within(offsets: Tensor, first: int, size: int) -> Tensor:
    """Clips the offsets of packed sequences to a range of positions; those outside are empty."""
    return offsets.clamp(first, first + size) - first


def _shifted(x: slice, by: int) -> slice:
    return slice(x.start + by, x.stop + by)


def _block(row: int, key: int, size: int, left: int | None, right: int | None) -> Block | None:
    """Selects ``size`` rows and keys from these positions on, if they may see each other.

    Bounds count from equal positions; in a block from its last row and key, and never below 0.
    """
    before = None if left is None else left - (row - key)
    after = None if right is None else right + (row - key)
    first, stop = 0, size
    if after is not None:
        first = max(0, -after)
    if before is not None:
        stop = min(size, size + before)
    if first >= stop:
        return None
    first_key = 0 if before is None else max(0, first - before)
    stop_key = size if after is None else min(size, stop + after)
    if before is not None:
        before += stop_key - stop
        before = None if before >= stop_key - first_key - 1 else before
    if after is not None:
        after += stop - stop_key
        after = None if after >= stop - first - 1 else after
    rows, keys = slice(first, stop), slice(first_key, stop_key)
    return Block(rows, keys, row + first, key + first_key, before, after)


class _RingExchange:
    """Sends the tensors of a rank to the next one, all of them as one tensor."""

    def __init__(self, tensors: list[Tensor], group_name: str) -> None:
        group = collectives.resolve(group_name)
        self.rank, self.size, self.group_name = group.rank(), group.size(), group_name
        self.shapes = [x.shape for x in tensors]
        self.flat = torch.cat([x.reshape(-1) for x in tensors])

    def tensors(self) -> list[Tensor]:
        """Returns views of the tensors that this rank holds now."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def send(self) -> Tensor:
        """Sends the tensors to the next rank, and begins to receive those of the one before."""
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size] = receive[self.rank - 1] = self.flat.numel()
        return collectives.all_to_all(self.flat, receive, send, self.group_name)

    def receive(self, moving: Tensor) -> None:
        self.flat = collectives.wait(moving)


def forward(ring: Ring) -> tuple[Tensor, RowStatistics]:
    """Returns values of this rank's rows and their statistics over all keys, in nats."""
    problem, form = ring.problem, form_of(ring.problem.functional)
    value, stats = RowStatistics.allocate(problem)
    state = RowState(*(x.clone() for x in RowState.empty(tuple(value.shape), value).tensors()))
    circle = _RingExchange([problem.student.k, problem.teacher.k], ring.group_name)
    for step in range(circle.size):
        is_last = step + 1 == circle.size
        moving = None if is_last else circle.send()
        keys = (circle.tensors()[0], circle.tensors()[1])
        owner = (circle.rank - step) % circle.size
        for block in ring.blocks(circle.rank, owner, circle.size):
            of_block, unit = ring.call(block, keys)
            found = _state_of(ops.forward(of_block)[1], unit, form)
            of_rows = [x[:, :, block.rows] for x in state.tensors()]
            for old, new in zip(of_rows, merge(RowState(*of_rows), found, form).tensors(),
                                strict=True):  # fmt: skip
                old.copy_(new)
        if moving is not None:
            circle.receive(moving)
    sums = finish(state, form)
    value.copy_(sums.value)
    sums.copy_to(stats, *LSES, *DELTAS)
    return value, stats


def _state_of(stats: RowStatistics, unit: float, form: Bilinear) -> RowState:
    """Converts statistics of a call to the state of its keys: the inverse of `finish`."""
    lse_t, lse_s = stats.teacher_lse * unit, stats.student_lse * unit
    row_sum_t, row_sum_s = ((x > -torch.inf).to(x.dtype) for x in (lse_t, lse_s))
    a = stats.teacher_delta - (form.tt + form.t) * row_sum_t - form.st * row_sum_s
    b = stats.student_delta - form.ts * row_sum_t - (form.ss + form.s) * row_sum_s
    return RowState(lse_t, row_sum_t, lse_s, row_sum_s, a, b)


def backward(
    ring: Ring, grad: Tensor, stats: RowStatistics, needs_grad: list[bool]
) -> list[Tensor | None]:
    """Returns this rank's gradients of q and k of both sides."""
    problem = ring.problem
    sides = problem.sides
    d_queries = [
        side.q.new_zeros(side.q.shape, dtype=problem.compute_dtype) if need else None
        for side, need in zip(sides, needs_grad[::2], strict=True)
    ]
    circle = _RingExchange([side.k for side in sides], ring.group_name)
    d_keys = _RingExchange(
        [
            side.k.new_zeros(side.k.shape if need else 0, dtype=problem.compute_dtype)
            for side, need in zip(sides, needs_grad[1::2], strict=True)
        ],
        ring.group_name,
    )
    has_keys, goes_around = any(needs_grad[1::2]), circle.size > 1
    moving_sums: Tensor | None = None
    for step in range(circle.size):
        is_last = step + 1 == circle.size
        moving = None if is_last else circle.send()
        keys = (circle.tensors()[0], circle.tensors()[1])
        owner = (circle.rank - step) % circle.size
        for block in ring.blocks(circle.rank, owner, circle.size):
            of_block, unit = ring.call(block, keys)
            of_rows = RowStatistics(
                *(_of_rows(x, block.rows, unit) for x in (stats.student, stats.teacher))
            )
            grad_of_rows = grad[:, :, block.rows].contiguous()
            found = ops.backward(of_block, of_rows, grad_of_rows, needs_grad)
            for total, part in zip(d_queries, found[::2], strict=True):
                if total is not None and part is not None:
                    total[:, :, block.rows] += part
            if moving_sums is not None:
                d_keys.receive(moving_sums)
                moving_sums = None
            for total, part in zip(d_keys.tensors(), found[1::2], strict=True):
                if part is not None:
                    total[:, :, block.keys] += part
        if moving is not None:
            circle.receive(moving)
        if has_keys and goes_around:
            if moving_sums is not None:  # nothing was added
                d_keys.receive(moving_sums)
            moving_sums = d_keys.send()
    if moving_sums is not None:
        d_keys.receive(moving_sums)
    given_keys = [x if need else None for x, need in
                  zip(d_keys.tensors(), needs_grad[1::2], strict=True)]  # fmt: skip
    found_all = (d_queries[0], given_keys[0], d_queries[1], given_keys[1])
    dtype = problem.student.q.dtype
    return [None if x is None else x.to(dtype, copy=True) for x in found_all]


def _of_rows(stats: Tensor, rows: slice, unit: float) -> Tensor:
    """Returns statistics of some rows in the unit of an implementation."""
    lse, total = stats[..., rows]
    return torch.stack([lse / unit, total])
