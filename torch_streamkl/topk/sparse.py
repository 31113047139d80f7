"""Multiplies by the weight rows of the entries alone, for losses of no other logit.

With k entries a token these are ``num_tokens * k`` dot products instead of
``num_tokens * vocab_size``. torch computes the three products in the kernels of `embedding_bag`,
which read rows by their ids, copy none of them, and add to a row in a fixed order. With the ids
as indices and d as weights of the bags, the bag of a token is the gradient to its hidden state,
and the gradients to embedding_bag's own inputs are the other two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_streamkl.linear.chunks import Gradients
from torch_streamkl.runtime.workspace import ranges
from torch_streamkl.topk.problem import Places, TopkProblem

_aten: Any = torch.ops.aten
SUM_MODE = 0
NO_PADDING = -1
COPIED_BYTES = 64 * 2**20  # of weight rows, at a time


def logits_of(problem: TopkProblem, places: Places) -> Tensor:
    """Returns the logits of the entries [num_tokens, k], in the operands' dtype."""
    head, (num_tokens, k) = problem.head, problem.ids.shape
    if not (num_tokens and k and head.vocab_size):
        return head.hidden.new_zeros(num_tokens, k)
    if head.hidden.dtype == torch.bfloat16 and head.hidden.is_cuda:
        return _logits_by_tokens(problem, places)
    found: Tensor = _aten._embedding_bag_per_sample_weights_backward(
        head.hidden.contiguous(), head.weight.contiguous(), *_bags(places), SUM_MODE, NO_PADDING
    )
    return found.view(num_tokens, k)


def _logits_by_tokens(problem: TopkProblem, places: Places) -> Tensor:
    """Copies the weight rows of some tokens at a time: torch's kernel has no bfloat16 on a GPU."""
    head, (num_tokens, k) = problem.head, problem.ids.shape
    found = head.hidden.new_empty(num_tokens, k)
    step = max(1, COPIED_BYTES // (k * head.weight.shape[1] * head.weight.element_size()))
    for part in ranges(num_tokens, step):
        rows = head.weight[places.index[part]]  # [tokens, k, hidden_size]
        torch.bmm(rows, head.hidden[part, :, None], out=found[part, :, None])
    return found


def gradients(
    problem: TopkProblem, places: Places, d_logits: Tensor, needs_grad: tuple[bool, bool, bool]
) -> Gradients:
    """Returns gradients to hidden states, weight and bias, from those to the entries' logits.

    They are contiguous, whatever the strides of hidden states and weight are.
    """
    head, (num_tokens, k) = problem.head, problem.ids.shape
    needs_hidden, needs_weight, needs_bias = needs_grad
    is_empty = not (num_tokens and k and head.vocab_size)
    d_hidden = d_weight = d_bias = None
    d = d_logits.to(head.hidden.dtype).contiguous()
    if needs_hidden:
        d_hidden = (
            head.hidden.new_zeros(head.hidden.shape) if is_empty else _bag_sums(problem, places, d)
        )
    if needs_weight:
        d_weight = (
            head.weight.new_zeros(head.weight.shape)
            if is_empty
            else _weight_gradient(problem, places, d)
        )
    if needs_bias and head.bias is not None:
        total = torch.zeros_like(head.bias, dtype=problem.compute_dtype)
        if not is_empty:
            total.index_put_((places.index,), d_logits.to(total.dtype), accumulate=True)
        d_bias = total.to(head.bias.dtype)
    return d_hidden, d_weight, d_bias


def _bag_sums(problem: TopkProblem, places: Places, d: Tensor) -> Tensor:
    weight = problem.head.weight.contiguous()
    return F.embedding_bag(places.index, weight, per_sample_weights=d, mode="sum")


def _weight_gradient(problem: TopkProblem, places: Places, d: Tensor) -> Tensor:
    head = problem.head
    ids, _, token_of = _bags(places)
    lengths = torch.full((d.shape[0],), d.shape[1], device=d.device)
    found: Tensor = _aten._embedding_bag_dense_backward(
        head.hidden.contiguous(), ids, token_of, lengths, lengths.new_empty(0), head.vocab_size,
        False, SUM_MODE, d.view(-1), NO_PADDING,
    )  # fmt: skip
    return found


def _bags(places: Places) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all ids, where each token's begin, and the token of each."""
    num_tokens, k = places.index.shape
    tokens = torch.arange(num_tokens, device=places.index.device)
    return places.index.reshape(-1), tokens * k, tokens.repeat_interleave(k)
