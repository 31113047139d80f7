"""Programs are matched with the operators, and recomputed from the arguments of each match."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.support import naive_programs as n
from tests.support.closed_forms import difference_around, recomputed_alike
from torch_streamkl.fx_passes.closed_forms.form import Call, ClosedForm, NotClosed
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.program.divergences import Functional, named
from torch_streamkl.program.graph import constant

Build = Callable[[n.Tensors], Array]


def matched(build: Build) -> list[ClosedForm | NotClosed]:
    """What a program is matched with; every match has the program's value."""
    t = n.Tensors()
    loss = build(t)
    matched = match_program(loss.expr, n.alone(loss))
    for form in matched.closed.values():
        recomputed_alike(form, t.values)
    assert difference_around(matched, t.values) < 1e-9
    return list(matched.found.values())


def call_of(build: Build) -> Call:
    (form,) = matched(build)
    assert isinstance(form, ClosedForm), form
    (call,) = form.calls
    return call


def _pair(function: Callable[..., Array], **options: int) -> Build:
    return lambda t: n.mean(function(n.scores(t, "s", **options), n.scores(t, "t")))


DIVERGENCES = {
    "forward_kl": (n.kl, named("forward_kl")),
    "reverse_kl": (n.reverse_kl, named("reverse_kl")),
    "js": (n.js, named("js")),
    "js 0.1": (lambda s, t: n.js(s, t, 0.1), named("js", 0.1)),
    "tv": (n.variation, Functional.of("abs(P-S)")),
    "clamp": (n.clamped_kl, named("forward_kl", student_clamp=1e-3)),
    "eps": (n.lifted_kl, named("forward_kl", student_eps=1e-3, teacher_eps=1e-3)),
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(name: str) -> None:
    function, expected = DIVERGENCES[name]
    call = call_of(_pair(function))
    assert call.functional == expected
    assert call.operator == "attention_kl" and call.student.requires_grad
    assert not call.teacher.requires_grad
    assert call.student.scale == pytest.approx(n.DIM**-0.5)


def test_query_heads_share_keys() -> None:
    call = call_of(_pair(n.kl, kv_heads=2))
    assert len(call.axes.heads) == 2 and len(call.axes.batch) == 1
    assert call.axes.query is not None and call.axes.query.size == n.ROWS


MASKS = {
    "causal": lambda t, x: n.filled(x, n.band(x, None, 0), -math.inf),
    "window": lambda t, x: n.filled(x, n.band(x, 2, 0), -math.inf),
    "added": lambda t, x: n.added_mask(x, n.band(x, None, 0), -math.inf),
    "padding": lambda t, x: n.filled(x, n.padding(t), -math.inf),
    "both": lambda t, x: n.filled(
        n.filled(x, n.padding(t), -math.inf), n.band(x, None, 0), -math.inf
    ),
    "1e9": lambda t, x: n.filled(x, n.padding(t), -1e9),
    "lowest added": lambda t, x: n.added_mask(x, n.padding(t), -3e38),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    call = call_of(
        lambda t: n.mean(n.kl(MASKS[name](t, n.scores(t, "s")), MASKS[name](t, n.scores(t, "t"))))
    )
    masks = call.masks
    has_band = name in ("causal", "window", "added", "both")
    assert (masks.window_right is not None and constant(masks.window_right) == 0) == has_band
    assert (masks.window_left is not None and constant(masks.window_left) == 2) == (
        name == "window"
    )
    assert len(masks.tensors) == (name in ("padding", "both", "1e9", "lowest added"))
    assert masks.fill == (-1e9 if name == "1e9" else None)


def test_a_moderate_fill_after_a_shift() -> None:
    """Keys that are hidden are as far below the others as without the number that is added."""

    def build(t: n.Tensors) -> Array:
        keep = n.padding(t)
        s, p = (n.scores(t, x).map(lambda e: n.c.linear(5.0, [(1.0, e)])) for x in "st")
        return n.mean(n.kl(n.filled(s, keep, -20.0), n.filled(p, keep, -20.0)))

    (found,) = matched(build)
    if isinstance(found, ClosedForm):
        assert found.calls[0].masks.fill == -25.0
    else:
        assert "mask" in found.reason, found.reason


def test_lengths_are_structure() -> None:
    def masked(t: n.Tensors, x: Array) -> Array:
        lengths = t.make("lengths", of=torch.tensor([7, 5]))
        j = n.index(x.dims[-1][0])
        lengths = Array(lengths.expr, (lengths.dims[0], (), (), ()))
        keep = n.both(
            lambda e, m: n.c.compare("gt", m, e), Array(j, ((), (), (), x.dims[-1])), lengths
        )
        return n.filled(x, keep, -math.inf)

    call = call_of(
        lambda t: n.mean(n.kl(masked(t, n.scores(t, "s")), masked(t, n.scores(t, "t"))))
    )
    assert call.masks.lengths is not None and not call.masks.tensors


def test_options_of_scores() -> None:
    def build(t: n.Tensors) -> Array:
        bias = t.make("bias", n.HEADS, n.ROWS, n.KEYS)
        s = n.scaled(n.plus(n.softcapped(n.scores(t, "s"), 5.0), bias), 0.5)
        return n.mean(n.kl(s, n.scaled(n.plus(n.scores(t, "t"), bias), 0.25)))

    call = call_of(build)
    student = call.student
    assert [b.weight for b in call.teacher.biases] == [0.25]
    assert student.softcap == pytest.approx(2.5)
    assert student.scale == pytest.approx(0.5 * n.DIM**-0.5)
    assert [b.weight for b in student.biases] == [0.5]
    assert call.teacher.scale == pytest.approx(0.25 * n.DIM**-0.5) and not call.teacher.softcap


def test_temperatures_that_are_tensors() -> None:
    def build(t: n.Tensors) -> Array:
        tau = t.make("tau", of=torch.tensor(1.7, dtype=torch.float64))
        s, p = (n.over_by(n.scores(t, x), tau) for x in "st")
        return n.times(n.mean(n.kl(s, p)), n.times(tau, tau))

    call = call_of(build)
    assert [f.divides for side in call.sides for f in side.product.factors] == [True, True]


def test_masks_before_and_after_a_temperature() -> None:
    """A key that either mask removes takes no part."""

    def build(t: n.Tensors) -> Array:
        keep, tau = n.padding(t), t.make("tau", of=torch.tensor(1.7, dtype=torch.float64))

        def masked(name: str) -> Array:
            x = n.over_by(n.filled(n.scores(t, name), keep, -math.inf), tau)
            return n.filled(x, n.band(x, None, 0), -math.inf)

        return n.mean(n.kl(masked("s"), masked("t")))

    masks = call_of(build).masks
    assert masks.window_right is not None and constant(masks.window_right) == 0
    assert len(masks.tensors) == 1


def test_heads_are_averaged() -> None:
    def build(t: n.Tensors) -> Array:
        p = n.average(n.scores(t, "t"))
        q = t.make("sq", n.BATCH, n.ROWS, n.DIM, grad=True)
        k = t.make("sk", n.BATCH, n.KEYS, n.DIM, grad=True)
        s = n.matmul(q, n.swapped(k, -1, -2))
        return n.mean(n.total(n.times(p, n.minus(n.log(p), n.log_softmax(s))), -1))

    call = call_of(build)
    assert call.head_mean and call.functional == named("forward_kl")


def test_masks_that_drop_rows() -> None:
    """Probabilities are masked again after the softmax: rows without keys count as 0."""

    def build(t: n.Tensors) -> Array:
        keep = n.padding(t)
        s, p = (n.filled(n.scores(t, x), keep, -1e9) for x in "st")
        ce = n.scaled(n.times(n.softmax(p), n.log_softmax(s)), -1.0)
        return n.mean(n.total(n.filled(ce, keep, 0.0), -1))

    call = call_of(build)
    assert call.functional == named("cross_entropy") and call.masks.fill is None


def test_entropies_that_cancel() -> None:
    """Cross-entropy minus entropy, of which only the first is a divergence."""

    def build(t: n.Tensors) -> Array:
        s, p = n.log_softmax(n.scores(t, "s")), n.log_softmax(n.scores(t, "t"))
        crossed = n.mean(n.total(n.times(n.exp(p), s), -1))
        own = n.mean(n.total(n.times(n.exp(p), p), -1))
        return n.minus(own, crossed)

    assert call_of(build).functional == named("forward_kl")


def test_lm_heads() -> None:
    def build(t: n.Tensors) -> Array:
        weight = t.make("rows", n.BATCH, n.ROWS)
        loss = n.kl(n.scaled(n.logits(t, "s"), 0.5), n.scaled(n.logits(t, "t"), 0.5))
        return n.total(n.times(loss, weight))

    call = call_of(build)
    assert call.operator == "linear_kl" and call.student.scale == 0.5


def test_adapters_and_vocab_entries() -> None:
    def build(t: n.Tensors) -> Array:
        narrow = t.make("sa", n.BATCH, n.ROWS, 2, grad=True)
        adapter = n.matmul(narrow, n.swapped(t.make("sb", n.VOCAB, 2, grad=True), -1, -2))
        s = n.plus(n.logits(t, "s"), adapter, 2.0)
        bias = t.make("bias", n.VOCAB, grad=True)
        s, p = n.plus(s, bias), n.logits(t, "t")

        def real(x: Array) -> Array:
            j = n.index(x.dims[-1][0])
            keep = n.c.nonnegative(n.c.linear(n.VOCAB - 3.0, [(-1.0, j)]))
            return n.filled(x, Array(keep, ((), (), x.dims[-1])), -math.inf)

        return n.mean(n.kl(real(s), real(p)))

    call = call_of(build)
    assert call.operator == "linear_kl" and len(call.student.adapters) == 1
    assert len(call.masks.vocab) == 1 and len(call.student.biases) == 1


REFUSED = {
    "one distribution only": lambda t: n.mean(
        n.total(n.times(n.softmax(n.scores(t, "s")), n.log_softmax(n.scores(t, "s"))), -1)
    ),
    "a bias that is added to the scores needs a gradient": lambda t: n.mean(
        n.kl(
            n.plus(n.scores(t, "s"), t.make("bias", n.ROWS, n.KEYS, grad=True)),
            n.scores(t, "t"),
        )
    ),
    "teacher and student are masked differently": lambda t: n.mean(
        n.kl(n.filled(n.scores(t, "s"), n.padding(t), -math.inf), n.scores(t, "t"))
    ),
    "weights that vary along the keys": lambda t: n.mean(
        n.total(
            n.times(
                n.times(n.softmax(n.scores(t, "t")), n.log_softmax(n.scores(t, "s"))),
                t.make("weight", n.KEYS),
            ),
            -1,
        )
    ),
    "the probabilities of both sides are averaged over heads": lambda t: n.mean(
        n.total(
            n.times(
                n.average(n.scores(t, "t")),
                n.minus(n.log(n.average(n.scores(t, "t"))), n.log(n.average(n.scores(t, "s")))),
            ),
            -1,
        )
    ),
    "double softmax": lambda t: n.mean(n.kl(n.softmax(n.scores(t, "s")), n.scores(t, "t"))),
    "tanh of scores that were capped before": lambda t: n.mean(
        n.kl(n.tanh(n.tanh(n.scores(t, "s"))), n.scores(t, "t"))
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_reasons(reason: str) -> None:
    (found,) = matched(REFUSED[reason])
    assert isinstance(found, NotClosed) and reason in found.reason


def test_a_log_sum_exp_and_an_expectation() -> None:
    """log-sum-exp minus the teacher's expectation of scores, both shifted: a cross-entropy."""

    def build(t: n.Tensors) -> Array:
        s = n.scores(t, "s").map(lambda e: n.c.linear(5.0, [(1.0, e)]))
        expected = n.total(n.times(n.softmax(n.scores(t, "t")), s), -1)
        return n.mean(n.minus(n.over(n.LOGSUMEXP, s, [-1]), expected))

    assert call_of(build).functional == named("cross_entropy")


def test_relations_of_probabilities() -> None:
    """The operands of scores may be computed: probabilities, as sums over their keys."""

    def relation(t: n.Tensors, side: str) -> Array:
        p = n.softmax(n.scores(t, side))
        a = Array(p.expr, (*p.dims[:2], p.dims[2], (), p.dims[3]))
        rows = n.arrays.fresh_axis(n.ROWS)
        b = n.arrays.renamed(p, {p.dims[2][0]: rows})
        b = Array(b.expr, (*b.dims[:2], (), (rows,), b.dims[3]))
        return n.total(n.times(a, b), -1)

    call = call_of(lambda t: n.mean(n.kl(relation(t, "s"), relation(t, "t"))))
    assert call.student.product.rows.source is None and call.student.requires_grad
    assert call.functional == named("forward_kl")
