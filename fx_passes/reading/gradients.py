"""Knows which nodes have a gradient, and which tensors with one an expression is made of."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.fx_utils.mutation import (
    RECORDS,
    autograd_modes,
    under_no_grad,
    written_by,
)
from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of
from torch_streamkl.program.graph import Node, Source
from torch_streamkl.program.walks import fold, walk

Name = tuple[object, int]  # of a captured tensor, and its version


def trained(exprs: Iterable[Node]) -> set[Name]:
    """Returns the captured tensors with gradient in expressions."""
    return set().union(*map(_name_of, walk(exprs)))


class Trained:
    """Finds what `trained` does, for the expressions of a graph: they share their parts."""

    def __init__(self) -> None:
        self._found: dict[Node, frozenset[Name]] = {}

    def of(self, x: Node) -> frozenset[Name]:
        """Returns the captured tensors with gradient in an expression."""

        def made_of(y: Node) -> frozenset[Name]:
            return frozenset(_name_of(y)).union(*(self._found[a] for a in y.args))

        return fold(x, self._found, made_of)

    def lost(self, given: Iterable[Node | None], x: Node) -> frozenset[Name]:
        """Returns those of operands that cancel in a result; none if the result names others."""
        before = frozenset[Name]().union(*(self.of(e) for e in given if e is not None))
        after = self.of(x)
        return before - after if after <= before else frozenset()


def _name_of(x: Node) -> set[Name]:
    source = x.value
    if x.op != "capture" or not x.flows or not isinstance(source, Source):
        return set()
    return {(source.name, source.version)} if source.grad_flows else set()


def recorded_gradients(trace: Trace) -> dict[fx.Node, bool]:
    """Returns whether Dynamo recorded a gradient of each node of a trace.

    Its record of a user's operation is that of the result: the nodes inside of one have gradient
    where an input has.
    """
    source = next(iter(trace.origin.values()), None)
    unrecorded = under_no_grad(source.graph) if source is not None else set()
    found: dict[fx.Node, bool] = {}
    modes = autograd_modes(trace.graph.nodes)
    for node in trace.graph.nodes:
        user = node_of(trace, node)
        value = example(user) if user is not None else None
        is_on = user not in unrecorded or (user is not None and name_of(user) == "requires_grad_")
        if node in trace.outer or node.op != "call_function":
            flows = isinstance(value, Tensor) and value.requires_grad
        else:  # also of a user's operation that returns nothing, such as setitem
            is_cut = modes[node] != RECORDS or name_of(node) in ("detach", "detach_")
            may = not isinstance(value, Tensor) or value.requires_grad
            flows = may and not is_cut and any(found[a] for a in _given_by(node))
        # a write that autograd does not see leaves a tensor its gradient
        found[node] = (is_on and flows) or any(found[x] for x in written_by(node))
    return found


def _given_by(node: fx.Node) -> list[fx.Node]:
    """The inputs that a result may have its gradient from: of broadcast tensors, its own."""
    source = node.args[0] if node.target is operator.getitem else None
    if isinstance(source, fx.Node) and source.target is torch.ops.aten.broadcast_tensors.default:
        tensors: Any = source.args[0]
        return [tensors[node.args[1]]]
    return node.all_input_nodes
