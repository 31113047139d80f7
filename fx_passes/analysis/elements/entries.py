"""Reads `gather`, and writes of a number at given ids."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import rule
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.domain.row_elements import Chosen, Placed
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import named_arguments
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, is_zero, provably_equal, shape_of

aten = torch.ops.aten
SAME = {aten.detach.default, aten.alias.default, aten.contiguous.default}


@rule(aten.scatter.value, aten.scatter_.value, aten.scatter.src, aten.scatter_.src)
def _scatter(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    """Reads a number written at given ids of a constant: a mask of labels."""
    base = self.recognised.values.get(a["self"])
    value = self.recognised.values.get(a["src"]) if "src" in a else a["value"]
    if isinstance(value, Number):
        value = value.value
    if not isinstance(base, Number) or not isinstance(value, (int, float)):
        raise Unsupported("scatter of scores")
    dim = a["dim"] % len(shape_of(node))
    hits = self.at_given_ids(a["index"], shape_of(node), dim)
    if node.meta["val"].dtype == torch.bool:
        if base.value != 0 or value == 0:
            raise Unsupported("scatter into a condition")
        return hits
    return self.combined("where", hits, self.number(float(value)), self.number(base.value))


@rule(aten.gather.default)
def _gather(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    """One entry of each row: a sum in which all others are 0. Of several, see `Chosen`."""
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    dim = a["dim"] % len(x.dims)
    if not is_one(shape_of(a["index"])[dim]):
        return _several(self, x, a["index"], dim)
    hits = self.at_given_ids(a["index"], x.shape, dim)
    kept = self.combined("where", hits, x, self.number(0.0))
    return self.reduced("sum", replace(kept, shape=x.shape), [dim], True)


def largest(self: Operands, top: fx.Node) -> Placed:
    """Returns the values of a top-k: entries at its ids."""
    ids = [u for u in top.users if u.target is operator.getitem and u.args[1] == 1]
    if not ids:
        raise Unsupported("the largest scores without their ids")
    source = named_arguments(top)["self"]
    x = replace(self.operand(source), shape=tuple(shape_of(source)))
    return _several(self, x, ids[0], named_arguments(top).get("dim", -1) % len(x.dims))


def _several(self: Operands, x: Placed, ids: fx.Node, dim: int) -> Placed:
    """Entries at ids that are given once in each row."""
    source = _ranked(ids, dim)
    if source is None:
        raise Unsupported(
            "gather reads entries of each row by ids that are no top-k of this graph: an id may "
            "be there twice"
        )
    if is_zero(shape_of(ids)[dim]):
        raise Unsupported("no entry of a row is gathered")  # their mean has no gradient, not NaN
    if not _is_within(shape_of(source)[dim], x.shape[dim]):
        raise Unsupported("ids of more keys than there are")  # eager code raises
    key = self.axes.atoms(x.dims[dim])
    if len(key) != 1 or (x.formula.key is not None and self.axes.atoms((x.formula.key,)) != key):
        raise Unsupported("entries of what is not the keys are gathered")
    known = (self.recognised.canonical[ids], dim)
    if known not in self.by_ids:
        axis = self.axes.new(shape_of(ids)[dim])
        self.chosen[axis] = Chosen(self.at_ids(ids, x.shape, dim), dim)
        self.by_ids[known] = axis
    axis = self.by_ids[known]
    hits = self.chosen[axis].hits
    if not provably_equal(hits.shape[dim], x.shape[dim]):
        raise Unsupported("ids of keys of two lengths")
    dims = self.aligned(hits, x)
    return Placed(x.formula, (*dims[:dim], (axis,), *dims[dim + 1 :]))


def _ranked(ids: fx.Node, dim: int) -> fx.Node | None:
    """Returns the node whose top-k along the dimension computes these ids: unique in each row."""
    while ids.target in SAME:
        (ids,) = ids.all_input_nodes
    if ids.target is not operator.getitem or ids.args[1] != 1:
        return None
    top = ids.args[0]
    assert isinstance(top, fx.Node)
    if top.target != aten.topk.default:
        return None
    given = named_arguments(top)
    if given.get("dim", -1) % len(shape_of(ids)) != dim:
        return None
    source = given["self"]
    assert isinstance(source, fx.Node)
    return source


def _is_within(length: Size, whole: Size) -> bool:
    known = isinstance(length, int) and isinstance(whole, int) and length <= whole
    return known or provably_equal(length, whole)
