"""Runs mutation tests: changes one line at a time, and names the test that fails.

    python -m tests.mutations                # all; writes the table of docs/evidence/mutations.md
    python -m tests.mutations --only rowstate

A mutation is applied in a copy of the tree, and the tests that are written next to it run there
until one fails. A mutation that no test catches is a hole in the tests. Each runs in a process
that is forked from one that has imported torch, and has no threads.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch  # noqa: F401  # here, once, for all processes that are forked

from tests.support.mutations import FAULTS, Fault

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "evidence" / "mutations.md"
BEGIN, END = "<!-- faults:begin -->\n", "<!-- faults:end -->\n"
PARTS = (
    "torch_streamkl",
    "fx_passes",
    "tests",
    "bench",
    "docs",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def tree(folder: Path) -> Path:
    """A copy of what the tests need, in which torch_streamkl has its fx_passes inside."""
    ignored = shutil.ignore_patterns("__pycache__", "results", "notes")
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy(source, folder / name)
    inside = folder / "torch_streamkl" / "fx_passes"
    if inside.is_symlink():
        inside.unlink()
    inside.symlink_to(folder / "fx_passes")
    return folder


def plant(fault: Fault, folder: Path) -> None:
    path = folder / fault.path
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.path} must have once: {fault.old!r}")
    path.write_text(text.replace(fault.old, fault.new))


def heal(fault: Fault, folder: Path) -> None:
    shutil.copy(ROOT / fault.path, folder / fault.path)


def caught_by(fault: Fault, folders: Path) -> str:
    """The test that fails with a mutation in this process's own copy of the tree."""
    folder = folders / str(os.getpid())
    if not folder.exists():
        folder.mkdir()
        tree(folder)
    plant(fault, folder)
    caught = outcome(fault.tests, folder, fault.interpreted)
    heal(fault, folder)
    return caught


def outcome(tests: str, folder: Path, interpreted: bool) -> str:
    """The test that fails in a forked process, "" where none does."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            text = _first_failure(tests, folder, interpreted)
        except BaseException as error:
            text = f"no run: {type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def _first_failure(tests: str, folder: Path, interpreted: bool) -> str:
    import pytest

    os.chdir(folder)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [
        n for n in sys.modules if n.split(".")[0] in ("torch_streamkl", "tests", "bench")
    ]:
        del sys.modules[name]
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    arguments = [f"tests/{x}" if ".py" in x else x for x in tests.split()]

    class Failures:
        found = ""
        passed = 0

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.found:
                self.found = report.nodeid
            self.passed += report.passed and report.when == "call"

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.found:
                self.found = f"no run: {report.nodeid} is not collected"

    failures = Failures()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
        pytest.main([*options, *arguments], plugins=[failures])
    if not failures.found and not failures.passed:
        return "no run: no test was selected"
    return failures.found


def line(fault: Fault, caught: str) -> str:
    """A row of the table."""
    parts = [" ".join(x.split()) for x in (fault.old, fault.new)]
    cells = [f"`{fault.path}`", *(f"`{x}`" for x in parts), f"`{caught.removeprefix('tests/')}`"]
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def write(rows: dict[Fault, str]) -> None:
    """The table with these rows new; the others stay, in the order of the faults."""
    text = DOCUMENT.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    old = text.split(BEGIN)[1].split(END)[0].splitlines()

    def row(fault: Fault) -> str:
        name = line(fault, "").removesuffix("`` |")
        return rows.get(fault) or next((x for x in old if x.startswith(name)), f"{name}not run |")

    head = ["| file | original line | mutation | caught by |", "| --- | --- | --- | --- |"]
    table = "\n".join([*head, *map(row, FAULTS)])
    DOCUMENT.write_text(f"{before}{BEGIN}{table}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="whose path, old or new text holds one of these"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    parser.add_argument(
        "--interpreted", choices=("yes", "no"), help="only those, or none, whose tests interpret"
    )
    options = parser.parse_args()
    interpreted = {"yes": (True,), "no": (False,)}.get(options.interpreted, (True, False))
    chosen = [
        f for f in FAULTS
        if any(x in f.path + f.old + f.new for x in options.only) and f.interpreted in interpreted
    ]  # fmt: skip
    escaped, rows = 0, {}
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(options.jobs, mp_context=context) as pool,
    ):
        runs = {pool.submit(caught_by, fault, Path(directory)): fault for fault in chosen}
        for run in as_completed(runs):
            fault, caught = runs[run], run.result()
            is_caught = bool(caught) and not caught.startswith("no run")
            escaped += not is_caught
            state = caught if is_caught else f"NOT CAUGHT {caught}"
            print(f"{fault.path}: {' '.join(fault.new.split())[:60]}: {state}", flush=True)
            rows[fault] = line(fault, caught if is_caught else "not caught")
            write(rows)
    print(f"{len(chosen) - escaped} of {len(chosen)} caught")
    return int(escaped > 0)


if __name__ == "__main__":
    raise SystemExit(main())
