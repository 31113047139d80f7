"""Multiplies gradients that a forward has stored by the gradient of their sum.

NOTE [Multiplying stored gradients]
The gradients of ``linear_kl_sum`` are as large as the weights. Its backward therefore multiplies
them in place, unless the graph is kept for another backward, or is being traced. In a compiled
graph the operator ``scale_stored`` multiplies: Inductor knows whether the buffer dies, and then it
launches the same kernel (fx_passes/inductor_kernels.py). A factor of 1, as of ``loss.backward()``,
moves no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import Library

from torch_streamkl.checks import has_batched_gradients
from torch_streamkl.registration import NAMESPACE, define, register

_lib = Library(NAMESPACE, "FRAGMENT")
scale_stored = define(_lib, "scale_stored(Tensor stored, Tensor factor) -> Tensor")


def times(stored: Tensor, factor: Tensor) -> Tensor:
    """Returns a stored gradient times the gradient of its sum, in the dtype of the first."""
    return (stored * factor).to(stored.dtype)


def scaled_here(stored: Tensor, factor: Tensor) -> Tensor:
    """Multiplies a stored gradient in place on a GPU, and returns it."""
    from torch_streamkl.kernels.scale import scale_

    scale_(stored, factor)
    return stored


register(_lib, "scale_stored", times, lambda stored, factor: torch.empty_like(stored))


def scaled(stored: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    """Multiplies a stored gradient by the gradient of its sum (see double_backward.py)."""
    if not in_place:
        return times(stored, factor)
    if not stored.is_cuda or stored.dtype == torch.float64 or stored.numel() == 0:
        return stored.mul_(factor)
    return scaled_here(stored, factor)


def scaled_gradients(
    stored: Sequence[Tensor], factor: Tensor, needs_grad: Iterable[bool]
) -> list[Tensor | None]:
    """Multiplies the stored gradients that are needed by the gradient of their sum."""
    in_place, each = may_overwrite(stored), zip(stored, needs_grad, strict=False)
    if is_compiled(stored):
        return [scale_stored(x, factor) if need else None for x, need in each]
    return [scaled(x, factor, in_place) if need else None for x, need in each]


def is_compiled(stored: Sequence[Tensor]) -> bool:
    """Whether a backward is traced of which no derivative is asked for."""
    is_traced = any(type(x) is FunctionalTensor for x in stored)
    return is_traced and not torch.is_grad_enabled() and not has_batched_gradients()


def may_overwrite(stored: Sequence[Tensor]) -> bool:
    """Whether stored gradients may be multiplied in place: NOTE [Multiplying stored gradients]."""
    if has_batched_gradients():
        return False
    if torch.is_grad_enabled() or any(
        type(x) is not Tensor for x in stored
    ):  # create_graph, or traced
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()
