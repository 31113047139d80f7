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

    With a tail bucket, a logit of -inf is hidden: it takes no part, whatever a softcap makes of
    it.
    """
    high = logits.new_full((logits.shape[0],), -torch.inf, dtype=problem.compute_dtype)
    total = torch.zeros_like(high)
    for _, score, _ in _blocks(problem, logits):
        new = torch.maximum(high, score.amax(-1))
        base = torch.where(new == -torch.inf, 0.0, new)
        total.mul_((high - base).exp())
        total.add_(elementwise.exp_(score.sub_(base[:, None])).sum(-1))
        high = new
    return high, torch.where(high == -torch.inf, 0.0, total.log())


def gradient_(problem: TopkProblem, logits: Tensor, factors: Tensor) -> None:
    """Overwrites logits by ``coefficient * exp((score - high) - log_sum)``, to the logits."""
    coefficient, high, log_sum = factors[..., None]
    for vocab, score, slope in _blocks(problem, logits):
        d = elementwise.exp_(score.sub_(high).sub_(log_sum))
        if isinstance(slope, Tensor):
            d, slope = d.mul_(slope), 1.0
        factor = coefficient * (slope / problem.temperature)
        if d.dtype == logits.dtype:
            torch.mul(d, factor, out=logits[:, vocab])
        else:
            logits[:, vocab].copy_(d.mul_(factor))
    dropped = factors[0] == 0  # also where a row's logits are not finite
    if logits.device.type != "cpu" or bool(dropped.any()):
        logits.masked_fill_(dropped[:, None], 0.0)


def _blocks(
    problem: TopkProblem, logits: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor | float]]:
    """Yields blocks of the vocabulary: scores, which may be overwritten, and d(y)/d(logit)."""
    head, (num_rows, vocab_size) = problem.head, logits.shape
    step = max(64, BLOCK_ELEMENTS // max(1, num_rows))
    scratch = logits.new_empty((num_rows, min(step, vocab_size)), dtype=problem.compute_dtype)
    for vocab in ranges(vocab_size, step):
        block = logits[:, vocab]
        bias = None if head.bias is None else head.bias[vocab]
        y, slope = transformed(head, block, bias, problem.compute_dtype)
        score = scratch[:, : block.shape[1]]
        torch.mul(y, 1.0 / problem.temperature, out=score)  # as the kernels do
        if problem.tail == "bucket":
            score.masked_fill_(block == -torch.inf, -torch.inf)
        yield vocab, score, slope
