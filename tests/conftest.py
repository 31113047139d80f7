"""What every test starts from: the same inputs in every run, so that a failure can be repeated.

A replacement whose check fails is an error of every test that does not say that it expects one.
"""

import os
import re
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from hypothesis import settings

from tests.support import covering, durations, quick, slow
from torch_streamkl import checks
from torch_streamkl.fx_passes.validation.check import LISTENERS, CheckResult
from torch_streamkl.rows import op

settings.register_profile("streamkl", derandomize=True, deadline=None)
settings.load_profile("streamkl")

quick.guards_are_not_timed()
quick.nothing_is_traced()
quick.devices_that_are_not_here_have_no_seed()
quick.compilations_collect_no_garbage()
quick.sites_are_fused_whatever_their_size()
quick.instruction_sets_are_not_tried_out()
quick.inductor_writes_scalar_code()
quick.what_stays_is_no_garbage()

DESELECTED = pytest.StashKey[Counter[str]]()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what cannot run here, and puts long tests first.

    A skip then says something: what needs another machine is a count in the summary instead.
    """
    slow.mark(items)
    covering.mark_slow(items)
    reasons = {item: covering.reason_not_to_run(item) for item in items}
    missing = [item for item in items if reasons[item]]
    config.stash[DESELECTED] = Counter(str(reasons[item]) for item in missing)
    if missing:
        config.hook.pytest_deselected(items=missing)
    items[:] = durations.longest_first([item for item in items if not reasons[item]])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Appends a test's CPU seconds to the file that STREAMKL_DURATIONS names, if it does."""
    before = durations.used()
    try:
        return (yield)
    finally:
        if path := os.environ.get("STREAMKL_DURATIONS"):
            with Path(path).open("a") as file:
                file.write(f"{durations.used() - before:.2f}\t{item.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that prints what it deselected."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = dict(session.config.stash[DESELECTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker collects all tests, so the count of any one is the count."""
    told = getattr(node, "workeroutput", {}).get("deselected", {})
    node.config.stash[DESELECTED] = Counter(told)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Inputs that a module makes when it is imported depend on no module before it."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which libraries are missing, and how many tests wait for each."""
    missing: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        found = re.search(r"([\w.]+) is not installed", str(report.longrepr))
        if found is not None:
            missing[found[1]] += 1
    for name, count in sorted(missing.items()):
        terminalreporter.write_line(f"{name} is not installed: {count} tests of it were skipped")
    deselected = terminalreporter.config.stash.get(DESELECTED, Counter())
    for reason, count in sorted(deselected.items()):
        terminalreporter.write_line(f"deselected, {reason}: {count} tests")


@pytest.fixture(autouse=True, scope="module")
def _what_stays_is_no_garbage() -> None:
    quick.what_stays_is_no_garbage()


@pytest.fixture(autouse=True)
def _vectorized(request: pytest.FixtureRequest) -> Iterator[None]:
    """Inductor writes loops with vector instructions in tests with this mark."""
    if request.node.get_closest_marker("vectorized") is None:
        yield
        return
    with torch._inductor.config.patch({"cpp.simdlen": None}):
        yield


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _row_programs_are_not_repeated() -> None:
    """A test that changes how they are computed meets no launches that another one recorded."""
    op._calls.clear()


@pytest.fixture(autouse=True)
def _nothing_is_recorded() -> None:
    """Launches that an earlier test had recorded would pass by what this one replaces."""
    checks._verdicts.clear()


@pytest.fixture(autouse=True)
def failed_checks(request: pytest.FixtureRequest) -> Iterator[list[CheckResult]]:
    """The checks that failed or broke; empty after a test without ``expects_failed_checks``."""
    failed: list[CheckResult] = []

    def listen(verdict: CheckResult) -> None:
        if verdict.difference or verdict.is_fault:
            failed.append(verdict)

    LISTENERS.append(listen)
    try:
        yield failed
    finally:
        LISTENERS.remove(listen)
    expected = request.node.get_closest_marker("expects_failed_checks") is not None
    assert expected or not failed, [f"{v.node}: {v}" for v in failed]
