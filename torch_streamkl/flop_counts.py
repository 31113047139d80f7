"""Registers FLOP formulas of the operators for `torch.utils.flop_counter`.

That module imports Triton, so it is not imported here: the formulas are registered when it is
loaded.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_streamkl.compiler_marks import is_compiling

_MODULE = "torch.utils.flop_counter"
_formulas: dict[Any, Callable[..., int]] = {}
_waiting: list[Any] = []
_lock = threading.Lock()


def add(operator: Any, formula: Callable[..., int]) -> None:
    """Keeps the formula of an operator (an OpOverloadPacket), and registers it if it can."""
    _formulas[operator] = formula
    _waiting.append(operator)
    register()


def register(load: bool = False) -> None:
    """Registers the formulas if torch's module is loaded, or loads it.

    Called before an operator is. A counter that is active by then copied torch's table when it
    was made, perhaps without our formulas: its copy gets them, too.
    """
    if not load and (is_compiling() or _MODULE not in sys.modules):
        return
    module: Any = importlib.import_module(_MODULE)  # which waits for a thread that imports it
    if _waiting:
        with _lock:
            while _waiting:
                operator = _waiting[-1]
                module.register_flop_formula(operator)(_formulas[operator])
                _waiting.pop()
    if torch._C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            counter = getattr(mode, "counter", None)
            if isinstance(counter, module.FlopCounterMode):
                counter.flop_registry.update({x: module.flop_registry[x] for x in _formulas})
