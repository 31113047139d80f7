"""Operations that read the shape or the type of a tensor, and none of its values."""

from __future__ import annotations

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of

WITH_SIZES = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}
OF_ITS_TYPE = {"to", "type_as"}


def reads_metadata(node: fx.Node) -> bool:
    """Whether a node asks its second argument for nothing but its shape or type."""
    if len(node.args) != 2 or node.kwargs:
        return False
    x, other = node.args
    if not isinstance(x, fx.Node) or not isinstance(other, fx.Node) or x is other:
        return False
    if name_of(node) in WITH_SIZES:
        return True
    a, b = example(x), example(other)
    is_pair = isinstance(a, Tensor) and isinstance(b, Tensor) and a.device == b.device
    return name_of(node) in OF_ITS_TYPE and is_pair
