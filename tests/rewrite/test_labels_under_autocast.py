"""The labels' cross-entropy under autocast or no_grad, and the KL after it: one call for both.

What reads the cross-entropy has to move after the KL, and may only where it computes the same.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.losses import rows_of_kl
from tests.support.subgraphs import inductor_without_code

ROWS, WIDTH, TEACHER, VOCAB = 7, 12, 20, 50


def inputs():
    shapes = ((2, ROWS, WIDTH), (VOCAB, WIDTH), (2, ROWS, TEACHER), (VOCAB, TEACHER))
    tensors = [torch.randn(*s, requires_grad=i < 2) for i, s in enumerate(shapes)]
    labels = torch.randint(0, VOCAB, (2, ROWS))
    labels[:, :2] = -100
    return [*tensors, labels]


def of_labels(s, labels, **options):
    return F.cross_entropy(s.float().view(-1, VOCAB), labels.view(-1), **options)


def kl(s, xt, wt):
    return 4 * rows_of_kl(s / 2, F.linear(xt, wt) / 2).mean()


def arithmetic_under_autocast(x, w, xt, wt, labels):
    with torch.autocast("cpu", torch.bfloat16):
        s = F.linear(x, w)
        hard = of_labels(s, labels) / 2.0
    return 0.5 * hard + kl(s.float(), xt, wt)


def matmul_under_autocast(x, w, xt, wt, labels):
    """Rounded to bfloat16 where it is, and not after the KL."""
    with torch.autocast("cpu", torch.bfloat16):
        s = F.linear(x, w)
        rows = of_labels(s, labels, reduction="none")
        hard = (rows[None] @ rows.detach()[:, None]).sum()
    return hard.float() + kl(s.float(), xt, wt)


def metric_without_gradient(x, w, xt, wt, labels):
    """After the KL the metric would have a gradient."""
    s = F.linear(x, w)
    hard = of_labels(s, labels)
    with torch.no_grad():
        metric = hard * 3.0
    return hard + metric + kl(s, xt, wt)


def teacher_under_autocast(x, w, xt, wt, labels):
    """The cross-entropy outside, and the KL inside."""
    s = F.linear(x, w)
    hard = of_labels(s, labels) * 0.5
    with torch.autocast("cpu", torch.bfloat16):
        return hard + kl(s, xt, wt)


CASES = {
    arithmetic_under_autocast: True,
    teacher_under_autocast: True,
    matmul_under_autocast: False,
    metric_without_gradient: False,
}
# what moves decides before any compiler
WITHOUT_CODE = ("inductor", inductor_without_code)
WITH_CODE = pytest.param("inductor", contextlib.nullcontext, marks=pytest.mark.slow)


@pytest.mark.parametrize("program", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("inner", "code"), [WITHOUT_CODE, WITH_CODE])
def test_shared_where_the_rest_computes_the_same(program, inner, code):
    with code():
        outcome = compare(program, inputs(), inner=inner).check()
    assert outcome.num_fused == 1, str(outcome.report)
    shares = outcome.report.num_remaining == 0
    assert shares == CASES[program], str(outcome.report)
    assert shares or any("keeps the student's logits" in x for x in outcome.report.notes)
