"""Defines AttentionProblem: the tensors and the options that every implementation reads.

`ops.py` builds one from an operator's flat arguments. The reference, plain torch and the kernel
launchers take it and nothing else. So an option is added here, and where it is computed.

Nobody changes these objects. They are not frozen dataclasses, because constructing a frozen one
takes 5 us, a twelfth of a small call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_streamkl.program.divergences import Functional
from torch_streamkl.spec import Spec, option


@dataclass(eq=False)
class Side:
    """Holds queries and keys of one model and how their dot products become scores.

    ``score = softcap * tanh(scale * q.k / softcap) + bias - slope * |i - j|``, divided by the
    problem's temperature; i counts from the position where the last query meets the last key.
    """

    q: Tensor  # [batch, num_heads, seqlen_q, head_dim]
    k: Tensor  # [batch, num_kv_heads, seqlen_k, head_dim]
    scale: float = 1.0
    softcap: float = 0.0  # 0 is none
    bias: Tensor | None = None  # additive, broadcasts to [batch, num_heads, seqlen_q, seqlen_k]
    alibi_slopes: Tensor | None = None  # [num_heads], float32
    sink: Tensor | None = None  # [num_heads], a logit that only the denominator sees

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Returns the number of query heads that share a key head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    def kv_heads(self, heads: slice) -> slice:
        """Returns the key heads of some query heads."""
        return slice(heads.start // self.group, -(-heads.stop // self.group))


@dataclass(eq=False)
class AttentionProblem:
    """Describes rows of ``sum_j f(P_j, S_j, logP_j, logS_j)`` between two attention distributions.

    A key j is allowed for a query i when the mask admits it, j < key_lengths[b], and, with
    o = j - (i + seqlen_k - seqlen_q), -window_left <= o <= window_right (None is no bound). A key
    that is not allowed gets the score ``mask_value`` on both sides: -inf removes it, and a finite
    value is what ``masked_fill(mask, value)`` writes, which matters where a row has no allowed key
    at all.
    """

    student: Side
    teacher: Side
    functional: Functional
    temperature: float = 1.0
    mask: Tensor | None = (
        None  # bool, True admits, broadcasts to [batch, num_heads, seqlen_q, seqlen_k]
    )
    mask_value: float = option(-math.inf, "float?", None)
    key_lengths: Tensor | None = None  # [batch], int32
    window_left: int | None = None
    window_right: int | None = None
    # packed sequences: batch is 1, seqlen_q and seqlen_k are totals, and sequence b is the rows
    # cu_seqlens_q[b] : cu_seqlens_q[b + 1] and the keys cu_seqlens_k[b] : cu_seqlens_k[b + 1]
    cu_seqlens_q: Tensor | None = None  # [num_sequences + 1], int32
    cu_seqlens_k: Tensor | None = None
    teacher_lse: Tensor | None = None  # [batch, num_teacher_heads, seqlen_q], known log-sum-exp
    max_seqlen_q: int = 0  # of packed sequences
    max_seqlen_k: int = 0
    head_mean: bool = False  # P is the mean over the teacher heads of each student head
    impl: str = "auto"
    deterministic: bool = True  # gradients are summed in a fixed order

    @property
    def batch(self) -> int:
        return self.student.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.student.num_heads

    @property
    def seqlen_q(self) -> int:
        return self.student.q.shape[2]

    @property
    def seqlen_k(self) -> int:
        return self.student.k.shape[2]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.student, self.teacher

    @property
    def device(self) -> torch.device:
        return self.student.q.device

    @property
    def longest(self) -> tuple[int, int]:
        """Returns the rows and keys of the longest sequence."""
        if self.is_packed:
            return self.max_seqlen_q, self.max_seqlen_k
        return self.seqlen_q, self.seqlen_k

    @property
    def queries_and_keys(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the tensors that have gradients, in the order of the operators' arguments."""
        return self.student.q, self.student.k, self.teacher.q, self.teacher.k

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.student.q.dtype == torch.float64 else torch.float32

    @property
    def has_masked_keys(self) -> bool:
        return not (
            self.mask is None
            and self.key_lengths is None
            and self.window_left is None
            and self.window_right is None
        )

    @property
    def has_key_mask(self) -> bool:
        """Whether the mask is the same for all heads and rows, as one of padding is."""
        return self.mask is not None and self.mask.shape[1:3] == (1, 1) and not self.is_packed

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def with_contiguous_vectors(self) -> AttentionProblem:
        """Returns a problem whose lengths, offsets, slopes and sinks are contiguous.

        Kernels have no strides for them, and a user may slice or expand them.
        """
        own = _with_contiguous(self, ("key_lengths", "cu_seqlens_q", "cu_seqlens_k"))
        student = _with_contiguous(own.student, ("alibi_slopes", "sink"))
        teacher = _with_contiguous(own.teacher, ("alibi_slopes", "sink"))
        if student is own.student and teacher is own.teacher:
            return own
        return replace(own, student=student, teacher=teacher)

    def sequences(self) -> Iterator[tuple[slice, slice, AttentionProblem]]:
        """Yields the row range, key range and problem of each packed sequence; reads offsets on
        the CPU.
        """
        assert self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
        offsets = zip(self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist(), strict=True)
        for (i0, j0), (i1, j1) in pairwise(offsets):
            rows, keys = slice(i0, i1), slice(j0, j1)

            def side(s: Side, rows: slice = rows, keys: slice = keys) -> Side:
                return replace(s, q=s.q[:, :, rows], k=s.k[:, :, keys])

            lse = None if self.teacher_lse is None else self.teacher_lse[:, :, rows]
            yield (
                rows,
                keys,
                replace(
                    self,
                    student=side(self.student),
                    teacher=side(self.teacher),
                    teacher_lse=lse,
                    cu_seqlens_q=None,
                    cu_seqlens_k=None,
                ),
            )


Holder = TypeVar("Holder", "AttentionProblem", Side)


def _with_contiguous(holder: Holder, names: Sequence[str]) -> Holder:
    """Returns a holder whose vectors of these names are contiguous: the same one, if they are."""
    strided = {}
    for name in names:
        x = getattr(holder, name)
        if x is not None and not x.is_contiguous():
            strided[name] = x.contiguous()
    return replace(holder, **strided) if strided else holder


SPEC = Spec(AttentionProblem, Side, first=("mask",))


@dataclass(eq=False)
class RowStatistics:
    """Stores softmax_lse and delta of each row and side, for the backward.

    The log-sum-exps are of the final scores, sinks included; a row without keys has -inf. Their
    unit is the implementation's (LSE_UNIT in attention/heuristics.py): converting would cost large
    scores their last digits. The sums are over keys (NOTE [Row gradient] in
    program/divergences.py).
    """

    # [2, batch, num_heads, seqlen_q]: softmax_lse, then delta, the sum over keys of df/dlogS (H in
    # NOTE [Row gradient], program/divergences.py), as FlashAttention's dPsum
    student: Tensor
    teacher: Tensor  # [2, batch, num_teacher_heads, seqlen_q]: the same with df/dlogP (G)

    @staticmethod
    def allocate(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
        """Allocates row values and statistics, uninitialised."""
        q, dtype = problem.student.q, problem.compute_dtype
        batch, num_heads, seqlen_q, _ = q.shape
        # new_empty() would take half a microsecond more, to find the strides
        value = q.new_empty_strided(
            (batch, num_heads, seqlen_q), (num_heads * seqlen_q, seqlen_q, 1), dtype=dtype
        )
        return value, RowStatistics(
            _empty_statistics(q, dtype), _empty_statistics(problem.teacher.q, dtype)
        )

    @property
    def student_lse(self) -> Tensor:
        return self.student.select(0, 0)

    @property
    def student_delta(self) -> Tensor:
        return self.student.select(0, 1)

    @property
    def teacher_lse(self) -> Tensor:
        return self.teacher.select(0, 0)

    @property
    def teacher_delta(self) -> Tensor:
        return self.teacher.select(0, 1)

    def viewed(self, rows: torch.Size) -> RowStatistics:
        """Views the statistics as those of rows of another shape, in the same order."""
        return RowStatistics(self.student.view(2, *rows), self.teacher.view(2, *rows))

    def at_rows(self, rows: slice) -> RowStatistics:
        """Returns views of a range of query rows."""
        return RowStatistics(self.student[..., rows], self.teacher[..., rows])


def _empty_statistics(q: Tensor, dtype: torch.dtype) -> Tensor:
    batch, num_heads, seqlen_q, _ = q.shape
    size = num_heads * seqlen_q
    return q.new_empty_strided(
        (2, batch, num_heads, seqlen_q), (batch * size, size, seqlen_q, 1), dtype=dtype
    )


# to student_q, student_k, teacher_q, teacher_k, None where not needed
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class NeedsGrad(NamedTuple):
    """Says which gradients a backward pass computes: the output mask."""

    student_q: bool
    student_k: bool
    teacher_q: bool
    teacher_k: bool

    @property
    def student(self) -> bool:
        return self.student_q or self.student_k

    @property
    def teacher(self) -> bool:
        return self.teacher_q or self.teacher_k


def zero_sums(problem: AttentionProblem, needs_grad: NeedsGrad) -> list[Tensor | None]:
    """Allocates zeros to which gradients are added, in the order of `Gradients`."""
    return [
        x.new_zeros(x.shape, dtype=problem.compute_dtype) if w else None
        for x, w in zip(problem.queries_and_keys, needs_grad, strict=True)
    ]


def in_dtypes_of_inputs(problem: AttentionProblem, sums: list[Tensor | None]) -> Gradients:
    """Returns gradients of their sums."""
    a, b, c, d = (
        None if x is None else x.to(like.dtype)
        for x, like in zip(sums, problem.queries_and_keys, strict=True)
    )
    return a, b, c, d


def sums_of_sequence(sums: list[Tensor | None], rows: slice, keys: slice) -> list[Tensor | None]:
    """Returns views of the sums that one of several packed sequences adds to."""
    ranges = (rows, keys, rows, keys)
    return [None if x is None else x[:, :, r] for x, r in zip(sums, ranges, strict=True)]


def bottom_right_offset(seqlen_q: int, seqlen_k: int) -> int:
    """Returns the position of query 0 among the keys when the last query is aligned with the last
    key.
    """
    return seqlen_k - seqlen_q
