"""What the graph computes between matmuls and sums, as formulas: see domain/row_elements.py.

A second reading of the trace beside the recogniser's. That one knows what divergences are made of
and what kernels take; this one knows operations, one by one, and no loss. Whatever is computed
from dot products by them, and summed over one of their axes, is a row program.

Every rule says what one operation makes of its inputs' elements, and nothing of gradients: a
formula is held against what its node recorded, as in the interpreter (NOTE [Gradient flow]).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.casts import is_narrower
from torch_streamkl.fx_passes.analysis.interpreter import Recogniser
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.analysis.rules.views import RESHAPES
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.layout import Layout
from torch_streamkl.fx_passes.domain.masks import BoolTensor, Choice, Linear, Opaque
from torch_streamkl.fx_passes.domain.row_elements import (
    Axes,
    Dim,
    Dot,
    Formula,
    Placed,
    Sum,
    formulas_in,
)
from torch_streamkl.fx_passes.domain.scores import Bias, Scale, Scores
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import name_of, named_arguments, storage_of
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    expression,
    is_one,
    is_zero,
    same,
    shape_of,
)
from torch_streamkl.rows.operations import MAX_POWER

aten = torch.ops.aten
MATMULS = {
    aten.matmul.default, aten.bmm.default, aten.mm.default, aten.baddbmm.default,
    aten.addmm.default, aten.linear.default, aten.einsum.default,
}  # fmt: skip
CASTS = (
    aten.to.device, aten.to.dtype, aten.to.other, aten._to_copy.default, aten.type_as.default,
)  # fmt: skip
REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
Rule = Callable[["RowElements", fx.Node, Arguments], Placed]
RULES: dict[object, Rule] = {}


def rule(*overloads: object) -> Callable[[Rule], Rule]:
    """Register what these overloads make of elements."""

    def register(function: Rule) -> Rule:
        for overload in overloads:
            assert overload not in RULES, f"{overload} has a rule already"
            RULES[overload] = function
        return function

    return register


class RowElements:
    """Formulas of all nodes of a trace that have one, in ``placed``, and ``reasons`` of others."""

    def __init__(self, trace: Trace, recognised: Recogniser) -> None:
        self.trace, self.recognised = trace, recognised
        self.axes = Axes()
        self.placed: dict[fx.Node, Placed] = {}
        self.reasons: dict[fx.Node, str] = {}
        self.behind_dots: set[fx.Node] = set()  # what is computed from a dot product
        self.products: dict[Dot, fx.Node] = {}
        self.parts: dict[tuple[int, str, str], int] = {}  # axes of parts of axes
        self.parts_of_dots: dict[tuple[Dot, int, str, str], Dot] = {}
        self._overwritten: set[fx.Node] = set()
        self._by_storage: dict[int | None, list[fx.Node]] = {}
        for node in trace.graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "call_function":
            if any(a in self.behind_dots for a in node.all_input_nodes) or _is_dot(node):
                self.behind_dots.add(node)
                try:
                    self.placed[node] = self._held(node, self._apply(node))
                except Blocked as reason:
                    self.reasons[node] = str(reason)
            for target in written_by(node):
                aliases = self._by_storage.get(storage_of(target), [])
                self._overwritten.update(aliases)
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            self._by_storage.setdefault(storage_of(node), []).append(node)

    def _apply(self, node: fx.Node) -> Placed:
        if any(a in self._overwritten for a in node.all_input_nodes):
            raise Blocked("a tensor that was modified in place is used afterwards")
        if self.recognised._hides_its_write(node):
            raise Blocked("a tensor that has a gradient is modified in place under no_grad")
        first = self.recognised.canonical[node]
        if first is not node and first in self.placed:
            return self.placed[first]
        if _is_dot(node):
            return self._dot(node)
        number = self.recognised.values.get(node)
        if isinstance(number, Number):  # zeros_like(scores)
            return self._constant(number.value, node)
        function = RULES.get(node.target)
        arguments = named_arguments(node)
        if function is None:
            for a in node.all_input_nodes:
                if a in self.reasons:
                    raise Blocked(self.reasons[a])
            raise Blocked(f"{name_of(node)} of scores")
        x = arguments.get("self", arguments.get("input"))
        dims = (arguments.get(name) for name in ("dim", "dims", "dim0"))
        if (
            any(d not in (None, [], ()) for d in dims)
            and isinstance(x, fx.Node)
            and not shape_of(x)
        ):
            raise Blocked("a dimension of a number")  # torch takes 0 and -1
        return function(self, node, arguments)

    # ------------------------------------------------------------------ leaves

    def _dot(self, node: fx.Node) -> Placed:
        scores = self.recognised.values.get(node)
        if not isinstance(scores, Scores):
            raise Blocked(
                self.recognised.reasons.get(node, "a product that makes no scores, or reads some")
            )
        key = scores.key
        shape = shape_of(node)
        if not all(isinstance(step, (Scale, Bias)) for step in key.steps):
            raise Blocked("a product that something else is added to")
        if not all(_is_contracted(ref.layout) for ref in (key.lhs, key.rhs)):
            raise Blocked("a product that sums nothing")
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
                placed = self.combined("mul", placed, self._number(step.number))
                continue
            assert isinstance(step, Bias)
            if step.factors:
                raise Blocked("a product that something else is added to")
            bias = self._capture_at(step.tensor.node, step.tensor.layout, dims, step.tensor.grad)
            if step.weight != 1.0:
                bias = self.combined("mul", bias, self._number(step.weight))
            placed = self.combined("add", placed, bias)
        return replace(placed, shape=tuple(shape))

    def _capture_at(
        self, source: fx.Node, layout: Any, dims: tuple[Dim, ...], flows: bool
    ) -> Placed:
        """A tensor laid out in dimensions of a product."""
        places: list[Dim] = []
        mine: dict[int, Dim] = {}
        for pieces in layout:
            if len(pieces) > 1 or any(not is_one(p.stride) for p in pieces):
                raise Blocked("a product that something else is added to")
            place: Dim = dims[pieces[0].axis] if pieces else ()
            places.append(place)
            if pieces:
                mine[pieces[0].axis] = place
        formula = self._capture_formula(source, tuple(places), flows)
        return Placed(formula, tuple(mine.get(d, ()) for d in range(len(dims))))

    def _capture_formula(self, source: fx.Node, places: tuple[Dim, ...], flows: bool) -> Formula:
        value = source.meta["val"]
        if value.dtype.is_complex:
            raise Blocked("a complex tensor meets scores")
        axes = frozenset(a for dim in places for a in dim)
        refs: frozenset[object] = frozenset({source}) if flows else frozenset()
        is_bool = value.dtype == torch.bool
        return Formula("capture", (), (source, places), axes, refs, is_bool=is_bool)

    def _number(self, value: float) -> Placed:
        if math.isnan(value):
            raise Blocked("NaN meets scores")
        return Placed(Formula("const", (), float(value)), (), ())

    def _constant(self, value: float, node: fx.Node) -> Placed:
        shape = tuple(shape_of(node))
        is_bool = node.meta["val"].dtype == torch.bool
        if is_bool:  # a constant condition
            zero = Formula("const", (), 0.0)
            formula = Formula("ne", (Formula("const", (), value), zero), is_bool=True)
        else:
            formula = self._number(value).formula
        return Placed(formula, ((),) * len(shape), shape)

    def operand(self, x: object) -> Placed:
        """An argument as elements: a formula, a number, or a tensor from outside."""
        if isinstance(x, (bool, int, float)):
            return self._number(float(x))
        if not isinstance(x, fx.Node) or not isinstance(x.meta.get("val"), Tensor):
            raise Blocked("scores meet a number that is not known")
        if x in self.placed:
            return self.placed[x]
        if x in self._overwritten and x not in self.behind_dots:
            raise Blocked("a tensor that was modified in place is used afterwards")
        value = self.recognised.values.get(x)
        match value:
            case Number():
                return self._constant(value.value, x)
            case BoolTensor() if x.meta["val"].dtype == torch.bool:
                return self._condition(value, shape_of(x))
            case Choice() if x.meta["val"].dtype.is_floating_point:
                holds = self._condition(value.mask, shape_of(x))
                either = (self._number(value.inside), self._number(value.outside))
                return replace(self.combined("where", holds, *either), shape=tuple(shape_of(x)))
        if x in self.behind_dots and x in self.reasons:
            raise Blocked(self.reasons[x])
        if x in self.recognised.reasons and x in self.behind_dots:
            raise Blocked(self.recognised.reasons[x])
        shape = tuple(shape_of(x))
        dims = self.axes.of_shape(shape)
        source = self.recognised.canonical[x]
        return Placed(self._capture_formula(source, dims, self._trained(x)), dims, shape)

    def _condition(self, mask: BoolTensor, shape: Sequence[Size]) -> Placed:
        """A mask that the recogniser knows: conditions on indices, and tensors as they were."""
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
                    raise Blocked("a mask whose place depends on a size that varies")
                found.append(Formula("linear", (), (coefficients, constant), axes, is_bool=True))
                read |= {d for d, c in enumerate(literal.coefficients) if c}
                continue
            assert isinstance(literal, Opaque)
            if literal.node in self._overwritten or literal.node in self.behind_dots:
                raise Blocked("a mask that is made of scores, or modified in place")
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

    def at_ids(self, ids: fx.Node, shape: Sequence[Size], dim: int) -> Placed:
        """Whether a position along a dimension is among the ids of its row."""
        if ids in self._overwritten:
            raise Blocked("a tensor that was modified in place is used afterwards")
        known = shape_of(ids)
        if len(known) != len(shape) or not all(
            same(a, b) for d, (a, b) in enumerate(zip(known, shape, strict=True)) if d != dim
        ):
            raise Blocked("ids of only some of the rows")
        dims = self.axes.of_shape(shape)
        if not dims[dim]:
            raise Blocked("ids of a single key")
        places = tuple(x for d, x in enumerate(dims) if d != dim)
        axes = frozenset(a for x in dims for a in x)
        source = self.recognised.canonical[ids]
        data = (source, places, dims[dim][0], dim)
        return Placed(Formula("columns", (), data, axes, is_bool=True), dims, tuple(shape))

    def _trained(self, node: fx.Node) -> bool:
        return self.recognised.trained(node)

    # ------------------------------------------------------------------ operations

    def aligned(self, *operands: Placed) -> tuple[Dim, ...]:
        """The places of axes where tensors meet by position."""
        rank = max(len(x.dims) for x in operands)
        raised = [((),) * (rank - len(x.dims)) + x.dims for x in operands]
        result: list[Dim] = []
        for position in zip(*raised, strict=True):
            given = [dim for dim in position if self.axes.atoms(dim)]
            for other in given[1:]:
                self.axes.unify(given[0], other)
            result.append(self.axes.atoms(given[0]) if given else ())
        return tuple(result)

    def combined(self, op: str, *operands: Placed, data: Any = None) -> Placed:
        """A pointwise operation by its name in `rows.operations`."""
        dims = self.aligned(*operands)
        return Placed(self.formula(op, *(x.formula for x in operands), data=data), dims)

    def formula(self, op: str, *args: Formula, data: Any = None) -> Formula:
        return Formula(
            op,
            args,
            data,
            frozenset().union(*(a.axes for a in args)),
            frozenset().union(*(a.flows for a in args)),
            frozenset().union(*(a.dots for a in args)),
            self._common_key(args),
            op in CONDITIONS or (op == "where" and all(a.is_bool for a in args[1:])),
        )

    def _common_key(self, args: Sequence[Formula]) -> int | None:
        keys = {self.axes.atoms((a.key,)) for a in args if a.key is not None}
        if len(keys) > 1:
            raise Blocked("values that were summed over different axes meet")
        (key,) = keys or {()}
        return key[0] if key else None

    def pointwise(self, op: str, *arguments: object, data: Any = None) -> Placed:
        return self.combined(op, *(self.operand(x) for x in arguments), data=data)

    def reduced(
        self,
        kind: str,
        x: Placed,
        dims: Sequence[int],
        keepdim: bool,
        scale: float = 1.0,
        divisors: tuple[Size, ...] = (),
    ) -> Placed:
        """A sum or log-sum-exp over dimensions of a tensor."""
        over = self.axes.atoms(a for d in dims for a in x.dims[d])
        formula = x.formula
        if not formula.dots:
            raise Blocked("a sum of what is not made from scores")
        key = self._summed_key(kind, x, over)
        for d in dims:
            if not self.axes.atoms(x.dims[d]) and not is_one(x.shape[d]):
                count = expression(x.shape[d])
                if kind == "logsumexp" or not isinstance(count, int):
                    raise Blocked("a sum over a dimension along which nothing varies")
        if kind != "sum" and len(over) != 1:
            raise Blocked("a softmax over a dimension that is not one axis of the scores")
        what = Sum(kind, over, x.dims, x.shape, tuple(dims), keepdim, scale, divisors)
        removed = set(over)
        axes = frozenset(self.axes.atoms(formula.axes)) - removed
        result = Formula("reduce", (formula,), what, axes, formula.flows, formula.dots, key, False)
        kept = tuple(
            () if d in dims else dim for d, dim in enumerate(x.dims) if keepdim or d not in dims
        )
        return Placed(result, kept)

    def _summed_key(self, kind: str, placed: Placed, over: Dim) -> int | None:
        """The axis of the keys, if it is among what is summed over.

        Before a softmax says which axis it is, a sum over the last dimension is taken for one over
        keys, if that is an axis of one operand only; any other is a sum over heads so far.
        """
        x = placed.formula
        if x.key is not None:
            (key,) = self.axes.atoms((x.key,)) if len(self.axes.atoms((x.key,))) == 1 else (None,)
            if key is None or key not in self.axes.atoms(x.axes):
                raise Blocked("a sum over rows: it stays as it is")  # the user's own code
            if kind != "sum" and over != (key,):
                raise Blocked("softmaxes over different axes")
            return key
        if kind != "sum":
            return over[0] if len(over) == 1 else None
        last = next((d for d in reversed(placed.dims) if self.axes.atoms(d)), ())
        candidates = [
            a
            for side in ("rhs", "lhs")
            for a in self.axes.atoms(last)
            if a in over and self.is_only_of(side, a, x)
        ]
        return candidates[-1] if candidates else None

    def is_only_of(self, side: str, atom: int, x: Formula) -> bool:
        """Whether one operand of every product has an axis, and the other has not."""
        other = {"lhs": "rhs", "rhs": "lhs"}[side]
        return all(
            atom in self.operand_axes(dot, side) and atom not in self.operand_axes(dot, other)
            for dot in x.dots
        )

    def operand_axes(self, dot: Dot, side: str) -> Dim:
        ref = dot.lhs if side == "lhs" else dot.rhs
        dims = dot.dims(ref.layout, self.axes)
        return self.axes.atoms(a for dim in dims for a in dim if a >= 0)

    # ------------------------------------------------------------------ checks

    def _held(self, node: fx.Node, x: Placed) -> Placed:
        """The elements as the node's own record has them."""
        made = node.meta.get("val")
        if not isinstance(made, Tensor):
            raise Blocked(f"{name_of(node)} of scores")
        dims = tuple(self.axes.atoms(d) for d in x.dims)
        x = Placed(x.formula, dims, tuple(made.shape))
        flat = [a for d in dims for a in d]
        if len(set(flat)) != len(flat):
            raise Blocked("an axis of the scores meets itself in another place")
        if len(dims) != made.dim() or not all(
            not d or same(self.axes.extent(d), size)
            for d, size in zip(dims, made.shape, strict=True)
        ):
            raise Blocked("elements are in a tensor of another shape")
        if any(not d and is_zero(size) for d, size in zip(dims, made.shape, strict=True)):
            raise Blocked("no element is left of a dimension along which nothing varies")
        self._check_rounding(node, x.formula, made)
        formula = x.formula
        self._check_integers(node, made.dtype, formula)
        if formula.is_bool or not made.dtype.is_floating_point:
            if formula.is_bool != (made.dtype == torch.bool):
                raise Blocked("scores are cast to an integer type")
            return replace(x, formula=replace(formula, flows=frozenset()))
        if not self._trained(node):
            if formula.flows:
                formula = replace(self.formula("detach", formula), flows=frozenset())
            return replace(x, formula=formula)
        # what is inside of one of the user's operations has that operation's record
        if not formula.flows and node in self.trace.outer:
            raise Blocked("a gradient flows through part of the loss that is a constant")
        return x

    def _check_integers(self, node: fx.Node, made: torch.dtype, formula: Formula) -> None:
        """Integers are counts of conditions, which formulas have exactly; nothing is truncated.

        What is computed of them alone has torch's default type, whatever the scores have.
        """
        if made == torch.bool:
            return
        values = [a.meta.get("val") for a in node.all_input_nodes]
        dtypes = [v.dtype for v in values if isinstance(v, Tensor)]
        if not made.is_floating_point:
            if made.itemsize < 4 or any(d.is_floating_point for d in dtypes):
                raise Blocked("scores are cast to an integer type")
            return
        is_cast = node.target in CASTS and dtypes[0] == torch.bool
        operands = [
            ref.node.meta["val"].dtype for dot in formula.dots for ref in (dot.lhs, dot.rhs)
        ]
        if not is_cast and any(d.is_floating_point and is_narrower(made, d) for d in operands):
            raise Blocked("what is made of conditions on scores has a narrower type than they")

    def _check_rounding(self, node: fx.Node, formula: Formula, made: Tensor) -> None:
        if made.dtype.is_complex:
            raise Blocked("scores are cast to a complex type")
        if not made.dtype.is_floating_point:
            return
        for dot in formula.dots:
            operands = [ref.node.meta["val"].dtype for ref in (dot.lhs, dot.rhs)]
            if made.dtype == torch.float64 and torch.float64 not in operands:
                raise Blocked("scores become float64 behind their matmul")
            for source in node.all_input_nodes:
                known = source.meta.get("val")
                if source not in self.placed or not isinstance(known, Tensor):
                    continue
                if not known.dtype.is_floating_point or not is_narrower(made.dtype, known.dtype):
                    continue
                if made.dtype.itemsize == 1 or any(made.dtype != d for d in operands):
                    name = str(made.dtype).removeprefix("torch.")
                    raise Blocked(f"scores or what is made of them are rounded to {name}")


# numbers whose float64 has no digits left for a logarithm of counts, as tests compare them
ROUNDED = 1e3
CONDITIONS = {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"}


def _is_contracted(layout: Layout) -> bool:
    return any(piece.axis < 0 for dim in layout for piece in dim)


def _is_dot(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in MATMULS


def is_row_level(x: Placed, axes: Axes) -> bool:
    """Whether the keys were summed over."""
    key = x.formula.key
    return key is not None and not set(axes.atoms((key,))) & set(axes.atoms(x.formula.axes))


# ------------------------------------------------------------------ rules


def _plain(op: str, *names: str) -> Rule:
    return lambda self, node, a: self.pointwise(op, *(a[name] for name in names))


_UNARY: dict[str, tuple[object, ...]] = {
    "exp": (aten.exp.default,),
    "log": (aten.log.default,),
    "log1p": (aten.log1p.default,),
    "sqrt": (aten.sqrt.default,),
    "neg": (aten.neg.default,),
    "abs": (aten.abs.default,),
    "tanh": (aten.tanh.default,),
    "sigmoid": (aten.sigmoid.default,),
    "relu": (aten.relu.default,),
}
_BINARY: dict[str, tuple[object, ...]] = {
    "mul": (aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar),
    "div": (aten.div.Tensor, aten.div.Scalar, aten.divide.Tensor, aten.true_divide.Tensor),
    "minimum": (aten.minimum.default,),
    "maximum": (aten.maximum.default,),
    "lt": (aten.lt.Tensor, aten.lt.Scalar),
    "le": (aten.le.Tensor, aten.le.Scalar),
    "gt": (aten.gt.Tensor, aten.gt.Scalar),
    "ge": (aten.ge.Tensor, aten.ge.Scalar),
    "eq": (aten.eq.Tensor, aten.eq.Scalar),
    "ne": (aten.ne.Tensor, aten.ne.Scalar),
    "and": (aten.logical_and.default, aten.bitwise_and.Tensor),
    "or": (aten.logical_or.default, aten.bitwise_or.Tensor),
}
for _op, _overloads in _UNARY.items():
    rule(*_overloads)(_plain(_op, "self"))
for _op, _overloads in _BINARY.items():

    def _binary(self: RowElements, node: fx.Node, a: Arguments, op: str = _op) -> Placed:
        operands = [self.operand(a[name]) for name in ("self", "other")]
        if op in ("and", "or") and not all(x.formula.is_bool for x in operands):
            raise Blocked("a logical operation on numbers that are made of scores")
        if op in CONDITIONS and op not in ("and", "or"):
            _check_comparison(operands)
        if op == "mul" and all(x.formula.is_bool for x in operands):
            op = "and"
        return self.combined(op, *operands)

    rule(*_overloads)(_binary)


@rule(aten.logical_not.default, aten.bitwise_not.default)
def _not(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    if x.formula.is_bool:
        return self.combined("not", x)
    if node.target is not aten.logical_not.default:
        raise Blocked("a logical operation on numbers that are made of scores")
    _check_comparison([x])
    return self.combined("eq", x, self.operand(0.0))


def _check_comparison(operands: Sequence[Placed]) -> None:
    """Scores of a narrow type are compared as they were rounded, which is not known here."""
    for x in operands:
        for dot in x.formula.dots:
            if any(dtype.itemsize < 4 for dtype in dot.dtypes):
                raise Blocked("scores of a narrow type are compared")


@rule(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
def _sum_of_two(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x, y = self.operand(a["self"]), self.operand(a["other"])
    if x.formula.is_bool or y.formula.is_bool:
        raise Blocked("conditions are added to scores")
    alpha = a.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        raise Blocked("scores meet a number that is not known")
    if alpha != 1:
        y = self.combined("mul", y, self.operand(alpha))
    op = "add" if node.target in (aten.add.Tensor, aten.add.Scalar) else "sub"
    return self.combined(op, x, y)


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    if a.get("alpha", 1) != 1:
        raise Blocked("rsub with a factor")
    return self.pointwise("sub", a["other"], a["self"])


@rule(aten.reciprocal.default)
def _reciprocal(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.pointwise("div", 1.0, a["self"])


@rule(aten.rsqrt.default)
def _rsqrt(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    root = self.pointwise("sqrt", a["self"])
    return self.combined("div", self.operand(1.0), root)


@rule(aten.log2.default)
def _log2(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("mul", self.pointwise("log", a["self"]), self.operand(1 / math.log(2)))


@rule(aten.square.default)
def _square(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.pointwise("mul", a["self"], a["self"])


@rule(aten.softplus.default)
def _softplus(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    if a.get("beta", 1) != 1 or a.get("threshold", 20) != 20:
        raise Blocked("softplus with a beta or threshold")
    return self.pointwise("softplus", a["self"])


@rule(aten.log_sigmoid.default)
def _log_sigmoid(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("neg", self.combined("softplus", self.pointwise("neg", a["self"])))


@rule(aten.pow.Tensor_Scalar)
def _pow(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    exponent = a["exponent"]
    if not isinstance(exponent, (int, float)) or abs(exponent) > MAX_POWER:
        raise Blocked("a power of scores whose exponent is not known, or large")
    return self.pointwise("pow", a["self"], data=float(exponent))


@rule(aten.clamp.default, aten.clip.default)
def _clamp(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    for bound, op in ((a.get("min"), "clamp_min"), (a.get("max"), "clamp_max")):
        if isinstance(bound, fx.Node):
            raise Blocked("scores are clamped by a tensor")
        if bound is not None:
            x = self.combined(op, x, self.operand(bound))
    return x


@rule(aten.clamp_min.default)
def _clamp_min(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.pointwise("clamp_min", a["self"], a["min"])


@rule(aten.clamp_max.default)
def _clamp_max(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.pointwise("clamp_max", a["self"], a["max"])


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def _where(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("where", _condition(self, a["condition"]), *_both(self, a))


def _both(self: RowElements, a: Arguments) -> tuple[Placed, Placed]:
    return self.operand(a["self"]), self.operand(a["other"])


def _condition(self: RowElements, x: object) -> Placed:
    condition = self.operand(x)
    if not condition.formula.is_bool:
        raise Blocked("a condition that is a number")
    return condition


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    fill = self.operand(a["value"])
    if fill.formula.flows:
        raise Blocked("scores are filled with a tensor that has a gradient")
    return self.combined("where", _condition(self, a["mask"]), fill, self.operand(a["self"]))


@rule(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def _xlogy(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x, y = self.operand(a["self"]), self.operand(a["other"])
    values = self.combined("mul0", x, self.combined("log", y))
    if _vanishes_with_gradient(x.formula):
        return values
    # torch's gradient to x is 0 where both are 0, not the infinite logarithm
    zero = self._number(0.0)
    _check_comparison([x, y])
    is_zero = self.combined("and", self.combined("eq", x, zero), self.combined("le", y, zero))
    return self.combined("where", is_zero, zero, values)


def _vanishes_with_gradient(x: Formula) -> bool:
    """Whether an element that is 0 has a gradient of 0 as well, as a probability has."""
    match x.op:
        case _ if not x.flows:
            return True
        case "exp":
            return True
        case "mul" | "mul0":
            return all(map(_vanishes_with_gradient, x.args))
        case "div" | "pow" | "sqrt":
            return _vanishes_with_gradient(x.args[0])
    return False


@rule(aten.lerp.Scalar)
def _lerp(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    start, end = self.operand(a["self"]), self.operand(a["end"])
    weighted = self.combined("mul", self.operand(a["weight"]), self.combined("sub", end, start))
    return self.combined("add", start, weighted)


@rule(aten.dropout.default)
def _dropout(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    if a["p"] != 0.0 and a["train"]:
        raise Blocked("dropout changes the probabilities after the softmax")
    return self.operand(a["input"])


@rule(aten.scatter.value, aten.scatter_.value, aten.scatter.src, aten.scatter_.src)
def _scatter(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    """A number at given ids of a constant: a mask of labels."""
    base = self.recognised.values.get(a["self"])
    value = self.recognised.values.get(a["src"]) if "src" in a else a["value"]
    if isinstance(value, Number):
        value = value.value
    if not isinstance(base, Number) or not isinstance(value, (int, float)):
        raise Blocked("scatter of scores")
    dim = a["dim"] % len(shape_of(node))
    hits = self.at_ids(a["index"], shape_of(node), dim)
    if node.meta["val"].dtype == torch.bool:
        if base.value != 0 or value == 0:
            raise Blocked("scatter into a condition")
        return hits
    return self.combined("where", hits, self._number(float(value)), self._number(base.value))


@rule(aten.gather.default)
def _gather(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    """One entry of each row: a sum in which all others are 0."""
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    dim = a["dim"] % len(x.dims)
    if not is_one(shape_of(a["index"])[dim]):
        raise Blocked("several entries of a row are gathered")
    hits = self.at_ids(a["index"], x.shape, dim)
    kept = self.combined("where", hits, x, self._number(0.0))
    return self.reduced("sum", replace(kept, shape=x.shape), [dim], True)


# ------------------------------------------------------------------ softmax and sums


def _logits(self: RowElements, node: fx.Node, a: Arguments) -> tuple[Placed, Placed]:
    x = self.operand(a["self"])
    x = replace(x, shape=tuple(shape_of(a["self"])))
    dim = a["dim"] % len(x.dims)
    return x, self.reduced("logsumexp", x, [dim], True)


@rule(aten.log_softmax.int, aten._log_softmax.default)
def _log_softmax(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("sub", *_logits(self, node, a))


@rule(aten.softmax.int, aten._softmax.default)
def _softmax(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("exp", self.combined("sub", *_logits(self, node, a)))


@rule(aten.logsumexp.default)
def _logsumexp(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    if is_filled(x.formula, ROUNDED):
        # in a row without keys eager code's sum is the fill, in which their count is lost
        raise Blocked("the log-sum-exp of scores that a large number may stand in place of")
    given = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
    dims = [d % len(x.dims) for d in given]
    return self.reduced("logsumexp", x, dims, bool(a.get("keepdim", False)))


@rule(aten.amax.default)
def _amax(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    given = a.get("dim", [])
    dims = [d % len(x.dims) for d in ([given] if isinstance(given, int) else given)]
    return self.reduced("max", x, dims or range(len(x.dims)), bool(a.get("keepdim", False)))


@rule(aten.sum.dim_IntList, aten.sum.default)
def _sum(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return _summed(self, a, mean=False)


@rule(aten.mean.dim, aten.mean.default)
def _mean(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return _summed(self, a, mean=True)


def _summed(self: RowElements, a: Arguments, *, mean: bool) -> Placed:
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    rank = len(x.dims)
    given = a.get("dim")
    if isinstance(given, int):
        given = [given]
    dims = sorted({d % rank for d in given}) if given else list(range(rank))
    counted = tuple(x.shape[d] for d in dims) if mean else ()
    return self.reduced("sum", x, dims, bool(a.get("keepdim", False)), 1.0, counted)


@rule(aten.linalg_vector_norm.default)
def _norm(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    order = a.get("ord", 2)
    x = self.operand(a["self"])
    if order == 1:
        inside = self.combined("abs", x)
    elif order == 2:
        inside = self.combined("mul", x, x)
    else:
        raise Blocked(f"a norm of order {order}")
    shape = tuple(shape_of(a["self"]))
    given = a.get("dim")
    dims = [given] if isinstance(given, int) else given or range(len(shape))
    total = self.reduced(
        "sum",
        replace(inside, shape=shape),
        [d % len(shape) for d in dims],
        bool(a.get("keepdim", False)),
    )
    return total if order == 1 else self.combined("norm", total)


@rule(aten.cosine_similarity.default)
def _cosine_similarity(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    """Norms are bounded from below without a gradient: it flows as if they were not."""
    shape = tuple(shape_of(a["x1"]))
    if len(shape) != len(shape_of(a["x2"])) or not all(map(same, shape, shape_of(a["x2"]))):
        raise Blocked("cosine_similarity of tensors of two shapes")
    if a["x1"].meta["val"].dtype != a["x2"].meta["val"].dtype:
        raise Blocked("cosine_similarity of tensors of two types")
    dim = a.get("dim", 1) % len(shape)
    units = []
    for name in ("x1", "x2"):
        x = self.operand(a[name])
        squares = replace(self.combined("mul", x, x), shape=shape)
        norm = self.combined("norm", self.reduced("sum", squares, [dim], True))
        bounded = self.combined("clamp_min", norm, self._number(a.get("eps", 1e-8)))
        missing = _without_gradient(self, self.combined("sub", bounded, norm))
        units.append(self.combined("div", x, self.combined("add", norm, missing)))
    values = replace(self.combined("mul", *units), shape=shape)
    return self.reduced("sum", values, [dim], False)


def _total(self: RowElements, node: fx.Node, x: Placed, shape: Any, reduction: int) -> Placed:
    """The reduction that a loss of torch ends with."""
    how = REDUCTIONS[reduction]
    x = replace(x, shape=tuple(shape))
    if how == "none":
        return x
    dims = list(range(len(x.dims)))
    return self.reduced("sum", x, dims, False, 1.0, tuple(shape) if how == "mean" else ())


def _shape_of_two(a: Arguments) -> tuple[Size, ...]:
    return tuple(torch.broadcast_shapes(shape_of(a["self"]), shape_of(a["target"])))


@rule(aten.kl_div.default)
def _kl_div(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    types = [a[name].meta["val"].dtype for name in ("self", "target")]
    if types[0] != types[1]:
        raise Blocked("the input and the target of kl_div are of two types")
    x, target = self.operand(a["self"]), self.operand(a["target"])
    if a.get("log_target"):
        difference = self.combined("sub", target, x)
        values = self.combined("mul", self.combined("exp", target), difference)
    else:
        difference = self.combined("sub", self.combined("log", target), x)
        values = self.combined("mul0", target, difference)
    return _total(self, node, values, _shape_of_two(a), a.get("reduction", 1))


@rule(aten.mse_loss.default)
def _mse_loss(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    difference = self.pointwise("sub", a["self"], a["target"])
    values = self.combined("mul", difference, difference)
    return _total(self, node, values, _shape_of_two(a), a.get("reduction", 1))


@rule(aten.l1_loss.default)
def _l1_loss(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    values = self.combined("abs", self.pointwise("sub", a["self"], a["target"]))
    return _total(self, node, values, _shape_of_two(a), a.get("reduction", 1))


@rule(aten.cross_entropy_loss.default)
def _cross_entropy(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    """Of probabilities: of labels it is no sum over the words."""
    if not a["target"].meta["val"].is_floating_point():
        raise Blocked("cross_entropy of labels")
    if a.get("weight") is not None or a.get("label_smoothing", 0.0):
        raise Blocked("cross_entropy with class weights or label smoothing")
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    dim = 1 if len(x.dims) > 1 else 0
    logs = self.combined("sub", x, self.reduced("logsumexp", x, [dim], True))
    values = self.combined("neg", self.combined("mul", self.operand(a["target"]), logs))
    values = replace(values, shape=x.shape)
    reduction = REDUCTIONS[a.get("reduction", 1)]
    if reduction == "none":
        return self.reduced("sum", values, [dim], False)
    counted = tuple(s for d, s in enumerate(x.shape) if d != dim) if reduction == "mean" else ()
    return self.reduced("sum", values, list(range(len(x.dims))), False, 1.0, counted)


# ------------------------------------------------------------------ views and casts


@rule(operator.getitem)
def _getitem(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    source, index = node.args
    assert isinstance(source, fx.Node)
    if source.target == aten.max.dim and index == 0:
        of = named_arguments(source)
        return _amax(self, source, of)
    if source.target != aten.broadcast_tensors.default:
        raise Blocked(f"{name_of(source)} of scores")
    tensors: Any = source.args[0]
    x = self.operand(tensors[index])
    return Placed(x.formula, ((),) * (len(shape_of(node)) - len(x.dims)) + x.dims)


def _moved(self: RowElements, a: Arguments, order: Sequence[int | None]) -> Placed:
    x = self.operand(a["self"])
    return Placed(x.formula, tuple(() if d is None else x.dims[d] for d in order))


@rule(*RESHAPES)
def _view(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    before = shape_of(a["self"])
    if any(not is_one(n) and not self.axes.atoms(d) for d, n in zip(x.dims, before, strict=True)):
        after = shape_of(node)
        if len(before) != len(after) or not all(map(same, before, after)):
            raise Blocked("reshape of elements that are broadcast")
        return x
    return Placed(x.formula, self.axes.reshaped(x.dims, shape_of(node)))


@rule(aten.transpose.int)
def _transpose(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    order: list[int | None] = list(range(len(shape_of(node))))
    x, y = a["dim0"] % len(order), a["dim1"] % len(order)
    order[x], order[y] = order[y], order[x]
    return _moved(self, a, order)


@rule(aten.permute.default)
def _permute(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return _moved(self, a, [d % len(a["dims"]) for d in a["dims"]])


@rule(aten.mT.default, aten.adjoint.default, aten.t.default, aten.numpy_T.default)
def _matrix_transpose(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    rank = len(shape_of(node))
    if rank != 2 and node.target not in (aten.mT.default, aten.adjoint.default):
        raise Blocked("t of scores")
    return _moved(self, a, [*range(rank - 2), rank - 1, rank - 2])


@rule(aten.unsqueeze.default)
def _unsqueeze(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    rank = len(shape_of(node))
    dim = a["dim"] % rank
    return _moved(self, a, [*range(dim), None, *range(dim, rank - 1)])


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    source = shape_of(a["self"])
    given = a.get("dim")
    every = range(len(source)) if given is None else [given] if isinstance(given, int) else given
    dropped = [d % len(source) for d in every if is_one(source[d])]
    return _moved(self, a, [d for d in range(len(source)) if d not in dropped])


@rule(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def _expand(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    extra = len(shape_of(node)) - len(x.dims)
    return Placed(x.formula, ((),) * extra + x.dims)


@rule(
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
)
def _same(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return self.operand(a["self"])


@rule(aten.detach.default)
def _detach(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    return _without_gradient(self, self.operand(a["self"]))


def _without_gradient(self: RowElements, x: Placed) -> Placed:
    formula = replace(self.formula("detach", x.formula), flows=frozenset())
    return replace(x, formula=formula) if x.formula.flows else x


@rule(*CASTS)
def _cast(self: RowElements, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    if node.meta["val"].device != a["self"].meta["val"].device:
        raise Blocked("scores are moved to another device")
    made = node.meta["val"].dtype
    if x.formula.is_bool and made.is_floating_point:
        return self.combined("float", x)
    if not x.formula.is_bool and made == torch.bool:
        _check_comparison([x])
        return self.combined("ne", x, self.operand(0.0))
    return x


def is_filled(scores: Formula, least: float) -> bool:
    """Whether a finite number of at least this size stands in place of scores, or is added.

    A tensor of rows and keys without a gradient may be a mask that is added.
    """
    stack, seen = [scores], {scores}
    while stack:
        f = stack.pop()
        if f.op == "const" and least <= abs(f.data) < math.inf:
            return True
        if f.op == "capture" and not (f.is_bool or f.flows) and len(f.axes) > 1:
            return True
        if f.op not in ("reduce", *CONDITIONS):
            fresh = [a for a in f.args if a not in seen and not a.is_bool]
            seen.update(fresh)
            stack += fresh
    return False


def is_supported(root: Formula) -> bool:
    """Whether a formula has a sum of dot products."""
    return any(f.op == "reduce" for f in formulas_in(root))
