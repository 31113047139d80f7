"""Copies graphs, so that a rewrite works on a copy."""

from __future__ import annotations

import copy

from torch import fx


def copied(graph: fx.Graph) -> fx.Graph:
    """Copies a graph, with the attributes that Dynamo set on nodes besides their metadata."""
    result = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, result.nodes, strict=True):
        for name, value in vars(old).items():
            if name not in vars(new):
                setattr(new, name, value)
    result.owning_module = graph.owning_module  # of the bodies of higher-order operators
    return result
