"""Defines the exceptions for what is not fused, and for what has to end the compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

SIZES_OF_DATA = (
    "sizes are read from tensors (.tolist(), .item(), nonzero), and not known in the graph"
)


def first_line(error: Exception, longest: int = 600) -> str:
    """Returns the beginning of what an error says."""
    return str(error).partition("\n")[0][:longest]


class NotWorthIt(str):
    """A reason why a loss is skipped that could be fused: other code would be as fast."""


Refused = Mapping[str, str]  # nodes of the user's graph that stay as they are, and why
Agree = Callable[[fx.Graph, Sequence[str], Refused], Refused]  # graph, fused sites, refused ones


class Unsupported(Exception):
    """Raised if an operation cannot be represented; the message says why in the user's terms."""


class Fatal(Exception):
    """Raised if the compilation has to end: after a failed analysis other ranks would go on."""
