"""In-place writes: they have no data edge, so they are looked for by storage.

Eager code may change a tensor after its scores were computed. A fused operator reads the tensor
later (and again in the backward), so a site whose inputs are written to after the scores were made
stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import fx

from torch_streamkl.fx_passes.capture.region import Region
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import location_of, storage_of


class Aliases:
    """Writes of a graph by the storage that they change."""

    def __init__(self, graph: fx.Graph, region: Region) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.analysed = set(region.nodes)
        # what reads a tensor for the scores is in the region; a view made outside does not read
        self.first_use = {
            node: min(
                (self.position[u] for u in node.users if u in self.analysed),
                default=len(self.position),
            )
            for node in graph.nodes
        }
        self.writes: dict[int | None, list[fx.Node]] = {}
        for node in graph.nodes:
            for target in written_by(node):
                storage = storage_of(target)
                if storage is not None:
                    self.writes.setdefault(storage, []).append(node)

    def check(
        self,
        added: Sequence[fx.Node],
        selecting: Iterable[tuple[Sequence[fx.Node], Sequence[fx.Node]]] = (),
    ) -> None:
        """Raise when what inserted nodes read is written to after the user's code read it.

        ``selecting`` are tensors that decide which rows are used, which are read at one place for
        all their uses, and tensors that those were made of: of these, the analysis has seen the
        writes that are part of the region.
        """
        for node in dict.fromkeys(a for x in added for a in x.all_input_nodes):
            if node in self.position:
                self._raise_on_write(node, self.first_use[node], "after the scores are computed, ")
        for tensors, made_of in selecting:
            for node in tensors:
                self._raise_on_write(node, self.position[node], "and selects rows, ")
            for node in made_of:
                self._raise_on_write(
                    node, self.position[node], "and selects rows, ", self.analysed
                )

    def _raise_on_write(
        self, node: fx.Node, since: int, what: str, known: Collection[fx.Node] = ()
    ) -> None:
        for write in self.writes.get(storage_of(node), []):
            if self.position[write] > since and write not in known:
                where, _ = location_of(write)
                raise Blocked(f"{node.name} is modified in place {what}at {where}")
