"""Draws pictures of records: time and memory against size, and the README's overview.

python -m bench.plots  # bench/results/*.png and docs/overview.png; nothing is measured
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.measure import ROOT
from bench.records import Record

RESULTS = ROOT / "bench" / "results"
# pictures of pages: record, sweep, axis
CURVES = {
    "h200-suite-linear": ("vocabulary-sweep T=4096, forward_kl", "vocabulary"),
    "h200-attention-cases-attention": ("llama-3-8b B=1", "sequence length"),
}
# how lines look, the same in all pictures: color, label, width, style
LINES = {
    "eager": ("#7f7f7f", "eager", 1.4, "-"), "inductor": ("#1f77b4", "torch.compile", 1.4, "-"),
    "streamkl": ("#d62728", 'backend="streamkl"', 2.2, "-"),
    "direct": ("#9467bd", "called directly", 2.2, "--"),
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
        known = [point for point in points if point[1] is not None]
        lost = [n for n, value in points if value is None]
        color, label, width, style = LINES[name]
        label += f" (out of memory at {_size(min(lost))})" if lost else ""
        axes.plot(
            *zip(*known, strict=True), style, marker="o", markersize=4, color=color, label=label,
            linewidth=width,
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
PINK, GREEN = "#f6c9c0", "#c9e4c5"  # a tensor of scores, and per-row values
STEP = 0.95  # from one line of a column to the next
# columns of the graph from their tops: x, y, color of boxes, lines; those at the ends have no box
COLUMNS = (
    (1.0, 6.0, PINK, ("student q, k", "q k^T", "scale, mask", "log_softmax")),
    (3.0, 6.0, PINK, ("teacher q, k", "q k^T", "scale, mask", "softmax")),
    (2.0, 2.2, PINK, ("kl_div", "loss")),
    (
        7.0,
        6.0,
        GREEN,
        ("q, k of both", "attention_kl(is_causal)", "sum of per-row values", "loss"),
    ),
)  # fmt: skip
TITLES = ((2.0, "before: 8 score-sized tensors"), (7.0, "after: one operator"))
ARROWS = ((1.0, 3.0, 1.7, 2.4), (3.0, 3.0, 2.3, 2.4), (4.3, 3.6, 5.3, 3.6))


def draw_overview(record: Record, path: Path) -> None:
    """Draws memory over sequence length, and the graph before and after."""
    with figure(path, 1, 2, (11, 4.2)) as (memory, graph):
        lines = curves(record, "llama-3-8b B=1", "peak")
        shown = {name: lines[name] for name in ("eager", "inductor", "streamkl")}
        draw(memory, shown, "sequence length", "peak memory, MiB")
        title = f"attention KL, Llama-3-8B heads, causal, bfloat16\n{about(record)}"
        memory.set_title(title, fontsize=9)
        arrows = list(ARROWS)
        middle = {"ha": "center", "va": "center", "fontsize": 9}
        for x, top, color, names in COLUMNS:
            for i, name in enumerate(names):
                box = {"boxstyle": "round,pad=0.35", "facecolor": color, "linewidth": 0.8}
                is_plain = "q, k" in name or name == "loss"
                graph.text(x, top - STEP * i, name, bbox=None if is_plain else box, **middle)
            ends = range(len(names) - 1)
            arrows += [(x, top - STEP * i - 0.27, x, top - STEP * i - 0.65) for i in ends]
        for x, text in TITLES:
            graph.text(x, 6.5, text, **middle)
        graph.text(4.8, 3.85, "streamkl", **middle)
        for x, y, to_x, to_y in arrows:
            graph.annotate("", (to_x, to_y), (x, y), arrowprops={"arrowstyle": "-|>"})
        graph.set(xlim=(0, 8.6), ylim=(0.9, 6.8))
        graph.axis("off")


def main() -> None:
    for stem, (sweep, axis) in CURVES.items():
        record = Record.load(RESULTS / f"{stem.rpartition('-')[0]}.json")
        draw_curves(record, sweep, axis, RESULTS / f"{stem}.png")
    draw_overview(
        Record.load(RESULTS / "h200-attention-cases.json"), ROOT / "docs" / "overview.png"
    )


if __name__ == "__main__":
    main()
