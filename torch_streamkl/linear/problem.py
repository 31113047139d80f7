"""Defines LinearProblem: one KL problem between two LM heads, its outputs and its chunks.

`linear/ops.py` builds a `LinearProblem` once from an operator's flat arguments; reference, row
functions and the chunk loops take that and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from torch_streamkl.program.divergences import Functional

MIB = 2**20


@dataclass(frozen=True)
class Head:
    """Holds hidden states and LM head of one model and how their dot products become scores.

    With ``z = hidden @ weight.T + adapter_hidden @ adapter_weight.T + bias``:
    ``y = softcap * tanh(scale * z / softcap)`` and ``score = y / temperature``. Labels see y.
    An adapter is a second, narrow head: with a low-rank adapter of the head, ``adapter_hidden`` is
    ``s * hidden @ A.T``, and ``weight`` stays as it is.
    """

    hidden: Tensor  # [num_tokens, width]
    weight: Tensor  # [vocab_size, width]
    bias: Tensor | None = None  # [vocab_size]
    scale: float = 1.0
    softcap: float = 0.0  # 0 is none
    adapter_hidden: Tensor | None = None  # [num_tokens, rank]
    adapter_weight: Tensor | None = None  # [vocab_size, rank]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def of_vocab(self, vocab: slice) -> Head:
        bias, adapter = (None if x is None else x[vocab] for x in (self.bias, self.adapter_weight))
        return replace(self, weight=self.weight[vocab], bias=bias, adapter_weight=adapter)

    def of_tokens(self, tokens: slice) -> Head:
        adapter = None if self.adapter_hidden is None else self.adapter_hidden[tokens]
        return replace(self, hidden=self.hidden[tokens], adapter_hidden=adapter)


@dataclass(frozen=True)
class LinearProblem:
    """Describes rows of ``sum_j f(P_j, S_j, logP_j, logS_j)`` between two distributions over a
    vocabulary.

    Id j is the same vocabulary entry on both sides; an entry that only one side has is
    impossible on the other (probability 0). ``labels`` adds a second value per row, the
    cross-entropy of y and the label. ``vocab_start`` is the index of the heads' first row: a shard
    of the vocabulary is a problem too.
    """

    student: Head
    teacher: Head
    functional: Functional
    temperature: float = 1.0
    labels: Tensor | None = None  # [num_tokens], integers
    ignore_index: int = -100
    vocab_start: int = 0

    @property
    def num_tokens(self) -> int:
        return self.student.hidden.shape[0]

    @property
    def compute_dtype(self) -> torch.dtype:
        double = torch.float64 in (self.student.hidden.dtype, self.teacher.hidden.dtype)
        return torch.float64 if double else torch.float32

    @property
    def heads(self) -> tuple[Head, Head]:
        return self.student, self.teacher

    def of_tokens(self, tokens: slice) -> LinearProblem:
        """Returns the problem of a range of rows (views)."""
        return replace(
            self,
            student=self.student.of_tokens(tokens),
            teacher=self.teacher.of_tokens(tokens),
            labels=None if self.labels is None else self.labels[tokens],
        )

    def of_vocab(self, vocab: slice) -> LinearProblem:
        """Returns the problem of a range of vocabulary entries (views); a side without them gets
        an empty head.
        """
        return replace(
            self,
            student=self.student.of_vocab(vocab),
            teacher=self.teacher.of_vocab(vocab),
            vocab_start=self.vocab_start + vocab.start,
        )


NUM_STATISTICS = 7


@dataclass(frozen=True)
class RowValues:
    """Holds the forward's results per token, and what the backward needs; log-sum-exps are in
    nats.

    ``statistics`` [7, num_tokens]: lse of the student's and the teacher's scores, H and G (NOTE
    [Row gradient] in program/divergences.py), lse of the student's y, and what rounding has
    taken from the two first.

    NOTE [Rounding of log-sum-exps]
    A log-sum-exp of 200 in float32 is off by 8e-6, and so are all probabilities of its row. Naive
    code, which subtracts the maximum first, is not: of a row that is nearly one-hot its gradient
    is 0 where ours would be that. So a log-probability is ``(score - lse) - rest`` with ``rest =
    (maximum - lse) + log(sum)``, in which nothing is rounded away.
    """

    value: Tensor  # [num_tokens]
    hard: Tensor  # [num_tokens], or [0] without labels
    statistics: Tensor

    @staticmethod
    def allocate(problem: LinearProblem) -> RowValues:
        """Allocates the tensors, uninitialised."""
        hidden, num_tokens, dtype = (
            problem.student.hidden,
            problem.num_tokens,
            problem.compute_dtype,
        )
        num_labels = 0 if problem.labels is None else num_tokens
        return RowValues(
            hidden.new_empty(num_tokens, dtype=dtype),
            hidden.new_empty(num_labels, dtype=dtype),
            hidden.new_empty((NUM_STATISTICS, num_tokens), dtype=dtype),
        )

    def of_tokens(self, tokens: slice) -> RowValues:
        return RowValues(self.value[tokens], self.hard[tokens], self.statistics[:, tokens])

    @property
    def student_lse(self) -> Tensor:
        return self.statistics[0]

    @property
    def teacher_lse(self) -> Tensor:
        return self.statistics[1]

    @property
    def student_delta(self) -> Tensor:
        return self.statistics[2]

    @property
    def teacher_delta(self) -> Tensor:
        return self.statistics[3]

    @property
    def hard_lse(self) -> Tensor:
        return self.statistics[4]

    @property
    def student_rest(self) -> Tensor:
        return self.statistics[5]

    @property
    def teacher_rest(self) -> Tensor:
        return self.statistics[6]


@dataclass(frozen=True)
class RowWeights:
    """Factor of each row's value and cross-entropy in the differentiated quantity."""

    value: Tensor | None  # [num_tokens] in the compute dtype; None is 0
    hard: Tensor | None

    def of_tokens(self, tokens: slice) -> RowWeights:
        return RowWeights(*(None if w is None else w[tokens] for w in (self.value, self.hard)))


@dataclass(frozen=True)
class NeedsGrad:
    """Says which gradients are computed, in the order of the operators' outputs."""

    student_hidden: bool = False
    student_weight: bool = False
    teacher_hidden: bool = False
    teacher_weight: bool = False
    student_bias: bool = False
    teacher_bias: bool = False
    student_adapter_hidden: bool = False
    student_adapter_weight: bool = False
    teacher_adapter_hidden: bool = False
    teacher_adapter_weight: bool = False

    @property
    def student(self) -> bool:
        adapter = self.student_adapter_hidden or self.student_adapter_weight
        return self.student_hidden or self.student_weight or self.student_bias or adapter

    @property
    def teacher(self) -> bool:
        adapter = self.teacher_adapter_hidden or self.teacher_adapter_weight
        return self.teacher_hidden or self.teacher_weight or self.teacher_bias or adapter


# NOTE [Sums over chunks]
# A weight's gradient is summed over chunks of tokens in its own dtype. In bfloat16 each addition
# rounds the running sum once: with n chunks the error's square grows by about n/2 roundings, and
# naive bfloat16 already carries the rounding of the logit gradients. Measured against float64 the
# sum stays within twice naive's error up to about 38 chunks; this limit keeps a margin. Beyond it
# `chunks.backward` cuts vocabulary entries as well as tokens, each at most so many times.
# float32 sums add errors of a matmul's own size, in any number.
MAX_LOW_PRECISION_SUMS = 34


def max_sums(problem: LinearProblem) -> int:
    """Limits how often a gradient may be added to."""
    is_low = any(head.hidden.element_size() == 2 for head in problem.heads)
    return MAX_LOW_PRECISION_SUMS if is_low else 2**31


DEFAULT_WORKSPACE_MIB = {"cpu": 40, "cuda": 512}
# On a CPU it is at least this share of the weights: every chunk of tokens reads them, and adds to
# a gradient as large, and products of 64 tokens are slow. 49,152 vocabulary entries, width 576
# from 960, 512 tokens: 1.98 s with an eighth, 1.80 with a third, 1.76 with all tokens at once;
# 65,536 vocabulary entries and 256 tokens 1.47, 1.27, 1.26 s (one thread, compiled rows).
CPU_SHARE_OF_WEIGHTS = 3
ROW_ALIGNMENT = 64  # elements; rows of logits start aligned, which the fast matmuls need


def padded(size: int, multiple: int = ROW_ALIGNMENT) -> int:
    """Rounds a size up to a multiple."""
    return int(-(-size // multiple) * multiple)


@dataclass(frozen=True)
class Chunks:
    """Tokens whose logits are alive at once.

    The teacher's logits are needed only until the student's are turned into their gradient, so
    they may cover fewer tokens (``teacher_tokens`` divides the work inside a chunk).
    """

    tokens: int
    teacher_tokens: int


def workspace_bytes(problem: LinearProblem, max_workspace_mib: int) -> int:
    """Returns the bytes that logits may take at once: as asked for, or the default."""
    if max_workspace_mib:
        return max_workspace_mib * MIB
    device = problem.student.hidden.device.type
    default = DEFAULT_WORKSPACE_MIB.get(device, 512) * MIB
    if device != "cpu":
        return default
    weights = sum(h.weight.numel() * h.weight.element_size() for h in problem.heads)
    return max(default, weights // CPU_SHARE_OF_WEIGHTS)


def row_bytes(problem: LinearProblem) -> tuple[int, int]:
    """Returns bytes of one token's logits of the student and of the teacher."""
    student, teacher = (padded(h.vocab_size) * h.hidden.element_size() for h in problem.heads)
    return student, teacher


def ranges(size: int, step: int) -> Iterator[slice]:
    """Yields the ranges of ``step`` that make up a size."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def even_ranges(size: int, limit: int, multiple: int) -> Iterator[slice]:
    """Yields the fewest ranges of at most ``limit``, nearly equal, that start at round numbers.

    Matmuls of equal and round sizes: a short rest would cost nearly as much as a whole chunk.
    Of no rows there is no range: a mask may select none.
    """
    if size == 0:
        return
    num_parts = -(-size // limit)
    for unit in (max(multiple >> shift, 1) for shift in (0, 1, 2, 3, 16)):
        ends = [round(i * size / (num_parts * unit)) * unit for i in range(num_parts)]
        lengths = [stop - start for start, stop in pairwise([*ends, size])]
        if min(lengths) > 0 and max(lengths) <= limit:
            break
    for start, length in zip(ends, lengths, strict=True):
        yield slice(start, start + length)


def even_step(size: int, limit: int, multiple: int) -> int:
    """Returns length of the longest of the `even_ranges`, at least 1."""
    if limit > multiple:
        limit -= limit % multiple
    return max((int(r.stop - r.start) for r in even_ranges(size, limit, multiple)), default=1)
