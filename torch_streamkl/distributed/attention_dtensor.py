"""`attention_kl` on DTensors: what is done to its tensors before the operators see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_streamkl.distributed import sharding

if TYPE_CHECKING:
    from torch_streamkl.attention.interface import Inputs, Settings


def prepared(inputs: Inputs, settings: Settings) -> list[Any]:
    """Tensors of a call, all of them DTensors, with keys on every rank that shares queries.

    Raises where `sharding.py` has no way to run the call.
    """
    given: dict[str, Any] = dict(zip(inputs._fields, inputs, strict=True))
    for name in (*sharding.QUERIES, *sharding.KEYS):
        if not isinstance(given[name], DTensor):
            raise TypeError(f"{name} must be a DTensor beside DTensors, got a plain tensor")
    mesh = given["student_q"].device_mesh
    for name, x in given.items():
        if isinstance(x, DTensor):
            if x.device_mesh != mesh:
                raise ValueError(
                    f"student_q and {name} must be on the same device mesh, got {mesh} and "
                    f"{x.device_mesh}"
                )
        elif isinstance(x, Tensor):  # the same on every rank
            replicated = [Replicate()] * mesh.ndim
            given[name] = DTensor.from_local(x, mesh, replicated, run_check=False)
    if settings.layout == "bhnd":  # the operator's own checks see another layout
        given = keys_everywhere(given)
    return list(given.values())


def keys_everywhere(given: dict[str, Any]) -> dict[str, Any]:
    """Keys that ranks share, as they share the queries, on every one of those ranks."""
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
