"""Chooses which values of a graph the operators compute: the earliest ones that they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from torch_streamkl.fx_passes.capture.region import MATMULS
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.values import Rows
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, name_of
from torch_streamkl.fx_passes.planning.plan import Plan, plan

# what a divergence reads that is computed besides a planned operator
DISTRIBUTIONS = MATMULS | {
    "_softmax", "softmax", "_log_softmax", "log_softmax", "logsumexp", "kl_div",
    "cross_entropy_loss",
}  # fmt: skip
Plans = Mapping[fx.Node, Plan | str]  # what computes a sum over keys, or why nothing does


@dataclass(frozen=True)
class Candidate:
    """Holds a node whose value is a fused divergence."""

    inner: fx.Node  # in the trace
    node: fx.Node  # in the user's graph
    plan: Plan


def find_candidates(
    trace: Trace, values: Mapping[fx.Node, object]
) -> tuple[list[Candidate], Plans]:
    """Finds where to put operators: the earliest nodes whose value one can compute."""
    rows = {
        n: v
        for n, v in values.items()
        if isinstance(v, Rows) and v.elements.terms and n.op == "call_function"
    }
    plans: dict[fx.Node, Plan | str] = {}
    for node, value in rows.items():
        try:
            plans[node] = plan(value)
        except Unsupported as reason:
            plans[node] = str(reason)
    covered: set[fx.Node] = set()
    chosen: dict[fx.Node, Plan] = {}
    # a sum of parts that are no divergence alone, such as cross-entropy minus entropy
    for node in reversed(list(rows)):
        made = plans[node]
        inputs = [a for a in node.all_input_nodes if a in rows]
        if node in covered or isinstance(made, str) or node not in trace.outer:
            continue
        if any(isinstance(plans[a], str) for a in inputs) or (
            inputs and not any(a in trace.outer for a in inputs)
        ):
            chosen[node] = made
            _cover(node, rows, covered)
    downstream: set[fx.Node] = set()
    for node in rows:
        made = plans[node]
        if any(a in chosen or a in downstream for a in node.all_input_nodes):
            downstream.add(node)
        elif (
            node not in covered
            and node not in chosen
            and not isinstance(made, str)
            and node in trace.outer
        ):
            chosen[node] = made
    return [Candidate(n, trace.outer[n], chosen[n]) for n in rows if n in chosen], plans


def _cover(node: fx.Node, rows: dict[fx.Node, Rows], covered: set[fx.Node]) -> None:
    for a in node.all_input_nodes:
        if a in rows and a not in covered:
            covered.add(a)
            _cover(a, rows, covered)


def without_candidate(found: Sequence[fx.Node], candidates: Sequence[Candidate]) -> list[fx.Node]:
    """Returns sites that no operator is planned for."""
    handled: set[fx.Node] = set()
    for candidate in candidates:
        handled |= ancestors(candidate.inner)
    values = {candidate.inner for candidate in candidates}
    return [n for n in found if n not in handled and not _is_made_of(n, values)]


def _is_made_of(node: fx.Node, values: set[fx.Node]) -> bool:
    """Whether a node reads distributions only as values of planned operators.

    The logarithm of a Bhattacharyya coefficient is arithmetic on rows and no second loss.
    """
    stack, seen, meets_value = [node], {node}, False
    while stack:
        current = stack.pop()
        if current in values:
            meets_value = True
            continue
        if current.op == "call_function" and name_of(current) in DISTRIBUTIONS:
            return False
        new = [a for a in current.all_input_nodes if a not in seen]
        seen.update(new)
        stack += new
    return meets_value
