"""docs/gpus.csv: nothing in it exceeds a GPU, it is of today's tiles, and a sample compiles so."""

from __future__ import annotations

import itertools

import pytest
import triton

from bench import offline_matrix
from bench.offline import TARGETS
from bench.offline_matrix import Cell, Row, can_run, compiled, launches_of, load, tiles_of

ROWS = load()
# bytes of a thread; docs/gpus.md says where and why
MOST_SPILLS = {"bf16": 160, "fp16": 160, "fp32": 512, "tf32": 512}
OF_TURING = 320
OF_TWO_LOOPS = 2048
SAMPLE = [
    Cell("sm_86", "attention", "bf16", 128, "plain"),
    Cell("sm_120", "attention", "fp32", 256, "plain"),
    Cell("gfx942", "attention", "bf16", 256, "plain"),
]


def most_spills(row: Row) -> int:
    if row.target == "sm_75":
        return OF_TURING
    two_loops = row.head_dim > 128 and row.variant in ("clamped", "js")
    if two_loops and (row.target, row.dtype) == ("sm_90", "fp32"):
        return OF_TWO_LOOPS
    return MOST_SPILLS[row.dtype]


def test_nothing_exceeds_what_there_is() -> None:
    assert len(ROWS) > 200
    for row in ROWS:
        assert row.shared_bytes <= TARGETS[row.target].shared_bytes, row
        assert row.spill_bytes <= most_spills(row), row


def test_every_gpu_was_compiled_for() -> None:
    assert {row.target for row in ROWS} == set(TARGETS)


def test_the_record_is_of_todays_tiles() -> None:
    known: dict[Cell, dict[str, Row]] = {}
    for row in ROWS:
        known.setdefault(row.cell, {})[row.kernel] = row
    for cell, rows in known.items():
        for launch in launches_of(cell):
            row = rows[offline_matrix.name_of(launch)]
            found = (row.block_m, row.block_n, row.num_warps, row.num_stages)
            assert found == tiles_of(launch), (cell, row.kernel)


@pytest.mark.skipif(not triton.__version__.startswith("3.9"), reason="recorded with Triton 3.9")
@pytest.mark.parametrize("cell", SAMPLE, ids=lambda c: f"{c.target} {c.dtype} {c.head_dim}")
def test_a_sample_compiles_as_recorded(cell: Cell) -> None:
    recorded = {row.kernel: row for row in ROWS if row.cell == cell}
    assert recorded
    for row in compiled(cell):
        assert row == recorded[row.kernel]


def test_cells_are_what_the_document_says() -> None:
    options = {"bf16", "fp16", "fp32", "tf32"}
    assert set(offline_matrix.DTYPES) == options
    cells = [
        Cell(*x)
        for x in itertools.product(
            TARGETS,
            offline_matrix.WORK,
            options,
            offline_matrix.HEAD_DIMS,
            offline_matrix.VARIANTS,
        )
    ]
    hopper = {c.target for c in cells if c.work == "hopper" and can_run(c)}
    assert hopper == {"sm_90"}
    assert not any(can_run(c) for c in cells if (c.target, c.dtype) == ("sm_75", "bf16"))
