"""What looks like a view or a familiar operation by its name, and computes something else."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare


@torch.library.custom_op("streamkl_tests::linear", mutates_args=())
def scaled_linear(input: Tensor, weight: Tensor) -> Tensor:
    return F.linear(input, weight.sign())


@scaled_linear.register_fake
def _(input: Tensor, weight: Tensor) -> Tensor:
    return F.linear(input, weight)


@torch.library.custom_op("streamkl_tests::softmax", mutates_args=())
def softmax_with_one(input: Tensor, dim: int) -> Tensor:
    return input.exp() / (1 + input.exp().sum(dim, keepdim=True))


@softmax_with_one.register_fake
def _(input: Tensor, dim: int) -> Tensor:
    return torch.empty_like(input)


def kl(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t, reduction="none").sum(-1)


def stored_as_integers(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
    stored = wt.view(torch.int32)
    return kl(h @ w.mT, (ht @ stored.view(torch.float32).mT).softmax(-1))


def unequal_repeats(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
    heads = w.view(2, -1, w.shape[-1]).repeat_interleave(torch.tensor([3, 1]), dim=0)
    teacher = wt.view(2, -1, wt.shape[-1]).repeat_interleave(torch.tensor([1, 3]), dim=0)
    return kl(h @ heads.mT, (ht @ teacher.mT).softmax(-1))


def equal_repeats(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
    heads = w.view(2, -1, w.shape[-1]).repeat_interleave(2, dim=0)
    teacher = wt.view(2, -1, wt.shape[-1]).repeat_interleave(2, dim=0)
    return kl(h @ heads.mT, (ht @ teacher.mT).softmax(-1))


def foreign_linear(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
    return kl(F.linear(h, w), scaled_linear(ht, wt).softmax(-1))


def foreign_softmax(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
    return kl(h @ w.mT, softmax_with_one(ht @ wt.mT, -1))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        stored_as_integers,
        unequal_repeats,
        equal_repeats,
        foreign_linear,
        foreign_softmax,
    ],
    ids=lambda f: f.__name__,
)
def test_computes_what_eager_does(program, dynamic: bool) -> None:
    shapes = ((24, 16), (64, 16), (24, 16), (64, 16))
    given = [torch.randn(s, requires_grad=i < 2) for i, s in enumerate(shapes)]
    outcome = compare(program, given, dynamic=dynamic).check()
    if program is equal_repeats and not dynamic:
        assert outcome.num_fused == 1, str(outcome.report)
