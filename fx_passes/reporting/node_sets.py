"""Says which of some nodes are before or after each node of a graph, as the bits of a number.

One walk of the graph answers it for all nodes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping

from torch import fx


def union(sets: Iterable[int]) -> int:
    """Returns the nodes that are in one of several sets."""
    return functools.reduce(operator.or_, sets, 0)


def those_before(graph: fx.Graph, own: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Returns which nodes each node is computed from, itself included; ``own`` has their bits."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found[node] = own.get(node, 0) | union(found[a] for a in node.all_input_nodes)
    return found


def those_after(graph: fx.Graph, own: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Returns which nodes are computed from each node, itself included; ``own`` has their bits."""
    found: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        found[node] = own.get(node, 0) | union(found[user] for user in node.users)
    return found
