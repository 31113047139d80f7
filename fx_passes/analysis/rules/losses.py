"""Defines rules for torch's losses, and for sums and means."""

from __future__ import annotations

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.context import Analysis
from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.domain import element_algebra as elements
from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain import score_algebra as scores
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    Entries,
    ExpSum,
    Rows,
    Shifted,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import shape_of

KL_DIV_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}

aten = torch.ops.aten


class LossRules(Analysis):
    """Adds the rules for losses and for sums over keys to the interpreter."""

    @rule(aten.kl_div.default)
    def kl_div(self, node: fx.Node, a: Arguments) -> object:
        x, target = self.value(a["self"]), self.value(a["target"])
        if not isinstance(x, Elements) or not isinstance(target, Elements):
            self._stays_blocked(a["self"], a["target"])
            which = "input" if not isinstance(x, Elements) else "target"
            raise Unsupported(f"the {which} of kl_div is not made from scores in this graph")
        t, x = elements.aligned(target, x)
        if a.get("log_target"):
            values = elements.combined(
                "mul", elements.unary("exp", t), elements.combined("sub", t, x)
            )
        else:
            values = elements.combined(
                "mul", t, elements.combined("sub", elements.unary("log", t), x)
            )
        reduction = KL_DIV_REDUCTIONS[a.get("reduction", 1)]
        if reduction == "none":
            return values
        return elements.reduced(values, range(values.rank), False, reduction == "mean")

    @rule(aten.cross_entropy_loss.default)
    def cross_entropy_loss(self, node: fx.Node, a: Arguments) -> object:
        x, target = self.value(a["self"]), self.value(a["target"])
        if not isinstance(target, Elements):
            return None  # labels: not a divergence between two distributions
        if (
            not isinstance(x, Scores)
            or a.get("weight") is not None
            or a.get("label_smoothing", 0.0)
        ):
            self._stays_blocked(a["self"])
            raise Unsupported(
                "cross_entropy with class weights, label smoothing or unknown logits"
            )
        dim = 1 if len(x.layout) > 1 else 0
        logs = elements.softmax(x, dim, log=True)
        values = elements.unary("neg", elements.combined("mul", target, logs))
        if values.key_dim != dim:
            raise Unsupported(
                "cross_entropy takes its classes from dimension 1, the target's are elsewhere"
            )
        shape = shape_of(a["self"])
        reduction = KL_DIV_REDUCTIONS[a.get("reduction", 1)]
        dims = (dim,) if reduction == "none" else tuple(range(len(shape)))
        rows = elements.reduced(values, dims, False, False)
        if reduction == "mean" and isinstance(rows, Rows):
            counted = tuple(size for d, size in enumerate(shape) if d != dim)
            return Rows(rows.elements, rows.reduced, False, rows.weight, counted)
        return rows

    @rule(aten.sum.dim_IntList, aten.sum.default, aten.nansum.default)
    def sum(self, node: fx.Node, a: Arguments) -> object:
        return self._reduced(node, a, mean=False)

    @rule(aten.mean.default, aten.mean.dim)
    def mean(self, node: fx.Node, a: Arguments) -> object:
        return self._reduced(node, a, mean=True)

    def _reduced(self, node: fx.Node, a: Arguments, *, mean: bool) -> object:
        x = self.value(a["self"])
        rank = self.rank[a["self"]]
        given = a.get("dim")
        dims = (
            [d % rank for d in ([given] if isinstance(given, int) else given)]
            if given
            else list(range(rank))
        )
        keepdim = bool(a.get("keepdim", False))
        if isinstance(x, Shifted) and x.exponential and not mean and keepdim:
            if dims == [lay.axis_dim(x.scores.layout, x.axis)]:
                rows = lay.without(x.scores.layout, dims[0])
                return ExpSum(x.scores.key, x.axis, rows, x.maximum)
        if isinstance(x, Elements):
            return elements.reduced(x, dims, keepdim, mean)
        if isinstance(x, Entries) and isinstance(x.rows, Elements) and not keepdim:
            return elements.reduced(x.rows, (0, 1), keepdim, mean)
        if isinstance(x, Scores) and len(dims) == 1:
            key, _ = scores.summed_over(x, dims[0], mean=mean)
            kept = ((),) if keepdim else ()
            return Scores(key, (*x.layout[: dims[0]], *kept, *x.layout[dims[0] + 1 :]))
        if isinstance(x, Rows):
            return None  # what the user does with rows stays the user's code
        return self._no_rule(node, "mean" if mean else "sum")

    @rule(aten.linalg_vector_norm.default)
    def linalg_vector_norm(self, node: fx.Node, a: Arguments) -> object:
        """Reads the 1-norm that F.normalize divides by: a sum, for values that are not
        negative.
        """
        x = self.value(a["self"])
        if not isinstance(x, Elements) or a.get("ord", 2) != 1 or not elements.not_negative(x):
            return self._no_rule(node, "norm")
        return self._reduced(node, {k: a.get(k) for k in ("self", "dim", "keepdim")}, mean=False)
