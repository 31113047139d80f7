"""Operations that read the shape or type of a large tensor, such as expand_as, given that instead.

Nothing else may keep scores or probabilities alive that a fused operator replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.region import Region
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_tensor, name_of
from torch_streamkl.fx_passes.fx_utils.shape_reads import OF_ITS_TYPE, WITH_SIZES, reads_metadata


def shapes_as_sizes(
    region: Region, quadratic: Container[fx.Node], builder: Callable[[fx.Node], Builder]
) -> None:
    """``x.expand_as(scores)`` becomes ``x.expand(sizes)``, with sizes from the region's inputs."""
    tensors = [leaf for leaf in region.leaves if is_tensor(leaf)]
    for node in region.nodes:
        if node._erased or not reads_metadata(node):
            continue
        x, other = node.args
        value = example(other) if isinstance(other, fx.Node) else None
        if other not in quadratic or not isinstance(value, Tensor) or not isinstance(x, fx.Node):
            continue
        build = builder(node)
        if name_of(node) in OF_ITS_TYPE:
            node.replace_all_uses_with(build.method("to", x, value.dtype))
            node.graph.erase_node(node)
            continue
        try:
            sizes = [build.size(size, tensors) for size in value.shape]
        except Blocked:
            for added in reversed(build.added):
                node.graph.erase_node(added)
            continue
        node.replace_all_uses_with(build.method(WITH_SIZES[name_of(node)], x, *sizes))
        node.graph.erase_node(node)
