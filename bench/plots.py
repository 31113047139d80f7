"""Pictures of a run: time and memory against size, and the roofline."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.providers import PROVIDERS, color_of
from bench.records import Record, Run

OURS = ("direct", "streamkl")
AXIS_NAMES = {"attention": "sequence length", "linear": "vocabulary"}
Point = tuple[float, float | None]  # None: out of memory


def draw_all(run: Run, folder: Path, stem: str) -> list[Path]:
    """Writes every picture that the run has data for; returns their paths."""
    paths = []
    for family in AXIS_NAMES:
        found = sweeps(run, family)
        if found:
            name, records = next(iter(found.items()))
            path = folder / f"{stem}-{family}.png"
            title = f"{name}, {run.dtype}, {run.machine['device']}"
            _time_and_memory(_curves(records), title, AXIS_NAMES[family], path)
            paths.append(path)
    if kernel_points(run):
        path = folder / f"{stem}-roofline.png"
        _roofline(run, path)
        paths.append(path)
    for objective in dict.fromkeys(row["objective"] for row in run.end_to_end):
        rows = [row for row in run.end_to_end if row["objective"] == objective]
        if len({row["context"] for row in rows if row["status"] == "ok"}) < 2:
            continue  # no curve
        path = folder / f"{stem}-end-to-end-{_as_file_name(objective)}.png"
        title = f"training step, {rows[0]['pair']}, KL of {objective}, {run.machine['device']}"
        _time_and_memory(_end_to_end_curves(rows), title, "context in tokens", path)
        paths.append(path)
    return paths


def _as_file_name(objective: str) -> str:
    return "-".join(re.findall(r"[\w.]+", objective))


def sweeps(run: Run, family: str) -> dict[str, list[Record]]:
    """Cases that differ in size only, at two sizes or more, with somebody to compare with."""
    groups: dict[str, list[Record]] = {}
    for record in run.records:
        if record.family == family and record.status not in ("unavailable", "error"):
            groups.setdefault(record.sweep[0], []).append(record)
    shown = {
        name: records
        for name, records in groups.items()
        if len({r.sweep[1] for r in records}) >= 2
        and any(r.status == "ok" and r.provider not in OURS for r in records)
    }
    return dict(sorted(shown.items(), key=lambda item: -len({r.sweep[1] for r in item[1]})))


Curves = dict[str, tuple[list[Point], list[Point]]]  # provider: time, memory


def _curves(records: Iterable[Record]) -> Curves:
    curves: Curves = {}
    for record in records:
        if record.status == "red":
            continue  # a wrong result has no place in a comparison
        time, memory = curves.setdefault(record.provider, ([], []))
        is_ok = record.status == "ok"
        time.append((record.sweep[1], record.timing["step"].median_ms if is_ok else None))
        if record.peak_mib is not None or not is_ok:  # it was weighed, or did not fit
            memory.append((record.sweep[1], record.peak_mib if is_ok else None))
    return curves


def _end_to_end_curves(rows: list[dict[str, Any]]) -> Curves:
    curves: Curves = {}
    for row in rows:
        if row["status"] not in ("ok", "oom"):
            continue
        time, memory = curves.setdefault(row["provider"], ([], []))
        time.append((row["context"], row.get("step_ms")))
        if row.get("peak_mib") is not None or row["status"] != "ok":
            memory.append((row["context"], row.get("peak_mib")))
    return curves


def _time_and_memory(curves: Curves, title: str, axis: str, path: Path) -> None:
    with _figure(path, 2, (11, 4.6)) as (figure, axes):
        order = [p.name for p in PROVIDERS]
        for name in sorted(curves, key=lambda n: order.index(n) if n in order else len(order)):
            for panel, points in zip(axes, curves[name], strict=True):
                _line(panel, name, points)
        sizes = sorted({x for time, _ in curves.values() for x, _ in time})
        for panel, label in zip(
            axes, ("forward and backward, ms", "peak memory, MiB"), strict=True
        ):
            panel.set(xscale="log", yscale="log", xlabel=axis, ylabel=label)
            panel.set_xticks(sizes, [_size(x) for x in sizes])
            panel.minorticks_off()
            panel.grid(True, which="major", alpha=0.3)
        for panel, one in zip(axes, range(2), strict=True):
            _mark_out_of_memory(panel, {name: both[one] for name, both in curves.items()})
        figure.suptitle(title, fontsize=10)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels),
            fontsize=8,
            frameon=False,
        )


def _line(panel: Any, name: str, points: list[Point]) -> None:
    known = sorted((x, y) for x, y in points if y is not None)
    emphasis = name in OURS
    dashes = {"direct": "--"}.get(name, ":" if name.endswith("-graphs") else "-")
    panel.plot(
        [x for x, _ in known],
        [y for _, y in known],
        marker="o",
        markersize=4,
        linewidth=2.2 if emphasis else 1.4,
        linestyle=dashes,
        color=color_of(name),
        label=name,
    )


def _mark_out_of_memory(panel: Any, curves: dict[str, list[Point]]) -> None:
    """A cross near the top where a provider first did not fit, each on a line of its own."""
    sizes = {name: [x for x, y in points if y is None] for name, points in curves.items()}
    missing = {name: min(found) for name, found in sizes.items() if found}
    for i, (name, x) in enumerate(missing.items()):
        height = 0.97 - 0.05 * i
        where = panel.get_xaxis_transform()
        panel.plot(
            [x],
            [height],
            marker="x",
            markersize=7,
            color=color_of(name),
            transform=where,
            clip_on=False,
        )
        text = f"{name}: out of memory "
        panel.text(
            x,
            height,
            text,
            transform=where,
            ha="right",
            va="center",
            fontsize=7,
            color=color_of(name),
        )


# An LM head's gradients may be computed in its forward: there only the whole step counts.
MARKS = {
    ("attention", "forward"): ("^", "attention forward"),
    ("attention", "backward"): ("v", "attention backward"),
    ("linear", "step"): ("s", "LM head, both"),
}
KERNELS = ("direct", "any-order", "liger_fused", "liger_chunked")


def kernel_points(run: Run) -> list[tuple[Record, str]]:
    """What the roofline shows: records of kernels, and a mode."""
    records = [r for r in run.records if r.status == "ok" and r.provider in KERNELS]
    return [(r, mode) for r in records for family, mode in MARKS if r.family == family]


def _roofline(run: Run, path: Path) -> None:
    """Rate against arithmetic intensity."""
    points = kernel_points(run)
    with _figure(path, 1, (7.5, 5)) as (figure, (panel,)):
        peak, bandwidth = run.ceilings["matmul_tflops"], run.ceilings["copy_gbytes"] * 1e-3
        largest = 2 * max(_intensity(r, mode) for r, mode in points)
        knee = peak / bandwidth
        panel.plot([knee / 8, knee, largest], [peak / 8, peak, peak], color="black")
        panel.text(largest, peak * 1.05, f"matmul {peak:.3g} TFLOP/s", ha="right", fontsize=8)
        panel.text(knee / 6, peak / 8, f"copy {bandwidth * 1e3:.0f} GB/s", fontsize=8)
        for record, mode in points:
            panel.plot(
                [_intensity(record, mode)],
                [record.tflops[mode]],
                marker=MARKS[record.family, mode][0],
                linestyle="none",
                alpha=0.8,
                color=color_of(record.provider),
            )
        for name in dict.fromkeys(r.provider for r, _ in points):
            panel.plot([], [], linewidth=5, color=color_of(name), label=name)
        for marker, label in dict.fromkeys(MARKS[r.family, mode] for r, mode in points):
            panel.plot([], [], marker=marker, linestyle="none", color="grey", label=label)
        panel.set(xscale="log", yscale="log")
        panel.xaxis.set_minor_formatter("")  # those of a short axis lie over each other
        panel.set(xlabel="least FLOP per least byte", ylabel="TFLOP/s on the least work")
        panel.set_ylim(top=peak * 1.6)
        panel.grid(True, which="major", alpha=0.3)
        panel.set_title(f"{run.machine['device']}, {run.dtype}", fontsize=10)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)


def _intensity(record: Record, mode: str) -> float:
    return record.least_gflop[mode] * 1e9 / (record.least_mib[mode] * 2**20)


class _figure:
    """A figure with one row of panels, written to a file at the end."""

    def __init__(self, path: Path, panels: int, size: tuple[float, float]) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        self.path, self.pyplot = path, pyplot
        self.figure, axes = pyplot.subplots(1, panels, figsize=size, layout="constrained")
        self.axes = list(axes) if panels > 1 else [axes]

    def __enter__(self) -> tuple[Any, list[Any]]:
        return self.figure, self.axes

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            # without a date or a version, so that equal data gives equal files
            self.figure.savefig(self.path, dpi=110, metadata={"Software": None})
        self.pyplot.close(self.figure)


def _size(x: float) -> str:
    return f"{x / 1024:.0f}k" if x >= 1024 else f"{x:.0f}"
