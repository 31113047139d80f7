"""Sorts what a function does to tensors into events: allocations, views, other operations.

With its launches, which `runtime.launch` reports, and its side streams, which tell themselves, it
is all that a function does on a device. `capture.Recorder` writes it down as a program to replay,
`trace.Trace` notes it for a compiler.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Events(TorchDispatchMode):
    """Hears of every operation inside."""

    def allocated(self, out: Tensor) -> None:
        raise NotImplementedError

    def viewed(self, part: Tensor, position: int | None, call: tuple[Any, ...]) -> None:
        """Hears of a view, and where in a list it is; ``call`` is operation and arguments."""
        raise NotImplementedError

    def computed(self, name: str, call: tuple[Any, ...], out: Any) -> None:
        raise NotImplementedError

    def classify(self, call: tuple[Any, ...], out: Any) -> None:
        """Reports a call as an allocation, a view or another operation."""
        func, args, _ = call
        name = str(func._schema.name).removeprefix("aten::")
        if name in ALLOCATIONS:
            self.allocated(out)
        elif func.is_view and _is_view(out, args[0]):
            for i, part in enumerate(out) if isinstance(out, (list, tuple)) else [(None, out)]:
                self.viewed(part, i, call)
        else:
            self.computed(name, call, out)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = (func, args, kwargs or {})
        out = func(*args, **call[2])
        self.classify(call, out)
        return out


def _is_view(out: Any, base: Tensor) -> bool:
    """Whether tensors lie in another's memory: `to`, `contiguous` and `reshape` may also copy."""
    memory = base.untyped_storage()._cdata
    parts = out if isinstance(out, (list, tuple)) else (out,)
    return all(part.untyped_storage()._cdata == memory for part in parts)
