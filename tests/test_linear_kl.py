"""linear_kl against its definition in float64: values and gradients, every option, both strategies."""

from __future__ import annotations

import pytest
import torch

from torch_streamkl import linear_kl

DIVERGENCES = ("forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "js", "tv")


def heads(num_tokens=10, widths=(8, 12), words=(37, 37), dtype=torch.float64, seed=0):
    """student_hidden, student_weight, teacher_hidden, teacher_weight, each requiring its gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (num_tokens, widths[0]),
        (words[0], widths[0]),
        (num_tokens, widths[1]),
        (words[1], widths[1]),
    )
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize("strategy", ["forward", "recompute"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_value_and_gradients_are_the_definition(divergence, strategy):
    inputs = heads()
    results = []
    for impl in ("auto", "reference"):
        loss = linear_kl(
            *inputs,
            divergence=divergence,
            reduction="mean",
            strategy=strategy if impl == "auto" else "auto",
            impl=impl,
        )
        results.append([loss, *torch.autograd.grad(loss, inputs)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-12)


def test_inputs_keep_their_dtype():
    """float32 stays float32 unless autocast is on: an error of bfloat16 would be 1e-3."""
    inputs = heads(dtype=torch.float32)
    truth = linear_kl(*(x.double() for x in inputs), impl="reference")
    torch.testing.assert_close(linear_kl(*inputs).double(), truth, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        low = linear_kl(*inputs)
    assert (low - truth).abs().max() > 1e-4
