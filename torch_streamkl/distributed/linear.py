"""`linear_kl` with a group: ranks that share a vocabulary and have the same hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_streamkl.distributed import linear_ops
from torch_streamkl.distributed.agreement import refused_together
from torch_streamkl.distributed.collectives import group_of
from torch_streamkl.distributed.summed_gradient import with_summed_gradient
from torch_streamkl.distributed.word_ranges import BY_RANK


@dataclass(frozen=True)
class UnsummedGroup:
    """A group whose caller adds up the gradients of hidden states (a DTensor's placement does)."""

    group: ProcessGroup


@dataclass(frozen=True)
class Places:
    """The operators' last arguments (NOTE [Places] in linear/ops.py), and who adds gradients."""

    arguments: dict[str, Any]
    sums_gradients: bool


def linear_kl_together(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """``function(...)``; a rank that refuses its arguments does not leave the others waiting."""
    if torch.compiler.is_compiling():  # every rank traces the same program
        return function(*args, **kwargs)
    group = kwargs["group"]
    group = group.group if isinstance(group, UnsummedGroup) else group_of(group)
    tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    device = next((x.device for x in tensors), torch.device("cpu"))
    value: Tensor = refused_together(group, device, lambda: function(*args, **kwargs))
    return value


def places_of(
    group: ProcessGroup | DeviceMesh | UnsummedGroup,
    student_first_word: int | None,
    teacher_first_word: int | None,
    impl: str,
) -> Places:
    """Where words are, checked."""
    if impl == "reference":
        raise NotImplementedError(
            "impl='reference' needs all logits on one rank, and a group shares them; "
            "impl='streaming' takes a group"
        )
    for name, first in (
        ("student_first_word", student_first_word),
        ("teacher_first_word", teacher_first_word),
    ):
        if first is not None and first < 0:
            raise ValueError(f"{name} must be at least 0, got {first}")
    sums_gradients = not isinstance(group, UnsummedGroup)
    ranks = group.group if isinstance(group, UnsummedGroup) else group_of(group)
    arguments = {
        "group_name": ranks.group_name,
        "student_first_word": BY_RANK if student_first_word is None else student_first_word,
        "teacher_first_word": BY_RANK if teacher_first_word is None else teacher_first_word,
    }
    return Places(arguments, sums_gradients)


def rows(tensors: list[Any], options: dict[str, Any], places: Places) -> tuple[Tensor, Tensor]:
    """Values and cross-entropies per token."""
    value, hard, *_ = linear_ops.linear_kl_sharded(
        *_shared(tensors, places), **options, **places.arguments
    )
    return value, hard


def total(arguments: tuple[Any, ...], options: dict[str, Any], places: Places) -> Tensor:
    """A weighted sum whose gradients the forward computes."""
    result: Tensor = linear_ops.linear_kl_sharded_sum(
        *_shared(arguments, places), **options, **places.arguments
    )[0]
    return result


def _shared(arguments: Any, places: Places) -> list[Any]:
    """The arguments, with hidden states whose gradients are added up over ranks."""
    shared = list(arguments)
    for index in (0, 2):
        needs_sum = places.sums_gradients and shared[index].requires_grad
        if needs_sum and torch.is_grad_enabled():
            shared[index] = with_summed_gradient(shared[index], places.arguments["group_name"])
    return shared
