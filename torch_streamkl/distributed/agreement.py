"""Compares the arguments of all ranks before they exchange tensors.

A collective hangs or corrupts memory if its tensors differ in size between ranks. If ranks differ
in anything else, such as a reduction, the result is something that nobody asked for. So every call
first gathers a few integers of each rank: digests of its arguments (`arguments.py` describes
them), and the sizes in which ranks may differ. If digests differ, or a rank has refused its
arguments, the ranks also gather the texts, and all of them raise the same error. It names the
argument, and what each rank has.

NOTE [What agreement costs]
One all-gather of 192 bytes a rank for each group of a call. A group with a backend for the CPU
(``init_process_group()`` or ``"cpu:gloo,cuda:nccl"``) exchanges them there: about 0.1 ms of the
CPU, which runs ahead of the GPU, and no synchronisation. A group with NCCL alone exchanges them on
the GPU, and the CPU waits for what was launched before. While a CUDA graph is captured nothing may
wait: the last answer to the same question is used.

NOTE [Why no call goes without it]
A rank cannot know that the others repeat the call that it repeats. If it skipped the exchange
because these arguments were compared before, it would meet the exchange of a rank with new
arguments in a collective of another size, which is the hang that all this prevents.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_streamkl.caches import Bounded
from torch_streamkl.distributed import collectives
from torch_streamkl.runtime.launch import is_capturing


class DisagreementError(ValueError):
    """Raised on every rank if the arguments of one call do not fit together between ranks.

    The message names the argument, and what each rank has. If the arguments of one rank are wrong
    by themselves, all ranks raise that rank's error instead. No tensor was computed or exchanged.
    """


@dataclass
class _Call:
    """Holds a call that the ranks of a group make, and whether they have compared it yet."""

    group_name: str
    arguments: dict[str, str]
    has_met: bool = False


@dataclass(frozen=True)
class _CallDescription:
    """Describes a rank's call to the other ranks."""

    kind: str
    options: Mapping[str, str]  # of the operator
    arguments: Mapping[str, str]  # of the public function; a compiled program does not know them
    sizes: Mapping[str, int] = field(default_factory=dict)  # may differ between ranks
    refusal: tuple[str, str] | None = None  # type and text of an error

    @property
    def text(self) -> bytes:
        description = [self.kind, dict(self.options), dict(self.arguments), self.refusal]
        return json.dumps(description).encode()

    @property
    def header(self) -> list[int]:
        digests = [_digest(self.kind), _digest(self.options), _digest(self.arguments)]
        return [int(self.refusal is not None), *digests, *self.sizes.values()]

    @staticmethod
    def of(text: bytes) -> _CallDescription:
        kind, options, arguments, refusal = json.loads(text)
        return _CallDescription(
            kind, options, arguments, {}, None if refusal is None else tuple(refusal)
        )


_log = logging.getLogger(__name__)
_NUM_FIRST = 4  # integers before the sizes
_current: ContextVar[_Call | None] = ContextVar("_current", default=None)
_answers: Bounded[list[dict[str, int]]] = Bounded()


def agree(
    group_name: str,
    device: torch.device,
    kind: str,
    same: Mapping[str, Any],
    own: Mapping[str, int],
) -> list[dict[str, int]]:
    """Returns every rank's ``own`` after a check that ``same`` is equal on all ranks.

    Raises the same DisagreementError on every rank if it is not, if the arguments of the public
    calls differ (`together`), or if a rank refused its arguments.
    """
    call = _current.get()
    if call is not None and call.group_name != group_name:
        call = None
    options = {name: str(value) for name, value in same.items()}
    description = _CallDescription(kind, options, {} if call is None else call.arguments, own)
    key = (group_name, device, *(tuple(x.items()) for x in (options, description.arguments, own)))
    if is_capturing(device):
        if key not in _answers:
            raise RuntimeError(
                "ranks cannot compare their arguments while a CUDA graph is captured: call once "
                "with the same shapes and options before the capture"
            )
        if call is not None:
            call.has_met = True
        return _answers[key]
    if call is not None:
        call.has_met = True  # also if the exchange fails: another one would not end either
    rows, error = _exchanged(description, collectives.resolve(group_name), device)
    if error is not None:
        raise error
    answer = [dict(zip(own, row[_NUM_FIRST:], strict=False)) for row in rows]
    _answers[key] = answer
    return answer


def together(
    group: ProcessGroup,
    device: torch.device,
    kind: str,
    describe: Callable[[], dict[str, str]],
    call: Callable[[], Any],
) -> Any:
    """Runs ``call()`` on all ranks of the group or on none.

    `agree` compares the arguments together with what the call itself has to compare. What is
    raised before that on one rank is raised on every rank, which would wait for this one.
    """
    current = _Call(group.group_name, {})
    token = _current.set(current)
    try:
        current.arguments = describe()
        result = call()
        if not current.has_met:  # nothing was left to compute
            agree(group.group_name, device, kind, {}, {})
        return result
    except Exception as error:
        if current.has_met or is_capturing(device):
            raise
        description = _CallDescription(kind, {}, current.arguments, refusal=_refusal(error))
        raised = _exchanged(description, group, device, error)[1]
        raise raised or error from None
    finally:
        _current.reset(token)


def together_on_mesh(
    mesh: DeviceMesh,
    device: torch.device,
    kind: str,
    describe: Callable[[], dict[str, str]],
    check: Callable[[], Any],
    explain: Callable[[], Any],
) -> Any:
    """Runs ``check()``, which does not communicate, after all ranks of a mesh compared arguments.

    If they differ, ``explain()`` raises what the call would raise on this rank alone. The groups
    of the mesh's dimensions compare one after the other, and a rank passes on what it has heard in
    one of them.
    """
    arguments: dict[str, str] = {}
    result, error = None, None
    try:
        arguments = describe()
        result = check()
    except Exception as refusal:
        error = refusal
    if not is_capturing(device):  # nothing may wait; the same call went well before the capture
        for dim in range(mesh.ndim):
            refused = None if error is None else _refusal(error)
            description = _CallDescription(kind, {}, arguments, refusal=refused)
            _, error = _exchanged(description, mesh.get_group(dim), device, error, explain)
    if error is not None:
        raise error
    return result


def _refusal(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _digest(x: object) -> int:
    """Returns seven bytes of a digest, or 0 for nothing to compare."""
    return int.from_bytes(hashlib.sha256(repr(x).encode()).digest()[:7], "big") if x else 0


def _exchanged(
    description: _CallDescription,
    group: ProcessGroup,
    device: torch.device,
    error: Exception | None = None,
    explain: Callable[[], Any] = lambda: None,
) -> tuple[list[list[int]], Exception | None]:
    """Returns the headers of all ranks, and the error that all of them have to raise."""
    header = description.header
    rows = _gathered(header + [0] * (_HEADER - len(header)), group, device)
    refused, kinds, options, arguments = ({row[i] for row in rows} for i in range(_NUM_FIRST))
    if refused == {0} and len(kinds) == len(options) == 1 and len(arguments - {0}) <= 1:
        return rows, None
    if error is None:
        try:
            explain()
        except (ValueError, TypeError, NotImplementedError) as refusal:
            error, description = refusal, replace(description, refusal=_refusal(refusal))
        except Exception as unexpected:  # what ranks differ in is the better message
            _log.debug("arguments could not be tried alone", exc_info=unexpected)
    text = description.text
    sizes = [size for (size,) in _gathered([len(text)], group, device)]
    padded = _gathered([*text, *[0] * (max(sizes) - len(text))], group, device)
    everyone = [
        _CallDescription.of(bytes(x[:size])) for x, size in zip(padded, sizes, strict=True)
    ]
    is_refused = any(x.refusal is not None for x in everyone)
    return rows, _refused(everyone, error) if is_refused else _different(everyone)


def _refused(everyone: list[_CallDescription], error: Exception | None) -> Exception:
    refusals = [description.refusal for description in everyone]
    if error is not None and len(set(refusals)) == 1:
        return error
    first = next(refusal for refusal in refusals if refusal is not None)
    reasons = "; ".join(f"rank {rank}: {x[1]}" for rank, x in enumerate(refusals) if x)
    kind = getattr(builtins, first[0], None)
    known = (ValueError, TypeError, NotImplementedError, RuntimeError)
    raised: Exception = (kind if kind in known else DisagreementError)(
        f"a rank refused its arguments: {reasons}"
    )
    raised.__cause__ = error
    return raised


def _different(everyone: list[_CallDescription]) -> Exception:
    """Describes the first argument in which ranks differ."""
    if len({description.kind for description in everyone}) > 1:
        kinds = listed([description.kind for description in everyone])
        return DisagreementError(f"all ranks must make the same call, got {kinds}")
    for given in (
        [description.options for description in everyone],
        [description.arguments for description in everyone],
    ):
        known = [x for x in given if x]
        for name in dict.fromkeys(name for x in known for name in x):
            if len({x.get(name) for x in known}) > 1:
                values = listed([x.get(name) for x in given])
                return DisagreementError(f"all ranks must have the same {name}, got {values}")
    return DisagreementError("all ranks must have the same arguments")


_HEADER = 24  # integers of a rank: a fixed number, so that unequal calls meet in one collective


def _gathered(row: list[int], group: ProcessGroup, device: torch.device) -> list[list[int]]:
    """Gathers the integers of every rank."""
    if group.size() == 1 or torch.distributed.get_backend(group) == "fake":
        return [row] * group.size()
    with collectives.unseen():
        mine = torch.tensor(row, dtype=torch.int64, device="cpu").to(_device_of(group, device))
        try:
            rows: Tensor = collectives.wait(
                collectives.all_gather(mine, group.size(), group.group_name)
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {group.rank()} could not compare its arguments with the other "
                f"{group.size() - 1} ranks of its group: one of them has ended, or did not make "
                f"this call in time; its own error says why ({error})"
            ) from error
        return [list(map(int, x)) for x in rows.view(-1, len(row)).tolist()]


def _device_of(group: ProcessGroup, device: torch.device) -> torch.device:
    """Returns the device on which a group exchanges integers: the CPU if it has a backend for
    it.
    """
    cpu = torch.device("cpu")
    try:
        group._get_backend(cpu)
    except RuntimeError:
        is_cpu = device.type == "cpu"  # of a call without tensors, or with those of another device
        return torch.device("cuda") if is_cpu else device
    return cpu


def listed(values: list[Any]) -> str:
    """Formats values by rank: ``12 (rank 0), 10 (rank 1)``."""
    return ", ".join(f"{value} (rank {rank})" for rank, value in enumerate(values))
