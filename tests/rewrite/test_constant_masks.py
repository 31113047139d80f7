"""Masks that depend on nothing but sizes are seen through, however they are looked up."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_streamkl
from tests.support.covering import only

N = 32


def positions(kind: str, size: int) -> Tensor:
    first = torch.arange(size).unsqueeze(0)
    return {
        "one sequence": first,
        "from 3 on": first + 3,
        "packed": first % 20,  # two sequences
        "every other": first * 2,
        "backwards": size - first,
    }[kind]


def packed_with_jump(position_ids: Tensor, before: Tensor) -> Tensor:
    """Which sequence every token is of, as in transformers: from jumps of the positions."""
    return (torch.diff(position_ids, prepend=before, dim=-1) != 1).cumsum(-1)


def loss_with(kind: str, lookup: str = "row"):
    def loss(student_q: Tensor, student_k: Tensor, teacher_q: Tensor, teacher_k: Tensor) -> Tensor:
        size = student_q.shape[2]
        position_ids = positions(kind, size)
        sequence = packed_with_jump(position_ids, position_ids[:, :1] - 1)
        i, j = torch.arange(size)[:, None], torch.arange(size)[None, :]
        order = torch.arange(size).unsqueeze(0)
        if lookup == "row":
            mask = (order[0, j] <= order[0, i]) & (sequence[0, i] == sequence[0, j])
        elif lookup == "batch":
            row = torch.arange(1)[:, None, None]
            mask = (order[row, j] <= order[row, i]) & (sequence[row, i] == sequence[row, j])
        elif lookup == "shifted":  # the last position is looked up again for the first row
            mask = order[0, j] <= order[0, i - 1]
        else:  # the positions of half of the tokens, twice
            mask = order[0, j // 2] <= order[0, i // 2]
        s = (student_q @ student_k.mT).masked_fill(~mask, -1e30).log_softmax(-1)
        t = (teacher_q @ teacher_k.mT).masked_fill(~mask, -1e30).softmax(-1)
        return F.kl_div(s, t, reduction="none").sum(-1).mean()

    return loss


def check(loss, dynamic: bool) -> str:
    """The form of the fused site, once its loss and gradients are eager's."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = [torch.randn(1, 2, N, 8, requires_grad=i < 2) for i in range(4)]
    if dynamic:
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2)
    report = torch_streamkl.explain(loss, *inputs)
    assert report.num_fused == 1
    compiled = torch.compile(loss, backend="streamkl", options={"streamkl.inner": "aot_eager"})
    expected, value = loss(*inputs), compiled(*inputs)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected, inputs[:2])
    for ours, theirs in zip(torch.autograd.grad(value, inputs[:2]), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    return report.sites[0].form


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "is_known", "lookup", "dynamic"),
    [
        pytest.param(*kind, lookup, dynamic, marks=[] if i in (2, 5, 8) else slow)
        for i, (kind, lookup, dynamic) in enumerate(
            product(
                [("one sequence", True), ("from 3 on", True), ("packed", False)],
                ["row", "batch"],
                [False, True],
            )
        )
    ],
)
def test_lookups_of_positions(kind: str, is_known: bool, lookup: str, dynamic: bool) -> None:
    form = check(loss_with(kind, lookup), dynamic)
    # several sequences are no affine condition: their mask stays one
    assert "causal" in form
    assert ("masked" not in form) == is_known, form


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("lookup", only(["halved"], ["shifted", "halved"]))
def test_other_lookups_stay_masks(lookup: str, dynamic: bool) -> None:
    assert "masked" in check(loss_with("one sequence", lookup), dynamic)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("kind", only(["backwards"], ["every other", "backwards"]))
def test_every_position_a_sequence(kind: str, dynamic: bool) -> None:
    """Positions that jump everywhere: a token sees only itself."""
    form = check(loss_with(kind), dynamic)
    assert "masked" in form or "sliding window" in form or "2 passes" in form
