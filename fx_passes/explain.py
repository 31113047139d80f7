"""explain(fn, *args): what the backend would do with a program, without changing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.report import Report


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Trace ``fn(*args, **kwargs)`` as torch.compile would and report every KL-like site.

    The function runs once, rewritten but not compiled by Inductor. It is not changed, and what
    torch.compile has cached for it stays.
    """
    collected = Report()
    observer = collected.extend
    backend.REPORTS.append(observer)
    try:
        compiled = torch.compile(fn, backend=_analyse, dynamic=None)
        with torch._dynamo.config.patch(force_parameter_static_shapes=True):
            compiled(*args, **kwargs)
    finally:
        backend.REPORTS.remove(observer)
    return collected


def _analyse(gm: torch.fx.GraphModule, example_inputs: list[object]) -> Callable[..., Any]:
    return backend.streamkl(gm, example_inputs, options={"streamkl.inner": "eager"})
