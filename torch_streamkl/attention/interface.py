"""Defines attention_kl(): the divergence between attention probabilities, a value per query."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.attention import direct, ops, reference
from torch_streamkl.attention.arguments import (
    LAYOUTS,
    PACKED,
    AttentionImpl,
    Inputs,
    Layout,
    Settings,
    checked_options,
    operands,
    window_of,
    with_dims,
)
from torch_streamkl.attention.bound_op import BoundOp
from torch_streamkl.divergences.names import Divergence, Reduction
from torch_streamkl.loading import distributed
from torch_streamkl.registration import without_autocast

_P = ParamSpec("_P")


def _on_several_ranks(function: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Calls with DTensors go through `torch_streamkl.distributed`."""

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
    r"""Computes the divergence between the attention probabilities of teacher and student, without
    materializing them.

    With P = softmax over keys of the teacher's scores and S of the student's, per query row

    .. math:: KL(P \| S) = \sum_j P_j (\log P_j - \log S_j)

    which equals the naive code

    .. code-block:: python

        s = (student_q @ student_k.transpose(-1, -2) * student_scale).masked_fill(~mask, -inf)
        t = (teacher_q @ teacher_k.transpose(-1, -2) * teacher_scale).masked_fill(~mask, -inf)
        F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)

    Args:
        student_q, teacher_q: ``[batch, num_heads, seqlen_q, head_dim]``; head_dim may differ per
            side.
        student_k, teacher_k: ``[batch, num_kv_heads, seqlen_k, head_dim]``; num_kv_heads divides
            num_heads and may differ per side (grouped heads). float16, bfloat16, float32 or (on
            the CPU) float64, one dtype for all four; any strides with a contiguous last
            dimension, nothing is copied. Under autocast all but float64 are cast to its dtype,
            as a matmul's operands are, and may differ before.
        divergence: ``"forward_kl"`` KL(P||S); ``"reverse_kl"`` KL(S||P); ``"cross_entropy"``
            -sum P log S; ``"jeffreys"`` KL(P||S) + KL(S||P); ``"js"`` beta KL(P||M) + (1 - beta)
            KL(S||M) with M = beta P + (1 - beta) S (generalised Jensen-Shannon as in GKD; beta 0
            and 1 are forward and reverse KL); ``"tv"`` 0.5 sum |P - S|.
        student_scale, teacher_scale: factor of the dot products, default ``head_dim ** -0.5``. A
            floating-point tensor (a learned scale, one per head or row) broadcasts to q as it is
            given, in ``layout``: q * scale takes the place of q, rounded to q's dtype. The tensor
            gets a gradient.
        temperature: divides the final scores of both sides. The T^2 of Hinton's loss is the
            caller's.
        student_softcap, teacher_softcap: c in ``c * tanh(score / c)``, after the scale. None is
            no softcap.
        is_causal: query i sees keys up to i + seqlen_k - seqlen_q (aligned at the last query and
            key).
        window: (left, right) keys around that position, None for no bound.
        attn_mask: boolean (True takes part) or additive (added to both sides' scores), broadcasts
            to ``[batch, num_heads, seqlen_q, seqlen_k]`` in either layout and is never expanded.
        key_lengths: int32 or int64 ``[batch]``, the number of valid keys.
        row_mask: boolean, broadcasts to ``[batch, num_heads, seqlen_q]``; False rows are 0 without
            gradient.
        student_bias, teacher_bias: additive, broadcast as attn_mask, for one side. No gradient.
        student_alibi_slopes, teacher_alibi_slopes: ``[num_heads]``, subtract
            slope * |distance|.
        student_sink, teacher_sink: ``[num_heads]``, an extra logit in the denominator (not divided
            by the temperature); gets gradient.
        student_eps, teacher_eps, student_clamp, teacher_clamp: log P becomes
            log(max(P + eps, clamp)), exactly; the weight before the log stays P. ``"js"``
            takes the logarithm of M from the guarded probabilities, too: log M = log(beta max(P +
            eps, clamp) + (1 - beta) max(S + eps, clamp)), each with its own side's guards.
        head_reduction: ``"mean"`` averages the teacher's probabilities over the heads that belong
            to one student head; the teacher then has a multiple of the student's heads. Triton
            kernels keep up to 64 MiB of the mean at a time.
        teacher_lse: ``[batch, num_teacher_heads, seqlen_q]`` known log-sum-exps in nats, with
            head_reduction only.
        layout: ``"bhnd"``, or ``"bnhd"`` for ``[batch, seqlen, num_heads, head_dim]`` inputs; rows
            are ``[batch, num_heads, seqlen_q]`` either way.
        reduction: ``"none"``, ``"mean"`` or ``"sum"`` over rows, ``"batchmean"`` sum / batch. Rows
            that row_mask leaves out count in both means, as 0.
        impl: ``"auto"``, ``"hopper"`` (H100, H200), ``"triton"``, ``"torch"`` (plain torch,
            bounded memory) or ``"reference"`` (naive). A choice that cannot run raises.
        deterministic: False allows gradients whose last bits differ from run to run, where they
            are faster: on Hopper with head_dim 64, if student_q and student_k both need one. This
            takes a float32 tensor as large as student_q.
            ``torch.use_deterministic_algorithms(True)`` forbids them again.

    Returns:
        float32 (float64 for float64 inputs) in nats; a scalar unless reduction is ``"none"``.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch, with the argument, the rule
            and the value.

    Numerics: scores and sums are accumulated in float32. A row without allowed keys is 0 with
    gradient 0; a key that the student excludes and the teacher does not makes the row +inf, as the
    definition says, and one whose probability underflows to 0 adds nothing. No batch, query or
    key at all (a size of 0) gives an empty result or rows of 0, the sum 0 with gradients 0, and
    NaN for a mean over nothing, as torch's. Gradients go to q and k of both sides, to sinks and
    to scales where they require it, and are the same bits on every run unless ``deterministic``
    is False.
    Source: the one-pass coupled softmax state of StreamKL (arXiv 2606.20005); see
    divergences/row_state.py.
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
        window_of(window),
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
    """Computes `attention_kl` over packed sequences, each attending to its own keys only.

    Equals a loop over b with rows ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]`` and keys
    ``cu_seqlens_k[b]:cu_seqlens_k[b + 1]``, results concatenated.

    Args:
        student_q, teacher_q: ``[total_q, num_heads, head_dim]``.
        student_k, teacher_k: ``[total_k, num_kv_heads, head_dim]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[num_sequences + 1]``, from 0 to the totals, not
            decreasing. Their values are not checked: a GPU would have to be waited for.
        max_seqlen_q, max_seqlen_k: bounds on the sequence lengths; a sequence longer than that is
            wrong.

        row_mask: boolean, broadcasts to ``[num_heads, total_q]``.
        teacher_lse: ``[num_teacher_heads, total_q]``.
        student_scale, teacher_scale: a tensor broadcasts to ``[total_q, num_heads, head_dim]``.

    The other arguments are those of `attention_kl`. There are no dense masks, biases, key_lengths
    and layout, which do not apply to packed sequences, and no ``deterministic``: gradients are
    always the same bits on every run.

    Returns:
        ``[num_heads, total_q]`` per-row values in nats, float32 (float64 for float64 inputs), or a
        scalar; ``"batchmean"`` divides by the number of sequences.
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
        window_of(window),
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


def _run(inputs: Inputs, settings: Settings) -> Tensor:
    plain = checks.is_plain(inputs)
    if not plain and any(hasattr(x, "device_mesh") for x in inputs if x is not None):
        placed, settings = distributed("attention_dtensor").prepared(inputs, settings)
        inputs = Inputs(*placed)
    if plain:
        verdict = checks.validated(inputs, settings, checked_options)
    else:
        verdict = checks.Validation(checked_options(inputs, settings))
    options = verdict.options
    tensors = operands(inputs, settings)
    if tensors[0].numel() == 0 or tensors[1].numel() == 0:
        value = _of_nothing(tensors)
    elif settings.impl == "reference":
        problem, _ = ops.problem_of(*tensors, *options)
        value = without_autocast(reference.attention_kl_rows, problem)  # operands are cast
    elif plain:
        bound = verdict.bound = verdict.bound or BoundOp(options)
        value = direct.attention_kl(tensors, bound)
    else:
        checks.refuse_transforms("attention_kl")
        value = ops.attention_kl(*tensors, *options)[0]
    if inputs.row_mask is not None:
        value = torch.where(with_dims(inputs.row_mask, 3), value, 0.0)
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
    """Rows of a call without a batch, query or key: each is 0, with gradient 0 to every input."""
    q = tensors[0]
    # slices without elements, whose sum is 0 whatever the tensors hold
    nothing = [x.narrow(-1, 0, 0).sum() for x in ops.differentiable(tensors) if x is not None]
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows: Tensor = q.new_zeros(q.shape[:3], dtype=dtype) + sum(nothing).to(dtype)
    return rows
