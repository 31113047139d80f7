"""Replaces Python lists of positions, as in ``logits[:, [3, 4]]``, by tensors.

torch makes a tensor of such a list in every call. In a trace it is a constant that no node of the
user's graph has, so no operator could be given it.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.fake_modes import fake_mode_of
from torch_streamkl.fx_passes.fx_utils.nodes import example


def lists_as_tensors(graph: fx.Graph) -> None:
    """Inserts ``torch.tensor(list)`` for each list that a tensor is indexed with."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        x, at = node.args
        value = example(x) if isinstance(x, fx.Node) else None
        every = at if isinstance(at, tuple) else (at,)
        if not isinstance(value, Tensor) or not any(map(_has_positions, every)):
            continue
        if isinstance(at, list) and any(isinstance(i, list) for i in at):
            continue  # torch may take a list of lists that is no part of a tuple for a tuple
        build = Builder(node, fake_mode_of(graph.nodes))
        made = [
            build.call(torch.tensor, i, device=value.device) if _has_positions(i) else i
            for i in every
        ]
        node.args = (x, tuple(made) if isinstance(at, tuple) else made[0])


def _has_positions(index: object) -> bool:
    """Whether an index is a list of known numbers, or of such lists; of booleans, it is a mask."""
    if not isinstance(index, list) or not index:
        return False
    return all(type(i) is int or _has_positions(i) for i in index)
