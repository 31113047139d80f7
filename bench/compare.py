"""Another commit of the library next to this one: `python -m bench --base REF`.

The base is unpacked into a temporary directory. This benchmark's code measures both versions in
processes of their own and interleaved: base, head, base, head for each case, so that a drifting
machine meets both alike.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench import table
from bench.machine import ROOT
from bench.records import Record, Run

VISITS = 2
DEFAULT_PROVIDERS = ("streamkl", "direct")
VERSIONS = ("base", "head")


def child_arguments(options: argparse.Namespace, providers: list[str]) -> list[str]:
    """What a measuring process is told next to its case."""
    arguments = ["--device", options.device, "--providers", *providers]
    for name in ("dtype", "seconds", "memory_limit_gib"):
        value = getattr(options, name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments + ["--quick"] * options.quick + ["--alone"] * options.alone


def compare(base: str, labels: list[str], arguments: list[str], run: Run, path: Path) -> None:
    """Fills ``run`` with records of both versions, case by case."""
    with library_at(base) as base_path, library_at() as head_path:
        for label in labels:
            visits: dict[str, list[Run]] = {version: [] for version in VERSIONS}
            for visit in range(VISITS):
                for version, library in zip(VERSIONS, (base_path, head_path), strict=True):
                    print(f"{label}: {version}, visit {visit + 1} of {VISITS}", file=sys.stderr)
                    visits[version].append(_measure(library, label, arguments))
            for version in VERSIONS:
                run.records += best(version, visits[version])
            run.save(path)
            print(text([r for r in run.records if r.case == label]), flush=True)


def best(version: str, visits: list[Run]) -> list[Record]:
    """For every provider the visit with the smaller median: other programs only add time."""
    chosen = []
    for records in zip(*(visit.records for visit in visits), strict=True):
        timed = [r for r in records if r.timing and r.status == "ok"]
        record = min(timed, key=lambda r: r.timing["step"].median_ms) if timed else records[0]
        chosen.append(replace(record, version=version))
    return chosen


def text(records: list[Record]) -> str:
    """One line for every provider: both versions' step and peak."""
    lines = [records[0].case]
    for head in (r for r in records if r.version == "head" and r.status != "unavailable"):
        base = next(r for r in records if r.version == "base" and r.provider == head.provider)
        if head.status != "ok" or base.status != "ok":
            states = (f"{r.version} {r.status} {r.detail}" for r in (base, head))
            lines.append(f"  {head.provider}: {', '.join(states)}")
            continue
        old, new = base.timing["step"].median_ms, head.timing["step"].median_ms
        memory = f"{table.number(base.peak_mib or 0)} -> {table.number(head.peak_mib or 0)} MiB"
        time = f"{table.number(old)} -> {table.number(new)} ms ({old / new:.2f}x)"
        lines.append(f"  {head.provider}: step {time}, peak {memory}")
    return "\n".join(lines)


@contextmanager
def library_at(ref: str = "") -> Iterator[Path]:
    """A directory to import the package from: as it was at ``ref``, or as the files are now."""
    with tempfile.TemporaryDirectory() as directory:
        tree, site = ROOT, Path(directory) / "site"
        if ref:
            tree = Path(directory) / "tree"
            archive = subprocess.run(
                ["git", "-C", str(ROOT), "archive", ref, "torch_streamkl", "fx_passes"],
                capture_output=True,
            )
            if archive.returncode:
                raise ValueError(f"--base must name a commit, got {ref!r}")
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(tree, filter="data")
        # An editable install maps torch_streamkl.fx_passes to this checkout, whichever
        # torch_streamkl is imported. Only a package that contains its fx_passes is independent.
        package = site / "torch_streamkl"
        package.mkdir(parents=True)
        for entry in (tree / "torch_streamkl").iterdir():
            (package / entry.name).symlink_to(entry)
        (package / "fx_passes").symlink_to(tree / "fx_passes")
        (site / "bench").symlink_to(ROOT / "bench")
        yield site


def _measure(library: Path, label: str, arguments: list[str]) -> Run:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "visit.json"
        what = ["--exact-case", label, "--json", str(path), *arguments]
        child = subprocess.run(
            [sys.executable, "-P", "-m", "bench", *what],
            env={**os.environ, "PYTHONPATH": str(library)}, capture_output=True, text=True,
        )  # fmt: skip
        if child.returncode:
            raise RuntimeError(f"measuring {label} failed:\n{child.stderr[-2000:]}")
        return Run.load(path)
