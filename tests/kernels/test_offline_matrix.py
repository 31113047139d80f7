"""bench/results/gpus.csv exceeds no GPU, is of today's tiles, and a sample compiles so."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import triton

from bench.offline import TARGETS
from bench.offline import cells as offline_cells
from bench.offline import matrix as offline_matrix
from bench.offline import rates as offline_rates
from bench.offline.cells import Cell, can_run, kernels_of, tiles_of, twin
from bench.offline.matrix import Row, compiled, load

ROWS = load()
# bytes of a thread; docs/evidence/gpus.md says why
MOST_SPILLS = {"bf16": 160, "fp16": 160, "fp32": 512, "tf32": 512}
OF_HEAD_MEANS = {"bf16": 192, "fp16": 192, "fp32": 640, "tf32": 640}
OF_PADDING = {"bf16": 176, "fp32": 512}
OF_TURING_AND_WIDE_ON_HOPPER = 512
OF_CLAMPS = 2048  # a forward of wide float32 on Hopper
OF_WORK = {"row program": 640, "row program of heads": 832}
# Hopper's forward of two passes, with Triton 3.9: of tiles of 128 columns none in the main loops
OF_SECOND_PASS = 376
MOST_APART = 16  # spills of kernels of twins
MOST_CELLS = 80  # whose tiles are chosen again: as many as take a second
OF_GRADIENTS_OF_LOGITS, OF_LOGITS = 32, 8
SLOW_SAMPLE = [  # one of each kind of GPU and of work
    Cell("sm_86", "attention", "bf16", 128, "plain"),
    Cell("sm_120", "attention", "fp32", 256, "plain"),
    Cell("gfx942", "attention", "bf16", 256, "plain"),
    Cell("sm_90", "LM head", "bf16", 0, "js"),
]
SAMPLE = [
    Cell("gfx942", "LM head", "bf16", 0, "plain"),
    *(pytest.param(cell, marks=pytest.mark.slow) for cell in SLOW_SAMPLE),
]


def most_spills(row: Row) -> int:
    if row.work == "LM head":
        return OF_GRADIENTS_OF_LOGITS if row.kernel == "row values gradient" else OF_LOGITS
    if row.work in OF_WORK:
        return OF_WORK[row.work]
    if (row.work, row.variant, row.kernel) == ("hopper", "js", "forward"):
        return OF_SECOND_PASS
    wide_on_hopper = row.target == "sm_90" and row.head_dim > 128 and row.work != "hopper"
    if wide_on_hopper and (row.dtype, row.variant, row.kernel) == ("fp32", "clamped", "forward"):
        return OF_CLAMPS
    bounds = OF_HEAD_MEANS if row.work == "head mean" else MOST_SPILLS
    bounds = OF_PADDING if row.variant == "padding" else bounds
    least = OF_TURING_AND_WIDE_ON_HOPPER if wide_on_hopper or row.target == "sm_75" else 0
    return max(least, bounds[row.dtype])


def test_nothing_exceeds_what_there_is() -> None:
    assert len(ROWS) > 200
    for row in ROWS:
        assert row.shared_bytes <= TARGETS[row.target].shared_bytes, row
        assert row.spill_bytes <= most_spills(row), row


def test_twins_take_the_same() -> None:
    found = {(row.cell, row.kernel): row for row in ROWS}
    pairs = [(row, found.get((twin(row.cell), row.kernel))) for row in ROWS]
    pairs = [(x, y) for x, y in pairs if y is not None and y is not x and x.triton == y.triton]
    assert len(pairs) > 50
    for row, like in pairs:
        assert like is not None and row.launch[5:] == like.launch[5:]
        assert row.shared_bytes == like.shared_bytes, row
        assert abs(row.spill_bytes - like.spill_bytes) <= MOST_APART, row


def test_every_gpu_was_compiled_for() -> None:
    assert {row.target for row in ROWS} == set(TARGETS)


def test_the_record_is_of_todays_tiles() -> None:
    known: dict[Cell, dict[str, Row]] = {}
    for row in ROWS:
        known.setdefault(row.cell, {})[row.kernel] = row
    for cell, rows in list(known.items())[:: 1 + len(known) // MOST_CELLS]:
        for name, launch in kernels_of(cell).items():
            row = rows[name]
            found = (row.block_m, row.block_n, row.num_warps, row.num_stages)
            assert found == tiles_of(launch), (cell, name)


@pytest.mark.skipif(not triton.__version__.startswith("3.9"), reason="recorded with Triton 3.9")
@pytest.mark.parametrize("cell", SAMPLE, ids=lambda c: f"{c.target} {c.work}")
def test_a_sample_compiles_as_recorded(cell: Cell) -> None:
    recorded = {row.kernel: row for row in ROWS if row.cell == cell}
    assert recorded
    for row in compiled(cell):
        assert row == recorded[row.kernel]


def test_the_rates_are_of_todays_tiles() -> None:
    text = offline_matrix.DOCUMENT.read_text()
    table = text.split("<!-- rates:begin -->")[1].split("<!-- rates:end -->")[0]
    rows = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    found = {(row[0].split("(")[1][:-1], row[1], int(row[2])): row[3] for row in rows}
    assert len(found) == len(offline_rates.CHIPS) * 2 * 3
    for (target, kernel, head_dim), tile in found.items():
        kernels = kernels_of(Cell(target, "attention", "bf16", head_dim, "plain"))
        name = kernel if kernel == "forward" else f"{kernel} student"
        block_m, block_n, num_warps, _ = tiles_of(kernels[name])
        assert tile == f"{block_m} x {block_n}, {num_warps} warps"


def test_a_compiler_that_aborts_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cell: Cell, _: object) -> list[Row]:
        if cell.head_dim == 64:
            os._exit(3)
        if cell.head_dim == 96:
            raise ValueError("no such instruction")
        return []

    monkeypatch.setattr(offline_matrix, "compiled", fails)
    cells = [Cell("sm_90", "attention", "bf16", n, "plain") for n in (32, 64, 96)]
    items = [(cell, frozenset[tuple[Any, ...]]()) for cell in cells]
    found = {c.head_dim: x for c, x in offline_matrix.compile_all(items, 2, 60.0)}
    assert found == {32: [], 64: "the compiler died: 3", 96: "ValueError: no such instruction"}
    assert list(offline_matrix.compile_all(items, 2, 0.0)) == []


def test_cells_are_what_the_document_says() -> None:
    options = {"bf16", "fp16", "fp32", "tf32"}
    assert set(offline_cells.DTYPES) == options
    cells = [
        Cell(*x)
        for x in itertools.product(
            TARGETS,
            offline_cells.WORK,
            options,
            offline_cells.HEAD_DIMS,
            offline_cells.EVERY_VARIANT,
        )
    ]
    hopper = {c.target for c in cells if c.work == "hopper" and can_run(c)}
    assert hopper == {"sm_90"}
    assert not any(can_run(c) for c in cells if (c.target, c.dtype) == ("sm_75", "bf16"))
