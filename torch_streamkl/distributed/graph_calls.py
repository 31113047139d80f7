"""What rewritten graphs call on DTensors in the place of the operators on whole tensors.

Hidden states and heads are DTensors; rows come back whole, as plain tensors that every rank has,
with the order of the operators' results. The gradient of a row is taken as each rank has it: what
a rank does with whole logits, it does with whole rows. Hidden states of ``own_rows`` are plain:
what a rank multiplies its words by, whatever the others have.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_streamkl.distributed import linear_ops as sharded_ops
from torch_streamkl.distributed.linear_dtensor import local_hidden, local_words
from torch_streamkl.distributed.placements import HIDDEN, Layout, layout_of, words_dim_of
from torch_streamkl.linear import ops as linear_ops

_TENSORS = (
    "student_hidden",
    "student_weight",
    "teacher_hidden",
    "teacher_weight",
    "student_bias",
    "teacher_bias",
    "labels",
)
_PER_WORD = ("student_weight", "teacher_weight", "student_bias", "teacher_bias")


def linear_kl(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Value and cross-entropy per token, of hidden states [tokens, width]."""
    tensors, options, layout = _local(args, kwargs)
    if layout.words_dim is None:
        rows = linear_ops.linear_kl(*tensors, **options)[:2]
    else:
        group = layout.group(layout.words_dim).group_name
        rows = sharded_ops.linear_kl_sharded(*tensors, **options, group_name=group)[:2]
    return tuple(_whole(x, layout) for x in rows)


def linear_kl_sum(
    *args: Any,
    row_weight: Tensor,
    hard_row_weight: Tensor | None = None,
    wanted: list[bool],
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """The sum of the rows, each times its weight; gradients in the forward where that is exact."""
    weight: Any = _everywhere(row_weight)
    hard_weight: Any = _everywhere(hard_row_weight)
    tensors, options, layout = _local(args, kwargs)
    if layout.shared_rows:  # a rank has its weights for all rows, and not the others' for its own
        value, hard = linear_kl(*args, **kwargs)
        total = linear_ops.weighted_sum(value, weight.to(value.dtype))
        if hard_weight is not None:
            total = total + linear_ops.weighted_sum(hard, hard_weight.to(hard.dtype))
        return total, value, hard
    options |= {"row_weight": weight, "hard_row_weight": hard_weight, "wanted": wanted}
    if layout.words_dim is None:
        return linear_ops.linear_kl_sum(*tensors, **options)[:3]
    group = layout.group(layout.words_dim).group_name
    return sharded_ops.linear_kl_sharded_sum(*tensors, **options, group_name=group)[:3]


def replicated_like(x: Tensor, like: DTensor) -> DTensor:
    """A constant, which is the same on every rank."""
    mesh = like.device_mesh
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def placed_like(x: Tensor, like: DTensor, placements: list[int | str]) -> DTensor:
    """What every rank has, placed (`encoded`) on the mesh of another DTensor; a sum is done."""
    wanted = [Shard(p) if isinstance(p, int) else Replicate() for p in placements]
    return replicated_like(x, like).redistribute(placements=wanted)


def encoded(placements: tuple[Placement, ...]) -> list[int | str]:
    """Placements as constants of a graph: the dimension of a shard, or the operation of a sum.

    Raises NotImplementedError for others.
    """
    found: list[int | str] = []
    for p in placements:
        if type(p) is Shard:
            found.append(p.dim)
        elif type(p) is Replicate or (type(p) is Partial and p.reduce_op == "sum"):
            found.append("sum" if isinstance(p, Partial) else "copy")
        else:
            raise NotImplementedError(f"the placement {p}")
    return found


def num_ranks(weights: list[DTensor]) -> int:
    """The ranks that share the words of two heads."""
    dims = {dim for x in weights if (dim := words_dim_of("weight", x)) is not None}
    mesh = weights[0].device_mesh
    return max((mesh.size(dim) for dim in dims), default=1)


def _local(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor | None], dict[str, Any], Layout]:
    """This rank's tensors of a call and its options; raises where placements do not fit."""
    options = {**dict(zip(_TENSORS, args, strict=False)), **kwargs}
    given = {name: options.pop(name, None) for name in _TENSORS}
    own = {f"{side}_hidden": given[f"{side}_hidden"] for side in options.pop("own_rows", ())}
    for name, x in own.items():  # plain: its gradient is this rank's
        given[name] = replicated_like(x.detach(), given["student_weight"])
    _check(given, options)
    dims = {words_dim_of(name, given[name]) for name in _PER_WORD if given[name] is not None}
    dims.discard(None)
    if len(dims) > 1:
        raise NotImplementedError(
            "the heads' words must be shared over one dimension of the mesh, got "
            + " and ".join(f"{name} {given[name].placements}" for name in _PER_WORD[:2])
        )
    for words_dim in dims:
        assert words_dim is not None
        for name in _PER_WORD:
            given[name] = _with_words_shared(given[name], words_dim)
    layout = layout_of(given)
    local = {
        **{name: local_hidden(given[name], layout) for name in HIDDEN},
        **{name: local_words(given[name], layout) for name in _PER_WORD},
        **own,
        "labels": _local_labels(given["labels"], layout),
    }
    return [local[name] for name in _TENSORS], options, layout


def _check(given: dict[str, Any], options: dict[str, Any]) -> None:
    for name, x in given.items():
        if x is not None and not isinstance(x, DTensor):
            raise NotImplementedError(
                f"{name} is a plain tensor beside DTensors, and nothing says that ranks have the "
                "same"
            )
    words = [given[name].shape[0] for name in ("student_weight", "teacher_weight")]
    if words[0] != words[1]:
        raise NotImplementedError(
            f"vocabularies of {words[0]} and {words[1]} words, which ranks share at other words"
        )
    unknown = sorted(name for name in options if isinstance(options[name], Tensor))
    if unknown:
        raise NotImplementedError(f"{' and '.join(unknown)} beside DTensors")


def _local_labels(labels: DTensor | None, layout: Layout) -> Tensor | None:
    return None if labels is None else labels.redistribute(placements=layout.rows).to_local()


def _with_words_shared(x: DTensor | None, words_dim: int) -> DTensor | None:
    """Words that every rank has are cut as the others are; nothing is sent."""
    if x is None or not x.placements[words_dim].is_replicate():
        return x
    placements = list(x.placements)
    placements[words_dim] = Shard(0)
    return x.redistribute(placements=placements)


def _everywhere(x: Tensor | None) -> Tensor | None:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _whole(rows: Tensor, layout: Layout) -> Tensor:
    """The rows of all ranks, a few bytes each."""
    if not layout.shared_rows or not rows.numel():
        return rows
    shared: DTensor = DTensor.from_local(rows, layout.mesh, layout.rows, run_check=False)
    return shared.full_tensor()
