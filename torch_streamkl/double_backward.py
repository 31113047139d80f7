"""Makes double backward raise for a loss whose gradients were computed in the forward.

Such a loss stores its gradients, without a graph from them to the inputs: autograd would omit a
second derivative silently. The operator `once` returns the loss itself, and its backward reads
``inputs``, the tensors that the loss is computed from. In eager code, a second derivative by any
of them raises our error. AOTAutograd refuses double backward if a graph keeps an input that needs
a gradient for its backward; `once` keeps such inputs, as the replaced code did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from torch_streamkl.checks import is_plain
from torch_streamkl.compiler_marks import is_compiling
from torch_streamkl.registration import (
    NAMESPACE,
    define,
    refuse_autograd,
    register,
    register_autograd,
)

_lib = Library(NAMESPACE, "FRAGMENT")
once = define(_lib, "once(Tensor x, Tensor[] inputs) -> Tensor")
# 1, to multiply a gradient by: its derivative by ``inputs`` is an error. It takes the gradient so
# that graphs compute it in the backward, and have to keep the inputs until then.
double_backward_factor = define(
    _lib, "double_backward_factor(Tensor grad, Tensor[] inputs) -> Tensor"
)


def differentiable_once(total: Tensor, inputs: Iterable[Any]) -> Tensor:
    """Returns a sum whose second derivative by any tensor of ``inputs`` raises."""
    if not total.requires_grad:
        return total
    given = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if is_compiling():
        parameters: list[Tensor] = [x for x in given if isinstance(x, torch.nn.Parameter)]
        return once(total, parameters) if parameters else total
    kept = [_no_elements(x) for x in given]
    if is_plain((total, *kept)):
        # a fifth of the operator's CPU time
        result: Tensor = _ForbidDoubleBackward.apply(total, kept)
        return result
    return once(total, kept)


def _no_elements(x: Tensor) -> Tensor:
    return (x if x.dim() else x[None]).narrow(0, 0, 0).clone()  # of a view the memory would stay


def _once(x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    return x.clone()


def _factor(grad: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    return torch.ones_like(grad)


register(_lib, "once", _once, _once)
register(_lib, "double_backward_factor", _factor, _factor)


def _gradient(grad: Tensor | None, inputs: Sequence[Tensor]) -> Tensor | None:
    is_kept = type(grad) is not Tensor or torch.is_grad_enabled()  # traced, or create_graph
    if grad is None or not is_kept:
        return grad
    # what is traced is not recorded, and a batch of gradients knows no view of itself
    factor_of = grad.detach() if torch.is_grad_enabled() else grad
    return grad * double_backward_factor(factor_of, list(inputs))


class _ForbidDoubleBackward(torch.autograd.Function):
    """Returns a loss, and reads its inputs in the backward, so that a second derivative raises.

    The inputs come in a list, which gets no gradient: as arguments they would get None, which
    compiled autograd would add to another gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: list[Tensor]) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _gradient(grads[0], ctx.saved_tensors), None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1])
    ctx.num_inputs = len(inputs[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    return _gradient(grad, ctx.saved_tensors), [None] * ctx.num_inputs


def _vmap_factor(
    info: Any, in_dims: tuple[Any, ...], grad: Tensor, inputs: list[Tensor]
) -> tuple[Tensor, int | None]:
    """Handles several gradients of one sum, under vmap."""
    return double_backward_factor(grad, inputs), in_dims[0]


def _batched_factor(grad: Tensor, inputs: list[Tensor]) -> Tensor:
    """Handles ``is_grads_batched=True``, an older vmap without a rule for lists of tensors."""
    return torch.ones(grad.shape, dtype=grad.dtype, device=grad.device)


register_autograd(_lib, "once", _autograd, _setup_context)
refuse_autograd(
    _lib,
    "double_backward_factor",
    "a sum whose gradients are computed in the forward can be differentiated once; use "
    "impl='reference' for higher derivatives",
)
torch.library.register_vmap(f"{NAMESPACE}::double_backward_factor", _vmap_factor, lib=_lib)
_lib.impl("double_backward_factor", _batched_factor, "Batched")
