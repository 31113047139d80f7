"""Records as text tables, for the terminal and for RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.measure import ALONE
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
    shown = [r for r in records if r.status != "unavailable"]
    return _rows(records, shown, matmul_tflops, "step", COLUMNS)


def alone_rows(records: list[Record], matmul_tflops: float) -> list[tuple[str, ...]]:
    """Cells in `ALONE_COLUMNS`' order of those records that have them."""
    shown = [r for r in records if r.status == "ok" and ALONE in r.timing]
    return _rows(records, shown, matmul_tflops, ALONE, ALONE_COLUMNS)


def _rows(
    records: list[Record], shown: list[Record], matmul_tflops: float, mode: str,
    columns: tuple[str, ...],
) -> list[tuple[str, ...]]:  # fmt: skip
    right = {
        r.provider: r.timing[mode].median_ms
        for r in records
        if r.status == "ok" and r.version in ("", "head") and mode in r.timing
    }
    every = (_cells(r, mode, matmul_tflops, right) for r in shown)
    return [tuple(cells.get(name, "") for name in columns) for cells in every]


def _cells(r: Record, mode: str, matmul_tflops: float, right: dict[str, float]) -> dict[str, str]:
    """By column; ``right`` are the milliseconds of providers that a time may be compared with."""
    cells = {"provider": f"{r.provider} ({r.version})" if r.version else r.provider}
    if r.status in ("oom", "error"):
        error = "error: " + r.detail.replace("|", "/")[:80]
        return cells | {"forward ms": "out of memory" if r.status == "oom" else error}
    for name, timing in r.timing.items():
        cells["forward alone ms" if name == ALONE else f"{name} ms"] = number(timing.median_ms)
    timing, share = r.timing[mode], r.share_of_attention(mode)
    cells["spread"] = f"{(timing.high_ms - timing.low_ms) / timing.median_ms:.0%}"
    cells["TFLOP/s"] = number(r.tflops[mode])
    cells["of matmul"] = f"{r.tflops[mode] / matmul_tflops:.0%}"
    cells["of attention"] = "" if share is None else f"{share:.0%}"
    cells["peak MiB"] = _mib(r.peak_mib)
    if r.verdict is not None:
        loss = r.verdict.loss_error
        cells["loss error"] = "not checked" if loss is None else f"{loss:.1e}"
        cells["gradient error"] = f"{r.verdict.gradient_error:.1e}"
    for name in ("eager", "inductor"):
        # a result that is wrong is compared with nothing
        ratio = f"{right[name] / timing.median_ms:.2f}x" if name in right else ""
        cells[f"vs {name}"] = "red" if r.status == "red" else ratio
    return cells


def _mib(peak: float | None) -> str:
    return "" if peak is None else number(peak)


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
    lines = [f"{records[0].case}  ({records[0].shape})", markdown(records, matmul_tflops)]
    failed = (r for r in records if r.status in ("unavailable", "red", "error"))
    return "\n".join([*lines, *(f"{r.provider}: {r.detail}" for r in failed), ""])


def markdown(records: list[Record], matmul_tflops: float) -> str:
    """One case, with its forwards alone where they were timed."""
    lines = markdown_lines(COLUMNS, rows(records, matmul_tflops))
    if alone := alone_rows(records, matmul_tflops):
        lines += ["", *markdown_lines(ALONE_COLUMNS, alone)]
    return "\n".join(lines)


def markdown_lines(head: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> list[str]:
    """A table of Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *cells)]


END_TO_END_COLUMNS = ("provider", "context", "step ms", "tokens/s", "peak MiB", "loss")


def end_to_end_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the end-to-end table."""
    what = (row["provider"], str(row["context"]))
    if row["status"] != "ok":
        why = f"{row['status']}: {row['detail']}".split("\n")[0].replace("|", "/")[:100]
        return (*what, "out of memory" if row["status"] == "oom" else why, "", "", "")
    figures = (number(row["step_ms"]), f"{row['tokens_per_s']:.0f}", _mib(row.get("peak_mib")))
    return (*what, *figures, f"{row['loss']:.5f}")


def end_to_end_line(row: dict[str, Any]) -> str:
    """One row for the terminal."""
    cells = zip(END_TO_END_COLUMNS, end_to_end_cells(row), strict=True)
    return f"{row['objective']}: " + ", ".join(f"{name} {cell}" for name, cell in cells if cell)
