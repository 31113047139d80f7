"""What a small call costs: the host's time, its kernels', and a wait for the device.

    python -m bench.native_operators --out bench/results/attention_native.json

The tests of the operators on a GPU are pytest's: `pytest -n 14 --dist worksteal -m gpu`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.machine import describe
from bench.measure import host_seconds, median_ms
from bench.records import command_line
from torch_streamkl import attention_kl
from torch_streamkl.attention import ops

CUDA = torch.device("cuda")
COPIES = 50  # of a call in one CUDA graph


def small_call_overhead() -> dict[str, Any]:
    """Host time of a call on tiny inputs, and the time of its kernels in a CUDA graph, in us."""
    torch.manual_seed(0)
    shape = (1, 2, 16, 64)
    plain = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    leaves = [x.clone().requires_grad_(i < 2) for i, x in enumerate(plain)]
    weight = torch.ones(shape[:3], device="cuda")

    def forward() -> None:
        attention_kl(*plain, is_causal=True)

    def recorded() -> None:
        attention_kl(*leaves, is_causal=True)

    def step() -> None:
        torch.autograd.grad(attention_kl(*leaves, is_causal=True), leaves[:2], weight)

    def dispatched() -> None:
        ops.attention_kl(*plain, window_right=0)

    results = {}
    for call in (forward, recorded, step, dispatched):
        _seconds(call, 50, 1)
        results[call.__name__] = {
            # as fast as the host can issue them; and with a wait after each
            "call_us": _seconds(call, 20, 100) * 1e6,
            "synchronised_us": _seconds(call, 1, 500) * 1e6,
        }
    for call in (forward, step):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(COPIES):
                call()
        results[call.__name__]["kernels_us"] = median_ms(graph.replay, CUDA, 20) / COPIES * 1e3
    empty = _seconds(lambda: weight.add_(0.0), 1, 500)
    results["empty_kernel"] = {"synchronised_us": empty * 1e6}
    return results


def _seconds(call: Callable[[], object], repeats: int, rounds: int) -> float:
    return statistics.median(host_seconds(call, CUDA, repeats) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": command_line("bench.native_operators", sys.argv[1:]),
        "machine": describe(CUDA, options.commit),
        "overhead": small_call_overhead(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
