"""Provides torch.compiler's decorators and question without importing the compiler.

`torch.compiler.disable` and `assume_constant_result` import Dynamo, which takes longer than all of
torch_streamkl. The decorators here leave the same marks on a function. Dynamo reads them when it
traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_R = TypeVar("_R")


def is_compiling() -> bool:
    """Returns whether a compiler traces the code that asks.

    `torch.compiler.is_compiling` is also True while another thread compiles, from torch 2.13 on.
    What is traced without Dynamo, as by a non-strict export, runs on fake tensors.
    """
    if not torch.compiler.is_compiling():
        return False
    fakes = torch._C._TorchDispatchModeKey.FAKE
    return torch.compiler.is_dynamo_compiling() or torch._C._get_dispatch_mode(fakes) is not None


def assume_constant_result(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function as `torch.compiler.assume_constant_result` does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Marks a function as `torch.compiler.disable` does: it breaks the graph and is not compiled.

    Dynamo is imported by the first call.
    """
    result = _disable_dynamo(function)
    result._torchdynamo_disable = True  # type: ignore[attr-defined]
    result._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return result
