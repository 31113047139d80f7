"""Reads comparisons, logic, and what chooses by a condition."""

from __future__ import annotations

import math

import torch

from torch_streamkl.fx_passes.reading import arrays, types
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.index_values import promoted
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, in_type, number_of, rule
from torch_streamkl.fx_passes.reading.rules.reductions import over
from torch_streamkl.fx_passes.reading.types import stored
from torch_streamkl.program.canonical import (
    TRUE,
    all_of,
    any_of,
    choose,
    compare,
    linear,
    negation,
    nonnegative,
    truth,
)
from torch_streamkl.program.functions import function
from torch_streamkl.program.graph import ANY, BOOL, FLOAT, INT, Node, const

aten = torch.ops.aten


def _comparison(call: Call) -> Array:
    op = call.name
    given = [call.get(name) for name in ("self", "other")]
    recorded = [x.meta.get("val") if isinstance(x, torch.fx.Node) else x for x in given]
    dtype = promoted(*recorded)
    call.observes(op)

    def compared(a: Node, b: Node) -> Node:
        if a.dtype == BOOL and b.dtype == BOOL and op in ("eq", "ne"):
            same = any_of(all_of(a, b), all_of(negation(a), negation(b)))
            return same if op == "eq" else negation(same)
        return compare(op, *(_in_common(x, dtype) for x in (a, b)))

    return call.pointwise(compared, *call.arrays("self", "other"))


def _in_common(x: Node, dtype: torch.dtype) -> Node:
    """An operand in the type in which torch compares."""
    if dtype == torch.bool:
        return number_of(x, INT)
    if x.op == "const":
        if math.isfinite(x.value) or dtype.is_floating_point:
            found = in_type(x.value, dtype)
            is_whole = math.isfinite(found.value) and found.value == int(found.value)
            return const(found.value, INT) if is_whole else found
        raise NoRule(f"{x.value} among integers")
    x = number_of(x, INT)
    return stored(x, dtype) if x.dtype == INT else x


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _packet = getattr(aten, _name)
    rule(_packet.Tensor, _packet.Scalar)(_comparison)


def _logic(call: Call) -> Array:
    name = call.name
    x, y = call.arrays("self", "other")
    if not name.startswith("logical") and call.dtype != torch.bool:
        raise NoRule("bits of integers")
    make = all_of if name.endswith("and") else any_of
    return call.pointwise(lambda a, b: make(truth(a), truth(b)), x, y)


for _packet in (aten.bitwise_and, aten.bitwise_or, aten.__and__, aten.__or__):
    _names = [n for n in ("Tensor", "Scalar", "Scalar_Tensor") if n in _packet.overloads()]
    rule(*(getattr(_packet, n) for n in _names))(_logic)
rule(aten.logical_and.default, aten.logical_or.default)(_logic)


@rule(aten.bitwise_xor.Tensor, aten.logical_xor.default)
def exclusive_or(call: Call) -> Array:
    """Reads whether one of two conditions holds."""
    if call.dtype != torch.bool:
        raise NoRule("bits of integers")

    def either(a: Node, b: Node) -> Node:
        a, b = truth(a), truth(b)
        return any_of(all_of(a, negation(b)), all_of(negation(a), b))

    return call.pointwise(either, *call.arrays("self", "other"))


@rule(aten.bitwise_not.default, aten.logical_not.default)
def opposite(call: Call) -> Array:
    """Reads the opposite of a condition."""
    if call.dtype != torch.bool:
        raise NoRule("bits of integers")
    return call.array("self").map(lambda e: negation(truth(e)))


@rule(aten.isnan.default, aten.isinf.default, aten.isfinite.default)
def special(call: Call) -> Array:
    """Reads which values are no numbers, which the program keeps as a question."""
    name = call.name
    call.observes(name)
    x = call.array("self")
    if x.expr.dtype != FLOAT:
        return x.map(lambda e: TRUE if name == "isfinite" else negation(TRUE))
    if name == "isfinite":
        return x.map(lambda e: negation(any_of(function("isnan", e), function("isinf", e))))
    return x.map(lambda e: function(name, e))


# ------------------------------------------------------------------------ choices


def chosen(call: Call, condition: Array, a: Array, b: Array) -> Array:
    """Returns ``where(condition, a, b)`` of tensors and numbers in the type of the result."""
    dtype = call.dtype

    def choice(c: Node, x: Node, y: Node) -> Node:
        c = truth(c)
        if dtype == torch.bool:
            return any_of(all_of(c, truth(x)), all_of(negation(c), truth(y)))
        return choose(c, *(_as_result(e, dtype) for e in (x, y)))

    return call.pointwise(choice, condition, a, b)


def _as_result(x: Node, dtype: torch.dtype) -> Node:
    return in_type(x.value, dtype) if x.op == "const" else number_of(x, types.kind_of(dtype))


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(call: Call) -> Array:
    """Reads a choice."""
    return chosen(call, *call.arrays("condition", "self", "other"))


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(call: Call) -> Array:
    """Reads a fill where a mask holds."""
    mask, value, x = call.arrays("mask", "value", "self")
    return chosen(call, mask, value, x)


@rule(aten.tril.default, aten.triu.default)
def triangle(call: Call) -> Array:
    """Reads a triangle: what is outside is 0."""
    x, diagonal = call.array("self"), call.number("diagonal", 0)
    i, j = (arrays.position(x.dims[d]) for d in (-2, -1))
    is_lower = call.node.target in (aten.tril.default, aten.tril_.default)
    sign = 1.0 if is_lower else -1.0
    kept = nonnegative(linear(0.0, [(sign, diagonal), (sign, i), (-sign, j)]))
    if call.dtype == torch.bool:
        return x.map(lambda e: all_of(kept, truth(e)))
    return x.map(lambda e: choose(kept, e, const(0.0, e.dtype)))


@rule(aten.any.default, aten.any.dim, aten.any.dims)
def any_along(call: Call) -> Array:
    """Reads whether any element is not 0."""
    x = call.array("self").map(truth)
    return over(ANY, x, call.dims(), call.keepdim)


@rule(aten.all.default, aten.all.dim, aten.all.dims)
def all_along(call: Call) -> Array:
    """Reads whether every element is not 0."""
    x = call.array("self").map(lambda e: negation(truth(e)))
    return over(ANY, x, call.dims(), call.keepdim).map(negation)
