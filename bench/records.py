"""One result, and the file that holds a run."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
        """Written beside the old file and moved over it, so that an interruption loses nothing."""
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)
        partial = path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(path)

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
