"""Packs the query heads of a GQA group into rows of one head, for short queries.

A tile has as many rows whether a head has one query or many, and each head would read the keys
again. If nothing depends on the head or the position of a query, the problem with the heads of a
group as rows has the same values, in the same order in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from torch_streamkl.attention.problem import (
    AttentionProblem,
    Gradients,
    NeedsGrad,
    RowStatistics,
    Side,
)

FEW_QUERIES = 64  # of a head: a tile's rows


def pack_gqa_heads(problem: AttentionProblem) -> AttentionProblem | None:
    """Packs grouped heads (GQA) as rows of one head, if that saves work."""
    student, teacher = problem.student, problem.teacher
    if (
        student.num_heads == student.num_kv_heads
        or not isinstance(problem.seqlen_q, int)  # few or many: a symbolic size is not asked
        or problem.seqlen_q > FEW_QUERIES
        or teacher.num_heads != student.num_heads
        or teacher.num_kv_heads != student.num_kv_heads
        or problem.is_packed
        or problem.head_mean
        or _has_positions(problem)
        or _has_heads(student)
        or _has_heads(teacher)
        or not _is_of_all_rows(problem.mask)
    ):
        return None
    return replace(
        problem, student=_as_rows(student), teacher=_as_rows(teacher), window_right=None
    )


def _has_positions(problem: AttentionProblem) -> bool:
    """Whether masks depend on the position of a query; a single one sees all keys before it."""
    if problem.window_left is not None:
        return True
    right = problem.window_right
    return right is not None and (problem.seqlen_q > 1 or right < 0)


def _has_heads(side: Side) -> bool:
    """Whether scores depend on the head or the position of a query."""
    per_head = (side.alibi_slopes, side.sink)
    return any(x is not None for x in per_head) or not _is_of_all_rows(side.bias)


def _is_of_all_rows(x: Tensor | None) -> bool:
    """Whether a mask or bias is one for all heads and queries, as one of padding is."""
    return x is None or x.shape[1] == x.shape[2] == 1


def _as_rows(side: Side) -> Side:
    batch, _, seqlen_q, head_dim = side.q.shape
    rows = side.group * seqlen_q
    # the copy that other layouts need is of few queries
    return replace(side, q=side.q.reshape(batch, side.num_kv_heads, rows, head_dim))


Forward = Callable[[AttentionProblem], tuple[Tensor, RowStatistics]]
Backward = Callable[[AttentionProblem, RowStatistics, Tensor, NeedsGrad], Gradients]


def packs_rows(forward: Forward) -> Forward:
    """Makes a forward pass compute grouped heads as rows where `pack_gqa_heads` does."""

    @functools.wraps(forward)
    def call(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
        rows = pack_gqa_heads(problem)
        if rows is None:
            return forward(problem)
        value, stats = forward(rows)
        shape = problem.student.q.shape[:3]
        return value.view(shape), stats.viewed(shape)

    return call


def packs_rows_backward(backward: Backward) -> Backward:
    """Makes a backward pass take gradients to rows as they come, and grouped heads as rows."""

    @functools.wraps(backward)
    def call(
        problem: AttentionProblem, stats: RowStatistics, grad: Tensor, needs_grad: NeedsGrad
    ) -> Gradients:
        grad = grad.to(torch.float32).contiguous()
        rows = pack_gqa_heads(problem)
        if rows is None:
            return backward(problem, stats, grad, needs_grad)
        shape = rows.student.q.shape[:3]
        dq, dk, *teacher = backward(rows, stats.viewed(shape), grad.view(shape), needs_grad)
        queries = (dq, problem.student.q), (teacher[0], problem.teacher.q)
        dq, teacher_dq = (None if x is None else x.view(q.shape) for x, q in queries)
        return dq, dk, teacher_dq, teacher[1]

    return call
