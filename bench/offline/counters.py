"""What limits a kernel of `attention_kl`: Nsight Compute's counters, one line a launch.

    python -m bench.offline.counters --only "128 packed bf16" "64 causal bf16 16 x" --json out.json

Each case of `python -m bench matrix` runs in a process of its own under `ncu`, with the clocks as
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

from bench.providers import named
from bench.records import Program, Row
from bench.suites import matrix
from bench.table import number

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
OURS = (
    "regex:forward|backward|again|table|vocabulary entries|lists|unite|dq|dk|lse|mean|state|merge"
)


def inside(name: str) -> None:
    """A case's forward and backward: once to compile, once for the counters."""
    (case,) = [case for case in matrix("cuda", False) if case.label == name]
    problem = named("direct").of(case, case.problem(torch.device("cuda")))
    for is_counted in (False, True):
        torch.cuda.synchronize()
        if is_counted:
            torch.cuda.profiler.start()
        problem.step()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counters(name: str, ncu: str, seconds: float) -> list[dict[str, str]]:
    """The counters of every launch of a case."""
    command = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        "--print-units", "base", "--kernel-name", OURS, "--metrics", ",".join(METRICS),
        sys.executable, "-m", "bench.offline.counters", "--inside", name,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    lines = [line for line in run.stdout.splitlines() if line.startswith('"')]
    if not lines:
        raise RuntimeError((run.stdout + run.stderr)[-400:])
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    return [row for row in rows if row["ID"]]  # the first has units


def row_of(case: str, found: dict[str, str]) -> Row:
    """One launch; a counter that this GPU does not have is left out."""
    counted = {m: found.get(m, "").replace(",", "") for m in METRICS}
    known = {m: float(x) for m, x in counted.items() if re.fullmatch(r"\d[\d.]*(e[+-]?\d+)?", x)}
    more: dict[str, Any] = {
        label: known[metric] for label, metric in SPLITS.items() if metric in known
    }
    more |= {"us": known.get(TIME, 0.0) / 1e3, "GHz": known.get(CYCLES, 0.0) / 1e9}
    waited = {reason: known.get(STALLS.format(reason), 0.0) for reason in REASONS}
    longest = sorted(waited.items(), key=lambda x: -x[1])[:MOST_STALLS]
    more["cycles of waiting"] = ", ".join(f"{reason} {value:.2f}" for reason, value in longest)
    return Row(case, found["Kernel Name"], "counters", more=more)


def main(argv: list[str] | None = None) -> int:
    parser = Program("bench.offline.counters", __doc__, devices=False)
    parser.add_argument("--only", nargs="+", default=[], help="parts of titles of cases")
    parser.add_argument("--seconds", type=float, default=120.0, help="at most, for a case")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options, record = parser.begin(argv)
    if options.inside:
        inside(options.inside)
        return 0
    ncu = next((path for path in map(shutil.which, NCU) if path), None)
    if ncu is None:
        print("Nsight Compute (ncu) is not installed here")
        return 2
    record.title = "What limits the kernels of attention_kl"
    names = [case.label for case in matrix("cuda", False)]
    for name in (x for x in names if any(part in x for part in options.only)):
        try:
            found = counters(name, ncu, options.seconds)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", flush=True)
            continue
        for launch in found:
            record.rows.append(row := row_of(name, launch))
            shown = (f"{k} {v if isinstance(v, str) else number(v)}" for k, v in row.more.items())
            print(row.case, row.provider, ", ".join(shown), flush=True)
            record.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
