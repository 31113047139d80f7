"""Masks that depend on nothing but sizes are seen through, however they are looked up."""

import pytest
import torch

from tests.support.comparing import compare
from tests.support.losses import rows_of_kl

POSITIONS = {
    "one sequence": lambda first: first,
    "from 3 on": lambda first: first + 3,
    "packed": lambda first: first % 20,  # two sequences
    "every other": lambda first: first * 2,
    "backwards": lambda first: first.shape[-1] - first,
}


def by_sequence(kind, row):
    """As in transformers: which sequence every token is of is counted from jumps of positions."""

    def mask(size, i, j):
        order = torch.arange(size).unsqueeze(0)
        positions = POSITIONS[kind](order)
        jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
        sequence, batch = jumps.cumsum(-1), row()
        return (order[batch, j] <= order[batch, i]) & (sequence[batch, i] == sequence[batch, j])

    return mask


def first():
    return 0


def every():
    return torch.arange(1)[:, None, None]


def form_of(mask, dynamic):
    """The form of the fused site, whose value and gradients are as exact as eager's."""

    def loss(q, k, r, u):
        size = q.shape[2]
        keep = mask(size, torch.arange(size)[:, None], torch.arange(size)[None, :])
        products = (x @ y.mT for x, y in ((q, k), (r, u)))
        return rows_of_kl(*(x.masked_fill(~keep, -1e30) for x in products)).mean()

    inputs = [torch.randn(1, 2, 32, 8, requires_grad=i < 2) for i in range(4)]
    outcome = compare(loss, inputs, inner="aot_eager", dynamic=dynamic, largest_score=8.0).check()
    assert outcome.num_fused == 1
    return outcome.report.sites[0].form


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "row", "dynamic"),
    [
        ("one sequence", every, False),
        ("from 3 on", first, True),
        # several sequences are no affine condition: their mask stays one
        ("packed", first, False),
        pytest.param("one sequence", first, True, marks=slow),
        pytest.param("from 3 on", every, True, marks=slow),
        pytest.param("packed", every, True, marks=slow),
    ],
)
def test_lookups_of_positions(kind, row, dynamic):
    form = form_of(by_sequence(kind, row), dynamic)
    assert "causal" in form
    assert ("masked" in form) == (kind == "packed"), form


# the last position again for the first row; the positions of half of the tokens, twice
LOOKUPS = {
    "shifted": lambda size, i, j: torch.arange(size)[j] <= torch.arange(size)[i - 1],
    "halved": lambda size, i, j: torch.arange(size)[j // 2] <= torch.arange(size)[i // 2],
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [("halved", False), pytest.param("shifted", True, marks=slow)]
)
def test_other_lookups_stay_masks(name, dynamic):
    assert "masked" in form_of(LOOKUPS[name], dynamic)


@pytest.mark.parametrize("kind", ["backwards", pytest.param("every other", marks=slow)])
def test_every_position_a_sequence(kind):
    """Positions that jump everywhere: a token sees only itself."""
    form = form_of(by_sequence(kind, first), False)
    assert "masked" in form or "sliding window" in form or "2 passes" in form
