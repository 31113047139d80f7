"""Says where what a loss compares is made, written to, or ended, and where a node stands."""

from __future__ import annotations

import re

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import (
    UNKNOWN,
    ancestors,
    example,
    is_call,
    is_tensor,
    location_of,
    name_of,
    nearest_inputs,
    reached,
    subgraphs_of,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.fx_utils.shape_reads import values_of
from torch_streamkl.fx_passes.fx_utils.sizes import numel
from torch_streamkl.fx_passes.reporting.graph_breaks import (
    break_after,
    break_before,
    called_apart,
)
from torch_streamkl.fx_passes.reporting.operations import SPELLINGS, why_not
from torch_streamkl.fx_passes.reporting.reasons import LEAVES
from torch_streamkl.fx_passes.reporting.refusals import ELSEWHERE, NOT_MADE, Refusals
from torch_streamkl.fx_passes.reporting.text import shown
from torch_streamkl.fx_passes.reporting.unrecognized import CHECKPOINT, called

_OUTSIDE = re.compile(r"(not made (?:from scores )?in this graph).*")


def with_place(reason: str, site: fx.Node, blocker: fx.Node, refusals: Refusals) -> str:
    """Returns a reason, with where that is made which is not made in the graph, or written to."""
    origin = node_of(refusals.trace, site)
    if "modified in place" in reason:
        return _with_write(reason, site, refusals.trace)
    if reason == LEAVES and origin is not None:
        return f"{reason}: {_where_graph_ends(origin.graph)}"
    if origin is None or not _OUTSIDE.search(reason):
        return reason
    ended = break_before(origin)
    if ended is not None:
        said = f"a graph break at {shown(ended.location)} lies between"
        apart = called_apart(origin)
        if apart:
            said = f"Dynamo compiles {apart}() apart from its caller, because it has the graph "
            said += f"break at {shown(ended.location)} in it"
        said += _said(ended.code)
    elif not _reads_input(origin):
        source = _source(blocker, refusals)
        if source is None:
            return reason.replace(ELSEWHERE, NOT_MADE)
        name, at = called(source), shown(location_of(source)[0])
        before = values_of(source) - {source}
        is_known = name in (CHECKPOINT, "register_hook")
        if not is_known and any(name_of(a) in MATMULS for a in before if is_call(a)):
            if name in SPELLINGS:
                return f"{name} at {at} is applied to scores{why_not(name)}"
            return (
                f"{name} at {at} is applied to a product in a way that the rewrite does not read"
            )
        said = f"it comes from {name} at {at}, which is no matrix product"
        if name == CHECKPOINT:
            said = f"it is a result of the checkpoint at {at}, which the loss is not in"
    elif _is_body(origin.graph):
        said = "it is an input of the checkpoint that the loss is in"
    else:
        said = "it is an input of the compiled function"
    return _OUTSIDE.sub(lambda found: f"{found[1]}: {said}", reason, count=1)


def _where_graph_ends(graph: fx.Graph) -> str:
    owner = graph.owning_module
    ended = break_after(owner) if owner is not None else None
    if ended is None:
        return "it is an output"
    return f"a graph break at {shown(ended.location)} ends it{_said(ended.code)}"


def _with_write(reason: str, site: fx.Node, trace: Trace) -> str:
    """The reason, with the last write to what a site is made of."""
    origin, found = node_of(trace, site), _last_write(site)
    where = place_of(found, trace) if found is not None else None
    if found is None and origin is not None:
        found = _last_write(origin)  # through a view of it
        where = location_of(found) if found is not None else None
    if found is None or where is None:
        return reason
    place, code = where
    return f"{reason}: {name_of(found)} at {shown(place)}{_said(code)}"


def _last_write(node: fx.Node) -> fx.Node | None:
    """The last node of a graph that writes to what another one is computed from."""
    made_of = ancestors(node)
    every = reversed(node.graph.nodes)
    return next((n for n in every if not made_of.isdisjoint(written_by(n))), None)


def _said(code: str) -> str:
    return f": {code}" if code else ""


def _reads_input(site: fx.Node) -> bool:
    """Whether a tensor as large as what a site compares is an input of its graph."""
    values = [example(a) for a in (site, *site.all_input_nodes)]
    sizes = [numel(x) for x in values if isinstance(x, Tensor)]
    least = max(sizes, default=0)

    def made_of(node: fx.Node) -> list[fx.Node]:
        return [a for a in node.all_input_nodes if name_of(a) not in MATMULS]

    inputs = (a for a in reached([site], made_of) if a.op == "placeholder" and is_tensor(a))
    return any(numel(tensor_of(a)) >= least for a in inputs)


def _source(site: fx.Node, refusals: Refusals) -> fx.Node | None:
    """The user's operation that makes what a site compares and that the analysis does not know.

    It is as large as what the site compares. None where an input of the graph is.
    """
    trace, is_known = refusals.trace, refusals.levels.is_known
    made_of = ancestors(site) - {site}
    least = max((numel(a.meta["val"]) for a in site.all_input_nodes if is_tensor(a)), default=0)
    large = [
        n
        for n in trace.graph.nodes
        if n in made_of and is_tensor(n) and numel(n.meta["val"]) >= least
    ]
    for node in nearest_inputs(site):
        outer = node_of(trace, node) if node.op == "placeholder" and node in large else None
        if outer is not None and outer.op != "placeholder":
            return outer.all_input_nodes[0] if name_of(outer) == "getitem" else outer
    for node in large:
        if node.op == "call_function" and not is_known(node):
            if all(is_known(a) for a in node.all_input_nodes if a in large):
                return node_of(trace, node)
    return None


def _is_body(graph: fx.Graph) -> bool:
    """Whether a higher-order operator runs the graph: Dynamo marks the inputs of all others."""
    inputs = graph.find_nodes(op="placeholder")
    owner = graph.owning_module
    is_marked = any("grapharg" in n.meta for n in inputs)
    return owner is not None and bool(inputs) and not is_marked and _is_of_dynamo(graph)


def _is_of_dynamo(graph: fx.Graph) -> bool:
    return any("example_value" in n.meta for n in graph.nodes)


def is_shared_by_hand(site: fx.Node) -> bool:
    """Returns whether a collective adds up parts of softmaxes between a site and its matmuls."""
    before = reached([site], lambda n: () if name_of(n) in MATMULS else n.all_input_nodes)
    written = (u for n in before - {site} for u in n.users)  # dist.all_reduce works in place
    return any(map(_holds_reduction, {*before, *written}))


def _holds_reduction(node: fx.Node) -> bool:
    has_bodies = isinstance(node.target, torch._ops.HigherOrderOperator)
    bodies = subgraphs_of(node) if has_bodies else []
    inside = (n for body in bodies for n in body.graph.nodes)
    return any("all_reduce" in name_of(n) for n in (node, *inside))


def place_of(node: fx.Node, trace: Trace) -> tuple[str, str]:
    """Returns location and code of a node of the trace."""
    origin = node_of(trace, node)
    return location_of(origin) if origin is not None else (UNKNOWN, "")
