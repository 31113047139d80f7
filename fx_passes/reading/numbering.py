"""Numbers equal operations: captured tensors that are computed alike are one tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import storage_of


class Numbering:
    """Finds the first node that computes the same: equal pure operations on equal inputs.

    Equal operations on memory that is written see different values at different times.
    """

    def __init__(
        self, written: Collection[int | None], records: Callable[[fx.Node], bool]
    ) -> None:
        self.canonical: dict[fx.Node, fx.Node] = {}
        self._written, self._records = written, records
        self._known: dict[object, fx.Node] = {}

    def visit(self, node: fx.Node, held: Tensor | None = None) -> None:
        """Numbers the next node of the graph; ``held`` is the tensor that an attribute has."""
        self.canonical[node] = self._first(node) if held is None else self._attribute(node, held)

    def _attribute(self, node: fx.Node, held: Tensor) -> fx.Node:
        """The first of attributes that are one tensor."""
        if storage_of(node) in self._written:
            return node
        return self._known.setdefault(("attribute", id(held)), node)

    def _first(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function" or not is_pure(node):
            return node
        if self._written and any(
            storage_of(n) in self._written for n in (node, *node.all_input_nodes)
        ):
            return node
        try:
            arguments = fx.map_arg(
                (node.args, tuple(sorted(node.kwargs.items()))), lambda n: self.canonical[n]
            )
            key = (node.target, _hashable(arguments), _shape_key(node), self._records(node))
            return self._known.setdefault(key, node)
        except TypeError:
            return node


def is_pure(node: fx.Node) -> bool:
    """Returns whether a node computes the same of the same inputs, and nothing else."""
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
