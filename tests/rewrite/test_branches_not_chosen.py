"""What `where` does not choose: its gradient is 0, and not 0 times a derivative that overflows.

Scores are some hundreds, whose exponential float32 does not hold, and some that float64 does not.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.rewrite.test_row_program_counterexamples import judge, scores, tensors
from tests.support.misleading_programs import run

SIZE = 400.0  # of an operand of the scores
LARGE = 20.0
INFINITY = torch.inf

# of a score, or of a number of its row: each is finite in eager code
SAFE = {
    "expm1": lambda x, big: torch.where(big, x, torch.where(big, 0.0, x).expm1()),
    "a branch on the left": lambda x, big: torch.where(~big, x.masked_fill(big, 0.0).exp(), x),
    "softplus": lambda x, big: torch.where(big, x, torch.where(big, 0.0, x).exp().log1p()),
    "cosh": lambda x, big: torch.where(
        x.abs() > LARGE, x, x.masked_fill(x.abs() > LARGE, 0.0).cosh()
    ),
    "sinh": lambda x, big: torch.where(
        x.abs() > LARGE, x, x.masked_fill(x.abs() > LARGE, 0.0).sinh()
    ),
    "exp2": lambda x, big: torch.where(big, x, torch.where(big, 1.0, x).exp2()),
    "two conditions": lambda x, big: torch.where(
        big, x, torch.where(x < -3.0, -3.0, x.masked_fill(big | (x < -3.0), 0.0).exp())
    ),
    "a fill of -inf": lambda x, big: x.masked_fill(big, -INFINITY).exp(),
    "a multiple with it": lambda x, big: (1.5 * x.masked_fill(big, -INFINITY) + 2.0).exp(),
    "log": lambda x, big: torch.where(big, torch.where(big, x, 1.0).log(), 0.0),
    "a quotient": lambda x, big: torch.where(big, 1.0 / torch.where(big, x, 1.0), 0.0),
    "a root": lambda x, big: torch.where(big, torch.where(big, x, 1.0).sqrt(), 0.0),
    "a power": lambda x, big: torch.where(big, torch.where(big, x, 1.0) ** -1.5, 0.0),
}  # fmt: skip


def judged(step, inputs, sites):
    eager = run(step, inputs)
    for x in (*eager.outputs, *eager.gradients):
        assert x is not None and bool(x.isfinite().all())
    judge(step, inputs, sites)


@pytest.mark.parametrize("name", SAFE)
def test_functions_of_scores(name):
    def step(q, k, r, s, w, keep):
        z, t = scores(q, k, r, s)
        return (SAFE[name](z, z > LARGE) * t.softmax(-1)).sum(-1)

    judged(step, tensors("qk", SIZE), 1)


WEIGHTS = {
    "of a captured tensor": lambda q, z, t: q.sum(-1, keepdim=True) * 3.0,
    "of one that is 0": lambda q, z, t: q.sum(-1, keepdim=True).relu(),
    "of a value of the row": lambda q, z, t: 1e3 * (z.softmax(-1) * t).sum(-1, keepdim=True),
    "of one with its keys": lambda q, z, t: q.sum(-1, keepdim=True) * t.detach() * 3.0,
}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", SAFE)
def test_weights(name, weight):
    """They are torch code next to an operator, or captured by a program."""

    def step(q, k, r, s, w, keep):
        z, t = scores(q / SIZE, k, r, s)
        x = WEIGHTS[weight](q, z, t)
        divergence = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none")
        return (divergence * SAFE[name](x, x > LARGE)).sum(-1)

    judged(step, tensors("qk", SIZE), None)


# ------------------------------------------------------ softmaxes by hand
SUMS = {
    "an epsilon": lambda e, keep: e / (e.sum(-1, keepdim=True) + 1e-8),
    "a bound": lambda e, keep: e / e.sum(-1, keepdim=True).clamp(min=1e-6),
    "of visible keys": lambda e, keep: e * keep / ((e * keep).sum(-1, keepdim=True) + 1e-8),
    "none": lambda e, keep: e,
}


@pytest.mark.parametrize("trained", ["qk", "rs", "qkrs"])
@pytest.mark.parametrize("fill", [-1e9, -1e4, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("name", SUMS)
def test_softmaxes_by_hand_of_hidden_rows(name, fill, trained):
    """The largest score of a row that a mask hides is the fill: no other score is next to it."""

    def step(q, k, r, s, w, keep):
        z, t = scores(q, k, r, s)
        t = t.masked_fill(~keep, fill)
        e = (t - t.amax(-1, keepdim=True).detach()).exp()
        h = SUMS[name](e, keep)
        return (h * (1e-6 + h).log() - h * z.log_softmax(-1)).masked_fill(~keep, 0.0).sum(-1)

    judged(step, tensors(trained), 1)


def test_softmaxes_by_hand_without_a_shift_are_closed_forms():
    """With a mask of -inf, as before an exponential that is written where the mask is."""

    def step(q, k, r, s, w, keep):
        keep = torch.ones(keep.shape, dtype=torch.bool).tril()
        z, t = (x.masked_fill(~keep, -INFINITY) for x in scores(q, k, r, s))
        h = t.exp() / t.exp().sum(-1, keepdim=True)
        return F.kl_div(z.log_softmax(-1).masked_fill(~keep, 0.0), h, reduction="none").sum(-1)

    judged(step, tensors("qk"), 1)
