"""Programs written to mislead the rewrite, their neighbours, and how compiled ones are judged.

``python -m tests.support.misleading_programs`` prints which are compiled to something else than
eager; vocabulary entries among its arguments choose programs whose names or faults have them.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.comparing import compare
from tests.support.misleading import (  # noqa: F401  # they register their programs
    axes,
    chunks_and_layers,
    detached_results,
    gradient_of_factors,
    indices,
    operators,
    plain_losses,
    row_programs,
    score_steps,
    values_and_labels,
)
from tests.support.misleading.registry import FAULTS, PROGRAMS, Program
from torch_streamkl.fx_passes import backend

EXACT = 2.0**-36  # between float64's rounding, of sums of thousands, and any mistake


@dataclass(frozen=True)
class Results:
    """Outputs, gradients of the trained inputs, and inputs as the program leaves them."""

    outputs: list[Tensor]
    needs_grad: list[bool]
    gradients: list[Tensor | None]
    inputs: list[Tensor]


@dataclass(frozen=True)
class Verdict:
    """Empty ``difference``: the compiled program computes what eager does."""

    difference: str
    num_fused: int
    reasons: tuple[str, ...]


def run(fn: Callable[..., Any], inputs: list[Tensor]) -> Results:
    """One run on fresh leaves, with gradients of all outputs, no two entries weighted alike."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = [x for x in tree_leaves(fn(*leaves)) if isinstance(x, Tensor)]
    trained = [x for x in leaves if x.requires_grad]
    results = [x for x in outputs if x.requires_grad]
    gradients: list[Tensor | None] = [None] * len(trained)
    if results and trained:
        weights = [
            torch.linspace(0.5, 1.5, x.numel()).view(x.shape).to(x) if x.dim() else x * 0 + 1
            for x in (y.detach() for y in results)
        ]
        gradients = list(torch.autograd.grad(results, trained, weights, allow_unused=True))
    return Results(
        [x.detach() for x in outputs],
        [x.requires_grad for x in outputs],
        gradients,
        [x.detach() for x in leaves],
    )


def difference(eager: Results, compiled: Results) -> str:
    """The first thing that two runs in float64 do not have in common, or an empty string."""
    if eager.needs_grad != compiled.needs_grad:
        return f"outputs need gradients: {eager.needs_grad} -> {compiled.needs_grad}"
    for kind in ("outputs", "gradients", "inputs"):
        pairs = zip(getattr(eager, kind), getattr(compiled, kind), strict=True)
        for i, (x, y) in enumerate(pairs):
            if found := _difference(x, y):
                return f"{kind[:-1]} {i}: {found}"
    return ""


def _difference(x: Tensor | None, y: Tensor | None) -> str:
    if x is None or y is None:
        return "" if x is y else f"{_size(x)} -> {_size(y)}"
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{x.dtype} {tuple(x.shape)} -> {y.dtype} {tuple(y.shape)}"
    if not x.dtype.is_floating_point:
        return "" if torch.equal(x, y) else "other integers"
    exact = EXACT * max(1.0, float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0)
    if torch.allclose(x, y, rtol=EXACT, atol=exact, equal_nan=True):
        return ""
    # NaN that eager has and the compiled program has not is no mistake, the reverse is one
    where = ~x.isnan()
    if torch.allclose(x[where], y[where], rtol=EXACT, atol=exact):
        return ""
    return f"{_size(x)} -> {_size(y)}, off by {_size(x - y)}"


def _size(x: Tensor | None) -> str:
    return "None" if x is None else f"{float(x.abs().max()) if x.numel() else 0.0:.4g}"


def judge(
    program: Program,
    *,
    inner: str = "aot_eager",
    front_end: str = "backend",
    verify: str = "never",
) -> Verdict:
    """Compile a program and compare it with eager.

    ``front_end`` is "backend" or "inductor_options". The rules are judged alone by default: with
    ``verify`` a rewrite that is checked when it is compiled is left out where it is wrong.
    """
    inputs = program.inputs()
    options: dict[str, Any] = {"streamkl.verify": verify}
    if program.dtype is not torch.float64 or program.dtypes:
        dynamic = program.dynamic or None
        outcome = compare(program.fn, inputs, inner=inner, dynamic=dynamic, options=options)
        return Verdict(outcome.mismatch(), outcome.num_fused, tuple(outcome.reasons))
    torch._dynamo.reset()
    eager = run(program.fn, inputs)
    with backend.collected() as report:
        if front_end == "backend":
            chosen: dict[str, Any] = {"backend": "streamkl"}
            chosen["options"] = {"streamkl.inner": inner, **options}
        else:
            chosen = {"options": backend.inductor_options(verify=verify)}
        compiled_fn = torch.compile(program.fn, dynamic=program.dynamic or None, **chosen)
        try:
            found = difference(eager, run(compiled_fn, inputs))
        except Exception as error:  # eager ran
            found = f"runs -> {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    if report.failures:
        found = found or f"the analysis fails: {report.failures}"
    reasons = tuple(site.reason for site in report.sites if not site.fused)
    return Verdict(found, report.num_fused, reasons)


def main(vocab: list[str]) -> None:
    chosen = [
        p
        for p in PROGRAMS.values()
        if not vocab or any(w == p.fault or w in p.name for w in vocab)
    ]
    start, num_wrong = time.monotonic(), 0
    for p in chosen:
        verdict = judge(p)
        num_wrong += bool(verdict.difference)
        mark = "WRONG" if verdict.difference else "ok"
        promise = f" of {p.fuses}" if (p.fuses or 0) > verdict.num_fused else ""
        print(
            f"{mark:<6}{p.fault:<4}{p.name:<52} fused {verdict.num_fused}{promise} "
            f"{verdict.difference or '; '.join(verdict.reasons)}"[:220],
            flush=True,
        )
    seconds = time.monotonic() - start
    print(f"{num_wrong} of {len(chosen)} wrong, {len(FAULTS)} faults, {seconds:.0f} s")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
