"""Reads entries at positions that tensors hold: gather, indexing, boolean selections, scatter."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array, Dim
from torch_streamkl.fx_passes.reading.positions import MaskedRows, Positions
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, rule, truth_of
from torch_streamkl.fx_passes.reading.rules.views import part_written, start_of
from torch_streamkl.fx_passes.reading.sizes import torch_size
from torch_streamkl.program.canonical import all_of, choose, compare, linear, nonnegative, truth
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.functions import function
from torch_streamkl.program.graph import (
    ANY,
    CONTRACT,
    INT,
    SUM,
    Axis,
    Extent,
    Node,
    Size,
    Source,
    capture,
    const,
    size_of,
)
from torch_streamkl.program.graph import index as position_along
from torch_streamkl.program.reductions import reduced, substitute
from torch_streamkl.program.walks import walk

aten = torch.ops.aten


def gathered(call: Call, x: Array, d: int, at: Array) -> Array:
    """Returns a dimension read at positions; the other dimensions of both are the same."""
    x = arrays.with_one_axis(x, d)
    hole = fresh_axis(x.dims[d][0].size if x.dims[d] else 1)
    expr = substitute(x.expr, {x.dims[d][0]: position_along(hole)}) if x.dims[d] else x.expr
    open_ = replace(x, expr=expr, dims=tuple(() if i == d else y for i, y in enumerate(x.dims)))
    (value, place), met = arrays.met(open_, at)
    return call.made(arrays.read_at(replace(x, expr=value), {hole: place}), met)


def _gather(call: Call, x: Array, d: int, at: Array) -> Array:
    for i in range(len(x.dims)):
        if i != d and not call.reader.sizes.are_equal(x.size(i), at.size(i)):
            x = arrays.sliced(x, i, 0, at.size(i))
    return gathered(call, x, d, at)


@rule(aten.gather.default)
def gather(call: Call) -> Array:
    """Reads entries along one dimension."""
    x, at = call.arrays("self", "index")
    if not x.dims:
        return x
    d = call.dim()
    call.reads_at(at.expr, "gather", d, x.size(d))
    return _gather(call, x, d, at)


@rule(aten.take_along_dim.default)
def take_along_dim(call: Call) -> Array:
    """Reads entries along one dimension, the others broadcast."""
    if not call.has("dim"):
        raise NoRule("take_along_dim without a dimension")
    x, at = call.arrays("self", "indices")
    d = call.dim()
    if not _are_unique(call.get("indices"), d):  # torch takes the remainder by the size
        at = at.map(lambda e: function("remainder", e, size_of(x.size(d))))
    return gathered(call, x, d, at)


@rule(aten.index_select.default)
def index_select(call: Call) -> Array:
    """Reads whole slices at positions."""
    x, at = call.arrays("self", "index")
    if not x.dims:
        return x
    d = call.dim()
    own = at.dims[0] if at.dims else ()
    (place,), dims = _apart(x.dims, [at.expr], [own])
    return arrays.indexed(x, d, place, dims)


def _apart(
    others: Sequence[Dim], at: Sequence[Node], dims: Sequence[Dim]
) -> tuple[list[Node], list[Dim]]:
    """Positions with other axes than these dimensions have."""
    taken = {a for own in others for a in own}
    names = {a: fresh_axis(a.size) for own in dims for a in own if a in taken}
    theta = {a: position_along(b) for a, b in names.items()}
    renamed = [tuple(names.get(a, a) for a in own) for own in dims]
    return [substitute(x, theta) for x in at], renamed


@rule(aten.embedding.default)
def embedding(call: Call) -> Array:
    """Reads rows of a table."""
    table, at = call.arrays("weight", "indices")
    if call.known("padding_idx", -1) != -1 or call.known("scale_grad_by_freq", False):
        raise NoRule("an embedding whose gradient is not that of indexing")
    (place,), dims = _apart(table.dims, [at.expr], at.dims)
    return arrays.indexed(table, 0, place, dims)


@rule(aten.index.Tensor)
def index(call: Call) -> Array:
    """Reads ``x[mask]`` and ``x[i, j]``."""
    x, given = call.array("self"), call.get("indices")
    places = [d for d, i in enumerate(given) if i is not None]
    masks = [given[d] for d in places if given[d].meta["val"].dtype in (torch.bool, torch.uint8)]
    if masks:
        if len(places) != 1:
            raise NoRule("a mask among other indices")
        return _where(call, x, places[0], masks[0])
    every = [call.reader.array(given[d]) for d in places]
    first = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
    kept = [(i, own) for i, own in enumerate(x.dims) if i not in places]
    exprs, new = _apart([own for _, own in kept], *arrays.met(*every))
    theta: dict[Axis, Node] = {}
    for d, e in zip(places, exprs, strict=True):
        x = arrays.with_one_axis(x, d)
        call.reads_at(e, "index", d, x.size(d))
        if x.dims[d]:
            theta[x.dims[d][0]] = _from_front(e, x.size(d))
    result = [own for i, own in kept if i < first] + new + [own for i, own in kept if i >= first]
    return call.made(arrays.read_at(x, theta), result)


def _from_front(at: Node, size: Size) -> Node:
    """A position that may be counted from the end."""
    if at.range[0] >= 0.0:
        return at
    return choose(nonnegative(at), at, linear(0.0, [(1.0, at), (1.0, size_of(size))]))


# ------------------------------------------------------------------------ rows of a mask


def _where(call: Call, x: Array, d: int, mask: fx.Node, lacking: int = 0) -> Array:
    """Rows at which a mask holds: equal masks select the same rows.

    Dimensions before and after those along which it varies are selected as a whole, and so are
    ``lacking`` leading ones that the mask is broadcast along.
    """
    condition = call.reader.array(mask)
    assert isinstance(call.value, Tensor)
    varying = [i for i, own in enumerate(condition.dims) if set(own) & condition.expr.axes]
    if not varying:
        raise NoRule("a mask that is the same for all rows")
    first, last = varying[0], varying[-1]
    if (first or lacking) and not isinstance(call.reader.sizes.of(call.value.shape[d]), int):
        first = 0  # how many rows each of the leading positions has is not known
    in_rows = lacking if first == 0 else 0
    sizes, shape = call.reader.sizes, condition.shape
    for i in range(first, last + 1):
        if not sizes.are_equal(shape[i], x.size(d + lacking + i)):
            raise NoRule("masked_select with a mask that is broadcast")
    places = range(d + lacking - in_rows + first, d + lacking + last + 1)
    whole = [i for i in range(d, d + lacking + len(shape)) if i not in places]
    every = [x.size(i) for i in whole]
    rows = MaskedRows(mask, first, last, in_rows)
    rows, version, count = _selection(call, condition, rows, (d, every))
    axis = arrays.own_axis(x, d, count)
    taken = {a for i, own in enumerate(x.dims) if i not in places for a in own}
    axis = fresh_axis(count) if axis in taken else axis
    theta: dict[Axis, Node] = {}
    for k, i in enumerate(places):
        x = arrays.with_one_axis(x, i)
        if x.dims[i]:
            size = x.size(i)
            bounds = 0.0, float(size - 1) if isinstance(size, int) else math.inf
            source = Source(Positions(rows, k), version)
            at = [position_along(axis)]
            theta[x.dims[i][0]] = capture(source, INT, at=at, bounds=bounds)
    own: Dim = () if count == 1 else (axis,)
    before = tuple(a for i in whole if i < places[0] for a in x.dims[i])
    after = tuple(a for i in whole if i > places[-1] for a in x.dims[i])
    dims = (*x.dims[:d], (*before, *own, *after), *x.dims[d + lacking + len(shape) :])
    return call.made(arrays.read_at(x, theta), dims)


def _selection(
    call: Call,
    condition: Array,
    rows: MaskedRows,
    counted: tuple[int, Sequence[Size]],
) -> tuple[MaskedRows, int, Size]:
    """The rows of the first of equal masks, its version, and how many rows it selects.

    ``counted`` is the dimension of the result, and the sizes that its number is a multiple of.
    """
    reader, (d, sizes) = call.reader, counted
    dims = condition.dims[rows.first : rows.last + 1]
    key = condition.map(truth).expr, tuple(dims), rows.lacking
    known = reader.selections.get(key)
    assert isinstance(call.value, Tensor)
    count = call.value.shape[d]
    if known is not None and reader.writes.version(known[0].mask) == known[1]:
        # masked_select has a size of its own in every call, also of one mask
        reader.sizes.equate(count, reader.sizes.product([*sizes, known[2]]))
        return known
    number: Any = count
    for size in sizes:
        number = number // torch_size(size)
    known = rows, reader.writes.version(rows.mask), reader.sizes.of(number)
    reader.selections[key] = known
    if isinstance(known[2], Extent):
        reader.sizes.selected[known[2]] = rows
    return known


@rule(aten.masked_select.default)
def masked_select(call: Call) -> Array:
    """Reads elements at which a mask holds; both are broadcast."""
    x, mask = call.array("self"), call.get("mask")
    condition = call.reader.array(mask)
    if len(condition.dims) > len(x.dims):
        raise NoRule("masked_select with a mask that is broadcast")
    return _where(call, x, 0, mask, len(x.dims) - len(condition.dims))


# ------------------------------------------------------------------------ scatter


@rule(aten.scatter.value, aten.scatter.src)
def scatter(call: Call) -> Array:
    """Reads a number that is written at given positions."""
    x, at = call.arrays("self", "index")
    if not x.dims:
        raise NoRule("scatter to a number")
    d = call.dim()
    value = call.array("src") if call.has("src") else call.array("value")
    # the gradient of a value is the sum over its positions, also over those that are the same
    if value.expr.axes or value.expr.flows:
        if not _are_unique(call.get("index"), d):
            raise NoRule("scatter of a tensor at positions that may be the same")
    else:
        value = call.made(value.expr)
    for i in range(len(x.dims)):
        if i != d and not call.reader.sizes.are_equal(x.size(i), at.size(i)):
            raise NoRule("scatter into a part")
    return _scattered(call, x, d, at, value)


def _scattered(call: Call, x: Array, d: int, at: Array, value: Array) -> Array:
    x = arrays.with_one_axis(arrays.expanded(x, x.shape), d)
    if not x.dims[d]:
        raise NoRule("scatter along one position")
    call.reads_at(at.expr, "gather", d, x.size(d))
    held = fresh_axis(x.dims[d][0].size)
    opened = substitute(x.expr, {x.dims[d][0]: position_along(held)})
    base = call.made(opened, [() if i == d else y for i, y in enumerate(x.dims)])
    at = arrays.with_one_axis(at, d)
    if value.dims:
        value = arrays.with_one_axis(value, d)
        for i in range(len(x.dims)):
            if not call.reader.sizes.are_equal(value.size(i), at.size(i)):
                raise NoRule("scatter of a part")
    (old, place, new), dims = arrays.met(base, at, value)
    hit = compare("eq", place, position_along(held))
    added = choose(hit, new, const(0.0, new.dtype))
    for axis in dims[d]:
        hit = reduced(ANY, axis, hit)
        added = reduced(SUM, axis, added) if value.dims else new
    if new.dtype == "bool":
        hit, added = all_of(hit), new
    if call.dtype == torch.bool:
        expr = choose(hit, new, old) if old not in (truth_of(True), truth_of(False)) else hit
        if old is not truth_of(False) or new is not truth_of(True):
            raise NoRule("scatter into a condition")
        return call.made(expr, [(held,) if i == d else y for i, y in enumerate(dims)])
    result = choose(hit, added, old)
    return call.made(result, [(held,) if i == d else y for i, y in enumerate(dims)])


@rule(aten.one_hot.default)
def one_hot(call: Call) -> Array:
    """Reads 1 at ids, 0 elsewhere."""
    x = call.array("self")
    axes = arrays.leaf_dims(call.shape)[-1]
    at = arrays.position(axes)
    call.reads_at(x.expr, "one_hot", len(x.dims), call.shape[-1])
    whole = call.made(at, (*((),) * len(x.dims), axes))
    ids = call.made(x.expr, (*x.dims, ()))
    return call.pointwise(lambda i, j: compare("eq", i, j), ids, whole)


def _are_unique(ids: object, d: int) -> bool:
    """Whether positions are those of a top-k along the dimension."""
    top = top_of(ids)
    return top is not None and top[1] == d


def top_of(ids: object) -> tuple[fx.Node, int] | None:
    """Returns the top-k that computes positions, and its dimension."""
    while isinstance(ids, fx.Node) and ids.target in (
        aten.detach.default, aten.alias.default, aten.contiguous.default,
    ):  # fmt: skip
        ids = ids.args[0]
    if not isinstance(ids, fx.Node) or ids.target is not operator.getitem or ids.args[1] != 1:
        return None
    top: Any = ids.args[0]
    given = top.args[2] if len(top.args) > 2 else top.kwargs.get("dim", -1)
    return (top, given % ids.meta["val"].dim()) if top.target == aten.topk.default else None


@rule(aten.topk.default)
def topk(call: Call) -> tuple[Array | None, ...]:
    """Reads the largest elements as entries at their ids, which are captured."""
    ids = [u for u in call.node.users if u.target is operator.getitem and u.args[1] == 1]
    x = call.array("self")
    if not ids or not x.dims:
        raise NoRule("the largest elements without their ids")
    if _is_of_rows(x.expr):  # the user's code may compare them with the values that they are of
        raise NoRule("the largest of per-row values")
    assert isinstance(call.value, (tuple, list))
    at = call.reader.captured(ids[0], call.value[1])
    return _gather(call, x, call.dim(-1), at), at


def _is_of_rows(x: Node) -> bool:
    """Whether an expression has products in reductions over one of their rows or columns alone.

    A sum of scores over the heads of one side is still one of scores.
    """
    every = walk([x], lambda y: y.op not in ("capture", CONTRACT) and not _is_over_one(y))
    if any(y.op == CONTRACT for y in every) or not any(map(_is_over_one, every)):
        return False
    return not any(_is_of_both(x, y) for y in walk([x]) if y.op == CONTRACT)


def _is_of_both(x: Node, product: Node) -> bool:
    """Whether an expression has an axis of each operand of a product that the other lacks."""
    a, b = (y.axes for y in product.args)
    return bool(x.axes & (a - b)) and bool(x.axes & (b - a))


def _is_over_one(x: Node) -> bool:
    """Whether it is a reduction over an axis that one operand of products has, as keys."""
    if x.op != "reduce":
        return False
    products = [y for y in walk(x.args) if y.op == CONTRACT and x.value.axis in y.axes]
    having = [sum(x.value.axis in a.axes for a in y.args) for y in products]
    return bool(having) and max(having) == 1


@rule(aten.index_put.default)
def index_put(call: Call) -> Array:
    """Reads a number that is written where a mask holds."""
    x, given = call.array("self"), call.get("indices")
    masks = [i for i in given if i is not None]
    mask = masks[0] if len(masks) == 1 else None
    if mask is None or mask.meta["val"].dtype != torch.bool or call.get("accumulate"):
        raise NoRule("index_put at positions")
    value = call.array("values")
    if value.expr.axes:
        raise NoRule("index_put of a tensor")
    condition, before = call.reader.array(mask), list(given).index(mask)
    after = len(x.dims) - len(condition.dims) - before
    dims = (*((),) * before, *condition.dims, *((),) * after)
    new = call.made(value.expr)
    return call.pointwise(
        lambda c, v, e: choose(truth(c), v, e), call.made(condition.expr, dims), new, x
    )


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Array:
    """Reads values that are written where two positions are equal."""
    x, new = call.arrays("self", "src")
    places = [call.known(n, d) % len(x.dims) for n, d in (("dim1", 0), ("dim2", 1))]
    if call.known("offset", 0) or places[0] == places[1]:
        raise NoRule("a diagonal that is not the first is written")
    x = arrays.with_one_axis(arrays.with_one_axis(x, places[0]), places[1])
    here = compare("eq", *(arrays.position(x.dims[d]) for d in places))
    rest = iter(new.dims[:-1])
    for short in places:  # the values run along the shorter of both
        if call.reader.sizes.are_equal(x.size(short), new.size(-1)):
            dims = [
                new.dims[-1] if d == short else () if d in places else next(rest)
                for d in range(len(x.dims))
            ]
            condition = call.made(here, [y if d in places else () for d, y in enumerate(x.dims)])
            return call.pointwise(choose, condition, call.made(new.expr, dims), x)
    raise NoRule("a diagonal of symbolic sizes is written")


@rule(aten.select_scatter.default, aten.slice_scatter.default)
def part_scatter(call: Call) -> Array:
    """Reads values that replace a position or a range of a dimension."""
    x, new = call.arrays("self", "src")
    d = call.dim(0)
    size = call.get("self").meta["val"].shape[d]
    if call.name == "select_scatter":
        start, count = start_of(call, call.get("index"), size, 1), None
    elif call.known("step", 1) != 1:
        raise NoRule("a slice with a step is written")
    else:
        length = call.get("src").meta["val"].shape[d]
        start = start_of(call, call.get("start"), size, length)
        count = call.reader.array(length).expr
    return part_written(call, (d, start, count), new, x)
