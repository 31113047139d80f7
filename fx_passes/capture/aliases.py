"""Finds in-place writes to what an operator reads, by storage: they have no data edge.

Eager code may change a tensor after its scores were computed. A fused operator reads the tensor
later, and again in the backward. So a loss is not fused if one of its inputs is written after its
scores were computed. An operator that computes its gradients in the forward reads nothing
afterwards, so a teacher may be updated after that loss in the same graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from torch_streamkl.fx_passes.capture.region import Region
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import written_by, written_memory
from torch_streamkl.fx_passes.fx_utils.nodes import location_of, needs_gradient, storage_of


@dataclass(frozen=True)
class LateWrite:
    """Holds a tensor that an inserted operator reads, and the node that writes to it later."""

    tensor: fx.Node
    write: fx.Node
    when: str

    @property
    def reason(self) -> str:
        where, _ = location_of(self.write)
        name = (written_by(self.tensor) or [self.tensor])[0].name  # the user's name of it
        return f"{name} is modified in place {self.when}, at {where}"


class Aliases:
    """Groups the writes of a graph by the storage that they change."""

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
            for storage in written_memory(node):
                self.writes.setdefault(storage, []).append(node)
        self._note_reads_of_writes(region)

    def _note_reads_of_writes(self, region: Region) -> None:
        """Records that later reads by a tensor's earlier names see what an operation wrote.

        The analysis takes the write itself for what such a name has: ``m.tril_(); s[m]``.
        """
        reads: dict[int | None, list[fx.Node]] = {}
        for node in region.nodes:
            for source in node.all_input_nodes:
                reads.setdefault(storage_of(source), []).append(node)
        for storage, writes in self.writes.items():
            for written in writes:
                later = [
                    self.position[n]
                    for n in reads.get(storage, [])
                    if self.position[n] > self.position[written]
                ]
                self.first_use[written] = min([self.first_use[written], *later])

    def check(
        self,
        added: Sequence[fx.Node],
        selecting: Iterable[tuple[Sequence[fx.Node], Sequence[fx.Node]]] = (),
        before: fx.Node | None = None,
    ) -> list[LateWrite]:
        """Raises if a tensor that inserted nodes read is written to after the user's code read it.

        ``selecting`` are tensors that decide which rows are used, and the tensors that they are
        computed from. They are read at one place for all their uses, and the analysis has seen
        their writes in the region. The nodes are inserted before ``before``. A later write harms
        only a backward that reads the tensor again; writes to tensors without gradient are
        returned.
        """
        late: list[LateWrite] = []
        for node in dict.fromkeys(a for x in added for a in x.all_input_nodes):
            if node not in self.position:
                continue
            for write in self._writes_since(node, self.first_use[node]):
                found = LateWrite(node, write, "after the scores are computed")
                is_later = before is not None and self.position[write] > self.position[before]
                if not is_later or needs_gradient(node):
                    raise Unsupported(found.reason)
                late.append(found)
        for tensors, made_of in selecting:
            for node, known in (
                *((n, ()) for n in tensors),
                *((n, self.analysed) for n in made_of),
            ):
                for write in self._writes_since(node, self.position[node]):
                    if write not in known:
                        raise Unsupported(LateWrite(node, write, "and selects rows").reason)
        return late

    def _writes_since(self, node: fx.Node, position: int) -> list[fx.Node]:
        writes = self.writes.get(storage_of(node), [])
        return [write for write in writes if self.position[write] > position]
