"""Sums over keys as row programs: what they are made of, and what is none."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.read_programs import Case
from tests.support.row_forms import made_of
from torch_streamkl.fx_passes.closed_forms.form import NotClosed
from torch_streamkl.fx_passes.closed_forms.row_form import RowForm


def made(fn):
    """The form of a loss of the two sides' scores, whose values and gradients are eager's."""
    make = torch.Generator().manual_seed(0)
    shapes = [(2, 3, n, 4) for n in (5, 8, 5, 8)]
    x = [torch.randn(s, generator=make, dtype=torch.float64).requires_grad_() for s in shapes]
    found = made_of(Case("", lambda q, k, r, s: fn(q @ k.mT, r @ s.mT), x))
    (form,) = found.forms
    assert not found.wrong
    return form


def test_a_detached_part_is_computed_once():
    """The same probabilities with and without gradient have one log-sum-exp."""

    def loss(s, t):
        p = s.softmax(-1)
        return (p.detach() * (p * t.softmax(-1)).sqrt()).sum(-1).mean()

    assert [r.kind for r in made(loss).program.reductions].count("logsumexp") == 2


def test_a_mask_and_its_constant_are_added_first():
    """1e4 * keep - 1e4 is 0 at keys that are kept: scores keep their digits in float32."""

    def loss(s, t):
        keep = (torch.arange(8) % 3 > 0).to(s.dtype)
        x = s + (1.0 - keep) * -1e4
        return (x.softmax(-1).square() * t.softmax(-1)).sum(-1).mean()

    nodes = made(loss).program.nodes
    assert len([n for n in nodes if n.op == "const" and abs(n.value) == 1e4]) == 1


def test_products_that_share_a_probability_are_one():
    form = made(lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum"))
    assert isinstance(form, RowForm)
    assert [n.op for n in form.program.nodes].count("mul") == 1


LEFT = {
    "a sum over rows or some heads comes before the sum over the keys": lambda p, t: (
        (p.sum(-2, keepdim=True) * p * t).sum(-1).mean()
    ),
    "an axis of the scores meets itself in another place": lambda p, t: (
        (p[..., None] - t[..., None, :]).abs().sum((-1, -2)).mean()
    ),
    "only some of the keys are used after the softmax": lambda p, t: (
        (p[..., 1:] * t[..., 1:].log()).sum(-1).mean()
    ),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_no_row_program(reason):
    form = made(lambda s, t: LEFT[reason](s.softmax(-1), t.softmax(-1)))
    assert isinstance(form, NotClosed) and form.reason == reason


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 4)])
def test_log_probabilities_of_entries(shape):
    """A program sums the keys that no id names: NOTE [Log-probabilities of entries]."""
    h, w = (torch.randn(*n, 4, dtype=torch.float64) for n in (shape[:-1], (11,)))
    ids = torch.randint(11, shape)
    ids[..., -1] = ids[..., 0]

    def loss(h, w, bias):
        logs = (h @ w.mT * 2 + bias).log_softmax(-1).gather(-1, ids)
        return ((1 - logs.exp()) ** 1.5 * logs).sum(-1)

    given = [x.requires_grad_() for x in (h, w, torch.randn(11, dtype=torch.float64))]
    found = made_of(Case("", loss, given))
    (form,) = found.forms
    assert not found.wrong and len(form.chosen) == 1
    assert [r.kind for r in form.program.reductions] == ["logsumexp"]
    assert [c.kind for c in form.program.captures].count("columns") == 1
