"""More losses after public code of 2026: trainers of language models, vision, drafts, hooks.

Importing this module adds them to `USER_LOSSES`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.support.losses import kd
from tests.support.user_losses import (
    IDS,
    LABELS,
    TOP_LOGPROBS,
    VOCAB,
    attention,
    chosen,
    cross_entropy,
    heads,
    jsd,
    kl_of_logs,
)

KEEP = LABELS % 3 > 0
DRAFT = torch.arange(VOCAB) % 2 == 0  # the vocabulary of a draft model


@heads(0, "TRL's GKDTrainer: rows by a mask in a called function")
def gkd_of_trl(h, w, g, v):
    def generalized_jsd(s, t, beta):
        weight = torch.tensor(beta, dtype=s.dtype)
        logs = s.log_softmax(-1), t.log_softmax(-1)
        found = jsd(*logs, torch.log(1 - weight), torch.log(weight), weight)
        return found[KEEP].sum() / KEEP.sum()

    return generalized_jsd(h @ w.T, g @ v.T, 0.5)


@heads(0, "GRPO: selective_log_softmax and the k3 estimate")
def selective_log_softmax(s, t):
    difference = (chosen(t) - torch.logsumexp(t, -1)) - (chosen(s) - torch.logsumexp(s, -1))
    return (difference.exp() - difference - 1).mean()


@heads(1, "Liger's tests: JSD by lerp, a temperature, ignored labels")
def jsd_by_lerp(s, t):
    s, t = ((x / 2.0).log_softmax(-1) for x in (s, t))
    m = torch.lerp(s.exp(), t.exp(), 0.5).log()
    rows = 0.5 * kl_of_logs(m, t).sum(-1) + 0.5 * kl_of_logs(m, s).sum(-1)
    return rows.masked_fill(~KEEP, 0.0).sum() / KEEP.sum()


CENTER = torch.zeros(1, VOCAB)


@heads(0, "DINO: a center that is updated in place")
def center_in_place(s, t):
    p = ((t - CENTER) / 0.04).softmax(-1).detach()
    loss = cross_entropy(p, (s / 0.1).log_softmax(-1))
    with torch.no_grad():
        CENTER.mul_(0.9).add_(t.mean(0, keepdim=True) * 0.1)
    return loss


# fmt: off
heads(2, "DPO: log-ratios of chosen tokens", log_ratios=lambda log_s, log_t: (
    -F.logsigmoid(0.1 * (chosen(log_s) - chosen(log_t))).mean()))
heads(2, "verl: the entropy from logits", entropy_from_logits=lambda s: (
    s.logsumexp(-1) - (s.softmax(-1) * s).sum(-1)).mean())
heads(0, "verl: the KL at the ids of a served top-k", kl_at_served_ids=lambda log_s: (
    kl_of_logs(log_s.gather(-1, IDS), TOP_LOGPROBS).sum(-1).mean()))
heads(1, "iBOT: masked patches", masked_patches=lambda s, t: (
    -(((t / 0.07).softmax(-1) * (s / 0.1).log_softmax(-1)).sum(-1) * KEEP).sum()
    / KEEP.sum().clamp(min=1.0)))
heads(1, "speculative decoding: the acceptance rate", acceptance_rate=lambda p_s, p_t: (
    torch.minimum(torch.ones_like(p_t), p_t / p_s).mul(p_s).sum(-1).mean()))
heads(1, "EAGLE: cross-entropy and a smooth L1 of hidden states", eagle=lambda h, g, p_t, s: (
    cross_entropy(p_t.detach(), torch.nn.LogSoftmax(dim=-1)(s))
    + 0.1 * torch.nn.SmoothL1Loss(reduction="none")(h, g[:, :4]).mean()))
heads(0, "EAGLE-3: the teacher's logits in the draft's vocabulary, by a boolean mask",
      draft_vocabulary=lambda h, w, g, v: cross_entropy(
          (g @ v.T)[..., DRAFT].softmax(-1).detach(),
          (h @ w[DRAFT].T).log_softmax(-1)))
# fmt: on


@heads(1, "DistiLLM: skewed forward KL with masked infinities")
def skewed(s, t, lam=0.1):
    p = F.softmax(t, dim=-1, dtype=torch.float32)
    mixed = lam * p + (1 - lam) * F.softmax(s, dim=-1, dtype=torch.float32)
    return -torch.masked_fill(p * mixed.log(), torch.isinf(s), 0).sum(-1).mean()


@heads(0, "NKD: the target's probability apart, others by a mask")
def others_by_mask(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    labels = LABELS[:, None]
    p_s, p_t = s.softmax(1).gather(1, labels), t.softmax(1).gather(1, labels)
    keep = torch.ones_like(s, dtype=torch.bool).scatter(1, labels, False)
    s, t = s[keep].view(len(h), -1), t[keep].view(len(h), -1)
    return kd(s, t) - (p_t * p_s.log()).mean()


def pearson(a, b):
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return F.cosine_similarity(a, b, dim=-1).mean()


# fmt: off
heads(0, "DIST: correlations of probabilities, over classes and over the batch",
      correlations=lambda p_s, p_t: 2 - pearson(p_s, p_t) - pearson(p_s.T, p_t.T))
heads(0, "a Wasserstein distance by cumulative sums", wasserstein=lambda p_s, p_t: (
    p_s.cumsum(-1) - p_t.cumsum(-1)).abs().mean())
heads(1, "a metric of agreement next to the loss", agreement=lambda s, t: (
    kd(s, t), (s.argmax(-1) == t.argmax(-1)).float().mean()))
heads(0, "smooth L1 of log-probabilities",
      smooth_l1_of_logs=lambda log_s, log_t: F.smooth_l1_loss(log_s, log_t))
# fmt: on


KEPT: dict[str, torch.Tensor] = {}
HEAD = torch.nn.Identity()
HEAD.register_forward_hook(lambda module, args, output: KEPT.update(logits=output))


@heads(1, "a hook of a module that keeps the logits")
def hook_of_a_module(h, w, g, v):
    HEAD(h @ w.T)
    return kd(KEPT["logits"], g @ v.T)


@attention(1, "output_attentions: probabilities plus an eps, and the layer's output")
def maps_with_eps(q, k, r, u):
    p = (q @ k.mT / math.sqrt(4)).softmax(-1)
    t = (r @ u.mT / math.sqrt(4)).softmax(-1)
    outputs = F.mse_loss(p @ k, (t @ u).detach())
    return F.kl_div((p + 1e-8).log(), t, reduction="batchmean") + outputs


@attention(0, "RKD: pairwise distances by cdist, normalized by the mean of those above 0")
def normalized_distances(q, k, r, u):
    def normalized(x):
        d = torch.cdist(x, x)
        return d / d[d > 0].mean()

    return F.smooth_l1_loss(normalized(q[0]), normalized(r[0]))
