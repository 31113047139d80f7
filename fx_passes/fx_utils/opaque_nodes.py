"""Defines functions that replace nodes in a graph: opaque to the analysis, or the identity."""

from __future__ import annotations

from typing import Any


def same(x: Any) -> Any:
    """Returns its argument's numbers: placements and memory may differ (DTensor.redistribute)."""
    return x


def same_detached(x: Any) -> Any:
    """Returns its argument's numbers without their gradient, as for a move under no_grad."""
    return x.detach()


def opaque(*inputs: Any) -> Any:
    """Represents a node whose computation is not analysed; it never runs."""
    raise RuntimeError("a node that stands for another one was run")
