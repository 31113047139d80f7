"""Rewrites a graph of DTensors: as whole tensors, agreed on by all ranks, and restored."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from torch_streamkl.fx_passes.dtensors.agreement import Agreement, with_guarded_parts
from torch_streamkl.fx_passes.dtensors.restore import DoesNotFit, Restore
from torch_streamkl.fx_passes.dtensors.unshard import whole_graph
from torch_streamkl.fx_passes.fx_utils.errors import Refused, Unsupported
from torch_streamkl.fx_passes.fx_utils.fake_modes import fake_mode_of
from torch_streamkl.fx_passes.lowering.sites import SITE
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.validation.check import PASSED
from torch_streamkl.fx_passes.validation.options import CheckOptions

log = logging.getLogger("torch_streamkl.sharded")
# of a graph, losses that are not tried, and how ranks agree (not at all, if it is left out)
RewriteChecked = Callable[..., tuple[fx.Graph, Report]]


def rewrite_sharded(
    sharded: fx.Graph,
    options: CheckOptions,
    rewrite_checked: RewriteChecked,
) -> tuple[fx.Graph, Report]:
    """Returns the rewritten graph with the losses that passed and fit, and the report of all.

    Checks run on whole tensors, on every rank by itself.
    """
    agreement, tried = Agreement(sharded), list[str]()
    with agreement.sharing_failures():
        whole = whole_graph(sharded)

        def agreed(graph: fx.Graph, sites: Sequence[str], refused: Refused) -> Refused:
            tried[:] = sites
            with_guarded_parts(sharded)
            return agreement.refusals([repr(options), *sites, *_calls(graph)], refused)

        try:
            together = functools.partial(rewrite_checked, agree=agreed)
            return _rewritten(sharded, whole, agreement, together)
        except Unsupported as reason:  # on all ranks
            if not tried:
                raise
            return sharded, _left_as_written(whole, tried, str(reason), rewrite_checked)


def _rewritten(
    sharded: fx.Graph, whole: fx.Graph, agreement: Agreement, rewrite_checked: RewriteChecked
) -> tuple[fx.Graph, Report]:
    unfit: dict[str, str] = {}
    while True:
        graph, report = rewrite_checked(whole, unfit)
        fused = frozenset(s.node for s in report.sites if s.fused)
        if not fused:
            return graph, report
        back = Restore(sharded, whole, graph, fake_mode_of(sharded.nodes))
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
            agreement.refusals(["constants", *back.alike.constants], {})
            agreement.is_settled = True
            report.sites = [_with_ranks(site, back.how) for site in report.sites]
            return graph, report
        unfit |= new


def _left_as_written(
    whole: fx.Graph, sites: Sequence[str], reason: str, rewrite_checked: RewriteChecked
) -> Report:
    """The report of a graph in which these losses stay, and what would fuse without them.

    Other ranks hear nothing of it: they have the same reason, or have left already.
    """
    refused, report, new = dict[str, str](), Report(), list(sites)
    while new:
        refused |= dict.fromkeys(new, reason)
        _, report = rewrite_checked(whole, refused)
        new = [s.node for s in report.sites if s.fused and s.node not in refused]
    return report


def _calls(graph: fx.Graph) -> list[str]:
    """Describes the calls of our operators with their options, which ranks must have in common."""
    calls = [n for n in graph.nodes if SITE in n.meta]
    return [f"{n.meta[SITE]} {n.target} {n.args} {n.kwargs}" for n in calls]


def _with_ranks(site: Site, how: Mapping[str, str]) -> Site:
    if site.node not in how:
        return site
    check = f"{site.check}, as whole tensors" if site.check == PASSED else site.check
    return replace(site, runs="; ".join(filter(None, (site.runs, how[site.node]))), check=check)
