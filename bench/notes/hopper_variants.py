"""Launches of the Hopper kernels beside each other and cuDNN's attention, on an H200.

    python -m bench.notes.hopper_variants [--only forward|backward] [--rounds 9]

The results of every variant are compared with the default's, then all take turns in shuffled
rounds; medians, bf16, B=1, 32 heads, N=8192. Processes that run every variant once compile first.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention_matrix import median_ms
from torch_streamkl import devices, launch, ops, tune
from torch_streamkl.functional import DIVERGENCES, named
from torch_streamkl.kernels import hopper_attention, plans
from torch_streamkl.launch import HopperLaunch
from torch_streamkl.problem import AttentionProblem
from torch_streamkl.streaming import Wanted

HEADS, SEQLEN = 32, 8192
STUDENT = Wanted(True, True, False, False)
CLAMPED = named("forward_kl", student_clamp=1e-12, teacher_clamp=1e-12).text


@dataclass(frozen=True)
class Variant:
    """What replaces a table of launch.py, for one head_dim."""

    name: str
    table: str
    launch: HopperLaunch
    deterministic: bool = True
    parts: int = 0  # of the last round of blocks, where it is not full; 0 as launch.py has it


DEFAULT, CUDNN = "default", "cuDNN attention"
FORWARD = {
    64: [
        Variant("4 groups", "HOPPER_LAUNCHES", HopperLaunch(64, 64, 4, 2)),
        Variant("4 groups, 5 parts", "HOPPER_LAUNCHES", HopperLaunch(64, 64, 4, 2), parts=5),
        Variant("2 slots, 4 parts", "HOPPER_LAUNCHES", HopperLaunch(64, 64, 3, 2), parts=4),
        Variant("2 slots, 7 parts", "HOPPER_LAUNCHES", HopperLaunch(64, 64, 3, 2), parts=7),
        Variant("4 slots", "HOPPER_LAUNCHES", HopperLaunch(64, 64, 3, 4)),
        Variant("4 slots, 7 parts", "HOPPER_LAUNCHES", HopperLaunch(64, 64, 3, 4), parts=7),
    ],
    128: [
        Variant("4 parts", "HOPPER_LAUNCHES", HopperLaunch(64, 64, 3, 2), parts=4),
        Variant("7 parts", "HOPPER_LAUNCHES", HopperLaunch(64, 64, 3, 2), parts=7),
    ],
}
ANY_ORDER = launch.HOPPER_ATOMIC_LAUNCHES[64]
BACKWARD = {
    64: [Variant("any order", "HOPPER_ATOMIC_LAUNCHES", ANY_ORDER, deterministic=False)],
    128: [],  # in one kernel they do not fit with four slots
}
CASES = list(itertools.product((64, 128), (False, True), (False, True)))  # causal, clamped
_plans: dict[str, dict[Any, Any]] = {}  # a variant's own: they keep what was compiled


@contextmanager
def used(variant: Variant | None, head_dim: int) -> Iterator[None]:
    """Inside, launches are a variant's."""
    name = DEFAULT if variant is None else variant.name
    table = {} if variant is None else getattr(launch, variant.table)
    changes = {} if variant is None else {head_dim: variant.launch}
    own_plans = _plans.setdefault(f"{name} {head_dim}", {})
    parts_of = launch.parts_of_last_round
    if variant is not None and variant.parts:
        parts_of = partial(_in_parts, variant.parts)
    with (
        patch.object(plans, "_plans", own_plans),
        patch.dict(table, changes),
        patch.object(hopper_attention, "parts_of_last_round", parts_of),
    ):
        yield


def _in_parts(parts: int, blocks: int, _tiles: int, device: torch.device) -> tuple[int, int]:
    return blocks - blocks % devices.multiprocessors(device), parts


def problem(head_dim: int, causal: bool, clamped: bool, deterministic: bool) -> AttentionProblem:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, HEADS, SEQLEN, head_dim)
    tensors = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    ]
    return ops.problem_of(
        *tensors,
        functional=CLAMPED if clamped else DIVERGENCES["forward_kl"],
        student_scale=head_dim**-0.5,
        teacher_scale=head_dim**-0.5,
        window_right=0 if causal else None,
        deterministic=deterministic,
    )[0]


def calls_of(case: tuple[int, bool, bool], backward: bool) -> dict[str, Callable[[], Any]]:
    """What is timed, by name: the variants, and cuDNN's attention beside a forward."""
    head_dim, causal, clamped = case
    calls: dict[str, Callable[[], Any]] = {}
    grad = torch.rand(1, HEADS, SEQLEN, device="cuda")
    for variant in (None, *(BACKWARD if backward else FORWARD)[head_dim]):
        p = problem(head_dim, causal, clamped, variant is None or variant.deterministic)
        _, stats = hopper_attention.forward(p)

        def call(p: Any = p, stats: Any = stats, v: Any = variant) -> Any:
            with used(v, head_dim):
                if backward:
                    return hopper_attention.backward(p, stats, grad, STUDENT)[:2]
                return hopper_attention.forward(p)[:1]

        calls[DEFAULT if variant is None else variant.name] = call
    if not backward:
        s = problem(head_dim, causal, clamped, True).student

        def attention() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    s.q, s.k, s.q, is_causal=causal
                )

        calls[CUDNN] = attention
    return calls


def errors_of(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """How far a variant's results are from the default's, of what is allowed."""
    expected = calls[DEFAULT]()
    variants = {n: call for n, call in calls.items() if n not in (DEFAULT, CUDNN)}
    return {name: tune.largest_error(call(), expected) for name, call in variants.items()}


def timed(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of a call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    device = torch.device("cuda")
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(median_ms(calls[name], device, rounds=1))
    return {name: statistics.median(t) for name, t in times.items()}


def compile_all(work: tuple[tuple[int, bool, bool], bool]) -> None:
    for call in calls_of(*work).values():
        call()
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("forward", "backward"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=14)
    options = parser.parse_args()
    passes = [b for b in (False, True) if options.only in (None, ("forward", "backward")[b])]
    work = [(case, backward) for backward in passes for case in CASES]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, work))
    for case, backward in work:
        head_dim, causal, clamped = case
        calls = calls_of(case, backward)
        errors = errors_of(calls)
        flop = 4.0 * HEADS * SEQLEN**2 * head_dim * (2 if backward else 1) / (2 if causal else 1)
        what = ("backward" if backward else "forward", "causal" if causal else "full")
        print(f"D={head_dim}", *what, "clamped" if clamped else "", flush=True)
        for name, ms in timed(calls, options.rounds).items():
            error = f"  error {errors[name]:.2f} of what is allowed" if name in errors else ""
            print(f"  {name:<20}{ms:8.3f} ms {flop / ms * 1e-9:6.0f} TFLOP/s{error}", flush=True)


if __name__ == "__main__":
    main()
