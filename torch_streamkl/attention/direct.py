"""Runs eager calls of `attention_kl` without the dispatcher.

Two trips through the dispatcher with 28 arguments take several times as long as a small kernel. So
a call on plain tensors (`checks.is_plain`) that nothing watches goes straight to the
implementation. A compiler, a dispatch mode, a functorch transform and a tensor subclass still see
the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.attention import ops
from torch_streamkl.attention.bound_op import BoundOp
from torch_streamkl.checks import is_plain
from torch_streamkl.registration import without_autocast


def attention_kl(tensors: tuple[Tensor | None, ...], site: BoundOp) -> Tensor:
    """Returns the first result of ``ops.attention_kl(*tensors, *site.options)`` for plain tensors,
    those of every call of the bound op alike.
    """
    inputs = ops.differentiable(tensors)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        # Function.apply itself would look for functorch's wrappers among the arguments
        apply = super(torch.autograd.Function, _AttentionKL).apply
        value: Tensor = apply(tensors, site, *inputs)
        return value
    rows: Tensor = without_autocast(site.forward, *tensors)[0]
    return rows


class Call:
    """Computes the rows of one call in a graph that runs without a compiler.

    Tensors have the same metadata in every call; absent tensors are None.
    """

    def __init__(self, options: tuple[Any, ...]) -> None:
        self.options = options
        self._site = BoundOp(options)
        self.__name__ = "attention_kl"  # in the graph's code

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        if is_plain(tensors):
            return attention_kl(tensors, self._site)
        rows: Tensor = ops.attention_kl(*tensors, *self.options)[0]
        return rows


class _AttentionKL(torch.autograd.Function):
    # Autograd looks at every argument, and takes a tuple as one. So it gets those tensors again
    # that it has to know of.
    @staticmethod
    def forward(
        ctx: Any, tensors: tuple[Tensor | None, ...], site: BoundOp, *_inputs: Tensor | None
    ) -> Tensor:
        value: Tensor
        value, student_stats, teacher_stats = without_autocast(site.forward, *tensors)
        ctx.save_for_backward(student_stats, teacher_stats, *tensors)
        ctx.site = site
        # a hook may return another layout than it got, as save_on_cpu(pin_memory=True) does
        ctx.layouts = _layouts(tensors) if _saved_tensors_hooks(False) is not None else None
        ctx.set_materialize_grads(False)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        site, needs, saved = ctx.site, ctx.needs_input_grad[2:], ctx.saved_tensors
        if ctx.layouts is not None and ctx.layouts != _layouts(saved[2:]):
            return (None, None, *ops.gradients(grad, needs, saved, site.options))
        if (
            needs[4]
            or needs[5]
            or grad is None
            or torch.is_grad_enabled()
            or not is_plain((grad, *saved))
        ):
            grads = ops.gradients(grad, needs, saved, site.options, site.backward)
            return (None, None, *grads)
        # the usual call, without what the others need
        dq, dk, teacher_dq, teacher_dk = without_autocast(site.backward, needs[:4], grad, *saved)
        return None, None, dq, dk, teacher_dq, teacher_dk, None, None


# where a torch does not tell whether there are hooks, layouts are always compared
_saved_tensors_hooks: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ()
)


def _layouts(tensors: tuple[Tensor | None, ...]) -> list[Any]:
    return [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
