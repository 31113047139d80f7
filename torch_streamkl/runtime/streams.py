"""Provides a second stream of a GPU, for work in parallel to that of the current stream."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_streamkl.runtime.launch import active_observer


class SideStream:
    """Provides a second stream of a tensor's GPU if it is wanted, and does nothing on a CPU.

    Two matmuls of a chunk run side by side: one fills the multiprocessors that the last tiles of
    the other leave idle, and hides the memory traffic of the running sum.
    """

    def __init__(self, x: Tensor | None, is_needed: bool = True) -> None:
        self.stream: torch.cuda.Stream | None = None
        if x is not None and is_needed and x.is_cuda and not isinstance(x, FakeTensor):
            self.stream = _side_stream(x.device)
        self.is_busy = False

    def _notify(self, what: str) -> None:
        observer = active_observer()
        if observer is not None and self.stream is not None:
            observer.side_stream(what, self.stream)

    def fork(self) -> None:
        """Makes later work on the side stream wait for all work on the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            self._notify("fork")

    def __enter__(self) -> None:
        if self.stream is not None:
            self.is_busy = True
            self.context = torch.cuda.stream(self.stream)
            self.context.__enter__()
            self._notify("enter")

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.context.__exit__(*error)
            self._notify("exit")

    def join(self) -> None:
        """Makes the current stream wait for the side stream."""
        if self.stream is not None and self.is_busy:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.is_busy = False
            self._notify("join")


NO_SIDE = SideStream(None)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
