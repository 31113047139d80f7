"""Tracks the axes of a score matrix through reshapes, transposes and broadcasts.

A tensor dimension is a tuple of pieces: (b, h) is a flattened dimension, and () one of size 1. A
piece is a digit of an axis: with axis index = sum(stride * digit), splitting H into (groups,
members) gives the pieces (axis, groups, members) and (axis, members, 1). All functions return None
if the operation cannot be followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    expression,
    is_one,
    product,
    provably_equal,
    quotient,
)


@dataclass(frozen=True)
class Piece:
    """Represents a digit of an axis."""

    axis: int
    size: Size
    stride: Size = 1

    def key(self) -> tuple[object, ...]:
        return (self.axis, str(expression(self.size)), str(expression(self.stride)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Piece) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


Dim = tuple[Piece, ...]
Layout = tuple[Dim, ...]
Shape = tuple[Size, ...]


def dim_size(dim: Dim) -> Size:
    """Returns the size of a dimension."""
    return product(p.size for p in dim)


def axes_of(layout: Layout) -> set[int]:
    """Returns the axes of a layout."""
    return {p.axis for dim in layout for p in dim}


def sizes_of(layout: Layout) -> Shape:
    """Returns the shape of a layout."""
    return tuple(dim_size(d) for d in layout)


def with_rank(layout: Layout, rank: int) -> Layout | None:
    """Adds leading dimensions to the layout, as a broadcast to ``rank`` does."""
    extra = rank - len(layout)
    return ((),) * extra + layout if extra >= 0 else None


def has_shape(layout: Layout, shape: Sequence[Size]) -> bool:
    """Returns whether a tensor of this layout has provably this shape."""
    return len(layout) == len(shape) and all(map(provably_equal, sizes_of(layout), shape))


def broadcasts_to(layout: Layout, shape: Sequence[Size]) -> bool:
    """Returns whether a tensor of this layout is, or is provably broadcast to, this shape."""
    return len(layout) == len(shape) and all(
        d == () or provably_equal(dim_size(d), size) for d, size in zip(layout, shape, strict=True)
    )


def broadcast(a: Sequence[Size], b: Sequence[Size]) -> Shape | None:
    """Returns the common shape of two tensors of one rank; None if extents may differ."""
    if not all(is_one(x) or is_one(y) or provably_equal(x, y) for x, y in zip(a, b, strict=True)):
        return None
    return tuple(y if is_one(x) else x for x, y in zip(a, b, strict=True))


def without(layout: Layout, dim: int) -> Layout:
    """Returns the layout after a reduction over ``dim`` that keeps it with size 1."""
    return (*layout[:dim], (), *layout[dim + 1 :])


def reshape(layout: Layout, shape: Sequence[Size]) -> Layout | None:
    """Returns the layout after a view or reshape to ``shape``."""
    pieces = [p for dim in layout for p in dim if not is_one(p.size)]
    result: list[Dim] = []
    for size in shape:
        if is_one(size):
            result.append(())
            continue
        dim: list[Piece] = []
        remaining: Size = size
        while not is_one(remaining):
            if not pieces:
                return None
            piece = pieces.pop(0)
            rest = quotient(remaining, piece.size)
            if rest is not None:
                dim.append(piece)
                remaining = rest
                continue
            inner = quotient(piece.size, remaining)
            if inner is None:
                return None
            dim.append(Piece(piece.axis, remaining, piece.stride * inner))
            pieces.insert(0, Piece(piece.axis, inner, piece.stride))
            remaining = 1
        result.append(merged(tuple(dim)))
    return None if pieces else tuple(result)


def merged(dim: Dim) -> Dim:
    """Returns neighbouring digits of one axis as one digit."""
    result: list[Piece] = []
    for piece in dim:
        if result:
            last = result[-1]
            if last.axis == piece.axis and provably_equal(last.stride, piece.size * piece.stride):
                result[-1] = Piece(piece.axis, last.size * piece.size, piece.stride)
                continue
        result.append(piece)
    return tuple(result)


def permute(layout: Layout, dims: Sequence[int]) -> Layout:
    """Permutes dimensions."""
    return tuple(layout[d] for d in dims)


def unsqueeze(layout: Layout, dim: int) -> Layout:
    """Inserts a dimension of size 1."""
    dim = dim % (len(layout) + 1)
    return (*layout[:dim], (), *layout[dim:])


def squeeze(layout: Layout, dims: Sequence[int]) -> Layout:
    """Drops the given dimensions if they have size 1."""
    return tuple(d for i, d in enumerate(layout) if not (i in dims and d == ()))


def axis_dim(layout: Layout, axis: int) -> int | None:
    """Returns the dimension that is exactly the whole axis, or None."""
    for i, dim in enumerate(layout):
        if any(p.axis == axis for p in dim):
            whole = len(dim) == 1 and is_one(dim[0].stride)
            return i if whole and sum(p.axis == axis for d in layout for p in d) == 1 else None
    return None
