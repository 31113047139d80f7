"""Calls functional collectives by the name of a process group. Nothing else communicates.

They are PyTorch's own operators, so a compiler sees and schedules them in its graphs. Each returns
before the data has arrived; `wait` makes the current stream wait for it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    _get_default_store,
    _resolve_process_group,
)
from torch.utils._python_dispatch import _disable_current_modes

_ops: Any = torch.ops._c10d_functional


def group_of(group: ProcessGroup | DeviceMesh, argument: str = "group") -> ProcessGroup:
    """Returns the process group of a one-dimensional mesh, or the group itself."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{argument} must be a process group or a device mesh of one dimension, got a "
                f"mesh of shape {tuple(group.shape)}; take one dimension of it: mesh['name']"
            )
        return group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{argument} must be a process group or a device mesh, got {type(group).__name__}"
        )
    return group


def resolve(group_name: str) -> ProcessGroup:
    """Finds the process group of a name."""
    group: ProcessGroup = _resolve_process_group(group_name)  # type: ignore[arg-type]
    return group


def default_store() -> Any:
    """Returns the store by which ranks found each other, or None without other processes."""
    if torch.distributed.get_backend() == "fake":
        return None
    return _get_default_store()


def unseen() -> AbstractContextManager[None]:
    """Hides collectives from modes that count or trace a user's."""
    hidden: AbstractContextManager[None] = _disable_current_modes()
    return hidden


def all_gather(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """Gathers ``x`` of every rank, one after the other along the first dimension."""
    gathered: Tensor = _ops.all_gather_into_tensor(x, num_ranks, group_name)
    return gathered


def all_reduce(x: Tensor, group_name: str, op: str = "sum") -> Tensor:
    """Sums ``x`` over ranks."""
    reduced: Tensor = _ops.all_reduce(x, op, group_name)
    return reduced


def reduce_scatter(x: Tensor, num_ranks: int, group_name: str) -> Tensor:
    """Returns this rank's part, along the first dimension, of the sum of ``x`` over ranks."""
    mine: Tensor = _ops.reduce_scatter_tensor(x, "sum", num_ranks, group_name)
    return mine


def all_to_all(x: Tensor, receive: list[int], send: list[int], group_name: str) -> Tensor:
    """Sends rows of ``x`` to ranks in their order, ``send[rank]`` each, and returns those
    received.
    """
    received: Tensor = _ops.all_to_all_single(x, receive, send, group_name)
    return received


def wait(x: Tensor) -> Tensor:
    """Makes the current stream wait for a collective's result."""
    done: Tensor = _ops.wait_tensor(x)
    return done
