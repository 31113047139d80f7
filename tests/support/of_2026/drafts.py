"""Losses of drafts (EAGLE-3, SpecForge, speculators, DFlash), and of heads for vision (DINO)."""

import torch
import torch.nn.functional as F

from tests.support.of_2026.registry import (
    EAGER,
    KEEP,
    LINEAR,
    TOKENS,
    VOCAB,
    batchmean,
    cross_entropy,
    loss,
    of_rows,
)

STEPS, LENGTH = 2, TOKENS // 2
IN_DRAFT = torch.arange(VOCAB) % 2 == 0
OF_DRAFT = IN_DRAFT.nonzero()[:, 0]
DECAY = torch.exp(-torch.arange(LENGTH) / 4.0)


def sequences(h, w):
    """Logits of two sequences."""
    return h.view(2, LENGTH, -1) @ w.T


def crops(x):
    return x.view(4, TOKENS // 4, VOCAB)


# ------------------------------------------------------------------ a teacher shifted by rows
@loss(LINEAR, style="EAGLE-3: probabilities shifted by cat", findings=True)
def shifted_probabilities(h, w, g, v):
    p = sequences(g, v).softmax(-1).detach()
    p = torch.cat([p[:, 1:], torch.zeros_like(p[:, :1])], 1)
    return cross_entropy(p, sequences(h, w).log_softmax(-1))


@loss(LINEAR, style="EAGLE-3: logits shifted by cat", findings=True)
def shifted_logits(h, w, g, v):
    t = sequences(g, v)
    t = torch.cat([t[:, 1:], torch.zeros(2, 1, VOCAB)], 1)
    return -(t.softmax(-1) * sequences(h, w).log_softmax(-1))[:, :-1].sum(-1).mean()


@loss(LINEAR, style="logits shifted by roll, the last row masked", findings=True)
def rolled_logits(h, w, g, v):
    t = torch.roll(sequences(g, v), -1, dims=1)
    s = sequences(h, w).log_softmax(-1)
    rows = F.kl_div(s, t.softmax(-1), reduction="none").sum(-1)
    rows[:, -1] = 0.0
    return rows.sum() / (2 * (LENGTH - 1))


@loss(LINEAR, style="SpecForge: padded once, sliced a step", findings=True)
def padded_and_sliced(h, w, g, v):
    with torch.no_grad():
        p = sequences(g, v).float().softmax(dim=2)
        p = F.pad(p, pad=(0, 0, 0, STEPS), mode="constant", value=1 / VOCAB)
    z = sequences(h, w)
    total = 0.0
    for step in range(STEPS):
        target = p[:, step : step + LENGTH].contiguous()
        total = total - 0.8**step * (target * z.float().log_softmax(2)).sum(2).mean()
    return total


@loss(
    LINEAR,
    EAGER,
    style="SpecForge: the draft's vocabulary by a mask, a position mask",
    reason="argmax reads whole logits",
)
def draft_vocabulary(h, w, g, v):
    target = sequences(g, v)
    keep = IN_DRAFT[target.argmax(-1)][..., None].int() * KEEP.view(2, LENGTH, 1)
    p = target[..., IN_DRAFT].float().softmax(dim=2).detach()
    s = sequences(h, w[OF_DRAFT]).log_softmax(dim=2)
    return -torch.sum(keep * (p * s), 2).mean()


@loss(LINEAR, style="speculators: KLDivLoss of shifted hidden states, decays of positions")
def speculators_decayed(h, w, g, v):
    t = F.pad(g.view(2, LENGTH, -1)[:, 1:], (0, 0, 0, 1)) @ v.T
    kl = torch.nn.KLDivLoss(reduction="none", log_target=True)
    rows = kl(sequences(h, w).log_softmax(-1), t.log_softmax(-1)).sum(-1) * DECAY
    mask = KEEP.view(2, LENGTH)
    return (rows * mask).sum(1).div(mask.sum(1) + 1e-5).mean()


@loss(LINEAR, style="LK losses: a KL weighted by the overlap", findings=True)
def weighted_by_overlap(p_t, p_s):
    lam = torch.exp(-3 * torch.minimum(p_t, p_s).sum(-1).detach())
    kl = of_rows(p_t, p_t.log() - p_s.log())
    return (lam * kl + (1 - lam) * 0.5 * (p_t - p_s).abs().sum(-1)).mean()


@loss(LINEAR, style="LK losses: minus the logarithm of the acceptance")
def log_of_acceptance(p_t, p_s):
    alpha = torch.minimum(p_t, p_s).sum(-1).clamp_min(1e-6)
    return -(alpha.log() * KEEP).sum() / KEEP.sum()


@loss(LINEAR, style="a total variation and the rate of acceptance")
def total_variation(p_t, p_s):
    tv = 0.5 * (p_t - p_s).abs().sum(-1)
    return tv.mean(), (1 - tv).mean().detach()


@loss(LINEAR, style="DFlash: blocks of anchors, weights by position in a block")
def blocks_of_drafts(h, w, g, v):
    s = (h.view(3, 4, -1) @ w.T)[:, 1:].log_softmax(-1)
    t = (g.view(3, 4, -1) @ v.T)[:, :-1].softmax(-1)
    rows = of_rows(t, t.clamp_min(1e-8).log() - s)
    return (rows * torch.exp(-torch.arange(3) / 7.0)).sum() / 3


@loss(LINEAR, style="Medusa, MTP: a KL a head, tokens ahead")
def heads_ahead(p_t, h, w):
    total = h.new_zeros(())
    for ahead in (1, 2):
        s = (h[:-ahead] * (1.0 + ahead)) @ w.T
        total += batchmean(s.log_softmax(-1), p_t[ahead:]) * 0.8**ahead
    return total


@loss(
    EAGER,
    reason="scores are sliced with a step",
    style="draft logits scattered into the target's vocabulary",
)
def scattered_draft(h, w, t):
    z = torch.full((TOKENS, VOCAB), -1e9)
    z[:, ::2] = h @ w[::2].T
    return batchmean(z.log_softmax(-1)[:, ::2], t[:, ::2].softmax(-1))


# ------------------------------------------------------------------ heads of vision models
@loss(LINEAR, style="DINO: every pair of crops by einsum", findings=True)
def pairs_of_crops(s, t):
    s, t = crops(s / 0.1).log_softmax(-1), crops(t / 0.04)[:2].softmax(-1).detach()
    return -torch.einsum("sbk,tbk->", s.float(), t.float()) / (8 * (TOKENS // 4))


@loss(LINEAR, style="DINOv3: pairs by einsum, those of one crop left out", findings=True)
def pairs_without_the_same(s, t):
    s, t = crops(s / 0.1).log_softmax(-1), crops(t / 0.07)[:2].softmax(-1).detach()
    each = -torch.einsum("sbk,tbk->st", s, t)
    each = torch.diagonal_scatter(each, each.new_zeros(2))
    return each.sum() / (3 * 6)


@loss(LINEAR, style="DINO: a loop over pairs of crops, a center")
def loop_over_crops(s, t):
    center = torch.linspace(-1, 1, VOCAB)
    students = (s / 0.1).chunk(4)
    teachers = ((t - center) / 0.04).softmax(-1).detach().chunk(4)[:2]
    total, count = 0.0, 0
    for i, t in enumerate(teachers):
        for j, s in enumerate(students):
            if i != j:
                total = total + torch.sum(-t * F.log_softmax(s, dim=-1), dim=-1).mean()
                count += 1
    return total / count


@loss(LINEAR, style="iBOT: masked patches chosen behind the maps", findings=True)
def patches_by_a_mask(s, t):
    s, t = (s / 0.1).log_softmax(-1), (t / 0.06).softmax(-1).detach()
    rows = torch.sum(t[KEEP] * s[KEEP], dim=-1)
    return -(rows * 0.25).sum() / 3


@loss(LINEAR, style="elements of the masked rows by masked_select", findings=True)
def elements_by_a_mask(log_s, p_t):
    terms = p_t * (p_t.log() - log_s)
    return terms.masked_select(KEEP[:, None].expand_as(terms)).sum() / KEEP.sum()


@loss(
    EAGER,
    style="DINOv2: Sinkhorn targets",
    reason="probabilities are normalised over rows and entries in turn",
)
def sinkhorn_targets(g, v, s):
    with torch.no_grad():
        p = ((g @ v.T) / 0.7).exp().T
        p = p / p.sum()
        for _ in range(3):
            p = p / p.sum(1, keepdim=True) / VOCAB
            p = p / p.sum(0, keepdim=True) / TOKENS
        p = (p * TOKENS).T
    return cross_entropy(p, (s / 0.1).log_softmax(-1))


@loss(LINEAR, style="DINO heads: weight-normalised prototypes")
def normalised_prototypes(h, w, g, v):
    s, t = (
        F.normalize(x, dim=-1, eps=1e-6) @ F.normalize(y, dim=-1).T for x, y in ((h, w), (g, v))
    )
    p = (t / 0.05).softmax(-1).detach()
    return torch.sum(-p * F.log_softmax(s / 0.1, dim=-1), dim=-1).mean()


@loss(LINEAR, style="RoPE-DINO, MSN: a mean entropy of the anchors next to the loss")
def mean_entropy(p_s, t):
    return cross_entropy((t / 0.5).softmax(-1).detach(), p_s.log()) + 0.1 * (
        of_rows(p_s, p_s.log()).mean()
    )


# fmt: off
loss(LINEAR, style="HASS: teacher rows by index_select", selected_teacher_rows=lambda t, log_s: (
    cross_entropy(t.index_select(0, torch.arange(1, TOKENS)).softmax(-1), log_s[:-1])))
# fmt: on
