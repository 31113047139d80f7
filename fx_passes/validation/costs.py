"""Estimates a check's cost: memory and time of the naive code, both passes, in float64."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of, storage_of
from torch_streamkl.fx_passes.validation.kinds import HEAVY
from torch_streamkl.fx_passes.validation.options import SHARE_OF_FREE_MEMORY, CheckOptions
from torch_streamkl.fx_passes.validation.sizes import Sizes

MIB = 2**20
_BYTES_PER_SECOND = {"cpu": 1e9, "cuda": 3e11}  # of one elementwise operation in float64
_FLOPS = {"cpu": 4e9, "cuda": 5e11}  # float64, a slow device of its kind


def bytes_needed(nodes: Iterable[fx.Node], leaves: Iterable[fx.Node], sizes: Sizes) -> int:
    """Estimates the bytes that the naive code allocates in float64 and keeps for its backward."""
    made: dict[object, int] = {}
    for node in (*nodes, *leaves):
        value = example(node)
        if isinstance(value, Tensor):
            width = 8 if value.dtype.is_floating_point else value.element_size()
            made[storage_of(node) or node] = math.prod(sizes.numbers(value.shape)) * width
    largest = max(made.values(), default=0)
    return sum(made.values()) + 4 * largest


def seconds_needed(nodes: Iterable[fx.Node], sizes: Sizes) -> float:
    """Estimates the time of the naive code in its own dtype and in float64, each with its
    backward.
    """
    total = 0.0
    for node in nodes:
        value = example(node)
        if not isinstance(value, Tensor):
            continue
        kind = value.device.type if value.device.type in _FLOPS else "cuda"
        numel = math.prod(sizes.numbers(value.shape))
        threads = torch.get_num_threads() if kind == "cpu" else 1
        total += 8 * numel / (_BYTES_PER_SECOND[kind] * threads)
        if name_of(node) in HEAVY and node.all_input_nodes:
            first = example(node.all_input_nodes[0])
            inner = sizes.numbers(first.shape)[-1:] if isinstance(first, Tensor) else []
            total += 2 * numel * math.prod(inner) / (_FLOPS[kind] * threads)
    return 5.0 * total  # a backward is two forwards; in the own dtype it takes less


def bytes_allowed(device: torch.device, options: CheckOptions) -> float:
    """Returns the bound on memory: the option, or a share of what is free."""
    if options.mode == "always":
        return math.inf
    if options.max_mib is not None:
        return options.max_mib * MIB
    return SHARE_OF_FREE_MEMORY * _free_bytes(device)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    try:
        with open("/proc/meminfo") as lines:
            known = dict(line.split(":") for line in lines)
        return float(known["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
