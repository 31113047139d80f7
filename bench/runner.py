"""Runs a case: every provider is built, checked and weighed, then all are timed in turn.

The library's attention takes its steps with them: its rate is that of the same chip in the same
state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench import accuracy, ceilings, cuda_graphs, measure
from bench.cases import AttentionCase, Case, Inputs
from bench.providers import Provider
from bench.records import Record

BUDGET_OF_INPUTS = 2**31  # bytes: larger inputs get two sets instead of three
ATTENTION = "the library's attention"  # among the timed, and no provider


@dataclass(frozen=True)
class Settings:
    """How long and on what."""

    device: torch.device
    dtype: torch.dtype
    seconds: float = 2.0  # of timing per provider and case
    alone: bool = False  # forwards alone, too


def run_case(
    case: Case,
    providers: list[Provider],
    settings: Settings,
    show: Callable[[str], None] = lambda _: None,
) -> list[Record]:
    """A record for every provider, whatever happens to it."""
    device, dtype = settings.device, settings.dtype
    torch._dynamo.reset()
    measure.release(device)
    inputs = [case.make_inputs(device, dtype, seed) for seed in range(3)]
    if _bytes(inputs[0]) > BUDGET_OF_INPUTS:
        inputs = inputs[:2]
    show(f"{case.label}: float64")
    truth = accuracy.truth_of(case, inputs[0])
    records = {p.name: _blank(case, p) for p in providers}
    losses: dict[str, Callable[..., Tensor]] = {}
    for provider in providers:
        show(f"{case.label}: {provider.name}")
        record = records[provider.name]
        prepare = partial(_prepare, case, provider, inputs[0], truth, record)
        loss_fn, why = measure.attempt(prepare, device)
        if loss_fn is None:
            vars(record).update(why)
        else:
            losses[provider.name] = loss_fn
        measure.release(device)
    del truth
    measure.release(device)
    show(f"{case.label}: timing")
    entries = {name: measure.Timed(loss_fn, inputs) for name, loss_fn in losses.items()}
    if entries and isinstance(case, AttentionCase):
        attention = ceilings.attention(case, device, dtype)
        if attention is not None:
            entries[ATTENTION] = attention
    for name in losses:
        _weigh(records[name], case, inputs[0])
    _time(case, entries, measure.MODES, settings, records)
    if settings.alone:
        alone = {name: replace(entry, has_backward=False) for name, entry in entries.items()}
        _time(case, alone, (measure.ALONE,), settings, records)
    return list(records.values())


def _time(
    case: Case, entries: dict[str, measure.Timed], modes: tuple[str, ...], settings: Settings,
    records: dict[str, Record],
) -> None:  # fmt: skip
    """Times of the providers, and rates of theirs and of the library's attention's, by mode."""
    samples = measure.interleaved(entries, settings.seconds)
    attention = samples.pop(ATTENTION, None)
    for name, taken in samples.items():
        record = records[name]
        if isinstance(taken, measure.OutOfMemory):
            record.status, record.detail = "oom", str(taken)
            continue
        record.samples = record.samples or len(taken)  # steps are timed first
        for mode in modes:
            timing = measure.Timing.of([sample.ms(mode) for sample in taken])
            record.timing[mode] = timing
            record.tflops[mode] = record.least_gflop[mode] / timing.median_ms
            if isinstance(attention, list) and isinstance(case, AttentionCase):
                record.attention_tflops[mode] = _attention_tflops(record, case, mode, attention)


def out_of_memory_before(case: Case, provider: Provider) -> Record:
    """The record of a provider that was out of memory at a smaller size of the same sweep."""
    record = _blank(case, provider)
    record.status, record.detail = "oom", "out of memory at a smaller size already"
    return record


def _blank(case: Case, provider: Provider) -> Record:
    return Record(case.family, case.label, case.sweep, case.shape(), case.source, provider.name)


def _prepare(
    case: Case, provider: Provider, inputs: Inputs, truth: accuracy.Truth, record: Record
) -> Callable[..., Tensor]:
    """First step, gate and memory; returns the loss for the timing."""
    device = inputs[0].device
    if case.family not in provider.families:
        raise measure.Unavailable(f"has no {case.family} form")
    if device.type not in provider.devices:
        raise measure.Unavailable(f"does not run on {device.type}")
    loss_fn = provider.build(case)

    def one_step() -> tuple[Tensor, tuple[Tensor, ...]]:
        return measure.guarded(lambda: measure.step(loss_fn, inputs), device)

    start = time.perf_counter()
    loss, gradients = one_step()
    loss.item()  # waits
    record.compile_s = time.perf_counter() - start
    if provider.graphs:
        cuda_graphs.record(one_step)
        loss, gradients = one_step()
    checked = loss.item() if case.gates_everything else None
    record.verdict = truth.judge(checked, case.gated(gradients))
    vars(record).update(record.verdict.status)
    del loss, gradients
    if not provider.graphs:  # all graphs of a process share pools: bench.steps weighs them
        record.peak_mib = measure.guarded(lambda: measure.peak_mib(one_step, device), device)
    return loss_fn


def _attention_tflops(
    record: Record, case: AttentionCase, mode: str, attention: list[measure.Sample]
) -> float:
    """The rate of the library's attention; of a step that of one with the case's arithmetic."""
    if mode != "step":
        return ceilings.attention_tflops(case, mode, attention)
    gflop, rates = record.least_gflop, record.attention_tflops
    return gflop["step"] / sum(gflop[part] / rates[part] for part in ("forward", "backward"))


def _weigh(record: Record, case: Case, inputs: Inputs) -> None:
    """The least arithmetic and traffic of a case."""
    forward, backward = (f * 1e-9 for f in case.flops())  # GFLOP
    record.least_gflop = {"forward": forward, "backward": backward, "step": forward + backward}
    record.least_gflop[measure.ALONE] = forward
    # gradients are as large as the student's inputs
    input_bytes, gradient = _bytes(inputs), _bytes(inputs[:2])
    record.least_mib = {
        "forward": input_bytes / measure.MIB,
        "backward": (input_bytes + gradient) / measure.MIB,
        "step": (2 * input_bytes + gradient) / measure.MIB,
    }


def _bytes(inputs: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in inputs)
