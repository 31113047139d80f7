"""Defines rules for masks on scores and after the softmax: masked_fill, where, comparisons."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.analysis.rules.masks import MaskRules
from torch_streamkl.fx_passes.domain import element_algebra as elements
from torch_streamkl.fx_passes.domain.layout import Dim, Layout
from torch_streamkl.fx_passes.domain.masks import (
    NEVER,
    AnyKey,
    BoolTensor,
    Choice,
    to_axes,
    to_tensor,
)
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import IMPROBABLE, Masking, Scores
from torch_streamkl.fx_passes.domain.values import Elements, Infinite, Number, Rows
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import is_one, provably_equal, shape_of
from torch_streamkl.program.graph import ONE, ZERO, apply

aten = torch.ops.aten


class ValueMaskRules(MaskRules):
    """Adds the rules that apply masks to the interpreter."""

    @rule(
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
    )
    def masked_fill(self, node: fx.Node, a: Arguments) -> object:
        x, mask, value = self.value(a["self"]), self.boolean(a["mask"]), self.value(a["value"])
        if not isinstance(x, (Elements, Scores, Rows)):
            return self.mask_masked_fill(node, a)
        if isinstance(x, Rows):
            return None
        if mask == NEVER:
            return x
        if not isinstance(value, Number):
            raise Unsupported("masked_fill with a tensor")
        if isinstance(x, Scores):
            return self._filled(x, mask, value.value)
        return self._without(x, mask, value.value, a["mask"])

    def _filled(self, x: Scores, mask: object, fill: float) -> Scores:
        """Scores with ``fill`` where the mask is True."""
        if isinstance(mask, Infinite):
            raise Unsupported("infinite scores are replaced before the softmax")
        if not isinstance(mask, BoolTensor):
            raise Unsupported("scores are masked by something that is not a boolean tensor")
        keep = to_axes(mask.inverted(), x.layout, self.rank)
        if keep is None:
            raise Unsupported("scores are masked where one of several conditions holds")
        return x.then(Masking(keep, fill))

    def _without(self, x: Elements, mask: object, fill: float, node: object) -> Elements:
        """Values with ``fill`` where the mask is True."""
        if fill != 0.0:
            raise Unsupported(f"values after the softmax are filled with {fill:g}")
        if isinstance(mask, Infinite):
            if _same_removed(x, mask):
                return x
            raise Unsupported(
                "values are masked where scores of another distribution are infinite"
            )
        if isinstance(mask, AnyKey):
            raise Unsupported("rows with keys are set to 0")
        if isinstance(mask, Elements):
            return self._where_expression(mask, None, x)
        if not isinstance(mask, BoolTensor):
            raise Unsupported("values after the softmax are masked by something unknown")
        return elements.masked_after(
            x,
            mask.inverted(),
            self.rank,
            lambda: self._row_factor(x, node, selects=True, keeps=False),
        )

    @rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
    def where(self, node: fx.Node, a: Arguments) -> object:
        if "self" not in a or "other" not in a:
            return self._no_rule(node, "where")
        condition, x, y = (
            self.boolean(a["condition"]),
            self.value(a["self"]),
            self.value(a["other"]),
        )
        if isinstance(condition, BoolTensor) and not condition.literals:
            chosen, taken = (a["other"], y) if condition.negative else (a["self"], x)
            if isinstance(taken, (Elements, Scores)) and _same_shape(chosen, node):
                return taken
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
            raise Unsupported("where between values after the softmax")
        if not isinstance(y, Number):
            raise Unsupported("where between two values after the softmax")
        return self._kept(x, condition, y.value, a["condition"], keeps=True)

    def _kept(
        self, x: Elements, mask: object, other: float, node: object, *, keeps: bool
    ) -> Elements:
        if other != 0.0:
            raise Unsupported(f"values after the softmax are filled with {other:g}")
        if isinstance(mask, AnyKey):
            return self._rows_with_keys(x, mask, node, keeps)
        if not isinstance(mask, BoolTensor):
            raise Unsupported("values after the softmax are masked by something unknown")
        return elements.masked_after(
            x, mask, self.rank, lambda: self._row_factor(x, node, selects=True, keeps=keeps)
        )

    def _rows_with_keys(self, x: Elements, mask: AnyKey, node: object, keeps: bool) -> Elements:
        """Only rows that have a key count: as if the mask were applied to every value."""
        is_own = keeps and mask.keepdim and mask.dim == x.key_dim
        if is_own and all(
            form.fill <= IMPROBABLE and form.mask == to_axes(mask.mask, layout, self.rank)
            for form, layout in zip(map(read, (d.scores for d in x.parts)), x.layouts, strict=True)
        ):
            return elements.masked_after(
                x, mask.mask, self.rank, lambda: self._row_factor(x, node)
            )
        return elements.with_row_factor(x, self._row_factor(x, node, selects=True, keeps=keeps))

    def _where_expression(self, condition: Elements, x: object, y: object) -> Elements:
        """Reads where() with a condition on probabilities, such as P > 0."""
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
        raise Unsupported("where with a condition on probabilities that is not always true")

    def _times_mask(self, x: Elements, mask: object, node: object) -> Elements:
        """Multiplies values by a 0/1 mask."""
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
        except Unsupported as reason:
            value = node.meta["val"] if isinstance(node, fx.Node) else None
            dim = value.dim() - (x.rank - x.key_dim) if isinstance(value, Tensor) else -1
            if dim < 0 or not isinstance(value, Tensor) or is_one(value.shape[dim]):
                return elements.with_row_factor(x, self._row_factor(x, node))
            raise reason

    def _times_boolean(self, x: Elements, mask: BoolTensor, node: object) -> Elements:
        return elements.masked_after(x, mask, self.rank, lambda: self._row_factor(x, node))

    def compared(self, op: str, x: Elements, value: float) -> object:
        """Reads P > 0, which a probability that underflows misses, or P <= 0."""
        e = x.single()
        if e is not None and e.op == "P" and value == 0.0 and op in ("gt", "ne"):
            return x.map(lambda p: apply("gt", p, ZERO))
        if e is not None and e.op == "P" and value == 0.0 and op in ("le", "eq"):
            return x.map(lambda p: apply("ge", ZERO, p))
        raise Unsupported("a comparison of probabilities with a number")

    def infinite(self, x: object) -> object:
        """Marks where scores or log-probabilities are infinite: at the keys that a mask
        removed.
        """
        if isinstance(x, Scores):
            return _removed(x)
        if isinstance(x, Elements):
            e = x.single()
            part = elements.takes_part(x)
            if e is not None and e.op == "logP" and part.single() == ONE:
                k = int(e.value)
                return _removed(Scores(x.parts[k].scores, x.layouts[k]))
            return part.map(lambda e: ZERO if e == ONE else -e)
        return None

    def finite(self, x: object) -> object:
        """Marks where scores or log-probabilities are finite."""
        if isinstance(x, Elements) and elements.takes_part(x).single() != ONE:
            return elements.takes_part(x)
        found = self.infinite(x)
        if isinstance(found, Elements):
            return found.map(lambda _: ONE)
        if isinstance(found, Infinite):
            raise Unsupported("isfinite of scores that a tensor was added to")
        return found.inverted() if isinstance(found, BoolTensor) else None


# A mask value that this is multiplied up to is -inf in float32.
LOWEST = torch.finfo(torch.float32).min


def _removed(x: Scores) -> BoolTensor | Infinite:
    """Marks where scores are -inf, if everything that they are made of but biases is finite."""
    form = read(x.key)
    if form.padded is not None:
        raise Unsupported("isinf of scores that were padded with -inf")
    if form.biases:
        return Infinite((x,))
    if not form.mask or all(layer.fill >= LOWEST for layer in form.layers):
        return NEVER
    mask = to_tensor(form.mask, x.layout)
    if form.fill != -math.inf or not form.exact_fill or mask is None:
        raise Unsupported("isinf of scores of which some are masked and others finite")
    return mask.inverted()


def _same_removed(x: Elements, infinite: Infinite) -> bool:
    """Whether the same keys, of masks and biases alike, have no part in any distribution."""
    own = [Scores(d.scores, layout) for d, layout in zip(x.parts, x.layouts, strict=True)]
    return len({_removing(s, x.rank) for s in (*own, *infinite.scores)}) == 1


def _removing(x: Scores, rank: int) -> object:
    """Collects what may remove keys of the scores, by the dimensions of a tensor."""
    form = read(x.key)
    layout = ((),) * (rank - len(x.layout)) + x.layout
    mask = to_tensor(form.mask, layout)
    tensors = [b.tensor for b in form.biases if b.weight > 0.0]
    biases = frozenset((x.node, tuple(_place_of(d, layout) for d in x.layout)) for x in tensors)
    return mask, biases, form.fill == -math.inf


def _place_of(dim: Dim, layout: Layout) -> int | None:
    return layout.index(dim) if dim and dim in layout else None


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    x, y = shape_of(a), shape_of(b)
    return len(x) == len(y) and all(map(provably_equal, x, y))


def _is_zero(x: object) -> bool:
    if isinstance(x, Elements):
        return x.single() == ZERO
    return isinstance(x, Number) and x.value == 0.0
