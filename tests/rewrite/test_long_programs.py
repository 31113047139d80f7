"""Programs with many operations: no limit is silent, and no analysis is exponential in them."""

from collections import Counter

import pytest
import torch

from tests.support.comparing import compare
from torch_streamkl import explain
from torch_streamkl.fx_passes.passes import row_sums
from torch_streamkl.fx_passes.planning import row_plans
from torch_streamkl.fx_passes.reporting import unfused


def bisected_entmax(s, t, steps):
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


def mixed_probabilities(s, t, steps):
    p, q = s.softmax(-1), t.softmax(-1)
    for _ in range(steps):
        m = (p + q) / 2
        p, q = p + 0.01 * m * q, q + 0.01 * m * p
    return (p * (p.log() - q.log())).sum(-1).mean()


def after_the_sum(s, t, steps):
    low = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)
    high = low + 1
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = low + middle * 0.1 * high, high - middle * 0.1 * low
    return (low + high).tanh().mean()


def chain(s, t, steps):
    """Deep: every operation reads the one before it."""
    for _ in range(steps):
        s = torch.relu(s) + 0.001
    return (t.softmax(-1) * s).sum(-1).mean()


def step_of(loss, steps):
    return lambda q, k, qt, kt: loss(q @ k.mT, qt @ kt.mT, steps)


def inputs():
    return [torch.randn(1, 2, 6, 4, requires_grad=i < 2) for i in range(4)]


@pytest.mark.parametrize(
    ("loss", "steps"),
    [
        pytest.param(bisected_entmax, 50, marks=pytest.mark.slow),  # as long as the next, and more
        (mixed_probabilities, 25),  # 3 ** 25 terms, if all were written out
        (after_the_sum, 25),
        pytest.param(mixed_probabilities, 50, marks=pytest.mark.slow),
        pytest.param(chain, 500, marks=pytest.mark.slow),
    ],
)
def test_many_steps_fuse(loss, steps):
    report = compare(step_of(loss, steps), inputs()).check().report
    assert report.num_fused == len(report.sites) == 1, report


@pytest.mark.slow
def test_a_limit_is_said():
    report = explain(step_of(chain, 2100), *inputs())
    assert report.num_fused == 0
    assert "an expression that is too large to be analysed" in report.details()


def of_layers(count):
    """A row program and a loss that stays, of each layer; the sums stand in one total."""

    def loss(h, w, g, v):
        total = h.new_zeros(())
        for i in range(count):
            p, q = (h @ (w * (i + 1.0)).T).softmax(-1), (g @ (v * (i + 1.0)).T).softmax(-1)
            total = total + (p.sqrt() - q).abs().pow(1.5).sum(-1).mean()
            p, q = (h @ (w * (i + 0.5)).T).softmax(-1), (g @ (v * (i + 0.5)).T).softmax(-1)
            total = total + (q.sort(-1).values * (q.log() - p.log())).sum(-1).mean()
        return total

    return loss


@pytest.mark.parametrize("count", [4, 16])
def test_many_sums_and_reasons_are_found_by_few_walks(count, monkeypatch):
    """What a graph has is collected once, and what a sum reads once for all pairs of sums."""
    calls = Counter()

    def counted(module, name):
        function = getattr(module, name)

        def call(*args):
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, call)

    counted(row_sums, "under_no_grad")
    counted(row_plans, "products_in")
    counted(unfused, "_OfPrograms")
    shapes = (6, 8), (40, 8), (6, 5), (40, 5)
    tensors = [torch.randn(n, requires_grad=i < 2) for i, n in enumerate(shapes)]
    options = {"streamkl.min_mib": 0, "streamkl.verify": "never"}
    report = explain(of_layers(count), *tensors, options=options)
    assert report.num_fused == count and report.num_unfused == 1, report  # alike: said once
    assert calls["under_no_grad"] == calls["_OfPrograms"] == 1
    assert calls["products_in"] < 20 * count
