"""Reads softmaxes, sums, maxima and norms along axes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.elements.algebra import CONDITIONS
from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import rule
from torch_streamkl.fx_passes.analysis.registry import Arguments
from torch_streamkl.fx_passes.domain.row_elements import Formula, Placed
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import shape_of

aten = torch.ops.aten
# numbers whose float64 has no digits left for a logarithm of counts, as tests compare them
ROUNDED = 1e3


def _logits(self: Operands, node: fx.Node, a: Arguments) -> tuple[Placed, Placed]:
    x = self.operand(a["self"])
    x = replace(x, shape=tuple(shape_of(a["self"])))
    dim = a["dim"] % len(x.dims)
    return x, self.reduced("logsumexp", x, [dim], True)


@rule(aten.log_softmax.int, aten._log_softmax.default)
def _log_softmax(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("sub", *_logits(self, node, a))


@rule(aten.softmax.int, aten._softmax.default)
def _softmax(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return self.combined("exp", self.combined("sub", *_logits(self, node, a)))


@rule(aten.logsumexp.default)
def _logsumexp(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    if is_filled(x.formula, ROUNDED):
        # in a row without keys eager code's sum is the fill, in which their count is lost
        raise Unsupported("the log-sum-exp of scores that a large number may stand in place of")
    given = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
    dims = [d % len(x.dims) for d in given]
    return self.reduced("logsumexp", x, dims, bool(a.get("keepdim", False)))


@rule(aten.amax.default)
def maximum(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    """Reads amax, and max over all elements."""
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    given = a.get("dim", [])
    dims = [d % len(x.dims) for d in ([given] if isinstance(given, int) else given)]
    return self.reduced("max", x, dims or range(len(x.dims)), bool(a.get("keepdim", False)))


@rule(aten.sum.dim_IntList, aten.sum.default)
def _sum(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return _summed(self, a, mean=False)


@rule(aten.mean.dim, aten.mean.default)
def _mean(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    return _summed(self, a, mean=True)


def _summed(self: Operands, a: Arguments, *, mean: bool) -> Placed:
    x = replace(self.operand(a["self"]), shape=tuple(shape_of(a["self"])))
    rank = len(x.dims)
    given = a.get("dim")
    if isinstance(given, int):
        given = [given]
    dims = sorted({d % rank for d in given}) if given else list(range(rank))
    counted = tuple(x.shape[d] for d in dims) if mean else ()
    return self.reduced("sum", x, dims, bool(a.get("keepdim", False)), 1.0, counted)


@rule(aten.linalg_vector_norm.default)
def _norm(self: Operands, node: fx.Node, a: Arguments) -> Placed:
    order = a.get("ord", 2)
    x = self.operand(a["self"])
    if order == 1:
        inside = self.combined("abs", x)
    elif order == 2:
        inside = self.combined("mul", x, x)
    else:
        raise Unsupported(f"a norm of order {order}")
    shape = tuple(shape_of(a["self"]))
    given = a.get("dim")
    dims = [given] if isinstance(given, int) else given or range(len(shape))
    total = self.reduced(
        "sum",
        replace(inside, shape=shape),
        [d % len(shape) for d in dims],
        bool(a.get("keepdim", False)),
    )
    return total if order == 1 else self.combined("norm", total)


def is_filled(scores: Formula, least: float) -> bool:
    """Returns whether a finite number of at least this size replaces scores, or is added to them.

    A tensor of rows and keys without a gradient may be a mask that is added.
    """
    stack, seen = [scores], {scores}
    while stack:
        f = stack.pop()
        if f.op == "const" and least <= abs(f.data) < math.inf:
            return True
        if f.op == "capture" and not (f.is_bool or f.grad_flows) and len(f.axes) > 1:
            return True
        if f.op not in ("reduce", *CONDITIONS):
            fresh = [a for a in f.args if a not in seen and not a.is_bool]
            seen.update(fresh)
            stack += fresh
    return False
