"""Represents a tensor's elements as formulas over dot products, which become row programs.

A `Formula` says how the element at one index of its axes is computed. A `Placed` formula says
which dimension of a tensor each axis is in. Views change places only. Axes have no names: those
that meet position by position in one operation become one (`Axes.unify`), and an axis that is
reshaped into two is split in every formula that has it. An axis that cannot be split is an atom.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.fx_passes.domain.layout import Layout
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, product, provably_equal, quotient

Dim = tuple[int, ...]  # axes, the leading one first; () is a dimension without an index


class Axes:
    """Holds axes by number, their sizes, and which of them are one."""

    def __init__(self) -> None:
        self._sizes: list[Size] = []
        self._same_as: dict[int, int] = {}
        self._parts: dict[int, tuple[int, int]] = {}

    def new(self, size: Size) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def of_shape(self, shape: Sequence[Size]) -> tuple[Dim, ...]:
        """Returns a new axis for each dimension that has an index."""
        return tuple(() if is_one(size) else (self.new(size),) for size in shape)

    def atoms(self, axes: Iterable[int]) -> Dim:
        """Returns the atoms that the axes currently consist of."""
        found: list[int] = []
        for axis in axes:
            while axis in self._same_as:
                axis = self._same_as[axis]
            found += self.atoms(self._parts[axis]) if axis in self._parts else (axis,)
        return tuple(found)

    def size(self, atom: int) -> Size:
        return self._sizes[atom]

    def extent(self, axes: Iterable[int]) -> Size:
        return product(self._sizes[a] for a in self.atoms(axes))

    def split(self, atom: int, trailing: Size) -> tuple[int, int]:
        """Returns an atom as two: index = leading * size of trailing + trailing."""
        leading = quotient(self._sizes[atom], trailing)
        if leading is None:
            raise Unsupported(
                "an axis of the scores is split into parts of sizes that do not divide it"
            )
        self._parts[atom] = (self.new(leading), self.new(trailing))
        return self._parts[atom]

    def unify(self, a: Dim, b: Dim) -> None:
        """Makes two dimensions share one index."""
        left, right = list(self.atoms(a)), list(self.atoms(b))
        while left and right:
            x, y = left.pop(0), right.pop(0)
            if x == y:
                continue
            if provably_equal(self._sizes[x], self._sizes[y]):
                self._same_as[y] = x
                if y in left or y in right or x in left or x in right:
                    raise Unsupported("an axis of the scores meets itself in another place")
                continue
            rest = quotient(self._sizes[x], self._sizes[y])
            if rest is not None:
                leading, trailing = self.split(x, rest)
                left[:0] = [leading, trailing]
                right.insert(0, y)
                continue
            rest = quotient(self._sizes[y], self._sizes[x])
            if rest is None:
                raise Unsupported("scores meet a tensor whose dimensions are other axes")
            leading, trailing = self.split(y, rest)
            right[:0] = [leading, trailing]
            left.insert(0, x)
        if left or right:
            raise Unsupported("scores meet a tensor of another shape")

    def digits(self, axis: int, size: Size, stride: Size) -> Dim:
        """Returns the atoms of a digit of an axis, which is split if necessary."""
        outer, _ = self._cut(self.atoms((axis,)), stride)
        return self._cut(outer, size)[1]

    def _cut(self, atoms: Dim, trailing: Size) -> tuple[Dim, Dim]:
        """The leading atoms, and the trailing ones, which have this extent together."""
        rest, taken = list(atoms), list[int]()
        remaining = trailing
        while not is_one(remaining):
            if not rest:
                raise Unsupported("an operand's axis is longer than that of the scores")
            last = rest.pop()
            left_over = quotient(remaining, self._sizes[last])
            if left_over is not None:
                taken.insert(0, last)
                remaining = left_over
                continue
            leading, behind = self.split(last, remaining)
            rest.append(leading)
            taken.insert(0, behind)
            remaining = 1
        return tuple(rest), tuple(taken)

    def reshaped(self, dims: Sequence[Dim], shape: Sequence[Size]) -> tuple[Dim, ...]:
        """Returns the places of axes after a view or reshape."""
        atoms = [a for dim in dims for a in self.atoms(dim)]
        result: list[Dim] = []
        for size in shape:
            dim: list[int] = []
            remaining: Size = size
            while not is_one(remaining):
                if not atoms:
                    raise Unsupported("reshape that mixes the axes of the scores")
                first = atoms.pop(0)
                rest = quotient(remaining, self._sizes[first])
                if rest is not None:
                    dim.append(first)
                    remaining = rest
                    continue
                behind = quotient(self._sizes[first], remaining)
                if behind is None:
                    raise Unsupported("reshape that mixes the axes of the scores")
                leading, trailing = self.split(first, behind)
                dim.append(leading)
                atoms.insert(0, trailing)
                remaining = 1
            result.append(tuple(dim))
        if atoms:
            raise Unsupported("reshape that mixes the axes of the scores")
        return tuple(result)


@dataclass(frozen=True, eq=False)
class Dot:
    """Represents a product of two operands: which of its axes each of their dimensions has.

    Layouts number the dimensions of the product; ``axes`` are those dimensions' axes. ``dtype`` is
    what the program makes the product in, which under autocast is not the operands'.
    """

    lhs: TensorRef
    rhs: TensorRef
    axes: tuple[Dim, ...]
    dtype: torch.dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Returns the dtypes of the product and of what it is computed from."""
        operands: tuple[Tensor, Tensor] = (self.lhs.node.meta["val"], self.rhs.node.meta["val"])
        return (self.dtype, *(x.dtype for x in operands))

    def dims(self, layout: Layout, axes: Axes) -> list[Dim]:
        """Returns the axes in each dimension of an operand; contracted ones are negative
        numbers.
        """
        found: list[Dim] = []
        for dim in layout:
            parts: list[int] = []
            for piece in dim:
                if piece.axis < 0:
                    parts.append(piece.axis)
                else:
                    (axis,) = self.axes[piece.axis]
                    parts += axes.digits(axis, piece.size, piece.stride)
            found.append(tuple(parts))
        return found


@dataclass(frozen=True)
class Sum:
    """Describes a reduction: ``scale`` times the sum, divided by sizes.

    ``dims`` are dimensions of the tensor whose axes are ``places``. A log-sum-exp has no scale.
    """

    kind: str  # "sum", "logsumexp" or "max"
    over: Dim
    places: tuple[Dim, ...]
    shape: tuple[Size, ...]
    dims: tuple[int, ...]
    keepdim: bool = False
    scale: float = 1.0
    divisors: tuple[Size, ...] = ()


@dataclass(frozen=True, eq=False)
class Formula:
    """Represents one operation, by its name in `program.operations`, or a leaf.

    Leaves: "dot" (data: `Dot`), "const" (a number), "capture" (a node and the axes of each of its
    dimensions), "linear" (coefficients by axis and a constant: whether their sum is not negative),
    "columns" (a node with ids, its axes and the axis that they are of: whether an index is among
    the ids of its row). "reduce" has a `Sum`. ``grad_flows`` are the tensors that a gradient
    reaches, ``key`` is the axis that was summed over inside, if one was.
    """

    op: str
    args: tuple[Formula, ...] = ()
    data: Any = None
    axes: frozenset[int] = frozenset()
    grad_flows: frozenset[object] = frozenset()
    dots: frozenset[Dot] = frozenset()
    key: int | None = None
    is_bool: bool = False


@dataclass(frozen=True)
class Placed:
    """Represents a tensor whose elements a formula computes."""

    formula: Formula
    dims: tuple[Dim, ...]
    shape: tuple[Size, ...] = field(compare=False, default=())


@dataclass(frozen=True)
class Chosen:
    """Represents top-k entries: unique key ids per row, as a masked reduction over all keys.

    A tensor of these entries has an axis of its own, and its formula is that of all keys: the
    other keys add nothing when it is reduced.
    """

    hits: Placed  # "columns", as a tensor of all keys
    dim: int  # that of the keys


def formulas_in(root: Formula) -> list[Formula]:
    """Returns a formula and all that it is made of, operands first."""
    order: list[Formula] = []
    seen: set[Formula] = set()
    stack = [root]
    while stack:
        current = stack[-1]
        if current in seen:
            stack.pop()
            continue
        waiting = [a for a in current.args if a not in seen]
        if waiting:
            stack += waiting
            continue
        seen.add(current)
        order.append(current)
        stack.pop()
    return order
