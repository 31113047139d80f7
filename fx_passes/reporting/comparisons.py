"""Finds losses that compare two score- or logit-sized distributions, recognized or not.

`strict` asks for them: a loss on sorted probabilities is no known divergence, and materializes all
of its probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import is_unused
from torch_streamkl.fx_passes.fx_utils.nodes import (
    descendants,
    example,
    is_view,
    location_of,
    name_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import OF_ROWS
from torch_streamkl.fx_passes.fx_utils.sizes import numel, size_hint
from torch_streamkl.fx_passes.reporting.large_tensors import PRODUCTS
from torch_streamkl.fx_passes.reporting.report import Site
from torch_streamkl.fx_passes.reporting.text import shown


def unfused_comparisons(
    graph: fx.Graph, is_large: Callable[[Tensor], bool], sites: Iterable[Site]
) -> list[str]:
    """Returns the places where two large distributions meet before keys are summed.

    Losses that are skipped for their size, among ``sites``, are left out, and what nothing reads.
    """
    marks: dict[fx.Node, frozenset[fx.Node]] = {}  # the scores of the softmaxes before a node
    softmaxes: dict[fx.Node, fx.Node] = {}  # by their scores
    met: dict[fx.Node, fx.Node] = {}  # what is computed of several, and where they met
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if not node.op.startswith("call") or name_of(node) in PRODUCTS:
            continue
        value = example(node)
        before = [a for a in node.all_input_nodes if a in marks]
        place = next((met[a] for a in before if a in met), None)
        if isinstance(value, Tensor):
            if place is not None and _sums_keys(value, place):
                found[place] = None
                continue
            scores = _scores_of(node, bool(before)) if is_large(value) else None
            if scores is not None:
                marks[node] = frozenset([scores])
                softmaxes[scores] = node
                continue
        made_of = frozenset().union(*(marks[a] for a in before))
        if not made_of:
            continue
        if isinstance(value, Tensor):
            if len(made_of) == 1 and _sums_keys(value, softmaxes[next(iter(made_of))]):
                continue  # a value for each row, such as an entropy: no distribution any more
            if len(made_of) > 1 and place is None and _sums_keys(value, before[0]):
                found[node] = None  # such as kl_div with a mean
                continue
            if len(made_of) > 1:
                met[node] = place or node
        marks[node] = made_of
    skipped = [site for site in sites if site.skipped]
    read = [n for n in found if not is_unused(n)]
    nodes = [n for n in read if not any(_is_part_of(n, site) for site in skipped)]
    return list(dict.fromkeys(shown(location_of(n)[0]) for n in nodes))


def _scores_of(node: fx.Node, is_of_distribution: bool) -> fx.Node | None:
    """What a softmax is taken of, by one operation or by hand. None for other operations.

    Exponentials that are summed are a distribution, too, as in Sinkhorn's teacher.
    """
    if name_of(node) in OF_ROWS:
        return next(iter(node.all_input_nodes), None)
    if is_of_distribution or name_of(node) != "exp":
        return None
    users = [u for n in (node, *filter(is_view, node.users)) for u in n.users]
    if not any(name_of(u) == "sum" for u in users):
        return None
    scores = node.all_input_nodes[0]
    while name_of(scores) == "sub":  # the maximum of each row
        first, *rest = scores.all_input_nodes
        if not rest or not _is_smaller(rest[0], first):
            break
        scores = first
    return scores


def _is_smaller(node: fx.Node, other: fx.Node) -> bool:
    x, y = example(node), example(other)
    return isinstance(x, Tensor) and isinstance(y, Tensor) and 2 * numel(x) <= numel(y)


def _sums_keys(made: Tensor, node: fx.Node) -> bool:
    """Whether a result has no more than a value for each row of what a node computes."""
    value = example(node)
    if not isinstance(value, Tensor) or not value.dim():
        return False
    return numel(made) * size_hint(value.shape[-1]) <= numel(value)


def _is_part_of(node: fx.Node, site: Site) -> bool:
    return any(
        n.name == site.node or location_of(n)[0] == site.location
        for n in (node, *descendants([node]))
    )
