"""Records as text tables, for the terminal and for RESULTS.md."""

from __future__ import annotations

from typing import Any

from bench.records import Record, Run

COLUMNS = (
    "provider", "forward ms", "backward ms", "step ms", "spread", "TFLOP/s", "of matmul",
    "of attention", "peak MiB", "loss error", "gradient error", "vs eager", "vs inductor",
)  # fmt: skip


def rows(records: list[Record], matmul_tflops: float) -> list[tuple[str, ...]]:
    """Cells of one case's records, in `COLUMNS`' order."""
    step_ms = {
        r.provider: r.timing["step"].median_ms
        for r in records
        if r.status == "ok" and r.version in ("", "head")
    }
    return [_row(r, matmul_tflops, step_ms) for r in records if r.status != "unavailable"]


def _row(record: Record, matmul_tflops: float, step_ms: dict[str, float]) -> tuple[str, ...]:
    name = f"{record.provider} ({record.version})" if record.version else record.provider
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
    share = record.share_of_attention("step")
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
        f"{(step.high_ms - step.low_ms) / step.median_ms:.0%}",
        number(record.tflops["step"]),
        f"{record.tflops['step'] / matmul_tflops:.0%}",
        "" if share is None else f"{share:.0%}",
        "" if record.peak_mib is None else number(record.peak_mib),
        *errors,
        *ratios,
    )


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
    cells = [COLUMNS, *rows(records, matmul_tflops)]
    widths = [
        max(len(row[i]) for row in cells if not _is_message(row)) for i in range(len(COLUMNS))
    ]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    missing = [
        f"{r.provider}: {r.detail}" for r in records if r.status in ("unavailable", "red", "error")
    ]
    return "\n".join(
        [
            f"{records[0].case}  ({records[0].shape})",
            *(line.rstrip() for line in lines),
            *missing,
            "",
        ]
    )


def _is_message(row: tuple[str, ...]) -> bool:
    return not any(row[2:])


def markdown(records: list[Record], matmul_tflops: float) -> str:
    """One case for RESULTS.md."""
    cells = [COLUMNS, ("---",) * len(COLUMNS), *rows(records, matmul_tflops)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


END_TO_END_COLUMNS = ("provider", "context", "step ms", "tokens/s", "peak MiB", "loss")


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
    figures = (number(row["step_ms"]), f"{row['tokens_per_s']:.0f}", number(row["peak_mib"]))
    return (name, context, *figures, f"{row['loss']:.5f}")


def end_to_end_line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    cells = zip(END_TO_END_COLUMNS, end_to_end_cells(row), strict=True)
    return f"{row['objective']}: " + ", ".join(f"{name} {cell}" for name, cell in cells if cell)
