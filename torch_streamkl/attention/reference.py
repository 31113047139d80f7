"""Specifies the attention operators in a few naive lines, for any floating dtype.

All other implementations are tested against it in float64, values and gradients. It materializes
the scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_streamkl.attention.problem import AttentionProblem, Side, bottom_right_offset
from torch_streamkl.divergences.infinite_rows import with_infinite_rows
from torch_streamkl.program.divergences import evaluate_logs


def attention_kl_rows(problem: AttentionProblem) -> Tensor:
    """Returns per-row values [batch, num_heads, seqlen_q], differentiable by autograd."""
    if problem.is_packed:
        return torch.cat(
            [rows_and_lse(sequence)[0] for _, _, sequence in problem.sequences()], dim=2
        )
    return rows_and_lse(problem)[0]


def rows_and_lse(problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Returns values and the log-sum-exps of both sides, in nats."""
    allowed = allowed_keys(problem)
    log_s, lse_s = log_probabilities(problem.student, problem, allowed)
    log_t, lse_t = log_probabilities(problem.teacher, problem, allowed)
    if problem.head_mean:
        log_t = _mean_over_groups(log_t, problem.num_heads)
    # A key that is not allowed adds nothing. Its logs are replaced before the expression, so that
    # no infinity meets autograd.
    counted = allowed if problem.mask_value == -math.inf else torch.ones_like(allowed)
    safe_t, safe_s = (torch.where(counted, x, torch.zeros_like(x)) for x in (log_t, log_s))

    def sums(log_t: Tensor, log_s: Tensor) -> Tensor:
        f = evaluate_logs(problem.functional.expr, log_t, log_s)
        return torch.where(counted, f, torch.zeros_like(f)).sum(-1)

    # of a mean of heads there is one for each head, and a key that all exclude has no derivative
    of_teacher = torch.zeros_like(lse_s) if problem.head_mean else lse_t
    value = with_infinite_rows(
        problem.functional, sums, (safe_t, of_teacher), (safe_s, lse_s), counted
    )
    return value, lse_s, lse_t


def allowed_keys(problem: AttentionProblem) -> Tensor:
    """Returns boolean [batch or 1, num_heads or 1, seqlen_q, seqlen_k], True where a key takes
    part.
    """
    device, n, m = problem.device, problem.seqlen_q, problem.seqlen_k
    i = torch.arange(n, device=device)[:, None] + bottom_right_offset(n, m)
    j = torch.arange(m, device=device)[None, :]
    allowed = torch.ones(1, 1, n, m, dtype=torch.bool, device=device)
    if problem.window_left is not None:
        allowed = allowed & (j >= i - problem.window_left)
    if problem.window_right is not None:
        allowed = allowed & (j <= i + problem.window_right)
    if problem.key_lengths is not None:
        allowed = allowed & (j < problem.key_lengths[:, None, None, None])
    if problem.mask is not None:
        allowed = allowed & problem.mask
    return allowed


def scores(side: Side, problem: AttentionProblem) -> Tensor:
    """Returns scores [batch, num_heads, seqlen_q, seqlen_k] before masking."""
    dtype = problem.compute_dtype
    k = side.k.repeat_interleave(side.group, dim=1)
    x = side.q.to(dtype) @ k.to(dtype).transpose(-1, -2) * side.scale
    if side.softcap:
        x = side.softcap * torch.tanh(x / side.softcap)
    if side.bias is not None:
        x = x + side.bias.to(dtype)
    if side.alibi_slopes is not None:
        n, m = problem.seqlen_q, problem.seqlen_k
        i = torch.arange(n, device=x.device)[:, None] + bottom_right_offset(n, m)
        distance = (i - torch.arange(m, device=x.device)[None, :]).abs().to(dtype)
        x = x - side.alibi_slopes.to(dtype)[:, None, None] * distance
    return x / problem.temperature


def log_probabilities(
    side: Side, problem: AttentionProblem, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities (-inf where a key has none) and the log-sum-exp of every row."""
    x = scores(side, problem)
    # one mask per student head, several teacher heads each
    if allowed.shape[1] not in (1, side.num_heads):
        allowed = allowed.repeat_interleave(side.num_heads // allowed.shape[1], dim=1)
    # A softmax ignores a constant: the level of a row without any allowed key is 0 instead of a
    # mask_value that could be too large to carry the log of the number of keys. A sink is not
    # masked, so with one the value matters.
    keeps_value = problem.mask_value == -math.inf or side.sink is not None
    level = x.new_tensor(problem.mask_value)  # two numbers would be float32 in torch.where
    fill = torch.where(allowed.any(-1, keepdim=True) | keeps_value, level, 0.0)
    x = torch.where(allowed, x, fill)
    with_sink = x
    if side.sink is not None:
        sink = side.sink.to(x.dtype)[None, :, None, None].expand(*x.shape[:-1], 1)
        with_sink = torch.cat((x, sink), dim=-1)
    empty = (with_sink == -math.inf).all(-1, keepdim=True)
    with_sink = with_sink.masked_fill(empty, 0.0)
    # as log_softmax: what a large log-sum-exp is rounded by would be in every probability
    high = with_sink.detach().amax(-1, keepdim=True) if with_sink.shape[-1] else 0.0
    log_sum = torch.logsumexp(with_sink - high, dim=-1, keepdim=True)
    log_p = torch.where(x == -math.inf, x, x.masked_fill(x == -math.inf, 0.0) - high - log_sum)
    return log_p, (high + log_sum).masked_fill(empty, -math.inf).squeeze(-1)


def _mean_over_groups(log_p: Tensor, num_groups: int) -> Tensor:
    """Returns the log of the mean probability over head groups, [batch, num_groups, seqlen_q,
    seqlen_k].
    """
    grouped = log_p.unflatten(1, (num_groups, -1))
    absent = (grouped == -math.inf).all(2)
    mean = torch.logsumexp(grouped.masked_fill(absent.unsqueeze(2), 0.0), dim=2) - math.log(
        grouped.shape[2]
    )
    return mean.masked_fill(absent, -math.inf)
