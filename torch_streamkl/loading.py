"""Loads what only some calls need: the operators know its name, and it imports them."""

from __future__ import annotations

import importlib
from typing import Any

from torch_streamkl.compiler_marks import assume_constant_result


@assume_constant_result
def distributed(module: str) -> Any:
    """Returns a module of `torch_streamkl.distributed`."""
    return importlib.import_module(f"torch_streamkl.distributed.{module}")
