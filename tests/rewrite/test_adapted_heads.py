"""Low-rank adapters of LM heads: ``x W^T + s (x A^T) B^T`` fuses, with gradients to A, B and x."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare, refusals
from tests.support.covering import every
from tests.support.subgraphs import inductor_without_code

ROWS, WIDTH, TEACHER, VOCAB, RANK = 7, 12, 20, 50, 3
Logits = Callable[..., Tensor]


def inputs(dtype: torch.dtype = torch.float32, trains_w: bool = False) -> list[Tensor]:
    """x, W, A, B, the bias, then the teacher's x and W, and labels."""
    make = torch.Generator().manual_seed(0)
    shapes = (
        (2, ROWS, WIDTH), (VOCAB, WIDTH), (RANK, WIDTH), (VOCAB, RANK), (VOCAB,),
        (2, ROWS, TEACHER), (VOCAB, TEACHER),
    )  # fmt: skip
    tensors = [torch.randn(*s, generator=make).to(dtype) for s in shapes]
    labels = torch.randint(0, VOCAB, (2, ROWS), generator=make)
    labels[:, :2] = -100
    for i, x in enumerate(tensors):
        x.requires_grad_(i in (0, 2, 3) or (trains_w and i in (1, 4)))
    return [*tensors, labels]


def peft(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """As PEFT's layers compute it."""
    result = F.linear(x, w)
    return result + F.linear(F.linear(x, a), b) * 0.5


def other_vocab_entries(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """An adapter whose vocabulary entries have another order."""
    return F.linear(x, w) + F.linear(F.linear(x, a), b).flip(-1)


def adapter_of_one_row(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w) + F.linear(F.linear(x[:, :1], a), b)


FORMS: dict[str, Logits] = {
    "peft": peft,
    "adapter first": lambda x, w, a, b, bias: x @ a.t() @ b.t() * 0.5 + x @ w.t(),
    "with a bias": lambda x, w, a, b, bias: F.linear(x, w, bias) + F.linear(F.linear(x, a), b),
    "bias of the adapter": lambda x, w, a, b, bias: (
        F.linear(x, w) - 2.0 * F.linear(F.linear(x, a), b, bias)
    ),
    "alpha": lambda x, w, a, b, bias: (F.linear(x, w) + F.linear(F.linear(x, a), b)) * 0.25,
    "head scaled": lambda x, w, a, b, bias: 0.25 * F.linear(x, w) + F.linear(F.linear(x, a), b),
    "softcap": lambda x, w, a, b, bias: 3.0 * torch.tanh(peft(x, w, a, b, bias) / 3.0),
    "negative": lambda x, w, a, b, bias: -(F.linear(x, w) - F.linear(F.linear(x, a), b)),
    "scaled adapter": lambda x, w, a, b, bias: F.linear(x, w) + F.linear(F.linear(x * 2, a), b),
    "learned temperature": lambda x, w, a, b, bias: peft(x, w, a, b, bias) / bias.detach()[0],
    "value per row": lambda x, w, a, b, bias: peft(x, w, a, b, bias) * x.detach()[..., :1].abs(),
    "adapter of one row": adapter_of_one_row,
    "other vocabulary entries": other_vocab_entries,
    "sliced vocabulary entries": lambda x, w, a, b, bias: peft(x, w, a, b, bias)[..., :30],
    "padded vocabulary entries": lambda x, w, a, b, bias: F.pad(
        peft(x, w, a, b, bias)[..., :30], (0, VOCAB - 30), value=float("-inf")
    ),
}


def divergence(s: Tensor, t: Tensor) -> Tensor:
    vocab_size = min(s.shape[-1], t.shape[-1])
    s, t = s[..., :vocab_size], t[..., :vocab_size]
    return F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="none").sum(-1)


def fused(program: Any, given: list[Tensor], **options: Any) -> Outcome:
    outcome = compare(program, given, **options).check()
    assert outcome.num_fused == len(outcome.report.sites) == 1, str(outcome.report)
    assert outcome.report.num_remaining == 0, str(outcome.report)
    assert "a sum of two products" in outcome.report.sites[0].form
    return outcome


@pytest.mark.parametrize("form", every(2, FORMS))
@pytest.mark.parametrize("trains_w", [False, True])
def test_forms(form: str, trains_w: bool) -> None:
    def loss(x, w, a, b, bias, xt, wt, labels):  # type: ignore[no-untyped-def]
        s = FORMS[form](x, w, a, b, bias)
        return divergence(s, F.linear(xt, wt)).mean()

    fused(loss, inputs(trains_w=trains_w))


@pytest.mark.parametrize("reduction", ["mean", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, reduction: str) -> None:
    def loss(x, w, a, b, bias, xt, wt, labels):  # type: ignore[no-untyped-def]
        rows = divergence(peft(x, w, a, b, bias), F.linear(xt, wt))
        return rows.mean() if reduction == "mean" else (rows**2).sum()

    fused(loss, inputs(dtype))


def test_an_adapter_of_the_teacher() -> None:
    def loss(x, w, a, b, bias, xt, wt, labels):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            t = peft(x, w, a, b, bias)
        return divergence(F.linear(x, w), t).sum()

    fused(loss, inputs(trains_w=True))


@pytest.mark.parametrize(
    ("inner", "code"),
    [
        pytest.param("aot_eager", contextlib.nullcontext, id="aot_eager"),
        pytest.param("inductor", inductor_without_code, id="inductor"),
        pytest.param("inductor", contextlib.nullcontext, id="its code", marks=pytest.mark.slow),
    ],
)
def test_labels_and_shifted_tokens(inner: str, code: Callable[[], Any]) -> None:
    """The loss of a causal model: KL and cross-entropy of shifted logits."""

    def loss(x, w, a, b, bias, xt, wt, labels):  # type: ignore[no-untyped-def]
        s = peft(x, w, a, b, bias)[:, :-1].reshape(-1, VOCAB)
        t = F.linear(xt, wt)[:, :-1].reshape(-1, VOCAB)
        kl = F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean")
        return F.cross_entropy(s, labels[:, 1:].reshape(-1)) + 4 * kl

    with code():
        fused(loss, inputs(), inner=inner)


@pytest.mark.parametrize("dynamic", [False, True])
def test_selected_rows(dynamic: bool) -> None:
    def loss(x, w, a, b, bias, xt, wt, labels):  # type: ignore[no-untyped-def]
        keep = labels != -100
        return divergence(peft(x, w, a, b, bias)[keep], F.linear(xt, wt)[keep]).mean()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fused(loss, inputs(), inner="aot_eager", dynamic=dynamic)


def test_dynamic_shapes() -> None:
    def loss(x, w, a, b, bias, xt, wt, labels):  # type: ignore[no-untyped-def]
        return divergence(peft(x, w, a, b, bias), F.linear(xt, wt)).mean()

    fused(loss, inputs(), inner="aot_eager", dynamic=True)


# ------------------------------------------------------------ not one head with one adapter
def two_adapters(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return peft(x, w, a, b, bias) + F.linear(F.linear(x.sin(), a), b)


def weight_decomposed(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """DoRA: a magnitude per vocabulary entry over the norm of the adapted weight."""
    norm = (w + 0.5 * b @ a).norm(dim=1).detach()
    magnitude = (bias.abs() / norm)[None]
    adapted = F.linear(F.linear(x, a), b) * 0.5
    return F.linear(x, w) + (magnitude - 1) * F.linear(x, w) + magnitude * adapted


def behind_a_tanh(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w)) + F.linear(F.linear(x, a), b)


def behind_removed_words(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    masked = F.linear(x, w).masked_fill(torch.arange(VOCAB) > 40, float("-inf"))
    return masked + F.linear(F.linear(x, a), b)


def adapter_capped(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w) + torch.tanh(F.linear(F.linear(x, a), b))


def adapter_of_each_text(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """Words that another matrix has in every text of the batch."""
    return F.linear(x, w) + F.linear(x, a) @ torch.stack([b, b.sin()]).mT


def of_other_rows(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """Rows that another order has: as many, and not the same."""
    adapted = F.linear(F.linear(x, a), b)
    return F.linear(x, w) + adapted.transpose(0, 1).reshape(x.shape[0], x.shape[1], -1)


def multiplied(x: Tensor, w: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w) * F.linear(F.linear(x, a), b)


ROW_PROGRAMS = (
    two_adapters, behind_a_tanh, behind_removed_words, adapter_capped, adapter_of_each_text,
    multiplied,
)  # fmt: skip
LEFT_ALONE = (weight_decomposed, of_other_rows)


def loss_of(form: Logits) -> Callable[..., Tensor]:
    def loss(x, w, a, b, bias, xt, wt, labels):  # type: ignore[no-untyped-def]
        return divergence(form(x, w, a, b, bias), F.linear(xt, wt)).mean()

    return loss


@pytest.mark.parametrize("form", every(2, ROW_PROGRAMS), ids=lambda form: form.__name__)
def test_is_a_row_program(form: Logits) -> None:
    """Several products that meet: the operators of divergences take one and an adapter."""
    outcome = compare(loss_of(form), inputs(), inner="aot_eager").check()
    assert outcome.kinds == {"row_program"}, str(outcome.report)
    assert all(refusals(loss_of(form), inputs()))


@pytest.mark.parametrize("form", LEFT_ALONE, ids=lambda form: form.__name__)
def test_left_alone(form: Logits) -> None:
    outcome = compare(loss_of(form), inputs(), inner="aot_eager").check()
    assert outcome.num_fused == 0
    assert outcome.report.sites[0].reason


def test_other_types_are_left_alone() -> None:
    """An adapter in float32 next to a head in bfloat16: the operator would round it."""

    def loss(x, w, a, b, bias, xt, wt, labels):  # type: ignore[no-untyped-def]
        adapted = F.linear(F.linear(x.float(), a.float()), b.float())
        s = (F.linear(x, w) + adapted).to(x.dtype)
        return divergence(s, F.linear(xt, wt)).mean()

    outcome = compare(loss, inputs(torch.bfloat16), inner="aot_eager").check()
    assert outcome.num_fused == 0
    assert outcome.report.sites[0].reason
