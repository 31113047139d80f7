"""Computes per-row values, and their gradients, from the scores of k entries and one log-sum-exp.

With scores x_i of the entries and h_i = df/dlogS_i:

- ``tail="none"``: logS_i = x_i - lse, over all vocabulary entries. The gradient to x_i is h_i, and
  that to every score x_j another -S_j sum(h).
- ``tail="bucket"``: the tail is one more entry, whose logS is the log-sum-exp of all others minus
  lse. The gradient to x_i is h_i - S_i sum(h). That to another score is its share of the tail's,
  h_tail - S_tail sum(h).
- ``tail="renormalize"``: logS_i = x_i - lse, over the entries alone. The gradient to x_i is
  h_i - S_i sum(h).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_streamkl.program.divergences import variables_of
from torch_streamkl.topk.problem import LEAST_TAIL, RowParts, RowResults, TopkProblem


def teacher_log_probs(problem: TopkProblem, present: Tensor) -> Tensor:
    """Returns the teacher's log-probabilities [num_tokens, k], with a tail [num_tokens, k + 1]."""
    log_p = problem.log_probs.to(problem.compute_dtype).masked_fill(~present, -torch.inf)
    if problem.tail == "none":
        return log_p
    if problem.tail == "renormalize":
        return log_softmax(log_p)
    return torch.cat([log_p, log_tail(log_p.logsumexp(-1, keepdim=True))], -1)


def log_softmax(scores: Tensor) -> Tensor:
    """Returns log-softmaxes of rows; -inf, with no gradient, for rows of -inf.

    torch subtracts a row's maximum first. Scores minus their log-sum-exp would be off by its
    rounding, which is large if the scores are logits of several hundred.
    """
    is_empty = (scores == -torch.inf).all(-1, keepdim=True)
    logs = scores.masked_fill(is_empty, 0.0).log_softmax(-1)
    return logs.masked_fill(is_empty, -torch.inf)


def log_tail(lse: Tensor) -> Tensor:
    """Returns the logarithm of the probability that entries with this log-sum-exp leave."""
    return torch.log(-torch.expm1(lse.clamp_max(-LEAST_TAIL)))


def results(problem: TopkProblem, parts: RowParts, out: RowResults) -> None:
    """Writes values and gradients of rows."""
    present = problem.present
    log_s, exists = _student_log_probs(problem, parts, present)
    log_t = teacher_log_probs(problem, present)
    # what does not exist has logarithms of 0, in which everything is finite, and counts 0 times
    log_s, log_t = (torch.where(exists, x, 0.0) for x in (log_s, log_t))
    variables = variables_of(log_t, log_s)
    f, h = problem.functional.terms("fh", variables)
    f, h = (torch.where(exists, x, 0.0) for x in (f, h))
    total = h.sum(-1, keepdim=True)
    k = problem.ids.shape[1]
    out.value.copy_(f.sum(-1))
    out.log_s.copy_(torch.where(present, log_s[:, :k], -torch.inf))
    coefficient, high, log_sum = out.factors
    high.copy_(torch.where(parts.high == -torch.inf, 0.0, parts.high))
    log_sum.copy_(parts.log_sum)
    if problem.tail == "none":
        out.entry_grad.copy_(h)
        coefficient.copy_(-total.squeeze(-1))
        return
    d = torch.where(exists, h - variables["S"] * total, 0.0)
    out.entry_grad.copy_(d[:, :k])
    coefficient.copy_(d[:, k]) if problem.tail == "bucket" else coefficient.zero_()


def _student_log_probs(
    problem: TopkProblem, parts: RowParts, present: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns logS of the entries, with a tail of k + 1, and which of them exist."""
    scores = parts.scores
    if problem.tail == "none":
        return (scores - parts.high[:, None]) - parts.log_sum[:, None], present
    given = torch.where(present, scores, -torch.inf)
    high = parts.high.new_full(parts.high.shape, -torch.inf)
    if problem.tail == "bucket":
        high = parts.high
    if given.shape[1]:
        high = torch.maximum(high, given.amax(-1))
    high = torch.where(high == -torch.inf, 0.0, high)[:, None]
    if problem.tail == "renormalize":
        log_sum = (given - high).exp().sum(-1, keepdim=True).log()
        # -inf where a bias hides all entries of a row: so are their logarithms
        log_sum = torch.where(log_sum == -torch.inf, 0.0, log_sum)
        return (scores - high) - log_sum, present
    tail = (parts.high[:, None] - high) + parts.log_sum[:, None]
    given = torch.cat([given - high, tail], -1)
    log_sum = given.exp().sum(-1, keepdim=True).log()
    # ids that name every vocabulary entry leave no tail
    exists = torch.cat([present, parts.high[:, None] > -torch.inf], -1)
    return given - log_sum, exists
