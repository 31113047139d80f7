"""Reads the placements of a call: which mesh dimensions shard vocabulary and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


@dataclass(frozen=True)
class Layout:
    """Describes how ranks share a call of `linear_kl`."""

    mesh: DeviceMesh
    vocab_dim: int | None  # of the mesh; the vocabulary is whole on every rank without it
    rows: tuple[Placement, ...]  # of one value per token, whole along vocab_dim

    @property
    def shared_rows(self) -> list[int]:
        """Returns the mesh dimensions that shard tokens."""
        return [dim for dim, placement in enumerate(self.rows) if isinstance(placement, Shard)]

    def group(self, dim: int) -> ProcessGroup:
        return self.mesh.get_group(dim)


def layout_of(tensors: dict[str, Any]) -> Layout:
    """Returns the layout of a call; raises if placements do not fit, or would need a gather."""
    weight = tensors["student_weight"]
    for name in ("student_hidden", "student_weight", "teacher_hidden"):
        if not isinstance(tensors[name], DTensor):
            raise TypeError(
                f"{name} must be a DTensor, as other operands are, got {_kind(tensors[name])}; "
                "DTensor.from_local(x, mesh, [Replicate()]) says that every rank has the same "
                "tokens, [Shard(0)] that each has its own"
            )
        if tensors[name].ndim < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, got shape {tuple(tensors[name].shape)}"
            )
    mesh: DeviceMesh = weight.device_mesh
    for name, x in tensors.items():
        if isinstance(x, DTensor) and x.device_mesh != mesh:
            raise ValueError(
                f"student_weight and {name} must be on the same device mesh, got {mesh} and "
                f"{x.device_mesh}"
            )
    vocab_dim = vocab_dim_of("student_weight", weight)
    for name in ("teacher_weight", "student_bias", "teacher_bias"):
        x = tensors.get(name)
        if isinstance(x, DTensor) and vocab_dim_of(name, x) != vocab_dim:
            raise ValueError(
                f"student_weight and {name} must shard the vocabulary over the same mesh "
                "dimension, "
                f"got placements {weight.placements} and {x.placements}"
            )
    rows = [_rows_of(name, tensors[name], vocab_dim) for name in HIDDEN]
    if rows[0] != rows[1]:
        placements = [tensors[name].placements for name in HIDDEN]
        raise ValueError(
            "student_hidden and teacher_hidden must be placed alike except where the vocabulary "
            "entries are "
            f"shared, got {placements[0]} and {placements[1]}"
        )
    return Layout(mesh, vocab_dim, rows[0])


HIDDEN = ("student_hidden", "teacher_hidden")


def vocab_dim_of(name: str, x: DTensor) -> int | None:
    """Returns the mesh dimension that shards a weight's vocabulary, None if it is replicated."""
    found = None
    for dim, placement in enumerate(x.placements):
        if type(placement) is Replicate:
            continue
        of_vocab = isinstance(placement, Shard) and placement.dim % x.ndim == 0
        if type(placement) is not Shard or not of_vocab or found is not None:
            raise NotImplementedError(
                f"{name} may be Replicate() or shard the vocabulary, Shard(0), over one dimension "
                "of "
                f"the mesh, got {x.placements}; redistribute it"
            )
        found = dim
    return found


def _rows_of(name: str, x: DTensor, vocab_dim: int | None) -> tuple[Placement, ...]:
    """Returns placements of one value per token; whole along a dimension of the vocabulary."""
    rows: list[Placement] = []
    for dim, placement in enumerate(x.placements):
        last = x.ndim - 1
        token_dim: int | None
        if isinstance(placement, Shard) and type(placement) is Shard:
            token_dim = placement.dim % x.ndim
        else:
            token_dim = None if type(placement) is Replicate else last
        if token_dim == last:
            raise NotImplementedError(
                f"{name} may be Replicate() or share its tokens, Shard(dim) of any dimension but "
                f"the last, got {x.placements}; redistribute it"
            )
        if token_dim is None or dim == vocab_dim:
            rows.append(Replicate())
        else:
            rows.append(Shard(token_dim))
    return tuple(rows)


def _kind(x: object) -> str:
    return "a plain tensor" if isinstance(x, Tensor) else type(x).__name__


def vocab_as_local(x: Tensor | None) -> Tensor | None:
    """Returns this rank's vocabulary shard; a plain tensor already is one."""
    return x.to_local() if isinstance(x, DTensor) else x
