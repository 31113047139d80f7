"""Losses between two LM heads, and on quantised ones: divergences, masks and weights of tokens."""

import math

import torch
import torch.nn.functional as F

from tests.support.of_2026.registry import (
    EAGER,
    KEEP,
    LABELS,
    LINEAR,
    ROW,
    TOKENS,
    VOCAB,
    batchmean,
    cross_entropy,
    kl_of_logs,
    loss,
    of_rows,
)

WIDER = 26  # entries that both vocabularies have
QUANTISED = torch.randint(-127, 128, (VOCAB, 4), generator=torch.Generator().manual_seed(2)).to(
    torch.int8
)
SCALES = torch.linspace(0.01, 0.02, VOCAB)[:, None]
ADAPTER_IN = torch.linspace(-1, 1, 8).view(2, 4)
ADAPTER_OUT = torch.linspace(0, 1, 2 * VOCAB).view(VOCAB, 2)
BLOCKS = torch.linspace(0.5, 1.5, VOCAB * 2).view(VOCAB, 2)


# ------------------------------------------------------------------ one vocabulary
@loss(LINEAR, style="TRL DistillationTrainer: JSD by a stack, tokens by labels")
def generalised_js(s, t):
    s, t = (s / 0.9).log_softmax(-1), (t / 0.9).log_softmax(-1)
    beta = torch.tensor(0.3, dtype=s.dtype)
    m = torch.logsumexp(torch.stack([s + torch.log(1 - beta), t + torch.log(beta)]), dim=0)
    jsd = beta * kl_of_logs(m, t) + (1 - beta) * kl_of_logs(m, s)
    return jsd[KEEP].sum() / KEEP.sum()


@loss(LINEAR, style="JS as logsumexp of a stack less log 2")
def js_less_log_2(log_s, log_t):
    m = torch.logsumexp(torch.stack([log_s, log_t]), dim=0) - math.log(2)
    return 0.5 * (of_rows(log_t.exp(), log_t - m) + of_rows(log_s.exp(), log_s - m)).mean()


@loss(LINEAR, style="JS of probabilities, nn.KLDivLoss both ways")
def js_of_probabilities(p_s, p_t):
    m = (0.5 * (p_s + p_t)).log()
    kl = torch.nn.KLDivLoss(reduction="batchmean")
    return 0.5 * (kl(m, p_s) + kl(m, p_t))


@loss(LINEAR, ROW, style="OPD: JSD with entropies of student and teacher")
def js_and_entropies(log_s, log_t):
    m = torch.logaddexp(log_s, log_t) - math.log(2)
    js = 0.5 * (of_rows(log_t.exp(), log_t - m) + of_rows(log_s.exp(), log_s - m))
    with torch.no_grad():
        of_s, of_t = -of_rows(log_s.exp(), log_s), -of_rows(log_t.exp(), log_t)
    return js.mean(), of_s.mean(), of_t.mean()


@loss(LINEAR, style="ModelOpt: maxima subtracted, temperatures")
def modelopt_logits(s, t):
    s, t = s / 2.0, t / 2.0
    s = s - s.amax(-1, keepdim=True).detach()
    t = t - t.amax(-1, keepdim=True)
    s, t = (x - x.exp().sum(-1, keepdim=True).log() for x in (s, t))
    return of_rows(t.exp(), t - s).mean() * 4.0


@loss(LINEAR, style="MiniLLM, reverse KL: rows of a mask in float32")
def reverse_of_rows(s, t):
    s, t = s[KEEP].float(), t[KEEP].float()
    q = F.softmax(s, dim=-1)
    inf = torch.isinf(s) | torch.isinf(t)
    terms = q * F.log_softmax(t, dim=-1) - q * F.log_softmax(s, dim=-1)
    return -terms.masked_fill(inf, 0).sum(-1).mean()


@loss(LINEAR, style="DistiLLM-2: skewed KLs, weighted by sequences")
def skewed_both_ways(p_t, p_s):
    m, n = 0.9 * p_t + 0.1 * p_s, 0.1 * p_t + 0.9 * p_s
    forward = of_rows(p_t, p_t.log() - m.log()).view(2, -1)
    reverse = of_rows(p_s, p_s.log() - n.log()).view(2, -1)
    return (forward.mean(1) + 0.5 * reverse.mean(1)).mean()


@loss(ROW, style="ToDi: a weight of each entry by the ratio")
def token_wise_directions(log_s, log_t):
    a, difference = torch.sigmoid(log_t - log_s).detach(), log_t - log_s
    return (a * log_t.exp() * difference + (1 - a) * log_s.exp() * (log_s - log_t)).sum(-1).mean()


@loss(LINEAR, style="ABKD: an alpha-beta divergence of powers")
def alpha_beta(p_t, p_s):
    a, b = 0.2, 0.7
    ab = a + b
    terms = p_t**a * p_s**b - a / ab * p_t**ab - b / ab * p_s**ab
    return -terms.sum(-1).mean() / (a * b)


@loss(LINEAR, style="Liger: total variation, then KLDiv with a log target")
def liger_tvd_and_kl(p_s, p_t, log_s, log_t):
    tvd = 0.5 * torch.abs(p_s - p_t)
    return tvd.sum(-1).mean() + kl_of_logs(log_s, log_t).sum() / TOKENS


@loss(ROW, style="logits standardised per token")
def standardised(s, t):
    s, t = ((x - x.mean(-1, keepdim=True)) / (1e-7 + x.std(-1, keepdim=True)) for x in (s, t))
    return 9 * batchmean((s / 2).log_softmax(-1), (t / 2).softmax(-1))


@loss(LINEAR, ROW, style="tokens weighted by the teacher's entropy")
def weighted_by_entropy(log_t, log_s):
    p = log_t.exp()
    weight = torch.exp(of_rows(p, log_t) / math.log(VOCAB))
    return (weight * of_rows(p, log_t - log_s)).sum() / weight.sum()


@loss(LINEAR, ROW, style="half of the tokens, by their entropy")
def entropic_tokens(log_s, log_t):
    entropy = -of_rows(log_s.exp(), log_s).detach()
    chosen = (entropy >= torch.quantile(entropy, 0.5)).to(log_s.dtype)
    return (of_rows(log_s.exp(), log_s - log_t) * chosen).sum() / chosen.sum().clamp(min=1.0)


@loss(ROW, style="verl: low-variance KL of the labels' log-probabilities")
def low_variance_kl(t, s):
    def chosen(z):
        return z.gather(-1, LABELS[:, None]).squeeze(-1) - z.logsumexp(-1)

    ratio = (chosen(t).detach() - chosen(s)).clamp(-20, 20)
    kl = torch.clamp(ratio.exp() - ratio - 1, min=-10, max=10)
    return (kl * KEEP).sum() / KEEP.sum()


@loss(ROW, style="Thinking Machines' OPD: reverse KL as an advantage")
def reverse_kl_as_advantage(log_s, g, v):
    s = torch.gather(log_s, 1, LABELS[:, None])[:, 0]
    with torch.no_grad():
        t = torch.gather((g @ v.T).log_softmax(-1), 1, LABELS[:, None])[:, 0]
        advantage = t - s
    ratio = torch.exp(s - s.detach())
    return -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * KEEP).mean()


@loss(LINEAR, style="two teachers, averaged log-probabilities of each")
def two_teachers(log_s, g, v):
    total = 0.0
    for scale, weight in ((1.0, 0.3), (0.5, 0.7)):
        total = total + weight * batchmean(log_s, (g @ v.T * scale).softmax(-1))
    return total


@loss(LINEAR, style="softcapped heads, base 2, a mean over sequences")
def softcapped(s, t):
    s, t = ((30.0 * torch.tanh(x / 30.0)).log_softmax(-1) for x in (s, t))
    bits = of_rows(t.exp(), t - s) / math.log(2)
    return bits.view(2, -1).sum(1).mean()


@loss(LINEAR, style="PEFT: an adapter of the head, in place")
def adapted_head(s, h, p_t):
    s += 2.0 * ((h @ ADAPTER_IN.to(h.dtype).T) @ ADAPTER_OUT.to(h.dtype).T)
    return batchmean(s.log_softmax(-1), p_t)


@loss(LINEAR, ROW, style="CTC: the blank apart, the others renormalised without it")
def blank_apart(log_s, log_t):
    s, t = (x[..., 1:] - x[..., 1:].logsumexp(-1, keepdim=True) for x in (log_s, log_t))
    p, q = (x[..., 0].exp().clamp_min(1e-6) for x in (log_t, log_s))
    of_blank = p * (p.log() - q.log()) + (1 - p) * ((1 - p).log() - (1 - q).log())
    return (of_blank + (1 - p) * of_rows(t.exp(), t - s)).mean()


# ------------------------------------------------------------------ vocabularies of two sizes
@loss(LINEAR, style="logits padded to the larger vocabulary", findings=True)
def padded_vocabulary(h, w, t):
    s = F.pad(h @ w[:WIDER].T, (0, VOCAB - WIDER), value=-1e9)
    return batchmean(s.log_softmax(-1)[:, :WIDER], t[:, :WIDER].softmax(-1))


@loss(LINEAR, style="a slice write of the other's logits", findings=True)
def slice_written(log_s, t):
    x = torch.full((TOKENS, VOCAB), -1e4)
    x[:, :WIDER] = t[:, :WIDER]
    return batchmean(log_s, x.softmax(-1))


@loss(LINEAR, style="both sliced to what they share", findings=True)
def sliced_to_the_shared(s, g, v):
    n = min(WIDER, VOCAB)
    s, t = s[..., :n], (g @ v[:WIDER].T)[..., :n]
    return of_rows(t.softmax(-1), t.log_softmax(-1) - s.log_softmax(-1)).mean()


@loss(EAGER, style="a nucleus of the teacher", reason="cumsum has no rule")
def nucleus(p_t, log_s):
    p, ids = p_t.sort(-1, descending=True)
    p = p.masked_fill(p.cumsum(-1) - p > 0.9, 0.0)
    return cross_entropy(p / p.sum(-1, keepdim=True), log_s.gather(-1, ids))


# ------------------------------------------------------------------ raw logits
@loss(ROW, style="centered logits, normalised rows")
def centered_logits(s, t):
    s, t = (x - x.mean(-1, keepdim=True) for x in (s, t))
    return F.mse_loss(F.normalize(s, dim=-1), F.normalize(t, dim=-1), reduction="sum") / TOKENS


def sort(p):
    return p.sort(-1, descending=True).values


# fmt: off
loss(LINEAR, style="TAID: a target between student and teacher",
     interpolated_target=lambda s, t: cross_entropy(
         ((1 - 0.4) * s.detach() + 0.4 * t).softmax(-1), s.log_softmax(-1)))
loss(LINEAR, style="an ensemble: the mean of the teachers' probabilities",
     ensemble=lambda g, v, log_s: cross_entropy(
         torch.stack([(g @ v.T * c).softmax(-1) for c in (1.0, 0.5)]).mean(0), log_s))
loss(EAGER, style="GOLD, ULD: sorted probabilities", reason="sort has no rule",
     sorted_probabilities=lambda p_s, p_t: (sort(p_s) - sort(p_t)).abs().sum(-1).mean())
loss(ROW, style="MSE of logits", findings=True, mse_of_logits=lambda s, t: (s - t).pow(2).mean())
loss(ROW, style="a smooth L1 of logits", findings=True,
     smooth_l1=lambda s, t: F.smooth_l1_loss(s, t, beta=0.5))
loss(ROW, style="iCaRL, detectors: probabilities of their own, the old classes alone",
     sigmoids_of_old_classes=lambda s, t: F.binary_cross_entropy_with_logits(
         s[:, :WIDER], t[:, :WIDER].sigmoid(), reduction="none").sum(1).mean())
loss(ROW, style="Liger: cosine of logits", findings=True,
     cosine_of_logits=lambda s, t: (1 - F.cosine_similarity(s, t, dim=-1)).mean())
# ------------------------------------------------------------------ quantised heads
loss(LINEAR, style="int8 weights of the teacher's head, dequantised by rows",
     int8_teacher=lambda log_s, g: batchmean(
         log_s, (g[:, :4] @ (QUANTISED.to(g.dtype) * SCALES).T).softmax(-1)))
loss(LINEAR, style="int8 weights, scales after the product",
     scales_after_the_product=lambda log_s, g: batchmean(
         log_s, (F.linear(g[:, :4], QUANTISED.to(g.dtype)) * SCALES[:, 0]).softmax(-1)))
# fmt: on


@loss(LINEAR, style="groups of columns with scales of their own")
def scales_of_groups(log_s, g):
    v = (QUANTISED.view(VOCAB, 2, 2).to(g.dtype) * BLOCKS[..., None] * 0.01).view(VOCAB, 4)
    return cross_entropy((g[:, :4] @ v.T).softmax(-1), log_s)
