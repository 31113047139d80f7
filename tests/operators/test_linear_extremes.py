"""linear_kl where numbers are 0, infinite, or nearly one: against formulas of torch alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.operators.test_linear_kl import heads
from torch_streamkl import linear_kl


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "tv"])
@pytest.mark.parametrize("strategy", ["forward", "recompute"])
def test_rows_that_are_nearly_one_hot(divergence: str, strategy: str) -> None:
    """One row's logits are 30 times larger: rounding of its log-sum-exp is no gradient."""
    inputs = heads(16, (32, 24), (200, 200), torch.float32)
    with torch.no_grad():
        for hidden in inputs[::2]:
            hidden[3] *= 30.0

    def loss(xs, ws, xt, wt):
        log_s, log_p = (xs @ ws.t()).log_softmax(-1), (xt @ wt.t()).log_softmax(-1)
        p, s = log_p.exp(), log_s.exp()
        if divergence == "tv":
            return 0.5 * (p - s).abs().sum()
        if divergence == "forward_kl":
            return (p * (log_p - log_s)).sum()
        log_m = torch.logaddexp(log_p, log_s) - math.log(2.0)
        return 0.5 * (p * (log_p - log_m) + s * (log_s - log_m)).sum()

    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = torch.autograd.grad(loss(*exact), exact)
    naive_grads = torch.autograd.grad(loss(*inputs), inputs)
    value = linear_kl(*inputs, divergence=divergence, reduction="sum", strategy=strategy)
    partners = (inputs[1], inputs[0], inputs[3], inputs[2])
    for got, same, want, other in zip(
        torch.autograd.grad(value, inputs), naive_grads, truth, partners, strict=True
    ):
        rounding = torch.finfo(torch.float32).eps * float(other.abs().max())
        allowed = 2 * (same - want).abs().max() + rounding
        assert (got - want).abs().max() <= allowed


def test_weights_of_zero_learn():
    """The gradient of a weight is its row's loss wherever gradients are computed, also at 0."""
    inputs = heads(5, (8, 12), (40, 40), torch.float32)
    rows = linear_kl(*inputs).detach()
    frozen = [x.detach() for x in inputs]
    for call, options in (
        (inputs, {"strategy": "forward"}),
        (inputs, {"strategy": "recompute"}),
        (inputs, {"impl": "reference"}),
        (frozen, {}),
        ([x.half() for x in frozen], {}),
    ):
        weight = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.0], requires_grad=True)
        total = linear_kl(*call, row_weight=weight, reduction="sum", **options)
        (grad,) = torch.autograd.grad(total, weight)
        torch.testing.assert_close(grad, rows, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("divergence", ["forward_kl", "cross_entropy", "jeffreys", "js", "tv"])
def test_words_whose_probability_underflows(divergence: str, impl: str) -> None:
    """Words that the student lacks, at -200: as if they were at -inf, where float32 has 0."""
    xs, ws, xt, wt = heads(5, (8, 12), (10, 30), torch.float32)
    results = []
    for level in (-200.0, -math.inf):
        bias = torch.zeros(30)
        bias[10:] = level
        value = linear_kl(xs, ws, xt, wt, teacher_bias=bias, divergence=divergence, impl=impl)
        results.append([value, *torch.autograd.grad(value.sum(), (xs, ws, xt, wt))])
    for got, want in zip(*results, strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_no_tokens(reduction: str, impl: str) -> None:
    """An empty result, a sum of 0 with gradients 0, and torch's mean of nothing."""
    inputs = heads(0, (8, 12), (40, 40), torch.float32)
    labels = torch.zeros(0, dtype=torch.int64)
    for options in ({}, {"labels": labels}, {"row_mask": labels > 0}):
        given: dict[str, Any] = {"reduction": reduction, "impl": impl, **options}
        value = linear_kl(*inputs, **given)
        if reduction == "none":
            assert value.shape == (0,)
            continue
        assert value.isnan() if "mean" in reduction else value == 0.0
        grads = torch.autograd.grad(linear_kl(*inputs, **given | {"reduction": "sum"}), inputs)
        assert all(not g.any() for g in grads)
