"""Records as text tables, for the terminal and for RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.measure import ALONE, Timing
from bench.records import Record, Run

COLUMNS = (
    "provider", "forward ms", "backward ms", "step ms", "spread", "TFLOP/s", "of matmul",
    "of attention", "peak MiB", "loss error", "gradient error", "vs eager", "vs inductor",
)  # fmt: skip
# of forwards without gradients, where they were timed
ALONE_COLUMNS = (
    "provider", "forward alone ms", "spread", "TFLOP/s", "of matmul", "of attention",
    "vs eager", "vs inductor",
)  # fmt: skip


def rows(records: list[Record], matmul_tflops: float) -> list[tuple[str, ...]]:
    """Cells of one case's records, in `COLUMNS`' order."""
    step_ms = _medians(records, "step")
    return [_row(r, matmul_tflops, step_ms) for r in records if r.status != "unavailable"]


def alone_rows(records: list[Record], matmul_tflops: float) -> list[tuple[str, ...]]:
    """Cells in `ALONE_COLUMNS`' order of those records that have them."""
    ms = _medians(records, ALONE)
    return [
        (
            _name(r),
            number(r.timing[ALONE].median_ms),
            _spread(r.timing[ALONE]),
            number(r.tflops[ALONE]),
            f"{r.tflops[ALONE] / matmul_tflops:.0%}",
            _percent(r.share_of_attention(ALONE)),
            _ratio("eager", ms, r.timing[ALONE].median_ms),
            _ratio("inductor", ms, r.timing[ALONE].median_ms),
        )
        for r in records
        if r.status == "ok" and ALONE in r.timing
    ]


def _medians(records: list[Record], mode: str) -> dict[str, float]:
    """Milliseconds by provider, of those that are right."""
    return {
        r.provider: r.timing[mode].median_ms
        for r in records
        if r.status == "ok" and r.version in ("", "head") and mode in r.timing
    }


def _row(record: Record, matmul_tflops: float, step_ms: dict[str, float]) -> tuple[str, ...]:
    name = _name(record)
    if record.status in ("oom", "error"):
        text = (
            "out of memory"
            if record.status == "oom"
            else "error: " + record.detail.replace("|", "/")[:80]
        )
        return (name, text, *("",) * (len(COLUMNS) - 2))
    timing, verdict = record.timing, record.verdict
    step = timing["step"]
    errors = ("", "")
    if verdict is not None:
        loss = "not checked" if verdict.loss_error is None else f"{verdict.loss_error:.1e}"
        errors = (loss, f"{verdict.gradient_error:.1e}")
    # a result that is wrong is compared with nothing
    ratios = (
        ("red", "red")
        if record.status == "red"
        else (
            _ratio("eager", step_ms, step.median_ms),
            _ratio("inductor", step_ms, step.median_ms),
        )
    )
    return (
        name,
        number(timing["forward"].median_ms),
        number(timing["backward"].median_ms),
        number(step.median_ms),
        _spread(step),
        number(record.tflops["step"]),
        f"{record.tflops['step'] / matmul_tflops:.0%}",
        _percent(record.share_of_attention("step")),
        "" if record.peak_mib is None else number(record.peak_mib),
        *errors,
        *ratios,
    )


def _name(record: Record) -> str:
    return f"{record.provider} ({record.version})" if record.version else record.provider


def _spread(timing: Timing) -> str:
    return f"{(timing.high_ms - timing.low_ms) / timing.median_ms:.0%}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _ratio(name: str, step_ms: dict[str, float], mine: float) -> str:
    return f"{step_ms[name] / mine:.2f}x" if name in step_ms else ""


def number(x: float) -> str:
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def by_case(run: Run) -> dict[str, list[Record]]:
    """Records in the order of the run, grouped."""
    groups: dict[str, list[Record]] = {}
    for record in run.records:
        groups.setdefault(record.case, []).append(record)
    return groups


def text(records: list[Record], matmul_tflops: float) -> str:
    """One case for the terminal."""
    lines = _aligned([COLUMNS, *rows(records, matmul_tflops)])
    alone = alone_rows(records, matmul_tflops)
    if alone:
        lines += ["", *_aligned([ALONE_COLUMNS, *alone])]
    missing = [
        f"{r.provider}: {r.detail}" for r in records if r.status in ("unavailable", "red", "error")
    ]
    return "\n".join(
        [
            f"{records[0].case}  ({records[0].shape})",
            *lines,
            *missing,
            "",
        ]
    )


def _aligned(cells: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table with a head; rows that are a message may be wider than it."""
    widths = [
        max(len(row[i]) for row in cells if not _is_message(row)) for i in range(len(cells[0]))
    ]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _is_message(row: tuple[str, ...]) -> bool:
    return not any(row[2:])


def markdown(records: list[Record], matmul_tflops: float) -> str:
    """One case for RESULTS.md."""
    lines = markdown_lines(COLUMNS, rows(records, matmul_tflops))
    alone = alone_rows(records, matmul_tflops)
    if alone:
        lines += ["", *markdown_lines(ALONE_COLUMNS, alone)]
    return "\n".join(lines)


def markdown_lines(head: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> list[str]:
    """A table of Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *cells)]


END_TO_END_COLUMNS = ("provider", "context", "step ms", "tokens/s", "peak MiB", "loss")


def _peak_of(row: dict[str, Any]) -> str:
    return "" if row.get("peak_mib") is None else number(row["peak_mib"])


def end_to_end_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the end-to-end table."""
    name, context = row["provider"], str(row["context"])
    if row["status"] != "ok":
        text = (
            "out of memory"
            if row["status"] == "oom"
            else f"{row['status']}: " + row["detail"].split("\n")[0]
        )
        return (name, context, text.replace("|", "/")[:100], "", "", "")
    figures = (number(row["step_ms"]), f"{row['tokens_per_s']:.0f}", _peak_of(row))
    return (name, context, *figures, f"{row['loss']:.5f}")


def end_to_end_line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    cells = zip(END_TO_END_COLUMNS, end_to_end_cells(row), strict=True)
    return f"{row['objective']}: " + ", ".join(f"{name} {cell}" for name, cell in cells if cell)
