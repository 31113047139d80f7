"""Tiles of the kernels for a head-averaged teacher beside each other, on an H200.

    python -m bench.notes.head_mean_variants [--rounds 9] [--jobs 14]

Forward and student backward of two problems, causal, bf16, N=4096. The results of every variant
are compared with the default's, then all take turns in shuffled rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from bench.notes.hopper_variants import DEFAULT, STUDENT, errors_of, timed
from torch_streamkl import launch, ops
from torch_streamkl.functional import DIVERGENCES
from torch_streamkl.kernels import head_mean_launch, plans
from torch_streamkl.problem import AttentionProblem
from torch_streamkl.tiles import TritonLaunch

SEQLEN = 4096


class Case(NamedTuple):
    student: tuple[int, int]  # heads and head_dim
    teacher: tuple[int, int]


CASES = {
    "an indexer: 128 heads of 192": Case((1, 128), (128, 192)),
    "groups: 32 heads of 128 for 8": Case((8, 128), (32, 128)),
}
# By kernel, as launch._head_mean_launch names them. Tiles of "mean" hold whole ones of "forward".
VARIANTS: dict[str, dict[str, TritonLaunch]] = {
    DEFAULT: {},
    "log-sum-exps of 128 x 64": {"lse": TritonLaunch(128, 64, 8, 2)},
    "log-sum-exps of 128 x 64, 3 stages": {"lse": TritonLaunch(128, 64, 8, 3)},
    "log-sum-exps of 128 x 128": {"lse": TritonLaunch(128, 128, 8, 2)},
    "log-sum-exps of 64 x 64, 4 warps": {"lse": TritonLaunch(64, 64, 4, 2)},
    "mean of 64 x 64": {"mean": TritonLaunch(64, 64, 8, 2)},
    "mean of 64 x 128": {"mean": TritonLaunch(64, 128, 8, 2)},
    "mean of 128 x 64, 1 stage": {"mean": TritonLaunch(128, 64, 8, 1)},
    "mean of 128 x 32": {"mean": TritonLaunch(128, 32, 8, 2)},
    "readers of 64 x 64, 4 warps": {"forward": TritonLaunch(64, 64, 4, 2)},
    "readers of 64 x 32": {"forward": TritonLaunch(64, 32, 8, 2)},
}
_plans: dict[str, dict[Any, Any]] = {}  # a variant's own: they keep what was compiled


@contextmanager
def used(variant: str) -> Iterator[None]:
    """Inside, launches are a variant's."""
    default = launch._head_mean_launch
    changes = VARIANTS[variant]

    def chosen(kernel: str, *arguments: Any) -> TritonLaunch:
        return changes.get(kernel) or default(kernel, *arguments)

    own_plans = _plans.setdefault(variant, {})
    with (
        patch.object(plans, "_plans", own_plans),
        patch.object(launch, "_head_mean_launch", chosen),
    ):
        yield


def problem(case: Case) -> AttentionProblem:
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [
        torch.randn(1, heads, SEQLEN, dim, device="cuda", generator=generator).bfloat16()
        for heads, dim in (case.student, case.student, case.teacher, case.teacher)
    ]
    return ops.problem_of(
        *tensors,
        functional=DIVERGENCES["forward_kl"],
        student_scale=case.student[1] ** -0.5,
        teacher_scale=case.teacher[1] ** -0.5,
        window_right=0,
        head_mean=True,
    )[0]


def calls_of(name: str, backward: bool, variants: list[str]) -> dict[str, Callable[[], Any]]:
    p = problem(CASES[name])
    _, stats = head_mean_launch.forward(p)
    grad = torch.rand(stats.student_sum.shape, device="cuda")

    def call(variant: str) -> Any:
        with used(variant):
            if backward:
                return head_mean_launch.backward(p, stats, grad, STUDENT)[:2]
            return head_mean_launch.forward(p)[:1]

    return {variant: lambda variant=variant: call(variant) for variant in variants}


def first_run(variant: str) -> str:
    """Why a variant cannot run, or ""; what it compiles stays in Triton's cache."""
    try:
        for name in CASES:
            for backward in (False, True):
                calls_of(name, backward, [variant])[variant]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=14)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        refusals = dict(zip(VARIANTS, pool.map(first_run, VARIANTS), strict=True))
    for name, why in refusals.items():
        if why:
            print(f"{name}: {why}", flush=True)
    able = [name for name, why in refusals.items() if not why]
    for name in CASES:
        for backward in (False, True):
            calls = calls_of(name, backward, able)
            errors = errors_of(calls)
            print(name, "backward" if backward else "forward", flush=True)
            for variant, ms in timed(calls, options.rounds).items():
                error = (
                    f"  error {errors[variant]:.2f} of what is allowed"
                    if variant in errors
                    else ""
                )
                print(f"  {variant:<36}{ms:8.3f} ms{error}", flush=True)


if __name__ == "__main__":
    main()
