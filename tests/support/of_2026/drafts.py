"""Losses of drafts (EAGLE-3, SpecForge, speculators, DFlash), and of heads for vision (DINO)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.of_2026.registry import (
    EAGER,
    KEEP,
    LINEAR,
    TOKENS,
    VOCAB,
    loss,
)

STEPS, LENGTH = 2, TOKENS // 2
IN_DRAFT = torch.arange(VOCAB) % 2 == 0
OF_DRAFT = IN_DRAFT.nonzero()[:, 0]
DECAY = torch.exp(-torch.arange(LENGTH) / 4.0)


# ------------------------------------------------------------------ a teacher shifted by rows
@loss(LINEAR, style="EAGLE-3: probabilities shifted by cat", findings=True)
def shifted_probabilities(h, w, g, v):
    p = (g.view(2, LENGTH, -1) @ v.T).softmax(-1).detach()
    p = torch.cat([p[:, 1:], torch.zeros_like(p[:, :1])], 1)
    s = (h.view(2, LENGTH, -1) @ w.T).log_softmax(-1)
    return -(p * s).sum(-1).mean()


@loss(LINEAR, style="EAGLE-3: logits shifted by cat", findings=True)
def shifted_logits(h, w, g, v):
    t = g.view(2, LENGTH, -1) @ v.T
    t = torch.cat([t[:, 1:], torch.zeros(2, 1, VOCAB)], 1)
    s = (h.view(2, LENGTH, -1) @ w.T).log_softmax(-1)
    return -(t.softmax(-1) * s)[:, :-1].sum(-1).mean()


@loss(LINEAR, style="logits shifted by roll, the last row masked", findings=True)
def rolled_logits(h, w, g, v):
    t = torch.roll((g.view(2, LENGTH, -1) @ v.T), -1, dims=1)
    s = (h.view(2, LENGTH, -1) @ w.T).log_softmax(-1)
    rows = F.kl_div(s, t.softmax(-1), reduction="none").sum(-1)
    rows[:, -1] = 0.0
    return rows.sum() / (2 * (LENGTH - 1))


@loss(LINEAR, style="SpecForge: padded once, sliced a step", findings=True)
def padded_and_sliced(h, w, g, v):
    with torch.no_grad():
        p = (g.view(2, LENGTH, -1) @ v.T).float().softmax(dim=2)
        p = F.pad(p, pad=(0, 0, 0, STEPS), mode="constant", value=1 / VOCAB)
    z = h.view(2, LENGTH, -1) @ w.T
    total = 0.0
    for step in range(STEPS):
        target = p[:, step : step + LENGTH].contiguous()
        total = total - 0.8**step * (target * z.float().log_softmax(2)).sum(2).mean()
    return total


@loss(LINEAR, EAGER, style="SpecForge: the draft's vocabulary by a mask, a position mask",
      reason="argmax reads whole logits")  # fmt: skip
def draft_vocabulary(h, w, g, v):
    target = g.view(2, LENGTH, -1) @ v.T
    keep = IN_DRAFT[target.argmax(-1)][..., None].int() * KEEP.view(2, LENGTH, 1)
    p = target[..., IN_DRAFT].float().softmax(dim=2).detach()
    s = (h.view(2, LENGTH, -1) @ w[OF_DRAFT].T).log_softmax(dim=2)
    return -torch.sum(keep * (p * s), 2).mean()


@loss(LINEAR, style="speculators: KLDivLoss of shifted hidden states, decays of positions")
def speculators_decayed(h, w, g, v):
    t = F.pad(g.view(2, LENGTH, -1)[:, 1:], (0, 0, 0, 1)) @ v.T
    s = h.view(2, LENGTH, -1) @ w.T
    kl = torch.nn.KLDivLoss(reduction="none", log_target=True)
    rows = kl(s.log_softmax(-1), t.log_softmax(-1)).sum(-1) * DECAY
    mask = KEEP.view(2, LENGTH)
    return (rows * mask).sum(1).div(mask.sum(1) + 1e-5).mean()


@loss(LINEAR, style="LK losses: a KL weighted by the overlap", findings=True)
def weighted_by_overlap(h, w, g, v):
    p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
    lam = torch.exp(-3 * torch.minimum(p, q).sum(-1).detach())
    kl = (p * (p.log() - q.log())).sum(-1)
    return (lam * kl + (1 - lam) * 0.5 * (p - q).abs().sum(-1)).mean()


@loss(LINEAR, style="LK losses: minus the logarithm of the acceptance")
def log_of_acceptance(h, w, g, v):
    p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
    alpha = torch.minimum(p, q).sum(-1).clamp_min(1e-6)
    return -(alpha.log() * KEEP).sum() / KEEP.sum()


@loss(LINEAR, style="a total variation and the rate of acceptance")
def total_variation(h, w, g, v):
    p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
    tv = 0.5 * (p - q).abs().sum(-1)
    return tv.mean(), (1 - tv).mean().detach()


@loss(LINEAR, style="DFlash: blocks of anchors, weights by position in a block")
def blocks_of_drafts(h, w, g, v):
    s = (h.view(3, 4, -1) @ w.T)[:, 1:].log_softmax(-1)
    t = (g.view(3, 4, -1) @ v.T)[:, :-1].softmax(-1)
    rows = (t * (t.clamp_min(1e-8).log() - s)).sum(-1)
    return (rows * torch.exp(-torch.arange(3) / 7.0)).sum() / 3


@loss(LINEAR, style="Medusa, MTP: a KL a head, tokens ahead")
def heads_ahead(h, w, g, v):
    t = (g @ v.T).softmax(-1)
    total = h.new_zeros(())
    for ahead in (1, 2):
        s = (h[:-ahead] * (1.0 + ahead)) @ w.T
        total += F.kl_div(s.log_softmax(-1), t[ahead:], reduction="batchmean") * 0.8**ahead
    return total


@loss(LINEAR, style="HASS: teacher rows by index_select")
def selected_teacher_rows(h, w, g, v):
    rows = torch.arange(1, TOKENS)
    t = (g @ v.T).index_select(0, rows).softmax(-1)
    return -(t * (h @ w.T).log_softmax(-1)[:-1]).sum(-1).mean()


@loss(
    EAGER,
    reason="scores are sliced with a step",
    style="draft logits scattered into the target's vocabulary",
)
def scattered_draft(h, w, g, v):
    z = torch.full((TOKENS, VOCAB), -1e9)
    z[:, ::2] = h @ w[::2].T
    return F.kl_div(
        z.log_softmax(-1)[:, ::2], (g @ v.T)[:, ::2].softmax(-1), reduction="batchmean"
    )


# ------------------------------------------------------------------ heads of vision models
@loss(LINEAR, style="DINO: every pair of crops by einsum", findings=True)
def pairs_of_crops(h, w, g, v):
    s = (h @ w.T / 0.1).view(4, TOKENS // 4, VOCAB).log_softmax(-1)
    t = ((g @ v.T) / 0.04).view(4, TOKENS // 4, VOCAB)[:2].softmax(-1).detach()
    return -torch.einsum("sbk,tbk->", s.float(), t.float()) / (8 * (TOKENS // 4))


@loss(LINEAR, style="DINOv3: pairs by einsum, those of one crop left out", findings=True)
def pairs_without_the_same(h, w, g, v):
    s = (h @ w.T / 0.1).view(4, TOKENS // 4, VOCAB).log_softmax(-1)
    t = (g @ v.T / 0.07).view(4, TOKENS // 4, VOCAB)[:2].softmax(-1).detach()
    each = -torch.einsum("sbk,tbk->st", s, t)
    each = torch.diagonal_scatter(each, each.new_zeros(2))
    return each.sum() / (3 * 6)


@loss(LINEAR, style="DINO: a loop over pairs of crops, a center")
def loop_over_crops(h, w, g, v):
    center = torch.linspace(-1, 1, VOCAB)
    students = (h @ w.T / 0.1).chunk(4)
    teachers = ((g @ v.T - center) / 0.04).softmax(-1).detach().chunk(4)[:2]
    total, count = 0.0, 0
    for i, t in enumerate(teachers):
        for j, s in enumerate(students):
            if i != j:
                total = total + torch.sum(-t * F.log_softmax(s, dim=-1), dim=-1).mean()
                count += 1
    return total / count


@loss(LINEAR, style="iBOT: masked patches chosen behind the maps", findings=True)
def patches_by_a_mask(h, w, g, v):
    s, t = (h @ w.T / 0.1).log_softmax(-1), (g @ v.T / 0.06).softmax(-1).detach()
    rows = torch.sum(t[KEEP] * s[KEEP], dim=-1)
    return -(rows * 0.25).sum() / 3


@loss(LINEAR, style="elements of the masked rows by masked_select", findings=True)
def elements_by_a_mask(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
    terms = t * (t.log() - s)
    return terms.masked_select(KEEP[:, None].expand_as(terms)).sum() / KEEP.sum()


@loss(EAGER, style="DINOv2: Sinkhorn targets",
      reason="probabilities are normalised over rows and entries in turn")  # fmt: skip
def sinkhorn_targets(h, w, g, v):
    with torch.no_grad():
        p = ((g @ v.T) / 0.7).exp().T
        p = p / p.sum()
        for _ in range(3):
            p = p / p.sum(1, keepdim=True) / VOCAB
            p = p / p.sum(0, keepdim=True) / TOKENS
        p = (p * TOKENS).T
    return -(p * (h @ w.T / 0.1).log_softmax(-1)).sum(-1).mean()


@loss(LINEAR, style="DINO heads: weight-normalised prototypes")
def normalised_prototypes(h, w, g, v):
    s = F.normalize(h, dim=-1, eps=1e-6) @ F.normalize(w, dim=-1).T
    t = F.normalize(g, dim=-1, eps=1e-6) @ F.normalize(v, dim=-1).T
    p = (t / 0.05).softmax(-1).detach()
    return torch.sum(-p * F.log_softmax(s / 0.1, dim=-1), dim=-1).mean()


@loss(LINEAR, style="RoPE-DINO, MSN: a mean entropy of the anchors next to the loss")
def mean_entropy(h, w, g, v):
    s, t = (h @ w.T).softmax(-1), (g @ v.T / 0.5).softmax(-1).detach()
    ce = -(t * s.log()).sum(-1).mean()
    entropy = (s * s.log()).sum(-1).mean()
    return ce + 0.1 * entropy
