"""Replays the launches of a function that is called often with the same tensor metadata.

Only addresses change between the calls. The second call is captured (runtime/capture.py), and
later ones replay it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.runtime.launch import active_observer, is_capturing

log = logging.getLogger("torch_streamkl")
Tensors = Sequence[Tensor | None]
CALLS_BEFORE = 1  # a recording: of what is called once it would only cost time
RECORDS = True  # False: every call takes the usual way, for comparisons


class Replay:
    """Replays a function of tensors, if its launches can be captured; otherwise calls it."""

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self._function = function
        self._program: Any = None
        self._calls = 0

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        program = self._program
        if program is not None:
            results: Tensors | None = program(*tensors)
            return self._function(*tensors) if results is None else results
        if active_observer() is not None:  # it wants to see launches
            return self._function(*tensors)
        self._calls += 1
        if self._calls != CALLS_BEFORE + 1 or not RECORDS or _is_capturing(tensors):
            return self._function(*tensors)
        from torch_streamkl.runtime import capture

        with torch.no_grad():
            outputs, program = capture.record(self._function, tensors)
        if program is not None:
            self._program = functools.partial(self._first, program)
        return outputs

    def _first(self, program: Any, *tensors: Tensor | None) -> Tensors | None:
        """Runs a captured program for the first time; if it cannot run here, no later call uses
        it.
        """
        try:
            results: Tensors | None = program(*tensors)
        except (TypeError, ValueError, AttributeError, SystemError) as error:
            log.warning("recorded launches do not run here, and calls take longer: %s", error)
            self._program = None
            return None
        if results is not None:
            self._program = program
        return results


def _is_capturing(tensors: Tensors) -> bool:
    # nobody will call a function again whose launches go into a CUDA graph
    return any(x is not None and is_capturing(x.device) for x in tensors[:1])
