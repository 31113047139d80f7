"""Defines rules for matmul, linear and einsum, whose results may be scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.registry import Arguments, rule
from torch_streamkl.fx_passes.analysis.rules.arithmetic import ArithmeticRules
from torch_streamkl.fx_passes.analysis.rules.matmul_scores import (
    attention_of,
    attention_of_einsum,
    scores_of_einsum,
    scores_of_linear,
    scores_of_matmul,
)
from torch_streamkl.fx_passes.domain.scores import Scale
from torch_streamkl.fx_passes.domain.values import Elements
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import shape_of

aten = torch.ops.aten


class MatmulRules(ArithmeticRules):
    """Adds the rules for matmul, linear and einsum to the interpreter."""

    @rule(aten.matmul.default, aten.bmm.default, aten.mm.default)
    def matmul(self, node: fx.Node, a: Arguments) -> object:
        operands: Any = node.args[:2]  # of a matmul, nodes
        lhs, rhs = (self.canonical[n] for n in operands)
        probabilities = self.value(node.args[0])
        if isinstance(probabilities, Elements) and not isinstance(
            self.value(node.args[1]), Elements
        ):
            attention = attention_of(probabilities, rhs, self.reference)
            if attention is not None:
                return attention
        if self.rank[lhs] < 2 or self.rank[rhs] < 2:
            return None
        return scores_of_matmul(lhs, rhs, shape_of(node), self.reference)

    @rule(aten.baddbmm.default)
    def baddbmm(self, node: fx.Node, a: Arguments) -> object:
        """Reads beta * input + alpha * (batch1 @ batch2)."""
        alpha, beta = a.get("alpha", 1), a.get("beta", 1)
        if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
            return self._no_rule(node, "baddbmm with symbolic factors")
        lhs, rhs = (self.canonical[a[name]] for name in ("batch1", "batch2"))
        product = scores_of_matmul(lhs, rhs, shape_of(node), self.reference)
        product = product.then(Scale(float(alpha)))
        if beta == 0 and self.requires_grad(a["self"]):
            raise Unsupported("baddbmm with a factor of 0 on its input, whose gradient is zeros")
        if beta == 0:
            return product  # the input is not even read
        if beta != 1:
            raise Unsupported("baddbmm with a factor on its input")
        return self._scores_plus_tensor(node, product, a["self"], 1.0)

    @rule(aten.addmm.default)
    def addmm(self, node: fx.Node, a: Arguments) -> object:
        return self.baddbmm(node, {**a, "batch1": a["mat1"], "batch2": a["mat2"]})

    @rule(aten.linear.default)
    def linear(self, node: fx.Node, a: Arguments) -> object:
        bias = a.get("bias")
        return scores_of_linear(
            self.canonical[a["input"]],
            self.canonical[a["weight"]],
            None if bias is None else self.canonical[bias],
            shape_of(node),
            self.reference,
        )

    @rule(aten.einsum.default)
    def einsum(self, node: fx.Node, a: Arguments) -> object:
        operands = [self.canonical[n] for n in a["tensors"]]
        maps = self.value(operands[0])
        if (
            len(operands) == 2
            and isinstance(maps, Elements)
            and not isinstance(self.value(operands[1]), Elements)
        ):
            attention = attention_of_einsum(a["equation"], maps, operands[1], self.reference)
            if attention is not None:
                return attention
        try:
            return scores_of_einsum(a["equation"], operands, shape_of(node), self.reference)
        except Unsupported:
            return None
