"""Interprets a region's ATen graph abstractly: every node gets a meaning, or a reason why not.

Rules are compositional: each knows one operation and the meanings of its inputs, never the
spelling of a whole loss. So spelling, reduction, scale, masks, casts and layout are independent of
each other. The class is called ScoreInterpreter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.casts import after_rounding
from torch_streamkl.fx_passes.analysis.constant_folding import Folding
from torch_streamkl.fx_passes.analysis.registry import RULES
from torch_streamkl.fx_passes.analysis.rules.functions import FunctionRules
from torch_streamkl.fx_passes.analysis.rules.losses import LossRules
from torch_streamkl.fx_passes.analysis.rules.matmuls import MatmulRules
from torch_streamkl.fx_passes.analysis.rules.selections import SelectionRules
from torch_streamkl.fx_passes.analysis.rules.writes import WriteRules
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.fitting import fitted
from torch_streamkl.fx_passes.domain.index_values import stored
from torch_streamkl.fx_passes.domain.masks import Affine
from torch_streamkl.fx_passes.domain.row_selection import RowSelection
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.tensor_ref import cut, grad_flows, refs_in
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import (
    under_no_grad,
    written_by,
    written_storages,
)
from torch_streamkl.fx_passes.fx_utils.nodes import name_of, named_arguments, storage_of
from torch_streamkl.fx_passes.fx_utils.sizes import Size

T = TypeVar("T")


class ScoreInterpreter(MatmulRules, FunctionRules, LossRules, SelectionRules, WriteRules):
    """Computes abstract values of all nodes of a trace, in ``values``, and else ``reasons`` why
    not.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.values: dict[fx.Node, object] = {}
        self.reasons: dict[fx.Node, str] = {}
        self.canonical: dict[fx.Node, fx.Node] = {}
        self.rank = {
            n: n.meta["val"].dim()
            for n in trace.graph.nodes
            if isinstance(n.meta.get("val"), Tensor)
        }
        self._numbering: dict[object, fx.Node] = {}
        self._by_storage: dict[int, list[fx.Node]] = {}
        self._overwritten: set[fx.Node] = set()
        self.written: dict[fx.Node, tuple[fx.Node, Scores]] = {}
        self.selections: dict[object, RowSelection] = {}
        self.counted: dict[fx.Node, tuple[RowSelection, int, Size]] = {}
        self.folding = Folding()
        source = next(iter(trace.origin.values()), None)
        self.unrecorded = under_no_grad(source.graph) if source is not None else set()
        # what the region reads from outside may be written by code that is no part of the trace
        self.written_storages = written_storages(trace.graph)
        if source is not None:
            self.written_storages |= written_storages(source.graph)
        self._constants(trace.module)
        for node in trace.graph.nodes:
            self._visit(node)

    def _constants(self, module: fx.GraphModule) -> None:
        for node in self.trace.graph.nodes:
            if node.op == "get_attr":
                value = getattr(module, str(node.target), None)
                if isinstance(value, Tensor) and value.numel() == 1 and not _is_fake(value):
                    self.values[node] = Number(float(value))

    def _visit(self, node: fx.Node) -> None:
        self.canonical[node] = self._number(node)
        if node.op != "call_function":
            self._note_storage(node)
            return
        name = name_of(node)
        try:
            if any(a in self._overwritten for a in node.all_input_nodes):
                raise Unsupported(
                    "a tensor that is modified in place through a view or in a list is used later"
                )
            if self._hides_its_write(node):
                raise Unsupported(
                    "a tensor that has a gradient is modified in place under no_grad"
                )
            value = self._apply(node, name)
        except Unsupported as reason:
            self.reasons[node] = str(reason)
            value = None
        finally:
            self._note_writes(node)
            self._note_storage(node)
        if node in self.reasons:
            return
        if _is_pure(node):
            self.folding.visit(node)
            if not isinstance(value, (Number, Affine)):
                value = self.folding.meaning(node) or value
        made = node.meta.get("val")
        if isinstance(made, Tensor):
            value = stored(value, made)
        if value is None and isinstance(node.meta.get("val"), Tensor):
            value = self.unknown(node)
        if value is not None:
            self.values[node] = value

    def _note_storage(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            self._by_storage.setdefault(value.untyped_storage()._cdata, []).append(node)

    def _note_writes(self, node: fx.Node) -> None:
        """Discards what the analysis knows of a storage after a write to it.

        Later readers of the written tensor read the result of the write: its node, unless the
        operation returns nothing, such as ``torch._foreach_mul_``.
        """
        for target in written_by(node):
            storage = storage_of(target)
            aliases = self._by_storage.get(storage, []) if storage is not None else []
            self._overwritten.update((target, *aliases))
        if node in self.written:
            base, scores = self.written[node]
            self._overwritten.discard(base)
            self.values[base] = scores

    def _number(self, node: fx.Node) -> fx.Node:
        """Finds the first node that computes the same: equal pure operations on equal inputs."""
        if node.op != "call_function" or not _is_pure(node):
            return node
        if any(storage_of(n) in self.written_storages for n in (node, *node.all_input_nodes)):
            return node  # equal operations at different times see different values
        try:
            arguments = fx.map_arg(
                (node.args, tuple(sorted(node.kwargs.items()))), lambda n: self.canonical[n]
            )
            key = (node.target, _hashable(arguments), _shape_key(node), self.requires_grad(node))
            return self._numbering.setdefault(key, node)
        except TypeError:
            return node

    def _apply(self, node: fx.Node, name: str) -> object:
        same_node = self.canonical[node]
        if same_node is not node and same_node in self.values:
            return self.values[same_node]
        rule = RULES.get(node.target)
        if rule is None or self._is_along_nothing(node):
            return self._no_rule(node, name)
        value = after_rounding(self, node, rule(self, node, named_arguments(node)))
        if isinstance(value, Scores) and value.key.dtype is None:
            value = replace(value, key=replace(value.key, dtype=self._dtype_of(node)))
        tensor = node.meta.get("val")
        if isinstance(tensor, Tensor):
            value = fitted(value, tensor.shape)
        return self._with_gradient_of(node, value)

    def _is_along_nothing(self, node: fx.Node) -> bool:
        """A reduction of a scalar over a dimension, which it does not have."""
        arguments = named_arguments(node)
        source = arguments.get("self")
        return "dim" in arguments and isinstance(source, fx.Node) and self.rank.get(source) == 0

    def _with_gradient_of(self, node: fx.Node, value: T) -> T:
        """The value as the node's own record has it: see NOTE [Gradient flow]."""
        made = node.meta.get("val")
        if not isinstance(made, Tensor) or not made.dtype.is_floating_point:
            return value  # a condition names the distributions that it asks about
        if next(refs_in(value), None) is None:
            return value
        if not self.requires_grad(node):
            return cut(value)
        if not grad_flows(value):
            raise Unsupported("a gradient flows through part of the divergence that is a constant")
        return value


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not target._schema.is_mutable and not random


def _hashable(x: object) -> object:
    if isinstance(x, (list, tuple)):
        return tuple(_hashable(v) for v in x)
    if isinstance(x, slice):
        return (x.start, x.stop, x.step)
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(x)
    hash(x)
    return (type(x).__name__, x)


def _shape_key(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (str(tuple(value.shape)), value.dtype) if isinstance(value, Tensor) else None


def _is_fake(value: Tensor) -> bool:
    return isinstance(value, torch._subclasses.FakeTensor)
