"""Metrics of the largest logits of a row, next to a loss: their values and places, which agree.

They need no gradient, and keep no logits. A place is what torch has: the first of equal logits,
and that of the first NaN.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import torch_streamkl
from tests.support.comparing import compare, is_exact_in_float64
from tests.support.compiling import compile_rewritten
from torch_streamkl.fx_passes import backend

TOKENS, WIDTH, TEACHER_WIDTH, VOCAB = 23, 16, 19, 101


def kl(s, t):
    return F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="sum")


def the_largest(s, t):
    return kl(s, t), s.detach().max(-1).values.mean(), t.amax(-1, keepdim=True)


def agreement(s, t):
    return kl(s, t), (s.argmax(-1) == t.argmax(-1)).float().mean()


def agreement_of_views(s, t):
    return kl(s, t), (s[:, None].argmax(-1) == t[:, None].argmax(dim=2)).sum()


def agreement_of_probabilities(s, t):
    p, q = s.softmax(-1), t.log_softmax(-1)
    return kl(s, t), (p.argmax(-1) != q.argmax(-1)).float().mean()


def accuracy(s, t):
    labels = torch.arange(TOKENS) - 3
    is_label = labels >= 0
    return kl(s, t), ((s.argmax(-1) == labels) & is_label).sum() / is_label.sum()


def accuracy_without_a_gradient(s, t):
    with torch.no_grad():
        largest, place = (s / 0.7).max(-1)
        found = largest.mean(), (place == 5).float().mean()
    return kl(s, t), *found


def places_that_are_returned(s, t):
    return kl(s, t), s.argmax(-1, keepdim=True)


def of_some_keys(s, t):
    """Of a padded vocabulary; metrics also of a row of which all keys are hidden."""
    loss, hidden = kl(s, t), torch.arange(VOCAB) > 90
    hidden = hidden | (torch.arange(TOKENS) == 3)[:, None]
    s, t = s.masked_fill(hidden, -1e9), t.masked_fill(hidden, -1e9)
    metrics = (s.argmax(-1) == t.argmax(-1)).float().mean(), s.detach().amax(-1).sum()
    return loss, *metrics, t.softmax(-1).amax(-1).sum()


def of_removed_keys(s, t):
    hidden = torch.arange(VOCAB) % 7 == 0
    s, t = s.masked_fill(hidden, -math.inf), t.masked_fill(hidden, -math.inf)
    p, q = s.log_softmax(-1), t.softmax(-1)
    rows = torch.where(hidden, 0.0, q * (t.log_softmax(-1) - p)).sum()
    return rows, (s.argmax(-1) == t.argmax(-1)).float().mean(), q.amax(-1), t.amax(-1)


def the_largest_difference(s, t):
    return kl(s, t), (s.detach() - t).abs().amax(-1).mean()


def the_entropy(s, t):
    with torch.no_grad():
        p = s.softmax(-1)
        return kl(s, t), torch.special.entr(p).sum(-1).mean(), t.argmax(-1) == 7


METRICS = [
    the_largest, agreement, agreement_of_views, agreement_of_probabilities, accuracy,
    accuracy_without_a_gradient, places_that_are_returned, of_some_keys, of_removed_keys,
    the_largest_difference, the_entropy,
]  # fmt: skip


def _inputs(spread=0.3, dtype=torch.float32, step=1):
    torch.manual_seed(0)
    sizes = ((TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS, TEACHER_WIDTH), (VOCAB, TEACHER_WIDTH))
    wide = [torch.randn(n, m * step, dtype=dtype) * spread for n, m in sizes]
    return [x[:, ::step].detach().requires_grad_(i < 2) for i, x in enumerate(wide)]


def _step(loss):
    return lambda h, w, th, tw: loss(h @ w.T, th @ tw.T)


@pytest.mark.parametrize("special", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_and_special_logits(dtype, special):
    """Of whole numbers, so that many logits of a row are equal; bfloat16 rounds some of them."""
    h, th = torch.randint(-9, 10, (2, TOKENS, 4)).to(dtype)
    w, tw = torch.randint(-9, 10, (2, VOCAB, 4)).to(dtype)
    h[1] = 0.0
    if special is not None:
        w[[7, 9], 0] = special
    h.requires_grad_()

    def step(h, w, th, tw):
        s, t = h @ w.T, th @ tw.T
        return kl(s, t), s.argmax(-1), t.argmax(-1), s.detach().amax(-1), s.argmax(-1) == 7

    found = compile_rewritten(step, verify="never")(h, w, th, tw)
    for x, y in zip(found[1:], step(h, w, th, tw)[1:], strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def narrow_and_cast(s, t):
    s, t = s.float(), t.float()
    return agreement(s, t)


def narrow_and_scaled(s, t):
    return kl(s, t), ((s * 0.7).argmax(-1) == t.argmax(-1)).float().mean()


def narrow_probabilities(s, t):
    return kl(s, t), (s.softmax(-1).argmax(-1) == t.argmax(-1)).float().mean()


def probabilities_that_are_cast(s, t):
    return kl(s, t), (s.softmax(-1).float().argmax(-1) == t.argmax(-1)).float().mean()


def narrow_and_biased(s, t):
    bias = torch.linspace(-0.5, 0.5, VOCAB, dtype=s.dtype)
    return kl(s, t), ((s * 0.7 + bias).argmax(-1) == (t + bias).argmax(-1)).float().mean()


def narrow_labels(s, t):
    return kl(s, t) + F.cross_entropy(s, (t / 0.7).argmax(-1))


def of_two_narrow_products(s, t):
    return kl(s, t), (s - 0.5 * t).max(-1).indices.float().mean()


NARROW = [
    agreement, narrow_and_cast, narrow_and_scaled, narrow_probabilities,
    probabilities_that_are_cast, narrow_and_biased, narrow_labels, of_two_narrow_products,
]  # fmt: skip


@pytest.mark.parametrize("by", ["inputs", "autocast"])
@pytest.mark.parametrize("loss", NARROW, ids=lambda f: f.__name__)
def test_products_of_a_narrow_type(loss, by):
    """Of the largest as eager code has rounded them, or of what is as large before that."""

    def step(h, w, th, tw):
        with torch.autocast("cpu", torch.bfloat16, enabled=by == "autocast"):
            return loss(h @ w.T, th @ tw.T)

    dtype = torch.bfloat16 if by == "inputs" else torch.float32
    report = torch_streamkl.explain(step, *_inputs(dtype=dtype))
    assert report.num_fused == len(report.sites) > 1, report
    assert report.num_remaining == 0, report.details()


@pytest.mark.parametrize("change", ["scaled", "probabilities", "biased"])
@pytest.mark.parametrize("by", ["inputs", "autocast"])
def test_places_are_of_the_largest_up_to_rounding(change, by):
    """Of many rows, in each of which several elements are nearly the largest.

    What scales a product keeps its order: the place is that of one of eager code's largest.
    """
    torch.manual_seed(0)
    sizes = (512, 8), (256, 8), (512, 9), (256, 9)
    dtype = torch.bfloat16 if by == "inputs" else torch.float32
    inputs = [torch.randn(n, dtype=dtype).requires_grad_(i < 2) for i, n in enumerate(sizes)]
    bias = torch.randn(256, dtype=torch.bfloat16)

    def elements(s):
        if change == "probabilities":
            return s.softmax(-1)
        return s * 0.3 + bias if change == "biased" else s * 0.7

    def step(h, w, th, tw):
        with torch.autocast("cpu", torch.bfloat16, enabled=by == "autocast"):
            s, t = h @ w.T, th @ tw.T
            return kl(s.float(), t.float()), elements(s).argmax(-1)

    torch._dynamo.reset()
    options = {"streamkl.inner": "eager", "streamkl.verify": "never"}
    found = torch.compile(step, backend="streamkl", options=options)(*inputs)[1][:, None]
    with torch.autocast("cpu", torch.bfloat16, enabled=by == "autocast"):
        own = elements(inputs[0] @ inputs[1].T)
    exact = elements(inputs[0].double() @ inputs[1].double().T)
    error = (own.double() - exact).abs().amax(-1, keepdim=True)
    largest = exact.amax(-1, keepdim=True)
    assert (exact.gather(-1, found) >= largest - 2 * error).all()
    if change != "biased" and by == "inputs":
        assert torch.equal(own.gather(-1, found), own.amax(-1, keepdim=True))


def with_a_gradient(s, t):
    return kl(s, t) + s.amax(-1).sum()


def of_all_elements(s, t):
    return kl(s, t), s.argmax()


def of_tokens(s, t):
    return kl(s, t), s.detach().argmax(0), t.amax(0)


def next_to_a_large_number(s, t):
    """What is added takes the digits of the logits: all of a row are equal."""
    return kl(s, t), (s + 1e9).argmax(-1)


def labels_of_logits_that_are_read(s, t):
    return kl(s, t) + F.cross_entropy(s, t.argmax(-1)), t.clone()


OTHERS = [
    with_a_gradient, of_all_elements, of_tokens, next_to_a_large_number,
    labels_of_logits_that_are_read,
]  # fmt: skip


@pytest.mark.parametrize("loss", OTHERS, ids=lambda f: f.__name__)
def test_other_maxima_are_as_they_were(loss):
    outcome = compare(_step(loss), _inputs()).check()
    has_one = loss is labels_of_logits_that_are_read  # the labels are the user's own
    assert outcome.num_fused == 1 if has_one else outcome.num_fused, outcome.report


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_probabilities_without_numbers(special):
    """A softmax of a row without numbers is NaN, of which the first place is that of torch."""
    h, w, th, tw = _inputs()
    h = h.detach().index_fill(0, torch.tensor([4]), 0.0).requires_grad_()
    with torch.no_grad():
        w[7] = special

    def step(h, w, th, tw):
        s, t = h @ w.T, th @ tw.T
        return kl(s, t), s.softmax(-1).argmax(-1), s.log_softmax(-1).max(-1).indices + 0

    found = compile_rewritten(step, verify="never")(h, w, th, tw)
    for x, y in zip(found[1:], step(h, w, th, tw)[1:], strict=True):
        assert torch.equal(x, y)


# ------------------------------------------------------------------ places that are read at


def hard_labels(s, t):
    return kl(s, t) + F.cross_entropy(s, t.argmax(-1))


def hard_labels_alone(s, t):
    return -s.log_softmax(-1).gather(-1, t.argmax(-1, keepdim=True)).mean()


def probability_of_the_teachers_choice(s, t):
    with torch.no_grad():
        chosen = s.softmax(-1).gather(-1, t.argmax(-1, keepdim=True)).mean()
    return kl(s, t), chosen


def labels_that_are_filled(s, t):
    keep = torch.arange(TOKENS) % 3 > 0
    labels = t.argmax(-1).masked_fill(~keep, -100)
    return kl(s, t) + F.cross_entropy(s, labels)


def labels_that_are_written_to(s, t):
    labels = t.argmax(-1)
    labels[torch.arange(TOKENS) % 3 == 0] = -100
    return kl(s, t) + F.cross_entropy(s, labels)


def labels_that_are_returned(s, t):
    labels = t.argmax(-1)
    return kl(s, t) + F.cross_entropy(s, labels), labels, labels + 1


READ_AT = [
    hard_labels, hard_labels_alone, probability_of_the_teachers_choice, labels_that_are_filled,
    labels_that_are_written_to, labels_that_are_returned,
]  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "extreme", "strided", "symbolic"])
@pytest.mark.parametrize("loss", [*METRICS, *READ_AT], ids=lambda f: f.__name__)
def test_they_keep_no_logits(loss, kind):
    """Neither metrics nor what is read at the place of a maximum."""
    inputs = _inputs(30.0 if kind == "extreme" else 0.3, step=3 if kind == "strided" else 1)
    outcome = compare(_step(loss), inputs, dynamic=kind == "symbolic").check_fused()
    assert outcome.num_fused > 1, outcome.report


@pytest.mark.parametrize(
    "loss",
    [the_largest, agreement, places_that_are_returned, *READ_AT],
    ids=lambda f: f.__name__,
)
def test_they_are_exact_in_float64(loss):
    is_exact_in_float64(_step(loss), _inputs(dtype=torch.float64))


# ------------------------------------------------------------------ maxima of several dimensions


def of_all(s, t):
    return kl(s, t), s.detach().max(), t.amax((-1, -2))


@pytest.mark.parametrize("special", [None, math.nan, math.inf])
def test_maxima_of_all_elements(special):
    h, w, th, tw = _inputs()
    if special is not None:
        with torch.no_grad():
            h[3, 0] = th[5, 1] = special
    with backend.collected() as report:
        step = compile_rewritten(_step(of_all), verify="never")
        found = step(h, w, th, tw)
    expected = _step(of_all)(h, w, th, tw)
    torch.testing.assert_close(found[1:], expected[1:], equal_nan=True)
    assert report.num_fused


# ------------------------------------------------------------------ attention


def with_attention(z, t, mask):
    z, t = (x.masked_fill(~mask, -math.inf) for x in (z, t))
    p, q = z.log_softmax(-1), t.softmax(-1)
    loss = torch.where(mask, q * (t.log_softmax(-1) - p), 0.0).sum(-1).mean()
    agreement = (z.argmax(-1) == q.argmax(-1)).float().mean()
    return loss, agreement, z.detach().amax(-1).mean(), q.amax(-1).mean()


@pytest.mark.parametrize("heads", [1, 2])
def test_of_attention(heads):
    sizes = ((2, 2, 19, 8), (2, heads, 19, 8), (2, 2, 19, 6), (2, heads, 19, 6))
    inputs = [torch.randn(n).requires_grad_(i < 2) for i, n in enumerate(sizes)]
    mask = torch.ones(19, 19, dtype=torch.bool).tril()

    def step(q, k, r, u):
        z, t = (a @ b.expand(2, 2, -1, -1).mT for a, b in ((q, k), (r, u)))
        return with_attention(z / 2.0, t / 2.0, mask)

    outcome = compare(step, inputs).check()
    # heads that share their keys become rows, along which the mask varies in part
    assert outcome.num_fused == (5 if heads > 1 else 1), str(outcome.report)
    assert (outcome.report.num_remaining == 0) == (heads > 1), outcome.report.details()
