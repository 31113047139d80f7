"""Finds the nodes that a rewrite changed by comparing both graphs node by node."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import fx

from torch_streamkl.fx_passes.fx_utils.mutation import written_memory
from torch_streamkl.fx_passes.fx_utils.nodes import name_of
from torch_streamkl.fx_passes.validation.kinds import HEAVY, is_leaf, sets_state

Write = tuple[fx.Node, set[int | None]]  # a node and the memory that it writes to


@dataclass(frozen=True)
class Change:
    """Holds a value that the rest of the program read, and the value that it reads instead."""

    before: fx.Node
    after: fx.Node


class Graph:
    """Holds the nodes of a graph by name, in order, and facts of all of them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = {n.name: n for n in graph.nodes}
        self.position = {name: i for i, name in enumerate(self.nodes)}

    @functools.cached_property
    def writes(self) -> tuple[Write, ...]:
        """Returns the nodes that write, in order, and what they write to."""
        every = ((n, written_memory(n)) for n in self.nodes.values())
        return tuple((node, memory) for node, memory in every if memory)

    @functools.cached_property
    def modes(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.nodes.values() if sets_state(n))

    @functools.cached_property
    def cheap(self) -> frozenset[str]:
        """Returns the nodes that may be recomputed to keep a relation between inputs."""
        nodes = self.nodes.values()
        return frozenset(n.name for n in nodes if not is_leaf(n) and name_of(n) not in HEAVY)


@dataclass(frozen=True)
class Comparison:
    """Compares two graphs: the names of the nodes in both, and the values that were replaced."""

    before: Graph
    after: Graph
    kept: frozenset[str]
    changes: tuple[Change, ...]


def compare_graphs(before: fx.Graph, after: fx.Graph) -> Comparison:
    """Compares graphs by names: a copy keeps the original's, and added nodes have new ones."""
    old, new = Graph(before), Graph(after)
    kept: set[str] = set()
    changes: dict[Change, None] = {}
    for name, node in new.nodes.items():
        original = old.nodes.get(name)
        if original is None:
            continue
        pairs = _read_otherwise(original, node)
        if pairs is None:
            changes[Change(original, node)] = None
            continue
        kept.add(name)
        for pair in pairs:
            changes[pair] = None
    return Comparison(old, new, frozenset(kept), tuple(changes))


def _read_otherwise(old: fx.Node, new: fx.Node) -> list[Change] | None:
    """Returns the inputs in which two nodes differ; None if they differ in more than that."""
    pairs: list[Change] = []
    if old.op != new.op or old.target != new.target:
        return None
    return pairs if _alike((old.args, old.kwargs), (new.args, new.kwargs), pairs) else None


def _alike(x: Any, y: Any, pairs: list[Change]) -> bool:
    """Whether arguments are the same but for the nodes in them, which are collected."""
    if isinstance(x, fx.Node) and isinstance(y, fx.Node):
        if x.name != y.name:
            pairs.append(Change(x, y))
        return True
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(_alike(a, b, pairs) for a, b in zip(x, y, strict=True))
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_alike(x[key], y[key], pairs) for key in x)
    if isinstance(x, slice) and isinstance(y, slice):
        parts = zip((x.start, x.stop, x.step), (y.start, y.stop, y.step), strict=True)
        return all(_alike(a, b, pairs) for a, b in parts)
    return x is y or (type(x) is type(y) and bool(x == y))
