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
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_streamkl.distributed.agreement import refused_by_any
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
    }
    device = local["student_hidden"].device
    per_token = {name: given[name] for name in _PER_TOKEN if given.get(name) is not None}
    local |= dict.fromkeys(_PER_TOKEN)
    if per_token:
        everyone = [layout.group(dim) for dim in range(layout.mesh.ndim)]
        local |= _together(
            everyone,
            device,
            lambda: {n: _local_per_token(n, x, tokens, layout) for n, x in per_token.items()},
        )
    if layout.words_dim is not None:
        local["group"] = UnsummedGroup(layout.group(layout.words_dim))
    reduction = given.get("reduction", "none")
    shared = layout.shared_rows and reduction in ("sum", "mean", "batchmean")
    if shared:
        local |= {"reduction": "sum", "row_weight": _share(local, reduction, tokens, layout)}
    own_tokens = local["student_hidden"].shape[:-1]
    has_none = 0 in own_tokens and 0 not in tokens
    if has_none:
        local |= _one_token_that_does_not_count(local)
    # those that share words tell each other in the call itself
    others = [layout.group(dim) for dim in layout.shared_rows]
    result = _together(others, device, lambda: function(**local))
    if reduction == "none":
        rows = result[:0].view(own_tokens) if has_none else result
        return _rows(rows, given["student_hidden"], layout)
    for dim in layout.shared_rows:
        result = summed(result, layout.group(dim).group_name)
    return DTensor.from_local(result, layout.mesh, _whole(layout), run_check=False)


def _together(groups: list[ProcessGroup], device: torch.device, call: Callable[[], Any]) -> Any:
    """``call()``; what a rank of the groups refuses is raised on all of them."""
    if torch.compiler.is_compiling():  # every rank traces the same program
        return call()
    return refused_by_any(groups, device, call)


def _one_token_that_does_not_count(local: dict[str, Any]) -> dict[str, Any]:
    """For a rank whose share has no token: it takes part in every exchange all the same."""
    hidden = {name: F.pad(local[name].flatten(0, -2), (0, 0, 0, 1)) for name in HIDDEN}
    changed = {**hidden, "row_mask": hidden["student_hidden"].new_zeros(1, dtype=torch.bool)}
    if local["labels"] is not None:
        changed["labels"] = local["labels"].new_full((1,), local.get("ignore_index", -100))
    weight = local["row_weight"]
    if weight is not None and weight.ndim:
        changed["row_weight"] = F.pad(weight.flatten(), (0, 1))
    return changed


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


def _local_per_token(name: str, x: Tensor, tokens: torch.Size, layout: Layout) -> Tensor:
    """This rank's tokens of a label, mask or weight; a plain tensor is the same on every rank."""
    sizes = zip(reversed(x.shape), reversed(tokens), strict=False)
    if x.ndim > len(tokens) or any(have not in (1, size) for have, size in sizes):
        raise ValueError(
            f"{name} must broadcast to the shape of the tokens {tuple(tokens)}, got "
            f"{tuple(x.shape)}"
        )
    whole = x.expand(tokens)
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
