"""Rewrites a graph of DTensors: as whole tensors, agreed on by all ranks, and restored."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from torch_streamkl.fx_passes.dtensors.agreement import Agreement
from torch_streamkl.fx_passes.dtensors.restore import DoesNotFit, Restore
from torch_streamkl.fx_passes.dtensors.unshard import whole_graph
from torch_streamkl.fx_passes.fx_utils.fake_modes import fake_mode_of
from torch_streamkl.fx_passes.reporting.execution import SITE
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.validation.check import PASSED
from torch_streamkl.fx_passes.validation.options import CheckOptions
from torch_streamkl.fx_passes.validation.refusal import Attempt, Refused, rewrite_checked

log = logging.getLogger("torch_streamkl.sharded")


def rewrite_sharded(
    gm: fx.GraphModule,
    attempt: Attempt,
    options: CheckOptions,
) -> tuple[fx.Graph, Report]:
    """Returns the rewritten graph with the losses that passed and fit, and the report of all.

    Checks run on whole tensors, on every rank by itself.
    """
    agreement = Agreement(gm.graph)
    with agreement.sharing_failures():
        whole = whole_graph(gm.graph)
        unfit: dict[str, str] = {}
        latest = whole

        def attempted(source: fx.Graph, refused: Refused) -> tuple[fx.Graph, Report]:
            nonlocal latest
            latest, report = attempt(source, {**unfit, **refused})
            return latest, report

        def agreed(sites: Sequence[str], refused: Refused) -> Mapping[str, str]:
            return agreement.refusals([repr(options), *sites, *_calls(latest)], refused)

        while True:
            graph, report = rewrite_checked(
                gm,
                attempted,
                options,
                original=whole,
                agree=agreed,
            )
            fused = frozenset(s.node for s in report.sites if s.fused)
            if not fused:
                return graph, report
            back = Restore(gm.graph, whole, graph, fake_mode_of(gm.graph.nodes))
            new: dict[str, str] = {}
            try:
                back.run()
            except DoesNotFit as reason:
                log.info("%s: %s", sorted(reason.sites), reason, exc_info=True)
                names = (reason.sites or fused) - unfit.keys() or fused - unfit.keys()
                if not names:
                    raise
                new = dict.fromkeys(names, str(reason))
            new = agreement.refusals(["put back"], new)
            if not new:
                agreement.is_settled = True
                report.sites = [_with_ranks(site, back.how) for site in report.sites]
                return graph, report
            unfit |= new


def _calls(graph: fx.Graph) -> list[str]:
    """Describes the calls of our operators with their options, which ranks must have in common."""
    calls = [n for n in graph.nodes if SITE in n.meta]
    return [f"{n.meta[SITE]} {n.target} {n.args} {n.kwargs}" for n in calls]


def _with_ranks(site: Site, how: Mapping[str, str]) -> Site:
    if site.node not in how:
        return site
    check = f"{site.check}, as whole tensors" if site.check == PASSED else site.check
    return replace(site, runs="; ".join(filter(None, (site.runs, how[site.node]))), check=check)
