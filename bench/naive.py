"""The losses as people write them: what every provider computes and what the gate checks against.

Both return the mean over rows (query rows, or tokens) of KL(teacher || student) in nats. Scores in
half precision become float32 before the softmax, as in Transformers; float64 stays float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_kl(
    student_q: Tensor,
    student_k: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    is_causal: bool = False,
    softcap: float | None = None,
    head_mean: bool = False,
) -> Tensor:
    """KL between two materialised attention maps, q ``[B, H, N, D]`` and k ``[B, H_kv, M, D]``."""
    student = attention_scores(student_q, student_k, is_causal, softcap).log_softmax(-1)
    teacher = attention_scores(teacher_q, teacher_k, is_causal, softcap).softmax(-1)
    if head_mean:
        teacher = teacher.mean(1, keepdim=True)
    return F.kl_div(student, teacher, reduction="none").sum(-1).mean()


def attention_scores(q: Tensor, k: Tensor, is_causal: bool, softcap: float | None) -> Tensor:
    """Scaled and masked scores; causal queries are aligned with the last keys."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)
    scores = as_wide(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        n, m = scores.shape[-2:]
        future = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1 + m - n)
        scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
    return scores


def linear_kl(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    softcap: float | None = None,
) -> Tensor:
    """KL between two LM heads' materialised logits, hidden ``[T, D]`` and weight ``[V, D]``."""
    student = head_logits(student_hidden, student_weight, softcap).log_softmax(-1)
    teacher = head_logits(teacher_hidden, teacher_weight, softcap).softmax(-1)
    return F.kl_div(student, teacher, reduction="none").sum(-1).mean()


def head_logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """Logits ``[T, V]``."""
    logits = as_wide(F.linear(hidden, weight))
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def as_wide(x: Tensor) -> Tensor:
    """float32, or what is wider already."""
    return x if x.dtype == torch.float64 else x.float()
