"""Finds the keys of a row program: which axis is summed over, and its outermost sums.

NOTE [Places]
Sums bind axes of their own, so an axis is known by where it stands: the place of an axis is the
dimension of an operand of a product at which it is read. The keys are at the places of a softmax,
of a maximum, or of a sum that is over the same places. If nothing says which of several sums is
over keys, each of them is tried, the outermost first.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch_streamkl.program.graph import ARGMAX, CONTRACT, LOGSUMEXP, MAX, SUM, Axis, Node, Source
from torch_streamkl.program.walks import fold, walk

Place = tuple[Any, ...]  # the sources of both operands, which of them it is, and a dimension


def is_entered(x: Node) -> bool:
    """Returns whether the arguments of an expression are values, and no positions."""
    return x.op not in ("capture", CONTRACT)


def is_elementwise(x: Node) -> bool:
    """Returns whether an expression is computed from its arguments at the same rows and keys."""
    return is_entered(x) and x.op not in ("reduce", "log_softmax")


def products_in(roots: Iterable[Node]) -> list[Node]:
    """Returns the products of two tensors in expressions."""
    return [x for x in walk(roots, is_entered) if x.op == CONTRACT]


def maxima_places_in(roots: Iterable[Node]) -> list[Node]:
    """Returns the places of maxima in expressions."""
    return [x for x in walk(roots, is_entered) if x.kind == ARGMAX]


_products: weakref.WeakKeyDictionary[Node, frozenset[Node]] = weakref.WeakKeyDictionary()


def products_of(x: Node) -> frozenset[Node]:
    """Returns the products in an expression, each of which is looked at once."""

    def made_of(y: Node) -> frozenset[Node]:
        if not is_entered(y):
            return frozenset([y]) if y.op == CONTRACT else frozenset()
        return frozenset[Node]().union(*(_products[a] for a in y.args))

    return fold(x, _products, made_of, is_entered)


def has_products(x: Node) -> bool:
    """Returns whether an expression is made of products."""
    return bool(products_of(x))


def name_of(x: Node) -> tuple[Any, ...]:
    """Returns what a tensor is, whether it has gradient or not."""
    if x.op == "capture" and isinstance(x.value, Source):
        return x.value.name, x.value.version
    return (x,)


def operands_in(product: Node) -> tuple[object, ...]:
    """Returns what both tensors of a product are, whatever positions it reads."""
    return tuple(map(name_of, product.args))


def places_of(product: Node, axis: Axis) -> set[Place]:
    """Returns where an axis stands in a product: at ids, the one that nothing else has."""
    names = operands_in(product)
    every = [
        (side, d, at)
        for side, operand in enumerate(product.args)
        for d, at in enumerate(operand.args)
        if axis in at.axes
    ]
    found = [x for x in every if len(every) == 1 or x[2].op != "capture"]
    return {(names, side, d) for side, d, _ in found}


@dataclass(frozen=True)
class Binding:
    """Holds what binds an axis, and the products that have it."""

    node: Node
    axis: Axis
    products: tuple[Node, ...]
    says: bool  # whether it says what the keys are

    @property
    def places(self) -> set[Place]:
        return {place for x in self.products for place in places_of(x, self.axis)}

    def is_over(self, keys: Set[Place]) -> bool:
        """Returns whether the axis is that of the keys."""
        return stands_at(self.products, self.axis, keys)


def bindings_of(roots: Iterable[Node]) -> list[Binding]:
    """Returns the reductions and softmaxes over axes of products, inner ones first.

    What a logarithm of probabilities is normalised along, as over heads, are no keys.
    """
    inside: dict[Node, frozenset[Node]] = {}
    said: dict[Node, bool] = {}
    found = []
    for x in walk(roots, is_entered):
        if x.op == CONTRACT:
            inside[x], said[x] = frozenset((x,)), False
            continue
        args = x.args if is_entered(x) else ()
        inside[x] = frozenset[Node]().union(*(inside[a] for a in args))
        said[x] = any(said[a] for a in args)
        if x.op not in ("reduce", "log_softmax"):
            continue
        axis = x.value if x.op == "log_softmax" else x.value.axis
        products = sorted((p for p in inside[x] if axis in p.axes), key=lambda p: p.digest)
        if products:
            says = x.op == "log_softmax" or x.kind in (ARGMAX, LOGSUMEXP, MAX)
            says = says and not said[x]
            said[x] |= says
            found.append(Binding(x, axis, tuple(products), says))
    return found


def places_of_keys(bindings: Sequence[Binding]) -> list[frozenset[Place]]:
    """Returns the places of the keys, each of what they may be."""
    said = {place for b in bindings if b.says for place in b.places}
    if said:
        return [_closed(said, bindings)]
    found: dict[frozenset[Place], None] = {}
    sums = [b for b in reversed(bindings) if b.node.kind == SUM]
    sums = [b for b in sums if all(_is_of_one(p, b.axis) for p in b.products)]
    # the vocabulary before a dimension of tokens: others would be heads, with a weight each
    for b in sorted(sums, key=lambda b: any(_has_more_rows(p, b.axis) for p in b.products)):
        found[_closed(b.places, bindings)] = None
    return list(found)


def _has_more_rows(product: Node, axis: Axis) -> bool:
    """Whether the operand that has an axis has other ones that the other operand has not."""
    (mine,) = (x for x in product.args if axis in x.axes)
    others = frozenset[Axis]().union(*(x.axes for x in product.args if x is not mine))
    return bool(mine.axes - others - {*product.value, axis})


def _is_of_one(product: Node, axis: Axis) -> bool:
    return sum(axis in x.axes for x in product.args) == 1


def _closed(places: set[Place], bindings: Sequence[Binding]) -> frozenset[Place]:
    """With the places of other products in the same sums."""
    while True:
        more = {p for b in bindings if b.is_over(places) for p in b.places} - places
        if not more:
            return frozenset(places)
        places = places | more


def is_of_keys(x: Node, keys: frozenset[Place], products: Iterable[Node] | None = None) -> bool:
    """Returns whether a reduction is over keys."""
    if x.op != "reduce":
        return False
    inside = products_of(x) if products is None else products
    return stands_at(inside, x.value.axis, keys)


def stands_at(products: Iterable[Node], axis: Axis, keys: Set[Place]) -> bool:
    """Returns whether an axis stands where keys do, and nowhere else in the same product.

    On a diagonal an axis of rows stands there, too: that is one key of each row.
    """
    return any(found and found <= keys for p in products for found in [places_of(p, axis)])


def key_position(product: Node, keys: frozenset[Place]) -> tuple[int, int] | None:
    """Returns which operand has the keys, and in which dimension."""
    names = operands_in(product)
    found = [(side, d) for n, side, d in keys if n == names]
    return min(found) if found else None


def has_entries(product: Node, place: tuple[int, int]) -> bool:
    """Returns whether the ids at which keys are read have an axis of their own."""
    side, d = place
    others = [
        at
        for s, operand in enumerate(product.args)
        for i, at in enumerate(operand.args)
        if (s, i) != place
    ]
    rest = frozenset[Axis]().union(*(at.axes for at in others))
    return not product.args[side].args[d].axes <= rest


def sites_of(root: Node, keys: frozenset[Place]) -> list[Node]:
    """Returns the outermost reductions over keys, and products at one key of each row."""
    found: dict[Node, None] = {}
    known: dict[Node, bool] = {}

    def is_site(x: Node) -> bool:
        if x not in known:
            known[x] = x.op == CONTRACT or is_of_keys(x, keys)
        return known[x]

    for x in walk([root], lambda x: is_entered(x) and not is_site(x)):
        if is_site(x):
            found[x] = None
    return list(found)


def is_score_sized(expr: Node, products: Collection[Node]) -> bool:
    """Returns whether an expression has axes of rows alone and of keys alone."""
    for product in products:
        a, b = (x.axes for x in product.args)
        if expr.axes & (a - b) and expr.axes & (b - a):
            return True
    return False
