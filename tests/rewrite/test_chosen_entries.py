"""What a reader found in programs at keys that a top-k names: each stands for its class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import Tensor

from tests.rewrite.test_row_program_counterexamples import KEYS, OPTIONS, ROWS, judge, tensors
from tests.support.covering import every
from tests.support.misleading.registry import student


@pytest.mark.parametrize("count", [0, 2])
def test_the_mean_of_no_entry_has_no_gradient(count: int) -> None:
    """It is NaN, and eager code's gradient of it 0."""

    def step(q, k, r, s, w, keep):
        p, t = student(q, k).softmax(-1), student(r, s).softmax(-1)
        ids = t.topk(count, -1).indices
        return (p.gather(-1, ids) - t.gather(-1, ids)).square().mean(-1)

    judge(step, tensors("qk"), int(count > 0))


PAIRS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "entries and keys": lambda p, t, x, y: (x[..., None] - p[..., None, :]).abs().sum((-1, -2)),
    "keys and entries": lambda p, t, x, y: (t[..., None] * x[..., None, :]).exp().sum(-1).sum(-1),
    "keys of both, first": lambda p, t, x, y: (
        (x[..., None] - t[..., None, :]).relu().sum(-1) * y
    ).sum(-1),
    "in a loss": lambda p, t, x, y: torch.nn.functional.l1_loss(
        x[..., None].expand(2, 3, ROWS, 2, KEYS), t[..., None, :].expand(2, 3, ROWS, 2, KEYS)
    ),
    "two keys in a loss": lambda p, t, x, y: torch.nn.functional.mse_loss(
        p[..., None].expand(2, 3, ROWS, KEYS, KEYS), t[..., None, :].expand(2, 3, ROWS, KEYS, KEYS)
    ),
    "two entries": lambda p, t, x, y: (x[..., None] - y[..., None, :]).abs().sum((-1, -2)),
    "two entries in a loss": lambda p, t, x, y: torch.nn.functional.mse_loss(
        x[..., None].expand(2, 3, ROWS, 2, 2), y[..., None, :].expand(2, 3, ROWS, 2, 2)
    ),
}


@pytest.mark.parametrize("name", every(2, PAIRS))
def test_pairs_of_entries_and_keys(name: str) -> None:
    """An entry is not met only by the key that it is."""

    def step(q, k, r, s, w, keep):
        scores = student(r, s)
        ids = scores.topk(2, -1).indices
        p, t = student(q, k).softmax(-1), scores.softmax(-1)
        return PAIRS[name](p, t, p.gather(-1, ids), t.gather(-1, ids))

    judge(step, tensors("qk"), 0)


def of_data(q: Tensor, k: Tensor, r: Tensor, s: Tensor, data: Tensor) -> Tensor:
    ids = data.topk(2, -1).indices
    p, t = student(q, k).softmax(-1), student(r, s).softmax(-1)
    return (p.gather(-1, ids) - t.gather(-1, ids)).square().sum(-1)


@pytest.mark.parametrize(("length", "sites"), [(KEYS - 2, 1), (KEYS, 1), (KEYS + 2, 0)])
def test_ids_of_other_keys(length: int, sites: int) -> None:
    """Of more keys than there are, eager code raises where one is out of range."""
    data = torch.arange(float(length)).flip(0).expand(2, 3, ROWS, length).contiguous()
    judge(of_data, [*tensors("qk")[:4], data], sites)


def test_ids_out_of_range_raise_as_in_eager_code() -> None:
    data = torch.arange(KEYS + 2.0).expand(2, 3, ROWS, KEYS + 2).contiguous()
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.compile(of_data, backend="streamkl", options=OPTIONS)(*tensors("qk")[:4], data)


def test_ids_of_the_largest_rows() -> None:
    """In a row of them one may be there twice, and counts twice."""

    def step(q, k, r, s, w, keep):
        p, t = student(q, k).softmax(-1), student(r, s).softmax(-1)
        ids = t.topk(ROWS, -2).indices
        return (p.gather(-1, ids) - t.gather(-1, ids)).square().sum(-1)

    judge(step, tensors("qk"), 0)
