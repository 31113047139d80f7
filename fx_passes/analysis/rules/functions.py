"""Defines rules for functions of one value, and for clamp, lerp, xlogy and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.analysis.rules.masks import MaskRules
from torch_streamkl.fx_passes.domain import element_algebra as elements
from torch_streamkl.fx_passes.domain.absent_keys import drops_absent_keys, may_be_infinite
from torch_streamkl.fx_passes.domain.scores import Scale, Scores, Tanh
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    ExpSum,
    Number,
    Rows,
    Shifted,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.program.graph import ZERO, apply

aten = torch.ops.aten


class FunctionRules(MaskRules):
    """Adds the rules for pointwise functions to the interpreter."""

    @rule(aten.exp.default)
    def exp(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, Shifted) and not x.exponential:
            return replace(x, exponential=True)
        return self._unary(node, a, "exp", math.exp)

    @rule(aten.log.default)
    def log(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, ExpSum) and not x.logarithm:
            return replace(x, logarithm=True)
        return self._unary(node, a, "log", lambda v: math.log(v) if v > 0 else -math.inf)

    @rule(aten.neg.default)
    def neg(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, Rows):
            return x.scaled(-1.0)
        if isinstance(x, Scores):
            return x.then(Scale(-1.0))
        return self._unary(node, a, "neg", lambda v: -v)

    @rule(aten.abs.default)
    def abs(self, node: fx.Node, a: Arguments) -> object:
        return self._unary(node, a, "abs", abs)

    @rule(aten.sqrt.default)
    def sqrt(self, node: fx.Node, a: Arguments) -> object:
        return self._unary(node, a, "sqrt", math.sqrt)

    @rule(aten.log1p.default)
    def log1p(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, Number):
            return Number(math.log1p(x.value))
        if isinstance(x, Elements):
            return elements.unary("log", elements.with_constant("add", x, 1.0))
        return self._no_rule(node, "log1p")

    def _unary(
        self, node: fx.Node, a: Arguments, op: str, on_number: Callable[[float], float]
    ) -> object:
        x = self.value(a["self"])
        if isinstance(x, Elements):
            return elements.unary(op, x)
        if isinstance(x, Number):
            return Number(on_number(x.value))
        return self.mask_unary(node, a["self"], op) or self._no_rule(node, op)

    @rule(aten.tanh.default)
    def tanh(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        return x.then(Tanh()) if isinstance(x, Scores) else self._no_rule(node, "tanh")

    @rule(aten.pow.Tensor_Scalar)
    def pow(self, node: fx.Node, a: Arguments) -> object:
        x, exponent = self.value(a["self"]), a["exponent"]
        if isinstance(x, Elements) and exponent == 2:
            return elements.combined("mul", x, x)
        if isinstance(x, Elements) and exponent == 0.5:
            return elements.unary("sqrt", x)
        return self._no_rule(node, "pow")

    @rule(aten.clamp.default, aten.clip.default, aten.clamp_.default)
    def clamp(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        low, high = a.get("min"), a.get("max")
        if isinstance(x, Rows):
            return self._clamped_constant(node, x, low, high)
        if not isinstance(x, Elements) or isinstance(low, fx.Node) or isinstance(high, fx.Node):
            return self._no_rule(node, "clamp")
        e = x.single()
        if e is None:
            raise Unsupported("clamp of values that carry row weights")
        if low is not None:
            x = x.map(lambda e: apply("clamp_min", e, low))
        if (
            high is not None
            and not (high >= 1.0 and e.op == "P")
            and not (high >= 0.0 and e.op == "logP")
        ):
            x = x.map(lambda e: apply("clamp_max", e, high))
        return x

    @rule(aten.clamp_min.default, aten.clamp_min_.default)
    def clamp_min(self, node: fx.Node, a: Arguments) -> object:
        return self.clamp(node, {"self": a["self"], "min": a["min"]})

    def _clamped_constant(self, node: fx.Node, x: Rows, low: object, high: object) -> object:
        known = not x.offsets and not x.divisors and all(t.expr == ZERO for t in x.elements.terms)
        if known and isinstance(low, (int, float)) and high is None and 0.0 < low <= x.constant:
            return x
        return self._no_rule(node, "clamp")

    @rule(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
    def xlogy(self, node: fx.Node, a: Arguments) -> object:
        x, y = self.value(a["self"]), self.value(a["other"])
        if isinstance(x, Elements) and isinstance(y, Elements):
            return elements.combined("mul", x, elements.unary("log", y))
        return self._no_rule(node, "xlogy")

    @rule(aten.logaddexp.default)
    def logaddexp(self, node: fx.Node, a: Arguments) -> object:
        x, y = self.value(a["self"]), self.value(a["other"])
        if isinstance(x, Elements) and isinstance(y, Elements):
            return elements.combined("logaddexp", x, y)
        return self._no_rule(node, "logaddexp")

    @rule(aten.maximum.default)
    def maximum(self, node: fx.Node, a: Arguments) -> object:
        return self._no_rule(
            node, "maximum"
        )  # halves the gradient at ties: not the clamp of expressions

    @rule(aten.lerp.Scalar, aten.lerp.Tensor)
    def lerp(self, node: fx.Node, a: Arguments) -> object:
        x, y, w = self.value(a["self"]), self.value(a["end"]), self.value(a["weight"])
        if isinstance(x, Elements) and isinstance(y, Elements) and isinstance(w, Number):
            end = elements.with_constant("mul", y, w.value)
            return elements.combined("add", elements.with_constant("mul", x, 1.0 - w.value), end)
        return self._no_rule(node, "lerp")

    @rule(aten.nan_to_num.default)
    def nan_to_num(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if not isinstance(x, Elements):
            return self._no_rule(node, "nan_to_num")
        if a.get("nan") not in (None, 0.0):
            raise Unsupported("values after the softmax that are NaN are replaced")
        if any(may_be_infinite(part.scores) for part in x.parts) and not drops_absent_keys(x):
            raise Unsupported("values after the softmax that are infinite are replaced")
        return x

    @rule(aten.dropout.default)
    def dropout(self, node: fx.Node, a: Arguments) -> object:
        if a["p"] == 0.0 or not a["train"]:
            return self.value(a["input"])
        if isinstance(self.value(a["input"]), Elements):
            raise Unsupported("dropout changes the probabilities after the softmax")
        return None
