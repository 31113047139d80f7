"""Defines rewrite(gm): replaces every loss found in a Dynamo graph by a streaming operator.

Stages: capture -> analysis -> planning -> lowering -> passes -> validation, each a folder. A graph
of DTensors goes through them as one of whole tensors (dtensors/). The work is done on a copy of
the graph, which replaces the original only if everything succeeds: a program that compiles without
the rewrite compiles with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.elements.reading import FormulaInterpreter
from torch_streamkl.fx_passes.analysis.interpreter import ScoreInterpreter
from torch_streamkl.fx_passes.analysis.sites import divergence_sites, score_sized_nodes
from torch_streamkl.fx_passes.capture.aliases import Aliases, LateWrite
from torch_streamkl.fx_passes.capture.preconditions import why_unsupported
from torch_streamkl.fx_passes.capture.region import find_region, has_seeds
from torch_streamkl.fx_passes.capture.retrace import Trace, fake_mode_of, trace_region
from torch_streamkl.fx_passes.capture.subgraphs import is_plain_body, owner_of
from torch_streamkl.fx_passes.fx_utils.builder import Builder, Selections
from torch_streamkl.fx_passes.fx_utils.copies import copied
from torch_streamkl.fx_passes.fx_utils.dead_code import remove_dead
from torch_streamkl.fx_passes.fx_utils.dtensors import has_dtensors
from torch_streamkl.fx_passes.fx_utils.errors import Fatal, Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    is_view,
    location_of,
)
from torch_streamkl.fx_passes.lowering.calls import emit
from torch_streamkl.fx_passes.lowering.row_programs import emit as emit_program
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.passes.forbid_double_backward import refuse_second_derivatives
from torch_streamkl.fx_passes.passes.late_writes import read_after_writes
from torch_streamkl.fx_passes.passes.loss_sum import sum_in_forward
from torch_streamkl.fx_passes.passes.row_counts import reread_counts, symbols_of_counts
from torch_streamkl.fx_passes.passes.row_sums import sum_rows_in_forward
from torch_streamkl.fx_passes.passes.sdpa_fusion import replace_attention
from torch_streamkl.fx_passes.passes.shape_reads import shapes_as_sizes
from torch_streamkl.fx_passes.passes.share_cross_entropy import share_cross_entropy
from torch_streamkl.fx_passes.planning.candidates import (
    Candidate,
    find_candidates,
    without_candidate,
)
from torch_streamkl.fx_passes.planning.nan_readers import (
    NO_READERS,
    Readers,
    check_masked_logarithms,
    check_nan_readers,
    readers_of_body,
)
from torch_streamkl.fx_passes.planning.profitability import why_left, why_program_is_left
from torch_streamkl.fx_passes.planning.row_plan import RowPlan
from torch_streamkl.fx_passes.planning.row_programs import (
    find_programs,
    first_of,
    may_have_programs,
    needs_no_mask,
    sharing_products,
)
from torch_streamkl.fx_passes.planning.row_readers import (
    check_readers_of_program,
    reads_products,
)
from torch_streamkl.fx_passes.reporting.describe import (
    describe,
    describe_program,
    roles_of,
    warning_of,
)
from torch_streamkl.fx_passes.reporting.execution import (
    how_sites_run,
    mark_site,
    shared_with,
    sum_in_any_order,
)
from torch_streamkl.fx_passes.reporting.hints import FORCE_SIZE, hint_for
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.reporting.savings import savings_of
from torch_streamkl.fx_passes.reporting.sites import (
    not_fused,
    reasons_of_programs,
    unfused_sites,
)
from torch_streamkl.fx_passes.reporting.unfused_memory import large_tensors_left
from torch_streamkl.fx_passes.validation.options import CheckOptions
from torch_streamkl.fx_passes.validation.refusal import Refused, rewrite_checked

log = logging.getLogger("torch_streamkl.rewrite")
EVERYTHING = RewriteOptions(min_mib=0)  # whatever its size


def rewrite(
    gm: fx.GraphModule,
    options: RewriteOptions = EVERYTHING,
    version: str = "",
    outside: Readers = NO_READERS,
    is_compiled: bool = True,
) -> Report:
    """Rewrites a Dynamo graph module in place, and reports every loss.

    ``version`` is that of the sources, under which passed checks are recorded; none are without.
    ``outside`` is what reads the module's results where it is the body of a checkpoint.
    ``is_compiled`` says whether Inductor compiles what is left: the report depends on it.
    """
    report = Report()
    try:
        for name, child in gm.named_children():
            if not isinstance(child, fx.GraphModule) or _has_nothing_to_find(child):
                continue
            if is_plain_body(gm, name):
                readers = readers_of_body(gm, name, outside)
                report.extend(rewrite(child, options, version, readers, is_compiled))
            else:
                reason = f"it is in {owner_of(gm, name)}"
                report.extend(not_fused(reason, child.graph, is_body=True))

        if has_dtensors(gm.graph):  # which row programs do not run on
            options = replace(options, row_programs=False)

        def attempt(source: fx.Graph, refused: Refused) -> tuple[fx.Graph, Report]:
            while True:
                graph = copied(source)
                left, late = _rewrite_graph(gm, graph, refused, options, outside, is_compiled)
                if not late:
                    return graph, left
                refused = {**refused, **late}

        graph, found = _checked_with(gm)(gm, attempt, CheckOptions.of(options, version))
        if found.num_fused:
            graph.lint()
            gm.graph = graph
            gm.recompile()
        report.extend(found)
    except Fatal:
        raise
    except Unsupported as reason:
        report.extend(not_fused(str(reason), gm.graph))
    except Exception as error:
        log.warning("the analysis failed and the graph is left as it was", exc_info=True)
        report.failures.append(f"{type(error).__name__}: {error}")
    return report


def _has_nothing_to_find(body: fx.GraphModule) -> bool:
    """Whether a subgraph cannot hold a loss, such as one that gathers a parameter for FSDP."""
    subgraphs = [x for x in body.children() if isinstance(x, fx.GraphModule)]
    return not has_seeds(body.graph) and all(map(_has_nothing_to_find, subgraphs))


def _checked_with(gm: fx.GraphModule) -> Callable[..., tuple[fx.Graph, Report]]:
    """Chooses how the rewrite of a graph is checked: DTensors as whole tensors, by all ranks."""
    if not has_dtensors(gm.graph):
        return rewrite_checked
    from torch_streamkl.fx_passes.dtensors.rewriting import rewrite_sharded  # needs DTensor

    return rewrite_sharded


def _rewrite_graph(
    gm: fx.GraphModule,
    graph: fx.Graph,
    refused: Refused,
    options: RewriteOptions,
    outside: Readers,
    is_compiled: bool,
) -> tuple[Report, dict[str, str]]:
    """Returns the report and losses to refuse; if any, discard this graph, retry without them."""
    report = Report()
    reason = why_unsupported(graph)
    if reason:
        return not_fused(reason, graph), {}
    region = find_region(graph)
    if region is None:
        return report, {}
    try:
        trace = trace_region(gm, region)
    except Unsupported as blocked:
        return not_fused(str(blocked), graph), {}
    recognised = ScoreInterpreter(trace)
    aliases = Aliases(graph, region)
    found = divergence_sites(trace, recognised)
    candidates, plans = find_candidates(trace, recognised.values)
    row_programs = options.row_programs and may_have_programs(trace)
    min_mib = options.min_mib
    if not found and not candidates and not row_programs:
        return report, {}
    unfused = without_candidate(found, candidates)
    path = [c.inner for c in candidates]
    operands = [
        x.node
        for c in candidates
        for part in c.plan.rows.elements.parts
        for x in (part.scores.lhs, part.scores.rhs)
    ]
    unused = {n for n in region.nodes if not n.users}
    views = {n for n in graph.nodes if is_view(n)}
    kept: list[str] = []
    fused: list[tuple[fx.Node, Site]] = []  # with their nodes of the trace
    stayed: list[tuple[Candidate, Site]] = []
    handled: set[fx.Node] = set()
    late: dict[str, list[LateWrite]] = {}
    mode, selections = fake_mode_of(region), Selections(symbols_of_counts(recognised))

    def builder(before: fx.Node) -> Builder:
        return Builder(before, mode, selections)

    def fuse(candidate: Candidate) -> None:
        left = _left(candidate, min_mib)
        if left is not None:
            report.sites.append(left)
            handled.update(ancestors(candidate.inner))
            return
        build = builder(candidate.node)
        site = _fuse(candidate, build, trace, recognised, aliases, refused, outside, late)
        if site.fused:
            fused.append((candidate.inner, site))
            handled.update(ancestors(candidate.inner))
        else:
            stayed.append((candidate, site))

    elements = FormulaInterpreter(trace, recognised) if row_programs else None
    waiting = [c for c in candidates if elements is not None and needs_no_mask(c, elements)]
    sharing: dict[fx.Node, Candidate] = {}
    if elements is not None:
        found_sharing = sharing_products(candidates, elements, trace, region, min_mib)
        sharing = {c.inner: c for c in found_sharing if c not in waiting}
        waiting = [c for c in candidates if c in waiting or c.inner in sharing]
    for candidate in candidates:
        if candidate not in waiting:
            fuse(candidate)
    if elements is not None:
        programs = find_programs(elements, trace, region, handled)
        replaced: list[RowPlan] = []
        for program in programs:
            if len(program.outputs) == 1 and program.outputs[0].inner in sharing:
                continue  # a divergence after all
            computed = {a for o in program.outputs for a in ancestors(o.inner)}
            build = builder(first_of(program))
            sites = _fuse_program(program, build, trace, aliases, refused, outside, min_mib)
            named = [sharing.get(o.inner) for o in program.outputs]
            sites = [
                site if c is None else _named(site, c, trace, recognised)
                for site, c in zip(sites, named, strict=True)
            ]
            if sites[0].reason and any(c.inner in computed for c, _ in stayed):
                continue  # why the divergence stays says more
            if not sites[0].fused and any(c.inner in computed for c in waiting):
                continue  # it is fused as a divergence, below
            if sites[0].reason and computed.isdisjoint(found) and sites[0].node not in refused:
                sites = [replace(s, is_required=False) for s in sites]
            inner = (o.inner for o in program.outputs)
            fused += [x for x in zip(inner, sites, strict=True) if x[1].fused]
            report.sites += [site for site in sites if not site.fused]
            path += [o.inner for o in program.outputs]
            operands += [x.node for dot in program.dots for x in (dot.lhs, dot.rhs)]
            replaced.append(program)
            unfused = [n for n in unfused if n not in computed]
            stayed = [(c, site) for c, site in stayed if c.inner not in computed]
            waiting = [c for c in waiting if c.inner not in computed]
        unfused = [n for n in unfused if reads_products(n, replaced)]
        for candidate in waiting:
            fuse(candidate)
    operands_of_user = dict(trace.outer)  # before later passes replace nodes
    report.sites += [site for _, site in stayed]
    products = score_sized_nodes(trace, recognised, [*path, *unfused], operands)
    sizes = {n: inner for n, inner in products.items() if not is_view(n) and not _is_scalar(n)}
    reread_counts(sizes, trace, recognised, selections, builder)
    if fused:
        shapes_as_sizes(region, sizes, builder)
    removed = remove_dead(graph, region.nodes, unused, views)
    if fused:
        values = recognised.values
        kept = replace_attention(graph, trace, values, aliases, builder, refused, min_mib)
        report.notes += share_cross_entropy(graph, trace, recognised, builder)
        sum_in_forward(graph, builder)
        sum_rows_in_forward(graph, builder)
        if not has_dtensors(gm.graph):  # of which AOTAutograd keeps shards
            refuse_second_derivatives(graph, builder)
        removed += remove_dead(graph, region.nodes, unused, views)
    read_again = read_after_writes(graph, late)
    if read_again:
        return report, read_again
    savings = savings_of({n: sizes[n] for n in removed if n in sizes}, [x for x, _ in fused])
    if not options.deterministic:
        sum_in_any_order(graph)
    runs, shared = how_sites_run(graph, mode, is_compiled), shared_with(graph)
    for (_, site), saving in zip(fused, savings, strict=True):
        how, also = runs.get(site.node, ""), shared.get(site.node, "")
        site = replace(site, bytes_saved=saving.num_bytes, num_sharing=saving.num_sharing)
        report.sites.append(replace(site, runs=how, also=also))
    of_programs = elements.reasons if elements is not None else {}
    report.sites += unfused_sites(unfused, trace, recognised, plans, of_programs)
    if not report.sites:
        report.unrecognized += reasons_of_programs(elements, trace)
    report.remaining = large_tensors_left(graph, sizes, recognised, operands_of_user)
    if report.remaining:  # else it is attention whose maps nobody distils
        report.notes += kept
    return report, {}


def _fuse(
    candidate: Candidate,
    build: Builder,
    trace: Trace,
    recognised: ScoreInterpreter,
    aliases: Aliases,
    refused: Refused,
    outside: Readers,
    late: dict[str, list[LateWrite]],
) -> Site:
    """Inserts the operators of one loss and moves its users over, or changes nothing.

    ``late`` gets what is written after the site, of what its operators read.
    """
    node = candidate.node
    location, code = location_of(node)
    kind, form = describe(candidate.plan)
    value = example(node)
    assert isinstance(value, Tensor)
    try:
        with build.undone_if_unsupported():
            if node.name in refused:
                raise Unsupported(refused[node.name])
            elements = candidate.plan.rows.elements
            check_masked_logarithms(candidate.inner, elements, recognised.values)
            check_nan_readers(node, candidate.inner, elements, recognised.values, outside)
            replacement = emit(build, candidate.plan, value, trace.outer)
            late[node.name] = aliases.check(build.added, build.selecting, before=node)
            mark_site(build.added, node.name)
    except Unsupported as reason:
        hint = hint_for(str(reason))
        return Site(False, kind, form, str(reason), location, code, hint=hint, node=node.name)
    node.replace_all_uses_with(replacement)
    warning = warning_of(candidate.plan)
    site = Site(True, kind, form, "", location, code, node=node.name, warning=warning)
    return replace(site, roles=roles_of(candidate.plan, trace, recognised.values))


def _fuse_program(
    program: RowPlan,
    build: Builder,
    trace: Trace,
    aliases: Aliases,
    refused: Refused,
    outside: Readers,
    min_mib: float | None,
) -> list[Site]:
    """Inserts one row program, or changes nothing; returns a site for each of its sums.

    All of them are known by the first one's name: they are refused together.
    """
    nodes = [o.node for o in program.outputs]
    name, form = first_of(program).name, describe_program(program)
    value = example(nodes[0])
    assert isinstance(value, Tensor)
    left = why_program_is_left(program, value.device.type, min_mib)
    try:
        with build.undone_if_unsupported():
            if name in refused:
                raise Unsupported(refused[name])
            check_readers_of_program(program, outside)
            if not left:
                replacements = emit_program(build, program, trace.outer, aliases.writes)
                aliases.check(build.added, build.selecting)
                mark_site(build.added, name)
                for node, replacement in replacements.items():
                    node.replace_all_uses_with(replacement)
        reason = ""
    except Unsupported as blocked:
        reason, left = str(blocked), ""
    is_fused = not reason and not left
    site = Site(is_fused, "row_program", form, reason, "", node=name, skipped=left)
    site = replace(site, hint=hint_for(reason) if reason else FORCE_SIZE if left else "")
    places = (location_of(node) for node in nodes)
    return [replace(site, location=location, code=code) for location, code in places]


def _named(site: Site, candidate: Candidate, trace: Trace, recognised: ScoreInterpreter) -> Site:
    """Describes a result of a program as the divergence that it is."""
    _, form = describe(candidate.plan)
    roles = roles_of(candidate.plan, trace, recognised.values)
    return replace(site, form=form, roles=roles, warning=warning_of(candidate.plan))


def _left(candidate: Candidate, min_mib: float | None) -> Site | None:
    """Returns the site of a divergence that is skipped for its size."""
    value = example(candidate.node)
    assert isinstance(value, Tensor)
    size = why_left(candidate, value.device.type, min_mib)
    if not size:
        return None
    kind, form = describe(candidate.plan)
    place = location_of(candidate.node)
    left = Site(False, kind, form, "", *place, node=candidate.node.name, skipped=size)
    return replace(left, hint=FORCE_SIZE)


def _is_scalar(node: fx.Node) -> bool:
    """Whether a value is a scalar, which has no score-sized memory even if scores lead to it."""
    value = example(node)
    return isinstance(value, Tensor) and value.dim() == 0
