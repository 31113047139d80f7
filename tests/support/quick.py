"""What a process that tests does not do: it takes time and proves nothing, or leaves it out."""

from __future__ import annotations

import gc

import torch._dynamo.guards

from torch_streamkl.fx_passes.planning import small

MEASURED_MIB = dict(small.LEAST_MIB)


def guards_are_not_timed() -> None:
    """Dynamo empties the processor's caches at every compilation to time its guards for a log."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def sites_are_fused_whatever_their_size() -> None:
    """Tests are of tiny shapes: those of the choice by size give the option."""
    small.LEAST_MIB.clear()
    small.LEAST_PROGRAM_MIB.clear()


def what_stays_is_no_garbage() -> None:
    """Modules and what earlier tests left stay to the end; Dynamo's every reset searched them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
