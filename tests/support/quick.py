"""What a process that tests does not do: it takes time and proves nothing."""

from __future__ import annotations

import gc

import torch._dynamo.guards


def guards_are_not_timed() -> None:
    """Dynamo empties the processor's caches at every compilation to time its guards for a log."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def what_stays_is_no_garbage() -> None:
    """Modules and what earlier tests left stay to the end; Dynamo's every reset searched them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
