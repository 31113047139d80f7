"""Checks a call of attention_kl(), and converts it into the operator's arguments."""

from __future__ import annotations

import numbers
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.attention.problem import SPEC
from torch_streamkl.divergences.names import Reduction, text_of

Layout = Literal["bhnd", "bnhd"]
AttentionImpl = Literal["auto", "hopper", "triton", "torch", "reference"]
LAYOUTS = get_args(Layout)
IMPLEMENTATIONS = get_args(AttentionImpl)
PACKED = "packed"  # [total, num_heads, head_dim], of attention_kl_varlen
REDUCTIONS = get_args(Reduction)


# A call is two tuples: the tensors, and everything else. Together with the tensors' metadata the
# second decides whether a call is legal, so the result of the checks is cached (checks.py).
class Inputs(NamedTuple):
    """Holds the tensors of a call, as the caller passed them."""

    student_q: Tensor
    student_k: Tensor
    teacher_q: Tensor
    teacher_k: Tensor
    attn_mask: Tensor | None
    student_bias: Tensor | None
    teacher_bias: Tensor | None
    student_alibi_slopes: Tensor | None
    teacher_alibi_slopes: Tensor | None
    student_sink: Tensor | None
    teacher_sink: Tensor | None
    key_lengths: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    teacher_lse: Tensor | None
    row_mask: Tensor | None


class Settings(NamedTuple):
    """Holds all other arguments of a call."""

    divergence: str
    beta: float
    student_scale: float | Tensor | None
    teacher_scale: float | Tensor | None
    temperature: float
    student_softcap: float | None
    teacher_softcap: float | None
    is_causal: bool
    window: tuple[int | None, int | None] | None
    student_eps: float
    teacher_eps: float
    student_clamp: float
    teacher_clamp: float
    head_reduction: str | None
    layout: str
    reduction: str
    impl: str
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    deterministic: bool = True


def operator_call(inputs: Inputs, settings: Settings) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Checks a call, and returns the tensors and the options that the operator takes."""
    return operands(inputs, settings), checked_options(inputs, settings)


def operands(inputs: Inputs, settings: Settings) -> tuple[Any, ...]:
    """Returns the operator's tensors: views, but for tensor scales and autocast."""
    q_s, k_s, q_t, k_t = inputs[:4]
    if isinstance(settings.student_scale, Tensor):
        q_s = _scaled(q_s, settings.student_scale)
    if isinstance(settings.teacher_scale, Tensor):
        q_t = _scaled(q_t, settings.teacher_scale)
    if settings.layout != "bhnd":
        q_s, k_s, q_t, k_t = (_heads_first(x, settings.layout) for x in (q_s, k_s, q_t, k_t))
    if checks.is_autocast(q_s):
        q_s, k_s, q_t, k_t = (checks.as_matmul_operand(x) for x in (q_s, k_s, q_t, k_t))
    optional = inputs[4:]
    for x in optional:
        if x is not None:
            break
    else:  # the usual call
        return (q_s, k_s, q_t, k_t, *optional[:-1])
    mask, student_bias, teacher_bias, *others, teacher_lse, _ = optional
    if mask is not None:
        mask = with_dims(mask, 4)
        if mask.dtype != torch.bool:
            mask, student_bias, teacher_bias = None, mask, mask
    if student_bias is not None:
        student_bias = with_dims(student_bias, 4)
    if teacher_bias is not None:
        teacher_bias = with_dims(teacher_bias, 4)
    if teacher_lse is not None:
        teacher_lse = with_dims(teacher_lse, 3)
    return (q_s, k_s, q_t, k_t, mask, student_bias, teacher_bias, *others, teacher_lse)


def _heads_first(x: Tensor, layout: str) -> Tensor:
    if layout == "bhnd":
        return x
    return x.transpose(1, 2) if layout == "bnhd" else x.transpose(0, 1).unsqueeze(0)


def with_dims(x: Tensor, ndim: int) -> Tensor:
    """Returns a tensor with leading dimensions of size 1."""
    return x if x.ndim == ndim else x[(None,) * (ndim - x.ndim)]


def checked_options(inputs: Inputs, settings: Settings) -> tuple[Any, ...]:
    """Checks a call; returns the operator's options in the order of its schema."""
    packed = settings.layout == PACKED
    for name, x in zip(Inputs._fields[:4], inputs[:4], strict=True):
        checks.check_tensor(name, x, ndim=3 if packed else 4)
    q_s, k_s, q_t, k_t = (_heads_first(x, settings.layout) for x in inputs[:4])
    checks.one_of("head_reduction", settings.head_reduction, (None, "mean"))
    checks.check_attention_inputs(q_s, k_s, q_t, k_t, settings.head_reduction is not None)
    rows, keys = (q_s.shape[0], q_s.shape[1], q_s.shape[2]), k_s.shape[2]
    if packed:
        _check_offsets(inputs, settings)
    _check_masks(inputs, rows, keys, q_t.shape[1])
    if inputs.key_lengths is not None:
        lengths = (torch.int32, torch.int64)
        checks.check_vector("key_lengths", inputs.key_lengths, rows[0], q_s.device, lengths)
    if inputs.row_mask is not None:
        checks.row_mask(inputs.row_mask, rows, q_s.device)
    for side, q, given in (
        ("student", q_s, inputs.student_q),
        ("teacher", q_t, inputs.teacher_q),
    ):
        _check_side(side, q, given, inputs, settings)
    _check_head_reduction(inputs, settings, q_t)
    left, right = window_bounds(settings.is_causal, settings.window)
    values = {
        **settings._asdict(),
        "functional": _functional(settings),
        "student_scale": _scale(settings.student_scale, q_s),
        "teacher_scale": _scale(settings.teacher_scale, q_t),
        "student_softcap": float(settings.student_softcap or 0.0),
        "teacher_softcap": float(settings.teacher_softcap or 0.0),
        "temperature": float(settings.temperature),
        "window_left": left,
        "window_right": right,
        "head_mean": settings.head_reduction == "mean",
    }
    arguments = SPEC.arguments
    return tuple([values.get(x, arguments[x].default) for x in SPEC.option_names])


def _functional(settings: Settings) -> str:
    checks.one_of("reduction", settings.reduction, REDUCTIONS)
    checks.one_of("impl", settings.impl, IMPLEMENTATIONS)
    checks.boolean("deterministic", settings.deterministic)
    checks.positive("temperature", settings.temperature)
    return text_of(settings)


def _check_offsets(inputs: Inputs, settings: Settings) -> None:
    checks.offsets(
        inputs.student_q.device,
        cu_seqlens_q=inputs.cu_seqlens_q,
        cu_seqlens_k=inputs.cu_seqlens_k,
    )
    # no sequence has a query or key where there is none at all
    for name, x in (("q", inputs.student_q), ("k", inputs.student_k)):
        least = 1 if x.shape[0] else 0
        checks.integer(f"max_seqlen_{name}", getattr(settings, f"max_seqlen_{name}"), least)


def _check_masks(
    inputs: Inputs, rows: tuple[int, int, int], keys: int, num_teacher_heads: int
) -> None:
    device, mask = inputs.student_q.device, inputs.attn_mask
    if mask is not None:
        view = checks.check_broadcast("attn_mask", mask, (*rows, keys), device)
        if mask.dtype != torch.bool:
            checks.additive("attn_mask", mask)
            if inputs.student_bias is not None or inputs.teacher_bias is not None:
                raise NotImplementedError(
                    "an additive attn_mask cannot be combined with a bias; add them up"
                )
            if view.shape[1] != 1 and num_teacher_heads != rows[1]:
                raise NotImplementedError(
                    "an additive attn_mask with head_reduction must have one head, got "
                    f"{view.shape[1]}; pass student_bias and teacher_bias"
                )
    for side, heads in (("student", rows[1]), ("teacher", num_teacher_heads)):
        name = f"{side}_bias"
        bias = getattr(inputs, name)
        if bias is not None:
            checks.check_broadcast(name, bias, (rows[0], heads, rows[2], keys), device)
            checks.additive(name, bias)


def _check_side(side: str, q: Tensor, given: Tensor, inputs: Inputs, settings: Settings) -> None:
    """Checks a side, and returns its options; ``given`` is q in the caller's layout."""
    softcap = getattr(settings, f"{side}_softcap")
    if softcap is not None:
        checks.positive(f"{side}_softcap", softcap)
    scale = getattr(settings, f"{side}_scale")
    if isinstance(scale, Tensor):
        if scale.ndim or scale.device.type != "cpu":  # a scalar on the CPU multiplies any tensor
            checks.check_broadcast(f"{side}_scale", scale, tuple(given.shape), q.device)
        if scale.dtype not in checks.FLOAT_DTYPES:
            raise TypeError(f"{side}_scale must be floating point, got {scale.dtype}")
    elif scale is not None:
        checks.finite(f"{side}_scale", scale)
    for name in (f"{side}_alibi_slopes", f"{side}_sink"):
        x = getattr(inputs, name)
        if x is not None:
            checks.check_vector(name, x, q.shape[1], q.device, checks.FLOAT_DTYPES)
            if not name.endswith("sink"):
                checks.no_gradient(name, x)


def _scaled(q: Tensor, scale: Tensor) -> Tensor:
    """Returns ``q * scale``, rounded to q's dtype once.

    A tensor without dimensions does not promote q, and a GPU rounds such a tensor to q's dtype
    before it multiplies.
    """
    if scale.ndim == 0 and scale.device == q.device:
        scale = scale.reshape(1)
    return (q * scale).to(q.dtype)


def _scale(scale: float | Tensor | None, q: Tensor) -> float:
    """Returns the operator's scale; a tensor scale has been multiplied into q."""
    if isinstance(scale, Tensor):
        return 1.0
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def _check_head_reduction(inputs: Inputs, settings: Settings, teacher_q: Tensor) -> None:
    lse = inputs.teacher_lse
    if lse is None:
        return
    checks.tensor("teacher_lse", lse)
    if settings.head_reduction is None:
        raise ValueError(
            "teacher_lse is used with head_reduction='mean' only; "
            "one pass needs no log-sum-exp in advance"
        )
    packed = settings.layout == PACKED
    shape = tuple(teacher_q.shape[1:3] if packed else teacher_q.shape[:3])
    checks.log_sum_exps(lse, shape, teacher_q.device)


def window_of(window: Any) -> tuple[int | None, int | None] | None:
    """Returns the window as a hashable tuple of integers."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(
            "window must be a pair (left, right) of numbers of keys, None for no bound, got "
            f"{window!r}"
        )
    for name, bound in zip(("left", "right"), window, strict=True):
        if bound is not None:
            checks.integer(f"window's {name} bound", bound, 0)
    # numpy's integers are none of Python, and int() would fix one that is symbolic
    left, right = (int(x) if isinstance(x, numbers.Integral) else x for x in window)
    return left, right


def window_bounds(
    is_causal: bool, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None]:
    """Returns how many keys a query sees before and after its position, None for no bound."""
    checks.boolean("is_causal", is_causal)
    left, right = window_of(window) or (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right
