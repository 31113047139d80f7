"""What a second reader of row programs found: each program stands for its class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor

from tests.rewrite.test_row_program_counterexamples import judge, tensors
from tests.support.comparing import compare
from tests.support.misleading.registry import student


def equal_pairs(trained: str = "qkw") -> list[Tensor]:
    """A teacher that is a copy of the student, as at the first step."""
    q, k, _, _, *rest = tensors(trained)
    return [q, k, q.detach().clone(), k.detach().clone(), *rest]


# ------------------------------------------------------ slopes that are infinite at 0
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of order 2": lambda x: x.norm(dim=-1, keepdim=True),
    "of order 1": lambda x: x.norm(p=1, dim=-1, keepdim=True),
    "normalised": lambda x: torch.nn.functional.normalize(x, dim=-1),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_of_a_norm_of_zeros(name: str) -> None:
    """It is 0 in eager code, unlike that of a square root."""

    def step(q, k, r, s, w, keep):
        p = student(q, k).softmax(-1)
        return (w * p * NORMS[name](p - student(r, s).softmax(-1))).sum(-1)

    judge(step, equal_pairs(), 1)


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "a difference": lambda p: p - p.detach(),
    "a probability": lambda p: p,
    "a square": lambda p: (p - p.detach()).square(),
    "renormalised": lambda p: p / (p.sum(-1, keepdim=True) + 1.0),
}


@pytest.mark.parametrize("name", FACTORS)
def test_xlogy_where_both_arguments_are_zero(name: str) -> None:
    """Its gradient to the factor is 0 in eager code, not the logarithm."""

    def step(q, k, r, s, w, keep):
        x = FACTORS[name](student(q, k).softmax(-1))
        return (torch.xlogy(x, student(r, s).relu()) * w).sum(-1)

    judge(step, tensors("qkw"))


# ------------------------------------------------------ probabilities that underflow
POWERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "small": (lambda p: p**0.01, 0),
    "small, by two": (lambda p: (p**0.3) ** 0.3, 0),
    "roots of roots": (lambda p: p.sqrt().sqrt().sqrt(), 0),
    "small and negative": (lambda p: p**-0.01, 0),
    "a root": (lambda p: p.sqrt(), 1),
    "large": (lambda p: p**1.5, 1),
}


@pytest.mark.parametrize("name", POWERS)
def test_small_powers_of_what_underflows(name: str) -> None:
    """0 ** 0.01 is 0 in eager code; of the logarithm it is a number."""
    function, sites = POWERS[name]

    def step(q, k, r, s, w, keep):
        return (w * student(r, s).softmax(-1) * function(student(q, k).softmax(-1))).sum(-1)

    judge(step, tensors("w", size=600.0), sites)


# ------------------------------------------------------ sums that one operator computes
def test_ids_that_are_made_behind_the_first_sum() -> None:
    """Label smoothing: the mean over the vocabulary entries comes before the labels are given a
    dimension.
    """

    def step(h, w, labels):
        log_p = (h @ w.T).log_softmax(-1)
        smooth = 0.1 * log_p.mean(-1)
        return smooth + log_p.gather(-1, labels[..., None])[..., 0]

    h, w = (torch.randn(n, 4, dtype=torch.float64).requires_grad_() for n in (6, 11))
    judge(step, [h, w, torch.arange(6)], 2)


# ------------------------------------------------------ sizes that data decides
@pytest.mark.parametrize("selected", ["rows", "vocab"])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows_or_words_of_which_none_is_selected(selected: str, count: int) -> None:
    def step(h, w, keep):
        x = h[keep] @ w.T if selected == "rows" else h @ w[keep].T
        p = x.softmax(-1)
        return (p * p * x.tanh()).sum(-1).sum()

    h, w = (torch.randn(n, 4, dtype=torch.float64).requires_grad_() for n in (9, 9))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        judge(step, [h, w, torch.arange(9) < count])


# ------------------------------------------------------ numbers, which torch gives a dimension
@pytest.mark.parametrize("reduce", [Tensor.mean, Tensor.sum, Tensor.logsumexp])
def test_a_dimension_of_a_number(reduce: Callable[..., Tensor]) -> None:
    """It stops what is read of the number, and no divergence next to it."""

    def step(q, k, r, s, w, keep):
        t = student(r, s).softmax(-1)
        loss = torch.nn.functional.kl_div(student(q, k).log_softmax(-1), t, reduction="sum")
        return loss + reduce(student(q, k).sum(), 0)

    judge(step, tensors("qk"), 1)


@pytest.mark.parametrize("fill", [-1e4, -1e9])
def test_rows_that_only_the_teacher_masks_are_uniform(fill: float) -> None:
    """A finite fill of a whole row leaves a uniform teacher, whose cross-entropy is not 0."""

    def step(q, k, r, s, w, keep):
        rows = torch.arange(r.shape[-2])[:, None] % 3 > 0
        t = student(r, s).masked_fill(~rows, fill)
        z = student(q, k)
        p = (t - t.logsumexp(-1, keepdim=True)).exp()
        return (p * (z - z.logsumexp(-1, keepdim=True))).nansum(-1)

    judge(step, tensors("qk"), 0)


def test_maps_that_are_averaged_over_no_sequence() -> None:
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = ((a @ b.mT).softmax(-1).mean(0) for a, b in ((q, k), (qt, kt)))
        return (t * (t.log() - s.log())).sum(-1)

    inputs = [torch.randn(0, 2, 4, width, requires_grad=True) for width in (3, 3, 5, 5)]
    outcome = compare(loss, inputs).check()
    (value,) = outcome.compiled.outputs
    assert value.shape == (2, 4) and value.isnan().all()  # a mean of nothing
    assert [x.shape for x in outcome.compiled.gradients] == [x.shape for x in inputs]


def test_infinities_of_keys_that_added_masks_hide_are_filled() -> None:
    """Two masks of -1e4 that differ: the teacher has keys whose student is 0 in eager code."""

    def step(q, k, r, s, w, keep):
        t, z = student(r, s), student(q, k)
        rows, keys = torch.arange(t.shape[-2])[:, None], torch.arange(t.shape[-1])
        p = (t + torch.zeros_like(t).masked_fill((rows + keys) % 5 == 0, -1e4)).softmax(-1)
        q_ = (z + torch.zeros_like(z).masked_fill((rows + keys) % 5 == 2, -1e4)).softmax(-1)
        x = p * (p / q_).log()
        return x.masked_fill(x.isinf() | x.isnan(), 0.0).sum(-1)

    judge(step, tensors(""), 0)
