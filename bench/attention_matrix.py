"""Rates of `attention_kl` over head_dim, mask, dtype and length, each checked against float64.

    python -m bench.attention_matrix --json bench/results/attention_matrix.json
    python -m bench.attention_matrix --only "key lengths" packed --versus triton attention

Kernels are compiled first, by processes that run every case once; then the cases are timed one by
one. A row below 60 % of the best rate at its head_dim shows the reason that is written next to its
case here. TFLOP/s count the matmuls of the pairs of query and key in `Cell.pairs`: two of scores
forward; backward those again, dQ and dK of the student. The gate: values and dQ of sampled rows
against float64, and sum(q dQ) = sum(k dK), which are both the sum of dS times the dot products.

``--versus`` times other implementations of a cell interleaved with it, and "attention": torch's
(cuDNN's on CUDA), full or causal, at the wider head_dim.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bench import ceilings
from bench.attention_cells import (
    DIVERGENCES,
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
from bench.cases import AttentionCase, Heads
from bench.measure import Sample, attempt, interleaved_calls, median_ms, release, synchronize
from bench.records import Program, save
from bench.table import markdown_lines, number

LEAST_SHARE = 0.6  # of the best rate at a head_dim; a row below shows its reason
ATTENTION = "attention"  # of those next to a cell
ROUNDS = 5  # of a cell and those next to it
Call = Callable[[], Any]


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
    versus: dict[str, tuple[float, float]] = field(default_factory=dict)  # milliseconds of others

    def rates(self) -> tuple[float, float]:
        """TFLOP/s."""
        forward, backward = self.cell.flops()
        return forward / self.forward_ms * 1e-9, backward / self.backward_ms * 1e-9

    def key_rates(self) -> tuple[float, float]:
        """GB/s of reading every key once."""
        gbytes = self.cell.key_bytes() * 1e-6
        return gbytes / self.forward_ms, gbytes / self.backward_ms


def run_cell(
    cell: Cell, device: torch.device, impl: str, rounds: int, rows: int, versus: Sequence[str] = ()
) -> Row:
    """Time a cell; ``rows`` of a head are checked first."""
    row, why = attempt(lambda: _run_cell(cell, device, impl, rounds, rows, versus), device)
    return row or Row(cell, **why)


def _run_cell(
    cell: Cell, device: torch.device, impl: str, rounds: int, rows: int, versus: Sequence[str]
) -> Row:
    inputs = cell.inputs(device)
    forward, backward, value = _calls(cell, inputs, impl)
    row = Row(cell, implementation=_implementation(cell, inputs, impl))
    gradients = backward()
    if rows:
        row.detail = gate(cell, inputs, value.detach(), gradients, rows)
        row.status = "red" if row.detail else "ok"
    del gradients
    synchronize(device)
    if rounds:
        calls = {name: _calls(cell, inputs, name)[:2] for name in versus}
        calls[impl] = forward, backward
        takes = {
            name: lambda _, both=both: [median_ms(f, device, rounds) for f in both]
            for name, both in calls.items()
        }
        for name, times in interleaved_calls(takes, ROUNDS if versus else 1).items():
            forward_ms, backward_ms = (median(x) for x in zip(*times, strict=True))
            row.versus[name] = (forward_ms, backward_ms)
        row.forward_ms, row.backward_ms = row.versus.pop(impl)
    return row


def _calls(cell: Cell, inputs: tuple[Tensor, ...], name: str) -> tuple[Call, Call, Tensor]:
    """Forward, backward and value of an implementation of a cell, or of torch's attention."""
    device = inputs[0].device
    if name != ATTENTION:
        call = call_of(cell, device, name)
        value = call(*inputs)
        weight = torch.ones_like(value)
        return (
            lambda: call(*inputs),
            lambda: torch.autograd.grad(value, inputs[:2], weight, retain_graph=True),
            value,
        )
    timed = ceilings.attention(_attention(cell), device, DTYPES[cell.dtype])
    assert timed is not None, "torch has no such attention here"
    (given,) = timed.inputs

    def forward() -> Tensor:
        with timed.context():
            return timed.loss_fn(*given)

    loss = forward()
    return forward, lambda: torch.autograd.grad(loss, given[:3], retain_graph=True), loss


def _attention(cell: Cell) -> AttentionCase:
    """Of torch's attention next to a cell: full or causal, at the wider head_dim."""
    heads = Heads(cell.heads, cell.heads, cell.widest)
    is_causal = cell.mask in ("causal", "window", "packed", "causal clamps")
    return AttentionCase("", "", cell.batch, cell.seqlen_k, heads, heads, is_causal)


def attention_rates(row: Row) -> tuple[float, ...]:
    """TFLOP/s of torch's attention next to a row."""
    case, taken = _attention(row.cell), [Sample(*row.versus[ATTENTION])]
    modes = ("forward", "backward")
    return tuple(ceilings.attention_tflops(case, mode, taken) for mode in modes)


def _implementation(cell: Cell, inputs: tuple[Tensor, ...], impl: str) -> str:
    """What computes the cell, of those masks that decide about it without their contents."""
    from torch_streamkl.attention import heuristics, ops

    known: dict[str, dict[str, object]] = {
        "none": {},
        "causal": {"window_right": 0},
        "window": {"window_left": WINDOW - 1, "window_right": 0},
        "key lengths": cell.options(inputs[0].device),
    }
    if impl != "auto" or cell.mask not in known:
        return impl
    problem = ops.problem_of(*inputs, **known[cell.mask])[0]
    return heuristics.select_implementation(problem, impl)


# ----------------------------------------------------------------------------------- compiling
def compile_first(
    cells: list[Cell], jobs: int, impl: str, device: torch.device, progress: tqdm,
    versus: Sequence[str] = (),
) -> dict[Cell, str]:  # fmt: skip
    """Run every case once in processes, which leaves its kernels in Triton's cache.

    Returns the cases that failed. The longest cases have the kernels of those of `TOKENS`.
    """

    def kernels(c: Cell) -> Cell:
        return replace(c, seqlen_q=0, seqlen_k=0, batch=0)

    seen = {kernels(c) for c in cells if c.seqlen_k <= TOKENS}
    # what takes longest to compile goes first
    new = [c for c in cells if c.seqlen_k <= TOKENS or kernels(c) not in seen]
    new.sort(key=lambda c: c.dtype != "fp32")
    progress.update(len(cells) - len(new))
    failed = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(run_cell, c, device, impl, 0, 0): c for c in new}
        for other, c in itertools.product(set(versus) - {ATTENTION}, new):
            pool.submit(run_cell, c, device, other, 0, 0)
        for future in as_completed(futures):
            c = futures[future]
            progress.set_description(f"compiled {title(c)}")
            progress.update()
            try:
                row = future.result()
            except BrokenProcessPool:  # while it compiled this or another: it is tried again
                continue
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
    title: str = ""  # by hand, of one that has a section of its own in RESULTS.md

    def save(self, path: Path | None) -> None:
        """After every row."""
        if path is not None:
            save(asdict(self), path)

    @classmethod
    def load(cls, path: Path) -> Matrix:
        return cls.of(json.loads(path.read_text()))

    @classmethod
    def of(cls, content: dict[str, Any]) -> Matrix:
        """What a file holds."""
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
    if cell.teacher_kv_heads:
        kv = f" ({cell.kv_heads} from {cell.teacher_kv_heads})"
    size = f"{cell.seqlen_q}" + (f" x {cell.seqlen_k}" if cell.has_few_rows else "")
    return dims, cell.mask, cell.dtype, f"{cell.batch} x {cell.heads}{kv} x {size}"


def row_cells(row: Row, matrix: Matrix) -> tuple[str, ...]:
    """One row of the table, in `COLUMNS`' order."""
    what = (*cells_of(row.cell), row.implementation)
    if row.status != "ok":
        return _failed(row, what, COLUMNS)
    reason = (row.cell.reason or "**no reason known**") if matrix.is_slow(row) else ""
    return (*what, *_rated(row, 1.0, row.rates(), matrix.shares(row)), reason)


def few_cells(row: Row, matrix: Matrix) -> tuple[str, ...]:
    """One row of the table of few queries, in `FEW_COLUMNS`' order."""
    cell, rates = row.cell, row.key_rates()
    heads = f"{cell.heads} ({cell.kv_heads}) x {cell.widest}"
    what = (f"{cell.seqlen_q}", f"{cell.seqlen_k}", heads)
    if row.status != "ok":
        return _failed(row, what, FEW_COLUMNS)
    return (*what, *_rated(row, 1e3, rates, [rate / matrix.copy_gbytes for rate in rates]))


def _failed(row: Row, what: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    why = f"{row.status}: {row.detail}".replace("|", "/")
    return (*what, why, *("",) * (len(columns) - len(what) - 1))


def _rated(
    row: Row, unit: float, rates: Sequence[float], shares: Sequence[float]
) -> Iterator[str]:
    """Time, rate and share of the forward, then of the backward."""
    times = (row.forward_ms, row.backward_ms)
    for ms, rate, share in zip(times, rates, shares, strict=True):
        yield from (number(ms * unit), number(rate), f"{share:.0%}")


def versus_lines(matrix: Matrix) -> list[str]:
    """What was timed alternately with the rows, where something was."""
    rows = [row for row in matrix.rows if row.versus and row.status == "ok"]
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row.versus))
    same = (f"{name}, the same" for name in names)
    columns = (*COLUMNS[:5], "TFLOP/s, forward / backward", *same)
    lines = []
    for row in rows:
        rates = [row.rates()]
        for name in names:
            forward_ms, backward_ms = row.versus[name]
            other = replace(row, forward_ms=forward_ms, backward_ms=backward_ms)
            rates.append(attention_rates(row) if name == ATTENTION else other.rates())
        pairs = (" / ".join(map(number, both)) for both in rates)
        lines.append((*cells_of(row.cell), row.implementation, *pairs))
    what = "Interleaved with others (attention: torch's, full or causal, at the wider head_dim):"
    return [what, "", *markdown_lines(columns, lines), ""]


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
    lines += versus_lines(matrix)
    order = {mask: i for i, mask in enumerate((*MASKS, "blocks", *DIVERGENCES))}
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
def run(cells: list[Cell], matrix: Matrix, settings: argparse.Namespace) -> None:
    """Fill the matrix, saving after each row."""
    started = time.perf_counter()
    device = torch.device(settings.device)
    jobs = settings.jobs if device.type == "cuda" else 0
    failed: dict[Cell, str] = {}
    with tqdm(total=len(cells) * (2 if jobs else 1), leave=False) as progress:
        if jobs:
            failed = compile_first(cells, jobs, settings.impl, device, progress, settings.versus)
            tqdm.write(f"compiled after {time.perf_counter() - started:.0f} s")
        for cell in cells:
            progress.set_description(title(cell))
            progress.update()
            if time.perf_counter() - started > settings.seconds:
                tqdm.write(f"stopped after {settings.seconds:.0f} s, before {title(cell)}")
                return
            how = (settings.impl, settings.rounds, settings.rows, settings.versus)
            is_known = cell in failed
            row = Row(cell, "error", failed[cell]) if is_known else run_cell(cell, device, *how)
            matrix.rows.append(row)
            tqdm.write(" | ".join(row_cells(row, matrix)[:11]))
            matrix.save(settings.json)
    matrix.is_complete = True
    matrix.save(settings.json)


def main(arguments: list[str] | None = None, cells: list[Cell] | None = None) -> int:
    parser = Program("bench.attention_matrix", __doc__)
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--versus", nargs="+", default=(), help="also timed, interleaved")
    parser.add_argument("--only", nargs="+", help="cells whose title holds one of these texts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=3, help="of two heads that are checked")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=220.0, help="no row starts after these")
    settings, head = parser.begin(arguments)
    device = torch.device(settings.device)
    result = Matrix(**head, copy_gbytes=ceilings.copy_gbytes(device), rows=[])
    release(device)
    cells = matrix() if cells is None else cells
    if settings.only:
        cells = [c for c in cells if any(text in title(c) for text in settings.only)]
    run(cells, result, settings)
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
