"""Compare a training step over modules in eager and compiled: loss and every parameter's gradient.

The measure is float64: a compiled gradient may be off by 2 x (eager's own error + one rounding),
where one rounding is what the exact gradient moves by when every parameter, every probability and
every row's log-sum-exp (all that a streaming softmax keeps of a row) is rounded once. Parameters
whose gradient is zero in exact arithmetic (the bias of a key projection, layers after a LayerNorm
whose output only enters through its norm) are measured like all others: by absolute error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.reporting.report import Report

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax)
EPS = torch.finfo(torch.float32).eps
Step = Callable[..., Tensor]


class Exact(TorchFunctionMode):
    """Code that asks for float32 gets float64; a seed rounds probabilities and log-sum-exps."""

    def __init__(self, seed=None):
        super().__init__()
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        args, kwargs = tree_map(_wide, (args, kwargs or {}))
        result = func(*args, **kwargs)
        if func in SOFTMAXES and self.generator is not None:
            self._round(result, args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1))
        return result

    def _round(self, probabilities, scores, dim):
        """Unseen by autograd: the softmax's backward reads the rounded values."""
        assert self.generator is not None
        lse = scores.detach().logsumexp(dim, keepdim=True)
        lse = torch.where(
            lse.abs() < 1 / EPS, lse, 0.0
        )  # of a row without keys nothing is left of the scores
        for size, digits in ((probabilities, 1.0), (lse, lse)):
            draw = torch.rand(size.shape, generator=self.generator, dtype=torch.float64) - 0.5
            probabilities.data.mul_(1 + draw * EPS * digits)


def _wide(x):
    return torch.float64 if isinstance(x, torch.dtype) and x in FLOATS else x


@dataclass
class Outcome:
    """What the rewrite did, and each result's error next to the error it may have."""

    report: Report
    num_graphs: int
    errors: dict[str, tuple[float, float]]  # name -> (error, allowed)

    def check(self):
        assert not self.report.failures, self.report.failures
        wrong = {n: e for n, e in self.errors.items() if not e[0] <= e[1]}
        assert not wrong, f"{wrong}\n{self.report}"
        return self


def compare_step(
    make_step,
    modules,
    inputs,
    **compile_options,
):
    """Compare ``make_step(*modules)(*inputs)``; gradients of all parameters that require one."""
    eager = _run(make_step(*modules), modules, inputs)
    reports = []
    backend.REPORTS.append(reports.append)
    torch._dynamo.reset()
    try:
        arguments = {
            "options": {"streamkl.inner": "aot_eager"},
            "fullgraph": True,
            **compile_options,
        }
        compiled = _run(
            torch.compile(make_step(*modules), backend="streamkl", **arguments), modules, inputs
        )
    finally:
        backend.REPORTS.remove(reports.append)
    wide = copy.deepcopy(modules)
    for module in wide:
        module.double()
    with Exact():
        truth = _run(make_step(*wide), wide, inputs)
    _round_parameters(wide)
    with Exact(seed=0):
        rounded = _run(make_step(*wide), wide, inputs)
    assert truth.keys() == eager.keys() == compiled.keys(), (
        "the compiled step has other gradients than eager"
    )
    errors = {}
    for name, exact in truth.items():
        off = {
            k: float((r[name].double() - exact).norm())
            for k, r in (("e", eager), ("c", compiled), ("r", rounded))
        }
        last_place = EPS * float(exact.norm())
        errors[name] = (off["c"], 2 * (off["e"] + off["r"] + last_place))
    report = Report()
    for found in reports:
        report.extend(found)
    return Outcome(report, len(reports), errors)


def _round_parameters(modules):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in modules:
            for p in module.parameters():
                p.mul_(1 + (torch.rand(p.shape, generator=generator, dtype=p.dtype) - 0.5) * EPS)


def _run(step, modules, inputs):
    for module in modules:
        module.zero_grad(set_to_none=True)
    loss = step(*inputs)
    loss.backward()
    grads = {
        f"{i}.{name}": p.grad.clone()
        for i, module in enumerate(modules)
        for name, p in module.named_parameters()
        if p.grad is not None
    }
    return {"loss": loss.detach(), **grads}
