"""Losses on a cached or served teacher: ids and log-probabilities of its top entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.of_2026.registry import (
    EAGER,
    IDS,
    KEEP,
    LABELS,
    LOG_P,
    LOG_P_PADDED,
    PADDED,
    REPEATED,
    ROW,
    TOKENS,
    TOP,
    VOCAB,
    loss,
)

OF_ANSWERS = LABELS.masked_fill(~KEEP, -100)


# ------------------------------------------------------------------ entries at given ids
@loss(ROW, style="Cartridges", findings=True)
def cross_entropy_at_ids(h, w):
    return -(LOG_P.exp() * (h @ w.T).log_softmax(-1).gather(-1, IDS)).sum(-1).mean()


@loss(ROW, style="NeMo-RL: the normaliser by hand", findings=True)
def entries_minus_logsumexp(h, w):
    z = h @ w.T
    at_ids = z.gather(-1, IDS) - z.logsumexp(-1, keepdim=True)
    return -(LOG_P.exp() * at_ids).sum(-1).mean()


@loss(ROW, style="EasyDistill: kl_div of entries", findings=True)
def kl_div_at_ids(h, w):
    s = (h @ w.T).log_softmax(-1).gather(-1, IDS)
    return F.kl_div(s, LOG_P, log_target=True, reduction="batchmean")


@loss(ROW, style="an id that stands twice", findings=True)
def repeated_ids(h, w):
    s = (h @ w.T).log_softmax(-1).gather(-1, REPEATED)
    return (LOG_P.exp() * (LOG_P - s)).sum(-1).mean()


@loss(ROW, style="entries of padding have a log-probability of -inf", findings=True)
def padded_ids(h, w):
    s = (h @ w.T).log_softmax(-1).gather(-1, PADDED)
    p = LOG_P_PADDED.exp()
    return torch.where(p > 0, p * (LOG_P_PADDED - s), 0.0).sum(-1).mean()


@loss(ROW, style="Cartridges: pairs of a row and an id", findings=True)
def pairs_of_rows_and_ids(h, w):
    s = (h @ w.T).log_softmax(-1)
    rows = torch.arange(TOKENS).repeat_interleave(TOP)
    return -(LOG_P.exp().flatten() * s[rows, IDS.flatten()]).sum() / TOKENS


@loss(ROW, style="TRL's SDPO: a bucket for the tail", findings=True)
def tail_bucket(h, w):
    def with_tail(x):
        rest = x.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
        return torch.cat([x, torch.log(-torch.expm1(rest))], -1)

    s = with_tail((h @ w.T).log_softmax(-1).gather(-1, IDS))
    return F.kl_div(s, with_tail(LOG_P), log_target=True, reduction="none").sum(-1).mean()


@loss(ROW, style="a ghost token of the rest by cat", findings=True)
def ghost_token(h, w):
    s = (h @ w.T).softmax(-1).gather(-1, IDS)
    p = LOG_P.exp()
    s, p = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (s, p))
    return -(p * s.clamp_min(1e-8).log()).sum(-1).mean()


@loss(ROW, style="chunks of tokens into a buffer", findings=True)
def chunks_into_a_buffer(h, w):
    kept = torch.empty(TOKENS, TOP)
    for i in range(0, TOKENS, TOKENS // 2):
        rows = slice(i, i + TOKENS // 2)
        kept[rows] = (h[rows] @ w.T).log_softmax(-1).gather(-1, IDS[rows])
    return -(LOG_P.exp() * kept).sum(-1).mean()


@loss(
    ROW,
    EAGER,
    style="NeMo-RL: the top-k of the teacher in the graph",
    findings=True,
    reason="top-k reads whole logits",
)
def top_of_the_teacher(h, w, g, v):
    t = (g @ v.T).detach()
    values, ids = t.topk(TOP, dim=-1)
    s = (h @ w.T).log_softmax(-1).gather(-1, ids)
    return -(values.softmax(-1) * s).sum(-1).mean()


@loss(ROW, style="verl: metrics next to the loss", findings=True)
def with_masses(h, w):
    s = (h @ w.T).log_softmax(-1).gather(-1, IDS)
    losses = (LOG_P.exp() * (LOG_P - s)).sum(-1)
    return losses[KEEP].mean(), s.exp().sum(-1).detach(), LOG_P.exp().sum(-1)


@loss(ROW, style="a dense target by scatter_", findings=True)
def scattered_target(h, w):
    target = torch.zeros(TOKENS, VOCAB).scatter_(-1, IDS, LOG_P.exp())
    return F.kl_div((h @ w.T).log_softmax(-1), target, reduction="batchmean")


# ------------------------------------------------------------------ trainers' own
@loss(ROW, style="verl: clamped log-probabilities")
def verl_clamped(h, w):
    s = (h @ w.T)[None].log_softmax(-1).gather(-1, IDS[None]).clamp_min(-10.0)
    t = LOG_P[None].clamp_min(-10.0)
    return (t.exp() * (t - s)).sum(-1).masked_select(KEEP[None]).mean()


@loss(ROW, style="NeMo-RL: renormalised to the entries, temperature")
def nemo_renormalised(h, w):
    s = ((h @ w.T).gather(-1, IDS) / 2.0).log_softmax(-1)
    t = (LOG_P / 2.0).log_softmax(-1)
    per_token = (t.exp() * (t - s)).sum(-1)
    return (per_token * KEEP).sum() / KEEP.sum().clamp(min=1)


@loss(ROW, style="NeMo-RL: mixed KL with the entropies of both")
def nemo_mixed(h, w):
    full = (h @ w.T).log_softmax(-1)
    s, p = full.gather(-1, IDS), LOG_P.exp()
    entropy = -(full.exp() * full).sum(-1)
    rest = entropy + (s.exp() * s).sum(-1)
    forward = (p * (LOG_P - s)).sum(-1)
    reverse = (s.exp() * (s - LOG_P)).sum(-1) + 0.1 * rest
    return (0.5 * forward + 0.5 * reverse)[KEEP].mean()


@loss(ROW, style="VeOmni: reverse KL of renormalised entries")
def veomni_reverse(h, w):
    s = (h @ w.T).gather(-1, IDS).log_softmax(-1)
    t = LOG_P - LOG_P.logsumexp(-1, keepdim=True)
    return (s.exp() * (s - t)).sum(-1).mean()


@loss(ROW, style="SDPO: JS of entries and a tail")
def sdpo_js(h, w):
    def with_tail(x):
        rest = x.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
        return torch.cat([x, torch.log(-torch.expm1(rest))], -1)

    s, t = with_tail((h @ w.T).log_softmax(-1).gather(-1, IDS)), with_tail(LOG_P)
    m = torch.logsumexp(torch.stack([s + torch.log(torch.tensor(0.5)), t - 0.6931471805599453]), 0)
    kl_s = F.kl_div(m, s, reduction="none", log_target=True).sum(-1)
    kl_t = F.kl_div(m, t, reduction="none", log_target=True).sum(-1)
    return (0.5 * (kl_s + kl_t)).mean()


@loss(
    ROW,
    EAGER,
    style="SDPO: the student's own top-k in the graph",
    reason="top-k reads whole logits",
)
def sdpo_students_top(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
    top, ids = s.topk(TOP, dim=-1)
    return (top.exp() * (top - t.gather(-1, ids))).sum(-1).mean()


@loss(ROW, style="axolotl: cached entries and labels")
def axolotl_with_labels(h, w):
    z = h @ w.T
    entries = torch.gather(z, -1, IDS).to(torch.float32) - torch.logsumexp(z, -1, keepdim=True)
    kd = -(LOG_P.exp() * entries * KEEP[:, None]).sum() / KEEP.sum()
    return 0.7 * kd + 0.3 * F.cross_entropy(z, OF_ANSWERS)


@loss(
    EAGER,
    reason="top-k reads whole logits",
    style="overlap of the student's and the teacher's top entries",
)
def with_overlap(h, w):
    s = (h @ w.T).log_softmax(-1)
    chosen = s.detach().topk(TOP, dim=-1).indices
    overlap = (chosen[:, :, None] == IDS[:, None, :]).any(-1).float().mean()
    return -(LOG_P.exp() * s.gather(-1, IDS)).sum(-1).mean(), overlap


@loss(ROW, style="chunks of tokens, concatenated")
def chunks_concatenated(h, w):
    parts = [
        (a @ w.T).log_softmax(-1).gather(-1, i)
        for a, i in zip(h.chunk(2), IDS.chunk(2), strict=True)
    ]
    return -(LOG_P.exp() * torch.cat(parts)).sum(-1).mean()


@loss(ROW, style="by indexing: rows of an arange")
def by_advanced_indexing(h, w):
    s = (h @ w.T).log_softmax(-1)[torch.arange(TOKENS)[:, None], IDS]
    return -(LOG_P.exp() * s).sum(-1).mean()


@loss(ROW, style="by take_along_dim, sequences of a batch")
def by_take_along_dim(h, w):
    z = (h @ w.T).view(2, TOKENS // 2, VOCAB)
    ids, p = IDS.view(2, -1, TOP), LOG_P.exp().view(2, -1, TOP)
    s = torch.take_along_dim(z, ids, dim=-1) - z.logsumexp(-1, keepdim=True)
    return -(p * s).sum(-1).mean(-1).mean()


@loss(ROW, style="a loop over entries")
def a_loop_over_entries(h, w):
    s = (h @ w.T).log_softmax(-1)
    total = s.new_zeros(TOKENS)
    for i in range(TOP):
        total += LOG_P[:, i].exp() * s.gather(-1, IDS[:, i : i + 1]).squeeze(-1)
    return -total.mean()


@loss(ROW, style="the rest spread evenly over the vocabulary")
def rest_spread_evenly(h, w):
    p = LOG_P.exp()
    rest = (1 - p.sum(-1, keepdim=True)) / (VOCAB - TOP)
    target = rest.expand(TOKENS, VOCAB).scatter(-1, IDS, p)
    return -(target * (h @ w.T).log_softmax(-1)).sum(-1).mean()


@loss(ROW, style="a one-hot target, smoothed")
def smoothed_one_hot(h, w):
    target = F.one_hot(LABELS, VOCAB).to(h.dtype) * 0.9 + 0.1 / VOCAB
    return -(target * (h @ w.T).log_softmax(-1)).sum(-1).mean()


@loss(EAGER, style="NeMo-RL: sorted ids by bincount", reason="bincount has no rule")
def rare_tokens(h, w):
    counts = torch.bincount(IDS.flatten(), minlength=VOCAB)
    weights = (h @ w.T).softmax(-1).detach() / (1 + counts)
    return (weights.cumsum(-1) * (h @ w.T).log_softmax(-1)).amax()
