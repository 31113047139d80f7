"""Traces what an implementation does on a device: allocations, torch operations, launches.

A compiler that launches kernels itself (fx_passes/inductor_kernels.py) has to know these steps
without running any. `trace` calls an implementation with fake tensors, whose sizes may be
symbolic, and records its steps. All launches go through `runtime.launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.runtime.events import Events
from torch_streamkl.runtime.launch import observed_by

# whose results are tensors of their own
OPERATIONS = {
    "_to_copy", "add.Tensor", "clone", "eq.Scalar", "mul.Tensor", "ne.Scalar", "new_ones",
    "scalar_tensor", "sum", "sum.dim_IntList", "where.self", "zeros", "zeros_like",
}  # fmt: skip
# and those that write to one, with the operation whose result they write
WRITING = {
    "add_.Tensor": "add.Tensor", "addmm_": "addmm", "copy_": "copy", "mm.out": "mm",
    "mul.out": "mul.Tensor", "sum.IntList_out": "sum.dim_IntList", "zero_": "zeros_like",
}  # fmt: skip


class Untraceable(NotImplementedError):
    """Raised at a step that a compiler could not repeat."""


@dataclass(frozen=True)
class Allocation:
    """Represents an allocation."""

    out: Tensor


@dataclass(frozen=True)
class Operation:
    """Represents a torch operation, and the tensor of its result."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor


@dataclass(frozen=True)
class Launch:
    """Represents a kernel launch."""

    kernel: Any
    grid: tuple[Any, ...]
    arguments: tuple[Any, ...]
    constants: tuple[Any, ...]  # compile-time arguments, after the others
    options: dict[str, int]


Step = Allocation | Operation | Launch


class Trace(Events):
    """Holds the steps of a function of fake tensors."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        # of every tensor that was met, and what its memory belongs to: an input or an allocation
        self._roots: dict[int, Tensor] = {id(x): x for x in tensors if x is not None}
        self._alive: list[Any] = list(tensors)  # an id is a name as long as its object lives

    def root(self, x: Tensor) -> Tensor:
        """Returns the input or the allocation whose memory a tensor is a part of."""
        found = self._roots.get(id(x))
        if found is None:
            raise Untraceable("a tensor from elsewhere")
        return found

    def allocated(self, out: Tensor) -> None:
        self._new(out)
        self.steps.append(Allocation(out))

    def viewed(self, part: Tensor, position: int | None, call: tuple[Any, ...]) -> None:
        self._alive.append(part)
        self._roots[id(part)] = self.root(call[1][0])

    def computed(self, name: str, call: tuple[Any, ...], out: Any) -> None:
        func, args, kwargs = call
        full_name = str(func).removeprefix("aten.").removesuffix(".default")
        is_result = isinstance(out, (Tensor, list, tuple))
        if not is_result:
            return  # a question about metadata
        if full_name in OPERATIONS:
            self._new(out)
        elif full_name in WRITING:
            self.root(out)
        else:
            raise Untraceable(f"the operation {full_name}")
        self.steps.append(Operation(WRITING.get(full_name, full_name), args, kwargs, out))

    def _new(self, x: Tensor) -> None:
        self._alive.append(x)
        self._roots[id(x)] = x

    def run(
        self,
        start: Callable[[], Any],
        kernel: Any,
        grid: tuple[Any, ...],
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
    ) -> None:
        """Records a launch, which ``start`` would make."""
        self.steps.append(Launch(kernel, grid, arguments, constants, options))

    def side_stream(self, what: str, stream: torch.cuda.Stream) -> None:
        raise Untraceable("a side stream")


def trace(
    function: Callable[..., Sequence[Tensor | None]], tensors: Sequence[Tensor | None]
) -> tuple[Trace, Sequence[Tensor | None]]:
    """Returns the steps of ``function(*tensors)``, and its result; raises Untraceable."""
    found = Trace(tensors)
    with observed_by(found), torch.no_grad(), found:
        outputs = function(*tensors)
    return found, outputs
