"""Reads the distributions of a sum over keys: softmaxes, and their averages over heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.closed_forms.form import NO_ENTRIES, NoForm, sources_in
from torch_streamkl.fx_passes.closed_forms.score_form import ScoreForm, read
from torch_streamkl.fx_passes.closed_forms.worlds import LOG
from torch_streamkl.program.canonical import linear, scaled, terms_of
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.functions import exponential
from torch_streamkl.program.graph import BOOL, CONTRACT, FLOAT, LOGSUMEXP, SUM, Axis, Node, index
from torch_streamkl.program.identities import variable
from torch_streamkl.program.reductions import detached, reduced, remade, substitute
from torch_streamkl.program.walks import has_op, rebuilt_root, walk

LEAVES = ("log_softmax", CONTRACT, "capture", "reduce", "index")
SELECTED_KEYS = "keys are selected after the softmax"
OTHER_DIMENSIONS = "two distributions over different dimensions are combined"
EARLIER_SUM = "a sum over rows or some heads comes before the sum over the keys"
PLAIN = ("capture", "index", "const", "size", "linear")  # what weights of keys are made of


@dataclass(frozen=True)
class Distribution:
    """Represents probabilities along the key axis, or their mean over axes of heads."""

    score: Node
    averaged: tuple[Axis, ...] = ()

    @property
    def requires_grad(self) -> bool:
        return self.score.flows


class Variables:
    """Replaces the softmaxes in a sum over keys by variables."""

    def __init__(self, key: Axis) -> None:
        self.key = key
        self.parts: list[Distribution] = []
        self._means: dict[tuple[Node, tuple[Axis, ...]], int] = {}

    def forms(self) -> list[ScoreForm]:
        return [read(part.score, self.key) for part in self.parts]

    def of(self, body: Node) -> Node:
        """Returns the expression over log-probabilities; raises NoForm at what is no divergence.

        Per-row values and conditions stay in it as they are.
        """

        def enter(x: Node) -> bool:
            if self.key not in x.axes or x.op in LEAVES:
                return False
            self._check_terms(x)
            return x.dtype != BOOL or mentions_softmax(x, self.key)

        def change(x: Node, args: tuple[Node, ...]) -> Node:
            return _without_shift(remade(x, args)) if enter(x) else self._changed(x)

        return rebuilt_root(body, change, enter)

    def _check_terms(self, x: Node) -> None:
        """Raises NoForm where an operation says more than the part of it that is no divergence."""
        own = [y for y in x.args if self.key in y.axes]
        if x.op == "product" and len(own) > 1:
            for y in own:
                if y.dtype == FLOAT and all(z.op in PLAIN for z in walk([y])):
                    raise NoForm("weights that vary along the keys multiply the divergence", x)
        scores = [y for y in own if y.op == CONTRACT]
        normalisers = [y for y in x.args if y.kind == LOGSUMEXP]
        if x.op == "linear" and scores and normalisers:
            is_same = set(sources_in(*scores)) <= set(sources_in(*normalisers))
            other = "a log-sum-exp of other scores is subtracted"
            raise NoForm(SELECTED_KEYS if is_same else other, x)

    def _changed(self, x: Node) -> Node:
        if self.key not in x.axes or x.dtype == BOOL:
            return x
        match x.op:
            case "log_softmax":
                if x.value == self.key:
                    return self._variable(Distribution(x.args[0]))
                if not mentions_softmax(x.args[0], self.key):
                    raise NoForm(OTHER_DIMENSIONS, x)
                return self._compared_with_mean(x)
            case "reduce" if x.kind in (SUM, LOGSUMEXP):
                return self._mean(x)
            case "reduce":
                raise NoForm(f"a {x.kind} over heads inside of the sum over keys", x)
            case "contract":
                raise NoForm("scores without their log-sum-exp are part of the sum", x)
            case "capture" if x.dtype == FLOAT:
                raise NoForm("a tensor with a value for each key is part of the sum", x)
        if x.op == "index" or x.op == "capture":
            raise NoForm("positions of keys are part of the sum", x)
        raise NoForm(f"{x.op} is part of the sum", x)

    def _compared_with_mean(self, x: Node) -> Node:
        """The logarithm of a head's share of the sum over heads: of its own minus of the sum."""
        total = reduced(LOGSUMEXP, x.value, x.args[0])
        return linear(0.0, [(1.0, self.of(x.args[0])), (-1.0, self.of(total))])

    def _variable(self, part: Distribution) -> Node:
        if part not in self.parts:
            self.parts.append(part)
        return variable(LOG, self.parts.index(part))

    def _mean(self, x: Node) -> Node:
        """A sum of probabilities over heads: their number times the mean; or its logarithm."""
        kind, bound, inner = x.kind, list[Axis](), x
        while inner.kind == kind:
            bound.append(inner.value.axis)
            inner = inner.args[0]
        is_softmax = kind == LOGSUMEXP or inner.op == "exp"
        if kind == SUM and inner.op == "exp":
            inner = inner.args[0]
        if not is_softmax or inner.op != "log_softmax" or inner.value != self.key:
            raise NoForm(_why_no_mean(inner, self.key, bound), x)
        place = inner.args[0], tuple(bound)
        if place not in self._means:
            names = {a: fresh_axis(a.size) for a in bound}
            score = substitute(inner.args[0], {a: index(b) for a, b in names.items()})
            self._means[place] = len(self.parts)
            self.parts.append(Distribution(score, tuple(reversed(names.values()))))
        count, log = _num_heads(bound), variable(LOG, self._means[place])
        if kind == SUM:
            return scaled(count, exponential(log))
        if not count:
            raise NoForm(NO_ENTRIES, x)
        return linear(math.log(count), [(1.0, log)])


def _why_no_mean(x: Node, key: Axis, over: Sequence[Axis]) -> str:
    """Says why a sum over heads inside of the sum over keys is no mean of probabilities."""
    softmaxes = [y for y in walk([x]) if y.op == "log_softmax"]
    if any(y.value in over for y in softmaxes):
        return OTHER_DIMENSIONS
    if len(softmaxes) == 1 and softmaxes[0].value == key:
        return "probabilities are not averaged with equal weights over heads"
    return EARLIER_SUM


def _num_heads(axes: Sequence[Axis]) -> float:
    sizes = [a.size for a in axes if isinstance(a.size, int)]
    if len(sizes) < len(axes):
        raise NoForm("probabilities are averaged over a dimension of unknown size")
    return float(math.prod(sizes))


TINY = 1e-12


def _without_shift(x: Node) -> Node:
    """The number in an exponent becomes a factor, one that rounding has left is dropped."""
    if x.op == "linear" and 0.0 < abs(x.value[0]) < TINY and not has_op(x, "exp"):
        return linear(0.0, terms_of(x)[1])
    if x.op == "exp" and x.args[0].op == "linear" and x.args[0].value[0]:
        constant, terms = terms_of(x.args[0])
        return scaled(math.exp(constant), exponential(linear(0.0, terms)))
    return x


def mentions_softmax(x: Node, key: Axis) -> bool:
    """Returns whether a part of an expression is a log-softmax over an axis."""
    return any(y.op == "log_softmax" and y.value == key for y in walk([x]))


def aligned(parts: Sequence[Distribution], number: int, other: int) -> bool:
    """Returns whether two distributions are equal if gradients are not looked at."""
    a, b = parts[number], parts[other]
    if [x.size for x in a.averaged] != [x.size for x in b.averaged]:
        return False
    names = dict(zip(b.averaged, a.averaged, strict=True))
    score = substitute(b.score, {x: index(y) for x, y in names.items()})
    return detached(a.score) is detached(score)
