"""Results of fused losses that are written to afterwards: where eager code has no view, autograd
refuses nothing.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from torch_streamkl.fx_passes import backend

TOKENS = {"of a batch": (2, 5), "of one sequence": (6,), "one": (1,)}


def logits(h, w, ht, wt):
    return h @ w.mT, ht @ wt.mT


def rows(s, t):
    return F.kl_div(s.log_softmax(-1), t.log_softmax(-1), reduction="none", log_target=True).sum(
        -1
    )


def make_inputs(tokens, dtype=torch.float32):
    make = torch.Generator().manual_seed(0)
    shapes = ((*tokens, 4), (9, 4), (*tokens, 3), (9, 3), ())
    tensors = [torch.randn(s, generator=make, dtype=dtype) for s in shapes]
    return [x.requires_grad_() for x in tensors]


def by_hand(tensors):
    """The values by definition: every logarithm of its own sum of exponentials."""
    z, y = (x.detach() for x in logits(*tensors[:4]))
    p, q = (x.exp() / x.exp().sum(-1, keepdim=True) for x in (y, z))
    return (p * p.log()).sum(-1) - (p * q.log()).sum(-1)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_made_without_gradients_and_multiplied_by_a_weight_that_learns(where, tokens, inner):
    def loss(h, w, ht, wt, weight):
        with torch.no_grad():
            value = rows(*logits(h, w, ht, wt))
        return value.mul_(weight) if where == "inside" else value

    given = make_inputs(TOKENS[tokens], torch.float64)
    compiled = compile_rewritten(loss, inner=inner)
    with backend.collected() as report:
        value = compiled(*given)
    assert report.num_fused and not report.failures, str(report)
    if where == "outside":
        value.mul_(given[-1])
    expected = by_hand(given)
    torch.testing.assert_close(value, expected * given[-1])
    gradients = torch.autograd.grad(value.sum(), given, allow_unused=True)
    assert [x is None for x in gradients] == [True] * 4 + [False]
    torch.testing.assert_close(gradients[-1], expected.sum())


@pytest.mark.parametrize("reduction", ["rows", "batchmean"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_detached_in_place(tokens, reduction):
    def loss(h, w, ht, wt, weight):
        s, t = logits(h, w, ht, wt)
        value = rows(s, t)
        if reduction == "batchmean":
            value = value.sum() / len(value)
        return value.detach_() * weight + s.mean()

    # the check takes it for a gradient that was lost
    outcome = compare(loss, make_inputs(TOKENS[tokens]), verify="never").check()
    assert outcome.num_fused


def test_several_results_of_which_each_is_written_to():
    """The second look at what programs leave behind sees the memory of what was fused before."""

    def loss(h, w, ht, wt, weight):
        s, t = logits(h, w, ht, wt)
        log_s, p = s.log_softmax(-1), t.softmax(-1)
        first, second = (p * log_s).sum(-1), (log_s.exp() * log_s).sum(-1)
        third = log_s[:, :1].sum(-1)
        first.mul_(weight)
        second[0] = 0
        third.add_(1)
        return first, second, third

    outcome = compare(loss, make_inputs((6,))).check()
    assert outcome.num_fused
