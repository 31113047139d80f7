"""Finds which nodes write to which memory, including hidden writes (batch_norm statistics)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import name_of, storage_of

Write = tuple[fx.Node, frozenset[int]]  # a node and the storages that it writes to


def writes_of(nodes: Iterable[fx.Node]) -> tuple[Write, ...]:
    """Returns the nodes that write and the storages they write to, in order of the graph."""
    found = []
    for node in nodes:
        targets = [storage_of(x) for x in (*written_by(node), *_hidden_targets(node))]
        storages = frozenset(x for x in targets if x is not None)
        if storages:
            found.append((node, storages))
    return tuple(found)


def _hidden_targets(node: fx.Node) -> list[fx.Node]:
    """Tables of embeddings that are renormalised, statistics that are updated."""
    name = name_of(node)
    if name in ("embedding", "embedding_bag"):
        place = 3 if name == "embedding" else 4
        norm = node.args[place] if len(node.args) > place else node.kwargs.get("max_norm")
        return node.all_input_nodes if norm is not None else []
    return node.all_input_nodes if name in ("batch_norm", "instance_norm") else []
