"""Multiplies gradients that a forward has stored by the gradient of their sum.

NOTE [Multiplying stored gradients]
The gradients of ``linear_kl_sum`` are as large as the weights. Its backward therefore multiplies
them in place, unless the graph is kept for another backward, or is being traced: the compiler
reuses the buffer that it sees die.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_streamkl.checks import has_batched_gradients


def scaled(stored: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    """Multiplies a stored gradient by the gradient of its sum (see double_backward.py)."""
    if not in_place:
        return (stored * factor).to(stored.dtype)
    if not stored.is_cuda or stored.dtype == torch.float64 or stored.numel() == 0:
        return stored.mul_(factor)
    from torch_streamkl.kernels.scale import scale_

    scale_(stored, factor)
    return stored


def scaled_gradients(
    stored: Sequence[Tensor], factor: Tensor, needs_grad: Iterable[bool]
) -> list[Tensor | None]:
    """Multiplies the stored gradients that are needed by the gradient of their sum."""
    in_place = may_overwrite(stored)
    each = zip(stored, needs_grad, strict=False)
    return [scaled(x, factor, in_place) if need else None for x, need in each]


def may_overwrite(stored: Sequence[Tensor]) -> bool:
    """Whether stored gradients may be multiplied in place: NOTE [Multiplying stored gradients]."""
    if has_batched_gradients():
        return False
    if torch.is_grad_enabled() or any(
        type(x) is not Tensor for x in stored
    ):  # create_graph, or traced
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()
