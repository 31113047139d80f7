"""Means of what two LM heads give for each token and vocabulary entry, without a softmax.

The keys are the vocabulary: tokens of all sequences are rows, and a weight of an entry is one.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.support.comparing import compare
from torch_streamkl.fx_passes import backend

BATCH, TOKENS, WIDTH, TEACHER_WIDTH, VOCAB = 3, 43, 8, 9, 101
WEIGHTS = torch.linspace(0.5, 2.0, VOCAB)
OPTIONS = {"streamkl.min_mib": 0.0}


def squares(s, t):
    return F.mse_loss(s, t)


def weighted_squares(s, t):
    return (WEIGHTS.to(s.dtype) * (s - t) ** 2).mean()


def scaled_by_classes(s, t):
    return F.smooth_l1_loss(s * WEIGHTS.to(s.dtype), t * WEIGHTS.to(s.dtype))


def sigmoids(s, t):
    return F.binary_cross_entropy_with_logits(s, t.sigmoid())


def sigmoids_of_weights(s, t):
    weights = WEIGHTS.to(s.dtype)
    return F.binary_cross_entropy_with_logits(s, t.sigmoid(), weights, pos_weight=weights)


def sigmoids_of_rows(s, t):
    return F.binary_cross_entropy_with_logits(s, t.sigmoid(), reduction="none").sum(-1).mean()


LOSSES = [
    squares, weighted_squares, scaled_by_classes, sigmoids, sigmoids_of_weights, sigmoids_of_rows
]  # fmt: skip
MEANS = LOSSES[:-1]


def _inputs(dtype=torch.float32, spread=1.0):
    torch.manual_seed(0)
    sizes = ((BATCH, TOKENS, WIDTH), (VOCAB, WIDTH), (BATCH, TOKENS, TEACHER_WIDTH))
    sizes = (*sizes, (VOCAB, TEACHER_WIDTH))
    made = [torch.randn(n, dtype=dtype) * spread for n in sizes]
    return [x.requires_grad_(i < 2) for i, x in enumerate(made)]


def _step(loss):
    return lambda h, w, th, tw: loss(h @ w.T, th @ tw.T)


@pytest.mark.parametrize("spread", [1.0, 40.0])
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_they_keep_no_logits(loss, is_dynamic, spread):
    compare(_step(loss), _inputs(spread=spread), dynamic=is_dynamic).check_fused(1)


@pytest.mark.parametrize("loss", MEANS, ids=lambda f: f.__name__)
def test_each_product_is_made_once(loss):
    """So that gradients are computed in the forward: no dimension of tokens is one of heads."""
    inputs = _inputs(torch.float64)
    torch._dynamo.reset()
    counter = FlopCounterMode(display=False)

    def compiler(gm, examples):
        forward = backend.streamkl(gm, examples, options={**OPTIONS, "streamkl.inner": "eager"})

        def run(*args):
            with counter:
                return forward(*args)

        return run

    found = torch.compile(_step(loss), backend=compiler)(*inputs)
    gradients = torch.autograd.grad(found, inputs[:2])
    expected = _step(loss)(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs[:2]))
    rows = 2 * BATCH * TOKENS * VOCAB
    assert counter.get_total_flops() == 3 * rows * WIDTH + rows * TEACHER_WIDTH
