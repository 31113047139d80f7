"""Finds every place in which a program computes a divergence, fused or not, for the report.

A site is the node at which two distributions first meet, one of them as a logarithm: the product
or the difference of a divergence, a mixture, or a call of kl_div. A distribution is identified by
the input of its softmax (or logarithm). This mark is followed through everything but matmuls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.region import compared_by_hand
from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.closed_forms.earliest import Divergence
from torch_streamkl.fx_passes.fx_utils.mutation import is_unused
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, name_of, reached
from torch_streamkl.fx_passes.fx_utils.op_names import LOG_SOFTMAXES, MATMULS, SOFTMAXES
from torch_streamkl.fx_passes.fx_utils.sizes import is_one
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.reader import Reading

CALLS = {"kl_div", "cross_entropy_loss"}
# what a divergence reads that is computed besides a planned operator
DISTRIBUTIONS = MATMULS | SOFTMAXES | LOG_SOFTMAXES | CALLS


@dataclass(frozen=True)
class _Mark:
    """Marks a distribution by what its scores are, and says whether this is its logarithm."""

    scores: object
    is_log: bool


def divergence_sites(trace: Trace, reading: Reading) -> list[fx.Node]:
    """Returns the first nodes of the trace where two distributions meet, one of them as a
    logarithm.
    """
    marks: dict[fx.Node, frozenset[_Mark]] = {}
    met: set[fx.Node] = set()
    sites = []
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        name = name_of(node)
        inherited = frozenset().union(*(marks.get(a, frozenset()) for a in node.all_input_nodes))
        marks[node] = _marks_of(node, name, inherited, reading)
        if any(a in met for a in node.all_input_nodes):
            met.add(node)
        elif _meet(inherited) and not _is_floating(node):
            marks[node] = frozenset()  # a metric, such as equal argmaxes: it has no gradient
        elif _meet(inherited) or _is_call(node, name) or compared_by_hand(node):
            met.add(node)
            sites.append(node)
    return sites


def without_divergence(
    trace: Trace, sites: Iterable[fx.Node], divergences: Sequence[Divergence]
) -> list[fx.Node]:
    """Returns the sites that no divergence of an operator is computed from, or is read by.

    Those that nothing reads are left out.
    """
    handled = {a for d in divergences for a in ancestors(d.inner)}
    values = {d.inner for d in divergences}
    sites = [n for n in sites if n not in handled and not _is_made_of(n, values)]
    origins = ((n, node_of(trace, n)) for n in sites)
    return [n for n, origin in origins if origin is None or not is_unused(origin)]


def _is_made_of(node: fx.Node, values: Collection[fx.Node]) -> bool:
    """Whether a node reads distributions only as values of planned operators.

    The logarithm of a Bhattacharyya coefficient is arithmetic on rows and no second loss.
    """
    read = reached([node], lambda n: () if n in values else n.all_input_nodes)
    others = (n for n in read if n not in values and n.op == "call_function")
    return not read.isdisjoint(values) and all(name_of(n) not in DISTRIBUTIONS for n in others)


def _marks_of(
    node: fx.Node, name: str, inherited: frozenset[_Mark], reading: Reading
) -> frozenset[_Mark]:
    source = node.args[0] if node.args else None
    if name in MATMULS or not isinstance(source, fx.Node):
        return frozenset()
    if name in SOFTMAXES or name in LOG_SOFTMAXES:
        return frozenset({_Mark(scores_of(source, reading), name in LOG_SOFTMAXES)})
    if name == "log" and node.meta["val"].dim() > 1:
        return frozenset(_Mark(m.scores, True) for m in inherited) or frozenset(
            {_Mark(scores_of(source, reading), True)}
        )
    if name == "gather" and is_one(node.meta["val"].shape[-1]):
        return frozenset()  # one entry of each row, such as a label's: no distribution any more
    return inherited


def scores_of(node: fx.Node, reading: Reading) -> object:
    """Returns what a tensor is, which is equal for tensors that are equal."""
    found = reading.arrays.get(node)
    return (found.expr, found.dims) if isinstance(found, Array) else node


def _meet(marks: frozenset[_Mark]) -> bool:
    logs = {m.scores for m in marks if m.is_log}
    return bool(logs) and len({m.scores for m in marks}) > 1


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point()


def _is_call(node: fx.Node, name: str) -> bool:
    """Whether a node calls kl_div, or cross_entropy with probabilities as its target."""
    if name == "cross_entropy_loss":
        target = node.args[1]
        return isinstance(target, fx.Node) and target.meta["val"].is_floating_point()
    return name in CALLS
