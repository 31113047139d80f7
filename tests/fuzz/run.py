"""Many programs, one after the other: how many fuse, which are wrong, which rules were met."""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz.grammar import Grammar
from tests.fuzz.judge import Coverage, Invalid, Verdict, is_valid, judge
from tests.fuzz.shrink import shrink
from tests.fuzz.tree import Program

CHUNK = 20
DRAWS = 50  # programs that are drawn for a seed until eager runs one
FUSED, LEFT_ALONE, NO_SITE, WRONG = "fused", "not fused", "no site", "wrong"


def program(seed: int) -> Program:
    """The program of a seed: the first that eager runs."""
    for i in range(DRAWS):
        drawn = Grammar(seed * DRAWS + i).program()
        if is_valid(drawn):
            return drawn
    raise AssertionError(f"eager runs none of {DRAWS} programs of seed {seed}")


@dataclass(frozen=True)
class Failure:
    """A wrong program as it was drawn and as small as it gets."""

    seed: int
    drawn: str
    difference: str
    shrunk: str
    of_shrunk: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.of_shrunk}\n{self.shrunk}"


@dataclass
class Outcome:
    """What became of some programs."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)

    def add(self, other: Outcome) -> None:
        self.counts += other.counts
        self.reasons += other.reasons
        self.failures += other.failures
        self.coverage.add(other.coverage)

    def summary(self) -> str:
        total = max(1, self.counts.total())
        parts = [
            f"{kind} {self.counts[kind]} ({self.counts[kind] / total:.0%})"
            for kind in (FUSED, LEFT_ALONE, NO_SITE, WRONG)
        ]
        return f"{self.counts.total()} programs: " + ", ".join(parts)


def fuzz(seeds: Iterable[int], options: dict[str, Any], *, shrinks: bool = True) -> Outcome:
    """Judge the programs of some seeds in this process."""
    outcome = Outcome()
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            with outcome.coverage.counted():
                drawn = program(seed)
                try:
                    verdict = judge(drawn, **options)
                except Invalid as error:  # torch.compile does not run it, with us or without
                    verdict = Verdict("", reasons=(str(error)[:80],))
            outcome.counts[_kind(verdict)] += 1
            outcome.reasons.update(verdict.reasons)
            if verdict.difference:
                outcome.failures.append(_failure(seed, drawn, verdict, options, shrinks))
    return outcome


@contextmanager
def _quiet() -> Iterator[None]:
    """Without our warnings, which other tests of this process read."""
    logger = logging.getLogger("torch_streamkl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _kind(verdict: Verdict) -> str:
    if verdict.difference:
        return WRONG
    return FUSED if verdict.num_fused else LEFT_ALONE if verdict.num_sites else NO_SITE


def _failure(
    seed: int, drawn: Program, verdict: Verdict, options: dict[str, Any], shrinks: bool
) -> Failure:
    way = _way(verdict)
    shrunk, last = drawn, verdict

    def fails(smaller: Program) -> bool:
        nonlocal last
        try:
            found = judge(smaller, **options)
        except Invalid:
            return False
        if found.difference and _way(found) == way:
            last = found
            return True
        return False

    if shrinks:
        shrunk = shrink(drawn, fails)
    return Failure(seed, drawn.describe(), verdict.difference, shrunk.describe(), last.difference)


def _way(verdict: Verdict) -> str:
    """How a program fails: it raises, the analysis fails, or a number is wrong."""
    for way in ("runs -> ", "the analysis fails"):
        if verdict.difference.startswith(way):
            return way + verdict.difference.partition(":")[0]
    return "value"


def chunks(first: int, count: int) -> Iterator[range]:
    for start in range(first, first + count, CHUNK):
        yield range(start, min(start + CHUNK, first + count))


def outcomes(
    first: int, count: int, jobs: int, options: dict[str, Any], *, shrinks: bool = True
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of chunks of programs, with their numbers, in this process or in several."""
    if jobs == 1:
        for part in chunks(first, count):
            yield len(part), fuzz(part, options, shrinks=shrinks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        parts = [*chunks(first, count)]
        tasks = [pool.submit(fuzz, part, options, shrinks=shrinks) for part in parts]
        for part, task in zip(parts, tasks, strict=True):
            yield len(part), task.result()


def _one_thread() -> None:
    torch.set_num_threads(1)
