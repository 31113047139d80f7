"""``logits[:, vocabulary entry] = -inf``: vocabulary entries left out fuse, and any other write
keeps the user's value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare
from tests.support.covering import every
from tests.support.named_inputs import given

Case = Callable[..., Any]
NEG_INF = float("-inf")


def make_inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    xs, ws, xt, wt = (
        torch.randn(*s, generator=make).to(dtype) for s in ((6, 8), (37, 8), (6, 12), (37, 12))
    )
    return [xs.requires_grad_(), ws.requires_grad_(), xt, wt]


def kl(s: Tensor, t: Tensor) -> Tensor:
    lt, ls = t.log_softmax(-1), s.log_softmax(-1)
    p = lt.exp()
    return (p * torch.where(p > 0, lt - ls, torch.zeros_like(lt))).sum(-1).mean()


def logits(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor) -> tuple[Tensor, Tensor]:
    return xs @ ws.mT / 2.0, F.linear(xt, wt)


of_logits = given("xs ws xt wt", {"s t": logits})


@of_logits
def one_word(s, t):
    s[:, 3] = NEG_INF
    t[:, 3] = NEG_INF
    return kl(s, t)


@of_logits
def the_last_words(s, t):
    s[..., -5:] = NEG_INF
    t[..., 32:] = NEG_INF
    return kl(s / 1.5, t / 1.5)


@of_logits
def several_words(s, t):
    for x in (s, t):
        x[..., 0] = NEG_INF
        x[:, 10:13] = NEG_INF
    return kl(s, t)


@of_logits
def clones_of_logits_that_are_used(s, t):
    kept, out = s.clone(), t.clone()
    kept[:, 3] = NEG_INF
    out[:, 3].fill_(NEG_INF)
    return kl(kept, out) + kl(s, t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("program", "sites"),
    [(one_word, 1), (the_last_words, 1), (several_words, 1), (clones_of_logits_that_are_used, 2)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_words_left_out(program: Case, sites: int, dtype: torch.dtype) -> None:
    outcome = compare(program, make_inputs(dtype)).check()
    assert outcome.num_fused == len(outcome.report.sites) == sites, str(outcome.report)
    assert outcome.report.num_remaining == 0, str(outcome.report)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_words_left_out_of_any_number(inner: str) -> None:
    outcome = compare(one_word, make_inputs(), inner=inner, dynamic=True).check()
    assert outcome.num_fused == 1, str(outcome.report)


# ------------------------------------------------------------------ the value stays the user's
@of_logits
def another_word_on_each_side(s, t):
    s[:, 3] = NEG_INF
    t[:, 4] = NEG_INF
    return kl(s, t).nan_to_num(), s.exp()


@of_logits
def on_one_side_only(s, t):
    t[:, 3] = NEG_INF
    return kl(s, t)


@of_logits
def a_finite_number(s, t):
    s[:, 3], t[:, 3] = -2.0, -2.0
    return kl(s, t)


@of_logits
def every_other_word(s, t):
    for x in (s, t):
        x[:, ::2] = NEG_INF
    return kl(s, t)


@of_logits
def words_of_some_tokens(s, t):
    for x in (s, t):
        x[:2, 3] = NEG_INF
    return kl(s, t)


@of_logits
def read_through_another_view(s, t):
    early = s.view(2, 3, -1)
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    return kl(early, t.view(2, 3, -1))


@of_logits
def probabilities_from_before(s, t):
    before, p = s.log_softmax(-1), t.softmax(-1)
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    return F.kl_div(before, p, reduction="batchmean") + kl(s, t)


@of_logits
def two_clones_of_equal_logits(s, t):
    first, second, wanted = s.clone(), s.clone(), t.clone()
    first[:, 3], wanted[:, 3] = NEG_INF, NEG_INF
    second[:, 4] = NEG_INF
    return kl(first, wanted) + second.log_softmax(-1)[:, 3].sum()


@of_logits
def the_logits_are_returned(s, t):
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    return kl(s, t), s


@of_logits
def a_view_is_scaled_and_its_base_returned(s, t):
    flat = s.view(-1, s.shape[-1])
    flat.mul_(0.5)
    return kl(flat, t), s


@of_logits
def before_a_softcap(s, t):
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    return kl(5 * torch.tanh(s / 5), 5 * torch.tanh(t / 5))


@of_logits
def times_a_negative_number(s, t):
    s[:, 3], t[:, 3] = NEG_INF, NEG_INF
    s[:, 3], t[:, 3] = -s[:, 4].detach(), -t[:, 4]
    return kl(-s, -t)


FUSED = [
    (a_finite_number, "row_program"),
    (words_of_some_tokens, "row_program"),
    (on_one_side_only, "attention_kl"),
    (before_a_softcap, "row_program"),
]
KEEP_THEIR_VALUE = [
    read_through_another_view,
    another_word_on_each_side,
    probabilities_from_before,
    two_clones_of_equal_logits,
    the_logits_are_returned,
    a_view_is_scaled_and_its_base_returned,
    times_a_negative_number,
]


@pytest.mark.parametrize("program", every(2, KEEP_THEIR_VALUE), ids=lambda x: x.__name__)
def test_keeps_its_value(program: Case) -> None:
    compare(program, make_inputs()).check()


@pytest.mark.parametrize(("program", "kind"), FUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_is_fused(program: Case, kind: str) -> None:
    outcome = compare(program, make_inputs()).check()
    assert outcome.kinds == {kind}, str(outcome.report)
    assert outcome.report.num_remaining == 0, str(outcome.report)


def test_is_left_alone_for_a_reason() -> None:
    outcome = compare(every_other_word, make_inputs()).check()
    assert outcome.num_fused == 0, str(outcome.report)
    assert any("modified in place" in r for r in outcome.reasons), outcome.reasons


def test_keys_of_attention() -> None:
    def program(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        s, wanted = q @ k.mT, t @ t.mT
        s[..., 2], wanted[..., 2] = NEG_INF, NEG_INF
        return kl(s, wanted)

    inputs = [torch.randn(2, 3, 6, 4, requires_grad=grad) for grad in (True, True, False)]
    outcome = compare(program, inputs).check()
    assert outcome.kinds == {"attention_kl"}, str(outcome.report)
    assert "entries left out" in outcome.report.sites[0].form


# ---------------------------------------------------------------------------- what is no write
def test_operator_and_is_no_write() -> None:
    """Named with an underscore because ``and`` is a keyword: the mask code of transformers."""

    def student_first(xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, labels: Tensor) -> Tensor:
        s = xs @ ws.mT
        hard = F.cross_entropy(s, labels)
        counted = (labels != 0) & (labels != 1)
        rows = F.kl_div(s.log_softmax(-1), (xt @ wt.mT).softmax(-1), reduction="none").sum(-1)
        return hard + (rows * counted).sum()

    outcome = compare(student_first, [*make_inputs(), torch.arange(6)]).check()
    assert outcome.num_fused == 1, str(outcome.report)
    assert outcome.report.num_remaining == 0, str(outcome.report)
