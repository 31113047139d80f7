"""Defines attention_kl() and attention_kl_varlen(): divergences of attention probabilities.

Both functions check their arguments, bring them into the operator's layout, and call the operator
(`ops.py`), or for repeated calls with plain tensors its launches (`direct.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, ParamSpec, get_args

import torch
from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.attention import direct, ops, reference
from torch_streamkl.attention.problem import SPEC
from torch_streamkl.divergences.names import Divergence, Reduction, divergence_text
from torch_streamkl.loading import distributed
from torch_streamkl.registration import without_autocast

Layout = Literal["bhnd", "bnhd"]
AttentionImpl = Literal["auto", "hopper", "triton", "torch", "reference"]
LAYOUTS = get_args(Layout)
IMPLEMENTATIONS = get_args(AttentionImpl)
PACKED = "packed"  # [total, num_heads, head_dim], of attention_kl_varlen
REDUCTIONS = get_args(Reduction)
_P = ParamSpec("_P")


def _on_several_ranks(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Sends calls with DTensors to `torch_streamkl.distributed`, others to ``function``."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and hasattr(x, "device_mesh"):
                dtensors = distributed("attention_dtensor")
                value: Tensor = dtensors.attention_kl_dtensor(function, *args, **kwargs)
                return value
        return function(*args, **kwargs)

    return call


@_on_several_ranks
@checks.named_options
def attention_kl(
    student_q: Tensor,
    student_k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    *,
    divergence: Divergence = "forward_kl",
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
    head_reduction: Literal["mean"] | None = None,
    teacher_lse: Tensor | None = None,
    layout: Layout = "bhnd",
    reduction: Reduction = "none",
    impl: AttentionImpl = "auto",
    deterministic: bool = True,
) -> Tensor:
    r"""Computes the divergence of teacher and student attention probabilities, one value per
    query.

    Neither the scores nor the probabilities are materialized. With P the softmax of the teacher's
    scores over the keys and S the student's, the default is, for each query row,

    .. math:: KL(P \| S) = \sum_j P_j (\log P_j - \log S_j)

    It equals this naive code:

    .. code-block:: python

        lowest = torch.finfo(student_q.dtype).min
        s = (student_q @ student_k.mT * student_scale).masked_fill(~mask, lowest)
        t = (teacher_q @ teacher_k.mT * teacher_scale).masked_fill(~mask, lowest)
        F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)

    Args:
        student_q, teacher_q: ``[batch, num_heads, seqlen_q, head_dim]``. The head_dim of the two
            sides may differ. float16, bfloat16, float32, or float64 on the CPU; one dtype for
            queries and keys of both sides. Any strides with a contiguous last dimension: nothing
            is copied. Under autocast, operands are cast as those of a matmul are, and their dtypes
            may differ.
        student_k, teacher_k: ``[batch, num_kv_heads, seqlen_k, head_dim]``. num_kv_heads divides
            num_heads (GQA, MQA), and may differ between the sides.
        divergence: ``"forward_kl"`` is KL(P||S), ``"reverse_kl"`` KL(S||P), ``"cross_entropy"``
            -sum P log S, ``"jeffreys"`` KL(P||S) + KL(S||P), and ``"tv"`` 0.5 sum \|P - S\|.
            ``"js"`` is beta KL(P||M) + (1 - beta) KL(S||M) with M = beta P + (1 - beta) S.
        beta: the teacher's weight in ``"js"``, from 0 to 1. As in GKD, 0 gives the forward KL and
            1 the reverse KL.
        student_scale, teacher_scale: the factor of the dot products; None is ``head_dim ** -0.5``.
            A floating-point tensor broadcasts to q in ``layout`` and gets a gradient. The product
            q * scale is rounded to q's dtype.
        temperature: divides the scores of both sides. Multiply by T^2 yourself, as in Hinton's
            loss.
        student_softcap, teacher_softcap: c in ``c * tanh(score / c)``, applied after the scale.
            None applies no softcap.
        is_causal: True lets query i see the keys up to i + seqlen_k - seqlen_q: the last query
            sees all keys.
        window: ``(left, right)``, how many keys a query sees before and after that position. None
            is no bound.
        attn_mask: a boolean mask, True for keys that take part, or a float mask that is added to
            the scores of both sides. It broadcasts to ``[batch, num_heads, seqlen_q, seqlen_k]``
            in either layout, and is never expanded in memory.
        key_lengths: int32 or int64 ``[batch]``, the number of valid keys.
        row_mask: boolean, broadcasts to ``[batch, num_heads, seqlen_q]``. A False row has value 0
            and no gradient.
        student_bias, teacher_bias: added to the scores of one side. They broadcast as attn_mask
            does, and get no gradient.
        student_alibi_slopes, teacher_alibi_slopes: ``[num_heads]``. The scores get ``-slope *
            distance``, with the distance between query and key.
        student_sink, teacher_sink: ``[num_heads]``, one more logit in the softmax's denominator.
            The temperature does not divide it. It gets a gradient.
        student_eps, teacher_eps, student_clamp, teacher_clamp: replace log P by log(max(P + eps,
            clamp)), exactly; the factor before the logarithm stays P. ``"js"`` also computes log M
            from the guarded probabilities of each side.
        head_reduction: ``"mean"`` averages the teacher's probabilities over the teacher heads that
            belong to one student head. num_heads of the teacher is then a multiple of the
            student's.
        teacher_lse: ``[batch, num_teacher_heads, seqlen_q]``, the teacher's log-sum-exps in nats
            if they are known. Needs head_reduction.
        layout: ``"bhnd"`` as above, or ``"bnhd"`` for ``[batch, seqlen, num_heads, head_dim]``
            queries and keys. The result is ``[batch, num_heads, seqlen_q]`` in both.
        reduction: ``"none"``, ``"mean"``, ``"sum"``, or ``"batchmean"``, the sum divided by batch.
            Rows that row_mask excludes count in both means, as 0.
        impl: ``"auto"``; ``"hopper"`` (H100, H200); ``"triton"``; ``"torch"``, plain torch with
            bounded memory; or ``"reference"``, the naive code. If a choice other than ``"auto"``
            cannot run, the call raises.
        deterministic: False allows faster gradients whose last bits differ between runs. It
            matters on Hopper with head_dim 64 if student_q and student_k both need a gradient, and
            takes a float32 tensor as large as student_q.
            ``torch.use_deterministic_algorithms(True)`` overrides it.

    Returns:
        Values in nats, float32 (float64 for float64 inputs): ``[batch, num_heads, seqlen_q]``, or
        a scalar with a reduction.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch. The message has the
            argument, the rule and the value that breaks it.

    Numerics:
        - Scores and sums are accumulated in float32.
        - A row without allowed keys has value 0 and gradient 0.
        - A key that the student excludes and the teacher allows makes the row +inf, as the formula
          says, unless the teacher's probability underflows to 0.
        - Logarithms come from scores: a student probability that underflows has a finite one.
        - If a size is 0, rows are 0, a sum is 0 with gradients 0, and a mean over no row is NaN.
        - Gradients go to queries and keys of both sides, sinks and tensor scales that require one.
          They have the same bits in every run, unless ``deterministic`` is False. A second
          derivative raises.

    Source: the one-pass state of two coupled softmaxes of StreamKL (arXiv 2606.20005);
    `torch_streamkl/divergences/row_state.py` derives it.
    """
    checks.one_of("layout", layout, LAYOUTS)
    inputs = Inputs(
        student_q,
        student_k,
        teacher_q,
        teacher_k,
        attn_mask,
        student_bias,
        teacher_bias,
        student_alibi_slopes,
        teacher_alibi_slopes,
        student_sink,
        teacher_sink,
        key_lengths,
        None,
        None,
        teacher_lse,
        row_mask,
    )
    settings = Settings(
        divergence,
        beta,
        student_scale,
        teacher_scale,
        temperature,
        student_softcap,
        teacher_softcap,
        is_causal,
        _window(window),
        student_eps,
        teacher_eps,
        student_clamp,
        teacher_clamp,
        head_reduction,
        layout,
        reduction,
        impl,
        deterministic=deterministic,
    )
    return _run(inputs, settings)


@_on_several_ranks
@checks.named_options
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
    divergence: Divergence = "forward_kl",
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
    head_reduction: Literal["mean"] | None = None,
    teacher_lse: Tensor | None = None,
    reduction: Reduction = "none",
    impl: AttentionImpl = "auto",
) -> Tensor:
    """Computes `attention_kl` of packed sequences, each of which attends to its own keys only.

    It equals this loop:

    .. code-block:: python

        q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        rows = [
            attention_kl(
                *(x[None, first:last].transpose(1, 2) for x, first, last in (
                    (student_q, q[b], q[b + 1]), (student_k, k[b], k[b + 1]),
                    (teacher_q, q[b], q[b + 1]), (teacher_k, k[b], k[b + 1]),
                ))
            )[0]
            for b in range(len(q) - 1)
        ]
        torch.cat(rows, -1)  # [num_heads, total_q]

    Args:
        student_q, teacher_q: ``[total_q, num_heads, head_dim]``, the sequences one after the
            other.
        student_k, teacher_k: ``[total_k, num_kv_heads, head_dim]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[num_sequences + 1]``, where each sequence begins, then
            the total; from 0 and not decreasing. The values are not checked, because that would
            wait for the GPU.
        max_seqlen_q, max_seqlen_k: upper bounds of the sequence lengths. A longer sequence gives
            wrong values.
        row_mask: boolean, broadcasts to ``[num_heads, total_q]``.
        teacher_lse: ``[num_teacher_heads, total_q]``.
        student_scale, teacher_scale: as in `attention_kl`; a tensor broadcasts to ``[total_q,
            num_heads, head_dim]``.

    The other arguments are those of `attention_kl`. Dense masks, biases, key_lengths and layout do
    not apply to packed sequences. Gradients are always deterministic.

    Returns:
        Values in nats, float32 (float64 for float64 inputs): ``[num_heads, total_q]``, or a scalar
        with a reduction. ``"batchmean"`` divides the sum by the number of sequences.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch, as `attention_kl` does.

    Numerics and source are those of `attention_kl`.
    """
    inputs = Inputs(
        student_q,
        student_k,
        teacher_q,
        teacher_k,
        None,
        None,
        None,
        student_alibi_slopes,
        teacher_alibi_slopes,
        student_sink,
        teacher_sink,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        teacher_lse,
        row_mask,
    )
    settings = Settings(
        divergence,
        beta,
        student_scale,
        teacher_scale,
        temperature,
        student_softcap,
        teacher_softcap,
        is_causal,
        _window(window),
        student_eps,
        teacher_eps,
        student_clamp,
        teacher_clamp,
        head_reduction,
        PACKED,
        reduction,
        impl,
        max_seqlen_q,
        max_seqlen_k,
    )
    value = _run(inputs, settings)
    return value.squeeze(0) if reduction == "none" else value


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
    return _operands(inputs, settings), _checked_options(inputs, settings)


def _run(inputs: Inputs, settings: Settings) -> Tensor:
    plain = checks.is_plain(inputs)
    if not plain and any(hasattr(x, "device_mesh") for x in inputs if x is not None):
        placed, settings = distributed("attention_dtensor").prepared(inputs, settings)
        inputs = Inputs(*placed)
    sites: dict[Any, Any] = {}
    if plain:
        verdict = checks.validated(inputs, settings, _checked_options)
        options, sites = verdict.options, verdict.kept
    else:
        options = _checked_options(inputs, settings)
    tensors = _operands(inputs, settings)
    if tensors[0].numel() == 0 or tensors[1].numel() == 0:
        value = _of_nothing(tensors)
    elif settings.impl == "reference":
        problem, _ = ops.problem_of(*tensors, *options)
        value = without_autocast(reference.attention_kl_rows, problem)  # operands are cast
    elif plain:
        value = direct.attention_kl(tensors, options, sites)
    else:
        checks.refuse_transforms("attention_kl")
        value = ops.attention_kl(*tensors, *options)[0]
    if inputs.row_mask is not None:
        value = torch.where(_with_dims(inputs.row_mask, 3), value, 0.0)
    match settings.reduction:
        case "mean":
            return value.mean()
        case "sum":
            return value.sum()
        case "batchmean":
            packed = inputs.cu_seqlens_q
            return value.sum() / (value.shape[0] if packed is None else packed.shape[0] - 1)
    return value


def _of_nothing(tensors: tuple[Any, ...]) -> Tensor:
    """Returns rows of 0, with gradients of 0, for a call without a batch, a query or a key."""
    q = tensors[0]
    # slices without elements, whose sum is 0 whatever the tensors hold
    nothing = [x.narrow(-1, 0, 0).sum() for x in ops.differentiable(tensors) if x is not None]
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows: Tensor = q.new_zeros(q.shape[:3], dtype=dtype) + sum(nothing).to(dtype)
    return rows


def _operands(inputs: Inputs, settings: Settings) -> tuple[Any, ...]:
    """Returns the operator's tensors: views of the inputs, copied only for tensor scales and
    autocast.
    """
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
        mask = _with_dims(mask, 4)
        if mask.dtype != torch.bool:
            mask, student_bias, teacher_bias = None, mask, mask
    if student_bias is not None:
        student_bias = _with_dims(student_bias, 4)
    if teacher_bias is not None:
        teacher_bias = _with_dims(teacher_bias, 4)
    if teacher_lse is not None:
        teacher_lse = _with_dims(teacher_lse.detach(), 3)
    return (q_s, k_s, q_t, k_t, mask, student_bias, teacher_bias, *others, teacher_lse)


def _heads_first(x: Tensor, layout: str) -> Tensor:
    if layout == "bhnd":
        return x
    return x.transpose(1, 2) if layout == "bnhd" else x.transpose(0, 1).unsqueeze(0)


def _with_dims(x: Tensor, ndim: int) -> Tensor:
    return x if x.ndim == ndim else x[(None,) * (ndim - x.ndim)]


# ------------------------------------------------------------------------------------------ checks
def _checked_options(inputs: Inputs, settings: Settings) -> tuple[Any, ...]:
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
        checks.check_broadcast("row_mask", inputs.row_mask, rows, q_s.device)
        if inputs.row_mask.dtype != torch.bool:
            raise TypeError(f"row_mask must be boolean, got {inputs.row_mask.dtype}")
    for side, q, given in (
        ("student", q_s, inputs.student_q),
        ("teacher", q_t, inputs.teacher_q),
    ):
        _check_side(side, q, given, inputs, settings)
    _check_head_reduction(inputs, settings, q_t)
    left, right = window_bounds(settings.is_causal, settings.window)
    given = {
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
    return tuple([given.get(x, arguments[x].default) for x in SPEC.option_names])


def _functional(settings: Settings) -> str:
    checks.one_of("reduction", settings.reduction, REDUCTIONS)
    checks.one_of("impl", settings.impl, IMPLEMENTATIONS)
    checks.boolean("deterministic", settings.deterministic)
    checks.positive("temperature", settings.temperature)
    return divergence_text(
        settings.divergence,
        settings.beta,
        settings.student_eps,
        settings.teacher_eps,
        settings.student_clamp,
        settings.teacher_clamp,
    )


def _check_offsets(inputs: Inputs, settings: Settings) -> None:
    device, offsets = inputs.student_q.device, inputs.cu_seqlens_q
    size = offsets.shape[0] if isinstance(offsets, Tensor) and offsets.ndim == 1 else 2
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        checks.check_vector(name, getattr(inputs, name), size, device, (torch.int32,))
    if size < 2:
        raise ValueError(f"cu_seqlens_q must have num_sequences + 1 >= 2 entries, got {size}")
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
    if tuple(lse.shape) != shape:
        raise ValueError(f"teacher_lse must have shape {shape}, got {tuple(lse.shape)}")
    checks.on_device("teacher_lse", lse, teacher_q.device)
    if lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"teacher_lse must be float32 (float64 on the CPU), got {lse.dtype}")


def _window(window: Any) -> tuple[int | None, int | None] | None:
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
    return window[0], window[1]


def window_bounds(
    is_causal: bool, window: tuple[int | None, int | None] | None
) -> tuple[int | None, int | None]:
    """Returns how many keys a query sees before and after its position, None for no bound."""
    checks.boolean("is_causal", is_causal)
    left, right = _window(window) or (None, None)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right
