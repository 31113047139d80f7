"""KL from hidden states on the CPU: `linear_kl` beside eager code, in turns.

    python -m bench.linear_cpu --out bench/results/linear_cpu.json

T=512 tokens, width 768, 50,257 words, float32, forward KL, gradients to the student's hidden
states and weight. Seconds are those of the process (one thread), so that other work on the machine
counts little. Peaks are resident memory above the inputs and the two gradients.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import machine
from torch_streamkl import linear_kl

MIB = 2**20


def resident_mib(field: str) -> float:
    """VmRSS, or VmHWM: its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(loss: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[float, float]:
    """Process seconds and peak MiB of one step."""
    for x in leaves:
        x.grad = None
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start = time.process_time()
    loss().backward()
    seconds = time.process_time() - start
    gradients = sum(x.numel() * x.element_size() for x in leaves) / MIB
    return seconds, resident_mib("VmHWM") - before - gradients


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    xs, xt = torch.randn(512, 768, requires_grad=True), torch.randn(512, 768)
    ws, wt = (torch.randn(50257, 768).mul_(768**-0.5) for _ in range(2))
    ws.requires_grad_()

    def eager() -> Tensor:
        student, teacher = F.linear(xs, ws).log_softmax(-1), F.linear(xt, wt).softmax(-1)
        return F.kl_div(student, teacher, reduction="batchmean")

    def ours() -> Tensor:
        return linear_kl(xs, ws, xt, wt, reduction="mean")

    table = {"eager": eager, "linear_kl": ours}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in table}
    for _ in range(options.rounds + 1):  # the first round warms up
        for name, loss in table.items():
            found[name].append(measure(loss, [xs, ws]))
    rows = {
        name: {
            "process_s": min(s for s, _ in steps[1:]),
            "peak_mib": max(mib for _, mib in steps[1:]),
        }
        for name, steps in found.items()
    }
    for name, row in rows.items():
        print(f"{name:12}{row['process_s']:8.2f} s {row['peak_mib']:8.1f} MiB")
    if options.out:
        record = {
            "machine": machine.describe(torch.device("cpu")),
            "command": "python -m bench.linear_cpu",
            "case": "T=512, V=50257, width 768, float32",
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
