"""Starts Triton's interpreter for the tests that are marked ``inside``, in one process.

A process takes seconds to import what it tests, so files share it. With TRITON_INTERPRET=1 pytest
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
MARKED = {p for p in TESTS.glob("*/test_*.py") if "\n@inside\n" in p.read_text()}
PATHS = sorted(map(str, {*MARKED, TESTS / "operators" / "test_attention_numerics.py"}))
# of a file in which other tests run there as well, those of kernels
KERNELS = (
    "not test_attention_numerics and not test_shard_kernels"
    " or test_attention_numerics and not reference and not streaming"
    " or test_shard_kernels and interpreted"
)


def _run(*arguments: str, **environment: str) -> None:
    """Every test has to pass."""
    arguments = (*PATHS, "-k", KERNELS, *arguments)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert "100%]" in run.stdout


@outside
def test_in_the_interpreter() -> None:
    _run("-m", "not slow")


@outside
@pytest.mark.slow
def test_all_in_the_interpreter() -> None:
    """Those marked slow too, with integers that overflow found."""
    _run(COMPARE_INTEGERS="1")
