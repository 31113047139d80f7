"""Writes rows as text tables, for the terminal and for RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.measure import MODES
from bench.records import Row

COLUMNS = (
    "provider", "forward ms", "backward ms", "step ms", "spread", "TFLOP/s", "peak MiB",
    "loss error", "gradient error", "may be", "vs eager", "vs inductor",
)  # fmt: skip


def text(rows: Sequence[Row]) -> str:
    """Formats one case for the terminal."""
    if not rows:
        return ""
    right = {r.provider: ms for r in rows if r.status == "ok" and (ms := r.ms()) is not None}
    lines = [f"{rows[0].case}  ({rows[0].shape})"]
    lines += markdown_lines(COLUMNS, (_cells(r, right) for r in rows))
    for r in rows:
        more = ", ".join(f"{k} {number(v)}" for k, v in r.more.items())
        if r.status != "ok" or more:
            lines.append(f"{r.provider}: {r.status} {r.detail} {more}".rstrip())
    return "\n".join([*lines, ""])


def _cells(r: Row, right: dict[str, float]) -> list[str]:
    """One row; ``right`` are the milliseconds of providers that a time may be compared with."""
    times = [number(r.ms(mode)) for mode in MODES] if r.timing else [r.status, "", ""]
    spread, ratios = "", ["", ""]
    if timing := r.timing.get("step"):
        spread = f"{(timing.high - timing.low) / timing.median:.0%}"
        ratios = [
            # a result that is wrong is compared with nothing
            "red" if r.status == "red"
            else f"{right[name] / timing.median:.2f}x" if name in right else ""
            for name in ("eager", "inductor")
        ]  # fmt: skip
    errors = ["" if error is None else f"{error:.1e}"
              for error in (r.loss_error, r.gradient_error, r.gradient_budget)]  # fmt: skip
    return [r.provider, *times, spread, number(r.tflops()), number(r.peak_mib), *errors, *ratios]


def number(x: float | None) -> str:
    """Three digits."""
    return "" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def markdown_lines(head: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)]


def between(text: str, name: str, lines: Iterable[str]) -> str:
    """Replaces what lies between two marks of a page."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, rest = text.split(begin)
    return "\n".join((before + begin, *lines, end + rest.split(end)[1]))
