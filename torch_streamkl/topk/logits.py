"""Registers ``entry_logits``: logits of given vocabulary ids, by the weight rows of these alone.

It is ``(hidden[:, None] * weight[ids]).sum(-1)`` without its copy of weight rows. An id may stand
twice: each entry has its own logit, and the gradient of a weight row is the sum of its entries'.
The rewrite computes entries at ids with it, next to one row program for what reads whole rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.library import Library

from torch_streamkl.linear.problem import Head
from torch_streamkl.program.divergences import named
from torch_streamkl.registration import (
    NAMESPACE,
    contiguous,
    define,
    fake_gradients,
    register,
    register_recomputing,
    without_none,
)
from torch_streamkl.topk import sparse
from torch_streamkl.topk.problem import Places, TopkProblem

_lib = Library(NAMESPACE, "FRAGMENT")
TENSORS = "Tensor hidden, Tensor weight, Tensor ids"
entry_logits = define(_lib, f"entry_logits({TENSORS}) -> Tensor")
entry_logits_backward = define(
    _lib,
    f"entry_logits_backward(Tensor grad, bool[] needs_grad, {TENSORS}) -> "
    "(Tensor hidden_grad, Tensor weight_grad)",
)


def _problem(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[TopkProblem, Places]:
    ids = ids.long()
    problem = TopkProblem(Head(hidden, weight), ids, ids, named("forward_kl"), "renormalize")
    return problem, Places(ids, ids >= 0)


def _forward(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return sparse.logits_of(*_problem(hidden, weight, ids))


def _forward_fake(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return hidden.new_empty(ids.shape)


def _backward(
    grad: Tensor, needs_grad: list[bool], hidden: Tensor, weight: Tensor, ids: Tensor
) -> tuple[Tensor, ...]:
    needs = needs_grad[0], needs_grad[1], False
    found = sparse.gradients(*_problem(hidden, weight, ids), grad, needs)
    return without_none(found[:2], hidden)


def _backward_fake(
    grad: Tensor, needs_grad: list[bool], hidden: Tensor, weight: Tensor, ids: Tensor
) -> tuple[Tensor, ...]:
    return fake_gradients((hidden, weight), needs_grad, hidden, contiguous)


def _flops(given: dict[str, Any]) -> int:
    num_tokens, k = given["ids"]
    return int(2 * given["hidden"][1] * num_tokens * k)


def _backward_flops(given: dict[str, Any]) -> int:
    return _flops(given) * sum(given["needs_grad"])


register(_lib, "entry_logits", _forward, _forward_fake, _flops)
register(_lib, "entry_logits_backward", _backward, _backward_fake, _backward_flops)
register_recomputing(_lib, "entry_logits", 3, slice(0, 0))
