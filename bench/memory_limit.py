"""A limit on memory, so that running out of it is a result and not the end of the machine."""

from __future__ import annotations

from pathlib import Path

import torch


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Allocations beyond the limit fail: running out of memory must not end the machine."""
    if device.type == "cuda":
        if gib is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))
        return
    try:
        import resource

        pages = {
            line.split(":")[0]: int(line.split()[1])
            for line in Path("/proc/meminfo").read_text().splitlines()
        }
        status = Path("/proc/self/status").read_text().splitlines()
    except (ImportError, OSError):
        return
    virtual_kib = next(int(line.split()[1]) for line in status if line.startswith("VmSize"))
    budget = int(gib * 2**30) if gib is not None else int(pages["MemAvailable"] * 1024 * 0.9)
    resource.setrlimit(resource.RLIMIT_AS, (virtual_kib * 1024 + budget, resource.RLIM_INFINITY))
