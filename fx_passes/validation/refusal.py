"""Rewrites, checks, and rewrites again without the losses whose check failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import location_of
from torch_streamkl.fx_passes.reporting.report import Report, Site
from torch_streamkl.fx_passes.reporting.text import shown
from torch_streamkl.fx_passes.validation.check import CheckResult, check
from torch_streamkl.fx_passes.validation.options import CheckOptions

log = logging.getLogger("torch_streamkl.validation")
Refused = Mapping[str, str]  # nodes of the user's graph that stay as they are, and why
Agree = Callable[[Sequence[str], Refused], Mapping[str, str]]  # fused sites, refused ones

Attempt = Callable[[fx.Graph, Refused], tuple[fx.Graph, Report]]  # of a copy


FAILED = "the check failed"


def _alone(sites: Sequence[str], refused: Refused) -> Mapping[str, str]:
    return refused


def rewrite_checked(
    gm: fx.GraphModule,
    attempt: Attempt,
    options: CheckOptions,
    *,
    original: fx.Graph | None = None,
    agree: Agree = _alone,
) -> tuple[fx.Graph, Report]:
    """Returns the rewritten graph with the losses that passed, and the report of all."""
    original = original or gm.graph
    refused: dict[str, str] = {}
    losses: set[str] = set()  # others are attention, or reads of sizes
    while True:
        graph, report = attempt(original, refused)
        verdicts = check(original, graph, gm, options) if report.num_fused else []
        losses |= {site.node for site in report.sites}
        wrong = {node: reason for v in verdicts for node, reason in _refusals(v, options)}
        if report.sites:
            wrong = dict(agree([site.node for site in report.sites if site.fused], wrong))
        new = {node: reason for node, reason in wrong.items() if node not in refused}
        if not wrong:
            report.sites = [_with_verdict(site, verdicts) for site in report.sites]
            nodes = {n.name: n for n in original.nodes}
            known = {site.node for site in report.sites}
            for name, reason in refused.items():
                place = location_of(nodes[name])
                if name in losses - known or (name not in known and reason.startswith(FAILED)):
                    report.sites.append(Site(False, "", "", reason, *place, node=name))
                elif name not in losses:
                    report.notes.append(f"the code at {shown(place[0])} is as written: {reason}")
            return graph, report
        for reason in new.values():
            log.warning("%s", reason)
        if not new:  # refusing did not help: nothing is rewritten
            new = {s.node: next(iter(wrong.values())) for s in report.sites if s.fused}
        refused.update(new)


def _refusals(verdict: CheckResult, options: CheckOptions) -> list[tuple[str, str]]:
    """Lists the losses not to rewrite after a verdict, and why."""
    reason = ""
    if verdict.difference:
        reason = f"{FAILED}: {verdict.difference}"
    elif verdict.not_checked and options.mode == "always":
        reason = f'streamkl.verify is "always", and it was not checked: {verdict.not_checked}'
    return [(node, reason) for node in verdict.sites or {verdict.node}] if reason else []


def _with_verdict(site: Site, verdicts: list[CheckResult]) -> Site:
    """Adds to a fused loss the first check of its values that did not pass."""
    mine = [v for v in verdicts if site.node in v.sites]
    if not site.fused or not mine:
        return site
    return replace(site, check=str(min(mine, key=lambda v: not v.not_checked)))
