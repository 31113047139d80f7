"""Finds sums over keys that code outside of the elements reads.

A value is of rows if its products are all inside of sums over keys. The keys are what softmaxes of
the graph are over; of products without one, an axis that leaves nothing as large as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import cached_property

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.region import Region
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.closed_forms.entries import ids_of, places_at_ids
from torch_streamkl.fx_passes.closed_forms.row_sites import (
    Place,
    bindings_of,
    has_entries,
    has_products,
    is_score_sized,
    key_position,
    maxima_places_in,
    places_of_keys,
    products_in,
    sites_of,
)
from torch_streamkl.fx_passes.fx_utils.mutation import is_in_place
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, reached, storage_of
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.fx_passes.reading.rules.views import RESHAPES, SAME
from torch_streamkl.program.graph import CONTRACT, Node


class Levels:
    """Says which nodes of a trace are per-row values."""

    def __init__(self, trace: Trace, reading: Reading) -> None:
        self.trace, self.reading = trace, reading
        self.made: dict[fx.Node, Node] = {}  # what is made of products
        for node in trace.graph.nodes:
            x = reading.expression(node)
            if node.op == "call_function" and x is not None and has_products(x):
                self.made[node] = x
        every = bindings_of(self.made.values())
        said = [b for b in every if b.says]
        places = places_of_keys(every) if said else []  # none of entries that a mask selects
        self.places: frozenset[Place] = places[0] if places else frozenset()
        for node, expr in list(self.made.items()) if said else []:
            if all(_is_of_row(p, self.places) for p in products_in([expr])):
                del self.made[node]  # as the gate of a row, which a projection makes
        self._known: dict[Node, bool] = {}
        self._read: set[fx.Node] | None = None
        self._left: set[fx.Node] = set()  # what other code reads itself

    def is_of_rows(self, node: fx.Node) -> bool:
        """Returns whether a node is computed from sums over keys alone."""
        expr = self.made.get(node)
        if expr is None:
            return False
        if expr not in self._known:
            self._known[expr] = self._is_of_rows(expr)
        return self._known[expr]

    def _is_of_rows(self, expr: Node) -> bool:
        products = [p for p in products_in([expr]) if not _is_of_row(p, self.places)]
        if all(key_position(p, self.places) is not None for p in products):
            return _are_summed(expr, self.places)
        candidates = places_of_keys(bindings_of([expr]))
        return not is_score_sized(expr, products) and any(_are_summed(expr, p) for p in candidates)

    # ------------------------------------------------------------------------ roots

    def roots(self, region: Region) -> list[fx.Node]:
        """Returns sums over keys that code outside of the elements reads.

        A sum inside of one of the user's operations, such as a norm, is no value of the graph: the
        first one that is computed from it is. So it is with the score of one key, as of a label:
        what sums over keys are added to it is a sum over keys, too.
        """
        read = self._read_outside(region)
        roots, hidden = list[fx.Node](), set[fx.Node]()
        added = {n for n in read & self.trace.outer.keys() if self._is_added_to_one_key(n)}
        for node in self.made:
            if not self.is_of_rows(node):
                continue
            inputs = [a for a in _inputs_of(node) if a in self.made]
            is_sum = any(not self.is_of_rows(a) for a in inputs)
            if not is_sum and not hidden & set(inputs) and node not in added:
                continue
            if node not in self.trace.outer:
                hidden.add(node)
            elif node in read and not self._is_only_read_by(node, added):
                roots.append(node)
        return roots

    def _is_added_to_one_key(self, node: fx.Node) -> bool:
        """Whether a value of rows adds the score of one key of each row and sums over keys."""
        if not self.is_of_rows(node) or self.made[node].op != "linear":
            return False
        inputs = [a for a in node.all_input_nodes if self.is_of_rows(a)]
        return {bool(bindings_of([self.made[a]])) for a in inputs} == {True, False}

    def _is_only_read_by(self, node: fx.Node, nodes: Collection[fx.Node]) -> bool:
        """Whether other per-row values alone read a value, or a view of it."""
        users = [u for u in node.users if u.op != "output"]
        return bool(users and node not in self._left) and all(
            u in nodes or (u.target in SAME | RESHAPES and self._is_only_read_by(u, nodes))
            for u in users
        )

    def entries(self, region: Region, refused: Collection[fx.Node]) -> list[fx.Node]:
        """Returns values at ids that other code reads, or sums without a program; the last ones.

        They are no per-row values: there is one for each id. But they are as small. Of several in
        one memory it is the first, of which the code makes views: one may be written through.
        """
        self._read_outside(region)
        read = self._left if not self.places else ()  # of sums over keys, each has a program
        behind = self._left.union(*map(ancestors, (*refused, *read)))
        every = [n for n in self.made if n in self.trace.outer and self._is_of_entries(n)]
        found = [n for n in every if n in behind]
        inner = {a for n in found for a in ancestors(n) - {n}} - self._left
        last = [n for n in found if n not in inner]
        memory = {n: storage_of(self.trace.outer[n]) or n for n in every}
        first = {memory[n]: n for n in reversed(every)}
        count = Counter(memory[n] for n in last)
        return list(dict.fromkeys(first[memory[n]] if count[memory[n]] > 1 else n for n in last))

    def _is_of_entries(self, node: fx.Node) -> bool:
        """Whether a value is made of entries at ids, and of sums over keys next to them."""
        places, expr = self.places or self._places_of_ids, self.made[node]
        sites = [x for x in sites_of(expr, places) if x.op == CONTRACT]
        if not sites or not all(_is_at_ids(x, places) for x in sites):
            return False
        found = products_in(maxima_places_in([expr]))
        return not any(_is_at_ids(x, places) for x in found)  # the user's code finds the place

    @cached_property
    def _places_of_ids(self) -> frozenset[Place]:
        """Where products are read at ids, in a graph in which nothing says what the keys are."""
        products = products_in(self.made.values())
        return frozenset(place for x in products for place in places_at_ids(x))

    def read_by_elements(self, region: Region) -> set[fx.Node]:
        """Returns the per-row values that only elements read, whose sums compute them, too."""
        read = self._read_outside(region)
        return {n for n in self.made if n not in read and self.is_of_rows(n)}

    def _read_outside(self, region: Region) -> set[fx.Node]:
        """The nodes that other code uses, or uses what is computed from them alone as rows'
        values.
        """
        if self._read is not None:
            return self._read
        inside = set(region.nodes)
        mapped = set(self.trace.outer.values()) | set(self.trace.origin.values())
        leaves: dict[fx.Node, bool] = {}
        found: set[fx.Node] = set()
        for node in reversed(self.trace.graph.nodes):
            users = [user for user in node.users if user.op != "output"]
            if (
                node in self.trace.outer
                and _leaves(self.trace.outer[node], inside, mapped, leaves)
            ) or any(self._is_left(user) for user in users):
                self._left.add(node)
            if node in self._left or any(
                (u in found and self.is_of_rows(u)) or is_in_place(u) for u in users
            ):  # whoever reads what was written to is no user of the write
                found.add(node)
        self._read = found
        return found

    def _is_left(self, node: fx.Node) -> bool:
        """Whether an operation is not read."""
        value = node.meta.get("val")
        return isinstance(value, (Tensor, list, tuple)) and node not in self.made


def _inputs_of(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node: of one of several results, those of all."""
    inputs = node.all_input_nodes
    is_part = len(inputs) == 1 and isinstance(inputs[0].meta.get("val"), (list, tuple))
    return inputs[0].all_input_nodes if is_part else inputs


def _are_summed(expr: Node, places: frozenset[Place]) -> bool:
    """Whether all products are inside of sums over keys, or at one key of each row."""
    sites = [x for x in sites_of(expr, places) if not _is_of_row(x, places)]
    return bool(sites) and all(x.op != CONTRACT or _is_at_one_key(x, places) for x in sites)


def _is_of_row(site: Node, places: frozenset[Place]) -> bool:
    """Whether an expression is a product without keys, and no map of its own."""
    is_product = site.op == CONTRACT and key_position(site, places) is None
    return is_product and not is_score_sized(site, [site])


def _is_at_ids(product: Node, places: frozenset[Place]) -> bool:
    """Whether a product is at ids of its own in each row."""
    place = key_position(product, places)
    if place is None or not ids_of(product) or not has_entries(product, place):
        return False
    side, d = place
    return bool(product.args[side].args[d].axes & product.args[1 - side].axes)


def _is_at_one_key(product: Node, places: frozenset[Place]) -> bool:
    place = key_position(product, places)
    if place is None:
        return False
    side, d = place
    at = product.args[side].args[d]
    if at.op == "index":
        return at.value in (*product.value, *product.args[1 - side].axes)  # summed, or a diagonal
    return not has_entries(product, place)


def _leaves(
    node: fx.Node,
    inside: Collection[fx.Node],
    mapped: Collection[fx.Node],
    known: dict[fx.Node, bool],
) -> bool:
    """Whether code that is not analysed uses a node of the user's graph.

    What is inside and no node of the trace returns its input: its users count.
    """
    if node not in known:

        def same(n: fx.Node) -> list[fx.Node]:
            return [user for user in n.users if user in inside and user not in mapped]

        users = (user for n in reached([node], same) for user in n.users)
        known[node] = any(user not in inside for user in users)
    return known[node]
