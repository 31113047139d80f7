"""What a reader of the analysis found, who did not write its rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare

WITHOUT_CHECK = {"streamkl.verify": "never"}


def maps(head_dim: int = 4) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    sizes = (5, 7, 5, 7)
    return [
        torch.randn(2, 2, n, head_dim, generator=make).requires_grad_(i < 2)
        for i, n in enumerate(sizes)
    ]


# ------------------------------------------------- a maximum with gradient here, and without there
def in_the_difference_only(q, k, qt, kt):
    s = q @ k.mT
    total = (s - s.amax(-1, keepdim=True).detach()).exp().sum(-1, keepdim=True)
    logs = s - s.amax(-1, keepdim=True) - total.log()
    return F.kl_div(logs, (qt @ kt.mT).softmax(-1), reduction="sum")


def in_the_sum_only(q, k, qt, kt):
    s = q @ k.mT
    with torch.no_grad():
        largest = s.amax(-1, keepdim=True)
    total = (s - s.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    return F.kl_div(s - largest - total.log(), (qt @ kt.mT).softmax(-1), reduction="sum")


def in_the_quotient(q, k, qt, kt):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    total = (s - s.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    return F.kl_div((e / total).log(), (qt @ kt.mT).softmax(-1), reduction="sum")


def in_both(q, k, qt, kt):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True)).exp()
    logs = (e / e.sum(-1, keepdim=True)).log()
    return F.kl_div(logs, (qt @ kt.mT).softmax(-1), reduction="sum")


def in_neither(q, k, qt, kt):
    s = q @ k.mT
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    logs = (e / e.sum(-1, keepdim=True)).log()
    return F.kl_div(logs, (qt @ kt.mT).softmax(-1), reduction="sum")


@pytest.mark.parametrize(
    ("program", "remaining"),
    [
        (in_the_difference_only, 1),
        (in_the_sum_only, 1),
        (in_the_quotient, 1),
        (in_both, 0),
        (in_neither, 0),
    ],
)
def test_gradient_of_a_maximum(program: Callable[..., Tensor], remaining: int) -> None:
    """Where the maximum has a gradient, it stays a value of the rows, and its scores remain."""
    outcome = compare(program, maps(), options=WITHOUT_CHECK).check()
    assert outcome.num_fused == 1, str(outcome.report)
    assert outcome.report.num_remaining == remaining, str(outcome.report)


# --------------------------------------------------------------------- a batch without any label
def plain(ce: Tensor) -> Tensor:
    return ce


def guarded(ce: Tensor) -> Tensor:
    return torch.where(ce.isnan(), 0.0, ce)


@pytest.mark.parametrize("guard", [plain, guarded])
@pytest.mark.parametrize("num_labels", [0, 1, 6])
def test_gradients_beside_labels_that_are_ignored(
    guard: Callable[[Tensor], Tensor], num_labels: int
) -> None:
    def step(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        z = h @ w.T
        rows = F.kl_div(z.log_softmax(-1), (ht @ wt.T).softmax(-1), reduction="none").sum(-1)
        return rows.sum() + guard(F.cross_entropy(z, labels))

    make = torch.Generator().manual_seed(0)
    sizes = ((6, 4), (11, 4), (6, 5), (11, 5))
    inputs = [torch.randn(*s, generator=make) for s in sizes]
    labels = torch.full((6,), -100)
    labels[:num_labels] = torch.arange(num_labels)
    given = [x.requires_grad_(i < 2) for i, x in enumerate(inputs)]
    compiled = torch.compile(
        step, backend="streamkl", options={"streamkl.inner": "aot_eager", "streamkl.strict": True}
    )
    results = []
    for run in (step, compiled):
        value = run(*given, labels)
        results.append([value, *torch.autograd.grad(value, given[:2])])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    assert all(g.isfinite().all() for g in results[1][1:])


# -------------------------------------------------------------------- attention next to the loss
def test_matmul_by_keyword() -> None:
    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        out = torch.matmul(input=p, other=k)
        loss = F.kl_div(p.log(), (qt @ kt.mT).softmax(-1), reduction="sum")
        return loss + out.square().sum()

    outcome = compare(step, maps(), options=WITHOUT_CHECK).check()
    assert not outcome.report.failures


def test_heads_of_nothing() -> None:
    def step(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        loss = F.kl_div(p.log(), (qt @ kt.mT).softmax(-1), reduction="sum")
        return loss + (p @ k).sum()

    outcome = compare(step, maps(head_dim=0), options=WITHOUT_CHECK)
    assert not outcome.report.failures


# -------------------------------------------------- functions of a probability that underflows
FUNCTIONS = {
    "a half": lambda p: p / 2,
    "nine tenths": lambda p: p * 0.9,
    "the square": lambda p: p**2,
    "the square root": lambda p: p.sqrt(),
    "a half of the square": lambda p: 0.5 * p * p,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("by", ["kl_div", "xlogy"])
def test_a_function_of_a_probability_that_underflows(name: str, by: str) -> None:
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        wanted, got = FUNCTIONS[name]((qt @ kt.mT).softmax(-1)), (q @ k.mT).log_softmax(-1)
        if by == "kl_div":
            return F.kl_div(got, wanted, reduction="sum")
        return (torch.xlogy(wanted, wanted) - wanted * got).sum()

    q, k, qt, kt = maps()
    scores = ((qt * 60) @ kt.mT).detach()
    assert scores.softmax(-1).min() == 0.0
    outcome = compare(
        loss,
        [q, k, (qt * 60).detach(), kt.detach()],
        options=WITHOUT_CHECK,
        largest_score=float(scores.abs().max()),
    )
    assert outcome.compiled.outputs[0].isfinite()
    assert outcome.num_fused == 1, str(outcome.report)
    outcome.check()
