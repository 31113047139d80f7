"""Specifies `attention_topk_kl` in a few naive lines, for any floating dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_streamkl.attention_topk.problem import ChosenKeys


def chosen_key_rows(problem: ChosenKeys) -> Tensor:
    """Returns per-row values [batch, seqlen_q], differentiable by autograd."""
    if not problem.rows[0] or not problem.num_keys:
        return _rows_of_nothing(problem)
    return torch.stack([_rows_of(problem, b) for b in range(problem.rows[0])])


def _rows_of(problem: ChosenKeys, b: int) -> Tensor:
    dtype, ids = problem.compute_dtype, problem.ids[b]
    exists = problem.inside(ids, b, slice(None))
    index = torch.where(exists, ids, 0).long()
    q_s, q_t = problem.student_q[b].to(dtype), problem.teacher_q[b].to(dtype)
    k_s, k_t = problem.student_k[b].to(dtype), problem.teacher_k[b].to(dtype)
    k_t = k_t.repeat_interleave(q_t.shape[0] // k_t.shape[0], 0)
    x = torch.einsum("hnd,hnkd->hnk", q_t, k_t[:, index]) * problem.teacher_scale
    x = x.masked_fill(~exists, -torch.inf)
    if problem.teacher_lse is None:
        lse = _log_sum_exp(x)
    else:
        lse = problem.teacher_lse[b, :, :, None].to(dtype)
    p = torch.where(exists, (x - lse).exp(), 0.0).mean(0)
    mass = p.sum(-1, keepdim=True)
    is_nothing = mass < torch.finfo(dtype).tiny
    p = torch.where(is_nothing, 0.0, p / torch.where(is_nothing, 1.0, mass))
    s = torch.einsum("hnd,nkd->hnk", q_s, k_s[index]) * problem.student_scale
    if problem.head_weights is not None:
        s = s.relu() * problem.head_weights[b, :, :, None].to(dtype)
    s = s.sum(0).masked_fill(~exists, -torch.inf)
    log_s = s - _log_sum_exp(s)
    log_p = torch.where(p == 0, 0.0, torch.where(p == 0, 1.0, p).log())
    counts = exists & (p != 0)
    value = torch.where(counts, p * (log_p - torch.where(counts, log_s, 0.0)), 0.0).sum(-1)
    wrong = problem.out_of_range(ids, b, slice(None)).any(-1)
    return value.masked_fill(wrong, torch.nan)


def _log_sum_exp(x: Tensor) -> Tensor:
    """Returns log-sum-exps of rows; 0, with no gradient, for rows of -inf."""
    is_empty = (x == -torch.inf).all(-1, keepdim=True)
    lse = x.masked_fill(is_empty, 0.0).logsumexp(-1, keepdim=True)
    return torch.where(is_empty, 0.0, lse)


def _rows_of_nothing(problem: ChosenKeys) -> Tensor:
    """Returns rows of 0, with gradients of 0, for a call without a batch or a key."""
    given = (problem.student_q, problem.student_k, problem.head_weights)
    rows = problem.student_q.new_zeros(problem.rows, dtype=problem.compute_dtype)
    for x in given:
        if x is not None:  # the sum of no elements is 0 whatever the tensor holds
            rows = rows + x.narrow(-1, 0, 0).sum().to(rows.dtype)
    return rows
