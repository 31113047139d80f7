"""Defines ChosenKeys: queries of both sides, and the keys that each query has chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChosenKeys:
    """Describes rows of ``KL(P || S)``, with P and S softmaxes over the chosen keys of a query.

    P is the mean of the teacher's heads, divided by its sum. The student's score of a key is
    ``sum_h weight_h relu(scale q_h k)``, or without weights ``scale q k`` of one head.

    An id below 0, and one outside of its query's ``key_ranges``, is no entry. An id counts as
    often as it stands.
    """

    student_q: Tensor  # [batch, num_student_heads, seqlen_q, head_dim]
    student_k: Tensor  # [batch, seqlen_k, head_dim]: all heads share a key
    head_weights: Tensor | None  # [batch, num_student_heads, seqlen_q]
    teacher_q: Tensor  # [batch, num_teacher_heads, seqlen_q, teacher_head_dim]
    teacher_k: Tensor  # [batch, num_kv_heads, seqlen_k, teacher_head_dim]
    ids: Tensor  # [batch, seqlen_q, topk], int64 or int32
    teacher_lse: Tensor | None  # [batch, num_teacher_heads, seqlen_q], in nats, if it is known
    key_ranges: Tensor | None  # [2, batch, seqlen_q], int32: first key, and the one after the last
    student_scale: float = 1.0
    teacher_scale: float = 1.0

    @property
    def rows(self) -> tuple[int, int]:
        """Returns the shape of the result: batch and seqlen_q."""
        return self.student_q.shape[0], self.student_q.shape[2]

    @property
    def num_keys(self) -> int:
        return self.student_k.shape[1]

    @property
    def topk(self) -> int:
        return self.ids.shape[2]

    @property
    def num_student_heads(self) -> int:
        return self.student_q.shape[1]

    @property
    def num_teacher_heads(self) -> int:
        return self.teacher_q.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.student_q.dtype == torch.float64 else torch.float32

    def inside(self, ids: Tensor, batch: int, queries: slice) -> Tensor:
        """Marks ids [queries, topk] of a batch element that are entries."""
        if self.key_ranges is None:
            return (ids >= 0) & (ids < self.num_keys)
        first, end = self.key_ranges[:, batch, queries, None]
        return (ids >= first) & (ids < end)

    def out_of_range(self, ids: Tensor, batch: int, queries: slice) -> Tensor:
        """Marks ids past the last key, of queries that have keys."""
        wrong = ids >= self.num_keys
        if self.key_ranges is None:
            return wrong
        first, end = self.key_ranges[:, batch, queries, None]
        return wrong & (end > first)


class RowStats(NamedTuple):
    """Holds per-row values, and what the backward needs of a row.

    ``student`` has the largest score and the logarithm of the sum of exponentials after it is
    subtracted, and the logarithm of the teacher's sum before it is divided by it. A row whose
    teacher has no probability at its keys, or one below the smallest normal number, by which
    nothing can be divided, counts 0: the second of them is +inf.
    """

    value: Tensor  # [batch, seqlen_q]
    student: Tensor  # [3, batch, seqlen_q]
    teacher_lse: Tensor  # [batch, num_teacher_heads, seqlen_q], in nats

    @staticmethod
    def allocate(problem: ChosenKeys) -> RowStats:
        """Allocates the tensors, uninitialised. A teacher_lse that is given is not copied."""
        batch, seqlen_q = problem.rows

        def empty(*size: int) -> Tensor:
            return problem.student_q.new_empty(size, dtype=problem.compute_dtype)

        is_given = problem.teacher_lse is not None
        lse = empty(0) if is_given else empty(batch, problem.num_teacher_heads, seqlen_q)
        return RowStats(empty(batch, seqlen_q), empty(3, batch, seqlen_q), lse)


class NeedsGrad(NamedTuple):
    """Says which gradients a backward computes."""

    q: bool
    k: bool
    head_weights: bool


class Gradients(NamedTuple):
    """Holds the student's gradients, None where none is needed."""

    q: Tensor | None
    k: Tensor | None
    head_weights: Tensor | None
