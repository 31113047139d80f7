"""The row kernels of linear_kl and linear_topk_kl without a GPU: the interpreter against float64.

The interpreter has to be chosen before a kernel is imported: test_in_the_interpreter.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.offline.compile import check_frontend, record_launches
from tests.operators import test_linear_topk_kl as topk
from tests.operators.test_linear_kl import (
    DIVERGENCES,
    check_infinite_rows,
    heads,
    limit_workspace,
    outcome,
)
from tests.support.interpreter import inside, outside, quiet
from torch_streamkl import linear_kl, linear_topk_kl
from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.linear.problem import Head
from torch_streamkl.program.divergences import named
from torch_streamkl.topk.problem import Tail, TopkProblem
from torch_streamkl.topk.triton import rows as topk_kernels

pytestmark = quiet


def as_exact(ours: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """Twice the error of plain torch in the same dtype, and a few roundings of what is summed."""
    for got, same, expected in zip(ours, plain, truth, strict=True):
        finite = expected.isfinite()
        assert torch.equal(got.isfinite(), finite)
        if not finite.any():
            continue
        error, naive = ((x.double() - expected)[finite].abs().max() for x in (got, same))
        size = 1 + expected[finite].abs().max()
        assert error <= 2 * naive + 8 * torch.finfo(got.dtype).eps * size


def check(inputs, **options):
    exact = [x.detach().double().requires_grad_() for x in inputs]
    in_double = {
        name: x.detach().double().requires_grad_(x.requires_grad) if is_float(x) else x
        for name, x in options.items()
    }
    truth = outcome(exact, **in_double, impl="reference")
    as_exact(*(outcome(inputs, **options, impl=impl) for impl in ("triton", "torch")), truth)


def is_float(x) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


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


# ------------------------------------------------------------------------------ linear_topk_kl
@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tail", ["none", "bucket"])
def test_topk_rows(tail: str, dtype: torch.dtype) -> None:
    more = {"reduction": "none", "temperature": 2.0, "softcap": 4.0}
    every = [{"reduction": "mean"}, *({**more, "logit_scale": scale} for scale in (0.7, 0.0))]
    for options in every:
        options = {"tail": tail, "divergence": "js", **options}
        tensors, given = topk.head(5, 16, 150, dtype), topk.entries(5, 150, 6)
        if options["reduction"] == "none":
            del tensors["bias"]
        results = {}
        for impl in ("triton", "torch", "truth"):
            mine = topk.leaves(tensors, torch.float64 if impl == "truth" else dtype)
            value = _value(impl, mine, given, options)
            value.sum().backward()
            results[impl] = [value.detach(), *(x.grad for x in mine.values())]
        as_exact(*results.values())


def _value(impl: str, mine: dict[str, Any], given: Any, options: dict[str, Any]) -> Any:
    ids, log_probs = given
    if impl != "truth":
        return linear_topk_kl(**mine, ids=ids, log_probs=log_probs, impl=impl, **options)
    kept = {k: x for k, x in options.items() if k != "reduction"}
    rows = topk.formula(mine, ids, log_probs, **kept)
    return rows.mean() if options["reduction"] == "mean" else rows


@inside
def test_topk_rows_that_do_not_count_and_ids_that_are_everywhere() -> None:
    """Infinite logits of a masked row; a bucket without another entry."""
    tensors = topk.leaves(topk.head(4, 8, 20, torch.float32))
    log_probs, ids = torch.randn(4, 20).log_softmax(-1).topk(20)
    with torch.no_grad():
        tensors["hidden"][2] = 1e30
        tensors["weight"][3] = 1e30
    value = linear_topk_kl(
        **tensors,
        ids=ids,
        log_probs=log_probs,
        tail="bucket",
        row_mask=torch.tensor([True, True, False, True]),
        impl="triton",
        reduction="mean",
    )
    value.backward()
    assert value.isfinite()
    assert all(x.grad.isfinite().all() for x in tensors.values())
    assert not tensors["hidden"].grad[2].any()


@outside
@pytest.mark.parametrize("tail", ["none", "bucket"])
def test_the_topk_kernels_compile(tail: Tail) -> None:
    """The interpreter runs code that compilers refuse, such as Triton 3.6's tl.zeros here."""
    given = Head(torch.empty(4, 8), torch.empty(1000, 8), softcap=5.0)
    ids = torch.zeros(4, 2, dtype=torch.long)
    problem = TopkProblem(given, ids, torch.zeros(4, 2), named("forward_kl"), tail)
    with record_launches("sm_90") as launches:
        logits = torch.empty(4, 1000, dtype=torch.bfloat16)
        topk_kernels.log_sums(problem, logits)
        topk_kernels.gradient_(problem, logits, torch.empty(3, 4))
    assert len(launches) == 2
    for launch in launches:
        check_frontend(launch, "sm_90")


@inside
@pytest.mark.parametrize("made", ["strided", "expanded"])
def test_biases_that_are_not_contiguous(made: str) -> None:
    """Kernels read a bias without strides."""
    hidden, weight = torch.randn(5, 4), torch.randn(7, 4)
    bias = torch.randn(1).expand(7) if made == "expanded" else torch.randn(7, 2)[:, 0]
    ids, log_probs = torch.tensor([[3, 0]]).expand(5, 2), torch.full((5, 2), -1.0)
    calls = [
        lambda b: linear_kl(
            hidden, weight, hidden, weight.cos(), student_bias=b, teacher_bias=2 * b.cos(),
            impl="triton",
        ),
        lambda b: linear_kl(hidden, weight, hidden, weight.cos(), teacher_bias=b, impl="triton"),
        lambda b: linear_topk_kl(
            hidden, weight, ids, log_probs, bias=b, tail="bucket", impl="triton"
        ),
    ]  # fmt: skip
    for call in calls:
        assert torch.equal(call(bias), call(bias.contiguous()))
