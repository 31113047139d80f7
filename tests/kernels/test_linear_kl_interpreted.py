"""The row kernel of linear_kl without a GPU: Triton's interpreter against float64.

The interpreter has to be chosen before a kernel is imported: test_in_the_interpreter.py does.
"""

from __future__ import annotations

import pytest
import torch

from tests.operators.test_linear_kl import (
    DIVERGENCES,
    check_infinite_rows,
    heads,
    limit_workspace,
    outcome,
)
from tests.support.interpreter import inside, quiet
from torch_streamkl import linear_kl
from torch_streamkl.linear import chunks as linear_chunks

pytestmark = quiet


def check(inputs, **options):
    """Twice the error of plain torch in the same dtype, and a few roundings of what is summed."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    in_double = {
        name: x.detach().double().requires_grad_(x.requires_grad) if is_float(x) else x
        for name, x in options.items()
    }
    truth = outcome(exact, **in_double, impl="reference")
    plain = outcome(inputs, **options, impl="torch")
    ours = outcome(inputs, **options, impl="triton")
    eps = torch.finfo(inputs[0].dtype).eps
    for got, same, expected in zip(ours, plain, truth, strict=True):
        finite = expected.isfinite()
        assert torch.equal(got.isfinite(), finite)
        if not finite.any():
            continue
        error, naive = ((x.double() - expected)[finite].abs().max() for x in (got, same))
        size = 1 + expected[finite].abs().max()
        rounding = eps if got.dtype == inputs[0].dtype else torch.finfo(torch.float32).eps
        assert error <= 2 * naive + 8 * rounding * size


def is_float(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergences(divergence, dtype):
    check(heads(3, vocab=(150, 150), dtype=dtype), divergence=divergence)
    if dtype == torch.float32:
        check(heads(3, vocab=(150, 150), dtype=dtype), divergence=divergence, reduction="mean")


@inside
@pytest.mark.parametrize("strategy", ["forward", "recompute"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_every_option_at_once(strategy, temperature):
    check(
        heads(5, vocab=(77, 77), dtype=torch.float32, size=4.0),
        student_bias=torch.randn(77).requires_grad_(),
        teacher_bias=torch.randn(77).requires_grad_(),
        temperature=temperature,
        student_logit_scale=0.7,
        student_softcap=5.0,
        teacher_softcap=7.0,
        student_eps=1e-6,
        labels=torch.tensor([3, -100, 76, 0, 12]),
        hard_weight=0.3,
        row_weight=torch.tensor([1.0, 2.0, 0.0, 1.0, 0.5]),
        reduction="sum",
        strategy=strategy,
    )


@inside
@pytest.mark.parametrize("vocab", [(64, 64), (1, 70), (130, 63)])
def test_vocabularies_of_any_size(vocab):
    for divergence in ("js", "tv") if vocab[0] < vocab[1] else ("js", "forward_kl"):
        check(heads(2, vocab=vocab, dtype=torch.float32), divergence=divergence)


@inside
def test_blocks_of_words_in_the_backward(monkeypatch):
    limit_workspace(monkeypatch, num_rows=2)
    monkeypatch.setattr(linear_chunks, "VOCAB_MULTIPLE", 64)
    labels = torch.tensor([0, 299, 150, 64, -100])
    for vocab in ((300, 300), (300, 200)):
        inputs = heads(5, vocab=vocab, dtype=torch.float32)
        check(inputs, labels=labels, reduction="mean", strategy="recompute", temperature=2.0)


@inside
def test_extreme_logits():
    inputs = heads(2, vocab=(100, 100), dtype=torch.float32, size=1e4)
    for divergence in DIVERGENCES:
        assert all(
            x.isfinite().all() for x in outcome(inputs, divergence=divergence, impl="triton")
        )


@inside
def test_label_that_is_no_entry_is_an_error():
    inputs = heads(3, dtype=torch.float32)
    with pytest.raises(IndexError, match="got 37"):
        linear_kl(*inputs, labels=torch.tensor([0, 37, -100]), impl="triton")


@inside
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jeffreys"])
def test_rows_that_one_side_s_vocabulary_makes_infinite(divergence):
    check_infinite_rows(divergence, "triton", torch.float32)
