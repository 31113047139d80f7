"""Turns a trace's tensors into elements: products, numbers, masks, and tensors from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.elements.algebra import ElementAlgebra, is_block_level
from torch_streamkl.fx_passes.analysis.interpreter import ScoreInterpreter
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.layout import Layout
from torch_streamkl.fx_passes.domain.masks import BoolTensor, Choice, Linear, Opaque
from torch_streamkl.fx_passes.domain.row_elements import Dim, Dot, Formula, Placed
from torch_streamkl.fx_passes.domain.scores import Bias, Scale, Scores
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    expression,
    is_one,
    provably_equal,
    shape_of,
)


class Operands(ElementAlgebra):
    """Holds the state of a reading, and answers the questions of its rules.

    Rules are functions that `registry.rule` registers for overloads: ``rule(self, node,
    arguments)`` says what the operation makes of its inputs' elements.
    """

    trace: Trace
    recognised: ScoreInterpreter
    placed: dict[fx.Node, Placed]
    reasons: dict[fx.Node, str]
    behind_dots: set[fx.Node]  # what is computed from a dot product
    products: dict[Dot, fx.Node]
    parts: dict[tuple[int, str, str], int]  # axes of parts of axes
    parts_of_dots: dict[tuple[Dot, int, str, str], Dot]
    by_ids: dict[tuple[fx.Node, int], int]  # axes of chosen entries, by ids and their dimension
    unchecked_ids: dict[fx.Node, tuple[Size, int]]  # of what size and dimension they are positions
    _overwritten: set[fx.Node]

    def _dot(self, node: fx.Node) -> Placed:
        scores = self.recognised.values.get(node)
        if not isinstance(scores, Scores):
            raise Unsupported(
                self.recognised.reasons.get(node, "a product that makes no scores, or reads some")
            )
        key = scores.key
        shape = shape_of(node)
        if not all(isinstance(step, (Scale, Bias)) for step in key.steps):
            raise Unsupported("a product that something else is added to")
        if not all(_is_contracted(ref.layout) for ref in (key.lhs, key.rhs)):
            raise Unsupported("a product that sums nothing")
        dims = self.axes.of_shape(shape)
        dot = Dot(key.lhs, key.rhs, dims, self.recognised._dtype_of(node))
        self.products[dot] = node
        refs = frozenset((dot, side) for side in ("lhs", "rhs") if getattr(key, side).grad)
        axes = frozenset(a for dim in dims for a in dim)
        formula = Formula("dot", (), dot, axes, refs, frozenset({dot}))
        if not refs:  # a teacher: nothing of its gradient is derived
            formula = self.formula("detach", formula)
        placed = Placed(formula, dims, tuple(shape))
        for step in key.steps:
            if isinstance(step, Scale):
                placed = self.combined("mul", placed, self.number(step.number))
                continue
            assert isinstance(step, Bias)
            if step.factors:
                raise Unsupported("a product that something else is added to")
            bias = self._capture_at(step.tensor.node, step.tensor.layout, dims, step.tensor.grad)
            if step.weight != 1.0:
                bias = self.combined("mul", bias, self.number(step.weight))
            placed = self.combined("add", placed, bias)
        return replace(placed, shape=tuple(shape))

    def _capture_at(
        self, source: fx.Node, layout: Any, dims: tuple[Dim, ...], grad_flows: bool
    ) -> Placed:
        """Captures a tensor in dimensions of a product."""
        places: list[Dim] = []
        mine: dict[int, Dim] = {}
        for pieces in layout:
            if len(pieces) > 1 or any(not is_one(p.stride) for p in pieces):
                raise Unsupported("a product that something else is added to")
            place: Dim = dims[pieces[0].axis] if pieces else ()
            places.append(place)
            if pieces:
                mine[pieces[0].axis] = place
        formula = self._capture_formula(source, tuple(places), grad_flows)
        return Placed(formula, tuple(mine.get(d, ()) for d in range(len(dims))))

    def _capture_formula(
        self, source: fx.Node, places: tuple[Dim, ...], grad_flows: bool
    ) -> Formula:
        value = source.meta["val"]
        if value.dtype.is_complex:
            raise Unsupported("a complex tensor meets scores")
        axes = frozenset(a for dim in places for a in dim)
        refs: frozenset[object] = frozenset({source}) if grad_flows else frozenset()
        is_bool = value.dtype == torch.bool
        return Formula("capture", (), (source, places), axes, refs, is_bool=is_bool)

    def number(self, value: float) -> Placed:
        if math.isnan(value):
            raise Unsupported("NaN meets scores")
        return Placed(Formula("const", (), float(value)), (), ())

    def _constant(self, value: float, node: fx.Node) -> Placed:
        shape = tuple(shape_of(node))
        is_bool = node.meta["val"].dtype == torch.bool
        if is_bool:  # a constant condition
            zero = Formula("const", (), 0.0)
            formula = Formula("ne", (Formula("const", (), value), zero), is_bool=True)
        else:
            formula = self.number(value).formula
        return Placed(formula, ((),) * len(shape), shape)

    def operand(self, x: object) -> Placed:
        """Returns an argument as elements: a formula, a number, or a tensor from outside."""
        if isinstance(x, (bool, int, float)):
            return self.number(float(x))
        if is_symbolic_number(x):
            return Placed(Formula("capture", (), (x, ())), (), ())
        if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), Tensor):
            raise Unsupported("scores meet a number that is not known")
        if x in self.placed:
            if is_block_level(self.placed[x], self.axes):
                raise Unsupported("what is computed of sums over blocks of keys stays as it is")
            return self.placed[x]
        if x in self._overwritten and x not in self.behind_dots:
            raise Unsupported("a tensor that was modified in place is used afterwards")
        value = self.recognised.values.get(x)
        match value:
            case Number():
                return self._constant(value.value, x)
            case BoolTensor() if x.meta["val"].dtype == torch.bool:
                return self._condition(value, shape_of(x))
            case Choice() if x.meta["val"].dtype.is_floating_point:
                holds = self._condition(value.mask, shape_of(x))
                either = (self.number(value.inside), self.number(value.outside))
                return replace(self.combined("where", holds, *either), shape=tuple(shape_of(x)))
        if x in self.behind_dots and x in self.reasons:
            raise Unsupported(self.reasons[x])
        if x in self.recognised.reasons and x in self.behind_dots:
            raise Unsupported(self.recognised.reasons[x])
        shape = tuple(shape_of(x))
        dims = self.axes.of_shape(shape)
        source = self.recognised.canonical[x]
        return Placed(self._capture_formula(source, dims, self._requires_grad(x)), dims, shape)

    def _condition(self, mask: BoolTensor, shape: Sequence[Size]) -> Placed:
        """Converts a mask: conditions on indices, and tensors as they are."""
        if not mask.literals:  # it holds everywhere, or nowhere
            one, zero = (Formula("const", (), x) for x in (float(not mask.negative), 0.0))
            return Placed(Formula("ne", (one, zero), is_bool=True), ((),) * len(shape))
        mask = mask.raised(len(shape))
        dims = self.axes.of_shape(shape)
        found: list[Formula] = []
        read: set[int] = set()
        for literal in sorted(mask.literals, key=repr):
            if isinstance(literal, Linear):
                coefficients = tuple(
                    (dims[d][0], c) for d, c in enumerate(literal.coefficients) if c and dims[d]
                )
                axes = frozenset(a for a, _ in coefficients)
                constant = expression(literal.constant)
                if not isinstance(constant, int):
                    raise Unsupported("a mask whose place depends on a size that varies")
                found.append(Formula("linear", (), (coefficients, constant), axes, is_bool=True))
                read |= {d for d, c in enumerate(literal.coefficients) if c}
                continue
            assert isinstance(literal, Opaque)
            if literal.node in self._overwritten or literal.node in self.behind_dots:
                raise Unsupported("a mask that is made of scores, or modified in place")
            places: list[Dim] = [()] * len(shape_of(literal.node))
            for d, source in enumerate(literal.dims):
                if source is not None:
                    places[source] = dims[d]
                    read.add(d)
            condition = self._capture_formula(literal.node, tuple(places), False)
            if not condition.is_bool:
                zero = Formula("const", (), 0.0)
                condition = Formula("ne", (condition, zero), axes=condition.axes, is_bool=True)
            if not literal.positive:
                condition = Formula("not", (condition,), axes=condition.axes, is_bool=True)
            found.append(condition)
        total = found[0]
        for other in found[1:]:
            axes = total.axes | other.axes
            total = Formula("and", (total, other), axes=axes, is_bool=True)
        if mask.negative:
            total = Formula("not", (total,), axes=total.axes, is_bool=True)
        return Placed(total, tuple(dims[d] if d in read else () for d in range(len(dims))))

    def at_given_ids(self, ids: fx.Node, shape: Sequence[Size], dim: int) -> Placed:
        """Returns `at_ids` for ids of the user, all of which torch's gather and scatter check."""
        hits = self.at_ids(ids, shape, dim)
        self.unchecked_ids[self.recognised.canonical[ids]] = (shape[dim], dim)
        return hits

    def at_ids(self, ids: fx.Node, shape: Sequence[Size], dim: int) -> Placed:
        """Returns whether a position along a dimension is among the ids of its row."""
        if ids in self._overwritten:
            raise Unsupported("a tensor that was modified in place is used afterwards")
        known = shape_of(ids)
        if len(known) != len(shape) or not all(
            provably_equal(a, b)
            for d, (a, b) in enumerate(zip(known, shape, strict=True))
            if d != dim
        ):
            raise Unsupported("ids of only some of the rows")
        dims = self.axes.of_shape(shape)
        if not dims[dim]:
            raise Unsupported("ids of a single key")
        places = tuple(x for d, x in enumerate(dims) if d != dim)
        axes = frozenset(a for x in dims for a in x)
        source = self.recognised.canonical[ids]
        data = (source, places, dims[dim][0], dim)
        return Placed(Formula("columns", (), data, axes, is_bool=True), dims, tuple(shape))

    def _requires_grad(self, node: fx.Node) -> bool:
        return self.recognised.requires_grad(node)

    def pointwise(self, op: str, *arguments: object, data: Any = None) -> Placed:
        return self.combined(op, *(self.operand(x) for x in arguments), data=data)


def is_symbolic_number(x: object) -> bool:
    """Returns whether a number changes between calls, such as an annealed weight: programs read
    it.
    """
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), (torch.SymFloat, torch.SymInt))


def _is_contracted(layout: Layout) -> bool:
    return any(piece.axis < 0 for dim in layout for piece in dim)
