"""attention_kl_context_parallel(): attention maps of a sequence that ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_streamkl import checks
from torch_streamkl.attention import interface
from torch_streamkl.distributed.agreement import agree, refused_together
from torch_streamkl.distributed.collectives import group_of
from torch_streamkl.distributed.sequence import (
    HEAD_TAIL,
    LOAD_BALANCES,
    chunks_of,
    some_heads,
    some_rows,
    whole_sequence,
)
from torch_streamkl.distributed.summed_gradient import summed, with_summed_gradient

METHODS = ("gather", "heads")
_QUERIES_AND_KEYS = ("student_q", "student_k", "teacher_q", "teacher_k")
_SINKS = ("student_sink", "teacher_sink")
# of attention_kl, what is the same for every rank and row
_OPTIONS = {
    "divergence", "beta", "student_scale", "teacher_scale", "temperature", "student_softcap",
    "teacher_softcap", "student_eps", "teacher_eps", "student_clamp", "teacher_clamp",
    "head_reduction", "impl", "deterministic", *_SINKS,
}  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """The group, in the form that traced code can use."""

    name: str
    rank: int
    size: int
    load_balance: str | None


def attention_kl_context_parallel(
    student_q: Tensor,
    student_k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    *,
    mesh: DeviceMesh | ProcessGroup,
    method: str = "gather",
    load_balance: str | None = HEAD_TAIL,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    row_mask: Tensor | None = None,
    reduction: str = "none",
    **options: Any,
) -> Tensor:
    """`attention_kl` of a sequence whose rows ranks share, with this rank's rows of the result.

    Args:
        student_q, teacher_q: ``[batch, num_heads, rows, head_dim]``, this rank's rows of the
            sequence (`shard_sequence` cuts them).
        student_k, teacher_k: ``[batch, num_kv_heads, rows, head_dim]``, the same rows.
        mesh: the ranks, as a device mesh of one dimension or a process group.
        method: ``"gather"``: every rank gathers the keys and computes its rows; gradients of keys
            are reduce-scattered. ``"heads"``: an all-to-all gives every rank all rows of some
            heads (Ulysses); the numbers of heads and of key heads must divide by the ranks.
        load_balance: ``"head_tail"``: a rank has chunks r and 2 n - 1 - r of 2 n, which shares a
            causal mask's work evenly; None: rank r has the r-th of n parts.
        is_causal, window: as in `attention_kl`, in positions of the whole sequence.
        key_lengths: ``[batch]``, the number of valid keys of the whole sequence, the same on every
            rank.
        row_mask: boolean, broadcasts to this rank's rows.
        reduction: ``"none"``; ``"mean"``, ``"sum"`` and ``"batchmean"`` over the rows of all
            ranks.
        options: divergence, scales, temperature, softcaps, eps, clamps, sinks, head_reduction,
            impl and deterministic of `attention_kl`.

    Returns:
        float32 ``[batch, num_heads, rows]``, or a scalar, the same on every rank.

    Raises:
        ValueError, TypeError, NotImplementedError: with the rule and the value, on every rank.
            Masks, biases, ALiBi and packed sequences are not supported.
    """
    group = group_of(mesh, "mesh")
    given = {
        "student_q": student_q,
        "student_k": student_k,
        "teacher_q": teacher_q,
        "teacher_k": teacher_k,
    }
    ranks = Ranks(group.group_name, group.rank(), group.size(), load_balance)
    bounds = (is_causal, window)
    if not torch.compiler.is_compiling():  # a compiled program is the same on every rank
        device = student_q.device if isinstance(student_q, Tensor) else torch.device("cpu")
        refused_together(
            group,
            device,
            lambda: _check(given, ranks, method, bounds, reduction, key_lengths, options),
        )
    for name in _SINKS:
        if options.get(name) is not None:
            options[name] = with_summed_gradient(options[name], ranks.name)
    left, right = interface.window_bounds(is_causal, window)
    if method == "heads":
        value = _by_heads(given, ranks, (is_causal, window), key_lengths, options)
    else:
        value = _by_rows(given, ranks, left, right, key_lengths, options)
    if row_mask is not None:
        value = torch.where(row_mask, value, 0.0)
    if reduction == "none":
        return value
    total = summed(value.sum(), ranks.name)
    if reduction == "sum":
        return total
    batch = value.shape[0]
    return total / (batch if reduction == "batchmean" else value.numel() * ranks.size)


def _by_rows(
    given: dict[str, Tensor],
    ranks: Ranks,
    left: int | None,
    right: int | None,
    key_lengths: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Every rank has all keys and computes its rows."""
    how = (ranks.name, ranks.size, ranks.load_balance)
    keys = {side: whole_sequence(given[f"{side}_k"], *how) for side in ("student", "teacher")}
    queries = {side: given[f"{side}_q"] for side in ("student", "teacher")}
    if left is None and right is None:  # where a row stands does not matter
        return interface.attention_kl(
            queries["student"],
            keys["student"],
            queries["teacher"],
            keys["teacher"],
            key_lengths=key_lengths,
            **options,
        )
    chunks = chunks_of(ranks.rank, ranks.size, ranks.load_balance)
    num_rows = queries["student"].shape[2] // len(chunks)
    num_keys = keys["student"].shape[2]
    values = []
    for index, chunk in enumerate(chunks):
        # Keys before the window and after it are cut off. The operator counts distances from the
        # last query and the last key, so the bounds move by the keys beyond the chunk's last row.
        first = chunk * num_rows
        start = 0 if left is None else max(0, first - left)
        stop = num_keys if right is None else min(num_keys, first + num_rows + right)
        beyond = stop - num_rows - first
        rows = slice(index * num_rows, (index + 1) * num_rows)
        lengths = None if key_lengths is None else (key_lengths - start).clamp(0, stop - start)
        values.append(
            interface.attention_kl(
                queries["student"][:, :, rows],
                keys["student"][:, :, start:stop],
                queries["teacher"][:, :, rows],
                keys["teacher"][:, :, start:stop],
                window=(
                    None if left is None else left + beyond,
                    None if right is None else right - beyond,
                ),
                key_lengths=lengths,
                **options,
            )
        )
    return torch.cat(values, 2)


def _by_heads(
    given: dict[str, Tensor],
    ranks: Ranks,
    bounds: tuple[bool, tuple[int | None, int | None] | None],
    key_lengths: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Every rank has all rows of some heads."""
    how = (ranks.name, ranks.size, ranks.load_balance)
    whole = [some_heads(given[name], *how) for name in _QUERIES_AND_KEYS]
    for name in _SINKS:
        if options.get(name) is not None:
            options[name] = options[name].chunk(ranks.size)[ranks.rank]
    value = interface.attention_kl(
        *whole, is_causal=bounds[0], window=bounds[1], key_lengths=key_lengths, **options
    )
    return some_rows(value, *how)


def _check(
    given: dict[str, Any],
    ranks: Ranks,
    method: str,
    bounds: tuple[bool, tuple[int | None, int | None] | None],
    reduction: str,
    key_lengths: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Raise on what is not legal here, and agree with the other ranks on the rest."""
    for name in options:
        if name not in _OPTIONS:
            raise NotImplementedError(
                f"attention_kl_context_parallel does not take {name}; it takes "
                f"{', '.join(sorted(_OPTIONS))}"
            )
    checks.one_of("method", method, METHODS)
    checks.one_of("load_balance", ranks.load_balance, LOAD_BALANCES)
    checks.one_of("reduction", reduction, interface.REDUCTIONS)
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
    interface.window_bounds(*bounds)
    sizes = {
        f"{what} of {name}": x.shape[dim]
        for name, x in given.items()
        for dim, what in enumerate(("batch size", "number of heads", "number of rows", "head_dim"))
        if (dim in (0, 2) and name == "student_q") or dim in (1, 3)
    }
    shown = {name: _shown(x) for name, x in sorted(options.items())}
    agree(
        ranks.name,
        q.device,
        sizes,
        {},
        {
            "dtype": str(q.dtype),
            "method": method,
            "load_balance": str(ranks.load_balance),
            "is_causal and window": str(bounds),
            "reduction": reduction,
            "presence of key_lengths": str(key_lengths is not None),
            "options": str(shown),
        },
    )


def _shown(value: Any) -> Any:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else value
