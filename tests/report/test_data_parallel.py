"""What nn.DataParallel gathered cannot fuse, and the report says so by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_streamkl

BY_NAME = "nn.DataParallel runs the model in threads"


class Gather(torch.autograd.Function):
    """Stands for that of torch.nn.parallel, which takes no tensors of a CPU."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].chunk(2)


def by_kl_div(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def by_hand(s: Tensor, t: Tensor) -> Tensor:
    log_s, log_t = s.log_softmax(-1), t.log_softmax(-1)
    return (log_t.exp() * (log_t - log_s)).sum(-1).mean()


@pytest.mark.parametrize("loss", [by_kl_div, by_hand])
@pytest.mark.parametrize("gathers", [False, True])
def test_gathered_logits(gathers: bool, loss: Any) -> None:
    hidden, weight = torch.randn(6, 4), torch.randn(4, 8, requires_grad=True)
    parts = [x @ weight for x in hidden.chunk(2)]
    logits = Gather.apply(*parts) if gathers else torch.cat(parts)
    report = torch_streamkl.explain(loss, logits, torch.randn(6, 8))
    assert report.num_fused == 0
    said = str(report)
    assert (BY_NAME in said) is gathers
    assert ("torchrun" in said and "DistributedDataParallel" in said) is gathers
