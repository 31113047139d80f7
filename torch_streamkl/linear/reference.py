"""Specifies `linear_kl` in a few naive lines, for any floating dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_streamkl.divergences.infinite_rows import with_infinite_rows
from torch_streamkl.linear.problem import Head, LinearProblem
from torch_streamkl.program.divergences import evaluate_logs


def linear_kl_rows(problem: LinearProblem) -> tuple[Tensor, Tensor]:
    """Returns differentiable values and cross-entropies per token (no elements without labels)."""
    y_s, y_t = (head_scores(head, problem.compute_dtype) for head in problem.heads)
    vocab_size = max(y_s.shape[1], y_t.shape[1])
    student, teacher = (
        _log_probabilities(y / problem.temperature, vocab_size) for y in (y_s, y_t)
    )

    def sums(log_t: Tensor, log_s: Tensor) -> Tensor:
        return evaluate_logs(problem.functional.expr, log_t, log_s).sum(-1)

    counted = torch.ones_like(student[0], dtype=torch.bool)
    value = with_infinite_rows(problem.functional, sums, teacher, student, counted)
    if problem.labels is None:
        return value, value.new_empty(0)
    hard = F.cross_entropy(
        y_s, problem.labels.long(), ignore_index=problem.ignore_index, reduction="none"
    )
    return value, hard


def head_scores(head: Head, dtype: torch.dtype) -> Tensor:
    """Returns y, the logits of one side after scale and softcap."""
    z = head.hidden.to(dtype) @ head.weight.to(dtype).t()
    if head.adapter_hidden is not None and head.adapter_weight is not None:
        z = z + head.adapter_hidden.to(dtype) @ head.adapter_weight.to(dtype).t()
    if head.bias is not None:
        z = z + head.bias.to(dtype)
    y = z * head.scale
    return head.softcap * torch.tanh(y / head.softcap) if head.softcap else y


def _log_probabilities(scores: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities, and each row's log-sum-exp, 0 without vocabulary entries."""
    # a vocabulary entry that this side lacks has the score -inf; where all are, none has a
    # probability
    scores = F.pad(scores, (0, vocab_size - scores.shape[1]), value=-math.inf)
    absent = scores == -math.inf
    empty = absent.all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    log_p = scores.log_softmax(-1).masked_fill(absent, -math.inf)
    return log_p, scores.logsumexp(-1).masked_fill(empty.squeeze(-1), 0.0)
