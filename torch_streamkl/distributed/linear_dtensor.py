"""`linear_kl` on DTensors: their placements say what is where, and gradients come back alike.

- A weight shares its words over one mesh dimension, Shard(0), or is Replicate().
- Hidden states share tokens over any mesh dimension. Along the one that shares words they are
  gathered (sequence parallel), and their gradient is reduce-scattered; along others ranks keep
  their tokens (data parallel), and the weights' gradients are summed.
- The result has one value per token where the student's hidden states have theirs, or is a scalar
  on every rank.

Every other placement is an error: nothing is gathered but hidden states along that dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_streamkl.distributed.linear import UnsummedGroup
from torch_streamkl.distributed.placements import HIDDEN, Layout, layout_of, words_as_local
from torch_streamkl.distributed.summed_gradient import summed, with_summed_gradient

_POSITIONAL = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
_PER_WORD = ("student_weight", "teacher_weight", "student_bias", "teacher_bias")
_PER_TOKEN = ("labels", "row_mask", "row_weight")


def linear_kl_dtensor(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """`linear_kl` (``function``) of which an argument is a DTensor."""
    given = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
    if given.get("group") is not None:
        raise ValueError("group is for plain tensors; DTensors say which ranks share the words")
    layout = layout_of(given)
    tokens = given["student_hidden"].shape[:-1]
    local = {
        **given,
        **{name: local_hidden(given[name], layout) for name in HIDDEN},
        **{name: local_words(given.get(name), layout) for name in _PER_WORD},
        **{name: _local_per_token(given.get(name), tokens, layout) for name in _PER_TOKEN},
    }
    if layout.words_dim is not None:
        local["group"] = UnsummedGroup(layout.group(layout.words_dim))
    reduction = given.get("reduction", "none")
    if reduction == "none":
        return _rows(function(**local), given["student_hidden"], layout)
    if layout.shared_rows and reduction in ("sum", "mean", "batchmean"):
        local |= {"reduction": "sum", "row_weight": _share(local, reduction, tokens, layout)}
    total = function(**local)
    for dim in layout.shared_rows:
        total = summed(total, layout.group(dim).group_name)
    return DTensor.from_local(total, layout.mesh, _whole(layout), run_check=False)


def _whole(layout: Layout) -> list[Replicate]:
    return [Replicate()] * layout.mesh.ndim


def local_hidden(x: DTensor, layout: Layout) -> Tensor:
    """This rank's tokens; every rank that shares words has a part of the gradient."""
    gradients = [
        Partial() if dim == layout.words_dim else placement
        for dim, placement in enumerate(layout.rows)
    ]
    return x.redistribute(placements=layout.rows).to_local(grad_placements=gradients)


def local_words(x: Tensor | None, layout: Layout) -> Tensor | None:
    """This rank's words, whose gradient is summed over the ranks that have other tokens."""
    local = words_as_local(x)
    if local is None or not (local.requires_grad and torch.is_grad_enabled()):
        return local
    for dim in layout.shared_rows:
        local = with_summed_gradient(local, layout.group(dim).group_name)
    return local


def _local_per_token(x: Tensor | None, tokens: torch.Size, layout: Layout) -> Tensor | None:
    """This rank's tokens of a label, mask or weight; a plain tensor is the same on every rank."""
    if x is None:
        return None
    whole = x.expand(tokens) if x.ndim <= len(tokens) else x
    if not isinstance(whole, DTensor):
        whole = DTensor.from_local(whole, layout.mesh, _whole(layout), run_check=False)
    return whole.redistribute(placements=layout.rows).to_local()


def _rows(value: Tensor, hidden: DTensor, layout: Layout) -> Tensor:
    """Values as a DTensor with the hidden states' placements."""
    shape = hidden.shape[:-1]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    rows = DTensor.from_local(
        value, layout.mesh, layout.rows, run_check=False, shape=shape, stride=tuple(strides)
    )
    placements = [Shard(p.dim % hidden.ndim) if isinstance(p, Shard) else p
                  for p in hidden.placements]  # fmt: skip
    return rows.redistribute(placements=placements)


def _share(local: dict[str, Any], reduction: str, tokens: torch.Size, layout: Layout) -> Any:
    """The factor of each of this rank's tokens in the reduction over all ranks' tokens."""
    hidden, weight = local["student_hidden"], local["row_weight"]
    match reduction:
        case "mean":
            counted = _num_counted(local, layout)
            denominator = math.prod(tokens) if counted is None else counted.clamp(min=1)
        case "batchmean":
            denominator = tokens[0]
        case _:
            return weight
    factor = hidden.new_ones((), dtype=torch.float32 if weight is None else weight.dtype)
    return (factor if weight is None else weight) / denominator


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
