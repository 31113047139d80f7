"""Losses as users of 2026 write them: what the report has to be silent about in none of them.

Every program takes hidden states and LM heads, or queries and keys, at sizes of which only scores
and logits are large: what is as large as half of them is one. ``fuses`` is the number of losses
that operators compute (with ``min_mib=0``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TOKENS, VOCAB, HIDDEN, TEACHER_HIDDEN, TOP = 48, 160, 4, 5, 6
HEADS, LENGTH, HEAD_DIM = 2, 64, 4
LOGITS, SCORES = TOKENS * VOCAB, HEADS * LENGTH * LENGTH


@dataclass(frozen=True)
class UserLoss:
    fn: Callable[..., Any]
    fuses: int
    style: str  # of whose code
    is_attention: bool

    @property
    def large(self) -> int:
        """Entries from which a tensor is score- or logit-sized."""
        return (SCORES if self.is_attention else LOGITS) // 2

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        if self.is_attention:
            made = [draw(1, HEADS, LENGTH, HEAD_DIM) for _ in range(4)]
        else:
            made = [draw(TOKENS, HIDDEN), draw(VOCAB, HIDDEN)]
            made += [draw(TOKENS, TEACHER_HIDDEN), draw(VOCAB, TEACHER_HIDDEN)]
        return [x.requires_grad_(i < 2) for i, x in enumerate(made)]


USER_LOSSES: dict[str, UserLoss] = {}


def heads(fuses: int, style: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return _registers(fuses, style, False)


def attention(fuses: int, style: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return _registers(fuses, style, True)


def _registers(fuses: int, style: str, is_attention: bool) -> Callable[..., Any]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        USER_LOSSES[fn.__name__] = UserLoss(fn, fuses, style, is_attention)
        return fn

    return register


_generator = torch.Generator().manual_seed(1)
LABELS = torch.randint(0, VOCAB, (TOKENS,), generator=_generator)
IDS = torch.rand(TOKENS, VOCAB, generator=_generator).topk(TOP).indices
TOP_LOGPROBS = torch.randn(TOKENS, TOP, generator=_generator).log_softmax(-1) - 0.1


# ------------------------------------------------------------------ distributions of two LM heads
@heads(1, "TRL GKD")
def generalized_jsd(h, w, g, v, beta=0.5):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
    m = torch.logsumexp(torch.stack([s + math.log(1 - beta), t + math.log(beta)]), dim=0)
    kl_t = F.kl_div(m, t, reduction="none", log_target=True)
    kl_s = F.kl_div(m, s, reduction="none", log_target=True)
    return (beta * kl_t + (1 - beta) * kl_s).sum(-1).mean()


@heads(1, "NeMo-RL distillation, reverse KL")
def reverse_kl(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
    return (s.exp() * (s - t)).sum(-1).mean()


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


@heads(1, "GRPO: KL and an entropy bonus")
def kl_and_entropy_bonus(h, w, g, v):
    logits = h @ w.T
    s, t = logits.log_softmax(-1), (g @ v.T).log_softmax(-1)
    kl = (s.exp() * (s - t)).sum(-1)
    entropy = -(s.exp() * s).sum(-1)
    return (kl - 0.01 * entropy).mean()


@heads(2, "R-Drop")
def r_drop(h, w, g, v):
    a, b = (h @ w.T).log_softmax(-1), ((h * 1.1) @ w.T).log_softmax(-1)
    forward = F.kl_div(a, b.exp(), reduction="batchmean")
    return forward + F.kl_div(b, a.exp(), reduction="batchmean")


@heads(1, "swapped arguments of kl_div")
def swapped(h, w, g, v):
    return F.kl_div((h @ w.T).softmax(-1), (g @ v.T).softmax(-1), reduction="batchmean")


@heads(1, "Bhattacharyya")
def bhattacharyya(h, w, g, v):
    p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
    return -(p.sqrt() * q.sqrt()).sum(-1).log().mean()


@heads(1, "acceptance of a draft model")
def acceptance(h, w, g, v):
    p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
    return 1 - torch.minimum(p, q).sum(-1).mean()


# ------------------------------------------------------------------- cached and served teachers
@heads(0, "verl, SDPO: log-probabilities of a served top-k")
def cached_topk(h, w, g, v):
    s = (h @ w.T).log_softmax(-1).gather(-1, IDS)
    return F.kl_div(s, TOP_LOGPROBS, log_target=True, reduction="batchmean")


@heads(0, "cached top-k, normalised by hand")
def cached_topk_by_logsumexp(h, w, g, v):
    z = h @ w.T
    return -(TOP_LOGPROBS.exp() * (z.gather(-1, IDS) - z.logsumexp(-1, keepdim=True))).sum()


@heads(0, "cached top-k with a tail bucket")
def tail_bucket(h, w, g, v):
    s = (h @ w.T).log_softmax(-1).gather(-1, IDS)
    rest_s = torch.log1p(-s.exp().sum(-1).clamp(max=0.999))
    rest_t = torch.log1p(-TOP_LOGPROBS.exp().sum(-1).clamp(max=0.999))
    kl = (TOP_LOGPROBS.exp() * (TOP_LOGPROBS - s)).sum(-1)
    return (kl + rest_t.exp() * (rest_t - rest_s)).mean()


@heads(1, "dense target from a cached top-k")
def scattered_target(h, w, g, v):
    target = torch.zeros(TOKENS, VOCAB).scatter_(-1, IDS, TOP_LOGPROBS.exp())
    return F.kl_div((h @ w.T).log_softmax(-1), target, reduction="batchmean")


@heads(1, "one-hot target")
def one_hot_target(h, w, g, v):
    target = F.one_hot(LABELS, VOCAB).float() * 0.9 + 0.1 / VOCAB
    return -(target * (h @ w.T).log_softmax(-1)).sum(-1).mean()


@heads(1, "top-k of the teacher's own logits, NeMo-RL")
def topk_in_graph(h, w, g, v):
    t = (g @ v.T).topk(TOP, dim=-1)
    s = (h @ w.T).log_softmax(-1).gather(-1, t.indices)
    return -(t.values.softmax(-1) * s).sum(-1).mean()


@heads(1, "cached top-k, rows and ids flattened to pairs")
def cached_pairs(h, w, g, v):
    s = (h @ w.T).log_softmax(-1)
    rows = torch.arange(TOKENS).repeat_interleave(TOP)
    return -(TOP_LOGPROBS.exp().flatten() * s[rows, IDS.flatten()]).sum() / TOKENS


@heads(0, "a ghost token for the tail")
def ghost_token(h, w, g, v):
    s = (h @ w.T).log_softmax(-1).gather(-1, IDS)
    rest = torch.log1p(-s.exp().sum(-1, keepdim=True).clamp(max=0.999))
    wanted = TOP_LOGPROBS.exp()
    wanted = torch.cat([wanted, 1 - wanted.sum(-1, keepdim=True)], -1)
    return F.kl_div(torch.cat([s, rest], -1), wanted.clamp_min(1e-6), reduction="batchmean")


@heads(0, "written by chunks into a preallocated tensor")
def preallocated_chunks(h, w, g, v):
    kept = torch.zeros(TOKENS, TOP)
    for i in range(0, TOKENS, TOKENS // 2):
        rows = slice(i, i + TOKENS // 2)
        kept[rows] = (h[rows] @ w.T).log_softmax(-1).gather(-1, IDS[rows])
    return -(TOP_LOGPROBS.exp() * kept).sum(-1).mean()


# ------------------------------------------------------------------ other functions of logits
@heads(0, "ULD: sorted probabilities")
def universal_logit_distillation(h, w, g, v):
    s = (h @ w.T).softmax(-1).sort(-1, descending=True).values
    t = (g @ v.T).softmax(-1).sort(-1, descending=True).values
    return (s - t).abs().sum(-1).mean()


@heads(0, "cosine of logits")
def cosine(h, w, g, v):
    return (1 - F.cosine_similarity(h @ w.T, g @ v.T, dim=-1)).mean()


@heads(0, "language-model loss alone")
def cross_entropy_alone(h, w, g, v):
    return F.cross_entropy(h @ w.T, LABELS)


@heads(1, "focal loss")
def focal(h, w, g, v):
    s = (h @ w.T).log_softmax(-1).gather(-1, LABELS[:, None])[:, 0]
    return -((1 - s.exp()) ** 2 * s).mean()


@heads(2, "DPO with logits")
def dpo(h, w, g, v):
    def logp(x, head):
        return (x @ head.T).log_softmax(-1).gather(-1, LABELS[:, None])[:, 0]

    margin = logp(h, w) - logp(g, v)
    return -F.logsigmoid(margin[::2] - margin[1::2]).mean()


@heads(1, "policy gradient with an entropy")
def entropy_alone(h, w, g, v):
    p = (h @ w.T).softmax(-1)
    return -(p * p.clamp_min(1e-9).log()).sum(-1).amax()


@heads(0, "logits as the result")
def logits_are_returned(h, w, g, v):
    logits = h @ w.T
    return F.kl_div(logits.log_softmax(-1), (g @ v.T).softmax(-1).cumsum(-1)), logits


@heads(0, "InfoNCE of hidden states")
def info_nce(h, w, g, v):
    a, b = F.normalize(h, dim=-1), F.normalize(w[:TOKENS], dim=-1)
    keys = torch.cat([b, F.normalize(w, dim=-1)])
    return F.cross_entropy(a @ keys.T / 0.07, torch.arange(TOKENS))


@heads(1, "a teacher shifted by a row, EAGLE-3")
def shifted_teacher(h, w, g, v):
    p = (g @ v.T).softmax(-1)
    p = torch.cat([p[1:], torch.zeros(1, VOCAB)])
    return -(p * (h @ w.T).log_softmax(-1)).sum(-1).mean()


@heads(1, "vocabularies aligned by a slice write")
def aligned_vocabularies(h, w, g, v):
    t = torch.full((TOKENS, VOCAB), -1e4)
    t[:, :150] = (g @ v.T)[:, :150]
    return F.kl_div((h @ w.T).log_softmax(-1), t.softmax(-1), reduction="batchmean")


@heads(1, "a weight of the overlap")
def weighted_by_overlap(h, w, g, v):
    p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
    lam = torch.exp(-3 * torch.minimum(p, q).sum(-1).detach())
    kl = (p * (p.clamp_min(1e-9).log() - q.clamp_min(1e-9).log())).sum(-1)
    return (lam * kl).mean()


@heads(0, "smooth L1 of logits")
def smooth_l1(h, w, g, v):
    return F.smooth_l1_loss(h @ w.T, g @ v.T)


@heads(1, "pairs of crops by einsum, DINO")
def crops_by_einsum(h, w, g, v):
    s = (h @ w.T).log_softmax(-1).view(4, TOKENS // 4, VOCAB)
    t = (g @ v.T).softmax(-1).view(4, TOKENS // 4, VOCAB)[:2]
    return -torch.einsum("sbk,tbk->st", s, t).sum()


# --------------------------------------------------------- what hides a loss from the compiler
class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, student, teacher):
        ctx.save_for_backward(student, teacher)
        return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")

    @staticmethod
    def backward(ctx, grad):
        student, teacher = ctx.saved_tensors
        return grad * (student.softmax(-1) - teacher.softmax(-1)) / len(student), None


@heads(0, "custom autograd.Function")
def custom_function(h, w, g, v):
    return ByHand.apply(h @ w.T, g @ v.T)


@heads(0, "checkpoint around the loss alone")
def checkpointed_loss(h, w, g, v):
    def loss(a, b):
        return F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")

    return checkpoint(loss, h @ w.T, g @ v.T, use_reentrant=False)


@heads(0, "print between logits and loss")
def printed(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    print(end="")
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


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
@attention(1, "TinyBERT on probabilities")
def attention_kl_of_probabilities(q, k, r, u):
    p, s = (r @ u.mT).softmax(-1), (q @ k.mT).softmax(-1)
    return (p * (p.clamp_min(1e-9).log() - s.clamp_min(1e-9).log())).sum(-1).mean()


@attention(0, "MSE of raw scores, TinyBERT")
def mse_of_scores(q, k, r, u):
    return (q @ k.mT - r @ u.mT).pow(2).sum().sqrt()


@attention(0, "norm of differences of scores")
def norm_of_scores(q, k, r, u):
    return torch.linalg.matrix_norm(q @ k.mT - r @ u.mT).mean()


@attention(0, "Gram matrices, DINOv3")
def gram(q, k, r, u):
    a, b = F.normalize(q, dim=-1), F.normalize(r, dim=-1)
    s, t = a @ a.mT, b @ b.mT
    s = s.clone()
    s[s < 0] = 0
    return ((s - t) ** 2).max()


@attention(1, "an indexer that ranks")
def indexer_topk(q, k, r, u):
    chosen = (r @ u.mT).sum(1).topk(8, dim=-1).indices
    s = (q @ k.mT).softmax(-1).sum(1)
    return -s.gather(-1, chosen).clamp_min(1e-9).log().mean()


@attention(1, "indexer of Megatron, in-place mask")
def masked_in_place(q, k, r, u):
    t = r @ u.mT
    t += torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)
    s = (q @ k.mT) + torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)
    p, log_s = t.softmax(-1), s.log_softmax(-1)
    return (p[:, :, 1:] * -log_s[:, :, 1:].clamp_min(-50)).sum(-1).mean()


@attention(0, "dropout of the student's probabilities")
def dropout_before_the_loss(q, k, r, u):
    p = (r @ u.mT).softmax(-1)
    s = F.dropout((q @ k.mT).softmax(-1), 0.1)
    return (p * (p + 1e-8).log() - p * (s + 1e-8).log()).sum(-1).mean()


@attention(0, "contrastive loss over pairs")
def pairwise_distances(q, k, r, u):
    return (torch.cdist(q, k) - torch.cdist(r, u)).abs().amax()


@attention(0, "attention alone, nothing is distilled")
def attention_alone(q, k, r, u):
    return (((q @ k.mT).softmax(-1) @ r) * u).sum()


@attention(1, "an indexer of Megatron-core: relu and in-place masks")
def indexer_in_place(q, k, r, u):
    mask = torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)
    t = r @ u.mT
    t += mask
    s = torch.relu(q @ k.mT) + mask
    return (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1)).clamp(-50, 50)).sum(-1).mean()
