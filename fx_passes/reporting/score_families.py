"""Finds the score-sized tensors on the paths of losses, and those that a rewrite leaves."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, example, is_view, name_of
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS, SOFTMAXES
from torch_streamkl.fx_passes.fx_utils.sizes import expression
from torch_streamkl.fx_passes.planning.divergence_sites import scores_of
from torch_streamkl.fx_passes.planning.score_levels import Level, ScoreLevels
from torch_streamkl.program.graph import Source

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
            behind = _union(self.behind.get(a, 0) for a in node.all_input_nodes)
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
            if self.is_as_large(node, behind) and behind & (behind - 1):
                joined = [g for g in self.groups if g & behind]
                self.groups = [g for g in self.groups if not g & behind] + [_union(joined)]

    def is_as_large(self, node: fx.Node, behind: int) -> bool:
        return any(size == num_elements(node) for bit, size in self.sizes.items() if bit & behind)

    def sums_keys(self, node: fx.Node) -> bool:
        """Whether it is a product of probabilities, or what is made of them, with values."""
        read = operands_of(node, self._levels)
        return any(self.is_as_large(x, self.behind.get(x, 0)) for x in read)

    def of_sites(self, sites: Iterable[fx.Node]) -> int:
        chosen = _union(self.behind.get(node, 0) for node in sites)
        return _union(g for g in self.groups if g & chosen)


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
    sources = [a.value for x in levels.products_of(node) for a in x.args]
    names = [x.name for x in sources if isinstance(x, Source)]
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


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)
