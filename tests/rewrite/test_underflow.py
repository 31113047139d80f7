"""Probabilities that are 0 by underflow, and numbers that are small next to them."""

import pytest
import torch
import torch.nn.functional as F

from tests.rewrite.test_row_program_counterexamples import judge
from tests.support.comparing import compare

ROWS, KEYS, WIDTH = 5, 7, 4
APART = 30.0  # factor of both operands: some scores are 1000 apart

# of probabilities p and q, and of their log-softmaxes
GUARDS = {
    "where p > 0, log": lambda p, q: q * (q.log() - torch.where(p > 0, p.log(), 0.0)),
    "where p == 0, number": lambda p, q: -q * torch.where(p == 0, -23.0, p.log()),
    "where both > 0": lambda p, q: torch.where((q > 0) & (p > 0), q * (q.log() - p.log()), 0.0),
    "where p > 0, quotient": lambda p, q: p * torch.where(p > 0, q / p, 0.0),
    "log of a quotient": lambda p, q: torch.where(p > 0, q * (q / p).log(), 0.0),
    "nan_to_num of log": lambda p, q: q * (q.log() - p.log().nan_to_num(neginf=-30.0)),
    "isinf of log": lambda p, q: (q * -p.log()).masked_fill(p.log().isinf(), 0.0),
    "isfinite of log": lambda p, q: torch.where(p.log().isfinite(), q * (q.log() - p.log()), 0.0),
    "kl_div": lambda p, q: F.kl_div(p.log().nan_to_num(neginf=0.0), q, reduction="none"),
}  # fmt: skip
# of which a quotient is NaN where both are 0
QUOTIENTS = {
    "nansum": lambda p, q: ((p - q) ** 2 / (p + q)).nansum(-1),
    "nan_to_num": lambda p, q: ((p - q) ** 2 / (p + q)).nan_to_num(0.5).sum(-1),
    "where": lambda p, q: torch.where(p + q > 0, p * q / (p + q), 0.25).sum(-1),
    "nansum of a square": lambda p, q: (((p - q) / (p + q)) ** 2).nansum(-1).sqrt(),
}  # fmt: skip
# where the other branch is the limit of the first: they are closed forms
LIMITS = {
    "q > 0": lambda q, log_q, log_p: torch.where(q > 0, q * (q.log() - log_p), 0.0),
    "log q": lambda q, log_q, log_p: q * torch.where(q > 0, q.log(), 0.0) - q * log_p,
    "isinf": lambda q, log_q, log_p: (q * (log_q - log_p)).masked_fill(log_p.isinf(), 0.0),
    "-inf": lambda q, log_q, log_p: (q * (log_q - log_p)).masked_fill(log_p == -torch.inf, 0.0),
    "nan": lambda q, log_q, log_p: (q * (log_q - log_p)).nan_to_num(),
}
MASKS = {
    "no mask": lambda s, keep: s,
    "-inf": lambda s, keep: s.masked_fill(~keep, -torch.inf),
    "lowest": lambda s, keep: s.masked_fill(~keep, torch.finfo(s.dtype).min),
    "-1e4 added": lambda s, keep: s + torch.where(keep, 0.0, -1e4).to(s.dtype),
}


def operands(scale, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = ((ROWS, scale), (KEYS, scale), (ROWS, 1.0), (KEYS, 1.0))
    return [(torch.randn(n, WIDTH, dtype=dtype) * s).requires_grad_(s == scale) for n, s in sizes]


@pytest.mark.parametrize("quotient", QUOTIENTS.values(), ids=QUOTIENTS)
def test_quotients_of_two_zeros(quotient):
    def loss(h, w, t, v):
        return quotient((h @ w.T).softmax(-1), (t @ v.T).softmax(-1)).sum()

    inputs = operands(APART)
    with torch.no_grad():
        for x in inputs[2:]:
            x *= APART
    judge(loss, inputs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("guard", GUARDS)
def test_guards(guard, mask):
    def loss(x, w, y, u):
        keep = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS)
        p, q = (MASKS[mask](a @ b.mT, keep).softmax(-1) for a, b in ((x, w), (y, u)))
        return GUARDS[guard](p, q).nansum(-1)

    judge(loss, [x.detach() for x in operands(APART)])  # eager code's gradients are NaN


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("guard", LIMITS)
def test_guards_that_change_nothing(guard, mask):
    def loss(x, w, y, u):
        keep = torch.ones(ROWS, KEYS, dtype=torch.bool).tril(KEYS - ROWS)
        s, t = (MASKS[mask](a @ b.mT, keep) for a, b in ((x, w), (y, u)))
        return LIMITS[guard](t.softmax(-1), t.log_softmax(-1), s.log_softmax(-1)).sum(-1)

    report = judge(loss, operands(1.0))
    assert report.num_fused == 1 and "row_program" not in str(report), report


# of a probability, the other one, and a small number; next to 1 - p, only a probability of 1
# itself is well conditioned
EPSILONS = {
    "next to 1 - p": (1.0, lambda p, q, eps: -(q * (1 - p + eps).log())),
    "binary": (1.0, lambda p, q, eps: -(q * (p + eps).log() + (1 - q) * (1 - p + eps).log())),
    "odds": (1.0, lambda p, q, eps: q * ((p + eps) / (1 - p + eps)).log()),
    "of a logarithm": (4.0, lambda p, q, eps: -(q * (p + eps).log())),
    "of both": (4.0, lambda p, q, eps: q * ((q + eps).log() - (p + eps).log())),
    "of a product": (4.0, lambda p, q, eps: q * (p * q + eps).log()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-6, 1e-8, 1e-13, 1e-20])
@pytest.mark.parametrize("name", EPSILONS)
def test_small_numbers(name, eps, dtype):
    """A causal row of one key has a probability of 1; others are far below the number."""
    scale, of = EPSILONS[name]

    def loss(x, w, y, u):
        keep = torch.ones(ROWS, KEYS, dtype=torch.bool).tril()
        p, q = ((a @ b.mT).masked_fill(~keep, -1e9).softmax(-1) for a, b in ((x, w), (y, u)))
        return of(p, q, eps).sum(-1)

    if dtype == torch.float64:
        judge(loss, operands(scale))
    else:
        compare(loss, [x.detach() for x in operands(scale, dtype)]).check()
