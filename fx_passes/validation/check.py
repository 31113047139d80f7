"""Defines check(before, after): runs replaced code and its replacement on the same inputs.

Each rewrite is checked when it is compiled. The check compares graphs and runs them. It knows
nothing of the rules that made the replacement, so it cannot share their mistakes.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.errors import first_line
from torch_streamkl.fx_passes.fx_utils.mutation import draws_random
from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of
from torch_streamkl.fx_passes.fx_utils.sizes import bytes_text
from torch_streamkl.fx_passes.fx_utils.torch_names import later
from torch_streamkl.fx_passes.lowering.sites import SITE
from torch_streamkl.fx_passes.reporting.hints import FORCE_CHECK
from torch_streamkl.fx_passes.reporting.report import Site
from torch_streamkl.fx_passes.validation.changes import compare_graphs
from torch_streamkl.fx_passes.validation.compare import (
    Tolerance,
    difference,
    is_informative,
)
from torch_streamkl.fx_passes.validation.costs import bytes_allowed, bytes_needed, seconds_needed
from torch_streamkl.fx_passes.validation.gradient_terms import GradientTerms
from torch_streamkl.fx_passes.validation.inputs import (
    ASKS_FOR_INFINITY,
    FINITE,
    PLAIN,
    Draw,
    values_of,
)
from torch_streamkl.fx_passes.validation.isolation import isolated
from torch_streamkl.fx_passes.validation.kinds import is_leaf
from torch_streamkl.fx_passes.validation.options import CheckOptions, NotChecked
from torch_streamkl.fx_passes.validation.places import Places
from torch_streamkl.fx_passes.validation.records import (
    Fingerprint,
    passed_before,
    record_pass,
)
from torch_streamkl.fx_passes.validation.regions import (
    Region,
    find_region,
    replacement_of,
)
from torch_streamkl.fx_passes.validation.running import IN_USERS_CODE, Result, run
from torch_streamkl.fx_passes.validation.sizes import Sizes, smaller_sizes
from torch_streamkl.runtime.precompile import compiled_beside

log = logging.getLogger("torch_streamkl.validation")
FAILED = "the check failed"
PASSED = "same value and gradients on random inputs"
TIME_LIMIT_FACTOR = 2  # of the time left, before a run is stopped
NUM_ROUNDINGS = 5  # runs with other roundings, before a difference is believed


LISTENERS: list[Callable[[CheckResult], None]] = []  # who wants to hear of every verdict


@dataclass(frozen=True)
class CheckResult:
    """Holds the check's result for one replaced value."""

    node: str  # of the user's graph
    sites: frozenset[str]  # whose operators compute it now
    difference: str = ""  # empty when there is none
    not_checked: str = ""  # why it was not judged
    is_fault: bool = False  # of the check itself: it broke

    def __str__(self) -> str:
        return self.difference or (
            f"check skipped: {self.not_checked}" if self.not_checked else PASSED
        )


def refused_by(verdicts: Sequence[CheckResult], options: CheckOptions) -> dict[str, str]:
    """Returns the losses not to rewrite after the verdicts of a graph, and why."""
    found: dict[str, str] = {}
    for verdict in verdicts:
        reason = ""
        if verdict.difference:
            reason = f"{FAILED}: {verdict.difference}"
        elif verdict.not_checked and options.mode == "always":
            reason = f'streamkl.verify is "always", and it was not checked: {verdict.not_checked}'
        found |= dict.fromkeys(verdict.sites or {verdict.node}, reason) if reason else {}
    return found


def with_verdict(site: Site, verdicts: Sequence[CheckResult]) -> Site:
    """Adds to a fused loss the first check of its values that did not pass."""
    mine = [v for v in verdicts if site.node in v.sites]
    if not site.fused or not mine:
        return site
    return replace(site, check=str(min(mine, key=lambda v: not v.not_checked)))


@dataclass
class Budget:
    """Counts the seconds that the user's code may still run in checks of a graph."""

    left: float


def check(
    before: fx.Graph, after: fx.Graph, owner: fx.GraphModule, options: CheckOptions
) -> list[CheckResult]:
    """Returns a verdict for every value of ``before`` that ``after`` computes in another way."""
    graphs = compare_graphs(before, after)
    budget = Budget(math.inf if options.mode == "always" else options.max_seconds)
    sites_of = {
        change: frozenset(n.meta[SITE] for n in replacement_of(change, graphs) if SITE in n.meta)
        for change in graphs.changes
    }
    verdicts = []
    # divergences first, attention that is fused besides them later
    for change, sites in sorted(sites_of.items(), key=lambda item: not item[1]):
        reason = found = ""
        is_fault = False
        try:
            if options.mode == "never":
                raise NotChecked('streamkl.verify is "never"')
            region = find_region(change, graphs)
            found = _check_region(region, before, owner, options, budget)
        except NotChecked as limit:
            reason = str(limit)
        except torch.OutOfMemoryError:
            reason = "out of memory"
        except Exception as error:
            log.warning("a check failed to run", exc_info=True)
            reason = f"{type(error).__name__}: {first_line(error, 200)}"
            is_fault = True
        verdicts.append(CheckResult(change.before.name, sites, found, reason, is_fault))
        for listener in LISTENERS:
            listener(verdicts[-1])
    return verdicts


def _check_region(
    region: Region,
    graph: fx.Graph,
    owner: fx.GraphModule,
    options: CheckOptions,
    budget: Budget,
) -> str:
    if any(draws_random(n) for n in (*region.before, *region.after) if not is_leaf(n)):
        raise NotChecked("it draws random numbers")
    devices = {x.device for n in region.before if isinstance(x := example(n), Tensor)}
    if any(device.type == "meta" for device in devices):
        raise NotChecked("tensors on the meta device have no values")
    if passed_before(Fingerprint(region, Sizes(), owner), options):
        return ""
    sizes = _affordable_sizes(region, graph, devices, options, budget)
    fingerprint = Fingerprint(region, sizes, owner)
    if passed_before(fingerprint, options):
        return ""
    with isolated(devices):
        comparison = _Comparison(region, owner, sizes, budget, devices, options.uses_inductor)
        found = comparison.difference()
    if not found:
        record_pass(fingerprint, options)
    return found


def _affordable_sizes(
    region: Region,
    graph: fx.Graph,
    devices: set[torch.device],
    options: CheckOptions,
    budget: Budget,
) -> Sizes:
    """Returns the first sizes within the limits: those of the trace, then smaller ones."""
    refusal = ""
    for sizes in _candidates(graph):
        needed = bytes_needed(region.before, region.leaves, sizes)
        allowed = min((bytes_allowed(d, options) for d in devices), default=math.inf)
        seconds = seconds_needed(region.before, sizes)
        if needed > allowed:
            limits = f"{bytes_text(needed)} > {bytes_text(allowed)} limit. {FORCE_CHECK}"
            refusal = refusal or limits
        elif seconds > budget.left:
            limit = f"{options.max_seconds:g} s limit"
            if budget.left < options.max_seconds:
                limit = f"{max(budget.left, 0.0):.2g} s left of the graph's {limit}"
            refusal = refusal or f"~{max(seconds, 0.1):.2g} s > {limit}. {FORCE_CHECK}"
        else:
            return sizes
    raise NotChecked(refusal)


def _candidates(graph: fx.Graph) -> Iterator[Sizes]:
    yield Sizes()
    yield from smaller_sizes(graph)


class _Comparison:
    """Compares a region before and after, on one draw of its inputs."""

    def __init__(
        self,
        region: Region,
        owner: fx.GraphModule,
        sizes: Sizes,
        budget: Budget,
        devices: set[torch.device],
        uses_inductor: bool,
    ) -> None:
        self.region, self.owner, self.sizes, self.budget = region, owner, sizes, budget
        self.devices = devices
        self.uses_inductor = uses_inductor

    def difference(self) -> str:
        """Describes the difference on the first inputs that show one; empty if none do."""
        reason = ""
        for draw in PLAIN:
            try:
                return self._difference_on(draw)
            except _Inconclusive as error:
                reason = str(error)
        if any(name_of(n) in ASKS_FOR_INFINITY for n in self.region.before):
            raise NotChecked(f"{reason}, and it asks for infinite numbers")
        found = ""
        for draw in FINITE:
            try:
                found = self._difference_on(draw)
            except _Inconclusive as error:
                raise NotChecked(reason) from error
            if not found:
                break
        return found

    def _difference_on(self, draw: Draw) -> str:
        inputs = values_of(self.region.leaves, self.region.before, self.sizes, draw, self.owner)
        finite = draw.finite and any(n.target in IN_USERS_CODE for n in self.region.after)
        name = self.region.change.after.name
        compute = functools.partial(run, self.region.after, name, inputs, finite=finite)
        with compiled_beside(compute, self.devices) as is_compiling:
            naive, exact = self._run_both(inputs, draw)
            if is_compiling and self.uses_inductor:
                later("torch._inductor.compile_fx", "compile_fx")  # seconds, else after the check
        try:
            ours = compute()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"it raises {type(error).__name__}: {first_line(error, 120)}"
        slack = Tolerance()
        slack.add(naive, exact)
        found = difference(ours, naive, exact, slack)
        places = Places.of(self.region.change.before) if found else None
        if places is not None:
            slack.is_right = self._agreement(places, ours, inputs, draw)
            found = difference(ours, naive, exact, slack)
        for is_of_terms, seed in itertools.product((False, True), range(NUM_ROUNDINGS)):
            if not found:
                break
            noise = torch.Generator().manual_seed(seed)
            if is_of_terms:
                terms = GradientTerms(noise)
                slack.add_terms(self._naive(inputs, draw, wide=True, terms=terms))
            else:
                slack.add(self._naive(inputs, draw, wide=True, noise=noise), exact)
            found = difference(ours, naive, exact, slack)
        return found

    def _agreement(
        self, places: Places, ours: Result, inputs: dict[str, Any], draw: Draw
    ) -> Tensor | None:
        nodes, name = self.region.before, places.elements.name
        if name not in {n.name for n in nodes}:
            return None
        with torch.no_grad():
            given, exact = (
                run(nodes, name, inputs, wide=wide, finite=draw.finite) for wide in (False, True)
            )
        return places.agree(ours, given, exact)

    def _run_both(self, inputs: dict[str, Any], draw: Draw) -> tuple[Result, Result]:
        """Runs the user's code in its own dtypes and in float64; raises if the result says
        nothing.
        """
        try:
            naive = self._naive(inputs, draw)
            exact = self._naive(inputs, draw, wide=True)
        except (NotChecked, torch.OutOfMemoryError):
            raise
        except Exception as error:
            log.debug("a draw cannot be run", exc_info=True)
            raise _Inconclusive(
                f"the code raises {type(error).__name__} on random inputs: {first_line(error, 99)}"
            ) from error
        if not is_informative(exact):
            raise _Inconclusive("the code gives NaN on random inputs")
        return naive, exact

    def _naive(
        self,
        inputs: dict[str, Any],
        draw: Draw,
        *,
        wide: bool = False,
        noise: torch.Generator | None = None,
        terms: GradientTerms | None = None,
    ) -> Result:
        nodes, name = self.region.before, self.region.change.before.name
        start = time.perf_counter()
        # what it takes is known after a run only; a difference is confirmed whatever it takes
        is_judged = noise is None and terms is None
        deadline = start + TIME_LIMIT_FACTOR * self.budget.left if is_judged else None
        how: dict[str, Any] = {"wide": wide, "noise": noise, "finite": draw.finite, "terms": terms}
        try:
            return run(nodes, name, inputs, deadline, **how)
        finally:
            self.budget.left -= time.perf_counter() - start


class _Inconclusive(Exception):
    """Says why a run of the user's code gives nothing to compare with."""
