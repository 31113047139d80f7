"""Eager calls in one step, without the dispatcher.

Two trips through the dispatcher with 28 arguments cost several times what a small kernel does. A
call on plain tensors that nothing watches (no compiler, no mode, no functorch transform, no tensor
subclass) goes straight to the implementation; whatever wants to see the operator still does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_streamkl import ops
from torch_streamkl.checks import is_plain


def attention_kl(tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> Tensor:
    """The first result of ``ops.attention_kl(*tensors, *options)``, all arguments given."""
    if not is_plain(tensors):
        value: Tensor = ops.attention_kl(*tensors, *options)[0]
        return value
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        value = _AttentionKL.apply(options, *tensors)  # type: ignore[no-untyped-call]
        return value
    return ops.run_forward(*tensors, *options)[0]


class _AttentionKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor | None) -> Tensor:
        value, student_stats, teacher_stats = ops.run_forward(*tensors, *options)
        ctx.save_for_backward(student_stats, teacher_stats, *tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = ops.gradients(grad, ctx.needs_input_grad[1:], ctx.saved_tensors, ctx.options)
        return (None, *grads)
