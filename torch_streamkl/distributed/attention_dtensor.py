"""Prepares DTensors for `attention_kl` before its operators see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_streamkl.distributed import sharding
from torch_streamkl.distributed.arguments import compared

if TYPE_CHECKING:
    from torch_streamkl.attention.arguments import Inputs, Settings


def attention_kl_dtensor(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Calls ``function(...)`` with DTensors, after ranks compared the arguments."""
    compared(function, args, kwargs, {}, lambda: None)
    return function(*args, **kwargs)


def prepared(inputs: Inputs, settings: Settings) -> tuple[list[Any], Settings]:
    """Returns a call whose tensors are DTensors, with whole keys on ranks that shard queries.

    Raises if `sharding.py` has no way to run the call.
    """
    if settings.impl == "reference":
        raise NotImplementedError(
            "impl='reference' needs whole tensors on one rank, and DTensors share them; "
            "impl='torch' takes DTensors"
        )
    given: dict[str, Any] = dict(zip(inputs._fields, inputs, strict=True))
    for name in (*sharding.QUERIES, *sharding.KEYS):
        if not isinstance(given[name], DTensor):
            raise TypeError(
                f"{name} must be a DTensor, as the other operands are, got a plain tensor"
            )
    mesh = given["student_q"].device_mesh
    scales = {name: getattr(settings, name) for name in ("student_scale", "teacher_scale")}
    given = {name: _on_mesh(name, x, mesh) for name, x in given.items()}
    scales = {name: _on_mesh(name, x, mesh) for name, x in scales.items()}
    if settings.layout == "bhnd":  # the operator's own checks see another layout
        given = keys_everywhere(given)
    return list(given.values()), settings._replace(**scales)


def _on_mesh(name: str, x: Any, mesh: DeviceMesh) -> Any:
    """Returns a tensor as a DTensor; a plain one is the same on every rank."""
    if isinstance(x, DTensor):
        if x.device_mesh != mesh:
            raise ValueError(
                f"student_q and {name} must be on the same device mesh, got {mesh} and "
                f"{x.device_mesh}"
            )
        if name in (*sharding.QUERIES, *sharding.KEYS):
            return x
        # what is of all batches, heads or queries is needed on every rank
        placements = [
            Replicate() if isinstance(p, Shard) and x.shape[p.dim] == 1 else p
            for p in x.placements
        ]
        return x.redistribute(placements=placements)
    if isinstance(x, Tensor):
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return x


def keys_everywhere(given: dict[str, Any]) -> dict[str, Any]:
    """Gathers keys that are sharded as the queries are."""
    queries = [p == Shard(2) for p in given["student_q"].placements]
    gathered = {}
    for name in sharding.KEYS:
        x = given[name]
        placements = [
            Replicate() if shared and p == Shard(2) else p
            for shared, p in zip(queries, x.placements, strict=True)
        ]
        gathered[name] = x.redistribute(placements=placements)
    return {**given, **gathered}
