"""What happened to every KL-like site of a program, as a value and as a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Site:
    """One place where the program computes a divergence, or something that looks like one."""

    fused: bool
    kind: str  # "attention_kl", "linear_kl", or "" when nothing was recognised
    form: str  # what was recognised
    reason: str  # empty when fused, otherwise what blocked it
    location: str  # file:line of the user's code
    code: str = ""  # that line
    quadratic_bytes_saved: int = 0
    remedy: str = ""  # what would make it fusable
    blocked_at: str = ""  # file:line of the blocking operation, where that is another line
    runs: str = ""  # implementation on this device; for LM heads, where the gradients are made
    check: str = ""  # what came of running it beside the code that it replaces
    # why Inductor has it: the size of what could be fused, or what keeps one that is no divergence
    left: str = ""
    node: str = field(default="", compare=False)  # the replaced value's name in the graph


@dataclass(frozen=True)
class Remaining:
    """A tensor of queries x keys or tokens x vocabulary that the compiled program still makes."""

    name: str
    shape: tuple[object, ...]
    location: str
    reason: str
    cause: str = ""  # why nothing could take its place, where that is known


@dataclass(frozen=True)
class Outside:
    """Logits or an attention map that a compiled graph returns to code that is not compiled."""

    what: str  # "logits" or "attention map"
    shape: tuple[object, ...]
    num_bytes: int
    location: str


@dataclass
class Report:
    """Every site of a program, and what quadratic tensors are left."""

    sites: list[Site] = field(default_factory=list)
    remaining: list[Remaining] = field(default_factory=list)
    failures: list[str] = field(
        default_factory=list
    )  # exceptions in the analysis; the graph was left alone
    outside: list[Outside] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what else keeps large tensors, and where
    not_analysed: int = 0  # graphs with sites that are left alone as a whole

    @property
    def num_fused(self) -> int:
        return sum(site.fused for site in self.sites)

    @property
    def num_unfused(self) -> int:
        """Divergences that stay as they are for another reason than their size."""
        return sum(not (site.fused or site.left) for site in self.sites)

    @property
    def remaining_quadratic(self) -> int:
        return len(self.remaining)

    @property
    def quadratic_bytes_saved(self) -> int:
        return sum(site.quadratic_bytes_saved for site in self.sites)

    def extend(self, other: Report) -> None:
        self.sites += other.sites
        self.remaining += other.remaining
        self.failures += other.failures
        self.outside += other.outside
        self.notes += other.notes
        self.not_analysed += other.not_analysed

    def __str__(self) -> str:
        head = f"streamkl: {self.num_fused} of {len(self.sites)} KL sites fused"
        if self.quadratic_bytes_saved:
            head += f", {_bytes(self.quadratic_bytes_saved)} of quadratic tensors not made"
        lines = [head]
        for index, (site, count) in enumerate(_alike(self.sites), 1):
            lines += [f"{index:>3}. {line}" if i == 0 else line for i, line in _table(site, count)]
        if self.remaining:
            lines.append(f"{remaining_text(len(self.remaining))}:")
            for x, count in _alike([replace(x, name="") for x in self.remaining]):
                shape = " x ".join(str(s) for s in x.shape)
                times = f"{count} of " if count > 1 else ""
                why = "; ".join(filter(None, (x.reason, x.cause)))
                lines.append(f"     {times}[{shape}] {_shown(x.location)}: {why}")
        elif self.num_fused and not (self.not_analysed or self.failures):
            lines.append("No quadratic tensor remains on the distillation path.")
        lines += _leaving(self.outside)
        lines += [f"note: {note}" for note, _ in _alike(self.notes)]
        if self.not_analysed:
            lines.append(f"{_graphs(self.not_analysed)} not analysed: what remains is not known.")
        lines += [f"analysis failed, graph left alone: {failure}" for failure in self.failures]
        return "\n".join(lines)


def _table(site: Site, count: int) -> Iterator[tuple[int, str]]:
    """The lines of a site that occurs ``count`` times, such as in every layer."""
    verdict = "fused" if site.fused else "left" if site.left else "not fused"
    verdict += f" {count}x" if count > 1 else ""
    rows = [("code", site.code), ("form", f"{site.kind}: {site.form}" if site.form else "")]
    if site.fused:
        rows += [("runs", site.runs), ("check", site.check)]
        each = " each" if count > 1 else ""
        rows.append(("saved", _bytes(site.quadratic_bytes_saved) + each))
    elif site.left:
        rows.append(("runs", f"left to Inductor: {site.left}"))
    else:
        where = f" ({_shown(site.blocked_at)})" if site.blocked_at else ""
        rows.append(("blocked", site.reason + where))
    rows.append(("remedy", site.remedy))
    yield 0, f"{verdict:<14}{_shown(site.location)}"
    yield from enumerate((f"     {name:<9} {text}" for name, text in rows if text), 1)


def _leaving(outside: Sequence[Outside]) -> Iterator[str]:
    """A loss on these is not fused, and nobody else would say so."""
    if outside:
        yield (
            "Returned to code that is not compiled, where a distillation loss of them is not "
            "fused: compile what computes the loss, such as compute_loss"
        )
    for x, count in _alike(outside):
        shape = " x ".join(str(s) for s in x.shape)
        times = f"{count} of " if count > 1 else ""
        yield f"     {times}{x.what} [{shape}], {_bytes(x.num_bytes)} {_shown(x.location)}"


def _alike(items: Sequence[Item]) -> list[tuple[Item, int]]:
    """Equal items once, in order of appearance, with their number."""
    return list(Counter(items).items())


def _graphs(count: int) -> str:
    return "1 graph was" if count == 1 else f"{count} graphs were"


def _shown(location: str) -> str:
    """A location relative to the working directory when it is below it."""
    return location.removeprefix(os.getcwd() + os.sep)


def _bytes(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def remaining_text(count: int) -> str:
    """How many quadratic tensors remain, as a sentence without its end."""
    return "1 quadratic tensor remains" if count == 1 else f"{count} quadratic tensors remain"
