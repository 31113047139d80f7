"""What a rewrite changed: two graphs compared node by node, without asking who changed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Change:
    """A value that the rest of the program read, and what it reads in its place."""

    before: fx.Node
    after: fx.Node


@dataclass(frozen=True)
class Comparison:
    """Two graphs: the names of the nodes that are in both, and the values that were replaced."""

    before: dict[str, fx.Node]
    after: dict[str, fx.Node]
    kept: frozenset[str]
    changes: tuple[Change, ...]


def compare_graphs(before: fx.Graph, after: fx.Graph) -> Comparison:
    """A copy of a graph has the names of the original; nodes that were added have new ones."""
    old = {n.name: n for n in before.nodes}
    new = {n.name: n for n in after.nodes}
    kept: set[str] = set()
    changes: dict[Change, None] = {}
    for name, node in new.items():
        if name not in old:
            continue
        pairs = _read_otherwise(old[name], node)
        if pairs is None:
            changes[Change(old[name], node)] = None
            continue
        kept.add(name)
        for pair in pairs:
            changes[pair] = None
    return Comparison(old, new, frozenset(kept), tuple(changes))


def _read_otherwise(old: fx.Node, new: fx.Node) -> list[Change] | None:
    """The inputs in which two nodes differ; None when they differ in more than that."""
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
