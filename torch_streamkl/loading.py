"""Imports modules that only some calls need, such as torch_streamkl.distributed."""

from __future__ import annotations

import importlib
from typing import Any

from torch_streamkl.compiler_marks import assume_constant_result

_MODULES: dict[str, Any] = {}


@assume_constant_result
def _load(module: str) -> bool:
    _MODULES[module] = importlib.import_module(f"torch_streamkl.distributed.{module}")
    return True  # Dynamo takes no module as a constant


def distributed(module: str) -> Any:
    """Returns a module of `torch_streamkl.distributed`."""
    _load(module)
    return _MODULES[module]
