"""Rewrites one graph: finds its losses, replaces them, and reports what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.aliases import Aliases
from torch_streamkl.fx_passes.capture.retrace import capture
from torch_streamkl.fx_passes.closed_forms.row_sites import name_of as source_of
from torch_streamkl.fx_passes.fusing import Fusing
from torch_streamkl.fx_passes.fx_utils.builder import Builder, Selections
from torch_streamkl.fx_passes.fx_utils.dead_code import remove_dead
from torch_streamkl.fx_passes.fx_utils.dtensors import has_dtensors
from torch_streamkl.fx_passes.fx_utils.fake_modes import fake_mode_of
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, example, is_view, tensor_of
from torch_streamkl.fx_passes.options import RewriteOptions
from torch_streamkl.fx_passes.passes.forbid_double_backward import refuse_second_derivatives
from torch_streamkl.fx_passes.passes.listed_positions import lists_as_tensors
from torch_streamkl.fx_passes.passes.loss_sum import sum_in_forward
from torch_streamkl.fx_passes.passes.row_sums import sum_rows_in_forward
from torch_streamkl.fx_passes.passes.sdpa_fusion import replace_attention
from torch_streamkl.fx_passes.passes.selected_counts import masks_of_counts, reread_counts
from torch_streamkl.fx_passes.passes.shape_reads import shapes_as_sizes
from torch_streamkl.fx_passes.passes.share_cross_entropy import share_cross_entropy
from torch_streamkl.fx_passes.planning.divergences import Divergence
from torch_streamkl.fx_passes.planning.losses import Losses
from torch_streamkl.fx_passes.planning.profitability import why_program_is_left
from torch_streamkl.fx_passes.planning.readers import Readers
from torch_streamkl.fx_passes.planning.row_plans import ProgramPlan
from torch_streamkl.fx_passes.reporting.execution import (
    how_sites_run,
    shared_with,
    sum_in_any_order,
)
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.reporting.score_tensors import (
    large_tensors_left,
    savings_of,
    score_sized_nodes,
)
from torch_streamkl.fx_passes.reporting.unfused import (
    not_fused,
    reasons_of_programs,
    too_large,
    unfused_sites,
)
from torch_streamkl.fx_passes.validation.refusal import Refused


@dataclass(frozen=True)
class Given:
    """Holds a copy of a graph to rewrite, and how."""

    owner: fx.GraphModule
    graph: fx.Graph
    refused: Refused
    options: RewriteOptions
    outside: Readers
    is_compiled: bool


def rewrite_graph(given: Given) -> tuple[Report, dict[str, str]]:
    """Returns the report and losses to refuse; if any, discard this graph, retry without them."""
    lists_as_tensors(given.graph)
    captured = capture(given.owner, given.graph)
    if isinstance(captured, str):
        return (not_fused(captured, given.graph) if captured else Report()), {}
    losses = Losses(*captured, given.options.row_programs)
    return (Report(), {}) if losses.is_empty else _Rewriting(given, losses).run()


@dataclass
class _Rewriting:
    """Replaces the losses of one graph, and notes what the report says of them."""

    given: Given
    losses: Losses
    report: Report = field(default_factory=Report)
    fused: list[tuple[fx.Node, Site]] = field(default_factory=list)  # with nodes of the trace
    stayed: list[tuple[Divergence, Site]] = field(default_factory=list)
    handled: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        losses, graph = self.losses, self.given.graph
        region, trace, reading = losses.region, losses.trace, losses.reading
        self.mode = fake_mode_of((*region.leaves, *region.nodes))
        self.selections = Selections(masks_of_counts(trace, reading))
        aliases = Aliases(graph, region)
        given = self.given
        self.fusing = Fusing(
            losses, self.builder, aliases, given.refused, given.outside, given.options.min_mib
        )
        self.unfused = losses.unfused
        self.path = [d.inner for d in losses.divergences]
        self.operands = losses.operands()
        self.unused = {n for n in region.nodes if not n.users}
        self.views = {n for n in graph.nodes if is_view(n)}
        self.of_rows: set[object] = set()  # operands of products that programs read as tensors

    def builder(self, before: fx.Node) -> Builder:
        return Builder(before, self.mode, self.selections)

    def run(self) -> tuple[Report, dict[str, str]]:
        self._fuse()
        self.report.sites += [site for _, site in self.stayed]
        losses, levels = self.losses, self.losses.refusals.levels
        sites = [*self.path, *self.unfused]
        products = score_sized_nodes(losses.trace, levels, sites, self.operands)
        sizes = {n: i for n, i in products.items() if not is_view(n) and not _is_scalar(n)}
        sizes = {n: i for n, i in sizes.items() if not self._is_of_rows(i)}
        reread_counts(losses.region.nodes, self.selections, self.builder)
        removed, kept = self._clean(sizes)
        read_again = self.fusing.read_after_writes(self.given.graph)
        if read_again:
            return self.report, read_again
        self._report_fused(sizes, removed)
        self._report_rest(sizes, kept)
        return self.report, {}

    # ------------------------------------------------------------------------- replacing

    def _fuse(self) -> None:
        """Replaces divergences, and then what row programs compute.

        What one of those may compute as well waits for them, as does what only elements read.
        """
        planner = self.losses.planner
        waiting, sharing = self.losses.delayed(self._is_left)
        for divergence in self.losses.divergences:
            if divergence not in waiting:
                self._fuse_divergence(divergence)
        if planner is not None:
            plans = planner.find(self.handled)
            fused = [p for p in plans if self._fuse_program(p, sharing, waiting)]
            computed = {a for p in fused for o in p.outputs for a in ancestors(o.inner)}
            waiting = [d for d in waiting if not d.parts <= computed]
            self.unfused = [n for n in self.unfused if planner.reads_products(n, fused)]
            of_rows = (x for p in fused for x in p.of_rows)
            self.of_rows = {tuple(map(source_of, x.args)) for x in of_rows}
        for divergence in waiting:
            self._fuse_divergence(divergence)

    def _fuse_divergence(self, divergence: Divergence) -> None:
        site = self.fusing.divergence(divergence)
        if site.skipped:
            self.report.sites.append(site)
        elif not site.fused:
            self.stayed.append((divergence, site))
            return
        else:
            self.fused.append((divergence.inner, site))
        self.handled |= ancestors(divergence.inner)

    def _is_left(self, plan: ProgramPlan) -> bool:
        device, min_mib = tensor_of(plan.outputs[0].node).device.type, self.given.options.min_mib
        return bool(why_program_is_left(plan.form.products, device, min_mib))

    def _fuse_program(
        self, plan: ProgramPlan, sharing: Sequence[Divergence], waiting: Sequence[Divergence]
    ) -> bool:
        """Inserts a row program; returns whether it or its report takes the place of its sums."""
        inner = [o.inner for o in plan.outputs]
        if any(d.parts == set(inner) for d in sharing):
            return False  # a divergence after all
        computed = {a for n in inner for a in ancestors(n)}
        sites = self.fusing.program(plan)
        own = {d.inner: d for d in sharing}
        named = [own.get(n) for n in inner]
        sites = [
            site if d is None else self.fusing.named(site, d)
            for site, d in zip(sites, named, strict=True)
        ]
        if sites[0].reason and any(d.parts <= computed for d, _ in self.stayed):
            return False  # why the divergence stays says more
        if not sites[0].fused and any(d.parts <= computed for d in waiting):
            return False  # it is fused as a divergence, later
        is_new = computed.isdisjoint(self.losses.sites)
        if sites[0].reason and is_new and sites[0].node not in self.given.refused:
            sites = [replace(s, is_required=False) for s in sites]
        self.fused += [x for x in zip(inner, sites, strict=True) if x[1].fused]
        self.report.sites += [site for site in sites if not site.fused]
        self.path += inner
        self.operands += plan.operands
        self.unfused = [n for n in self.unfused if n not in computed]
        self.stayed = [(d, site) for d, site in self.stayed if not d.parts <= computed]
        return True

    def _is_of_rows(self, inner: fx.Node) -> bool:
        """Whether a node is made of products that fused programs read as values of their rows."""
        found = self.losses.refusals.levels.products_of(inner) if self.of_rows else []
        return bool(found) and all(tuple(map(source_of, x.args)) in self.of_rows for x in found)

    def _clean(self, sizes: dict[fx.Node, fx.Node]) -> tuple[list[fx.Node], list[str]]:
        """Runs the passes after the operators; returns what was removed, and notes."""
        graph, region, losses = self.given.graph, self.losses.region, self.losses
        nodes = list(region.nodes)
        if self.fused:
            nodes += shapes_as_sizes(region, sizes, self.builder)
        removed = remove_dead(graph, nodes, self.unused, self.views)
        if not self.fused:
            return removed, []
        kept = replace_attention(
            graph,
            losses,
            self.fusing.aliases,
            self.builder,
            self.given.refused,
            self.given.options.min_mib,
        )
        self.report.notes += share_cross_entropy(graph, losses.trace, losses.reading, self.builder)
        sum_in_forward(graph, self.builder)
        sum_rows_in_forward(graph, self.builder)
        if not has_dtensors(self.given.owner.graph):  # of which AOTAutograd keeps shards
            refuse_second_derivatives(graph, self.builder)
        return removed + remove_dead(graph, nodes, self.unused, self.views), kept

    # ------------------------------------------------------------------------- reporting

    def _report_fused(self, sizes: dict[fx.Node, fx.Node], removed: list[fx.Node]) -> None:
        graph = self.given.graph
        gone = {n: sizes[n] for n in removed if n in sizes}
        savings = savings_of(gone, [inner for inner, _ in self.fused])
        if not self.given.options.deterministic:
            sum_in_any_order(graph)
        runs = how_sites_run(graph, self.mode, self.given.is_compiled)
        shared = shared_with(graph)
        for (_, site), saving in zip(self.fused, savings, strict=True):
            site = replace(site, bytes_saved=saving.num_bytes, num_sharing=saving.num_sharing)
            how, also = runs.get(site.node, ""), shared.get(site.node, "")
            self.report.sites.append(replace(site, runs=how, also=also))

    def _report_rest(self, sizes: dict[fx.Node, fx.Node], kept: list[str]) -> None:
        losses, planner = self.losses, self.losses.planner
        of_programs = losses.refusals.of_programs(planner.refused) if planner else {}
        self.report.sites += unfused_sites(self.unfused, losses.refusals, of_programs)
        if not self.report.sites and planner is not None:
            compared = losses.refusals.places_of(planner.refused, planner.compared())
            self.report.unrecognized += reasons_of_programs(losses.trace, of_programs, compared)
        self.report.remaining = large_tensors_left(
            self.given.graph, sizes, losses.refusals, losses.trace.outer
        )
        if self.report.remaining:  # else it is attention whose maps nobody distils
            self.report.notes += kept
        self.report.notes += too_large(losses.reading)


def _is_scalar(node: fx.Node) -> bool:
    """Whether a value is a scalar, which has no score-sized memory even if scores lead to it."""
    value = example(node)
    return isinstance(value, Tensor) and value.dim() == 0
