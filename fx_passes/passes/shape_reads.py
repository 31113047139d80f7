"""Redirects reads of a large tensor's shape or type, such as expand_as, to another tensor.

Otherwise such a read would keep scores or probabilities alive that a fused operator replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.region import Region
from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_tensor, name_of, tensor_of
from torch_streamkl.fx_passes.fx_utils.shape_reads import (
    LIKE,
    OF_ITS_TYPE,
    WITH_SIZES,
    number_in,
    read_for_metadata,
)


def shapes_as_sizes(
    region: Region, quadratic: Container[fx.Node], builder: MakeBuilder
) -> list[fx.Node]:
    """Replaces ``x.expand_as(scores)`` by ``x.expand(sizes)``, with sizes from the region's
    inputs; returns what takes the place of the region's nodes.
    """
    made = list[fx.Node]()
    tensors = [leaf for leaf in region.leaves if is_tensor(leaf)]
    for node in region.nodes:
        if node._erased:
            continue
        other = read_for_metadata(node)
        value = example(other) if other is not None else None
        if other not in quadratic or not isinstance(value, Tensor):
            continue
        build = builder(node)
        with contextlib.suppress(Unsupported), build.undone_if_unsupported():
            made.append(_without(node, value, build, tensors))
            node.replace_all_uses_with(made[-1])
            node.graph.erase_node(node)
    return made


def _without(node: fx.Node, value: Tensor, build: Builder, tensors: list[fx.Node]) -> fx.Node:
    """Computes the result of a node that reads only the shape or type of its tensor."""
    x, name = node.args[0], name_of(node)
    assert isinstance(x, fx.Node)
    if name in OF_ITS_TYPE:
        return build.method("to", x, value.dtype)
    if name in WITH_SIZES:
        return build.method(WITH_SIZES[name], x, *(build.size(n, tensors) for n in value.shape))
    made, number = tensor_of(node), number_in(node)
    sizes = [build.size(n, tensors) for n in made.shape]
    filled = [number] if LIKE[name] is torch.full else []
    return build.call(LIKE[name], sizes, *filled, dtype=made.dtype, device=made.device)
