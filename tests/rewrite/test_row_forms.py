"""Sums over keys as row programs: each is held against eager values and gradients in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.read_programs import Case
from tests.support.row_forms import made_of, rewrites
from torch_streamkl.fx_passes.closed_forms.form import NotClosed
from torch_streamkl.fx_passes.closed_forms.row_program import RowForm

FORMS = {case.name: case for case in rewrites()}


@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name: str) -> None:
    made = made_of(FORMS[name])
    assert all(isinstance(form, RowForm) for form in made.forms), made.forms
    assert not made.wrong


def given(trained: bool = True) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 5, 4), (2, 3, 8, 4), (2, 3, 5, 4), (2, 3, 8, 4)]
    return [
        torch.randn(s, generator=make, dtype=torch.float64).requires_grad_(trained) for s in shapes
    ]


def of(fn: Callable[..., Any]) -> tuple[RowForm, str]:
    made = made_of(Case(fn.__name__, fn, given()))
    (form,) = made.forms
    assert isinstance(form, RowForm), form
    return form, made.wrong


def test_a_detached_part_is_computed_once() -> None:
    """The same probabilities with and without gradient have one log-sum-exp."""

    def loss(q: Tensor, k: Tensor, r: Tensor, s: Tensor) -> Tensor:
        p, t = (q @ k.mT).softmax(-1), (r @ s.mT).softmax(-1)
        return (p.detach() * (p * t).sqrt()).sum(-1).mean()

    form, wrong = of(loss)
    assert not wrong
    assert [r.kind for r in form.program.reductions].count("logsumexp") == 2


def test_a_mask_and_its_constant_are_added_first() -> None:
    """1e4 * keep - 1e4 is 0 at keys that are kept: scores keep their digits in float32."""

    def loss(q: Tensor, k: Tensor, r: Tensor, s: Tensor) -> Tensor:
        keep = (torch.arange(8) % 3 > 0).to(q.dtype)
        x = q @ k.mT + (1.0 - keep) * -1e4
        return (x.softmax(-1).square() * (r @ s.mT).softmax(-1)).sum(-1).mean()

    form, wrong = of(loss)
    assert not wrong
    numbers = [n.value for n in form.program.nodes if n.op == "const" and abs(n.value) == 1e4]
    assert len(numbers) == 1


def test_products_that_share_a_probability_are_one() -> None:
    def loss(q: Tensor, k: Tensor, r: Tensor, s: Tensor) -> Tensor:
        return F.kl_div((q @ k.mT).log_softmax(-1), (r @ s.mT).softmax(-1), reduction="sum")

    form, wrong = of(loss)
    assert not wrong
    assert [n.op for n in form.program.nodes].count("mul") == 1


LEFT: dict[str, tuple[Callable[..., Tensor], str]] = {
    "rows before keys": (
        lambda p, t: (p.sum(-2, keepdim=True) * p * t).sum(-1).mean(),
        "a sum over rows or some heads comes before the sum over the keys",
    ),
    "pairs of keys": (
        lambda p, t: (p[..., None] - t[..., None, :]).abs().sum((-1, -2)).mean(),
        "an axis of the scores meets itself in another place",
    ),
    "some keys": (
        lambda p, t: (p[..., 1:] * t[..., 1:].log()).sum(-1).mean(),
        "only some of the keys are used after the softmax",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_row_program(name: str) -> None:
    function, reason = LEFT[name]

    def loss(q: Tensor, k: Tensor, r: Tensor, s: Tensor) -> Tensor:
        return function((q @ k.mT).softmax(-1), (r @ s.mT).softmax(-1))

    (form,) = made_of(Case(name, loss, given())).forms
    assert isinstance(form, NotClosed) and form.reason == reason
