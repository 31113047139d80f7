"""From a matmul operand in the user's graph to the tensor that an operator takes.

Transposes, casts and repeated heads were peeled off by the analysis, so the source tensor is used
as it is; what is inserted here are views, except where flattened dimensions cannot be a view.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.domain.layout import Layout, Piece
from torch_streamkl.fx_passes.domain.tensor_ref import Step, TensorRef
from torch_streamkl.fx_passes.domain.values import Factor
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, product, quotient, same
from torch_streamkl.fx_passes.planning.dimensions import Geometry, SideGeometry


@dataclass(frozen=True)
class Slot:
    """A position in the operator's tensor: ("digit" or "averaged" or "key" or "dim", index)."""

    kind: str
    index: int = 0


def outer_node(node: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The user's node that holds an ATen node's value."""
    found = outer.get(node)
    if found is None:
        raise Blocked(f"an intermediate value ({node.name}) of a composite operation is needed")
    return found


def shape(node: fx.Node) -> Sequence[Size]:
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
    """An operand as [batch, heads, rows or keys, head_dim]."""
    own = (geometry.teacher, geometry.student)[side]
    x = materialise(build, operand, outer)
    pieces = _split(operand.layout, side, geometry, own)
    if not is_keys and any(
        p.slot.kind == "digit" and not same(p.size, geometry.digits[p.slot.index].size)
        for p in pieces
    ):
        raise Blocked("several heads share their query rows")
    x = _reshaped(build, x, [p.size for p in pieces], tensors)
    order = _order(geometry, is_keys=is_keys, pieces=pieces)
    x = _permuted(build, x, [pieces.index(p) for p in order if p is not None])
    x = _with_factors(
        build, x, [p.slot for p in order if p is not None], factors, side, geometry, outer
    )
    x = _to_four_dimensions(build, x, order, geometry, own, tensors, is_keys=is_keys)
    return x if _dtype(x) == dtype else build.method("to", x, dtype)


def weight(
    build: Builder,
    operand: TensorRef,
    side: int,
    geometry: Geometry,
    outer: Mapping[fx.Node, fx.Node],
    dtype: torch.dtype,
) -> fx.Node:
    """An operand that holds keys only, as [keys, width]."""
    own = (geometry.teacher, geometry.student)[side]
    x = materialise(build, operand, outer)
    pieces = _split(operand.layout, side, geometry, own)
    x = _reshaped(build, x, [p.size for p in pieces], [x])
    kinds = [p.slot.kind for p in pieces]
    ones = [d for d, kind in enumerate(kinds) if kind == "one"]
    x = _permuted(build, x, [*ones, kinds.index("key"), kinds.index("dim")])
    x = _squeezed(build, x, 0, len(ones))
    return x if _dtype(x) == dtype else build.method("to", x, dtype)


def materialise(build: Builder, tensor: TensorRef, outer: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The part of the user's tensor that a reference stands for, detached where it has to be."""
    x = outer_node(tensor.node, outer)
    for step in tensor.steps:
        x = _with_step(build, x, step, outer)
    return x if tensor.grad or not _requires_grad(x) else build.method("detach", x)


@dataclass(frozen=True)
class SubDim:
    """A dimension of an operand after splitting: where it goes, and its size there."""

    slot: Slot
    size: Size


def _split(layout: Layout, side: int, geometry: Geometry, own: SideGeometry) -> list[SubDim]:
    """The operand's dimensions split so that each belongs to one slot."""
    result: list[SubDim] = []
    contracted = sorted({p.axis for d in layout for p in d if p.axis < 0}, reverse=True)
    for dim in layout:
        if dim == ():
            result.append(SubDim(Slot("one", len(result)), 1))  # numbered: there may be several
        for piece in dim:
            if piece.axis < 0:
                result.append(SubDim(Slot("dim", contracted.index(piece.axis)), piece.size))
            elif piece.axis == own.distribution.axis:
                result.append(SubDim(Slot("key"), piece.size))
            else:
                result += _row_digits(piece, side, geometry, own)
    return result


def _row_digits(piece: Piece, side: int, geometry: Geometry, own: SideGeometry) -> list[SubDim]:
    """A piece of a row axis as the digits it covers, the leading one first."""
    candidates = [(Slot("digit", i), d.pieces[side]) for i, d in enumerate(geometry.digits)]
    candidates += [(Slot("averaged", i), p) for i, p in enumerate(own.distribution.averaged)]
    covered = [
        (slot, p)
        for slot, p in candidates
        if p is not None and p.axis == piece.axis and _inside(p, piece)
    ]
    if covered:
        covered.sort(key=lambda c: _rank_of_stride(c[1], [p for _, p in covered if p is not None]))
        if not same(product(p.size for _, p in covered if p is not None), piece.size):
            raise Blocked("an operand has rows that the divergence does not use")
        return [SubDim(slot, p.size) for slot, p in covered if p is not None]
    # fewer heads than the digit has: the leading part of it, shared by a group
    for slot, p in candidates:
        if (
            p is not None
            and p.axis == piece.axis
            and same(p.size * p.stride, piece.size * piece.stride)
        ):
            return [SubDim(slot, piece.size)]
    raise Blocked("an operand is repeated along a flattened dimension")


def _inside(p: Piece, held: Piece) -> bool:
    """Whether a digit lies within a held piece of the same axis."""
    return quotient(p.stride, held.stride) is not None and (
        quotient(held.size * held.stride, p.size * p.stride) is not None
    )


def _rank_of_stride(p: Piece | None, others: Sequence[Piece]) -> int:
    """Number of digits with a larger stride: the leading digit has 0."""
    assert p is not None
    return sum(quotient(o.stride, p.size * p.stride) is not None for o in others if o is not p)


def _order(geometry: Geometry, *, is_keys: bool, pieces: Sequence[SubDim]) -> list[SubDim | None]:
    """Sub-dimensions in the operator's order; None for a digit that the operand lacks."""
    by_slot = {p.slot: p for p in pieces if p.slot.kind != "one"}
    wanted = [Slot("digit", i) for i in (*geometry.batch, *geometry.heads)]
    wanted += sorted((s for s in by_slot if s.kind == "averaged"), key=lambda s: s.index)
    wanted.append(
        Slot("key")
        if is_keys
        else Slot("digit", geometry.query if geometry.query is not None else -1)
    )
    wanted += sorted((s for s in by_slot if s.kind == "dim"), key=lambda s: s.index)
    if set(by_slot) - set(wanted):
        raise Blocked(
            "an operand varies along a dimension that its place in the operator cannot have"
        )
    ones = [p for p in pieces if p.slot.kind == "one"]
    return [by_slot.get(slot) for slot in wanted] + list(ones)


def _with_step(
    build: Builder, x: fx.Node, step: Step, outer: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    if step.kind == "rows":
        assert step.mask is not None
        positions = build.positions(outer_node(step.mask, outer), step.length)
        if step.mask_rank > 1:
            x = build.method("flatten", x, step.dim, step.dim + step.mask_rank - 1)
        return build.method("index_select", x, step.dim, positions)
    if not isinstance(step.start, int) or not isinstance(step.length, int):
        raise Blocked("scores are sliced at a position of unknown size")
    if step.kind == "select":
        return build.method("select", x, step.dim, step.start)
    return build.method("narrow", x, step.dim, step.start, step.length)


def _dtype(x: fx.Node) -> torch.dtype:
    value = example(x)
    assert isinstance(value, Tensor)
    return value.dtype


def _requires_grad(x: fx.Node) -> bool:
    value = example(x)
    return isinstance(value, Tensor) and value.requires_grad


def _reshaped(
    build: Builder, x: fx.Node, sizes: Sequence[Size], tensors: Sequence[fx.Node]
) -> fx.Node:
    have = shape(x)
    if len(have) == len(sizes) and all(same(a, b) for a, b in zip(have, sizes, strict=True)):
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
    """The queries times tensors that multiply all scores: scalars, or one value per row."""
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
    """A tensor over row digits, viewed so that it broadcasts against dimensions ``slots``."""
    own = (geometry.teacher, geometry.student)[side]
    pieces = _split(layout, side, geometry, own)
    by_slot = {p.slot: d for d, p in enumerate(pieces) if p.slot.kind != "one"}
    if set(by_slot) - set(slots):
        raise Blocked("a tensor that multiplies the scores varies along the keys")
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
    order: Sequence[SubDim | None],
    geometry: Geometry,
    own: SideGeometry,
    tensors: Sequence[fx.Node],
    *,
    is_keys: bool,
) -> fx.Node:
    """Missing digits expanded, groups of dimensions flattened."""
    num_batch, num_heads = len(geometry.batch), len(geometry.heads)
    num_averaged = sum(p is not None and p.slot.kind == "averaged" for p in order)
    num_digits = num_batch + num_heads
    digits = [geometry.digits[i] for i in (*geometry.batch, *geometry.heads)]
    missing = [d for d in range(num_digits) if order[d] is None]
    if not is_keys and order[num_digits + num_averaged] is None and geometry.query is not None:
        raise Blocked("the queries of one side do not vary along the query dimension")
    for d in missing:
        x = build.method("unsqueeze", x, d)
    if not is_keys and geometry.query is None:
        x = build.method("unsqueeze", x, num_digits + num_averaged)
    group_dims = [d for d in missing if is_keys and d >= num_batch]
    expanded = [d for d in missing if d not in group_dims]
    if group_dims and group_dims != list(range(num_digits - len(group_dims), num_digits)):
        expanded, group_dims = (
            missing,
            [],
        )  # heads share keys in an order the operator does not have
    if expanded:
        sizes = [
            build.size(digits[d].size, tensors) if d in expanded else -1 for d in range(num_digits)
        ]
        rest = (-1,) * (len(shape(x)) - num_digits)
        x = build.method("expand", x, *sizes, *rest)
    have = shape(x)
    row = num_digits + num_averaged
    groups = [(0, num_batch), (num_batch, row), (row, row + 1), (row + 1, len(have))]
    return _grouped(build, x, groups)


def _grouped(build: Builder, x: fx.Node, groups: Sequence[tuple[int, int]]) -> fx.Node:
    """Each group of neighbouring dimensions as one dimension; an empty group as one of size 1."""
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
    """Row values [batch, heads, queries] in the user's dimensions, the key dimension of size 1.

    ``trailing``: the values have one more dimension, which takes the place of the (last) key
    dimension.
    """
    order = [*geometry.batch, *geometry.heads]
    if geometry.query is not None:
        order.append(geometry.query)
    tail = list(shape(value)[-1:]) if trailing else []
    x = _reshaped(build, value, [*(geometry.digits[i].size for i in order), *tail], tensors)
    x = _permuted(
        build,
        x,
        [*(order.index(i) for i in range(len(order))), *([len(order)] if trailing else [])],
    )
    dims = [d for d in range(rank) if d != key_dim]
    sizes = [product(g.size for g in geometry.digits if g.dim == d) for d in dims]
    x = _reshaped(build, x, [*sizes, *tail], tensors)
    return x if trailing else build.method("unsqueeze", x, key_dim)


def placed(
    build: Builder,
    node: fx.Node,
    layout: Layout,
    side: int,
    geometry: Geometry,
    tensors: Sequence[fx.Node],
) -> fx.Node:
    """A mask or bias as a tensor that broadcasts to [batch, heads, queries, keys]."""
    own = (geometry.teacher, geometry.student)[side]
    pieces = _split(layout, side, geometry, own)
    x = _reshaped(build, node, [p.size for p in pieces], tensors)
    by_slot = {p.slot: d for d, p in enumerate(pieces) if p.slot.kind != "one"}
    slots = [Slot("digit", i) for i in (*geometry.batch, *geometry.heads)]
    slots.append(Slot("digit", geometry.query if geometry.query is not None else -1))
    slots.append(Slot("key"))
    if set(by_slot) - set(slots):
        raise Blocked("a mask varies along a dimension that its place in the operator cannot have")
    ones = [d for d, p in enumerate(pieces) if p.slot.kind == "one"]
    x = _permuted(build, x, [*(by_slot[s] for s in slots if s in by_slot), *ones])
    x = _squeezed(build, x, len(by_slot), len(ones))
    x = build.call(
        operator.getitem, x, tuple(slice(None) if s in by_slot else None for s in slots)
    )
    num_batch, num_digits = len(geometry.batch), len(geometry.batch) + len(geometry.heads)
    for start, stop in ((num_batch, num_digits), (0, num_batch)):
        sizes = [is_one(s) for s in shape(x)[start:stop]]
        if stop - start > 1 and any(sizes) and not all(sizes):
            raise Blocked("a mask varies along some of the dimensions that are flattened into one")
    groups = [
        (0, num_batch),
        (num_batch, num_digits),
        (num_digits, num_digits + 1),
        (num_digits + 1, len(slots)),
    ]
    return _grouped(build, x, groups)


def _squeezed(build: Builder, x: fx.Node, start: int, count: int) -> fx.Node:
    for _ in range(count):
        x = build.method("squeeze", x, start)
    return x
