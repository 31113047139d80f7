"""Gradients that several programs share: each writes its part, and the parts are added up."""

from __future__ import annotations

import torch
from torch import Tensor


def new_shares(x: Tensor, splits: int, adds: bool = False) -> Tensor:
    """Where a gradient to x is written.

    That is as x, or [batch, num_heads, splits, seqlen, head_dim] in float32, with more than one
    share or if several kernels add to one (``adds``).
    """
    if splits == 1 and not adds:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    shape = (*x.shape[:2], splits, *x.shape[2:])
    return x.new_empty(shape, dtype=torch.float32)


def share_strides(shares: Tensor) -> tuple[int, ...]:
    """Strides of shares, batch, heads and sequence."""
    strides = shares.stride()
    return (0, *strides[:3]) if shares.dim() == 4 else (strides[2], *strides[:2], strides[3])


def num_shares(shares: Tensor) -> int:
    return 1 if shares.dim() == 4 else shares.shape[2]


def as_heads(shares: Tensor) -> Tensor:
    """Shares as heads of their own, [batch, num_heads * splits, seqlen, head_dim]."""
    return shares if shares.dim() == 4 else shares.flatten(1, 2)


def sum_of_shares(shares: Tensor, x: Tensor) -> Tensor:
    """The gradient to x, summed in a fixed order."""
    return shares if shares.dim() == 4 else shares.sum(2).to(x.dtype)
