"""explain(fn, *args): what the backend would do with a program, without changing it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.leaves import uncompiled
from torch_streamkl.fx_passes.reporting.report import Report

_LIMITS = {"recompile_limit": 2**30, "accumulated_recompile_limit": 2**30}


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Trace ``fn(*args, **kwargs)`` as torch.compile would and report every loss.

    The function runs once, rewritten but not compiled by Inductor. It is not changed: what it
    was compiled to before stays, and no cache is read or written. ``fn`` may be a module or a
    compiled function.
    """
    program = in_a_new_frame(uncompiled(fn))
    with backend.collected() as report, torch._dynamo.config.patch(_LIMITS):
        torch.compile(program, backend=_new_backend())(*args, **kwargs)
    return report


def in_a_new_frame(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with code of its own, so that nothing compiled before is found for it."""

    def program(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = program.__code__.replace()
    return types.FunctionType(code, program.__globals__, "explained", None, program.__closure__)


def _new_backend() -> Callable[..., Callable[..., Any]]:
    """Another object each time: Dynamo finds what it compiled before by the identity of these."""
    return functools.partial(backend.streamkl, options={"streamkl.inner": "eager"})
