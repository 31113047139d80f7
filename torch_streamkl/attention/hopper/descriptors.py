"""Creates the TMA descriptors by which the Hopper kernels load tiles of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torch_streamkl.attention.hopper_tiles import columns_of
from torch_streamkl.attention.plans import Plan
from torch_streamkl.runtime.descriptors import with_base

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def descriptor(plan: Plan, x: Tensor, rows: int, columns: int = 0) -> TensorDescriptor:
    """Creates a descriptor of tiles [1, 1, rows, columns] of [batch, heads, seqlen, head_dim].

    Reads past the end give 0. By default, columns are those of the head_dim, padded. Triton checks
    a new descriptor, which takes longer than a small kernel. So a plan keeps one for each shape
    and strides, without a tensor, and copies it.
    """
    columns = columns or columns_of(x.shape[3])
    key = ("descriptor", x.shape, x.stride(), rows, columns)
    kept = plan.kept(key, lambda: with_base(_new_descriptor(x, rows, columns), None))
    found: TensorDescriptor = with_base(kept, x)
    return found


def _new_descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), _strides(x.shape, x.stride()), block, layout)


def _strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    # the stride of a dimension of size 1 means nothing, but must be a multiple of 16 bytes
    outer = zip(shape[:3], strides[:3], strict=True)
    return [*(shape[3] if size == 1 else stride for size, stride in outer), 1]
