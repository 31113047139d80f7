"""Defines the rules for select, slice and narrow of scores and probabilities, for row programs.

A slice of samples, heads, rows or keys moves to the operands of the dot products: the sliced
formula has the same operations, on products of sliced q or k. A sum over the keys that comes
before the slice still reads all keys. Keys cannot be sliced after a softmax. Neither can scores
that another tensor with the sliced axis was combined with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.algebra import is_row_level
from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import rule
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.analysis.rules.views import from_front
from torch_streamkl.fx_passes.domain.row_elements import Dim, Dot, Formula, Placed, Sum
from torch_streamkl.fx_passes.domain.score_algebra import part_of_operand
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    expression,
    is_one,
    is_unknown,
    provably_equal,
    shape_of,
)

aten = torch.ops.aten


@rule(aten.select.int)
def _select(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    before = shape_of(a["self"])
    dim = a["dim"] % len(before)
    if not isinstance(a["index"], int):
        raise Unsupported("scores are selected at a position that is not known")
    return _part(self, self.operand(a["self"]), dim, from_front(a["index"], before[dim]), None)


@rule(aten.slice.Tensor)
def _slice(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    if a.get("step", 1) != 1:
        raise Unsupported("scores are sliced with a step")
    return _range(self, node, a, a.get("dim", 0))


@rule(aten.narrow.default)
def _narrow(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return _range(self, node, a, a["dim"])


def _range(self: Operands, node: fx.Node, a: Arguments, dim: int) -> Placed:
    dim %= len(shape_of(a["self"]))
    if is_unknown(shape_of(node)[dim]):
        raise Unsupported("scores are sliced to a size that only data decides")
    start = self.recognised.first_index(node, a["self"], dim, a.get("start"))
    if start is None:
        raise Unsupported("scores are sliced from a place that depends on their size")
    return _part(self, self.operand(a["self"]), dim, start, shape_of(node)[dim])


def _part(self: Operands, x: Placed, dim: int, start: Size, length: Size | None) -> Placed:
    """Reads ``narrow(dim, start, length)``, or ``select(dim, start)`` without a length."""
    if any(self.chosen_in(d) is not None for d in x.dims):
        raise Unsupported("chosen entries of rows are sliced")
    if is_row_level(x, self.axes):
        raise Unsupported("part of what was summed over the keys")  # the user's own code takes it
    axes = self.axes.atoms(x.dims[dim])
    if len(axes) > 1:
        raise Unsupported("a flattened dimension of the scores is sliced")
    kept: Dim = axes
    formula = x.formula
    if axes and not (length is not None and provably_equal(length, self.axes.size(axes[0]))):
        key = formula.key
        if key is not None and set(axes) <= set(self.axes.atoms((key,))):
            raise Unsupported("only some of the keys are used after the softmax")
        kept = _axis_of_part(self, axes[0], start, length)
        formula = _Part(self, axes[0], kept, start, length).of(formula)
    inner = () if length is None else (kept,)
    return Placed(formula, (*x.dims[:dim], *inner, *x.dims[dim + 1 :]))


def _axis_of_part(self: Operands, axis: int, start: Size, length: Size | None) -> Dim:
    """The axis of a part, which is one for the same part; none where that has one entry."""
    if length is None or is_one(length):
        return ()
    known = (axis, str(expression(start)), str(expression(length)))
    if known not in self.parts:
        self.parts[known] = self.axes.new(length)
    return (self.parts[known],)


@dataclass
class _Part:
    """Replaces an axis in formulas by a part of it."""

    elements: Operands
    axis: int
    kept: Dim
    start: Size
    length: Size | None

    def __post_init__(self) -> None:
        self.known: dict[Formula, Formula] = {}

    def of(self, f: Formula) -> Formula:
        """An axis that was summed over is whole."""
        if self.axis not in self.elements.axes.atoms(f.axes):
            return f
        if f not in self.known:
            made = self._of(f)
            # conditions have no gradient, whatever they are made of
            self.known[f] = made if f.grad_flows else replace(made, grad_flows=frozenset())
        return self.known[f]

    def _of(self, f: Formula) -> Formula:
        match f.op:
            case "dot":
                return self._dot(f)
            case "linear":
                return self._linear(f)
            case "capture" | "columns":
                raise Unsupported("scores are sliced after a tensor has met them")
            case "reduce":
                return self._reduction(f)
        return self.elements.formula(f.op, *map(self.of, f.args), data=f.data)

    def _dims(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        atoms = self.elements.axes.atoms
        if any(self.axis in atoms(d) and atoms(d) != (self.axis,) for d in dims):
            raise Unsupported("a flattened dimension of the scores is sliced")
        return tuple(self.kept if atoms(d) == (self.axis,) else d for d in dims)

    def _dot(self, f: Formula) -> Formula:
        old: Dot = f.data
        elements, axes = self.elements, self.elements.axes
        dims = self._dims(old.axes)
        part = (old, self.axis, str(expression(self.start)), str(expression(self.length or 0)))
        new = elements.parts_of_dots.get(part)
        if new is None:
            (number,) = (d for d, x in enumerate(old.axes) if axes.atoms(x) == (self.axis,))
            lhs, rhs = (
                part_of_operand(ref, number, self.start, self.length) for ref in (old.lhs, old.rhs)
            )
            new = elements.parts_of_dots[part] = Dot(lhs, rhs, dims, old.dtype)
            elements.products[new] = elements.products[old]
        refs = frozenset((new, ref[1]) for ref in f.grad_flows if isinstance(ref, tuple))
        found = frozenset(a for d in dims for a in d)
        return Formula("dot", (), new, found, refs, frozenset({new}))

    def _linear(self, f: Formula) -> Formula:
        """The index in the whole is the one in the part and the start."""
        coefficients, constant = f.data
        if not isinstance(self.start, int):
            raise Unsupported("a mask whose place depends on a size that varies")
        moved: list[tuple[int, int]] = []
        for axis, c in coefficients:
            if self.elements.axes.atoms((axis,)) == (self.axis,):
                constant += c * self.start
                moved += [(new, c) for new in self.kept]
            else:
                moved.append((axis, c))
        found = frozenset(a for a, _ in moved)
        return replace(f, data=(tuple(moved), constant), axes=found)

    def _reduction(self, f: Formula) -> Formula:
        what: Sum = f.data
        inner = self.of(f.args[0])
        axes = self.elements.axes
        sizes = tuple(
            (1 if self.length is None else self.length) if axes.atoms(d) == (self.axis,) else n
            for d, n in zip(what.places, what.shape, strict=True)
        )
        data = replace(what, places=self._dims(what.places), shape=sizes)
        found = frozenset(axes.atoms(inner.axes)) - set(axes.atoms(what.over))
        return replace(
            f, args=(inner,), data=data, axes=found, grad_flows=inner.grad_flows, dots=inner.dots
        )
