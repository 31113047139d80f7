"""Losses of attention maps, indexers and Gram matrices."""

import math

import torch
import torch.nn.functional as F

from tests.support.losses import kd
from tests.support.of_2026.registry import (
    ATTENTION,
    BATCH,
    CAUSAL,
    DIM,
    EAGER,
    FUTURE,
    HEADS,
    LINEAR,
    ROW,
    ROWS,
    batchmean,
    cross_entropy,
    loss,
    of_rows,
)

CHOSEN = torch.rand(BATCH, ROWS, ROWS, generator=torch.Generator().manual_seed(3)).topk(4).indices


def of_lifted(p, s):
    return of_rows(p, torch.log(p + 1e-10) - torch.log(s + 1e-10)).mean()


def index_scores(iq, ik, iw):
    """As Megatron-core and DeepSeek: ReLU, a weight of each head, their sum."""
    scores = torch.relu(torch.einsum("bqhd,bkd->bqhk", iq, ik))
    return (scores * iw.unsqueeze(-1)).sum(2)


# ------------------------------------------------------------------ writes in place
@loss(ATTENTION, style="masks added in place to both", findings=True)
def masks_in_place(b, a):
    t, s = b, a
    t += CAUSAL
    s.add_(CAUSAL)
    return (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).nan_to_num().sum(-1).mean()


@loss(ATTENTION, style="masked_fill_ and a scale in place", findings=True)
def filled_in_place(a, b):
    a *= DIM**-0.5
    b.mul_(DIM**-0.5)
    for x in (a, b):
        x.masked_fill_(FUTURE, -1e9)
    return kd(a, b)


@loss(ATTENTION, style="assignments at a mask and at a slice", findings=True)
def assigned(a, b):
    a[:, :, FUTURE] = -1e9
    b[:, :, FUTURE] = -1e9
    b[..., -1:] = a[..., -1:] = -1e9
    return kd(a, b)


@loss(ROW, style="an indexer of one head: relu_ and an in-place mask", findings=True)
def relu_in_place(b, a):
    t = b.detach()
    t += CAUSAL
    s = a.relu_() + CAUSAL
    kl = t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))
    return kl.masked_fill(FUTURE, 0.0).sum(-1).mean()


@loss(ROW, style="scores clamped in place", findings=True)
def clamped_in_place(a, b):
    s = a.clamp_(-5, 5)
    b.clamp_(min=-5, max=5)
    return kd(s, b)


# ------------------------------------------------------------------ indexers
@loss(ROW, style="Megatron-core: compute_dsa_indexer_loss, dense", findings=True)
def megatron_indexer(iq, ik, iw, r, u):
    query = r.permute(0, 1, 2, 3).reshape(BATCH * HEADS, ROWS, DIM)
    key = u.permute(0, 1, 3, 2).reshape(BATCH * HEADS, DIM, ROWS)
    attention = (torch.bmm(query.float(), key.float()) * DIM**-0.5).detach()
    attention = attention.reshape(BATCH, HEADS, ROWS, ROWS)
    scores = index_scores(iq, ik, iw)
    attention += CAUSAL.view(1, 1, ROWS, ROWS)
    scores += CAUSAL.unsqueeze(0)
    attention = attention.softmax(-1, dtype=torch.float32).sum(dim=1)
    attention = attention / attention.sum(dim=-1, keepdim=True)
    log_scores = scores.softmax(-1, dtype=torch.float32)
    return of_lifted(attention, log_scores) * 0.01


@loss(ROW, style="Megatron-core: the sparse stage, chosen keys by a mask of -inf")
def megatron_sparse(iq, ik, iw, b):
    attention = (b * DIM**-0.5).detach() + CAUSAL
    scores = index_scores(iq, ik, iw) + CAUSAL
    index_mask = torch.full((BATCH, ROWS, ROWS), float("-inf")).scatter_(-1, CHOSEN, 0)
    index_mask[..., 0] = 0.0
    attention += index_mask.view(BATCH, 1, ROWS, ROWS)
    scores += index_mask
    p = attention.softmax(-1).sum(1)
    p = p / p.sum(-1, keepdim=True)
    return of_lifted(p, scores.softmax(-1))


@loss(EAGER, style="VeOmni: keys chosen by gather, both sides normalised over them",
      reason="keys are chosen for each query")  # fmt: skip
def indexer_of_chosen_keys(iq, ik, iw, b):
    p = (b * DIM**-0.5).softmax(-1).mean(1).gather(-1, CHOSEN).detach()
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-9)
    s = index_scores(iq, ik, iw).gather(-1, CHOSEN).log_softmax(-1)
    return F.kl_div(s, p, reduction="none").sum(-1).mean()


@loss(ATTENTION, style="an indexer of one head: the mean of the heads, clamped")
def mean_of_heads(ik, b, iq):
    p = (b * DIM**-0.5).masked_fill(FUTURE, float("-inf")).softmax(-1).mean(1).detach()
    s = (iq[:, :, 0] @ ik.mT).masked_fill(FUTURE, float("-inf")).softmax(-1)
    return of_rows(p, p.clamp_min(1e-9).log() - s.clamp_min(1e-9).log()).mean()


@loss(EAGER, style="SeerAttention: a block's largest probability", reason="max_pool2d has no rule")
def pooled_maps(q, k, p_b):
    p = F.max_pool2d(p_b, 3)
    s = (q[:, :, ::3] @ k[:, :, ::3].mT).log_softmax(-1)
    return batchmean(s, p / p.sum(-1, keepdim=True))


@loss(EAGER, style="NSA gates: sums of blocks of keys against compressed keys",
      reason="probabilities are summed over blocks of keys")  # fmt: skip
def sums_of_blocks(q, k, p_b):
    p = p_b.view(BATCH, HEADS, ROWS, ROWS // 3, 3).sum(-1).detach()
    s = (q @ k.view(BATCH, HEADS, ROWS // 3, 3, DIM).mean(3).mT).log_softmax(-1)
    return cross_entropy(p, s)


# ------------------------------------------------------------------ maps
@loss(ATTENTION, style="MiniLM, BitDistill: relations of queries, keys and values")
def relations(q, k, r, u):
    total = 0.0
    for x, y in ((q, r), (k, u)):
        s, t = x @ x.mT / math.sqrt(DIM), y @ y.mT / math.sqrt(DIM)
        total = total + kd(s, t)
    return total / ROWS


@loss(ATTENTION, style="FiD, retrievers: attention summed over heads as the target")
def retriever_from_a_reader(ik, p_b, iq):
    s = (iq[:, :, 1] @ ik.mT / math.sqrt(DIM)).log_softmax(-1)
    return batchmean(s, p_b.mean(1).detach())


@loss(ROW, style="LoLCATs: feature maps in place of a softmax")
def feature_maps(q, k, b):
    s = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).masked_fill(FUTURE, 0.0)
    s = s / (s.sum(-1, keepdim=True) + 1e-6)
    return cross_entropy(b.masked_fill(FUTURE, -1e9).softmax(-1), (s + 1e-8).log())


@loss(ROW, style="an attention sink as a logit of each head")
def sinks_as_logits(a, b):
    sink = torch.linspace(-1, 1, HEADS).view(1, HEADS, 1, 1).expand(BATCH, HEADS, ROWS, 1)
    s, t = (torch.cat([x, sink], -1).log_softmax(-1)[..., :-1] for x in (a, b))
    return of_rows(t.exp(), t - s).mean()


@loss(ROW, style="MLA absorbed: latent and rotary parts in one width")
def absorbed_mla(q, k, r, u):
    s = torch.einsum("bhqd,bhkd->bhqk", q[..., :3], k[..., :3])
    s = s + torch.einsum("bhqd,bhkd->bhqk", q[..., 3:], k[..., 3:])
    return kd(s, torch.cat([r, r], -1) @ torch.cat([u, u], -1).mT)


# ------------------------------------------------------------------ raw products
# fmt: off
loss(ROW, style="MOHAWK: the norm of differences of maps", norm_of_maps=lambda p_a, p_b: (
    torch.linalg.matrix_norm(p_a - p_b, ord="fro").mean()))
loss(ATTENTION, style="a sink's column left out, renormalised",
     without_the_sink=lambda a, b: F.kl_div(
         a[..., 1:].log_softmax(-1), b[..., 1:].softmax(-1), reduction="none").sum(-1).mean())
loss(ROW, style="TinyBERT: MSE of raw scores", findings=True,
     mse_of_scores=lambda a, b: F.mse_loss(a * 0.5, b * 0.5))
loss(ROW, style="the norm of differences of scores", findings=True,
     norm_of_scores=lambda a, b: (a - b).pow(2).sum().sqrt())
loss(ROW, style="matrix_norm, l1_loss and .norm()", findings=True, three_norms=lambda a, b: (
    torch.linalg.matrix_norm(a - b).mean() + F.l1_loss(a, b) + 0.1 * (a - b).norm()))
# fmt: on


@loss(ROW, style="DINOv3: Gram matrices, negatives removed in place", findings=True)
def gram(x, y):
    a, b = F.normalize(x.float(), dim=-1), F.normalize(y.float(), dim=-1)
    s, t = torch.matmul(a, a.transpose(-1, -2)), torch.matmul(b, b.transpose(-1, -2))
    t[t < 0] = 0.0
    s[s < 0] = 0.0
    return torch.nn.MSELoss()(s, t)


@loss(ROW, style="DINOv3: negatives of both removed where the teacher has them")
def gram_of_both(x, y):
    a, b = F.normalize(x, dim=-1).flatten(0, 1), F.normalize(y, dim=-1).flatten(0, 1)
    s, t = a @ a.T, b @ b.T
    s[(s < 0) & (t < 0)] = 0.0
    t[t < 0] = 0.0
    return (s - t).square().mean()


@loss(ROW, style="a linear-attention mixer: products times decays", findings=True)
def decayed_products(q, a, b):
    c = F.logsigmoid(q.detach().sum(-1)).cumsum(-1)
    decay = torch.exp(c[..., :, None] - c[..., None, :])
    s = (a * decay).masked_fill(FUTURE, 0.0)
    t = b.masked_fill(FUTURE, -1e9).softmax(-1)
    return ((s - t) ** 2).sum((-1, -2)).mean()


@loss(ROW, style="RKD: cosine similarities of a batch's samples")
def relational_angles(x, y):
    s, t = (F.normalize(z.flatten(0, 1), dim=-1) for z in (x, y))
    return F.smooth_l1_loss(s @ s.T, t @ t.T)


# ------------------------------------------------------------------ embedding models
@loss(LINEAR, style="sentence-transformers: DistillKLDivLoss over in-batch passages")
def in_batch_passages(x, y):
    a, b, c, d = x.flatten(0, 1)[::2], x.flatten(0, 1)[1::2], y[0], y[1]
    return kd(a @ b.T / 2.0, c @ d.T / 2.0) * 4.0


@loss(LINEAR, style="both directions of a similarity matrix, CLIP-KD")
def both_directions(x, y):
    a, b, c, d = (F.normalize(z, dim=-1) for z in (x[0], x[1], y[0], y[1]))
    s, t = 14.0 * a @ b.T, 14.0 * c @ d.T
    return (kd(s, t) + kd(s.T, t.T)) / 2


@loss(EAGER, style="CachedGIST: a guide masks false negatives",
      reason="the mask is computed from scores")  # fmt: skip
def guided_negatives(x, y):
    a, b = (F.normalize(z, dim=-1) for z in (x[0], x[1]))
    guide = F.normalize(y[0], dim=-1) @ F.normalize(y[1], dim=-1).T
    s = a @ b.T / 0.05
    s = s.masked_fill(guide > guide.diagonal()[:, None] - 0.1, -torch.inf)
    s = torch.where(torch.eye(ROWS, dtype=torch.bool), a @ b.T / 0.05, s)
    return F.cross_entropy(s, torch.arange(ROWS))


@loss(ROW, style="MarginMSE over all pairs of a batch")
def margins(x, y):
    s, t = x[0] @ x[1].T, y[0] @ y[1].T
    s, t = (z.diagonal()[:, None] - z for z in (s, t))
    return F.mse_loss(s, t)


@loss(EAGER, style="ColBERT: the largest product of each query's token",
      reason="scores are summed after a maximum")  # fmt: skip
def late_interaction(x, y):
    s = (x[0] @ x.mT).amax(-1).sum(-1)
    t = (y[0] @ y.mT).amax(-1).sum(-1)
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")
