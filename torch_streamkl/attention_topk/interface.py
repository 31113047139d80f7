"""Defines attention_topk_kl(): the KL of attention probabilities over chosen keys."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from torch_streamkl import checks, flop_counts
from torch_streamkl.attention_topk import ops, reference
from torch_streamkl.attention_topk.arguments import OPTION_NAMES, MoreOptions, Options, operands
from torch_streamkl.divergences.names import Reduction
from torch_streamkl.linear.reductions import denominator
from torch_streamkl.registration import without_autocast

_TENSORS = (
    "student_q", "student_k", "teacher_q", "teacher_k", "ids", "student_head_weights",
)  # fmt: skip


def attention_topk_kl(
    student_q: Tensor,
    student_k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    ids: Tensor,
    *,
    student_head_weights: Tensor | None = None,
    student_scale: float | None = None,
    teacher_scale: float | None = None,
    is_causal: bool = False,
    row_mask: Tensor | None = None,
    reduction: Reduction = "none",
    **options: Unpack[MoreOptions],
) -> Tensor:
    r"""Computes the KL of teacher and student attention probabilities over the chosen keys of each
    query: the loss of a sparse attention's indexer in its sparse training stage.

    Of each query, ``ids`` has the keys that its indexer chose, usually the top 2048 of its scores.
    Both softmaxes go over these keys alone. No score of another key is computed, and no tensor has
    the size of queries times keys. With P the mean of the teacher's heads, divided by its sum, and
    S the student's softmax,

    .. math:: KL(P \| S) = \sum_{j \in ids} P_j (\log P_j - \log S_j)

    It equals this naive code, which has the scores of all keys:

    .. code-block:: python

        t = teacher_q @ teacher_k.mT * teacher_scale
        t = t.gather(-1, ids[:, None].expand(*t.shape[:3], -1))
        p = t.softmax(-1).mean(1)
        p = p / p.sum(-1, keepdim=True)
        s = (student_q @ student_k[:, None].mT * student_scale).relu()
        s = (s * student_head_weights[..., None]).sum(1).gather(-1, ids)
        (p * (p.log() - s.log_softmax(-1))).sum(-1)

    Args:
        student_q: the indexer's queries ``[batch, num_student_heads, seqlen_q, head_dim]``.
            float16, bfloat16, float32, or float64 in plain torch; one dtype for queries and keys
            of both sides. Any strides with a contiguous last dimension. Under autocast, operands
            are cast as those of a matmul are.
        student_k: ``[batch, seqlen_k, head_dim]``, or with a dimension of one head: the index key
            of a position, which all student heads share.
        teacher_q: ``[batch, num_heads, seqlen_q, teacher_head_dim]``.
        teacher_k: ``[batch, num_kv_heads, seqlen_k, teacher_head_dim]``. num_kv_heads divides
            num_heads (GQA, MQA). The teacher gets no gradient: detach it.
        ids: int64 or int32 ``[batch, seqlen_q, topk]``, positions of keys in any order. A negative
            id is padding. One that ``is_causal`` hides does not count. One that stands twice
            counts twice.
        student_head_weights: ``[batch, num_student_heads, seqlen_q]``. The score of a key is then
            ``sum_h weight_h relu(student_scale q_h k)``. Without weights, student_q has one head,
            and the score is ``student_scale q k``. Any floating dtype.
        student_scale: the factor of the student's dot products. None is 1 with
            student_head_weights, and ``head_dim ** -0.5`` without.
        teacher_scale: that of the teacher's. None is ``teacher_head_dim ** -0.5``.
        is_causal: True lets query i see the keys up to i + seqlen_k - seqlen_q.
        row_mask: boolean, broadcasts to ``[batch, seqlen_q]``. A False row has value 0 and no
            gradient.
        reduction: ``"none"``, ``"sum"``, ``"mean"`` over the rows that row_mask keeps, or
            ``"batchmean"``, the sum divided by batch.
        teacher_lse: ``[batch, num_heads, seqlen_q]`` float32, the teacher's log-sum-exps in nats
            if its attention has computed them, which saves one of the teacher's two products. They
            may be over more keys than the chosen ones: heads count by their probability there.
        cu_seqlens_q, cu_seqlens_k: int32 ``[num_sequences + 1]``, where each packed sequence
            begins, then the total. Queries are then ``[total_q, num_heads, head_dim]``, keys
            ``[total_k, num_kv_heads, head_dim]``, student_head_weights ``[total_q,
            num_student_heads]``, teacher_lse ``[num_heads, total_q]``, and ids ``[total_q,
            topk]`` are positions among all keys. Ids of another sequence do not count. In eager
            mode on a CPU, offsets that decrease or leave queries or keys out raise.
        layout: ``"bhnd"`` as above, or ``"bnhd"`` for ``[batch, seqlen, num_heads, head_dim]``
            queries and keys and ``[batch, seqlen_q, num_student_heads]`` weights.
        check_values: True raises on a GPU, too, for ids past the last key, which waits for it. On
            a CPU they always raise. On a GPU, the value of such a query is NaN otherwise.
        deterministic: True adds the gradients of keys in an order-independent way, with 64-bit
            integers, so that all runs have the same bits. It is slower.
            ``torch.use_deterministic_algorithms(True)`` has the same effect.
        impl: ``"auto"``; ``"triton"``; ``"torch"``, plain torch with bounded memory; or
            ``"reference"``, the naive code. A choice other than ``"auto"`` that cannot run raises.

    Returns:
        Values in nats, float32 (float64 for float64 inputs): ``[batch, seqlen_q]``, packed
        ``[total_q]``, or a scalar with a reduction.

    Raises:
        ValueError, TypeError, NotImplementedError: before any launch. The message has the
            argument, the rule and the value that breaks it.
        IndexError: an id is past the last key (on a GPU, with ``check_values=True``).

    Numerics:
        - Scores and sums are accumulated in float32. Gradients of scores are rounded to the
          inputs' dtype for the products with keys and queries.
        - A row without chosen keys, or whose teacher has no probability there (with teacher_lse,
          less than 1.2e-38 in float32), has value 0 and gradient 0.
        - The forward keeps three numbers of a row and the teacher's log-sum-exps. The backward
          recomputes scores.
        - A second derivative raises.

    Source: the sparse training stage of DeepSeek-V3.2; Megatron-core's `compute_dsa_indexer_loss`
    with ``sparse_loss=True`` has the naive code on the scores of all keys.
    """
    for name in options:
        if name not in OPTION_NAMES:
            checks.refuse_option("attention_topk_kl", name, (*OPTION_NAMES, *_TENSORS))
    given = Options(student_scale, teacher_scale, is_causal, row_mask, reduction, **options)
    sides = {
        "student_q": student_q,
        "student_k": student_k,
        "teacher_q": teacher_q,
        "teacher_k": teacher_k,
    }
    for x in (*sides.values(), ids, student_head_weights):
        if hasattr(x, "device_mesh"):
            raise NotImplementedError(
                "attention_topk_kl takes plain tensors, got a DTensor; pass x.to_local() of one "
                "that is sharded over batch or queries, and x.full_tensor() of keys"
            )
    tensors = operands(sides, ids, student_head_weights, given)
    value = _rows(tensors, _scales(student_q, teacher_q, student_head_weights, given), given)
    shape = value.shape[1:] if given.is_packed else value.shape
    return _reduced(value.view(shape), given)


def _scales(
    student_q: Tensor, teacher_q: Tensor, weights: Tensor | None, options: Options
) -> tuple[float, float]:
    student, teacher = options.student_scale, options.teacher_scale
    if student is None:
        student = student_q.shape[-1] ** -0.5 if weights is None else 1.0
    return float(student), float(teacher_q.shape[-1] ** -0.5 if teacher is None else teacher)


def _rows(tensors: Any, scales: tuple[float, float], options: Options) -> Tensor:
    if options.impl == "reference":
        return without_autocast(reference.chosen_key_rows, ops.problem_of(*tensors, *scales))
    checks.refuse_transforms("attention_topk_kl")
    flop_counts.register()
    value, *_ = ops.attention_topk(
        *tensors, *scales, options.impl, options.check_values, options.deterministic
    )
    return value


def _reduced(value: Tensor, options: Options) -> Tensor:
    if options.reduction == "none":
        return value
    counted, rows = options.row_mask, tuple(value.shape)
    if options.reduction == "batchmean" and options.is_packed:
        assert options.cu_seqlens_q is not None
        return value.sum() / (options.cu_seqlens_q.shape[0] - 1)
    if counted is not None:
        counted = counted.expand(rows)
    total: Tensor = value.sum() / denominator(counted, options.reduction, rows)
    return total
