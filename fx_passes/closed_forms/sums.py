"""Joins sums over keys that are added: parts that are no divergence alone may be one together.

These are cross-entropy minus entropy, and log-sum-exp minus the expectation of scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch_streamkl.fx_passes.closed_forms.form import is_of_products, is_softmax
from torch_streamkl.fx_passes.closed_forms.rows import is_outside, sums_over_keys
from torch_streamkl.program.canonical import factors_of, linear, product, terms_of
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.functions import quotient
from torch_streamkl.program.graph import CONTRACT, LOGSUMEXP, SUM, Axis, Node, Size
from torch_streamkl.program.reductions import opened, reduced
from torch_streamkl.program.walks import walk


@dataclass(frozen=True)
class Joined:
    """Represents sums over keys that are added, as one sum over keys in their place."""

    total: Node  # that they are terms of
    replacement: Node  # the same with one sum
    parts: tuple[Node, ...]
    whole: Node  # what the terms become


_Around = tuple[object, ...] | None  # what a sum is divided by or multiplied with
_Shape = tuple[Size | None, ...]


@dataclass(frozen=True)
class _Term:
    """Represents coefficient * a sum over keys, or a log-sum-exp, in a sum over rows."""

    coefficient: float
    term: Node
    inside: Node  # the sum over rows
    reduction: Node  # over keys
    factor: _Around = None  # of each row, that becomes one of what is summed

    @property
    def is_normaliser(self) -> bool:
        return self.reduction.kind == LOGSUMEXP

    @property
    def num_rows(self) -> int:
        return len(_chain(self.inside)) - (self.reduction.kind == SUM)


def joined(root: Node, of: Iterable[Node]) -> list[Joined]:
    """Returns groups of added sums over keys, some of which are among these."""
    wanted, found = set(of), list[Joined]()
    every = sums_over_keys([root])
    for x in walk([root], lambda x: is_outside(x) and x not in every):
        if x.op != "linear":
            continue
        groups: dict[tuple[_Around, _Shape], list[_Term]] = {}
        constant, terms = terms_of(x)
        for c, t in terms:
            around, inside = _unwrapped(t)
            term = _term(c, t, inside, every)
            if term is not None:
                groups.setdefault((around, _shape(term)), []).append(term)
        alone = [(around, group) for (around, _), group in groups.items()]
        for around, group in (*alone, *_of_scaled_scores(groups)):
            parts = tuple(t.reduction for t in group if t.reduction.kind == SUM)
            if len(group) < 2 or not wanted.intersection(parts):
                continue
            whole = _one_sum(group)
            rest = [(c, t) for c, t in terms if not any(t is y.term for y in group)]
            replacement = linear(constant, [*rest, (1.0, _wrapped(around, whole))])
            found.append(Joined(x, replacement, parts, whole))
    return found


def _of_scaled_scores(
    groups: Mapping[tuple[_Around, _Shape], list[_Term]],
) -> Iterator[tuple[_Around, list[_Term]]]:
    """Groups of log-sum-exps and of expectations of the same scores.

    A value of each row that multiplies the scores is outside of the sum of an expectation.
    """
    for (around, shape), group in groups.items():
        normalisers = [t for t in groups.get((None, shape), ()) if t.is_normaliser]
        terms = [*normalisers, *(replace(t, factor=around) for t in group)]
        if around is not None and normalisers and not any(t.num_rows for t in terms):
            yield None, terms


def _term(c: float, x: Node, inside: Node, every: set[Node]) -> _Term | None:
    chain = _chain(inside)
    last = chain[-1].args[0] if chain else inside
    if last.kind == LOGSUMEXP:
        is_score = any(y.op == CONTRACT and last.value.axis in y.axes for y in walk([last]))
        return _Term(c, x, inside, last) if is_score else None
    if chain and chain[-1] in every:
        return _Term(c, x, inside, chain[-1])
    return None


def _shape(term: _Term) -> _Shape:
    """The sizes of rows and keys."""
    rows = _chain(term.inside)[: term.num_rows]
    return (*(y.value.axis.size for y in rows), term.reduction.value.axis.size)


def _wrapped(around: _Around, x: Node) -> Node:
    if around is None:
        return x
    kind, *others = around
    factors = [y for y in others if isinstance(y, Node)]
    return quotient(x, factors[0]) if kind == "div" else product(*factors, x)


def _unwrapped(x: Node) -> tuple[_Around, Node]:
    """What a sum is divided by or multiplied with, and the sum."""
    if x.op == "div":
        return ("div", x.args[1]), x.args[0]
    if x.op == "product":
        sums = [y for y in x.args if y.kind in (SUM, LOGSUMEXP)]
        if len(sums) == 1:
            return ("product", *(y for y in x.args if y is not sums[0])), sums[0]
    return None, x


def _chain(x: Node) -> list[Node]:
    """A sum, the sum that it is of, and so on."""
    found = list[Node]()
    while x.kind == SUM:
        found.append(x)
        x = x.args[0]
    return found


def _one_sum(group: Sequence[_Term]) -> Node:
    """Terms over rows and keys of the same numbers as one sum over rows of one over keys."""
    first = group[0]
    rows = [fresh_axis(y.value.axis.size) for y in _chain(first.inside)[: first.num_rows]]
    key = fresh_axis(first.reduction.value.axis.size)
    bodies, normalisers = list[tuple[float, Node]](), list[tuple[float, Node]]()
    for term in group:
        x = term.inside
        for axis in rows:
            x = opened(x, axis)
        if term.is_normaliser:
            normalisers.append((term.coefficient, x))
        else:
            bodies.append((term.coefficient, _wrapped(term.factor, opened(x, key))))
    constant, bodies, left = _normalised(bodies, normalisers, key)
    total = linear(constant, [*left, (1.0, reduced(SUM, key, linear(0.0, bodies)))])
    for axis in reversed(rows):
        total = reduced(SUM, axis, total)
    return total


def _normalised(
    bodies: list[tuple[float, Node]], normalisers: Sequence[tuple[float, Node]], key: Axis
) -> tuple[float, list[tuple[float, Node]], list[tuple[float, Node]]]:
    """Adds log-sum-exps to the scores of an expectation, whose probabilities sum to 1.

    Returns a number that is outside of the sum, the sum's terms, and log-sum-exps that are left.
    """
    constant, left = 0.0, list[tuple[float, Node]]()
    for c, lse in normalisers:
        for i, (k, body) in enumerate(bodies):
            weights = [y for y in factors_of(body) if is_softmax(y, key)]
            rest = product(*(y for y in factors_of(body) if y not in weights))
            if len(weights) != 1 or not is_of_products(rest):
                continue
            shift, terms = terms_of(rest)
            if not terms_of(lse.args[0])[0]:  # which is where it cancels
                constant, shift = constant + k * shift, 0.0
            inside = linear(k * shift, [*((k * d, t) for d, t in terms), (c, lse)])
            bodies = [*bodies[:i], (1.0, product(weights[0], inside)), *bodies[i + 1 :]]
            break
        else:
            left.append((c, lse))
    return constant, bodies, left
