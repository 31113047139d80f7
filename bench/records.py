"""Defines the row of one provider on one case, the record that holds rows, and command lines."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import measure
from bench.measure import Timing

SCHEMA = 2


@dataclass
class Row:
    """One provider on one case."""

    case: str  # label
    provider: str
    family: str = ""
    sweep: tuple[str, int] = ("", 0)  # the curve that the case is a point of, and its place
    shape: str = ""
    source: str = ""
    status: str = "ok"  # or "red" (wrong), "oom", "unavailable", "error", "untimed"
    detail: str = ""  # why it is not ok
    timing: dict[str, Timing] = field(default_factory=dict)  # milliseconds by mode
    peak_mib: float | None = None  # above inputs or weights, gradients included
    loss: float | None = None
    loss_error: float | None = None  # None where only a part was checked
    loss_budget: float | None = None
    gradient_error: float | None = None
    gradient_budget: float | None = None
    compile_s: float | None = None  # the first step: compilation, kernel builds
    samples: int = 0  # of steps
    gflop: dict[str, float] = field(default_factory=dict)  # least arithmetic
    more: dict[str, Any] = field(default_factory=dict)

    def ms(self, mode: str = "step") -> float | None:
        return self.timing[mode].median if mode in self.timing else None

    def tflops(self, mode: str = "step") -> float | None:
        """Rate on the least arithmetic, where it is counted."""
        gflop = sum(self.gflop.values()) if mode == "step" else self.gflop.get(mode)
        ms = self.ms(mode)
        return gflop / ms if gflop and ms else None

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Row:
        timing = {mode: Timing(**t) for mode, t in fields.get("timing", {}).items()}
        return cls(**{**fields, "timing": timing, "sweep": tuple(fields.get("sweep", ("", 0)))})


@dataclass
class Record:
    """The rows of one run, and what it was made by and on."""

    command: str
    machine: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    title: str = ""
    note: str = ""  # by whoever made the run: what its circumstances were
    is_complete: bool = False

    def save(self, path: Path | None) -> None:
        if path is not None:
            content = {"schema": SCHEMA, **asdict(self)}
            content["rows"] = [
                {k: v for k, v in asdict(row).items() if v not in (None, "", {}, ("", 0))}
                for row in self.rows
            ]
            # written next to the old file and moved over it: an interruption loses nothing
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(content, indent=1) + "\n")
            partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        fields = json.loads(path.read_text())
        schema = fields.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"{path.name} must have schema {SCHEMA}, got {schema}")
        return cls(**{**fields, "rows": [Row.of(row) for row in fields["rows"]]})

    def find(self, case: str, provider: str) -> Row | None:
        """Returns a provider's row of a case."""
        rows = (x for x in self.rows if (x.case, x.provider) == (case, provider))
        return next(rows, None)


def command_line(module: str, arguments: list[str]) -> str:
    """Returns what to type for the same run, without where its record went."""
    shown = list(arguments)
    if "--json" in shown:
        position = shown.index("--json")
        del shown[position : position + 2]
    return f"python -m {module} {shlex.join(shown)}".rstrip()


class Program(argparse.ArgumentParser):
    """The command line of a module that measures: where, into which file, and of which commit."""

    def __init__(self, module: str, documentation: str | None) -> None:
        super().__init__(
            prog=f"python -m {module}", description=documentation,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.module = module
        add = self.add_argument
        here = "cuda" if torch.cuda.is_available() else "cpu"
        add("--device", choices=("cpu", "cuda"), default=here,
            help="default: cuda if there is one")  # fmt: skip
        add("--json", type=Path, metavar="FILE", help="the record, saved as its parts come")
        add("--commit", default="", help="of a tree without its history")
        add("--note", default="", help="for the reader of the record")

    def begin(self, argv: list[str] | None) -> tuple[argparse.Namespace, Record]:
        """Returns the options, and an empty record."""
        options = self.parse_args(argv)
        device = torch.device(options.device)
        command = command_line(self.module, sys.argv[1:] if argv is None else argv)
        machine = measure.describe(device, options.commit)
        return options, Record(command, machine, note=options.note)
