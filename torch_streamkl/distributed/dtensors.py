"""Runs `linear_kl` and `attention_kl` on DTensors: reads each rank's part from the placements.

`linear_kl`:

- A weight is Shard(0) over one mesh dimension (its vocabulary), or Replicate().
- Hidden states may shard tokens over any mesh dimension. Along the dimension of the vocabulary
  they are gathered, and their gradient is reduce-scattered (sequence parallel). Along others,
  ranks keep their tokens, and the weights' gradients are summed (data parallel).
- The result has one value per token, placed as the student's hidden states, or is a scalar on
  every rank.

Every other placement is an error. Nothing is gathered but hidden states along that dimension.

`attention_kl` gathers keys that are sharded as the queries are; `sharding.py` has the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_streamkl import checks
from torch_streamkl.distributed import sharding
from torch_streamkl.distributed.arguments import bound, compared
from torch_streamkl.distributed.linear import OWN, UnsummedGroup
from torch_streamkl.distributed.summed_gradient import summed, with_summed_gradient
from torch_streamkl.linear.reductions import denominator

if TYPE_CHECKING:
    from torch_streamkl.attention.arguments import Inputs, Settings

HIDDEN = ("student_hidden", "teacher_hidden")


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
    _check_mesh("student_weight", mesh, tensors)
    vocab_dim = vocab_dim_of("student_weight", weight)
    for name in ("teacher_weight", "student_bias", "teacher_bias"):
        x = tensors.get(name)
        if isinstance(x, DTensor) and vocab_dim_of(name, x) != vocab_dim:
            raise ValueError(
                f"student_weight and {name} must shard the vocabulary over the same mesh "
                f"dimension, got placements {weight.placements} and {x.placements}"
            )
    rows = [_rows_of(name, tensors[name], vocab_dim) for name in HIDDEN]
    if rows[0] != rows[1]:
        placements = [tensors[name].placements for name in HIDDEN]
        raise ValueError(
            "student_hidden and teacher_hidden must be placed alike except where the vocabulary "
            f"entries are shared, got {placements[0]} and {placements[1]}"
        )
    return Layout(mesh, vocab_dim, rows[0])


def _check_mesh(first: str, mesh: DeviceMesh, tensors: dict[str, Any]) -> None:
    for name, x in tensors.items():
        if isinstance(x, DTensor) and x.device_mesh != mesh:
            raise ValueError(
                f"{first} and {name} must be on the same device mesh, got {mesh} and "
                f"{x.device_mesh}"
            )


def replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Returns a tensor that is the same on every rank as a DTensor."""
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


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
                f"of the mesh, got {x.placements}; redistribute it"
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


# ------------------------------------------------------------------------------------ LM heads
PER_VOCAB_ENTRY = ("student_weight", "teacher_weight", "student_bias", "teacher_bias")
_PER_TOKEN = ("labels", "row_mask", "row_weight")


def linear_kl_dtensor(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Runs `linear_kl` (``function``) with an argument that is a DTensor."""
    given, layout = _together(function, args, kwargs)
    tokens = given["student_hidden"].shape[:-1]
    local = {
        **given,
        **{name: local_hidden(given[name], layout) for name in HIDDEN},
        **{name: local_vocab(given[name], layout) for name in PER_VOCAB_ENTRY},
    }
    own_tokens = local["student_hidden"].shape[:-1]
    for name in _PER_TOKEN:
        local[name] = _local_per_token(given[name], own_tokens, layout)
    if layout.vocab_dim is not None:
        local["group"] = UnsummedGroup(layout.group(layout.vocab_dim))
    reduction = given["reduction"]
    is_reduced = reduction in ("sum", "mean", "batchmean")
    if is_reduced and 0 in tokens:
        local["reduction"] = "sum"
    elif is_reduced and layout.shared_rows:
        local |= {"reduction": "sum", "row_weight": _share(local, reduction, tokens, layout)}
    result = function(**local)
    if reduction == "none":
        return _rows(result, given["student_hidden"], layout)
    if 0 in tokens:
        result = result / denominator(None, reduction, tokens)
    for dim in layout.shared_rows:
        result = summed(result, layout.group(dim).group_name)
    return replicated(result, layout.mesh)


def _together(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Layout]:
    """Checks all arguments on every rank before any exchange; returns them with their layout."""

    def check() -> tuple[dict[str, Any], Layout]:
        given = bound(function, args, kwargs)
        return given, _checked(given)

    found: tuple[dict[str, Any], Layout] = compared(function, args, kwargs, OWN, check)
    return found


def _checked(given: dict[str, Any]) -> Layout:
    """Returns the layout; raises for unsupported placements, and for errors that only this rank
    sees.
    """
    if given["group"] is not None:
        raise ValueError(
            "group is for plain tensors; DTensors say which ranks shard the vocabulary"
        )
    for name in ("student_vocab_start", "teacher_vocab_start"):
        if given[name] is not None:
            raise ValueError(
                f"{name} is for plain tensors with a group; DTensors say where vocabulary entries "
                f"are, got {given[name]}"
            )
    checks.number("hard_weight", given["hard_weight"])
    layout = layout_of(given)
    tokens = given["student_hidden"].shape[:-1]
    for name in _PER_TOKEN:
        x = given[name]
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        sizes = zip(reversed(x.shape), reversed(tokens), strict=False)
        if x.ndim > len(tokens) or any(have not in (1, size) for have, size in sizes):
            raise ValueError(
                f"{name} must broadcast to the shape of the tokens {tuple(tokens)}, got "
                f"{tuple(x.shape)}"
            )
    for name in PER_VOCAB_ENTRY[:2]:
        local = vocab_as_local(given[name])
        if isinstance(local, Tensor) and local.ndim == 2 and 1 not in local.stride():
            raise ValueError(
                f"{name} must have contiguous rows or columns, got strides {local.stride()}"
            )
    return layout


def local_hidden(x: DTensor, layout: Layout) -> Tensor:
    """Returns this rank's tokens; ranks of one vocabulary each have a part of the gradient."""
    gradients = [
        Partial() if dim == layout.vocab_dim else placement
        for dim, placement in enumerate(layout.rows)
    ]
    return x.redistribute(placements=layout.rows).to_local(grad_placements=gradients)


def local_vocab(x: Tensor | None, layout: Layout) -> Tensor | None:
    """Returns this rank's vocabulary shard; its gradient is summed over the ranks' tokens."""
    local = vocab_as_local(x)
    if local is None or not (local.requires_grad and torch.is_grad_enabled()):
        return local
    for dim in layout.shared_rows:
        local = with_summed_gradient(local, layout.group(dim).group_name)
    return local


def _local_per_token(x: Tensor | None, own: torch.Size, layout: Layout) -> Tensor | None:
    """Returns this rank's ``own`` tokens of a label, mask or weight.

    A plain tensor is the same on every rank. A tensor of size 1 along the sharded tokens is whole
    on every rank, and its gradient is the sum over ranks.
    """
    if x is None:
        return None
    if not isinstance(x, DTensor):
        x = replicated(x, layout.mesh)
    placements: list[Placement] = []
    gradients: list[Placement] = []
    for row in layout.rows:
        dim = row.dim - (len(own) - x.ndim) if isinstance(row, Shard) else -1
        is_shared = dim >= 0 and x.shape[dim] != 1
        placements.append(Shard(dim) if is_shared else Replicate())
        is_part = isinstance(row, Shard) and not is_shared
        gradients.append(Partial() if is_part else placements[-1])
    local = x.redistribute(placements=placements).to_local(grad_placements=gradients)
    return local.expand(own)


def _rows(value: Tensor, hidden: DTensor, layout: Layout) -> Tensor:
    """Returns values as a DTensor with the hidden states' placements."""
    shape = hidden.shape[:-1]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    rows = DTensor.from_local(
        value, layout.mesh, layout.rows, run_check=False, shape=shape, stride=tuple(strides)
    )
    placements = [Shard(p.dim % hidden.ndim) if isinstance(p, Shard) else p
                  for p in hidden.placements]  # fmt: skip
    return rows.redistribute(placements=placements)


def _share(local: dict[str, Any], reduction: str, tokens: torch.Size, layout: Layout) -> Any:
    """Computes each of this rank's tokens' factor in the reduction over all ranks' tokens."""
    hidden, weight = local["student_hidden"], local["row_weight"]
    match reduction:
        case "mean":
            counted = _num_counted(local, layout)
            denominator = math.prod(tokens) if counted is None else counted.clamp(min=1)
        case "batchmean":
            denominator = tokens[0]
        case _:
            return weight
    # in the dtype of the result: a weight's own may not hold the number of tokens
    is_double = torch.float64 in (hidden.dtype, local["teacher_hidden"].dtype)
    dtype = torch.float64 if is_double else torch.float32
    factor = hidden.new_ones((), dtype=dtype) if weight is None else weight.to(dtype)
    return factor / denominator


def _num_counted(local: dict[str, Any], layout: Layout) -> Tensor | None:
    labels, counted = local["labels"], local["row_mask"]
    if labels is not None:
        of_labels = labels != local.get("ignore_index", -100)
        counted = of_labels if counted is None else counted & of_labels
    if counted is None:
        return None
    number = counted.sum()
    for dim in layout.shared_rows:
        number = summed(number, layout.group(dim).group_name)
    return number


# ----------------------------------------------------------------------------------- attention
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
    _check_mesh("student_q", mesh, {**given, **scales})
    given = {name: _on_mesh(name, x, mesh) for name, x in given.items()}
    scales = {name: _on_mesh(name, x, mesh) for name, x in scales.items()}
    if settings.layout == "bhnd":  # the operator's own checks see another layout
        given = keys_everywhere(given)
    return list(given.values()), settings._replace(**scales)


def _on_mesh(name: str, x: Any, mesh: DeviceMesh) -> Any:
    """Returns a tensor as a DTensor; a plain one is the same on every rank."""
    if isinstance(x, DTensor):
        if name in (*sharding.QUERIES, *sharding.KEYS):
            return x
        # what is of all batches, heads or queries is needed on every rank
        placements = [
            Replicate() if isinstance(p, Shard) and x.shape[p.dim] == 1 else p
            for p in x.placements
        ]
        return x.redistribute(placements=placements)
    return replicated(x, mesh) if isinstance(x, Tensor) else x


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
