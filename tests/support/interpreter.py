"""Triton's interpreter has to be chosen before a kernel is imported: tests of it run in a process
of their own, which a test outside of it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETED, reason="is that process")
# numpy warns where a GPU computes infinities and NaN silently
quiet = pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning",
    "ignore:overflow:RuntimeWarning",
    "ignore:divide by zero:RuntimeWarning",
)


def run_interpreted(*arguments: str) -> None:
    """Run pytest with the arguments in the interpreter; every test has to pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert "100%]" in run.stdout
