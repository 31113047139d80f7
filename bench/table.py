"""Writes rows as text tables, for the terminal and for RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.measure import ALONE
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
        shown = {k: v if isinstance(v, str) else number(v) for k, v in r.more.items()}
        more = ", ".join(f"{k} {v}" for k, v in shown.items())
        if alone := r.ms(ALONE):
            more += f" forward alone {number(alone)} ms, {number(r.tflops(ALONE) or 0)} TFLOP/s"
        if r.status != "ok" or more:
            lines.append(f"{r.provider}: {r.status} {r.detail} {more}".rstrip())
    return "\n".join([*lines, ""])


def _cells(r: Row, right: dict[str, float]) -> tuple[str, ...]:
    """One row; ``right`` are the milliseconds of providers that a time may be compared with."""
    cells = {"provider": r.provider, "forward ms": "" if r.timing else r.status}
    for mode in ("forward", "backward", "step"):
        if (ms := r.ms(mode)) is not None:
            cells[f"{mode} ms"] = number(ms)
    if timing := r.timing.get("step"):
        cells["spread"] = f"{(timing.high - timing.low) / timing.median:.0%}"
        for name in ("eager", "inductor"):
            # a result that is wrong is compared with nothing
            ratio = f"{right[name] / timing.median:.2f}x" if name in right else ""
            cells[f"vs {name}"] = "red" if r.status == "red" else ratio
    if (rate := r.tflops()) is not None:
        cells["TFLOP/s"] = number(rate)
    if r.peak_mib is not None:
        cells["peak MiB"] = number(r.peak_mib)
    errors = {"loss error": r.loss_error, "gradient error": r.gradient_error}
    for name, error in (errors | {"may be": r.gradient_budget}).items():
        cells[name] = "" if error is None else f"{error:.1e}"
    return tuple(cells.get(name, "") for name in COLUMNS)


def number(x: float) -> str:
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def markdown_lines(head: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)]
