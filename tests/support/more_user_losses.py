"""More losses as users of 2026 write them: higher-order operators, graph breaks, dense targets.

As in `user_losses`, which they are added to: naive spellings, of which the report has to be silent
about none.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.losses import kd as kl
from tests.support.user_losses import (
    HEAD_DIM,
    HEADS,
    IDS,
    LABELS,
    LENGTH,
    TOKENS,
    TOP,
    TOP_LOGPROBS,
    VOCAB,
    attention,
    chosen,
    cross_entropy,
    heads,
)


# --------------------------------------------------------- what hides a loss from the compiler
class FusedLinearKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w, t):
        logits = h @ w.T
        lse = logits.logsumexp(-1, keepdim=True)
        p = t.softmax(-1)
        ctx.save_for_backward(h, w, (logits - lse).exp() - p)
        return (p * (p.log() - logits + lse)).sum(-1).mean()

    @staticmethod
    def backward(ctx, grad):
        h, w, d = ctx.saved_tensors
        d = d * grad / len(h)
        return d @ w, d.T @ h, None


@torch.compiler.disable
def opaque_kl(s, t):
    return kl(s, t)


@torch.library.custom_op("streamkl_tests::softcap", mutates_args=())
def softcap(x: torch.Tensor) -> torch.Tensor:
    return 30 * torch.tanh(x / 30)


softcap.register_fake(torch.empty_like)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(output)


softcap.register_autograd(
    lambda ctx, grad: grad * (1 - (ctx.saved_tensors[0] / 30) ** 2), setup_context=_keep
)
# fmt: off
heads(0, "a fused linear loss as a custom autograd.Function, Liger",
      linear_function=lambda h, w, t: FusedLinearKL.apply(h, w, t))
heads(0, "torch.cond on a schedule", branch_of_cond=lambda s, t, h: torch.cond(
    h.sum() > 0, lambda s, t: kl(s / 2, t / 2) * 4, lambda s, t: kl(s, t) * 1.0, (s, t)))
heads(4, "chunks of tokens, each in a checkpoint", checkpointed_chunks=lambda h, w, g, v: sum(
    checkpoint(lambda a, b: kl(a @ w.T, b @ v.T), a, b, use_reentrant=False)
    for a, b in zip(h.chunk(4), g.chunk(4), strict=True)) / 4)
heads(0, "a helper that torch.compiler.disable leaves out",
      disabled_helper=lambda h, w, g, v: opaque_kl(h @ w.T, g @ v.T))
heads(0, "a softcap as a custom operator",
      custom_operator=lambda s, t: kl(softcap(s), softcap(t)))
# fmt: on


@heads(0, "labelled rows by a boolean mask, without enable()")
def masked_rows(h, w, g, v):
    keep = LABELS % 3 > 0
    return kl((h @ w.T)[keep], (g @ v.T)[keep])


@heads(1, "a metric after the loss, by item()")
def metric_after_the_loss(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    loss = kl(s, t)
    print(end="" if loss.item() < 1e9 else "overflow")
    agree = (s.argmax(-1) == t.argmax(-1)).float().mean()
    return loss * (1 - agree)


@heads(0, "gradients of logits clamped by a hook")
def hook_on_logits(s, t):
    s.register_hook(lambda grad: grad.clamp(-1, 1))
    return kl(s, t)


@heads(1, "a teacher by way of NumPy")
def numpy_teacher(h, w, g, v):
    t = torch.from_numpy((g @ v.T).softmax(-1).numpy())
    return F.kl_div((h @ w.T).log_softmax(-1), t, reduction="batchmean")


@heads(1, "logits under autocast, the loss in float32")
def autocast_inside(h, w, g, v):
    with torch.autocast("cpu", torch.bfloat16):
        s, t = h @ w.T, g @ v.T
    return kl(s.float(), t.float())


@heads(1, "a model's output with loss and logits")
def output_of_a_model(h, w, g, v):
    logits = h @ w.T
    with torch.no_grad():
        wanted = g @ v.T
    return {"loss": kl(logits, wanted), "logits": logits}


# ---------------------------------------------------------------------------------- dense targets
@heads(1, "a cached top-k, the rest spread evenly")
def smoothed_topk_target(log_s):
    p = TOP_LOGPROBS.exp()
    rest = (1 - p.sum(-1, keepdim=True)).clamp_min(0) / (VOCAB - TOP)
    target = rest.expand(TOKENS, VOCAB).clone()
    target.scatter_(-1, IDS, p)
    return cross_entropy(target, log_s)


@heads(0, "a target filled by index")
def target_by_index(s):
    target = torch.zeros(TOKENS, VOCAB)
    target[torch.arange(TOKENS)[:, None], IDS] = TOP_LOGPROBS.exp()
    return F.cross_entropy(s, target)


# fmt: off
heads(1, "cross_entropy with the teacher's probabilities", soft_cross_entropy=lambda s, t: (
    F.cross_entropy(s / 2, (t / 2).softmax(-1)) * 4))
heads(1, "a mixture of the teacher and one-hot labels", mixed_with_labels=lambda p_t, log_s: (
    cross_entropy(0.7 * p_t + 0.3 * F.one_hot(LABELS, VOCAB).to(p_t.dtype), log_s)))
# fmt: on


@heads(5, "decoupled distillation")
def decoupled(s, t):
    mask = torch.zeros_like(s).scatter_(1, LABELS[:, None], 1).bool()
    two_s, two_t = (
        torch.stack([(p * mask).sum(1), (p * ~mask).sum(1)], 1)
        for p in (s.softmax(1), t.softmax(1))
    )
    target_class = F.kl_div(two_s.log(), two_t, reduction="batchmean")
    return target_class + 8 * kl(s - 1000.0 * mask, t - 1000.0 * mask)


@heads(0, "a teacher truncated to its top-p")
def top_p(p_t, log_s):
    order = p_t.sort(-1, descending=True)
    keep = (order.values.cumsum(-1) - order.values) < 0.9
    t = p_t * torch.zeros_like(p_t, dtype=torch.bool).scatter(-1, order.indices, keep)
    return cross_entropy(t / t.sum(-1, keepdim=True), log_s)


# ---------------------------------------------------------------------- other spellings of losses
@heads(2, "adaptive KL: forward and reverse weighted by gaps of sorted probabilities")
def adaptive_kl(p_t, p_s):
    sorted_t, order = p_t.sort(-1, descending=True)
    gap = (sorted_t - p_s.gather(-1, order)).abs()
    head = (gap * (sorted_t.cumsum(-1) < 0.5)).sum(-1) / gap.sum(-1)
    forward = (p_t * (p_t.log() - p_s.log())).sum(-1)
    reverse = (p_s * (p_s.log() - p_t.log())).sum(-1)
    return (head * forward + (1 - head) * reverse).mean()


@heads(1, "torch.distributions")
def categorical(s, t):
    s, t = (torch.distributions.Categorical(logits=x) for x in (s, t))
    return torch.distributions.kl_divergence(t, s).mean()


def z(x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-7)


def k3(difference):
    return (difference.exp() - 1 - difference).mean()


heads(1, "log-probabilities that are normalised again",
      normalised_twice=lambda log_s, log_t: kl(log_s, log_t))  # fmt: skip
heads(1, "standardized logits", standardized=lambda s, t: kl(z(s), z(t)))
# fmt: off
heads(2, "the k3 estimate of a KL at sampled tokens",
      k3_estimate=lambda log_s, log_t: k3(chosen(log_t) - chosen(log_s)))
heads(1, "deep mutual learning", mutual_learning=lambda s, h, g, v: (
    kl(s, t := (g * h.mean()) @ v.T) + kl(t, s)))
heads(1, "torch.special.entr", special_entropy=lambda p_t, log_s: (
    -torch.special.entr(p_t) - p_t * log_s).sum(-1).mean())
heads(0, "probabilities by sigmoids", sigmoids=lambda s, t: (
    F.binary_cross_entropy_with_logits(s, t.sigmoid())))
heads(0, "a sampled token by Gumbel noise", gumbel=lambda log_t, s: (
    -(log_t * F.gumbel_softmax(s, hard=True)).sum(-1).mean()))
# fmt: on


@attention(0, "attention rollout")
def rollout(p_s, p_t):
    a, b = (p.mean(1) + torch.eye(LENGTH) for p in (p_s, p_t))
    return F.mse_loss(a @ a, b @ b)


@attention(1, "a mean over layers")
def mean_of_layers(q, k, r, u):
    s, t = (
        torch.stack([(x * c @ y.mT).softmax(-1) for c in (1.0, 0.5)]).mean(0)
        for x, y in ((q, k), (r, u))
    )
    return F.kl_div(s.log(), t, reduction="batchmean")


@attention(1, "the expectation by einsum")
def kl_by_einsum(q, k, r, u):
    s, t = (
        torch.einsum("bhid,bhjd->bhij", x, y) / math.sqrt(HEAD_DIM) for x, y in ((q, k), (r, u))
    )
    difference = t.log_softmax(-1) - s.log_softmax(-1)
    return torch.einsum("bhij,bhij->", t.softmax(-1), difference) / LENGTH


@attention(1, "scores and bias by baddbmm")
def scores_by_baddbmm(q, k, r, u):
    bias = torch.full((LENGTH, LENGTH), -1e4).triu(1).expand(HEADS, -1, -1)
    s = torch.baddbmm(bias, q[0], k[0].mT, alpha=0.5)
    return kl(s, torch.baddbmm(bias, r[0], u[0].mT, alpha=0.5))


def attend(q, k, v):
    """scaled_dot_product_attention as torch's documentation writes it."""
    bias = torch.zeros(LENGTH, LENGTH)
    bias.masked_fill_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().logical_not(), -1e9)
    weight = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.size(-1)))
    weight += bias
    weight = torch.softmax(weight, dim=-1)
    return weight @ v, weight


@attention(1, "attention by hand, outputs and maps compared")
def outputs_and_maps(q, k, r, u):
    (out, a), (wanted, b) = attend(q, k, k), attend(r, u, u)
    return F.mse_loss(out, wanted) + F.mse_loss(a, b)


@attention(1, "relations of tokens, MiniLM")
def relations(q, k, r, u):
    a, b = (F.normalize(x.transpose(1, 2).flatten(2), dim=-1) for x in (q, r))
    return kl(a @ a.mT / 0.1, b @ b.mT / 0.1)


@attention(0, "pairwise distances by broadcasting")
def distances(q, k, r, u):
    a, b = (((x[:, :, :, None] - x[:, :, None]) ** 2).sum(-1) for x in (q, r))
    return F.smooth_l1_loss(a, b)


@attention(2, "CLIP, both directions")
def both_directions(q, k, r, u):
    a, b, c, d = (F.normalize(x.flatten(0, 2), dim=-1) for x in (q, k, r, u))
    s, t = a @ b.T * 10, c @ d.T * 10
    return (kl(s, t) + kl(s.T, t.T)) / 2


@attention(0, "Sinkhorn targets, DINOv2")
def sinkhorn(s, t):
    t = torch.exp(t / 5)
    for _ in range(3):
        t = t / t.sum(-2, keepdim=True)
        t = t / t.sum(-1, keepdim=True)
    return cross_entropy(t, (s / 0.1).log_softmax(-1))
