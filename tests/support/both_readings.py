"""Runs what works on the new reading beside what it replaces, while programs are rewritten.

``watched(old, new)`` patches a function of the pipeline: the new one gets the trace, its reading
and the old one's arguments. Results, or the reasons of an `Unsupported`, are collected as pairs.
It goes with the old reading.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from torch_streamkl import explain
from torch_streamkl.fx_passes import pipeline
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.closed_forms.form import Matched
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.reading.reader import Reading, read_trace


@dataclass
class Read:
    """A trace and its reading, which is made where somebody asks for it."""

    trace: Trace
    _reading: Reading | None = None
    _matched: dict[Any, Matched] = field(default_factory=dict)

    @property
    def reading(self) -> Reading:
        if self._reading is None:
            self._reading = read_trace(self.trace)
        return self._reading

    def matched(self, inner: torch.fx.Node) -> Matched:
        if inner not in self._matched:
            x = self.reading.array(inner)
            self._matched[inner] = match_program(x.expr, [a for d in x.dims for a in d])
        return self._matched[inner]


def outcome(function: Callable[..., Any], *args: Any) -> object:
    """What a function returns, or the reason why it does not."""
    try:
        return function(*args)
    except Unsupported as reason:
        return str(reason)


@contextlib.contextmanager
def watched(name: str, new: Callable[..., Any]) -> Iterator[list[tuple[object, object]]]:
    """Patches a function of the pipeline; ``new`` gets the last trace and its arguments."""
    pairs: list[tuple[object, object]] = []
    traced: list[Read] = []
    trace_region, old = pipeline.trace_region, getattr(pipeline, name)

    def traces(*args: Any) -> Trace:
        trace = trace_region(*args)
        traced.append(Read(trace))
        return trace

    def both(*args: Any) -> Any:
        found = outcome(new, traced[-1], *args)
        try:
            result = old(*args)
        except Unsupported as reason:
            pairs.append((str(reason), found))
            raise
        pairs.append((result, found))
        return result

    with (
        mock.patch.object(pipeline, "trace_region", traces),
        mock.patch.object(pipeline, name, both),
    ):
        yield pairs


def pairs_of(
    name: str, new: Callable[..., Any], program: Callable[..., Any], *inputs: Any
) -> list[tuple[object, object]]:
    """Rewrites a program, and returns what the old and the new function return."""
    torch._dynamo.reset()
    with watched(name, new) as pairs:
        explain(program, *inputs)
    return pairs
