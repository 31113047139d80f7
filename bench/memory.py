"""Peak memory of a call, as the allocator handed it out, and a limit on what there is."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

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


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Allocations beyond the limit fail: running out of memory must not end the machine."""
    if device.type == "cuda":
        if gib is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
        return
    try:
        import resource

        kib = {
            name: int(number)
            for file in ("/proc/meminfo", "/proc/self/status")
            for name, number in re.findall(r"(?m)^(\w+):\s+(\d+) kB", Path(file).read_text())
        }
    except (ImportError, OSError):
        return
    budget = int(gib * 2**30) if gib is not None else int(kib["MemAvailable"] * 1024 * 0.9)
    resource.setrlimit(resource.RLIMIT_AS, (kib["VmSize"] * 1024 + budget, resource.RLIM_INFINITY))
