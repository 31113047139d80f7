"""Draws divided over processes, each of which stops in time and says what it saw in one line.

On a GPU most of the time is Triton's compilation, of one core each. Seeds with the same remainder
by ``--structures`` share compiled kernels, so one process draws all of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

STRUCTURES = 48
PATIENCE = 20.0  # seconds that a process has to end what it began
SHOWN = 20  # differences that a process prints


Outcomes = Iterator[tuple[str, str, str]]  # counted as; of what differs its name and how


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of `run`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--impl", help="only this implementation")
    parser.add_argument("--first", "--seed", type=int, default=0, help="of the first call")
    parser.add_argument(
        "--few-shapes", action="store_true", help=f"the same as --structures {STRUCTURES}"
    )
    parser.add_argument(
        "--structures", type=int, help="what kernels are compiled for is one of so many choices"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--share", type=int, help="only what this process of them draws")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    return parser


def structures_of(given: argparse.Namespace) -> int | None:
    return given.structures or (STRUCTURES if given.few_shapes else None)


def structure_of(given: argparse.Namespace, seed: int) -> int | None:
    structures = structures_of(given)
    return None if structures is None else seed % structures


def seeds_of(given: argparse.Namespace, calls: int) -> Iterator[int]:
    """The seeds of this process: each once, and all seeds of a structure in one process."""
    for seed in range(given.first, given.first + calls):
        structure = structure_of(given, seed)
        owner = seed if structure is None else structure
        if given.share is None or owner % given.processes == given.share:
            yield seed


def run(module: str, given: argparse.Namespace, outcomes: Callable[[int], Outcomes]) -> int:
    """`outcomes` of seeds in this process, or in as many as are asked for; 1 if one differs."""
    if given.processes > 1 and given.share is None:
        return _in_processes(module, given)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # the summary is printed all the same
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    num_calls, started = 0, time.monotonic()
    try:
        for seed in seeds_of(given, given.calls):
            if given.seconds is not None and time.monotonic() - started > given.seconds:
                break
            for kind, name, how in outcomes(seed):
                counts[kind] += 1
                if name:
                    wrong.append(name)
                    if len(wrong) <= SHOWN:
                        print(f"{name}: {how}", flush=True)
            num_calls += 1
    finally:
        share = "" if given.share is None else f"process {given.share}: "
        text = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
        found = f"{len(wrong)} differences" + "".join(f" [{x}]" for x in wrong)
        seconds = time.monotonic() - started
        print(f"{share}{num_calls} calls, {found}; {seconds:.0f} s ({text})", flush=True)
    return int(bool(wrong))


def _in_processes(module: str, given: argparse.Namespace) -> int:
    command = [sys.executable, "-m", module, *sys.argv[1:]]
    deadline = None if given.seconds is None else time.monotonic() + given.seconds + PATIENCE
    running: list[tuple[Any, Any]] = []
    for i in range(given.processes):
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        process = subprocess.Popen(
            [*command, "--share", str(i)],
            stdout=said, stderr=subprocess.STDOUT, env=os.environ | _environment(given, i),
        )  # fmt: skip
        running.append((process, said))
    status, calls, differences = 0, 0, 0
    for i, (process, said) in enumerate(running):
        status |= _wait(process, deadline)
        said.seek(0)
        lines = said.read().splitlines()
        summaries = [x for x in lines if x.startswith(f"process {i}: ")]
        others = [x for x in lines if x not in summaries]
        print("\n".join([*others, *(summaries or [f"process {i}: ended without a summary"])]))
        if summaries:
            words = summaries[-1].split()
            calls, differences = calls + int(words[2]), differences + int(words[4])
        else:
            status = 1
    print(f"{calls} calls in {given.processes} processes, {differences} differences")
    return int(status != 0)


def _environment(given: argparse.Namespace, share: int) -> dict[str, str]:
    """One thread each; GPUs are divided."""
    environment = {"OMP_NUM_THREADS": "1"}
    if given.device != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else range(torch.cuda.device_count())
        devices = [str(x) for x in names]
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[share % len(devices)]
    return environment


def _wait(process: Any, deadline: float | None) -> int:
    """The status of a process; after the deadline it is asked to end, then ended."""
    for stop in (process.terminate, process.kill):
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            return int(process.wait(left) not in (0, 3))
        except subprocess.TimeoutExpired:
            stop()
        deadline = time.monotonic() + PATIENCE
    process.wait()
    return 1
