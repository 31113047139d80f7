"""Rates of `attention_kl` over head_dim, mask, dtype and length, each checked against float64.

    python -m bench.attention_matrix --json bench/results/attention_matrix.json

Kernels are compiled first, by processes that run every case once; then the cases are timed one by
one. A row below 60 % of the best rate at its head_dim shows the reason that is written beside its
case here. TFLOP/s count the matmuls of the pairs of query and key in `Cell.pairs`: two of scores
forward; backward those again, dQ and dK of the student. The gate: values and dQ of sampled rows
against float64, and sum(q dQ) = sum(k dK), which are both the sum of dS times the dot products.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from bench import ceilings, machine
from bench.attention_cells import (
    DTYPES,
    LENGTH,
    MASKS,
    TOKENS,
    WINDOW,
    Cell,
    call_of,
    gate,
    matrix,
)
from bench.measure import is_out_of_memory, median_ms, release, synchronize
from bench.records import command_line
from bench.table import markdown_lines, number

LEAST_SHARE = 0.6  # of the best rate at a head_dim; a row below shows its reason


# -------------------------------------------------------------------------------------- timing
@dataclass
class Row:
    """What was measured of a cell."""

    cell: Cell
    status: str = "ok"  # or "red" (gate), "oom", "error"
    detail: str = ""
    implementation: str = ""
    forward_ms: float = 0.0
    backward_ms: float = 0.0

    def rates(self) -> tuple[float, float]:
        """TFLOP/s."""
        forward, backward = self.cell.flops()
        return forward / self.forward_ms * 1e-9, backward / self.backward_ms * 1e-9

    def key_rates(self) -> tuple[float, float]:
        """GB/s of reading every key once."""
        gbytes = self.cell.key_bytes() * 1e-6
        return gbytes / self.forward_ms, gbytes / self.backward_ms


def run_cell(cell: Cell, device: torch.device, impl: str, rounds: int, rows: int) -> Row:
    """Time a cell; ``rows`` of a head are checked first."""
    try:
        return _run_cell(cell, device, impl, rounds, rows)
    except Exception as error:  # a case that breaks is a result; the others go on
        status = "oom" if is_out_of_memory(error) else "error"
        detail = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    release(device)
    return Row(cell, status, detail)


def _run_cell(cell: Cell, device: torch.device, impl: str, rounds: int, rows: int) -> Row:
    inputs = cell.inputs(device)
    call = call_of(cell, device, impl)
    value = call(*inputs)
    weight = torch.ones_like(value)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, inputs[:2], weight, retain_graph=True)

    dq, dk = backward()
    row = Row(cell, implementation=_implementation(cell, inputs, impl))
    if rows:
        row.detail = gate(cell, inputs, value.detach(), (dq, dk), rows)
        row.status = "red" if row.detail else "ok"
    del dq, dk
    synchronize(device)
    if rounds:
        row.forward_ms = median_ms(lambda: call(*inputs), device, rounds)
        row.backward_ms = median_ms(backward, device, rounds)
    return row


def _implementation(cell: Cell, inputs: tuple[Tensor, ...], impl: str) -> str:
    """What computes the cell, for those cases whose choice does not depend on masks."""
    from torch_streamkl import launch, ops

    if impl != "auto" or cell.mask not in ("none", "causal"):
        return impl
    window_right = 0 if cell.mask == "causal" else None
    problem = ops.problem_of(*inputs, window_right=window_right)[0]
    return launch.select_implementation(problem, impl)


# ----------------------------------------------------------------------------------- compiling
def show(progress: tqdm, what: str) -> None:
    progress.set_description(what)
    progress.update()


def compile_first(
    cells: list[Cell], jobs: int, impl: str, device: torch.device, progress: tqdm
) -> dict[Cell, str]:
    """Run every case once in processes, which leaves its kernels in Triton's cache.

    Returns the cases that failed. The longest cases have the kernels of those of `TOKENS`.
    """
    seen = {replace(c, seqlen_q=0, seqlen_k=0, batch=0) for c in cells if c.seqlen_k <= TOKENS}
    failed = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {}
        # what takes longest to compile goes first
        for c in sorted(cells, key=lambda c: c.dtype != "fp32"):
            known = replace(c, seqlen_q=0, seqlen_k=0, batch=0) in seen
            if known and c.seqlen_k > TOKENS:
                progress.update()  # has the kernels of a shorter one
            else:
                futures[pool.submit(run_cell, c, device, impl, 0, 0)] = c
        for future in as_completed(futures):
            c = futures[future]
            show(progress, f"compiled {title(c)}")
            try:
                row = future.result()
            except BrokenProcessPool:
                failed[c] = "a process ended while it compiled this and others"
            else:
                if row.status != "ok":
                    failed[c] = row.detail
    return failed


# ------------------------------------------------------------------------------------- records
@dataclass
class Matrix:
    """Everything that was measured, and on what."""

    command: str
    machine: dict[str, str]
    copy_gbytes: float
    rows: list[Row]
    is_complete: bool = False
    note: str = ""  # by hand: what a reader of the record has to know

    def save(self, path: Path) -> None:
        """After every row: written beside the old file and moved over it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Matrix:
        content = json.loads(path.read_text())
        rows = [Row(**{**row, "cell": Cell(**row["cell"])}) for row in content["rows"]]
        known = {replace(cell, reason=""): cell.reason for cell in matrix()}  # as of today
        for row in rows:
            reason = known.get(replace(row.cell, reason="")) or row.cell.reason
            row.cell = replace(row.cell, reason=reason)
        return cls(**{**content, "rows": rows})

    def best(self) -> dict[int, tuple[float, float]]:
        """The best rates at each head_dim, forward and backward."""
        best: dict[int, tuple[float, float]] = {}
        for row in self.rows:
            if row.status == "ok" and row.cell.student_dim == row.cell.teacher_dim:
                rates, known = row.rates(), best.get(row.cell.widest, (0.0, 0.0))
                best[row.cell.widest] = (max(rates[0], known[0]), max(rates[1], known[1]))
        return best

    def shares(self, row: Row) -> tuple[float, float]:
        """A row's rates over the best at its (wider) head_dim."""
        best = self.best().get(row.cell.widest, row.rates())
        rates = row.rates()
        return rates[0] / best[0], rates[1] / best[1]

    def is_slow(self, row: Row) -> bool:
        return row.status == "ok" and min(self.shares(row)) < LEAST_SHARE


# --------------------------------------------------------------------------------------- tables
COLUMNS = (
    "D", "mask", "dtype", "B x H (kv) x N", "by", "forward ms", "TFLOP/s", "of best",
    "backward ms", "TFLOP/s", "of best", "why below 60 %",
)  # fmt: skip
FEW_COLUMNS = (
    "queries", "keys", "H (kv) x D", "forward us", "GB/s of keys", "of copy",
    "backward us", "GB/s of keys", "of copy",
)  # fmt: skip


def title(cell: Cell) -> str:
    return " ".join(cells_of(cell)[:4])


def cells_of(cell: Cell) -> tuple[str, str, str, str]:
    dims = f"{cell.student_dim}"
    if cell.teacher_dim != cell.student_dim:
        dims += f" from {cell.teacher_dim}"
    kv = f" ({cell.kv_heads})" if cell.kv_heads != cell.heads else ""
    size = f"{cell.seqlen_q}" + (f" x {cell.seqlen_k}" if cell.has_few_rows else "")
    return dims, cell.mask, cell.dtype, f"{cell.batch} x {cell.heads}{kv} x {size}"


def row_cells(row: Row, matrix: Matrix) -> tuple[str, ...]:
    """One row of the table, in `COLUMNS`' order."""
    what = (*cells_of(row.cell), row.implementation)
    if row.status != "ok":
        return (*what, f"{row.status}: {row.detail}".replace("|", "/"), *("",) * 6)
    rates, shares = row.rates(), matrix.shares(row)
    cells = []
    for ms, rate, share in zip((row.forward_ms, row.backward_ms), rates, shares, strict=True):
        cells += [number(ms), number(rate), f"{share:.0%}"]
    reason = (row.cell.reason or "**no reason known**") if matrix.is_slow(row) else ""
    return (*what, *cells, reason)


def few_cells(row: Row, matrix: Matrix) -> tuple[str, ...]:
    cell = row.cell
    shape = f"{cell.heads} ({cell.kv_heads}) x {cell.widest}"
    what = (f"{cell.seqlen_q}", f"{cell.seqlen_k}", shape)
    if row.status != "ok":
        return (*what, f"{row.status}: {row.detail}".replace("|", "/"), *("",) * 5)
    cells = []
    for ms, rate in zip((row.forward_ms, row.backward_ms), row.key_rates(), strict=True):
        share = rate / matrix.copy_gbytes
        cells += [number(ms * 1e3), number(rate), f"{share:.0%}"]
    return (*what, *cells)


def markdown(matrix: Matrix) -> str:
    """The section of RESULTS.md."""
    where = ", ".join(f"{k} {v}" for k, v in matrix.machine.items() if k != "device")
    lines = [
        f"## attention_kl by head_dim, mask, dtype and length: {matrix.machine['device']}",
        "",
        f"    {matrix.command}",
        "",
        f"{where}. Measured copy: {number(matrix.copy_gbytes)} GB/s.",
        "",
        "Device times of the forward and of the student's backward, D_s = D_t = D unless it says",
        '"D_s from D_t". TFLOP/s count two score matmuls forward, and backward those again, dQ',
        "and dK; masked work counts where its tiles are not skipped: all pairs without a mask and",
        "with a boolean or additive mask or alibi, half when causal, the band of a window of",
        f"{WINDOW} keys, the {LENGTH:.0%} of keys that key_lengths admits, half of each packed",
        'sequence. "of best" is the share of the best rate at the (wider) D; a row below',
        f"{LEAST_SHARE:.0%} says why. Values and dQ of sampled rows and the sum of k dK were",
        "checked against float64 and dQ in the same run; a row that fails is red and has no rate.",
        "",
    ]
    if not matrix.is_complete:
        lines += ["The run was interrupted; what it had measured is here.", ""]
    if matrix.note:
        lines += [matrix.note, ""]
    order = {mask: i for i, mask in enumerate(MASKS)}
    usual = [row for row in matrix.rows if not row.cell.has_few_rows]
    usual.sort(
        key=lambda row: (
            row.cell.widest, row.cell.student_dim, row.cell.teacher_dim, order[row.cell.mask],
            list(DTYPES).index(row.cell.dtype), row.cell.seqlen_k, -row.cell.kv_heads,
        )
    )  # fmt: skip
    lines += [*markdown_lines(COLUMNS, [row_cells(row, matrix) for row in usual]), ""]
    few = [row for row in matrix.rows if row.cell.has_few_rows]
    if few:
        lines += ["Few queries against many keys: bytes of the keys of both sides, read once.", ""]
        lines += [*markdown_lines(FEW_COLUMNS, [few_cells(row, matrix) for row in few]), ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------ run
def run(
    cells: list[Cell], matrix: Matrix, device: torch.device, settings: argparse.Namespace
) -> None:
    """Fill the matrix, saving after each row."""
    started = time.perf_counter()
    jobs = settings.jobs if device.type == "cuda" else 0
    with tqdm(total=len(cells) * (2 if jobs else 1), leave=False) as progress:
        failed = compile_first(cells, jobs, settings.impl, device, progress) if jobs else {}
        tqdm.write(f"compiled after {time.perf_counter() - started:.0f} s")
        for cell in cells:
            show(progress, title(cell))
            if time.perf_counter() - started > settings.seconds:
                tqdm.write(f"stopped after {settings.seconds:.0f} s, before {title(cell)}")
                return
            if cell in failed and not failed[cell].startswith("a process ended"):
                row = Row(cell, "error", failed[cell])
            else:
                row = run_cell(cell, device, settings.impl, settings.rounds, settings.rows)
            matrix.rows.append(row)
            tqdm.write(" | ".join(row_cells(row, matrix)[:11]))
            if settings.json:
                matrix.save(settings.json)
    matrix.is_complete = True
    if settings.json:
        matrix.save(settings.json)


def main(arguments: list[str] | None = None, cells: list[Cell] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=3, help="of two heads that are checked")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=220.0, help="no row starts after these")
    parser.add_argument("--commit", default="")
    settings = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = Matrix(
        command_line("bench.attention_matrix", given),
        machine.describe(device, settings.commit),
        ceilings.copy_gbytes(device),
        [],
    )
    release(device)
    run(matrix() if cells is None else cells, result, device, settings)
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
