"""What the report says of sites that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from torch_streamkl.fx_passes.analysis.interpreter import Recogniser
from torch_streamkl.fx_passes.analysis.sites import reason_of
from torch_streamkl.fx_passes.capture.preconditions import divergence_like
from torch_streamkl.fx_passes.capture.region import MATMULS
from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.fx_utils.nodes import UNKNOWN, location_of, name_of
from torch_streamkl.fx_passes.planning.candidates import Plans
from torch_streamkl.fx_passes.reporting import data_parallel
from torch_streamkl.fx_passes.reporting.hints import remedy_for
from torch_streamkl.fx_passes.reporting.report import Report, Site


def left_alone(reason: str, graph: fx.Graph) -> Report:
    """Sites of a graph that is not analysed."""
    remedy = remedy_for(reason)
    sites = [
        Site(False, "", "", reason, *location_of(n), remedy=remedy) for n in divergence_like(graph)
    ]
    return Report(sites, not_analysed=1 if sites else 0)


def unfused_sites(
    found: Sequence[fx.Node], trace: Trace, recognised: Recogniser, plans: Plans
) -> list[Site]:
    """Sites without an operator, each with the first thing that blocked it."""
    sites: dict[tuple[str, str], Site] = {}
    for node in found:
        reason, blocker = reason_of(node, recognised, plans)
        origin = node_of(trace, node)
        if origin is not None and _is_shared_by_hand(origin):
            reason = "ranks add up what each computes of its own words (all_reduce)"
        location, code = _place(node, trace)
        elsewhere = _place(blocker, trace)[0] if blocker is not None else location
        sites.setdefault(
            (location, reason),
            Site(
                False,
                "",
                "",
                reason,
                location,
                code,
                remedy=remedy_for(reason),
                blocked_at="" if elsewhere == location else elsewhere,
            ),
        )
    return data_parallel.named(sites.values(), [node_of(trace, node) for node in found])


def _is_shared_by_hand(site: fx.Node) -> bool:
    """Whether a collective adds up parts of the softmaxes between a site and its matmuls."""
    stack, seen = [site], {site}
    while stack:
        node = stack.pop()
        written = node.users if node is not site else ()  # dist.all_reduce works in place
        if any(_holds_reduction(n) for n in (node, *written)):
            return True
        if name_of(node) in MATMULS:
            continue
        stack += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return False


def _holds_reduction(node: fx.Node) -> bool:
    if "all_reduce" in name_of(node):
        return True
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    bodies = [getattr(node.graph.owning_module, str(a.target), None)
              for a in node.all_input_nodes if a.op == "get_attr"]  # fmt: skip
    return any(
        "all_reduce" in name_of(n)
        for body in bodies
        if isinstance(body, fx.GraphModule)
        for n in body.graph.nodes
    )


def _place(node: fx.Node, trace: Trace) -> tuple[str, str]:
    """Location and code of a node of the trace."""
    origin = node_of(trace, node)
    return location_of(origin) if origin is not None else (UNKNOWN, "")
