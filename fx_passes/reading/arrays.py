"""Represents tensors as an expression, and for each dimension the axes that it runs through.

Every view, slice, gather and selection substitutes index expressions for axes
(`reductions.substitute`). Axes are variables: if two tensors meet, those of one are renamed. There
are no strides. A dimension is an ordered list of whole axes, the leading one first, and an axis
that is split elsewhere becomes two axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch_streamkl.fx_passes.reading.positions import is_view
from torch_streamkl.fx_passes.reading.sizes import Sizes
from torch_streamkl.program.canonical import all_of, choose, linear, nonnegative, product
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.functions import function
from torch_streamkl.program.graph import INT, Axis, Node, Size, const, index, size_of
from torch_streamkl.program.masks import is_within
from torch_streamkl.program.reductions import remade, substitute
from torch_streamkl.program.walks import rebuilt_root

Dim = tuple[Axis, ...]


class NoView(ValueError):
    """Raised for a view that no substitution of whole axes is."""


NUMBERS = Sizes()  # of tensors whose sizes are all known


@dataclass(frozen=True)
class Array:
    """Represents a tensor; a dimension without axes has size 1."""

    expr: Node
    dims: tuple[Dim, ...] = ()
    sizes: Sizes = NUMBERS

    def size(self, d: int) -> Size:
        return self.sizes.product(a.size for a in self.dims[d])  # type: ignore[misc]

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(self.size(d) for d in range(len(self.dims)))

    def map(self, function: Callable[[Node], Node]) -> Array:
        return replace(self, expr=function(self.expr))


def _placed(place: int, size: Size | None) -> Axis:
    """The axis that a dimension of this size has by default, counted from the last one."""
    return Axis(("dim", place), size)


def leaf_dims(shape: Sequence[Size]) -> tuple[Dim, ...]:
    """Returns the axes of a captured tensor: those of tensors of one shape are the same.

    So tensors that meet have the same axes already, and equal expressions are one node.
    """
    rank = len(shape)
    return tuple(() if n == 1 else (_placed(rank - d, n),) for d, n in enumerate(shape))


def _unless_taken(axis: Axis, dims: Iterable[Dim]) -> Axis:
    return fresh_axis(axis.size) if any(axis in own for own in dims) else axis


def own_axis(x: Array, d: int, size: Size) -> Axis:
    """Returns an axis of another size for a dimension of a tensor."""
    others = (own for i, own in enumerate(x.dims) if i != d)
    return _unless_taken(_placed(len(x.dims) - d, size), others)


def position(dim: Dim) -> Node:
    """Returns the index of a dimension as an expression of its axes."""
    terms, stride = list[tuple[float, Node]](), const(1, INT)
    for a in reversed(dim):
        assert a.size is not None
        terms.append((1.0, product(stride, index(a))))
        stride = product(stride, size_of(a.size))
    return linear(0.0, terms)


def renamed(x: Array, names: dict[Axis, Axis]) -> Array:
    """Returns a tensor with other axes in place of some."""
    expr = substitute(x.expr, {a: index(b) for a, b in names.items()})
    return replace(x, expr=expr, dims=tuple(tuple(names.get(a, a) for a in d) for d in x.dims))


def read_at(x: Array, theta: dict[Axis, Node]) -> Node:
    """Returns what a tensor has at positions.

    Some may be outside of a captured tensor, which pads and concatenations do not choose. A view
    pads it there. Positions of any other kind are moved inside.
    """
    is_plain = all(is_view(at) and is_within(at, a.size) for a, at in theta.items())
    return substitute(x.expr if is_plain else _kept_inside(x, theta), theta)


def _kept_inside(x: Array, theta: dict[Axis, Node]) -> Node:
    """An expression before positions take the place of axes, with bounds where views have none.

    Positions that the user's tensors hold have no bounds of ours: eager code raises there.
    """
    leaves = any(is_view(at) and not is_within(at, a.size) for a, at in theta.items())

    def is_bounded(at: Node) -> bool:
        return at.op in ("capture", "remainder") or is_view(substitute(at, theta))

    def change(y: Node, args: tuple[Node, ...]) -> Node:
        at = list(args)
        for d, p in enumerate(args if y.op == "capture" else ()):
            if not p.axes & theta.keys() or is_bounded(p):
                continue
            n = x.sizes.extent(y.value, d)
            if n is None and p.op != "index":
                raise NoView("rows that a mask selects are padded, and read in another order")
            if n is not None and (not is_within(p, n) or leaves):
                last = linear(-1.0, [(1.0, size_of(n))])
                at[d] = function("clamp_max", function("clamp_min", p, const(0, INT)), last)
        return remade(y, tuple(at))

    return rebuilt_root(x.expr, change)


def _split(x: Array, axis: Axis, outer: Size, inner: Size) -> Array:
    """An axis as two: index = outer * size of inner + inner."""
    named = (Axis(("outer", axis.name), outer), Axis(("inner", axis.name), inner))
    parts = tuple(_unless_taken(a, x.dims) for a in named)
    expr = substitute(x.expr, {axis: position(parts)})
    dims = (tuple(b for a in d for b in (parts if a == axis else (a,))) for d in x.dims)
    return replace(x, expr=expr, dims=tuple(dims))


def refined(x: Array, d: int, sizes: Sequence[Size]) -> Array:
    """Splits the axes of a dimension, so that a product of leading ones is each of the sizes."""
    k, rest = 0, [s for s in sizes if s != 1]
    while k < len(x.dims[d]) and rest:
        axis, wanted = x.dims[d][k], rest[0]
        assert axis.size is not None
        if axis.size == wanted:
            rest = rest[1:]
        elif (left := x.sizes.quotient(wanted, axis.size)) is not None:
            rest = [left, *rest[1:]] if left != 1 else rest[1:]
        elif (inner := x.sizes.quotient(axis.size, wanted)) is not None:
            x, rest = _split(x, axis, wanted, inner), rest[1:]
        else:
            raise NoView(f"axes of {axis.size} and {wanted} do not divide each other")
        k += 1
    return x


def reshaped(x: Array, shape: Sequence[Size]) -> Array:
    """Returns a view of another shape; -1 is not among its sizes."""
    flat = refined(replace(x, dims=(tuple(a for d in x.dims for a in d),)), 0, shape)
    axes, dims = list(flat.dims[0]), list[Dim]()
    for size in shape:
        own, left = list[Axis](), size
        while left != 1:
            if not axes or axes[0].size is None:
                raise NoView(f"a view of {x.shape} as {tuple(shape)}")
            rest = x.sizes.quotient(left, axes[0].size)
            if rest is None:
                raise NoView(f"a view of {x.shape} as {tuple(shape)}")
            own.append(axes.pop(0))
            left = rest
        dims.append(tuple(own))
    if axes:
        raise NoView(f"a view of {x.shape} as {tuple(shape)}")
    return replace(flat, dims=tuple(dims))


def expanded(x: Array, shape: Sequence[Size]) -> Array:
    """Returns a tensor broadcast to a shape: along axes that its expression lacks."""
    dims = [()] * (len(shape) - len(x.dims)) + list(x.dims)
    for d, n in enumerate(shape):
        if not dims[d] and n != 1:
            dims[d] = (_unless_taken(_placed(len(dims) - d, n), dims),)
    return replace(x, dims=tuple(dims))


def _refined_as(x: Array, y: Array, d: int) -> Array:
    """Splits the axes of a dimension as another tensor has them.

    Of sizes that vary a guard may say that they are a number, as of 16 // s heads for each of s:
    then they become one axis, of that size.
    """
    try:
        return refined(x, d, [a.size or 1 for a in y.dims[d]])
    except NoView:
        size = y.size(d)
        if not isinstance(size, int) or not x.sizes.are_guarded(x.size(d), size):
            if isinstance(x.size(d), int) and x.sizes.are_guarded(y.size(d), x.size(d)):
                return x  # the other one changes
            raise
        return with_one_axis(x, d, size)


def met(*arrays: Array) -> tuple[list[Node], tuple[Dim, ...]]:
    """Returns the expressions of tensors that broadcast together, with the same axes in each."""
    rank = max(len(x.dims) for x in arrays)
    every = [replace(x, dims=((),) * (rank - len(x.dims)) + x.dims) for x in arrays]
    for d in range(rank):
        for _ in every:  # boundaries of one split others
            for i, x in enumerate(every):
                for y in every:
                    if x.dims[d] and y.dims[d] and x.dims[d] != y.dims[d]:
                        x = every[i] = _refined_as(x, y, d)
    dims = list[Dim]()
    taken = set[Axis]()
    deepest = sorted(every, key=lambda x: -x.expr.depth)  # which is not rebuilt
    for d in range(rank):
        own = next((x.dims[d] for x in deepest if x.dims[d]), ())
        own = tuple(fresh_axis(a.size) if a in taken else a for a in own)
        taken |= set(own)
        for x in every:
            if x.dims[d] and [a.size for a in x.dims[d]] != [a.size for a in own]:
                raise NoView(f"tensors of sizes {x.size(d)} and {own} meet")
        dims.append(own)
    exprs = []
    for x in every:
        names = dict[Axis, Axis]()
        for d, own in enumerate(dims):
            names |= dict(zip(x.dims[d], own, strict=False)) if x.dims[d] else {}
        exprs.append(substitute(x.expr, {a: index(b) for a, b in names.items() if a != b}))
    return exprs, tuple(dims)


def with_one_axis(x: Array, d: int, size: Size | None = None) -> Array:
    """Returns a tensor whose dimension runs through one axis: others are digits of it.

    ``size`` is that of the axis, if it is known better than by the product of the others.
    """
    if len(x.dims[d]) <= 1:
        return x
    axis = own_axis(x, d, x.size(d) if size is None else size)
    theta, stride = dict[Axis, Node](), const(1, INT)
    for a in reversed(x.dims[d]):
        assert a.size is not None
        digit = function("floor_divide", index(axis), stride)
        is_leading = a == x.dims[d][0]
        theta[a] = digit if is_leading else function("remainder", digit, size_of(a.size))
        stride = product(stride, size_of(a.size))
        stride = const(stride.value, INT) if stride.op == "const" else stride
    dims = tuple((axis,) if i == d else y for i, y in enumerate(x.dims))
    return replace(x, expr=read_at(x, theta), dims=dims)


def indexed(x: Array, d: int, at: Node, dims: Sequence[Dim]) -> Array:
    """Returns a dimension read at an index expression, whose dimensions take its place.

    A select has none and a constant, a slice ``start + step * f``, a gather a captured index.
    """
    x = with_one_axis(x, d)
    axis = x.dims[d]
    expr = read_at(x, {axis[0]: at}) if axis else x.expr
    return replace(x, expr=expr, dims=(*x.dims[:d], *dims, *x.dims[d + 1 :]))


def sliced(x: Array, d: int, start: int | Node, count: Size, step: int = 1) -> Array:
    """Returns a slice, read along a new axis."""
    first = const(start, INT) if isinstance(start, int) else start
    if count == x.size(d) and first is const(0, INT) and step == 1:
        return x
    if count == 1:
        return indexed(x, d, first, [()])
    axis = own_axis(x, d, count)
    return indexed(x, d, linear(0.0, [(1.0, first), (float(step), index(axis))]), [(axis,)])


def padded(x: Array, d: int, before: int | Node, size: Size, fill: float | Node) -> Array:
    """Returns a tensor padded to a size with a number: read inside, the number outside."""
    before = const(before, INT) if isinstance(before, int) else before
    fill = fill if isinstance(fill, Node) else const(fill, x.expr.dtype)
    inside, axis = size_of(x.size(d)), own_axis(x, d, size)
    at = linear(0.0, [(-1.0, before), (1.0, index(axis))])
    shifted = indexed(x, d, at, [(axis,)])
    is_inside = all_of(nonnegative(at), nonnegative(linear(-1.0, [(1.0, inside), (-1.0, at)])))
    return shifted.map(lambda e: choose(is_inside, e, fill))


def concatenated(parts: Sequence[Array], d: int, total: Size | None = None) -> Array:
    """Returns tensors after each other: a `where` of the position. ``total`` may be symbolic."""
    sizes = parts[0].sizes
    counts = [x.size(d) for x in parts]
    if total is None:
        if not all(isinstance(n, int) for n in counts):
            raise NoView("tensors of symbolic sizes are concatenated")
        total = sum(counts)  # type: ignore[arg-type]  # numbers
    shifted, starts = list[Array](), [const(0, INT)]
    for x, n in zip(parts, counts, strict=True):
        axis = own_axis(x, d, total)
        at = linear(0.0, [(1.0, index(axis)), (-1.0, starts[-1])])
        shifted.append(indexed(x, d, at, [(axis,)]))
        starts.append(linear(0.0, [(1.0, starts[-1]), (1.0, size_of(n))]))
    exprs, dims = met(*shifted)
    result = exprs[-1]
    for expr, start in zip(exprs[-2::-1], starts[-2:0:-1], strict=True):
        is_before = nonnegative(linear(-1.0, [(1.0, start), (-1.0, index(dims[d][0]))]))
        result = choose(is_before, expr, result)
    return Array(result, dims, sizes)
