"""Softmaxes by hand, which subtract the maximum of a row without detaching it.

Where it is subtracted everywhere, its gradient cancels exactly: also that of several maxima, among
which torch shares it, or of which it takes the first. Where it is not, it is the user's.
"""

import pytest
import torch

from tests.support.comparing import compare, is_exact_in_float64

TOKENS, WIDTH, VOCAB = 23, 16, 101
MAXIMA = {
    "max": lambda x: x.max(-1, keepdim=True).values,
    "amax": lambda x: x.amax(-1, keepdim=True),
}


def log_softmax(x, maximum):
    z = x - maximum(x)
    return z - z.exp().sum(-1, keepdim=True).log()


def log_sum_exp(x, maximum):
    m = maximum(x)
    return x - (m + (x - m).exp().sum(-1, keepdim=True).log())


def softmax(x, maximum):
    e = (x - maximum(x)).exp()
    return (e / e.sum(-1, keepdim=True)).log()


def of_a_temperature(x, maximum):
    x = x / 2.0
    z = x - maximum(x)
    return z - torch.log(torch.sum(torch.exp(z), -1, keepdim=True))


def twice(x, maximum):
    return log_softmax(log_softmax(x, maximum), maximum)


SPELLINGS = [log_softmax, log_sum_exp, softmax, of_a_temperature, twice]


def _inputs(kind):
    torch.manual_seed(0)
    sizes = ((TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS, WIDTH), (VOCAB, WIDTH))
    if kind == "equal":  # whole numbers, so that many logits of a row are the largest
        made = [torch.randint(-1, 2, n).double() for n in sizes]
        made[0][3] = 0.0
    else:
        made = [torch.randn(n, dtype=torch.float64) for n in sizes]
    if kind == "strided":
        made = [x.repeat(1, 3)[:, ::3] for x in made]
    return [x.detach().requires_grad_(i < 2) for i, x in enumerate(made)]


@pytest.mark.parametrize("kind", ["plain", "equal", "strided"])
@pytest.mark.parametrize("maximum", MAXIMA)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda f: f.__name__)
def test_its_gradient_cancels(spelling, maximum, kind):
    def step(h, w, th, tw):
        s, t = (spelling(x, MAXIMA[maximum]) for x in (h @ w.T, th @ tw.T))
        return (t.exp() * (t - s)).sum(-1).mean()

    inputs = _inputs(kind)
    is_exact_in_float64(step, inputs)
    inputs = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    compare(step, inputs).check_fused(1)


def once(x, maximum):
    """Subtracted from the exponents alone."""
    m = maximum(x)
    return x - (x - m).exp().sum(-1, keepdim=True).log()


def scaled(x, maximum):
    z = x - 0.5 * maximum(x)
    return z - (x - maximum(x)).exp().sum(-1, keepdim=True).log()


@pytest.mark.parametrize("kind", ["plain", "equal"])
@pytest.mark.parametrize("maximum", MAXIMA)
@pytest.mark.parametrize("spelling", [once, scaled], ids=lambda f: f.__name__)
def test_elsewhere_it_has_one(spelling, maximum, kind):
    def step(h, w, th, tw):
        s, t = spelling(h @ w.T, MAXIMA[maximum]), (th @ tw.T).log_softmax(-1)
        return (t.exp() * (t - s)).sum(-1).mean()

    is_exact_in_float64(step, _inputs(kind), verify="never")
