"""A program for every row of docs/reference/reasons.md, in one process or on ranks.

Each takes hidden states and LM heads of student and teacher, or queries and keys of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import tests.support.more_user_losses  # noqa: F401  # adds to USER_LOSSES
from tests.support.losses import kd as kl
from tests.support.quantized import Quantized
from tests.support.user_losses import HIDDEN, LENGTH, USER_LOSSES, VOCAB

EXAMPLES = {}  # by the reason that docs/reference/reasons.md names

# rows whose examples need several processes: the test in tests/distributed/ that asserts them,
# and what it asserts
ON_RANKS = {
    "a plain tensor next to DTensors":
        ("what_does_not_fit", "is a plain tensor next to DTensors"),
    "a number next to whole tensors of ranks":
        ("symbols_that_a_rank_is_given", "is a number next to plain tensors of DTensors"),
    "a DTensor would have to be gathered": ("what_does_not_fit", "would gather it"),
    "ranks add up parts of the softmax by hand (all_reduce)": (
        "softmaxes_that_ranks_add_up",
        "ranks add up what each computes of its own vocabulary entries",
    ),
    "ranks compile different graphs":
        (
        "test_ranks_that_rewrite_otherwise_rewrite_nothing",
        "rank 1 compiles another graph than rank 0",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How an example is run, where it is not compiled once on the usual inputs."""

    inputs: Callable[[], list[Any]] | None = None
    calls: tuple[tuple[Any, ...], ...] = ((),)  # what each call gets next to the inputs
    config: dict[str, Any] = field(default_factory=dict)  # of torch._dynamo
    options: dict[str, Any] = field(default_factory=dict)  # of the rewrite
    compile: dict[str, Any] = field(default_factory=dict)  # of torch.compile


SETTINGS = {}  # by reason


def example(reason, **setting):
    def register(fn):
        EXAMPLES[reason] = fn
        SETTINGS[reason] = Setting(**setting)
        return fn

    return register


def of_scores(reason, **named):
    """An example of the scores of student and teacher."""
    ((name, fn),) = named.items()

    def program(q, k, r, u):
        return fn(q @ k.mT, r @ u.mT)

    program.__name__ = name
    EXAMPLES[reason] = program


for _reason, _name in {
    "a graph break lies between the logits and the loss": "printed",
    "only the logits or only the loss is in a checkpoint": "checkpointed_loss",
    "the loss is in a custom autograd.Function": "custom_function",
    "sort, top-k, cumsum: whole rows in order": "logits_are_returned",
    "dropout changes probabilities": "dropout_before_the_loss",
    "a target is filled in place (target[rows, ids] = p)": "target_by_index",
    "a hook on logits (register_hook)": "hook_on_logits",
}.items():
    EXAMPLES[_reason] = USER_LOSSES[_name].fn


def elements(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")


@example("logits or probabilities are inputs of the compiled function")
def logits_are_inputs(s, k, t, u):
    return kl(s, t)


of_scores("the divergence leaves the graph before it is summed over the keys",
          unsummed=elements)  # fmt: skip


@example("torch.vmap")
def mapped(q, k, r, u):
    return torch.vmap(lambda a, b, c, d: kl(a @ b.mT, c @ d.mT))(q, k, r, u).sum()


@example("a transform of torch.func")
def transformed(q, k, r, u):
    return torch.func.grad(lambda a: kl(a @ k.mT, r @ u.mT))(q).sum()


of_scores("a distribution is detached in one place and not in another",
          detached_once=lambda s, t: (
              (p := s.softmax(-1)) * (p.log() - (0.5 * (p.detach() + t.softmax(-1))).log())
          ).sum(-1).mean())  # fmt: skip


@example("the logarithm of a probability that may be 0 by underflow")
def temperature_of_entropies(h, w, g, v):
    t = g @ v.T
    p = t.softmax(-1)
    temperature = 1 - (p * p.log()).sum(-1, keepdim=True)
    s = (h @ w.T).log_softmax(-1)
    return F.kl_div(s, (t / temperature).softmax(-1), reduction="batchmean")


@example("a loss over rows: a relation of tokens, a norm of a whole map, averages of a column")
def dist_of_classes(h, w, g, v):
    """The relation of the probabilities that all tokens give one class, as in DIST."""
    p, q = (h @ w.T).softmax(-1).T, (g @ v.T).softmax(-1).T
    p, q = (x - x.mean(-1, keepdim=True) for x in (p, q))
    return 1 - F.cosine_similarity(p, q, dim=-1).mean()


@example("a matrix product of probabilities (attention rollout, a map between vocabularies)")
def attention_rollout(q, k, r, u):
    p, t = ((a @ b.mT).softmax(-1).mean(1) for a, b in ((q, k), (r, u)))
    return F.kl_div((p @ p).log(), t @ t, reduction="batchmean")


@example("entries of a top-k of this graph, next to a value of as many (a bucket for the rest)")
def topk_and_the_rest(h, w, g, v):
    log_t, ids = (g @ v.T).log_softmax(-1).topk(4)
    log_s = (h @ w.T).log_softmax(-1).gather(-1, ids)
    s, t = (
        torch.cat([x, (-x.logsumexp(-1, keepdim=True).expm1()).log()], -1) for x in (log_s, log_t)
    )
    return (t.exp() * (t - s)).sum(-1).mean()


@example("a maximum over the parts of a stack, such as several teachers")
def largest_of_teachers(h, w, g, v):
    teachers = torch.stack([x @ v.T for x in (g, 2 * g)])
    return kl(h @ w.T, teachers.max(0).values)


@example("a temperature that is computed from all logits")
def temperature_of_all_logits(h, w, g, v):
    s, t = h @ w.T, g @ v.T
    temperature = 1 + t.std()
    return kl(s / temperature, t / temperature)


@example("a bias or gate that a matrix product of the same graph makes (an MLP of positions)")
def relative_positions(q, k, r, u):
    """As Swin Transformer v2: an MLP makes a table of which each pair of tokens has an entry."""
    heads, length = q.shape[1:3]
    steps = torch.arange(length)
    offsets = torch.linspace(-1, 1, 2 * length - 1)[:, None]
    table = F.linear(F.linear(offsets, u.new_ones(64, 1)).relu(), u.new_ones(heads, 64))
    bias = table[(steps[:, None] - steps + length - 1).flatten()].sigmoid()
    bias = bias.view(length, length, heads).permute(2, 0, 1).contiguous()
    return kl(q @ k.mT + bias.unsqueeze(0), r @ u.mT + bias.unsqueeze(0))


@example("entries of rows are gathered by ids (a cached or served top-k)")
def largest_queries(q, k, r, u):
    s, t = q @ k.mT, r @ u.mT
    ids = t.softmax(-1).topk(3, dim=-2).indices
    return (t.gather(-2, ids) - s.log_softmax(-1).gather(-2, ids)).square().sum(-1).mean()


of_scores("double softmax",
          softmax_twice=lambda s, t: F.kl_div(
              s.softmax(-1).log_softmax(-1), t.softmax(-1), reduction="sum"))  # fmt: skip


@example("teacher and student are masked differently")
def other_masks(q, k, r, u):
    n = q.shape[-2]
    keep = torch.ones(n, n, dtype=torch.bool)
    s = (q @ k.mT).masked_fill(~keep.tril(), -1e4)
    t = (r @ u.mT).masked_fill(~keep.tril(2), -1e4)
    return kl(s, t)


of_scores("keys are masked after the softmax",
          masked_after=lambda s, t: (
              elements(s, t).masked_fill(s.log_softmax(-1) < -2, 1.0).sum(-1).mean()))  # fmt: skip


of_scores("the probabilities of both sides are averaged over heads",
          averaged_sides=lambda s, t: F.kl_div(
              s.softmax(-1).mean(1).log(), t.softmax(-1).mean(1),
              reduction="batchmean"))  # fmt: skip


of_scores("weights that vary along the keys",
          weighted_keys=lambda s, t: (
              elements(s, t) * torch.linspace(0.5, 1.5, s.shape[-1])).sum(-1).mean())  # fmt: skip


of_scores("keys are sliced away after the softmax",
          sliced_keys=lambda s, t: F.kl_div(
              s.log_softmax(-1)[..., 1:], t.softmax(-1)[..., 1:], reduction="sum"))  # fmt: skip


of_scores("a column or slice of scores or probabilities is returned, written to or viewed again",
          returned_column=lambda s, t: (
              p := s.log_softmax(-1)[..., 3], (p * t.softmax(-1)[..., 3]).sum()))  # fmt: skip


of_scores("an operation that is read in another spelling (hardtanh, huber_loss, silu)",
          hardtanh=lambda s, t: kl(F.hardtanh(s), t))  # fmt: skip


of_scores("an operation that row programs have and divergences have not (sin, relu, floor)",
          sine=lambda s, t: kl(s.sin(), t))  # fmt: skip


of_scores("scores are multiplied by the number 0",
          times_zero=lambda s, t: kl(s * 0, t))  # fmt: skip


@example(
    'streamkl.verify is "always", and the check cannot run',
    config={"capture_dynamic_output_shape_ops": True},
    options={"streamkl.verify": "always"},
)
def rows_that_data_select(h, w, g, v):
    keep = g[:, 0] > 0
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
    return F.kl_div(s, t, reduction="none")[keep].sum(-1).mean()


of_scores("an operation that no operator has",
          arctangent=lambda s, t: kl(s.atan(), t))  # fmt: skip


@example("a tensor is modified in place")
def written_later(q, k, r, u):
    key = k * 2
    t = (r @ u.mT).softmax(-1)
    loss = F.kl_div((q @ key.mT).log_softmax(-1), t, reduction="none").sum(-1).mean()
    with torch.no_grad():
        key.mul_(0.5)
    return loss


@example("an in-place write to scores")
def diagonal_written(q, k, r, u):
    s, at = q @ k.mT, torch.arange(k.shape[-2])
    s[..., at, at] = -1e9
    return kl(s, r @ u.mT)


@example("a slice or column of the scores is overwritten")
def columns_written(q, k, r, u):
    s, t = q @ k.mT, r @ u.mT
    s[..., ::2] = -1e9
    t[..., ::2] = -1e9
    return kl(s, t)


@example("a sum over the keys is written as a product (einsum, @)")
def cross_entropy_by_matmul(h, w, g, v):
    s, t = (h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1)
    return -(t @ s.mT).diagonal().mean()


@example("columns or slices of the scores are joined (cat, stack)")
def three_columns_joined(h, w, g, v):
    s, t = (torch.stack([x[:, 5], x[:, 9], x[:, 11]], -1) for x in (h @ w.T, g @ v.T))
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


@example(
    "a mask selects entries of each row (all logits but the label's)",
    config={"capture_dynamic_output_shape_ops": True},
)
def all_logits_but_one(h, w, g, v):
    keep = torch.arange(len(w)) != torch.arange(len(h))[:, None]
    s, t = ((x @ y.T)[keep].reshape(len(h), -1) for x, y in ((h, w), (g, v)))
    return kl(s, t)


@example("a top-k is renormalized and scattered to a dense target")
def renormalized_topk_scattered(h, w, g, v):
    t = (g @ v.T).softmax(-1)
    values, ids = t.topk(8)
    p = torch.zeros_like(t).scatter(-1, ids, values / values.sum(-1, keepdim=True))
    return -(p * (h @ w.T).log_softmax(-1)).sum(-1).mean()


@example("probabilities are padded to another vocabulary size")
def padded_probabilities(h, w, g, v):
    p = F.pad((g @ v[:-3].T).softmax(-1), (0, 3))
    return F.kl_div((h @ w.T).log_softmax(-1), p, reduction="batchmean")


@example("scores are sliced, reshaped or flattened so that their axes mix")
def mixed_axes(h, w, g, v):
    return kl(*((x @ y.T).view(-1, 96) for x, y in ((h, w), (g, v))))


@example("an entry of a row that a mask of large finite numbers may hide")
def log_probability_of_a_masked_row(h, w, g, v):
    s = h @ w.T
    rows, entries = (torch.arange(n) for n in s.shape)
    masked = s + torch.where(rows[:, None] < entries, -1e9, 0.0)
    return masked.log_softmax(-1).gather(-1, torch.zeros_like(rows)[:, None]).square().mean()


@example("argmax: a hard teacher")
def hard_teacher(q, k, r, u):
    labels = (r @ u.mT).argmax(-1)
    s = (q @ k.mT).log_softmax(-1)
    later = F.one_hot(labels, s.shape[-1]).to(s.dtype).cumsum(-1)
    return F.kl_div(s, later / later.sum(-1, keepdim=True), reduction="batchmean")


@example("another operation than a matrix product makes the scores")
def einsum_of_one_label(q, k, r, u):
    s = torch.einsum("bhqd,bhkd,d->bhqk", q, k, torch.ones(q.shape[-1]))
    return kl(s, r @ u.mT)


of_scores("an entropy alone",
          entropy_of_the_student=lambda s, t: (
              (p := s.softmax(-1)) * (p.log() - p.detach().log())).sum(-1).mean())  # fmt: skip


@example("the loss is in the body of a higher-order operator")
def in_a_branch(q, k, r, u):
    def loss(q, k, r, u):
        return kl(q @ k.mT, r @ u.mT)

    return torch.cond(q.sum() > 0, loss, lambda q, k, r, u: loss(q, k, r, u) * 2, (q, k, r, u))


of_scores("the scores are also read by other code",
          scores_are_returned=lambda s, t: (kl(x := s.relu(), y := t.relu()), x, y))  # fmt: skip


_generator = torch.Generator().manual_seed(2)
BIAS = torch.randn(LENGTH, LENGTH, generator=_generator).requires_grad_()
ADAPTERS = [
    (torch.randn(2, HIDDEN, generator=_generator), torch.randn(VOCAB, 2, generator=_generator))
    for _ in range(2)
]


@example("a bias or adapter needs a gradient")
def trained_bias(q, k, r, u):
    return kl(q @ k.mT + BIAS, r @ u.mT)


@example("scores are a sum of several products (adapters)")
def two_adapters(h, w, g, v):
    s = F.linear(h, w)
    for a, b in ADAPTERS:
        s = s + F.linear(F.linear(h, a), b)
    return kl(s, g @ v.T)


@example("logits are padded to another vocabulary size")
def padded_logits(h, w, g, v):
    return kl(F.pad(h @ w[:150].T, (0, VOCAB - 150), value=-1e4), g @ v.T)


@example("NaN or infinity is read by the code after the loss")
def nan_is_replaced(q, k, r, u):
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    s, t = ((x @ y.mT).masked_fill(~keep, float("-inf")) for x, y in ((q, k), (r, u)))
    rows = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
    return rows.nan_to_num().mean()


@example(
    "a weight is a tensor subclass with operations of its own, as of torchao",
    inputs=lambda: _with_quantized_weight(USER_LOSSES["cosine"].inputs()),
)
def quantized_weight(h, w, g, v):
    return kl(h @ w.mT, F.linear(g, v))


def _with_quantized_weight(inputs):
    h, w, g, v = inputs
    return [h, w, g.detach(), Quantized.of(v.detach())]


@example("a tensor subclass", inputs=lambda: _of_two_tensors(USER_LOSSES["gram"].inputs()))
def subclass(q, k, r, u):
    return kl(q @ k.mT, r @ u.mT)


def _of_two_tensors(inputs):
    from torch.testing._internal.two_tensor import TwoTensor

    q, *others = inputs
    return [TwoTensor(q.detach(), q.detach()), *others]


@example(
    "gradients are asked for inside of the compiled code", config={"trace_autograd_ops": True}
)
def gradient_inside(q, k, r, u):
    q = q * 1
    loss = kl(q @ k.mT, r @ u.mT)
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    return loss + gradient.square().sum()


@example(
    "sizes are read from tensors (.item(), .tolist(), nonzero)",
    calls=((torch.tensor([5]),),),
    config={"capture_scalar_outputs": True},
)
def lengths_of_data(q, k, r, u, lengths):
    n = lengths[0].item()
    return kl(q[:, :, :n] @ k[:, :, :n].mT, r[:, :, :n] @ u[:, :, :n].mT)


@example("a size that the inputs do not have", compile={"dynamic": True})
def scale_of_the_longer(q, k, r, u):
    length = max(q.shape[2], 3)
    return kl((q @ k.mT) / length, (r @ u.mT) / length)


@example("a Python number that changes between calls", calls=((1.5,), (2.5,)))
def annealed_power(q, k, r, u, power):
    return kl((q @ k.mT).abs() ** power, r @ u.mT)


of_scores("scores or probabilities change their type",
          rounded_scores=lambda s, t: kl(s.half().float(), t))  # fmt: skip


of_scores("a softmax over heads, over several dimensions, or over other ones than the sum",
          softmax_over_heads=lambda s, t: F.kl_div(
              s.log_softmax(1), t.softmax(1), reduction="batchmean"))  # fmt: skip


@example("masks, biases, paddings and factors in another order than operators apply them")
def scaled_after_the_mask(q, k, r, u):
    keep, scale = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), torch.rand(LENGTH, 1) + 0.5
    s, t = ((x @ y.mT).masked_fill(~keep, -1e4) * scale for x, y in ((q, k), (r, u)))
    return kl(s, t)


HIDDEN_KEYS = torch.zeros(LENGTH, LENGTH).masked_fill(torch.rand(LENGTH, LENGTH) < 0.1, -torch.inf)


@example("infinite values or NaN are replaced by nan_to_num")
def infinite_scores(q, k, r, u):
    return kl(*((x @ y.mT + HIDDEN_KEYS).nan_to_num(neginf=-5.0) for x, y in ((q, k), (r, u))))


of_scores("another combination of operations",
          other_normaliser=lambda s, t: F.kl_div(
              s - t.logsumexp(-1, keepdim=True), t.softmax(-1),
              reduction="batchmean"))  # fmt: skip


# those that only a divergence has, and no row program
OF_DIVERGENCES = {
    "double softmax",
    "logits are padded to another vocabulary size",
    "an operation that row programs have and divergences have not (sin, relu, floor)",
    "a distribution is detached in one place and not in another",
    "teacher and student are masked differently",
    "keys are masked after the softmax",
    "the probabilities of both sides are averaged over heads",
    "weights that vary along the keys",
    "keys are sliced away after the softmax",
    "an entropy alone",
    "masks, biases, paddings and factors in another order than operators apply them",
    "another combination of operations",
    "a bias or adapter needs a gradient",
    "scores are a sum of several products (adapters)",
}
