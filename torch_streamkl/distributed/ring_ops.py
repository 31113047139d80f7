"""Registers the operators that ``attention_kl_context_parallel(..., method="ring")`` calls.

The collectives are inside, because keys travel while the present ones are used. Forward and
backward are separate operators, as those of `attention_kl` are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import Library

from torch_streamkl.attention import ops
from torch_streamkl.attention.problem import AttentionProblem, RowStatistics, Side
from torch_streamkl.distributed import collectives, ring
from torch_streamkl.distributed.ring import Ring
from torch_streamkl.registration import (
    NAMESPACE,
    define,
    register,
    register_recomputing,
    without_none,
)
from torch_streamkl.spec import Spec

_lib = Library(NAMESPACE, "FRAGMENT")
# what merges over blocks of keys, of `attention_kl`'s arguments: all but these
_SPEC = Spec(AttentionProblem, Side, without=(
    "mask", "bias", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "teacher_lse",
    "mask_value", "max_seqlen_q", "max_seqlen_k", "head_mean",
))  # fmt: skip
_OWN = {"cu_seqlens": None, "max_seqlen": 0, "group_name": "", "is_head_tail": True}
_ARGUMENTS = (
    f"{_SPEC.tensors}, Tensor? cu_seqlens=None, {_SPEC.options}, SymInt max_seqlen=0, "
    "str group_name='', bool is_head_tail=True"
)
_NUM_TENSORS = len(_SPEC.tensor_names) + 1
attention_kl_ring = define(
    _lib,
    f"attention_kl_ring({_ARGUMENTS}) -> "
    "(Tensor value, Tensor student_stats, Tensor teacher_stats)",
)
attention_kl_ring_backward = define(
    _lib,
    "attention_kl_ring_backward(Tensor grad, Tensor student_stats, Tensor teacher_stats, "
    f"bool[] needs_grad, {_ARGUMENTS})"
    " -> (Tensor student_q, Tensor student_k, Tensor teacher_q, Tensor teacher_k)",
)


_NAMES = [a.name for a in attention_kl_ring._schema.arguments]


def _ring_of(*args: Any, **kwargs: Any) -> Ring:
    given = {**_OWN, **dict(zip(_NAMES, args, strict=False)), **kwargs}
    own = {name: given.pop(name) for name in _OWN}
    return Ring(_SPEC.problem(**given), **own)


def call(tensors: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Returns values of queries and keys, with those of the options that the operator takes."""
    taken = {name: x for name, x in options.items() if name in _NAMES}
    value: Tensor = attention_kl_ring(*tensors, **taken)[0]
    return value


def _forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    value, stats = ring.forward(_ring_of(*args, **kwargs))
    return value, stats.student, stats.teacher


def _forward_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    value, stats = RowStatistics.allocate(_ring_of(*args, **kwargs).problem)
    return value, stats.student, stats.teacher


def _backward(
    grad: Tensor,
    student_stats: Tensor,
    teacher_stats: Tensor,
    needs_grad: list[bool],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    stats = RowStatistics(student_stats, teacher_stats)
    grads = ring.backward(_ring_of(*args, **kwargs), grad, stats, needs_grad)
    return without_none(grads, args[0])


def _of_ring(flops: Callable[[dict[str, Any]], int], given: dict[str, Any]) -> int:
    """Counts what a rank computes with the keys of all ranks."""
    return flops(given) * collectives.resolve(given["group_name"]).size()


_forward_flops = functools.partial(_of_ring, ops.forward_flops)
_backward_flops = functools.partial(_of_ring, ops.backward_flops)
register(_lib, "attention_kl_ring", _forward, _forward_fake, _forward_flops)
register(_lib, "attention_kl_ring_backward", _backward, ops.backward_fake, _backward_flops)
register_recomputing(_lib, "attention_kl_ring", _NUM_TENSORS, slice(1, 3))
