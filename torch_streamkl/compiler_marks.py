"""Provides torch.compiler's decorators without importing the compiler.

`torch.compiler.disable` and `assume_constant_result` import Dynamo, which takes longer than all of
torch_streamkl. The decorators here leave the same marks on a function. Dynamo reads them when it
traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
