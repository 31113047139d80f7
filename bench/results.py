"""Writes RESULTS.md, and the tables of other libraries in README and docs, from the records.

python -m bench.results
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from bench.attention import DTYPES
from bench.heads import QWEN, QWEN_SMALL
from bench.measure import ROOT
from bench.records import Record, Row
from bench.table import between, markdown_lines, number

FOLDER = ROOT / "bench" / "results"
TARGET = ROOT / "bench" / "RESULTS.md"
NOTES = ("hopper_", "gloo-")  # records of these are shown in bench/notes alone
COLUMNS = ("eager", "inductor", "streamkl", "direct")
FAMILIES = {
    "attention": "Attention KL", "heads": "LM heads", "programs": "Row programs",
    "steps": "Training steps", "first steps": "First step of a process",
    "shared": "Several GPUs",
    "matrix": "attention_kl by head_dim, mask and dtype: TFLOP/s",
}  # fmt: skip
INTRODUCTION = """# Results

`python -m bench.results` writes this page from the records in [results/](results/).

- A cell has milliseconds of a step (loss and the student's gradients) and peak MiB.
- Times are medians of interleaved rounds. Peaks are above the inputs, or above the weights, and
  contain the gradients. With CUDA graphs, they contain all that the graphs reserve.
- "inductor" is torch.compile of the naive code, "streamkl" the same with our backend, "direct" an
  operator called by hand. `python -m bench --help` describes all providers.
- A result is red if its error against float64 exceeds twice that of naive code in the same dtype
  plus one rounding. Errors, quartiles, and versions are in the records.
"""


def load(folder: Path = FOLDER) -> dict[str, Record]:
    """Returns the records by name; the long run has a form of its own."""
    paths = sorted(folder.glob("*.json"))
    return {p.stem: Record.load(p) for p in paths if p.stem != "long_run"}


def render(records: dict[str, Record]) -> str:
    """Returns the whole document."""
    index = ("record", "device", "torch", "commit", "date", "command")
    parts = [INTRODUCTION, *markdown_lines(index, map(_about, records.items())), ""]
    shown = {name: r for name, r in records.items() if not name.startswith(NOTES)}
    for family, title in FAMILIES.items():
        columns = ("record", "case", *COLUMNS, "others")
        lines = [x for name, r in shown.items() for x in _lines(name, r.rows, family)]
        if family == "matrix":
            columns = ("case", "dtype and tokens: forward, backward")
            lines = _matrix(shown)
        if lines:
            parts += [f"## {title}", "", *markdown_lines(columns, lines), ""]
    return "\n".join(parts)


def _about(item: tuple[str, Record]) -> tuple[str, ...]:
    name, record = item
    about = [record.machine.get(k, "") for k in ("device", "torch", "commit", "date")]
    note = f" ({record.note})" if record.note else ""
    return (name, *about, f"`{record.command.replace('|', '/')}`{note}")


def _lines(name: str, rows: list[Row], family: str) -> Iterable[tuple[str, ...]]:
    mine = [row for row in rows if row.family == family]
    for case in dict.fromkeys(row.case for row in mine):
        cells = {row.provider: _cell(row) for row in mine if row.case == case}
        others = ", ".join(f"{k}: {v}" for k, v in cells.items() if k not in COLUMNS)
        yield (name, case, *(cells.get(k, "") for k in COLUMNS), others)


def _cell(row: Row) -> str:
    if row.status in ("oom", "error"):
        return "out of memory" if row.status == "oom" else "error"
    peak = f" {number(row.peak_mib)}" if row.peak_mib is not None else ""
    return number(row.ms()) + peak + (" red" if row.status == "red" else "")


def _matrix(records: dict[str, Record]) -> list[tuple[str, str]]:
    """Cases that differ in their dtypes and sizes alone are one line. The last record counts."""
    found: dict[str, dict[str, str]] = {}
    label = re.compile(rf"(.*?) ({'|'.join(DTYPES)}) \d+ x (.*) x (\d+)$")
    rows = [row for r in records.values() for row in r.rows if row.family == "matrix"]
    for row in (row for row in rows if row.provider == "direct"):
        parts = label.match(row.case)
        assert parts is not None, row.case
        what, dtype, heads, size = parts.groups()
        heads = heads.rpartition(" x ")[2]
        key = what if heads in ("32", "8") else f"{what} heads {heads}"
        rates = ", ".join(number(row.tflops(mode) or 0) for mode in ("forward", "backward"))
        found.setdefault(key, {})[f"{dtype} {size}"] = rates
    return [
        (name, "; ".join(f"{of}: {rates}" for of, rates in cells.items()))
        for name, cells in found.items()
    ]


# ------------------------------------------------------------------------------------------- peers
# the first that has a row
PEERS = ("h100-peers-topk", "h100-peers", "h100-peers-js", "h100-peers-compiled")
LIGER = ("liger_fused", "liger_chunked", "liger_kl")
PAGES = {"README.md": False, "docs/guide/comparison.md": True}  # and whether they show every row
LOSSES = {
    "": "forward KL", ", reverse_kl": "reverse KL", ", js": "JS", ", top 64": "cached top 64",
}  # fmt: skip


def peer(records: dict[str, Record], case: str, provider: str) -> Row | None:
    """Returns a library's row of a case, or the fastest of several providers' that are right."""
    if provider == "liger":
        rows = [row for name in LIGER if (row := peer(records, case, name))]
        return min(rows, key=lambda row: (row.status != "ok", row.ms() or 0), default=None)
    found = next((row for name in PEERS if (row := records[name].find(case, provider))), None)
    if found is None and provider == "direct" and case.endswith("top 64"):
        return peer(records, case, "program")
    return found


def peers_table(records: dict[str, Record], is_full: bool) -> list[str]:
    """Returns the table of other libraries: all of it, or the largest head at 8192 tokens."""
    providers = {"direct": "torch_streamkl", "inductor": "torch.compile", "trl": "TRL 1.16"}
    providers |= {name: f"Liger, `{name}`" for name in LIGER} | {
        "nitrobrew": "vocabulary chunks", "eager": "eager",
    } if is_full else {"liger": "Liger 0.8.5"}  # fmt: skip
    lines: list[tuple[str, ...]] = []
    errors = dict.fromkeys(providers, 0.0)
    sizes = {QWEN: "7B from 32B", QWEN_SMALL: "1.7B from 8B"} if is_full else {QWEN: "7B from 32B"}
    for head, what in sizes.items():
        for tokens in (8192, 32768) if is_full else (8192,):
            for loss, title in LOSSES.items():
                case = f"{head.name} T={tokens} V={head.vocabulary}{loss}"
                rows = {name: peer(records, case, name) for name in providers}
                right = [row for row in rows.values() if row and row.status == "ok"]
                best = min(right, key=lambda row: row.ms() or 0)
                cells = (peer_cell(row, row is best) for row in rows.values())
                lines.append((f"{what}, {tokens:,} tokens, {title}", *cells))
                for name, row in rows.items():
                    errors[name] = max(errors[name], (row and row.gradient_error) or 0.0)
    if is_full:
        lines.append(("largest gradient error", *(f"{x:.1e}" for x in errors.values())))
    return markdown_lines(("Qwen, one NVIDIA H100", *providers.values()), lines)


def peer_cell(row: Row | None, is_best: bool) -> str:
    """Milliseconds and GiB; the fastest that is right is bold."""
    if row is None or row.status in ("oom", "unavailable"):
        return "" if row is None or row.status != "oom" else "out of memory"
    cell = f"{number(row.ms() or 0)} ms, {(row.peak_mib or 0) / 1024:.1f} GiB"
    return f"**{cell}**" if is_best else cell + (" (inexact)" if row.status == "red" else "")


def main() -> int:
    records = load()
    TARGET.write_text(render(records))
    for page, is_full in PAGES.items():
        path = ROOT / page
        path.write_text(between(path.read_text(), "peers", peers_table(records, is_full)))
    print(f"{TARGET} from {', '.join(records)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
