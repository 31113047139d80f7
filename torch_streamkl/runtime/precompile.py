"""Compiles the kernels of a computation at the same time, before the computation runs.

Triton compiles a kernel when it is launched first, so a forward and a backward of three kernels
wait for three compilations, one after another. `compiled_beside` runs the computation without its
launches, and lets threads compile the kernels while the caller does something else.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torch_streamkl.runtime.devices import is_interpreted
from torch_streamkl.runtime.launch import observed_by, warm_up

log = logging.getLogger("torch_streamkl")
MAX_THREADS = 8  # a computation has few kernels, and Triton's frontend holds the GIL


class _Compiler:
    """Starts the compilation of every kernel that is launched, and launches none."""

    def run(
        self,
        start: Callable[[], Any],
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        warm_up(kernel, grid, arguments, constants, options)

    def side_stream(self, what: str, stream: torch.cuda.Stream) -> None:
        """Ignores side streams, since nothing runs in them."""


@contextlib.contextmanager
def compiled_beside(
    compute: Callable[[], object], devices: Collection[torch.device]
) -> Iterator[bool]:
    """Compiles the kernels that ``compute`` launches while the code inside runs.

    ``compute`` is called without its launches, so its results are not initialized. At the end of
    the ``with`` block all kernels are compiled. One that does not compile raises where it is
    launched. Without a GPU among ``devices`` nothing is compiled, and the context is False.
    """
    with contextlib.ExitStack() as stack:
        is_compiling = any(d.type == "cuda" for d in devices) and _enter_threads(stack)
        if is_compiling:
            try:
                # autograd's own threads have no observer
                with torch.autograd.set_multithreading_enabled(False), observed_by(_Compiler()):
                    compute()
            except Exception:
                log.debug("kernels are compiled when they are launched", exc_info=True)
        yield is_compiling


def _enter_threads(stack: contextlib.ExitStack) -> bool:
    """Lets threads compile what Triton is asked to warm up, until the stack is left."""
    import triton

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or is_interpreted():
        return False
    threads = stack.enter_context(ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)))
    try:
        stack.enter_context(mode(threads, ignore_errors=True))
    except RuntimeError:  # the caller's own mode is active
        return False
    return True
