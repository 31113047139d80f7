"""Defines rules for selected rows: by a boolean mask, positions, masked_select or gather.

A selection of a divergence's rows, after its sum over the keys, stays the user's own code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.context import SINGLE_ENTRIES
from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.analysis.rules.views import ViewRules
from torch_streamkl.fx_passes.domain import score_algebra as scores
from torch_streamkl.fx_passes.domain.layout import Shape
from torch_streamkl.fx_passes.domain.masks import BoolTensor, Linear, opaque, rearranged
from torch_streamkl.fx_passes.domain.row_selection import (
    GATHER,
    INDEX_SELECT,
    MASK,
    MASK_ENTRIES,
    POSITIONS,
    RowSelection,
)
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.values import Elements, Entries
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import storage_of
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    expression,
    is_one,
    provably_equal,
    shape_of,
)

aten = torch.ops.aten
POSITION_TYPES = (torch.int64, torch.int32)  # uint8 is a mask
BY_INDEX = "scores or probabilities are gathered by index"


class SelectionRules(ViewRules):
    """Adds the rules for selected rows to the interpreter."""

    @rule(aten.index.Tensor)
    def index(self, node: fx.Node, a: Arguments) -> object:
        """Reads ``x[mask]`` and ``x[i, j]``, after any number of whole dimensions."""
        x, indices = self.value(a["self"]), a["indices"]
        if not isinstance(x, (Scores, Elements)):
            return self.mask_index(node, a)
        given = [(d, i) for d, i in enumerate(indices) if i is not None]
        places = [d for d, _ in given]
        tensors = [self.canonical[i] for _, i in given if isinstance(i, fx.Node)]
        if len(tensors) < len(given) or places != list(range(places[0], places[0] + len(places))):
            raise Unsupported(BY_INDEX)
        types = {i.meta["val"].dtype for i in tensors}
        ranks = [self.rank[i] for i in tensors]
        first, sizes = places[0], shape_of(a["self"])
        if types == {torch.bool} and len(tensors) == 1:
            (mask,) = tensors
            if self.rank[mask] == len(sizes):
                return self._entries(node, x, a["self"], mask)
            selection = self._rows_where(mask, shape_of(mask), (shape_of(node)[first],))
            self.counted[node] = (selection, first, 1)
        elif types <= set(POSITION_TYPES) and min(ranks) > 0:
            shape = tuple(shape_of(node)[first : first + max(ranks)])
            held = tuple(sizes[d] for d in places)
            selection = RowSelection(POSITIONS, tuple(tensors), held, shape)
        else:
            raise Unsupported(BY_INDEX)
        return self._selected(x, first, selection)

    def _rows_where(
        self, mask: fx.Node, sizes: Sequence[Size], shape: Shape, *, of_entries: bool = False
    ) -> RowSelection:
        """Returns the rows at which a mask holds: one selection for all equal masks."""
        found = self.boolean(mask)
        condition = found if isinstance(found, BoolTensor) else opaque(mask, shape_of(mask))
        rank = len(sizes)
        condition = condition.raised(rank + of_entries)
        if of_entries:
            if any(_varies_along(x, rank) for x in condition.literals):
                raise Unsupported(SINGLE_ENTRIES)
            condition = rearranged(condition, range(rank))
        key = (condition, tuple(str(expression(size)) for size in sizes))
        # every use of a mask has a symbol of its own for the number of rows: the first one stands
        kind = MASK_ENTRIES if of_entries else MASK
        selection = RowSelection(kind, (mask,), tuple(sizes), shape, condition=condition)
        return self.selections.setdefault(key, selection)

    @rule(aten.masked_select.default)
    def masked_select(self, node: fx.Node, a: Arguments) -> object:
        x, mask = self.value(a["self"]), self.canonical[a["mask"]]
        if not isinstance(x, (Scores, Elements)):
            return self._no_rule(node, "masked_select")
        if mask.meta["val"].dtype != torch.bool:
            raise Unsupported(SINGLE_ENTRIES)
        return self._entries(node, x, a["self"], mask)

    def _entries(
        self, node: fx.Node, x: Scores | Elements, source: fx.Node, mask: fx.Node
    ) -> Entries:
        """The entries of whole rows, where the mask is the same for all entries of a row."""
        sizes, given = shape_of(source), shape_of(mask)
        fits = 2 <= len(given) <= len(sizes) and all(
            is_one(m) or provably_equal(m, n)
            for m, n in zip(given, sizes[len(sizes) - len(given) :], strict=True)
        )
        if not fits:
            raise Unsupported(SINGLE_ENTRIES)
        count = shape_of(node)[0] // sizes[-1]
        selection = self._rows_where(mask, sizes[:-1], (count,), of_entries=True)
        rows = self._selected(x, 0, selection)
        if isinstance(rows, Elements) and rows.key_dim != 1:
            raise Unsupported(SINGLE_ENTRIES)
        self.counted[node] = (selection, 0, sizes[-1])
        return Entries(rows)

    @rule(aten.index_select.default)
    def index_select(self, node: fx.Node, a: Arguments) -> object:
        x, dim, index = self.value(a["self"]), a["dim"], self.canonical[a["index"]]
        if not isinstance(x, (Scores, Elements)):
            return self._no_rule(node, "index_select")
        if self.rank[index] != 1 or index.meta["val"].dtype not in POSITION_TYPES:
            raise Unsupported(BY_INDEX)
        dim = dim % self.rank[node]
        size, count = shape_of(a["self"])[dim], shape_of(node)[dim]
        selection = RowSelection(INDEX_SELECT, (index,), (size,), (count,))
        return self._selected(x, dim, selection)

    @rule(aten.gather.default)
    def gather(self, node: fx.Node, a: Arguments) -> object:
        return self._gathered(node, "gather", a["self"], a["dim"], a["index"])

    @rule(aten.take_along_dim.default)
    def take_along_dim(self, node: fx.Node, a: Arguments) -> object:
        if a.get("dim") is None:
            return self._no_rule(node, "take_along_dim")
        return self._gathered(node, "take_along_dim", a["self"], a["dim"], a["indices"])

    def _gathered(
        self, node: fx.Node, name: str, source: fx.Node, dim: int, index: fx.Node
    ) -> object:
        """Rows at positions along a dimension that are the same for all entries of a row."""
        x, rank = self.value(source), self.rank[source]
        if not isinstance(x, (Scores, Elements)):
            return self._no_rule(node, name)
        sizes, made, given = shape_of(source), shape_of(node), shape_of(index)
        along = dim % rank
        base, dims = self._unrepeated(index)
        whole = len(given) == rank and all(
            d == along
            or (
                provably_equal(made[d], sizes[d])
                and (d == rank - 1 or provably_equal(given[d], sizes[d]))
            )
            for d in range(rank)
        )
        if along == rank - 1 or dims[-1] is not None or not whole:
            return self._no_rule(node, name)
        if index.meta["val"].dtype != torch.int64:
            return self._no_rule(node, name)
        selection = RowSelection(
            GATHER, (self.canonical[index],), tuple(sizes[:-1]), tuple(made[:-1]), along
        )
        rows = tuple(str(expression(size)) for size in made[:-1])
        selection = self.selections.setdefault((GATHER, base, dims, rows, along), selection)
        return self._selected(x, 0, selection)

    def _unrepeated(self, node: fx.Node) -> tuple[fx.Node, tuple[int | None, ...]]:
        """Returns the tensor before expand and repeat, and the origin of each dimension."""
        node, dims = self.unexpanded(node)
        while True:
            source = node.args[0] if node.args else None
            if node.op != "call_function" or not isinstance(source, fx.Node):
                return node, dims
            if node.target is aten.unsqueeze.default:
                new = int(node.args[1]) % self.rank[node]  # type: ignore[arg-type]  # its dim
                below = [d if d < new else None if d == new else d - 1 for d in range(len(dims))]
            elif node.target is aten.repeat.default:
                if storage_of(source) in self.written_storages:
                    return node, dims  # a copy of what it was at this time
                shape, skipped = shape_of(source), self.rank[node] - self.rank[source]
                made = shape_of(node)
                below = [
                    None if d < skipped or is_one(shape[d - skipped]) else d - skipped
                    for d in range(self.rank[node])
                ]
                if any(
                    b is not None and not provably_equal(shape[b], made[d])
                    for d, b in enumerate(below)
                ):
                    return node, dims
            else:
                return node, dims
            dims = tuple(None if d is None else below[d] for d in dims)
            node, inner = self.unexpanded(source)
            dims = tuple(None if d is None else inner[d] for d in dims)

    def _selected(
        self, x: Scores | Elements, dim: int, selection: RowSelection
    ) -> Scores | Elements:
        if isinstance(x, Scores):
            return Scores(*scores.selected_rows(x.key, x.layout, dim, selection))
        end = dim + len(selection.sizes)
        if dim <= x.key_dim < end:
            raise Unsupported("keys are selected after the softmax")
        shape = (*x.shape[:dim], *selection.shape, *x.shape[end:])
        return self._changed_scores(
            x, shape, lambda key, layout: scores.selected_rows(key, layout, dim, selection)
        )


def _varies_along(literal: object, dim: int) -> bool:
    if isinstance(literal, Linear):
        return literal.coefficients[dim] != 0
    return literal.dims[dim] is not None  # type: ignore[attr-defined]  # an Opaque
