"""Training steps by every provider, in rounds: what `bench.short_steps` is made of.

A step is both models' forward, the loss and the student's backward, and the optimiser where a step
has one. Every provider has models of its own with the same weights. All are interleaved, or where
their models do not fit side by side one follows the other. "host ms" is how long a step keeps the
host alone: issued while the device waits.

A provider passes the gate when the gradients of its first step, against float64, are at most twice
as far off as those of eager code, plus one rounding; one that does not pass is red. Where models
do not fit side by side float64 does not either: there the losses stand next to each other.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import cuda_graphs, measure, table
from bench.accuracy import Truth, total_error
from bench.models import TrainingStep
from bench.providers import with_graphs, with_streamkl
from bench.records import Run

Loss = Callable[..., Tensor]
Row = dict[str, Any]
UNTIMED = {"status": "untimed", "detail": "compiled and judged"}
PROFILED = 3  # steps
WAIT_CYCLES = 60_000_000  # of the device, about 35 ms: longer than the host needs for a step


PROVIDERS: dict[str, Callable[[Loss], Loss]] = {
    "eager": lambda loss_of: loss_of,
    "inductor": lambda loss_of: torch.compile(loss_of, dynamic=False),
    "streamkl": with_streamkl,
    "streamkl-any-order": lambda f: with_streamkl(f, **{"streamkl.deterministic": False}),
    "inductor-graphs": cuda_graphs.inductor,
    "streamkl-graphs": with_graphs,
}
GRAPH_PROVIDERS = ("inductor-graphs", "streamkl-graphs")
ON_REQUEST = ("eager", "streamkl-any-order")


def default_providers(device: torch.device) -> list[str]:
    """All that can run on the device, but for those that are named when they are wanted."""
    left_out = ON_REQUEST + (GRAPH_PROVIDERS if device.type == "cpu" else ())
    return [p for p in PROVIDERS if p not in left_out]


@dataclass(frozen=True)
class Schedule:
    """How steps are timed."""

    device: torch.device
    rounds: int  # 0 compiles and judges, which fills Inductor's caches
    repeats: int = 0  # steps of a sample; 0: as many as take `BURST_S`
    profiles: bool = False


class Contender:
    """One provider's models, optimiser and compiled loss."""

    def __init__(self, name: str, step: TrainingStep, device: torch.device) -> None:
        self.name, self.device, self.context = name, device, step.context
        self.student, self.teacher = step.models(device)
        self.student.train()
        self.optimizer = step.optimizer(self.student)
        self.clear = (self.optimizer or self.student).zero_grad
        self.loss_of = PROVIDERS[name](step.loss(self.student, self.teacher))

    def gradients(self, batch: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """Loss and gradients of the weights as they are."""
        loss = self.backward(batch)
        used = [p.grad for p in self.student.parameters() if p.grad is not None]
        return loss.item(), [g.clone() for g in used]

    def step(self, batch: Sequence[Tensor]) -> Tensor:
        loss = self.backward(batch)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def timed(self, batch: Sequence[Tensor], steps: int) -> float:
        """Milliseconds of a step, of several that follow each other without a wait."""
        self.step(batch)
        return measure.host_seconds(lambda: self.step(batch), self.device, steps) * 1e3

    def host_ms(self, batch: Sequence[Tensor]) -> float:
        """Milliseconds until a step is issued to a device that does not start it yet."""
        measure.synchronize(self.device)
        torch.cuda._sleep(WAIT_CYCLES)
        start = time.perf_counter()
        self.step(batch)
        elapsed = (time.perf_counter() - start) * 1e3
        measure.synchronize(self.device)
        return elapsed

    def backward(self, batch: Sequence[Tensor]) -> Tensor:
        self.clear(set_to_none=True)
        with self.context(self.device):
            loss = self.loss_of(*batch)
        loss.backward()
        return loss


def gate_of(step: TrainingStep, batch: Sequence[Tensor], device: torch.device) -> Truth:
    """Exact gradients of a batch, and what a provider's may be off by."""
    eager = Contender("eager", step, device)
    student, teacher = (copy.deepcopy(x).double() for x in (eager.student, eager.teacher))
    exact = step.loss(student, teacher)(*batch)
    exact.backward()
    expected = [p.grad for p in student.parameters() if p.grad is not None]
    loss, gradients = eager.gradients(batch)
    off, dtype = abs(loss - exact.item()), measure.usual_dtype(device)
    return Truth.of((exact.item(), expected), (off, gradients), dtype, total_error)


def run_step(
    step: TrainingStep,
    seqlen: int,
    batch_size: int,
    providers: list[str],
    schedule: Schedule,
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """A row for every provider, whatever happens to it; ``keep`` gets those that there are."""
    device = schedule.device
    torch._dynamo.reset()
    measure.release(device)
    batch = step.batch(batch_size, seqlen, device)
    gate = gate_of(step, batch, device) if step.is_side_by_side else None
    measure.release(device)
    rows: dict[str, Row] = {}

    def run(names: list[str]) -> None:
        contenders: dict[str, Contender] = {}
        for name in names:
            head = step.names(batch_size) | {"provider": name, "context": seqlen}
            row = rows[name] = head | UNTIMED
            made, why = measure.attempt(partial(_prepared, name, step, batch, gate, row), device)
            row |= why
            if made is not None:
                contenders[name] = made
                print(f"{name}: compiled after {row['compile_s']:.0f} s", flush=True)
            keep(list(rows.values()))
        _, why = measure.attempt(lambda: _interleaved(contenders, rows, batch, schedule), device)
        for name in contenders:
            rows[name] |= why
        keep(list(rows.values()))

    def forget() -> None:
        torch._dynamo.reset()  # drops the graphs
        measure.release(device)

    for names in [providers] if step.is_side_by_side else [[p] for p in providers]:
        run(names)
        forget()
    for name, row in rows.items():
        if "graph_replays" in row and "peak_mib" not in row:
            # All graphs of a device share one memory pool: while another provider's are there,
            # nobody can say whose its memory is. So each is made once more and alone.
            row |= _memory(_prepared(name, step, batch, None, {}), batch)
            forget()
    return list(rows.values())


def _interleaved(
    contenders: dict[str, Contender],
    rows: dict[str, Row],
    batch: Sequence[Tensor],
    schedule: Schedule,
) -> None:
    """Times the contenders in rounds, and writes what they took into their rows."""
    samples: dict[str, Callable[[int], float]] = {}
    for name, contender in contenders.items() if schedule.rounds else ():
        repeats = schedule.repeats or math.ceil(measure.BURST_S * 1e3 / contender.timed(batch, 1))
        samples[name] = lambda _, c=contender, repeats=repeats: c.timed(batch, repeats)
    for name, times in measure.interleaved_calls(samples, schedule.rounds).items():
        timing = measure.Timing.of(times)
        if rows[name]["status"] == "untimed":
            rows[name] |= {"status": "ok", "detail": ""}
        rows[name] |= vars(timing) | {
            "step_ms": timing.median_ms,
            "tokens_per_s": batch[0].numel() / timing.median_ms * 1e3,
            "samples": len(times),
        }
    if schedule.device.type == "cuda":
        alone = {n: lambda _, c=contenders[n]: c.host_ms(batch) for n in samples}
        for name, times in measure.interleaved_calls(alone, schedule.rounds).items():
            rows[name]["host_ms"] = statistics.median(times)
    if schedule.profiles:
        for name, contender in contenders.items():
            print(f"{name}: {PROFILED} steps\n{_profile(contender, batch)}", flush=True)


def _prepared(
    name: str, step: TrainingStep, batch: Sequence[Tensor], gate: Truth | None, row: Row
) -> Contender:
    """A provider that has compiled, been judged, and weighed where no other graphs are there."""
    device = batch[0].device
    if name in GRAPH_PROVIDERS:
        cuda_graphs.check(device)
    start = time.perf_counter()
    contender = Contender(name, step, device)
    loss, gradients = contender.gradients(batch)
    row |= {"loss": loss, "compile_s": time.perf_counter() - start}
    if gate is not None:
        row |= gate.judge(loss, gradients).row()
    del gradients
    if name in GRAPH_PROVIDERS:
        row["graph_replays"] = cuda_graphs.record(lambda: contender.step(batch))
    if name not in GRAPH_PROVIDERS or not step.is_side_by_side:
        row |= _memory(contender, batch)
    return contender


def _memory(contender: Contender, batch: Sequence[Tensor]) -> Row:
    """The peak of a step, and what its graphs reserve besides."""
    contender.step(batch)  # makes the optimiser's state
    contender.clear(set_to_none=True)
    peak = measure.peak_mib(lambda: contender.step(batch), contender.device)
    if contender.name not in GRAPH_PROVIDERS:
        return {"peak_mib": peak}
    pool = cuda_graphs.pools_bytes() / measure.MIB
    return {"graph_pool_mib": pool, "peak_mib": peak + pool}


def _profile(contender: Contender, batch: Sequence[Tensor]) -> str:
    """What takes most of the host's time, ours going through the dispatcher then, and a GPU's."""
    activities = {torch.profiler.ProfilerActivity.CPU}
    orders = ["self_cpu_time_total"]
    if contender.device.type == "cuda":
        activities.add(torch.profiler.ProfilerActivity.CUDA)
        orders.append("self_device_time_total")
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            contender.step(batch)
        measure.synchronize(contender.device)
    return "\n".join(profile.key_averages().table(order, 25, 60) for order in orders)


def line(row: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """One row for the terminal."""
    more = f", host ms {row['host_ms']:.2f}" if "host_ms" in row else ""
    if "gradient_error" in row:
        more += f", gradient error {row['gradient_error']:.1e} of {row['gradient_budget']:.1e}"
    if row["status"] == "ok" and reference is not None and reference["status"] == "ok":
        more += f", {row['step_ms'] / reference['step_ms']:.2f} of inductor's time"
        more += f", {row['peak_mib'] / reference['peak_mib']:.2f} of its memory"
    return table.end_to_end_line(row) + more


def run_all(
    steps: Sequence[TrainingStep],
    contexts: Sequence[int],
    batch_size: int,
    providers: list[str],
    schedule: Schedule,
    run: Run,
    path: Path,
) -> None:
    """Steps at every context; where providers follow each other each goes as far as it fits."""
    for step in steps:
        fitting = list(providers)
        for context in contexts:
            before = list(run.end_to_end)

            def keep(rows: list[Row], before: list[Row] = before) -> None:
                run.end_to_end = before + rows
                run.save(path)

            rows = run_step(step, context, batch_size, fitting, schedule, keep)
            keep(rows)
            reference = next((r for r in rows if r["provider"] == "inductor"), None)
            print("\n".join(line(row, reference) for row in rows), flush=True)
            if not step.is_side_by_side:
                fitting = [r["provider"] for r in rows if r["status"] in ("ok", "red", "untimed")]
