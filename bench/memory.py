"""Peak memory of a call: what the allocator handed out, not what the process seems to hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Largest number of bytes allocated at once during ``call()``, above what was before.

    On a GPU the caching allocator counts. On the CPU the profiler records every allocation and
    release of a tensor, which is exact and unlike the resident set size has no noise, but makes
    the call slower: never time and measure memory in one call.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    cpu = [ProfilerActivity.CPU]
    with warnings.catch_warnings():
        # of events that other cycles would have; to keep those takes several times the call itself
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with profile(activities=cpu, profile_memory=True) as recorded:
            call()
    current = highest = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            highest = max(highest, current)
    return highest
