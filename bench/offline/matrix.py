"""Every kernel for every GPU, compiled without one: what a block of threads takes of its limits.

    python -m bench.offline.matrix --targets sm_86 sm_120 --jobs 2  # goes on where it stopped
    python -m bench.offline.matrix --seconds 400  # begins no cell later
    python -m bench.offline.matrix --render  # writes docs/evidence/gpus.md's tables

Rows are in bench/results/gpus.csv as soon as a cell is compiled. A cell whose rows are there, of
any Triton, with the tiles that are chosen today is not compiled again; after a change of kernels
use --fresh. Each cell has a process of its own: a compiler that aborts is a result.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import triton
from tqdm import tqdm

from bench.offline import cells as offline_cells
from bench.offline.cells import DTYPES, WORK, Cell
from bench.offline.compile import TARGETS, compile_launch
from bench.table import between, markdown_lines

RECORD = Path("bench/results/gpus.csv")
DOCUMENT = Path("docs/evidence/gpus.md")


@dataclass(frozen=True, order=True)
class Row:
    """One kernel of a cell."""

    target: str
    work: str
    dtype: str
    head_dim: int
    variant: str
    kernel: str
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    shared_bytes: int
    spill_bytes: int  # of a thread
    registers: int  # of a thread
    triton: str  # the version that compiled it

    @property
    def cell(self) -> Cell:
        return Cell(self.target, self.work, self.dtype, self.head_dim, self.variant)

    @property
    def launch(self) -> tuple[Any, ...]:
        """What decides whether it has to be compiled again."""
        return astuple(self)[:10]


def compiled(cell: Cell, known: frozenset[tuple[Any, ...]] = frozenset()) -> list[Row]:
    """The rows of a cell; none for the launches that are known."""
    rows = []
    for name, launch in offline_cells.kernels_of(cell).items():
        what = (*astuple(cell), name, *offline_cells.tiles_of(launch))
        if what not in known:
            built = compile_launch(launch, cell.target)
            taken = (built.shared_bytes, built.spill_bytes, built.registers)
            version = ".".join(triton.__version__.split(".")[:2])
            rows.append(Row(*what, *taken, version))
    return rows


def load() -> list[Row]:
    """What was compiled, the last row of a kernel of a cell."""
    kinds = {f.name: int if f.type == "int" else str for f in fields(Row)}
    with RECORD.open() as file:
        rows = [Row(**{k: kinds[k](v) for k, v in x.items()}) for x in csv.DictReader(file)]
    return merged(rows)


def save(rows: list[Row]) -> None:
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(r) for r in sorted(rows))


# ----------------------------------------------------------------------------------------- table
COLUMNS = (
    "GPU", "dtype", "kernels compiled", "shared memory, KiB: largest", "limit",
    "spills, bytes per thread: largest", "in kernel", "registers per thread: largest",
)  # fmt: skip
OF_WORK = (
    "kernels", "combinations", "compiled", "equivalent to a compiled one",
)  # fmt: skip
TITLES = {
    "attention": "attention KL: forward, student gradients",
    "teacher": "attention KL: teacher gradients",
    "few queries": "attention KL: few queries (split-KV)",
    "head mean": "attention KL: teacher averaged over heads",
    "hopper": "attention KL: Hopper kernels (`hopper`)",
    "LM head": "LM-head KL",
    "row program": "row programs: dot products in tiles",
    "row program of heads": "row programs: sums over heads",
    "row program of LM heads": "row programs: LM heads",
}


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """A line for every target and dtype: the most that any kernel takes."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((r.target, r.dtype), []).append(r)
    lines = []
    order = [*TARGETS, *DTYPES]
    for target, dtype in sorted(groups, key=lambda key: [order.index(x) for x in key]):
        group = groups[target, dtype]
        worst = max(group, key=lambda r: r.spill_bytes)
        most = {n: max(getattr(r, n) for r in group) for n in ("shared_bytes", "registers")}
        size = f"head_dim {worst.head_dim}, " if worst.head_dim else ""
        where = f"{worst.kernel}, {size}{worst.variant}" if worst.spill_bytes else ""
        shared = (f"{x / 1024:.0f}" for x in (most["shared_bytes"], TARGETS[target].shared_bytes))
        spills = f"{worst.spill_bytes}", where, f"{most['registers']}"
        lines.append((target, dtype, f"{len(group)}", *shared, *spills))
    return lines


def coverage(rows: list[Row]) -> list[tuple[str, ...]]:
    """A line for every kind of work: how many of its cells were compiled."""
    done = {r.cell for r in rows}
    every = offline_cells.cells()
    same = {c for c in every if c not in done and offline_cells.twin(c) in done}
    return [
        (TITLES[w], *(f"{sum(c.work == w for c in cells)}" for cells in (every, done, same)))
        for w in WORK
    ]


def render() -> None:
    """Write the tables of what was compiled into docs/evidence/gpus.md."""
    rows = load()
    versions = " and ".join(sorted({r.triton for r in rows}))
    note = f"{len(rows)} kernels, compiled by Triton {versions}:"
    text = between(DOCUMENT.read_text(), "coverage", markdown_lines(OF_WORK, coverage(rows)))
    lines = (note, "", *markdown_lines(COLUMNS, table(rows)))
    DOCUMENT.write_text(between(text, "matrix", lines))


Specialized = frozenset[tuple[Any, ...]]  # launches that need not be compiled
Found = tuple[Cell, list[Row] | str]  # or why there are none


def _work(cell: Cell, known: Specialized, to: Connection) -> None:
    try:
        to.send(compiled(cell, known))
    except Exception as error:  # what does not compile is a result, and the others go on
        lines = str(error).strip().splitlines() or [""]
        to.send(f"{type(error).__name__}: {lines[-1]}")


def compile_all(
    items: Sequence[tuple[Cell, Specialized]], jobs: int, seconds: float
) -> Iterator[Found]:
    """Cells as they finish, each in a process; after so many seconds none is begun."""
    processes = multiprocessing.get_context("fork")
    stop = time.monotonic() + seconds
    left, running = list(reversed(items)), {}
    while running or (left and time.monotonic() < stop):
        while left and len(running) < jobs and time.monotonic() < stop:
            cell, known = left.pop()
            mine, its = processes.Pipe(duplex=False)
            process = processes.Process(target=_work, args=(cell, known, its))
            process.start()
            its.close()
            running[mine] = cell, process
        for mine in wait(list(running)):
            assert isinstance(mine, Connection)
            cell, process = running.pop(mine)
            try:
                found = mine.recv()
            except EOFError:
                found = ""
            process.join()
            yield cell, found if found != "" else f"the compiler died: {process.exitcode}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--targets", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS))
    add("--work", nargs="+", choices=WORK, default=WORK)
    add("--jobs", type=int, default=2)
    add("--seconds", type=float, default=float("inf"), help="begin no cell later")
    add("--fresh", action="store_true", help="forget what was compiled")
    add("--render", action="store_true", help="only write the tables")
    options = parser.parse_args(arguments)
    if options.render:
        render()
        return 0
    rows = [] if options.fresh else load()
    launches: dict[Cell, set[tuple[Any, ...]]] = {}
    for r in rows:
        launches.setdefault(r.cell, set()).add(r.launch)
    wanted = offline_cells.cells(options.work, options.targets)
    items = [(c, frozenset(launches.get(c, ()))) for c in wanted]
    failed = 0
    found_cells = compile_all(items, options.jobs, options.seconds)
    for cell, found in tqdm(found_cells, total=len(items)):
        if isinstance(found, str):
            failed += 1
            tqdm.write(f"{cell}: {found}")
        else:
            rows = merged(rows, found)
            save(rows)
    render()
    return int(failed > 0)


def merged(*records: list[Row]) -> list[Row]:
    """One row for a kernel of a cell, of the record that is named last."""
    return list({(*astuple(r.cell), r.kernel): r for rows in records for r in rows}.values())


if __name__ == "__main__":
    raise SystemExit(main())
