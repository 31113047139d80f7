"""Short training steps, where the host's share counts: `python -m bench.short_steps`.

A step is both models' forward, the loss, the student's backward and AdamW, under bfloat16 autocast
on a GPU and in float32 on a CPU (short_models.py). Every provider has models of its own with the
same weights, and all take turns in rounds. "host ms" is how long a step keeps the host alone:
issued while the device waits. Behind the steps the heads alone follow, as `python -m bench`
measures them. A run can be cut into pieces: ``--steps tinybert --seqlens 128 --providers inductor
streamkl --seconds 0`` is one pair, rows are saved as they come, and what one run has compiled the
next finds in Inductor's caches.

A provider passes the gate when the gradients of its first step, against float64, are at most twice
as far off as those of eager code, plus one rounding; one that does not pass is red.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import cases, ceilings, cuda_graphs, machine, table
from bench.__main__ import measure_all
from bench.end_to_end import GRAPH_PROVIDERS, with_streamkl
from bench.measure import (
    MIB,
    OutOfMemory,
    Timing,
    guarded,
    host_seconds,
    peak_mib,
    release,
    synchronize,
)
from bench.providers import choose
from bench.records import Run, command_line
from bench.runner import Settings
from bench.short_models import STEPS, Batch, ShortStep, in_float64

Loss = Callable[..., Tensor]
UNTIMED = {"status": "untimed", "detail": "compiled and judged"}
PROFILED = 3  # steps
WAIT_CYCLES = 60_000_000  # of the device, about 35 ms: longer than the host needs for a step
PROVIDERS: dict[str, Callable[[Loss], Loss]] = {
    "eager": lambda loss_of: loss_of,
    "inductor": lambda loss_of: torch.compile(loss_of, dynamic=False),
    "streamkl": with_streamkl,
    "inductor-graphs": cuda_graphs.inductor,
    "streamkl-graphs": lambda f: cuda_graphs.marked(with_streamkl(f, **cuda_graphs.options())),
}
HEADS_PROVIDERS = ["inductor", "direct", "streamkl", "inductor-graphs", "streamkl-graphs"]


class Contender:
    """One provider's models, optimiser and compiled loss."""

    def __init__(self, name: str, step: ShortStep, device: torch.device) -> None:
        self.name, self.device = name, device
        self.student, self.teacher = step.models(device)
        self.student.train()
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5, fused=on_gpu)
        self.loss_of = PROVIDERS[name](step.loss(self.student, self.teacher))  # type: ignore[arg-type]
        self.milliseconds: list[float] = []
        self.host: list[float] = []

    def gradients(self, batch: Batch) -> tuple[float, list[Tensor]]:
        """Loss and gradients of the weights as they are."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()
        return loss.item(), [p.grad.clone() for p in self._used()]

    def step(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def timed(self, batch: Batch, steps: int) -> float:
        """Milliseconds of a step, of several that follow each other without a wait."""
        self.step(batch)
        return host_seconds(lambda: self.step(batch), self.device, steps) * 1e3

    def host_ms(self, batch: Batch) -> float:
        """Milliseconds until a step is issued to a device that does not start it yet."""
        synchronize(self.device)
        torch.cuda._sleep(WAIT_CYCLES)
        start = time.perf_counter()
        self.step(batch)
        elapsed = (time.perf_counter() - start) * 1e3
        synchronize(self.device)
        return elapsed

    def _loss(self, batch: Batch) -> Tensor:
        with _autocast(self.device):
            return self.loss_of(batch.ids, batch.mask, batch.labels)

    def _used(self) -> list[Any]:
        return [p for p in self.student.parameters() if p.grad is not None]


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


class Gate:
    """Exact gradients of a batch, and what a provider's may be off by."""

    def __init__(self, step: ShortStep, batch: Batch, device: torch.device) -> None:
        eager = Contender("eager", step, device)
        student, teacher = in_float64(eager.student), in_float64(eager.teacher)
        exact = step.loss(student, teacher)(batch.ids, batch.mask, batch.labels)
        exact.backward()
        self.loss = exact.item()
        self.gradients = [p.grad for p in student.parameters() if p.grad is not None]
        loss, gradients = eager.gradients(batch)
        rounding = torch.finfo(torch.bfloat16 if device.type == "cuda" else torch.float32).eps
        self.budget = 2 * self.error(gradients) + rounding / 2
        self.loss_budget = 2 * abs(loss / self.loss - 1) + rounding

    def error(self, gradients: list[Tensor]) -> float:
        """Of all gradients together, relative in norm."""
        pairs = list(zip(gradients, self.gradients, strict=True))
        off = torch.stack([(g.double() - e).square().sum() for g, e in pairs]).sum()
        norm = torch.stack([e.square().sum() for _, e in pairs]).sum()
        return float((off / norm).sqrt())

    def judge(self, loss: float, gradients: list[Tensor]) -> dict[str, Any]:
        """What a row says of a provider's first step."""
        error, loss_error = self.error(gradients), abs(loss / self.loss - 1)
        row: dict[str, Any] = {
            "gradient_error": error, "gradient_budget": self.budget,
            "loss_error": loss_error, "loss_budget": self.loss_budget,
        }  # fmt: skip
        if error <= self.budget and loss_error <= self.loss_budget:  # NaN is red
            return row
        off = f"gradients off by {error:.1e} (allowed {self.budget:.1e})"
        return row | {"status": "red", "detail": f"loss off by {loss_error:.1e}, {off}"}


def run_step(
    step: ShortStep,
    seqlen: int,
    batch_size: int,
    providers: list[str],
    settings: tuple[torch.device, int, int, bool],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row for every provider, whatever happens to it; ``keep`` gets those that there are.

    Without rounds every provider is compiled and judged, which fills Inductor's caches.
    """
    device = settings[0]
    torch._dynamo.reset()
    release(device)
    batch = Batch.of(batch_size, seqlen, device, seqlen)
    gate = Gate(step, batch, device)
    release(device)
    rows: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Contender] = {}
    for name in providers:
        rows[name] = {
            "pair": f"{step.source}, batch {batch_size}",
            "objective": f"{step.objective} ({step.name})",
            "provider": name,
            "context": seqlen,
            **UNTIMED,
        }
        try:
            contenders[name], row = guarded(  # type: ignore[misc]
                lambda name=name: _prepared(name, step, batch, gate), device
            )
        except OutOfMemory as error:
            rows[name] |= {"status": "oom", "detail": str(error)}
        except Exception as error:  # a provider that breaks is a result
            detail = f"{type(error).__name__}: {error}"[:300]
            rows[name] |= {"status": "error", "detail": detail}
        else:
            rows[name] |= row
            print(f"{name}: compiled after {row['compile_s']:.0f} s", flush=True)
        keep(list(rows.values()))
    _take_turns(contenders, rows, batch, settings)
    keep(list(rows.values()))
    with_graphs = [name for name in contenders if name in GRAPH_PROVIDERS]
    contenders.clear()
    for name in with_graphs:
        rows[name] |= _memory_of_graphs(name, step, batch)
    return list(rows.values())


def _take_turns(
    contenders: dict[str, Contender],
    rows: dict[str, dict[str, Any]],
    batch: Batch,
    settings: tuple[torch.device, int, int, bool],
) -> None:
    """Times the contenders in rounds, and writes what they took into their rows."""
    device, rounds, steps, profiles = settings
    for number in range(rounds):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            contender = contenders[name]
            contender.milliseconds.append(contender.timed(batch, steps))
            if device.type == "cuda":
                contender.host.append(contender.host_ms(batch))
    for name, contender in contenders.items():
        if rounds:
            if rows[name]["status"] == "untimed":
                rows[name] |= {"status": "ok", "detail": ""}
            rows[name] |= _timing(contender, batch)
        if profiles:
            print(f"{name}: {PROFILED} steps\n{_profile(contender, batch)}", flush=True)


def _prepared(
    name: str, step: ShortStep, batch: Batch, gate: Gate
) -> tuple[Contender, dict[str, Any]]:
    """A provider that has compiled and been judged, and weighed unless it has CUDA graphs."""
    device = batch.ids.device
    start = time.perf_counter()
    contender = Contender(name, step, device)
    loss, gradients = contender.gradients(batch)
    row = {"loss": loss, "compile_s": time.perf_counter() - start} | gate.judge(loss, gradients)
    del gradients
    if name in GRAPH_PROVIDERS:
        row["graph_replays"] = cuda_graphs.record(lambda: contender.step(batch))
    else:
        row["peak_mib"] = _peak_mib(contender, batch)
    return contender, row


def _memory_of_graphs(name: str, step: ShortStep, batch: Batch) -> dict[str, Any]:
    """The peak of a provider with CUDA graphs, made once more and alone.

    All graphs of a device share one memory pool: while another provider's are there, nobody can
    say whose its memory is.
    """
    device = batch.ids.device
    torch._dynamo.reset()  # drops the graphs
    release(device)
    contender = Contender(name, step, device)
    contender.gradients(batch)
    cuda_graphs.record(lambda: contender.step(batch))
    pool = cuda_graphs.pools_bytes() / MIB
    return {"graph_pool_mib": pool, "peak_mib": _peak_mib(contender, batch) + pool}


def _peak_mib(contender: Contender, batch: Batch) -> float:
    contender.step(batch)  # makes the optimiser's state
    contender.optimizer.zero_grad(set_to_none=True)
    return peak_mib(lambda: contender.step(batch), contender.device)


def _profile(contender: Contender, batch: Batch) -> str:
    """What takes most of the host's time, ours going through the dispatcher then, and a GPU's."""
    activities = {torch.profiler.ProfilerActivity.CPU}
    orders = ["self_cpu_time_total"]
    if contender.device.type == "cuda":
        activities.add(torch.profiler.ProfilerActivity.CUDA)
        orders.append("self_device_time_total")
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            contender.step(batch)
        synchronize(contender.device)
    return "\n".join(profile.key_averages().table(order, 25, 60) for order in orders)


def _timing(contender: Contender, batch: Batch) -> dict[str, Any]:
    timing = Timing.of(contender.milliseconds)
    row = {
        "step_ms": timing.median_ms,
        "low_ms": timing.low_ms,
        "high_ms": timing.high_ms,
        "tokens_per_s": batch.ids.numel() / timing.median_ms * 1e3,
        "samples": len(contender.milliseconds),
    }
    if contender.host:
        row["host_ms"] = statistics.median(contender.host)
    return row


def heads(device: torch.device) -> list[cases.Case]:
    """The heads alone, at the same lengths."""
    bert = replace(cases.BERT_BASE, batch=32 if device.type == "cuda" else 1)
    llama = [replace(cases.LLAMA_8B, seqlen=n) for n in (1024, 2048)]
    return [*(replace(bert, seqlen=n) for n in (128, 512)), *llama]


def line(row: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """One row for the terminal."""
    more = f", host ms {row['host_ms']:.2f}" if "host_ms" in row else ""
    if "gradient_error" in row:
        more += f", gradient error {row['gradient_error']:.1e} of {row['gradient_budget']:.1e}"
    if row["status"] == "ok" and reference is not None and reference["status"] == "ok":
        more += f", {row['step_ms'] / reference['step_ms']:.2f} of inductor's time"
        more += f", {row['peak_mib'] / reference['peak_mib']:.2f} of its memory"
    return table.end_to_end_line(row) + more


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.short_steps", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", nargs="*", choices=tuple(STEPS), default=list(STEPS))
    parser.add_argument("--seqlens", nargs="*", type=int, default=[128, 512])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--providers", nargs="*", choices=tuple(PROVIDERS))
    parser.add_argument(
        "--rounds", type=int, default=15, help="0 compiles and judges: later runs find it cached"
    )
    parser.add_argument("--repeats", type=int, default=10, help="steps of a sample")
    parser.add_argument("--profile", action="store_true", help="print what host and GPU do")
    parser.add_argument("--seconds", type=float, default=0.3, help="for a provider of the heads")
    parser.add_argument("--heads", nargs="*", default=[], help="as --cases of `python -m bench`")
    parser.add_argument("--json", type=Path, default=machine.ROOT / "out" / "short-steps.json")
    parser.add_argument("--commit", default="")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    run = Run(
        command=command_line("bench.short_steps", sys.argv[1:] if argv is None else argv),
        machine=machine.describe(device, options.commit),
        dtype="bfloat16" if on_gpu else "float32",
        ceilings={},
    )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    chosen = options.providers or [
        p for p in PROVIDERS if p != "eager" and (on_gpu or p not in GRAPH_PROVIDERS)
    ]
    for name in options.steps:
        for seqlen in options.seqlens:
            settings = (device, options.rounds, options.repeats, options.profile)
            before = list(run.end_to_end)

            def keep(rows: list[dict[str, Any]], before: list[dict[str, Any]] = before) -> None:
                run.end_to_end = before + rows
                run.save(options.json)

            rows = run_step(STEPS[name], seqlen, options.batch, chosen, settings, keep)
            keep(rows)
            reference = next((r for r in rows if r["provider"] == "inductor"), None)
            print("\n".join(line(row, reference) for row in rows), flush=True)
    if options.seconds:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        run.ceilings = {
            "matmul_tflops": ceilings.matmul_tflops(device, dtype),
            "copy_gbytes": ceilings.copy_gbytes(device),
        }
        providers = [
            p for p in choose(options.providers or HEADS_PROVIDERS, []) if device.type in p.devices
        ]
        settings_of_heads = Settings(device, dtype, options.seconds)
        chosen_heads = cases.select(heads(device), options.heads)
        measure_all(chosen_heads, providers, settings_of_heads, run, options.json)
    run.is_complete = True
    run.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
