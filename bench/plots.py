"""Draws pictures of records: time and memory against size, and the README's overview.

python -m bench.plots  # bench/results/*.png and docs/overview.png; nothing is measured
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.measure import ROOT
from bench.providers import color_of
from bench.records import Record

RESULTS = ROOT / "bench" / "results"
# pictures of pages: record, sweep, axis
CURVES = {
    "h200-suite-linear": ("vocabulary-sweep T=4096, forward_kl", "vocabulary"),
    "h200-attention-cases-attention": ("llama-3-8b B=1", "sequence length"),
}
LABELS = {
    "inductor": "torch.compile", "streamkl": 'backend="streamkl"', "direct": "called directly",
}  # fmt: skip


@contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Gives a list of axes, written to a file at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    try:
        yield list(axes.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        # without a date or a version, so that equal data gives equal files
        drawn.savefig(path, dpi=110, metadata={"Software": None})
    finally:
        pyplot.close(drawn)


def plain_numbers(axis: Any) -> None:
    """Writes ticks of a logarithmic axis as one writes them: powers of 10, and 2 and 5 if few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high / low < 2e3 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=16))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else f"{x:g}"))
    axis.set_minor_locator(NullLocator())


Curve = list[tuple[int, float | None]]  # None: out of memory


def curves(record: Record, sweep: str, what: str) -> dict[str, Curve]:
    """Returns milliseconds ("step") or MiB ("peak") by size for each provider."""
    found: dict[str, Curve] = {}
    for row in record.rows:
        if row.sweep[0] == sweep and row.status in ("ok", "oom"):  # what is wrong has no place
            value = row.ms() if what == "step" else row.peak_mib
            is_known = row.status == "ok" and value is not None
            found.setdefault(row.provider, []).append((row.sweep[1], value if is_known else None))
    return {name: sorted(points) for name, points in found.items()}


def draw(axes: Any, lines: dict[str, Curve], x: str, y: str) -> None:
    """Draws a line for each provider; says from where on it is out of memory."""
    for name, points in lines.items():
        known = [(n, value) for n, value in points if value is not None]
        lost = [n for n, value in points if value is None]
        label = LABELS.get(name, name)
        label += f" (out of memory at {_size(min(lost))})" if lost else ""
        style = "--" if name == "direct" else "-"
        axes.plot(
            [n for n, _ in known], [value for _, value in known], style, marker="o",
            markersize=4, color=color_of(name), label=label,
            linewidth=2.2 if name in ("streamkl", "direct") else 1.4,
        )  # fmt: skip
    sizes = sorted({n for points in lines.values() for n, _ in points})
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.set_xticks(sizes, [_size(n) for n in sizes])
    axes.minorticks_off()
    plain_numbers(axes.yaxis)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, frameon=False)


def _size(n: float) -> str:
    """In units of 1024 where it is a multiple, as 131,072 is 128k, else in those of 1000."""
    return f"{n / 1024:.0f}k" if n % 1024 == 0 else f"{n / 1000:.3g}k" if n >= 1000 else f"{n:.0f}"


def about(record: Record) -> str:
    return f"{record.machine['device']}, commit {record.machine['commit']}"


def draw_curves(record: Record, sweep: str, axis: str, path: Path) -> None:
    with figure(path, 1, 2, (11, 4.8)) as axes:
        for one, what, y in zip(
            axes, ("step", "peak"), ("forward and backward, ms", "peak memory, MiB"), strict=True
        ):
            draw(one, curves(record, sweep, what), axis, y)
            one.set_title(f"{sweep}\n{about(record)}", fontsize=9)


# ---------------------------------------------------------------------------------------- overview
SCORES, ROWS = "#f6c9c0", "#c9e4c5"  # a tensor of scores, and per-row values
# boxes: left and bottom, width, text, color; "" is a heading without a box
BOXES = (
    (1.0, 5.0, 1.5, "q k^T", SCORES), (1.0, 4.05, 1.5, "scale, mask", SCORES),
    (1.0, 3.1, 1.5, "log_softmax", SCORES), (3.0, 5.0, 1.5, "q k^T", SCORES),
    (3.0, 4.05, 1.5, "scale, mask", SCORES), (3.0, 3.1, 1.5, "softmax", SCORES),
    (2.0, 2.15, 1.5, "kl_div", SCORES), (7.0, 4.05, 2.6, "attention_kl(is_causal)", ROWS),
    (7.0, 2.75, 2.6, "sum of per-row values", ROWS),
)  # fmt: skip
TEXTS = (
    (2.0, 6.25, "before: 8 score-sized tensors"), (7.0, 6.25, "after: one operator"),
    (1.0, 5.75, "student q, k"), (3.0, 5.75, "teacher q, k"), (6.2, 5.75, "student q, k"),
    (7.8, 5.75, "teacher q, k"), (2.0, 1.25, "loss"), (7.0, 1.25, "loss"), (4.8, 3.65, "streamkl"),
)  # fmt: skip
ARROWS = (
    (1, 5.6, 1, 5.27), (1, 4.73, 1, 4.32), (1, 3.78, 1, 3.37), (1, 2.83, 1.7, 2.4),
    (3, 5.6, 3, 5.27), (3, 4.73, 3, 4.32), (3, 3.78, 3, 3.37), (3, 2.83, 2.3, 2.4),
    (2, 1.88, 2, 1.4), (6.2, 5.6, 6.6, 4.35), (7.8, 5.6, 7.4, 4.35), (7, 3.78, 7, 3.0),
    (7, 2.48, 7, 1.4), (4.3, 3.4, 5.3, 3.4),
)  # fmt: skip


def draw_overview(record: Record, path: Path) -> None:
    """Draws memory over sequence length, and the graph before and after."""
    with figure(path, 1, 2, (11, 4.2)) as (memory, graph):
        lines = curves(record, "llama-3-8b B=1", "peak")
        shown = {name: lines[name] for name in ("eager", "inductor", "streamkl")}
        draw(memory, shown, "sequence length", "peak memory, MiB")
        title = f"attention KL, Llama-3-8B heads, causal, bfloat16\n{about(record)}"
        memory.set_title(title, fontsize=9)
        for x, y, width, text, color in BOXES:
            box = {"boxstyle": "round,pad=0.35", "facecolor": color, "linewidth": 0.8}
            graph.text(x, y, text.center(int(width * 9)), ha="center", va="center", fontsize=8.5,
                       bbox=box)  # fmt: skip
        for x, y, text in TEXTS:
            graph.text(x, y, text, ha="center", va="center", fontsize=9)
        for x, y, to_x, to_y in ARROWS:
            graph.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>"})
        graph.set(xlim=(0, 8.6), ylim=(0.9, 6.7))
        graph.axis("off")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of records and pictures")
    parser.add_argument("--overview", type=Path, default=ROOT / "docs" / "overview.png")
    options = parser.parse_args()
    for stem, (sweep, axis) in CURVES.items():
        record = Record.load(RESULTS / f"{stem.rpartition('-')[0]}.json")
        draw_curves(record, sweep, axis, options.folder / f"{stem}.png")
    draw_overview(Record.load(RESULTS / "h200-attention-cases.json"), options.overview)


if __name__ == "__main__":
    main()
