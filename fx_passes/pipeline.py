"""rewrite(gm): find the KL sites of a Dynamo graph and replace each by a streaming operator.

Stages: slicing -> tracing -> recognise -> plan -> emit -> (this file) replace and clean up.
The work is done on a copy of the graph, which takes the original's place only when everything
succeeded: a program that compiles without the rewrite compiles with it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.interpreter import Recogniser
from torch_streamkl.fx_passes.analysis.sites import (
    divergence_sites,
    quadratic_nodes,
    reason_of,
)
from torch_streamkl.fx_passes.capture.aliases import Aliases
from torch_streamkl.fx_passes.capture.preconditions import (
    divergence_like,
    obstacle,
)
from torch_streamkl.fx_passes.capture.region import (
    MATMULS,
    Region,
    find_region,
)
from torch_streamkl.fx_passes.capture.retrace import (
    Trace,
    fake_mode_of,
    trace_region,
)
from torch_streamkl.fx_passes.domain.values import (
    Attention,
    Rows,
)
from torch_streamkl.fx_passes.followup.hard_labels import share_labels
from torch_streamkl.fx_passes.followup.loss_sum import sum_in_forward
from torch_streamkl.fx_passes.followup.sdpa_fusion import Leftovers
from torch_streamkl.fx_passes.followup.shape_reads import shapes_as_sizes
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.builder import (
    Builder,
    Selections,
)
from torch_streamkl.fx_passes.fx_utils.dead_code import remove_dead
from torch_streamkl.fx_passes.fx_utils.nodes import (
    UNKNOWN,
    example,
    location_of,
    name_of,
)
from torch_streamkl.fx_passes.fx_utils.sizes import (
    is_unknown,
    same,
)
from torch_streamkl.fx_passes.lowering.calls import emit
from torch_streamkl.fx_passes.planning.plan import (
    Plan,
    plan,
)
from torch_streamkl.fx_passes.reporting.describe import describe
from torch_streamkl.fx_passes.reporting.execution import (
    how_sites_run,
    mark_site,
    sum_in_any_order,
)
from torch_streamkl.fx_passes.reporting.hints import remedy_for
from torch_streamkl.fx_passes.reporting.remaining_tensors import (
    is_view,
    large_tensors_left,
    num_bytes,
)
from torch_streamkl.fx_passes.reporting.report import (
    Report,
    Site,
)

log = logging.getLogger("torch_streamkl.rewrite")
Plans = dict[fx.Node, Plan | str]  # what computes a sum over keys, or why nothing does


def rewrite(gm: fx.GraphModule, deterministic: bool = True) -> Report:
    """Rewrite a Dynamo graph module in place and report every KL-like site."""
    report = Report()
    try:
        for name, child in gm.named_children():
            if not isinstance(child, fx.GraphModule):
                continue
            if _is_plain_body(gm, name):
                report.extend(rewrite(child, deterministic))
            else:
                reason = f"it is in the body of {_owner(gm, name)}"
                report.extend(_left_alone(reason, child.graph))
        graph = _copied(gm.graph)
        found = _rewrite_graph(gm, graph, deterministic)
        if found.num_fused:
            graph.lint()
            gm.graph = graph
            gm.recompile()
        report.extend(found)
    except Exception as error:
        log.warning("the analysis failed and the graph is left as it was", exc_info=True)
        report.failures.append(f"{type(error).__name__}: {error}")
    return report


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes also have what Dynamo set on them beside their metadata."""
    result = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, result.nodes, strict=True):
        for name, value in vars(old).items():
            if name not in vars(new):
                setattr(new, name, value)
    return result


def _is_plain_body(gm: fx.GraphModule, name: str) -> bool:
    """Bodies that run as they are: checkpoint regions, not autograd functions or mapped code."""
    users = [u for n in gm.graph.nodes if n.op == "get_attr" and n.target == name for u in n.users]
    return (
        bool(users)
        and all("checkpoint" in str(u.target) or "wrap" in str(u.target) for u in users)
        and not any("autograd_function" in str(u.target) for u in users)
    )


def _owner(gm: fx.GraphModule, name: str) -> str:
    """The higher-order operator that runs a body."""
    users = [u for n in gm.graph.nodes if n.op == "get_attr" and n.target == name for u in n.users]
    return str(users[0].target) if users else "another operator"


def _left_alone(reason: str, graph: fx.Graph) -> Report:
    """Sites of a graph that is not analysed."""
    remedy = remedy_for(reason)
    sites = [
        Site(False, "", "", reason, *location_of(n), remedy=remedy) for n in divergence_like(graph)
    ]
    return Report(sites, not_analysed=1 if sites else 0)


@dataclass(frozen=True)
class Candidate:
    """A node whose value is a fused divergence."""

    inner: fx.Node  # in the trace
    node: fx.Node  # in the user's graph
    plan: Plan


def _rewrite_graph(gm: fx.GraphModule, graph: fx.Graph, deterministic: bool) -> Report:
    report = Report()
    reason = obstacle(graph)
    if reason:
        return _left_alone(reason, graph)
    region = find_region(graph)
    if region is None:
        return report
    try:
        trace = trace_region(gm, region)
    except Blocked as blocked:
        return _left_alone(str(blocked), graph)
    recognised = Recogniser(trace)
    aliases = Aliases(graph, region)
    found = divergence_sites(trace, recognised)
    candidates, plans = _candidates(trace, recognised)
    if not found and not candidates:
        return report
    unfused = _without_candidate(found, candidates)
    path = [*(c.inner for c in candidates), *unfused]
    sizes = {
        n: inner for n, inner in quadratic_nodes(trace, recognised, path).items() if not is_view(n)
    }
    unused = {n for n in region.nodes if not n.users}
    fused: list[tuple[Candidate, Site]] = []
    selections = Selections()
    for candidate in candidates:
        site = _fuse(candidate, region, trace, aliases, selections)
        if site.fused:
            fused.append((candidate, site))
        else:
            report.sites.append(site)
    _reread_counts(sizes, selections)
    if fused:
        mode = fake_mode_of(region)
        shapes_as_sizes(region, sizes, lambda node: Builder(node, mode))
    removed = remove_dead(graph, region.nodes, unused)
    if fused:
        _replace_attention(trace, recognised, region, aliases)
        share_labels(graph, trace, recognised, lambda node: Builder(node, mode))
        sum_in_forward(graph, lambda node: Builder(node, mode))
        removed += remove_dead(graph, region.nodes, unused)
    saved = sum(num_bytes(n) for n in removed if n in sizes)
    if not deterministic:
        sum_in_any_order(graph)
    runs = how_sites_run(graph, fake_mode_of(region))
    for candidate, site in fused:
        share = saved // len(fused)
        how = runs.get(candidate.node.name, "")
        report.sites.append(replace(site, quadratic_bytes_saved=share, runs=how))
    report.sites += _unfused_sites(unfused, trace, recognised, plans)
    report.remaining = large_tensors_left(graph, sizes, recognised)
    return report


# ------------------------------------------------------------------------------------------- sites
def _candidates(trace: Trace, recognised: Recogniser) -> tuple[list[Candidate], Plans]:
    """Where to put operators: the earliest nodes whose value one can compute."""
    rows = {
        n: v
        for n, v in recognised.values.items()
        if isinstance(v, Rows) and v.elements.terms and n.op == "call_function"
    }
    plans: Plans = {}
    for node, value in rows.items():
        try:
            plans[node] = plan(value)
        except Blocked as reason:
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


def _without_candidate(found: Sequence[fx.Node], candidates: Sequence[Candidate]) -> list[fx.Node]:
    """Sites that no operator is planned for."""
    handled: set[fx.Node] = set()
    for candidate in candidates:
        handled |= {candidate.inner} | _ancestors(candidate.inner)
    return [node for node in found if node not in handled]


def _unfused_sites(
    found: Sequence[fx.Node], trace: Trace, recognised: Recogniser, plans: Plans
) -> list[Site]:
    """Sites without an operator, each with the first thing that blocked it."""
    sites: dict[tuple[str, str], Site] = {}
    for node in found:
        reason, blocker = reason_of(node, recognised, plans)
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
    return list(sites.values())


def _place(node: fx.Node, trace: Trace) -> tuple[str, str]:
    """Location and code of a node of the trace."""
    origin = trace.outer.get(node) or trace.origin.get(node)
    return location_of(origin) if origin is not None else (UNKNOWN, "")


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        for a in stack.pop().all_input_nodes:
            if a not in found:
                found.add(a)
                stack.append(a)
    return found


# --------------------------------------------------------------------------------------- replacing
def _reread_counts(quadratic: Iterable[fx.Node], selections: Selections) -> None:
    """Checks of how many rows were selected read it from the positions, not from large tensors."""
    for node in quadratic:
        value = example(node)
        for user in list(node.users):
            if user.target is torch.ops.aten.sym_size.int and isinstance(value, Tensor):
                size = value.shape[user.args[1]]  # type: ignore[index]  # sym_size's dimension
                seen = {_entries(x) for x in _inputs_of(node)}
                masks = [m for m in selections.positions if _entries(m) in seen]
                if is_unknown(size) and len(masks) == 1:
                    user.args = (selections.positions[masks[0]], 0)


def _entries(node: fx.Node) -> object:
    """The storage of a boolean tensor and how much of it: views in any order have as many True."""
    value = example(node)
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        return node
    return (value.untyped_storage()._cdata, str(value.numel()))


def _inputs_of(node: fx.Node) -> set[fx.Node]:
    """All inputs of an index operation, and of what views of it are made of."""
    found = set(node.all_input_nodes)
    while is_view(node):
        node = node.all_input_nodes[0]
        found |= set(node.all_input_nodes)
    return found


def _fuse(
    candidate: Candidate,
    region: Region,
    trace: Trace,
    aliases: Aliases,
    selections: Selections,
) -> Site:
    """Insert the operators of one site and move its users over, or leave everything as it was."""
    node = candidate.node
    location, code = location_of(node)
    kind, form = describe(candidate.plan)
    build = Builder(node, fake_mode_of(region), selections)
    try:
        value = example(node)
        assert isinstance(value, Tensor)
        replacement = emit(build, candidate.plan, value, trace.outer)
        aliases.check(build.added)
        mark_site(build.added, node.name)
    except Blocked as reason:
        for added in reversed(build.added):
            node.graph.erase_node(added)
        remedy = remedy_for(str(reason))
        return Site(False, kind, form, str(reason), location, code, remedy=remedy)
    node.replace_all_uses_with(replacement)
    return Site(True, kind, form, "", location, code)


def _replace_attention(
    trace: Trace, recognised: Recogniser, region: Region, aliases: Aliases
) -> None:
    """Attention written by hand, where its map has no other reader, by the fused one."""
    leftovers = Leftovers(trace.outer)
    for inner in trace.graph.nodes:
        value, node = recognised.values.get(inner), trace.outer.get(inner)
        if not isinstance(value, Attention) or node is None or not _is_only_reader(node):
            continue
        build = Builder(node, fake_mode_of(region))
        try:
            replacement = leftovers.replace(node, value, build)
            if not same_metadata(replacement, node):
                raise Blocked("the fused attention has another shape or type")
            aliases.check(build.added)
        except Blocked as reason:
            log.info("attention stays as it is: %s", reason)
            for added in reversed(build.added):
                node.graph.erase_node(added)
            continue
        node.replace_all_uses_with(replacement)
        trace.outer[inner] = replacement  # the next layer reads it


def _is_only_reader(node: fx.Node) -> bool:
    """Whether the probabilities that a matmul reads have no other use, back to their scores."""
    current = node.args[0]
    while isinstance(current, fx.Node) and name_of(current) not in MATMULS:
        if len(current.users) != 1:
            return False
        if name_of(current) in ("softmax", "_softmax"):
            return True
        current = current.args[0] if current.args else None
    return False


def same_metadata(a: fx.Node, b: fx.Node) -> bool:
    x, y = example(a), example(b)
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    return (
        x.dtype == y.dtype
        and len(x.shape) == len(y.shape)
        and all(same(p, q) for p, q in zip(x.shape, y.shape, strict=True))
    )
