"""Operations that read the shape of a large tensor, such as expand_as, given the shape instead.

Nothing else may keep scores or probabilities alive that a fused operator replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.region import Region
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_tensor, name_of

WITH_SIZES = {"expand_as": "expand", "view_as": "view", "reshape_as": "reshape"}


def shapes_as_sizes(
    region: Region, quadratic: Container[fx.Node], builder: Callable[[fx.Node], Builder]
) -> None:
    """``x.expand_as(scores)`` becomes ``x.expand(sizes)``, with sizes from the region's inputs."""
    tensors = [leaf for leaf in region.leaves if is_tensor(leaf)]
    for node in region.nodes:
        if node._erased or name_of(node) not in WITH_SIZES or len(node.args) != 2:
            continue
        x, other = node.args
        value = example(other) if isinstance(other, fx.Node) else None
        if other not in quadratic or not isinstance(value, Tensor) or not isinstance(x, fx.Node):
            continue
        build = builder(node)
        try:
            sizes = [build.size(size, tensors) for size in value.shape]
        except Blocked:
            for added in reversed(build.added):
                node.graph.erase_node(added)
            continue
        node.replace_all_uses_with(build.method(WITH_SIZES[name_of(node)], x, *sizes))
        node.graph.erase_node(node)
