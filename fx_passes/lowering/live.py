"""Finds the user's tensors that hold what is computed from products, such as probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import cached_property

from torch import fx

from torch_streamkl.fx_passes.closed_forms.alike import numbered
from torch_streamkl.fx_passes.fx_utils.mutation import written_memory
from torch_streamkl.fx_passes.fx_utils.nodes import memory_of
from torch_streamkl.fx_passes.lowering.placed import Placed
from torch_streamkl.fx_passes.reading.arrays import Array, Dim
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.graph import Node

MOST_AXES = 5


class LiveTensors:
    """Looks for expressions among the values of a trace, whatever their axes are called.

    Only what the user's graph computes before a node is there to be read. A tensor that is written
    after it was computed holds something else by then. One whose operands are written meanwhile
    may be equal to another of other numbers: captured tensors have no version of such writes.
    ``tensors_of`` gives the user's tensors that an expression reads.
    """

    def __init__(
        self,
        reading: Reading,
        outer: Mapping[fx.Node, fx.Node],
        before: fx.Node,
        tensors_of: Callable[[Node], list[fx.Node]],
    ) -> None:
        self.reading, self.outer, self.before = reading, outer, before
        self.tensors_of = tensors_of

    @cached_property
    def _known(self) -> dict[Node, tuple[fx.Node, tuple[Dim, ...]]]:
        """The user's nodes by their expressions, with axes that are numbered by dimension."""
        found: dict[Node, tuple[fx.Node, tuple[Dim, ...]]] = {}
        stale = set[Node]()
        nodes = self.before.graph.nodes
        there = {n: i for i, n in enumerate(itertools.takewhile(self._is_there, nodes))}
        writes = [(i, own) for n, i in there.items() if (own := written_memory(n))]
        for inner, node in self.outer.items():
            x = self.reading.arrays.get(inner)
            if inner.op != "call_function" or node not in there or not isinstance(x, Array):
                continue
            if inner in self.reading.reads_products and inner not in self.reading.reasons:
                order = [a for dim in x.dims for a in dim]
                if x.expr.axes <= set(order):
                    key = numbered(x.expr, order, "live")[0]
                    found.setdefault(key, (node, x.dims))
                    memory = self._memory(node, x.expr) if writes else set()
                    if any(at > there[node] and memory & written for at, written in writes):
                        stale.add(key)
        return {key: x for key, x in found.items() if key not in stale}

    def _is_there(self, node: fx.Node) -> bool:
        return node is not self.before

    def _memory(self, node: fx.Node, expr: Node) -> set[int | None]:
        """The memory of a tensor, and of those that its expression captures."""
        return memory_of((node, *self.tensors_of(expr)))

    def find(self, x: Node) -> Placed | None:
        """Returns the user's tensor with the values of an expression."""
        if len(x.axes) > MOST_AXES:
            return None
        for order in itertools.permutations(sorted(x.axes, key=repr)):
            found = self._known.get(numbered(x, order, "live")[0])
            if found is None:
                continue
            node, dims = found
            own = [a for dim in dims for a in dim]
            if len(own) == len(order):
                names = dict(zip(own, order, strict=True))
                return Placed(node, tuple(tuple(names[a] for a in dim) for dim in dims))
        return None
