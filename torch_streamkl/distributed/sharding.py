"""Registers the DTensor sharding strategies of the attention operators, forward and backward.

Along one mesh dimension, a call may shard

- the batch, ``Shard(0)`` of queries and keys, or the heads, ``Shard(1)``: no tensor is exchanged;
- the queries, ``Shard(2)``, with whole keys on every rank (`attention_kl` gathers keys that are
  ``Shard(2)`` too): every rank has a part of the keys' gradient, a Partial that DTensor reduces.
  This excludes causal masks, windows and ALiBi, because the operator counts from the last query
  that it sees.

Any other placement is refused. DTensor would gather the arguments silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from torch_streamkl.attention import ops

ARGUMENTS = [argument.name for argument in ops.attention_kl._schema.arguments]
QUERIES, KEYS = ("student_q", "teacher_q"), ("student_k", "teacher_k")
# what an optional tensor has in place of batch, heads and queries; None where it has none of it
_DIMENSIONS: dict[str, tuple[int | None, int | None, int | None]] = {
    "mask": (0, 1, 2),
    "student_bias": (0, 1, 2),
    "teacher_bias": (0, 1, 2),
    "student_alibi_slopes": (None, 0, None),
    "teacher_alibi_slopes": (None, 0, None),
    "student_sink": (None, 0, None),
    "teacher_sink": (None, 0, None),
    "key_lengths": (0, None, None),
    "cu_seqlens_q": (None, None, None),
    "cu_seqlens_k": (None, None, None),
    "teacher_lse": (0, 1, 2),
}
_NAMES = ("batch", "heads", "queries")


@dataclass(frozen=True)
class ShardingStrategy:
    """Describes how ranks share a call: placements of tensors, values and keys' gradients."""

    name: str
    inputs: dict[str, Placement]
    value: Placement
    statistics: Placement
    key_gradients: dict[str, Placement]


def sharding_strategies(given: dict[str, Any], num_ranks: int) -> list[ShardingStrategy]:
    """Lists the ways to share a call over so many ranks; ``given`` has tensors or their specs."""
    tensors = {name: given[name] for name in (*QUERIES, *KEYS, *_DIMENSIONS)
               if given.get(name) is not None}  # fmt: skip
    everywhere = ShardingStrategy(
        "no rank",
        dict.fromkeys(tensors, Replicate()),
        Replicate(),
        Replicate(),
        dict.fromkeys(KEYS, Replicate()),
    )
    found = [everywhere]
    for dim in range(3):
        if _why_unsupported(dim, given, num_ranks) is not None:
            continue
        inputs = {name: _placement(name, x, dim) for name, x in tensors.items()}
        gradients: dict[str, Placement] = {
            name: Partial() if inputs[name] == Replicate() else inputs[name] for name in KEYS
        }
        found.append(ShardingStrategy(_NAMES[dim], inputs, Shard(dim), Shard(dim + 1), gradients))
    return found


def _why_unsupported(dim: int, given: dict[str, Any], num_ranks: int) -> str | None:
    """Explains why a call cannot be shared along batch, heads or queries; None if it can."""
    packed = given.get("cu_seqlens_q") is not None
    for name in (*QUERIES, *KEYS):
        size = given[name].shape[dim]
        if (dim == 2 and name in KEYS) or (dim == 1 and name in KEYS and size == 1):
            continue
        if dim == 1 and size % num_ranks:
            return f"{name} has {size} heads, which {num_ranks} ranks cannot share evenly"
        if -(-size // num_ranks) * (num_ranks - 1) >= size:
            return f"{name} has size {size} there, too little for {num_ranks} ranks"
    if packed and dim != 1:
        return "packed sequences can be shared by heads only"
    if dim != 2:
        return None
    for name in ("window_left", "window_right", "student_alibi_slopes", "teacher_alibi_slopes"):
        if given.get(name) is not None:
            return (
                "a causal mask, a window or ALiBi counts from the last query; "
                "torch_streamkl.distributed.attention_kl_context_parallel shares such queries"
            )
    return None


def _placement(name: str, x: Any, dim: int) -> Placement:
    """Returns the placement of one tensor if a call is shared along batch, heads or queries."""
    if name in QUERIES:
        return Shard(dim)
    if name in KEYS:
        # one head of keys for all queries' heads is needed everywhere
        return Replicate() if dim == 2 or (dim == 1 and x.shape[1] == 1) else Shard(dim)
    own = _DIMENSIONS[name][dim]
    return Replicate() if own is None or x.shape[own] == 1 else Shard(own)


def fitting_strategies(given: dict[str, Any], mesh: DeviceMesh) -> list[ShardingStrategy]:
    """Returns the strategy of each mesh dimension by its placements; raises if none fits."""
    found = []
    for mesh_dim in range(mesh.ndim):
        num_ranks = mesh.size(mesh_dim)
        placed = {
            name: given[name].placements[mesh_dim]
            for name in (*QUERIES, *KEYS, *_DIMENSIONS)
            if given.get(name) is not None
        }
        fitting = (x for x in sharding_strategies(given, num_ranks) if _fits(x, placed))
        strategy = next(fitting, None)
        if strategy is None:
            raise NotImplementedError(_refusal(given, placed, mesh_dim, num_ranks))
        found.append(strategy)
    return found


def _fits(strategy: ShardingStrategy, placed: dict[str, Placement]) -> bool:
    """Whether inputs are placed as the strategy needs them, or need a local slice at most."""
    return all(
        placement == strategy.inputs[name] or (name in _DIMENSIONS and placement == Replicate())
        for name, placement in placed.items()
    )


def _refusal(
    given: dict[str, Any], placed: dict[str, Placement], mesh_dim: int, num_ranks: int
) -> str:
    reason = "queries, keys and what comes with them are not placed alike"
    q = placed["student_q"]
    if isinstance(q, Shard) and q.dim < 3:
        reason = _why_unsupported(q.dim, given, num_ranks) or reason
    listed = ", ".join(f"{name} {placement}" for name, placement in placed.items())
    return (
        "attention_kl on DTensors may share, over a dimension of the mesh, the batch (Shard(0)) "
        "or the heads (Shard(1)) of queries and keys, or the queries (Shard(2)) with keys "
        f"everywhere; got, on dimension {mesh_dim}, {listed}: {reason}"
    )


def _given(arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(ARGUMENTS, arguments, strict=False))


def _fitting(given: dict[str, Any]) -> dict[str, ShardingStrategy]:
    return {
        strategy.name: strategy for strategy in fitting_strategies(given, given["student_q"].mesh)
    }


def _inputs(strategy: ShardingStrategy, num_arguments: int) -> list[Placement | None]:
    return [strategy.inputs.get(name) for name in ARGUMENTS[:num_arguments]]


def _forward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    return [
        (
            [strategy.value, strategy.statistics, strategy.statistics],
            _inputs(strategy, len(arguments)),
        )
        for strategy in _fitting(_given(arguments)).values()
    ]


def _backward(
    grad: Any, student_stats: Any, teacher_stats: Any, needs_grad: Any, *arguments: Any
) -> list[tuple[list[Any], list[Any]]]:
    rows = []
    for strategy in _fitting(_given(arguments)).values():
        gradients = [
            strategy.key_gradients[name] if name in KEYS else strategy.inputs[name]
            for name in ("student_q", "student_k", "teacher_q", "teacher_k")
        ]
        statistics = [strategy.value, strategy.statistics, strategy.statistics, None]
        rows.append((gradients, statistics + _inputs(strategy, len(arguments))))
    return rows


register_sharding(ops.attention_kl)(_forward)
register_sharding(ops.attention_kl_backward)(_backward)
# DTensor remembers what it found for the same tensors and integers. The shapes of the backward's
# results also depend on `needs_grad`, a list of booleans: everything from there on has to count.
_NEEDS_GRAD = [a.name for a in ops.attention_kl_backward._schema.arguments].index("needs_grad")
DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[ops.attention_kl_backward] = (
    RuntimeSchemaInfo(static_argnum=_NEEDS_GRAD, needs_pytree=True)
)
