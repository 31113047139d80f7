"""Defines rules for softmax, and for softmaxes that are written by hand."""

from __future__ import annotations

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.context import Analysis
from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.domain import element_algebra as elements
from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.tensor_ref import same_numbers
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    ExpSum,
    LogSumExp,
    RowMax,
    Shifted,
    Stacked,
    log_prob,
    prob,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported

aten = torch.ops.aten


def is_reduction_of(x: Scores, y: LogSumExp | RowMax | ExpSum) -> bool:
    """Returns whether every score meets the value of its own row."""
    return x.key == y.scores and _meets_rows(x, y)


def is_shift_of(x: Scores, y: RowMax) -> bool:
    """Returns `is_reduction_of` for a maximum, wherever its gradient flows."""
    return same_numbers(x.key, y.scores) and _meets_rows(x, y)


def is_sum_of(x: Shifted, y: ExpSum) -> bool:
    """Returns whether a sum adds these exponentials, relative to the same maximum."""
    return x.axis == y.axis and x.maximum == y.maximum and is_reduction_of(x.scores, y)


def _meets_rows(x: Scores, y: LogSumExp | RowMax | ExpSum) -> bool:
    """Whether the same axes are in the same places, but for the one that was reduced."""
    dim, layout = lay.axis_dim(x.layout, y.axis), lay.with_rank(y.layout, len(x.layout))
    return dim is not None and layout == lay.without(x.layout, dim)


class SoftmaxRules(Analysis):
    """Adds the rules that turn scores into distributions to the interpreter."""

    @rule(aten.softmax.int, aten._softmax.default)
    def softmax(self, node: fx.Node, a: Arguments) -> object:
        return self._softmax_of(node, a, log=False)

    @rule(aten.log_softmax.int, aten._log_softmax.default)
    def log_softmax(self, node: fx.Node, a: Arguments) -> object:
        return self._softmax_of(node, a, log=True)

    def _softmax_of(self, node: fx.Node, a: Arguments, *, log: bool) -> object:
        x = self.value(a["self"])
        if isinstance(x, Elements):
            # of log-probabilities, as torch.distributions takes it: they are normalised already
            is_log = x.single() == log_prob(0) and len(x.parts) == 1
            if is_log and a["dim"] % x.rank == x.key_dim:
                return x if log else x.map(lambda _: prob(0))
            raise Unsupported("softmax of values that are probabilities already (double softmax)")
        if not isinstance(x, Scores):
            self._stays_blocked(a["self"])
            return None
        dim = a["dim"] % len(x.layout)
        return elements.softmax(x, dim, log=log)

    def _softmax(self, x: Scores, axis: int, *, log: bool) -> Elements:
        dim = lay.axis_dim(x.layout, axis)
        assert dim is not None
        return elements.softmax(x, dim, log=log)

    @rule(aten.logsumexp.default)
    def logsumexp(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        dims = a["dim"] if isinstance(a["dim"], (list, tuple)) else [a["dim"]]
        if isinstance(x, Stacked) and [d % (x.items[0].rank + 1) for d in dims] == [x.dim]:
            total = x.items[0]
            for item in x.items[1:]:
                total = elements.combined("logaddexp", total, item)
            return total
        if not isinstance(x, Scores) or len(dims) != 1:
            return self._no_rule(node, "logsumexp")
        dim = dims[0] % len(x.layout)
        axis = self._axis(x, dim)
        layout = (*x.layout[:dim], *(((),) if a.get("keepdim") else ()), *x.layout[dim + 1 :])
        return LogSumExp(x.key, axis, layout)

    def _log_probabilities(self, node: fx.Node, x: Scores, y: LogSumExp) -> Elements:
        dim = lay.axis_dim(x.layout, y.axis)
        if dim is None or not is_reduction_of(x, y):
            raise Unsupported("a log-sum-exp of other scores is subtracted")
        return elements.softmax(x, dim, log=True)

    @rule(aten.amax.default)
    def amax(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        given = a.get("dim", [])
        dims = given if isinstance(given, (list, tuple)) else [given]
        if not isinstance(x, Scores) or len(dims) != 1 or not a.get("keepdim"):
            return self._no_rule(node, "amax")
        dim = dims[0] % len(x.layout)
        return RowMax(x.key, self._axis(x, dim), lay.without(x.layout, dim))

    @rule(aten.max.dim)
    def max_along(self, node: fx.Node, a: Arguments) -> object:
        if "dim" not in a:
            return self._no_rule(node, "max")
        return self.amax(node, a)
