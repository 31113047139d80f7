"""Checks the arguments of `attention_kl_context_parallel`, and compares them between ranks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from torch_streamkl import checks
from torch_streamkl.attention import arguments as call_arguments
from torch_streamkl.attention import interface
from torch_streamkl.bounds import check_key_lengths, check_offsets
from torch_streamkl.distributed import ring
from torch_streamkl.distributed.agreement import agree
from torch_streamkl.distributed.arguments import defaults, on_group
from torch_streamkl.distributed.collectives import group_of
from torch_streamkl.distributed.sequence import LOAD_BALANCES
from torch_streamkl.divergences.names import OPTIONS as DIVERGENCE_OPTIONS
from torch_streamkl.divergences.names import divergence_text
from torch_streamkl.program.divergences import Functional

METHODS = ("gather", "heads", "ring")
QUERIES_AND_KEYS = ("student_q", "student_k", "teacher_q", "teacher_k")
SINKS = ("student_sink", "teacher_sink")
SCALES = ("student_scale", "teacher_scale")
# of attention_kl, what is the same for every rank and row
_OPTIONS = {
    *DIVERGENCE_OPTIONS, *SCALES, "temperature", "student_softcap", "teacher_softcap",
    "head_reduction", "impl", "deterministic", *SINKS,
}  # fmt: skip
DEFAULTS = {name: x for name, x in defaults(interface.attention_kl).items() if name in _OPTIONS}


@dataclass(frozen=True)
class Packing:
    """Describes packed sequences in the shared sequence; each has its own keys."""

    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True)
class Keys:
    """Says which keys a row sees, in positions of the whole sequence."""

    is_causal: bool
    window: tuple[int | None, int | None] | None
    lengths: Tensor | None
    packing: Packing | None

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        return call_arguments.window_bounds(self.is_causal, self.window)


@dataclass(frozen=True)
class Ranks:
    """Holds the group in the form that traced code can use: its name, this rank, its size."""

    name: str
    rank: int
    size: int
    load_balance: str | None


def call_of(
    given: dict[str, Any], keys: Keys, row_mask: Tensor | None, options: dict[str, Any]
) -> tuple[call_arguments.Inputs, call_arguments.Settings]:
    """Returns this rank's rows and keys as a call of `attention_kl`, packed or not."""
    packing = keys.packing
    packed_options: dict[str, Any] = {}
    tensors: dict[str, Any] = {name: given[name] for name in QUERIES_AND_KEYS}
    if packing is not None:
        tensors = {name: x.squeeze(0).transpose(0, 1) for name, x in tensors.items()}
        tensors |= {"cu_seqlens_q": packing.cu_seqlens, "cu_seqlens_k": packing.cu_seqlens}
        packed_options = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), packing.max_seqlen)
    tensors |= {"key_lengths": keys.lengths, "row_mask": row_mask}
    tensors |= {name: options.get(name) for name in SINKS}
    settings = {name: x for name, x in {**DEFAULTS, **options}.items() if name not in SINKS}
    inputs: dict[str, Any] = {name: tensors.get(name) for name in call_arguments.Inputs._fields}
    return (
        call_arguments.Inputs(**inputs),
        call_arguments.Settings(
            **settings,
            **packed_options,
            is_causal=keys.is_causal,
            window=keys.window,
            layout="bhnd" if packing is None else call_arguments.PACKED,
            reduction="none",
        ),
    )


def compare(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks and compares a call's arguments; what one rank refuses is raised on all of them."""
    mesh: Any = kwargs.get("mesh")
    group = group_of(mesh, "mesh")
    names = inspect.signature(function).parameters

    def check(given: dict[str, Any]) -> None:
        _check(group, given, {name: x for name, x in given.items() if name not in names})

    on_group(function, args, {**DEFAULTS, **kwargs}, group, {"mesh": None}, check)


def _check(group: ProcessGroup, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Raises for arguments that context parallelism does not support, and compares the rest
    between ranks.
    """
    checks.refuse_all_transforms("attention_kl_context_parallel")
    given = {name: arguments[name] for name in QUERIES_AND_KEYS}
    method, reduction = arguments["method"], arguments["reduction"]
    ranks = Ranks(group.group_name, group.rank(), group.size(), arguments["load_balance"])
    max_seqlen, cu_seqlens = arguments["max_seqlen"], arguments["cu_seqlens"]
    packing = None if cu_seqlens is None else Packing(cu_seqlens, max_seqlen or 0)
    keys = Keys(arguments["is_causal"], arguments["window"], arguments["key_lengths"], packing)
    for name in options:
        _check_name(name, {*_OPTIONS, *(x for x in arguments if x not in options)})
    checks.one_of("method", method, METHODS)
    checks.one_of("load_balance", ranks.load_balance, LOAD_BALANCES)
    checks.one_of("reduction", reduction, call_arguments.REDUCTIONS)
    for name, x in given.items():
        checks.check_tensor(name, x, ndim=4)
        if hasattr(x, "device_mesh"):
            raise TypeError(f"{name} must be this rank's rows, got a DTensor; pass x.to_local()")
    has_head_mean = options.get("head_reduction") is not None
    checks.check_attention_inputs(**given, head_mean=has_head_mean)
    q, k = given["student_q"], given["student_k"]
    checks.same("number of rows", {"student_q": q.shape[2], "student_k": k.shape[2]})
    if ranks.load_balance and q.shape[2] % 2:
        raise ValueError(
            "load_balance='head_tail' gives every rank two chunks of the same length, got "
            f"{q.shape[2]} rows"
        )
    if method == "heads":
        for name, x in given.items():
            if x.shape[1] % ranks.size:
                raise ValueError(
                    f"method='heads' needs a multiple of {ranks.size} heads, got {x.shape[1]} of "
                    f"{name}; method='gather' takes any number"
                )
    bounds = keys.bounds
    if keys.packing is not None:
        _check_packing(keys.packing, given, method, bounds, keys.lengths)
    elif max_seqlen is not None:
        raise ValueError(
            f"max_seqlen is of packed sequences and needs cu_seqlens, got {max_seqlen}"
        )
    if method == "ring":
        _check_ring(options)
    _check_as_one_rank(given, keys, arguments["row_mask"], options)
    _check_values(keys, q.shape[2] * ranks.size)
    sizes = {
        f"{what} of {name}": x.shape[dim]
        for name, x in given.items()
        for dim, what in enumerate(("batch size", "number of heads", "number of rows", "head_dim"))
        if (dim in (0, 2) and name == "student_q") or dim in (1, 3)
    }
    dtype = str(q.dtype).removeprefix("torch.")
    agree(ranks.name, q.device, "attention_kl_context_parallel", {**sizes, "dtype": dtype}, {})


def _check_as_one_rank(
    given: dict[str, Any], keys: Keys, row_mask: Tensor | None, options: dict[str, Any]
) -> None:
    """Runs the checks of `attention_kl` on this rank's rows and keys."""
    numbers = dict(options)
    for name in SCALES:
        scale = options.get(name)
        if isinstance(scale, Tensor):
            numbers[name] = None
            q = given[f"{name.removesuffix('_scale')}_q"]
            device = scale.device if scale.ndim == 0 else q.device
            checks.check_broadcast(name, scale, tuple(q.shape), device)
            if scale.dtype not in checks.FLOAT_DTYPES:
                raise TypeError(f"{name} must be floating point, got {scale.dtype}")
            if hasattr(scale, "device_mesh"):
                raise TypeError(f"{name} must be a plain tensor, got a DTensor")
    call_arguments.operator_call(*call_of(given, keys, row_mask, numbers))


def _check_values(keys: Keys, total: int) -> None:
    """Checks lengths and offsets in the whole sequence."""
    if keys.lengths is not None:
        check_key_lengths(keys.lengths, total)
    if keys.packing is not None:
        offsets, longest = keys.packing.cu_seqlens, keys.packing.max_seqlen
        check_offsets("", offsets, total, longest)


def _check_packing(
    packing: Packing,
    given: dict[str, Any],
    method: str,
    bounds: tuple[int | None, int | None],
    key_lengths: Tensor | None,
) -> None:
    q = given["student_q"]
    checks.offsets(q.device, cu_seqlens=packing.cu_seqlens)
    checks.positive("max_seqlen", packing.max_seqlen)
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences have batch size 1, got {q.shape[0]}")
    if key_lengths is not None:
        raise ValueError("key_lengths and cu_seqlens both say where sequences end; pass one")
    left, right = bounds
    if method == "heads":
        return
    if right not in (None, 0) or (left is not None and right is None):
        raise NotImplementedError(
            f"packed sequences with method={method!r} take a window only where it ends at the row "
            f"itself (is_causal), got {bounds}; method='heads' takes any"
        )
    if method == "ring" and left is not None:
        raise NotImplementedError(
            f"packed sequences with method='ring' take no window, got {bounds}; method='gather' "
            "takes it next to is_causal"
        )


def _check_name(name: str, allowed: set[str]) -> None:
    """Refuses an argument that only a call on one rank has, and one that no call has."""
    if name in allowed:
        return
    of_one_rank = (interface.attention_kl, interface.attention_kl_varlen)
    if any(name in inspect.signature(f).parameters for f in of_one_rank):
        raise NotImplementedError(
            f"attention_kl_context_parallel does not take {name}; it takes "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    checks.refuse_option("attention_kl_context_parallel", name, allowed)


def _check_ring(options: dict[str, Any]) -> None:
    """Refuses what a ring cannot compute, because it merges results of key blocks."""
    for name in (*SINKS, "head_reduction"):
        if options.get(name) is not None:
            raise NotImplementedError(
                f"method='ring' does not take {name}; method='gather' takes it"
            )
    if options.get("impl") == "reference":
        raise NotImplementedError("method='ring' needs impl='auto' or a streaming one")
    given = {**DEFAULTS, **options}
    text = divergence_text(*(given[name] for name in DIVERGENCE_OPTIONS))
    changed = {name: given[name] for name in DIVERGENCE_OPTIONS if given[name] != DEFAULTS[name]}
    ring.form_of(Functional.of(text), ", ".join(f"{name}={x!r}" for name, x in changed.items()))
