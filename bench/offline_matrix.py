"""Every kernel for every GPU, compiled without one: what a block of threads takes of its limits.

    python -m bench.offline_matrix --targets sm_86 sm_120 --jobs 2  # goes on where it stopped
    python -m bench.offline_matrix --seconds 400 --record out/gpus.csv  # stops in time
    python -m bench.offline_matrix --add out/gpus.csv  # into docs/gpus.csv
    python -m bench.offline_matrix --render  # writes docs/gpus.md's table

Rows are appended to docs/gpus.csv as soon as a cell is compiled. A cell whose rows are there, of
any Triton, with the tiles that are chosen today is not compiled again; after a change of kernels
use --fresh. Each cell has a process of its own: a compiler that aborts is a result.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

from bench.offline import TARGETS, Launch, compile_launch, record_launches
from bench.table import markdown_lines
from torch_streamkl.attention.blocked import Wanted
from torch_streamkl.attention.ops import problem_of
from torch_streamkl.attention.problem import AttentionProblem, RowStatistics
from torch_streamkl.divergences.functional import DIVERGENCES, Functional, named
from torch_streamkl.linear.problem import Head, LinearProblem, RowValues, RowWeights
from torch_streamkl.linear.problem import Wanted as OfHeads
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.tensors import Inputs, keys_of, normalised
from torch_streamkl.rows.trace import Tracer, trace

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
# a head-averaged teacher has kernels of its own; few queries split keys over programs; LM heads,
# whole and as shards of the vocabulary, have rows of words instead of a head_dim
WORK = ("attention", "teacher", "few queries", "head mean", "hopper", "LM head", "row program")


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
    triton: str  # the version that compiled it

    @property
    def cell(self) -> Cell:
        return Cell(self.target, self.work, self.dtype, self.head_dim, self.variant)

    @property
    def launch(self) -> tuple[Any, ...]:
        """What decides whether it has to be compiled again."""
        return astuple(self)[:10]


def can_run(cell: Cell) -> bool:
    """Whether our kernels take the cell's dtype on the target."""
    no_units = cell.dtype == "tf32" or (cell.dtype == "bf16" and cell.work != "LM head")
    if cell.target == "sm_75" and (no_units or (cell.dtype == "fp16" and cell.head_dim > 128)):
        return False  # the blocked implementation runs it
    if cell.work == "hopper":
        plain = cell.variant in ("plain", "clamped")
        return (
            cell.target == "sm_90"
            and cell.dtype in ("bf16", "fp16")
            and cell.head_dim in (64, 128)
            and plain
        )
    if cell.work == "LM head":
        return cell.dtype != "tf32" and cell.head_dim == 0
    if cell.work == "row program" and cell.variant in ("clamped", "js"):
        return False
    return cell.head_dim > 0 and (cell.work != "few queries" or cell.variant in ("plain", "js"))


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
    if cell.variant == "masks":
        options["mask"] = empty(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
        options |= {"student_softcap": 30.0, "teacher_softcap": 30.0}
        options["student_bias"] = empty(1, q.shape[1], seqlen_q, seqlen_k, dtype=torch.float32)
        options["teacher_bias"] = empty(
            1, teacher_q.shape[1], seqlen_q, seqlen_k, dtype=torch.float32
        )
    scale = cell.head_dim**-0.5
    return problem_of(
        q, k, teacher_q, teacher_k, functional=functional(cell), student_scale=scale,
        teacher_scale=scale, window_right=0, head_mean=head_mean, **options,
    )[0]  # fmt: skip


def functional(cell: Cell) -> str:
    """The divergence of a variant."""
    if cell.variant == "clamped":
        return named("forward_kl", student_clamp=1e-12, teacher_clamp=1e-12).text
    return named("js").text if cell.variant == "js" else DIVERGENCES["forward_kl"]


def lm_head(cell: Cell) -> LinearProblem:
    """Rows of 152,064 words; with "masks" also labels, a temperature, biases and softcaps."""
    tokens, words, more = 512, 152064, cell.variant == "masks"

    def head(width: int) -> Head:
        hidden, weight = (
            torch.empty(n, width, dtype=DTYPES[cell.dtype], device="cuda") for n in (tokens, words)
        )
        bias = torch.empty(words, device="cuda") if more else None
        return Head(hidden, weight, bias, softcap=30.0 if more else 0.0)

    labels = torch.empty(tokens, dtype=torch.int64, device="cuda") if more else None
    temperature = 2.0 if more else 1.0
    kl = Functional.of(functional(cell))
    return LinearProblem(head(3584), head(5120), kl, temperature, labels)


def _launch_lm_head(cell: Cell) -> None:
    from torch_streamkl.linear.triton import launches as row_kernels
    from torch_streamkl.linear.triton import shards as shard_kernels

    p = lm_head(cell)
    logits = [torch.empty(512, 152064, dtype=DTYPES[cell.dtype], device="cuda") for _ in range(2)]
    each = torch.empty(512, device="cuda")
    weights = RowWeights(each, None if p.labels is None else each)
    out, both = RowValues.allocate(p), OfHeads(student_hidden=True, student_weight=True)
    row_kernels.values(p, *logits, out)
    row_kernels.values_and_gradient(p, *logits, out, weights, both)
    row_kernels.gradient(p, *logits, out, weights, both)
    if p.functional.bilinear is not None:
        shard_kernels.state(p, *logits, torch.empty(8, 512, device="cuda"))
        shard_kernels.merged(p, torch.empty(4, 8, 512, device="cuda"), 152064, out)
    else:
        shard_kernels.sums(p, *logits, out, torch.empty(3, 512, device="cuda"))


def _launch_row_program(cell: Cell) -> None:
    """KL weighted by key; with "masks" also a dense mask and a dense bias."""
    from torch_streamkl.rows.triton import launches as row_programs

    def weighted(e: Any) -> Any:
        scores = torch.where(e.hidden, -torch.inf, e.t + e.bias) if more else e.t
        p = scores.softmax("key") * e.weight
        return (p * (p.log() - e.s.log_softmax("key"))).sum("key")

    more = cell.variant == "masks"
    shapes = ((1, 32, 1024, cell.head_dim), (1, 8, 1024, cell.head_dim))
    q, k = (torch.empty(shape, dtype=DTYPES[cell.dtype], device="cuda") for shape in shapes)
    dense = {"hidden": torch.bool, "bias": torch.float32} if more else {}
    pairs = {n: torch.empty(1, 1, 1024, 1024, dtype=t, device="cuda") for n, t in dense.items()}
    keys = {"weight": torch.empty(1, 1, 1024, device="cuda")}
    given = normalised(Inputs({"s": (q, k), "t": (q, k)}, {}, keys, pairs, {}, None, None))
    tracer = Tracer(
        given.dot_heads, given.captures, keys_of(given, True, (None, None)), given.num_heads
    )
    program = trace(weighted, given.dot_names, given.capture_names, tracer).program
    p = RowProblem.of(program.text, given.tensors)
    result = row_programs.forward(p, True)
    grads = [torch.empty(1, 32, 1024, device="cuda") for _ in program.outputs]
    row_programs.backward(p, result, grads, [True] * 4 + [False] * len(given.captures))


def launches_of(cell: Cell) -> list[Launch]:
    """What our launchers would run, the choice of tiles included."""
    from torch_streamkl.attention.hopper import launches as hopper
    from torch_streamkl.attention.triton import head_mean_launches
    from torch_streamkl.attention.triton import launches as portable

    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if cell.dtype == "tf32" else "highest")
    try:
        with record_launches(cell.target) as launches:
            if cell.work == "LM head":
                _launch_lm_head(cell)
                return launches
            if cell.work == "row program":
                _launch_row_program(cell)
                return launches
            p = problem(cell)
            _, stats = RowStatistics.allocate(p)
            grad = torch.empty(p.student.q.shape[:3], device="cuda")
            of_student = Wanted(True, True, False, False)
            match cell.work:
                case "attention":
                    portable.forward(p)
                    portable.backward(p, stats, grad, of_student)
                case "teacher":
                    portable.backward(p, stats, grad, Wanted(False, False, True, True))
                case "few queries":
                    portable.forward(p)
                case "head mean":
                    head_mean_launches.forward(p)
                    head_mean_launches.backward(p, stats, grad, Wanted(True, True, True, True))
                case "hopper":
                    hopper.forward(p)
                    hopper.backward(p, stats, grad, of_student)
    finally:
        torch.set_float32_matmul_precision(precision)
    return launches


def name_of(launch: Launch) -> str:
    """The kernel, whose side it is of where it takes either, what it writes of rows of logits."""
    student, config = launch.args.get("STUDENT"), launch.args.get("CONFIG")
    name = launch.kernel.__name__.removesuffix("_kernel")
    if name == "row":
        parts = {"values": config.VALUES, "gradient": config.S_GRAD}  # type: ignore[union-attr]
        return " ".join([name, *(part for part, is_there in parts.items() if is_there)])
    return name if student is None else f"{name} {'student' if student else 'teacher'}"


def tiles_of(launch: Launch) -> tuple[int, int, int, int]:
    """Rows and keys of a tile, warps and stages; 0 where a kernel has none."""
    config, options = launch.args.get("CONFIG"), launch.options
    blocks = (getattr(config, name, launch.args.get(name, 0)) for name in ("BLOCK_M", "BLOCK_N"))
    return (*blocks, options["num_warps"], options.get("num_stages", 0))


def kernels_of(cell: Cell) -> dict[str, Launch]:
    """The different kernels of a cell by name; what has one name twice has numbers."""
    found: dict[str, Launch] = {}
    for launch in launches_of(cell):
        name = name_of(launch)
        alike = [x for n, x in found.items() if n.rstrip(" 23456789") == name]
        if not any(_constants(x) == _constants(launch) for x in alike):
            found[f"{name} {len(alike) + 1}" if alike else name] = launch
    return found


def _constants(launch: Launch) -> tuple[Any, ...]:
    values = [launch.args[p.name] for p in launch.kernel.params if p.is_constexpr]
    return (launch.kernel, *values)


def compiled(cell: Cell, known: frozenset[tuple[Any, ...]] = frozenset()) -> list[Row]:
    """The rows of a cell; none for the launches that are known."""
    rows = []
    for name, launch in kernels_of(cell).items():
        what = (*astuple(cell), name, *tiles_of(launch))
        if what not in known:
            built = compile_launch(launch, cell.target)
            taken = (built.shared_bytes, built.spill_bytes, built.registers)
            version = ".".join(triton.__version__.split(".")[:2])
            rows.append(Row(*what, *taken, version))
    return rows


def cells(
    work: Sequence[str],
    variants: Sequence[str],
    head_dims: Sequence[int],
    dtypes: Sequence[str],
    targets: Sequence[str],
) -> Iterator[Cell]:
    """The ones that say most first: every target before the next variant."""
    for w, variant, dim, dtype, target in itertools.product(
        work, variants, (0, *head_dims), dtypes, targets
    ):
        cell = Cell(target, w, dtype, dim, variant)
        if can_run(cell):
            yield cell


def load(record: Path = RECORD) -> list[Row]:
    """What was compiled, the last row of a kernel of a cell."""
    if not record.exists():
        return []
    kinds = {f.name: int if f.type == "int" else str for f in fields(Row)}
    with record.open() as file:
        rows = [Row(**{k: kinds[k](v) for k, v in x.items()}) for x in csv.DictReader(file)]
    return merged(rows)


def save(rows: list[Row], record: Path = RECORD) -> None:
    with record.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(r) for r in sorted(rows))


def append(rows: list[Row], record: Path = RECORD) -> None:
    with record.open("a", newline="") as file:
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
            (target, dtype, f"{head_dim or 'words'}", f"{len(group)}", f"{shared:.0f}", f"{room}",
             f"{worst.spill_bytes}", where, f"{most}")
        )  # fmt: skip
    return lines


def render() -> None:
    """Write the table of what was compiled into docs/gpus.md."""
    rows = load()
    done = {r.cell for r in rows}
    every = list(cells(WORK, VARIANTS, HEAD_DIMS, tuple(DTYPES), tuple(TARGETS)))
    counts = [
        f"{w} {sum(c.work == w for c in done)} of {sum(c.work == w for c in every)}" for w in WORK
    ]
    versions = sorted({r.triton for r in rows})
    note = f"{len(rows)} kernels, by Triton {' and '.join(versions)}. Cells: {', '.join(counts)}."
    lines = [note, "", *markdown_lines(COLUMNS, table(rows))]
    between(DOCUMENT, "matrix", "\n".join(lines))


def between(path: Path, name: str, text: str) -> None:
    """Replace what lies between two marks of a document."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, rest = path.read_text().split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


Known = frozenset[tuple[Any, ...]]  # launches that need not be compiled
Found = tuple[Cell, list[Row] | str]  # or why there are none


def _work(cell: Cell, known: Known, to: Connection) -> None:
    try:
        to.send(compiled(cell, known))
    except Exception as error:  # what does not compile is a result, and the others go on
        lines = str(error).strip().splitlines() or [""]
        to.send(f"{type(error).__name__}: {lines[-1]}")


def compile_all(items: Sequence[tuple[Cell, Known]], jobs: int, seconds: float) -> Iterator[Found]:
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
    parser.add_argument("--targets", nargs="+", choices=tuple(TARGETS), default=tuple(TARGETS))
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell later")
    parser.add_argument("--record", type=Path, default=RECORD, help="where new rows go")
    parser.add_argument("--add", nargs="*", type=Path, default=[], help="records of other runs")
    parser.add_argument("--fresh", action="store_true", help="forget what was compiled")
    parser.add_argument("--render", action="store_true", help="only write the table")
    options = parser.parse_args(arguments)
    if options.add or options.render:
        save(merged(load(), *(load(path) for path in options.add)))
        render()
        return 0
    earlier = [] if options.fresh else merged(load(), load(options.record))
    save([] if options.fresh else load(options.record), options.record)
    launches: dict[Cell, set[tuple[Any, ...]]] = {}
    for r in earlier:
        launches.setdefault(r.cell, set()).add(r.launch)
    wanted = cells(
        options.work, options.variants, options.head_dims, options.dtypes, options.targets
    )
    items = [(c, frozenset(launches.get(c, ()))) for c in wanted]
    failed = 0
    found_cells = compile_all(items, options.jobs, options.seconds)
    for cell, found in tqdm(found_cells, total=len(items)):
        if isinstance(found, str):
            failed += 1
            tqdm.write(f"{cell}: {found}")
        else:
            append(found, options.record)
    save(load(options.record), options.record)
    if options.record == RECORD:
        render()
    return int(failed > 0)


def merged(*records: list[Row]) -> list[Row]:
    """One row for a kernel of a cell, of the record that is named last."""
    return list({(*astuple(r.cell), r.kernel): r for rows in records for r in rows}.values())


if __name__ == "__main__":
    raise SystemExit(main())
