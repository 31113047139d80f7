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
from torch_streamkl.distributed import ring, ring_ops
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
from torch_streamkl.divergences.functional import Functional
from torch_streamkl.divergences.names import divergence_text

METHODS = ("gather", "heads", "ring")
_QUERIES_AND_KEYS = ("student_q", "student_k", "teacher_q", "teacher_k")
_SINKS = ("student_sink", "teacher_sink")
# of attention_kl, what is the same for every rank and row
_OPTIONS = {
    "divergence", "beta", "student_scale", "teacher_scale", "temperature", "student_softcap",
    "teacher_softcap", "student_eps", "teacher_eps", "student_clamp", "teacher_clamp",
    "head_reduction", "impl", "deterministic", *_SINKS,
}  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """Sequences that follow each other in the shared one, each with keys of its own."""

    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True)
class Keys:
    """Which keys a row sees, in positions of the whole sequence."""

    is_causal: bool
    window: tuple[int | None, int | None] | None
    lengths: Tensor | None
    packing: Packing | None

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        return interface.window_bounds(self.is_causal, self.window)


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
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
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
            ``"ring"``: keys, and in the backward their gradients, go from rank to rank, so that
            no rank holds more than two ranks' keys; for divergences that are linear in
            log-probabilities (forward and reverse KL, cross-entropy, jeffreys), without sinks and
            head_reduction.
        load_balance: ``"head_tail"``: a rank has chunks r and 2 n - 1 - r of 2 n, which shares a
            causal mask's work evenly; None: rank r has the r-th of n parts.
        is_causal, window: as in `attention_kl`, in positions of the whole sequence.
        key_lengths: ``[batch]``, the number of valid keys of the whole sequence, the same on every
            rank.
        cu_seqlens: int32 ``[num_sequences + 1]``, from 0 to the length of the whole sequence:
            packed sequences with keys of their own, the same on every rank; batch size 1.
            ``is_causal`` is of each of them; a window only beside it, and not with ``"ring"``.
        max_seqlen: a bound on the length of a packed sequence.
        row_mask: boolean, broadcasts to this rank's rows.
        reduction: ``"none"``; ``"mean"``, ``"sum"`` and ``"batchmean"`` over the rows of all
            ranks.
        options: divergence, scales, temperature, softcaps, eps, clamps, sinks, head_reduction,
            impl and deterministic of `attention_kl`.

    Returns:
        float32 ``[batch, num_heads, rows]``, or a scalar, the same on every rank.

    Raises:
        ValueError, TypeError, NotImplementedError: with the rule and the value, on every rank.
            Masks, biases and ALiBi are not supported.
    """
    group = group_of(mesh, "mesh")
    given = {
        "student_q": student_q,
        "student_k": student_k,
        "teacher_q": teacher_q,
        "teacher_k": teacher_k,
    }
    ranks = Ranks(group.group_name, group.rank(), group.size(), load_balance)
    packing = None
    if cu_seqlens is not None:
        packing = Packing(cu_seqlens, 0 if max_seqlen is None else max_seqlen)
    keys = Keys(is_causal, window, key_lengths, packing)
    if not torch.compiler.is_compiling():  # a compiled program is the same on every rank
        device = student_q.device if isinstance(student_q, Tensor) else torch.device("cpu")
        refused_together(
            group,
            device,
            lambda: _check(given, ranks, method, keys, reduction, options),
        )
    for name in _SINKS:
        if options.get(name) is not None:
            options[name] = with_summed_gradient(options[name], ranks.name)
    how = {"heads": _by_heads, "ring": _around, "gather": _by_rows}[method]
    value = how(given, ranks, keys, options)
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
    given: dict[str, Tensor], ranks: Ranks, keys: Keys, options: dict[str, Any]
) -> Tensor:
    """Every rank has all keys and computes its rows."""
    how = (ranks.name, ranks.size, ranks.load_balance)
    student_k, teacher_k = (
        whole_sequence(given[f"{side}_k"], *how) for side in ("student", "teacher")
    )
    student_q, teacher_q = given["student_q"], given["teacher_q"]
    left, right = keys.bounds
    if keys.packing is None and left is None and right is None:  # rows are all alike
        return interface.attention_kl(
            student_q, student_k, teacher_q, teacher_k, key_lengths=keys.lengths, **options
        )
    chunks = chunks_of(ranks.rank, ranks.size, ranks.load_balance)
    num_rows, num_keys = student_q.shape[2] // len(chunks), student_k.shape[2]
    values = []
    for index, chunk in enumerate(chunks):
        # Keys before the window and after it are cut off. The operator counts distances from the
        # last query and the last key, so the bounds move by the keys beyond the chunk's last row.
        first = chunk * num_rows
        rows = slice(index * num_rows, (index + 1) * num_rows)
        if keys.packing is not None:
            # the last query of a sequence that goes on behind the chunk has no key behind it
            stop = num_keys if right is None else first + num_rows
            values.append(
                _packed(
                    (student_q[:, :, rows], student_k[:, :, :stop]),
                    (teacher_q[:, :, rows], teacher_k[:, :, :stop]),
                    ring.within(keys.packing.cu_seqlens, first, num_rows),
                    keys.packing.cu_seqlens.clamp(max=stop),
                    keys,
                    options,
                )
            )
            continue
        start = 0 if left is None else max(0, first - left)
        stop = num_keys if right is None else min(num_keys, first + num_rows + right)
        beyond = stop - num_rows - first
        lengths = None if keys.lengths is None else (keys.lengths - start).clamp(0, stop - start)
        values.append(
            interface.attention_kl(
                student_q[:, :, rows],
                student_k[:, :, start:stop],
                teacher_q[:, :, rows],
                teacher_k[:, :, start:stop],
                window=(
                    None if left is None else left + beyond,
                    None if right is None else right - beyond,
                ),
                key_lengths=lengths,
                **options,
            )
        )
    return torch.cat(values, 2)


def _packed(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    keys: Keys,
    options: dict[str, Any],
) -> Tensor:
    """Rows of packed sequences: [1, heads, rows, head_dim] of queries and keys of a side."""
    assert keys.packing is not None
    num_rows, num_keys = student[0].shape[2], student[1].shape[2]
    for name in ("student_scale", "teacher_scale"):
        if isinstance(scale := options.get(name), Tensor) and scale.ndim > 1:
            # it broadcasts to q, which is packed here: [rows, heads, head_dim]
            scale = scale[(None,) * (4 - scale.ndim)].squeeze(0).transpose(0, 1)
            options = {**options, name: scale}
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
    """Every rank has all rows of some heads."""
    how = (ranks.name, ranks.size, ranks.load_balance)
    student_q, student_k, teacher_q, teacher_k = (
        some_heads(given[name], *how) for name in _QUERIES_AND_KEYS
    )
    for name in _SINKS:
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
    """Every rank computes its rows, and keys go from rank to rank."""
    left, right = keys.bounds
    get = options.get
    tensors, checked = interface.operator_call(
        interface.Inputs(
            **{name: given.get(name) for name in interface.Inputs._fields}  # type: ignore[arg-type]
        )._replace(key_lengths=keys.lengths),
        interface.Settings(
            divergence=get("divergence", "forward_kl"),
            beta=get("beta", 0.5),
            student_scale=get("student_scale"),
            teacher_scale=get("teacher_scale"),
            temperature=get("temperature", 1.0),
            student_softcap=get("student_softcap"),
            teacher_softcap=get("teacher_softcap"),
            is_causal=keys.is_causal,
            window=keys.window,
            student_eps=get("student_eps", 0.0),
            teacher_eps=get("teacher_eps", 0.0),
            student_clamp=get("student_clamp", 0.0),
            teacher_clamp=get("teacher_clamp", 0.0),
            head_reduction=None,
            layout="bhnd",
            reduction="none",
            impl=get("impl", "auto"),
            deterministic=get("deterministic", True),
        ),
    )
    functional, *numbers = checked[:6]
    impl, deterministic = checked[-2:]
    packing = keys.packing
    value: Tensor = ring_ops.attention_kl_ring(
        *tensors[:4],
        keys.lengths,
        None if packing is None else packing.cu_seqlens,
        functional,
        *numbers,
        left,
        right,
        0 if packing is None else packing.max_seqlen,
        impl,
        deterministic,
        ranks.name,
        ranks.load_balance is not None,
    )[0]
    return value


def _check(
    given: dict[str, Any],
    ranks: Ranks,
    method: str,
    keys: Keys,
    reduction: str,
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
    bounds = keys.bounds
    if keys.packing is not None:
        _check_packing(keys.packing, given, ranks, method, bounds, keys.lengths)
    if method == "ring":
        _check_ring(options)
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
            "is_causal and window": str((keys.is_causal, keys.window)),
            "reduction": reduction,
            "presence of key_lengths": str(keys.lengths is not None),
            "number of packed sequences": str(
                0 if keys.packing is None else keys.packing.cu_seqlens.shape[0] - 1
            ),
            "max_seqlen": str(0 if keys.packing is None else keys.packing.max_seqlen),
            "options": str(shown),
        },
    )


def _check_packing(
    packing: Packing,
    given: dict[str, Any],
    ranks: Ranks,
    method: str,
    bounds: tuple[int | None, int | None],
    key_lengths: Tensor | None,
) -> None:
    q, offsets = given["student_q"], packing.cu_seqlens
    size = offsets.shape[0] if isinstance(offsets, Tensor) and offsets.ndim == 1 else 2
    checks.check_vector("cu_seqlens", offsets, size, q.device, (torch.int32,))
    if size < 2:
        raise ValueError(f"cu_seqlens must have num_sequences + 1 >= 2 entries, got {size}")
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
            "takes it beside is_causal"
        )


def _check_ring(options: dict[str, Any]) -> None:
    """What merging values of blocks of keys does not allow."""
    for name in (*_SINKS, "head_reduction"):
        if options.get(name) is not None:
            raise NotImplementedError(
                f"method='ring' does not take {name}; method='gather' takes it"
            )
    if options.get("impl") == "reference":
        raise NotImplementedError("method='ring' needs impl='auto' or a streaming one")
    names = ("divergence", "beta", "student_eps", "teacher_eps", "student_clamp", "teacher_clamp")
    text = divergence_text(
        *(options.get(name, default) for name, default in
          zip(names, ("forward_kl", 0.5, 0.0, 0.0, 0.0, 0.0), strict=True))
    )  # fmt: skip
    ring.form_of(Functional.of(text))


def _shown(value: Any) -> Any:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else value
