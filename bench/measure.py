"""Time and memory of a training step: the loss, then the gradients of the student's two inputs."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from bench.cases import Inputs
from bench.memory import peak_bytes

T = TypeVar("T")

MIB = 2**20
SHORT_MS = 50.0  # steps shorter than this are repeated within a sample
MODES = ("forward", "backward", "step")
ALONE = "alone"  # one more where asked for: a forward without gradients, after no backward
QUEUED_MS = 10.0  # of waiting that the device does while the host issues short calls
BURST_S = 0.1  # of steps that follow each other without a wait, as in a training loop
LONG_MS = 100.0  # timed once more after the first time
WARM_UP_MS = 10.0  # of steps before them that do not count: a GPU's clocks fall while it waits


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    forward_ms: float
    backward_ms: float

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    def ms(self, mode: str) -> float:
        """Of one of `MODES`, or `ALONE`: the forward of a sample without a backward."""
        time: float = getattr(self, f"{'forward' if mode == ALONE else mode}_ms")
        return time


@dataclass(frozen=True)
class Timing:
    """Median of the samples and the half of them around it."""

    median_ms: float
    low_ms: float  # first quartile
    high_ms: float  # third quartile

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


class OutOfMemory(Exception):
    """The step did not fit; the original message."""


class Unavailable(Exception):
    """A provider cannot compute a case: a package is missing, or it has no such form."""


def step(loss_fn: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Loss and gradients."""
    loss = loss_fn(*inputs)
    return loss.detach(), torch.autograd.grad(loss, inputs[:2])


def attempt(call: Callable[[], T], device: torch.device) -> tuple[T | None, dict[str, str]]:
    """What a call gives; or None and why it is a result all the same: a status and a detail."""
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
    """``call()``; without enough memory `OutOfMemory` is raised and nothing is left after."""
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
    """Whether an allocator gave up, or caused an error that says something else."""
    while error is not None:
        if isinstance(
            error, torch.OutOfMemoryError | MemoryError
        ) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


def usual_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -------------------------------------------------------------------------------------- time
def sample(
    loss_fn: Callable[..., Tensor],
    inputs: Inputs,
    repeats: int = 1,
    warm_up: int = 0,
    has_backward: bool = True,
) -> Sample:
    """Forward and backward of ``repeats`` steps, by CUDA events or by the host's clock.

    Without ``has_backward`` no gradients are recorded, either.
    The first ``warm_up`` steps of the burst do not count. Nothing waits between them and the
    others: a GPU that is busy when a step is issued is not charged for the host's work.
    """
    device = inputs[0].device
    marks: list[tuple[object, object, object]] = []
    with torch.set_grad_enabled(has_backward):
        for _ in range(warm_up + repeats):
            start = _now(device)
            loss = loss_fn(*inputs)
            middle = _now(device)
            if has_backward:
                torch.autograd.grad(loss, inputs[:2])
            marks.append((start, middle, _now(device)))
    synchronize(device)
    timed = marks[warm_up:]
    forward = sum(_elapsed_ms(start, middle) for start, middle, _ in timed) / repeats
    backward = sum(_elapsed_ms(middle, end) for _, middle, end in timed) / repeats
    return Sample(forward, backward)


@dataclass(frozen=True)
class Timed:
    """A loss, the input sets that it is called with in turn, and what surrounds its calls."""

    loss_fn: Callable[..., Tensor]
    inputs: Sequence[Inputs]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    has_backward: bool = True  # or the forward alone, without gradients

    def burst(self, number: int, repeats: int = 1, warm_up: int = 0) -> Sample:
        """A sample on the input set whose turn it is; raises `OutOfMemory`."""
        inputs = self.inputs[number % len(self.inputs)]
        with self.context():  # entered before the clock starts
            return guarded(
                lambda: sample(self.loss_fn, inputs, repeats, warm_up, self.has_backward),
                inputs[0].device,
            )


def interleaved(
    entries: Mapping[str, Timed], seconds: float, max_rounds: int = 50
) -> dict[str, list[Sample] | OutOfMemory]:
    """Samples of every entry, in rounds: each once on the next of its input sets.

    Whatever changes during a run (clocks, heat, other programs) meets all alike, and every round
    has an order of its own: after a provider that waits for memory a chip is cooler than after
    one that multiplies. Every entry gets about ``seconds``, at least three rounds.
    """
    results: dict[str, list[Sample] | OutOfMemory] = {}
    rounds: dict[str, int] = {}
    takes: dict[str, Callable[[int], None]] = {}

    def take(name: str, number: int, repeats: int, warm_up: int) -> None:
        samples = results[name]
        if isinstance(samples, list):
            try:
                samples.append(entries[name].burst(number, repeats, warm_up))
            except OutOfMemory as error:
                results[name] = error

    for name, entry in entries.items():
        try:
            entry.burst(0)  # may compile: a step that says nothing about the next
            first = entry.burst(0)
        except OutOfMemory as error:
            results[name] = error
            continue
        step_ms = max(first.step_ms, 1e-3)
        repeats, warm_up = min(50, math.ceil(SHORT_MS / step_ms)), 0
        if repeats > 1:
            warm_up = min(10, math.ceil(WARM_UP_MS / step_ms))
        cost_ms = step_ms * (repeats + warm_up)
        rounds[name] = max(3, min(max_rounds, round(seconds * 1e3 / cost_ms)))
        results[name] = []
        takes[name] = partial(take, name, repeats=repeats, warm_up=warm_up)
    interleaved_calls(takes, rounds)
    return results


def interleaved_calls(
    takes: Mapping[str, Callable[[int], T]], rounds: int | Mapping[str, int]
) -> dict[str, list[T]]:
    """What each gives when its turn comes, in rounds that have an order of their own each."""
    found: dict[str, list[T]] = {name: [] for name in takes}
    last = rounds if isinstance(rounds, int) else max(rounds.values(), default=0)
    for number in range(last):
        for name in random.Random(number).sample(list(takes), len(takes)):
            if isinstance(rounds, int) or number < rounds[name]:
                found[name].append(takes[name](number))
    return found


def _now(device: torch.device) -> object:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(start: object, end: object) -> float:
    if isinstance(start, torch.cuda.Event):
        return float(start.elapsed_time(end))
    assert isinstance(start, float)
    assert isinstance(end, float)
    return (end - start) * 1e3


def median_ms(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Time of a call, issued while the device waits: what the host takes is not in it.

    A call that is short is timed together with others, a long one once.
    """
    estimate = _burst_ms(call, device, 1)
    repeats = 1
    if estimate < SHORT_MS:
        repeats = 20 if device.type == "cuda" else 2
    times = []
    for _ in range(rounds if estimate < LONG_MS else 1):
        if device.type == "cuda":
            torch.cuda._sleep(int(QUEUED_MS * 1.7e6))  # cycles
        times.append(_burst_ms(call, device, repeats))
    return statistics.median(times)


def _burst_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    start = _now(device)
    for _ in range(repeats):
        call()
    end = _now(device)
    synchronize(device)
    return _elapsed_ms(start, end) / repeats


def host_seconds(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Time of a call by the host's clock, of calls that follow each other without a wait."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


# ------------------------------------------------------------------------------------ memory
def peak_mib(call: Callable[[], object], device: torch.device) -> float:
    """Most memory alive during a call beyond what was alive before, in MiB; see `peak_bytes`."""
    release(device)
    return peak_bytes(call, device) / MIB
