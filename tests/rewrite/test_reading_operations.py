"""Operations as losses of 2026 have them: what is read has eager's value and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.read_programs import examine


def rolled(x: Tensor, y: Tensor) -> list[Tensor]:
    s = x @ y.mT
    return [s.roll(-1, 1).softmax(-1).square(), torch.roll(s, (2, -3), (1, 2))]


def moved(x: Tensor, y: Tensor) -> list[Tensor]:
    s = x @ y.mT
    return [s.movedim(0, -1) * torch.arange(2), s.movedim((0, 1), (2, 0))[..., 0].exp()]


def diagonals(x: Tensor, y: Tensor) -> list[Tensor]:
    s = x @ y.mT
    # a wide matrix: of a tall one, torch 2.11 has a gradient beside the diagonal, at (5, 0)
    return [
        s.diagonal(dim1=-2, dim2=-1), s.diagonal(1, 1, 2) ** 2,
        s[:, :, :4].diagonal(0, 1, 2).exp(), torch.trace(s[0]), torch.trace(s[1, :4]),
        s.masked_fill(torch.eye(6, dtype=torch.bool), 0.0) + torch.eye(6),
    ]  # fmt: skip


def written_diagonals(x: Tensor, y: Tensor) -> list[Tensor]:
    s = x @ y.mT
    return [
        torch.diagonal_scatter(s, torch.arange(12.0).view(2, 6), dim1=1, dim2=2),
        torch.diagonal_scatter(s[..., :4], (y @ x.mT)[:, :4, 1], dim1=1, dim2=2),
        s[0].clone().fill_diagonal_(-1e9).softmax(-1),
    ]  # fmt: skip


def written_parts(x: Tensor, y: Tensor) -> list[Tensor]:
    s, t = x @ y.mT, y @ y.mT
    at_rows, at_keys = s.clone(), s.clone()
    at_rows[:, torch.arange(6) % 2 == 0] = 0.5
    at_keys[..., torch.arange(6) % 3 == 0] = -2.0
    return [
        torch.slice_scatter(s, t[:, :2], 1, 2, 4), torch.select_scatter(s, t[:, 2], 1, -1),
        at_rows.exp(), at_keys.softmax(-1),
    ]  # fmt: skip


def pairs(x: Tensor, y: Tensor) -> list[Tensor]:
    s = (x @ y.mT)[0]
    rows = torch.arange(6)
    return [
        s[rows.repeat_interleave(2), torch.arange(12) % 5].square(),
        s.log_softmax(-1)[rows, rows], F.cross_entropy(s, rows),  # of in-batch negatives
        s.softmax(-1).gather(1, rows[:, None]),
    ]  # fmt: skip


def functions(x: Tensor, y: Tensor) -> list[Tensor]:
    s, t = x @ y.mT, y @ y.mT
    return [
        torch.min(s, t) + torch.max(s, x @ x.mT), torch.addcmul(s, t, t, value=0.5),
        torch.addcdiv(s, t, 1 + s.square()), F.elu(s) + F.elu(t, 0.3), F.leaky_relu(s),
    ]  # fmt: skip


def norms(x: Tensor, y: Tensor) -> list[Tensor]:
    s = x @ y.mT
    return [
        torch.linalg.matrix_norm(s), torch.linalg.norm(s), torch.linalg.norm(s, dim=(1, 2)),
        torch.linalg.norm(s, ord=1, dim=-1), torch.linalg.norm(s, dim=-1), s.norm(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fn",
    [rolled, moved, diagonals, written_diagonals, written_parts, pairs, functions, norms],
    ids=lambda f: f.__name__,
)
def test_operations(fn: Callable[..., list[Tensor]]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    found = examine(fn, [x.requires_grad_(), y])
    assert found.is_right, (found.value, found.gradient)
    assert not found.captured and not found.nan
