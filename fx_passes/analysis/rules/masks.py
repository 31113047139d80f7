"""Defines rules for the ways to write masks: index arithmetic, boolean and two-valued tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.analysis.rules.indices import IndexRules
from torch_streamkl.fx_passes.domain.index_values import first_index, is_exact, promote, promoted
from torch_streamkl.fx_passes.domain.masks import (
    NEVER,
    TRUE_TENSOR,
    Affine,
    AnyKey,
    BoolTensor,
    Choice,
    Linear,
    Literal,
    Opaque,
    opaque,
    rearranged,
)
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.values import Elements, Infinite, Number
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, shape_of
from torch_streamkl.program.graph import ONE, ZERO

aten = torch.ops.aten
_EXPANSIONS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}


class MaskRules(IndexRules):
    """Adds the rules for masks to the interpreter."""

    def compared(self, op: str, x: Elements, value: float) -> object:
        raise NotImplementedError

    def infinite(self, x: object) -> object:
        raise NotImplementedError

    def finite(self, x: object) -> object:
        raise NotImplementedError

    def unknown(self, node: fx.Node) -> BoolTensor | None:
        """Makes a boolean tensor that no rule explains an opaque mask."""
        value = node.meta["val"]
        return opaque(self.canonical[node], value.shape) if value.dtype == torch.bool else None

    def boolean(self, x: object) -> object:
        """Returns the value of a condition; boolean inputs of the region are opaque masks."""
        known = self.value(x)
        if known is None and isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor):
            return self.unknown(x)
        if isinstance(known, Number):
            return TRUE_TENSOR if known.value else TRUE_TENSOR.inverted()
        return known

    def unexpanded(self, node: fx.Node) -> tuple[fx.Node, tuple[int | None, ...]]:
        """Returns the tensor before ``expand``, and the origin of each dimension."""
        node = self.canonical[node]
        dims: tuple[int | None, ...] = tuple(
            None if is_one(size) else d for d, size in enumerate(node.meta["val"].shape)
        )
        while node.target in _EXPANSIONS:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            shape = source.meta["val"].shape
            skipped = self.rank[node] - len(shape)
            dims = tuple(
                None if d is None or d < skipped or is_one(shape[d - skipped]) else d - skipped
                for d in dims
            )
            node = self.canonical[source]
        return node, dims

    # ------------------------------------------------------------------------------------ creation
    @rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
    def arange(self, node: fx.Node, a: Arguments) -> object:
        start, step = self.size(a.get("start", 0)), self.size(a.get("step", 1))
        if start is None or not isinstance(step, int):
            return None
        return Affine((step,), start)

    @rule(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
    def ones(self, node: fx.Node, a: Arguments) -> object:
        return Number(1.0)

    @rule(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
    def zeros(self, node: fx.Node, a: Arguments) -> object:
        return Number(0.0)

    @rule(aten.full.default, aten.full_like.default, aten.new_full.default)
    def full(self, node: fx.Node, a: Arguments) -> object:
        value = a.get("fill_value")
        return Number(float(value)) if isinstance(value, (bool, int, float)) else None

    @rule(aten.scalar_tensor.default)
    def scalar_tensor(self, node: fx.Node, a: Arguments) -> object:
        return Number(float(a["s"])) if isinstance(a["s"], (bool, int, float)) else None

    @rule(aten.tril.default)
    def tril(self, node: fx.Node, a: Arguments) -> object:
        return self._triangle(node, a, lower=True)

    @rule(aten.triu.default)
    def triu(self, node: fx.Node, a: Arguments) -> object:
        return self._triangle(node, a, lower=False)

    def _triangle(self, node: fx.Node, a: Arguments, *, lower: bool) -> object:
        rank, diagonal = self.rank[node], self.size(a.get("diagonal", 0))
        if diagonal is None:
            return self.unknown(node)
        # lower: j - i <= diagonal
        sign = 1 if lower else -1
        condition = Linear((0,) * (rank - 2) + (sign, -sign), sign * diagonal)
        kept = BoolTensor(frozenset({condition}), rank)
        x = self.value(a["self"])
        is_bool = node.meta["val"].dtype == torch.bool
        if isinstance(x, Number):
            if x.value == 0.0:
                return x
            return kept if is_bool else Choice(kept, x.value, 0.0)
        if isinstance(x, BoolTensor):
            return x.conjunction(kept) or self.unknown(node)
        return self.unknown(node)

    # ---------------------------------------------------------------------------------- arithmetic
    def mask_sum(self, node: fx.Node, left: object, right: object, sign: float) -> object:
        x, y = self._integers(node, left, right)
        match x, y:
            case Affine(), Affine():
                return x + y.scaled(int(sign))
            case Affine(), (int() | torch.SymInt()):
                return x.shifted(y * int(sign))
            case ((int() | torch.SymInt()), Affine()):
                return y.scaled(int(sign)).shifted(x)
        p, q = self.value(left), self.value(right)
        match p, q:
            case Number(), Number():
                return Number(p.value + sign * q.value)
            case Choice(), Number():
                return replace(
                    p, inside=p.inside + sign * q.value, outside=p.outside + sign * q.value
                )
            case Number(), Choice():
                return Choice(q.mask, p.value + sign * q.inside, p.value + sign * q.outside)
        return None

    def mask_product(self, node: fx.Node, left: object, right: object, divides: bool) -> object:
        p, q = self.value(left), self.value(right)
        if isinstance(p, BoolTensor):
            p = Choice(p, 1.0, 0.0)
        if isinstance(q, BoolTensor):
            q = Choice(q, 1.0, 0.0)
        match p, q:
            case Number(), Number() if not divides or q.value != 0.0:
                return Number(p.value / q.value if divides else p.value * q.value)
            case (Affine(), Number()) | (Number(), Affine()) if not divides:
                x, y = self._integers(node, left, right)
                if isinstance(x, Affine) and isinstance(y, int):
                    return x.scaled(y)
                return y.scaled(x) if isinstance(x, int) and isinstance(y, Affine) else None
            case Choice(), Number() if q.value != 0.0:
                factor = 1.0 / q.value if divides else q.value
                return Choice(p.mask, _times(p.inside, factor), _times(p.outside, factor))
            case Number(), Choice() if not divides:
                return Choice(q.mask, _times(q.inside, p.value), _times(q.outside, p.value))
            case Choice(inside=1.0, outside=0.0), Choice(inside=1.0, outside=0.0) if not divides:
                both = p.mask.conjunction(q.mask)
                is_bool = node.meta["val"].dtype == torch.bool
                return None if both is None else both if is_bool else Choice(both, 1.0, 0.0)
        return self.unknown(node) if isinstance(node.meta.get("val"), Tensor) else None

    def mask_unary(self, node: fx.Node, source: object, op: str) -> object:
        x = self.value(source)
        if op == "neg" and isinstance(x, Affine):
            return x.scaled(-1)
        if op == "neg" and isinstance(x, Choice):
            return Choice(x.mask, -x.inside, -x.outside)
        return None

    def _integer(self, x: object) -> Affine | Size | None:
        """Reads an index expression: an affine tensor or an integer, symbolic or not."""
        known = self.value(x)
        if isinstance(known, Affine):
            return known
        if isinstance(known, Number):
            whole = math.isfinite(known.value) and known.value == int(known.value)
            return int(known.value) if whole else None
        return self.size(x)

    def size(self, x: object) -> Size | None:
        """Returns an integer argument, symbolic or not."""
        recorded = x.meta.get("val") if isinstance(x, fx.Node) else x
        if isinstance(recorded, (int, torch.SymInt)) and not isinstance(recorded, bool):
            return recorded
        return None

    def _integers(
        self, node: fx.Node, left: object, right: object
    ) -> tuple[Affine | Size | None, Affine | Size | None]:
        """Reads both operands as index expressions, if torch's promotion changes neither."""
        x, y = self._integer(left), self._integer(right)
        dtype = promoted(_recorded(left), _recorded(right))
        if not is_exact(x, _shape(left), dtype) or not is_exact(y, _shape(right), dtype):
            return None, None
        return x, y

    # --------------------------------------------------------------------------------- comparisons
    @rule(aten.ge.Tensor, aten.ge.Scalar)
    def ge(self, node: fx.Node, a: Arguments) -> object:
        return self._comparison(node, "ge", a["self"], a["other"])

    @rule(aten.gt.Tensor, aten.gt.Scalar)
    def gt(self, node: fx.Node, a: Arguments) -> object:
        return self._comparison(node, "gt", a["self"], a["other"])

    @rule(aten.le.Tensor, aten.le.Scalar)
    def le(self, node: fx.Node, a: Arguments) -> object:
        return self._comparison(node, "le", a["self"], a["other"])

    @rule(aten.lt.Tensor, aten.lt.Scalar)
    def lt(self, node: fx.Node, a: Arguments) -> object:
        return self._comparison(node, "lt", a["self"], a["other"])

    @rule(aten.eq.Tensor, aten.eq.Scalar)
    def eq(self, node: fx.Node, a: Arguments) -> object:
        return self._comparison(node, "eq", a["self"], a["other"])

    @rule(aten.ne.Tensor, aten.ne.Scalar)
    def ne(self, node: fx.Node, a: Arguments) -> object:
        return self._comparison(node, "ne", a["self"], a["other"])

    def _comparison(self, node: fx.Node, op: str, left: object, right: object) -> object:
        known, number = self.value(left), self.value(right)
        if isinstance(known, Elements) and isinstance(number, Number):
            return self.compared(op, known, number.value)
        if isinstance(known, (Elements, Scores)):
            return None
        if isinstance(known, (Choice, Number)) and isinstance(number, Number):
            dtype = promoted(_recorded(left), _recorded(right))
            known, number = promote(known, dtype), promote(number, dtype)
        if isinstance(known, Choice) and isinstance(number, Number):
            inside, outside = (
                _holds(op, known.inside, number.value),
                _holds(op, known.outside, number.value),
            )
            if inside == outside:
                return TRUE_TENSOR if inside else TRUE_TENSOR.inverted()
            return known.mask if inside else known.mask.inverted()
        if isinstance(known, Number) and isinstance(number, Number):
            return TRUE_TENSOR if _holds(op, known.value, number.value) else TRUE_TENSOR.inverted()
        x, y = self._integers(node, left, right)
        if isinstance(x, Affine) or isinstance(y, Affine):
            difference = _difference(x, y)
            if difference is not None:
                return _conditions(op, difference)
        return self.unknown(node)

    @rule(aten.isinf.default)
    def isinf(self, node: fx.Node, a: Arguments) -> object:
        return self.infinite(self.value(a["self"])) or self.unknown(node)

    @rule(aten.isnan.default)
    def isnan(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, Scores):
            read(x.key)  # of finite dot products, nothing that it has a form for is NaN
        return NEVER if isinstance(x, (Elements, Scores)) else self.unknown(node)

    @rule(aten.isfinite.default)
    def isfinite(self, node: fx.Node, a: Arguments) -> object:
        return self.finite(self.value(a["self"])) or self.unknown(node)

    # --------------------------------------------------------------------------------------- logic
    @rule(aten.bitwise_not.default, aten.logical_not.default)
    def bitwise_not(self, node: fx.Node, a: Arguments) -> object:
        x = self.boolean(a["self"])
        if isinstance(x, Elements):
            e = x.single()
            if e not in (ONE, ZERO):
                raise Unsupported("the opposite of a condition on probabilities")
            return x.map(lambda e: ZERO if e == ONE else ONE)
        return x.inverted() if isinstance(x, BoolTensor) else self.unknown(node)

    @rule(
        aten.bitwise_and.Tensor,
        aten.bitwise_and.Scalar,
        aten.bitwise_and.Scalar_Tensor,
        aten.__and__.Scalar,
        aten.__and__.Tensor,
        aten.logical_and.default,
        aten.bitwise_and_.Tensor,
        aten.bitwise_and_.Scalar,
        aten.__iand__.Tensor,
        aten.__iand__.Scalar,
    )
    def bitwise_and(self, node: fx.Node, a: Arguments) -> object:
        return self._logical(node, a, conjunction=True)

    @rule(
        aten.bitwise_or.Tensor,
        aten.bitwise_or.Scalar,
        aten.bitwise_or.Scalar_Tensor,
        aten.__or__.Tensor,
        aten.__or__.Scalar,
        aten.logical_or.default,
        aten.bitwise_or_.Tensor,
        aten.bitwise_or_.Scalar,
        aten.__ior__.Tensor,
        aten.__ior__.Scalar,
    )
    def bitwise_or(self, node: fx.Node, a: Arguments) -> object:
        return self._logical(node, a, conjunction=False)

    def _logical(self, node: fx.Node, a: Arguments, *, conjunction: bool) -> object:
        x, y = self.boolean(a["self"]), self.boolean(a["other"])
        if isinstance(x, Infinite) and isinstance(y, Infinite) and not conjunction:
            return Infinite(x.scores + y.scores)
        if not isinstance(x, BoolTensor) or not isinstance(y, BoolTensor):
            return self.unknown(node)
        if conjunction:
            return x.conjunction(y) or self.unknown(node)
        neither = x.inverted().conjunction(y.inverted())
        return neither.inverted() if neither is not None else self.unknown(node)

    @rule(aten.any.default, aten.any.dim, aten.any.dims)
    def any(self, node: fx.Node, a: Arguments) -> object:
        x = self.boolean(a["self"])
        if (
            not isinstance(x, BoolTensor)
            or x.negative
            or "dim" not in a
            or not isinstance(a["dim"], int)
        ):
            return self.unknown(node)
        rank = self.rank[a["self"]]
        return AnyKey(x.raised(rank), a["dim"] % rank, bool(a.get("keepdim", False)))

    # ----------------------------------------------------------------------------- views of masks
    def mask_view(
        self, node: fx.Node, source: fx.Node, order: Sequence[int | None] | None
    ) -> object:
        x = self.value(source)
        if x is None and node.meta["val"].dtype == torch.bool:
            x = self.boolean(
                source
            )  # a mask that the region was given: views of it stay that mask
        if isinstance(x, Number):
            return x
        if isinstance(x, AnyKey) and not x.keepdim and order is not None and None in order:
            # any(-1).unsqueeze(-1) is any(-1, keepdim=True)
            if order.index(None) == x.dim:
                return AnyKey(x.mask, x.dim, True)
            return self.unknown(node)
        if order is None:
            order = _same_entries(source.meta["val"].shape, node.meta["val"].shape)
        if order is None or not isinstance(x, (BoolTensor, Choice, Affine)):
            return self.unknown(node)
        if isinstance(x, BoolTensor):
            return rearranged(x.raised(self.rank[source]), order)
        if isinstance(x, Choice):
            return replace(x, mask=rearranged(x.mask.raised(self.rank[source]), order))
        return Affine(tuple(0 if d is None else x.coefficients[d] for d in order), x.constant)

    def mask_expand(self, node: fx.Node, source: fx.Node) -> object:
        x, rank = self.value(source), self.rank[node]
        if isinstance(x, Number):
            return x
        if isinstance(x, Affine):
            return Affine((0,) * (rank - len(x.coefficients)) + x.coefficients, x.constant)
        if isinstance(x, BoolTensor):
            return x.raised(rank)
        if isinstance(x, Choice):
            return replace(x, mask=x.mask.raised(rank))
        if node.meta["val"].dtype == torch.bool:
            x = self.boolean(source)
            if isinstance(x, BoolTensor):
                return x.raised(rank)
            below, dims = self.unexpanded(node)
            return BoolTensor(frozenset({Opaque(below, dims)}), rank)
        return None

    def first_index(self, node: fx.Node, source: fx.Node, dim: int, start: object) -> Size | None:
        """Returns where a slice begins, counted from the front; None if that is not certain."""
        given = 0 if start is None else self.size(start)
        if given is None:
            return None
        return first_index(given, shape_of(source)[dim], shape_of(node)[dim])

    def mask_slice(self, node: fx.Node, a: Arguments) -> object:
        source, rank = a["self"], self.rank[a["self"]]
        dim, step = a.get("dim", 0) % rank, a.get("step", 1)
        start = self.first_index(node, source, dim, a.get("start"))
        x = self.value(source)
        if start is None or not isinstance(step, int):
            return x if isinstance(x, Number) else self.unknown(node)
        if isinstance(x, Affine):
            c = x.coefficients[dim]
            coefficients = (*x.coefficients[:dim], c * step, *x.coefficients[dim + 1 :])
            return Affine(coefficients, x.constant + c * start)
        if isinstance(x, Number):
            return x
        mask = x.mask if isinstance(x, Choice) else x
        if isinstance(mask, BoolTensor) and step == 1:
            moved = _sliced(mask.raised(rank), dim, start)
            if moved is not None:
                return replace(x, mask=moved) if isinstance(x, Choice) else moved
        return self.unknown(node)

    def mask_select(self, node: fx.Node, a: Arguments) -> object:
        x, index, rank = self.value(a["self"]), a["index"], self.rank[a["self"]]
        if isinstance(x, Affine) and isinstance(index, int) and len(x.coefficients) == rank:
            dim = a["dim"] % rank
            if index < 0:
                index = index + a["self"].meta["val"].shape[dim]
            others = (*x.coefficients[:dim], *x.coefficients[dim + 1 :])
            return Affine(others, x.constant + x.coefficients[dim] * index)
        return x if isinstance(x, Number) else self.unknown(node)

    def mask_cast(self, node: fx.Node, source: fx.Node) -> object:
        x, dtype = self.value(source), node.meta["val"].dtype
        if isinstance(x, BoolTensor) and dtype != torch.bool:
            return Choice(x, 1.0, 0.0)
        if isinstance(x, Choice) and dtype == torch.bool:
            if bool(x.inside) == bool(x.outside):
                return TRUE_TENSOR if x.inside else TRUE_TENSOR.inverted()
            return x.mask if x.inside else x.mask.inverted()
        return x if x is not None else self.unknown(node)

    # -------------------------------------------------------------------------- two-valued tensors
    def mask_masked_fill(self, node: fx.Node, a: Arguments) -> object:
        x, mask, fill = self.value(a["self"]), self.boolean(a["mask"]), self.value(a["value"])
        if isinstance(x, Number) and isinstance(mask, BoolTensor) and isinstance(fill, Number):
            return Choice(mask, fill.value, x.value)
        return self.unknown(node)

    def mask_where(self, node: fx.Node, a: Arguments) -> object:
        mask, x, y = self.boolean(a["condition"]), self.value(a["self"]), self.value(a["other"])
        if isinstance(mask, BoolTensor) and isinstance(x, Number) and isinstance(y, Number):
            if node.meta["val"].dtype == torch.bool:
                return self.unknown(node)
            return Choice(mask, x.value, y.value)
        return self.unknown(node)


def _recorded(x: object) -> object:
    return x.meta["val"] if isinstance(x, fx.Node) else x


def _shape(x: object) -> Sequence[Size]:
    recorded = _recorded(x)
    return recorded.shape if isinstance(recorded, Tensor) else ()


def _times(x: float, factor: float) -> float:
    return 0.0 if x == 0.0 or factor == 0.0 else x * factor


def _holds(op: str, x: float, y: float) -> bool:
    return {"ge": x >= y, "gt": x > y, "le": x <= y, "lt": x < y, "eq": x == y, "ne": x != y}[op]


def _difference(x: object, y: object) -> Affine | None:
    if isinstance(x, Affine):
        if isinstance(y, Affine):
            return x + y.scaled(-1)
        return x.shifted(-y) if isinstance(y, (int, torch.SymInt)) else None
    if isinstance(x, (int, torch.SymInt)) and isinstance(y, Affine):
        return y.scaled(-1).shifted(x)
    return None


def _conditions(op: str, d: Affine) -> BoolTensor:
    """Returns the condition ``d op 0``."""
    rank = len(d.coefficients)
    at_least = Linear(d.coefficients, d.constant)
    at_most = Linear(d.scaled(-1).coefficients, -d.constant)
    literals = {
        "ge": {at_least},
        "gt": {at_most.negated()},
        "le": {at_most},
        "lt": {at_least.negated()},
        "eq": {at_least, at_most},
        "ne": {at_least, at_most},
    }[op]
    return BoolTensor(frozenset(literals), rank, op == "ne")


def _same_entries(source: Sequence[Size], target: Sequence[Size]) -> list[int | None] | None:
    """Maps a reshaped tensor's dimensions to the original ones, if only sizes of 1 come or go."""
    kept = [d for d, size in enumerate(source) if not is_one(size)]
    order: list[int | None] = []
    for size in target:
        if is_one(size):
            order.append(None)
        elif kept and str(source[kept[0]]) == str(size):
            order.append(kept.pop(0))
        else:
            return None
    return None if kept else order


def _sliced(mask: BoolTensor, dim: int, start: Size) -> BoolTensor | None:
    literals: list[Literal] = []
    for literal in mask.literals:
        if isinstance(literal, Linear):
            shift = literal.coefficients[dim] * start
            literals.append(Linear(literal.coefficients, literal.constant + shift))
        elif literal.dims[dim] is None:
            literals.append(literal)
        else:
            return None
    return BoolTensor(frozenset(literals), mask.rank, mask.negative)
