"""Lists the nodes that a check treats specially: never run, not compared, or modes."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import draws_random
from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of
from torch_streamkl.fx_passes.fx_utils.op_names import LAYERS, MATMULS
from torch_streamkl.fx_passes.fx_utils.opaque_nodes import opaque
from torch_streamkl.fx_passes.validation.sizes import Sizes

# what a check does not look after for the origin of a leaf
HEAVY = MATMULS | LAYERS | {
    "embedding_bag", "conv_transpose1d", "conv_transpose3d", "bilinear", "cdist",
}  # fmt: skip


def is_leaf(node: fx.Node) -> bool:
    """Returns whether a node never runs: an input, a known number, or a random draw."""
    if node.op in ("placeholder", "get_attr"):
        return True
    return Sizes().is_known(example(node)) or _is_opaque(node)


def _is_opaque(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator) or node.target is opaque:
        return True
    if name_of(node) == "getitem" and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        return not isinstance(example(source), Tensor) and _is_opaque(source)
    return draws_random(node)


def sets_state(node: fx.Node) -> bool:
    """Returns whether a node changes a mode for those that follow: gradients, autocast."""
    return name_of(node) in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")
