"""Finds entries of products at given ids, such as the logits of a cached teacher's ids.

``z.gather(-1, ids)`` of ``z = h @ w.T`` is one product for each id: a value of its row, and of its
place among the ids. Such an entry is computed by its own operator, from the weight rows of the
ids, whether an id stands twice or not. What is left of a loss reads whole rows of z, as a
log-sum-exp does, or nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch_streamkl.fx_passes.closed_forms.alike import free_axes, numbered
from torch_streamkl.fx_passes.closed_forms.form import NoForm, Product
from torch_streamkl.fx_passes.closed_forms.repeated_ids import SINGLE_ENTRIES, why_repeated
from torch_streamkl.fx_passes.closed_forms.row_sites import (
    Place,
    is_elementwise,
    is_entered,
    operands_in,
)
from torch_streamkl.fx_passes.reading.positions import Positions
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.graph import (
    BOOL,
    CONTRACT,
    FLOAT,
    INT,
    LOGSUMEXP,
    SUM,
    Axis,
    Node,
    Size,
    Source,
    capture,
    index,
)
from torch_streamkl.program.reductions import contraction, reduced, remade, substitute
from torch_streamkl.program.shifts import LARGE
from torch_streamkl.program.walks import rebuilt, walk

HIDDEN = "an entry of a row of scores that a finite mask may hide"


@dataclass(frozen=True)
class EntryValue:
    """Names the entries of a product at ids, in a program around them."""

    number: int


@dataclass(frozen=True)
class Entries:
    """Represents the entries of a product at ids, with axes of their own.

    ``product`` has the keys at all positions, along ``key``; ``ids`` are positions of entries.
    """

    product: Product
    ids: Node
    key: Axis
    rows: tuple[Axis, ...]
    places: tuple[Axis, ...]  # among the ids of a row

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (*self.rows, *self.places)

    @property
    def flows(self) -> bool:
        return self.product.rows.flows or self.product.keys.flows


@dataclass
class Search:
    """Finds the entries that products are; ``extent`` says how long a dimension is."""

    extent: Callable[[object, int], Size | None]
    _known: dict[Node, Entries] = field(default_factory=dict)

    def at(self, x: Node) -> tuple[Entries, list[Axis]] | None:
        """Returns the entries at ids that a product is, and its names of their axes."""
        order = free_axes(x)
        same, names = numbered(x, order, "entry")
        back = dict(zip(names, order, strict=True))
        entries = self._known.get(same)
        if entries is not None:
            return entries, [back[a] for a in entries.axes]
        entries = _entries_of(same, self.extent)
        if entries is None:
            return None
        if not entries.ids.axes & {*entries.rows} and any(back[a].level for a in entries.rows):
            if _are_of_elements(keys := entries.product.keys, entries.ids):
                raise NoForm(SINGLE_ENTRIES, keys)
            return None  # keys of rows that are selected
        self._known[same] = entries
        return entries, [back[a] for a in entries.axes]


def without_entries(
    roots: Sequence[Node], search: Search
) -> tuple[list[Node], tuple[Entries, ...]]:
    """Returns expressions of captured entries in place of products at ids, and these entries.

    Ids of a top-k of the graph stay: such entries are keys that a row program chooses.
    """
    found: dict[Entries, int] = {}

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        x = remade(x, args)
        if x.op != CONTRACT:
            return x
        of_one, summed = _of_one_id(x)
        at_ids = search.at(of_one)
        if at_ids is None:
            return x
        entries, order = at_ids
        number = found.setdefault(entries, len(found))
        source = Source(EntryValue(number), 0, entries.flows)
        value = capture(source, FLOAT, at=list(map(index, order)))
        for axis in summed:
            value = reduced(SUM, axis, value)
        return value

    made = rebuilt(roots, change, is_entered)
    return [made[x] for x in roots], tuple(found)


def _entries_of(x: Node, extent: Callable[[object, int], Size | None]) -> Entries | None:
    """The entries that a product is, None if it is none: one operand is read at ids."""
    contracted = set(x.value)
    for keys, rows, d in _places_of_ids(x):
        ids, length = keys.args[d], extent(keys.value, d)
        if length is None:
            continue
        others = frozenset[Axis]().union(*(p.axes for i, p in enumerate(keys.args) if i != d))
        row_axes = rows.axes - contracted
        places = ids.axes - row_axes
        if not others <= contracted or not places or not row_axes or ids.axes & contracted:
            continue
        key = Axis(("entry", "key"), length)
        if ids.op == "capture" and any(not why_repeated(ids, a, key) for a in places):
            return None
        at = [index(key) if i == d else p for i, p in enumerate(keys.args)]
        whole = capture(keys.value, FLOAT, at=at)
        product = Product(rows, whole, x.value)
        order = free_axes(x)
        return Entries(
            product,
            ids,
            key,
            tuple(a for a in order if a in row_axes),
            tuple(a for a in order if a in places),
        )
    return None


def _of_one_id(x: Node) -> tuple[Node, list[Axis]]:
    """The product at one id of each row, and the places of ids that a product is summed over.

    The sum of scores at ids is a matmul's element that sums over them, too.
    """
    for keys, rows, d in _places_of_ids(x):
        others = rows.axes.union(*(p.axes for i, p in enumerate(keys.args) if i != d))
        at = {a: fresh_axis(a.size) for a in x.value if a in keys.args[d].axes - others}
        if at:
            free = {axis: index(place) for axis, place in at.items()}
            a, b = (substitute(operand, free) for operand in x.args)
            of_one = contraction(a, b, [axis for axis in x.value if axis not in at])
            if of_one.op == CONTRACT:
                return of_one, list(at.values())
    return x, []


def _places_of_ids(x: Node) -> Iterator[tuple[Node, Node, int]]:
    """Yields an operand that is read at ids in one dimension, the other one, and which it is."""
    for keys, rows in (x.args, x.args[::-1]):
        at_ids = [d for d, p in enumerate(keys.args) if _has_ids(p)]
        if len(at_ids) == 1:
            yield keys, rows, at_ids[0]


def places_at_ids(x: Node) -> list[Place]:
    """Returns where the keys of entries stand in a product."""
    names = operands_in(x)
    return [(names, x.args.index(keys), d) for keys, _, d in _places_of_ids(x)]


def ids_of(x: Node) -> list[Node]:
    """Returns the ids that entries of a product may be at."""
    return [keys.args[d] for keys, _, d in _places_of_ids(x)]


def _are_of_elements(keys: Node, ids: Node) -> bool:
    """Whether a mask of single elements selects the rows: one for each element."""
    columns = {
        y.value.name
        for y in walk([ids, *keys.args])
        if y.op == "capture" and isinstance(y.value.name, Positions)
    }
    read = {x.rows: {c.dim for c in columns if c.rows == x.rows} for x in columns}
    return any(set(rows.varying) - dims for rows, dims in read.items())


def _has_ids(position: Node) -> bool:
    return any(y.op == "capture" and y.dtype == INT for y in walk([position]))


def check_normalizers(opened: Iterable[Node], roots: Iterable[Node]) -> None:
    """Raises NoForm if a log-sum-exp may have lost the digits of what it is subtracted from.

    Where a mask of -1e9 hides all keys of a row, the log-sum-exp is -1e9, without the logarithm of
    their number. What has a row's scores and masks in one place computes with the maximum apart;
    an entry is computed elsewhere (in ``roots``), or without what is added to it (in ``opened``).
    """
    for exprs, is_score, is_added in ((opened, _is_product, True), (roots, _is_entry, False)):
        for x in walk(exprs, is_entered):
            if x.op != "linear" or not any(may_hide_rows(t, is_added) for t in x.args):
                continue
            if any(map(is_score, walk(x.args, is_elementwise))):
                raise NoForm(HIDDEN, x)


def _is_product(x: Node) -> bool:
    return x.op == CONTRACT


def _is_entry(x: Node) -> bool:
    return x.op == "capture" and isinstance(x.value.name, EntryValue)


def may_hide_rows(x: Node, is_added: bool) -> bool:
    """Returns whether it is a log-sum-exp of scores with large masks that differ by row."""
    if x.kind != LOGSUMEXP:
        return False
    for y in walk(x.args, lambda y: is_entered(y) and y.dtype != BOOL and y.op != "reduce"):
        numbers = [z.value for z in y.args[1:] if z.op == "const"] if y.op == "where" else []
        is_large = any(LARGE <= abs(n) < math.inf for n in numbers)
        if is_large and len(numbers) > is_added and y.args[0].axes - {x.value.axis}:
            return True
    return False
