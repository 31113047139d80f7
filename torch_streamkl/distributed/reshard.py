"""Moves vocabulary shards of a weight between ranks.

If student and teacher are sharded at different entries, `linear_kl` needs one of them moved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_streamkl import checks
from torch_streamkl.distributed import collectives
from torch_streamkl.distributed.agreement import agree
from torch_streamkl.distributed.arguments import Own, bound, compared, on_group
from torch_streamkl.distributed.dtensors import vocab_dim_of

_P = ParamSpec("_P")


def _on_all_ranks(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Makes ranks check and compare their arguments before any of them exchanges tensors."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        given = {**dict(zip(("weight", "ranges"), args, strict=False)), **kwargs}
        weight, like, group = (given.get(name) for name in ("weight", "like", "group"))
        placed = weight if isinstance(weight, DTensor) or group is not None else like
        if isinstance(placed, DTensor):
            shared: ProcessGroup = compared(
                function,
                args,
                kwargs,
                OWN,
                lambda: _group_of(**bound(function, args, kwargs)),
                lambda: None,
            )
        elif group is None:
            raise ValueError("a weight that is no DTensor needs a group, got None")
        else:
            shared = collectives.group_of(group)  # type: ignore[arg-type]
        moved: Tensor = on_group(function, args, kwargs, shared, OWN)
        return moved

    return call


@_on_all_ranks
def reshard_vocab(
    weight: Tensor,
    ranges: Sequence[tuple[int, int]] | None = None,
    *,
    like: DTensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Moves a weight's vocabulary shards between ranks, and returns this rank's new shard.

    On each rank, `linear_kl` needs the same vocabulary entries of student and teacher. If the two
    are sharded differently, move a frozen teacher once, before training:

    .. code-block:: python

        teacher_weight = reshard_vocab(teacher.lm_head.weight, like=student.lm_head.weight)
        linear_kl(student_hidden, student.lm_head.weight, teacher_hidden, teacher_weight)

    With the whole weight on one rank, it equals ``weight[slice(*ranges[rank])]``.

    Args:
        weight: ``[vocab_size, ...]``, any dtype: a DTensor that shards the vocabulary over one
            mesh dimension, or a plain tensor with this rank's shard and ``group``. Ranks hold
            consecutive shards in their order.
        ranges: one ``(start, stop)`` of vocabulary entries for each rank; consecutive, and from 0
            to vocab_size.
        like: the student's weight, instead of ``ranges``: each rank gets the entries that it has
            of the student. Entries beyond the student's vocabulary go to the rank with its last
            one.
        group: the ranks, for a plain tensor.

    Returns:
        A plain tensor with this rank's entries, detached from ``weight``. It takes one all-to-all.

    Raises:
        ValueError, TypeError: on every rank, with the rule and the value.
        DisagreementError: ranks passed different arguments.
    """
    return _exchanged(weight, ranges, like, _group_of(weight, ranges, like, group))


# this rank's vocabulary shard; which group it is the group itself says
OWN: Own = {"weight": (0,), "group": None}


def _group_of(weight: Tensor, ranges: object, like: object, group: Any) -> ProcessGroup:
    """Returns the ranks that shard the vocabulary; raises on arguments that do not fit."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a tensor, got {type(weight).__name__}")
    if (ranges is None) == (like is None):
        raise ValueError("give either ranges or like, got both or none of them")
    if like is not None and not isinstance(like, DTensor):
        raise TypeError(f"like must be a DTensor, got {type(like).__name__}")
    if not isinstance(weight, DTensor):
        if group is None:
            raise ValueError("a weight that is no DTensor needs a group, got None")
        return collectives.group_of(group)
    if group is not None:
        raise ValueError(
            "group is for plain tensors; a DTensor says which ranks shard the vocabulary"
        )
    dim = vocab_dim_of("weight", weight)
    if dim is None:
        raise ValueError(
            f"weight must shard the vocabulary over a mesh dimension, got {weight.placements}"
        )
    return weight.device_mesh.get_group(dim)


def _exchanged(
    weight: Tensor,
    ranges: Sequence[tuple[int, int]] | None,
    like: DTensor | None,
    group: ProcessGroup,
) -> Tensor:
    local = (weight.to_local() if isinstance(weight, DTensor) else weight).detach().contiguous()
    if local.ndim == 0:
        raise ValueError(
            "weight must have dimensions [vocab_size, ...], got a tensor without dimensions"
        )
    given = None if ranges is None else _pairs(ranges)
    facts = agree(
        group.group_name,
        local.device,
        "reshard_vocab",
        {
            "number of elements of a vocabulary entry": _row(local),
            "dtype of the weight": local.dtype,
        },
        {"vocab": local.shape[0]},
    )
    sizes = [fact["vocab"] for fact in facts]
    total = sum(sizes)
    own = [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes))]
    needs_grad = given if like is None else ranges_like(like, total, len(sizes))
    assert needs_grad is not None
    _check(needs_grad, total, len(sizes))
    rank = group.rank()
    send = [_overlap(own[rank], other) for other in needs_grad]
    receive = [_overlap(other, needs_grad[rank]) for other in own]
    return collectives.wait(collectives.all_to_all(local, receive, send, group.group_name))


def _pairs(ranges: Any) -> list[tuple[int, int]]:
    """Converts ``ranges`` to pairs of integers."""
    if isinstance(ranges, Tensor):
        ranges = ranges.tolist()
    is_list = isinstance(ranges, Iterable) and not isinstance(ranges, str)
    found = [tuple(x) if isinstance(x, tuple | list) else (x,) for x in ranges] if is_list else []
    if not is_list or any(len(pair) != 2 for pair in found):
        raise TypeError(
            "ranges must be a pair (start, stop) of vocabulary entries for each rank, got "
            f"{found if is_list else ranges!r}"
        )
    for pair in found:
        for name, x in zip(("start", "stop"), pair, strict=True):
            checks.integer(f"{name} of ranges", x)
    return [(int(start), int(stop)) for start, stop in found]


def ranges_like(weight: DTensor, vocab_size: int, num_ranks: int) -> list[tuple[int, int]]:
    """Returns the vocabulary range of every rank of a DTensor, as DTensor cuts them."""
    dim = vocab_dim_of("like", weight)
    if dim is None or weight.device_mesh.size(dim) != num_ranks:
        raise ValueError(
            f"like must shard the vocabulary over a mesh dimension of {num_ranks} ranks, got "
            f"{weight.placements} on {weight.device_mesh}"
        )
    vocabulary = weight.shape[0]
    step = -(-vocabulary // num_ranks)
    starts = [min(rank * step, vocabulary) for rank in range(num_ranks)]
    stops = [min(start + step, vocabulary) for start in starts]
    last = max(rank for rank in range(num_ranks) if stops[rank] > starts[rank])
    ranges = []
    for rank, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        end = vocab_size if rank >= last else min(stop, vocab_size)
        ranges.append((min(start, vocab_size) if rank <= last else vocab_size, end))
    return ranges


def _row(x: Tensor) -> int:
    return int(torch.Size(x.shape[1:]).numel())


def _check(ranges: Sequence[tuple[int, int]], vocab_size: int, num_ranks: int) -> None:
    if len(ranges) != num_ranks:
        raise ValueError(
            f"ranges must name the vocabulary entries of {num_ranks} ranks, got {list(ranges)}"
        )
    end = 0
    for start, stop in ranges:
        if start != end or stop < start:
            raise ValueError(
                f"ranges must be consecutive and start at vocabulary entry 0, got {list(ranges)}"
            )
        end = stop
    if end != vocab_size:
        raise ValueError(
            f"ranges must end at the last of {vocab_size} vocabulary entries, got {list(ranges)}"
        )


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
