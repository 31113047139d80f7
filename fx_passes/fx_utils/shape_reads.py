"""Lists operations that read the shape or the type of a tensor, and none of its values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of, reached

WITH_SIZES = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}
OF_ITS_TYPE = {"to", "type_as"}
MADE: dict[str, Callable[..., Tensor]] = {
    "zeros": torch.zeros, "ones": torch.ones, "full": torch.full, "empty": torch.empty,
}  # fmt: skip
LIKE = {text: make for n, make in MADE.items() for text in (f"{n}_like", f"new_{n}")}


def values_of(node: fx.Node) -> set[fx.Node]:
    """Returns the node and all whose values it is computed from: not those read for a shape."""

    def inputs(each: fx.Node) -> list[fx.Node]:
        shape = read_for_metadata(each)
        return [x for x in each.all_input_nodes if x is not shape]

    return reached([node], inputs)


def is_of_a_shape(node: fx.Node) -> bool:
    """Returns whether a new tensor has the shape and type of an input, and none of its values."""
    name = name_of(node)
    return name.startswith("new_") or name.endswith("_like")


def reads_values(node: fx.Node, source: fx.Node) -> bool:
    """Returns whether a node reads values of an input, and not its shape or type alone."""
    if isinstance(example(node), (int, torch.SymInt, torch.Size)):
        return False
    is_template = is_of_a_shape(node) and name_of(node) != "new_tensor"
    others = [*node.args[1:], *node.kwargs.values()]
    if is_template and source not in others:
        return False
    return read_for_metadata(node) is not source


def number_in(node: fx.Node) -> float | None:
    """Returns the number that ``full_like`` or ``new_full`` fills a tensor with, if it is one."""
    given = node.args[1:] if name_of(node).endswith("_like") else node.args[2:]
    value = given[0] if given else node.kwargs.get("fill_value")
    return value if isinstance(value, (int, float)) else None


def read_for_metadata(node: fx.Node) -> fx.Node | None:
    """Returns the argument of which a node reads only shape or type, if there is one."""
    name = name_of(node)
    if name in LIKE:
        source, made = node.args[0] if node.args else None, example(node)
        is_plain = isinstance(made, Tensor) and made.is_contiguous()
        is_known = LIKE[name] is not torch.full or number_in(node) is not None
        is_leaf = node.kwargs.get("requires_grad", False)
        return (
            source
            if isinstance(source, fx.Node) and is_plain and is_known and not is_leaf
            else None
        )
    if len(node.args) != 2 or node.kwargs:
        return None
    x, other = node.args
    if not isinstance(x, fx.Node) or not isinstance(other, fx.Node) or x is other:
        return None
    a, b = example(x), example(other)
    is_pair = isinstance(a, Tensor) and isinstance(b, Tensor) and a.device == b.device
    return other if name in WITH_SIZES or (name in OF_ITS_TYPE and is_pair) else None
