"""Triton's interpreter has to be chosen before a kernel is imported: tests of it run in a process
of their own, which a test outside of it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

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


def _set_up_once_a_launch() -> None:
    """Calls of helpers repeat what the interpreter does to triton.language before a launch.

    That is half of its time. What it does to the same modules twice in a launch is the same.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()

    def patch_once(fn: Any) -> Any:
        modules = frozenset(m.__name__ for m in fn.__globals__.values() if m is tl or m is tl.core)
        if modules in patched:
            return None  # helpers restore nothing
        patched.add(modules)
        return patch(fn)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


if INTERPRETED:
    _set_up_once_a_launch()


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
