"""Reads views and copies, which move axes or read positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.index_values import first_index, is_certain
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, number_of, rule
from torch_streamkl.program.canonical import all_of, choose, compare, linear, nonnegative
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.functions import function
from torch_streamkl.program.graph import INT, Node, Size, const, index, size_of
from torch_streamkl.program.reductions import substitute

aten = torch.ops.aten

SAME = {
    aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.detach_.default,
    aten.resolve_conj.default, aten.resolve_neg.default, aten.requires_grad_.default,
}  # fmt: skip
RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.view_as.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.unsqueeze.default, aten.reshape_as.default, aten.ravel.default,
}  # fmt: skip
EXPANSIONS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}


@rule(*(SAME - {aten.detach_.default}))
def same(call: Call) -> Array:
    """Reads a copy; what it does to gradients the node's record says."""
    return call.array("self")


@rule(*RESHAPES)
def view(call: Call) -> Array:
    """Reads a view of another shape."""
    return arrays.reshaped(call.array("self"), call.shape)


@rule(*EXPANSIONS)
def expand(call: Call) -> Array:
    """Reads a tensor that is broadcast."""
    return arrays.expanded(call.array("self"), call.shape)


@rule(aten.broadcast_tensors.default)
def broadcast(call: Call) -> tuple[Array, ...]:
    """Reads tensors that are broadcast together."""
    assert isinstance(call.value, (tuple, list))
    shapes = [call.shape_of(v) for v in call.value]
    every = [call.reader.array(x) for x in call.get("tensors")]
    return tuple(arrays.expanded(x, s) for x, s in zip(every, shapes, strict=True))


def _swapped(call: Call, rank: int) -> list[int]:
    order = list(range(rank))
    names = ("axis0", "axis1") if call.has("axis0") else ("dim0", "dim1")
    i, j = (call.get(name) % max(rank, 1) for name in names)
    if rank:
        order[i], order[j] = order[j], order[i]
    return order


def _matrix(call: Call, rank: int) -> list[int]:
    return [*range(rank - 2), *list(range(rank))[-2:][::-1]]


def _reversed(call: Call, rank: int) -> list[int]:
    return list(range(rank))[::-1]


def _permuted(call: Call, rank: int) -> list[int]:
    return [d % max(rank, 1) for d in call.get("dims")]


ORDERS: dict[object, Callable[[Call, int], list[int]]] = {
    aten.transpose.int: _swapped,
    aten.swapaxes.default: _swapped,
    aten.swapdims.default: _swapped,
    aten.permute.default: _permuted,
    aten.mT.default: _matrix,
    aten.mH.default: _matrix,
    aten.adjoint.default: _matrix,
    aten.t.default: _reversed,
    aten.numpy_T.default: _reversed,
}


@rule(*ORDERS)
def permute(call: Call) -> Array:
    """Reads dimensions in another order."""
    x = call.array("self")
    return call.made(x.expr, [x.dims[d] for d in order_of(call, len(x.dims))])


def order_of(call: Call, rank: int) -> list[int]:
    """Returns which dimension of the source each dimension of the result is."""
    order = ORDERS[call.node.target]
    return order(call, rank)


# ------------------------------------------------------------------------ parts


def start_of(call: Call, given: Any, size: Any, length: Any) -> Node:
    """Returns where a slice or an index begins, counted from the front."""
    given = given.meta.get("val") if isinstance(given, torch.fx.Node) else given
    if not isinstance(given, (int, torch.SymInt, type(None))):
        raise NoRule("a position that is a value of the program")
    start = first_index(given, size, length)
    if start is None:
        raise NoRule("a position of unknown sign")
    if isinstance(start, int) and isinstance(size, int):
        start = min(max(start, 0), size)
    return call.reader.array(start).expr


def part_of(call: Call) -> tuple[int, Node, Node | None]:
    """Returns the dimension, start and length of a select, slice or narrow; a select has none."""
    source = call.get("self").meta["val"]
    d = call.dim(0)
    size = source.shape[d]
    if call.node.target == aten.select.int:
        return d, start_of(call, call.get("index"), size, 1), None
    if call.known("step", 1) != 1:
        raise NoRule("a slice with a step is written")
    assert isinstance(call.value, Tensor)
    length = call.value.shape[d]
    return d, start_of(call, call.get("start"), size, length), _expr(call, length)


def _expr(call: Call, size: Any) -> Node:
    return call.reader.array(size).expr


def part_written(call: Call, part: tuple[int, Node, Node | None], new: Array, old: Array) -> Array:
    """Returns a tensor a part of which is replaced: its dimension, start and length."""
    d, start, count = part
    base = arrays.with_one_axis(old, d)
    if not base.dims[d]:
        return new if len(new.dims) == len(old.dims) else call.made(new.expr, old.dims)
    j = index(base.dims[d][0])
    if count is None:
        here = compare("eq", j, start)
        dims = (*new.dims[:d], (), *new.dims[d:])
        inside = call.made(new.expr, dims)
    else:
        at = linear(0.0, [(1.0, j), (-1.0, start)])
        last = linear(-1.0, [(1.0, count), (-1.0, at)])
        here = all_of(nonnegative(at), nonnegative(last))
        # an axis of its own: another dimension of what is written may have that of the base
        axis = arrays.own_axis(new, d, base.size(d))
        own = linear(0.0, [(1.0, index(axis)), (-1.0, start)])
        inside = arrays.indexed(new, d, own, [(axis,)])
    position = [()] * len(base.dims)
    condition = call.made(here, [base.dims[d] if i == d else x for i, x in enumerate(position)])
    return call.pointwise(choose, condition, inside, base)


@rule(aten.select.int)
def select(call: Call) -> Array:
    """Reads one position of a dimension."""
    x = call.array("self")
    d, start, _ = part_of(call)
    return arrays.indexed(x, d, start, [])


@rule(aten.slice.Tensor)
def slice_(call: Call) -> Array:
    """Reads a range of positions."""
    x = call.array("self")
    d = call.dim(0)
    size, length = call.get("self").meta["val"].shape[d], call.value.shape[d]  # type: ignore[attr-defined]
    step = call.known("step", 1)
    start = start_of(call, call.get("start"), size, length if step == 1 else None)
    return arrays.sliced(x, d, start, call.size(length), step)


@rule(aten.narrow.default)
def narrow(call: Call) -> Array:
    """Reads ``narrow``."""
    x = call.array("self")
    d, start, _ = part_of(call)
    return arrays.sliced(x, d, start, call.shape[d])


@rule(aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default,
      aten.tensor_split.sections, aten.tensor_split.indices, aten.unsafe_chunk.default,
      aten.unsafe_split.Tensor)  # fmt: skip
def parts(call: Call) -> tuple[Array, ...]:
    """Reads parts that follow each other."""
    x = call.array("self")
    d = call.dim(0)
    found, start = [], const(0, INT)
    assert isinstance(call.value, (tuple, list))
    for value in call.value:
        length = value.shape[d]
        found.append(arrays.sliced(x, d, start, call.size(length)))
        start = linear(0.0, [(1.0, start), (1.0, _expr(call, length))])
    return tuple(found)


@rule(aten.unbind.int)
def unbind(call: Call) -> tuple[Array, ...]:
    """Reads every position of a dimension."""
    x = call.array("self")
    d = call.dim(0)
    assert isinstance(call.value, (tuple, list))
    return tuple(arrays.indexed(x, d, const(i, INT), []) for i in range(len(call.value)))


# ------------------------------------------------------------------------ joined and repeated


def _joined(call: Call, every: Sequence[Array], d: int) -> Array:
    kind = max((x.expr.dtype for x in every), key=["bool", "int", "float"].index)
    if kind != "bool":
        every = [x.map(lambda e: number_of(e, kind)) for x in every]
    return arrays.concatenated(every, d, call.shape[d])


@rule(aten.cat.default, aten.concat.default)
def concatenate(call: Call) -> Array:
    """Reads tensors after each other."""
    given = [x for x in call.get("tensors") if x.meta["val"].dim() > 1 or x.meta["val"].numel()]
    every = [call.reader.array(x) for x in given]
    d = call.known("dim", 0) % len(every[0].dims)
    if len(every) == 1:
        return every[0]
    return _of_even_steps(call, given, every, d) or _joined(call, every, d)


@rule(aten.stack.default)
def stack(call: Call) -> Array:
    """Reads tensors along a new dimension."""
    every = [call.reader.array(x) for x in call.get("tensors")]
    d = call.known("dim", 0) % (len(every[0].dims) + 1)
    new = [call.made(x.expr, (*x.dims[:d], (), *x.dims[d:])) for x in every]
    if len(new) == 1:
        return new[0]
    return _of_even_steps(call, call.get("tensors"), new, d) or _joined(call, new, d)


def _of_even_steps(
    call: Call, parts: Sequence[torch.fx.Node], every: Sequence[Array], d: int
) -> Array | None:
    """Returns single positions of one tensor as a slice, if they are evenly spaced.

    Two always are: of a yes and a no token, ``stack([z[:, 5], z[:, 9]], -1)`` is ``z[:, 5:10:4]``.
    """
    found = [_position_of(call, part, d) for part in parts]
    known = [x for x in found if x is not None]
    if len(known) < len(found):
        return None
    (source, first), (_, second), *_ = known
    step = second - first
    for i, own in enumerate(every):  # as each part was read: one may be detached
        at = const(first + i * step, INT)
        if not step or own != arrays.indexed(source, d, at, [()]):
            return None
    return arrays.sliced(source, d, first, len(every), step)


def _position_of(call: Call, part: torch.fx.Node, d: int) -> tuple[Array, int] | None:
    """Returns the tensor that a single position of a dimension is read from, and the position."""
    if part.target == aten.unsqueeze.default and part.args[1] in (d, d - part.meta["val"].dim()):
        part = part.args[0]  # type: ignore[assignment]
    if part.target not in (aten.select.int, aten.slice.Tensor):
        return None
    own = Call(call.reader, part)
    try:
        at, start, _ = part_of(own)
    except NoRule:  # joined as any other tensor
        return None
    is_known = start.op == "const" and at == d
    return (own.array("self"), int(start.value)) if is_known else None


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Array:
    """Reads entries that are repeated one by one."""
    x, repeats = call.array("self"), call.size(call.get("repeats"))
    if not call.has("dim"):  # of all elements in a row
        x = call.made(x.expr, [tuple(a for own in x.dims for a in own)])
    d = call.dim() if call.has("dim") else 0
    axes = [] if repeats == 1 else [fresh_axis(repeats)]
    dims = [(*own, *axes) if i == d else own for i, own in enumerate(x.dims)]
    return call.made(x.expr, dims)


@rule(aten.repeat.default, aten.tile.default)
def repeat(call: Call) -> Array:
    """Reads whole tensors that are repeated."""
    x = call.array("self")
    name = "repeats" if call.node.target == aten.repeat.default else "dims"
    given = [call.size(n) for n in call.get(name)]
    counts = [*[1] * (len(x.dims) - len(given)), *given]
    dims: list[arrays.Dim] = [()] * (len(counts) - len(x.dims)) + list(x.dims)
    for d, n in enumerate(counts):
        if n != 1:
            dims[d] = (fresh_axis(n), *dims[d])
    return call.made(x.expr, dims)


@rule(aten.pad.default, aten.constant_pad_nd.default)
def pad(call: Call) -> Array:
    """Reads padding with a number, which may also crop."""
    if call.get("mode", "constant") != "constant":
        raise NoRule("padding that is not with a number")
    x, widths = call.array("self"), call.get("pad")
    value = call.get("value")
    fill = call.reader.array(0.0 if value is None else value).expr
    fill = (
        const(fill.value, x.expr.dtype) if fill.op == "const" and x.expr.dtype != "bool" else fill
    )
    assert isinstance(call.value, Tensor)
    for k in range(len(widths) // 2):
        d = len(x.dims) - 1 - k
        before, after = widths[2 * k : 2 * k + 2]
        size: Size = call.size(call.value.shape[d])
        if all(is_certain(_value(w) <= 0) for w in (before, after)):
            start = linear(0.0, [(-1.0, _expr(call, _value(before)))])
            x = arrays.sliced(x, d, start, size)
        else:
            x = _padded(x, d, _expr(call, _value(before)), size, fill)
    return x


def _value(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, torch.fx.Node) else x


def _padded(x: Array, d: int, before: Node, size: Size, fill: Node) -> Array:
    if x.expr.dtype == "bool":
        x = x.map(lambda e: number_of(e, INT))
        fill = number_of(fill, INT)
    if not x.dims[d]:  # one entry
        x = arrays.expanded(x, x.shape)
    return arrays.padded(x, d, before, size, fill)


@rule(aten.roll.default)
def roll(call: Call) -> Array:
    """Reads positions that move around."""
    x, dims = call.array("self"), call.known("dims") or []
    if not dims:
        raise NoRule("roll of all elements in a row")
    for d, shift in zip(dims, call.known("shifts"), strict=True):
        d = d % len(x.dims)
        x = arrays.with_one_axis(x, d)
        if x.dims[d]:
            n = x.size(d)
            moved = -shift % n if isinstance(n, int) else -shift
            at = linear(float(moved), [(1.0, arrays.position(x.dims[d]))])
            x = arrays.indexed(x, d, function("remainder", at, size_of(n)), [x.dims[d]])
    return x


@rule(aten.movedim.intlist, aten.movedim.int, aten.moveaxis.intlist, aten.moveaxis.int)
def movedim(call: Call) -> Array:
    """Reads dimensions that are moved."""
    x = call.array("self")
    given = (call.get(name) for name in ("source", "destination"))
    source, to = ([n] if isinstance(n, int) else list(n) for n in given)
    rank = len(x.dims)
    place = {d % rank: s % rank for s, d in zip(source, to, strict=True)}
    rest = iter(d for d in range(rank) if d not in place.values())
    return call.made(x.expr, [x.dims[place[d] if d in place else next(rest)] for d in range(rank)])


@rule(aten.diagonal.default)
def diagonal(call: Call) -> Array:
    """Reads the elements at which two positions are equal, as the last dimension."""
    x, offset = call.array("self"), call.known("offset", 0)
    first, second = (call.known(n, d) % len(x.dims) for n, d in (("dim1", 0), ("dim2", 1)))
    if first == second or offset < 0:
        raise NoRule("a diagonal below the first")
    x = arrays.with_one_axis(arrays.with_one_axis(x, first), second)
    count = call.shape[-1]
    own: arrays.Dim = () if count == 1 else (fresh_axis(count),)
    at = arrays.position(own)
    moved = linear(float(offset), [(1.0, at)])
    theta = {a: e for d, e in ((first, at), (second, moved)) for a in x.dims[d]}
    kept = [y for d, y in enumerate(x.dims) if d not in (first, second)]
    return call.made(substitute(x.expr, theta), [*kept, own])


@rule(aten.flip.default)
def flip(call: Call) -> Array:
    """Reads dimensions backwards."""
    x = call.array("self")
    for d in (d % len(x.dims) for d in call.get("dims")):
        x = arrays.with_one_axis(x, d)
        if x.dims[d]:
            axis = x.dims[d][0]
            at = linear(-1.0, [(1.0, size_of(x.size(d))), (-1.0, arrays.position((axis,)))])
            x = arrays.indexed(x, d, at, [(axis,)])
    return x
