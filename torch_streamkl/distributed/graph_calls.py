"""Defines the functions that rewritten graphs call on DTensors, in place of the operators.

- Attention: placed as its queries are, with rows that are DTensors.
- LM heads: hidden states and weights are DTensors. Rows are plain tensors, whole on every rank,
  and their gradient is taken as each rank has it: a rank treats whole rows as it would whole
  logits.
- ``own_rows`` marks hidden states that are plain tensors: this rank multiplies its vocabulary
  shard by them, whatever the other ranks have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_streamkl.attention import ops as attention_ops
from torch_streamkl.distributed import linear_ops as sharded_ops
from torch_streamkl.distributed import sharding
from torch_streamkl.distributed.dtensors import (
    HIDDEN,
    PER_VOCAB_ENTRY,
    Layout,
    keys_everywhere,
    layout_of,
    local_hidden,
    local_vocab,
    replicated,
    vocab_dim_of,
)
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.linear.problem import SPEC

_TENSORS = SPEC.tensor_names


def linear_kl(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Returns the value and cross-entropy per token, of hidden states [tokens, hidden_size]."""
    tensors, options, layout = _local(args, kwargs)
    if layout.vocab_dim is None:
        rows = linear_ops.linear_kl(*tensors, **options)[:2]
    else:
        group = layout.group(layout.vocab_dim).group_name
        rows = sharded_ops.linear_kl_sharded(*tensors, **options, group_name=group)[:2]
    value, hard = rows
    hidden = kwargs["student_hidden"] if "student_hidden" in kwargs else args[0]
    num_tokens = hidden.shape[0]
    if tensors[-1] is not None:  # else it is empty
        hard = _whole(hard, num_tokens, layout)
    return _whole(value, num_tokens, layout), hard


def linear_kl_sum(
    *args: Any,
    row_weight: Tensor,
    hard_row_weight: Tensor | None = None,
    needs_grad: list[bool],
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Returns the sum of weighted rows; gradients come from the forward if that is exact."""
    weight: Any = _everywhere(row_weight)
    hard_weight: Any = _everywhere(hard_row_weight)
    tensors, options, layout = _local(args, kwargs)
    if layout.shared_rows:  # a rank has its weights for all rows, and not the others' for its own
        value, hard = linear_kl(*args, **kwargs)
        total = linear_ops.weighted_sum(value, weight.to(value.dtype))
        if hard_weight is not None:
            total = total + linear_ops.weighted_sum(hard, hard_weight.to(hard.dtype))
        return total, value, hard
    options |= {"row_weight": weight, "hard_row_weight": hard_weight, "needs_grad": needs_grad}
    if layout.vocab_dim is None:
        return linear_ops.linear_kl_sum(*tensors, **options)[:3]
    group = layout.group(layout.vocab_dim).group_name
    return sharded_ops.linear_kl_sharded_sum(*tensors, **options, group_name=group)[:3]


def attention_kl(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Returns value and statistics per row, as DTensors; raises if placements do not fit."""
    given = {**dict(zip(sharding.ARGUMENTS, args, strict=False)), **kwargs}
    _refuse_plain({name: given[name] for name in (*sharding.QUERIES, *sharding.KEYS)})
    made: tuple[Tensor, ...] = attention_ops.attention_kl(**keys_everywhere(given))
    return made


def scaled_dot_product_attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    *,
    attn_mask: DTensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> DTensor:
    """Computes attention of this rank's batch and heads; raises if anything else is sharded."""
    mesh, placements = q.device_mesh, q.placements
    for name, x in (("keys", k), ("values", v)):
        if not isinstance(x, DTensor) or x.device_mesh != mesh or x.placements != placements:
            raise NotImplementedError(f"attention whose queries and {name} are not placed alike")
    for dim, placement in enumerate(placements):
        if type(placement) is Shard and placement.dim in (0, 1):
            if any(x.shape[placement.dim] % mesh.size(dim) for x in (q, k, v)):
                raise NotImplementedError("attention whose batch or heads are not shared evenly")
        elif not placement.is_replicate():
            raise NotImplementedError(f"attention whose queries are placed {placements}")
    mask = None if attn_mask is None else _local_mask(attn_mask, placements)
    out = F.scaled_dot_product_attention(
        q.to_local(),
        k.to_local(),
        v.to_local(),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return DTensor.from_local(out, mesh, placements, run_check=False)


def _local_mask(mask: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """Returns the part of a mask [batch, heads, ...] for this rank's queries."""
    needs_grad = list(placements)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            own = placement.dim + mask.ndim - 4
            is_whole = own < 0 or mask.shape[own] == 1
            needs_grad[dim] = Replicate() if is_whole else Shard(own)
        if mask.placements[dim] != needs_grad[dim] and not mask.placements[dim].is_replicate():
            raise NotImplementedError(f"attention with a mask that is placed {mask.placements}")
    return mask.redistribute(placements=needs_grad).to_local()


def replicated_like(x: Tensor, like: DTensor) -> DTensor:
    """Returns a constant, the same on every rank, on the mesh of another DTensor."""
    return replicated(x, like.device_mesh)


def placed(x: DTensor, placements: list[int | str]) -> DTensor:
    """Returns a DTensor with other (`encoded`) placements; a Partial sum is reduced."""
    needs_grad = [Shard(p) if isinstance(p, int) else Replicate() for p in placements]
    return x.redistribute(placements=needs_grad)


def placed_like(x: Tensor, like: DTensor, placements: list[int | str]) -> DTensor:
    """Places a value (`encoded`) on the mesh of another DTensor; a Partial sum is reduced."""
    return placed(replicated_like(x, like), placements)


def encoded(placements: tuple[Placement, ...]) -> list[int | str]:
    """Encodes placements as constants of a graph: a shard's dimension, or a sum's operation.

    Raises NotImplementedError for others.
    """
    found: list[int | str] = []
    for p in placements:
        if type(p) is Shard:
            found.append(p.dim)
        elif type(p) is Replicate or (type(p) is Partial and p.reduce_op in ("sum", "avg")):
            found.append("sum" if isinstance(p, Partial) else "copy")
        else:
            raise NotImplementedError(f"the placement {p}")
    return found


def num_ranks(weights: list[DTensor]) -> int:
    """Counts the ranks that shard the vocabulary of two heads."""
    dims = {dim for x in weights if (dim := vocab_dim_of("weight", x)) is not None}
    mesh = weights[0].device_mesh
    return max((mesh.size(dim) for dim in dims), default=1)


def _local(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor | None], dict[str, Any], Layout]:
    """Returns this rank's tensors of a call and its options; raises if placements do not fit."""
    options = {**dict(zip(_TENSORS, args, strict=False)), **kwargs}
    given = {name: options.pop(name, None) for name in _TENSORS}
    own = {f"{side}_hidden": given[f"{side}_hidden"] for side in options.pop("own_rows", ())}
    for name, x in own.items():  # plain: its gradient is this rank's
        weight = given[name.replace("hidden", "weight")]
        given[name] = replicated_like(x.detach(), weight)
    _check(given, options)
    dims = {vocab_dim_of(name, given[name]) for name in PER_VOCAB_ENTRY if given[name] is not None}
    dims.discard(None)
    if len(dims) > 1:
        raise NotImplementedError(
            "the heads' vocabulary entries must be shared over one dimension of the mesh, got "
            + " and ".join(f"{name} {given[name].placements}" for name in PER_VOCAB_ENTRY[:2])
        )
    for vocab_dim in dims:
        assert vocab_dim is not None
        for name in PER_VOCAB_ENTRY:
            given[name] = _with_vocab_sharded(given[name], vocab_dim)
    layout = layout_of(given)
    local = {
        **{name: local_hidden(given[name], layout) for name in HIDDEN},
        **{name: local_vocab(given[name], layout) for name in PER_VOCAB_ENTRY},
        **own,
        "labels": _local_labels(given["labels"], layout),
    }
    return [local[name] for name in _TENSORS], options, layout


def _refuse_plain(given: dict[str, Any]) -> None:
    for name, x in given.items():
        if x is not None and not isinstance(x, DTensor):
            raise NotImplementedError(
                f"{name} is a plain tensor next to DTensors, and nothing says that ranks have the "
                "same"
            )


def _check(given: dict[str, Any], options: dict[str, Any]) -> None:
    _refuse_plain(given)
    vocab = [given[name].shape[0] for name in ("student_weight", "teacher_weight")]
    if vocab[0] != vocab[1]:
        raise NotImplementedError(
            f"vocabularies of {vocab[0]} and {vocab[1]} entries, which ranks shard differently"
        )
    unknown = sorted(name for name in options if isinstance(options[name], Tensor))
    if unknown:
        raise NotImplementedError(f"with DTensors, {' and '.join(unknown)} cannot be tensors")


def _local_labels(labels: DTensor | None, layout: Layout) -> Tensor | None:
    return None if labels is None else labels.redistribute(placements=layout.rows).to_local()


def _with_vocab_sharded(x: DTensor | None, vocab_dim: int) -> DTensor | None:
    """Slices a replicated head as the other one is sharded; nothing is sent."""
    if x is None or not x.placements[vocab_dim].is_replicate():
        return x
    placements = list(x.placements)
    placements[vocab_dim] = Shard(0)
    return x.redistribute(placements=placements)


def _everywhere(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _whole(rows: Tensor, tokens: int, layout: Layout) -> Tensor:
    """Gathers the rows of all ranks, a few bytes each; some may have fewer tokens, or none."""
    if not layout.shared_rows:
        return rows
    shared: DTensor = DTensor.from_local(
        rows, layout.mesh, layout.rows, run_check=False, shape=torch.Size([tokens]), stride=(1,)
    )
    return shared.full_tensor()
