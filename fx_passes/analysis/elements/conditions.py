"""Reads comparisons, logical operations and `where`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import rule
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.domain.row_elements import Placed
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported

aten = torch.ops.aten


_COMPARISONS: dict[str, tuple[object, ...]] = {
    "lt": (aten.lt.Tensor, aten.lt.Scalar),
    "le": (aten.le.Tensor, aten.le.Scalar),
    "gt": (aten.gt.Tensor, aten.gt.Scalar),
    "ge": (aten.ge.Tensor, aten.ge.Scalar),
    "eq": (aten.eq.Tensor, aten.eq.Scalar),
    "ne": (aten.ne.Tensor, aten.ne.Scalar),
    "and": (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor),
    "or": (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor),
}
for _op, _overloads in _COMPARISONS.items():

    def _compared(self: Operands, node: fx.Node, a: Arguments, op: str = _op) -> Placed:
        operands = [self.operand(a[name]) for name in ("self", "other")]
        if op in ("and", "or") and not all(x.formula.is_bool for x in operands):
            raise Unsupported("a logical operation on numbers that are made of scores")
        if op not in ("and", "or"):
            check_comparison(operands)
        return self.combined(op, *operands)

    rule(*_overloads)(_compared)


@rule(aten.logical_not.default, aten.bitwise_not.default)
def _not(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    if x.formula.is_bool:
        return self.combined("not", x)
    if node.target is not aten.logical_not.default:
        raise Unsupported("a logical operation on numbers that are made of scores")
    check_comparison([x])
    return self.combined("eq", x, self.operand(0.0))


def check_comparison(operands: Sequence[Placed]) -> None:
    """Refuses comparisons of narrow scores, whose rounding is not known here."""
    for x in operands:
        for dot in x.formula.dots:
            if any(dtype.itemsize < 4 for dtype in dot.dtypes):
                raise Unsupported("scores of a narrow type are compared")


@rule(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def _where(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("where", _condition(self, a["condition"]), *_both(self, a))


def _both(self: Operands, a: Arguments) -> tuple[Placed, Placed]:
    return self.operand(a["self"]), self.operand(a["other"])


def _condition(self: Operands, x: object) -> Placed:
    condition = self.operand(x)
    if not condition.formula.is_bool:
        raise Unsupported("a condition that is a number")
    return condition


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    fill = self.operand(a["value"])
    if fill.formula.grad_flows:
        raise Unsupported("scores are filled with a tensor that has a gradient")
    return self.combined("where", _condition(self, a["mask"]), fill, self.operand(a["self"]))
