"""Inserts the views that turn a matmul's operand into the tensor that an operator takes.

The analysis removed transposes, casts and repeated heads, so the source tensor is used as it is.
All inserted nodes are views, unless flattened dimensions cannot be a view.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import outer_node
from torch_streamkl.fx_passes.domain.layout import (
    Layout,
    Piece,
)
from torch_streamkl.fx_passes.domain.scores import Factor, Pad
from torch_streamkl.fx_passes.domain.tensor_ref import Step, TensorRef
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, product, provably_equal
from torch_streamkl.fx_passes.lowering.selections import selected
from torch_streamkl.fx_passes.planning.dimensions import (
    Geometry,
    SideGeometry,
    Slot,
    is_split_of,
    leading_first,
)


def shape(node: fx.Node) -> Sequence[Size]:
    """Returns the recorded shape of a node."""
    value = example(node)
    assert isinstance(value, Tensor)
    return value.shape


def canonical(
    build: Builder,
    operand: TensorRef,
    side: int,
    geometry: Geometry,
    tensors: Sequence[fx.Node],
    outer: Mapping[fx.Node, fx.Node],
    *,
    is_keys: bool,
    dtype: torch.dtype,
    factors: Sequence[Factor] = (),
) -> fx.Node:
    """Returns an operand as [batch, heads, rows or keys, head_dim]."""
    own = geometry.side(side)
    x = materialise(build, operand, outer)
    pieces = _split(operand.layout, side, geometry)
    places = _places(geometry, own, pieces, is_keys=is_keys)
    if not any(f.tensor.layout for f in factors):  # which are placed digit by digit
        pieces, places = _merged(pieces, places)
    x = _reshaped(build, x, [p.size for p in pieces], tensors)
    slots = [p.slot for p in pieces]
    present = [p.slot for p in places if p.slot in slots]
    ones = [slot for slot in slots if slot.kind == "one"]
    if len(present) + len(ones) < len(slots):
        raise Unsupported(
            "an operand varies along a dimension that its place in the operator cannot have"
        )
    x = _permuted(build, x, [slots.index(slot) for slot in (*present, *ones)])
    x = _with_factors(build, x, [*present, *ones], factors, side, geometry, outer)
    x = _to_four_dimensions(build, x, places, set(present), tensors)
    return x if _dtype(x) == dtype else build.method("to", x, dtype)


def weight(
    build: Builder,
    operand: TensorRef,
    side: int,
    geometry: Geometry,
    outer: Mapping[fx.Node, fx.Node],
    dtype: torch.dtype,
) -> fx.Node:
    """Returns an operand that holds keys only, as [keys, hidden_size]."""
    x = materialise(build, operand, outer)
    pieces = _split(operand.layout, side, geometry)
    places = [Place(kind, p.slot, p.size) for kind in ("key", "dim") for p in _of(kind, pieces)]
    pieces, places = _merged(pieces, places)
    x = _reshaped(build, x, [p.size for p in pieces], [x])
    slots = [p.slot for p in pieces]
    ones = [p.slot for p in _of("one", pieces)]
    x = _permuted(build, x, [slots.index(slot) for slot in (*ones, *(p.slot for p in places))])
    x = _squeezed(build, x, 0, len(ones))
    num_keys = sum(p.group == "key" for p in places)
    x = _grouped(build, x, [(0, num_keys), (num_keys, len(places))])
    return x if _dtype(x) == dtype else build.method("to", x, dtype)


def materialise(build: Builder, tensor: TensorRef, outer: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Inserts the part of the user's tensor that a reference names, detached if necessary."""
    x = outer_node(tensor.node, outer)
    for step in tensor.steps:
        x = _with_step(build, x, step, outer)
    return x if tensor.grad or not _requires_grad(x) else build.method("detach", x)


@dataclass(frozen=True)
class SubDim:
    """Describes a dimension of an operand after splitting: where it goes, and its size there."""

    slot: Slot
    size: Size


def _split(layout: Layout, side: int, geometry: Geometry) -> list[SubDim]:
    """Splits a tensor's dimensions so that each belongs to one slot."""
    distribution = geometry.side(side).distribution
    keys = _Pieces("key", [p for d in layout for p in d if p.axis == distribution.axis])
    contracted = _Pieces("dim", [p for d in layout for p in d if p.axis < 0])
    if keys.pieces:
        key = distribution.scores
        start = keys.pieces[0].size * keys.pieces[0].stride
        padded = any(isinstance(x, Pad) and x.axis == distribution.axis for x in key.steps)
        have = start if padded else key.size(distribution.axis)
        if not is_split_of(keys.pieces, Piece(distribution.axis, have)):
            raise Unsupported("an operand's keys are repeated")
    result: list[SubDim] = []
    for dim in layout:
        if dim == ():
            result.append(SubDim(Slot("one", len(result)), 1))  # numbered: there may be several
        for piece in dim:
            if piece.axis < 0:
                result.append(SubDim(contracted.slot(piece), piece.size))
            elif piece.axis == distribution.axis:
                result.append(SubDim(keys.slot(piece), piece.size))
            else:
                result += [SubDim(*digit) for digit in geometry.digits_of(piece, side)]
    return result


class _Pieces:
    """Numbers the pieces of the keys or of the contracted axes in their order."""

    def __init__(self, kind: str, pieces: Sequence[Piece]) -> None:
        self.kind = kind
        by_axis = [
            [p for p in pieces if p.axis == axis]
            for axis in sorted({p.axis for p in pieces}, reverse=True)
        ]
        self.pieces = [own[i] for own in by_axis for i in leading_first(own)]

    def slot(self, piece: Piece) -> Slot:
        return Slot(self.kind, self.pieces.index(piece))


def _of(kind: str, pieces: Sequence[SubDim]) -> list[SubDim]:
    found = [p for p in pieces if p.slot.kind == kind]
    return sorted(found, key=lambda p: p.slot.index)


@dataclass(frozen=True)
class Place:
    """Describes a dimension of the operator's tensor before each group of them is flattened."""

    group: str
    slot: Slot
    size: Size


GROUPS = ("batch", "heads", "row", "width")


def _row_places(geometry: Geometry) -> list[Place]:
    groups = (("batch", geometry.batch), ("heads", geometry.heads))
    return [
        Place(group, Slot("digit", i), geometry.digits[i].size)
        for group, digits in groups
        for i in digits
    ]


def _query_place(geometry: Geometry) -> Place:
    if geometry.query is None:
        return Place("row", Slot("no query"), 1)
    return Place("row", Slot("digit", geometry.query), geometry.digits[geometry.query].size)


def _places(
    geometry: Geometry, own: SideGeometry, pieces: Sequence[SubDim], *, is_keys: bool
) -> list[Place]:
    """Lists the dimensions of an operand in the operator's order, missing ones included.

    Keys lack the last ones of the query heads: query head h uses key head h // group.
    """
    places = _row_places(geometry)
    places += [Place("heads", Slot("averaged", i), p.size) for i, p in enumerate(own.averaged)]
    if is_keys:
        slots = {p.slot for p in pieces}
        while places and places[-1].group == "heads" and places[-1].slot not in slots:
            places.pop()
        places += [Place("row", p.slot, p.size) for p in _of("key", pieces)]
    else:
        places.append(_query_place(geometry))
        if geometry.query is not None and places[-1].slot not in {p.slot for p in pieces}:
            raise Unsupported("the queries of one side do not vary along the query dimension")
    return places + [Place("width", p.slot, p.size) for p in _of("dim", pieces)]


def _merged(pieces: Sequence[SubDim], places: Sequence[Place]) -> tuple[list[SubDim], list[Place]]:
    """Neighbours that stay neighbours in one group are not split to begin with."""
    at = {p.slot: i for i, p in enumerate(places)}
    result: list[SubDim] = []
    absorbed: set[int] = set()
    last: int | None = None
    for piece in pieces:
        place = at.get(piece.slot)
        if place is not None and last == place - 1 and _one_group(places, place):
            result[-1] = SubDim(result[-1].slot, result[-1].size * piece.size)
            absorbed.add(place)
        else:
            result.append(piece)
        last = place
    return result, [p for i, p in enumerate(places) if i not in absorbed]


def _one_group(places: Sequence[Place], place: int) -> bool:
    return places[place].group == places[place - 1].group


def _with_step(
    build: Builder, x: fx.Node, step: Step, outer: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    if step.selection is not None:
        return selected(build, x, step.dim, step.num_dims, step.selection, outer)
    if not isinstance(step.start, int) or not isinstance(step.length, int):
        raise Unsupported("scores are sliced at a position of unknown size")
    if step.kind == "select":
        return build.method("select", x, step.dim, step.start)
    return build.method("narrow", x, step.dim, step.start, step.length)


def _dtype(x: fx.Node) -> torch.dtype:
    value = example(x)
    assert isinstance(value, Tensor)
    return value.dtype


def _requires_grad(x: fx.Node) -> bool:
    """Whether an operand keeps its gradient, as dropout's input in eval under no_grad does."""
    value = example(x)
    if isinstance(value, Tensor) and value.requires_grad:
        return True
    return x.target is F.dropout and any(_requires_grad(a) for a in x.all_input_nodes)


def _reshaped(
    build: Builder, x: fx.Node, sizes: Sequence[Size], tensors: Sequence[fx.Node]
) -> fx.Node:
    have = shape(x)
    if len(have) == len(sizes) and all(
        provably_equal(a, b) for a, b in zip(have, sizes, strict=True)
    ):
        return x
    return build.method("reshape", x, tuple(build.size(s, (x, *tensors)) for s in sizes))


def _permuted(build: Builder, x: fx.Node, order: Sequence[int]) -> fx.Node:
    if list(order) == list(range(len(order))):
        return x
    moved = [d for d, o in enumerate(order) if d != o]
    if len(moved) == 2:
        return build.method("transpose", x, *moved)
    return build.method("permute", x, tuple(order))


def _with_factors(
    build: Builder,
    x: fx.Node,
    slots: Sequence[Slot],
    factors: Sequence[Factor],
    side: int,
    geometry: Geometry,
    outer: Mapping[fx.Node, fx.Node],
) -> fx.Node:
    """Multiplies queries by tensors that multiply all scores: scalars, or one value per row."""
    dtype = _dtype(x)
    for factor in factors:
        node = materialise(build, factor.tensor, outer)
        if factor.tensor.layout:
            node = _placed(build, node, factor.tensor.layout, slots, side, geometry)
        x = build.call(torch.div if factor.divides else torch.mul, x, node)
        if _dtype(x) != dtype:
            x = build.method("to", x, dtype)
    return x


def _placed(
    build: Builder,
    node: fx.Node,
    layout: Layout,
    slots: Sequence[Slot],
    side: int,
    geometry: Geometry,
) -> fx.Node:
    """Views a tensor over row digits so that it broadcasts against dimensions ``slots``."""
    pieces = _split(layout, side, geometry)
    by_slot = {p.slot: d for d, p in enumerate(pieces) if p.slot.kind != "one"}
    if set(by_slot) - set(slots):
        raise Unsupported("a tensor that multiplies the scores varies along the keys")
    x = _reshaped(build, node, [p.size for p in pieces], [node])
    ones = [d for d, p in enumerate(pieces) if p.slot.kind == "one"]
    x = _permuted(build, x, [*(by_slot[s] for s in slots if s in by_slot), *ones])
    x = _squeezed(build, x, len(by_slot), len(ones))
    return build.call(
        operator.getitem, x, tuple(slice(None) if s in by_slot else None for s in slots)
    )


def _to_four_dimensions(
    build: Builder,
    x: fx.Node,
    places: Sequence[Place],
    present: set[Slot],
    tensors: Sequence[fx.Node],
) -> fx.Node:
    """Expands missing digits, and flattens groups of dimensions."""
    missing = [i for i, p in enumerate(places) if p.slot not in present]
    for i in missing:
        x = build.method("unsqueeze", x, i)
    if not all(is_one(places[i].size) for i in missing):
        sizes = [build.size(p.size, tensors) if i in missing else -1 for i, p in enumerate(places)]
        x = build.method("expand", x, *sizes, *(-1,) * (len(shape(x)) - len(places)))
    return _in_groups(build, x, places, len(shape(x)))


def _in_groups(build: Builder, x: fx.Node, places: Sequence[Place], rank: int) -> fx.Node:
    """Arranges an operand as [batch, heads, rows or keys, hidden_size].

    A dimension without a place becomes part of the hidden size.
    """
    ends = [sum(GROUPS.index(p.group) <= i for p in places) for i in range(len(GROUPS))]
    ends[-1] = rank
    return _grouped(build, x, list(zip([0, *ends[:-1]], ends, strict=True)))


def _grouped(build: Builder, x: fx.Node, groups: Sequence[tuple[int, int]]) -> fx.Node:
    """Flattens each group of neighbouring dimensions; an empty group has size 1."""
    for start, stop in reversed(groups):
        if stop - start > 1:
            x = build.method("flatten", x, start, stop - 1)
        elif stop == start:
            x = build.method("unsqueeze", x, start)
    return x


def rows_as_user(
    build: Builder,
    value: fx.Node,
    geometry: Geometry,
    rank: int,
    key_dim: int,
    tensors: Sequence[fx.Node],
    *,
    trailing: bool = False,
) -> fx.Node:
    """Returns row values [batch, heads, queries] in the user's dimensions; the key dimension has
    size 1.

    ``trailing``: the values have one more dimension, which replaces the (last) key dimension.
    """
    order = [*geometry.batch, *geometry.heads]
    if geometry.query is not None:
        order.append(geometry.query)
    runs = _runs(order, geometry)
    tail = list(shape(value)[-1:]) if trailing else []
    sizes = [product(geometry.digits[i].size for i in run) for run in runs]
    x = _reshaped(build, value, [*sizes, *tail], tensors)
    sorted_runs = sorted(range(len(runs)), key=lambda i: runs[i])
    x = _permuted(build, x, [*sorted_runs, *([len(runs)] if trailing else [])])
    dims = [d for d in range(rank) if d != key_dim]
    sizes = [product(g.size for g in geometry.digits if g.dim == d) for d in dims]
    x = _reshaped(build, x, [*sizes, *tail], tensors)
    return x if trailing else build.method("unsqueeze", x, key_dim)


def _runs(order: Sequence[int], geometry: Geometry) -> list[list[int]]:
    """Digits that follow one another in the operator and in one dimension of the user's tensor."""
    runs: list[list[int]] = []
    for i in order:
        follows = bool(runs) and runs[-1][-1] == i - 1
        if follows and geometry.digits[i - 1].dim == geometry.digits[i].dim:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def placed(
    build: Builder,
    node: fx.Node,
    layout: Layout,
    side: int,
    geometry: Geometry,
    tensors: Sequence[fx.Node],
) -> fx.Node:
    """Returns a mask or bias as a tensor that broadcasts to [batch, heads, queries, keys]."""
    pieces = _split(layout, side, geometry)
    keys = [Place("width", p.slot, p.size) for p in _of("key", pieces)]
    places = [*_row_places(geometry), _query_place(geometry)]
    places += keys or [Place("width", Slot("key"), 1)]
    slots = {p.slot for p in pieces if p.slot.kind != "one"}
    if slots - {p.slot for p in places}:
        raise Unsupported(
            "a mask varies along a dimension that its place in the operator cannot have"
        )
    for group in GROUPS:
        varies = {p.slot in slots for p in places if p.group == group and not is_one(p.size)}
        if len(varies) > 1:
            raise Unsupported(
                "a mask varies along some of the dimensions that are flattened into one"
            )
    pieces, places = _merged(pieces, places)
    x = _reshaped(build, node, [p.size for p in pieces], tensors)
    found = {p.slot: d for d, p in enumerate(pieces)}
    ones = [d for d, p in enumerate(pieces) if p.slot.kind == "one"]
    order = [found[p.slot] for p in places if p.slot in found]
    x = _squeezed(build, _permuted(build, x, [*order, *ones]), len(order), len(ones))
    index = tuple(slice(None) if p.slot in found else None for p in places)
    return _in_groups(build, build.call(operator.getitem, x, index), places, len(index))


def _squeezed(build: Builder, x: fx.Node, start: int, count: int) -> fx.Node:
    for _ in range(count):
        x = build.method("squeeze", x, start)
    return x
