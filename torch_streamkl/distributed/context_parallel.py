"""Defines attention_kl_context_parallel(): `attention_kl` of a sequence that ranks share.

Three methods exchange what a rank's rows need: gathered keys, an all-to-all of heads (Ulysses), or
keys that travel around a ring (`ring.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torch_streamkl.attention import arguments as call_arguments
from torch_streamkl.attention import interface
from torch_streamkl.attention.problem import SPEC
from torch_streamkl.compiler_marks import is_compiling
from torch_streamkl.distributed import ring, ring_ops
from torch_streamkl.distributed.collectives import group_of
from torch_streamkl.distributed.context_call import (
    QUERIES_AND_KEYS,
    SCALES,
    SINKS,
    Keys,
    Packing,
    Ranks,
    call_of,
    compare,
)
from torch_streamkl.distributed.sequence import (
    chunks_of,
    ranges_of_sequence,
    some_heads,
    some_rows,
)
from torch_streamkl.distributed.summed_gradient import summed, with_summed_gradient
from torch_streamkl.divergences.names import Reduction

SIDES = ("student", "teacher")
_P = ParamSpec("_P")


def _on_all_ranks(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Makes ranks check and compare their arguments before any of them exchanges tensors."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        if not is_compiling():  # a compiled program is the same on every rank
            compare(function, args, kwargs)
        return function(*args, **kwargs)

    return call


@_on_all_ranks
def attention_kl_context_parallel(
    student_q: Tensor,
    student_k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    *,
    mesh: DeviceMesh | ProcessGroup,
    method: Literal["gather", "heads", "ring"] = "gather",
    load_balance: Literal["head_tail"] | None = "head_tail",
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    row_mask: Tensor | None = None,
    reduction: Reduction = "none",
    **options: Any,
) -> Tensor:
    """Computes `attention_kl` of a sequence that ranks share, and returns the values of this
    rank's rows.

    With the whole sequence on one rank, it equals

    .. code-block:: python

        rows = attention_kl(student_q, student_k, teacher_q, teacher_k, is_causal=True)
        shard_sequence(rows, mesh)  # this rank's rows

    Every rank calls it with its own rows:

    .. code-block:: python

        rows = attention_kl_context_parallel(
            student_q=shard_sequence(student_q, mesh), student_k=shard_sequence(student_k, mesh),
            teacher_q=shard_sequence(teacher_q, mesh), teacher_k=shard_sequence(teacher_k, mesh),
            mesh=mesh, is_causal=True,
        )

    Args:
        student_q, teacher_q: ``[batch, num_heads, rows, head_dim]``, this rank's rows of the
            sequence. dtypes are those of `attention_kl`.
        student_k, teacher_k: ``[batch, num_kv_heads, rows, head_dim]``, the keys of the same
            positions.
        mesh: the ranks, as a device mesh of one dimension or a process group.
        method: how ranks exchange tensors. ``"gather"`` gathers all keys on every rank, and
            reduce-scatters their gradients. ``"heads"`` gives every rank all rows of some heads by
            an all-to-all (Ulysses); heads and key heads must divide by the number of ranks.
            ``"ring"`` passes keys from rank to rank, so a rank holds the keys of two ranks at
            most. It supports the divergences that are linear in log-probabilities (forward and
            reverse KL, cross-entropy, jeffreys), without sinks, head_reduction, eps and clamps.
        load_balance: ``"head_tail"`` gives rank r of n the chunks r and 2 n - 1 - r of 2 n, so
            that all ranks have the same work under a causal mask. None gives it the r-th of n
            parts.
        is_causal, window: as in `attention_kl`, in positions of the whole sequence.
        key_lengths: ``[batch]``, the number of valid keys of the whole sequence. It is the same on
            every rank.
        cu_seqlens: int32 ``[num_sequences + 1]``, the offsets of packed sequences in the whole
            sequence, from 0 to its length. It is the same on every rank. batch must be 1. Each
            sequence attends to its own keys. ``window`` then needs ``is_causal``, and does not run
            as a ring.
        max_seqlen: an upper bound of the lengths of packed sequences. As in `attention_kl`, values
            of lengths and offsets are checked on a CPU.
        row_mask: boolean, broadcasts to this rank's rows. A False row has value 0 and no gradient.
        reduction: ``"none"``, or ``"mean"``, ``"sum"`` or ``"batchmean"`` over the rows of all
            ranks. With packed sequences, ``"batchmean"`` divides by their number.
        options: divergence, beta, scales, temperature, softcaps, eps, clamps, sinks,
            head_reduction, impl and deterministic of `attention_kl`. Sinks and scales are the same
            on every rank, and get the sum of all ranks' gradients. A tensor scale that varies
            between rows is this rank's part instead, and keeps its own gradient.

    Returns:
        ``[batch, num_heads, rows]``, or a scalar that is the same on every rank. float32, in nats.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, with the rule and the value.
            Masks, biases and ALiBi are not supported.
        DisagreementError: ranks passed different arguments.

    Numerics: as `attention_kl`. Blocks of a ring are merged as row states, in float32.

    Source: the chunks are those of PyTorch's context parallelism; Ulysses is arXiv 2309.14509, and
    ring attention arXiv 2310.01889.
    """
    group = group_of(mesh, "mesh")
    given = {
        "student_q": student_q,
        "student_k": student_k,
        "teacher_q": teacher_q,
        "teacher_k": teacher_k,
    }
    ranks = Ranks(group.group_name, group.rank(), group.size(), load_balance)
    packing = None if cu_seqlens is None else Packing(cu_seqlens, max_seqlen or 0)
    keys = Keys(is_causal, window, key_lengths, packing)
    given = _scaled(given, ranks, options)
    for name in SINKS:
        if options.get(name) is not None:
            options[name] = with_summed_gradient(options[name], ranks.name)
    if 0 in student_q.shape:  # no batch or no row on any rank
        value = interface.attention_kl(*given.values(), **options)
    else:
        how = {"heads": _by_heads, "ring": _around, "gather": _by_rows}[method]
        value = how(given, ranks, keys, options)
    if row_mask is not None:
        value = torch.where(row_mask, value, 0.0)
    if reduction == "none":
        return value
    total = summed(value.sum(), ranks.name)
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / (value.numel() * ranks.size)
    return total / (value.shape[0] if packing is None else packing.cu_seqlens.shape[0] - 1)


def _scaled(given: dict[str, Tensor], ranks: Ranks, options: dict[str, Any]) -> dict[str, Tensor]:
    """Multiplies queries by tensor scales, and removes these from ``options``.

    A method may then exchange and shard queries as without scales.
    """
    scaled = dict(given)
    for name in SCALES:
        scale = options.get(name)
        if not isinstance(scale, Tensor):
            continue
        options[name] = 1.0
        q = given[f"{name.removesuffix('_scale')}_q"]
        is_of_rows = scale.ndim > 1 and scale.shape[-2] > 1
        if not is_of_rows:
            scale = with_summed_gradient(scale.to(q.device), ranks.name)
        scaled[f"{name.removesuffix('_scale')}_q"] = (q * scale).to(q.dtype)
    return scaled


def _by_rows(
    given: dict[str, Tensor], ranks: Ranks, keys: Keys, options: dict[str, Any]
) -> Tensor:
    """Gathers all keys on every rank, and computes this rank's rows."""
    how = (ranks.name, ranks.size, ranks.load_balance)
    student_q, teacher_q = given["student_q"], given["teacher_q"]
    left, right = keys.bounds
    num_keys = given["student_k"].shape[2] * ranks.size
    if keys.packing is None and left is None and right is None:  # rows are all alike
        whole = ((0, num_keys),)
        (student_k,), (teacher_k,) = (
            ranges_of_sequence(given[f"{x}_k"], *how, whole) for x in SIDES
        )
        return interface.attention_kl(
            student_q, student_k, teacher_q, teacher_k, key_lengths=keys.lengths, **options
        )
    chunks = chunks_of(ranks.rank, ranks.size, ranks.load_balance)
    num_rows = student_q.shape[2] // len(chunks)
    firsts = [chunk * num_rows for chunk in chunks]
    bounds = tuple(_keys_of(first, num_rows, num_keys, keys) for first in firsts)
    values = []
    for first, (start, stop), *tensors in zip(
        firsts,
        bounds,
        student_q.split(num_rows, 2),
        ranges_of_sequence(given["student_k"], *how, bounds),
        teacher_q.split(num_rows, 2),
        ranges_of_sequence(given["teacher_k"], *how, bounds),
        strict=True,
    ):
        if keys.packing is not None:
            values.append(
                _packed(
                    (tensors[0], tensors[1]),
                    (tensors[2], tensors[3]),
                    ring.within(keys.packing.cu_seqlens, first, num_rows),
                    keys.packing.cu_seqlens.clamp(max=stop),
                    keys,
                    options,
                )
            )
            continue
        # The operator counts distances from the last query and the last key, so the bounds move by
        # the keys beyond the chunk's last row.
        beyond = stop - num_rows - first
        lengths = None if keys.lengths is None else (keys.lengths - start).clamp(0, stop - start)
        values.append(
            interface.attention_kl(
                *tensors,
                window=(
                    None if left is None else left + beyond,
                    None if right is None else right - beyond,
                ),
                key_lengths=lengths,
                **options,
            )
        )
    return torch.cat(values, 2)


def _keys_of(first: int, num_rows: int, num_keys: int, keys: Keys) -> tuple[int, int]:
    """Returns where the keys start and stop that a chunk of rows sees: keys before the window and
    after it are cut off.
    """
    left, right = keys.bounds
    if keys.packing is not None:
        # the last query of a sequence that goes on after the chunk has no key after it
        return 0, num_keys if right is None else first + num_rows
    start = 0 if left is None else max(0, first - left)
    return start, num_keys if right is None else min(num_keys, first + num_rows + right)


def _packed(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    keys: Keys,
    options: dict[str, Any],
) -> Tensor:
    """Views rows of packed sequences: [1, heads, rows, head_dim] of queries and keys of a side."""
    assert keys.packing is not None
    num_rows, num_keys = student[0].shape[2], student[1].shape[2]
    value = interface.attention_kl_varlen(
        *(x.squeeze(0).transpose(0, 1) for x in (*student, *teacher)),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=min(keys.packing.max_seqlen, num_rows),
        max_seqlen_k=min(keys.packing.max_seqlen, num_keys),
        is_causal=keys.is_causal,
        window=keys.window,
        **{name: x for name, x in options.items() if name != "deterministic"},
    )
    return value.unsqueeze(0)


def _by_heads(
    given: dict[str, Tensor], ranks: Ranks, keys: Keys, options: dict[str, Any]
) -> Tensor:
    """Exchanges rows for heads, and computes all rows of this rank's heads."""
    how = (ranks.name, ranks.size, ranks.load_balance)
    student_q, student_k, teacher_q, teacher_k = (
        some_heads(given[name], *how) for name in QUERIES_AND_KEYS
    )
    for name in SINKS:
        if options.get(name) is not None:
            options[name] = options[name].chunk(ranks.size)[ranks.rank]
    if keys.packing is not None:
        offsets = keys.packing.cu_seqlens
        sides = (student_q, student_k), (teacher_q, teacher_k)
        return some_rows(_packed(*sides, offsets, offsets, keys, options), *how)
    value = interface.attention_kl(
        student_q,
        student_k,
        teacher_q,
        teacher_k,
        is_causal=keys.is_causal,
        window=keys.window,
        key_lengths=keys.lengths,
        **options,
    )
    return some_rows(value, *how)


def _around(given: dict[str, Tensor], ranks: Ranks, keys: Keys, options: dict[str, Any]) -> Tensor:
    """Computes this rank's rows, while keys go from rank to rank."""
    left, right = keys.bounds
    tensors, checked = call_arguments.operator_call(*call_of(given, keys, None, options))
    given_options = dict(zip(SPEC.option_names, checked, strict=True))
    packing = keys.packing
    own = {
        "key_lengths": keys.lengths, "window_left": left, "window_right": right,
        "group_name": ranks.name, "is_head_tail": ranks.load_balance is not None,
    }  # fmt: skip
    if packing is not None:
        own |= {"cu_seqlens": packing.cu_seqlens, "max_seqlen": packing.max_seqlen}
    return ring_ops.call(tensors[:4], {**given_options, **own})
