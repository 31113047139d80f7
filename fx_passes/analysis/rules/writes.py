"""Defines rules for writes through a view: `scores[:, column] = -inf`.

NOTE [Writes through a view]
A write has no data edge to later readers of the tensor that was viewed, so a tensor is unknown
after it (`ScoreInterpreter._note_writes`). One write is followed: -inf in one column of scores,
or in a range of columns, by a view of plain indexing. It equals a masked_fill of those columns
for every later reader of that very tensor; other views of its memory stay unknown. Two operations
on memory that is written anywhere are never taken for equal.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.context import Analysis
from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.domain.index_values import first_index
from torch_streamkl.fx_passes.domain.layout import axis_dim
from torch_streamkl.fx_passes.domain.masks import AxisExcept
from torch_streamkl.fx_passes.domain.scores import Masking, Scores
from torch_streamkl.fx_passes.domain.values import (
    Number,
)
from torch_streamkl.fx_passes.fx_utils.nodes import (
    name_of,
    named_arguments,
)
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    provably_equal,
    shape_of,
)

aten = torch.ops.aten


class WriteRules(Analysis):
    """Adds the rules for writes to parts of scores to the interpreter."""

    @rule(aten.fill_.Scalar, aten.fill_.Tensor)
    def fill_(self, node: fx.Node, a: Arguments) -> object:
        written = self._columns(a["self"])
        value = self.value(a["value"])
        if written is None or not isinstance(value, Number) or value.value != -math.inf:
            return self._no_rule(node, "fill_")
        base, dim, start, stop = written
        x = self.value(base)
        pieces = x.layout[dim] if isinstance(x, Scores) else ()
        if not isinstance(x, Scores) or len(pieces) != 1:
            return self._no_rule(node, "fill_")
        axis = pieces[0].axis
        if axis_dim(x.layout, axis) != dim or not provably_equal(pieces[0].size, x.key.size(axis)):
            return self._no_rule(node, "fill_")
        keep = AxisExcept(axis, start, stop)
        self.written[node] = (base, x.then(Masking(frozenset({keep}), -math.inf)))
        return None

    def _columns(self, view: fx.Node) -> tuple[fx.Node, int, int, int] | None:
        """The tensor, dimension, start and stop that a view of plain indexing takes."""
        found: tuple[int, int, int] | None = None
        while view.op == "call_function" and name_of(view) in ("select", "slice"):
            a = named_arguments(view)
            source = a["self"]
            dim = a.get("dim", 0) % self.rank[source]
            size, name = shape_of(source)[dim], name_of(view)
            length = 1 if name == "select" else shape_of(view)[dim]
            if name == "select" or not provably_equal(length, size):
                start = _start(a, name, size, length)
                is_range = isinstance(length, int) and a.get("step", 1) == 1
                if found is not None or start is None or not is_range:
                    return None
                found = (dim, start, start + length)
            view = source
        return None if found is None else (view, *found)


def _start(a: Arguments, name: str, size: Size, length: Size) -> int | None:
    """Returns where an index or a slice begins, counted from the front."""
    given = a["index"] if name == "select" else a.get("start") or 0
    start = first_index(given, size, length) if isinstance(given, int) else None
    return start if isinstance(start, int) else None
