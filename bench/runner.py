"""Runs a case: every provider is built, judged and weighed, then all are timed in rounds.

One runner for a CPU, one GPU, and ranks that share a problem.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import cuda_graphs, measure
from bench.case import Case, Problem, Truth, total_error
from bench.measure import MODES, Timing
from bench.providers import Provider
from bench.records import Row

BUDGET_OF_INPUTS = 2**31  # bytes: larger inputs get one set instead of three


def _same(mine: Any) -> Any:
    return mine


@dataclass(frozen=True)
class Settings:
    """How long and on what."""

    device: torch.device
    seconds: float = 2.0  # of timing per provider and case; 0 compiles and judges
    max_rounds: int = 50
    agree: Callable[[int], int] = _same  # ranks: the largest of all
    worst: Callable[[Row], Row] = _same  # ranks: the slowest, the largest, the farthest off


def run_case(
    case: Case,
    providers: list[Provider],
    settings: Settings,
    show: Callable[[str], None] = lambda _: None,
    keep: Callable[[list[Row]], None] = lambda _: None,
) -> list[Row]:
    """Returns a row for every provider, whatever happens to it; ``keep`` gets those there are."""
    device = settings.device
    _forget(device)
    rows = {p.name: _blank(case, p) for p in providers}
    shared, judge = None, _Judge(case)
    if case.is_shared:
        shared = case.problem(device)
        size = sum(x.nbytes for x in shared.sets[0])
        if size <= BUDGET_OF_INPUTS and device.type == "cuda":
            shared = case.problem(device, 3)
    if case.is_exact:
        show(f"{case.label}: float64")
        judge.truth = case.truth(shared or case.problem(device))
        measure.release(device)
    ready: dict[str, Problem] = {}
    graphs = [p for p in providers if p.graphs]
    for provider in graphs if len(graphs) > 1 else ():
        # all graphs of a process share one memory pool: each is weighed while it is alone
        row = rows[provider.name]
        measure.attempt(partial(_prepare, provider, judge, shared, row, device), device)
        _forget(device)
    for provider in providers:
        show(f"{case.label}: {provider.name}")
        row = rows[provider.name]
        weigh = not provider.graphs or len(graphs) == 1
        prepare = partial(_prepare, provider, judge, shared, row, device, weigh)
        problem, why = measure.attempt(prepare, device)
        vars(row).update(why)
        measure.release(device)
        if problem is not None:
            ready[provider.name] = problem
            if not case.fits_together:
                _time(ready, rows, settings)
                ready.clear()
                del problem
                _forget(device)
        keep(list(rows.values()))
    judge.truth = None  # its memory is the providers' now
    measure.release(device)
    show(f"{case.label}: timing")
    _time(ready, rows, settings)
    return [settings.worst(row) for row in rows.values()]


def _forget(device: torch.device) -> None:
    torch._dynamo.reset()  # drops graphs
    measure.release(device)


def _blank(case: Case, provider: Provider) -> Row:
    return Row(
        case.label, provider.name, case.section, case.sweep, case.shape(), case.source,
        gflop=_gflop(case.flops()),
    )  # fmt: skip


def _gflop(flops: tuple[float, float]) -> dict[str, float]:
    return {mode: x * 1e-9 for mode, x in zip(MODES, flops, strict=False)}


class _Judge:
    """Compares with exact results; with the first provider's where nobody has them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.truth: Truth | None = None

    def __call__(self, loss: float, gradients: list[Tensor]) -> dict[str, Any]:
        if self.case.is_exact and self.truth is not None:
            checked = loss if self.case.gate_scale == 1.0 else None
            return self.truth.judge(checked, self.case.gated(gradients))
        if self.truth is None:  # on the CPU: a GPU has room for one provider's
            budget = self.case.budget(gradients[0].device)
            on_cpu = [g.detach().cpu() for g in gradients]
            self.truth = Truth(loss, on_cpu, budget, budget, total_error)
        found = self.truth.judge(loss, gradients)
        if self.truth.gradient_budget < math.inf:
            return found
        return {k: v for k, v in found.items() if not k.endswith("budget")}  # there is none


def _prepare(
    provider: Provider, judge: _Judge, shared: Problem | None, row: Row, device: torch.device,
    weigh: bool = True,
) -> Problem:  # fmt: skip
    """Builds, runs the first step, judges it and weighs another."""
    naive = shared or judge.case.problem(device)
    start = time.perf_counter()
    problem = provider.of(judge.case, naive)
    loss, gradients = problem.step()
    row.loss = float(loss)  # waits
    row.compile_s = time.perf_counter() - start
    has_model = problem.model is not None  # which a step changes, so that its first is judged
    if provider.graphs and not has_model:
        row.more["graph_replays"] = cuda_graphs.record(problem.step)
        loss, gradients = problem.step()
    if problem.is_judged:
        vars(row).update(judge(float(loss), problem.part(gradients)))
    elif problem.flops:
        row.gflop = _gflop(problem.flops)
    del loss, gradients
    if provider.graphs and has_model:
        row.more["graph_replays"] = cuda_graphs.record(problem.step)
    if has_model:
        problem.model.zero_grad(set_to_none=True)
    if weigh:
        row.peak_mib = measure.peak_mib(problem.step, device)
        if provider.graphs:
            row.more["graph_pool_mib"] = pool = cuda_graphs.pools_bytes() / measure.MIB
            row.peak_mib += pool
    return problem


def _time(ready: dict[str, Problem], rows: dict[str, Row], settings: Settings) -> None:
    """Writes medians and quartiles into the rows, by mode."""
    if not settings.seconds:
        for name in ready:
            if rows[name].status == "ok":
                rows[name].status, rows[name].detail = "untimed", "compiled and judged"
        return
    given = settings.seconds, settings.max_rounds, settings.agree
    samples, failures = measure.interleaved(ready, *given)
    for name, taken in samples.items():
        row = rows[name]
        if name in failures:
            vars(row).update(failures[name])
            continue
        row.samples = len(taken)
        row.timing = {mode: Timing.of([sample[mode] for sample in taken]) for mode in MODES}
