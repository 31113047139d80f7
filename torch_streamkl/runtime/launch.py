"""Launches kernels: the only function of the package that does.

Triton launches on the current device and its current stream, wherever the tensors are. So `launch`
makes the device of the kernel's tensors the current one. It also tells the thread's observer, if
there is one: a recorder that captures launches, or a trace that only notes them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

_CURRENT = contextlib.nullcontext()  # where nothing has to change

# of every kernel: Triton 3.10 computes a product and its sum apart unless this is set
COMPILE_OPTIONS = {"enable_fp_fusion": True}
# Of kernels whose gradients jump where P equals S. The sum of a row over its keys, from the
# forward, and the backward's terms must agree on which one is larger. With products and sums
# computed together in one kernel and apart in the other, P and S of 1 - 1e-8 compare differently,
# and the gradient of a row that has none is as large as that of any other row.
APART = {"enable_fp_fusion": False}


class Observer(Protocol):
    """Sees launches: a `capture.Recorder`, or a `trace.Trace`."""

    def run(
        self,
        start: Callable[[], Any],
        kernel: Any,
        grid: tuple[int, int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        """Launch a kernel by ``start`` and return what that returns, or only note the launch."""

    def side_stream(self, what: str, stream: torch.cuda.Stream) -> None:
        """Receives a side stream's "fork", "enter", "exit" or "join"."""


class _Thread(threading.local):
    observer: Observer | None = None
    has_context = False


_THREAD = _Thread()


def active_observer() -> Observer | None:
    """Returns the observer of this thread's launches."""
    return _THREAD.observer


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Lets an observer see the launches of this thread inside."""
    outer = active_observer()
    _THREAD.observer = observer
    try:
        yield
    finally:
        _THREAD.observer = outer


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    options: dict[str, Any],
    compiled: Any = None,
) -> Any:
    """Launch a kernel on the device of its tensors, in the stream that is current there.

    Args:
        kernel: the jit function.
        grid: the numbers of programs.
        arguments: what it is given, tensors and tuples of them among it.
        constants: its compile-time arguments, last in its signature.
        options: of the compiler, as num_warps.
        compiled: what an earlier launch returned for arguments that Triton compiles alike, which
            saves Triton's look-up.

    Returns:
        The compiled kernel; None from the interpreter, and where the observer did not launch it.
    """
    observer = active_observer()
    if observer is None:
        return _start(kernel, grid, arguments, constants, options, compiled)
    options = {**COMPILE_OPTIONS, **options}
    start = functools.partial(_start, kernel, grid, arguments, constants, options, compiled)
    return observer.run(start, kernel, grid, arguments, constants, options)


def _start(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    options: dict[str, Any],
    compiled: Any,
) -> Any:
    with on_device(device_of(arguments)):
        if compiled is None:
            return kernel[grid](*arguments, *constants, **{**COMPILE_OPTIONS, **options})
        compiled[grid](*arguments, *constants)
        return compiled


def warm_up(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Compile a kernel as a launch would, and launch nothing: of what an observer is given."""
    device = device_of(arguments)
    with on_device(device):
        kernel.warmup(*arguments, *constants, grid=grid, **options)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current device inside; calls no driver if it already is."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # fake tensors of a GPU elsewhere
        return _CURRENT
    if not _THREAD.has_context:
        _give_context()
    if device.index is None or torch.cuda.current_device() == device.index:
        return _CURRENT
    return torch.cuda.device(device)


def _give_context() -> None:
    """Gives this thread the context of its current device.

    A new thread has none before it calls CUDA's runtime, which tensors of cached memory do not
    need. The driver encodes no tensor map without one.
    """
    if not torch.cuda.is_current_stream_capturing():  # else there is one
        torch.cuda.mem_get_info()
    _THREAD.has_context = True


def ready_device() -> int:
    """Returns the index of the current device, -1 where this thread has to call `on_device`."""
    return _get_device() if _THREAD.has_context else -1


# without the Python of torch.cuda.current_device(); there is none in a torch without CUDA
_get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)


def with_index(device: torch.device) -> torch.device:
    """Returns the device by its index: without one, torch means the device that is current
    then.
    """
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())


def device_of(arguments: Iterable[Any]) -> torch.device:
    """Returns the device of a kernel's tensors: that of the first, since all are on one."""
    found = _first_device(arguments)
    if found is None:
        raise TypeError("a kernel must be launched with a tensor")
    return found


def _first_device(arguments: Iterable[Any]) -> torch.device | None:
    for x in arguments:
        if isinstance(x, tuple):
            found = _first_device(x)
            if found is not None:
                return found
        elif isinstance(x, Tensor):
            return x.device
        elif isinstance(base := getattr(x, "base", None), Tensor):  # of a tensor descriptor
            return base.device
    return None


def is_capturing(device: torch.device) -> bool:
    """Returns whether a device's current stream is captured into a CUDA graph."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with on_device(device):  # torch asks the current device's stream
        return torch.cuda.is_current_stream_capturing()
