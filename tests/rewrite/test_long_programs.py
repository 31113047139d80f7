"""Programs with many operations: no limit is silent, and no analysis is exponential in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_streamkl import explain
from torch_streamkl.fx_passes.backend import collected

Loss = Callable[[Tensor, Tensor, int], Tensor]


def bisected_entmax(s: Tensor, t: Tensor, steps: int) -> Tensor:
    """Per-row values, each of which the next step reads several times."""
    with torch.no_grad():
        high = s.amax(-1, keepdim=True)
        low = high - 1
        for _ in range(steps):
            middle = (low + high) / 2
            is_less = (s - middle).clamp(min=0).square().sum(-1, keepdim=True) >= 1
            low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
    p = (s - low).clamp(min=0).square()
    return (p / p.sum(-1, keepdim=True) - t.softmax(-1)).square().sum(-1).mean()


def mixed_probabilities(s: Tensor, t: Tensor, steps: int) -> Tensor:
    p, q = s.softmax(-1), t.softmax(-1)
    for _ in range(steps):
        m = (p + q) / 2
        p, q = p + 0.01 * m * q, q + 0.01 * m * p
    return (p * (p.log() - q.log())).sum(-1).mean()


def mixed_logarithms(s: Tensor, t: Tensor, steps: int) -> Tensor:
    p, q = s.log_softmax(-1), t.log_softmax(-1)
    for _ in range(steps):
        m = (p + q) / 2
        p, q = 0.9 * p + 0.1 * m, 0.9 * q + 0.1 * m
    return (t.softmax(-1) * (p - q)).sum(-1).mean()


def after_the_sum(s: Tensor, t: Tensor, steps: int) -> Tensor:
    low = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
    high = low + 1
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = low + middle * 0.1 * high, high - middle * 0.1 * low
    return (low + high).tanh().mean()


def chain(s: Tensor, t: Tensor, steps: int) -> Tensor:
    """Deep: every operation reads the one before it."""
    for _ in range(steps):
        s = torch.relu(s) + 0.001
    return (t.softmax(-1) * s).sum(-1).mean()


def fuses(loss: Loss, steps: int) -> None:
    torch._dynamo.reset()
    x = [torch.randn(1, 2, 6, 4, requires_grad=i < 2) for i in range(4)]

    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        return loss(q @ k.mT, qt @ kt.mT, steps)

    options = {"streamkl.inner": "eager", "streamkl.min_mib": 0}
    with collected() as report:
        got = torch.compile(step, backend="streamkl", options=options)(*x)
    assert report.num_fused == len(report.sites) == 1, report
    want = step(*x)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(y, x[:2]) for y in (got, want))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "loss", [bisected_entmax, mixed_probabilities, mixed_logarithms, after_the_sum]
)
def test_fifty_steps_of_a_bisection(loss: Loss) -> None:
    fuses(loss, 50)


@pytest.mark.slow
def test_a_thousand_operations() -> None:
    fuses(chain, 500)


@pytest.mark.slow
def test_a_limit_is_said() -> None:
    torch._dynamo.reset()
    x = [torch.randn(1, 2, 6, 4, requires_grad=i < 2) for i in range(4)]

    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        return chain(q @ k.mT, qt @ kt.mT, 2100)

    report = explain(step, *x, options={"streamkl.min_mib": 0})
    assert report.num_fused == 0
    assert "an expression that is too large to be analysed" in report.details()
