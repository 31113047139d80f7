"""Defines rules for sums and products of scores, probabilities, rows and masks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.analysis.rules.softmax import (
    SoftmaxRules,
    is_shift_of,
    is_sum_of,
)
from torch_streamkl.fx_passes.analysis.rules.value_masks import ValueMaskRules
from torch_streamkl.fx_passes.domain import element_algebra as elements
from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain import row_algebra as rows
from torch_streamkl.fx_passes.domain.layout import Layout
from torch_streamkl.fx_passes.domain.masks import BoolTensor, Choice, to_axes
from torch_streamkl.fx_passes.domain.score_sums import sum_of_heads
from torch_streamkl.fx_passes.domain.scores import (
    ABSORBING,
    Bias,
    Factor,
    Masking,
    Scale,
    Scores,
    Shift,
)
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    ExpSum,
    LogSumExp,
    Number,
    RowMax,
    Rows,
    Shifted,
    where_within,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import provably_equal, shape_of
from torch_streamkl.program.graph import ZERO

aten = torch.ops.aten


class ArithmeticRules(ValueMaskRules, SoftmaxRules):
    """Adds the rules for + - * / between tensors to the interpreter."""

    @rule(aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor, aten.add_.Scalar)
    def add(self, node: fx.Node, a: Arguments) -> object:
        return self._sum(node, a["self"], a["other"], 1.0, a.get("alpha", 1))

    @rule(aten.sub.Tensor, aten.sub.Scalar, aten.sub_.Tensor, aten.sub_.Scalar)
    def sub(self, node: fx.Node, a: Arguments) -> object:
        return self._sum(node, a["self"], a["other"], -1.0, a.get("alpha", 1))

    @rule(aten.rsub.Tensor, aten.rsub.Scalar)
    def rsub(self, node: fx.Node, a: Arguments) -> object:
        return self._sum(node, a["other"], a["self"], -1.0, a.get("alpha", 1))

    def _sum(
        self, node: fx.Node, left: object, right: object, sign: float, alpha: object
    ) -> object:
        if alpha != 1:
            return self._no_rule(node, "add with alpha")
        x, y = self.value(left), self.value(right)
        op = "add" if sign > 0 else "sub"
        match x, y:
            case Elements(), Elements():
                return elements.combined(op, x, y)
            case Rows(), Rows():
                return rows.rows_combined(x, y, sign)
            case Elements(), Number():
                return elements.with_constant(op, x, y.value)
            case Number(), Elements():
                return elements.with_constant(op, y, x.value, reverse=True)
            case Elements(), Scores():
                return elements.combined(op, x, self._raw(y, x))
            case Scores(), Elements():
                return elements.combined(op, self._raw(x, y), y)
            case Scores(), LogSumExp() if sign < 0:
                return self._log_probabilities(node, x, y)
            case Shifted(), ExpSum(logarithm=True) if sign < 0 and not x.exponential:
                if is_sum_of(x, y):
                    return self._softmax(x.scores, x.axis, log=True)
            case Rows(), LogSumExp():
                return rows.rows_and_lse(x, y, sign)
            case LogSumExp(), Rows():
                return rows.rows_and_lse(y.scaled(sign), x, 1.0)
            case Scores(), RowMax() if sign < 0 and is_shift_of(x, y):
                return Shifted(x, y.axis, y.scores)
            case Scores(), Number():
                return x.then(Shift(y.value * sign))
            case Number(), Scores():
                return y.then(Scale(sign), Shift(x.value))
            case Scores(), Scores() if (total := sum_of_heads(x, y, sign)) is not None:
                return total
            case Scores(), _ if isinstance(right, fx.Node):
                return self._scores_plus_tensor(node, x, right, sign)
            case _, Scores() if isinstance(left, fx.Node):
                return self._scores_plus_tensor(node, y.then(Scale(sign)), left, 1.0)
        return self.mask_sum(node, left, right, sign)

    def _scores_plus_tensor(self, node: fx.Node, x: Scores, other: fx.Node, sign: float) -> Scores:
        if self.rank[other] > len(x.layout):
            raise Unsupported("scores are broadcast against a tensor with more dimensions")
        self._stays_as_wide(node, x)
        y = self.value(other)
        if isinstance(y, Choice):
            if not y.mask.literals:  # one number everywhere
                value = y.outside if y.mask.negative else y.inside
                return x.then(Shift(value * sign))
            mask = to_axes(y.mask, x.layout, self.rank)
            inside, outside = y.inside * sign, y.outside * sign
            if inside != 0.0 and outside == 0.0:
                mask, inside, outside = (
                    to_axes(y.mask.inverted(), x.layout, self.rank),
                    outside,
                    inside,
                )
            if mask is not None and inside == 0.0 and outside <= ABSORBING:
                return x.then(Masking(mask, outside, added=True))
        return x.then(Bias(self._dense(other, x.layout), sign))

    def _stays_as_wide(self, node: fx.Node, x: Scores) -> None:
        """Operators compute in the type of q and k; a float64 tensor makes eager scores wider."""
        if node.meta["val"].dtype == torch.float64 and x.key.dtype not in (None, torch.float64):
            raise Unsupported("scores become float64 by a tensor that is added or multiplied")

    def _dense(self, node: fx.Node, layout: Layout) -> TensorRef:
        """A tensor that is combined with the scores, at the size it had before it was expanded."""
        self._stays_blocked(node)
        source, dims = self.unexpanded(node)
        rank = self.rank[source]
        placed: list[lay.Dim] = [()] * rank
        skipped = len(layout) - len(dims)
        for d, origin in enumerate(dims):
            if origin is not None:
                placed[origin] = layout[skipped + d]
        shape = shape_of(source)
        if any(not provably_equal(lay.dim_size(p), s) for p, s in zip(placed, shape, strict=True)):
            raise Unsupported("a tensor that does not match the scores is added to them")
        return replace(self.reference(source, tuple(placed)), grad=self.requires_grad(node))

    @rule(aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar)
    def mul(self, node: fx.Node, a: Arguments) -> object:
        return self._product(node, a["self"], a["other"], divides=False)

    @rule(
        aten.div.Tensor,
        aten.div.Scalar,
        aten.div.Tensor_mode,
        aten.div.Scalar_mode,
        aten.div_.Tensor,
        aten.div_.Tensor_mode,
        aten.div_.Scalar,
        aten.div_.Scalar_mode,
        aten.true_divide.Tensor,
        aten.true_divide.Scalar,
    )
    def div(self, node: fx.Node, a: Arguments) -> object:
        if a.get("rounding_mode") is not None:
            return self._no_rule(node, "div with a rounding mode")
        return self._product(node, a["self"], a["other"], divides=True)

    def _product(self, node: fx.Node, left: object, right: object, *, divides: bool) -> object:
        x, y = self.value(left), self.value(right)
        op = "div" if divides else "mul"
        match x, y:
            case Number(), (Elements() | Scores() | Rows()) if not divides:
                return self._times_number(y, x.value)
            case Number(), Elements():
                return elements.with_constant(op, y, x.value, reverse=True)
            case ((Elements() | Scores() | Rows()), Number()):
                if y.value == 0.0 and divides:
                    raise Unsupported("division by 0")
                return self._times_number(x, 1.0 / y.value if divides else y.value)
            case Elements(), Elements():
                return elements.combined(op, x, y)
            case Elements(), Scores() if not divides:
                return elements.combined(op, x, self._raw(y, x))
            case Scores(), Elements() if not divides:
                return elements.combined(op, self._raw(x, y), y)
            case Elements(), Rows() if divides:
                return self._normalised(x, y)
            case Rows(), None if divides and (size := symbolic_size(right)) is not None:
                return replace(x, divisors=(*x.divisors, size))
            case Shifted(exponential=True), ExpSum(logarithm=False) if divides:
                if is_sum_of(x, y):
                    return self._softmax(x.scores, x.axis, log=False)
            case Elements(), (Choice() | BoolTensor()) if not divides:
                return self._times_mask(x, y, right)
            case ((Choice() | BoolTensor()), Elements()) if not divides:
                return self._times_mask(y, x, left)
            case Elements(), _:
                return elements.with_row_factor(x, self._row_factor(x, right, divides=divides))
            case _, Elements() if not divides:
                return elements.with_row_factor(y, self._row_factor(y, left))
            case Scores(), _ if isinstance(right, fx.Node):
                self._stays_as_wide(node, x)
                return x.then(self._factor(x, right, divides))
            case _, Scores() if isinstance(left, fx.Node) and not divides:
                self._stays_as_wide(node, y)
                return y.then(self._factor(y, left, False))
        return self.mask_product(node, left, right, divides)

    def _times_number(self, x: object, factor: float) -> object:
        if isinstance(x, Elements):
            return elements.with_constant("mul", x, factor)
        if isinstance(x, Rows):
            return x.scaled(factor)
        assert isinstance(x, Scores)
        return x.then(Scale(factor))

    def _factor(self, x: Scores, other: object, divides: bool) -> Factor:
        if not isinstance(other, fx.Node):
            raise Unsupported(
                "scores are multiplied by something that is not a tensor or a number"
            )
        if not isinstance(other.meta.get("val"), Tensor):
            return Factor(TensorRef(other), divides)  # a symbolic number
        return Factor(self._dense(other, x.layout), divides)

    def _raw(self, x: Scores, like: Elements) -> Elements:
        """Reads raw scores next to probabilities: log-probability + log-sum-exp."""
        dim = like.key_dim - (like.rank - len(x.layout))
        if dim < 0:
            raise Unsupported("scores and probabilities of different ranks are combined")
        return elements.raw_scores(x, dim)

    def _normalised(self, x: Elements, y: Rows) -> Elements:
        """Probabilities over their sum, which is known."""
        if (
            y.offsets
            or y.divisors
            or (y.elements.terms and y.elements.terms[0].expr != ZERO)
            or not y.keepdim
        ):
            raise Unsupported("a value is divided by a sum over keys")
        summed = tuple(d - y.elements.rank for d in y.reduced)
        if summed != (x.key_dim - x.rank,) or y.constant == 0.0:
            raise Unsupported("a value is divided by a sum over other dimensions")
        if y.constant_within and any(where_within(t.expr, False) != ZERO for t in x.terms):
            raise Unsupported(
                "a value is divided by a sum over keys that is 0 in rows without keys"
            )
        return elements.with_constant("mul", x, 1.0 / y.constant)


def symbolic_size(x: object) -> torch.SymInt | None:
    """Returns the size that a node or an argument holds."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    return value if isinstance(value, torch.SymInt) else None
