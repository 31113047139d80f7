"""Masks that depend on nothing but sizes are seen through, however they are looked up."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_streamkl

N = 32


def positions(kind: str) -> Tensor:
    first = torch.arange(N).unsqueeze(0)
    return first if kind == "one sequence" else first % 20  # two packed sequences


def loss_with(kind: str):
    def loss(student_q: Tensor, student_k: Tensor, teacher_q: Tensor, teacher_k: Tensor) -> Tensor:
        # as in transformers: sequence numbers from jumps of the positions, both looked up
        position_ids = positions(kind)
        jumps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
        sequence = jumps.cumsum(-1)
        i, j = torch.arange(N)[:, None], torch.arange(N)[None, :]
        order = torch.arange(N).unsqueeze(0)
        mask = (order[0, j] <= order[0, i]) & (sequence[0, i] == sequence[0, j])
        s = (student_q @ student_k.mT).masked_fill(~mask, -1e30).log_softmax(-1)
        t = (teacher_q @ teacher_k.mT).masked_fill(~mask, -1e30).softmax(-1)
        return F.kl_div(s, t, reduction="none").sum(-1).mean()

    return loss


@pytest.mark.parametrize(("kind", "is_known"), [("one sequence", True), ("packed", False)])
def test_lookups_of_constant_positions(kind: str, is_known: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, N, 8, requires_grad=i < 2) for i in range(4)]
    loss = loss_with(kind)
    report = torch_streamkl.explain(loss, *inputs)
    assert report.num_fused == 1
    # packed sequences are no affine condition: their mask stays one
    assert "causal" in report.sites[0].form
    assert ("masked" not in report.sites[0].form) == is_known, report
    compiled = torch.compile(loss, backend="streamkl", options={"streamkl.inner": "aot_eager"})
    expected, value = loss(*inputs), compiled(*inputs)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected, inputs[:2])
    for ours, theirs in zip(torch.autograd.grad(value, inputs[:2]), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
