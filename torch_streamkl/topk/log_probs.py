"""Registers ``entry_log_probs``: log-probabilities of given vocabulary ids, of whole rows.

It is ``(scale * hidden @ weight.T).log_softmax(-1).gather(-1, ids)`` in chunks of tokens. Entries
and log-sum-exps are of the same logits, so no probability is above 1. An id may stand twice.

The rewrite calls it for losses of cached entries. ``entry_log_probs_with_gradients`` computes
gradients of ``sum(entry_weight * log_probs)``, too; it has no autograd of its own.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_streamkl.linear.problem import Head, NeedsGrad
from torch_streamkl.program.divergences import named
from torch_streamkl.registration import (
    NAMESPACE,
    define,
    fake_gradients,
    register,
    register_recomputing,
    without_none,
)
from torch_streamkl.topk import chunks
from torch_streamkl.topk import rows as torch_rows
from torch_streamkl.topk.chunks import Exchange
from torch_streamkl.topk.ops import row_functions
from torch_streamkl.topk.problem import RowParts, RowResults, TopkProblem

_lib = Library(NAMESPACE, "FRAGMENT")
ARGUMENTS = "Tensor hidden, Tensor weight, Tensor ids, float scale"
VALUES = "Tensor log_probs, Tensor statistics"  # [2, tokens]: high and log_sum of `RowParts`
GRADIENTS = "Tensor hidden_grad, Tensor weight_grad"
entry_log_probs = define(_lib, f"entry_log_probs({ARGUMENTS}) -> ({VALUES})")
entry_log_probs_backward = define(
    _lib,
    "entry_log_probs_backward(Tensor grad, Tensor statistics, bool[] needs_grad, "
    f"{ARGUMENTS}) -> ({GRADIENTS})",
)
entry_log_probs_with_gradients = define(
    _lib,
    f"entry_log_probs_with_gradients(Tensor? entry_weight, bool[] needs_grad, {ARGUMENTS}) -> "
    f"({VALUES}, {GRADIENTS})",
)


def _problem(
    hidden: Tensor, weight: Tensor, ids: Tensor, scale: float
) -> tuple[TopkProblem, ModuleType, Exchange]:
    ids = ids.long()
    functional = named("forward_kl")  # which nobody asks
    problem = TopkProblem(Head(hidden, weight, None, scale), ids, ids, functional, "none")
    return problem, row_functions(problem, "auto"), Exchange.of_one(problem, 0)


def runs_kernels(*args: Any) -> bool:
    """Returns whether Triton's kernels read the rows of a call."""
    return _problem(*args)[1] is not torch_rows


def _values_of(parts: RowParts) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities, and both parts of the log-sum-exps."""
    log_probs = (parts.scores - parts.high[:, None]) - parts.log_sum[:, None]
    return log_probs, torch.stack([parts.high, parts.log_sum])


def _weighted(log_probs: Tensor, statistics: Tensor, weight: Tensor) -> RowResults:
    """Returns the gradients of ``sum(weight * log_probs)`` to the scores."""
    factors = torch.cat([-weight.sum(-1)[None], statistics])
    return RowResults(factors[0], log_probs, weight, factors)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    return _values_of(chunks.row_parts(*_problem(*args)))


def _forward_fake(hidden: Tensor, weight: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, ...]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    statistics = hidden.new_empty((2, hidden.shape[0]), dtype=dtype)
    return hidden.new_empty(ids.shape, dtype=dtype), statistics


def _backward(
    grad: Tensor, statistics: Tensor, needs_grad: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    problem, rows, exchange = _problem(*args)
    weight = grad.to(problem.compute_dtype)
    results = _weighted(weight, statistics, weight)
    found = chunks.gradients(problem, results, NeedsGrad(*needs_grad), rows, exchange)
    return without_none(found[:2], problem.head.hidden)


def _backward_fake(
    grad: Tensor, statistics: Tensor, needs_grad: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    return fake_gradients(args[:2], needs_grad, args[0])


def _with_gradients(
    entry_weight: Tensor | None, needs_grad: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    problem, rows, exchange = _problem(*args)
    if entry_weight is None:
        entry_weight = problem.head.hidden.new_ones(())
    weight = entry_weight.to(problem.compute_dtype).expand(problem.ids.shape)
    values = _forward_fake(*args)  # uninitialised

    def results_of(part: TopkProblem, merged: RowParts, tokens: slice) -> RowResults:
        log_probs, statistics = _values_of(merged)
        values[0][tokens] = log_probs
        values[1][:, tokens] = statistics
        return _weighted(log_probs, statistics, weight[tokens])

    needs = NeedsGrad(*needs_grad)
    grads = chunks.gradients_of_chunks(problem, results_of, needs, rows, exchange)
    if grads is None:
        values = _forward(*args)
        results = _weighted(values[0], values[1], weight)
        grads = chunks.gradients(problem, results, needs, rows, exchange)
    return *values, *without_none(grads[:2], problem.head.hidden)


def _with_gradients_fake(
    entry_weight: Tensor | None, needs_grad: list[bool], *args: Any
) -> tuple[Tensor, ...]:
    return *_forward_fake(*args), *fake_gradients(args[:2], needs_grad, args[0])


def _flops(given: dict[str, Any]) -> int:
    """Counts the logits, and one matmul for each gradient."""
    num_tokens, hidden_size = given["hidden"]
    logits = 2 * num_tokens * hidden_size * given["weight"][0]
    return int(logits) * (1 + sum(given.get("needs_grad", ())))


for _name, _implementation, _fake in (
    ("entry_log_probs", _forward, _forward_fake),
    ("entry_log_probs_backward", _backward, _backward_fake),
    ("entry_log_probs_with_gradients", _with_gradients, _with_gradients_fake),
):
    register(_lib, _name, _implementation, _fake, _flops)
register_recomputing(_lib, "entry_log_probs", 3, slice(1, 2))
