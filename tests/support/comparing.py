"""Run a program in eager and compiled with the rewrite, and say how far each is from float64.

A compiled program passes when its error is at most twice eager's own error, plus what one rounding
of every input does to the result: no constant is tuned. Eager's error is the largest over the
inputs and a few roundings of them, because a single number can be exact by luck.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.support.compiling import compile_rewritten, named
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.reporting.report import Report

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NUM_ROUNDINGS = 5  # draws of a rounding of the inputs


class InFloat64(TorchFunctionMode):
    """Programs that ask for float32, by ``.float()``, ``dtype=`` or ``.to()``, get float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double

        def wide(x):
            return torch.float64 if isinstance(x, torch.dtype) and x in FLOATS else x

        return func(*tree_map(wide, args), **tree_map(wide, kwargs or {}))


@dataclass
class Result:
    """Outputs and input gradients of one run."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]

    def tensors(self):
        return [*self.outputs, *self.gradients]


@dataclass
class Outcome:
    """What the rewrite did and, for each output and gradient, its error and what is allowed."""

    report: Report
    eager: Result
    compiled: Result
    truth: Result
    errors: list[float] = field(default_factory=list)
    allowed: list[float] = field(default_factory=list)
    num_graphs: int = 0

    @property
    def num_fused(self):
        return self.report.num_fused

    @property
    def reasons(self):
        return [site.reason for site in self.report.sites if not site.fused]

    @property
    def kinds(self):
        """The operators that sites are fused to."""
        return {site.kind for site in self.report.sites if site.fused}

    def relative(self, which):
        """Largest error relative to the largest value: of the "outputs" or of the "gradients"."""
        num = len(self.eager.outputs)
        part = slice(0, num) if which == "outputs" else slice(num, None)
        worst = 0.0
        for error, exact in zip(self.errors[part], self.truth.tensors()[part], strict=True):
            if exact is not None:
                worst = max(worst, error / max(_largest(exact), 1e-30))
        return worst

    def mismatch(self):
        """Empty when every error is within what it may be."""
        assert not self.report.failures, self.report.failures
        pairs = zip(self.eager.gradients, self.compiled.gradients, strict=True)
        for i, (a, b) in enumerate(pairs):
            if (a is None) != (b is None):
                return (
                    f"gradient {i} is {'missing' if b is None else 'new'} in the compiled program"
                )
        for i, (x, y) in enumerate(
            zip(self.eager.tensors(), self.compiled.tensors(), strict=True)
        ):
            if x is not None and y is not None and (x.shape, x.dtype) != (y.shape, y.dtype):
                return (
                    f"result {i} is {y.dtype} {tuple(y.shape)}, "
                    f"eager's is {x.dtype} {tuple(x.shape)}"
                )
        for i, (error, allowed) in enumerate(zip(self.errors, self.allowed, strict=True)):
            if not error <= allowed:
                return f"result {i} is off by {error:.3e}, allowed {allowed:.3e}\n{self.report}"
        return ""

    def check(self):
        """Raise AssertionError when the compiled program is not as exact as eager."""
        message = self.mismatch()
        assert not message, message
        return self

    def check_fused(self, sites=None, remaining=0):
        """As `check`; all sites are fused, how many there are, and how many scores are left."""
        self.check()
        report = self.report
        expected = len(report.sites) if sites is None else sites
        said = f"expected {sites or 'some'} sites, all fused, and {remaining} score tensors left"
        said = f"{said}\n{report}\n{report.details()}"
        assert self.num_fused == len(report.sites) == expected > 0, said
        assert remaining in (None, report.num_remaining), said
        return self


def compare(
    fn,
    inputs,
    *,
    inner="eager",
    dynamic=None,
    training=True,
    fullgraph=False,
    reset=True,
    largest_score=0.0,
    **options,
):
    """Run ``fn(*inputs)`` in eager, compiled, and in float64, with gradients to its inputs.

    ``options`` are ours, by name. ``largest_score`` budgets the rounding of large scores: a fused
    backward rebuilds probabilities as exp(score - lse), whose relative error is a rounding of the
    score.
    """
    if reset:
        torch._dynamo.reset()
    mode = contextlib.nullcontext() if training else torch.no_grad()
    with mode:
        eager = run(fn, inputs)
        report = Report()
        graphs = []

        def observe(found):
            graphs.append(found)
            report.extend(found)

        backend.REPORTS.append(observe)
        try:
            given = named(inner=inner, **options)
            compiled_fn = torch.compile(
                fn, backend="streamkl", dynamic=dynamic, fullgraph=fullgraph, options=given
            )
            # to keep what operators make of symbolic sizes takes longer than to ask them again
            with torch._dynamo.config.patch(fake_tensor_cache_enabled=not dynamic):
                compiled = run(compiled_fn, inputs)
        finally:
            backend.REPORTS.remove(observe)
        with InFloat64():
            truth = run(fn, [_in_float64(x) for x in inputs])
        outcome = Outcome(report, eager, compiled, truth, num_graphs=len(graphs))
        of_eager = _distances(eager, truth, truth)
        of_inputs = [0.0] * len(of_eager)
        outcome.errors = _distances(compiled, truth, eager)
        for seed in range(NUM_ROUNDINGS):
            near = [_rounded(x, seed) for x in inputs]
            eager_near = run(fn, near)
            with InFloat64():
                truth_near = run(fn, [_in_float64(x) for x in near])
            of_eager = [*map(max, of_eager, _distances(eager_near, truth_near, truth_near))]
            of_inputs = [*map(max, of_inputs, _distances(truth_near, truth, eager))]
            outcome.allowed = [
                2 * x + y + _last_digit(a, exact) * (1 + largest_score)
                for x, y, a, exact in zip(
                    of_eager, of_inputs, eager.tensors(), truth.tensors(), strict=True
                )
            ]
            if not outcome.mismatch():
                break  # more draws could only allow more
    return outcome


def is_exact_in_float64(fn, inputs, **options):
    """Values, and gradients of the first one, are those of eager code but for the last digits.

    The first two inputs are trained, and all are float64.
    """
    found, expected = compile_rewritten(fn, **options)(*inputs), fn(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    learns = [[y.requires_grad for y in tree_flatten(x)[0]] for x in (found, expected)]
    assert learns[0] == learns[1], learns
    first = (x[0] if isinstance(x, tuple) else x for x in (found, expected))
    gradients = [torch.autograd.grad(x.sum(), inputs[:2]) for x in first]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def refusals(fn, inputs, **options):
    """Why the operators of divergences do not take a program, where row programs are off."""
    with backend.collected() as report:
        compile_rewritten(fn, row_programs=False, **options)(*inputs)
    assert not report.num_fused, str(report)
    return [site.reason for site in report.sites]


def _distances(result, exact, where):
    """Largest difference of each result from the exact one, where it and ``where`` are finite."""
    distances = []
    for x, y, z in zip(result.tensors(), exact.tensors(), where.tensors(), strict=True):
        if x is None or y is None or z is None:
            distances.append(0.0)  # a gradient that is missing is looked for in `mismatch`
        elif not x.dtype.is_floating_point:
            distances.append(0.0 if torch.equal(x, y) else float("inf"))
        else:
            distances.append(_distance(x, y, torch.isfinite(y) & torch.isfinite(z)))
    return distances


def _last_digit(x, exact):
    if x is None or exact is None or not x.dtype.is_floating_point:
        return 0.0
    return torch.finfo(x.dtype).eps * _largest(exact)


def run(fn, inputs):
    """One run on fresh leaves; gradients of the sum of all floating outputs."""
    torch.manual_seed(0)
    fresh = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    ]
    outputs = [x for x in tree_flatten(fn(*fresh))[0] if isinstance(x, Tensor)]
    leaves = [x for x in fresh if isinstance(x, Tensor) and x.requires_grad]
    differentiable = [x for x in outputs if x.requires_grad]
    grads = [None] * len(leaves)
    if differentiable and leaves:
        # different weights per entry, so that an error in one row cannot cancel in another
        weights = [_weights(x) for x in differentiable]
        grads = list(torch.autograd.grad(differentiable, leaves, weights, allow_unused=True))
    return Result([x.detach() for x in outputs], grads)


def _weights(x):
    if x.dim() == 0:
        return torch.ones_like(x)
    return torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape).to(x)


def _in_float64(x):
    if not isinstance(x, Tensor) or x.dtype not in FLOATS:
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def _rounded(x, seed):
    """Every entry moved up or down by one unit in its last place."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        return x
    up = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(seed))
    change = (2 * up.to(x.device) - 1) * torch.finfo(x.dtype).eps
    return (x.detach().double() * (1 + change)).to(x.dtype).requires_grad_(x.requires_grad)


def _distance(x, exact, where):
    # NaN where eager has a value is an infinite error
    return (
        float(
            torch.where(where, (x.double() - exact).abs().nan_to_num(nan=float("inf")), 0.0).max()
        )
        if x.numel()
        else 0.0
    )


def _largest(x):
    return float(x.nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0
