"""Calls of attention_kl that once were wrong or raised: head groups, layouts, nothing, vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_streamkl import attention_kl, attention_kl_varlen


def test_teacher_groups_that_are_no_multiple_of_the_ratio() -> None:
    """24 teacher heads on 8 key heads, averaged for 12: blocks of heads hold whole key heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 12, 128, 4), (1, 4, 512, 4), (1, 24, 128, 4), (1, 8, 512, 4))
    q, k, tq, tk = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    log_s = (q @ k.repeat_interleave(3, 1).mT / 2).log_softmax(-1)
    p = (tq @ tk.repeat_interleave(3, 1).mT / 2).softmax(-1).unflatten(1, (12, 2)).mean(2)
    want = (p * (p.log() - log_s)).sum(-1)
    got = attention_kl(q, k, tq, tk, head_reduction="mean", impl="torch")
    torch.testing.assert_close(got, want)
    tensors = (q, k, tq, tk)
    for a, b in zip(
        torch.autograd.grad(got.sum(), tensors),
        torch.autograd.grad(want.sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "packed"])
def test_tensor_scales_broadcast_to_q_as_it_is_given(layout: str) -> None:
    """With as many heads as rows a scale of heads and one of rows look alike."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 3, 4) if layout == "packed" else (2, 3, 3, 4)
    q, k = (torch.randn(shape, generator=generator) for _ in "qk")
    scale = (torch.rand(3, 1, generator=generator) + 0.2).requires_grad_()
    if layout == "packed":
        offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
        how = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 2}

        def call(x: Any, **options: Any) -> Any:
            return attention_kl_varlen(x, k, q, k, **how, max_seqlen_k=2, **options)
    else:

        def call(x: Any, **options: Any) -> Any:
            return attention_kl(x, k, q, k, layout=layout, **options)

    got, want = call(q, student_scale=scale), call(q * scale, student_scale=1.0)
    torch.testing.assert_close(got, want)
    (a,), (b,) = (torch.autograd.grad(x.square().sum(), scale) for x in (got, want))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 2, 0, 5), (2, 2, 3, 0)])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_nothing_at_all(shape: tuple[int, ...], reduction: str) -> None:
    """No batch, query or key: rows of 0, a sum of 0 with gradients 0, and torch's mean."""
    batch, heads, n, m = shape
    q = torch.randn(batch, heads, n, 4, requires_grad=True)
    k = torch.randn(batch, heads, m, 4, requires_grad=True)
    value = attention_kl(q, k, q, k, reduction=reduction)
    rows = torch.zeros(batch, heads, n)
    means = {"mean": rows.mean(), "batchmean": rows.sum() / torch.tensor(float(batch))}
    want = {"none": rows, "sum": rows.sum(), **means}[reduction]
    torch.testing.assert_close(value, want, equal_nan=True)
    grads = torch.autograd.grad(value.sum(), (q, k))
    assert all(not g.any() for g in grads) or value.isnan().all()


def test_operands_under_autocast() -> None:
    """As a matmul's: cast to autocast's type whatever they are, and refused without it."""
    x = torch.randn(1, 2, 3, 4)
    mixed = (x, x.bfloat16(), x.half(), x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            attention_kl(*mixed), attention_kl(x, x, x, x), atol=1e-2, rtol=1
        )
        with pytest.raises(ValueError, match="must share dtype, got"):
            attention_kl(x.double(), x, x, x)
    with pytest.raises(ValueError, match="must share dtype"):
        attention_kl(*mixed)


@pytest.mark.parametrize("name", ["attn_mask", "key_lengths", "student_bias"])
def test_vmap_over_an_option_alone(name: str) -> None:
    x = torch.randn(2, 2, 3, 4)
    values = {
        "attn_mask": torch.rand(4, 3, 3) > 0.3,
        "key_lengths": torch.tensor([[1, 2], [3, 0], [2, 2], [3, 3]]),
        "student_bias": torch.randn(4, 1, 1, 3, 3),
    }[name]
    mapped = torch.vmap(lambda y: attention_kl(x, x, x * 2, x, **{name: y}))(values)
    want = torch.stack([attention_kl(x, x, x * 2, x, **{name: y}) for y in values])
    torch.testing.assert_close(mapped, want)
