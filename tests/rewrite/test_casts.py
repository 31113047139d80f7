"""Casts that round, reinterpret or replace numbers are the program's own, never left out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare

FLOAT8 = torch.float8_e4m3fn


def inputs(dtype: torch.dtype = torch.float32, n: int = 24, m: int = 32) -> list[Tensor]:
    sizes = (n, m, n, m)
    return [
        torch.randn(2, 2, size, 8, dtype=dtype, requires_grad=i < 2)
        for i, size in enumerate(sizes)
    ]


def rounded(scores, probabilities):
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = scores(q @ k.mT), scores(qt @ kt.mT)
        p = probabilities(t.softmax(-1))
        return (p * (p.clamp_min(1e-9).log() - s.log_softmax(-1))).sum(-1)

    return loss


def same(x: Tensor) -> Tensor:
    return x


ROUNDINGS = {
    "float8": lambda x: x.to(FLOAT8).float(),
    "half": lambda x: x.half().float(),
    "bfloat16": lambda x: x.to(torch.bfloat16).float(),
    "integer": lambda x: x.mul(8.0).int().float(),
}


@pytest.mark.parametrize("where", ["scores", "probabilities"])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding_is_kept(name: str, where: str) -> None:
    change = ROUNDINGS[name]
    loss = rounded(change, same) if where == "scores" else rounded(same, change)
    torch._dynamo.reset()
    given = inputs()
    for x in given[:2]:
        x.requires_grad_(name != "integer")
    outcome = compare(loss, given)
    assert outcome.num_fused == 0
    for ours, eager in zip(outcome.compiled.tensors(), outcome.eager.tensors(), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dynamic", [False, True])
def test_widening_is_the_identity(dynamic: bool) -> None:
    loss = rounded(lambda x: x.double(), same)
    assert compare(loss, inputs(), dynamic=dynamic).check().num_fused == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_back_to_the_dtype_of_the_inputs(dtype: torch.dtype) -> None:
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        log_p = F.log_softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype)
        p = F.softmax(qt @ kt.mT, -1, dtype=torch.float32).to(q.dtype)
        return F.kl_div(log_p, p, reduction="none").sum(-1)

    assert compare(loss, inputs(dtype)).check().num_fused == 1


@pytest.mark.parametrize("options", [{}, {"neginf": -100.0}, {"nan": 1.0}], ids=str)
@pytest.mark.parametrize("is_masked", [False, True])
def test_nan_to_num(is_masked: bool, options: dict[str, float]) -> None:
    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = q @ k.mT, qt @ kt.mT
        if is_masked:
            s = s.masked_fill(torch.arange(32) > 20, float("-inf"))
        return (t.softmax(-1) * -s.log_softmax(-1).nan_to_num(**options)).sum(-1)

    outcome = compare(loss, inputs()).check()
    assert outcome.num_fused == (not is_masked and "nan" not in options), str(outcome.report)


def _of_distances(like: Tensor) -> Tensor:
    at = torch.arange(like.shape[-1])
    return -(at[:, None] - at).abs().to(like.dtype) / 3


def _of_ids(like: Tensor) -> Tensor:
    ids = torch.tensor([3, 90, 17, 4, 55, 21]).to(like.dtype)
    return torch.log(ids + 1.0) / 7


def _of_a_mask(like: Tensor) -> Tensor:
    return (torch.tensor([1, 0, 1, 1, 0, 0]) > 0).to(like.dtype) * 0.1


@pytest.mark.parametrize("make", [_of_distances, _of_ids, _of_a_mask])
def test_numbers_made_of_integers_are_as_wide_as_the_scores(make) -> None:
    """torch computes ``integers / 3`` in the default type, which scripts set to bfloat16."""

    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        s, t = q @ k.mT, qt @ kt.mT
        bias = make(s)
        p = (t + bias).softmax(-1)
        return (p * (p.log() - (s + bias).log_softmax(-1))).sum()

    given = [torch.randn(2, 2, 6, 4, dtype=torch.float64, requires_grad=i < 2) for i in range(4)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        options = {"streamkl.min_mib": 0, "streamkl.verify": "never"}
        outcome = compare(loss, given, options=options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert outcome.num_fused == 1, outcome.report
    for ours, eager in zip(outcome.compiled.tensors(), outcome.eager.tensors(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-12)


def test_a_mask_of_float64_keeps_the_digits_of_scores_of_float32() -> None:
    """Rows that it masks as a whole have them next to -1e4, which float32 has not."""

    def loss(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor) -> Tensor:
        keep = torch.arange(24)[:, None] == torch.arange(5, 37)
        teacher = (qt @ kt.mT + (1 - keep.double()) * -1e4).softmax(-1)
        return F.kl_div((q @ k.mT).log_softmax(-1), teacher, reduction="batchmean")

    outcome = compare(loss, inputs(), options={"streamkl.verify": "never"}).check()
    assert outcome.num_fused == 0
    assert "scores become float64" in str(outcome.report)
