"""Programs are matched with the operators, and recomputed from the arguments of each match."""

import math

import pytest
import torch

from tests.support import naive_programs as n
from tests.support.closed_forms import difference_around, recomputed_alike
from torch_streamkl.fx_passes.closed_forms.form import ClosedForm, NotClosed
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.program.divergences import Functional, named
from torch_streamkl.program.graph import constant, index


def matched(build):
    """What a program of `n.Tensors` is matched with; every match has the program's value."""
    t = n.Tensors()
    loss = build(t)
    matched = match_program(loss.expr, n.alone(loss))
    for form in matched.closed.values():
        recomputed_alike(form, t.values)
    assert difference_around(matched, t.values) < 1e-9
    return list(matched.found.values())


def call_of(build):
    (form,) = matched(build)
    assert isinstance(form, ClosedForm), form
    (call,) = form.calls
    return call


def of_scores(function=n.kl, change=lambda t, x: x, **options):
    """The mean of a divergence of scores, both changed alike."""
    return lambda t: n.mean(
        function(change(t, n.scores(t, "s", **options)), change(t, n.scores(t, "t")))
    )


def tau_of(t):
    return t.make("tau", of=torch.tensor(1.7, dtype=torch.float64))


def shifted(x):
    return x.map(lambda e: n.c.linear(5.0, [(1.0, e)]))


DIVERGENCES = {
    "forward_kl": (n.kl, named("forward_kl")),
    "js 0.1": (lambda s, t: n.js(s, t, 0.1), named("js", 0.1)),
    "tv": (n.variation, Functional.of("abs(P-S)")),
    "clamp": (n.clamped_kl, named("forward_kl", student_clamp=1e-3)),
    "eps": (n.lifted_kl, named("forward_kl", student_eps=1e-3, teacher_eps=1e-3)),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(name):
    function, expected = DIVERGENCES[name]
    call = call_of(of_scores(function))
    assert call.functional == expected
    assert call.operator == "attention_kl" and call.student.requires_grad
    assert not call.teacher.requires_grad
    assert call.student.scale == pytest.approx(n.DIM**-0.5)


def test_query_heads_share_keys():
    axes = call_of(of_scores(kv_heads=2)).axes
    assert len(axes.heads) == 2 and len(axes.batch) == 1
    assert axes.query is not None and axes.query.size == n.ROWS


def padded(t, x, fill=-math.inf):
    return n.filled(x, n.padding(t), fill)


def causal(t, x):
    return n.filled(x, n.band(x, None, 0), -math.inf)


# the masks, and how many are a band, a window and tensors
MASKS = {
    "window": (lambda t, x: n.filled(x, n.band(x, 2, 0), -math.inf), 1, 1, 0),
    "added": (lambda t, x: n.added_mask(x, n.band(x, None, 0), -math.inf), 1, 0, 0),
    "both": (lambda t, x: causal(t, padded(t, x)), 1, 0, 1),
    # a key that either mask removes takes no part
    "around_a_temperature": (lambda t, x: causal(t, n.over_by(padded(t, x), tau_of(t))), 1, 0, 1),
    "1e9": (lambda t, x: padded(t, x, -1e9), 0, 0, 1),
    "lowest added": (lambda t, x: n.added_mask(x, n.padding(t), -3e38), 0, 0, 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    change, band, window, tensors = MASKS[name]
    masks = call_of(of_scores(change=change)).masks
    assert (masks.window_right is not None and constant(masks.window_right) == 0) == band
    assert (masks.window_left is not None and constant(masks.window_left) == 2) == window
    assert len(masks.tensors) == tensors
    assert masks.fill == (-1e9 if name == "1e9" else None)


def test_a_moderate_fill_after_a_shift():
    """Keys that are hidden are as far below the others as without the number that is added."""
    (found,) = matched(of_scores(change=lambda t, x: padded(t, shifted(x), -20.0)))
    if isinstance(found, ClosedForm):
        assert found.calls[0].masks.fill == -25.0
    else:
        assert "mask" in found.reason, found.reason


def test_lengths_are_structure():
    def masked(t, x):
        lengths = t.make("lengths", of=torch.tensor([7, 5]))
        lengths = Array(lengths.expr, (lengths.dims[0], (), (), ()))
        keys = Array(index(x.dims[-1][0]), ((), (), (), x.dims[-1]))
        keep = n.both(lambda e, m: n.c.compare("gt", m, e), keys, lengths)
        return n.filled(x, keep, -math.inf)

    masks = call_of(of_scores(change=masked)).masks
    assert masks.lengths is not None and not masks.tensors


def test_options_of_scores():
    def build(t):
        bias = t.make("bias", n.HEADS, n.ROWS, n.KEYS)
        s = n.scaled(n.plus(n.softcapped(n.scores(t, "s"), 5.0), bias), 0.5)
        return n.mean(n.kl(s, n.scaled(n.plus(n.scores(t, "t"), bias), 0.25)))

    teacher, student = call_of(build).sides
    assert student.softcap == pytest.approx(2.5) and not teacher.softcap
    for side, scale in ((student, 0.5), (teacher, 0.25)):
        assert side.scale == pytest.approx(scale * n.DIM**-0.5)
        assert [b.weight for b in side.biases] == [scale]


def test_temperatures_that_are_tensors():
    def build(t):
        tau = tau_of(t)
        loss = of_scores(change=lambda _, x: n.over_by(x, tau))(t)
        return n.times(loss, n.times(tau, tau))

    sides = call_of(build).sides
    assert [f.divides for side in sides for f in side.product.factors] == [True, True]


def test_heads_are_averaged():
    def build(t):
        p = n.average(n.scores(t, "t"))
        q = t.make("sq", n.BATCH, n.ROWS, n.DIM, grad=True)
        k = t.make("sk", n.BATCH, n.KEYS, n.DIM, grad=True)
        s = n.matmul(q, n.swapped(k, -1, -2))
        return n.mean(n.total(n.times(p, n.minus(n.log(p), n.log_softmax(s))), -1))

    call = call_of(build)
    assert call.head_mean and call.functional == named("forward_kl")


def masks_that_drop_rows(t):
    """Probabilities are masked again after the softmax: rows without keys count as 0."""
    s, p = (padded(t, n.scores(t, x), -1e9) for x in "st")
    ce = n.scaled(n.times(n.softmax(p), n.log_softmax(s)), -1.0)
    return n.mean(n.total(n.filled(ce, n.padding(t), 0.0), -1))


def entropies_that_cancel(t):
    """Cross-entropy minus entropy, of which only the first is a divergence."""
    s, p = n.log_softmax(n.scores(t, "s")), n.log_softmax(n.scores(t, "t"))
    crossed, own = (n.mean(n.total(n.times(n.exp(p), x), -1)) for x in (s, p))
    return n.minus(own, crossed)


def a_log_sum_exp_and_an_expectation(t):
    """log-sum-exp minus the teacher's expectation of scores, both shifted: a cross-entropy."""
    s = shifted(n.scores(t, "s"))
    expected = n.total(n.times(n.softmax(n.scores(t, "t")), s), -1)
    return n.mean(n.minus(n.over(n.LOGSUMEXP, s, [-1]), expected))


SUMS = {
    masks_that_drop_rows: "cross_entropy",
    entropies_that_cancel: "forward_kl",
    a_log_sum_exp_and_an_expectation: "cross_entropy",
}


@pytest.mark.parametrize("build", SUMS, ids=lambda f: f.__name__)
def test_sums_are_divergences(build):
    call = call_of(build)
    assert call.functional == named(SUMS[build]) and call.masks.fill is None


def test_lm_heads_with_adapters_and_without_vocab_entries():
    def build(t):
        narrow = t.make("sa", n.BATCH, n.ROWS, 2, grad=True)
        adapter = n.matmul(narrow, n.swapped(t.make("sb", n.VOCAB, 2, grad=True), -1, -2))
        s = n.plus(n.logits(t, "s"), adapter, 2.0)
        s, p = n.plus(s, t.make("bias", n.VOCAB, grad=True)), n.logits(t, "t")

        def real(x):
            j = index(x.dims[-1][0])
            keep = n.c.nonnegative(n.c.linear(n.VOCAB - 3.0, [(-1.0, j)]))
            return n.filled(n.scaled(x, 0.5), Array(keep, ((), (), x.dims[-1])), -math.inf)

        return n.total(n.times(n.kl(real(s), real(p)), t.make("rows", n.BATCH, n.ROWS)))

    call = call_of(build)
    assert call.operator == "linear_kl" and call.student.scale == 0.5
    assert len(call.student.adapters) == len(call.masks.vocab) == len(call.student.biases) == 1


def averaged_on_both_sides(t):
    p, s = (n.average(n.scores(t, x)) for x in "ts")
    return n.mean(n.total(n.times(p, n.minus(n.log(p), n.log(s))), -1))


REFUSED = {
    "teacher and student are masked differently": lambda t: n.mean(
        n.kl(padded(t, n.scores(t, "s")), n.scores(t, "t"))
    ),
    "the probabilities of both sides are averaged over heads": averaged_on_both_sides,
    "tanh of scores that were capped before": lambda t: n.mean(
        n.kl(n.tanh(n.tanh(n.scores(t, "s"))), n.scores(t, "t"))
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_reasons(reason):
    (found,) = matched(REFUSED[reason])
    assert isinstance(found, NotClosed) and reason in found.reason


def test_relations_of_probabilities():
    """The operands of scores may be computed: probabilities, as sums over their keys."""

    def relation(t, x):
        p = n.softmax(x)
        a = Array(p.expr, (*p.dims[:2], p.dims[2], (), p.dims[3]))
        rows = n.arrays.fresh_axis(n.ROWS)
        b = n.arrays.renamed(p, {p.dims[2][0]: rows})
        return n.total(n.times(a, Array(b.expr, (*b.dims[:2], (), (rows,), b.dims[3]))), -1)

    call = call_of(of_scores(change=relation))
    assert call.student.product.rows.op != "capture" and call.student.requires_grad
    assert call.functional == named("forward_kl")
