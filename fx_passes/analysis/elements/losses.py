"""Reads torch's loss functions, such as kl_div."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import rule
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.domain.row_elements import Placed
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size, provably_equal, shape_of

aten = torch.ops.aten
REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@rule(aten.cosine_similarity.default)
def _cosine_similarity(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    """Norms are bounded from below without a gradient: it flows as if they were not."""
    shape = tuple(shape_of(a["x1"]))
    if len(shape) != len(shape_of(a["x2"])) or not all(
        map(provably_equal, shape, shape_of(a["x2"]))
    ):
        raise Unsupported("cosine_similarity of tensors of two shapes")
    if a["x1"].meta["val"].dtype != a["x2"].meta["val"].dtype:
        raise Unsupported("cosine_similarity of tensors of two types")
    dim = a.get("dim", 1) % len(shape)
    units = []
    for name in ("x1", "x2"):
        x = self.operand(a[name])
        squares = replace(self.combined("mul", x, x), shape=shape)
        norm = self.combined("norm", self.reduced("sum", squares, [dim], True))
        bounded = self.combined("clamp_min", norm, self.number(a.get("eps", 1e-8)))
        missing = self.without_gradient(self.combined("sub", bounded, norm))
        units.append(self.combined("div", x, self.combined("add", norm, missing)))
    values = replace(self.combined("mul", *units), shape=shape)
    return self.reduced("sum", values, [dim], False)


def _total(self: Operands, node: fx.Node, x: Placed, shape: Any, reduction: int) -> Placed:
    """Applies the reduction with which a torch loss ends."""
    how = REDUCTIONS[reduction]
    x = replace(x, shape=tuple(shape))
    if how == "none":
        return x
    dims = list(range(len(x.dims)))
    return self.reduced("sum", x, dims, False, 1.0, tuple(shape) if how == "mean" else ())


def _shape_of_two(a: Arguments) -> tuple[Size, ...]:
    return tuple(torch.broadcast_shapes(shape_of(a["self"]), shape_of(a["target"])))


@rule(aten.kl_div.default)
def _kl_div(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    types = [a[name].meta["val"].dtype for name in ("self", "target")]
    if types[0] != types[1]:
        raise Unsupported("the input and the target of kl_div are of two types")
    x, target = self.operand(a["self"]), self.operand(a["target"])
    if a.get("log_target"):
        difference = self.combined("sub", target, x)
        values = self.combined("mul", self.combined("exp", target), difference)
    else:
        difference = self.combined("sub", self.combined("log", target), x)
        values = self.combined("mul0", target, difference)
    return _total(self, node, values, _shape_of_two(a), a.get("reduction", 1))


@rule(aten.mse_loss.default)
def _mse_loss(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    difference = self.pointwise("sub", a["self"], a["target"])
    values = self.combined("mul", difference, difference)
    return _total(self, node, values, _shape_of_two(a), a.get("reduction", 1))


@rule(aten.l1_loss.default)
def _l1_loss(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    values = self.combined("abs", self.pointwise("sub", a["self"], a["target"]))
    return _total(self, node, values, _shape_of_two(a), a.get("reduction", 1))


@rule(aten.cross_entropy_loss.default)
def _cross_entropy(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    """Reads a cross-entropy with probabilities; with labels it is no sum over the vocabulary."""
    if not a["target"].meta["val"].is_floating_point():
        raise Unsupported("cross_entropy of labels")
    if a.get("weight") is not None or a.get("label_smoothing", 0.0):
        raise Unsupported("cross_entropy with class weights or label smoothing")
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    dim = 1 if len(x.dims) > 1 else 0
    logs = self.combined("sub", x, self.reduced("logsumexp", x, [dim], True))
    values = self.combined("neg", self.combined("mul", self.operand(a["target"]), logs))
    values = replace(values, shape=x.shape)
    reduction = REDUCTIONS[a.get("reduction", 1)]
    if reduction == "none":
        return self.reduced("sum", values, [dim], False)
    counted = tuple(s for d, s in enumerate(x.shape) if d != dim) if reduction == "mean" else ()
    return self.reduced("sum", values, list(range(len(x.dims))), False, 1.0, counted)
