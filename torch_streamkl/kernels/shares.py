"""Gradients that several programs share: each writes its part, and the parts are added up."""

from __future__ import annotations

import torch
from torch import Tensor


def new_shares(x: Tensor, splits: int) -> Tensor:
    """Where a gradient to x is written: as x, or with more than one share [splits, *x.shape]."""
    if splits == 1:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return x.new_empty((splits, *x.shape), dtype=torch.float32)


def share_strides(shares: Tensor) -> tuple[int, ...]:
    """Strides of shares, batch, heads and sequence."""
    return (shares.stride(0), *shares.stride()[-4:-1])


def sum_of_shares(shares: Tensor, x: Tensor) -> Tensor:
    """The gradient to x, summed in a fixed order."""
    return shares if shares.dim() == x.dim() else shares.sum(0).to(x.dtype)
