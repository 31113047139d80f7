"""How many rows a boolean mask selects is read from the positions, not from large tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.builder import Selections
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_view
from torch_streamkl.fx_passes.fx_utils.sizes import is_unknown


def reread_counts(quadratic: Iterable[fx.Node], selections: Selections) -> None:
    """Checks of how many rows were selected read it from the positions, not from large tensors."""
    for node in quadratic:
        value = example(node)
        for user in list(node.users):
            if user.target is torch.ops.aten.sym_size.int and isinstance(value, Tensor):
                size = value.shape[user.args[1]]  # type: ignore[index]  # sym_size's dimension
                seen = {_entries(x) for x in _inputs_of(node)}
                masks = [m for m in selections.positions if _entries(m) in seen]
                if is_unknown(size) and len(masks) == 1:
                    user.args = (selections.positions[masks[0]], 0)


def _entries(node: fx.Node) -> object:
    """The storage of a boolean tensor and how much of it: views in any order have as many True."""
    value = example(node)
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        return node
    return (value.untyped_storage()._cdata, str(value.numel()))


def _inputs_of(node: fx.Node) -> set[fx.Node]:
    """All inputs of an index operation, and of what views of it are made of."""
    found = set(node.all_input_nodes)
    while is_view(node):
        node = node.all_input_nodes[0]
        found |= set(node.all_input_nodes)
    return found
