"""Ranks tell each other what they were called with, before they exchange tensors of that size.

A collective of tensors that differ in size hangs or corrupts memory. So every call first gathers
a few integers of each rank, and where they do not fit all ranks raise the same error, which names
the rule and what each rank has. Options (the divergence, scales and so on) travel as a digest and
are gathered in full only for that error.

NOTE [What agreement costs]
One all-gather of 192 bytes a rank and call. A group that has a backend for the CPU (one of
``init_process_group()`` or ``"cpu:gloo,cuda:nccl"``) exchanges them there: some 0.1 ms of the
host, which runs ahead of the GPU, and no synchronisation. A group with NCCL alone exchanges them
on the GPU, and the host waits for what was launched before. While a CUDA graph is captured nothing
may wait: the last answer to the same question is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_object

from torch_streamkl.distributed import collectives
from torch_streamkl.runtime.launch import is_capturing


class DisagreementError(ValueError):
    """What ranks were called with does not fit; raised on all of them."""


_MAX_ANSWERS = 1024
_answers: dict[Any, list[dict[str, int]]] = {}


def agree(
    group_name: str,
    device: torch.device,
    same: dict[str, int],
    own: dict[str, int],
    options: dict[str, str],
) -> list[dict[str, int]]:
    """What every rank has: ``same`` and ``options`` are equal on all, ``own`` may differ.

    Raises the same DisagreementError on every rank where they are not equal, or where a rank
    refused its arguments (`refused_together`).
    """
    facts = {**same, **own}
    text = repr(options)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    key = (group_name, device, text, *facts.items())
    if is_capturing(device):
        if key not in _answers:
            raise RuntimeError(
                "ranks cannot compare their arguments while a CUDA graph is captured: call once "
                "with the same shapes and options before the capture"
            )
        return _answers[key]
    group = collectives.resolve(group_name)
    rows = _gathered([0, digest, len(facts), *facts.values()], group, group_name, device)
    if any(refused for refused, *_ in rows):
        _raise_refusal(group, "")
    for what, values in (
        ("the kind of call", [row[2] for row in rows]),
        *((name, [row[3 + i] for row in rows]) for i, name in enumerate(same)),
    ):
        if len(set(values)) > 1:
            raise DisagreementError(f"all ranks must have the same {what}, got {listed(values)}")
    if len({row[1] for row in rows}) > 1:
        given: list[Any] = [None] * group.size()
        all_gather_object(given, options, group=group)
        name = next(n for n in options if len({other[n] for other in given}) > 1)
        raise DisagreementError(
            f"all ranks must have the same {name}, got {listed([other[name] for other in given])}"
        )
    answer = [dict(zip(facts, row[3:], strict=False)) for row in rows]
    if len(_answers) >= _MAX_ANSWERS:
        _answers.clear()
    _answers[key] = answer
    return answer


def refused_together(group: ProcessGroup, device: torch.device, check: Callable[[], Any]) -> Any:
    """``check()``; what it raises is raised on every rank, which would wait for this one."""
    try:
        return check()
    except DisagreementError:
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        rows = _gathered([1, 0, 0], group, group.group_name, device)
        _raise_refusal(group, str(error), error, sum(row[0] for row in rows))


def refused_by_any(
    groups: list[ProcessGroup], device: torch.device, call: Callable[[], Any]
) -> Any:
    """``call()``, which communicates with none of the groups; what a rank raises is raised by all.

    The groups are those of a mesh's dimensions: what one of them has heard it tells the next.
    """
    result, error = None, None
    try:
        result = call()
    except (ValueError, TypeError, NotImplementedError) as refusal:
        error = refusal
    if is_capturing(device):
        groups = []  # nothing may wait; the same call went well before the capture
    for group in groups:
        rows = _gathered([int(error is not None), 0, 0], group, group.group_name, device)
        if not any(refused for refused, *_ in rows):
            continue
        try:
            refused = sum(row[0] for row in rows)
            _raise_refusal(group, "" if error is None else str(error), error, refused)
        except (ValueError, TypeError, NotImplementedError) as refusal:
            error = refusal
    if error is not None:
        raise error
    return result


def _raise_refusal(
    group: ProcessGroup, text: str, error: Exception | None = None, num_refused: int = 0
) -> NoReturn:
    texts: list[Any] = [None] * group.size()
    all_gather_object(texts, text, group=group)
    if error is not None and num_refused == group.size():
        raise error
    reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(texts) if reason)
    kind = DisagreementError if error is None else type(error)
    raise kind(f"a rank refused its arguments: {reasons}") from error


_HEADER = 24  # integers of a rank: a fixed number, so that unequal calls meet in one collective


def _gathered(
    row: list[int], group: ProcessGroup, group_name: str, device: torch.device
) -> list[list[int]]:
    header = torch.tensor([*row, *[0] * (_HEADER - len(row))], dtype=torch.int64, device="cpu")
    header = header.to(_device_of(group, device))
    rows: Tensor = collectives.wait(collectives.all_gather(header, group.size(), group_name))
    return [list(map(int, r)) for r in rows.view(-1, _HEADER).tolist()]


def _device_of(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where a group can exchange a few integers: the CPU if it has a backend for it."""
    cpu = torch.device("cpu")
    try:
        group._get_backend(cpu)
    except RuntimeError:
        return device
    return cpu


def listed(values: list[Any]) -> str:
    """``12 (rank 0), 10 (rank 1)``."""
    return ", ".join(f"{value} (rank {rank})" for rank, value in enumerate(values))
