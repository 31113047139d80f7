"""Reads arithmetic and pointwise functions."""

from __future__ import annotations

import math

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.conditions import check_comparison
from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import Rule, rule
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.domain.row_elements import Formula, Placed
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.program.operations import MAX_POWER

aten = torch.ops.aten


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
    "logaddexp": (aten.logaddexp.default,),
}
for _op, _overloads in _UNARY.items():
    rule(*_overloads)(_plain(_op, "self"))
for _op, _overloads in _BINARY.items():

    def _binary(self: Operands, node: fx.Node, a: Arguments, op: str = _op) -> Placed:
        operands = [self.operand(a[name]) for name in ("self", "other")]
        if op == "mul" and all(x.formula.is_bool for x in operands):
            op = "and"
        return self.combined(op, *operands)

    rule(*_overloads)(_binary)


@rule(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
def _sum_of_two(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    x, y = self.operand(a["self"]), self.operand(a["other"])
    if x.formula.is_bool or y.formula.is_bool:
        raise Unsupported("conditions are added to scores")
    alpha = a.get("alpha", 1)
    if not isinstance(alpha, (int, float)):
        raise Unsupported("scores meet a number that is not known")
    if alpha != 1:
        y = self.combined("mul", y, self.operand(alpha))
    op = "add" if node.target in (aten.add.Tensor, aten.add.Scalar) else "sub"
    return self.combined(op, x, y)


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    if a.get("alpha", 1) != 1:
        raise Unsupported("rsub with a factor")
    return self.pointwise("sub", a["other"], a["self"])


@rule(aten.reciprocal.default)
def _reciprocal(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.pointwise("div", 1.0, a["self"])


@rule(aten.rsqrt.default)
def _rsqrt(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    root = self.pointwise("sqrt", a["self"])
    return self.combined("div", self.operand(1.0), root)


@rule(aten.log2.default)
def _log2(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("mul", self.pointwise("log", a["self"]), self.operand(1 / math.log(2)))


@rule(aten.square.default)
def _square(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.pointwise("mul", a["self"], a["self"])


@rule(aten.softplus.default)
def _softplus(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    if a.get("beta", 1) != 1 or a.get("threshold", 20) != 20:
        raise Unsupported("softplus with a beta or threshold")
    return self.pointwise("softplus", a["self"])


@rule(aten.log_sigmoid.default)
def _log_sigmoid(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("neg", self.combined("softplus", self.pointwise("neg", a["self"])))


@rule(aten.pow.Tensor_Scalar)
def _pow(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    exponent = a["exponent"]
    if not isinstance(exponent, (int, float)) or abs(exponent) > MAX_POWER:
        raise Unsupported("a power of scores whose exponent is not known, or large")
    return self.pointwise("pow", a["self"], data=float(exponent))


@rule(aten.clamp.default, aten.clip.default)
def _clamp(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    for bound, op in ((a.get("min"), "clamp_min"), (a.get("max"), "clamp_max")):
        if isinstance(bound, fx.Node):
            raise Unsupported("scores are clamped by a tensor")
        if bound is not None:
            x = self.combined(op, x, self.operand(bound))
    return x


@rule(aten.clamp_min.default)
def _clamp_min(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.pointwise("clamp_min", a["self"], a["min"])


@rule(aten.clamp_max.default)
def _clamp_max(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.pointwise("clamp_max", a["self"], a["max"])


@rule(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def _xlogy(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    x, y = self.operand(a["self"]), self.operand(a["other"])
    values = self.combined("mul0", x, self.combined("log", y))
    if _vanishes_with_gradient(x.formula):
        return values
    # torch's gradient to x is 0 where both are 0, not the infinite logarithm
    zero = self.number(0.0)
    check_comparison([x, y])
    is_zero = self.combined("and", self.combined("eq", x, zero), self.combined("le", y, zero))
    return self.combined("where", is_zero, zero, values)


def _vanishes_with_gradient(x: Formula) -> bool:
    """Whether an element that is 0 has a gradient of 0 as well, as a probability has."""
    stack, seen = [x], {x}
    while stack:
        f = stack.pop()
        if not f.grad_flows or f.op == "exp":
            continue
        if f.op not in ("mul", "mul0", "div", "pow", "sqrt"):
            return False
        factors = f.args if f.op in ("mul", "mul0") else f.args[:1]
        stack += [a for a in factors if a not in seen]
        seen.update(factors)
    return True


@rule(aten.lerp.Scalar)
def _lerp(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    start, end = self.operand(a["self"]), self.operand(a["end"])
    weighted = self.combined("mul", self.operand(a["weight"]), self.combined("sub", end, start))
    return self.combined("add", start, weighted)


@rule(aten.dropout.default)
def _dropout(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    if a["p"] != 0.0 and a["train"]:
        raise Unsupported("dropout changes the probabilities after the softmax")
    return self.operand(a["input"])
