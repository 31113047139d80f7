"""What happened to every KL-like site of a program, as a value and as a table."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


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


@dataclass(frozen=True)
class Remaining:
    """A tensor of queries x keys (or tokens x vocabulary) that the compiled program still makes."""

    name: str
    shape: tuple[object, ...]
    location: str
    reason: str


@dataclass
class Report:
    """Every site of a program, and what quadratic tensors are left."""

    sites: list[Site] = field(default_factory=list)
    remaining: list[Remaining] = field(default_factory=list)
    failures: list[str] = field(
        default_factory=list
    )  # exceptions in the analysis; the graph was left alone

    @property
    def num_fused(self) -> int:
        return sum(site.fused for site in self.sites)

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

    def __str__(self) -> str:
        lines = [f"streamkl: {self.num_fused} of {len(self.sites)} KL sites fused"]
        if self.quadratic_bytes_saved:
            lines[0] += f", {_bytes(self.quadratic_bytes_saved)} of quadratic tensors not made"
        for index, site in enumerate(self.sites, 1):
            verdict = "fused" if site.fused else "not fused"
            lines.append(f"{index:>3}. {verdict:<10}{site.location}")
            if site.code:
                lines.append(f"     code      {site.code}")
            if site.form:
                lines.append(f"     form      {site.kind}: {site.form}")
            if site.fused:
                lines.append(f"     saved     {_bytes(site.quadratic_bytes_saved)}")
            else:
                lines.append(f"     blocked   {site.reason}")
            if site.remedy:
                lines.append(f"     remedy    {site.remedy}")
        if self.remaining:
            lines.append(f"{len(self.remaining)} quadratic tensors remain:")
            for x in self.remaining:
                shape = " x ".join(str(s) for s in x.shape)
                lines.append(f"     {x.name} [{shape}] {x.location}: {x.reason}")
        elif self.num_fused:
            lines.append("No quadratic tensor remains on the distillation path.")
        lines += [f"analysis failed, graph left alone: {failure}" for failure in self.failures]
        return "\n".join(lines)


def _bytes(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def location_of(node: fx.Node) -> tuple[str, str]:
    """file:line of the innermost frame of the user's code that a node came from, and the line's
    text.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        return "unknown location", ""
    frames = list(_FRAME.finditer(trace))
    outside = [f for f in frames if "/torch/nn/" not in f[1] and "/torch/_" not in f[1]] or frames
    if not outside:
        return "unknown location", ""
    frame = outside[-1]
    rest = trace[frame.end() :].lstrip("\n").splitlines()
    return f"{frame[1]}:{frame[2]}", rest[0].strip() if rest else ""
