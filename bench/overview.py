"""Draws the picture of the README: memory over sequence length, and the graph before and after.

    python -m bench.overview  # writes docs/overview.png

The curves are those of a committed record. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.plots import figure, plain_numbers
from bench.providers import color_of

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "bench" / "results" / "h200-attention-cases.json"
SWEEP = "llama-3-8b B=1"
LABELS = {"eager": "eager", "inductor": "torch.compile", "streamkl": "torch_streamkl"}
OFFSETS = {"eager": (-62, 10), "inductor": (6, 0)}  # of the labels, in points
SCORES = "#f6c9c0"  # a tensor of scores
ROWS = "#c9e4c5"  # per-row values
BEFORE = ("q k^T", "scale, mask", "softmax")


def curves(record: dict[str, Any]) -> dict[str, list[tuple[int, float | None]]]:
    """Peak MiB by sequence length for each provider; None where it ran out of memory."""
    found: dict[str, list[tuple[int, float | None]]] = {name: [] for name in LABELS}
    for row in record["records"]:
        if row["sweep"][0] == SWEEP and row["provider"] in found:
            found[row["provider"]].append((row["sweep"][1], row["peak_mib"]))
    return {name: sorted(points) for name, points in found.items()}


def draw_memory(axes: Any, record: dict[str, Any]) -> None:
    for name, points in curves(record).items():
        known = [(x, y) for x, y in points if y is not None]
        axes.plot(
            *zip(*known, strict=True), marker="o", markersize=4, color=color_of(name),
            linewidth=2.4 if name == "streamkl" else 1.6, label=LABELS[name],
        )  # fmt: skip
        lost = [x for x, y in points if y is None]
        if lost:
            x, y = known[-1]
            axes.annotate(
                f"out of memory at {min(lost) // 1024}k", (x, y), OFFSETS[name],
                textcoords="offset points", fontsize=8, va="center", color=color_of(name),
            )  # fmt: skip
    sizes = sorted({x for points in curves(record).values() for x, _ in points})
    axes.set(xscale="log", yscale="log", xlabel="sequence length", ylabel="peak memory, MiB")
    axes.set_xticks(sizes, [f"{x // 1024}k" for x in sizes])
    axes.set_xlim(right=max(sizes) * 2.2)
    axes.minorticks_off()
    plain_numbers(axes.yaxis)
    axes.grid(True, which="major", alpha=0.3)
    machine, commit = record["machine"]["device"], record["machine"]["commit"]
    axes.set_title(
        f"attention KL, Llama-3-8B heads, causal, bfloat16\n{machine}, commit {commit}",
        fontsize=9,
    )
    axes.legend(fontsize=9, frameon=False, loc="upper left")


def _box(axes: Any, x: float, y: float, text: str, color: str, width: float = 1.5) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch((x - width / 2, y - 0.22), width, 0.44, boxstyle="round,pad=0.05",
                       facecolor=color, edgecolor="#555555", linewidth=0.8)
    )  # fmt: skip
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5)


def _arrow(axes: Any, start: tuple[float, float], stop: tuple[float, float]) -> None:
    arrow = {"arrowstyle": "-|>", "color": "#555555", "linewidth": 0.9}
    axes.annotate("", stop, start, arrowprops=arrow)


def draw_graphs(axes: Any) -> None:
    """Two chains of score-sized tensors, which become one operator with per-row values."""
    for side, x in (("student", 1.0), ("teacher", 3.0)):
        axes.text(x, 5.75, f"{side} q, k", ha="center", va="center", fontsize=8.5)
        last = 5.6
        for i, step in enumerate(BEFORE):
            y = 5.0 - 0.95 * i
            text = "log_softmax" if (side, step) == ("student", "softmax") else step
            _arrow(axes, (x, last), (x, y + 0.27))
            _box(axes, x, y, text, SCORES)
            last = y - 0.27
        _arrow(axes, (x, last), (2.0 + 0.3 * (x - 2.0), 2.4))
    _box(axes, 2.0, 2.15, "kl_div", SCORES)
    _arrow(axes, (2.0, 1.88), (2.0, 1.4))
    axes.text(2.0, 1.25, "loss", ha="center", va="center", fontsize=8.5)
    axes.text(2.0, 6.25, "before: 8 score-sized tensors", ha="center", fontsize=9.5)
    axes.text(7.0, 6.25, "after: one operator", ha="center", fontsize=9.5)
    for side, x in (("student", 6.2), ("teacher", 7.8)):
        axes.text(x, 5.75, f"{side} q, k", ha="center", va="center", fontsize=8.5)
        _arrow(axes, (x, 5.6), (7.0 + 0.5 * (x - 7.0), 4.35))
    _box(axes, 7.0, 4.05, "attention_kl(is_causal)", ROWS, 2.6)
    _arrow(axes, (7.0, 3.78), (7.0, 3.0))
    _box(axes, 7.0, 2.75, "sum of per-row values", ROWS, 2.6)
    _arrow(axes, (7.0, 2.48), (7.0, 1.4))
    axes.text(7.0, 1.25, "loss", ha="center", va="center", fontsize=8.5)
    axes.annotate(
        "", (5.3, 3.4), (4.3, 3.4),
        arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 1.8},
    )  # fmt: skip
    axes.text(4.8, 3.65, "streamkl", ha="center", fontsize=8.5)
    axes.set(xlim=(0, 8.6), ylim=(0.9, 6.7))
    axes.axis("off")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "overview.png")
    options = parser.parse_args()
    with figure(options.out, 1, 2, (11, 4.2)) as (_, axes):
        draw_memory(axes[0], json.loads(RECORD.read_text()))
        draw_graphs(axes[1])


if __name__ == "__main__":
    main()
