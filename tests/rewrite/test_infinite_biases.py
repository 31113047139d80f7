"""A mask that is added as a tensor: what -inf makes of a divergence is what eager code makes."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare

# of keys without probability each is 0 in eager code, as 0 log 0 is in `xlogy` and `kl_div`
LOSSES = {
    "half of the target": lambda p, s: F.kl_div((s + 1e-9).log(), 0.5 * p, reduction="sum"),
    "square of the target": lambda p, s: F.kl_div((s + 1e-9).log(), p**2, reduction="sum"),
    "product": lambda p, s: torch.xlogy(p * s, p * s).sum(),
    "plain": lambda p, s: F.kl_div((s + 1e-9).log(), p, reduction="sum"),
}


def fused(program, inputs):
    """A compiled program with one site, and its inputs: leaves in the places of the first two."""
    inputs = [x.requires_grad_(i < 2) for i, x in enumerate(inputs)]
    outcome = compare(program, inputs, verify="never")
    assert outcome.num_fused == 1, outcome.report
    return outcome


def maps(*leading, dtype=torch.float64):
    return [torch.randn(*leading, n, 4, dtype=dtype) for n in (5, 7, 5, 7)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_head", [False, True])
def test_minus_infinity_in_a_bias_of_both_sides(name, is_head):
    bias = torch.zeros(7) if is_head else torch.zeros(2, 1, 1, 7)
    bias[..., 3:5] = -math.inf

    def step(q, k, r, s, bias):
        return LOSSES[name]((r @ s.mT + bias).softmax(-1), (q @ k.mT + bias).softmax(-1))

    fused(step, [*maps(*([] if is_head else [2, 3]), dtype=torch.float32), bias]).check()


# ------------------------------------------------------------------- a mask of the student alone
def added(x, keep):
    return x + torch.where(keep, 0.0, -math.inf).to(x.dtype)


def filled(x, keep):
    return x.masked_fill(~keep, -math.inf)


def by_hand(x):
    masked = added(x, NARROW)
    return masked - masked.logsumexp(-1, keepdim=True)


NARROW = torch.tensor([True, False, True, True, False, True, True])
WIDE = torch.tensor([True, False, True, True, True, True, False])
OTHERS, ALL = NARROW & WIDE, NARROW | True
# how scores are masked, which keys are left, and which have the gradient of the scores
MASKED = {
    "added": (lambda x: added(x, NARROW), NARROW, ALL),
    "filled": (lambda x: filled(x, NARROW), NARROW, NARROW),
    "added twice": (lambda x: added(added(x, NARROW), WIDE), OTHERS, ALL),
    "added, then filled": (lambda x: filled(added(x, NARROW), WIDE), OTHERS, WIDE),
    "filled, then added": (lambda x: added(filled(x, NARROW), WIDE), OTHERS, NARROW),
    "added and filled": (lambda x: filled(added(x, NARROW), NARROW), NARROW, NARROW),
    "added, then scaled": (lambda x: 2.0 * added(0.5 * x, NARROW), NARROW, ALL),
    "normalised by hand": (by_hand, NARROW, ALL),
    # entries that linear_kl leaves out
    "added to the last": (lambda x: added(x, torch.arange(7) < 5), torch.arange(7) < 5, ALL),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("leading", [(2, 2), ()], ids=["attention", "head"])
def test_gradient_at_keys_that_only_the_student_lacks(name, leading):
    """What is added to a score leaves its gradient, what is filled in does not.

    The loss is infinite, and d loss / d score = S - P is not: -P at a key that S lacks.
    """
    mask, kept, has_gradient = MASKED[name]
    q, k, r, s = maps(*leading)

    def step(q, k, r, s):
        return F.kl_div(mask(q @ k.mT).log_softmax(-1), (r @ s.mT).softmax(-1), reduction="sum")

    found = fused(step, [q, k, r, s]).compiled.gradients
    q, k = q.detach(), k.detach()
    slope = (filled(q @ k.mT, kept).softmax(-1) - (r @ s.mT).softmax(-1)) * has_gradient
    torch.testing.assert_close(found, [slope @ k, slope.mT @ q])


def test_log_probabilities_that_are_filled_with_zero():
    """The gradient and value of a divergence whose logarithms are 0 where a mask removes keys."""

    def step(q, k, r, s, keep):
        logs = filled(q @ k.mT, keep).log_softmax(-1).masked_fill(~keep, 0.0)
        return F.kl_div(logs, filled(r @ s.mT, keep).softmax(-1), reduction="sum")

    q, k, r, s = maps(2, 2, dtype=torch.float32)
    outcome = fused(step, [q, k, r, s, NARROW]).check()
    t, s = ((x @ y.mT)[..., NARROW].double().log_softmax(-1) for x, y in ((r, s), (q, k)))
    expected = (t.exp() * (t - s)).sum().detach()
    torch.testing.assert_close(outcome.compiled.outputs[0].double(), expected, rtol=1e-5, atol=0)
