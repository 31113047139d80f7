"""Finds the row program that computes sums over keys, or says why there is none.

NOTE [How a row program is found]
Any expression of products of two tensors that is summed over an axis is one: nothing is searched
for. What has to be found is which axis is which.

1. `row_sites.py` says which axis the keys are, and finds the outermost sums over them. What is
   around these is an expression of the rows' values.
2. `row_opening.py` gives the axes of all sums names that they share: equal products are one.
3. `row_groups.py` assigns axes to batch, heads, rows and keys.
4. `row_steps.py` writes the steps, sound in floating point, and captures what is not made of
   products.
5. `row_checks.py` asks whether the program sees NaN and infinity where eager code does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_streamkl.fx_passes.closed_forms.alike import Forms
from torch_streamkl.fx_passes.closed_forms.axes import ordered_rows
from torch_streamkl.fx_passes.closed_forms.chosen import (
    in_one_pass,
    with_chosen,
)
from torch_streamkl.fx_passes.closed_forms.entries import (
    Search,
    check_normalizers,
    without_entries,
)
from torch_streamkl.fx_passes.closed_forms.form import (
    NO_ENTRIES,
    NoForm,
    Product,
    RowValue,
    names_of,
)
from torch_streamkl.fx_passes.closed_forms.row_checks import (
    Elements,
    UnderflowRead,
    check_readers_inside,
    is_filled,
)
from torch_streamkl.fx_passes.closed_forms.row_facts import dtype_of
from torch_streamkl.fx_passes.closed_forms.row_form import RowForm, RowReduction
from torch_streamkl.fx_passes.closed_forms.row_groups import (
    Dim,
    RowAxes,
    axes_of_products,
    product_of,
)
from torch_streamkl.fx_passes.closed_forms.row_keys import Facts, check_single_keys, keys_of
from torch_streamkl.fx_passes.closed_forms.row_leaves import Leaves
from torch_streamkl.fx_passes.closed_forms.row_maxima import with_largest
from torch_streamkl.fx_passes.closed_forms.row_opening import Opening, detached_in, with_whole_rows
from torch_streamkl.fx_passes.closed_forms.row_products import (
    with_row_products,
    without_row_products,
)
from torch_streamkl.fx_passes.closed_forms.row_sites import (
    Place,
    bindings_of,
    has_products,
    is_entered,
    maxima_places_in,
    operands_in,
    places_of_keys,
    products_in,
    sites_of,
)
from torch_streamkl.fx_passes.closed_forms.row_steps import Steps
from torch_streamkl.fx_passes.closed_forms.rows import replaced
from torch_streamkl.fx_passes.reading.arrays import position
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.program.derive import HeadJacobianError
from torch_streamkl.program.graph import (
    CONTRACT,
    FLOAT,
    LOGSUMEXP,
    Axis,
    HeadsError,
    Node,
    Source,
    capture,
    index,
)
from torch_streamkl.program.masks import Keys
from torch_streamkl.program.reductions import substitute
from torch_streamkl.program.shifts import HIDES
from torch_streamkl.program.walks import walk
from torch_streamkl.rows import derive
from torch_streamkl.rows.program import Program
from torch_streamkl.rows.trace import Tracer


@dataclass(frozen=True)
class _Site:
    """A sum over keys: in the user's axes, and opened."""

    node: Node
    names: dict[Axis, Axis]
    opened: Node
    blocks: Dim  # the axis of blocks of keys


def row_form(roots: Sequence[Node], order: Sequence[Axis], facts: Facts) -> RowForm:
    """Returns one program for the sums over keys of all roots; raises NoForm if there is none."""
    search = Search(facts.extent)
    left, every = with_chosen(roots, search, lambda x: len(set(dtypes_of(x, facts))) == 1)
    chosen = in_one_pass(every, {names_of(x.args) for x in products_in(left)})
    left += [x for c in chosen for x in c.parts]
    left, entries = without_entries(left, search)
    _check_places(left)
    every_row = (a for x in (*entries, *(c.entries for c in chosen)) for a in x.rows)
    if any(a.size == 0 for a in every_row):  # the mean over none is NaN
        raise NoForm(NO_ENTRIES)
    if (entries or chosen) and not products_in(left):
        nothing = RowAxes((), (), (), (), False)
        return RowForm(None, (), nothing, (), (), tuple(left), entries, tuple(chosen))
    form = _of_sums(left, order, facts)
    around, parts = form.around[: len(roots)], iter(form.around[len(roots) :])
    made = [replace(c, scores=next(parts), rest=next(parts)) if c.parts else c for c in chosen]
    return replace(form, around=around, entries=entries, chosen=tuple(made))


def _check_places(roots: Sequence[Node]) -> None:
    """Raises NoForm for the place of a maximum of entries, which is no place among the keys."""
    for x in maxima_places_in(roots):
        if not has_products(x):
            raise NoForm("the place of the largest of some entries", x)


def _of_sums(roots: Sequence[Node], order: Sequence[Axis], facts: Facts) -> RowForm:
    failed: NoForm | None = None
    for places in places_of_keys(bindings_of(roots)):
        try:
            return _Planner(roots, order, facts, places).form()
        except NoForm as reason:
            failed = failed or reason
        except (HeadsError, HeadJacobianError, ValueError) as reason:
            failed = failed or NoForm(str(reason))
    raise failed or NoForm("a sum of what is not made from scores")


class _Planner:
    """Makes the program of some roots, with the keys at known places."""

    def __init__(
        self, roots: Sequence[Node], order: Sequence[Axis], facts: Facts, places: frozenset[Place]
    ) -> None:
        narrow = functools.partial(_narrow_type, facts=facts)
        roots = with_largest(without_row_products(roots, places), places, narrow)
        bindings = [b for b in bindings_of(roots) if b.is_over(places)]
        keys = keys_of(bindings, places, facts)
        check_single_keys(roots, bindings, places, keys, facts)
        self.roots = [with_whole_rows(root, places, keys) for root in roots]
        self.order, self.facts = order, facts
        self.opening = Opening(places, keys)
        self.sites: list[_Site] = []
        nodes = dict.fromkeys(x for root in self.roots for x in sites_of(root, places))
        for node in _connected(list(nodes)):
            names, blocks = self.opening.names_of(node), self._blocks(node)
            places_of_axes = {a: index(b) for a, b in names.items()}
            places_of_axes |= {a: position(part) for a, part in blocks.items()}
            opened = self.opening.of(substitute(node, places_of_axes))
            self.sites.append(_Site(node, names, opened, tuple(blocks)))
        if not self.sites:
            raise NoForm("a sum of what is not made from scores")
        self.opened = list(dict.fromkeys(site.opened for site in self.sites))
        check_normalizers(self.opened, self.roots)

    def _blocks(self, node: Node) -> dict[Axis, Dim]:
        """The axis of blocks that a sum over parts of the keys leaves, as axes of the keys."""
        if len(self.opening.keys) == 1:
            return {}
        inside = products_in([node])
        parts = {a: self.opening.part_of(inside, a) for a in node.axes}
        return {a: part for a, part in parts.items() if part is not None}

    def form(self) -> RowForm:
        """Returns the program."""
        detached = detached_in(self.opened)
        products, numbers = _numbered(self.opened, detached, self.opening.keys)
        if any(a.size == 0 for x in products for y in (x.rows, x.keys) for a in y.axes):
            raise NoForm(NO_ENTRIES)
        groups = self._groups(products)
        logs = self._logarithms(detached)
        try:
            forms = self._traced(products, numbers, groups, detached, logs, False)
        except UnderflowRead:
            if not all(self._has_enough_digits(x) for x in products):
                raise
            forms = self._traced(products, numbers, groups, detached, logs, True)
        tracer, leaves, outputs = forms
        different = list(dict.fromkeys(outputs))
        program, numbers_of = tracer.program(different)
        derive.forward_plan(program, True)
        self._check_gradients(program, products, leaves)
        slots = dict(zip(different, numbers_of, strict=True))
        values, around = self._around(groups, [slots[x] for x in outputs], outputs)
        return RowForm(
            program,
            tuple(products),
            groups,
            tuple(replace(x, value=with_row_products(x.value)) for x in leaves.captured.values()),
            values,
            tuple(map(with_row_products, around)),
        )

    def _has_enough_digits(self, x: Product) -> bool:
        """Whether probabilities of eager code underflow where those of the program do."""
        return all(dtype.itemsize >= 4 for dtype in dtypes_of(x, self.facts))

    def _groups(self, products: Sequence[Product]) -> RowAxes:
        keys = self.opening.keys
        common = [set(x.axes) - set(keys) for x in self.opened]
        if len(set(map(frozenset, common))) != 1:
            raise NoForm("sums over different rows")
        original: dict[Axis, Axis] = {}
        for site in self.sites:
            for a, b in site.names.items():
                original.setdefault(b, a)
        if not common[0] <= original.keys():
            raise NoForm("sums over different rows")
        wanted = [original[a] for a in common[0]]
        ordered = ordered_rows(wanted, self.order)
        back = {original[a]: a for a in common[0]}
        return axes_of_products(products, [back[a] for a in ordered], keys)

    def _traced(
        self,
        products: Sequence[Product],
        numbers: dict[Node, int],
        groups: RowAxes,
        detached: dict[Node, Node],
        logs: dict[Node, bool],
        are_exact: bool,
    ) -> tuple[Tracer, Leaves, list[Node]]:
        heads = groups.numbers
        tracer = Tracer(tuple(heads[h] for h in groups.heads), (), Keys(), {})
        leaves = Leaves(groups, detached)
        twins, whole = _twins(detached), self.opening.whole
        leaves.parts = {axis: part for part, axis in self.opening.parts.items()}
        steps = Steps(tracer, leaves, numbers, whole, twins, logs, are_exact=are_exact)
        outputs = [steps.output(x) for x in self.opened]
        tracer.captures = leaves.declared()
        dtypes = {dtype for x in products for dtype in dtypes_of(x, self.facts)}
        # what a program detaches is made of the same numbers: one check of both
        bare = {detached.get(x, x): y for x, y in steps.nodes.items() if y.op == "detach"}
        bare |= {detached.get(x, x): y for x, y in steps.nodes.items() if y.op != "detach"}
        roots = [detached.get(x, x) for x in self.opened]
        of_logs = {detached.get(x, x) for x in logs}
        check_readers_inside(Elements(roots, bare, of_logs, dtypes), are_exact=are_exact)
        return tracer, leaves, outputs

    def _logarithms(self, detached: dict[Node, Node]) -> dict[Node, bool]:
        """The log-softmaxes that eager code computes as the logarithm of a probability.

        True: it computes them as log-softmaxes, too.

        Raises NoForm if another logarithm of them, which is none of these, may be -inf.
        """
        # the scores may have others inside, such as those of entropies in a temperature
        taken = walk(self.facts.logarithms, lambda x: is_entered(x) and x.op != "log_softmax")
        every = [x for x in taken if x.op == "log_softmax"]
        _check_chosen(every, detached)
        forms = Forms(bare=True)
        wanted = set(map(forms.of, every))
        both = wanted.intersection(map(forms.of, self.facts.log_softmaxes))
        found = ((x, forms.of(x)) for x in detached if x.op == "log_softmax")
        return {x: form in both for x, form in found if form in wanted}

    def _check_gradients(
        self, program: Program, products: Sequence[Product], leaves: Leaves
    ) -> None:
        backward = derive.backward_plan(program)
        for x, of in zip(backward.dots, products, strict=True):
            if (x is not None) != (of.rows.flows or of.keys.flows):
                raise NoForm("the gradient of the scores is a constant")
        for captured, x in zip(leaves.captured.values(), backward.captures, strict=True):
            if x is None and captured.value.flows:
                raise NoForm("the gradient of a tensor that meets the scores is a constant")
            kind = leaves.kind_of(captured.value)
            if kind != "row" and (captured.value.flows or kind == "pair"):
                for y in walk([captured.value]):
                    if source_name(y) in self.facts.made_of_products:
                        raise NoForm("a tensor with keys that is made of scores meets them", y)

    def _around(
        self, groups: RowAxes, slots: Sequence[int], outputs: Sequence[Node]
    ) -> tuple[tuple[RowReduction, ...], tuple[Node, ...]]:
        """The per-row values, and the roots as expressions of them."""
        by_number = {number: heads for heads, number in groups.numbers.items()}
        values, changes = dict[Node, RowReduction](), dict[Node, Node]()
        made_of = dict(zip(self.opened, zip(slots, outputs, strict=True), strict=True))
        for site in self.sites:
            slot, made = made_of[site.opened]
            number = self.opened.index(site.opened)
            of_rows = (groups.batch, by_number[made.head], groups.rows)
            dims = (*of_rows, site.blocks) if site.blocks else of_rows
            is_float = site.node.dtype == FLOAT
            values.setdefault(site.opened, RowReduction(slot, dims, site.opened.flows, is_float))
            original = {b: a for a, b in site.names.items() if a not in site.blocks}
            flat = [a for d in of_rows for a in d]
            if any(a not in original for a in flat):
                raise NoForm("sums over different rows")
            at = [*(index(original[a]) for a in flat), *map(index, site.blocks)]
            source = Source(RowValue(number), 0, site.opened.flows)
            changes[site.node] = capture(source, site.opened.dtype, at=at)
        found = tuple(values[x] for x in self.opened)
        return found, tuple(replaced(root, changes) for root in self.roots)


def _connected(sites: list[Node]) -> list[Node]:
    """Sums in an order in which each shares a product with those before it, if it does at all.

    Products at one key of each row come last: they are known by others.
    """
    left = sorted(sites, key=lambda x: (x.op == CONTRACT, -len(_products_of(x))))
    found: list[Node] = []
    known: set[Any] = set()
    while left:
        following = next((x for x in left if _products_of(x) & known), left[0])
        left.remove(following)
        known |= _products_of(following)
        found.append(following)
    return found


def _products_of(site: Node) -> set[Any]:
    return set(map(operands_in, products_in([site])))


def _numbered(
    opened: Sequence[Node], detached: dict[Node, Node], keys: Dim
) -> tuple[list[Product], dict[Node, int]]:
    """Products by number; one without gradient is one with gradient that is cut off."""
    variants: dict[Node, list[Node]] = {}
    for x in products_in(opened):
        variants.setdefault(detached[x], []).append(x)
    products: list[Product] = []
    numbers: dict[Node, int] = {}
    for bare, every in variants.items():
        trained = [x for x in every if x.flows]
        if len(trained) > 1:
            raise NoForm("a product has gradients of one operand here, and of both there", bare)
        numbers[bare] = len(products)
        products.append(product_of(trained[0] if trained else bare, keys))
    return products, numbers


def _check_chosen(logarithms: Sequence[Node], opened: Iterable[Node]) -> None:
    """Raises NoForm if a logarithm of probabilities is taken at some keys, as those of labels.

    There it is a score minus the log-sum-exp. Eager code has -inf where a mask made it 0.
    """
    hidden = {frozenset(_products_of(x)) for x in logarithms if is_filled(x.args[0], HIDES)}
    for x in opened:
        if x.kind == LOGSUMEXP and _products_of(x) in hidden:
            raise NoForm("the logarithm of some probabilities of a row, which a mask may make 0")


def _twins(detached: dict[Node, Node]) -> dict[Node, Node]:
    """Expressions with gradient by what they are without."""
    found: dict[Node, Node] = {}
    several = set()
    for x, bare in detached.items():
        if x.flows:
            if bare in found:
                several.add(bare)
            found[bare] = x
    return {bare: x for bare, x in found.items() if bare not in several}


def _narrow_type(product: Node, facts: Facts) -> Any:
    """The type narrower than float32 that a product is rounded to in eager code, None for none.

    None under autocast, too, which rounds operands that an operator reads as they are: what is
    equal after both is not equal after one of them.
    """
    rows, keys = product.args
    every = set(dtypes_of(Product(rows, keys, product.value), facts))
    return next((x for x in every if x.itemsize < 4), None) if len(every) == 1 else None


def dtypes_of(x: Product, facts: Facts) -> list[Any]:
    """Returns the types of a product's operands, and its own, which autocast decides."""
    found = [y.value for y in (x.rows, x.keys) if y.op == "capture"]
    own, made = map(dtype_of, found), facts.product_types.get(x.names)
    return [*own] if made is None else [*own, made]
