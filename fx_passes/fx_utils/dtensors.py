"""Reads what a graph records of DTensors: their nodes, placements and meshes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.torch_names import tree_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLACED = "streamkl_placed"  # in the metadata of whole tensors that stand for DTensors


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Returns whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there are none
    return module is not None and isinstance(x, module.DTensor)


def dtensors_in(value: object) -> list[DTensor]:
    """Returns the DTensors of a recorded value, which may be a tuple."""
    return [x for x in tree_leaves(value) if is_dtensor(x)]


def has_dtensors(graph: fx.Graph) -> bool:
    """Returns whether a graph records DTensors."""
    return any(True for _ in _all(graph))


def ranks_of(graph: fx.Graph) -> tuple[int, ...]:
    """Returns every rank that has a part of a DTensor of the graph."""
    meshes: list[Any] = []
    for x in _all(graph):
        if not any(x.device_mesh is mesh for mesh in meshes):
            meshes.append(x.device_mesh)
    return tuple(sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))


def _all(graph: fx.Graph) -> Iterator[DTensor]:
    for node in graph.nodes:
        yield from dtensors_in(example(node))
