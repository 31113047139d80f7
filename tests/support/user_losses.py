"""Losses as users of 2026 write them: what the report has to be silent about in none of them.

Every program takes hidden states and LM heads, or queries and keys, at sizes of which only scores
and logits are large: what is as large as half of them is one. ``fuses`` is the number of losses
that operators compute (with ``min_mib=0``). `s` and `t` are logits or scores of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.losses import kd
from tests.support.made_inputs import of_inputs, with_probabilities

TOKENS, VOCAB, HIDDEN, TEACHER_HIDDEN, TOP = 48, 160, 4, 5, 6
HEADS, LENGTH, HEAD_DIM = 2, 64, 4
LOGITS, SCORES = TOKENS * VOCAB, HEADS * LENGTH * LENGTH
OF_HEADS = with_probabilities(
    {"s": ("h w", lambda h, w: h @ w.T), "t": ("g v", lambda g, v: g @ v.T)}
)
OF_MAPS = with_probabilities(
    {"s": ("q k", lambda q, k: q @ k.mT), "t": ("r u", lambda r, u: r @ u.mT)}
)


@dataclass(frozen=True)
class UserLoss:
    fn: Callable[..., Any]
    fuses: int
    style: str  # of whose code
    is_attention: bool

    @property
    def large(self):
        """Entries from which a tensor is score- or logit-sized."""
        return (SCORES if self.is_attention else LOGITS) // 2

    def inputs(self):
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, HEADS, LENGTH, HEAD_DIM)] * 4
        if not self.is_attention:
            shapes = [(n, d) for d in (HIDDEN, TEACHER_HIDDEN) for n in (TOKENS, VOCAB)]
        made = [torch.randn(*shape, generator=generator) for shape in shapes]
        return [x.requires_grad_(i < 2) for i, x in enumerate(made)]


USER_LOSSES = {}


def heads(fuses, style, **named):
    """Registers a loss of LM heads, that is named here or that it decorates."""
    return _registers(fuses, style, False, named)


def attention(fuses, style, **named):
    return _registers(fuses, style, True, named)


def _registers(fuses, style, is_attention, named):
    made, inputs = (OF_MAPS, "qkru") if is_attention else (OF_HEADS, "hwgv")

    def register(fn, name=""):
        program, _ = of_inputs(fn, made, inputs=inputs)
        program.__name__ = name or fn.__name__
        assert program.__name__ not in USER_LOSSES, "another loss has this name"
        USER_LOSSES[program.__name__] = UserLoss(program, fuses, style, is_attention)
        return fn

    for name, fn in named.items():
        register(fn, name)
    return register


_generator = torch.Generator().manual_seed(1)
LABELS = torch.randint(0, VOCAB, (TOKENS,), generator=_generator)
IDS = torch.rand(TOKENS, VOCAB, generator=_generator).topk(TOP).indices
TOP_LOGPROBS = torch.randn(TOKENS, TOP, generator=_generator).log_softmax(-1) - 0.1


def kl_of_logs(log_m, log_p):
    return F.kl_div(log_m, log_p, reduction="none", log_target=True)


def jsd(log_s, log_t, of_s, of_t, beta):
    """Of a mixture as the log-sum-exp of a stack."""
    m = torch.logsumexp(torch.stack([log_s + of_s, log_t + of_t]), dim=0)
    return beta * kl_of_logs(m, log_t) + (1 - beta) * kl_of_logs(m, log_s)


def clamped_kl(p, q):
    return (p * (p.clamp_min(1e-9).log() - q.clamp_min(1e-9).log())).sum(-1)


def cross_entropy(p, log_s):
    return -(p * log_s).sum(-1).mean()


# ------------------------------------------------------------------ distributions of two LM heads
@heads(1, "TRL GKD")
def generalized_jsd(log_s, log_t):
    return jsd(log_s, log_t, math.log(0.5), math.log(0.5), 0.5).sum(-1).mean()


@heads(1, "NeMo-RL distillation, reverse KL")
def reverse_kl(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
    return (s.exp() * (s - t)).sum(-1).mean()


# the text of the report is tested of some losses, which make their logits: it names parameters
@heads(1, "distillation with hard labels")
def kl_and_cross_entropy(h, w, g, v):
    logits = h @ w.T
    kl = F.kl_div(logits.log_softmax(-1), (g @ v.T).softmax(-1), reduction="batchmean")
    return kl + F.cross_entropy(logits, LABELS)


@heads(1, "label smoothing next to a KL")
def kl_and_smoothed_labels(h, w, g, v):
    logits = h @ w.T
    kl = F.kl_div(logits.log_softmax(-1), (g @ v.T).softmax(-1), reduction="batchmean")
    return kl + F.cross_entropy(logits, LABELS, label_smoothing=0.1)


# fmt: off
heads(1, "swapped arguments of kl_div", swapped=lambda p_s, p_t: (
    F.kl_div(p_s, p_t, reduction="batchmean")))
heads(1, "Bhattacharyya", bhattacharyya=lambda p_t, p_s: (
    -(p_t.sqrt() * p_s.sqrt()).sum(-1).log().mean()))
heads(1, "GRPO: KL and an entropy bonus", kl_and_entropy_bonus=lambda log_s, log_t: (
    (log_s.exp() * (log_s - log_t)).sum(-1) - 0.01 * -(log_s.exp() * log_s).sum(-1)).mean())
heads(1, "acceptance of a draft model", acceptance=lambda p_t, p_s: (
    1 - torch.minimum(p_t, p_s).sum(-1).mean()))
# fmt: on


@heads(1, "R-Drop")  # both directions are one loss
def r_drop(h, w, g, v):
    a, b = (h @ w.T).log_softmax(-1), ((h * 1.1) @ w.T).log_softmax(-1)
    forward = F.kl_div(a, b.exp(), reduction="batchmean")
    return forward + F.kl_div(b, a.exp(), reduction="batchmean")


# ------------------------------------------------------------------- cached and served teachers
def rest(log_p, **keep):
    return torch.log1p(-log_p.exp().sum(-1, **keep).clamp(max=0.999))


def with_ghost(p):
    return torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)


@heads(0, "cached top-k with a tail bucket")
def tail_bucket(log_s):
    s, t = log_s.gather(-1, IDS), TOP_LOGPROBS
    return ((t.exp() * (t - s)).sum(-1) + rest(t).exp() * (rest(t) - rest(s))).mean()


@heads(0, "a ghost token for the tail")
def ghost_token(log_s):
    s = log_s.gather(-1, IDS)
    wanted = with_ghost(TOP_LOGPROBS.exp()).clamp_min(1e-6)
    return F.kl_div(torch.cat([s, rest(s, keepdim=True)], -1), wanted, reduction="batchmean")


@heads(0, "written by chunks into a preallocated tensor")
def preallocated_chunks(h, w, g, v):
    kept = torch.zeros(TOKENS, TOP)
    for i in range(0, TOKENS, TOKENS // 2):
        rows = slice(i, i + TOKENS // 2)
        kept[rows] = (h[rows] @ w.T).log_softmax(-1).gather(-1, IDS[rows])
    return cross_entropy(TOP_LOGPROBS.exp(), kept)


# fmt: off
heads(0, "verl, SDPO: log-probabilities of a served top-k", cached_topk=lambda log_s: F.kl_div(
    log_s.gather(-1, IDS), TOP_LOGPROBS, log_target=True, reduction="batchmean"))
heads(0, "cached top-k, normalised by hand", cached_topk_by_logsumexp=lambda s: (
    -(TOP_LOGPROBS.exp() * (s.gather(-1, IDS) - s.logsumexp(-1, keepdim=True))).sum()))
heads(1, "dense target from a cached top-k", scattered_target=lambda log_s: F.kl_div(
    log_s, torch.zeros(TOKENS, VOCAB).scatter_(-1, IDS, TOP_LOGPROBS.exp()),
    reduction="batchmean"))
heads(1, "one-hot target", one_hot_target=lambda log_s: cross_entropy(
    F.one_hot(LABELS, VOCAB).float() * 0.9 + 0.1 / VOCAB, log_s))
heads(1, "top-k of the teacher's own logits, NeMo-RL", topk_in_graph=lambda t, log_s: (
    cross_entropy((x := t.topk(TOP, dim=-1)).values.softmax(-1), log_s.gather(-1, x.indices))))
heads(1, "cached top-k, rows and ids flattened to pairs", cached_pairs=lambda log_s: (
    -(TOP_LOGPROBS.exp().flatten()
      * log_s[torch.arange(TOKENS).repeat_interleave(TOP), IDS.flatten()]).sum() / TOKENS))
# fmt: on


# ------------------------------------------------------------------ other functions of logits
def chosen(log_s):
    return log_s.gather(-1, LABELS[:, None])[:, 0]


# fmt: off
heads(0, "cosine of logits", cosine=lambda s, t: (
    1 - F.cosine_similarity(s, t, dim=-1)).mean())
heads(1, "focal loss", focal=lambda log_s: (
    -((1 - (x := chosen(log_s)).exp()) ** 2 * x).mean()))
heads(1, "policy gradient with an entropy", entropy_alone=lambda p_s: (
    -(p_s * p_s.clamp_min(1e-9).log()).sum(-1).amax()))
heads(1, "a teacher shifted by a row, EAGLE-3", shifted_teacher=lambda p_t, log_s: cross_entropy(
    torch.cat([p_t[1:], torch.zeros(1, VOCAB)]), log_s))
# fmt: on
heads(0, "smooth L1 of logits", smooth_l1=lambda s, t: F.smooth_l1_loss(s, t))
# fmt: off
heads(1, "a weight of the overlap", weighted_by_overlap=lambda p_t, p_s: (
    torch.exp(-3 * torch.minimum(p_t, p_s).sum(-1).detach()) * clamped_kl(p_t, p_s)).mean())
heads(1, "pairs of crops by einsum, DINO", crops_by_einsum=lambda log_s, p_t: -torch.einsum(
    "sbk,tbk->st", log_s.view(4, TOKENS // 4, VOCAB), p_t.view(4, TOKENS // 4, VOCAB)[:2]).sum())
# fmt: on


@heads(0, "ULD: sorted probabilities")
def universal_logit_distillation(h, w, g, v):
    s = (h @ w.T).softmax(-1).sort(-1, descending=True).values
    t = (g @ v.T).softmax(-1).sort(-1, descending=True).values
    return (s - t).abs().sum(-1).mean()


@heads(0, "language-model loss alone")
def cross_entropy_alone(h, w, g, v):
    return F.cross_entropy(h @ w.T, LABELS)


# fmt: off
heads(0, "logits as the result", logits_are_returned=lambda s, p_t: (
    F.kl_div(s.log_softmax(-1), p_t.cumsum(-1)), s))
# fmt: on


@heads(2, "DPO with logits")
def dpo(log_s, log_t):
    margin = chosen(log_s) - chosen(log_t)
    return -F.logsigmoid(margin[::2] - margin[1::2]).mean()


@heads(0, "InfoNCE of hidden states")
def info_nce(h, w, g, v):
    a, b = F.normalize(h, dim=-1), F.normalize(w[:TOKENS], dim=-1)
    keys = torch.cat([b, F.normalize(w, dim=-1)])
    return F.cross_entropy(a @ keys.T / 0.07, torch.arange(TOKENS))


@heads(1, "vocabularies aligned by a slice write")
def aligned_vocabularies(s, t):
    x = torch.full((TOKENS, VOCAB), -1e4)
    x[:, :150] = t[:, :150]
    return kd(s, x)


# --------------------------------------------------------- what hides a loss from the compiler
class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher):
        ctx.save_for_backward(student, teacher)
        return kd(student, teacher)

    @staticmethod
    def backward(ctx, grad):
        student, teacher = ctx.saved_tensors
        return grad * (student.softmax(-1) - teacher.softmax(-1)) / len(student), None


# fmt: off
heads(0, "custom autograd.Function", custom_function=lambda s, t: ByHand.apply(s, t))
heads(0, "checkpoint around the loss alone", checkpointed_loss=lambda s, t: (
    checkpoint(kd, s, t, use_reentrant=False)))
# fmt: on


@heads(0, "print between logits and loss")
def printed(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    print(end="")
    return kd(s, t)


@heads(0, "a branch on a value")
def branch_on_values(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
    if s.isnan().any():
        return s.sum() * 0
    return F.kl_div(s, t, reduction="batchmean")


@heads(0, "metrics by item()")
def item_between(h, w, g, v):
    s = (h @ w.T).log_softmax(-1)
    scale = 1.0 if s.detach().amax().item() < 0 else 2.0
    return scale * F.kl_div(s, (g @ v.T).softmax(-1), reduction="batchmean")


# ------------------------------------------------------------------------------------ attention
def future():
    return torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)


# fmt: off
attention(1, "TinyBERT on probabilities",
          attention_kl_of_probabilities=lambda p_t, p_s: clamped_kl(p_t, p_s).mean())
attention(0, "MSE of raw scores, TinyBERT", mse_of_scores=lambda s, t: (
    (s - t).pow(2).sum().sqrt()))
attention(0, "norm of differences of scores", norm_of_scores=lambda s, t: (
    torch.linalg.matrix_norm(s - t).mean()))
attention(1, "an indexer that ranks", indexer_topk=lambda t, p_s: (
    -p_s.sum(1).gather(-1, t.sum(1).topk(8, dim=-1).indices).clamp_min(1e-9).log().mean()))
attention(0, "contrastive loss over pairs", pairwise_distances=lambda q, k, r, u: (
    torch.cdist(q, k) - torch.cdist(r, u)).abs().amax())
# fmt: on


@attention(0, "dropout of the student's probabilities")
def dropout_before_the_loss(q, k, r, u):
    p = (r @ u.mT).softmax(-1)
    s = F.dropout((q @ k.mT).softmax(-1), 0.1)
    return (p * (p + 1e-8).log() - p * (s + 1e-8).log()).sum(-1).mean()


@attention(0, "attention alone, nothing is distilled")
def attention_alone(q, k, r, u):
    return (((q @ k.mT).softmax(-1) @ r) * u).sum()


@attention(0, "Gram matrices, DINOv3")
def gram(q, k, r, u):
    a, b = F.normalize(q, dim=-1), F.normalize(r, dim=-1)
    s, t = a @ a.mT, b @ b.mT
    s = s.clone()
    s[s < 0] = 0
    return ((s - t) ** 2).max()


@attention(1, "indexer of Megatron, in-place mask")
def masked_in_place(t, s):
    t += future()
    p, log_s = t.softmax(-1), (s + future()).log_softmax(-1)
    return (p[:, :, 1:] * -log_s[:, :, 1:].clamp_min(-50)).sum(-1).mean()


@attention(1, "an indexer of Megatron-core: relu and in-place masks")
def indexer_in_place(t, s):
    t += future()
    s = torch.relu(s) + future()
    return (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1)).clamp(-50, 50)).sum(-1).mean()
