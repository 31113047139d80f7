"""Pictures of a run: time and memory against size, and the roofline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.providers import PROVIDERS, color_of
from bench.records import Record, Run

OURS = {"direct": "direct (ours, called by hand)", "streamkl": "streamkl (ours, compiled)"}
AXIS_NAMES = {"attention": "sequence length", "linear": "vocabulary"}
TITLES = {"attention": "KL of attention maps", "linear": "KL of LM heads"}
Point = tuple[float, float | None]  # None: out of memory


@contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """A figure and the list of its axes, written to a file at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, panels = pyplot.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False
    )
    try:
        yield drawn, list(panels.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        # without a date or a version, so that equal data gives equal files
        drawn.savefig(path, dpi=110, metadata={"Software": None})
    finally:
        pyplot.close(drawn)


def plain_numbers(axis: Any) -> None:
    """Ticks of a logarithmic axis as one writes them: powers of 10, and 2 and 5 where few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high / low < 2e3 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=16))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axis.set_minor_locator(NullLocator())


def draw_all(run: Run, folder: Path, stem: str) -> list[Path]:
    """Writes every picture that the run has data for; returns their paths."""
    paths = []
    for family in AXIS_NAMES:
        found = sweeps(run, family)
        if found:
            name, records = next(iter(found.items()))
            path = folder / f"{stem}-{family}.png"
            title = f"{TITLES[family]}: {name}, {run.dtype}, {run.machine['device']}"
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
        name = "-".join(re.findall(r"[\w.]+", objective))
        path = folder / f"{stem}-end-to-end-{name}.png"
        title = f"training step, KL of {objective}, {rows[0]['pair']}\n{run.machine['device']}"
        _time_and_memory(_end_to_end_curves(rows), title, "context in tokens", path)
        paths.append(path)
    return paths


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
Measured = tuple[str, int, str, float | None, float | None]  # provider, size, status, ms, MiB


def _curves(records: Iterable[Record]) -> Curves:
    return _by_provider(
        (r.provider, r.sweep[1], r.status,
         r.timing["step"].median_ms if r.status == "ok" else None, r.peak_mib)
        for r in records
        if r.status != "red"  # a wrong result has no place in a comparison
    )  # fmt: skip


def _end_to_end_curves(rows: list[dict[str, Any]]) -> Curves:
    return _by_provider(
        (row["provider"], row["context"], row["status"], row.get("step_ms"), row.get("peak_mib"))
        for row in rows
        if row["status"] in ("ok", "oom")
    )


def _by_provider(measured: Iterable[Measured]) -> Curves:
    curves: Curves = {}
    for name, size, status, ms, mib in measured:
        time, memory = curves.setdefault(name, ([], []))
        is_ok = status == "ok"
        time.append((size, ms if is_ok else None))
        if mib is not None or not is_ok:  # it was weighed, or did not fit
            memory.append((size, mib if is_ok else None))
    return curves


def _time_and_memory(curves: Curves, title: str, axis: str, path: Path) -> None:
    order = [p.name for p in PROVIDERS]
    names = sorted(curves, key=lambda n: order.index(n) if n in order else len(order))
    sizes = sorted({x for time, _ in curves.values() for x, _ in time})
    labels = ("forward and backward, ms", "peak memory, MiB")
    with figure(path, 1, 2, (11, 4.8)) as (drawn, panels):
        for number, (axes, label) in enumerate(zip(panels, labels, strict=True)):
            mine = {name: curves[name][number] for name in names}
            for name, points in mine.items():
                _line(axes, name, points)
            axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=label)
            axes.set_xticks(sizes, [_size(x) for x in sizes])
            axes.minorticks_off()
            axes.grid(True, which="major", alpha=0.3)
            _mark_out_of_memory(axes, mine)
            plain_numbers(axes.yaxis)
        drawn.suptitle(title, fontsize=10)
        handles, texts = panels[0].get_legend_handles_labels()
        drawn.legend(
            handles, texts, loc="outside lower center", ncols=min(5, len(texts)), fontsize=8,
            frameon=False,
        )  # fmt: skip


def _line(axes: Any, name: str, points: list[Point]) -> None:
    known = sorted((x, y) for x, y in points if y is not None)
    style = {"direct": "--"}.get(name, ":" if name.endswith("-graphs") else "-")
    width = 2.2 if name in OURS else 1.4
    axes.plot(
        [x for x, _ in known], [y for _, y in known], style, marker="o", markersize=4,
        linewidth=width, color=color_of(name), label=OURS.get(name, name),
    )  # fmt: skip


def _mark_out_of_memory(axes: Any, curves: dict[str, list[Point]]) -> None:
    """A cross where a provider first did not fit, each on a line of its own above all curves."""
    sizes = {name: [x for x, y in points if y is None] for name, points in curves.items()}
    missing = {name: min(found) for name, found in sizes.items() if found}
    if not missing:
        return
    share = 0.07 * len(missing) + 0.03  # of the height of the axes, kept free of curves
    low, high = axes.get_ylim()
    axes.set_ylim(low, low * (high / low) ** (1 / (1 - share)))
    where = axes.get_xaxis_transform()
    for i, (name, x) in enumerate(missing.items()):
        height, color = 0.96 - 0.07 * i, color_of(name)
        axes.plot([x], [height], "x", markersize=7, color=color, transform=where)
        axes.text(
            x, height, f"{name}: out of memory  ", transform=where, ha="right", va="center",
            fontsize=8, color=color,
        )  # fmt: skip


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
    with figure(path, 1, 1, (7.5, 5)) as (drawn, (axes,)):
        peak, bandwidth = run.ceilings["matmul_tflops"], run.ceilings["copy_gbytes"] * 1e-3
        largest = 2 * max(_intensity(r, mode) for r, mode in points)
        knee = peak / bandwidth
        axes.plot([knee / 8, knee, largest], [peak / 8, peak, peak], color="black")
        axes.text(largest, peak * 1.05, f"matmul {peak:.3g} TFLOP/s", ha="right", fontsize=8)
        axes.text(knee / 6, peak / 8, f"copy {bandwidth * 1e3:.0f} GB/s", fontsize=8)
        for r, mode in points:
            axes.plot(
                [_intensity(r, mode)], [r.tflops[mode]], MARKS[r.family, mode][0], alpha=0.8,
                color=color_of(r.provider),
            )  # fmt: skip
        for name in dict.fromkeys(r.provider for r, _ in points):
            axes.plot([], [], linewidth=5, color=color_of(name), label=OURS.get(name, name))
        for marker, label in dict.fromkeys(MARKS[r.family, mode] for r, mode in points):
            axes.plot([], [], marker, color="grey", label=label)
        axes.set(xscale="log", yscale="log", ylabel="TFLOP/s on the least work")
        axes.set_xlabel("arithmetic intensity: least FLOP per least byte")
        axes.set_ylim(top=peak * 1.6)
        plain_numbers(axes.xaxis)
        plain_numbers(axes.yaxis)
        axes.tick_params(axis="x", labelrotation=30)
        axes.grid(True, which="major", alpha=0.3)
        axes.set_title(f"roofline: {run.machine['device']}, {run.dtype}", fontsize=10)
        drawn.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _intensity(record: Record, mode: str) -> float:
    return record.least_gflop[mode] * 1e9 / (record.least_mib[mode] * 2**20)


def _size(x: float) -> str:
    """In units of 1024 where it is a multiple, as 131,072 is 128k, else in those of 1000."""
    if x < 1000:
        return f"{x:.0f}"
    return f"{x / 1024:.0f}k" if x % 1024 == 0 else f"{x / 1000:.3g}k"
