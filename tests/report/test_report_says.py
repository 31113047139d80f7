"""What a report says of a loss: what blocks it and where, its form and roles, and warnings."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tests.support.more_user_losses  # noqa: F401  # adds to USER_LOSSES
import torch_streamkl
from tests.support.compiling import compile_rewritten
from tests.support.losses import kd
from tests.support.made_inputs import of_inputs, with_probabilities
from tests.support.reason_examples import EXAMPLES as REASONS
from tests.support.user_losses import OF_MAPS, USER_LOSSES, kl_of_logs

OPTIONS = {"streamkl.inner": "eager"}
OF_HEADS = with_probabilities(
    {"s": ("h w", lambda h, w: h @ w.mT), "t": ("g v", lambda g, v: g @ v.mT)}
)
Loss = Callable[..., Any]
Shape = tuple[int, ...]


def explained(fn, *inputs):
    torch._dynamo.reset()
    inputs = inputs or tuple(USER_LOSSES["cosine"].inputs())
    return torch_streamkl.explain(fn, *inputs, options=OPTIONS)


@dataclass
class Said:
    """Texts that the report of a loss has, and those that it has not.

    Its inputs are those of a user's loss, or of these shapes, of which the first two are trained.
    Its parameters name what it gets: inputs, or what is made of them.
    """

    loss: Loss
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    usual: str = "cosine"

    def program(self):
        made = {"cosine": of_heads, "gram": of_maps}.get(self.usual)
        return made(self.loss) if made else self.loss

    def inputs(self):
        if not self.shapes:
            return USER_LOSSES[self.usual].inputs()
        return [torch.randn(shape, requires_grad=i < 2) for i, shape in enumerate(self.shapes)]


def of_heads(loss):
    """A program with parameters, which the report names."""
    program = of_inputs(loss, OF_HEADS, inputs="hwgv")[0]
    return loss if program is loss else lambda h, w, g, v: program(h, w, g, v)


def of_maps(loss):
    return of_inputs(loss, OF_MAPS, inputs="qkru")[0]


def user(name, *has):
    return Said(USER_LOSSES[name].fn, has, usual=name)


# ------------------------------------------------------------------------------ what blocks
def drawn_and_scattered(t, log_s):
    p = F.gumbel_softmax(t, hard=True)
    return -(p * log_s).sum(-1).mean()


def with_tanh(s, t):
    return kd(s.tanh() * s.atan(), t)


def with_logaddexp(log_s, log_t):
    return (log_t.exp() * (log_t - torch.logaddexp(log_s, log_t))).cumsum(-1).mean()


def times_zero(s, t):
    s = s * 0  # here
    return kd(s, t)


def a_product_of_all_rows(p_t, log_s):
    return -(p_t @ log_s.T).diagonal().mean()


def applied_to_a_stack(log_s, log_t):
    m = torch.logsumexp(torch.stack([log_s, log_t]) + math.log(0.5), dim=0)
    return F.kl_div(m, log_t, reduction="batchmean", log_target=True)


def rows_after_a_graph_break(h, w, g, v):
    rows = F.kl_div((h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1), reduction="none")
    keep = torch.arange(48) % 3 > 0
    return rows[keep].sum() / keep.sum()  # here


def sorted_in_a_checkpoint(h, w, g, v):
    def loss(a, b):
        p, q = (x.softmax(-1).sort(-1).values for x in (a @ w.T, b @ v.T))
        return (p - q).abs().sum(-1).mean()

    return checkpoint(loss, h, g, use_reentrant=False)


def three_columns(join):
    return lambda s, t: F.kl_div(
        join(s).log_softmax(-1), join(t).log_softmax(-1), None, None, "sum", True
    )


def with_agreement(log_s, log_t):
    loss = F.kl_div(log_s, log_t, reduction="batchmean", log_target=True)
    return loss, agreement(log_s, log_t)


def agreement(s, t):
    return (s.log_softmax(-1).argmax(-1) == t.log_softmax(-1).argmax(-1)).float().mean()


def squared_maps(p_s, p_t):
    return F.mse_loss(p_s @ p_s, p_t @ p_t)


def ranked_with_argmax(s, t):
    return kd(s, t.sort(-1).values), s.argmax(-1)


def but_the_label(s, t):
    keep = torch.arange(s.shape[-1]) != torch.arange(len(s))[:, None]
    s, t = (x.masked_fill(~keep, torch.finfo(x.dtype).min) for x in (s, t))
    return -(t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()


SCATTERED = {
    "by scatter": lambda p, ids, v: torch.zeros_like(p).scatter(-1, ids, v / v.sum(-1, True)),
    "by scatter_": lambda p, ids, v: torch.zeros_like(p).scatter_(-1, ids, v.softmax(-1)),
    "before it is divided": lambda p, ids, v: (
        (x := torch.zeros_like(p).scatter(-1, ids, v)) / x.sum(-1, True)
    ),
}


def dense_topk_loss(scatter, p_t, log_s):
    values, ids = p_t.topk(4)
    return -(scatter(p_t, ids, values) * log_s).sum(-1).mean()


def of_topk_entries_over_rows(s, t):
    values, ids = t.topk(4)
    return F.kl_div(s.log_softmax(0).gather(-1, ids), values.softmax(-1), reduction="batchmean")


def of_topk_entries(p_t, log_s):
    values, ids = p_t.topk(4)
    p = values / values.sum(-1, keepdim=True)
    return (p * (p.log() - log_s.gather(-1, ids))).sum(-1).mean()


def binary_of_a_label(p_t, p_s):
    labels = torch.arange(len(p_s))[:, None] % p_s.shape[-1]
    p, q = (
        torch.cat([x.gather(1, labels), x.sum(1, keepdim=True) - x.gather(1, labels)], 1)
        for x in (p_t, p_s)
    )
    return (p * (p.log() - q.log())).sum(-1).mean()


def overwritten(s, t):
    s[s < 0] = 0
    t[t < 0] = 0
    return (s.sort(-1).values - t.sort(-1).values).square().mean()


def a_slice_with_a_step(s, t):
    s[..., ::2] = -1e4  # here
    return kd(s, t)


def hook_on_probabilities(log_s, p_t):
    log_s.register_hook(lambda grad: grad.clamp(-1, 1))
    return F.kl_div(log_s, p_t, reduction="batchmean")


def labels_and_a_transpose(s):
    return F.cross_entropy(s, torch.ones(len(s)).long()) + s.T.sort(-1).values.mean()


def multi_label(s, t):
    binary = F.binary_cross_entropy(s.sigmoid(), t.sigmoid())
    return binary + s.log_softmax(-1)[:, :2].mean()


def a_target_of_the_same_shape(s, t):
    target = torch.zeros_like(s).scatter(-1, t.topk(3).indices, 1.0)
    return F.binary_cross_entropy(s.log_softmax(-1).exp(), target)


OF_A_PRODUCT = next(x for x in REASONS if "an MLP of positions" in x)
PAIRS = torch.arange(64)[:, None] - torch.arange(64) + 63


def positions_of_a_product(q, k, r, u):
    table = F.linear(torch.randn(127, 8), u.new_ones(2, 8))
    bias = table[PAIRS.flatten()].view(64, 64, 2).permute(2, 0, 1)
    return kd(q @ k.mT + bias, r @ u.mT)


def mixture_of_heads(h, w, g, v):
    gate = (h @ w[:2].T).softmax(-1)
    p = gate[:, :1] * (h @ w.T).softmax(-1) + gate[:, 1:] * ((2 * h) @ w.T).softmax(-1)
    return F.kl_div(p.log(), (g @ v.T).softmax(-1), reduction="batchmean")


def entries_by_the_operator(h, w, log_t):
    log_probs, ids = log_t.topk(4)
    return torch_streamkl.linear_topk_kl(h, w, ids, log_probs, tail="bucket").mean()


def drawn_labels(log_s, log_t):
    ids = torch.multinomial(log_s.exp(), 1)
    return (log_s.gather(-1, ids) - log_t.gather(-1, ids)).mean()


def normalized_logits(s, t):
    s, t = (F.layer_norm(x, x.shape[-1:]) for x in (s, t))
    return kd(s, t)


def map_between_vocabularies(p_t, log_s):
    p = p_t @ torch.randn(160, 160).softmax(-1)
    return F.kl_div(log_s, p, reduction="batchmean")


def contrastive_decoding(s, g, v):
    expert, amateur = ((x @ v.T).softmax(-1).log() for x in (g, g.flip(0)))
    rare = expert < expert.amax(-1, keepdim=True) - 2
    return kd(s, (expert - amateur).masked_fill(rare, -1e9))


def next_to_its_log_softmax(log_s, t, v):
    """A finite mask, of which log_softmax has numbers, and the logarithm of a softmax -inf."""
    padding = torch.arange(v.shape[0]) >= v.shape[0] - 3
    t = t.masked_fill(padding, -1e9)
    p, log = t.softmax(-1), t.log_softmax(-1)
    return (p * (p.log() - log_s) - 0.1 * log).sum(-1).mean()


class Halved(torch.autograd.Function):
    """A loss whose gradient is written by hand."""

    @staticmethod
    def forward(ctx, s, t):
        p, q = s.softmax(-1), t.softmax(-1)
        ctx.save_for_backward(p, q)
        return (q * (q.log() - p.log())).sum(-1).mean()

    @staticmethod
    def backward(ctx, grad):
        p, q = ctx.saved_tensors
        return grad * (p - q) / 2, None


def logs_of_a_checkpoint(h, w, p_t):
    s = checkpoint(lambda x: (x @ w.T).log_softmax(-1), h, use_reentrant=False)
    return F.kl_div(s, p_t, reduction="batchmean")


def classes(p_s, p_t):
    return (p_s.mT @ p_s - p_t.mT @ p_t).square().mean()


def pooled(p_s, p_t):
    return F.mse_loss(F.avg_pool1d(p_s, 4), F.avg_pool1d(p_t, 4))


def dist(p_s, p_t):
    def distance(p, q):
        p, q = (x - x.mean(-1, keepdim=True) for x in (p, q))
        return 1 - F.cosine_similarity(p, q, dim=-1).mean()

    return distance(p_s, p_t) + distance(p_s.T, p_t.T)


def centered(s, t):
    """As DINO: the mean of the teacher's probabilities is the center of the next step."""
    target = (t / 0.04).softmax(-1)
    return -(target * (s / 0.1).log_softmax(-1)).sum(-1).mean(), target.mean(0)


def returned_and_read(q, p_s, p_t):
    return F.kl_div(p_s.log(), p_t, reduction="batchmean"), p_s @ q, p_s


# ----------------------------------------------------- losses, their sides and their inputs
def without_numbers(p_t, p_s):
    """ABKD's limit: a divergence whose terms nan_to_num replaces before their sum."""
    log_p, log_q = p_t.log(), p_s.log()
    terms = 0.5 * (log_q - log_p) + (0.5 * (log_p - log_q)).exp() - 1
    return (torch.nan_to_num(4 * terms, nan=0.0, posinf=0.0, neginf=0.0) * p_s).sum(-1).mean()


# what a checkpoint's body takes from around it: a transpose of w, or w from torch 2.14 on
OUTER, OUTER_TEACHER = ("w", "v") if torch.__version__ >= (2, 14) else ("a view", "a view")


def in_a_checkpoint(h, w, g, v):
    return checkpoint(lambda a, b: kd(a @ w.T, b @ v.T), h, g, use_reentrant=False)


def js_of_float32_numbers(log_s, log_t):
    """As TRL: beta is a tensor, and its logarithms are rounded."""
    beta = torch.tensor(0.1)
    m = torch.logsumexp(torch.stack([log_s + torch.log1p(-beta), log_t + torch.log(beta)]), dim=0)
    of_t, of_s = (kl_of_logs(m, x) for x in (log_t, log_s))
    return (beta * of_t + (1 - beta) * of_s).sum(-1).mean()


def skewed(p_t, p_s, alpha=0.1):
    return (p_t * (p_t.log() - (alpha * p_t + (1 - alpha) * p_s).log())).sum(-1).mean()


MASK = torch.arange(9) % 3 == 0


def a_masked_vocabulary(s, t):
    return kd(s.masked_fill(MASK, -torch.inf), t.masked_fill(MASK, -torch.inf))


def sliced_probabilities(p_s, p_t):
    return (p_s[:, :5] - p_t[:, :5]).square().sum()


def weighted_keys(p_s, p_t):
    p, t = (x[:, :, 0] for x in (p_s, p_t))
    keys = p.shape[-1]
    kept = (torch.arange(keys) > 0).to(p.dtype)
    return ((p - t).square() * kept).sum() / (p[..., 0].numel() * (keys - 1))


def a_slice_of_one_query(p_s, p_t):
    return F.mse_loss(*(x[:, :, 0, 1:] for x in (p_s, p_t)))


def padded_probabilities(p_s, p_t):
    return F.mse_loss(*(F.pad(x, (0, 3)) for x in (p_s, p_t)))


def joined_with_zeros(p_t, p_s):
    return (torch.cat([p_t, p_t.new_zeros(len(p_t), 2)], -1) - p_s).square().sum()


def padded_scores(t, p_s):
    t = F.pad(t, (0, 2), value=torch.finfo(t.dtype).min)
    return (t.softmax(-1) - p_s).square().sum()


def a_sliced_vocabulary(s, t):
    s[..., 7:] = -torch.inf
    t[..., 7:] = -torch.inf
    return kd(s, t)


def causal(s, t):
    keep = torch.ones(5, 9, dtype=torch.bool).tril()
    return kd(s.masked_fill(~keep, -torch.inf), t.masked_fill(~keep, -torch.inf))


def mean_of_teachers(log_s, p_t):
    return F.kl_div(log_s, p_t.mean(0), reduction="batchmean")


def mean_of_students(p_s, p_t):
    return (p_t * (p_t.log() - p_s.mean(0).log())).sum(-1).mean()


def means(p_s, p_t):
    return (p_t.mean(-3) - p_s.mean(-3)).abs().sum(-1).mean()


HEADS = (5, 4), (9, 4), (5, 3), (9, 3)
SMALLER = (5, 4), (9, 4), (5, 3), (7, 3)  # the teacher's vocabulary
MAPS = (2, 3, 5, 4), (2, 3, 9, 4), (2, 3, 5, 4), (2, 3, 9, 4)
AVERAGED = "forward_kl, {} averaged over a leading dimension"
SAID = {
    # parts of an operation are not named, nor is one that fuses elsewhere
    "draws and scatters": Said(
        drawn_and_scattered, ("gumbel_softmax is applied to scores",), ("scatter", "exponential")
    ),
    "tanh and atan": Said(with_tanh, ("not fused", "  atan is applied to"), ("tanh is",)),
    "logaddexp and cumsum": Said(with_logaddexp, ("  cumsum is applied to",), ("logaddexp is",)),
    "times 0": Said(
        times_zero, ("  scores multiplied by 0", "s = s * 0  # here", "torch.tensor(0.0)")
    ),
    "an einsum of rows": Said(
        lambda p_t, p_s: 1 - torch.einsum("tv,tv->t", p_t, p_s).mean(),
        ("1 of 1 loss fused", "sum of P*S"),
    ),
    "a product of all rows": Said(
        a_product_of_all_rows,
        ("the sum over the keys is written as a matrix product",), ("no other distribution",),
    ),
    "a stack": Said(applied_to_a_stack, ("loss",), ("no matrix product", "not made")),
    "a graph break that ends a divergence": Said(
        rows_after_a_graph_break,
        ("leaves the graph before it is summed over the keys: a graph break at",
         "rows[keep].sum() / keep.sum()  # here", "torch_streamkl.enable()"),
    ),
    "a sum that no operator has": Said(
        without_numbers,
        ("nan_to_num is applied to attention or vocabulary probabilities",),
        ("leaves the graph",),
    ),
    "a sort in a checkpoint": Said(
        sorted_in_a_checkpoint,
        ("feeds sort at", "which needs whole rows"), ("returned by the compiled function",),
    ),
    "a write to scores that are sorted": Said(
        overwritten, ("is overwritten in place at", "masked_fill instead of masked_fill_"),
        ("another tensor",), usual="gram",
    ),
    "a slice with a step": Said(
        a_slice_with_a_step, ("s[..., ::2] = -1e4  # here",), usual="gram"
    ),
    "a top-k of what is normalized over rows": Said(
        of_topk_entries_over_rows, ("single entries of scores",), ("no top-k",)
    ),
    "joined columns": Said(
        three_columns(lambda x: torch.stack([x[:, 5], x[:, 9], x[:, 11]], -1)),
        ("parts of the scores are joined by stack", "logits[:, [5, 9, 11]]"),
        ("leaves the graph",),
    ),
    "listed columns": Said(three_columns(lambda x: x[:, [5, 9, 11]]), ("1 of 1 loss fused",)),
    "all logits but the label's": Said(but_the_label, ("1 of 1 loss fused",)),
    **{
        f"a top-k scattered {name}": Said(
            functools.partial(dense_topk_loss, scatter),
            ("probabilities are scattered to the keys", "log_s.gather(-1, ids)"),
            ("different dimensions", "rows or some heads"),
        )
        for name, scatter in SCATTERED.items()
    },
    "entries of a top-k": Said(of_topk_entries, ("1 of 1 loss fused",)),
    "labels of this graph": Said(
        binary_of_a_label,
        ("also read by sum at",),
        ("not made",),
    ),
    "a hook on probabilities": Said(
        hook_on_probabilities,
        ("comes from register_hook at", "register the hook on the hidden states"),
    ),
    "an attribute": Said(labels_and_a_transpose, ("T",), ("getattr",)),
    "a custom function": user("custom_function", "it is in a custom autograd.Function"),
    "a checkpoint": user("checkpointed_loss", "it is an input of the checkpoint that the loss is"),
    "item()": user(
        "item_between", "lies between: scale = 1.0 if s.detach().amax().item() < 0 else 2.0"
    ),
    "labels alone": user(
        "cross_entropy_alone", "no distillation loss recognized",
        "cross-entropy with labels alone",
    ),
    "positions by an MLP": Said(
        REASONS[OF_A_PRODUCT],
        ("a function of another matrix product is added", "Hint: compute the bias or gate"),
        ("an id twice",), usual="gram",
    ),
    "a gate of a product": Said(
        mixture_of_heads, ("a value of another matrix product", "Hint: compute the bias or gate"),
        ("an id twice",),
    ),
    "an operator of ours": Said(
        entries_by_the_operator,
        ("feeds topk at",),
        ("linear_topk is applied", "no fused operator"),
    ),
    "a comparison of log-probabilities": Said(
        contrastive_decoding,
        ("a comparison with the logarithm of a probability that may underflow", "log_softmax"),
        ("supported.md",),
    ),
    "labels that are drawn": Said(
        drawn_labels, ("multinomial is applied to",), ("has no rule",)
    ),
    "logits of a layer norm": Said(
        normalized_logits,
        ("layer_norm at", "is applied to scores: the rewrite reads it in another spelling"),
        ("what is computed of",),
    ),
    "a map between vocabularies": Said(
        map_between_vocabularies, ("a matrix product of probabilities", "whole rows"),
        ("swap the operands",),
    ),
    "entries of a product as a bias": Said(
        positions_of_a_product,
        ("a function of another matrix product is added", "Hint: compute the bias or gate"),
        ("an id twice",), usual="gram",
    ),
    "a temperature by row": Said(
        REASONS["the logarithm of a probability that may be 0 by underflow"],
        ("the inverse of the logarithm of a probability", "take logarithms by log_softmax"),
    ),
    "a logarithm and a log-softmax": Said(
        next_to_its_log_softmax, ("the logarithm of a softmax", "next to its log-softmax"),
    ),
    "a temperature": Said(
        REASONS["a temperature that is computed from all logits"],
        ("scores are scaled by what std computes of them", "Hint: compute the temperature"),
    ),
    "a softmax next to what is read": Said(
        multi_label, ("matmul at", "feeds binary_cross_entropy"), ("log_softmax at",)
    ),
    "a shape that is read": Said(
        a_target_of_the_same_shape,
        ("zeros_like at", "is a dense target", "binary_cross_entropy at", "of log_softmax at"),
    ),
    "a gradient by hand": Said(
        lambda s, t: Halved.apply(s, t),
        ("goes into a custom autograd.Function at", "Hint: write the loss with torch operations"),
    ),
    "log-probabilities of a checkpoint": Said(
        logs_of_a_checkpoint, ("it is a result of the checkpoint at",), ("no divergence",)
    ),
    "DIST": Said(
        dist, ("comes before the sum over the keys", "cannot be fused"),
        ("inside of an operation", "supported.md"),
    ),
    "a convolution": Said(
        lambda s, t: kd(F.conv2d(s, torch.ones(3, 3, 1, 1)), t),
        ("conv2d at", "compute the scores by one matmul"), ("write the same value",), shapes=MAPS,
    ),
    "squared maps": Said(
        squared_maps,
        ("feeds matmul at", "a product of whole distributions"),
        ("a sum at", "softmaxes over different axes"),
        shapes=((2, 3, 9, 4),) * 4,
    ),
    "a Gram matrix": Said(
        classes, ("feeds matmul at", "a product of whole distributions"),
        ("attention", "no other distribution"),
    ),
    "who reads what a fused loss leaves": Said(
        centered, ("1 of 1 loss fused", "softmax at", "is also read by mean at", "is not fused")
    ),
    "a caller and code": Said(
        returned_and_read,
        ("1 of 1 loss fused", "is also read by matmul at", "is also returned by the compiled"),
        usual="gram",
    ),
    "attention alone": user(
        "attention_alone", "attention probabilities that are compared with no other distribution"
    ),
    "rows of a loss are no second one": user("bhattacharyya", "1 of 1 loss fused"),
    "equal argmaxes": Said(
        with_agreement, ("1 of 1 loss and 2 of 2 detached values fused",), ("not fused",)
    ),
    "equal argmaxes alone": Said(
        agreement, ("streamkl: 2 of 2 detached values fused",), ("not fused", "loss")
    ),
    "an argmax next to a loss that stays": Said(
        ranked_with_argmax, ("read by argmax, log_softmax", "sort needs whole rows"),
        ("argmax needs", "feeds argmax"),
    ),
    "an argmax alone": Said(
        lambda s, t: s.argmax(-1),
        ("feeds argmax at", "in scores of a fused loss, or as its labels",
         "biased or masked at most", "if these are labels"),
        ("whole rows",),
    ),
    # warnings
    "logarithms of log-probabilities": Said(
        lambda log_s, log_t: F.kl_div(log_s, log_t, reduction="sum"),
        ("1 of 1 loss fused", "warning: ", "log_target=True"),
    ),
    "probabilities as a log-target": Said(
        lambda log_s, p_t: F.kl_div(log_s, p_t, log_target=True),
        ("1 of 1 loss fused", "expects log-probabilities as its target"),
    ),
    "an exponential of probabilities": Said(
        lambda p_s, p_t: (p_s.exp() - p_t * p_s).sum(),
        ("1 of 1 loss fused",), ("warning",),
    ),
    # forms and roles; both directions are summed in R-Drop
    "R-Drop": user(
        "r_drop", "jeffreys, both sides need a gradient", "P: matmul of", "; Q: matmul of",
        "matmul of h and w (", "matmul of mul and w (",
    ),
    "reverse KL": user(
        "reverse_kl", "student: matmul of h and w (", "teacher: matmul of g and v (",
        "needs no gradient",
    ),
    "inputs of a checkpointed function": Said(
        in_a_checkpoint,
        (f"student: matmul of h and {OUTER} (", f"teacher: matmul of g and {OUTER_TEACHER} ("),
    ),
    "JS of a beta in float32": Said(js_of_float32_numbers, ("js, beta=0.1",)),
    "a number": Said(skewed, ("skewed forward_kl, KL(P || 0.1 P + 0.9 S)",)),
    # a mask over the vocabulary is why a head is attention, and only attention has heads
    "a masked vocabulary": Said(
        a_masked_vocabulary,
        ("attention_kl: forward_kl, masked, as attention with one head, because",
         "linear_kl cannot mask the vocabulary other than by x[..., i:j] = -inf"), shapes=HEADS,
    ),
    "sliced probabilities": Said(
        sliced_probabilities, ("only some of the keys are used after the softmax",),
        ("single entries",), ((6, 4), (96, 4), (6, 3), (96, 3)),
    ),
    "keys of one query": Said(
        a_slice_of_one_query, ("only some of the keys are used",), ("padded",), MAPS
    ),
    "weighted keys of one query": Said(
        weighted_keys, ("1 of 1 loss fused",), shapes=MAPS
    ),
    "padded probabilities": Said(
        padded_probabilities, ("probabilities are padded",), ("only some",), HEADS
    ),
    "probabilities joined with zeros": Said(
        joined_with_zeros, ("probabilities are padded",), ("only some",), SMALLER
    ),
    "padded scores": Said(padded_scores, ("1 of 1 loss fused",), shapes=SMALLER),
    "a sliced vocabulary": Said(
        a_sliced_vocabulary, ("linear_kl: forward_kl",), shapes=HEADS
    ),
    "causal": Said(causal, ("attention_kl",), ("one head",), HEADS),
    "one token": Said(
        kd, ("1 of 1 loss fused",), ("bias",), ((1, 4), (9, 4), (1, 3), (9, 3))
    ),
    "heads": Said(means, ("summed over heads",), shapes=MAPS),
    "crops": Said(
        means, ("summed over a leading dimension",), (),
        ((3, 5, 4), (9, 4), (3, 5, 4), (9, 4)),
    ),
    "a mean of teachers": Said(
        mean_of_teachers, (AVERAGED.format("teacher"),), (),
        ((5, 4), (9, 4), (3, 5, 4), (3, 9, 4)),
    ),
    "a mean of students": Said(  # as it is written
        mean_of_students,
        (AVERAGED.format("student"), "student: matmul of h and w", "teacher: matmul of g and v"),
        (), ((3, 5, 4), (9, 4), (5, 4), (9, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_the_report_says(name):
    if "hook" in name and torch.__version__ < (2, 13):
        pytest.skip("Dynamo of torch 2.11 traces a hook as a custom autograd.Function")
    row = SAID[name]
    report = explained(row.program(), *row.inputs())
    said = f"{report}\n{report.details()}"
    for text in row.has:
        assert text in said, said
    for text in row.lacks:
        assert text not in said, said
    assert all(site.fused or (site.reason and site.hint) for site in report.sites), said


LABELS = torch.arange(48)[:, None] % 7


def all_but_the_label(s, t):
    """As NKD: the target class is taken out by a boolean mask."""
    keep = torch.ones_like(s).scatter(1, LABELS, 0).bool()
    s, t = (x[keep].reshape(48, 159) for x in (s, t))
    return -(t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()


def masked_topk_entries(log_s, log_t):
    values, ids = log_t.topk(4)
    return (log_s.gather(-1, ids) - values)[values > -5].square().sum()


@pytest.mark.parametrize("loss", [all_but_the_label, masked_topk_entries])
def test_entries_that_a_mask_selects(loss):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = explained(of_heads(loss))
    assert not report.failures
    (site,) = report.sites
    assert site.reason == "a mask selects single entries of each row", site
    assert re.search(r"keep\]|> -5\]", site.unsupported_code or site.code), site


def test_a_hint_is_printed_once():
    said = str(explained(of_heads(pooled)))
    assert "avg_pool1d is applied to" in said and said.count("Hint: ") == 1, said


def test_code_around_a_loss_that_is_not_checked_is_no_second_loss():
    """Sizes that data decide keep "always" from checking; reads of sizes are no losses."""

    def loss(h, w, g, v, keep):
        rows = F.kl_div((h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1), reduction="none")
        return rows[keep].sum() / keep.sum()

    patched = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with patched, torch_streamkl.reports() as report:
        given = *USER_LOSSES["cosine"].inputs(), torch.arange(48) % 3 > 0
        compile_rewritten(loss, verify="always")(*given)
    (site,) = report.sites
    assert 'streamkl.verify is "always", and it was not checked' in site.reason
    assert '{"streamkl.verify": "auto"}' in site.hint


def test_a_loss_of_masked_rows_says_once_that_it_was_not_checked():
    def loss(h, w, g, v, keep):
        rows = F.kl_div((h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1), reduction="none")
        return rows[keep].sum() / keep.sum()

    given = *USER_LOSSES["cosine"].inputs(), torch.arange(48) % 3 > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = explained(loss, *given)
        verified = torch_streamkl.verify(loss, *given, options=OPTIONS)
    said = str(report)
    assert said.count("check skipped: the data decides its sizes, as where a mask selects") == 1
    assert "torch_streamkl.verify() checks it with your inputs" in said
    assert verified.ok, verified


def reverse(log_s, log_t):
    return (log_s.exp() * (log_s - log_t)).sum(-1).mean()


def skewed_reverse(p_s, p_t):
    return (p_s * (p_s.log() - (0.9 * p_s + 0.1 * p_t).log())).sum(-1).mean()


def clamped_entropy(p_t, p_s):
    return -(p_t * p_s.clamp(min=1e-6).log()).sum(-1).mean()


# of a loss and who is trained: the form, and the names of the first and second scores
ROLES = {
    (kd, 1, 0): ("forward_kl", "student", "teacher"),
    (kd, 0, 1): ("reverse_kl", "teacher", "student"),
    (kd, 1, 1): ("KL(P || Q), both sides need a gradient", "Q", "P"),
    (kd, 0, 0): ("KL(P || Q)", "Q", "P"),
    (reverse, 1, 0): ("reverse_kl", "student", "teacher"),
    (reverse, 1, 1): ("KL(P || Q), both sides need a gradient", "P", "Q"),
    (reverse, 0, 0): ("KL(P || Q)", "P", "Q"),
    (skewed_reverse, 1, 0): ("skewed reverse_kl, KL(S || 0.1 P + 0.9 S)", "student", "teacher"),
    (skewed_reverse, 0, 0): ("skewed KL(P || 0.9 P + 0.1 Q)", "P", "Q"),
    (clamped_entropy, 0, 1): (
        "reverse cross_entropy, teacher clamped at 1e-06", "teacher", "student",
    ),
    (clamped_entropy, 1, 1): (
        "cross_entropy -P*logQ, Q clamped at 1e-06, both sides need a gradient",
        "Q",
        "P",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "first", "second"), ROLES)
def test_no_side_is_called_teacher_unless_the_other_alone_is_trained(loss, first, second):
    inputs = USER_LOSSES["cosine"].inputs()
    for i, x in enumerate(inputs):
        x.requires_grad_(bool(first if i < 2 else second))
    (site,) = explained(of_heads(loss), *inputs).sites
    form, one, other = ROLES[loss, first, second]
    assert site.form == form, site
    assert {f"{one}: matmul of h", f"{other}: matmul of g"} == {
        role.partition(" and ")[0] for role in site.roles.split("; ")
    }


class Gather(torch.autograd.Function):
    """Stands for that of torch.nn.parallel, which takes no tensors of a CPU."""

    @staticmethod
    def forward(ctx, *parts):
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].chunk(2)


def by_hand(s, t):
    log_s, log_t = s.log_softmax(-1), t.log_softmax(-1)
    return (log_t.exp() * (log_t - log_s)).sum(-1).mean()


@pytest.mark.parametrize(("loss", "gathers"), [(kd, False), (kd, True), (by_hand, True)])
def test_logits_that_data_parallel_gathered(loss, gathers):
    weight = torch.randn(4, 8, requires_grad=True)
    parts = [x @ weight for x in torch.randn(6, 4).chunk(2)]
    logits = Gather.apply(*parts) if gathers else torch.cat(parts)
    report = explained(loss, logits, torch.randn(6, 8))
    assert report.num_fused == 0
    for text in ("nn.DataParallel runs the model in threads", "torchrun"):
        assert (text in str(report)) is gathers


def test_a_maximum_of_scores_is_not_said_to_read_single_entries():
    """SPLADE, ColBERT: ``max(dim=)`` has two results, and the code takes one of them."""

    def sparse_embedding(h, w):
        return torch.max(torch.log1p(F.relu(h @ w.mT)), dim=1).values.sum()

    with torch_streamkl.reports() as report:
        compile_rewritten(sparse_embedding, min_mib=0)(torch.randn(2, 6, 4), torch.randn(11, 4))
    said = str(report)
    assert "feeds max" in said and "single entries" not in said, said
