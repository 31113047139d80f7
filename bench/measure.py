"""Measures a step: its time in interleaved rounds, its peak memory, and what it ran on."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import platform
import random
import re
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from bench.case import Problem

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
SHORT_MS = 50.0  # steps shorter than this are repeated within a sample
WARM_UP_MS = 10.0  # of steps before them that do not count: a GPU's clocks fall while it waits
MODES = ("forward", "backward", "step")
ALONE = "alone"  # one more where asked for: a forward without gradients


# ------------------------------------------------------------------------------------- failures
class OutOfMemory(Exception):
    """The step did not fit; the original message."""


class Unavailable(Exception):
    """A provider cannot compute a case: a package is missing, or it has no such form."""


def attempt(call: Callable[[], T], device: torch.device) -> tuple[T | None, dict[str, str]]:
    """Returns a call's result; or None and why it is a result all the same, as fields of a row."""
    try:
        return guarded(call, device), {}
    except (OutOfMemory, Unavailable) as error:
        status = "oom" if isinstance(error, OutOfMemory) else "unavailable"
        return None, {"status": status, "detail": str(error)}
    except Exception as error:  # what breaks is a result; the others go on
        detail = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    release(device)
    return None, {"status": "error", "detail": detail}


def guarded(call: Callable[[], T], device: torch.device) -> T:
    """Returns ``call()``; without enough memory raises `OutOfMemory`, and nothing is left."""
    try:
        return call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = str(error).split("\n")[0][:160]
    # outside of the handler: the traceback held the tensors that did not fit
    release(device)
    raise OutOfMemory(message)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Says whether an allocator gave up, or caused an error that says something else."""
    while error is not None:
        is_full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if is_full or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def usual_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# ----------------------------------------------------------------------------------------- time
@dataclass(frozen=True)
class Timing:
    """Median of the samples and the half of them around it, in milliseconds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Sample:
    """The mean of steps that follow each other without a wait, in milliseconds."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        return self.forward + self.backward

    @property
    def alone(self) -> float:
        return self.forward


def burst(
    problem: Problem, number: int, repeats: int = 1, warm_up: int = 0, has_backward: bool = True
) -> Sample:
    """Times steps on one input set, forward and backward apart."""
    device = problem.device
    marks: list[list[object]] = []
    with torch.set_grad_enabled(has_backward):
        for _ in range(warm_up + repeats):
            mine = [_now(device)]
            problem.step(number, lambda mine=mine: mine.append(_now(device)), has_backward)
            marks.append([*mine, _now(device)])
    synchronize(device)
    timed = marks[warm_up:]
    forward = sum(_elapsed_ms(start, middle) for start, middle, _ in timed) / repeats
    backward = sum(_elapsed_ms(middle, end) for _, middle, end in timed) / repeats
    return Sample(forward, backward)


def _now(device: torch.device) -> object:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start) * 1e3
    return float(start.elapsed_time(end))


def interleaved(
    problems: Mapping[str, Problem],
    seconds: float,
    max_rounds: int = 50,
    has_backward: bool = True,
    agree: Callable[[int], int] = lambda mine: mine,
) -> dict[str, list[Sample] | OutOfMemory]:
    """Takes samples of every problem in rounds, each once in a round and on the next input set.

    Whatever changes during a run (clocks, heat, other programs) meets all alike, and every round
    has an order of its own: after a provider that waits for memory a chip is cooler than after
    one that multiplies. Every problem gets about ``seconds``, and at least three rounds where
    ``max_rounds`` allows. One round is for steps that take long: each problem's first step counts.
    Ranks that share a problem ``agree`` on how often a step is repeated, or would wait for each
    other.
    """
    results: dict[str, list[Sample] | OutOfMemory] = {}
    takes: dict[str, Callable[[int], None]] = {}
    rounds: dict[str, int] = {}

    def take(name: str, number: int, repeats: int, warm_up: int) -> None:
        samples, problem = results[name], problems[name]
        call = partial(burst, problem, number, repeats, warm_up, has_backward)
        if isinstance(samples, list):
            try:
                agree(0)  # ranks begin together
                samples.append(guarded(call, problem.device))
            except OutOfMemory as error:
                results[name] = error

    for name in problems:
        results[name] = []
        take(name, 0, 1, 0)  # may compile: a step that says nothing about the next
        if max_rounds == 1:
            continue
        take(name, 0, 1, 0)
        first = results[name]
        if isinstance(first, OutOfMemory):
            continue
        step_ms = max(first[-1].step, 1e-3)
        repeats, warm_up = min(50, agree(math.ceil(SHORT_MS / step_ms))), 0
        if repeats > 1:
            warm_up = min(10, agree(math.ceil(WARM_UP_MS / step_ms)))
        number = round(seconds * 1e3 / (step_ms * (repeats + warm_up)))
        rounds[name] = agree(min(max_rounds, max(3, number)))
        results[name] = []
        takes[name] = partial(take, name, repeats=repeats, warm_up=warm_up)
    interleaved_calls(takes, rounds)
    return results


def interleaved_calls(
    takes: Mapping[str, Callable[[int], T]], rounds: int | Mapping[str, int]
) -> dict[str, list[T]]:
    """Calls each in rounds that have an order of their own; returns what each call gave."""
    found: dict[str, list[T]] = {name: [] for name in takes}
    last = rounds if isinstance(rounds, int) else max(rounds.values(), default=0)
    for number in range(last):
        for name in random.Random(number).sample(list(takes), len(takes)):
            if isinstance(rounds, int) or number < rounds[name]:
                found[name].append(takes[name](number))
    return found


# --------------------------------------------------------------------------------------- memory
def peak_mib(call: Callable[[], object], device: torch.device) -> float:
    """Returns the most memory alive during a call beyond what was alive before, in MiB.

    On a GPU the caching allocator counts. On the CPU the profiler records every allocation and
    release of a tensor, which is exact and unlike the resident set size has no noise, but makes
    the call slower: never time and measure memory in one call.
    """
    release(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    with warnings.catch_warnings():
        # of events that other cycles would have; to keep those takes several times the call itself
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            call()
    current = highest = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            highest = max(highest, current)
    return highest / MIB


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Makes allocations beyond the limit fail: running out of memory must not end the machine."""
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


# -------------------------------------------------------------------------------------- machine
def describe(device: torch.device, commit: str = "") -> dict[str, str]:
    """Returns device, driver, versions and commit, as text: the head of every record."""
    about = {"device": device_name(device)}
    if device.type == "cuda":
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        about |= {"driver": driver.split("\n")[0], "cuda": str(torch.version.cuda)}
    else:
        about["threads"] = str(torch.get_num_threads())
    about |= {"torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "transformers", "liger_kernel", "trl"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            about[package] = metadata.version(package.replace("_", "-"))
    return about | {"commit": commit or current_commit(), "date": date.today().isoformat()}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo")
    text = known.read_text() if known.exists() else ""
    model = next(iter(re.findall(r"(?m)^model name\s*:\s*(.*?)\s*$", text)), "")
    return f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def current_commit() -> str:
    """Returns the short hash, with a plus when files differ; "unknown" outside of a clone."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD")
    tracked = ("torch_streamkl", "fx_passes", "bench/*.py")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", *tracked)
    return commit + ("+" if changed else "") if commit else "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
