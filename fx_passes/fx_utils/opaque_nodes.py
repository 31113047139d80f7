"""Defines functions that replace nodes in a graph: opaque to the analysis, or the identity."""

from __future__ import annotations

from typing import Any


def same(x: Any) -> Any:
    """Returns the same numbers: placements and memory may differ (DTensor.redistribute,
    full_tensor).
    """
    return x


def same_detached(x: Any) -> Any:
    """Returns the same numbers without their gradient: what is moved under no_grad."""
    return x.detach()


def opaque(*inputs: Any) -> Any:
    """Stands for a node whose computation is not analysed; never run."""
    raise RuntimeError("a node that stands for another one was run")
