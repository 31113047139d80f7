"""More losses after public code of 2026: trainers of language models, vision, drafts, hooks.

Importing this module adds them to `USER_LOSSES`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.support.user_losses import IDS, LABELS, TOP_LOGPROBS, VOCAB, attention, heads

KEEP = LABELS % 3 > 0
DRAFT = torch.arange(VOCAB) % 2 == 0  # the vocabulary of a draft model


@heads(0, "TRL's GKDTrainer: rows by a mask in a called function")
def gkd_of_trl(h, w, g, v):
    def generalized_jsd(s, t, beta):
        s, t = s.log_softmax(-1), t.log_softmax(-1)
        weight = torch.tensor(beta, dtype=s.dtype)
        mixed = [s + torch.log(1 - weight), t + torch.log(weight)]
        m = torch.logsumexp(torch.stack(mixed), dim=0)
        of_t = F.kl_div(m, t, reduction="none", log_target=True)
        of_s = F.kl_div(m, s, reduction="none", log_target=True)
        return (weight * of_t + (1 - weight) * of_s)[KEEP].sum() / KEEP.sum()

    return generalized_jsd(h @ w.T, g @ v.T, 0.5)


@heads(2, "DPO: log-ratios of chosen tokens")
def log_ratios(h, w, g, v):
    s, t = (x.log_softmax(-1).gather(-1, LABELS[:, None]) for x in (h @ w.T, g @ v.T))
    return -F.logsigmoid(0.1 * (s - t)).mean()


@heads(0, "GRPO: selective_log_softmax and the k3 estimate")
def selective_log_softmax(h, w, g, v):
    def chosen(logits):
        return logits.gather(-1, LABELS[:, None])[:, 0] - torch.logsumexp(logits, -1)

    difference = chosen(g @ v.T) - chosen(h @ w.T)
    return (difference.exp() - difference - 1).mean()


@heads(2, "verl: the entropy from logits")
def entropy_from_logits(h, w, g, v):
    logits = h @ w.T
    return (logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)).mean()


@heads(0, "verl: the KL at the ids of a served top-k")
def kl_at_served_ids(h, w, g, v):
    s = (h @ w.T).log_softmax(-1).gather(-1, IDS)
    return F.kl_div(s, TOP_LOGPROBS, log_target=True, reduction="none").sum(-1).mean()


@heads(1, "Liger's tests: JSD by lerp, a temperature, ignored labels")
def jsd_by_lerp(h, w, g, v):
    s, t = ((x @ y.T / 2.0).log_softmax(-1) for x, y in ((h, w), (g, v)))
    m = torch.lerp(s.exp(), t.exp(), 0.5).log()
    kl = torch.nn.KLDivLoss(reduction="none", log_target=True)
    rows = 0.5 * kl(m, t).sum(-1) + 0.5 * kl(m, s).sum(-1)
    return rows.masked_fill(~KEEP, 0.0).sum() / KEEP.sum()


CENTER = torch.zeros(1, VOCAB)


@heads(0, "DINO: a center that is updated in place")
def center_in_place(h, w, g, v):
    t = g @ v.T
    p = ((t - CENTER) / 0.04).softmax(-1).detach()
    loss = torch.sum(-p * (h @ w.T / 0.1).log_softmax(-1), -1).mean()
    with torch.no_grad():
        CENTER.mul_(0.9).add_(t.mean(0, keepdim=True) * 0.1)
    return loss


@heads(1, "iBOT: masked patches")
def masked_patches(h, w, g, v):
    rows = ((g @ v.T / 0.07).softmax(-1) * (h @ w.T / 0.1).log_softmax(-1)).sum(-1)
    return -(rows * KEEP).sum() / KEEP.sum().clamp(min=1.0)


@heads(1, "speculative decoding: the acceptance rate")
def acceptance(h, w, g, v):
    q, p = (h @ w.T).softmax(-1), (g @ v.T).softmax(-1)
    return torch.minimum(torch.ones_like(p), p / q).mul(q).sum(-1).mean()


@heads(1, "EAGLE: cross-entropy and a smooth L1 of hidden states")
def eagle(h, w, g, v):
    values = torch.nn.SmoothL1Loss(reduction="none")(h, g[:, :4]).mean()
    p = (g @ v.T).softmax(-1).detach()
    return -torch.sum(p * torch.nn.LogSoftmax(dim=-1)(h @ w.T), -1).mean() + 0.1 * values


@heads(0, "EAGLE-3: the teacher's logits in the draft's vocabulary, by a boolean mask")
def draft_vocabulary(h, w, g, v):
    p = (g @ v.T)[..., DRAFT].softmax(-1).detach()
    return -(p * (h @ w[DRAFT].T).log_softmax(-1)).sum(-1).mean()


@heads(1, "DistiLLM: skewed forward KL with masked infinities")
def skewed(h, w, g, v, lam=0.1):
    s, t = h @ w.T, g @ v.T
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
    rest = F.kl_div(s.log_softmax(1), t.softmax(1), reduction="batchmean")
    return rest - (p_t * p_s.log()).mean()


@heads(0, "DIST: correlations of probabilities, over classes and over the batch")
def correlations(h, w, g, v):
    def pearson(a, b):
        a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
        return F.cosine_similarity(a, b, dim=-1).mean()

    s, t = (h @ w.T).softmax(1), (g @ v.T).softmax(1)
    return 2 - pearson(s, t) - pearson(s.T, t.T)


@heads(0, "a Wasserstein distance by cumulative sums")
def wasserstein(h, w, g, v):
    s, t = (h @ w.T).softmax(-1), (g @ v.T).softmax(-1)
    return (s.cumsum(-1) - t.cumsum(-1)).abs().mean()


@heads(1, "a metric of agreement next to the loss")
def agreement(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    loss = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    return loss, (s.argmax(-1) == t.argmax(-1)).float().mean()


@heads(0, "smooth L1 of log-probabilities")
def smooth_l1_of_logs(h, w, g, v):
    return F.smooth_l1_loss((h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1))


KEPT: dict[str, torch.Tensor] = {}
HEAD = torch.nn.Identity()
HEAD.register_forward_hook(lambda module, args, output: KEPT.update(logits=output))


@heads(1, "a hook of a module that keeps the logits")
def hook_of_a_module(h, w, g, v):
    HEAD(h @ w.T)
    t = (g @ v.T).softmax(-1)
    return F.kl_div(KEPT["logits"].log_softmax(-1), t, reduction="batchmean")


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
