"""Losses on a cached or served teacher: ids and log-probabilities of its top entries."""

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
    batchmean,
    cross_entropy,
    kl_of_logs,
    loss,
    of_rows,
)

OF_ANSWERS = LABELS.masked_fill(~KEEP, -100)


def at_ids(log_s, ids=IDS):
    return log_s.gather(-1, ids)


def of_entries(entries):
    """The cross-entropy of the cached ones with a student's."""
    return cross_entropy(LOG_P.exp(), entries)


def with_tail(x):
    rest = x.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([x, torch.log(-torch.expm1(rest))], -1)


def scattered():
    return torch.zeros(TOKENS, VOCAB).scatter_(-1, IDS, LOG_P.exp())


# ------------------------------------------------------------------ entries at given ids
# fmt: off
loss(ROW, style="Cartridges", findings=True,
     cross_entropy_at_ids=lambda log_s: of_entries(at_ids(log_s)))
loss(ROW, style="NeMo-RL: the normaliser by hand", findings=True,
     entries_minus_logsumexp=lambda s: of_entries(at_ids(s) - s.logsumexp(-1, keepdim=True)))
loss(ROW, style="EasyDistill: kl_div of entries", findings=True,
     kl_div_at_ids=lambda log_s: F.kl_div(
         at_ids(log_s), LOG_P, log_target=True, reduction="batchmean"))
loss(ROW, style="an id that stands twice", findings=True, repeated_ids=lambda log_s: of_rows(
    LOG_P.exp(), LOG_P - at_ids(log_s, REPEATED)).mean())
loss(ROW, style="Cartridges: pairs of a row and an id", findings=True,
     pairs_of_rows_and_ids=lambda log_s: -(LOG_P.exp().flatten() * log_s[
         torch.arange(TOKENS).repeat_interleave(TOP), IDS.flatten()]).sum() / TOKENS)
loss(ROW, style="TRL's SDPO: a bucket for the tail", findings=True,
     tail_bucket=lambda log_s: kl_of_logs(
         with_tail(at_ids(log_s)), with_tail(LOG_P)).sum(-1).mean())
loss(ROW, style="a dense target by scatter_", findings=True,
     scattered_target=lambda log_s: batchmean(log_s, scattered()))
loss(ROW, style="a dense target of the student's shape and type",
     scattered_into_zeros_like=lambda log_s: batchmean(
         log_s, torch.zeros_like(log_s).scatter_(-1, IDS, LOG_P.exp().to(log_s.dtype))))
loss(ROW, style="a dense target of logits, out of place",
     scattered_into_full_like=lambda s, log_s: cross_entropy(
         torch.full_like(s, -1e4).scatter(-1, IDS, LOG_P.to(s.dtype)).softmax(-1), log_s))
loss(ROW, style="an id that stands twice, added up",
     scattered_by_scatter_add=lambda log_s: cross_entropy(log_s.new_zeros(
         log_s.shape).scatter_add(-1, REPEATED, LOG_P.exp().to(log_s.dtype)), log_s))
# fmt: on


@loss(ROW, style="entries of padding have a log-probability of -inf", findings=True)
def padded_ids(log_s):
    p = LOG_P_PADDED.exp()
    terms = p * (LOG_P_PADDED - at_ids(log_s, PADDED))
    return torch.where(p > 0, terms, 0.0).sum(-1).mean()


@loss(ROW, style="a ghost token of the rest by cat", findings=True)
def ghost_token(p_s):
    s, p = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (at_ids(p_s), LOG_P.exp()))
    return cross_entropy(p, s.clamp_min(1e-8).log())


@loss(ROW, style="chunks of tokens into a buffer", findings=True)
def chunks_into_a_buffer(h, w):
    kept = torch.empty(TOKENS, TOP)
    for i in range(0, TOKENS, TOKENS // 2):
        rows = slice(i, i + TOKENS // 2)
        kept[rows] = at_ids((h[rows] @ w.T).log_softmax(-1), IDS[rows])
    return of_entries(kept)


@loss(
    ROW,
    EAGER,
    style="NeMo-RL: the top-k of the teacher in the graph",
    findings=True,
    reason="top-k reads whole logits",
)
def top_of_the_teacher(t, log_s):
    values, ids = t.detach().topk(TOP, dim=-1)
    return cross_entropy(values.softmax(-1), at_ids(log_s, ids))


@loss(ROW, style="verl: metrics next to the loss", findings=True)
def with_masses(log_s):
    s = at_ids(log_s)
    losses = of_rows(LOG_P.exp(), LOG_P - s)
    return losses[KEEP].mean(), s.exp().sum(-1).detach(), LOG_P.exp().sum(-1)


# ------------------------------------------------------------------ trainers' own
@loss(ROW, style="verl: clamped log-probabilities")
def verl_clamped(s):
    s = at_ids(s[None].log_softmax(-1), IDS[None]).clamp_min(-10.0)
    t = LOG_P[None].clamp_min(-10.0)
    return of_rows(t.exp(), t - s).masked_select(KEEP[None]).mean()


@loss(ROW, style="NeMo-RL: renormalised to the entries, temperature")
def nemo_renormalised(s):
    s, t = ((x / 2.0).log_softmax(-1) for x in (at_ids(s), LOG_P))
    return (of_rows(t.exp(), t - s) * KEEP).sum() / KEEP.sum().clamp(min=1)


@loss(ROW, style="NeMo-RL: mixed KL with the entropies of both")
def nemo_mixed(log_s):
    s, p = at_ids(log_s), LOG_P.exp()
    rest = -of_rows(log_s.exp(), log_s) + of_rows(s.exp(), s)
    reverse = of_rows(s.exp(), s - LOG_P) + 0.1 * rest
    return (0.5 * of_rows(p, LOG_P - s) + 0.5 * reverse)[KEEP].mean()


@loss(ROW, style="VeOmni: reverse KL of renormalised entries")
def veomni_reverse(s):
    s = at_ids(s).log_softmax(-1)
    return of_rows(s.exp(), s - (LOG_P - LOG_P.logsumexp(-1, keepdim=True))).mean()


@loss(ROW, style="SDPO: JS of entries and a tail")
def sdpo_js(log_s):
    s, t = with_tail(at_ids(log_s)), with_tail(LOG_P)
    m = torch.logsumexp(torch.stack([s + torch.log(torch.tensor(0.5)), t - 0.6931471805599453]), 0)
    return (0.5 * (kl_of_logs(m, s).sum(-1) + kl_of_logs(m, t).sum(-1))).mean()


@loss(
    ROW,
    EAGER,
    style="SDPO: the student's own top-k in the graph",
    reason="top-k reads whole logits",
)
def sdpo_students_top(log_s, log_t):
    top, ids = log_s.topk(TOP, dim=-1)
    return of_rows(top.exp(), top - at_ids(log_t, ids)).mean()


@loss(ROW, style="axolotl: cached entries and labels")
def axolotl_with_labels(s):
    entries = at_ids(s).to(torch.float32) - torch.logsumexp(s, -1, keepdim=True)
    kd = -(LOG_P.exp() * entries * KEEP[:, None]).sum() / KEEP.sum()
    return 0.7 * kd + 0.3 * F.cross_entropy(s, OF_ANSWERS)


@loss(ROW, style="axolotl: entries of a mask of ids, the mean over them")
def axolotl_masked(s):
    s = s.view(2, TOKENS // 2, VOCAB)
    e = s.gather(-1, IDS.view(2, -1, TOP)) - torch.logsumexp(s, -1, keepdim=True)
    t, keep = LOG_P.view(2, -1, TOP), (LOG_P.median() < LOG_P).view(2, -1, TOP)
    terms = t[keep].exp() * (t[keep] - e[keep])
    return terms.sum() / terms.size(0)


@loss(ROW, style="axolotl: z-scores of entries and of the teacher's")
def axolotl_z_scores(s):
    s, t = (
        ((x - x.mean(-1, keepdim=True)) / (x.std(-1, unbiased=False, keepdim=True) + 1e-8)) / 2.0
        for x in (at_ids(s), LOG_P)
    )
    return 4.0 * kl_of_logs(s - s.logsumexp(-1, keepdim=True), t.log_softmax(-1)).sum(-1).mean()


@loss(ROW, style="verl: entries for the trainer, which computes the loss, and their mass")
def verl_entries(log_s):
    s = at_ids(log_s)
    return s, s.exp().sum(-1).detach()


@loss(
    EAGER,
    reason="top-k reads whole logits",
    style="overlap of the student's and the teacher's top entries",
)
def with_overlap(log_s):
    chosen = log_s.detach().topk(TOP, dim=-1).indices
    overlap = (chosen[:, :, None] == IDS[:, None, :]).any(-1).float().mean()
    return of_entries(at_ids(log_s)), overlap


@loss(ROW, style="by take_along_dim, sequences of a batch")
def by_take_along_dim(s):
    z = s.view(2, TOKENS // 2, VOCAB)
    ids, p = IDS.view(2, -1, TOP), LOG_P.exp().view(2, -1, TOP)
    entries = torch.take_along_dim(z, ids, dim=-1) - z.logsumexp(-1, keepdim=True)
    return -of_rows(p, entries).mean(-1).mean()


@loss(ROW, style="a loop over entries")
def a_loop_over_entries(log_s):
    total = log_s.new_zeros(TOKENS)
    for i in range(TOP):
        total += LOG_P[:, i].exp() * at_ids(log_s, IDS[:, i : i + 1]).squeeze(-1)
    return -total.mean()


@loss(ROW, style="the rest spread evenly over the vocabulary")
def rest_spread_evenly(log_s):
    p = LOG_P.exp()
    rest = (1 - p.sum(-1, keepdim=True)) / (VOCAB - TOP)
    return cross_entropy(rest.expand(TOKENS, VOCAB).scatter(-1, IDS, p), log_s)


@loss(EAGER, style="NeMo-RL: sorted ids by bincount", reason="bincount has no rule")
def rare_tokens(p_s, s):
    weights = p_s.detach() / (1 + torch.bincount(IDS.flatten(), minlength=VOCAB))
    return (weights.cumsum(-1) * s.log_softmax(-1)).amax()


# fmt: off
loss(ROW, style="chunks of tokens, concatenated", chunks_concatenated=lambda h, w: of_entries(
    torch.cat([at_ids((a @ w.T).log_softmax(-1), i)
               for a, i in zip(h.chunk(2), IDS.chunk(2), strict=True)])))
loss(ROW, style="by indexing: rows of an arange", by_advanced_indexing=lambda log_s: of_entries(
    log_s[torch.arange(TOKENS)[:, None], IDS]))
loss(ROW, style="a one-hot target, smoothed", smoothed_one_hot=lambda log_s: cross_entropy(
    F.one_hot(LABELS, VOCAB).to(log_s.dtype) * 0.9 + 0.1 / VOCAB, log_s))
# fmt: on
