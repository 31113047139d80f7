"""Reads rows of logits in plain torch, a few rows at a time; `triton/rows.py` does on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_streamkl.cpu import elementwise
from torch_streamkl.linear.rows import BLOCK_ELEMENTS, transformed
from torch_streamkl.runtime.workspace import ranges
from torch_streamkl.topk.problem import TopkProblem


def log_sums(problem: TopkProblem, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns largest score and logarithm of the rest of each row's log-sum-exp.

    With a tail bucket, a logit of -inf is hidden: it takes no part, whatever a softcap makes of
    it.
    """
    high = logits.new_full((logits.shape[0],), -torch.inf, dtype=problem.compute_dtype)
    log_sum = torch.zeros_like(high)
    for rows, score, _ in _blocks(problem, logits):
        torch.amax(score, -1, out=high[rows])
        base = torch.where(high[rows] == -torch.inf, 0.0, high[rows])
        total = elementwise.exp_(score.sub_(base[:, None])).sum(-1)
        log_sum[rows] = torch.where(high[rows] == -torch.inf, 0.0, total.log())
    return high, log_sum


def gradient_(problem: TopkProblem, logits: Tensor, factors: Tensor) -> None:
    """Overwrites logits by ``coefficient * exp((score - high) - log_sum)``, to the logits."""
    for rows, score, slope in _blocks(problem, logits):
        coefficient, high, log_sum = factors[:, rows, None]
        d = elementwise.exp_(score.sub_(high).sub_(log_sum))
        if isinstance(slope, Tensor):
            d, slope = d.mul_(slope), 1.0
        factor = coefficient * (slope / problem.temperature)
        if d.dtype == logits.dtype:
            torch.mul(d, factor, out=logits[rows])
        else:
            logits[rows].copy_(d.mul_(factor))
    dropped = factors[0] == 0  # also where a row's logits are not finite
    if logits.device.type != "cpu" or bool(dropped.any()):
        logits.masked_fill_(dropped[:, None], 0.0)


def _blocks(
    problem: TopkProblem, logits: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor | float]]:
    """Yields blocks of rows: scores, which may be overwritten, and d(y)/d(logit)."""
    head, (num_rows, vocab_size) = problem.head, logits.shape
    if not vocab_size:
        return
    step = min(num_rows, max(1, BLOCK_ELEMENTS // vocab_size))
    scratch = logits.new_empty((step, vocab_size), dtype=problem.compute_dtype)
    for rows in ranges(num_rows, step):
        block = logits[rows]
        y, slope = transformed(head, block, head.bias, problem.compute_dtype)
        score = scratch[: block.shape[0]]
        torch.mul(y, 1.0 / problem.temperature, out=score)  # as the kernels do
        if problem.tail == "bucket":
            is_hidden = block == -torch.inf
            score.masked_fill_(is_hidden, -torch.inf)
            if isinstance(slope, Tensor):  # NaN if the scale is 0
                slope.masked_fill_(is_hidden, 0.0)
        yield rows, score, slope
