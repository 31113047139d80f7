"""Checks the arguments of attention_topk_kl() on metadata, before any launch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.bounds import check_offsets
from torch_streamkl.divergences.names import Reduction

TopkImpl = Literal["auto", "triton", "torch", "reference"]
Layout = Literal["bhnd", "bnhd"]
REDUCTIONS, IMPLEMENTATIONS, LAYOUTS = (get_args(x) for x in (Reduction, TopkImpl, Layout))


class MoreOptions(TypedDict, total=False):
    """Names the options of `attention_topk_kl` that few calls have."""

    teacher_lse: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    layout: Layout
    check_values: bool
    deterministic: bool
    impl: TopkImpl


@dataclass(frozen=True)
class Options:
    """Holds the arguments of `attention_topk_kl` that are no queries or keys."""

    student_scale: float | None = None
    teacher_scale: float | None = None
    is_causal: bool = False
    row_mask: Tensor | None = None
    reduction: Reduction = "none"
    teacher_lse: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    layout: Layout = "bhnd"
    check_values: bool = False
    deterministic: bool = False
    impl: TopkImpl = "auto"

    def __post_init__(self) -> None:
        checks.one_of("reduction", self.reduction, REDUCTIONS)
        checks.one_of("layout", self.layout, LAYOUTS)
        checks.one_of("impl", self.impl, IMPLEMENTATIONS)
        for name in ("student_scale", "teacher_scale"):
            if getattr(self, name) is not None:
                checks.finite(name, getattr(self, name))
        for name in ("is_causal", "check_values", "deterministic"):
            checks.boolean(name, getattr(self, name))
        if (self.cu_seqlens_q is None) != (self.cu_seqlens_k is None):
            missing = "cu_seqlens_q" if self.cu_seqlens_q is None else "cu_seqlens_k"
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_k must be given together, got no {missing}"
            )

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None


OPTION_NAMES = tuple(field.name for field in fields(Options))


class Operands(NamedTuple):
    """Holds the tensors of the operator, in its layout: `ChosenKeys` describes them."""

    student_q: Tensor
    student_k: Tensor
    head_weights: Tensor | None
    teacher_q: Tensor
    teacher_k: Tensor
    ids: Tensor
    teacher_lse: Tensor | None
    key_ranges: Tensor | None


def operands(
    sides: dict[str, Tensor], ids: Tensor, head_weights: Tensor | None, options: Options
) -> Operands:
    """Checks all tensors, and returns views of them in the operator's layout.

    ``sides`` are student_q, student_k, teacher_q and teacher_k.
    """
    dims = 3 if options.is_packed else 4
    for name, x in sides.items():
        has_heads = name != "student_k" or getattr(x, "ndim", dims) != dims - 1
        checks.check_tensor(name, x, ndim=dims if has_heads else dims - 1)
    q_s, q_t, k_t = (
        _heads_first(sides[name], options) for name in ("student_q", "teacher_q", "teacher_k")
    )
    k_s = _shared_key(sides["student_k"], dims, options)
    checks.check_attention_inputs(q_s[:, :1], k_s, q_t, k_t, head_mean=True)
    for name in ("teacher_q", "teacher_k"):
        checks.no_gradient(name, sides[name])
    weights = _head_weights(head_weights, q_s, options)
    rows = (q_s.shape[0], q_s.shape[2])
    ids = _ids(ids, rows, q_s.device, options)
    lse = _teacher_lse(q_t, options)
    ranges = _key_ranges(rows, k_s.shape[2], q_s.device, options)
    q_s, k_s, q_t, k_t = (checks.as_matmul_operand(x) for x in (q_s, k_s, q_t, k_t))
    return Operands(q_s, k_s.squeeze(1), weights, q_t, k_t, ids, lse, ranges)


def _heads_first(x: Tensor, options: Options) -> Tensor:
    """Returns [batch, num_heads, seqlen, ...]."""
    if options.is_packed:
        return x.transpose(0, 1).unsqueeze(0)
    return x if options.layout == "bhnd" else x.transpose(1, 2)


def _shared_key(k: Tensor, dims: int, options: Options) -> Tensor:
    """Returns the student's keys [batch, 1, seqlen_k, head_dim], which all of its heads share."""
    if k.ndim == dims - 1:
        return k[None, None] if options.is_packed else k.unsqueeze(1)
    heads_first = _heads_first(k, options)
    if heads_first.shape[1] != 1:
        raise ValueError(
            "student_k must have one head, which all heads of student_q share, got "
            f"{heads_first.shape[1]} in shape {tuple(k.shape)}"
        )
    return heads_first


def _head_weights(weights: Tensor | None, q: Tensor, options: Options) -> Tensor | None:
    """Returns the weights of index heads [batch, num_heads, seqlen_q]."""
    if weights is None:
        if q.shape[1] != 1:
            raise ValueError(
                "student_head_weights must be given if student_q has several heads, whose scores "
                f"they sum, got None for {q.shape[1]} heads"
            )
        return None
    checks.tensor("student_head_weights", weights)
    batch, heads, seqlen_q, _ = q.shape
    shape: tuple[int, ...] = (batch, heads, seqlen_q)
    if options.is_packed:
        shape = (seqlen_q, heads)
    elif options.layout == "bnhd":
        shape = (batch, seqlen_q, heads)
    if tuple(weights.shape) != shape:
        raise ValueError(
            f"student_head_weights must have shape {shape}, one for each head of a query, got "
            f"{tuple(weights.shape)}"
        )
    checks.floating("student_head_weights", weights)
    checks.on_device("student_head_weights", weights, q.device)
    if options.is_packed:
        return weights.T[None]
    return weights if options.layout == "bhnd" else weights.transpose(1, 2)


def _ids(ids: Tensor, rows: tuple[int, int], device: torch.device, options: Options) -> Tensor:
    checks.tensor("ids", ids)
    wanted = rows[1:] if options.is_packed else rows
    if ids.ndim != len(wanted) + 1 or tuple(ids.shape[:-1]) != tuple(wanted):
        text = ", ".join(map(str, wanted))
        raise ValueError(
            f"ids must have shape [{text}, topk], the chosen keys of each query, got "
            f"{tuple(ids.shape)}"
        )
    checks.indices("ids", ids)
    if ids.shape[-1] == 0:
        raise ValueError(f"ids must have at least one key a query, got {tuple(ids.shape)}")
    checks.on_device("ids", ids, device)
    return ids[None] if options.is_packed else ids


def _teacher_lse(q: Tensor, options: Options) -> Tensor | None:
    lse = options.teacher_lse
    if lse is None:
        return None
    shape = tuple(q.shape[1:3] if options.is_packed else q.shape[:3])
    checks.log_sum_exps(lse, shape, q.device)
    return lse[None] if options.is_packed else lse


def _key_ranges(
    rows: tuple[int, int], num_keys: int, device: torch.device, options: Options
) -> Tensor | None:
    """Returns the first key of each query and the one after the last, [2, batch, seqlen_q].

    A causal mask ends at the query, aligned to the last key. Queries of a packed sequence see its
    keys alone, and those that do not count none. None means that every query sees all keys.
    """
    batch, seqlen_q = rows
    counted = _row_mask(rows, device, options)
    query = torch.arange(seqlen_q, dtype=torch.int32, device=device)
    if options.cu_seqlens_q is not None and options.cu_seqlens_k is not None:
        offsets = (options.cu_seqlens_q, options.cu_seqlens_k)
        first, end = _packed_ranges(query, num_keys, *offsets, options.is_causal)
    elif options.is_causal or counted is not None:
        first = torch.zeros_like(query)
        end = torch.full_like(query, num_keys)
        if options.is_causal:
            end = query + (1 + num_keys - seqlen_q)
    else:
        return None
    ranges = torch.stack([first, end])[:, None].expand(2, batch, seqlen_q)
    if counted is not None:
        ranges = torch.where(counted, ranges, 0)
    return ranges.contiguous()


def _packed_ranges(
    query: Tensor, num_keys: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    checks.offsets(query.device, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if checks.is_plain((cu_seqlens_q, cu_seqlens_k)):
        check_offsets("_q", cu_seqlens_q, query.shape[0])
        check_offsets("_k", cu_seqlens_k, num_keys)
    sequence = torch.searchsorted(cu_seqlens_q[1:-1].contiguous(), query, right=True)
    first, end = cu_seqlens_k[:-1][sequence], cu_seqlens_k[1:][sequence]
    if is_causal:
        end = end - (cu_seqlens_q[1:][sequence] - 1 - query)
    return first, torch.where(query < cu_seqlens_q[-1], end, 0)  # past the last sequence: no key


def _row_mask(rows: tuple[int, int], device: torch.device, options: Options) -> Tensor | None:
    mask = options.row_mask
    if mask is None:
        return None
    wanted = rows[1:] if options.is_packed else rows
    return checks.row_mask(mask, wanted, device).expand(wanted).reshape(rows)
