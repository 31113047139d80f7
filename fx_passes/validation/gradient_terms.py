"""Measures how large the terms of a gradient's sum are.

A gradient is a sum over the uses of a tensor, and inside of a softmax over its keys. If the terms
cancel, the user's code may give exactly 0: for one key that a mask leaves, p * (g - p * g) is 0
for p = 1 whatever g is. Other code rounds the terms in another order, and has an error of their
roundings, which the sum does not show. So a run gives every term a random sign. Nothing cancels
then, and the resulting gradients are as large as the terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import argument, name_of

SOFTMAXES = ("softmax", "log_softmax")


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draws 1 or -1 for every entry of a tensor, in its type."""
    draw = torch.randint(0, 2, like.shape, generator=generator, device=generator.device)
    return (2 * draw - 1).to(like.device, like.dtype)


class GradientTerms:
    """Draws signs for the gradients of one run."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def use(self, node: fx.Node, x: Any) -> Any:
        """Returns a tensor for ``node``, whose gradient from this use gets random signs."""
        is_plain = isinstance(x, Tensor) and x.dtype.is_floating_point and x.requires_grad
        if not is_plain or not torch.is_grad_enabled() or written_by(node):
            return x
        view = x.view_as(x)
        view.register_hook(lambda g: g * random_signs(g, self.generator))
        return view

    def softmax(self, node: fx.Node, x: Any, made: Any) -> Any:
        """Returns the softmax of ``x``, whose gradient also passes its terms with random signs."""
        dim = argument(node, 1, "dim")
        if name_of(node) not in SOFTMAXES or not isinstance(dim, int):
            return made
        if not isinstance(made, Tensor) or not made.requires_grad:
            return made
        is_log = name_of(node) == "log_softmax"
        p = made.detach().exp() if is_log else made.detach()

        def terms(g: Tensor) -> Tensor:
            own = g if is_log else p * g
            total = (own * random_signs(own, self.generator)).sum(dim, keepdim=True)
            return (own * random_signs(own, self.generator) + p * total).nan_to_num(0.0, 0.0, 0.0)

        with_terms: Tensor = _WithTerms.apply(made, x, terms)
        return with_terms


class _WithTerms(torch.autograd.Function):
    """Returns the first tensor; its gradient also flows to ``x``, changed by ``terms``."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, x: Tensor, terms: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.terms, ctx.dtype = terms, x.dtype
        return made.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        return g, ctx.terms(g).to(ctx.dtype), None
