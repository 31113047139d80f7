"""Entries of rows at given ids: gathered, or set to a number."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import rule
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.domain.row_elements import Placed
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.sizes import is_one, shape_of

aten = torch.ops.aten


@rule(aten.scatter.value, aten.scatter_.value, aten.scatter.src, aten.scatter_.src)
def _scatter(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    """A number at given ids of a constant: a mask of labels."""
    base = self.recognised.values.get(a["self"])
    value = self.recognised.values.get(a["src"]) if "src" in a else a["value"]
    if isinstance(value, Number):
        value = value.value
    if not isinstance(base, Number) or not isinstance(value, (int, float)):
        raise Blocked("scatter of scores")
    dim = a["dim"] % len(shape_of(node))
    hits = self.at_ids(a["index"], shape_of(node), dim)
    if node.meta["val"].dtype == torch.bool:
        if base.value != 0 or value == 0:
            raise Blocked("scatter into a condition")
        return hits
    return self.combined("where", hits, self.number(float(value)), self.number(base.value))


@rule(aten.gather.default)
def _gather(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    """One entry of each row: a sum in which all others are 0."""
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    dim = a["dim"] % len(x.dims)
    if not is_one(shape_of(a["index"])[dim]):
        raise Blocked("several entries of a row are gathered")
    hits = self.at_ids(a["index"], x.shape, dim)
    kept = self.combined("where", hits, x, self.number(0.0))
    return self.reduced("sum", replace(kept, shape=x.shape), [dim], True)
