"""Reads what a graph computes between matmuls and sums as formulas (domain/row_elements.py).

The interpreter (analysis/interpreter.py) knows divergences, and what kernels take. This second
reading knows single operations, and no loss. Everything that they compute from dot products, and
that is summed over an axis, is a row program.

A rule says how one operation combines its inputs' elements, and nothing of gradients: a formula is
compared with what its node recorded, as in the interpreter (NOTE [Gradient flow]).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.casts import is_narrower
from torch_streamkl.fx_passes.analysis.elements import (  # noqa: F401
    casts,
    conditions,
    entries,
    losses,
    parts,
    pointwise,
    sums,
    views,
)  # their rules are registered
from torch_streamkl.fx_passes.analysis.elements.casts import CASTS
from torch_streamkl.fx_passes.analysis.elements.operands import Operands
from torch_streamkl.fx_passes.analysis.elements.registry import RULES
from torch_streamkl.fx_passes.analysis.interpreter import ScoreInterpreter
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.row_elements import Axes, Formula, Placed
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import name_of, named_arguments, storage_of
from torch_streamkl.fx_passes.fx_utils.sizes import is_zero, provably_equal, shape_of

aten = torch.ops.aten
MATMULS = {
    aten.matmul.default, aten.bmm.default, aten.mm.default, aten.baddbmm.default,
    aten.addmm.default, aten.linear.default, aten.einsum.default,
}  # fmt: skip


class FormulaInterpreter(Operands):
    """Holds the formulas of a trace's nodes in ``placed``, and for others ``reasons`` why not."""

    def __init__(self, trace: Trace, recognised: ScoreInterpreter) -> None:
        self.trace, self.recognised = trace, recognised
        self.axes = Axes()
        self.placed, self.reasons, self.products = {}, {}, {}
        self.behind_dots, self._overwritten = set(), set()
        self.parts, self.parts_of_dots = {}, {}
        self.chosen, self.by_ids, self.unchecked_ids = {}, {}, {}
        self._by_storage: dict[int | None, list[fx.Node]] = {}
        for node in trace.graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "call_function":
            if any(a in self.behind_dots for a in node.all_input_nodes) or _is_dot(node):
                self.behind_dots.add(node)
                try:
                    self.placed[node] = self._held(node, self._apply(node))
                except Unsupported as reason:
                    self.reasons[node] = str(reason)
            for target in written_by(node):
                aliases = self._by_storage.get(storage_of(target), [])
                self._overwritten.update(aliases)
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            self._by_storage.setdefault(storage_of(node), []).append(node)

    def _apply(self, node: fx.Node) -> Placed:
        if any(a in self._overwritten for a in node.all_input_nodes):
            raise Unsupported("a tensor that was modified in place is used afterwards")
        if self.recognised._hides_its_write(node):
            raise Unsupported("a tensor that has a gradient is modified in place under no_grad")
        first = self.recognised.canonical[node]
        if first is not node and first in self.placed:
            return self.placed[first]
        if _is_dot(node):
            return self._dot(node)
        number = self.recognised.values.get(node)
        if isinstance(number, Number):  # zeros_like(scores)
            return self._constant(number.value, node)
        function = RULES.get(node.target)
        arguments = named_arguments(node)
        if function is None:
            for a in node.all_input_nodes:
                if a in self.reasons:
                    raise Unsupported(self.reasons[a])
            raise Unsupported(f"{name_of(node)} of scores")
        x = arguments.get("self", arguments.get("input"))
        dims = (arguments.get(name) for name in ("dim", "dims", "dim0"))
        if (
            any(d not in (None, [], ()) for d in dims)
            and isinstance(x, fx.Node)
            and not shape_of(x)
        ):
            raise Unsupported("a dimension of a number")  # torch takes 0 and -1
        return function(self, node, arguments)

    def _held(self, node: fx.Node, x: Placed) -> Placed:
        """The elements as the node's own record has them."""
        made = node.meta.get("val")
        if not isinstance(made, Tensor):
            raise Unsupported(f"{name_of(node)} of scores")
        dims = tuple(self.axes.atoms(d) for d in x.dims)
        x = Placed(x.formula, dims, tuple(made.shape))
        for d in dims:
            self.chosen_in(d)
        flat = [a for d in dims for a in d]
        if len(set(flat)) != len(flat):
            raise Unsupported("an axis of the scores meets itself in another place")
        if len(dims) != made.dim() or not all(
            not d or provably_equal(self.axes.extent(d), size)
            for d, size in zip(dims, made.shape, strict=True)
        ):
            raise Unsupported("elements are in a tensor of another shape")
        if any(not d and is_zero(size) for d, size in zip(dims, made.shape, strict=True)):
            raise Unsupported("no element is left of a dimension along which nothing varies")
        self._check_rounding(node, x.formula, made)
        formula = x.formula
        self._check_integers(node, made.dtype, formula)
        if formula.is_bool or not made.dtype.is_floating_point:
            if formula.is_bool != (made.dtype == torch.bool):
                raise Unsupported("scores are cast to an integer type")
            return replace(x, formula=replace(formula, grad_flows=frozenset()))
        if not self._requires_grad(node):
            return self.without_gradient(x)
        # what is inside of one of the user's operations has that operation's record
        if not formula.grad_flows and node in self.trace.outer:
            raise Unsupported("a gradient flows through part of the loss that is a constant")
        return x

    def _check_integers(self, node: fx.Node, made: torch.dtype, formula: Formula) -> None:
        """Integers are counts of conditions, which formulas have exactly; nothing is truncated.

        What is computed of them alone has torch's default type, whatever the scores have.
        """
        if made == torch.bool:
            return
        values = [a.meta.get("val") for a in node.all_input_nodes]
        dtypes = [v.dtype for v in values if isinstance(v, Tensor)]
        if not made.is_floating_point:
            if made.itemsize < 4 or any(d.is_floating_point for d in dtypes):
                raise Unsupported("scores are cast to an integer type")
            return
        is_cast = node.target in CASTS and dtypes[0] == torch.bool
        operands = [
            ref.node.meta["val"].dtype for dot in formula.dots for ref in (dot.lhs, dot.rhs)
        ]
        if not is_cast and any(d.is_floating_point and is_narrower(made, d) for d in operands):
            raise Unsupported("what is made of conditions on scores has a narrower type than they")

    def _check_rounding(self, node: fx.Node, formula: Formula, made: Tensor) -> None:
        if made.dtype.is_complex:
            raise Unsupported("scores are cast to a complex type")
        if not made.dtype.is_floating_point:
            return
        for dot in formula.dots:
            operands = [ref.node.meta["val"].dtype for ref in (dot.lhs, dot.rhs)]
            if made.dtype == torch.float64 and torch.float64 not in operands:
                raise Unsupported("scores become float64 after their matmul")
            for source in node.all_input_nodes:
                known = source.meta.get("val")
                if source not in self.placed or not isinstance(known, Tensor):
                    continue
                if not known.dtype.is_floating_point or not is_narrower(made.dtype, known.dtype):
                    continue
                if made.dtype.itemsize == 1 or any(made.dtype != d for d in operands):
                    name = str(made.dtype).removeprefix("torch.")
                    raise Unsupported(f"scores or what is made of them are rounded to {name}")


def _is_dot(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in MATMULS
