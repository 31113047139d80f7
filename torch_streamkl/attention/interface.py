"""Defines attention_kl() and attention_kl_varlen(): divergences of attention probabilities.

Both functions check their arguments, bring them into the operator's layout, and call the operator
(`ops.py`), or for repeated calls with plain tensors its launches (`direct.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor

from torch_streamkl import checks
from torch_streamkl.attention import direct, ops, reference, values
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
    """Sends calls with DTensors to `torch_streamkl.distributed`, others to ``function``."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and hasattr(x, "device_mesh"):
                dtensors = distributed("dtensors")
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
            sides may differ. float16, bfloat16, float32, or float64 in plain torch; one dtype
            for queries and keys of both sides. Any strides with a contiguous last dimension:
            nothing is copied. Under autocast, operands are cast as those of a matmul are, and
            their dtypes may differ.
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
        window: ``(left, right)``: query i sees the keys from i + seqlen_k - seqlen_q - left to i +
            seqlen_k - seqlen_q + right. None is no bound.
        attn_mask: a boolean mask, True for keys that take part, or a float mask that is added to
            the scores of both sides. It broadcasts to ``[batch, num_heads, seqlen_q, seqlen_k]``
            in either layout, and is never expanded in memory.
        key_lengths: int32 or int64 ``[batch]``, the number of valid keys, from 0 to seqlen_k. On a
            CPU another number raises. A GPU takes the nearest of these, and does not wait.
        row_mask: boolean, broadcasts to ``[batch, num_heads, seqlen_q]``. A False row has value 0
            and no gradient.
        student_bias, teacher_bias: added to the scores of one side. They broadcast as attn_mask
            does, and get no gradient.
        student_alibi_slopes, teacher_alibi_slopes: ``[num_heads]``. The scores get ``-slope *
            distance``, with the distance between query and key.
        student_sink, teacher_sink: ``[num_heads]``, one more logit in the softmax's denominator.
            The temperature does not divide it. It gets a gradient.
        student_eps, teacher_eps, student_clamp, teacher_clamp: change logarithms only: log P
            becomes log(max(P + eps, clamp)). A factor P outside of the logarithm does not change.
            ``"js"`` computes log M from max(P + eps, clamp) of each side, too.
        head_reduction: ``"mean"`` averages the teacher's probabilities over the teacher heads that
            belong to one student head. num_heads of the teacher is then a multiple of the
            student's.
        teacher_lse: ``[batch, num_teacher_heads, seqlen_q]``, the teacher's log-sum-exps in nats
            if they are known. Needs head_reduction. They get no gradient: detach them.
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
        ``[batch, num_heads, seqlen_q]``, or a scalar with a reduction. float32 (float64 for
        float64 inputs), in nats.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch. The message has the
            argument, the rule and the value that breaks it.

    Numerics:
        - Scores and sums are accumulated in float32.
        - A row without allowed keys has value 0 and gradient 0.
        - A key that the student excludes and the teacher allows makes the row +inf, as the formula
          says, unless the teacher's probability underflows to 0.
        - Logarithms are computed from scores. So the logarithm of a student probability that
          underflows to 0 is finite.
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
            the total; from 0 and not decreasing. On a CPU other values raise. On a GPU they give
            wrong results: a check would wait for it.
        max_seqlen_q, max_seqlen_k: upper bounds of the sequence lengths. A longer sequence raises
            on a CPU, and gives wrong values on a GPU.
        row_mask: boolean, broadcasts to ``[num_heads, total_q]``.
        teacher_lse: ``[num_teacher_heads, total_q]``.
        student_scale, teacher_scale: as in `attention_kl`; a tensor broadcasts to ``[total_q,
            num_heads, head_dim]``.

    The other arguments are those of `attention_kl`. Dense masks, biases, key_lengths and layout do
    not apply to packed sequences. Gradients are always deterministic.

    Returns:
        ``[num_heads, total_q]``, or a scalar with a reduction. float32 (float64 for float64
        inputs), in nats. ``"batchmean"`` divides the sum by the number of sequences.

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
        placed, settings = distributed("dtensors").prepared(inputs, settings)
        inputs = Inputs(*placed)
    if plain:
        verdict = checks.validated(inputs, settings, checked_options)
    else:
        verdict = checks.Validation(checked_options(inputs, settings))
    options = verdict.options
    tensors = operands(inputs, settings)
    student_q = tensors[0]
    if student_q.numel() == 0 or tensors[1].numel() == 0:
        value = _of_nothing(tensors)
    elif settings.impl == "reference":
        problem, _ = ops.problem_of(*tensors, *options)
        if plain:
            values.check(problem)
        value = without_autocast(reference.attention_kl_rows, problem)  # operands are cast
    elif plain and not student_q.is_meta:  # meta tensors have no values: fake implementations
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
    """Returns rows of 0, with gradients of 0, for a call without a batch, a query or a key."""
    q = tensors[0]
    # slices without elements, whose sum is 0 whatever the tensors hold (no `ops.differentiable`:
    # Dynamo does not trace it)
    given = [tensors[i] for i in ops.DIFFERENTIABLE]
    nothing = [x.narrow(-1, 0, 0).sum() for x in given if x is not None]
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows: Tensor = q.new_zeros(q.shape[:3], dtype=dtype) + sum(nothing).to(dtype)
    return rows
