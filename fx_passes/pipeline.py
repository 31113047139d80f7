"""rewrite(gm): find the KL sites of a Dynamo graph and replace each by a streaming operator.

Stages: capture -> analysis -> planning -> lowering -> followup -> validation, each a folder.
A graph of DTensors goes through them as one of whole tensors (`sharded`).
The work is done on a copy of the graph, which takes the original's place only when everything
succeeded: a program that compiles without the rewrite compiles with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.interpreter import Recogniser
from torch_streamkl.fx_passes.analysis.sites import divergence_sites, quadratic_nodes
from torch_streamkl.fx_passes.capture.aliases import Aliases, LateWrite
from torch_streamkl.fx_passes.capture.bodies import is_plain_body, owner_of
from torch_streamkl.fx_passes.capture.preconditions import obstacle
from torch_streamkl.fx_passes.capture.region import find_region
from torch_streamkl.fx_passes.capture.retrace import Trace, fake_mode_of, trace_region
from torch_streamkl.fx_passes.followup.hard_labels import share_labels
from torch_streamkl.fx_passes.followup.late_writes import read_after_writes
from torch_streamkl.fx_passes.followup.loss_sum import sum_in_forward
from torch_streamkl.fx_passes.followup.row_counts import reread_counts, symbols_of_counts
from torch_streamkl.fx_passes.followup.sdpa_fusion import replace_attention
from torch_streamkl.fx_passes.followup.shape_reads import shapes_as_sizes
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked, Fatal
from torch_streamkl.fx_passes.fx_utils.builder import Builder, Selections
from torch_streamkl.fx_passes.fx_utils.copies import copied
from torch_streamkl.fx_passes.fx_utils.dead_code import remove_dead
from torch_streamkl.fx_passes.fx_utils.dtensors import has_dtensors
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_view, location_of, num_bytes
from torch_streamkl.fx_passes.lowering.calls import emit
from torch_streamkl.fx_passes.planning.candidates import (
    Candidate,
    find_candidates,
    without_candidate,
)
from torch_streamkl.fx_passes.planning.nan_readers import (
    NO_READERS,
    Readers,
    check_nan_readers,
    readers_of_body,
)
from torch_streamkl.fx_passes.planning.small import least_mib, why_left
from torch_streamkl.fx_passes.reporting.describe import describe
from torch_streamkl.fx_passes.reporting.execution import how_sites_run, mark_site, sum_in_any_order
from torch_streamkl.fx_passes.reporting.hints import remedy_for
from torch_streamkl.fx_passes.reporting.remaining_tensors import large_tensors_left
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.reporting.sites import left_alone, unfused_sites
from torch_streamkl.fx_passes.validation.options import CheckOptions
from torch_streamkl.fx_passes.validation.refusal import Refused, rewrite_checked

log = logging.getLogger("torch_streamkl.rewrite")


def rewrite(
    gm: fx.GraphModule,
    deterministic: bool = True,
    verify: CheckOptions | None = None,
    min_mib: float | None = 0.0,
    outside: Readers = NO_READERS,
    is_compiled: bool = True,
) -> Report:
    """Rewrite a Dynamo graph module in place and report every KL-like site.

    ``outside`` is what reads the module's results where it is the body of a checkpoint.
    ``is_compiled`` says whether Inductor compiles what is left: the report depends on it.
    """
    verify = verify or CheckOptions()
    report = Report()
    try:
        for name, child in gm.named_children():
            if not isinstance(child, fx.GraphModule):
                continue
            if is_plain_body(gm, name):
                readers = readers_of_body(gm, name, outside)
                report.extend(rewrite(child, deterministic, verify, min_mib, readers, is_compiled))
            else:
                reason = f"it is in the body of {owner_of(gm, name)}"
                report.extend(left_alone(reason, child.graph))

        def attempt(source: fx.Graph, refused: Refused) -> tuple[fx.Graph, Report]:
            settings = (deterministic, min_mib, outside, is_compiled)
            while True:
                graph = copied(source)
                left, late = _rewrite_graph(gm, graph, refused, *settings)
                if not late:
                    return graph, left
                refused = {**refused, **late}

        graph, found = _checked_with(gm)(gm, attempt, verify)
        if found.num_fused:
            graph.lint()
            gm.graph = graph
            gm.recompile()
        report.extend(found)
    except Fatal:
        raise
    except Blocked as reason:
        report.extend(left_alone(str(reason), gm.graph))
    except Exception as error:
        log.warning("the analysis failed and the graph is left as it was", exc_info=True)
        report.failures.append(f"{type(error).__name__}: {error}")
    return report


def _checked_with(gm: fx.GraphModule) -> Callable[..., tuple[fx.Graph, Report]]:
    """How the rewrite of a graph is checked: DTensors are seen as whole tensors, by all ranks."""
    if not has_dtensors(gm.graph):
        return rewrite_checked
    from torch_streamkl.fx_passes.sharded.rewriting import rewrite_sharded  # needs DTensor

    return rewrite_sharded


def _rewrite_graph(
    gm: fx.GraphModule,
    graph: fx.Graph,
    refused: Refused,
    deterministic: bool,
    min_mib: float | None,
    outside: Readers,
    is_compiled: bool,
) -> tuple[Report, dict[str, str]]:
    """The report, and sites that have to stay after all: the graph is of no use then."""
    report = Report()
    reason = obstacle(graph)
    if reason:
        return left_alone(reason, graph), {}
    region = find_region(graph)
    if region is None:
        return report, {}
    try:
        trace = trace_region(gm, region)
    except Blocked as blocked:
        return left_alone(str(blocked), graph), {}
    recognised = Recogniser(trace)
    aliases = Aliases(graph, region)
    found = divergence_sites(trace, recognised)
    candidates, plans = find_candidates(trace, recognised.values)
    if not found and not candidates:
        return report, {}
    unfused = without_candidate(found, candidates)
    path = [*(c.inner for c in candidates), *unfused]
    sizes = {
        n: inner
        for n, inner in quadratic_nodes(trace, recognised, path).items()
        if not is_view(n) and not _is_scalar(n)
    }
    unused = {n for n in region.nodes if not n.users}
    views = {n for n in graph.nodes if is_view(n)}
    kept: list[str] = []
    fused: list[tuple[Candidate, Site]] = []
    late: dict[str, list[LateWrite]] = {}
    mode, selections = fake_mode_of(region), Selections(symbols_of_counts(recognised))

    def builder(before: fx.Node) -> Builder:
        return Builder(before, mode, selections)

    for candidate in candidates:
        left = _left(candidate, min_mib)
        if left is not None:
            report.sites.append(left)
            continue
        build = builder(candidate.node)
        site = _fuse(candidate, build, trace, recognised, aliases, refused, outside, late)
        if site.fused:
            fused.append((candidate, site))
        else:
            report.sites.append(site)
    reread_counts(sizes, trace, recognised, selections, builder)
    if fused:
        shapes_as_sizes(region, sizes, builder)
    removed = remove_dead(graph, region.nodes, unused, views)
    if fused:
        values = recognised.values
        kept = replace_attention(graph, trace, values, aliases, builder, refused, min_mib)
        report.notes += share_labels(graph, trace, recognised, builder)
        sum_in_forward(graph, builder)
        removed += remove_dead(graph, region.nodes, unused, views)
    read_again = read_after_writes(graph, late)
    if read_again:
        return report, read_again
    saved = sum(num_bytes(n) for n in removed if n in sizes)
    if not deterministic:
        sum_in_any_order(graph)
    runs = how_sites_run(graph, mode, is_compiled)
    for candidate, site in fused:
        share = saved // len(fused)
        how = runs.get(candidate.node.name, "")
        report.sites.append(replace(site, quadratic_bytes_saved=share, runs=how))
    report.sites += unfused_sites(unfused, trace, recognised, plans)
    report.remaining = large_tensors_left(graph, sizes, recognised)
    if report.remaining:  # else it is attention whose maps nobody distils
        report.notes += kept
    return report, {}


def _fuse(
    candidate: Candidate,
    build: Builder,
    trace: Trace,
    recognised: Recogniser,
    aliases: Aliases,
    refused: Refused,
    outside: Readers,
    late: dict[str, list[LateWrite]],
) -> Site:
    """Insert the operators of one site and move its users over, or leave everything as it was.

    ``late`` gets what is written behind the site, of what its operators read.
    """
    node = candidate.node
    location, code = location_of(node)
    kind, form = describe(candidate.plan)
    value = example(node)
    assert isinstance(value, Tensor)
    try:
        with build.undone_if_blocked():
            if node.name in refused:
                raise Blocked(refused[node.name])
            elements = candidate.plan.rows.elements
            check_nan_readers(node, candidate.inner, elements, recognised.values, outside)
            replacement = emit(build, candidate.plan, value, trace.outer)
            late[node.name] = aliases.check(build.added, build.selecting, before=node)
            mark_site(build.added, node.name)
    except Blocked as reason:
        remedy = remedy_for(str(reason))
        return Site(False, kind, form, str(reason), location, code, remedy=remedy, node=node.name)
    node.replace_all_uses_with(replacement)
    return Site(True, kind, form, "", location, code, node=node.name)


def _left(candidate: Candidate, min_mib: float | None) -> Site | None:
    """The site of a divergence that is too small to be worth an operator."""
    value = example(candidate.node)
    assert isinstance(value, Tensor)
    size = why_left(candidate, least_mib(value.device.type, min_mib))
    if not size:
        return None
    kind, form = describe(candidate.plan)
    place = location_of(candidate.node)
    return Site(False, kind, form, "", *place, node=candidate.node.name, left=size)


def _is_scalar(node: fx.Node) -> bool:
    """A loss that is derived from scores is as little quadratic as any other number."""
    value = example(node)
    return isinstance(value, Tensor) and value.dim() == 0
