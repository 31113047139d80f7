"""Decides what a row program captures: expressions of the user's tensors without products."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.row_groups import Dim, RowAxes
from torch_streamkl.fx_passes.closed_forms.row_sites import is_elementwise
from torch_streamkl.program.graph import ANY, FLOAT, INT, Axis, Node, index
from torch_streamkl.program.walks import walk
from torch_streamkl.rows.program import COLUMNS, KEY, PAIR, ROW, Capture


@dataclass(frozen=True)
class Captured:
    """Describes a tensor that a program reads: an expression, and its axes by dimension."""

    value: Node
    kind: str
    heads: Dim
    dims: tuple[Dim, ...]


@dataclass
class Leaves:
    """Decides what a program captures, and numbers it."""

    axes: RowAxes
    detached: Mapping[Node, Node]
    captured: dict[Node, Captured] = field(default_factory=dict)
    parts: dict[Axis, Dim] = field(default_factory=dict)  # of the keys, by the axis of their sums

    def kind_of(self, x: Node) -> str:
        by_key = bool(x.axes & set(self.axes.keys))
        by_row = bool(x.axes & set(self.axes.rows))
        return PAIR if by_key and by_row else KEY if by_key else ROW

    def is_whole(self, x: Node) -> bool:
        """Returns whether an expression without products is read as a tensor."""
        if x.op == "capture" or x.op in ("reduce", "log_softmax", "size"):
            return True
        if self._is_at_head(x):
            return True
        leaves = [y for y in walk([x], is_elementwise) if y.op in ("capture", "size")]
        if not leaves:
            return False
        if self.kind_of(x) != PAIR:
            return True
        return x.dtype != FLOAT and any(self.kind_of(y) == PAIR for y in leaves)

    def _is_at_head(self, x: Node) -> bool:
        """Whether a condition depends on the index of a batch or head, which a program lacks."""
        if x.op in ("index", "and", "or", "not"):
            return False
        if x.dtype == FLOAT and self.kind_of(x) == PAIR:
            return False
        axes = {*self.axes.batch, *(a for heads in self.axes.heads for a in heads)}
        return any(y.op == "index" and y.value in axes for y in walk([x], is_elementwise))

    def number(self, x: Node) -> int:
        """Returns the number of a captured tensor."""
        if x not in self.captured:
            self.captured[x] = self._described(x)
        return list(self.captured).index(x)

    def ids_of(self, x: Node) -> Node | None:
        """Returns the ids of a condition that a key is one of them."""
        if x.kind == ANY:
            hit, entries = x.args[0], x.value.axis
        else:
            hit, entries = x, None
        if hit.op != "eq" or len(self.axes.keys) != 1:
            return None
        place = index(self.axes.keys[0])
        ids = [a for a in hit.args if a is not place]
        if len(ids) != 1 or ids[0].op != "capture" or ids[0].dtype != INT:
            return None
        (found,) = ids
        if set(self.axes.keys) & found.axes or (entries is not None and entries not in found.axes):
            return None
        return found

    def hits(self, x: Node, ids: Node) -> int:
        """Returns the number of ids that are captured as a condition on keys."""
        if x not in self.captured:
            own = (x.value.axis,) if x.op == "reduce" else ()
            heads = self._heads(ids.axes - set(own), x)
            dims = (self.axes.batch, heads, self.axes.rows, own)
            self.captured[x] = Captured(ids, COLUMNS, heads, dims)
        return list(self.captured).index(x)

    def _heads(self, axes: Collection[Axis], at: Node) -> Dim:
        groups = self.axes
        own = [h for h in dict.fromkeys(groups.heads) if set(h) & set(axes)]
        if len(own) > 1:
            raise NoForm("a tensor has the heads of two products", at)
        heads = own[0] if own else ()
        if not set(axes) <= {*groups.batch, *heads, *groups.rows, *groups.keys}:
            raise NoForm("a tensor gives the scores a dimension that no matmul has", at)
        return heads

    def _described(self, x: Node) -> Captured:
        groups, kind, heads = self.axes, self.kind_of(x), self._heads(x.axes, x)
        if kind != ROW and not set(groups.keys) <= x.axes:
            raise NoForm("a tensor of blocks of keys meets the scores", x)
        if kind == PAIR:
            for group in (groups.batch, heads, groups.rows):
                if 0 < len(set(group) & x.axes) < len(group):
                    raise NoForm("a mask varies along some dimensions that become one", x)
            known = {*groups.batch, *heads, *groups.rows, *groups.keys}
            if x.flows and known <= x.axes:
                # the map of the other side, from another graph: its gradient is as large
                raise NoForm("a tensor as large as the scores meets them and needs a gradient", x)
        dims = {
            ROW: (groups.batch, heads, groups.rows),
            KEY: (groups.batch, heads, groups.keys),
            PAIR: (groups.batch, heads, groups.rows, groups.keys),
        }[kind]
        return Captured(x, kind, heads, dims)

    def declared(self) -> tuple[Capture, ...]:
        """Returns the captured tensors as a program has them."""
        numbers = self.axes.numbers
        return tuple(
            Capture(c.kind, c.value.dtype, numbers[c.heads]) for c in self.captured.values()
        )
