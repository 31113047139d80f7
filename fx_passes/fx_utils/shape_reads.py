"""Lists operations that read the shape or the type of a tensor, and none of its values."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of, reached

WITH_SIZES = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}
OF_ITS_TYPE = {"to", "type_as"}
LIKE = {"zeros_like": torch.zeros, "ones_like": torch.ones}


def values_of(node: fx.Node) -> set[fx.Node]:
    """Returns the node and all whose values it is computed from: not those read for a shape."""

    def inputs(each: fx.Node) -> list[fx.Node]:
        shape = read_for_metadata(each)
        return [x for x in each.all_input_nodes if x is not shape]

    return reached([node], inputs)


def read_for_metadata(node: fx.Node) -> fx.Node | None:
    """Returns the argument of which a node reads only shape or type, if there is one."""
    name = name_of(node)
    if name in LIKE:
        source = node.args[0] if len(node.args) == 1 else None
        values = (example(source) if isinstance(source, fx.Node) else None), example(node)
        is_plain = all(isinstance(x, Tensor) and x.is_contiguous() for x in values)
        return source if isinstance(source, fx.Node) and is_plain else None
    if len(node.args) != 2 or node.kwargs:
        return None
    x, other = node.args
    if not isinstance(x, fx.Node) or not isinstance(other, fx.Node) or x is other:
        return None
    a, b = example(x), example(other)
    is_pair = isinstance(a, Tensor) and isinstance(b, Tensor) and a.device == b.device
    return other if name in WITH_SIZES or (name in OF_ITS_TYPE and is_pair) else None
