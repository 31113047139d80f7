"""Defines rules for index tensors of symbolic length, which `constant_folding.Folding` cannot
evaluate.

Transformers finds the sequences of a packed batch by the jumps of `position_ids`, and looks both
up by `arange`. For positions that are a plain `arange` there is one sequence, and the mask is
causal.
"""

from __future__ import annotations

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.context import Analysis
from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.domain.masks import TRUE_TENSOR, Affine
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, provably_equal, shape_of

aten = torch.ops.aten


class IndexRules(Analysis):
    """Adds the rules for index tensors to the interpreter."""

    @rule(aten.diff.default)
    def diff(self, node: fx.Node, a: Arguments) -> object:
        """Reads differences of neighbours: of an affine tensor, its coefficient."""
        x, before = self.value(a["self"]), a.get("prepend")
        if not isinstance(x, Affine) or a.get("n", 1) != 1 or a.get("append") is not None:
            return self._no_rule(node, "diff")
        dim = a.get("dim", -1) % self.rank[a["self"]]
        step = x.coefficients[dim]
        if before is not None:  # continues the tensor by one element to the front
            first = self.value(before)
            if not isinstance(first, Affine) or not is_one(shape_of(before)[dim]):
                return self._no_rule(node, "diff")
            others = [c for d, c in enumerate(x.coefficients) if d != dim]
            if others != [
                c for d, c in enumerate(first.coefficients) if d != dim
            ] or not provably_equal(x.constant - first.constant, step):
                return self._no_rule(node, "diff")
        return Number(float(step))

    @rule(aten.cumsum.default)
    def cumsum(self, node: fx.Node, a: Arguments) -> object:
        x = self.value(a["self"])
        if x == TRUE_TENSOR.inverted() or x == Number(0.0):
            return Number(0.0)
        return self._no_rule(node, "cumsum")

    def mask_index(self, node: fx.Node, a: Arguments) -> object:
        """Reads ``x[i, j, ...]`` by one `arange` a dimension, each along a dimension of its
        own.
        """
        x, indices = self.value(a["self"]), a["indices"]
        if isinstance(x, Number):
            return x
        sizes = shape_of(a["self"])
        if not isinstance(x, Affine) or not len(indices) == len(sizes) == len(x.coefficients):
            return None
        result = Affine((0,) * self.rank[node], x.constant)
        for coefficient, size, index in zip(x.coefficients, sizes, indices, strict=True):
            if not isinstance(index, fx.Node) or not self._counts_up_to(index, size):
                return None
            along = self.value(index)
            assert isinstance(along, Affine)
            result = result + along.scaled(coefficient)
        return result

    def _counts_up_to(self, index: fx.Node, size: Size) -> bool:
        """Whether an index tensor is 0, 1, ... size - 1 along one dimension."""
        x, shape = self.value(index), shape_of(index)
        if not isinstance(x, Affine) or len(x.coefficients) != len(shape):
            return False
        if is_one(size):
            return not any(x.coefficients) and provably_equal(x.constant, 0)
        steps = [(c, n) for c, n in zip(x.coefficients, shape, strict=True) if c != 0]
        is_arange = len(steps) == 1 and steps[0][0] == 1 and provably_equal(x.constant, 0)
        return is_arange and provably_equal(steps[0][1], size)
