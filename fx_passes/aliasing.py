"""In-place writes: they have no data edge, so they are looked for by storage.

Eager code may change a tensor after its scores were computed. A fused operator reads the tensor
later (and again in the backward), so a site whose inputs are written to after the scores were made
stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, fx
from torch_streamkl.fx_passes.fuse import Plan
from torch_streamkl.fx_passes.operands import outer_node
from torch_streamkl.fx_passes.report import location_of
from torch_streamkl.fx_passes.slicing import example, is_in_place
from torch_streamkl.fx_passes.values import Blocked


class Aliases:
    """Writes of a graph by the storage that they change."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.writes: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op in ("call_function", "call_method") and is_in_place(node):
                target = node.args[0] if node.args else None
                storage = _storage(target) if isinstance(target, fx.Node) else None
                if storage is not None:
                    self.writes.setdefault(storage, []).append(node)

    def check(self, plan: Plan, site: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> None:
        """Raise when an input of the site is written to after it was read."""
        for call in plan.calls:
            for side in (call.geometry.teacher, call.geometry.student):
                key = side.distribution.scores
                inputs = [
                    key.lhs.node,
                    key.rhs.node,
                    *(x.node for x in (*key.factors, *key.biases)),
                ]
                inputs += [literal.node for literal in call.mask.tensors]
                self.check_nodes([outer_node(inner, outer) for inner in inputs])

    def check_nodes(self, nodes: Sequence[fx.Node]) -> None:
        """Raise when one of the user's tensors is written to after it was first used."""
        for node in nodes:
            self._check_input(node)

    def _check_input(self, node: fx.Node) -> None:
        storage = _storage(node)
        if storage is None:
            return
        first_use = min((self.position[u] for u in node.users if u in self.position), default=0)
        for write in self.writes.get(storage, []):
            if self.position[write] > first_use:
                where, _ = location_of(write)
                raise Blocked(
                    f"{node.name} is modified in place after the scores are computed, at {where}"
                )


def _storage(node: fx.Node) -> int | None:
    value = example(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
