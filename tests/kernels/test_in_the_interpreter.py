"""Starts Triton's interpreter for the tests that are marked ``inside``, in two processes.

A process takes seconds to import what it tests, so files share one. With TRITON_INTERPRET=1 pytest
runs the tests of a file one by one: ``TRITON_INTERPRET=1 pytest tests/operators/test_squares.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interpreter import outside

TESTS = Path(__file__).parents[1]
ATTENTION = ["attention_triton_interpreted", "attention_numerics"]
OTHERS = [
    "attention_topk_interpreted", "drawn_calls", "drawn_row_programs", "inductor_kernels",
    "launches", "linear_kl_interpreted", "linear_topk_interpreted",
    "poisoned_memory", "replayed_launches", "row_program_kernels", "row_program_maps",
    "row_program_operations", "row_program_sums", "shard_kernels", "squares",
    "settings_of_torch", "tune",
]  # fmt: skip
KERNELS = {  # of a file in which other tests run there as well, those of kernels
    "attention": "not reference and not streaming",
    "others": "not test_shard_kernels or interpreted",
}


def _run(files: list[str], *arguments: str, **environment: str) -> None:
    """Every test has to pass."""
    paths = [str(path) for path in TESTS.glob("*/test_*.py") if path.stem[5:] in files]
    assert len(paths) == len(files)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert "100%]" in run.stdout


@outside
@pytest.mark.parametrize(("files", "name"), [(ATTENTION, "attention"), (OTHERS, "others")])
def test_in_the_interpreter(files: list[str], name: str) -> None:
    _run(files, "-m", "not slow", "-k", KERNELS[name])


@outside
@pytest.mark.slow
@pytest.mark.parametrize(("files", "name"), [(ATTENTION, "attention"), (OTHERS, "others")])
def test_all_in_the_interpreter(files: list[str], name: str) -> None:
    """Those marked slow too, with integers that overflow found."""
    _run(files, "-k", KERNELS[name], COMPARE_INTEGERS="1")


@outside
def test_every_file_with_such_tests_is_run() -> None:
    marked = {p.stem for p in TESTS.glob("*/test_*.py") if "\n@inside\n" in p.read_text()}
    assert marked == {f"test_{name}" for name in (*ATTENTION[:1], *OTHERS)}
