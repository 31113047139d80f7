"""Products that autocast makes in a narrower type than their operands, or of two types."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.compiling import compile_rewritten
from tests.support.covering import every
from tests.support.losses import kd as divergence
from torch_streamkl.fx_passes import backend


def run(step):
    """The value and gradients in eager mode and compiled."""
    results = []
    inputs = [torch.randn(2, 3, n, 4, requires_grad=i < 2) for i, n in enumerate((5, 7, 5, 7))]
    with backend.collected() as report:
        for fn in (step, compile_rewritten(step, inner="aot_eager", verify="never")):
            value = fn(*inputs)
            gradients = torch.autograd.grad(value.float().sum(), inputs[:2])
            results.append([value.detach(), *gradients])
    assert not report.failures
    return *results, report


COMPARISONS = {
    "with the largest": lambda s, t: torch.where(
        s >= s.amax(-1, keepdim=True).detach(), s.log_softmax(-1), 0.0
    ),
    "with the other side": lambda s, t: (s > t) * s.softmax(-1),
    "of probabilities": lambda s, t: torch.where(t.softmax(-1) > 0.1, s.softmax(-1), 0.0),
    "for equality": lambda s, t: (s == t) * s.softmax(-1) + t.softmax(-1) * s,
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", COMPARISONS)
def test_scores_that_autocast_rounds_are_not_compared(name, dtype, inside):
    """A comparison sees what they were rounded to: two of them may be equal."""

    def step(q, k, r, s):
        with torch.autocast("cpu", dtype=dtype):
            a, b = q @ k.mT, r @ s.mT
            if inside:
                return COMPARISONS[name](a, b).sum(-1)
        return COMPARISONS[name](a.float(), b.float()).sum(-1)

    eager, compiled, report = run(step)
    assert report.num_fused == 0
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def entropy(s, t):
    logs = s.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def squares(s, t):
    return ((s.softmax(-1) - t.softmax(-1)) ** 2).sum(-1).mean()


def half_of(k):
    return k.bfloat16().mT


PRODUCTS = {
    "matmul": lambda q, k: q @ half_of(k),
    "matmul, the other": lambda q, k: q.bfloat16() @ k.mT,
    "einsum": lambda q, k: torch.einsum("bhnd,bhdm->bhnm", q, half_of(k)),
    "baddbmm": lambda q, k: torch.baddbmm(
        torch.zeros(1), q.flatten(0, 1), half_of(k.flatten(0, 1))
    ).unflatten(0, q.shape[:2]),
    "linear": lambda q, k: F.linear(q, k[0, 0].bfloat16()),
    "linear with a bias": lambda q, k: F.linear(q, k[0, 0].bfloat16(), k[0, 0, :, 0]),
}


@pytest.mark.parametrize("loss", every(2, [divergence, entropy, squares]))
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_two_types(name, loss):
    """Autocast takes them; the analysis runs the code without it."""

    def step(q, k, r, s):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a, b = PRODUCTS[name](q, k), PRODUCTS[name](r, s)
        return loss(a.float(), b.float())

    eager, compiled, report = run(step)
    assert report.num_fused == 1, str(report)
    for a, b in zip(eager, compiled, strict=True):
        assert (a - b).norm() <= 2.0**-5 * a.norm()
