"""Reads rows of logits on a GPU: the functions of `rows.py`, with one program a row.

A program reads a row in tiles [LANES, WIDTH] of consecutive vocabulary entries, as
linear/triton/rows.py does. Each lane has a maximum and a sum of its own, which are merged at the
end of the row. Scores are in nats: a score of 200 in log2 units is rounded by 2e-5 nats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_streamkl.kernels.row_state import LN2, LOG2E, LOW
from torch_streamkl.kernels.scores import tanh
from torch_streamkl.linear.triton.launches import TILE_WIDTH, dense, tile_of
from torch_streamkl.runtime.launch import launch
from torch_streamkl.topk.problem import TopkProblem


class RowArgs(NamedTuple):
    """Holds logits [rows, vocab], how they become scores, and three numbers of each row."""

    logits: Any
    stride: Any
    bias: Any
    vocab_size: Any
    scale: Any
    softcap: Any
    inv_temperature: Any
    coefficient: Any
    high: Any
    log_sum: Any


class Config(NamedTuple):
    """Holds compile-time choices."""

    LANES: int
    WIDTH: int  # consecutive vocabulary entries of a lane
    NUM_STAGES: int
    SOFTCAP: bool
    BIAS: bool
    HIDES: bool  # logits of -inf are hidden


def log_sums(problem: TopkProblem, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns largest score and logarithm of the rest of each row's log-sum-exp."""
    new = torch.empty if logits.shape[1] else torch.zeros
    factors = new((3, logits.shape[0]), dtype=torch.float32, device=logits.device)
    if not logits.shape[1]:
        return factors[1] - torch.inf, factors[2]
    _launch(log_sum_kernel, problem, logits, factors)
    return factors[1], factors[2]


def gradient_(problem: TopkProblem, logits: Tensor, factors: Tensor) -> None:
    """Overwrites logits by ``coefficient * exp((score - high) - log_sum)``, to the logits."""
    _launch(gradient_kernel, problem, logits, factors.contiguous())


def _launch(kernel: Any, problem: TopkProblem, logits: Tensor, factors: Tensor) -> None:
    head, num_rows = problem.head, logits.shape[0]
    lanes, num_stages, num_warps = tile_of(num_rows, logits.element_size())
    config = Config(
        LANES=lanes,
        WIDTH=TILE_WIDTH,
        NUM_STAGES=num_stages,
        SOFTCAP=head.softcap != 0.0,
        BIAS=head.bias is not None,
        HIDES=problem.tail == "bucket",
    )
    rows = RowArgs(
        logits, logits.stride(0), dense(head.bias), head.vocab_size, head.scale,
        head.softcap or 1.0, 1.0 / problem.temperature, *factors,
    )  # fmt: skip
    launch(kernel, (num_rows, 1, 1), (rows,), (config,), {"num_warps": num_warps})


@triton.jit
def scores_of(rows, row, start, MASKED: tl.constexpr, CONFIG: tl.constexpr):
    """Computes a tile's scores, d(score)/d(logit), their addresses, and which entries exist."""
    lanes = tl.arange(0, CONFIG.LANES)
    vocab = start + lanes[:, None] * CONFIG.WIDTH + tl.arange(0, CONFIG.WIDTH)[None, :]
    inside = vocab < rows.vocab_size
    ptrs = rows.logits + row * rows.stride + vocab
    if MASKED:
        logit = tl.load(ptrs, mask=inside, other=-float("inf")).to(tl.float32)
    else:
        logit = tl.load(ptrs).to(tl.float32)
    z = logit
    if CONFIG.BIAS:
        z += tl.load(rows.bias + vocab, mask=inside, other=0.0).to(tl.float32)
    if CONFIG.SOFTCAP:
        capped = tanh(z * (rows.scale / rows.softcap))
        score = capped * (rows.softcap * rows.inv_temperature)
        slope = (rows.scale * rows.inv_temperature) * (1.0 - capped * capped)
    else:
        slope = rows.scale * rows.inv_temperature
        score = z * slope
    if CONFIG.HIDES:
        score = tl.where(logit == -float("inf"), -float("inf"), score)
        if CONFIG.SOFTCAP:  # NaN if the scale is 0
            slope = tl.where(logit == -float("inf"), 0.0, slope)
    if MASKED:
        score = tl.where(inside, score, -float("inf"))
    return score, slope, ptrs, inside


@triton.jit
def updated(high, total, score):
    """Returns maximum and sum of each lane after one tile."""
    new = tl.maximum(high, tl.max(score, 1))
    total = total * tl.math.exp2((high - new) * LOG2E)
    total += tl.sum(tl.math.exp2((score - new[:, None]) * LOG2E), 1)
    return new, total


@triton.jit
def log_sum_kernel(rows, CONFIG: tl.constexpr):
    """Writes a row's largest score, and the logarithm of the rest of its log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = CONFIG.LANES * CONFIG.WIDTH
    whole = rows.vocab_size // TILE * TILE
    high = tl.full([CONFIG.LANES], LOW, tl.float32)
    total = tl.full([CONFIG.LANES], 0.0, tl.float32)
    for start in tl.range(0, whole, TILE, num_stages=CONFIG.NUM_STAGES):
        score, _, _, _ = scores_of(rows, row, start, False, CONFIG)
        high, total = updated(high, total, score)
    for start in range(whole, rows.vocab_size, TILE):
        score, _, _, _ = scores_of(rows, row, start, True, CONFIG)
        high, total = updated(high, total, score)
    most = tl.max(high, 0)
    total = tl.sum(total * tl.math.exp2((high - most) * LOG2E), 0)
    is_empty = most == LOW
    log_sum = tl.math.log2(tl.where(is_empty, 1.0, total)) * LN2
    tl.store(rows.high + row, tl.where(is_empty, -float("inf"), most))
    tl.store(rows.log_sum + row, log_sum)


@triton.jit
def gradient_kernel(rows, CONFIG: tl.constexpr):
    """Overwrites a row's logits by their gradients."""
    row = tl.program_id(0).to(tl.int64)
    TILE: tl.constexpr = CONFIG.LANES * CONFIG.WIDTH
    whole = rows.vocab_size // TILE * TILE
    coefficient = tl.load(rows.coefficient + row)
    high = tl.load(rows.high + row)
    log_sum = tl.load(rows.log_sum + row)
    # from the last entry to the first: what was read last is still in the cache
    for start in range(whole, rows.vocab_size, TILE):
        store_gradient(rows, row, start, coefficient, high, log_sum, True, CONFIG)
    for done in tl.range(0, whole, TILE, num_stages=CONFIG.NUM_STAGES):
        start = whole - TILE - done
        store_gradient(rows, row, start, coefficient, high, log_sum, False, CONFIG)


@triton.jit
def store_gradient(
    rows, row, start, coefficient, high, log_sum, MASKED: tl.constexpr, CONFIG: tl.constexpr
):
    """Overwrites a tile; a row of coefficient 0 gets 0, also if its logits are not finite."""
    score, slope, ptrs, inside = scores_of(rows, row, start, MASKED, CONFIG)
    d = tl.math.exp2(((score - high) - log_sum) * LOG2E) * (coefficient * slope)
    d = tl.where(coefficient == 0.0, 0.0, d).to(rows.logits.dtype.element_ty)
    if MASKED:
        tl.store(ptrs, d, mask=inside)
    else:
        tl.store(ptrs, d)
