"""Python numbers that change each step, such as annealed weights: fused for every value.

Dynamo makes such a number symbolic when it changes for the first time: one recompilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support.comparing import compare
from tests.support.covering import every
from torch_streamkl.fx_passes.backend import collected, streamkl

Loss = Callable[[Tensor, Tensor, Any], Tensor]


def skew(s: Tensor, t: Tensor, a: Any) -> Tensor:
    p, q = t.softmax(-1), s.softmax(-1)
    m = a * p + (1 - a) * q
    return (p * (p.log() - m.log())).sum(-1).mean()


def generalised_js(s: Tensor, t: Tensor, a: Any) -> Tensor:
    p, q = t.softmax(-1), s.softmax(-1)
    m = a * p + (1 - a) * q
    return (a * p * (p.log() - m.log()) + (1 - a) * q * (q.log() - m.log())).sum(-1).mean()


def two_weighted(s: Tensor, t: Tensor, a: Any) -> Tensor:
    p, q = t.log_softmax(-1), s.log_softmax(-1)
    return (a * p.exp() * (p - q) + (1 - a) * q.exp() * (q - p)).sum(-1).mean()


def lerp(s: Tensor, t: Tensor, a: Any) -> Tensor:
    p, q = t.softmax(-1), s.softmax(-1)
    return (p * (p.log() - torch.lerp(p, q, a).log())).sum(-1).mean()


def temperature(s: Tensor, t: Tensor, a: Any) -> Tensor:
    return F.kl_div((s / a).log_softmax(-1), (t / a).softmax(-1), reduction="batchmean") * a**2


def loss_weight(s: Tensor, t: Tensor, a: Any) -> Tensor:
    return a * F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def softcap(s: Tensor, t: Tensor, a: Any) -> Tensor:
    s = a * torch.tanh(s / a)
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def guard(s: Tensor, t: Tensor, a: Any) -> Tensor:
    p, q = t.softmax(-1) + a, s.softmax(-1) + a
    return (p * (p.log() - q.log())).sum(-1).mean()


LOSSES = (
    skew, generalised_js, two_weighted, lerp, temperature, loss_weight, softcap, guard,
)  # fmt: skip
VALUES = {"float": (0.3, 0.4, 0.55, 0.7), "int": (2, 3, 5, 4)}
OF_INTEGERS = (temperature, loss_weight, softcap)


@pytest.mark.parametrize("kind", ["attention", "lm head"])
@pytest.mark.parametrize(
    ("loss", "number"),
    [(f, "float") for f in LOSSES] + [(f, "int") for f in OF_INTEGERS],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_one_recompilation_and_fused_for_every_value(loss: Loss, number: str, kind: str) -> None:
    shapes = [(1, 2, 6, 4)] * 4 if kind == "attention" else [(5, 4), (9, 4)] * 2
    x = [torch.randn(s, dtype=torch.float64, requires_grad=i < 2) for i, s in enumerate(shapes)]

    def step(a: Any) -> Tensor:
        q, k, qt, kt = x
        return loss(q @ k.mT, qt @ kt.mT, a)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    options = {"streamkl.inner": "eager", "streamkl.min_mib": 0}

    def backend(gm: Any, inputs: Any) -> Any:
        return counter(gm, inputs) and streamkl(gm, inputs, options=options)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with collected() as report:
        for a in VALUES[number]:
            got, want = compiled(a), step(a)
            torch.testing.assert_close(got, want)
            for grads in zip(
                torch.autograd.grad(got, x[:2]), torch.autograd.grad(want, x[:2]), strict=True
            ):
                torch.testing.assert_close(*grads)
    assert counter.frame_count <= 2
    assert report.num_fused == len(report.sites) >= counter.frame_count, report


@pytest.mark.parametrize("loss", [skew, softcap, guard], ids=lambda f: f.__name__)
def test_aot_autograd_does_not_specialize(loss: Loss) -> None:
    """It makes tensors of symbolic floats, or else constants: a compilation for each value."""
    x = [torch.randn(s, requires_grad=i < 2) for i, s in enumerate([(5, 4), (9, 4)] * 2)]

    def step(a: Any) -> Tensor:
        q, k, qt, kt = x
        return loss(q @ k.mT, qt @ kt.mT, a)

    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}
    counts = []
    for given in ({"backend": "aot_eager"}, {"backend": "streamkl", "options": options}):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(step, **given)
        with collected() as report:
            for a in VALUES["float"]:
                torch.testing.assert_close(compiled(a), step(a))
        counts.append(counters["stats"]["unique_graphs"])
    assert counts == [2, 2]
    assert report.num_fused == len(report.sites) == 2, report


@pytest.mark.parametrize("loss", every(3, [skew, softcap, guard]), ids=lambda f: f.__name__)
def test_a_number_as_a_tensor(loss: Loss) -> None:
    x = [torch.randn(1, 2, 6, 4, requires_grad=i < 2) for i in range(4)]

    def step(a: Tensor) -> Tensor:
        q, k, qt, kt = x
        return loss(q @ k.mT, qt @ kt.mT, a)

    torch._dynamo.reset()
    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0}
    compiled = torch.compile(step, backend="streamkl", options=options, dynamic=True)
    with collected() as report:
        for a in (torch.tensor(0.3), torch.tensor(0.6), 0.4):
            torch.testing.assert_close(compiled(a), step(a))
    assert report.num_fused == len(report.sites), report


def test_a_size_that_varies_multiplies_elements() -> None:
    """A row program reads it as a number that is captured."""

    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        p, t = (q @ k.mT).softmax(-1), qt @ kt.mT
        return (p * t.shape[-1] * t.sigmoid()).square().sum(-1).mean()

    inputs = [torch.randn(2, 2, n, 4, requires_grad=i < 2) for i, n in enumerate((6, 9, 6, 9))]
    outcome = compare(loss, inputs, inner="aot_eager", dynamic=True).check()
    assert outcome.kinds == {"row_program"}, outcome.report
