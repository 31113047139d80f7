"""One result, the file that holds a run, and what every program is told on its command line."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.accuracy import Verdict
from bench.measure import Timing

SCHEMA = 1


@dataclass
class Record:
    """One provider on one case."""

    family: str
    case: str  # label
    sweep: tuple[str, int]
    shape: str
    source: str
    provider: str
    status: str = "ok"  # or "red" (accuracy), "oom", "unavailable", "error"
    detail: str = ""  # why it is not ok
    timing: dict[str, Timing] = field(default_factory=dict)  # by mode
    tflops: dict[str, float] = field(default_factory=dict)  # by mode, on the least work
    attention_tflops: dict[str, float] = field(
        default_factory=dict
    )  # of the library's attention at this shape
    least_gflop: dict[str, float] = field(default_factory=dict)
    least_mib: dict[str, float] = field(
        default_factory=dict
    )  # inputs read once, outputs written once
    peak_mib: float | None = None  # above inputs, gradients included
    compile_s: float | None = None  # the first step: compilation, kernel builds
    samples: int = 0  # of steps
    verdict: Verdict | None = None
    version: str = ""  # "head" or "base" when two commits are compared

    def share_of_attention(self, mode: str) -> float | None:
        rate = self.attention_tflops.get(mode)
        return self.tflops[mode] / rate if rate and mode in self.tflops else None


def command_line(module: str, arguments: list[str]) -> str:
    """What to type for the same run, without where its records went."""
    shown = list(arguments)
    for option in ("--json", "--out"):
        if option in shown:
            position = shown.index(option)
            del shown[position : position + 2]
    return f"python -m {module} {shlex.join(shown)}".rstrip()


def save(content: dict[str, Any], path: Path) -> None:
    """Written next to the old file and moved over it, so that an interruption loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


class Program(argparse.ArgumentParser):
    """Of a module that measures: with where, into which file, and of which commit."""

    def __init__(self, module: str, documentation: str | None, devices: bool = True) -> None:
        super().__init__(
            prog=f"python -m {module}",
            description=documentation,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.module = module
        if devices:
            here = "cuda" if torch.cuda.is_available() else "cpu"
            self.add_argument(
                "--device",
                choices=("cpu", "cuda"),
                default=here,
                help="default: cuda if there is one",
            )
        self.add_argument(
            "--json", type=Path, metavar="FILE", help="the record, saved as its parts come"
        )
        self.add_argument("--commit", default="", help="of a tree without its history")
        self.add_argument("--note", default="", help="for the reader of the record")

    def begin(self, argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
        """The options, and the head of the record: by what and on what it was made."""
        options = self.parse_args(argv)
        device = torch.device(getattr(options, "device", "cpu"))
        return options, {
            "command": command_line(self.module, sys.argv[1:] if argv is None else argv),
            "machine": machine.describe(device, options.commit),
            "note": options.note,
        }


def cells(columns: dict[str, str], row: dict[str, Any]) -> tuple[str, ...]:
    """Of columns, each a heading and a format of the row's fields; empty where one is missing."""

    def cell(template: str) -> str:
        try:
            return template.format_map(row)
        except KeyError:
            return ""

    return tuple(cell(template) for template in columns.values())


@dataclass
class Rows:
    """A record whose rows are of a kind of their own; saved after each."""

    title: str  # of its table
    columns: dict[str, str]
    head: dict[str, Any]
    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(" | ".join(cells(self.columns, row)), flush=True)
        if self.path is not None:
            about = {"title": self.title, **self.head, "columns": self.columns}
            save(about | {"rows": self.rows}, self.path)


@dataclass
class Run:
    """All records of one invocation."""

    command: str
    machine: dict[str, str]
    dtype: str
    ceilings: dict[str, float]  # matmul_tflops, copy_gbytes
    records: list[Record] = field(default_factory=list)
    end_to_end: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = False
    note: str = ""  # by whoever made the run: what its circumstances were

    def save(self, path: Path) -> None:
        save({"schema": SCHEMA, **asdict(self)}, path)

    @classmethod
    def load(cls, path: Path) -> Run:
        fields = json.loads(path.read_text())
        schema = fields.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"{path.name} must have schema {SCHEMA}, got {schema}")
        fields["records"] = [_record(r) for r in fields["records"]]
        return cls(**fields)


def _record(fields: dict[str, Any]) -> Record:
    fields["sweep"] = tuple(fields["sweep"])
    fields["timing"] = {mode: Timing(**t) for mode, t in fields["timing"].items()}
    fields["verdict"] = Verdict(**fields["verdict"]) if fields["verdict"] else None
    return Record(**fields)
