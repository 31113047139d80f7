"""Lowers `once` to the identity and `double_backward_factor` to 1, which cost Inductor nothing."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_streamkl.double_backward import double_backward_factor, once
from torch_streamkl.fx_passes.fx_utils.torch_names import has, optional
from torch_streamkl.registration import WITHOUT_AUTOGRAD

WITHOUT_LOWERINGS = "this torch's Inductor calls an operator that copies one number for every sum"


def can_install() -> bool:
    """Whether this torch has what `install` needs; it imports none of it."""
    return has("torch._inductor.lowering", "lowerings")


@functools.cache
def install() -> bool:
    """Adds both lowerings; False if Inductor has no table of them, and calls the operators."""
    lowerings: Any = optional("torch._inductor.lowering", "lowerings")
    full = lowerings.get(torch.ops.aten.full.default) if isinstance(lowerings, dict) else None
    if full is None:
        return False

    def same(x: Any, inputs: Any) -> Any:
        return x

    def one(grad: Any, inputs: Any) -> Any:
        return full(grad.get_size(), 1.0, dtype=grad.get_dtype(), device=grad.get_device())

    lowerings[WITHOUT_AUTOGRAD[once]] = same
    lowerings[WITHOUT_AUTOGRAD[double_backward_factor]] = one
    return True
