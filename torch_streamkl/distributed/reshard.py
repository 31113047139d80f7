"""Move the words of a weight between ranks: for student and teacher that are cut differently."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_streamkl.distributed import collectives
from torch_streamkl.distributed.agreement import agree, together, together_on_mesh
from torch_streamkl.distributed.arguments import Own, described
from torch_streamkl.distributed.placements import words_dim_of


def reshard_words(
    weight: Tensor,
    ranges: Sequence[tuple[int, int]] | None = None,
    *,
    like: DTensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """This rank's words of a weight or bias, after the ranks exchanged them.

    `linear_kl` needs the same words of student and teacher on a rank. For a frozen teacher call
    this once, before training:

    .. code-block:: python

        teacher_weight = reshard_words(teacher.lm_head.weight, like=student.lm_head.weight)
        linear_kl(student_hidden, student.lm_head.weight, teacher_hidden, teacher_weight)

    Args:
        weight: ``[num_words, ...]``: a DTensor that shares its words over one mesh dimension, or
            this rank's words, with ``group``. Ranks hold consecutive words, in their order.
        ranges: first and last-plus-one word of every rank, consecutive, from 0 to the size of the
            vocabulary.
        like: instead of ``ranges``, the student's weight: each rank gets the words that it has of
            it. Words beyond its vocabulary go to the rank with its last word.
        group: the ranks, for a weight that is no DTensor.

    Returns:
        A plain tensor with the rank's words, detached from ``weight``. One all-to-all.

    Raises:
        ValueError, TypeError: with the rule and the value, on every rank.
    """
    arguments = {"weight": weight, "ranges": ranges, "like": like, "group": group}
    if isinstance(weight, DTensor):
        device = weight.device
        shared: ProcessGroup = together_on_mesh(
            weight.device_mesh,
            device,
            "reshard_words of a DTensor",
            lambda: described(arguments, OWN, device),
            lambda: _group_of(weight, ranges, like, group),
            lambda: None,
        )
        local = weight.to_local().detach()
    elif not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a tensor, got {type(weight).__name__}")
    elif group is None:
        raise ValueError("a weight that is no DTensor needs a group, got None")
    else:
        shared, local = collectives.group_of(group), weight.detach()
    moved: Tensor = together(
        shared,
        local.device,
        "reshard_words",
        lambda: described(arguments, OWN, local.device),
        lambda: _exchanged(local.contiguous(), ranges, like, shared),
    )
    return moved


# this rank's words; which group it is the group itself says
OWN: Own = {"weight": (0,), "group": None}


def _group_of(weight: DTensor, ranges: object, like: object, group: object) -> ProcessGroup:
    """The ranks that share the words."""
    if group is not None:
        raise ValueError("group is for plain tensors; a DTensor says which ranks share the words")
    _check_wanted(ranges, like)
    dim = words_dim_of("weight", weight)
    if dim is None:
        raise ValueError(
            f"weight must share its words over a mesh dimension, got {weight.placements}"
        )
    return weight.device_mesh.get_group(dim)


def _check_wanted(ranges: object, like: object) -> None:
    if (ranges is None) == (like is None):
        raise ValueError("give either ranges or like, got both or none of them")
    if like is not None and not isinstance(like, DTensor):
        raise TypeError(f"like must be a DTensor, got {type(like).__name__}")


def _exchanged(
    local: Tensor,
    ranges: Sequence[tuple[int, int]] | None,
    like: DTensor | None,
    group: ProcessGroup,
) -> Tensor:
    _check_wanted(ranges, like)
    if local.ndim == 0:
        raise ValueError("weight must have dimensions [num_words, ...], got a tensor of none")
    given = None if ranges is None else [(int(start), int(stop)) for start, stop in ranges]
    facts = agree(
        group.group_name,
        local.device,
        "reshard_words",
        {"number of elements of a word": _row(local), "dtype of the weight": local.dtype},
        {"words": local.shape[0]},
    )
    sizes = [fact["words"] for fact in facts]
    total = sum(sizes)
    own = [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes))]
    wanted = given if like is None else ranges_like(like, total, len(sizes))
    assert wanted is not None
    _check(wanted, total, len(sizes))
    rank = group.rank()
    send = [_overlap(own[rank], other) for other in wanted]
    receive = [_overlap(other, wanted[rank]) for other in own]
    return collectives.wait(collectives.all_to_all(local, receive, send, group.group_name))


def ranges_like(weight: DTensor, num_words: int, num_ranks: int) -> list[tuple[int, int]]:
    """Words of every rank of a DTensor, as DTensor cuts them; the rest with the last."""
    dim = words_dim_of("like", weight)
    if dim is None or weight.device_mesh.size(dim) != num_ranks:
        raise ValueError(
            f"like must share its words over a mesh dimension of {num_ranks} ranks, got "
            f"{weight.placements} on {weight.device_mesh}"
        )
    vocabulary = weight.shape[0]
    step = -(-vocabulary // num_ranks)
    starts = [min(rank * step, vocabulary) for rank in range(num_ranks)]
    stops = [min(start + step, vocabulary) for start in starts]
    last = max(rank for rank in range(num_ranks) if stops[rank] > starts[rank])
    ranges = []
    for rank, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        end = num_words if rank >= last else min(stop, num_words)
        ranges.append((min(start, num_words) if rank <= last else num_words, end))
    return ranges


def _row(x: Tensor) -> int:
    return int(torch.Size(x.shape[1:]).numel())


def _check(ranges: Sequence[tuple[int, int]], num_words: int, num_ranks: int) -> None:
    if len(ranges) != num_ranks:
        raise ValueError(f"ranges must name the words of {num_ranks} ranks, got {list(ranges)}")
    end = 0
    for start, stop in ranges:
        if start != end or stop < start:
            raise ValueError(f"ranges must be consecutive and start at word 0, got {list(ranges)}")
        end = stop
    if end != num_words:
        raise ValueError(f"ranges must end at the last of {num_words} words, got {list(ranges)}")


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
