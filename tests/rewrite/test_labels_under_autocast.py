"""The labels' cross-entropy under autocast or no_grad, and the KL after it: one call for both.

What reads the cross-entropy has to move after the KL, and may only where it computes the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare
from tests.support.subgraphs import inductor_without_code

ROWS, WIDTH, TEACHER, VOCAB = 7, 12, 20, 50


def inputs() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((2, ROWS, WIDTH), (VOCAB, WIDTH), (2, ROWS, TEACHER), (VOCAB, TEACHER))
    tensors = [torch.randn(*s, generator=make) for s in shapes]
    labels = torch.randint(0, VOCAB, (2, ROWS), generator=make)
    labels[:, :2] = -100
    return [tensors[0].requires_grad_(), tensors[1].requires_grad_(), *tensors[2:], labels]


def of_labels(s: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(s.float().view(-1, VOCAB), labels.view(-1), **options)


def kl(s: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    t = F.linear(xt, wt)
    rows = F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="none").sum(-1)
    return 4 * rows.mean()


def arithmetic_under_autocast(x, w, xt, wt, labels):  # type: ignore[no-untyped-def]
    with torch.autocast("cpu", torch.bfloat16):
        s = F.linear(x, w)
        hard = of_labels(s, labels) / 2.0
    return 0.5 * hard + kl(s.float(), xt, wt)


def matmul_under_autocast(x, w, xt, wt, labels):  # type: ignore[no-untyped-def]
    """Rounded to bfloat16 where it is, and not after the KL."""
    with torch.autocast("cpu", torch.bfloat16):
        s = F.linear(x, w)
        rows = of_labels(s, labels, reduction="none")
        hard = (rows[None] @ rows.detach()[:, None]).sum()
    return hard.float() + kl(s.float(), xt, wt)


def metric_without_gradient(x, w, xt, wt, labels):  # type: ignore[no-untyped-def]
    """Behind the KL the metric would have a gradient."""
    s = F.linear(x, w)
    hard = of_labels(s, labels)
    with torch.no_grad():
        metric = hard * 3.0
    return hard + metric + kl(s, xt, wt)


def teacher_under_autocast(x, w, xt, wt, labels):  # type: ignore[no-untyped-def]
    """The cross-entropy outside, and the KL inside."""
    s = F.linear(x, w)
    hard = of_labels(s, labels) * 0.5
    with torch.autocast("cpu", torch.bfloat16):
        t = F.linear(xt, wt)
        rows = F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="none").sum(-1)
        return hard + rows.mean()


CASES = {
    arithmetic_under_autocast: True,
    teacher_under_autocast: True,
    matmul_under_autocast: False,
    metric_without_gradient: False,
}


slow = pytest.mark.slow
# what moves decides before any compiler
INNER: dict[str, tuple[str, Callable[[], Any]]] = {
    "aot_eager": ("aot_eager", contextlib.nullcontext),
    "inductor": ("inductor", inductor_without_code),
    "its code": ("inductor", contextlib.nullcontext),
}


@pytest.mark.parametrize("program", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor", pytest.param("its code", marks=slow)])
def test_shared_where_the_rest_computes_the_same(program: Any, inner: str) -> None:
    name, code = INNER[inner]
    with code():
        outcome = compare(program, inputs(), inner=name)
    outcome.check()
    assert outcome.num_fused == 1, str(outcome.report)
    shares = outcome.report.num_remaining == 0
    assert shares == CASES[program], str(outcome.report)
    assert shares or any("keeps the student's logits" in x for x in outcome.report.notes)
