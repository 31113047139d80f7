"""Specifies `linear_topk_kl` in a few naive lines, for any floating dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_streamkl.linear.reference import head_scores
from torch_streamkl.program.divergences import evaluate_logs
from torch_streamkl.topk.entries import log_softmax
from torch_streamkl.topk.problem import LEAST_TAIL, TopkProblem


def topk_rows(problem: TopkProblem) -> tuple[Tensor, Tensor]:
    """Returns differentiable per-row values, and log-probabilities of the entries [rows, k]."""
    x = head_scores(problem.head, problem.compute_dtype) / problem.temperature
    vocab_size = x.shape[1]
    exists = (problem.ids >= 0) & (problem.log_probs != -torch.inf)
    ids = torch.where(exists, problem.ids.long(), vocab_size)  # padding: one id after the last
    log_t = problem.log_probs.to(x.dtype).masked_fill(~exists, -torch.inf)
    log_s = x.log_softmax(-1).gather(1, ids.clamp_max(vocab_size - 1))
    log_s = log_s.masked_fill(~exists, -torch.inf)
    if problem.tail == "renormalize":
        log_t, log_s = (log_softmax(y) for y in (log_t, log_s))
    if problem.tail == "bucket":
        named = x.new_zeros(x.shape[0], vocab_size + 1).scatter(1, ids, 1.0)[:, :-1].bool()
        tail_s = _logsumexp(x.masked_fill(named, -torch.inf)) - x.logsumexp(-1, keepdim=True)
        tail_t = torch.log(-torch.expm1(_logsumexp(log_t).clamp_max(-LEAST_TAIL)))
        log_t, log_s = torch.cat([log_t, tail_t], -1), torch.cat([log_s, tail_s], -1)
        exists = torch.cat([exists, tail_s != -torch.inf], -1)
    log_t, kept = (y.masked_fill(~exists, 0.0) for y in (log_t, log_s))
    terms = evaluate_logs(problem.functional.expr, log_t, kept).masked_fill(~exists, 0.0)
    return terms.sum(-1), log_s.detach()[:, : ids.shape[1]]


def _logsumexp(x: Tensor) -> Tensor:
    """Returns log-sum-exps [rows, 1]; -inf, with no gradient, for rows of -inf."""
    is_empty = (x == -torch.inf).all(-1, keepdim=True)
    lse = x.masked_fill(is_empty, 0.0).logsumexp(-1, keepdim=True)
    return lse.masked_fill(is_empty, -torch.inf)
