"""Defines TopkProblem: an LM head, and a teacher's entries of each token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from torch_streamkl.linear.problem import Head, LinearProblem
from torch_streamkl.program.divergences import Functional

Tail = Literal["none", "bucket", "renormalize"]
# Of the teacher's probability outside of its entries, at least: log-probabilities are rounded, and
# their sum may be 1 or more. TRL and verl's recipes have the same number.
LEAST_TAIL = 1e-7


@dataclass(frozen=True)
class TopkProblem:
    """Describes rows of ``sum_i f(P_i, S_i, logP_i, logS_i)`` over a teacher's entries.

    An id below 0 and a log-probability of -inf are padding: there is no such entry.
    ``vocab_start`` is the index of the head's first row: a vocabulary shard is a problem, too.
    """

    head: Head
    ids: Tensor  # [num_tokens, k], integers
    log_probs: Tensor  # [num_tokens, k], in nats
    functional: Functional
    tail: Tail
    temperature: float = 1.0
    vocab_start: int = 0

    @property
    def num_tokens(self) -> int:
        return self.head.hidden.shape[0]

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.head.hidden.dtype == torch.float64 else torch.float32

    @property
    def is_sparse(self) -> bool:
        """Returns whether only the logits of the entries take part, and no whole row."""
        return self.tail == "renormalize"

    def of_tokens(self, tokens: slice) -> TopkProblem:
        """Returns the problem of a range of rows (views)."""
        return replace(
            self,
            head=self.head.of_tokens(tokens),
            ids=self.ids[tokens],
            log_probs=self.log_probs[tokens],
        )

    def of_vocab(self, vocab: slice) -> TopkProblem:
        """Returns the problem of a range of vocabulary entries (views)."""
        head = self.head.of_vocab(vocab)
        return replace(self, head=head, vocab_start=self.vocab_start + vocab.start)

    @property
    def present(self) -> Tensor:
        """Marks the entries that are no padding."""
        return (self.ids >= 0) & (self.log_probs != -torch.inf)

    @property
    def as_linear(self) -> LinearProblem:
        """Returns the problem as the chunk loops of `linear_kl` see it, with an empty teacher."""
        empty = Head(self.head.hidden, self.head.weight[:0])
        return LinearProblem(self.head, empty, self.functional, self.temperature)


@dataclass(frozen=True)
class Places:
    """Says where the entries of rows stand in the given vocabulary entries."""

    index: Tensor  # [num_tokens, k]; 0 where an entry is not among them
    inside: Tensor  # [num_tokens, k]: whether it is

    @staticmethod
    def of(problem: TopkProblem) -> Places:
        local = problem.ids.long() - problem.vocab_start
        inside = problem.present & (local >= 0) & (local < problem.head.vocab_size)
        return Places(torch.where(inside, local, 0), inside)


@dataclass(frozen=True)
class RowParts:
    """Holds what a row's logits tell: a log-sum-exp in two parts, and the scores of the entries.

    ``high`` is the largest score, and ``log_sum`` the logarithm of the sum of exponentials after
    it is subtracted (NOTE [Rounding of log-sum-exps] in linear/problem.py). They are over all
    vocabulary entries, or with a tail bucket over those that no id names. Without any, they are
    -inf and 0.
    """

    high: Tensor  # [num_tokens]
    log_sum: Tensor  # [num_tokens]
    scores: Tensor  # [num_tokens, k]; 0 where an entry is not among the given ones

    @property
    def flat(self) -> Tensor:
        """Returns all of it as one tensor [num_tokens, 2 + k], as ranks exchange it."""
        return torch.cat([self.high[:, None], self.log_sum[:, None], self.scores], 1)

    @staticmethod
    def merged(parts: Tensor) -> RowParts:
        """Merges `flat` of several shards, [shards, num_tokens, 2 + k]."""
        highs, log_sums = parts[..., 0], parts[..., 1]
        high = highs.amax(0)
        shift = highs - torch.where(high == -torch.inf, 0.0, high)
        log_sum = torch.logsumexp(shift + log_sums, 0)
        log_sum = torch.where(high == -torch.inf, 0.0, log_sum)
        return RowParts(high, log_sum, parts[..., 2:].sum(0))


@dataclass(frozen=True)
class RowResults:
    """Holds per-row values, and the gradients of each row's value to its scores.

    The gradient to the score x of an entry is ``entry_grad``. That to any other score is
    ``coefficient * exp((x - high) - log_sum)``. Without a tail bucket this second term belongs to
    every score, also to those of the entries. The backward needs nothing else of the divergence.
    """

    value: Tensor  # [num_tokens]
    log_s: Tensor  # [num_tokens, k]: the student's log-probabilities, -inf for padding
    entry_grad: Tensor  # [num_tokens, k]
    factors: Tensor  # [3, num_tokens]: coefficient, high, log_sum

    @staticmethod
    def allocate(problem: TopkProblem) -> RowResults:
        """Allocates the tensors, uninitialised."""
        num_tokens, k = problem.ids.shape

        def empty(*size: int) -> Tensor:
            return problem.head.hidden.new_empty(size, dtype=problem.compute_dtype)

        results = empty(num_tokens), empty(num_tokens, k), empty(num_tokens, k)
        return RowResults(*results, empty(3, num_tokens))

    def of_tokens(self, tokens: slice) -> RowResults:
        return RowResults(
            self.value[tokens],
            self.log_s[tokens],
            self.entry_grad[tokens],
            self.factors[:, tokens],
        )

    def times(self, weight: Tensor) -> RowResults:
        """Returns the gradients times a factor of each row; where that is 0, they are 0."""
        entry_grad = torch.where(weight[:, None] == 0, 0.0, self.entry_grad * weight[:, None])
        coefficient = torch.where(weight == 0, 0.0, self.factors[0] * weight)
        factors = torch.stack([coefficient, self.factors[1], self.factors[2]])
        return RowResults(self.value, self.log_s, entry_grad, factors)
