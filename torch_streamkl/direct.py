"""Eager calls in one step, without the dispatcher.

Two trips through the dispatcher with 28 arguments cost several times what a small kernel does. A
call on plain tensors (`checks.is_plain`) that nothing watches (no compiler, no mode, no functorch
transform, no tensor subclass) goes straight to the implementation; whatever wants to see the
operator still does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_streamkl import ops


def attention_kl(tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> Tensor:
    """The first result of ``ops.attention_kl(*tensors, *options)`` for plain tensors."""
    inputs = ops.differentiable(tensors)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        # Function.apply itself would look for functorch's wrappers among the arguments
        apply = super(torch.autograd.Function, _AttentionKL).apply
        value: Tensor = apply(tensors, options, *inputs)
        return value
    rows: Tensor = ops.without_autocast(ops.run_forward, *tensors, *options)[0]
    return rows


class _AttentionKL(torch.autograd.Function):
    # Autograd looks at every argument, and takes a tuple as one. So it gets those tensors again
    # that it has to know of.
    @staticmethod
    def forward(
        ctx: Any,
        tensors: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
        *_inputs: Tensor | None,
    ) -> Tensor:
        results = ops.without_autocast(ops.run_forward, *tensors, *options)
        value: Tensor = results[0]
        student_stats, teacher_stats = results[1:]
        ctx.save_for_backward(student_stats, teacher_stats, *tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = ops.gradients(grad, ctx.needs_input_grad[2:], ctx.saved_tensors, ctx.options)
        return (None, None, *grads)
