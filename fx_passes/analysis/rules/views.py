"""Defines rules for views, casts and parts of tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.casts import Cast
from torch_streamkl.fx_passes.analysis.context import SINGLE_ENTRIES
from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.analysis.rules.masks import MaskRules
from torch_streamkl.fx_passes.domain import element_algebra as elements
from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain import score_algebra as scores
from torch_streamkl.fx_passes.domain.layout import Layout, Shape
from torch_streamkl.fx_passes.domain.masks import BoolTensor, Choice
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    Entries,
    Number,
    Parts,
    RowMax,
    Rows,
    Stacked,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    is_one,
    is_zero,
    provably_equal,
    shape_of,
)
from torch_streamkl.fx_passes.fx_utils.torch_names import statically_known_true

aten = torch.ops.aten

RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
)


class ViewRules(MaskRules):
    """Adds the rules for operations that move values without changing them to the interpreter."""

    @rule(operator.getitem)
    def getitem(self, node: fx.Node, a: Arguments) -> object:
        source, index = node.args[0], node.args[1]
        x = self.value(source)
        if isinstance(x, RowMax):
            return x if index == 0 else None
        if isinstance(x, Parts) and isinstance(index, int):
            start, length = x.bounds[index]
            return self._part(x.source, x.dim, start, length)
        self._stays_blocked(source)
        return None

    @rule(*RESHAPES)
    def view(self, node: fx.Node, a: Arguments) -> object:
        shape, x = shape_of(node), self.value(a["self"])
        if isinstance(x, Entries):
            return rows_of_entries(x, shape)
        return self._viewed(node, a["self"], lambda x: lay.reshape(x, shape), "reshape")

    @rule(aten.transpose.int)
    def transpose(self, node: fx.Node, a: Arguments) -> object:
        rank = self.rank[node]
        order = list(range(rank))
        x, y = a["dim0"] % rank, a["dim1"] % rank
        order[x], order[y] = order[y], order[x]
        return self._permuted(node, a["self"], order)

    @rule(aten.permute.default)
    def permute(self, node: fx.Node, a: Arguments) -> object:
        return self._permuted(node, a["self"], [d % self.rank[node] for d in a["dims"]])

    @rule(aten.mT.default, aten.adjoint.default)
    def matrix_transpose(self, node: fx.Node, a: Arguments) -> object:
        rank = self.rank[node]
        if rank < 2:
            return self._no_rule(node, "mT")
        return self._permuted(node, a["self"], [*range(rank - 2), rank - 1, rank - 2])

    @rule(aten.t.default, aten.numpy_T.default)
    def t(self, node: fx.Node, a: Arguments) -> object:
        return self._permuted(node, a["self"], list(reversed(range(self.rank[node]))))

    def _permuted(self, node: fx.Node, source: fx.Node, order: list[int]) -> object:
        return self._viewed(node, source, lambda x: lay.permute(x, order), "transpose", order)

    @rule(aten.unsqueeze.default)
    def unsqueeze(self, node: fx.Node, a: Arguments) -> object:
        dim = a["dim"] % self.rank[node]
        order = [*range(dim), None, *range(dim, self.rank[node] - 1)]
        return self._viewed(node, a["self"], lambda x: lay.unsqueeze(x, dim), "unsqueeze", order)

    @rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
    def squeeze(self, node: fx.Node, a: Arguments) -> object:
        source = shape_of(a["self"])
        given = a.get("dim")
        dims = (
            range(len(source)) if given is None else [given] if isinstance(given, int) else given
        )
        dropped = [d % len(source) for d in dims if is_one(source[d])]
        order = [d for d in range(len(source)) if d not in dropped]
        return self._viewed(node, a["self"], lambda x: lay.squeeze(x, dropped), "squeeze", order)

    @rule(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
    def expand(self, node: fx.Node, a: Arguments) -> object:
        if isinstance(self.value(a["self"]), (Elements, Scores)):
            same_shape = len(shape_of(node)) == self.rank[a["self"]] and all(
                provably_equal(x, y)
                for x, y in zip(shape_of(node), shape_of(a["self"]), strict=True)
            )
            return self.value(a["self"]) if same_shape else self._no_rule(node, "expand")
        if isinstance(self.value(a["self"]), Rows):
            return self.value(a["self"])  # a known sum, expanded to divide by it
        return self.mask_expand(node, a["self"])

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
                raise Unsupported(f"{what} that mixes the axes of the scores")
            return Scores(x.key, layout)
        if isinstance(x, Elements):
            return elements.viewed(x, change, what)
        if isinstance(x, Rows):
            return None
        return self.mask_view(node, source, order)

    @rule(
        aten.contiguous.default,
        aten.clone.default,
        aten.alias.default,
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
    )
    def contiguous(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        return x if x is not None else self._no_rule(node, "contiguous")

    @rule(
        aten.to.device, aten.to.dtype, aten.to.other, aten._to_copy.default, aten.type_as.default
    )
    def to(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if isinstance(x, Cast) and not node.meta["val"].dtype.is_floating_point:
            raise Unsupported(
                "probabilities or scores are cast to a type that is not floating point"
            )
        if isinstance(x, (BoolTensor, Choice)) or x is None:
            return self.mask_cast(node, a["self"])
        return x

    @rule(aten.detach.default, aten.detach_.default)
    def detach(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])  # what detaching does to gradients, the node's own record says
        if isinstance(x, Rows):
            return None
        return x if x is not None else self._no_rule(node, "detach")

    @rule(aten.select.int)
    def select(self, node: fx.Node, a: Arguments) -> object:
        x, dim = self.value(a["self"]), a["dim"] % self.rank[a["self"]]
        if isinstance(x, (Scores, Elements)):
            index = self.size(a["index"])
            if index is None:
                raise Unsupported("scores are selected at a position that is not known")
            return self._part(x, dim, from_front(index, shape_of(a["self"])[dim]), None)
        return self.mask_select(node, a)

    @rule(aten.slice.Tensor)
    def slice(self, node: fx.Node, a: Arguments) -> object:
        x, dim = self.value(a["self"]), a.get("dim", 0) % self.rank[a["self"]]
        if not isinstance(x, (Scores, Elements)):
            return self.mask_slice(node, a)
        if a.get("step", 1) != 1:
            raise Unsupported("scores are sliced with a step")
        return self._range(node, a, x, dim)

    @rule(aten.narrow.default)
    def narrow(self, node: fx.Node, a: Arguments) -> object:
        x, dim = self.value(a["self"]), a["dim"] % self.rank[a["self"]]
        if isinstance(x, (Scores, Elements)):
            return self._range(node, a, x, dim)
        return self._no_rule(node, "narrow")

    def _range(self, node: fx.Node, a: Arguments, x: object, dim: int) -> object:
        start = self.first_index(node, a["self"], dim, a.get("start"))
        if start is None:
            raise Unsupported("scores are sliced from a place that depends on their size")
        return self._part(x, dim, start, shape_of(node)[dim])

    @rule(
        aten.chunk.default,
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
    )
    def chunk(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if not isinstance(x, (Scores, Elements)):
            return None
        dim = a.get("dim", 0) % self.rank[a["self"]]
        bounds, start = [], 0
        for piece in node.meta["val"]:
            bounds.append((start, piece.shape[dim]))
            start = start + piece.shape[dim]
        return Parts(x, dim, tuple(bounds))

    def _part(self, x: object, dim: int, start: Any, length: Any) -> object:
        if isinstance(x, Scores):
            return Scores(*scores.part(x.key, x.layout, dim, start, length))
        assert isinstance(x, Elements)
        if dim == x.key_dim:
            raise Unsupported("only some of the keys are used after the softmax")
        kept = () if length is None else (length,)
        shape = (*x.shape[:dim], *kept, *x.shape[dim + 1 :])
        return self._changed_scores(
            x, shape, lambda key, layout: scores.part(key, layout, dim, start, length)
        )

    def _changed_scores(
        self, x: Elements, shape: Shape, change: Callable[[Any, Layout], tuple[Any, Layout]]
    ) -> Elements:
        """Rows taken from probabilities are the probabilities of those rows' scores."""
        if any(t.factors for t in x.terms):
            raise Unsupported("part of values that carry row weights is used")
        parts, layouts = [], []
        for distribution, layout in zip(x.parts, x.layouts, strict=True):
            if distribution.averaged:
                raise Unsupported("part of head-averaged probabilities is used")
            key, changed = change(distribution.scores, layout)
            parts.append(type(distribution)(key, distribution.axis))
            layouts.append(changed)
        (key_dim,) = {lay.axis_dim(y, d.axis) for y, d in zip(layouts, parts, strict=True)}
        assert key_dim is not None
        return replace(x, parts=tuple(parts), layouts=tuple(layouts), key_dim=key_dim, shape=shape)

    @rule(aten.stack.default)
    def stack(self, node: fx.Node, a: Arguments) -> object:
        items = [self.value(n) for n in a["tensors"]]
        elements = tuple(x for x in items if isinstance(x, Elements))
        if items and len(elements) == len(items):
            return Stacked(elements, a.get("dim", 0) % self.rank[node])
        return self._no_rule(node, "stack")

    @rule(aten.pad.default, aten.constant_pad_nd.default)
    def pad(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if not isinstance(x, Scores):
            return self._no_rule(node, "pad")
        widths, value = a["pad"], self.value(a.get("value"))
        constant = a.get("mode", "constant") == "constant"
        if not constant or len(widths) != 2 or not is_zero(widths[0]):
            raise Unsupported("scores are padded in a way other than after the last key")
        last, (before, after) = self.rank[node] - 1, (shape_of(n)[-1] for n in (a["self"], node))
        if provably_equal(before, after):
            return x
        if statically_known_true(after < before):
            return self._part(x, last, 0, after)  # a negative width crops
        if not statically_known_true(before < after):
            raise Unsupported("scores are padded by a width of unknown sign")
        if not isinstance(value, Number):
            raise Unsupported("scores are padded with a value that is not a number")
        if value.value != -math.inf:
            raise Unsupported(
                f"scores are padded with {value.value:g}, which takes part in the softmax"
            )
        return scores.padded(x, shape_of(node)[-1])


def rows_of_entries(x: Entries, shape: Sequence[Size]) -> Scores | Elements:
    """Reads ``masked_select(scores, mask).view(-1, vocab_size)``: the rows of the entries."""
    rows = x.rows
    sizes = lay.sizes_of(rows.layout) if isinstance(rows, Scores) else rows.shape
    if len(shape) != 2 or not provably_equal(shape[1], sizes[1]):
        raise Unsupported(SINGLE_ENTRIES)
    return rows


def from_front(start: Size, size: Size) -> Size:
    """Returns a start counted from the front and within the dimension, as torch takes it."""
    if isinstance(start, int) and start >= 0 and not isinstance(size, int):
        return start  # what is longer than the dimension gives an empty slice
    if statically_known_true(start < 0):
        start = start + size
    if isinstance(start, int) and isinstance(size, int):
        return min(max(start, 0), size)
    if statically_known_true(start >= 0):
        return start
    raise Unsupported("scores are sliced from a position of unknown sign")
