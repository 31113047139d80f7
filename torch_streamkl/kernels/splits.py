"""Allocates and sums gradients that several programs share: each program writes its own split."""

from __future__ import annotations

import torch
from torch import Tensor


def new_splits(x: Tensor, splits: int, adds: bool = False) -> Tensor:
    """Allocates the splits to which a gradient to x is written.

    That is as x, or [batch, num_heads, splits, seqlen, head_dim] in float32, with more than one
    share or if several kernels add to one (``adds``).
    """
    if splits == 1 and not adds:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    shape = (*x.shape[:2], splits, *x.shape[2:])
    return x.new_empty(shape, dtype=torch.float32)


def split_strides(splits: Tensor) -> tuple[int, ...]:
    """Returns the strides of splits, batch, heads and sequence."""
    strides = splits.stride()
    return (0, *strides[:3]) if splits.dim() == 4 else (strides[2], *strides[:2], strides[3])


def num_splits(splits: Tensor) -> int:
    """Counts the splits of a gradient."""
    return 1 if splits.dim() == 4 else splits.shape[2]


def as_heads(splits: Tensor) -> Tensor:
    """Views splits as separate heads, [batch, num_heads * splits, seqlen, head_dim]."""
    return splits if splits.dim() == 4 else splits.flatten(1, 2)


def combine_splits(splits: Tensor, x: Tensor) -> Tensor:
    """Sums the splits to the gradient to x, in a fixed order."""
    return splits if splits.dim() == 4 else splits.sum(2).to(x.dtype)
