"""Every kernel for every GPU, compiled without one: what a block of threads takes of its limits.

    python -m bench.offline_matrix --targets sm_86 sm_120 --jobs 2  # goes on where it stopped
    python -m bench.offline_matrix --render  # writes docs/gpus.md's table

A row is appended to docs/gpus.csv as soon as it is compiled. A cell whose row is there with the
tiles that are chosen today is not compiled again; after a change of kernels use --fresh.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.offline import TARGETS, Launch, compile_launch, record_launches
from bench.table import markdown_lines
from torch_streamkl.functional import DIVERGENCES, named
from torch_streamkl.ops import problem_of
from torch_streamkl.problem import AttentionProblem, RowStatistics
from torch_streamkl.streaming import Wanted

RECORD = Path("docs/gpus.csv")
DOCUMENT = Path("docs/gpus.md")
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}
VARIANTS = ("plain", "clamped", "js", "masks")
# a head-averaged teacher has kernels of its own; few queries split keys over programs
WORK = ("attention", "teacher", "few queries", "head mean", "hopper")


@dataclass(frozen=True, order=True)
class Cell:
    """What is compiled together."""

    target: str
    work: str
    dtype: str
    head_dim: int
    variant: str


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

    @property
    def cell(self) -> Cell:
        return Cell(self.target, self.work, self.dtype, self.head_dim, self.variant)

    @property
    def launch(self) -> tuple[Any, ...]:
        """What decides whether it has to be compiled again."""
        return astuple(self)[:10]


def can_run(cell: Cell) -> bool:
    """Whether our kernels take the cell's dtype on the target."""
    if cell.target == "sm_75" and (
        cell.dtype in ("bf16", "tf32") or (cell.dtype == "fp16" and cell.head_dim > 128)
    ):
        return False  # no such matrix units: the blocked implementation runs it
    if cell.work == "hopper":
        plain = cell.variant in ("plain", "clamped")
        return (
            cell.target == "sm_90"
            and cell.dtype in ("bf16", "fp16")
            and cell.head_dim in (64, 128)
            and plain
        )
    return cell.work != "few queries" or cell.variant in ("plain", "js")


def problem(cell: Cell) -> AttentionProblem:
    """A causal problem of 32 query heads and 8 key heads (32 averaged ones for "head mean")."""
    few = cell.work == "few queries"
    seqlen_q, seqlen_k = (1, 8192) if few else (1024, 1024)
    head_mean = cell.work == "head mean"

    def empty(*shape: int, dtype: torch.dtype = DTYPES[cell.dtype]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    heads = (1, 1, 32, 8) if head_mean else (32, 8, 32, 8)
    q, k, teacher_q, teacher_k = (
        empty(1, h, n, cell.head_dim) for h, n in zip(heads, (seqlen_q, seqlen_k) * 2, strict=True)
    )
    options: dict[str, Any] = {}
    functional = DIVERGENCES["forward_kl"]
    if cell.variant == "clamped":
        functional = named("forward_kl", student_clamp=1e-12, teacher_clamp=1e-12).text
    elif cell.variant == "js":
        functional = named("js").text
    elif cell.variant == "masks":
        options["mask"] = empty(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
        options |= {"student_softcap": 30.0, "teacher_softcap": 30.0}
        options["student_bias"] = empty(1, q.shape[1], seqlen_q, seqlen_k, dtype=torch.float32)
        options["teacher_bias"] = empty(
            1, teacher_q.shape[1], seqlen_q, seqlen_k, dtype=torch.float32
        )
    scale = cell.head_dim**-0.5
    return problem_of(
        q, k, teacher_q, teacher_k, functional=functional, student_scale=scale,
        teacher_scale=scale, window_right=0, head_mean=head_mean, **options,
    )[0]  # fmt: skip


def launches_of(cell: Cell) -> list[Launch]:
    """What our launchers would run, the choice of tiles included."""
    from torch_streamkl.kernels import attention, head_mean_launch, hopper_attention

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if cell.dtype == "tf32" else "highest")
    try:
        with record_launches(cell.target) as launches:
            p = problem(cell)
            _, stats = RowStatistics.allocate(p)
            grad = torch.empty(p.student.q.shape[:3], device="cuda")
            of_student = Wanted(True, True, False, False)
            match cell.work:
                case "attention":
                    attention.forward(p)
                    attention.backward(p, stats, grad, of_student)
                case "teacher":
                    attention.backward(p, stats, grad, Wanted(False, False, True, True))
                case "few queries":
                    attention.forward(p)
                case "head mean":
                    head_mean_launch.forward(p)
                    head_mean_launch.backward(p, stats, grad, Wanted(True, True, True, True))
                case "hopper":
                    hopper_attention.forward(p)
                    hopper_attention.backward(p, stats, grad, of_student)
    finally:
        torch.set_float32_matmul_precision(precision)
    return launches


def name_of(launch: Launch) -> str:
    """The kernel, and whose side it is of where it takes either."""
    student = launch.args.get("STUDENT")
    name = launch.kernel.__name__.removesuffix("_kernel")
    return name if student is None else f"{name} {'student' if student else 'teacher'}"


def tiles_of(launch: Launch) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and stages; 0 where a kernel has none."""
    config, options = launch.args.get("CONFIG"), launch.options
    blocks = (getattr(config, name, 0) for name in ("BLOCK_M", "BLOCK_N"))
    return (*blocks, options["num_warps"], options.get("num_stages", 0))


def compiled(cell: Cell, known: frozenset[tuple[Any, ...]] = frozenset()) -> list[Row]:
    """The rows of a cell, each kernel once; none for the launches that are known."""
    rows: dict[str, Row] = {}
    for launch in launches_of(cell):
        what = (*astuple(cell), name_of(launch), *tiles_of(launch))
        if name_of(launch) not in rows and what not in known:
            built = compile_launch(launch, cell.target)
            taken = (built.shared_bytes, built.spill_bytes, built.registers)
            rows[name_of(launch)] = Row(*what, *taken)
    return list(rows.values())


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """The ones that say most first: every target before the next variant."""
    for w, variant, dim, dtype, target in itertools.product(
        options.work, options.variants, options.head_dims, options.dtypes, options.targets
    ):
        cell = Cell(target, w, dtype, dim, variant)
        if can_run(cell):
            yield cell


def load() -> list[Row]:
    """What was compiled, the last row of a kernel of a cell."""
    if not RECORD.exists():
        return []
    kinds = {f.name: int if f.type == "int" else str for f in fields(Row)}
    with RECORD.open() as file:
        rows = [Row(**{k: kinds[k](v) for k, v in x.items()}) for x in csv.DictReader(file)]
    return list({(*astuple(r.cell), r.kernel): r for r in rows}.values())


def save(rows: list[Row]) -> None:
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(r) for r in sorted(rows))


def append(rows: list[Row]) -> None:
    with RECORD.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(astuple(r) for r in rows)


# ----------------------------------------------------------------------------------------- table
COLUMNS = (
    "GPU", "type", "D", "kernels compiled", "shared KiB, most", "of", "spill bytes, most", "in",
    "registers, most",
)  # fmt: skip


def table(rows: list[Row]) -> list[tuple[str, ...]]:
    """A line for every target, dtype and head_dim: the most that any kernel takes."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for r in rows:
        groups.setdefault((r.target, r.dtype, r.head_dim), []).append(r)
    lines = []
    order = {name: i for i, name in enumerate((*TARGETS, *DTYPES))}
    for key in sorted(groups, key=lambda k: (order[k[0]], order[k[1]], k[2])):
        target, dtype, head_dim = key
        group = groups[key]
        worst = max(group, key=lambda r: r.spill_bytes)
        shared = max(r.shared_bytes for r in group) / 1024
        where = f"{worst.kernel}, {worst.variant}" if worst.spill_bytes else ""
        room = TARGETS[target].shared_bytes // 1024
        most = max(r.registers for r in group)
        lines.append(
            (target, dtype, f"{head_dim}", f"{len(group)}", f"{shared:.0f}", f"{room}",
             f"{worst.spill_bytes}", where, f"{most}")
        )  # fmt: skip
    return lines


def render() -> None:
    """Write the table of what was compiled into docs/gpus.md."""
    rows = load()
    targets = len({r.target for r in rows})
    note = f"{len(rows)} kernels of {len({r.cell for r in rows})} cells, {targets} GPUs."
    lines = [note, "", *markdown_lines(COLUMNS, table(rows))]
    between(DOCUMENT, "matrix", "\n".join(lines))


def between(path: Path, name: str, text: str) -> None:
    """Replace what lies between two marks of a document."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def _work(item: tuple[Cell, frozenset[tuple[Any, ...]]]) -> tuple[Cell, list[Row] | str]:
    try:
        return item[0], compiled(*item)
    except Exception as error:  # what does not compile is a result, and the others go on
        return item[0], f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--targets", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS))
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="forget what was compiled")
    parser.add_argument("--render", action="store_true", help="only write the table")
    options = parser.parse_args(arguments)
    if options.render:
        render()
        return 0
    known = [] if options.fresh else load()
    save(known)
    wanted = list(cells(options))
    launches: dict[Cell, set[tuple[Any, ...]]] = {}
    for r in known:
        launches.setdefault(r.cell, set()).add(r.launch)
    items = [(c, frozenset(launches.get(c, ()))) for c in wanted]
    failed = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for cell, found in tqdm(pool.map(_work, items), total=len(items)):
            if isinstance(found, str):
                failed += 1
                tqdm.write(f"{cell}: {found}")
            else:
                append(found)
    save(load())
    render()
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
