"""Programs that are hard on a graph rewrite: each is one thing that users do around a KL.

All run in float64, where what the compiled program does differently is either rounding, far below
`EXACT`, or a mistake, far above it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

EXACT = 2.0**-40  # between float64's rounding and any mistake
SHAPE = (2, 3, 6, 4)


@dataclass(frozen=True)
class Program:
    """A function of q, k, v, teacher; ``num_fused`` sites of its ``num_graphs`` graphs fuse."""

    fn: Callable[..., Any]
    num_fused: int
    num_graphs: int | None
    compile_options: dict[str, Any]


PROGRAMS = {}


def program(fused, graphs=1, **compile_options):
    def register(fn):
        PROGRAMS[fn.__name__] = Program(fn, fused, graphs, compile_options)
        return fn

    return register


def programs(fused, rows):
    for name, fn in rows.items():
        PROGRAMS[name] = Program(fn, fused, 1, {})


def make_inputs():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(4)]
    return [x.requires_grad_(i < 3) for i, x in enumerate(inputs)]


def loss(log_s, p_t):
    return F.kl_div(log_s, p_t, reduction="none").sum(-1)


def logs(q, k):
    return (q @ k.mT).log_softmax(-1)


def probabilities(t):
    return (t @ t.mT).softmax(-1)


def kl(q, k, t):
    return loss(logs(q, k), probabilities(t))


def naive(s, t):
    """Of probabilities."""
    return (t * (t.log() - s.log())).sum(-1)


# ----------------------------------------------------------------------------------- writes
@program(fused=1)
def leaf_modified_later(q, k, v, t):
    key = k * 2  # modified in place below: legal, as eager saves only what its matmul saved
    with torch.no_grad():
        got = logs(q, key)
    rows = loss(got, probabilities(t))
    key.add_(1)
    return rows + key.sum(-1)


@program(fused=0)
def leaf_modified_between(q, k, v, t):
    key = t.clone()
    got = logs(q.detach(), key)
    key.mul_(3)
    return loss(got, (key @ t.mT).softmax(-1)) + q.sum(-1)


def _zero_view(x):
    x[..., 0].zero_()


def _set_item(x):
    x[:, 0] = 1.0


def written_later(write):
    def program(q, k, v, t):
        teacher = t.clone()
        rows = kl(q, k, teacher)
        write(teacher)
        return rows + teacher.sum(-1)

    return program


programs(1, {
    "view_of_leaf_modified": written_later(_zero_view),
    "setitem_on_leaf": written_later(_set_item),
    "leaf_written_as_out": written_later(lambda x: torch.add(x, 1.0, out=x)),
    "leaf_in_foreach": written_later(lambda x: torch._foreach_mul_([x], 0.5)),
    "leaf_activated_in_place": written_later(lambda x: F.relu(x, True)),
})  # fmt: skip


@program(fused=0)
def input_modified_later(q, k, v, t):
    rows = kl(q, k, t)
    t.mul_(0.99).add_(0.01)  # a moving average of the teacher, in the same graph
    return rows


@program(fused=1)
def leaf_modified_before(q, k, v, t):
    teacher = t.clone()
    teacher[..., 0] += 1
    return kl(q, k, teacher)


@program(fused=1)
def scores_modified_in_place(q, k, v, t):
    scores = q @ k.mT
    scores *= 0.5
    scores.div_(2)
    return loss(scores.log_softmax(-1), probabilities(t))


@program(fused=1)
def scores_written_through_a_view(q, k, v, t):
    scores = q @ k.mT
    scores[..., 0] = 0.0
    last = scores[..., -1]
    last.fill_(0.0)
    return loss(scores.log_softmax(-1), probabilities(t))


@program(fused=1)
def row_weights_modified_later(q, k, v, t):
    weights = t[..., :1].exp()
    values = F.kl_div(logs(q, k).detach(), probabilities(t), reduction="none") * weights
    weights.zero_()
    return values.sum(-1) + q.sum(-1)


@program(fused=1)
def operands_of_one_projection(q, k, v, t):
    a, b = torch.cat([q, k], -1).chunk(2, -1)
    return kl(a, b, t)


@program(fused=1)
def probabilities_modified_after(q, k, v, t):
    wanted = probabilities(t)
    rows = (wanted * (wanted.log() - logs(q, k))).sum(-1)
    other = wanted.clone()
    other.mul_(2)
    return rows, other


# ---------------------------------------------------------------------------- gradient modes
@program(fused=1)
def teacher_without_grad(q, k, v, t):
    with torch.no_grad():
        wanted = (v @ t.mT).softmax(-1)
    return F.kl_div(logs(q, k), wanted, reduction="batchmean")


@program(fused=1)
def grad_switched_in_the_middle(q, k, v, t):
    torch.set_grad_enabled(False)
    scores = v @ t.mT
    torch.set_grad_enabled(True)
    return loss(logs(q, k), scores.softmax(-1))


@program(fused=1)
def monitored_without_grad(q, k, v, t):
    got = logs(q, k)
    with torch.no_grad():
        monitor = F.kl_div(got, probabilities(t), reduction="batchmean")
    return (q * k).sum(), monitor


# ------------------------------------------------------------------------ higher-order operators
@program(fused=2)
def checkpoint_of_a_layer(q, k, v, t):
    def layer(x):
        return x + (x @ k.mT).softmax(-1) @ v, kl(x, k, t)

    x, first = checkpoint(layer, q, use_reentrant=False)
    _, second = checkpoint(layer, x, use_reentrant=False)
    return first.mean() + second.mean()


class Doubled(torch.autograd.Function):
    """Identity whose gradient is twice what autograd would have."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@program(fused=0)
def conditional_body(q, k, v, t):
    def with_kl(q, k, t):
        return loss((q @ k).log_softmax(-1), (t @ k).softmax(-1))

    key = k.transpose(-1, -2).contiguous()
    return torch.cond(t.sum() > 0, with_kl, lambda q, k, t: (q * t).sum(-1), (q, key, t))


@program(fused=1)
def loop_beside(q, k, v, t):
    from torch._higher_order_ops.while_loop import while_loop

    count = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        _, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (count, t))
    return kl(q, k, x)


programs(1, {
    "one_side_detached": lambda q, k, v, t: F.kl_div(
        logs(q, k), (v @ t.mT).softmax(-1).detach(), reduction="sum"),
    "checkpoint_body": lambda q, k, v, t: checkpoint(kl, q, k, t, use_reentrant=False).mean(),
    "autograd_function_upstream": lambda q, k, v, t: kl(Doubled.apply(q), k, t),
    "conditional_beside": lambda q, k, v, t: torch.cond(
        t.sum() > 0, lambda x: x * 2, lambda x: x.clone(), (kl(q, k, t),)),
    "inner_function_compiled": lambda q, k, v, t: torch.compile(kl)(q, k, t).mean(),
    "size_read_from_the_map": lambda q, k, v, t: F.kl_div(
        logs(q, k), wanted := probabilities(t), reduction="sum"
    ) / (wanted.shape[0] * wanted.size(-2)),
    "map_is_returned": lambda q, k, v, t: (
        naive(got := (q @ k.mT).softmax(-1), probabilities(t)), got),
})  # fmt: skip
programs(2, {
    "map_feeds_another_loss": lambda q, k, v, t: (
        naive(got := (q @ k.mT).softmax(-1), probabilities(t)).mean() + got.square().mean()),
})  # fmt: skip
programs(0, {
    "autograd_function_on_scores": lambda q, k, v, t: loss(
        Doubled.apply(q @ k.mT).log_softmax(-1), probabilities(t)),
    "autograd_function_on_probabilities": lambda q, k, v, t: loss(
        Doubled.apply(logs(q, k)), probabilities(t)),
    "mapped": lambda q, k, v, t: torch.vmap(kl)(q, k, t),
    "mapped_over_heads": lambda q, k, v, t: torch.vmap(kl, in_dims=(1, 1, None), out_dims=1)(
        q, k, t[:, 0]),
    "gradient_taken_inside": lambda q, k, v, t: torch.func.grad(lambda x: kl(x, k, t).sum())(q),
})  # fmt: skip


# --------------------------------------------------------------------------------- other code
@program(fused=1)
def dropout_on_operands(q, k, v, t):
    torch.manual_seed(3)
    return kl(F.dropout(q, 0.5), k, t) + F.dropout(v, 0.5).sum(-1)


@program(fused=0)
def dropout_on_probabilities(q, k, v, t):
    torch.manual_seed(3)
    return loss(logs(q, k), F.dropout(probabilities(t), 0.5))


@program(fused=1)
def dropout_beside_the_kl(q, k, v, t):
    torch.manual_seed(3)
    got = (q @ k.mT).softmax(-1)
    return naive(got, probabilities(t)), F.dropout(got, 0.5) @ v


@program(fused=1, options={"streamkl.inner": "eager"})  # AOTAutograd removes unused code itself
def unused_random_numbers(q, k, v, t):
    torch.manual_seed(3)
    got = (q @ k.mT).softmax(-1)
    rows = naive(got, probabilities(t))
    F.dropout(got, 0.5)
    return rows, F.dropout(got, 0.5) @ v


@program(fused=1, graphs=2)
def graph_break_before(q, k, v, t):
    q = q * 2
    torch._dynamo.graph_break()
    return kl(q, k, t)


@program(fused=1, graphs=2)
def graph_break_between(q, k, v, t):
    wanted = probabilities(t)
    torch._dynamo.graph_break()
    return loss(logs(q, k), wanted)


@program(fused=1, graphs=None)
def branch_on_data(q, k, v, t):
    rows = kl(q, k, t)
    return rows * 2 if rows.sum() > 0 else rows


@program(fused=3)
def loop_over_layers(q, k, v, t):
    total = q.new_zeros(())
    for i in range(3):
        if i != 1:
            total = total + kl(q[:, i], k[:, i], t[:, i]).mean()
        else:
            total = total - kl(q[:, i] * 2, k[:, i], t[:, 0]).sum()
    return total


@program(fused=1)
def structured_arguments(q, k, v, t):
    config = {"scale": 0.5, "names": ("q", "k"), "side": {"teacher": t}, "nothing": None}
    rows = kl(q * config["scale"], k, config["side"]["teacher"])
    return {"rows": rows, "name": config["names"][0], "count": rows.shape[-1]}


@program(fused=1)
def large_graph(q, k, v, t):
    x = t
    for i in range(400):
        x = operator.add(x, 0.001 * i) if i % 2 else x.sin()
    return kl(q, k, x)


@program(fused=1)
def python_scalars(q, k, v, t):
    temperature = torch.tensor(2.0, dtype=torch.float64)
    got = (q @ k.mT / temperature).log_softmax(-1)
    return loss(got, (t @ t.mT / temperature).softmax(-1)) * temperature**2
