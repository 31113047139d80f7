"""Measures the large tensors of a graph: which are new memory, and which a rewrite leaves."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from torch_streamkl.fx_passes.fx_utils.mutation import has_effect
from torch_streamkl.fx_passes.fx_utils.nodes import num_bytes, said_name
from torch_streamkl.fx_passes.fx_utils.sizes import bytes_text

OF_AN_INPUT = "made of an input of this size"
SMALLER = 8  # times, and a tensor is no longer as large as the scores that it is made of


def unread_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Finds the nodes that no result needs: every compiler drops them."""
    unread: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not has_effect(node) and all(user in unread for user in node.users):
            unread.add(node)
    return unread


def readers_text(
    node: fx.Node, unread: Collection[fx.Node] = (), read_by: str | None = None
) -> str:
    """Says who reads a tensor, and what a user could do about an output.

    ``read_by`` says who reads the outputs, where that is not the caller of a compiled function.
    """
    readers = [u for u in node.users if u not in unread]
    names = sorted({said_name(u) for u in readers if u.op != "output"})
    said = [f"read by {', '.join(names)}"] if names else []
    is_output = any(u.op == "output" for u in readers)
    if is_output and read_by is not None:
        said.append(f"read by {read_by}")
    elif is_output:
        saved = bytes_text(num_bytes(node))
        said.append(f"returned, or used after a graph break; {saved} less without that")
    return ", ".join(said) or "nothing reads it"
