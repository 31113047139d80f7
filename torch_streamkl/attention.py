"""attention_kl(): the divergence between two attention maps, one value per query row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_streamkl import checks, ops, reference
from torch_streamkl.functional import NAMES, named
from torch_streamkl.launch import IMPLEMENTATIONS

LAYOUTS = ("bhnd", "bnhd")
REDUCTIONS = ("none", "mean", "sum", "batchmean")


def attention_kl(
    student_q: Tensor,
    student_k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    student_scale: float | Tensor | None = None,
    teacher_scale: float | Tensor | None = None,
    temperature: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    attn_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    row_mask: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_alibi_slopes: Tensor | None = None,
    teacher_alibi_slopes: Tensor | None = None,
    student_sink: Tensor | None = None,
    teacher_sink: Tensor | None = None,
    student_eps: float = 0.0,
    teacher_eps: float = 0.0,
    student_clamp: float = 0.0,
    teacher_clamp: float = 0.0,
    head_reduction: str | None = None,
    teacher_lse: Tensor | None = None,
    layout: str = "bhnd",
    reduction: str = "none",
    impl: str = "auto",
) -> Tensor:
    r"""Divergence between the attention distributions of a teacher and a student, without the
    maps.

    With P = softmax over keys of the teacher's scores and S of the student's, per query row

    .. math:: KL(P \| S) = \sum_j P_j (\log P_j - \log S_j)

    which equals the naive code

    .. code-block:: python

        s = (student_q @ student_k.transpose(-1, -2) * student_scale).masked_fill(~mask, -inf)
        t = (teacher_q @ teacher_k.transpose(-1, -2) * teacher_scale).masked_fill(~mask, -inf)
        F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)

    Args:
        student_q, teacher_q: ``[batch, num_heads, seqlen_q, head_dim]``; head_dim may differ per
        side. student_k, teacher_k: ``[batch, num_kv_heads, seqlen_k, head_dim]``; num_kv_heads
        divides num_heads
            and may differ per side (grouped heads). float16, bfloat16, float32 or (on the CPU)
            float64, one dtype for all four; any strides with a contiguous last dimension, nothing
            is copied.
        divergence: ``"forward_kl"`` KL(P||S); ``"reverse_kl"`` KL(S||P); ``"cross_entropy"``
            -sum P log S; ``"jeffreys"`` KL(P||S) + KL(S||P); ``"js"`` beta KL(P||M) + (1 - beta)
            KL(S||M) with M = beta P + (1 - beta) S (generalised Jensen-Shannon as in GKD; beta 0
            and 1 are forward and reverse KL); ``"tv"`` 0.5 sum |P - S|.
        student_scale, teacher_scale: factor of the dot products, default ``head_dim ** -0.5``. A
        tensor
            (a learned scale, or one per row: anything that multiplies q) is applied to q and gets
            gradient.
        temperature: divides the final scores of both sides. The T^2 of Hinton's loss is the
        caller's. student_softcap, teacher_softcap: c in ``c * tanh(score / c)``, after the scale.
        is_causal: query i sees keys up to i + seqlen_k - seqlen_q (aligned at the last query and
        key).
        window: (left, right) keys around that position, None for no bound.
        attn_mask: boolean (True takes part) or additive (added to both sides' scores), broadcasts
        to
            ``[batch, num_heads, seqlen_q, seqlen_k]`` and is never expanded.
        key_lengths: int32 or int64 ``[batch]``, the number of valid keys.
        row_mask: boolean, broadcasts to ``[batch, num_heads, seqlen_q]``; False rows are 0 without
        gradient. student_bias, teacher_bias: additive, broadcast as attn_mask, for one side. No
        gradient. student_alibi_slopes, teacher_alibi_slopes: ``[num_heads]``, subtract slope *
        |distance|. student_sink, teacher_sink: ``[num_heads]``, an extra logit in the denominator
        (not divided by the
            temperature); gets gradient.
        student_eps, teacher_eps, student_clamp, teacher_clamp: log P becomes log(max(P + eps,
        clamp)),
            exactly; the weight in front of the log stays P.
        head_reduction: ``"mean"`` averages the teacher's probabilities over the heads that belong
        to one
            student head; the teacher then has a multiple of the student's heads.
        teacher_lse: ``[batch, num_teacher_heads, seqlen_q]`` known log-sum-exps, with
        head_reduction only.
        layout: ``"bhnd"``, or ``"bnhd"`` for ``[batch, seqlen, num_heads, head_dim]`` inputs; rows
        are
            ``[batch, num_heads, seqlen_q]`` either way.
        reduction: ``"none"``, ``"mean"`` or ``"sum"`` over rows, ``"batchmean"`` sum / batch.
        impl: ``"auto"``, ``"triton"``, ``"streaming"`` (plain torch, bounded memory) or
        ``"reference"``
            (naive). A choice that cannot run raises.

    Returns:
        float32 (float64 for float64 inputs) in nats; a scalar unless reduction is ``"none"``.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch, with the rule and the value.

    Numerics: scores and sums are accumulated in float32. A row without allowed keys is 0 with
    gradient 0; a key that the student excludes and the teacher does not makes the row +inf, as the
    definition says. Gradients go to q and k of both sides where they require it, and are the same
    bits on every run.
    Source: the one-pass coupled softmax state of StreamKL (arXiv 2606.20005); see rowstate.py.
    """
    checks.one_of("layout", layout, LAYOUTS)
    if layout == "bnhd":
        for name, x in (
            ("student_q", student_q),
            ("student_k", student_k),
            ("teacher_q", teacher_q),
            ("teacher_k", teacher_k),
        ):
            checks.check_tensor(name, x, ndim=4)
        student_q, student_k = student_q.transpose(1, 2), student_k.transpose(1, 2)
        teacher_q, teacher_k = teacher_q.transpose(1, 2), teacher_k.transpose(1, 2)
    checks.check_attention_inputs(
        student_q, student_k, teacher_q, teacher_k, head_reduction is not None
    )
    device = student_q.device
    rows = (student_q.shape[0], student_q.shape[1], student_q.shape[2])
    keys = student_k.shape[2]
    options = _divergence_options(
        divergence,
        beta,
        temperature,
        student_eps,
        teacher_eps,
        student_clamp,
        teacher_clamp,
        reduction,
        impl,
    )
    options |= _head_options(head_reduction, teacher_lse, teacher_q)
    mask = None
    if attn_mask is not None:
        view = checks.check_broadcast("attn_mask", attn_mask, (*rows, keys), device)
        if attn_mask.dtype == torch.bool:
            mask = view
        else:
            if student_bias is not None or teacher_bias is not None:
                raise NotImplementedError(
                    "an additive attn_mask cannot be combined with a bias; add them up"
                )
            if view.shape[1] != 1 and teacher_q.shape[1] != rows[1]:
                raise NotImplementedError(
                    "an additive attn_mask with head_reduction must have one head, got "
                    f"{view.shape[1]}; pass student_bias and teacher_bias"
                )
            student_bias = teacher_bias = attn_mask
    if key_lengths is not None:
        checks.check_vector(
            "key_lengths", key_lengths, rows[0], device, (torch.int32, torch.int64)
        )
    left, right = _window(is_causal, window)
    sides: dict[str, Any] = {}
    for side, q, k, scale, softcap, bias, slopes, sink in (
        (
            "student",
            student_q,
            student_k,
            student_scale,
            student_softcap,
            student_bias,
            student_alibi_slopes,
            student_sink,
        ),
        (
            "teacher",
            teacher_q,
            teacher_k,
            teacher_scale,
            teacher_softcap,
            teacher_bias,
            teacher_alibi_slopes,
            teacher_sink,
        ),
    ):
        sides |= _side_options(side, q, k, scale, softcap, slopes, sink)
        if bias is not None:
            checks.no_gradient(f"{side}_bias", bias)
            shape = (rows[0], q.shape[1], rows[2], keys)
            sides[f"{side}_bias"] = checks.check_broadcast(f"{side}_bias", bias, shape, device)
    return _call(sides, options, mask, key_lengths, left, right, row_mask, rows, reduction, impl)


def attention_kl_varlen(
    student_q: Tensor,
    student_k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    student_scale: float | Tensor | None = None,
    teacher_scale: float | Tensor | None = None,
    temperature: float = 1.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    row_mask: Tensor | None = None,
    student_alibi_slopes: Tensor | None = None,
    teacher_alibi_slopes: Tensor | None = None,
    student_sink: Tensor | None = None,
    teacher_sink: Tensor | None = None,
    student_eps: float = 0.0,
    teacher_eps: float = 0.0,
    student_clamp: float = 0.0,
    teacher_clamp: float = 0.0,
    head_reduction: str | None = None,
    teacher_lse: Tensor | None = None,
    reduction: str = "none",
    impl: str = "auto",
) -> Tensor:
    """`attention_kl` over packed sequences, each attending to its own keys only.

    Equals a loop over b with rows ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]`` and keys
    ``cu_seqlens_k[b]:cu_seqlens_k[b + 1]``, results concatenated.

    Args:
        student_q, teacher_q: ``[total_q, num_heads, head_dim]``.
        student_k, teacher_k: ``[total_k, num_kv_heads, head_dim]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[num_sequences + 1]``, from 0 to the totals, not
        decreasing. Their
            values are not read on the host.
        max_seqlen_q, max_seqlen_k: bounds on the sequence lengths; a sequence longer than that is
        wrong. Everything else as in `attention_kl`; dense masks and biases do not apply to packed
        sequences.

    Returns:
        ``[num_heads, total_q]`` per-row values in float32 nats, or a scalar; ``"batchmean"``
        divides by the number of sequences.
    """
    named_inputs = {
        "student_q": student_q,
        "student_k": student_k,
        "teacher_q": teacher_q,
        "teacher_k": teacher_k,
    }
    for name, x in named_inputs.items():
        checks.check_tensor(name, x, ndim=3)
    q_s, k_s, q_t, k_t = (x.transpose(0, 1).unsqueeze(0) for x in named_inputs.values())
    checks.check_attention_inputs(q_s, k_s, q_t, k_t, head_reduction is not None)
    device = student_q.device
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.check_vector(name, offsets, cu_seqlens_q.shape[0], device, (torch.int32,))
    if cu_seqlens_q.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens_q must have num_sequences + 1 >= 2 entries, got {cu_seqlens_q.shape[0]}"
        )
    checks.positive("max_seqlen_q", max_seqlen_q)
    checks.positive("max_seqlen_k", max_seqlen_k)
    options = _divergence_options(
        divergence,
        beta,
        temperature,
        student_eps,
        teacher_eps,
        student_clamp,
        teacher_clamp,
        reduction,
        impl,
    )
    lse = None if teacher_lse is None else teacher_lse.unsqueeze(0)
    options |= _head_options(head_reduction, lse, q_t)
    options |= {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    left, right = _window(is_causal, window)
    sides = _side_options(
        "student", q_s, k_s, student_scale, student_softcap, student_alibi_slopes, student_sink
    )
    sides |= _side_options(
        "teacher", q_t, k_t, teacher_scale, teacher_softcap, teacher_alibi_slopes, teacher_sink
    )
    rows = (1, q_s.shape[1], q_s.shape[2])
    value = _call(
        sides,
        options,
        None,
        None,
        left,
        right,
        row_mask,
        rows,
        "none" if reduction == "batchmean" else reduction,
        impl,
    )
    if reduction == "batchmean":
        return value.sum() / (cu_seqlens_q.shape[0] - 1)
    return value.squeeze(0) if reduction == "none" else value


def _call(
    sides: dict[str, Any],
    options: dict[str, Any],
    mask: Tensor | None,
    key_lengths: Tensor | None,
    left: int | None,
    right: int | None,
    row_mask: Tensor | None,
    rows: tuple[int, int, int],
    reduction: str,
    impl: str,
) -> Tensor:
    q_s, k_s, q_t, k_t = (
        _autocast(sides.pop(name)) for name in ("student_q", "student_k", "teacher_q", "teacher_k")
    )
    kwargs = {
        **sides,
        **options,
        "mask": mask,
        "key_lengths": key_lengths,
        "window_left": left,
        "window_right": right,
    }
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if row_mask is not None:
        row_mask = checks.check_broadcast("row_mask", row_mask, rows, q_s.device)
        if row_mask.dtype != torch.bool:
            raise TypeError(f"row_mask must be boolean, got {row_mask.dtype}")
    if impl == "reference":
        problem, _ = ops.problem_of(q_s, k_s, q_t, k_t, **kwargs)
        value = reference.attention_kl_rows(problem)
    else:
        value = ops.attention_kl(q_s, k_s, q_t, k_t, impl=impl, **kwargs)[0]
    if row_mask is not None:
        value = torch.where(row_mask, value, 0.0)
    match reduction:
        case "mean":
            return value.mean()
        case "sum":
            return value.sum()
        case "batchmean":
            return value.sum() / value.shape[0]
    return value


def _divergence_options(
    divergence: str,
    beta: float,
    temperature: float,
    student_eps: float,
    teacher_eps: float,
    student_clamp: float,
    teacher_clamp: float,
    reduction: str,
    impl: str,
) -> dict[str, Any]:
    checks.one_of("divergence", divergence, NAMES)
    checks.one_of("reduction", reduction, REDUCTIONS)
    checks.one_of("impl", impl, IMPLEMENTATIONS)
    checks.in_unit_interval("beta", beta)
    checks.positive("temperature", temperature)
    guards = {
        "student_eps": student_eps,
        "teacher_eps": teacher_eps,
        "student_clamp": student_clamp,
        "teacher_clamp": teacher_clamp,
    }
    for name, guard in guards.items():
        checks.in_unit_interval(name, guard)
    if divergence == "tv" and any(guards.values()):
        raise ValueError(
            f"divergence 'tv' takes no logarithm, so eps and clamp do not apply, got {guards}"
        )
    text = functional_text(
        divergence, beta, student_eps, teacher_eps, student_clamp, teacher_clamp
    )
    return {"functional": text, "temperature": float(temperature)}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def functional_text(
    divergence: str,
    beta: float,
    student_eps: float,
    teacher_eps: float,
    student_clamp: float,
    teacher_clamp: float,
) -> str:
    """The expression that the operator takes; a constant to torch.compile, which cannot trace the
    parser.
    """
    return named(divergence, beta, student_eps, teacher_eps, student_clamp, teacher_clamp).text


def _head_options(
    head_reduction: str | None, teacher_lse: Tensor | None, teacher_q: Tensor
) -> dict[str, Any]:
    checks.one_of("head_reduction", head_reduction, (None, "mean"))
    if teacher_lse is None:
        return {"head_mean": head_reduction == "mean"}
    if head_reduction is None:
        raise ValueError(
            "teacher_lse is used with head_reduction='mean' only; one pass needs no log-sum-exp in advance"
        )
    if tuple(teacher_lse.shape) != tuple(teacher_q.shape[:3]):
        raise ValueError(
            f"teacher_lse must have shape {tuple(teacher_q.shape[:3])}, got {tuple(teacher_lse.shape)}"
        )
    checks.on_device("teacher_lse", teacher_lse, teacher_q.device)
    if teacher_lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"teacher_lse must be float32 (float64 on the CPU), got {teacher_lse.dtype}"
        )
    return {"head_mean": True, "teacher_lse": teacher_lse.detach()}


def _side_options(
    side: str,
    q: Tensor,
    k: Tensor,
    scale: float | Tensor | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
) -> dict[str, Any]:
    options: dict[str, Any] = {f"{side}_q": q, f"{side}_k": k}
    if isinstance(scale, Tensor):
        options[f"{side}_q"] = (q * scale).to(q.dtype)
        scale = 1.0
    options[f"{side}_scale"] = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(options[f"{side}_scale"]):
        raise ValueError(f"{side}_scale must be finite, got {scale}")
    if softcap is not None:
        checks.positive(f"{side}_softcap", softcap)
        options[f"{side}_softcap"] = float(softcap)
    if alibi_slopes is not None:
        checks.check_vector(
            f"{side}_alibi_slopes", alibi_slopes, q.shape[1], q.device, checks.FLOAT_DTYPES
        )
        checks.no_gradient(f"{side}_alibi_slopes", alibi_slopes)
        options[f"{side}_alibi_slopes"] = alibi_slopes
    if sink is not None:
        checks.check_vector(f"{side}_sink", sink, q.shape[1], q.device, checks.FLOAT_DTYPES)
        options[f"{side}_sink"] = sink
    return options


def _window(
    is_causal: bool, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None]:
    left, right = window if window is not None else (None, None)
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and bound < 0:
            raise ValueError(f"window bounds must be None or at least 0, got {name} {bound}")
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _autocast(x: Tensor) -> Tensor:
    """What autocast would do to the operand of a matmul."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x
