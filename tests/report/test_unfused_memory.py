"""Which large tensors the report lists as remaining: those made of a site's operands alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_streamkl

QUERIES, KEYS, DIM = 6, 8, 4


def inputs() -> list[Tensor]:
    return [torch.randn(2, 3, n, DIM) for n in (QUERIES, KEYS, QUERIES, KEYS)]


def divergence(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def sorted_again(q: Tensor, k: Tensor, r: Tensor, u: Tensor) -> Any:
    return divergence(q @ k.mT, r @ u.mT), (q @ k.mT).sort(-1).values


def scaled_and_sorted(q: Tensor, k: Tensor, r: Tensor, u: Tensor) -> Any:
    return divergence(q @ k.mT, r @ u.mT), (torch.einsum("bhqd,bhkd->bhqk", q, k) / 2).sort(-1)[0]


@pytest.mark.parametrize("step", [sorted_again, scaled_and_sorted])
def test_the_same_product_written_twice(step: Any) -> None:
    report = torch_streamkl.explain(step, *inputs())
    assert report.num_fused == 1
    assert "read by sort" in report.details()
    assert {x.shape for x in report.remaining} == {(2, 3, QUERIES, KEYS)}


def test_a_product_of_other_operands_is_on_no_site_s_path() -> None:
    def step(q: Tensor, k: Tensor, r: Tensor, u: Tensor) -> Any:
        return divergence(q @ k.mT, r @ u.mT), (q.tanh() @ k.mT).sort(-1).values

    report = torch_streamkl.explain(step, *inputs())
    assert (report.num_fused, report.remaining) == (1, [])


def test_a_product_with_values_is_not_quadratic() -> None:
    """The map stays, for its dropout; the product has a value per query and feature."""

    def step(q: Tensor, k: Tensor, r: Tensor, u: Tensor) -> Any:
        s = q @ k.mT
        return divergence(s, r @ u.mT), F.dropout(s.softmax(-1), 0.1) @ k

    report = torch_streamkl.explain(step, *inputs())
    assert report.num_fused == 1 and report.remaining
    assert {x.shape for x in report.remaining} == {(2, 3, QUERIES, KEYS)}, str(report)


@pytest.mark.parametrize("rank", [2, 4])
def test_low_rank_adapters_of_projections_are_no_logits(rank: int) -> None:
    """Their second layer has far more outputs than inputs, as an LM head has."""
    width, vocab = 32, 512
    sizes = ((rank, width), (width, rank), (width, width))
    down, up, proj = (torch.nn.Parameter(torch.randn(*size)) for size in sizes)

    def loss(x: Tensor, w: Tensor, t: Tensor, u: Tensor) -> Tensor:
        h = F.linear(x, proj) + F.linear(F.linear(F.dropout(x, 0.0), down), up) * 2.0
        return F.kl_div(
            F.linear(h, w).log_softmax(-1), F.linear(t, u).softmax(-1), reduction="sum"
        )

    shapes = ((24, width), (vocab, width)) * 2
    inputs = [torch.randn(*shape, requires_grad=i < 2) for i, shape in enumerate(shapes)]
    report = torch_streamkl.explain(loss, *inputs, options={"streamkl.min_mib": 0})
    assert report.num_fused == 1
    assert not report.remaining and not report.elsewhere, report.details()
