"""The recogniser: an abstract interpreter over a region's ATen graph.

Every node gets an abstract value, or none together with a reason why not. Rules are compositional:
each knows one operation and the meanings of its inputs, never a whole spelling, so that spelling,
reduction, scale, masks, casts and layout are independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.functional import ONE, ZERO, apply, const
from torch_streamkl.fx_passes import element_rules as elements
from torch_streamkl.fx_passes import layout as lay
from torch_streamkl.fx_passes import score_rules as scores
from torch_streamkl.fx_passes.constants import Folding
from torch_streamkl.fx_passes.layout import Layout
from torch_streamkl.fx_passes.mask_rules import MaskRules
from torch_streamkl.fx_passes.masks import Affine, AnyKey, BoolTensor, Choice, to_axes
from torch_streamkl.fx_passes.sizes import is_one, same
from torch_streamkl.fx_passes.slicing import example
from torch_streamkl.fx_passes.tracing import Trace
from torch_streamkl.fx_passes.values import (
    ABSORBING,
    IMPROBABLE,
    Absent,
    Blocked,
    Elements,
    ExpSum,
    Factor,
    LogSumExp,
    Number,
    Parts,
    RowFactor,
    RowMax,
    Rows,
    Scores,
    Shifted,
    Stacked,
    where_within,
)

Arguments = dict[str, Any]
KL_DIV_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


class Recogniser(MaskRules):
    """Abstract values of all nodes of a trace, in ``values``, and reasons in ``reasons``."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.values: dict[fx.Node, object] = {}
        self.reasons: dict[fx.Node, str] = {}
        self.canonical: dict[fx.Node, fx.Node] = {}
        self.rank = {
            n: n.meta["val"].dim()
            for n in trace.graph.nodes
            if isinstance(n.meta.get("val"), Tensor)
        }
        self._numbering: dict[object, fx.Node] = {}
        self._by_storage: dict[int, list[fx.Node]] = {}
        self._overwritten: set[fx.Node] = set()
        self._counts: dict[fx.Node, Any] = {}  # number of rows that a boolean index selects
        self.folding = Folding()
        self._constants(trace.module)
        for node in trace.graph.nodes:
            self._visit(node)

    # ------------------------------------------------------------------------------- the machinery
    def _constants(self, module: fx.GraphModule) -> None:
        for node in self.trace.graph.nodes:
            if node.op == "get_attr":
                value = getattr(module, str(node.target), None)
                if isinstance(value, Tensor) and value.numel() == 1 and not _is_fake(value):
                    self.values[node] = Number(float(value))

    def _visit(self, node: fx.Node) -> None:
        self.canonical[node] = self._number(node)
        if node.op != "call_function":
            self._note_storage(node)
            return
        name = op_name(node)
        try:
            if any(a in self._overwritten for a in node.all_input_nodes):
                raise Blocked(
                    "a tensor that is modified in place through a view of it is used afterwards"
                )
            value = self._apply(node, name)
        except Blocked as reason:
            self.reasons[node] = str(reason)
            value = None
        finally:
            self._note_writes(node)
            self._note_storage(node)
        if node in self.reasons:
            return
        if _is_pure(node):
            self.folding.visit(node)
            if not isinstance(value, (Number, Affine)):
                value = self.folding.meaning(node) or value
        if value is None and isinstance(node.meta.get("val"), Tensor):
            value = self.unknown(node)
        if value is not None:
            self.values[node] = value

    def _note_storage(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            self._by_storage.setdefault(value.untyped_storage()._cdata, []).append(node)

    def _note_writes(self, node: fx.Node) -> None:
        """After a write, what the analysis knows of other views of the storage is void."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            return
        for argument, value in zip(target._schema.arguments, node.args, strict=False):
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(value, fx.Node)
            ):
                known = value.meta.get("val")
                if isinstance(known, Tensor):
                    aliases = self._by_storage.get(known.untyped_storage()._cdata, [])
                    self._overwritten.update(a for a in aliases if a is not value)

    def _number(self, node: fx.Node) -> fx.Node:
        """The first node that computes the same: equal pure operations on equal inputs."""
        if node.op != "call_function" or not _is_pure(node):
            return node
        try:
            arguments = fx.map_arg(
                (node.args, tuple(sorted(node.kwargs.items()))), lambda n: self.canonical[n]
            )
            key = (node.target, _hashable(arguments), _shape_key(node))
            return self._numbering.setdefault(key, node)
        except TypeError:
            return node

    def _apply(self, node: fx.Node, name: str) -> object:
        same_node = self.canonical[node]
        if (
            same_node is not node
            and same_node in self.values
            and not self._differs_in_gradient(node, same_node)
        ):
            return self.values[same_node]
        rule: Callable[[fx.Node, Arguments], object] | None = getattr(self, f"op_{name}", None)
        arguments = named_arguments(node)
        if rule is None:
            return self._no_rule(node, name)
        value = rule(node, arguments)
        if isinstance(value, Scores) and value.key.dtype is None:
            value = value.with_key(dtype=self._dtype_of(node))
        return value

    def _dtype_of(self, node: fx.Node) -> torch.dtype:
        """What Dynamo recorded, which knows of autocast, or what the trace has."""
        source = self.trace.outer.get(node)
        value = example(source) if source is not None else node.meta["val"]
        assert isinstance(value, Tensor)
        return value.dtype

    def _no_rule(self, node: fx.Node, name: str) -> object:
        known = [self.value(a) for a in node.all_input_nodes]
        if any(isinstance(v, Rows) for v in known):
            return None  # what the user does with rows stays the user's code
        if any(isinstance(v, (Elements, Shifted)) for v in known):
            raise Blocked(f"{name} of attention or vocabulary probabilities")
        if any(isinstance(v, Scores) for v in known):
            raise Blocked(f"{name} of scores")
        for a in node.all_input_nodes:
            if a in self.reasons:
                raise Blocked(self.reasons[a])
        return None

    def value(self, x: object) -> object:
        """The abstract value of an argument: a number stands for itself."""
        if isinstance(x, fx.Node):
            return self.values.get(x)
        if isinstance(x, (bool, int, float)):
            return Number(float(x))
        return None

    def trained(self, node: fx.Node) -> bool:
        """Whether gradient flows through a node: what Dynamo recorded for the user's code."""
        source = self.trace.outer.get(node) or self.trace.origin.get(node)
        value = example(source) if source is not None else None
        return bool(isinstance(value, Tensor) and value.requires_grad)

    def _differs_in_gradient(self, a: fx.Node, b: fx.Node) -> bool:
        return self.trained(a) != self.trained(b)

    def _stays_blocked(self, *nodes: object) -> None:
        """Raise the reason of an input that was blocked before."""
        for node in nodes:
            if isinstance(node, fx.Node) and node in self.reasons:
                raise Blocked(self.reasons[node])

    # ---------------------------------------------------------------------------- score producers
    def op_matmul(self, node: fx.Node, a: Arguments) -> object:
        lhs, rhs = (self.canonical[n] for n in node.args[:2])  # type: ignore[index]
        probabilities = self.value(node.args[0])
        if isinstance(probabilities, Elements) and not isinstance(
            self.value(node.args[1]), Elements
        ):
            attention = scores.attention_of(probabilities, rhs)
            if attention is not None:
                return attention
        if self.rank[lhs] < 2 or self.rank[rhs] < 2:
            return None
        return scores.scores_of_matmul(lhs, rhs, scores.shape_of(node))

    op_bmm = op_matmul
    op_mm = op_matmul

    def op_baddbmm(self, node: fx.Node, a: Arguments) -> object:
        """beta * input + alpha * (batch1 @ batch2)."""
        alpha, beta = a.get("alpha", 1), a.get("beta", 1)
        if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
            return self._no_rule(node, "baddbmm with symbolic factors")
        lhs, rhs = (self.canonical[a[name]] for name in ("batch1", "batch2"))
        product = scores.scaled(
            scores.scores_of_matmul(lhs, rhs, scores.shape_of(node)), float(alpha)
        )
        if beta == 0:
            return product  # the input is not even read
        if beta != 1:
            raise Blocked("baddbmm with a factor on its input")
        return self._scores_plus_tensor(node, product, a["self"], 1.0)

    def op_addmm(self, node: fx.Node, a: Arguments) -> object:
        return self.op_baddbmm(node, {**a, "batch1": a["mat1"], "batch2": a["mat2"]})

    def op_linear(self, node: fx.Node, a: Arguments) -> object:
        bias = a.get("bias")
        return scores.scores_of_linear(
            self.canonical[a["input"]],
            self.canonical[a["weight"]],
            None if bias is None else self.canonical[bias],
            scores.shape_of(node),
        )

    def op_einsum(self, node: fx.Node, a: Arguments) -> object:
        operands = [self.canonical[n] for n in a["tensors"]]
        try:
            return scores.scores_of_einsum(a["equation"], operands, scores.shape_of(node))
        except Blocked:
            return None

    # --------------------------------------------------------------------------------- arithmetic
    def op_add(self, node: fx.Node, a: Arguments) -> object:
        return self._sum(node, a["self"], a["other"], 1.0, a.get("alpha", 1))

    def op_sub(self, node: fx.Node, a: Arguments) -> object:
        return self._sum(node, a["self"], a["other"], -1.0, a.get("alpha", 1))

    def op_rsub(self, node: fx.Node, a: Arguments) -> object:
        return self._sum(node, a["other"], a["self"], -1.0, a.get("alpha", 1))

    op_add_ = op_add
    op_sub_ = op_sub

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
                return elements.rows_combined(x, y, sign)
            case Elements(), Number():
                return elements.with_constant(op, x, y.value)
            case Number(), Elements():
                return elements.with_constant(op, y, x.value, reverse=True)
            case Elements(), Scores():
                return elements.combined(op, x, self._raw(y, x, right))
            case Scores(), Elements():
                return elements.combined(op, self._raw(x, y, left), y)
            case Scores(), LogSumExp() if sign < 0:
                return self._log_probabilities(node, x, y)
            case Shifted(), ExpSum(logarithm=True) if sign < 0 and not x.exponential:
                if (x.scores.key, x.axis) == (y.scores, y.axis):
                    return self._softmax(x.scores, x.axis, x.trained, log=True)
            case Rows(), LogSumExp():
                return elements.rows_and_lse(x, y, sign)
            case LogSumExp(), Rows():
                return elements.rows_and_lse(y.scaled(sign), x, 1.0)
            case Scores(), RowMax() if sign < 0 and x.key == y.scores:
                return Shifted(x, y.axis, self.trained(node))
            case Scores(), Number():
                return self._scores_plus_number(x, y.value * sign)
            case Number(), Scores() if sign > 0:
                return self._scores_plus_number(y, x.value)
            case Number(), Scores():
                return self._scores_plus_number(scores.scaled(y, -1.0), x.value)
            case Scores(), _ if isinstance(right, fx.Node):
                return self._scores_plus_tensor(node, x, right, sign)
            case _, Scores() if isinstance(left, fx.Node):
                return self._scores_plus_tensor(node, scores.scaled(y, sign), left, 1.0)
        return self.mask_sum(node, left, right, sign)

    def _scores_plus_number(self, x: Scores, value: float) -> Scores:
        # a constant does not change a softmax, but it changes masked scores relative to nothing
        if x.key.mask is not None and x.key.fill > ABSORBING:
            raise Blocked(
                "a number is added to scores after they were masked with a moderate value"
            )
        if not math.isfinite(value):
            raise Blocked(f"{value} is added to all scores")
        return x

    def _scores_plus_tensor(self, node: fx.Node, x: Scores, other: fx.Node, sign: float) -> Scores:
        if self.rank[other] > len(x.layout):
            raise Blocked("scores are broadcast against a tensor with more dimensions")
        y = self.value(other)
        if isinstance(y, Choice):
            mask = to_axes(y.mask, x.layout, self.rank)
            inside, outside = y.inside * sign, y.outside * sign
            if inside != 0.0 and outside == 0.0:
                mask, inside, outside = (
                    to_axes(y.mask.inverted(), x.layout, self.rank),
                    outside,
                    inside,
                )
            if mask is not None and inside == 0.0 and outside <= ABSORBING:
                return scores.masked(x, mask, outside, added=True)
        return scores.with_bias(x, *self._dense(other, x.layout), sign)

    def _dense(self, node: fx.Node, layout: Layout) -> tuple[fx.Node, Layout]:
        """A tensor beside the scores, at the size it had before it was expanded."""
        self._stays_blocked(node)
        source, dims = self.unexpanded(node)
        rank = self.rank[source]
        placed: list[lay.Dim] = [()] * rank
        skipped = len(layout) - len(dims)
        for d, origin in enumerate(dims):
            if origin is not None:
                placed[origin] = layout[skipped + d]
        shape = scores.shape_of(source)
        if any(not same(lay.dim_size(p), s) for p, s in zip(placed, shape, strict=True)):
            raise Blocked("a tensor that does not match the scores is added to them")
        return source, tuple(placed)

    def op_mul(self, node: fx.Node, a: Arguments) -> object:
        return self._product(node, a["self"], a["other"], divides=False)

    def op_div(self, node: fx.Node, a: Arguments) -> object:
        if a.get("rounding_mode") is not None:
            return self._no_rule(node, "div with a rounding mode")
        return self._product(node, a["self"], a["other"], divides=True)

    op_mul_ = op_mul
    op_div_ = op_div
    op_true_divide = op_div

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
                    raise Blocked("division by 0")
                return self._times_number(x, 1.0 / y.value if divides else y.value)
            case Elements(), Elements():
                return elements.combined(op, x, y)
            case Elements(), Scores() if not divides:
                return elements.combined(op, x, self._raw(y, x, right))
            case Scores(), Elements() if not divides:
                return elements.combined(op, self._raw(x, y, left), y)
            case Elements(), Rows() if divides:
                return self._normalised(x, y)
            case Rows(), None if divides and (size := symbolic_size(right)) is not None:
                return replace(x, divisors=(*x.divisors, size))
            case Shifted(exponential=True), ExpSum(logarithm=False) if divides:
                if (x.scores.key, x.axis) == (y.scores, y.axis):
                    return self._softmax(x.scores, x.axis, x.trained, log=False)
            case Elements(), (Choice() | BoolTensor()) if not divides:
                return self._times_mask(x, y, right)
            case ((Choice() | BoolTensor()), Elements()) if not divides:
                return self._times_mask(y, x, left)
            case Elements(), _:
                return elements.with_row_factor(x, self._row_factor(x, right, divides=divides))
            case _, Elements() if not divides:
                return elements.with_row_factor(y, self._row_factor(y, left))
            case Scores(), _ if isinstance(right, fx.Node):
                return scores.multiplied(x, self._factor(x, right, divides))
            case _, Scores() if isinstance(left, fx.Node) and not divides:
                return scores.multiplied(y, self._factor(y, left, False))
        return self.mask_product(node, left, right, divides)

    def _times_number(self, x: object, factor: float) -> object:
        if isinstance(x, Elements):
            return elements.with_constant("mul", x, factor)
        if isinstance(x, Rows):
            return x.scaled(factor)
        assert isinstance(x, Scores)
        return scores.scaled(x, factor)

    def _factor(self, x: Scores, other: object, divides: bool) -> Factor:
        if not isinstance(other, fx.Node):
            raise Blocked("scores are multiplied by something that is not a tensor or a number")
        if not isinstance(other.meta.get("val"), Tensor):
            return Factor(other, (), divides)  # a symbolic number
        return Factor(*self._dense(other, x.layout), divides)

    def _row_factor(
        self,
        x: Elements,
        other: object,
        *,
        selects: bool = False,
        keeps: bool = True,
        divides: bool = False,
    ) -> RowFactor:
        if not isinstance(other, fx.Node):
            raise Blocked(
                "a value that is neither a tensor nor a number multiplies the divergence"
            )
        self._stays_blocked(other)
        value = other.meta.get("val")
        if isinstance(value, Tensor):
            dim = value.dim() - (x.rank - x.key_dim)
            if value.dim() > x.rank:
                raise Blocked("the divergence is broadcast against a tensor with more dimensions")
            if dim >= 0 and not is_one(value.shape[dim]):
                raise Blocked("weights that vary along the keys multiply the divergence")
        return RowFactor(self.canonical[other], x.rank, selects, keeps, divides)

    def _raw(self, x: Scores, like: Elements, node: object) -> Elements:
        """Raw scores beside probabilities: log-probability + log-sum-exp along one dimension."""
        dim = like.key_dim - (like.rank - len(x.layout))
        if dim < 0:
            raise Blocked("scores and probabilities of different ranks are combined")
        return elements.raw_scores(x, dim, isinstance(node, fx.Node) and self.trained(node))

    def _normalised(self, x: Elements, y: Rows) -> Elements:
        """Probabilities over their sum, which is known."""
        if (
            y.offsets
            or y.divisors
            or (y.elements.terms and y.elements.terms[0].expr != ZERO)
            or not y.keepdim
        ):
            raise Blocked("a value is divided by a sum over keys")
        if y.reduced != (x.key_dim,) or y.constant == 0.0:
            raise Blocked("a value is divided by a sum over other dimensions")
        if y.constant_within and any(where_within(t.expr, False) != ZERO for t in x.terms):
            raise Blocked("a value is divided by a sum over keys that is 0 in rows without keys")
        return elements.with_constant("mul", x, 1.0 / y.constant)

    # ------------------------------------------------------------------------------------- softmax
    def op_softmax(self, node: fx.Node, a: Arguments) -> object:
        return self._softmax_of(node, a, log=False)

    def op_log_softmax(self, node: fx.Node, a: Arguments) -> object:
        return self._softmax_of(node, a, log=True)

    op__softmax = op_softmax
    op__log_softmax = op_log_softmax

    def _softmax_of(self, node: fx.Node, a: Arguments, *, log: bool) -> object:
        x = self.value(a["self"])
        if isinstance(x, Elements):
            raise Blocked("softmax of values that are probabilities already (double softmax)")
        if not isinstance(x, Scores):
            self._stays_blocked(a["self"])
            return None
        dim = a["dim"] % len(x.layout)
        return elements.softmax(x, dim, self.trained(node), log=log)

    def _softmax(self, x: Scores, axis: int, trained: bool, *, log: bool) -> Elements:
        dim = lay.axis_dim(x.layout, axis)
        assert dim is not None
        return elements.softmax(x, dim, trained, log=log)

    def op_logsumexp(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        if isinstance(x, Stacked) and [d % (x.items[0].rank + 1) for d in dims] == [x.dim]:
            total = x.items[0]
            for item in x.items[1:]:
                total = elements.combined("logaddexp", total, item)
            return total
        if not isinstance(x, Scores) or len(dims) != 1:
            return self._no_rule(node, "logsumexp")
        dim = dims[0] % len(x.layout)
        axis = self._axis(x, dim)
        layout = (*x.layout[:dim], *(((),) if a.get("keepdim") else ()), *x.layout[dim + 1 :])
        return LogSumExp(x.key, axis, self.trained(node), layout)

    def _axis(self, x: Scores, dim: int) -> int:
        pieces = x.layout[dim]
        if len(pieces) != 1 or lay.axis_dim(x.layout, pieces[0].axis) != dim:
            raise Blocked("a reduction over a dimension that is not one axis of the scores")
        return pieces[0].axis

    def _log_probabilities(self, node: fx.Node, x: Scores, y: LogSumExp) -> Elements:
        dim = lay.axis_dim(x.layout, y.axis)
        if x.key != y.scores or dim is None or len(y.layout) != len(x.layout):
            raise Blocked("a log-sum-exp of other scores is subtracted")
        return elements.softmax(x, dim, self.trained(node), log=True)

    def op_amax(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        given = a.get("dim", [])
        dims = given if isinstance(given, (list, tuple)) else [given]
        if not isinstance(x, Scores) or len(dims) != 1 or not a.get("keepdim"):
            return self._no_rule(node, "amax")
        return RowMax(x.key, self._axis(x, dims[0] % len(x.layout)))

    def op_max(self, node: fx.Node, a: Arguments) -> object:
        if "dim" not in a:
            return self._no_rule(node, "max")
        return self.op_amax(node, a)

    def op_getitem(self, node: fx.Node, a: Arguments) -> object:
        source, index = node.args[0], node.args[1]
        x = self.value(source)
        if isinstance(x, RowMax):
            return x if index == 0 else None
        if isinstance(x, Parts) and isinstance(index, int):
            start, length = x.bounds[index]
            return self._part(x.source, x.dim, start, length)
        self._stays_blocked(source)
        return None

    # ---------------------------------------------------------------------------- unary functions
    def op_exp(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, Shifted) and not x.exponential:
            return Shifted(x.scores, x.axis, x.trained, exponential=True)
        return self._unary(node, a, "exp", math.exp)

    def op_log(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, ExpSum):
            return ExpSum(x.scores, x.axis, logarithm=True)
        return self._unary(node, a, "log", lambda v: math.log(v) if v > 0 else -math.inf)

    def op_neg(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, Rows):
            return x.scaled(-1.0)
        if isinstance(x, Scores):
            return scores.scaled(x, -1.0)
        return self._unary(node, a, "neg", lambda v: -v)

    def op_abs(self, node: fx.Node, a: Arguments) -> object:
        return self._unary(node, a, "abs", abs)

    def op_sqrt(self, node: fx.Node, a: Arguments) -> object:
        return self._unary(node, a, "sqrt", math.sqrt)

    def op_log1p(self, node: fx.Node, a: Arguments) -> object:
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

    def op_tanh(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        return scores.with_tanh(x) if isinstance(x, Scores) else self._no_rule(node, "tanh")

    def op_pow(self, node: fx.Node, a: Arguments) -> object:
        x, exponent = self.value(a["self"]), a["exponent"]
        if isinstance(x, Elements) and exponent == 2:
            return elements.combined("mul", x, x)
        if isinstance(x, Elements) and exponent == 0.5:
            return elements.unary("sqrt", x)
        return self._no_rule(node, "pow")

    def op_clamp(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        low, high = a.get("min"), a.get("max")
        if isinstance(x, Rows):
            return self._clamped_constant(node, x, low, high)
        if not isinstance(x, Elements) or isinstance(low, fx.Node) or isinstance(high, fx.Node):
            return self._no_rule(node, "clamp")
        e = x.single()
        if e is None:
            raise Blocked("clamp of values that carry row weights")
        if low is not None:
            x = x.map(lambda e: apply("max", e, const(low)))
        if (
            high is not None
            and not (high >= 1.0 and e.op == "P")
            and not (high >= 0.0 and e.op == "logP")
        ):
            x = x.map(lambda e: apply("min", e, const(high)))
        return x

    op_clip = op_clamp
    op_clamp_ = op_clamp

    def op_clamp_min(self, node: fx.Node, a: Arguments) -> object:
        return self.op_clamp(node, {"self": a["self"], "min": a["min"]})

    op_clamp_min_ = op_clamp_min

    def _clamped_constant(self, node: fx.Node, x: Rows, low: object, high: object) -> object:
        known = not x.offsets and not x.divisors and all(t.expr == ZERO for t in x.elements.terms)
        if known and isinstance(low, (int, float)) and high is None and 0.0 < low <= x.constant:
            return x
        return self._no_rule(node, "clamp")

    def op_xlogy(self, node: fx.Node, a: Arguments) -> object:
        x, y = self.value(a["self"]), self.value(a["other"])
        if isinstance(x, Elements) and isinstance(y, Elements):
            return elements.combined("mul", x, elements.unary("log", y))
        return self._no_rule(node, "xlogy")

    def op_logaddexp(self, node: fx.Node, a: Arguments) -> object:
        x, y = self.value(a["self"]), self.value(a["other"])
        if isinstance(x, Elements) and isinstance(y, Elements):
            return elements.combined("logaddexp", x, y)
        return self._no_rule(node, "logaddexp")

    def op_maximum(self, node: fx.Node, a: Arguments) -> object:
        return self._no_rule(
            node, "maximum"
        )  # halves the gradient at ties: not the clamp of expressions

    def op_lerp(self, node: fx.Node, a: Arguments) -> object:
        x, y, w = self.value(a["self"]), self.value(a["end"]), self.value(a["weight"])
        if isinstance(x, Elements) and isinstance(y, Elements) and isinstance(w, Number):
            end = elements.with_constant("mul", y, w.value)
            return elements.combined("add", elements.with_constant("mul", x, 1.0 - w.value), end)
        return self._no_rule(node, "lerp")

    def op_nan_to_num(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        return x if isinstance(x, Elements) else self._no_rule(node, "nan_to_num")

    def op_dropout(self, node: fx.Node, a: Arguments) -> object:
        if a["p"] == 0.0 or not a["train"]:
            return self.value(a["input"])
        if isinstance(self.value(a["input"]), Elements):
            raise Blocked("dropout changes the probabilities after the softmax")
        return None

    # --------------------------------------------------------------------------- losses of torch
    def op_kl_div(self, node: fx.Node, a: Arguments) -> object:
        x, target = self.value(a["self"]), self.value(a["target"])
        if not isinstance(x, Elements) or not isinstance(target, Elements):
            self._stays_blocked(a["self"], a["target"])
            which = "input" if not isinstance(x, Elements) else "target"
            raise Blocked(f"the {which} of kl_div is not made from scores in this graph")
        t, x = elements.aligned(target, x)
        if a.get("log_target"):
            values = elements.combined(
                "mul", elements.unary("exp", t), elements.combined("sub", t, x)
            )
        else:
            values = elements.combined(
                "mul", t, elements.combined("sub", elements.unary("log", t), x)
            )
        reduction = KL_DIV_REDUCTIONS[a.get("reduction", 1)]
        if reduction == "none":
            return values
        shape = self._broadcast_shape(a["self"], a["target"])
        return elements.reduced(values, range(len(shape)), False, reduction == "mean", shape)

    def _broadcast_shape(self, *nodes: fx.Node) -> Sequence[Any]:
        return torch.broadcast_shapes(*(scores.shape_of(n) for n in nodes))

    def op_cross_entropy_loss(self, node: fx.Node, a: Arguments) -> object:
        x, target = self.value(a["self"]), self.value(a["target"])
        if not isinstance(target, Elements):
            return None  # labels: not a divergence between two distributions
        if (
            not isinstance(x, Scores)
            or a.get("weight") is not None
            or a.get("label_smoothing", 0.0)
        ):
            self._stays_blocked(a["self"])
            raise Blocked("cross_entropy with class weights, label smoothing or unknown logits")
        dim = 1 if len(x.layout) > 1 else 0
        logs = elements.softmax(x, dim, self.trained(a["self"]), log=True)
        values = elements.unary("neg", elements.combined("mul", target, logs))
        if values.key_dim != dim:
            raise Blocked(
                "cross_entropy takes its classes from dimension 1, the target's are elsewhere"
            )
        shape = scores.shape_of(a["self"])
        reduction = KL_DIV_REDUCTIONS[a.get("reduction", 1)]
        dims = (dim,) if reduction == "none" else tuple(range(len(shape)))
        rows = elements.reduced(values, dims, False, False, shape)
        if reduction == "mean" and isinstance(rows, Rows):
            counted = tuple(size for d, size in enumerate(shape) if d != dim)
            return Rows(rows.elements, rows.reduced, False, rows.weight, counted)
        return rows

    # ---------------------------------------------------------------------------------- reductions
    def op_sum(self, node: fx.Node, a: Arguments) -> object:
        return self._reduced(node, a, mean=False)

    def op_mean(self, node: fx.Node, a: Arguments) -> object:
        return self._reduced(node, a, mean=True)

    op_nansum = op_sum

    def _reduced(self, node: fx.Node, a: Arguments, *, mean: bool) -> object:
        x = self.value(a["self"])
        rank = self.rank[a["self"]]
        given = a.get("dim")
        dims = (
            [d % rank for d in ([given] if isinstance(given, int) else given)]
            if given
            else list(range(rank))
        )
        keepdim = bool(a.get("keepdim", False))
        if isinstance(x, Shifted) and x.exponential and not mean and keepdim:
            if dims == [lay.axis_dim(x.scores.layout, x.axis)]:
                return ExpSum(x.scores.key, x.axis)
        if isinstance(x, Elements):
            return elements.reduced(x, dims, keepdim, mean, scores.shape_of(a["self"]))
        if isinstance(x, Scores) and len(dims) == 1:
            key, _ = scores.summed_over(x, dims[0], mean=mean)
            kept = ((),) if keepdim else ()
            return Scores(key, (*x.layout[: dims[0]], *kept, *x.layout[dims[0] + 1 :]))
        if isinstance(x, Rows):
            return None  # what the user does with rows stays the user's code
        return self._no_rule(node, "mean" if mean else "sum")

    def op_linalg_vector_norm(self, node: fx.Node, a: Arguments) -> object:
        """The 1-norm that F.normalize divides by: a sum, for values that are not negative."""
        x = self.value(a["self"])
        if not isinstance(x, Elements) or a.get("ord", 2) != 1 or not elements.not_negative(x):
            return self._no_rule(node, "norm")
        return self._reduced(node, {k: a.get(k) for k in ("self", "dim", "keepdim")}, mean=False)

    # --------------------------------------------------------------------------------------- views
    def op_view(self, node: fx.Node, a: Arguments) -> object:
        shape = scores.shape_of(node)
        return self._viewed(node, a["self"], lambda x: lay.reshape(x, shape), "reshape")

    op_reshape = op_view
    op__unsafe_view = op_view
    op_flatten = op_view
    op_unflatten = op_view
    op_view_as = op_view

    def op_transpose(self, node: fx.Node, a: Arguments) -> object:
        rank = self.rank[node]
        order = list(range(rank))
        x, y = a["dim0"] % rank, a["dim1"] % rank
        order[x], order[y] = order[y], order[x]
        return self._permuted(node, a["self"], order)

    def op_permute(self, node: fx.Node, a: Arguments) -> object:
        return self._permuted(node, a["self"], [d % self.rank[node] for d in a["dims"]])

    def op_t(self, node: fx.Node, a: Arguments) -> object:
        return self._permuted(node, a["self"], list(reversed(range(self.rank[node]))))

    op_numpy_T = op_t

    def _permuted(self, node: fx.Node, source: fx.Node, order: list[int]) -> object:
        return self._viewed(node, source, lambda x: lay.permute(x, order), "transpose", order)

    def op_unsqueeze(self, node: fx.Node, a: Arguments) -> object:
        dim = a["dim"] % self.rank[node]
        order = [*range(dim), None, *range(dim, self.rank[node] - 1)]
        return self._viewed(node, a["self"], lambda x: lay.unsqueeze(x, dim), "unsqueeze", order)

    def op_squeeze(self, node: fx.Node, a: Arguments) -> object:
        source = scores.shape_of(a["self"])
        given = a.get("dim")
        dims = (
            range(len(source)) if given is None else [given] if isinstance(given, int) else given
        )
        dropped = [d % len(source) for d in dims if is_one(source[d])]
        order = [d for d in range(len(source)) if d not in dropped]
        return self._viewed(node, a["self"], lambda x: lay.squeeze(x, dropped), "squeeze", order)

    def op_expand(self, node: fx.Node, a: Arguments) -> object:
        if isinstance(self.value(a["self"]), (Elements, Scores)):
            same_shape = len(scores.shape_of(node)) == self.rank[a["self"]] and all(
                same(x, y)
                for x, y in zip(scores.shape_of(node), scores.shape_of(a["self"]), strict=True)
            )
            return self.value(a["self"]) if same_shape else self._no_rule(node, "expand")
        if isinstance(self.value(a["self"]), Rows):
            return self.value(a["self"])  # a known sum, expanded to divide by it
        return self.mask_expand(node, a["self"])

    op_expand_as = op_expand
    op_broadcast_to = op_expand

    def _viewed(
        self,
        node: fx.Node,
        source: fx.Node,
        change: Callable[[Layout], Layout | None],
        what: str,
        order: Sequence[int | None] | None = None,
    ) -> object:
        x = self.value(source)
        if isinstance(x, Scores):
            layout = change(x.layout)
            if layout is None:
                raise Blocked(f"{what} that mixes the axes of the scores")
            return Scores(x.key, layout)
        if isinstance(x, Elements):
            return elements.viewed(x, change, what)
        if isinstance(x, Rows):
            return None
        return self.mask_view(node, source, order)

    def op_contiguous(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        return x if x is not None else self._no_rule(node, "contiguous")

    op_clone = op_contiguous
    op_alias = op_contiguous
    op_lift_fresh_copy = op_contiguous
    op_lift_fresh = op_contiguous

    def op_to(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if (
            isinstance(x, (Elements, Scores, Rows, Shifted))
            and not node.meta["val"].dtype.is_floating_point
        ):
            raise Blocked("probabilities or scores are cast to a type that is not floating point")
        if isinstance(x, (BoolTensor, Choice)) or x is None:
            return self.mask_cast(node, a["self"])
        return x

    op__to_copy = op_to
    op_float = op_to
    op_type_as = op_to

    def op_detach(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, Elements):
            return Elements(x.terms, tuple(p.untrained() for p in x.parts), x.layouts, x.key_dim)
        if isinstance(x, Rows):
            return None
        return x if x is not None else self._no_rule(node, "detach")

    op_detach_ = op_detach

    def op_select(self, node: fx.Node, a: Arguments) -> object:
        x, dim = self.value(a["self"]), a["dim"] % self.rank[a["self"]]
        if isinstance(x, (Scores, Elements)):
            size = scores.shape_of(a["self"])[dim]
            index = a["index"]
            return self._part(
                x, dim, index if not isinstance(index, int) or index >= 0 else index + size, None
            )
        return self.mask_select(node, a)

    def op_slice(self, node: fx.Node, a: Arguments) -> object:
        x, dim = self.value(a["self"]), a.get("dim", 0) % self.rank[a["self"]]
        if not isinstance(x, (Scores, Elements)):
            return self.mask_slice(node, a)
        if a.get("step", 1) != 1:
            raise Blocked("scores are sliced with a step")
        start, size = a.get("start") or 0, scores.shape_of(a["self"])[dim]
        start = start + size if isinstance(start, int) and start < 0 else start
        return self._part(x, dim, start, scores.shape_of(node)[dim])

    def op_narrow(self, node: fx.Node, a: Arguments) -> object:
        x, dim = self.value(a["self"]), a["dim"] % self.rank[a["self"]]
        if isinstance(x, (Scores, Elements)):
            return self._part(x, dim, a["start"], scores.shape_of(node)[dim])
        return self._no_rule(node, "narrow")

    def op_chunk(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if not isinstance(x, (Scores, Elements)):
            return None
        dim = a.get("dim", 0) % self.rank[a["self"]]
        bounds, start = [], 0
        for piece in node.meta["val"]:
            bounds.append((start, piece.shape[dim]))
            start = start + piece.shape[dim]
        return Parts(x, dim, tuple(bounds))

    op_split = op_chunk
    op_split_with_sizes = op_chunk
    op_tensor_split = op_chunk

    def _part(self, x: object, dim: int, start: Any, length: Any) -> object:
        if isinstance(x, Scores):
            return Scores(*scores.part(x.key, x.layout, dim, start, length))
        assert isinstance(x, Elements)
        if dim == x.key_dim:
            raise Blocked("only some of the keys are used after the softmax")
        return self._changed_scores(
            x, dim, lambda key, layout: scores.part(key, layout, dim, start, length)
        )

    def _changed_scores(
        self, x: Elements, dim: int, change: Callable[[Any, Layout], tuple[Any, Layout]]
    ) -> Elements:
        """Rows taken from probabilities are the probabilities of those rows' scores."""
        if any(t.factors for t in x.terms):
            raise Blocked("part of values that carry row weights is used")
        parts, layouts = [], []
        for distribution, layout in zip(x.parts, x.layouts, strict=True):
            if distribution.averaged:
                raise Blocked("part of head-averaged probabilities is used")
            key, changed = change(distribution.scores, layout)
            parts.append(type(distribution)(key, distribution.axis, distribution.trained))
            layouts.append(changed)
        (key_dim,) = {lay.axis_dim(y, d.axis) for y, d in zip(layouts, parts, strict=True)}
        assert key_dim is not None
        return Elements(x.terms, tuple(parts), tuple(layouts), key_dim)

    def op_index(self, node: fx.Node, a: Arguments) -> object:
        x, indices = self.value(a["self"]), a["indices"]
        if not isinstance(x, (Scores, Elements)):
            return self.mask_index(node, a)
        given = [(d, i) for d, i in enumerate(indices) if i is not None]
        if (
            len(given) != 1
            or not isinstance(given[0][1], fx.Node)
            or given[0][1].meta["val"].dtype != torch.bool
        ):
            raise Blocked("scores or probabilities are gathered by index")
        ((dim, index),) = given
        rank = self.rank[index]
        count = scores.shape_of(node)[dim]
        chosen = self.canonical[index]
        count = self._counts.setdefault(chosen, count)  # each use has a symbol of its own
        if isinstance(x, Scores):
            return Scores(*scores.selected_rows(x.key, x.layout, dim, chosen, rank, count))
        if dim <= x.key_dim < dim + rank:
            raise Blocked("a boolean index selects keys after the softmax")
        return self._changed_scores(
            x, dim, lambda key, layout: scores.selected_rows(key, layout, dim, chosen, rank, count)
        )

    def op_stack(self, node: fx.Node, a: Arguments) -> object:
        items = [self.value(n) for n in a["tensors"]]
        if items and all(isinstance(x, Elements) for x in items):
            return Stacked(tuple(items), a.get("dim", 0) % self.rank[node])  # type: ignore[arg-type]
        return self._no_rule(node, "stack")

    def op_pad(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if not isinstance(x, Scores):
            return self._no_rule(node, "pad")
        widths, value = a["pad"], self.value(a.get("value"))
        constant = a.get("mode", "constant") == "constant"
        if not constant or len(widths) != 2 or widths[0] != 0 or not isinstance(value, Number):
            raise Blocked("scores are padded in a way other than behind the last key")
        if value.value != -math.inf:
            raise Blocked(
                f"scores are padded with {value.value:g}, which takes part in the softmax"
            )
        return scores.padded(x, scores.shape_of(node)[-1])

    op_constant_pad_nd = op_pad

    # -------------------- masks on values
    def op_masked_fill(self, node: fx.Node, a: Arguments) -> object:
        x, mask, value = self.value(a["self"]), self.boolean(a["mask"]), self.value(a["value"])
        if not isinstance(x, (Elements, Scores, Rows)):
            return self.mask_masked_fill(node, a)
        if isinstance(x, Rows):
            return None
        if not isinstance(value, Number):
            raise Blocked("masked_fill with a tensor")
        if isinstance(x, Scores):
            return self._filled(x, mask, value.value)
        return self._without(x, mask, value.value, a["mask"])

    op_masked_fill_ = op_masked_fill

    def _filled(self, x: Scores, mask: object, fill: float) -> Scores:
        """Scores with ``fill`` where the mask is True."""
        if isinstance(mask, Absent):
            if mask.scores.mask is None:
                return x
            raise Blocked("infinite scores are replaced before the softmax")
        if not isinstance(mask, BoolTensor):
            raise Blocked("scores are masked by something that is not a boolean tensor")
        keep = to_axes(mask.inverted(), x.layout, self.rank)
        if keep is None:
            raise Blocked("scores are masked where one of several conditions holds")
        return scores.masked(x, keep, fill)

    def _without(self, x: Elements, mask: object, fill: float, node: object) -> Elements:
        """Values with ``fill`` where the mask is True."""
        if fill != 0.0:
            raise Blocked(f"values after the softmax are filled with {fill:g}")
        if isinstance(mask, Absent):
            return x
        if isinstance(mask, AnyKey):
            raise Blocked("rows with keys are set to 0")
        if isinstance(mask, Elements):
            return self._where_expression(mask, None, x)
        if not isinstance(mask, BoolTensor):
            raise Blocked("values after the softmax are masked by something unknown")
        return elements.masked_after(
            x,
            mask.inverted(),
            self.rank,
            lambda: self._row_factor(x, node, selects=True, keeps=False),
        )

    def op_where(self, node: fx.Node, a: Arguments) -> object:
        if "self" not in a or "other" not in a:
            return self._no_rule(node, "where")
        condition, x, y = (
            self.boolean(a["condition"]),
            self.value(a["self"]),
            self.value(a["other"]),
        )
        match x, y:
            case Scores(), Number():
                keep = condition.inverted() if isinstance(condition, BoolTensor) else condition
                return self._filled(x, keep, y.value)
            case Number(), Scores():
                return self._filled(y, condition, x.value)
            case (Elements(), Number()) | (Number(), Elements()) | (Elements(), Elements()):
                return self._where_elements(a, condition, x, y)
            case (Rows(), _) | (_, Rows()):
                return None
        return self.mask_where(node, a)

    def _where_elements(self, a: Arguments, condition: object, x: object, y: object) -> Elements:
        if isinstance(condition, Elements):
            return self._where_expression(condition, x, y)
        if not isinstance(x, Elements):
            inverted = condition.inverted() if isinstance(condition, BoolTensor) else condition
            if (
                isinstance(inverted, BoolTensor)
                and isinstance(x, Number)
                and isinstance(y, Elements)
            ):
                return self._kept(y, inverted, x.value, a["condition"], keeps=False)
            raise Blocked("where between values after the softmax")
        if not isinstance(y, Number):
            raise Blocked("where between two values after the softmax")
        return self._kept(x, condition, y.value, a["condition"], keeps=True)

    def _kept(
        self, x: Elements, mask: object, other: float, node: object, *, keeps: bool
    ) -> Elements:
        if other != 0.0:
            raise Blocked(f"values after the softmax are filled with {other:g}")
        if isinstance(mask, AnyKey):
            return self._rows_with_keys(x, mask, node, keeps)
        if not isinstance(mask, BoolTensor):
            raise Blocked("values after the softmax are masked by something unknown")
        return elements.masked_after(
            x, mask, self.rank, lambda: self._row_factor(x, node, selects=True, keeps=keeps)
        )

    def _rows_with_keys(self, x: Elements, mask: AnyKey, node: object, keeps: bool) -> Elements:
        """Only rows that have a key count: as if the mask were applied to every value."""
        is_own = keeps and mask.keepdim and mask.dim == x.key_dim
        if is_own and all(
            d.scores.fill <= IMPROBABLE and d.scores.mask == to_axes(mask.mask, layout, self.rank)
            for d, layout in zip(x.parts, x.layouts, strict=True)
        ):
            return elements.masked_after(
                x, mask.mask, self.rank, lambda: self._row_factor(x, node)
            )
        return elements.with_row_factor(x, self._row_factor(x, node, selects=True, keeps=keeps))

    def _where_expression(self, condition: Elements, x: object, y: object) -> Elements:
        """where with a condition on probabilities, such as P > 0."""
        e = condition.single()
        kept, dropped = (y, x) if e is not None and e.op == "ge" else (x, y)
        if e is not None and e.op in ("gt", "ge") and isinstance(kept, Elements):
            condition, aligned = elements.aligned(condition, kept)
            e = condition.single()
            if dropped is None or _is_zero(dropped):
                if elements.needs_probability(aligned, e):
                    return kept  # what the condition drops is 0 in any case
                return elements.kept_where(aligned, e, inverted=kept is y)
        if e in (ONE, ZERO):
            chosen = x if e == ONE else y
            if isinstance(chosen, Elements):
                return chosen
        raise Blocked("where with a condition on probabilities that is not always true")

    def _times_mask(self, x: Elements, mask: object, node: object) -> Elements:
        """Values times a 0/1 mask."""
        if isinstance(mask, Choice):
            if (mask.inside, mask.outside) == (0.0, 1.0):
                mask = Choice(mask.mask.inverted(), 1.0, 0.0)
            if (mask.inside, mask.outside) != (1.0, 0.0):
                return elements.with_row_factor(x, self._row_factor(x, node))
            boolean = mask.mask
        else:
            assert isinstance(mask, BoolTensor)
            boolean = mask
        try:
            return self._times_boolean(x, boolean, node)
        except Blocked as reason:
            value = node.meta["val"] if isinstance(node, fx.Node) else None
            dim = value.dim() - (x.rank - x.key_dim) if isinstance(value, Tensor) else -1
            if dim < 0 or not isinstance(value, Tensor) or is_one(value.shape[dim]):
                return elements.with_row_factor(x, self._row_factor(x, node))
            raise reason

    def _times_boolean(self, x: Elements, mask: BoolTensor, node: object) -> Elements:
        return elements.masked_after(x, mask, self.rank, lambda: self._row_factor(x, node))

    def compared(self, op: str, x: Elements, value: float) -> object:
        """P > 0, which a probability that underflows misses, or P <= 0."""
        e = x.single()
        if e is not None and e.op == "P" and value == 0.0 and op in ("gt", "ne"):
            return x.map(lambda p: apply("gt", p, ZERO))
        if e is not None and e.op == "P" and value == 0.0 and op in ("le", "eq"):
            return x.map(lambda p: apply("ge", ZERO, p))
        raise Blocked("a comparison of probabilities with a number")

    def finite(self, x: object, *, infinite: bool) -> object:
        """isfinite, isinf or isnan of scores or log-probabilities."""
        if isinstance(x, Scores):
            if not infinite:
                raise Blocked("isfinite of scores")
            if x.key.padded is not None:
                raise Blocked("isinf of scores that were padded with -inf")
            return Absent(x.key)
        if isinstance(x, Elements):
            part = elements.takes_part(x)
            return part.map(lambda e: ZERO if e == ONE else -e) if infinite else part
        return None


def _is_zero(x: object) -> bool:
    if isinstance(x, Elements):
        return x.single() == ZERO
    return isinstance(x, Number) and x.value == 0.0


def symbolic_size(x: object) -> torch.SymInt | None:
    """The size that a node or an argument stands for."""
    value = x.meta.get("val") if isinstance(x, fx.Node) else x
    return value if isinstance(value, torch.SymInt) else None


def op_name(node: fx.Node) -> str:
    """Name of an ATen operation without its overload, or of a Python function."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return getattr(target, "__name__", str(target))


def named_arguments(node: fx.Node) -> Arguments:
    """Arguments by schema name; defaults are left out."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not target._schema.is_mutable and not random


def _hashable(x: object) -> object:
    if isinstance(x, (list, tuple)):
        return tuple(_hashable(v) for v in x)
    if isinstance(x, slice):
        return (x.start, x.stop, x.step)
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(x)
    hash(x)
    return (type(x).__name__, x)


def _shape_key(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (str(tuple(value.shape)), value.dtype) if isinstance(value, Tensor) else None


def _is_fake(value: Tensor) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)
