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
ATTENTION = {"attention_triton_interpreted", "attention_numerics"}
MARKED = {p.stem[5:] for p in TESTS.glob("*/test_*.py") if "\n@inside\n" in p.read_text()}
FILES = {"attention": ATTENTION, "others": MARKED - ATTENTION}
KERNELS = {  # of a file in which other tests run there as well, those of kernels
    "attention": "not reference and not streaming",
    "others": "not test_shard_kernels or interpreted",
}


def _run(name: str, *arguments: str, **environment: str) -> None:
    """Every test has to pass."""
    paths = sorted(str(path) for path in TESTS.glob("*/test_*.py") if path.stem[5:] in FILES[name])
    assert len(paths) == len(FILES[name])
    arguments = (*paths, "-k", KERNELS[name], *arguments)
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
@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name: str) -> None:
    _run(name, "-m", "not slow")


@outside
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_all_in_the_interpreter(name: str) -> None:
    """Those marked slow too, with integers that overflow found."""
    _run(name, COMPARE_INTEGERS="1")
