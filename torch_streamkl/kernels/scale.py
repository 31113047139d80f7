"""Multiplies stored gradients in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_streamkl.kernels.tiles import ceil_div
from torch_streamkl.runtime.launch import launch


@triton.jit
def scale_kernel(x_ptr, factor_ptr, num_elements, BLOCK: tl.constexpr):
    """Computes x *= factor, and does not touch x if the factor is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < num_elements
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + offsets, (x * factor).to(x_ptr.dtype.element_ty), mask=inside)


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiplies a dense tensor in place by a number on the device; a 1 moves no bytes."""
    block = 16384
    flat = x.as_strided((x.numel(),), (1,))
    grid, options = (ceil_div(x.numel(), block), 1, 1), {"num_warps": 8}
    launch(scale_kernel, grid, (flat, factor, x.numel()), (block,), options)
    torch.autograd.graph.increment_version(x)
