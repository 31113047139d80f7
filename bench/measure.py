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

from bench.case import Problem, Unavailable

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
SHORT_MS = 50.0  # steps shorter than this are repeated within a sample
WARM_UP_MS = 10.0  # of steps before them that do not count: a GPU's clocks fall while it waits
MODES = ("forward", "backward", "step")
Sample = dict[str, float]  # milliseconds by mode, the mean of steps that follow each other
Failure = dict[str, str]  # why there is no result, as fields of a row


# ------------------------------------------------------------------------------------- failures
def attempt(call: Callable[[], T], device: torch.device) -> tuple[T | None, Failure]:
    """Returns a call's result; or None and why it is a result all the same."""
    try:
        return call(), {}
    except Exception as error:  # what breaks is a result; the others go on
        status, detail = "error", f"{type(error).__name__}: {error}"
        if isinstance(error, Unavailable) or is_out_of_memory(error):
            status = "unavailable" if isinstance(error, Unavailable) else "oom"
            detail = str(error)
    release(device)  # outside of the handler: the traceback held the tensors that did not fit
    return None, {"status": status, "detail": detail.split("\n")[0][:300]}


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


def burst(problem: Problem, number: int, repeats: int = 1, warm_up: int = 0) -> Sample:
    """Times steps on one input set, forward and backward apart."""
    device = problem.device
    marks: list[list[object]] = []
    for _ in range(warm_up + repeats):
        mine = [_now(device)]
        problem.step(number, lambda mine=mine: mine.append(_now(device)))
        marks.append([*mine, _now(device)])
    synchronize(device)
    timed = marks[warm_up:]
    forward = sum(_elapsed_ms(start, middle) for start, middle, _ in timed) / repeats
    backward = sum(_elapsed_ms(middle, end) for _, middle, end in timed) / repeats
    return {"forward": forward, "backward": backward, "step": forward + backward}


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
    agree: Callable[[int], int] = lambda mine: mine,
) -> tuple[dict[str, list[Sample]], dict[str, Failure]]:
    """Takes samples of every problem in rounds, each once in a round and on the next input set.

    Whatever changes during a run (clocks, heat, other programs) meets all alike, and every round
    has an order of its own: after a provider that waits for memory a chip is cooler than after
    one that multiplies. Every problem gets about ``seconds``, and at least three rounds where
    ``max_rounds`` allows. One round is for steps that take long: each problem's first step counts.
    Ranks that share a problem ``agree`` on how often a step is repeated, or would wait for each
    other.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in problems}
    failures: dict[str, Failure] = {}
    takes: dict[str, Callable[[int], None]] = {}
    rounds: dict[str, int] = {}

    def take(name: str, number: int, repeats: int = 1, warm_up: int = 0) -> None:
        if name not in failures:
            agree(0)  # ranks begin together
            call = partial(burst, problems[name], number, repeats, warm_up)
            sample, why = attempt(call, problems[name].device)
            if sample is None:
                failures[name] = why
            else:
                samples[name].append(sample)

    for name, taken in samples.items():
        take(name, 0)  # may compile: a step that says nothing about the next
        if max_rounds == 1:
            continue
        take(name, 0)
        if name in failures:
            continue
        step_ms = max(taken[-1]["step"], 1e-3)
        repeats, warm_up = min(50, agree(math.ceil(SHORT_MS / step_ms))), 0
        if repeats > 1:
            warm_up = min(10, agree(math.ceil(WARM_UP_MS / step_ms)))
        number = round(seconds * 1e3 / (step_ms * (repeats + warm_up)))
        rounds[name] = agree(min(max_rounds, max(3, number)))
        taken.clear()
        takes[name] = partial(take, name, repeats=repeats, warm_up=warm_up)
    for number in range(max(rounds.values(), default=0)):
        for name in random.Random(number).sample(list(takes), len(takes)):
            if number < rounds[name]:
                takes[name](number)
    return samples, failures


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


def limit_memory() -> None:
    """Makes allocations of a CPU fail before the machine runs out of memory."""
    try:
        import resource

        files = {"MemAvailable": "meminfo", "VmSize": "self/status"}
        texts = {key: Path("/proc", name).read_text() for key, name in files.items()}
    except (ImportError, OSError):
        return
    kib = {key: int(re.findall(rf"{key}:\s+(\d+)", text)[0]) for key, text in texts.items()}
    most = int(kib["VmSize"] + 0.9 * kib["MemAvailable"]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


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
    model = re.search(r"(?m)^model name\s*:\s*(.*?)\s*$", text)
    return f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores"


def current_commit() -> str:
    """Returns the short hash, with a plus when files differ; "unknown" outside of a clone."""
    git = ("git", "-C", str(ROOT))
    commit = _output(*git, "rev-parse", "--short=10", "HEAD")
    tracked = ("torch_streamkl", "fx_passes", "bench/*.py")
    changed = _output(*git, "status", "--porcelain", "--", *tracked)
    return commit + ("+" if changed else "") if commit else "unknown"


def _output(*command: str) -> str:
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=20
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
