"""What limits a kernel of `attention_kl`: Nsight Compute's counters, one line a launch.

    python -m bench.counters --only "128 packed bf16" "64 causal bf16 16 x" --json out.json

Each case of `bench.attention_matrix` runs in a process of its own under `ncu`, with the clocks as
they are. Shares are of the peak while the launch ran: tensor cores, the unit of exponentials (XU),
issue slots, L2, memory; then for what warps that could not issue waited, in cycles per issue.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from typing import Any

import torch

from bench.attention_cells import call_of, matrix
from bench.attention_matrix import title
from bench.records import Program, Rows

NCU = ("ncu", "/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
SPLITS = {
    "tensor %": "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "tensor cycles %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "XU %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.per_cycle_active",
}
TIME, CYCLES = "gpu__time_duration.sum", "sm__cycles_elapsed.avg.per_second"
STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = (
    "barrier", "long_scoreboard", "math_pipe_throttle", "short_scoreboard", "wait", "gmma",
    "not_selected", "no_instruction", "dispatch_stall", "mio_throttle", "sleeping", "selected",
)  # fmt: skip
METRICS = [TIME, CYCLES, *SPLITS.values(), *(STALLS.format(reason) for reason in REASONS)]
MOST_STALLS = 4  # that are shown
COLUMNS = {"case": "{case}", "kernel": "{kernel:.28}", "us": "{us:.1f}", "GHz": "{GHz:.2f}"}
COLUMNS |= {label: f"{{{label}:.0f}}" for label in SPLITS} | {"cycles of waiting": "{waited}"}
OURS = (
    "regex:forward|backward|again|table|vocabulary entries|lists|unite|dq|dk|lse|mean|state|merge"
)


def inside(name: str) -> None:
    """A case's forward and backward: once to compile, once for the counters."""
    (cell,) = [cell for cell in matrix() if title(cell) == name]
    device = torch.device("cuda")
    inputs = cell.inputs(device)
    call = call_of(cell, device, "auto")
    for is_counted in (False, True):
        torch.cuda.synchronize()
        if is_counted:
            torch.cuda.profiler.start()
        value = call(*inputs)
        torch.autograd.grad(value, inputs[:2], torch.ones_like(value))
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counters(name: str, ncu: str, seconds: float) -> list[dict[str, str]]:
    """The counters of every launch of a case."""
    command = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        "--print-units", "base", "--kernel-name", OURS, "--metrics", ",".join(METRICS),
        sys.executable, "-m", "bench.counters", "--inside", name,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    lines = [line for line in run.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise RuntimeError((run.stdout + run.stderr)[-400:])
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    return [row for row in rows if row["ID"]]  # the first has units


def row_of(case: str, found: dict[str, str]) -> dict[str, Any]:
    """One launch; a counter that this GPU does not have is left out."""
    counted = {m: found.get(m, "").replace(",", "") for m in METRICS}
    known = {m: float(x) for m, x in counted.items() if re.fullmatch(r"\d[\d.]*(e[+-]?\d+)?", x)}
    row = {"case": case, "kernel": found["Kernel Name"], "counters": found}
    row |= {label: known[metric] for label, metric in SPLITS.items() if metric in known}
    row |= {"us": known.get(TIME, 0.0) / 1e3, "GHz": known.get(CYCLES, 0.0) / 1e9}
    waited = {reason: known.get(STALLS.format(reason), 0.0) for reason in REASONS}
    longest = sorted(waited.items(), key=lambda x: -x[1])[:MOST_STALLS]
    return row | {"waited": ", ".join(f"{reason} {value:.2f}" for reason, value in longest)}


def main(argv: list[str] | None = None) -> int:
    parser = Program("bench.counters", __doc__, devices=False)
    parser.add_argument("--only", nargs="+", default=[], help="parts of titles of cases")
    parser.add_argument("--seconds", type=float, default=120.0, help="at most, for a case")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options, head = parser.begin(argv)
    if options.inside:
        inside(options.inside)
        return 0
    ncu = next((path for path in map(shutil.which, NCU) if path), None)
    if ncu is None:
        print("Nsight Compute (ncu) is not installed here")
        return 2
    record = Rows("What limits the kernels of attention_kl", COLUMNS, head, options.json)
    names = [title(cell) for cell in matrix()]
    for name in (x for x in names if any(part in x for part in options.only)):
        try:
            found = counters(name, ncu, options.seconds)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", flush=True)
            continue
        for launch in found:
            record.add(row_of(name, launch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
