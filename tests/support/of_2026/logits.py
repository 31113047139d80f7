"""Losses between two LM heads, and on quantised ones: divergences, masks and weights of tokens."""

from __future__ import annotations

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
    loss,
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
def generalised_js(h, w, g, v):
    s, t = (h @ w.T / 0.9).log_softmax(-1), (g @ v.T / 0.9).log_softmax(-1)
    beta = torch.tensor(0.3, dtype=s.dtype)
    m = torch.logsumexp(torch.stack([s + torch.log(1 - beta), t + torch.log(beta)]), dim=0)
    kl_t = F.kl_div(m, t, reduction="none", log_target=True)
    kl_s = F.kl_div(m, s, reduction="none", log_target=True)
    jsd = beta * kl_t + (1 - beta) * kl_s
    return jsd[KEEP].sum() / KEEP.sum()


@loss(LINEAR, style="JS as logsumexp of a stack less log 2")
def js_less_log_2(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
    m = torch.logsumexp(torch.stack([s, t]), dim=0) - math.log(2)
    return 0.5 * ((t.exp() * (t - m)).sum(-1) + (s.exp() * (s - m)).sum(-1)).mean()


@loss(LINEAR, style="JS of probabilities, nn.KLDivLoss both ways")
def js_of_probabilities(h, w, g, v):
    s, t = (h @ w.T).softmax(-1), (g @ v.T).softmax(-1)
    m = (0.5 * (s + t)).log()
    kl = torch.nn.KLDivLoss(reduction="batchmean")
    return 0.5 * (kl(m, s) + kl(m, t))


@loss(LINEAR, ROW, style="OPD: JSD with entropies of student and teacher")
def js_and_entropies(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
    m = torch.logaddexp(s, t) - math.log(2)
    js = 0.5 * ((t.exp() * (t - m)).sum(-1) + (s.exp() * (s - m)).sum(-1))
    with torch.no_grad():
        of_s, of_t = -(s.exp() * s).sum(-1), -(t.exp() * t).sum(-1)
    return js.mean(), of_s.mean(), of_t.mean()


@loss(LINEAR, style="ModelOpt: maxima subtracted, temperatures")
def modelopt_logits(h, w, g, v):
    s, t = h @ w.T / 2.0, g @ v.T / 2.0
    s = s - s.amax(-1, keepdim=True).detach()
    t = t - t.amax(-1, keepdim=True)
    s = s - s.exp().sum(-1, keepdim=True).log()
    t = t - t.exp().sum(-1, keepdim=True).log()
    return (t.exp() * (t - s)).sum(-1).mean() * 4.0


@loss(LINEAR, style="MiniLLM, reverse KL: rows of a mask in float32")
def reverse_of_rows(h, w, g, v):
    s, t = (h @ w.T)[KEEP].float(), (g @ v.T)[KEEP].float()
    q = F.softmax(s, dim=-1)
    inf = torch.isinf(s) | torch.isinf(t)
    terms = q * F.log_softmax(t, dim=-1) - q * F.log_softmax(s, dim=-1)
    return -terms.masked_fill(inf, 0).sum(-1).mean()


@loss(LINEAR, style="DistiLLM-2: skewed KLs, weighted by sequences")
def skewed_both_ways(h, w, g, v):
    p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
    m, n = 0.9 * p + 0.1 * q, 0.1 * p + 0.9 * q
    forward = (p * (p.log() - m.log())).sum(-1)
    reverse = (q * (q.log() - n.log())).sum(-1)
    return (forward.view(2, -1).mean(1) + 0.5 * reverse.view(2, -1).mean(1)).mean()


@loss(ROW, style="ToDi: a weight of each entry by the ratio")
def token_wise_directions(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
    a = torch.sigmoid(t - s).detach()
    return (a * t.exp() * (t - s) + (1 - a) * s.exp() * (s - t)).sum(-1).mean()


@loss(LINEAR, style="TAID: a target between student and teacher")
def interpolated_target(h, w, g, v):
    t = 0.4
    s = h @ w.T
    p = ((1 - t) * s.detach() + t * (g @ v.T)).softmax(-1)
    return -(p * s.log_softmax(-1)).sum(-1).mean()


@loss(LINEAR, style="ABKD: an alpha-beta divergence of powers")
def alpha_beta(h, w, g, v):
    a, b = 0.2, 0.7
    p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
    ab = a + b
    terms = p**a * q**b - a / ab * p**ab - b / ab * q**ab
    return -terms.sum(-1).mean() / (a * b)


@loss(LINEAR, style="Liger: total variation, then KLDiv with a log target")
def liger_tvd_and_kl(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    tvd = 0.5 * torch.abs(s.softmax(-1) - t.softmax(-1))
    kl = F.kl_div(s.log_softmax(-1), t.log_softmax(-1), reduction="none", log_target=True)
    return tvd.sum(-1).mean() + kl.sum() / TOKENS


@loss(ROW, style="logits standardised per token")
def standardised(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    s, t = ((x - x.mean(-1, keepdim=True)) / (1e-7 + x.std(-1, keepdim=True)) for x in (s, t))
    return 9 * F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean")


@loss(LINEAR, ROW, style="tokens weighted by the teacher's entropy")
def weighted_by_entropy(h, w, g, v):
    t, s = (g @ v.T).log_softmax(-1), (h @ w.T).log_softmax(-1)
    p = t.exp()
    weight = torch.exp((p * t).sum(-1) / math.log(VOCAB))
    return (weight * (p * (t - s)).sum(-1)).sum() / weight.sum()


@loss(LINEAR, ROW, style="half of the tokens, by their entropy")
def entropic_tokens(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
    entropy = -(s.exp() * s).sum(-1).detach()
    chosen = (entropy >= torch.quantile(entropy, 0.5)).to(s.dtype)
    kl = (s.exp() * (s - t)).sum(-1)
    return (kl * chosen).sum() / chosen.sum().clamp(min=1.0)


@loss(ROW, style="verl: low-variance KL of the labels' log-probabilities")
def low_variance_kl(h, w, g, v):
    def chosen(x, y):
        z = x @ y.T
        return z.gather(-1, LABELS[:, None]).squeeze(-1) - z.logsumexp(-1)

    ratio = (chosen(g, v).detach() - chosen(h, w)).clamp(-20, 20)
    kl = torch.clamp(ratio.exp() - ratio - 1, min=-10, max=10)
    return (kl * KEEP).sum() / KEEP.sum()


@loss(ROW, style="Thinking Machines' OPD: reverse KL as an advantage")
def reverse_kl_as_advantage(h, w, g, v):
    s = torch.gather((h @ w.T).log_softmax(-1), 1, LABELS[:, None])[:, 0]
    with torch.no_grad():
        t = torch.gather((g @ v.T).log_softmax(-1), 1, LABELS[:, None])[:, 0]
        advantage = t - s
    ratio = torch.exp(s - s.detach())
    return -(torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * KEEP).mean()


@loss(LINEAR, style="two teachers, averaged log-probabilities of each")
def two_teachers(h, w, g, v):
    s = (h @ w.T).log_softmax(-1)
    total = 0.0
    for scale, weight in ((1.0, 0.3), (0.5, 0.7)):
        p = (g @ v.T * scale).softmax(-1)
        total = total + weight * F.kl_div(s, p, reduction="batchmean")
    return total


@loss(LINEAR, style="an ensemble: the mean of the teachers' probabilities")
def ensemble(h, w, g, v):
    p = torch.stack([(g @ v.T * c).softmax(-1) for c in (1.0, 0.5)]).mean(0)
    return -(p * (h @ w.T).log_softmax(-1)).sum(-1).mean()


@loss(LINEAR, style="softcapped heads, base 2, a mean over sequences")
def softcapped(h, w, g, v):
    s, t = (30.0 * torch.tanh(x @ y.T / 30.0) for x, y in ((h, w), (g, v)))
    s, t = s.log_softmax(-1), t.log_softmax(-1)
    bits = (t.exp() * (t - s)).sum(-1) / math.log(2)
    return bits.view(2, -1).sum(1).mean()


@loss(LINEAR, style="PEFT: an adapter of the head, in place")
def adapted_head(h, w, g, v):
    s = h @ w.T
    s += 2.0 * ((h @ ADAPTER_IN.to(h.dtype).T) @ ADAPTER_OUT.to(h.dtype).T)
    return F.kl_div(s.log_softmax(-1), (g @ v.T).softmax(-1), reduction="batchmean")


# ------------------------------------------------------------------ vocabularies of two sizes
@loss(LINEAR, style="logits padded to the larger vocabulary", findings=True)
def padded_vocabulary(h, w, g, v):
    s = F.pad(h @ w[:WIDER].T, (0, VOCAB - WIDER), value=-1e9)
    return F.kl_div(s.log_softmax(-1)[:, :WIDER], (g @ v.T)[:, :WIDER].softmax(-1),
                    reduction="batchmean")  # fmt: skip


@loss(LINEAR, style="a slice write of the other's logits", findings=True)
def slice_written(h, w, g, v):
    t = torch.full((TOKENS, VOCAB), -1e4)
    t[:, :WIDER] = (g @ v.T)[:, :WIDER]
    return F.kl_div((h @ w.T).log_softmax(-1), t.softmax(-1), reduction="batchmean")


@loss(LINEAR, style="both sliced to what they share", findings=True)
def sliced_to_the_shared(h, w, g, v):
    n = min(WIDER, VOCAB)
    s, t = (h @ w.T)[..., :n], (g @ v[:WIDER].T)[..., :n]
    return (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1).mean()


@loss(EAGER, style="GOLD, ULD: sorted probabilities", reason="sort has no rule")
def sorted_probabilities(h, w, g, v):
    s, t = ((x @ y.T).softmax(-1).sort(-1, descending=True).values for x, y in ((h, w), (g, v)))
    return (s - t).abs().sum(-1).mean()


@loss(EAGER, style="a nucleus of the teacher", reason="cumsum has no rule")
def nucleus(h, w, g, v):
    p, ids = (g @ v.T).softmax(-1).sort(-1, descending=True)
    p = p.masked_fill(p.cumsum(-1) - p > 0.9, 0.0)
    p = p / p.sum(-1, keepdim=True)
    return -(p * (h @ w.T).log_softmax(-1).gather(-1, ids)).sum(-1).mean()


# ------------------------------------------------------------------ raw logits
@loss(ROW, style="MSE of logits", findings=True)
def mse_of_logits(h, w, g, v):
    return (h @ w.T - g @ v.T).pow(2).mean()


@loss(ROW, style="a smooth L1 of logits", findings=True)
def smooth_l1(h, w, g, v):
    return F.smooth_l1_loss(h @ w.T, g @ v.T, beta=0.5)


@loss(ROW, style="Liger: cosine of logits", findings=True)
def cosine_of_logits(h, w, g, v):
    return (1 - F.cosine_similarity(h @ w.T, g @ v.T, dim=-1)).mean()


@loss(ROW, style="centered logits, normalised rows")
def centered_logits(h, w, g, v):
    s, t = (x - x.mean(-1, keepdim=True) for x in (h @ w.T, g @ v.T))
    return F.mse_loss(F.normalize(s, dim=-1), F.normalize(t, dim=-1), reduction="sum") / TOKENS


# ------------------------------------------------------------------ quantised heads
@loss(LINEAR, style="int8 weights of the teacher's head, dequantised by rows")
def int8_teacher(h, w, g):
    v = QUANTISED.to(g.dtype) * SCALES
    t = (g[:, :4] @ v.T).softmax(-1)
    return F.kl_div((h @ w.T).log_softmax(-1), t, reduction="batchmean")


@loss(LINEAR, style="int8 weights, scales after the product")
def scales_after_the_product(h, w, g):
    t = F.linear(g[:, :4], QUANTISED.to(g.dtype)) * SCALES[:, 0]
    return F.kl_div((h @ w.T).log_softmax(-1), t.softmax(-1), reduction="batchmean")


@loss(LINEAR, style="groups of columns with scales of their own")
def scales_of_groups(h, w, g):
    v = (QUANTISED.view(VOCAB, 2, 2).to(g.dtype) * BLOCKS[..., None] * 0.01).view(VOCAB, 4)
    t = (g[:, :4] @ v.T).softmax(-1)
    return -(t * (h @ w.T).log_softmax(-1)).sum(-1).mean()
