"""What random programs and a third reading found around row programs: a test for each class."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rewrite.test_row_program_counterexamples import judge, tensors
from tests.support.comparing import compare
from tests.support.misleading.registry import student

LOWEST = torch.finfo(torch.float64).min
FILLS = [LOWEST, -1e9, -1e4, -800.0, -100.0, 1e4, -math.inf]


# ------------------------------------------------------ masks of finite numbers
HOW: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "filled": lambda x, keep, low: x.masked_fill(~keep, low),
    "chosen": lambda x, keep, low: torch.where(keep, x, low),
    "added": lambda x, keep, low: x + torch.zeros_like(x).masked_fill(~keep, low),
}
LOGARITHMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of a probability": lambda p, t: t * p.log(),
    "of a multiple": lambda p, t: t * (0.5 * p).log(),
    "of a quotient below": lambda p, t: t * (t / p).log(),
    "of a quotient above": lambda p, t: t * (p / t).log(),
    "in kl_div": lambda p, t: F.kl_div(p.log(), t, reduction="none"),
}


@pytest.mark.parametrize(("how", "low"), list(product(["filled", "chosen"], FILLS)))
@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_of_masked_probabilities(name: str, how: str, low: float) -> None:
    """They are -inf where the mask makes the probability 0, as in eager code."""

    def step(q, k, r, s, w, keep):
        p = HOW[how](student(q, k), keep, low).softmax(-1)
        return (w.abs() * LOGARITHMS[name](p, student(r, s).softmax(-1))).sum(-1)

    judge(step, tensors("qk"), 1)


@pytest.mark.parametrize("low", [LOWEST, -1e4, -math.inf])
def test_one_side_that_is_masked(low: float) -> None:
    """Of a divergence that an operator has: infinite in eager code, and so it is not its."""

    def step(q, k, r, s, w, keep):
        p = student(q, k).masked_fill(~keep, low).softmax(-1)
        return F.kl_div(p.log(), student(r, s).softmax(-1), reduction="none").sum(-1)

    judge(step, tensors("qk"))


def test_a_logarithm_that_other_code_takes_of_the_same_probabilities() -> None:
    """The log-softmax of a filled score is finite, whatever a loss next to it computes."""

    def step(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        s, t = (h @ w.mT).masked_fill(~keep, -1e4), ht @ wt.mT
        own = F.kl_div(s.log_softmax(-1), s.softmax(-1), reduction="none").sum(-1)
        return (t.softmax(-1) * s.log_softmax(-1)).sum(-1), own

    make = torch.Generator().manual_seed(0)
    shapes = ((6, 4), (11, 4), (6, 3), (11, 3))
    given = [torch.randn(x, generator=make).requires_grad_() for x in shapes]
    given.append(torch.arange(11) % 3 > 0)
    outcome = compare(step, given, options={"streamkl.verify": "never"}).check()
    assert outcome.num_fused and outcome.compiled.outputs[0].isfinite().all()


@pytest.mark.parametrize("low", [LOWEST, -1e9, -1e4])
@pytest.mark.parametrize("how", HOW)
def test_log_sum_exps_of_masked_scores_stay(how: str, low: float) -> None:
    """In a row without keys eager's is the fill: the count of keys is lost in it."""

    def step(q, k, r, s, w, keep):
        x = HOW[how](student(q, k), keep, low)
        weighted = w * student(r, s).softmax(-1).square()
        return ((x - x.logsumexp(-1, keepdim=True)).exp() * weighted).sum(-1)

    judge(step, tensors("qk"), 0)


def test_a_mask_that_is_added_as_a_tensor() -> None:
    def step(q, k, r, s, w, keep):
        x = student(q, k) + (1.0 - keep.double()) * -1e9
        weighted = w * student(r, s).softmax(-1).square()
        return x.logsumexp(-1) * weighted.sum(-1)

    judge(step, tensors("qk"))


# ------------------------------------------------------ parts, order, multiples
def test_a_part_of_a_dimension_of_one_that_is_empty() -> None:
    """Nothing is left to sum: 0, whatever a row without keys has."""

    def step(q, k, r, s, w, keep):
        x = (q[:, :1] @ k[:, :1].mT).masked_fill(~keep, -math.inf)
        return (x.log_softmax(-1) * w)[:, 1:].sum((0, 1, -1))

    judge(step, tensors("w"))


def test_an_operand_that_is_made_behind_the_first_sum() -> None:
    def step(q, k, r, s, w, keep):
        first = F.kl_div(q @ k.mT, (r * 1.0).softmax(-1) @ s.mT, reduction="batchmean")
        t = torch.bmm(r.flatten(0, 1), s.flatten(0, 1).mT).unflatten(0, r.shape[:2])
        p = t.softmax(-1)
        return first + (torch.xlogy(p, p) * w - p * (q @ k.mT)).sum(-1)

    judge(step, tensors("q"))


def test_multiples_of_a_probability_are_one() -> None:
    """0.9 P + 0.1 P is 0 where P is, and so is its product with its logarithm."""

    def step(q, k, r, s, w, keep):
        p = student(r, s).masked_fill(~keep, -1e4).softmax(-1)
        mixed = 0.9 * p + 0.1 * p.detach()
        return F.kl_div(student(q, k).log_softmax(-1), mixed, reduction="none").sum(-1)

    judge(step, tensors("qk"), 1)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1.0])
def test_cosines(dim: int, scale: float) -> None:
    """Norms below the bound, where the gradient flows as if they were not bounded."""

    def step(q, k, r, s, w, keep):
        p, t = student(q, k).softmax(-1) * w, student(r, s).softmax(-1) * scale
        return F.cosine_similarity(p, t, dim=dim)

    judge(step, tensors("qkrs"))


# ------------------------------------------------------ what reads a sum
READERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a ratio": (lambda x: (x - x.detach()).exp(), 1),
    "a clipped ratio": (lambda x: x.exp().clamp(0.8, 1.2), 1),
    "a fraction": (lambda x: x + (x > -2.0).double().mean(), 1),
    "the smaller": (lambda x: torch.minimum(x.exp(), x.exp().clamp(max=1.0)), 1),
    "asked": (lambda x: x.nan_to_num(3.0), 1),
}


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("name", READERS)
def test_readers_of_log_probabilities(name: str, bad: float | None) -> None:
    """Of a policy: NaN where eager's are, in the same rows."""
    function, sites = READERS[name]

    def step(q, k, r, s, w, keep):
        logs = student(q, k).log_softmax(-1)
        chosen = logs.gather(-1, torch.ones(*logs.shape[:-1], 1, dtype=torch.long)).squeeze(-1)
        return function(chosen) + (logs.exp() * logs).sum(-1)

    given = tensors("qk")
    if bad is not None:
        with torch.no_grad():
            given[0][0, 1, 2] = bad
    judge(step, given, 2 * sites)


@pytest.mark.parametrize("low", [-1e4, -math.inf])
def test_readers_of_masked_ones_stay(low: float) -> None:
    def step(q, k, r, s, w, keep):
        logs = student(q, k).masked_fill(~keep, low).log_softmax(-1)
        return ((logs * w).sum(-1) * 0.01).exp()

    judge(step, tensors("qk"))


# ------------------------------------------------------ logarithms that are summed over heads
@pytest.mark.parametrize("size", [1.0, 40.0, 600.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_heads_that_are_multiplied(size: float, temperature: float) -> None:
    def step(q, k, r, s, w, keep):
        x = student(q, k).softmax(-1).log().sum(1) / temperature
        return (x.softmax(-1) * w).square().sum(-1) + student(r, s).softmax(-1).mean(1)[..., 0]

    judge(step, tensors("w", size=size))


# ------------------------------------------------------ gradients that are none
def test_a_captured_scale_behind_a_detached_softmax() -> None:
    def step(q, k, r, s, w, keep):
        scale = w.abs().sum() + 0.1
        return (student(q, k) / scale).softmax(-1).detach().mul(keep).sum(-1)

    judge(step, tensors("w"))


def test_a_contraction_over_one_head_is_no_product_of_operands() -> None:
    def step(q, k, r, s, w, keep):
        scores = torch.einsum("bhnm,h->bnm", student(q[:, :1], k[:, :1]), w[:1])
        return (scores.softmax(-1) * student(r, s).mean(1) * w).sum(-1)

    judge(step, tensors("qkw"))


def test_a_teacher_that_learns_from_nothing() -> None:
    """The divergence is detached: cross-entropy next to it must not give its teacher zeros."""
    make = torch.Generator().manual_seed(0)
    h, w, r, u = (
        torch.randn(s, generator=make, dtype=torch.float64).requires_grad_(i != 1)
        for i, s in enumerate([(5, 4), (12, 4), (5, 3), (12, 3)])
    )
    labels = torch.randint(0, 12, (5,), generator=make)

    def step(h, w, r, u, y):
        s = h @ w.T
        kl = F.kl_div(s.log_softmax(-1), (r @ u.T).softmax(-1), reduction="batchmean")
        return kl.detach() * F.cross_entropy(s, y)

    judge(step, [h, w, r, u, labels], 1)


# ------------------------------------------------------ operations that return their input
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "type_as": lambda x: x.type_as(x),
    "dropout of a model in eval": lambda x: F.dropout(x, training=False),
    "to": lambda x: x.to(x.dtype),
    "twice": lambda x: F.dropout(x, training=False).type_as(x),
}


@pytest.mark.parametrize("name", SAME)
def test_an_operand_that_is_an_input_by_another_name(name: str) -> None:
    """Its second name stands after the sum: the program reads the first."""

    def step(h, w, ht, wt):
        loss = F.kl_div((w @ h.T).T, (wt @ ht.T).T, reduction="sum", log_target=True)
        return loss, torch.mm(ht, SAME[name](wt).t()).softmax(-1)

    sizes = ((6, 5), (8, 5), (6, 3), (8, 3))
    judge(step, [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes], 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_dropout_in_eval_that_returns_its_input_under_no_grad(dynamic: bool) -> None:
    """It keeps the gradient of its input there, which the scores do not have."""
    q, k = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 7, 4, requires_grad=True)
    other = torch.randn(2, 2, 1, 6), torch.randn(2, 2, 7, 6)

    def program(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        with torch.no_grad():
            student = (F.dropout(k, 0.5, training=False) @ q.mT).mT.log_softmax(-1)
        return F.kl_div(student, (qt @ kt.mT).softmax(-1), reduction="mean")

    options = {"streamkl.inner": "aot_eager", "streamkl.min_mib": 0.0}
    compiled = torch.compile(program, backend="streamkl", dynamic=dynamic, options=options)
    got = compiled(q, k, *other)
    assert not got.requires_grad
    torch.testing.assert_close(got, program(q, k, *other))


# ------------------------------------------------------ scores that a mask multiplies
MULTIPLIED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of 1 and 0": lambda x, m: x * m - 1e9 * (1 - m),
    "lower": lambda x, m: x * m - 1e4 * (1 - m),
    "with a temperature": lambda x, m: (x * m - 1e9 * (1 - m)) / 2,
    "of the other sign": lambda x, m: x * m + (m - 1) * 1e9,
}


@pytest.mark.parametrize("name", MULTIPLIED)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_scores_times_a_mask_keep_their_digits(name: str, dtype: torch.dtype) -> None:
    """In the normal form, 1e9 * mask is apart from its -1e9: scores next to it have no digits."""
    make = torch.Generator().manual_seed(0)
    q, k, r, s = (torch.randn(2, 2, n, 4, generator=make) for n in (5, 7, 5, 7))
    given = (torch.rand(2, 1, 5, 7, generator=make) > 0.3).index_fill(-1, torch.tensor(0), True)
    score = MULTIPLIED[name]

    def step(q: Tensor, k: Tensor, r: Tensor, s: Tensor, keep: Tensor) -> Tensor:
        m = keep.float()
        logs = score(q @ k.mT, m).log_softmax(-1)
        return F.kl_div(logs, score(r @ s.mT, m).softmax(-1), reduction="sum")

    inputs = [q.requires_grad_(), k.requires_grad_(), r, s, given.to(dtype)]
    options = {"streamkl.min_mib": 0.0, "streamkl.verify": "never"}
    outcome = compare(step, inputs, options=options).check()
    assert outcome.num_fused == 1, outcome.report
