"""Finds log-probabilities of entries at given ids, whose products are computed apart.

NOTE [Log-probabilities of entries]
``z.log_softmax(-1).gather(-1, ids)`` reads as the entries' scores minus the log-sum-exp of their
row. The entries are products of their own, which round differently from those that a row program
sums. If an entry has nearly all of a row's probability, the difference of both would be that
rounding: a probability of 1.000004, and NaN in ``(1 - p) ** 1.5``.

- If scores are a multiple of the product, `entry_log_probs` computes both of the same logits.
- Else, or if few ids of a row stand next to other sums of the product, one program computes all in
  one pass: it sums the *other* keys of the row only, and the log-softmax is that of the entries,
  each id once, next to this sum.

As in eager code, no probability is above 1 then, and 1 - p is exact where p is nearly 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_streamkl.fx_passes.closed_forms.entries import (
    HIDDEN,
    Entries,
    Search,
    ids_of,
    may_hide_rows,
)
from torch_streamkl.fx_passes.closed_forms.form import NoForm, Product
from torch_streamkl.fx_passes.closed_forms.row_sites import (
    has_products,
    is_elementwise,
    is_entered,
)
from torch_streamkl.program.canonical import choose, compare, linear, terms_of
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.graph import (
    ANY,
    CONTRACT,
    FLOAT,
    INT,
    LOGSUMEXP,
    Axis,
    Node,
    Source,
    capture,
    const,
    index,
    num_positions,
)
from torch_streamkl.program.reductions import reduced, remade, substitute
from torch_streamkl.program.walks import rebuilt, walk

FEW_IDS = 16  # of a row, that a program may compare every key with on a GPU
ROUNDED = 1e-12  # of a coefficient: what is left of a difference of equal ones


@dataclass(frozen=True)
class ChosenValue:
    """Names the log-probabilities of entries, in a program around them."""

    number: int


@dataclass(frozen=True)
class ChosenIds:
    """Names the ids of these entries, along one dimension, in a program of the other keys."""

    number: int


@dataclass(frozen=True)
class Chosen:
    """Represents log-probabilities of entries at ids: NOTE [Log-probabilities of entries].

    ``others`` are axes of the scores that their product lacks. With a ``scale`` the scores are
    that multiple of the product, of all keys.
    """

    entries: Entries
    others: tuple[Axis, ...]
    scores: Node
    rest: Node  # the log-sum-exp of the keys of the row that no id names
    scale: float | None

    @property
    def rows(self) -> tuple[Axis, ...]:
        return (*self.entries.rows, *self.others)

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (*self.rows, *self.entries.places)

    @property
    def flows(self) -> bool:
        return self.scores.flows or self.rest.flows

    @property
    def has_few_ids(self) -> bool:
        count = num_positions(self.entries.places)
        return not isinstance(count, int) or count <= FEW_IDS

    @property
    def parts(self) -> tuple[Node, ...]:
        """Returns what a row program and single entries have to compute."""
        return (self.scores, self.rest) if self.scale is None else ()


@dataclass(frozen=True)
class _Difference:
    """A multiple of an entry's score minus the log-sum-exp of its row, and what else is added."""

    factor: float
    score: Node
    lse: Node
    product: Node  # of the entry
    constant: float
    terms: list[tuple[float, Node]]


def with_chosen(
    roots: Sequence[Node], search: Search, has_one_type: Callable[[Product], bool]
) -> tuple[list[Node], tuple[Chosen, ...]]:
    """Returns expressions of captured log-probabilities of entries, and what these are.

    ``has_one_type`` says whether a product and its operands have the same dtype.
    """
    known: dict[tuple[Node, Node], Chosen] = {}

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        x = remade(x, args)
        while x.op == "linear" and (found := next(_differences(x, search), None)) is not None:
            value = _captured(found, search, known, has_one_type)
            x = linear(found.constant, [*found.terms, (found.factor, value)])
        return x

    made = rebuilt(roots, change, is_entered)
    return [made[x] for x in roots], tuple(known.values())


def in_one_pass(chosen: Sequence[Chosen], products: Collection[frozenset[object]]) -> list[Chosen]:
    """Lets a program compute few entries of a product that is read more than once.

    ``products`` are the operands of those that programs read in any case.
    """
    counts = Counter(x.entries.product.names for x in chosen)
    counts.update(products)
    return [
        replace(x, scale=None) if x.has_few_ids and counts[x.entries.product.names] > 1 else x
        for x in chosen
    ]


def _captured(
    found: _Difference,
    search: Search,
    known: dict[tuple[Node, Node], Chosen],
    has_one_type: Callable[[Product], bool],
) -> Node:
    """The log-probabilities of entries, as a captured value."""
    at_ids = search.at(found.product)
    assert at_ids is not None
    entries, order = at_ids
    others = sorted((found.score.axes | found.lse.axes) - {*order}, key=repr)
    named = tuple(Axis(("other", i), a.size) for i, a in enumerate(others))
    own = [*entries.rows, *named, *entries.places]
    num_rows = len(entries.rows)
    order = [*order[:num_rows], *others, *order[num_rows:]]
    names = dict(zip(order, map(index, own), strict=True))
    key = substitute(found.score, names), substitute(found.lse, names)
    if key not in known:
        rest = _of_other_keys(key[1], entries, ChosenIds(len(known)))
        scale = _scale_of(found, entries) if has_one_type(entries.product) else None
        known[key] = Chosen(entries, named, key[0], rest, scale)
    source = Source(ChosenValue(list(known).index(key)), 0, known[key].flows)
    return capture(source, FLOAT, at=list(map(index, order)))


def _scale_of(found: _Difference, entries: Entries) -> float | None:
    """The factor of a product whose multiple the scores of all keys are; None if they are not."""
    _, parts = terms_of(found.score)
    if len(parts) > 1 or parts[0][1] is not found.product:
        return None
    has_all_keys = found.lse.value.axis.size == entries.key.size
    has_its_rows = len(found.product.axes) == len(entries.axes)
    return parts[0][0] if has_all_keys and has_its_rows else None


def _differences(x: Node, search: Search) -> Iterator[_Difference]:
    """Yields log-probabilities of entries in a sum."""
    constant, terms = terms_of(x)
    sums = [(c, t) for c, t in terms if t.kind == LOGSUMEXP]
    sums = [(c, t) for c, t in sums if has_products(t)]
    products = [y for y in walk(x.args, is_elementwise) if y.op == CONTRACT] if sums else []
    for product in products:
        at_ids = search.at(product)
        if at_ids is None or any(a.size == 0 for a in at_ids[0].places):
            continue
        for c, lse in sums:
            found = _difference(constant, terms, (c, lse), product)
            if found is not None:
                if may_hide_rows(lse, False):
                    raise NoForm(HIDDEN, x)
                yield found


def _difference(
    constant: float, terms: Sequence[tuple[float, Node]], lse: tuple[float, Node], product: Node
) -> _Difference | None:
    """The difference with the scores of a product at ids, None if there is none in a sum."""
    coefficient, reduction = lse
    left = {t: c for c, t in terms}
    for place in ids_of(product):
        score = substitute(reduction.args[0], {reduction.value.axis: place})
        shift, parts = terms_of(score)
        first = next(((c, t) for c, t in parts if _reads(t, product)), None)
        if first is None or first[1] not in left:
            continue
        for factor in (-coefficient, left[first[1]] / first[0]):
            every = [(factor * c, t) for c, t in parts]
            every.append((-factor, reduction))
            if all(_is_part(c, left.get(t, 0.0)) for c, t in every):
                rest = {**left, **{t: _minus(left[t], c) for c, t in every}}
                constant = _minus(constant, factor * shift)
                others = [(c, t) for t, c in rest.items() if c]
                return _Difference(factor, score, reduction, product, constant, others)
    return None


def _is_part(c: float, whole: float) -> bool:
    """Whether a coefficient is a part of another one."""
    return c * whole > 0.0 and abs(c) <= abs(whole) * (1.0 + ROUNDED)


def _minus(a: float, b: float) -> float:
    return 0.0 if math.isclose(a, b, rel_tol=ROUNDED) else a - b


def _reads(x: Node, product: Node) -> bool:
    return any(y is product for y in walk([x], is_elementwise))


def _of_other_keys(lse: Node, entries: Entries, name: ChosenIds) -> Node:
    """The log-sum-exp of the keys that no id names."""
    free, flat = fresh_axis(lse.value.axis.size), flat_axis(entries)
    last = entries.key.size - 1.0 if isinstance(entries.key.size, int) else math.inf
    at = [*map(index, entries.rows), index(flat)]
    ids = capture(Source(name, 0), INT, at=at, bounds=(0.0, last))
    hit = reduced(ANY, flat, compare("eq", ids, index(free)))
    body = substitute(lse.args[0], {lse.value.axis: index(free)})
    return reduced(LOGSUMEXP, free, choose(hit, const(-math.inf), body))


def flat_axis(entries: Entries) -> Axis:
    """Returns the axis of all ids of a row."""
    if len(entries.places) == 1:
        return entries.places[0]
    count = num_positions(entries.places)
    if count is None:
        raise NoForm("the ids of a row have dimensions of unknown sizes")
    return Axis(("entry", "ids"), count)
