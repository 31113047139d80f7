"""Tables of the records that say themselves what their columns are, for RESULTS.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import attention_matrix
from bench.records import cells
from bench.table import markdown_lines

Record = dict[str, Any]


def load(folder: Path) -> dict[str, Record]:
    """The records with a title, by name."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem)
    records = {path.stem: json.loads(path.read_text()) for path in paths}
    return {name: record for name, record in records.items() if "title" in record}


def render(records: dict[str, Record]) -> str:
    """A section for each record."""
    return "\n".join(
        _section(record.get("title", name), record) for name, record in records.items()
    )


def _section(title: str, record: Record) -> str:
    shown = {k: v for k, v in record["machine"].items() if k not in ("transformers", "driver")}
    machine = ", ".join(f"{k} {v}" if k != "device" else v for k, v in shown.items())
    command = f"    {record['command']}" if "command" in record else ""
    lines = []
    if columns := record.get("columns"):
        lines = markdown_lines(tuple(columns), (cells(columns, row) for row in record["rows"]))
    elif "copy_gbytes" in record:
        lines = attention_matrix.versus_lines(attention_matrix.Matrix.of(record))
    parts = (f"## {title}", command, f"{machine}.", record.get("note"), record.get("text"))
    return "\n\n".join(filter(None, (*parts, "\n".join(lines).strip()))) + "\n"
