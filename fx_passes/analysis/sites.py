"""Finds every place in which a program computes a divergence, fused or not, for the report.

A site is the node at which two distributions first meet, one of them as a logarithm: the product
or the difference of a divergence, a mixture, or a call of kl_div. A distribution is identified by
the input of its softmax (or logarithm). This mark is followed through everything but matmuls.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.interpreter import ScoreInterpreter
from torch_streamkl.fx_passes.capture.region import MATMULS, compared_by_hand
from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.values import (
    Elements,
    Entries,
    Shifted,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, name_of
from torch_streamkl.fx_passes.fx_utils.sizes import expression, is_one

SOFTMAXES = {"softmax", "_softmax"}
LOG_SOFTMAXES = {"log_softmax", "_log_softmax", "logsumexp"}
CALLS = {"kl_div", "cross_entropy_loss"}
ONE_SIDE = "the scores or probabilities of one side are not made"
AS_PRODUCT = "the sum over the keys is written as a matrix product"
LEAVES = "the divergence leaves the graph before it is summed over the keys"
NOT_MADE = "is not made from scores in this graph"
VARIES = "weights that vary along the keys"  # also what an unknown operation made of scores
ELSEWHERE = f"{NOT_MADE}: it is an input, or a graph break lies between"


_NUMBER = re.compile(r"-?\d[\d.e+-]*")  # a fill value that is scaled later is another number


@dataclass(frozen=True)
class Mark:
    """Marks a distribution, by the node of its scores, and whether this is its logarithm."""

    scores: fx.Node
    is_log: bool


def divergence_sites(trace: Trace, recognised: ScoreInterpreter) -> list[fx.Node]:
    """Returns the first nodes of the trace where two distributions meet, one of them as a
    logarithm.
    """
    marks: dict[fx.Node, frozenset[Mark]] = {}
    met: set[fx.Node] = set()
    sites = []
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        name = name_of(node)
        inherited = frozenset().union(*(marks.get(a, frozenset()) for a in node.all_input_nodes))
        marks[node] = _marks_of(node, name, inherited, recognised)
        if any(a in met for a in node.all_input_nodes):
            met.add(node)
        elif _meet(inherited) or _is_call(node, name) or compared_by_hand(node):
            met.add(node)
            sites.append(node)
    return sites


def _marks_of(
    node: fx.Node, name: str, inherited: frozenset[Mark], recognised: ScoreInterpreter
) -> frozenset[Mark]:
    source = node.args[0] if node.args else None
    if name in MATMULS or not isinstance(source, fx.Node):
        return frozenset()
    if name in SOFTMAXES or name in LOG_SOFTMAXES:
        return frozenset({Mark(recognised.canonical[source], name in LOG_SOFTMAXES)})
    if name == "log" and node.meta["val"].dim() > 1:
        return frozenset(Mark(m.scores, True) for m in inherited) or frozenset(
            {Mark(recognised.canonical[source], True)}
        )
    if name == "gather" and is_one(node.meta["val"].shape[-1]):
        return frozenset()  # one entry of each row, such as a label's: no distribution any more
    return inherited


def _meet(marks: frozenset[Mark]) -> bool:
    logs = {m.scores for m in marks if m.is_log}
    return bool(logs) and len({m.scores for m in marks}) > 1


def _is_call(node: fx.Node, name: str) -> bool:
    """Whether a node calls kl_div, or cross_entropy with probabilities as its target."""
    if name == "cross_entropy_loss":
        target = node.args[1]
        return isinstance(target, fx.Node) and target.meta["val"].is_floating_point()
    return name in CALLS


def reason_of(
    site: fx.Node, recognised: ScoreInterpreter, plans: Mapping[fx.Node, object]
) -> tuple[str, fx.Node | None]:
    """Explains why a loss is not fused: the nearest unsupported operation, and why it is."""
    for node in (site, *site.users):
        if any(x.op == "placeholder" for x in compared_by_hand(node)):
            return f"{ONE_SIDE} in this graph", None
    for node in _near(site, "users"):
        reason = recognised.reasons.get(node) or plans.get(node)
        if isinstance(reason, str):
            if NOT_MADE in reason or VARIES in reason:  # for a reason of its own?
                reason, node = _further_back(node, recognised) or (reason, node)
            made_here = _first_unreadable(reason, node, recognised)
            return reason, made_here or _first_with(reason, node, recognised)
    for node in _near(site, "all_input_nodes"):
        if node in recognised.reasons:
            reason = recognised.reasons[node]
            return reason, _first_with(reason, node, recognised)
    for node in _near(site, "all_input_nodes"):
        name = name_of(node) if node.op == "call_function" else ""
        if name in SOFTMAXES | LOG_SOFTMAXES | CALLS and recognised.values.get(node) is None:
            return f"the input of {name.removeprefix('_')} {ELSEWHERE}", node
    if isinstance(recognised.values.get(site), Elements):
        for node in _near(site, "users"):
            for other in node.all_input_nodes:  # it is combined with what is not known
                if other in recognised.reasons:
                    reason = recognised.reasons[other]
                    return reason, _first_with(reason, other, recognised)
            if name_of(node) in MATMULS:
                return AS_PRODUCT, node
        return LEAVES, None
    if name_of(site) in MATMULS:
        return AS_PRODUCT, site
    if _is_returned_whole(site, recognised.trace):
        return LEAVES, None
    return f"{ONE_SIDE} in this graph, or not summed in it", None


def _is_returned_whole(site: fx.Node, trace: Trace) -> bool:
    """Whether the graph returns something as large as what two distributions meet in."""
    least = site.meta["val"].numel() if isinstance(site.meta.get("val"), Tensor) else 0
    for node in _near(site, "users"):
        value, outer = node.meta.get("val"), node_of(trace, node)
        if outer is None or not isinstance(value, Tensor) or 2 * value.numel() < least:
            continue
        if any(user.op == "output" for user in outer.users):
            return True
    return False


def _further_back(node: fx.Node, recognised: ScoreInterpreter) -> tuple[str, fx.Node] | None:
    """Yields unsupported operations that the node depends on, the nearest first."""
    for earlier in _near(node, "all_input_nodes"):
        reason = recognised.reasons.get(earlier, NOT_MADE)  # which users are handed
        if NOT_MADE not in reason and VARIES not in reason:
            return reason, earlier
    return None


def _first_unreadable(reason: str, node: fx.Node, recognised: ScoreInterpreter) -> fx.Node | None:
    """Finds the operation on scores after which they have no operator's form, for this reason."""
    made_of = ancestors(node)
    for earlier in recognised.trace.graph.nodes:
        scores = recognised.values.get(earlier)
        if earlier in made_of and isinstance(scores, Scores):
            try:
                read(scores.key)
            except Unsupported as why:
                if _NUMBER.sub("", str(why)) == _NUMBER.sub("", reason):
                    return earlier
    return None


def _first_with(reason: str, node: fx.Node, recognised: ScoreInterpreter) -> fx.Node:
    """Finds where a reason that was passed on from input to user began."""
    for earlier in _near(node, "all_input_nodes"):
        if recognised.reasons.get(earlier) == reason and not any(
            recognised.reasons.get(a) == reason for a in earlier.all_input_nodes
        ):
            return earlier
    return node


def _near(node: fx.Node, direction: str) -> Iterator[fx.Node]:
    """Yields nodes in one direction, the nearest first, the node itself included."""
    queue, seen = [node], {node}
    while queue:
        current = queue.pop(0)
        yield current
        for other in getattr(current, direction):
            if other not in seen:
                seen.add(other)
                queue.append(other)


def score_sized_nodes(
    trace: Trace,
    recognised: ScoreInterpreter,
    sites: Sequence[fx.Node],
    operands: Iterable[fx.Node] = (),
) -> dict[fx.Node, fx.Node]:
    """Returns the user's nodes on a site's path with a value per query and key, and the trace's.

    They are scores, probabilities and what is computed from them, if it has as many entries. The
    logits of a cross-entropy next to a divergence are not on its path. Neither are features of
    linear attention (``operands`` of the sites' products): softmaxes of products that are no
    larger than their inputs.
    """
    families = _Families(trace, recognised)
    features = {a for x in operands for a in ancestors(x)}
    result = {}
    chosen = families.of_sites(sites)
    for inner, node in trace.outer.items():
        behind = families.behind.get(inner, 0)
        if not behind & chosen or (inner in features and not behind & ~families.projections):
            continue
        known = isinstance(recognised.values.get(inner), (Scores, Elements, Shifted, Entries))
        if (known and not families.sums_keys(inner)) or families.is_as_large(inner, behind):
            result[node] = inner
    return result


class _Families:
    """Says which score matrices precede each node, as bits."""

    def __init__(self, trace: Trace, recognised: ScoreInterpreter) -> None:
        self.behind: dict[fx.Node, int] = {}
        self.sizes: dict[int, object] = {}
        self._recognised = recognised
        by_operands: dict[object, int] = {}  # a product that is written twice is one
        self.groups: list[int] = []  # scores that meet before their keys are summed
        self.projections = 0  # products that are no larger than what they are computed from
        for node in trace.graph.nodes:
            behind = _union(self.behind.get(a, 0) for a in node.all_input_nodes)
            if not behind and is_origin(node, recognised):
                operands = _operands_of(node, recognised)
                if operands in by_operands:
                    self.behind[node] = by_operands[operands]
                    continue
                behind = by_operands[operands] = 1 << len(self.sizes)
                self.sizes[behind] = _num_elements(node)
                self.groups.append(behind)
                if _is_projection(node, recognised):
                    self.projections |= behind
            if not behind:
                continue
            self.behind[node] = behind
            if self.is_as_large(node, behind) and behind & (behind - 1):
                joined = [g for g in self.groups if g & behind]
                self.groups = [g for g in self.groups if not g & behind] + [_union(joined)]

    def is_as_large(self, node: fx.Node, behind: int) -> bool:
        return any(size == _num_elements(node) for bit, size in self.sizes.items() if bit & behind)

    def sums_keys(self, node: fx.Node) -> bool:
        """Whether it is a product of probabilities, or what is made of them, with values."""
        scores = self._recognised.values.get(node)
        if not isinstance(scores, Scores):
            return False
        read = [ref.node for ref in (scores.key.lhs, scores.key.rhs)]
        return any(self.is_as_large(x, self.behind.get(x, 0)) for x in read)

    def of_sites(self, sites: Iterable[fx.Node]) -> int:
        chosen = _union(self.behind.get(node, 0) for node in sites)
        return _union(g for g in self.groups if g & chosen)


def is_origin(node: fx.Node, recognised: ScoreInterpreter) -> bool:
    """Returns whether a node is a score matrix, or is computed from logits from elsewhere."""
    if isinstance(recognised.values.get(node), Scores):
        return True
    return node.op == "call_function" and name_of(node) in SOFTMAXES | {"log_softmax", "log"}


def _operands_of(node: fx.Node, recognised: ScoreInterpreter) -> object:
    """Returns the operands of the product that a score matrix is, or the node itself."""
    scores = recognised.values.get(node)
    if not isinstance(scores, Scores):
        return node
    refs = (scores.key.lhs, scores.key.rhs)
    return tuple((recognised.canonical.get(x.node, x.node), x.steps, x.layout) for x in refs)


def _is_projection(node: fx.Node, recognised: ScoreInterpreter) -> bool:
    scores = recognised.values.get(node)
    if not isinstance(scores, Scores):
        return False
    made = _num_elements(node)
    read = [_num_elements(ref.node) for ref in (scores.key.lhs, scores.key.rhs)]
    return isinstance(made, int) and any(isinstance(n, int) and made < 2 * n for n in read)


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def _num_elements(node: fx.Node) -> object:
    value = node.meta.get("val")
    return expression(value.numel()) if isinstance(value, Tensor) else None
