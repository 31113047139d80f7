"""Runs `linear_kl` with a group: ranks share a vocabulary and have the same hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_streamkl.compiler_marks import is_compiling
from torch_streamkl.distributed import linear_ops
from torch_streamkl.distributed.arguments import Own, on_group
from torch_streamkl.distributed.collectives import group_of
from torch_streamkl.distributed.summed_gradient import with_summed_gradient
from torch_streamkl.distributed.vocab_ranges import BY_RANK


@dataclass(frozen=True)
class UnsummedGroup:
    """Marks a group whose caller adds up gradients of hidden states, as a DTensor's placement
    does.
    """

    group: ProcessGroup


@dataclass(frozen=True)
class ShardArguments:
    """Holds the operators' last arguments (NOTE [Shard arguments] in linear_ops.py).

    It also says who adds up the gradients of hidden states.
    """

    arguments: dict[str, Any]
    sums_gradients: bool


# weights and biases are this rank's vocabulary shard; the operator compares where they begin
OWN: Own = {
    **dict.fromkeys(("student_weight", "teacher_weight", "student_bias", "teacher_bias"), (0,)),
    **dict.fromkeys(("group", "student_vocab_start", "teacher_vocab_start"), None),
}


def linear_kl_together(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Calls ``function(...)`` after ranks compared their arguments; all compute, or none does."""
    if is_compiling():  # every rank traces the same program
        return function(*args, **kwargs)
    ranks = _ranks_of(kwargs["group"])
    value: Tensor = on_group(function, args, kwargs, ranks, OWN)
    return value


def shard_arguments_of(
    group: ProcessGroup | DeviceMesh | UnsummedGroup,
    student_vocab_start: int | None,
    teacher_vocab_start: int | None,
    impl: str,
) -> ShardArguments:
    """Checks the shards of all ranks, and returns which vocabulary entries each has."""
    if impl == "reference":
        raise NotImplementedError(
            "impl='reference' needs all logits on one rank, and a group shares them; "
            "impl='torch' takes a group"
        )
    for name, first in (
        ("student_vocab_start", student_vocab_start),
        ("teacher_vocab_start", teacher_vocab_start),
    ):
        if first is not None and first < 0:
            raise ValueError(f"{name} must be at least 0, got {first}")
    arguments = {
        "group_name": _ranks_of(group).group_name,
        "student_vocab_start": BY_RANK if student_vocab_start is None else student_vocab_start,
        "teacher_vocab_start": BY_RANK if teacher_vocab_start is None else teacher_vocab_start,
    }
    return ShardArguments(arguments, not isinstance(group, UnsummedGroup))


def _ranks_of(group: ProcessGroup | DeviceMesh | UnsummedGroup) -> ProcessGroup:
    return group.group if isinstance(group, UnsummedGroup) else group_of(group)


def rows(
    tensors: list[Any], options: dict[str, Any], shard_arguments: ShardArguments
) -> tuple[Tensor, Tensor]:
    """Returns values and cross-entropies per token."""
    value, hard, *_ = linear_ops.linear_kl_sharded(
        *_shared(tensors, shard_arguments), **options, **shard_arguments.arguments
    )
    return value, hard


def total(
    arguments: tuple[Any, ...], options: dict[str, Any], shard_arguments: ShardArguments
) -> Tensor:
    """Returns a weighted sum whose gradients the forward computes."""
    result: Tensor = linear_ops.linear_kl_sharded_sum(
        *_shared(arguments, shard_arguments), **options, **shard_arguments.arguments
    )[0]
    return result


def _shared(arguments: Any, shard_arguments: ShardArguments) -> list[Any]:
    """Returns the arguments, with hidden states whose gradients are summed over ranks."""
    shared = list(arguments)
    for index in (0, 2):
        needs_sum = shard_arguments.sums_gradients and shared[index].requires_grad
        if needs_sum and torch.is_grad_enabled():
            shared[index] = with_summed_gradient(
                shared[index], shard_arguments.arguments["group_name"]
            )
    return shared
