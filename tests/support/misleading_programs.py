"""Programs written to mislead the rewrite, their neighbours, and how compiled ones are judged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.comparing import compare
from tests.support.compiling import named
from tests.support.misleading import (  # noqa: F401  # they register their programs
    axes,
    chunks_and_layers,
    detached_results,
    gradient_of_factors,
    indices,
    operators,
    row_programs,
    score_steps,
    values_and_labels,
)
from tests.support.read_programs import _difference as difference_of
from tests.support.read_programs import _size
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


def run(fn, inputs):
    """One run on fresh leaves, with gradients of all outputs, no two entries weighted alike."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = [x for x in tree_leaves(fn(*leaves)) if isinstance(x, Tensor)]
    trained = [x for x in leaves if x.requires_grad]
    results = [x for x in outputs if x.requires_grad]
    gradients = [None] * len(trained)
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


def difference(eager, compiled):
    """The first thing that two runs in float64 do not have in common, or an empty string."""
    if eager.needs_grad != compiled.needs_grad:
        return f"outputs need gradients: {eager.needs_grad} -> {compiled.needs_grad}"
    for kind in ("outputs", "gradients", "inputs"):
        pairs = zip(getattr(eager, kind), getattr(compiled, kind), strict=True)
        for i, (x, y) in enumerate(pairs):
            if found := _difference(x, y):
                return f"{kind[:-1]} {i}: {found}"
    return ""


def _difference(x, y):
    if x is None or y is None:
        return "" if x is y else f"{_size(x)} -> {_size(y)}"
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"{x.dtype} {tuple(x.shape)} -> {y.dtype} {tuple(y.shape)}"
    return difference_of(x, y, EXACT, least=EXACT)


def judge(
    program,
    *,
    inner="aot_eager",
    front_end="backend",
    verify="never",
):
    """Compile a program and compare it with eager.

    ``front_end`` is "backend" or "inductor_options". The rules are judged alone by default: with
    ``verify`` a rewrite that is checked when it is compiled is left out where it is wrong.
    """
    inputs = program.inputs()
    if program.dtype is not torch.float64 or program.dtypes:
        dynamic = program.dynamic or None
        outcome = compare(program.fn, inputs, inner=inner, dynamic=dynamic, verify=verify)
        return Verdict(outcome.mismatch(), outcome.num_fused, tuple(outcome.reasons))
    torch._dynamo.reset()
    eager = run(program.fn, inputs)
    with backend.collected() as report:
        if front_end == "backend":
            chosen = {"backend": "streamkl"}
            chosen["options"] = named(inner=inner, verify=verify)
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
