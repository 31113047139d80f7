"""The operator tests on this machine's GPU, in several processes, and what a small call costs.

    python -m bench.native_operators --out bench/results/attention_native.json

Compiling the kernels takes nearly all the time of the tests, so they are spread over processes,
and those that share kernels share a process.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.machine import describe
from bench.records import command_line
from torch_streamkl import attention_kl, ops

TEST_FILES = ("tests/test_attention_cuda.py", "tests/test_hopper_kernels.py")


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
        results[call.__name__] = {
            "call_us": _host_us(call),
            "synchronised_us": _round_trip_us(call),
        }
    for call in (forward, step):
        results[call.__name__]["kernels_us"] = _graph_us(call)
    results["empty_kernel"] = {"synchronised_us": _round_trip_us(lambda: weight.add_(0.0))}
    return results


def _host_us(call: Callable[[], None], batch: int = 20, repeats: int = 100) -> float:
    """Median time per call of short runs of calls: as fast as the host can issue them."""
    for _ in range(50):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    return sorted(times)[repeats // 2] * 1e6


def _round_trip_us(call: Callable[[], None], repeats: int = 500) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2] * 1e6


def _graph_us(call: Callable[[], None], copies: int = 50) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            call()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(20):
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / copies)
    return sorted(times)[10] * 1e3


def run_tests(processes: int, expression: str, limit_s: float) -> dict[str, str]:
    """Outcome of every test: "passed", "skipped", the message of its failure, or "no outcome"."""
    pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]
    listed = subprocess.run(
        [*pytest, "-q", "--collect-only", *TEST_FILES, "-k", expression],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    ids = [line for line in listed.splitlines() if "::" in line]
    if not ids:
        raise RuntimeError(f"no tests were collected:\n{listed[-2000:]}")
    stop = time.time() + limit_s
    outcomes = dict.fromkeys(ids, "no outcome")
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for i, share in enumerate(shares(ids, processes)):
            log = Path(folder) / f"{i}.log"
            with log.open("w") as output:
                command = [*pytest, "-v", "--tb=short", *share]
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            running.append((process, log))
        for process, log in running:
            try:
                process.wait(max(0.0, stop - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            output_text = log.read_text()
            outcomes |= outcomes_of(output_text)
            if process.returncode:
                print(output_text[-4000:], flush=True)
    return outcomes


def shares(ids: list[str], processes: int) -> list[list[str]]:
    """The tests of each process: those that differ in sizes and strides alone stay together."""
    groups: dict[str, list[str]] = {}
    for test in ids:
        kernels = re.sub(r"\b(sizes\d+|transposed|padded)\b", "", test)
        groups.setdefault(kernels, []).append(test)
    dealt = [list(groups.values())[i::processes] for i in range(processes)]
    return [[test for group in share for test in group] for share in dealt if share]


def outcomes_of(output: str) -> dict[str, str]:
    """Test ids and outcomes in what `pytest -v` printed, a failure with its first line."""
    found = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", output, flags=re.M)
    outcomes = {test: outcome.lower() for test, outcome in found}
    messages = re.findall(r"^(?:FAILED|ERROR) (\S+::.+?) - (.*)$", output, flags=re.M)
    return outcomes | {test: f"failed: {message}" for test, message in messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--commit", default="")
    parser.add_argument("-k", default="", dest="expression")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="of the tests' run")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": command_line("bench.native_operators", sys.argv[1:]),
        "machine": describe(torch.device("cuda"), options.commit),
        "overhead": small_call_overhead(),
    }
    print(json.dumps(result, indent=1), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    started = time.time()
    result["tests"] = run_tests(options.processes, options.expression, options.limit_s)
    passed = sum(outcome == "passed" for outcome in result["tests"].values())
    result["summary"] = f"{passed} of {len(result['tests'])} passed"
    print(result["summary"], f"in {time.time() - started:.0f} s")
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
