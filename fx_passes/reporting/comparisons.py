"""Finds losses that compare two score- or logit-sized distributions, recognized or not.

`strict` asks for them: a loss on sorted probabilities is no known divergence, and materializes all
of its probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import descendants, example, location_of, name_of
from torch_streamkl.fx_passes.reporting.large_tensors import OF_ROWS, PRODUCTS, numel, size_hint
from torch_streamkl.fx_passes.reporting.report import Site
from torch_streamkl.fx_passes.reporting.text import shown


def unfused_comparisons(
    graph: fx.Graph, is_large: Callable[[Tensor], bool], sites: Iterable[Site]
) -> list[str]:
    """Returns the places where two large distributions meet before keys are summed.

    Losses that are skipped for their size, among ``sites``, are left out.
    """
    marks: dict[fx.Node, frozenset[fx.Node]] = {}  # the inputs of the softmaxes before a node
    met: dict[fx.Node, fx.Node] = {}  # what is computed of several, and where they met
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if not node.op.startswith("call") or name_of(node) in PRODUCTS:
            continue
        value, name = example(node), name_of(node)
        before = [a for a in node.all_input_nodes if a in marks]
        place = next((met[a] for a in before if a in met), None)
        if isinstance(value, Tensor):
            if place is not None and _sums_keys(value, place):
                found[place] = None
                continue
            if name in OF_ROWS and is_large(value):
                marks[node] = frozenset(node.all_input_nodes[:1])
                continue
        marks[node] = frozenset().union(*(marks[a] for a in before))
        if not marks[node]:
            del marks[node]
            continue
        if len(marks[node]) > 1 and isinstance(value, Tensor):
            if place is None and _sums_keys(value, before[0]):  # such as kl_div with a mean
                found[node] = None
                del marks[node]
                continue
            met[node] = place or node
    skipped = [site for site in sites if site.skipped]
    nodes = [n for n in found if not any(_is_part_of(n, site) for site in skipped)]
    return list(dict.fromkeys(shown(location_of(n)[0]) for n in nodes))


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
