"""Sums over ranks the gradient of a tensor that each rank uses for a part of the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_streamkl.distributed import collectives


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = collectives.all_reduce(grad.contiguous(), ctx.group_name)
        return collectives.wait(summed), None


def with_summed_gradient(x: Tensor, group_name: str) -> Tensor:
    """Returns ``x``, whose gradient is the sum over ranks (an all-reduce in the backward)."""
    return _SummedGradient.apply(x, group_name)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        return collectives.wait(collectives.all_reduce(x.contiguous(), group_name))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def summed(x: Tensor, group_name: str) -> Tensor:
    """Sums ``x`` over ranks; each rank differentiates the result for its own share."""
    return _Summed.apply(x, group_name)
