"""Defines rewrite(gm): replaces every loss found in a Dynamo graph by a streaming operator.

`rewrite_once` calls the stages, each of which gets the results of earlier ones: capture ->
reading -> closed_forms -> planning -> lowering (fusing.py) -> passes -> reporting.
`rewrite_checked` compares what it made with the user's code (validation/), and begins again
without the losses that differ. A graph of DTensors goes through both as one of whole tensors
(dtensors/). The work is done on a copy of the graph, which replaces the original only if
everything succeeds: a program that compiles without the rewrite compiles with it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.aliases import Aliases
from torch_streamkl.fx_passes.capture.preconditions import why_bodies_are_unsupported
from torch_streamkl.fx_passes.capture.region import has_seeds
from torch_streamkl.fx_passes.capture.retrace import capture
from torch_streamkl.fx_passes.closed_forms.earliest import find_divergences, product_types
from torch_streamkl.fx_passes.closed_forms.row_sites import operands_in
from torch_streamkl.fx_passes.fusing import Fused, Fusing, Inserting, read_after_writes
from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder, Selections
from torch_streamkl.fx_passes.fx_utils.copies import copied
from torch_streamkl.fx_passes.fx_utils.dead_code import remove_dead, remove_unread
from torch_streamkl.fx_passes.fx_utils.dtensors import has_dtensors
from torch_streamkl.fx_passes.fx_utils.errors import Agree, Fatal, Refused, Unsupported
from torch_streamkl.fx_passes.fx_utils.fake_modes import fake_mode_of
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_view, location_of, users_of_body
from torch_streamkl.fx_passes.lowering.sites import sum_in_any_order
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.passes.forbid_double_backward import refuse_second_derivatives
from torch_streamkl.fx_passes.passes.listed_positions import lists_as_tensors
from torch_streamkl.fx_passes.passes.loss_sum import sum_in_forward
from torch_streamkl.fx_passes.passes.row_sums import sum_rows_in_forward
from torch_streamkl.fx_passes.passes.sdpa_fusion import replace_attention
from torch_streamkl.fx_passes.passes.selected_counts import masks_of_counts, reread_counts
from torch_streamkl.fx_passes.passes.shape_reads import shapes_as_sizes
from torch_streamkl.fx_passes.passes.share_cross_entropy import share_cross_entropy
from torch_streamkl.fx_passes.planning.logits_that_stay import computed_twice
from torch_streamkl.fx_passes.planning.losses import Losses
from torch_streamkl.fx_passes.planning.readers import NO_READERS, Readers, readers_behind
from torch_streamkl.fx_passes.planning.row_plans import RowPlanner, may_have_programs
from torch_streamkl.fx_passes.reading.reader import read_trace
from torch_streamkl.fx_passes.reading.registry import names_of_rules
from torch_streamkl.fx_passes.reporting.divergence_sites import divergence_sites
from torch_streamkl.fx_passes.reporting.execution import how_sites_run, shared_with
from torch_streamkl.fx_passes.reporting.refusals import Refusals
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.reporting.score_tensors import (
    large_tensors_left,
    operands_of_calls,
    savings_of,
    score_sized_nodes,
)
from torch_streamkl.fx_passes.reporting.text import shown
from torch_streamkl.fx_passes.reporting.unfused import (
    not_fused,
    reasons_of_programs,
    too_large,
    unfused_sites,
    with_readers,
)
from torch_streamkl.fx_passes.validation.check import FAILED, check, refused_by, with_verdict
from torch_streamkl.fx_passes.validation.options import CheckOptions
from torch_streamkl.program.fresh_axes import begin_analysis

log = logging.getLogger("torch_streamkl.rewrite")
EVERYTHING = RewriteOptions(min_mib=0)  # whatever its size


@dataclass(frozen=True)
class Given:
    """Holds what the rewrite of a module is given, besides its graph."""

    owner: fx.GraphModule
    options: RewriteOptions
    outside: Readers
    is_compiled: bool
    checks: CheckOptions


# ----------------------------------------------------------------------------- one module


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
        unsupported = why_bodies_are_unsupported(gm.graph)
        for name, child in gm.named_children():
            if not isinstance(child, fx.GraphModule) or _has_nothing_to_find(child):
                continue
            if not unsupported and _is_plain_body(gm, name):
                readers = readers_behind(users_of_body(gm, name), outside)
                report.extend(rewrite(child, options, version, readers, is_compiled))
            else:
                reason = unsupported or f"it is in {_owner_of(gm, name)}"
                report.extend(not_fused(reason, child.graph, is_body=True))

        given = Given(gm, options, outside, is_compiled, CheckOptions.of(options, version))
        if has_dtensors(gm.graph):  # which row programs do not run on
            from torch_streamkl.fx_passes.dtensors.rewriting import rewrite_sharded

            given = replace(given, options=replace(options, row_programs=False))
            checked = functools.partial(rewrite_checked, given)
            graph, found = rewrite_sharded(gm.graph, given.checks, checked)
        else:
            graph, found = rewrite_checked(given, gm.graph)
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


def _is_plain_body(gm: fx.GraphModule, name: str) -> bool:
    """Whether a body runs as it is: checkpoints do; autograd functions and vmap do not."""
    users = users_of_body(gm, name)
    return (
        bool(users)
        and all("checkpoint" in str(u.target) or "wrap" in str(u.target) for u in users)
        and not any("autograd_function" in str(u.target) for u in users)
    )


def _owner_of(gm: fx.GraphModule, name: str) -> str:
    """The higher-order operator that runs a body."""
    users = users_of_body(gm, name)
    name = str(users[0].target) if users else "another operator"
    return "a custom autograd.Function" if "autograd_function" in name else f"the body of {name}"


def _has_nothing_to_find(body: fx.GraphModule) -> bool:
    """Whether a subgraph cannot hold a loss, such as one that gathers a parameter for FSDP."""
    subgraphs = [x for x in body.children() if isinstance(x, fx.GraphModule)]
    return not has_seeds(body.graph) and all(map(_has_nothing_to_find, subgraphs))


# ----------------------------------------------------------------------------- one graph


def _alone(graph: fx.Graph, sites: Sequence[str], refused: Refused) -> Refused:
    return refused


def rewrite_checked(
    given: Given, original: fx.Graph, unfit: Refused | None = None, agree: Agree = _alone
) -> tuple[fx.Graph, Report]:
    """Returns the rewritten graph with the losses that passed, and the report of all.

    ``unfit`` are losses that are not tried. ``agree`` adds what other ranks refuse.
    """
    refused: dict[str, str] = {}
    late: dict[str, str] = {}  # losses that read a tensor after a write, or are not worth it
    losses: dict[str, Site] = {}  # others are attention, or reads of sizes
    while True:
        graph = copied(original)
        report, found = rewrite_once(given, graph, {**(unfit or {}), **refused, **late})
        if found:
            assert not late.items() >= found.items(), f"refused in vain: {found}"  # without end
            late.update(found)
            continue
        is_changed = bool(report.num_fused)
        verdicts = check(original, graph, given.owner, given.checks) if is_changed else []
        losses |= {site.node: site for site in report.sites}
        wrong: Refused = refused_by(verdicts, given.checks)
        if report.sites:
            wrong = agree(graph, [site.node for site in report.sites if site.fused], wrong)
        if not wrong:
            report.sites = [with_verdict(site, verdicts) for site in report.sites]
            _report_refused(report, original, refused, losses)
            return graph, report
        new = {node: reason for node, reason in wrong.items() if node not in refused}
        for reason in new.values():
            log.warning("%s", reason)
        if not new:  # refusing did not help: nothing is rewritten
            new = {s.node: next(iter(wrong.values())) for s in report.sites if s.fused}
        refused.update(new)
        late.clear()  # which operator a loss becomes depends on the others


def rewrite_once(
    given: Given, graph: fx.Graph, refused: Refused
) -> tuple[Report, Mapping[str, str]]:
    """Rewrites a graph in place, by all stages in their order.

    Returns the report, and losses to refuse. If there are any, discard this graph, and begin
    again without them.
    """
    begin_analysis()
    if not has_dtensors(given.owner.graph):  # where nodes of the user's are put back by name
        remove_unread(graph, names_of_rules())
    lists_as_tensors(graph)
    captured = capture(given.owner, graph)
    if isinstance(captured, str):
        return (not_fused(captured, graph) if captured else Report()), {}
    trace, region = captured
    reading = read_trace(trace)
    sites = divergence_sites(trace, reading)
    divergences, types = find_divergences(trace, reading), product_types(trace, reading)
    planner = None
    if given.options.row_programs and may_have_programs(trace):
        planner = RowPlanner(trace, reading, region, types)
    losses = Losses(trace, region, reading, divergences, types, planner)
    if losses.is_empty and not sites:
        return Report(), {}
    mode, refusals = fake_mode_of((*region.leaves, *region.nodes)), Refusals(trace, reading)
    selections = Selections(masks_of_counts(trace, reading))
    builder = functools.partial(Builder, mode=mode, selections=selections)
    unused, views = {n for n in region.nodes if not n.users}, set(filter(is_view, graph.nodes))
    min_mib, aliases = given.options.min_mib, Aliases(graph, region)

    insert = Inserting(losses, refusals, builder, aliases, refused, given.outside, min_mib)
    fused = Fusing(insert, sites).run()
    large = _score_sized(losses, refusals, fused)
    reread_counts(region.nodes, selections, builder)
    nodes = list(region.nodes)
    nodes += shapes_as_sizes(region, large, builder) if fused.sites else []
    removed, kept, notes = remove_dead(graph, nodes, unused, views), [], []
    if fused.sites:
        kept = replace_attention(graph, losses, aliases, builder, refused, min_mib)
        notes = _improve(given, graph, losses, builder)
        removed += remove_dead(graph, nodes, unused, views)
    late = read_after_writes(graph, insert.late)
    values = [inner for inner, _ in fused.sites]
    left = late or computed_twice(graph, losses, values, min_mib)
    if left:
        return Report(), left
    report = Report(list(fused.left), notes=notes)
    runs = how_sites_run(graph, mode, given.is_compiled)
    report.sites += _sites_of(graph, fused, {n: large[n] for n in removed if n in large}, runs)
    _report_unfused(report, losses, refusals, fused)
    report.remaining = large_tensors_left(graph, large, refusals, trace.outer)
    if report.remaining:  # else it is attention whose maps nobody distils
        report.notes += kept
    report.notes += too_large(reading)
    return report, {}


def _score_sized(losses: Losses, refusals: Refusals, fused: Fused) -> dict[fx.Node, fx.Node]:
    """Score-sized nodes of the user's on the paths of losses, with those of the trace."""
    operands = operands_of_calls(losses.divergences, refusals) + fused.operands
    values = [*fused.values, *fused.unfused]
    found = score_sized_nodes(losses.trace, refusals.levels, values, operands)
    found = {n: i for n, i in found.items() if not is_view(n) and not _is_scalar(n)}
    return {n: i for n, i in found.items() if not _is_of_rows(i, refusals, fused)}


def _is_scalar(node: fx.Node) -> bool:
    """Whether a value is a scalar, which has no score-sized memory even if scores lead to it."""
    value = example(node)
    return isinstance(value, Tensor) and value.dim() == 0


def _is_of_rows(inner: fx.Node, refusals: Refusals, fused: Fused) -> bool:
    """Whether a node is made of products that fused programs read as values of their rows."""
    found = refusals.levels.products_of(inner) if fused.of_rows else []
    return bool(found) and fused.of_rows.issuperset(map(operands_in, found))


def _improve(given: Given, graph: fx.Graph, losses: Losses, builder: MakeBuilder) -> list[str]:
    """Rewrites the operators that were inserted, and what reads them; returns notes."""
    notes = share_cross_entropy(graph, losses.trace, losses.reading, builder)
    sum_in_forward(graph, builder)
    sum_rows_in_forward(graph, builder)
    if not has_dtensors(given.owner.graph):  # of which AOTAutograd keeps shards
        refuse_second_derivatives(graph, builder)
    if not given.options.deterministic:
        sum_in_any_order(graph)
    return notes


# ----------------------------------------------------------------------------- the report


def _sites_of(
    graph: fx.Graph, fused: Fused, gone: Mapping[fx.Node, fx.Node], runs: Mapping[str, str]
) -> list[Site]:
    """The fused losses, with what each saves; ``gone`` are score-sized nodes that were removed."""
    savings = savings_of(gone, [inner for inner, _ in fused.sites])
    shared = shared_with(graph)
    return [
        replace(
            site,
            bytes_saved=saving.num_bytes,
            num_sharing=saving.num_sharing,
            runs=runs.get(site.node, ""),
            also=shared.get(site.node, ""),
        )
        for (_, site), saving in zip(fused.sites, savings, strict=True)
    ]


def _report_unfused(report: Report, losses: Losses, refusals: Refusals, fused: Fused) -> None:
    planner = losses.planner
    of_programs = refusals.of_programs(planner.refused) if planner else {}
    report.sites[:] = with_readers(report.sites, of_programs, losses.trace)
    report.sites += unfused_sites(fused.unfused, refusals, of_programs)
    if not report.sites and planner is not None:
        compared = refusals.places_of(planner.refused, planner.compared())
        report.unrecognized += reasons_of_programs(refusals, of_programs, compared)


def _report_refused(
    report: Report, original: fx.Graph, refused: Refused, losses: Mapping[str, Site]
) -> None:
    """Adds what is as the user wrote it because its check failed.

    ``losses`` are all sites, as they were last, by their nodes.
    """
    nodes = {n.name: n for n in original.nodes}
    known = {site.node for site in report.sites}
    for name, reason in refused.items():
        place = location_of(nodes[name])
        if name not in known and (name in losses or reason.startswith(FAILED)):
            is_loss = name not in losses or losses[name].is_loss
            report.sites.append(Site(False, "", "", reason, *place, node=name, is_loss=is_loss))
        elif name not in losses:
            report.notes.append(f"the code at {shown(place[0])} is as written: {reason}")
