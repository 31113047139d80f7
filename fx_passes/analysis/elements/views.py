"""Reads views and copies, which move axes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.entries import largest
from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import rule
from torch_streamkl.fx_passes.analysis.elements.sums import maximum
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.analysis.rules.views import RESHAPES
from torch_streamkl.fx_passes.domain.row_elements import Placed
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import name_of, named_arguments
from torch_streamkl.fx_passes.fx_utils.sizes import is_one, provably_equal, shape_of

aten = torch.ops.aten


@rule(operator.getitem)
def _getitem(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    source, index = node.args
    assert isinstance(source, fx.Node)
    if source.target == aten.max.dim and index == 0:
        of = named_arguments(source)
        return maximum(self, source, of)
    if source.target == aten.topk.default and index == 0:
        return largest(self, source)
    if source.target != aten.broadcast_tensors.default:
        raise Unsupported(f"{name_of(source)} of scores")
    tensors: Any = source.args[0]
    x = self.operand(tensors[index])
    return Placed(x.formula, ((),) * (len(shape_of(node)) - len(x.dims)) + x.dims)


def _moved(self: Operands, a: Arguments, order: Sequence[int | None]) -> Placed:
    x = self.operand(a["self"])
    return Placed(x.formula, tuple(() if d is None else x.dims[d] for d in order))


@rule(*RESHAPES)
def _view(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    before = shape_of(a["self"])
    if any(not is_one(n) and not self.axes.atoms(d) for d, n in zip(x.dims, before, strict=True)):
        after = shape_of(node)
        if len(before) != len(after) or not all(map(provably_equal, before, after)):
            raise Unsupported("reshape of elements that are broadcast")
        return x
    return Placed(x.formula, self.axes.reshaped(x.dims, shape_of(node)))


@rule(aten.transpose.int)
def _transpose(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    order: list[int | None] = list(range(len(shape_of(node))))
    x, y = a["dim0"] % len(order), a["dim1"] % len(order)
    order[x], order[y] = order[y], order[x]
    return _moved(self, a, order)


@rule(aten.permute.default)
def _permute(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return _moved(self, a, [d % len(a["dims"]) for d in a["dims"]])


@rule(aten.mT.default, aten.adjoint.default, aten.t.default, aten.numpy_T.default)
def _matrix_transpose(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    rank = len(shape_of(node))
    if rank != 2 and node.target not in (aten.mT.default, aten.adjoint.default):
        raise Unsupported("t of scores")
    return _moved(self, a, [*range(rank - 2), rank - 1, rank - 2])


@rule(aten.unsqueeze.default)
def _unsqueeze(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    rank = len(shape_of(node))
    dim = a["dim"] % rank
    return _moved(self, a, [*range(dim), None, *range(dim, rank - 1)])


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    source = shape_of(a["self"])
    given = a.get("dim")
    every = range(len(source)) if given is None else [given] if isinstance(given, int) else given
    dropped = [d % len(source) for d in every if is_one(source[d])]
    return _moved(self, a, [d for d in range(len(source)) if d not in dropped])


@rule(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def _expand(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    x = self.operand(a["self"])
    extra = len(shape_of(node)) - len(x.dims)
    return Placed(x.formula, ((),) * extra + x.dims)


@rule(
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
)
def _same(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.operand(a["self"])
