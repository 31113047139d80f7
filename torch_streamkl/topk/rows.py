"""Reads rows of logits in plain torch, by blocks of the vocabulary.

`triton/rows.py` does the same on a GPU.
"""

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

    A logit of -inf is hidden: it takes no part, whatever a softcap makes of it.
    """
    high = logits.new_full((logits.shape[0],), -torch.inf, dtype=problem.compute_dtype)
    total = torch.zeros_like(high)
    for vocab in _blocks(logits):
        score, _ = _scores(problem, logits, vocab)
        new = torch.maximum(high, score.amax(-1))
        base = torch.where(new == -torch.inf, 0.0, new)
        total.mul_((high - base).exp())
        total.add_(elementwise.exp_(score.sub_(base[:, None])).sum(-1))
        high = new
    return high, torch.where(high == -torch.inf, 0.0, total.log())


def gradient_(problem: TopkProblem, logits: Tensor, factors: Tensor) -> None:
    """Overwrites logits by ``coefficient * exp((score - high) - log_sum)``, to the logits."""
    coefficient, high, log_sum = factors[..., None]
    for vocab in _blocks(logits):
        score, slope = _scores(problem, logits, vocab)
        d = elementwise.exp_(score.sub_(high).sub_(log_sum))
        if isinstance(slope, Tensor):
            d = d.mul_(slope)
            d = d.mul_(coefficient / problem.temperature)
        else:
            d = d.mul_(coefficient * (slope / problem.temperature))
        logits[:, vocab].copy_(d)
    dropped = factors[0] == 0  # also where a row's logits are not finite
    if bool(dropped.any()):
        logits.masked_fill_(dropped[:, None], 0.0)


def _blocks(logits: Tensor) -> Iterator[slice]:
    return ranges(logits.shape[1], max(64, BLOCK_ELEMENTS // max(1, logits.shape[0])))


def _scores(problem: TopkProblem, logits: Tensor, vocab: slice) -> tuple[Tensor, Tensor | float]:
    """Returns scores of a block, and d(y)/d(logit)."""
    head, block = problem.head, logits[:, vocab]
    bias = None if head.bias is None else head.bias[vocab]
    y, slope = transformed(head, block, bias, problem.compute_dtype)
    score = y * (1.0 / problem.temperature)  # as the kernels do
    if problem.tail == "bucket":
        score.masked_fill_(block == -torch.inf, -torch.inf)
    return score, slope
