"""Defines LinearProblem: one divergence of two LM heads, its outputs and its chunks.

`linear/ops.py` builds one from an operator's flat arguments. The reference, the row functions and
the chunk loops take it and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from torch_streamkl.program.divergences import Functional
from torch_streamkl.runtime.workspace import (
    CPU_SHARE_OF_WEIGHTS,
    DEFAULT_WORKSPACE_MIB,
    MAX_LOW_PRECISION_SUMS,
    MIB,
    padded,
)
from torch_streamkl.spec import Spec, option


@dataclass(frozen=True)
class Head:
    """Holds hidden states and LM head of one model and how their dot products become scores.

    With ``z = hidden @ weight.T + adapter_hidden @ adapter_weight.T + bias``:
    ``y = softcap * tanh(scale * z / softcap)`` and ``score = y / temperature``. Labels see y.
    An adapter is a second, narrow head: with a low-rank adapter of the head, ``adapter_hidden`` is
    ``s * hidden @ A.T``, and ``weight`` stays as it is.
    """

    hidden: Tensor  # [num_tokens, hidden_size]
    weight: Tensor  # [vocab_size, hidden_size]
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
    """Describes rows of ``sum_j f(P_j, S_j, logP_j, logS_j)`` of two distributions over a
    vocabulary.

    Id j is the same vocabulary entry on both sides. An entry that only one side has has
    probability 0 on the other. ``labels`` adds a second value per row, the cross-entropy of y and
    the label. ``vocab_start`` is the index of the heads' first row: a vocabulary shard is a
    problem, too.
    """

    student: Head
    teacher: Head
    functional: Functional
    temperature: float = 1.0
    labels: Tensor | None = None  # [num_tokens], integers
    ignore_index: int = option(-100, "int")
    max_workspace_mib: int = 0  # 0 is the default
    impl: str = "auto"
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
        """Returns the problem of a range of vocabulary entries (views).

        A side without entries there gets an empty head.
        """
        return replace(
            self,
            student=self.student.of_vocab(vocab),
            teacher=self.teacher.of_vocab(vocab),
            vocab_start=self.vocab_start + vocab.start,
        )

    def is_labelled(self) -> Tensor:
        """Returns which tokens have a label that is not ignored."""
        assert self.labels is not None
        return self.labels != self.ignore_index


SPEC = Spec(
    LinearProblem, Head, last=("adapter_hidden", "adapter_weight"), without=("vocab_start",)
)
NUM_STATISTICS = 7


@dataclass(frozen=True)
class RowValues:
    """Holds the forward's results per token, and what the backward needs. Log-sum-exps are in
    nats.

    ``statistics`` [7, num_tokens] has the lse of the student's and the teacher's scores, their
    deltas (NOTE [Row gradient] in program/divergences.py), the lse of the student's y, and the
    rounding errors of the first two.

    NOTE [Rounding of log-sum-exps]
    A log-sum-exp of 200 in float32 has an error of 8e-6, and so have all probabilities of its row.
    Naive code subtracts the maximum first, and has not: in a row that is nearly one-hot its
    gradient is 0, and ours would be that error. So a log-probability is ``(score - lse) - rest``
    with ``rest = (maximum - lse) + log(sum)``, in which nothing is rounded away.
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
    """Holds the factor of each row's value and cross-entropy in the differentiated quantity."""

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
        return self._of("student")

    @property
    def teacher(self) -> bool:
        return self._of("teacher")

    @property
    def any(self) -> bool:
        return self.student or self.teacher

    def _of(self, side: str) -> bool:
        return any(getattr(self, f"{side}_{part}") for part in PARTS)


NO_WEIGHTS, NOTHING = RowWeights(None, None), NeedsGrad()  # of values without gradients
PARTS = ("hidden", "weight", "bias", "adapter_hidden", "adapter_weight")  # of a `Head`
OUTPUTS = tuple((x.name.split("_", 1)[0], x.name.split("_", 1)[1]) for x in fields(NeedsGrad))


def max_sums(problem: LinearProblem) -> int:
    """Limits how many times a gradient may be accumulated."""
    is_low = any(head.hidden.element_size() == 2 for head in problem.heads)
    return MAX_LOW_PRECISION_SUMS if is_low else 2**31


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
