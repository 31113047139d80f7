"""A mask that is added as a tensor: what -inf makes of a divergence is what eager code makes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.reporting.report import Report

# of keys without probability each is 0 in eager code, as 0 log 0 is in `xlogy` and `kl_div`
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "half of the target": lambda p, s: F.kl_div((s + 1e-9).log(), 0.5 * p, reduction="sum"),
    "square of the target": lambda p, s: F.kl_div((s + 1e-9).log(), p**2, reduction="sum"),
    "product": lambda p, s: torch.xlogy(p * s, p * s).sum(),
    "plain": lambda p, s: F.kl_div((s + 1e-9).log(), p, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_head", [False, True])
def test_minus_infinity_in_a_bias_of_both_sides(name: str, is_head: bool) -> None:
    make = torch.Generator().manual_seed(0)
    lead = () if is_head else (2, 3)
    q, k, r, s = (torch.randn(*lead, n, 4, generator=make) for n in (5, 7, 5, 7))
    bias = torch.zeros(7) if is_head else torch.zeros(2, 1, 1, 7)
    bias[..., 3:5] = -math.inf

    def step(q: Tensor, k: Tensor, r: Tensor, s: Tensor, bias: Tensor) -> Tensor:
        teacher, student = (r @ s.mT + bias).softmax(-1), (q @ k.mT + bias).softmax(-1)
        return LOSSES[name](teacher, student)

    given = [q.requires_grad_(), k.requires_grad_(), r, s, bias]
    options = {"streamkl.min_mib": 0.0, "streamkl.verify": "never"}
    outcome = compare(step, given, options=options).check()
    assert outcome.num_fused == 1, outcome.report


# ------------------------------------------------------------------- a mask of the student alone
def added(x: Tensor, keep: Tensor) -> Tensor:
    return x + torch.where(keep, 0.0, -math.inf).to(x.dtype)


def filled(x: Tensor, keep: Tensor) -> Tensor:
    return x.masked_fill(~keep, -math.inf)


def by_hand(x: Tensor, keep: Tensor) -> Tensor:
    masked = added(x, keep)
    return masked - masked.logsumexp(-1, keepdim=True)


NARROW = torch.tensor([True, False, True, True, False, True, True])
WIDE = torch.tensor([True, False, True, True, True, True, False])
OTHERS = NARROW & WIDE
# how scores are masked, which keys are left, and which have the gradient of the scores
MASKED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Tensor]] = {
    "added": (lambda x: added(x, NARROW), NARROW, NARROW | True),
    "filled": (lambda x: filled(x, NARROW), NARROW, NARROW),
    "added twice": (lambda x: added(added(x, NARROW), WIDE), OTHERS, NARROW | True),
    "added, then filled": (lambda x: filled(added(x, NARROW), WIDE), OTHERS, WIDE),
    "filled, then added": (lambda x: added(filled(x, NARROW), WIDE), OTHERS, NARROW),
    "added and filled": (lambda x: filled(added(x, NARROW), NARROW), NARROW, NARROW),
    "added, then scaled": (lambda x: 2.0 * added(0.5 * x, NARROW), NARROW, NARROW | True),
    "normalised by hand": (lambda x: by_hand(x, NARROW), NARROW, NARROW | True),
}


@pytest.mark.parametrize("name", MASKED)
def test_gradient_at_keys_that_only_the_student_lacks(name: str) -> None:
    """What is added to a score leaves its gradient, what is filled in does not.

    The loss is infinite, and d loss / d score = S - P is not: -P at a key that S lacks.
    """
    mask, kept, has_gradient = MASKED[name]
    make = torch.Generator().manual_seed(0)
    q, k, r, s = (
        torch.randn(2, 2, n, 4, generator=make, dtype=torch.float64) for n in (5, 7, 5, 7)
    )

    def step(q: Tensor, k: Tensor) -> Tensor:
        return F.kl_div(mask(q @ k.mT).log_softmax(-1), (r @ s.mT).softmax(-1), reduction="sum")

    torch._dynamo.reset()
    reports: list[Report] = []
    observe = reports.append
    backend.REPORTS.append(observe)
    try:
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        options = {
            "streamkl.inner": "eager",
            "streamkl.min_mib": 0.0,
            "streamkl.verify": "never",
        }
        torch.compile(step, backend="streamkl", options=options)(*leaves).backward()
    finally:
        backend.REPORTS.remove(observe)
    p = (r @ s.mT).softmax(-1)
    student = (q @ k.mT).masked_fill(~kept, -math.inf).softmax(-1)
    slope = (student - p) * has_gradient
    assert sum(x.num_fused for x in reports) == 1, reports
    torch.testing.assert_close(leaves[0].grad, slope @ k)
    torch.testing.assert_close(leaves[1].grad, slope.mT @ q)


def test_log_probabilities_that_are_filled_with_zero() -> None:
    """The gradient and value of a divergence whose logarithms are 0 where a mask removes keys."""
    make = torch.Generator().manual_seed(0)
    q, k, r, s = (torch.randn(2, 2, n, 4, generator=make) for n in (5, 7, 5, 7))

    def step(q: Tensor, k: Tensor, r: Tensor, s: Tensor, keep: Tensor) -> Tensor:
        logs = filled(q @ k.mT, keep).log_softmax(-1).masked_fill(~keep, 0.0)
        return F.kl_div(logs, filled(r @ s.mT, keep).softmax(-1), reduction="sum")

    given = [q.requires_grad_(), k.requires_grad_(), r, s, NARROW]
    options = {"streamkl.min_mib": 0.0, "streamkl.verify": "never"}
    outcome = compare(step, given, options=options).check()
    assert outcome.num_fused == 1, outcome.report
    kept = [(x @ y.mT).double()[..., NARROW].log_softmax(-1) for x, y in ((r, s), (q, k))]
    expected = (kept[0].exp() * (kept[0] - kept[1])).sum()
    torch.testing.assert_close(outcome.compiled.outputs[0].double(), expected, rtol=1e-5, atol=0)


def test_a_mask_of_the_vocabulary_that_is_added_to_the_student() -> None:
    """Of a head as well: the student's missing entries have the gradient -P of its logits."""
    make = torch.Generator().manual_seed(0)
    h, w, g, v = (torch.randn(n, 4, generator=make, dtype=torch.float64) for n in (6, 11, 6, 11))
    keep = torch.arange(11) < 9

    def step(h: Tensor) -> Tensor:
        logits = added(h @ w.mT, torch.arange(11) < 9)
        return F.kl_div(logits.log_softmax(-1), (g @ v.mT).softmax(-1), reduction="sum")

    torch._dynamo.reset()
    options = {"streamkl.inner": "eager", "streamkl.min_mib": 0.0, "streamkl.verify": "never"}
    leaf = h.clone().requires_grad_()
    torch.compile(step, backend="streamkl", options=options)(leaf).backward()
    student = filled(h @ w.mT, keep).softmax(-1)
    torch.testing.assert_close(leaf.grad, (student - (g @ v.mT).softmax(-1)) @ w)
