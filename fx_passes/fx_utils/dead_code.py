"""Erases nodes that only replaced code used."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import (
    Memory,
    by_storage,
    has_effect,
    is_in_place,
    written_by,
)
from torch_streamkl.fx_passes.fx_utils.nodes import (
    example,
    is_call,
    name_of,
    reached,
    storage_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import (
    CASTS,
    DIFFERENCES,
    MATMULS,
    ORDERED,
    PARTS,
    PRODUCTS,
    QUOTIENTS,
)

PURE = MATMULS | PRODUCTS | QUOTIENTS | DIFFERENCES | PARTS | CASTS | ORDERED


def remove_unread(graph: fx.Graph, names: Collection[str]) -> None:
    """Erases what nothing reads, as a metric that is not logged: compiled code has none of it.

    ``names`` are operations that do nothing but return values, besides those of ``PURE``.
    """
    for node in reversed(graph.nodes):
        is_named = name_of(node) in PURE or name_of(node) in names
        is_known = is_named and isinstance(example(node), (Tensor, tuple, list))
        if not node.users and is_known and not has_effect(node):
            graph.erase_node(node)


def remove_dead(
    graph: fx.Graph, nodes: Sequence[fx.Node], unused: set[fx.Node], views: set[fx.Node]
) -> list[fx.Node]:
    """Erases what only the replaced code used; a write stays while its target is visible.

    Unused nodes of the user stay, because they may draw random numbers. ``views`` are the nodes
    that were views before anything was replaced.
    """
    removed: list[fx.Node] = []
    alive = {n for n in nodes if not n._erased}
    memory = by_storage(graph)
    changed = True
    while changed:
        changed = False
        for node in reversed(graph.nodes):
            if node not in alive or node.users:
                continue
            if is_in_place(node):
                if not _writes_to_dead(node, alive, views, memory):
                    continue
            elif node in unused:
                continue
            graph.erase_node(node)
            alive.discard(node)
            removed.append(node)
            changed = True
    return removed


def _writes_to_dead(
    node: fx.Node, alive: set[fx.Node], views: set[fx.Node], memory: Memory
) -> bool:
    """Whether the memory that a node writes to has no other use, through any view of it."""
    (target, *others) = written_by(node)
    storage = storage_of(target)
    if others or storage is None:
        return False
    aliases = {n for n in memory[storage] if not n._erased}
    if any(n in views and not aliases.intersection(n.all_input_nodes) for n in aliases):
        return False  # a view of what took the place of a value, and of that one's memory
    return all(
        alias in alive
        and is_call(alias)
        and all(_ends_in_writes(user, storage, alive) for user in alias.users)
        for alias in aliases
    )


def _ends_in_writes(node: fx.Node, storage: object, alive: set[fx.Node]) -> bool:
    """Whether only writes to this memory read a node: `x[x < 0] = 0` reads a mask of its own."""

    def is_end(n: fx.Node) -> bool:
        return storage_of(n) == storage or is_in_place(n)

    found = reached([node], lambda n: () if is_end(n) else n.users)
    return all(_is_write_or_removed(n, storage, alive) for n in found if storage_of(n) != storage)


def _is_write_or_removed(node: fx.Node, storage: object, alive: set[fx.Node]) -> bool:
    """Whether a node writes to this memory alone, or goes with those that read it."""
    if is_in_place(node):
        return not node.users and all(storage_of(x) == storage for x in written_by(node))
    return node in alive and is_call(node) and bool(node.users)
