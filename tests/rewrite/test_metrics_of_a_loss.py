"""Metrics next to a loss of LM heads: one program, in which each product is made once.

What is detached, or computed under no_grad, has no gradient. The products of a step are counted:
both logits once, and the student's two gradients.
"""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_streamkl
from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.closed_forms import row_maxima
from torch_streamkl.fx_passes.fx_utils.mutation import has_effect
from torch_streamkl.program.canonical import choose, subtracted
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.functions import exponential
from torch_streamkl.program.graph import BOOL, FLOAT, MAX, capture, const, index
from torch_streamkl.program.reductions import contraction, log_softmax, reduced

TOKENS, WIDTH, TEACHER_WIDTH, VOCAB = 24, 16, 23, 101
SIZES = (TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS, TEACHER_WIDTH), (VOCAB, TEACHER_WIDTH)
STUDENT, TEACHER = 2 * TOKENS * WIDTH * VOCAB, 2 * TOKENS * TEACHER_WIDTH * VOCAB


def kl(t, s):
    return (t.exp() * (t - s)).sum(-1)


def js(s, t):
    m = torch.logaddexp(t, s) - math.log(2.0)
    return (0.5 * t.exp() * (t - m) + 0.5 * s.exp() * (s - m)).sum(-1)


def entropy(x):
    return -(x.exp() * x).sum(-1)


def detached_entropies(s, t, h):
    return js(s, t).mean(), entropy(s).mean().detach(), entropy(t).mean().detach()


def entropies_of_detached(s, t, h):
    return js(s, t).mean(), entropy(s.detach()).mean(), entropy(t.detach()).mean()


def other_divergences(s, t, h):
    loss = kl(t, s).mean()
    with torch.no_grad():
        return loss, kl(s, t).mean(), js(s, t).mean(), entropy(s).mean()


def acceptance(s, t, h):
    loss = kl(t, s).mean()
    return loss, torch.minimum(s.exp(), t.exp()).sum(-1).mean().detach()


def metrics_of_some_tokens(s, t, h):
    """What masks the metrics is computed after the loss."""
    loss = kl(t, s).mean()
    with torch.no_grad():
        kept = h.sum(-1) > 0
        of_student = torch.where(kept, entropy(s), 0.0).sum() / kept.sum()
        return loss, of_student, entropy(t).masked_fill(~kept, 0.0).sum()


def weighted_by_the_entropy(s, t, h):
    weight = (-entropy(s)).exp().detach()
    return (kl(t, s) * weight).mean(), weight.mean()


def confidences(s, t, h):
    """The largest probabilities, as metrics of both sides."""
    largest = s.detach().exp().max(-1).values, t.exp().amax(-1)
    return kl(t, s).mean(), *(x.mean() for x in largest)


def weighted_by_the_confidence(s, t, h):
    weight = t.exp().amax(-1)
    return (kl(t, s) * weight).mean(), weight.mean()


def places(s, t, h):
    return kl(t, s).mean(), (s.argmax(-1) == t.argmax(-1)).double().mean(), t.argmax(-1)


def metrics_before_the_loss(s, t, h):
    """The call stands where its gradients are recorded: before the first metric's no_grad."""
    with torch.no_grad():
        agreement = (s.argmax(-1) == t.argmax(-1)).double().mean()
        of_student = entropy(s).mean()
    loss = kl(t, s).mean()
    with torch.no_grad():
        return loss, agreement, of_student, t.exp().amax(-1).mean()


LOSSES = [
    metrics_before_the_loss, places, confidences, weighted_by_the_confidence, detached_entropies,
    entropies_of_detached, other_divergences, acceptance, metrics_of_some_tokens,
    weighted_by_the_entropy,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_each_product_is_made_once(loss):
    inputs = [
        torch.randn(n, dtype=torch.float64, requires_grad=i < 2) for i, n in enumerate(SIZES)
    ]
    torch._dynamo.reset()
    forward_counter, backward_counter = (FlopCounterMode(display=False) for _ in "ab")

    def step(h, w, th, tw):
        return loss((h @ w.T).log_softmax(-1), (th @ tw.T).log_softmax(-1), h)

    def compiler(gm, examples):
        options = {"streamkl.inner": "eager"}
        forward = backend.streamkl(gm, examples, options=options)
        gm.graph.eliminate_dead_code(has_effect)  # as every compiler does
        gm.recompile()

        def run(*args):
            with forward_counter:
                return forward(*args)

        return run

    values, expected = torch.compile(step, backend=compiler)(*inputs), step(*inputs)
    with backward_counter:
        gradients = torch.autograd.grad(values[0], inputs[:2])
    torch.testing.assert_close(values, expected)
    assert [x.requires_grad for x in values] == [x.requires_grad for x in expected]
    torch.testing.assert_close(gradients, torch.autograd.grad(expected[0], inputs[:2]))
    assert forward_counter.get_total_flops() == 3 * STUDENT + TEACHER
    assert backward_counter.get_total_flops() == 0


def evaluated(s, t, h):
    with torch.no_grad():
        return kl(t, s).mean(), entropy(s).mean(), s.amax(-1), s.argmax(-1)


def accumulated(s, t, h):
    total = torch.zeros((), dtype=s.dtype)
    total += kl(t, s).mean()
    return total, entropy(s).mean().detach()


COUNTS = {
    places: (1, 3), confidences: (1, 2), weighted_by_the_confidence: (1, 1),
    detached_entropies: (1, 2), other_divergences: (1, 3), weighted_by_the_entropy: (1, 1),
    accumulated: (1, 1), evaluated: (2, 2),
}  # fmt: skip


@pytest.mark.parametrize("loss", COUNTS, ids=lambda f: f.__name__)
def test_what_a_report_counts_as_losses(loss):
    """What the gradient of a result needs; without any gradient all but maxima."""
    report = torch_streamkl.explain(
        lambda h, w, th, tw: loss((h @ w.T).log_softmax(-1), (th @ tw.T).log_softmax(-1), h),
        *(torch.randn(n, requires_grad=i < 2) for i, n in enumerate(SIZES)),
        options={"streamkl.min_mib": 0},
    )
    are_losses = [site.is_loss for site in report.sites]
    assert (are_losses.count(True), are_losses.count(False)) == COUNTS[loss], report


@pytest.mark.parametrize("is_metric", [False, True])
def test_what_is_not_fused_is_counted_alike(is_metric):
    """With its reason."""

    def step(h, w, th, tw):
        s, t = (h @ w.T).log_softmax(-1), (th @ tw.T).log_softmax(-1)
        other = (t.exp().sort(-1).values * s).sum(-1).mean()
        return kl(t, s).mean(), other.detach() if is_metric else other

    inputs = [torch.randn(n, requires_grad=i < 2) for i, n in enumerate(SIZES)]
    report = torch_streamkl.explain(step, *inputs, options={"streamkl.min_mib": 0})
    assert [x.is_loss for x in report.sites if not x.fused] == [not is_metric], report


def of_sure_tokens(s, t):
    is_sure = t.softmax(-1).amax(-1) > 0.2
    rows = kl(t.log_softmax(-1), s.log_softmax(-1))
    return torch.where(is_sure, rows, 0.0).sum() / is_sure.sum().clamp(min=1)


def of_an_unlikely_largest(s, t):
    return (kl(t.log_softmax(-1), s.log_softmax(-1)) * (1 - t.softmax(-1).amax(-1)).log()).sum()


def beside_nan(s, t):
    """Of one token: a kernel's maximum ignores it."""
    broken = t * torch.tensor([1.0, math.nan] + [1.0] * (TOKENS - 2))[:, None]
    rows = kl(t.log_softmax(-1), s.log_softmax(-1))
    return rows.sum(), broken.softmax(-1).amax(-1)


def with_a_gradient(s, t):
    return (kl(t.log_softmax(-1), s.log_softmax(-1)) * s.softmax(-1).amax(-1)).sum()


def of_hidden_rows(s, t):
    """Eager code has the share of each key, which one log-sum-exp of a row does not know: a
    second pass over the keys has it.
    """
    hidden = t.masked_fill((torch.arange(TOKENS) == 3)[:, None], torch.finfo(t.dtype).min)
    return kl(t.log_softmax(-1), s.log_softmax(-1)).sum(), hidden.softmax(-1).amax(-1)


def of_scores(s, t):
    return kl(t.log_softmax(-1), s.log_softmax(-1)).sum(), t.amax(-1)


def of_shares_of_tokens(s, t):
    """The largest share that a token has of an entry, among all tokens: no row's own sum."""
    weight = t.detach().softmax(0).amax(-1)
    return (kl(t.log_softmax(-1), s.log_softmax(-1)) * weight).sum()


def entries_after(s, ids, metric):
    """A loss of entries alone, after a metric of the same logits."""
    with torch.no_grad():
        found = metric(s)
    return s.gather(-1, ids).log_softmax(-1)[:, 0].mean(), found


def log_probabilities_after(s, ids, metric):
    with torch.no_grad():
        found = metric(s)
    return -s.log_softmax(-1).gather(-1, ids).mean(), found


def largest_probability(s):
    return s.softmax(-1).amax(-1)


def place_of_the_largest(s):
    return s.argmax(-1)


@pytest.mark.parametrize(("loss", "metric", "kind"), [
    (entries_after, largest_probability, "entry_logits"),
    (entries_after, entropy, "entry_logits"),
    (log_probabilities_after, largest_probability, "row_program"),
    (log_probabilities_after, place_of_the_largest, "row_program"),
])  # fmt: skip
def test_a_loss_of_entries_after_a_metric_keeps_its_gradient(loss, metric, kind):
    """The program's sums have none: they stand under no_grad, but its entries do not."""
    ids = torch.rand(TOKENS, VOCAB).topk(5).indices
    inputs = [torch.randn(n, requires_grad=True) for n in SIZES[:2]]
    outcome = compare(lambda h, w, ids: loss(h @ w.T, ids, metric), [*inputs, ids])
    outcome.check()
    (found,) = [x for x in outcome.report.sites if x.is_loss]
    assert found.fused and found.kind == kind, outcome.report
    assert "maximum" not in found.form, outcome.report


def test_a_metric_that_is_refused_keeps_no_loss():
    """The bias may hide a whole row: its place is that of the first NaN, which no operator has."""

    def step(h, w, b, labels):
        s = torch.nn.functional.linear(h, w, b)
        with torch.no_grad():
            found = s.argmax(-1)
        return (
            -s.log_softmax(-1).gather(-1, labels).mean(),
            entropy(s.log_softmax(-1)).sum(),
            found,
        )

    labels = torch.randint(VOCAB, (TOKENS, 1))
    inputs = [torch.randn(n, requires_grad=True) for n in (*SIZES[:2], (VOCAB,))]
    outcome = compare(step, [*inputs, labels]).check()
    assert [(x.is_loss, x.fused) for x in outcome.report.sites] == [
        (False, False), (True, True), (True, True),
    ], outcome.report  # fmt: skip


@pytest.mark.expects_failed_checks
def test_a_metric_whose_check_fails_keeps_no_loss(monkeypatch):
    """They share a program, which is tried again without the metric."""

    def step(h, w):
        s = (h @ w.T).log_softmax(-1)
        with torch.no_grad():
            found = s.exp().amax(-1)
        return entropy(s).mean(), found

    inputs = [torch.randn(n, requires_grad=True) for n in SIZES[:2]]
    exact = row_maxima._largest
    monkeypatch.setattr(row_maxima, "_largest", lambda x: subtracted(exact(x), const(0.1)))
    outcome = compare(step, inputs).check()
    assert {x.is_loss: x.fused for x in outcome.report.sites} == {False: False, True: True}
    assert "check failed" in outcome.reasons[0]


# and how many logits remain
CONFIDENCES = {
    of_sure_tokens: 0, of_an_unlikely_largest: 0, beside_nan: 0, with_a_gradient: 2,
    of_hidden_rows: 0, of_scores: 0, of_shares_of_tokens: 2,
}  # fmt: skip


@pytest.mark.parametrize("loss", CONFIDENCES, ids=lambda f: f.__name__)
def test_the_largest_probability_of_a_row(loss):
    inputs = [torch.randn(n, requires_grad=i < 2) * 0.3 for i, n in enumerate(SIZES)]
    outcome = compare(lambda h, w, th, tw: loss(h @ w.T, th @ tw.T), inputs)
    outcome.check_fused(remaining=CONFIDENCES[loss])


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("of", ["probability", "logarithm"])
def test_the_largest_probability_is_at_most_1(of, is_masked):
    """Kernels round a log-sum-exp to less than the largest score, where it is the only large one.

    `(1 - confidence).sqrt()` would be NaN.
    """
    row, key, along = fresh_axis(5), fresh_axis(7), fresh_axis(3)
    hidden = capture("hidden", FLOAT, at=[index(row), index(along)])
    weight = capture("weight", FLOAT, at=[index(key), index(along)])
    scores = contraction(hidden, weight, [along])
    if is_masked:
        scores = choose(capture("mask", BOOL, at=[index(key)]), scores, const(-math.inf))
    logarithms = log_softmax(scores, key)
    elements = exponential(logarithms) if of == "probability" else logarithms
    largest = row_maxima._largest(reduced(MAX, key, elements))
    assert (largest.op == "where") == is_masked  # NaN where the mask hides the row
    largest = largest.args[1] if is_masked else largest
    assert largest.range[1] == (1.0 if of == "probability" else 0.0)


@pytest.mark.parametrize("draws", [False, True])
def test_metrics_that_nothing_reads_keep_no_scores(draws):
    """Compiled code does not compute them, but draws the same random numbers."""

    def step(h, w):
        s = h @ w.T
        p = s.softmax(-1)
        entropy(p.log())  # of no logger
        if draws:
            torch.dropout(p, 0.5, True)
        return entropy(s.log_softmax(-1)).mean(), torch.rand_like(h)

    sizes = (TOKENS, WIDTH), (VOCAB, WIDTH)
    inputs = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in sizes]
    with torch_streamkl.reports() as report, torch.random.fork_rng():
        compiled = compile_rewritten(step)
        found = [f(*inputs) for f in (compiled, step) if torch.manual_seed(0)]
    torch.testing.assert_close(*found)
    assert report.num_fused == 1 - draws, report
