"""Keys whose number no graph knows (`mark_unbacked`), also none at all.

A program that torch compiles for every number of keys must not fail for some of them, and what
torch cannot decide without the number leaves one loss as it was, not the whole graph.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.compiling import compile_rewritten
from torch_streamkl.fx_passes.backend import collected

# before torch 2.13, Dynamo fails at none by itself, whatever the backend
NUMBERS = (7, 3, 1, 0) if torch.__version__ >= (2, 13) else (7, 3, 1)


def with_biases(q_s, k_s, q_t, k_t):
    """Additive: rows without keys are looked for."""
    bias = -(torch.arange(q_s.shape[-2])[:, None] - torch.arange(k_s.shape[-2])).abs().double()
    return kl((q_s @ k_s.mT + bias).log_softmax(-1), (q_t @ k_t.mT + bias).softmax(-1)).sum()


def of_some_queries(q_s, k_s, q_t, k_t):
    """A divergence as a row program."""
    rows = kl((q_s @ k_s.mT).log_softmax(-1), (q_t @ k_t.mT).softmax(-1))
    return rows[:, :, q_s.shape[-2] // 2 :].sum() + rows[:, :, : q_s.shape[-2] // 3].mean()


def with_attention_of_masked_keys(q_s, k_s, q_t, k_t):
    """Torch asks whether there is one key before it broadcasts the mask: attention stays."""
    bias = torch.where(k_s[..., 0] > 0, 0.0, -1e9).double()[:, :, None]
    scores = q_s @ k_s.mT + bias
    rows = kl(scores.log_softmax(-1), (q_t @ k_t.mT + bias).softmax(-1))
    return rows.sum() + (scores.softmax(-1) @ k_s).square().sum()


def test_a_part_of_an_unknown_number_of_tokens():
    """Both numbers are known to data alone, and they are different ones."""

    def loss(x_s, w_s, x_t, w_t, keep):
        count = keep.sum().item()
        torch._check(count >= 0)
        torch._check(count <= x_s.shape[0])
        student, teacher = (x_s @ w_s.T)[:count], (x_t @ w_t.T)[:count]
        return kl(student.log_softmax(-1), teacher.softmax(-1)).sum()

    x_s, w_s, x_t, w_t = (torch.randn(n, 4, dtype=torch.float64) for n in (6, 9, 6, 9))
    keep = torch.tensor([True, False, True, True, False, True])
    for x in (x_s, x_t, keep):
        torch._dynamo.decorators.mark_unbacked(x, 0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        step = compile_rewritten(loss, verify="never")
        torch.testing.assert_close(step(x_s, w_s, x_t, w_t, keep), loss(x_s, w_s, x_t, w_t, keep))


def test_a_part_of_the_rows_that_a_mask_selects():
    def loss(x_s, w_s, x_t, w_t, keep):
        count = keep[:2].sum().item()
        torch._check(count >= 0)
        chosen = keep.nonzero().squeeze(-1)[:count]
        student, teacher = (x_s @ w_s.T)[chosen], (x_t @ w_t.T)[chosen]
        selected = kl((x_s[keep] @ w_s.T)[:count].softmax(-1).log(), teacher.softmax(-1)).sum()
        return kl(student.log_softmax(-1), teacher.softmax(-1)).sum() + selected

    inputs = [torch.randn(n, 4, dtype=torch.float64) for n in (6, 9, 6, 9)]
    inputs.append(torch.tensor([True, False, True, True, False, True]))
    names = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
    with torch._dynamo.config.patch(dict.fromkeys(names, True)):
        step = compile_rewritten(loss, verify="never")
        torch.testing.assert_close(step(*inputs), loss(*inputs))


def kl(student, teacher):
    return F.kl_div(student, teacher, reduction="none").sum(-1)


@pytest.mark.parametrize(
    "loss", [with_biases, of_some_queries, with_attention_of_masked_keys], ids=lambda f: f.__name__
)
def test_every_number_of_keys(loss):
    step = compile_rewritten(loss, verify="never")
    with collected() as report:
        for num_keys in NUMBERS:
            torch.manual_seed(0)
            shapes = [(2, 2, 5, 4), (2, 2, num_keys, 4)] * 2
            inputs = [torch.randn(s, dtype=torch.float64) for s in shapes]
            trained = [x.requires_grad_() for x in inputs[:2]]
            for x in inputs:
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.decorators.mark_unbacked(x, 2)
            got, expected = step(*inputs), loss(*inputs)
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(
                torch.autograd.grad(got, trained), torch.autograd.grad(expected, trained)
            )
    assert report.num_fused >= report.num_graphs and not report.failures, report
