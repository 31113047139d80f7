"""Attention left beside a fused KL, with heads that a GPU's fused attention does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare
from tests.support.plants import planted
from torch_streamkl.fx_passes.followup import sdpa_fusion
from torch_streamkl.fx_passes.fx_utils.nodes import name_of

LOWEST = torch.finfo(torch.float32).min
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def step(q: Tensor, k: Tensor, v: Tensor, qt: Tensor, kt: Tensor, keep: Tensor) -> Any:
    """As transformers' BERT: padding is added; what follows reads whole rows of all heads."""
    mask = torch.where(keep[:, None, None, :], 0.0, LOWEST)
    s = (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1)
    p = (qt @ kt.mT * qt.shape[-1] ** -0.5 + mask).softmax(-1)
    kl = (p * (p.clamp_min(1e-12).log() - s.clamp_min(1e-12).log())).sum(-1).mean()
    return kl, (s @ v).transpose(1, 2).flatten(2).tanh()


def inputs(width: int, value_width: int, device: str = "cpu") -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(width)
    widths = (width, width, value_width, 16, 16)
    tensors = [
        torch.randn(2, 3, 40, n, generator=make).to(device).requires_grad_(i < 3)
        for i, n in enumerate(widths)
    ]
    keep = torch.arange(40, device=device) < torch.tensor([[40], [23]], device=device)
    return (*tensors, keep)


@pytest.mark.parametrize("widths", [(26, 26), (26, 32), (8, 7)])
def test_narrow_heads_are_filled_up(
    widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_fusion, "_is_on_gpu", lambda x: True)
    found: list[tuple[int, ...]] = []

    def look(graph: Any) -> None:
        for node in graph.nodes:
            if name_of(node) == name_of_fused:
                found.append(tuple(x.meta["example_value"].shape[-1] for x in node.args[:3]))

    name_of_fused = F.scaled_dot_product_attention.__name__
    with planted(look):
        outcome = compare(step, inputs(*widths), options={"streamkl.min_mib": 0.0})
    outcome.check()
    assert outcome.num_fused == 1, outcome.report
    assert outcome.report.remaining_quadratic == 0, outcome.report
    whole = tuple(-(-n // 4) * 4 for n in (widths[0], *widths))
    assert set(found) == {whole}


@on_a_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(26, 26), (64, 26)])
def test_on_a_gpu(widths: tuple[int, int]) -> None:
    tensors = inputs(*widths, device="cuda")
    outcome = compare(step, tensors, inner="inductor", options={"streamkl.min_mib": 0.0})
    outcome.check()
    assert outcome.report.remaining_quadratic == 0, outcome.report
