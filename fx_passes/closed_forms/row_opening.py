"""Names the axes of sums: in a program, equal products are one expression, wherever they stand.

An expression that is opened has no bound axes where products are. Its reductions over keys are
over `Opening.whole`, or over some of the axes in `Opening.keys` where code sums blocks of keys.
"""

from __future__ import annotations

import math

from torch_streamkl.fx_passes.closed_forms.alike import matched
from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.repeated_ids import why_repeated
from torch_streamkl.fx_passes.closed_forms.row_sites import (
    Place,
    has_entries,
    has_products,
    is_entered,
    is_of_keys,
    key_position,
    operands_in,
    places_of,
    products_in,
)
from torch_streamkl.fx_passes.reading.arrays import position as position_of
from torch_streamkl.program.canonical import choose, compare, linear, log_softmax, terms_of
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.graph import (
    ANY,
    ARGMAX,
    CONTRACT,
    INT,
    SUM,
    Axis,
    Node,
    Reduction,
    Source,
    capture,
    const,
    index,
    intern,
    num_positions,
)
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.reductions import contraction, reduced, remade, substitute
from torch_streamkl.program.walks import rebuilt, rebuilt_root, walk

SOME_KEYS = "only some of the keys are used after the softmax"


def with_args(x: Node, args: tuple[Node, ...]) -> Node:
    """Returns an expression on other arguments, in the form that it has."""
    if args == x.args:
        return x
    axes = frozenset[Axis]().union(*(a.axes for a in args))
    if x.op == "reduce":
        axes -= {x.value.axis}
    elif x.op == CONTRACT:
        axes -= set(x.value)
    return intern(x.op, args, x.value, x.dtype, axes, x.is_finite, x.range)


class Opening:
    """Holds the axes of a program, and the products that were found with them."""

    def __init__(self, places: frozenset[Place], keys: tuple[Axis, ...]) -> None:
        self.places, self.keys = places, keys
        self.whole = keys[0] if len(keys) == 1 else fresh_axis(None)
        self.parts: dict[tuple[Axis, ...], Axis] = {}  # of the keys, and the axis of their sums
        self.products: dict[Node, None] = {}
        self._known: dict[Node, Node] = {}

    def names_of(self, site: Node) -> dict[Axis, Axis]:
        """Returns the program's names of a site's axes; those of products are shared."""
        names: dict[Axis, Axis] = {}
        for product in products_in([site]):
            self._match(product, site, names)
        for axis in sorted(site.axes, key=repr):
            names.setdefault(axis, fresh_axis(axis.size))
        return names

    def _match(self, product: Node, site: Node, names: dict[Axis, Axis]) -> None:
        for known in self.products:
            found = dict[Axis, Axis]()
            if not matched(product, known, found) and not self._at_one_key(product, known, found):
                continue
            own = {a: b for a, b in found.items() if a in site.axes}
            if all(names.get(a, b) == b for a, b in own.items()):
                taken = {b for a, b in names.items() if a not in own}
                if not taken & set(own.values()):
                    names |= own
                    return

    def _at_one_key(self, product: Node, known: Node, names: dict[Axis, Axis]) -> bool:
        """Whether a product is another one at one key of each row."""
        place = key_position(known, self.places)
        if place is None or operands_in(product) != operands_in(known):
            return False
        names.clear()
        pairs = [
            (a, b)
            for side, (x, y) in enumerate(zip(product.args, known.args, strict=True))
            for d, (a, b) in enumerate(zip(x.args, y.args, strict=True))
            if (side, d) != place
        ]
        return all(matched(a, b, names) for a, b in pairs)

    def of(self, x: Node) -> Node:
        """Returns an expression of the program's axes without bound axes where products are."""
        found = self._known.get(x)
        if found is not None:
            return found
        done: dict[Node, Node] = {}
        for y in walk([x], lambda y: is_entered(y) and y.op != "reduce"):
            if y.op == "reduce":
                is_open = y.value.axis in (self.whole, *self.keys, *self.parts.values())
                inside = self.of(y.args[0]) if is_open else y
                done[y] = with_args(y, (inside,)) if is_open else self._reduction(y)
            elif y.op == CONTRACT:
                done[y] = self._product(y)
            elif is_entered(y):
                done[y] = with_args(y, tuple(done[a] for a in y.args))
            else:
                done[y] = y
        self._known[x] = done[x]
        return done[x]

    # ------------------------------------------------------------------------ products

    def _product(self, x: Node) -> Node:
        place = key_position(x, self.places)
        if place is None or set(self.keys) & x.axes:
            self.products[x] = None
            return x
        side, d = place
        at = x.args[side].args[d]
        if at.op == "index" and at.value in x.value and at.value not in x.args[1 - side].axes:
            return self._sum_of_products(x, at.value)
        if has_entries(x, place):
            raise NoForm(SOME_KEYS, x)
        whole = _at_position(x, place, self.position)
        self.products[whole] = None
        hit = compare("eq", at, self.position)
        return self._summed(SUM, choose(hit, whole, const(0.0)))

    def _sum_of_products(self, x: Node, axis: Axis) -> Node:
        """A sum over keys that is a part of a product: of the sum of all keys."""
        if axis.size != self.whole.size:
            raise NoForm(SOME_KEYS, x)
        names = {a: self.position if a == axis else index(fresh_axis(a.size)) for a in x.value}
        operands = [substitute(y, names) for y in x.args]
        rest = [names[a].value for a in x.value if a != axis]
        return self.of(self._summed(SUM, contraction(operands[0], operands[1], rest)))

    @property
    def position(self) -> Node:
        """Returns the position of a key."""
        return position_of(self.keys)

    def _summed(self, kind: str, body: Node, axis: Axis | None = None) -> Node:
        axis = self.whole if axis is None else axis
        part = next((part for part, a in self.parts.items() if a == axis), (axis,))
        axes = body.axes - set(self.keys if axis == self.whole else part)
        about = Reduction(kind, axis)
        dtype = INT if kind == ARGMAX else body.dtype
        return intern("reduce", (body,), about, dtype, axes, True)

    # ------------------------------------------------------------------------ reductions

    def _reduction(self, x: Node) -> Node:
        axis, body = x.value.axis, x.args[0]
        inside = [p for p in products_in([body]) if axis in p.axes]
        if not inside:
            if has_products(body):
                raise NoForm("a sum over a dimension along which nothing varies", x)
            return x
        is_plain = len(self.keys) == 1 and self._chosen_ids(inside, axis) is None
        if x.kind == ARGMAX and not (is_plain and is_of_keys(x, self.places, inside)):
            raise NoForm("argmax of some keys", x)
        if not is_of_keys(x, self.places, inside):
            free = self._heads(axis, inside)
            opened = self.of(substitute(body, {axis: index(free)}))
            return self._summed(x.kind, opened, free)
        outside = set(self.keys) & x.axes
        if outside and outside & set(self.part_of(inside, axis) or self.keys):
            raise NoForm("an axis of the scores meets itself in another place", x)
        chosen = self._chosen_ids(inside, axis)
        if chosen is not None:
            return self._of_chosen(x, chosen)
        if len(self.keys) == 1:
            if axis.size != self.keys[0].size:
                raise NoForm(SOME_KEYS, x)
            return self._summed(x.kind, self.of(substitute(body, {axis: self.position})))
        return self._of_blocks(x, inside)

    def _heads(self, axis: Axis, inside: list[Node]) -> Axis:
        """The axis of a sum that is not over keys: the one that a known product has there."""
        for product in inside:
            for known in self.products:
                names = dict[Axis, Axis]()
                if matched(product, known, names) and all(
                    names.get(a, a) == a for a in product.axes if a != axis and not a.level
                ):
                    return names[axis]
        return fresh_axis(axis.size)

    def _of_blocks(self, x: Node, inside: list[Node]) -> Node:
        axis, body, kind = x.value.axis, x.args[0], x.kind
        part = self.part_of(inside, axis)
        if part is None:
            if axis.size != num_positions(self.keys):
                raise NoForm(SOME_KEYS, x)
            return self._summed(kind, self.of(substitute(body, {axis: self.position})))
        opened = self.of(substitute(body, {axis: position_of(part)}))
        rest = tuple(a for a in self.keys if a not in part)
        inner = opened.value if opened.op == "reduce" else None
        if inner and inner.axis == self.parts.get(rest) and inner.kind == kind:
            return self._summed(kind, opened.args[0])  # blocks, of all in each
        return self._summed(kind, opened, self.parts.setdefault(part, fresh_axis(axis.size)))

    def part_of(self, products: list[Node], axis: Axis) -> tuple[Axis, ...] | None:
        """Returns which axes of the keys an axis is: of blocks, or inside of them."""
        for product in products:
            for names, side, d in places_of(product, axis):
                if (names, side, d) not in self.places:
                    continue
                _, terms = terms_of(product.args[side].args[d])
                own = next((c for c, t in terms if t is index(axis)), None)
                others = {t.value for _, t in terms if t.op == "index"} - {axis}
                if own is None or not others or not (len(terms) == 2 or others <= set(self.keys)):
                    return None
                for n in range(1, len(self.keys)):
                    leading, trailing = self.keys[:n], self.keys[n:]
                    if own == 1.0 and num_positions(trailing) == axis.size:
                        return trailing
                    if own == num_positions(trailing) and num_positions(leading) == axis.size:
                        return leading
        return None

    # ------------------------------------------------------------------------ chosen entries

    def _chosen_ids(self, products: list[Node], axis: Axis) -> Node | None:
        """The ids at which keys are read along an axis."""
        for product in products:
            place = key_position(product, self.places)
            at = product.args[place[0]].args[place[1]] if place else None
            if at is not None and at.op == "capture" and axis in at.axes:
                return at
        return None

    def _of_chosen(self, x: Node, ids: Node) -> Node:
        """A reduction of chosen entries, as a masked one over all keys."""
        axis = x.value.axis
        why = why_repeated(ids, axis, self.whole)
        if why:
            raise NoForm(why, x)
        free = fresh_axis(axis.size)
        at = substitute(ids, {axis: index(free)})
        body = substitute(x.args[0], {axis: index(free)})
        hit = reduced(ANY, free, compare("eq", at, self.position))
        body = _at_all_keys(body, at, self.position, hit, free)
        if free in body.axes:
            raise NoForm("chosen entries of rows meet a tensor of as many", x)
        nothing = const(0.0 if x.kind == SUM else -math.inf)
        kept = intern("where", (hit, body, nothing), None, body.dtype, hit.axes | body.axes, False)
        return self._summed(x.kind, self.of(kept))


def with_whole_rows(root: Node, places: frozenset[Place], keys: tuple[Axis, ...]) -> Node:
    """Returns a value of rows in which what is computed at one key of each row is a sum over keys.

    It is that of a log-probability, say, and not of its score alone: a row with a score that is
    infinite has no number in it.
    """

    def is_inner(x: Node) -> bool:
        return is_entered(x) and not is_of_keys(x, places)

    def changed(x: Node, args: tuple[Node, ...]) -> Node:
        if x.op != "linear" or len(keys) != 1:
            return remade(x, args)
        every = [p for p in walk([x], is_inner) if p.op == CONTRACT]
        found = {key_position(p, places) for p in every}
        if (
            len(found) != 1
            or None in found
            or not any(is_of_keys(y, places) for y in walk([x], is_inner))
        ):
            return remade(x, args)
        positions = {_at(p, key_position(p, places)) for p in every}
        (place,) = found
        assert place is not None
        if len(positions) != 1 or any(has_entries(p, place) for p in every):
            return remade(x, args)
        (at,) = positions
        if at.op == "index":
            return remade(x, args)
        free = fresh_axis(keys[0].size)
        whole = {p: _at_position(p, key_position(p, places), index(free)) for p in every}
        constant, terms = terms_of(x)
        made = [(c, t) for c, t in terms if has_products(t)]
        inside = rebuilt_root(
            linear(0.0, made), lambda y, a: whole.get(y) or remade(y, a), is_inner
        )
        total = reduced(SUM, free, choose(compare("eq", at, index(free)), inside, const(0.0)))
        rest = [(c, t) for c, t in terms if not has_products(t)]
        return linear(constant, [*rest, (1.0, total)])

    return rebuilt_root(root, changed, is_inner)


def _at(product: Node, place: tuple[int, int] | None) -> Node:
    assert place is not None
    return product.args[place[0]].args[place[1]]


def _at_position(product: Node, place: tuple[int, int] | None, position: Node) -> Node:
    """A product with another position of the keys."""
    assert place is not None
    side, d = place
    operands = list(product.args)
    args = tuple(position if i == d else y for i, y in enumerate(operands[side].args))
    operands[side] = with_args(operands[side], args)
    return with_args(product, tuple(operands))


def _at_all_keys(root: Node, ids: Node, position: Node, hit: Node, entries: Axis) -> Node:
    """Returns an expression of chosen entries as one of all keys, also inside of products.

    A softmax of the entries is one of the keys that are hit.
    """

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if x is ids:
            return position
        if x.op == "log_softmax" and x.value == entries and position.op == "index":
            return log_softmax(choose(hit, args[0], const(-math.inf)), position.value)
        return with_args(x, args) if x.op == CONTRACT else remade(x, args)

    return rebuilt_root(root, change)


def detached_in(roots: list[Node]) -> dict[Node, Node]:
    """Returns each expression inside of opened ones without gradient, in the same form."""

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if x.op == "capture" and isinstance(x.value, Source) and x.value.grad_flows:
            source = Source(x.value.name, x.value.version)
            axes = frozenset[Axis]() if args else x.axes
            return capture(source, x.dtype, axes, args, x.range)
        return with_args(x, args) if x.op == CONTRACT else _sorted(x, args)

    return rebuilt(roots, change)


def _sorted(x: Node, args: tuple[Node, ...]) -> Node:
    """Arguments whose order depends on what they are."""
    if args == x.args:
        return x
    value = x.value
    if x.op == "where" and not args[1].flows:
        value = None  # NOTE [Masks that are added] in program/canonical.py
    if x.op == "linear":
        pairs = sorted(zip(args, value[1], strict=True), key=lambda item: item[0].digest)
        args, value = tuple(a for a, _ in pairs), (value[0], tuple(c for _, c in pairs))
    elif x.op in ("product", "and", "or") or (
        x.op in OPERATIONS and OPERATIONS[x.op].is_commutative
    ):
        args = tuple(sorted(args, key=lambda a: (x.op == "eq" and a.op == "const", a.digest)))
    return intern(x.op, args, value, x.dtype, x.axes, x.is_finite, x.range)
