"""Metrics next to a loss of LM heads: one program, in which each product is made once.

What is detached, or computed under no_grad, has no gradient. The products of a step are counted:
both logits once, and the student's two gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.fx_utils.mutation import has_effect

TOKENS, WIDTH, TEACHER_WIDTH, VOCAB = 24, 16, 23, 101
STUDENT, TEACHER = 2 * TOKENS * WIDTH * VOCAB, 2 * TOKENS * TEACHER_WIDTH * VOCAB
Loss = Callable[..., tuple[Tensor, ...]]


def logs(h: Tensor, w: Tensor, th: Tensor, tw: Tensor) -> tuple[Tensor, Tensor]:
    return (h @ w.T).log_softmax(-1), (th @ tw.T).log_softmax(-1)


def kl(t: Tensor, s: Tensor) -> Tensor:
    return (t.exp() * (t - s)).sum(-1)


def js(s: Tensor, t: Tensor, beta: float = 0.5) -> Tensor:
    m = torch.logaddexp(t + math.log(beta), s + math.log(1 - beta))
    return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1)


def entropy(x: Tensor) -> Tensor:
    return -(x.exp() * x).sum(-1)


def js_and_detached_entropies(*given: Tensor) -> tuple[Tensor, ...]:
    s, t = logs(*given)
    return js(s, t).mean(), entropy(s).mean().detach(), entropy(t).mean().detach()


def js_and_entropies_of_detached(*given: Tensor) -> tuple[Tensor, ...]:
    s, t = logs(*given)
    return js(s, t).mean(), entropy(s.detach()).mean(), entropy(t.detach()).mean()


def js_and_entropies_without_gradients(*given: Tensor) -> tuple[Tensor, ...]:
    s, t = logs(*given)
    loss = js(s, t).mean()
    with torch.no_grad():
        return loss, entropy(s).mean(), entropy(t).mean()


def kl_and_other_divergences(*given: Tensor) -> tuple[Tensor, ...]:
    s, t = logs(*given)
    loss = kl(t, s).mean()
    with torch.no_grad():
        return loss, kl(s, t).mean(), js(s, t).mean(), entropy(s).mean()


def kl_and_acceptance(*given: Tensor) -> tuple[Tensor, ...]:
    s, t = logs(*given)
    loss = kl(t, s).mean()
    return loss, torch.minimum(s.exp(), t.exp()).sum(-1).mean().detach()


def kl_and_metrics_of_some_tokens(*given: Tensor) -> tuple[Tensor, ...]:
    """What masks the metrics is computed after the loss."""
    s, t = logs(*given)
    loss = kl(t, s).mean()
    with torch.no_grad():
        kept = given[0].sum(-1) > 0
        of_student = torch.where(kept, entropy(s), 0.0).sum() / kept.sum()
        return loss, of_student, entropy(t).masked_fill(~kept, 0.0).sum()


def kl_weighted_by_the_entropy(*given: Tensor) -> tuple[Tensor, ...]:
    s, t = logs(*given)
    weight = (-entropy(s)).exp().detach()
    return (kl(t, s) * weight).mean(), weight.mean()


@pytest.mark.parametrize(
    "loss",
    [
        js_and_detached_entropies,
        js_and_entropies_of_detached,
        js_and_entropies_without_gradients,
        kl_and_other_divergences,
        kl_and_acceptance,
        kl_and_metrics_of_some_tokens,
        kl_weighted_by_the_entropy,
    ],
    ids=lambda f: f.__name__,
)
def test_each_product_is_made_once(loss: Loss) -> None:
    sizes = ((TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS, TEACHER_WIDTH), (VOCAB, TEACHER_WIDTH))
    given = [torch.randn(size, dtype=torch.float64) for size in sizes]
    inputs, same = ([x.clone().requires_grad_(i < 2) for i, x in enumerate(given)] for _ in "ab")
    torch._dynamo.reset()
    forward_counter, backward_counter = (FlopCounterMode(display=False) for _ in "ab")

    def compiler(gm: fx.GraphModule, examples: Any) -> Any:
        options = {"streamkl.inner": "eager", "streamkl.min_mib": 0.0}
        forward = backend.streamkl(gm, examples, options=options)
        gm.graph.eliminate_dead_code(has_effect)  # as every compiler does
        gm.recompile()

        def run(*args: Any) -> Any:
            with forward_counter:
                return forward(*args)

        return run

    values, expected = torch.compile(loss, backend=compiler)(*inputs), loss(*same)
    with backward_counter:
        values[0].backward()
    expected[0].backward()
    torch.testing.assert_close(values, expected)
    assert [x.requires_grad for x in values] == [x.requires_grad for x in expected]
    for x, y in zip(inputs[:2], same[:2], strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    assert forward_counter.get_total_flops() == 3 * STUDENT + TEACHER
    assert backward_counter.get_total_flops() == 0
