"""Finds the score-sized tensors on the paths of losses, what is saved, and what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.closed_forms.earliest import Divergence
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    is_view,
    location_of,
    name_of,
    num_bytes,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS, ORDERED, SOFTMAXES, STREAMED
from torch_streamkl.fx_passes.fx_utils.sizes import (
    expression,
    provably_equal,
    same_shape,
    shown_shape,
)
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.fx_passes.reporting.divergence_sites import scores_of
from torch_streamkl.fx_passes.reporting.large_tensors import (
    OF_AN_INPUT,
    SMALLER,
    is_vector,
    readers_text,
    unread_nodes,
)
from torch_streamkl.fx_passes.reporting.node_sets import those_after, union
from torch_streamkl.fx_passes.reporting.refusals import Refusals
from torch_streamkl.fx_passes.reporting.report import Remaining
from torch_streamkl.fx_passes.reporting.score_levels import Level, ScoreLevels
from torch_streamkl.fx_passes.reporting.wording import as_sentence

ORIGINS = SOFTMAXES | {"log_softmax", "log"}  # also of logits from elsewhere


def score_sized_nodes(
    trace: Trace,
    levels: ScoreLevels,
    sites: Sequence[fx.Node],
    operands: Iterable[fx.Node] = (),
) -> dict[fx.Node, fx.Node]:
    """Returns the user's nodes on a site's path with a value per query and key, and the trace's.

    They are scores, probabilities and what is computed from them, if it has as many entries. The
    logits of a cross-entropy next to a divergence are not on its path. Neither are features of
    linear attention (``operands`` of the sites' products): softmaxes of products that are no
    larger than their inputs.
    """
    families, operands = _Families(trace, levels), set(operands)
    features = {a for x in operands for a in ancestors(x)}
    products = _products_of(trace, operands)
    result = {}
    chosen = families.of_sites(sites)
    for inner, node in trace.outer.items():
        behind = families.behind.get(inner, 0)
        if not behind & chosen or (inner in features and not behind & ~families.projections):
            continue
        of_keys = levels.of(inner) in (Level.SCORES, Level.PROBABILITIES)
        known = of_keys and not levels.are_chosen(inner)
        is_large = inner in products or families.is_as_large(inner, behind)
        if (known and not families.sums_keys(inner)) or is_large:
            result[node] = inner
    return result


def operands_of_calls(divergences: Iterable[Divergence], refusals: Refusals) -> list[fx.Node]:
    """Returns the tensors of the trace that the products of divergences are made of."""
    calls = (call for divergence in divergences for call in divergence.calls)
    found = (x for call in calls for side in call.sides for x in side.operands)
    nodes = (source_name(x) or refusals.first_with(x) for x in found)
    return [x for x in nodes if isinstance(x, fx.Node)]


def _products_of(trace: Trace, operands: set[fx.Node]) -> set[fx.Node]:
    """Products of two operands of the sites, and what is made of them of the same size.

    Operands may be computed from other scores, as features of linear attention are.
    """
    views = set(operands)  # and what is the same tensor in another shape
    found: set[fx.Node] = set()
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        if is_view(node) and inputs and inputs[0] in views:
            views.add(node)
        is_product = name_of(node) in MATMULS and all(a in views for a in inputs)
        size = num_elements(node)
        if is_product or any(a in found and num_elements(a) == size for a in inputs):
            found.add(node)
    return found


class _Families:
    """Says which score matrices precede each node, as bits."""

    def __init__(self, trace: Trace, levels: ScoreLevels) -> None:
        self.behind: dict[fx.Node, int] = {}
        self.sizes: dict[int, object] = {}
        self._levels = levels
        by_operands: dict[object, int] = {}  # a product that is written twice is one
        self.groups: list[int] = []  # scores that meet before their keys are summed
        self.projections = 0  # products that are no larger than what they are computed from
        for node in trace.graph.nodes:
            behind = union(self.behind.get(a, 0) for a in node.all_input_nodes)
            if not behind and is_origin(node, levels):
                operands = scores_of(node, levels.reading)
                if operands in by_operands:
                    self.behind[node] = by_operands[operands]
                    continue
                behind = by_operands[operands] = 1 << len(self.sizes)
                self.sizes[behind] = num_elements(node)
                self.groups.append(behind)
                if _is_projection(node):
                    self.projections |= behind
            if not behind:
                continue
            self.behind[node] = behind
            meet = self.is_as_large(node, behind) and behind & (behind - 1)
            if meet and levels.of(node) is not Level.ROWS:
                joined = [g for g in self.groups if g & behind]
                self.groups = [g for g in self.groups if not g & behind] + [union(joined)]

    def is_as_large(self, node: fx.Node, behind: int) -> bool:
        return any(size == num_elements(node) for bit, size in self.sizes.items() if bit & behind)

    def sums_keys(self, node: fx.Node) -> bool:
        """Whether it is a product of probabilities, or what is made of them, with values."""
        read = operands_of(node, self._levels)
        return any(self.is_as_large(x, self.behind.get(x, 0)) for x in read)

    def of_sites(self, sites: Iterable[fx.Node]) -> int:
        chosen = union(self.behind.get(node, 0) for node in sites)
        return union(g for g in self.groups if g & chosen)


def is_origin(node: fx.Node, levels: ScoreLevels) -> bool:
    """Returns whether a node is a score matrix, or is computed from logits from elsewhere."""
    if node.op != "call_function":
        return False
    is_product = name_of(node) in MATMULS and levels.has_product(node)
    return is_product or levels.of(node) is Level.SCORES or name_of(node) in ORIGINS


def operands_of(node: fx.Node, levels: ScoreLevels) -> list[fx.Node]:
    """Returns the tensors of the trace whose product a score matrix is."""
    if levels.of(node) is not Level.SCORES:
        return []
    names = [source_name(a) for x in levels.products_of(node) for a in x.args]
    return [x for x in names if isinstance(x, fx.Node)]


def num_elements(node: fx.Node) -> object:
    """Returns how many entries a tensor has, as a number or an expression."""
    value = example(node)
    return expression(value.numel()) if isinstance(value, Tensor) else None


def by_user(operands: Iterable[fx.Node], outer: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """Returns the user's nodes of operands, none if one of them is no node of the user."""
    found = list(operands)
    return [outer[x] for x in found] if all(x in outer for x in found) else []


def _is_projection(node: fx.Node) -> bool:
    if name_of(node) not in MATMULS:
        return False
    made = num_elements(node)
    read = [num_elements(a) for a in node.all_input_nodes]
    return isinstance(made, int) and any(isinstance(n, int) and made < 2 * n for n in read)


# ------------------------------------------------------------------------ removed


@dataclass
class Saving:
    """Counts the bytes that one loss no longer materializes.

    Of a tensor that several losses are computed from, each has an equal share. ``num_sharing``
    is the number of losses with which it has such tensors in common, itself included.
    """

    num_bytes: int = 0
    num_sharing: int = 1


def savings_of(removed: Mapping[fx.Node, fx.Node], losses: Sequence[fx.Node]) -> list[Saving]:
    """Returns the savings of each loss.

    ``removed`` maps the user's large tensors to the nodes of the trace, which has the losses.
    """
    found = [Saving() for _ in losses]
    if not losses:  # what was removed are writes whose results nobody reads
        return found
    sharing: list[set[int]] = [{i} for i in range(len(losses))]
    after = those_after(losses[0].graph, {loss: 1 << i for i, loss in enumerate(losses)})
    for node, inner in removed.items():
        owners = [i for i in range(len(losses)) if after[inner] >> i & 1] or [*range(len(losses))]
        share, rest = divmod(num_bytes(node), len(owners))
        for i in owners:
            found[i].num_bytes += share + (rest if i == owners[0] else 0)
            sharing[i].update(owners)
    for saving, others in zip(found, sharing, strict=True):
        saving.num_sharing = len(others)
    return found


# ------------------------------------------------------------------------ left


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
        names = [name_of(u) for u in users if name_of(u) in ORDERED - {STREAMED}]
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
