"""Inductor computes nothing for `once`: a number is itself, its gradient is multiplied by 1."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_streamkl.fx_passes.fx_utils.torch_names import later
from torch_streamkl.once import once, once_factor
from torch_streamkl.registration import WITHOUT_AUTOGRAD


@functools.cache
def install() -> None:
    lowerings: Any = later("torch._inductor.lowering", "lowerings")
    full = lowerings[torch.ops.aten.full.default]

    def same(x: Any, inputs: Any) -> Any:
        return x

    def one(grad: Any, inputs: Any) -> Any:
        return full(grad.get_size(), 1.0, dtype=grad.get_dtype(), device=grad.get_device())

    lowerings[WITHOUT_AUTOGRAD[once]] = same
    lowerings[WITHOUT_AUTOGRAD[once_factor]] = one
