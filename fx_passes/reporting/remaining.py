"""Finds the large tensors on the paths of losses that a rewritten graph still materializes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    is_view,
    location_of,
    name_of,
    num_bytes,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS, ORDERED
from torch_streamkl.fx_passes.fx_utils.sizes import provably_equal, same_shape, shown_shape
from torch_streamkl.fx_passes.planning.refusals import Refusals
from torch_streamkl.fx_passes.planning.score_levels import ScoreLevels
from torch_streamkl.fx_passes.reporting.large_tensors import is_vector
from torch_streamkl.fx_passes.reporting.report import Remaining
from torch_streamkl.fx_passes.reporting.score_families import (
    by_user,
    is_origin,
    num_elements,
    operands_of,
)
from torch_streamkl.fx_passes.reporting.unfused_memory import (
    OF_AN_INPUT,
    SMALLER,
    readers_text,
    unread_nodes,
)
from torch_streamkl.fx_passes.reporting.wording import as_sentence


def large_tensors_left(
    graph: fx.Graph,
    sizes: dict[fx.Node, fx.Node],
    refusals: Refusals,
    outer: Mapping[fx.Node, fx.Node],
) -> list[Remaining]:
    """Returns those of ``sizes`` (large tensors of the trace) that are still materialized."""
    remaining, levels = [], refusals.levels
    unread = unread_nodes(graph)
    of_scores: set[fx.Node] = set()
    ordered = _read_by_order(graph, unread)
    again = _made_again(graph, sizes, levels, outer)
    refused = refusals.noted()
    captured = {inner: refusals.captured(inner) for inner in sizes.values()}
    refused |= {inner: x.reason for inner, x in captured.items() if x is not None}
    for node in graph.nodes:
        if any(a in of_scores for a in node.all_input_nodes) or (
            node in sizes and is_origin(sizes[node], levels)
        ):
            of_scores.add(node)
        if (node in again or (node in sizes and node in of_scores)) and node not in unread:
            value = tensor_of(node)
            if is_vector(value) or (node in sizes and _is_far_smaller(sizes[node], levels)):
                continue
            reason = readers_text(node, unread)
            if node in sizes and sizes[node] in refused:
                reason += f" ({as_sentence(refused[sizes[node]])})"
            location, _ = location_of(node)
            cause = ordered.get(node) or _of_an_input(node)
            size = num_bytes(node)
            made = Remaining(node.name, shown_shape(value), location, reason, cause, size)
            remaining.append(made)
    return remaining


def _is_far_smaller(inner: fx.Node, levels: ScoreLevels) -> bool:
    """Whether it is far smaller than any scores that it is made of, such as means over queries."""
    made = num_elements(inner)
    scores = [num_elements(a) for a in ancestors(inner) if is_origin(a, levels)]
    return (
        isinstance(made, int)
        and bool(scores)
        and all(isinstance(n, int) and made * SMALLER <= n for n in scores)
    )


def _made_again(
    graph: fx.Graph,
    sizes: dict[fx.Node, fx.Node],
    levels: ScoreLevels,
    outer: Mapping[fx.Node, fx.Node],
) -> set[fx.Node]:
    """Products of the operands of ``sizes`` that no site reads, and what is made of them."""
    products = set()
    for node, inner in sizes.items():
        read = by_user(operands_of(inner, levels), outer) if name_of(inner) in MATMULS else []
        if read:
            products.add((_operands(read), num_elements(node)))
    found: set[fx.Node] = set()
    for node in graph.nodes if products else ():
        if node in sizes or not isinstance(example(node), Tensor) or is_view(node):
            continue
        if name_of(node) in MATMULS:
            if (_operands(node.all_input_nodes), num_elements(node)) in products:
                found.add(node)
            continue
        sources = [_source(a) for a in node.all_input_nodes]
        if any(a in found and num_elements(a) == num_elements(node) for a in sources):
            found.add(node)
    return found


def _operands(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    return frozenset(_source(n) for n in nodes)


def _source(node: fx.Node) -> fx.Node:
    """Returns the tensor that a view, or one of several results, is taken from."""
    while node.op != "placeholder" and node.all_input_nodes and is_view(node):
        before = node.all_input_nodes[0]
        if not isinstance(example(before), Tensor) or num_elements(before) != num_elements(node):
            return node
        node = before
    return node


def _read_by_order(graph: fx.Graph, unread: set[fx.Node]) -> dict[fx.Node, str]:
    """Finds tensors made for an operation that needs whole rows in order, and describes them."""

    def has_the_keys_of(user: fx.Node, node: fx.Node) -> bool:
        x, y = example(user), example(node)
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or name_of(user) in MATMULS:
            return False
        return x.dim() > 0 and y.dim() > 0 and provably_equal(x.shape[-1], y.shape[-1])

    found: dict[fx.Node, str] = {}
    for node in reversed(graph.nodes):
        if node in unread:
            continue
        users = [u for u in node.users if u not in unread]
        names = [name_of(u) for u in users if name_of(u) in ORDERED]
        causes = [found[u] for u in users if u in found and has_the_keys_of(u, node)]
        if names or causes:
            found[node] = f"{names[0]} needs whole rows" if names else causes[0]
    return found


def _of_an_input(node: fx.Node) -> str:
    """Said of what is made of an input of its size, and of no product."""
    before = ancestors(node)
    if any(name_of(a) in MATMULS for a in before if a.op != "placeholder"):
        return ""
    shape = tensor_of(node).shape
    inputs = [example(a) for a in before if a.op in ("placeholder", "get_attr")]
    is_as_large = any(isinstance(x, Tensor) and same_shape(x.shape, shape) for x in inputs)
    return OF_AN_INPUT if is_as_large else ""
