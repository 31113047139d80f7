"""Digits next to 1: log(1 + x) of a small x, and what probabilities of nearly 1 leave of it.

In programs, and in torch code around operators. And digits of products of small differences.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.compiling import compile_rewritten
from torch_streamkl.fx_passes import backend

SMALL = 1e-6  # next to 1 it has one digit left in float32
TOLERANCE = 2e-6  # of the largest: some roundings, where lost digits are a tenth

# of scores, of both sides
ELEMENTS = {
    "a product": lambda s, t: t.softmax(-1) * (SMALL * s * s).log1p(),
    "its magnitude": lambda s, t: t.softmax(-1) * (SMALL * s * s).log1p().abs(),
    "a difference": lambda s, t: t.softmax(-1) * (SMALL * s - SMALL * t * t).log1p().abs(),
    "two that are subtracted": lambda s, t: t.softmax(-1)
    * (-SMALL * s.sigmoid() - SMALL * t * t).log1p().abs(),
    "a quotient": lambda s, t: t.softmax(-1) * (SMALL * s.sigmoid() / t.cosh()).log1p().abs(),
}  # fmt: skip
EPS = 1e-6
# of the student's and the teacher's probabilities, some of which are 1 or nearly 1
PROBABILITIES = {
    "binary": lambda s, t: -(t * (s + EPS).log() + (1 - t) * (1 - s + EPS).log()),
    "a small number first": lambda s, t: -(1 - t) * (1 + EPS - s).log(),
    "another small number": lambda s, t: -(1 - t) * (1 - s + 1e-4).log(),
    "a tiny one": lambda s, t: -(1 - t) * (1 - s + 1e-8).log(),
    "odds": lambda s, t: t * ((s + EPS) / (1 - s + EPS)).log(),
    "a power": lambda s, t: -t * (1 - s + EPS) ** 0.5 * (s + EPS).log(),
    "a quotient": lambda s, t: t / (1 - s + 1e-3),
    "a square": lambda s, t: (1 - s) ** 2 * t,
}  # fmt: skip
# of the student's and the teacher's scores, which are nearly equal
DIFFERENCES = {
    "square roots": lambda s, t: (
        ((0.5 * s.log_softmax(-1)).exp() - (0.5 * t.log_softmax(-1)).exp()).square().sum(-1)
    ),
    "logarithms": lambda s, t: (s.log_softmax(-1) - t.log_softmax(-1)).square().sum(-1),
    "by probabilities": lambda s, t: (
        t.softmax(-1) * (s.log_softmax(-1) - t.log_softmax(-1)).square()
    ).sum(-1),
    "from a mean": lambda s, t: ((s.softmax(-1) - 0.02) * (t.softmax(-1) - 0.02)).sum(-1),
}
# of hidden states
WEIGHTS = {
    "a square": lambda h: (SMALL * h.square().sum(-1, keepdim=True)).log1p(),
    "of any sign": lambda h: (SMALL * h.sum(-1, keepdim=True)).log1p(),
    "of any sign, negative": lambda h: -(-SMALL * h.sum(-1, keepdim=True)).log1p(),
    "in a function": lambda h: (SMALL * h.sum(-1, keepdim=True)).log1p().abs(),
}


def _drawn():
    make = torch.Generator().manual_seed(0)
    return [torch.randn(n, 4, generator=make, dtype=torch.float64) for n in (6, 50, 6, 50)]


def _judge(program, inputs, within=4):
    """As exact as eager code, but for some roundings: ``within`` so many times its errors."""

    def run(fn, dtype):
        given = [x.to(dtype).requires_grad_(i < 2) for i, x in enumerate(inputs)]
        rows = fn(*given)
        return [rows.detach(), *torch.autograd.grad(rows.sum(), given[:2])]

    with backend.collected() as report:
        found = run(compile_rewritten(program, verify="never"), torch.float32)
    assert report.num_fused == 1, str(report)
    eager = run(program, torch.float32)
    for x, near, exact in zip(found, eager, run(program, torch.float64), strict=True):
        size = exact.abs().max()
        allowed = within * (near.double() - exact).abs().max() + TOLERANCE * size
        assert (x.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("name", ELEMENTS)
def test_in_programs(name):
    _judge(lambda q, k, r, u: ELEMENTS[name](q @ k.mT, r @ u.mT).sum(-1), _drawn())


@pytest.mark.parametrize("name", PROBABILITIES)
def test_of_probabilities(name):
    """Scores are up to 90: with one log-sum-exp a row's probabilities are 1 + 4e-6."""

    def program(q, k, r, u):
        return PROBABILITIES[name]((q @ k.mT).softmax(-1), (r @ u.mT).softmax(-1)).sum(-1)

    make = torch.Generator().manual_seed(0)
    inputs = [1.7 * torch.randn(2, 40, 8, generator=make).double() for _ in range(4)]
    _judge(program, inputs, within=10)


# of the student's probabilities and their logarithms
FOCAL = {
    "of the student": lambda p, log_p, t: (1 - p + EPS) ** 0.5 * t * log_p,
    "a square": lambda p, log_p, t: (1.5 - p) ** 2 * t * log_p,
    "the teacher first": lambda p, log_p, t: t * (1 - p + EPS) ** 0.5 * log_p,
}


@pytest.mark.parametrize("name", FOCAL)
def test_of_the_lowest_number(name):
    """A bit more than 1 times the logarithm of a masked key is infinite; 0 comes first."""

    def program(q, k, r, u):
        allowed = torch.ones(40, 40, dtype=torch.bool).tril()
        lowest = torch.finfo(q.dtype).min
        s, t = ((x @ y.mT).masked_fill(~allowed, lowest) for x, y in ((q, k), (r, u)))
        return FOCAL[name](s.softmax(-1), s.log_softmax(-1), t.softmax(-1)).sum(-1)

    make = torch.Generator().manual_seed(0)
    inputs = [0.5 * torch.randn(2, 40, 8, generator=make).double() for _ in range(4)]
    _judge(program, inputs, within=10)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_of_differences(name):
    """If products of sums are not kept, their terms are up to 1e8 times what is left."""
    make = torch.Generator().manual_seed(0)
    q, k = (0.01 * torch.randn(n, 4, generator=make, dtype=torch.float64) for n in (6, 50))
    inputs = q, k, q + 1e-4 * q.roll(1, 0), k + 1e-4 * k.roll(1, 0)
    _judge(lambda q, k, r, u: DIFFERENCES[name](q @ k.mT, r @ u.mT), inputs, within=10)


@pytest.mark.parametrize("name", WEIGHTS)
def test_in_weights_of_rows(name):
    def program(q, k, r, u):
        divergence = F.kl_div((q @ k.mT).log_softmax(-1), (r @ u.mT).softmax(-1), reduction="none")
        return (divergence * WEIGHTS[name](q)).sum(-1)

    _judge(program, _drawn())
