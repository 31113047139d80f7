"""Large tensors of a graph: which are new memory, how much of it, and which a rewrite leaves."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.interpreter import Recogniser
from torch_streamkl.fx_passes.fx_utils.mutation import has_effect
from torch_streamkl.fx_passes.fx_utils.nodes import example, location_of, name_of
from torch_streamkl.fx_passes.reporting.report import Remaining


def _plain(shape: Sequence[object]) -> tuple[object, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in shape)


def _unread(graph: fx.Graph) -> set[fx.Node]:
    """What no result needs: every compiler drops it."""
    unread: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not has_effect(node) and all(user in unread for user in node.users):
            unread.add(node)
    return unread


def large_tensors_left(
    graph: fx.Graph, sizes: dict[fx.Node, fx.Node], recognised: Recogniser
) -> list[Remaining]:
    """Those of ``sizes``, large tensors and what they are in the trace, that are still made."""
    remaining = []
    unread = _unread(graph)
    for node in graph.nodes:
        if node in sizes and node not in unread:
            value = example(node)
            assert isinstance(value, Tensor)
            users = ", ".join(sorted({name_of(u) for u in node.users}))
            reason = f"still used by {users}"
            blocked = recognised.reasons.get(sizes[node])
            if blocked:
                reason += f" ({blocked})"
            location, _ = location_of(node)
            remaining.append(Remaining(node.name, _plain(value.shape), location, reason))
    return remaining
