"""Allocates the buffers of gradients that several program instances compute, and sums them.

Each program instance of a kernel writes its own split, in float32. `combine_splits` then adds the
splits in a fixed order, so the bits are the same in every run. With one split, the kernel may
write to the gradient itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_streamkl.kernels.arguments import GradientArgs


def new_splits(x: Tensor, splits: int, adds: bool = False) -> Tensor:
    """Allocates the splits to which a gradient to x is written.

    The result is like x. With more than one split, or if several kernels add to one (``adds``), it
    is [batch, num_heads, splits, seqlen, head_dim] in float32.
    """
    if splits == 1 and not adds:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    shape = (*x.shape[:2], splits, *x.shape[2:])
    return x.new_empty(shape, dtype=torch.float32)


def gradient_args(splits: Tensor, scale: float) -> GradientArgs:
    """Groups a kernel's arguments of a gradient that it writes."""
    s = splits.stride()
    strides = (0, *s[:3]) if splits.dim() == 4 else (s[2], *s[:2], s[3])
    return GradientArgs(splits, *strides, scale)


def num_splits(splits: Tensor) -> int:
    """Counts the splits of a gradient."""
    return 1 if splits.dim() == 4 else splits.shape[2]


def as_heads(splits: Tensor) -> Tensor:
    """Views splits as separate heads, [batch, num_heads * splits, seqlen, head_dim]."""
    return splits if splits.dim() == 4 else splits.flatten(1, 2)


def combine_splits(splits: Tensor, x: Tensor) -> Tensor:
    """Sums the splits to the gradient to x, in a fixed order."""
    return splits if splits.dim() == 4 else splits.sum(2).to(x.dtype)
