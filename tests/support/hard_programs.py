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
from torch import Tensor
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


PROGRAMS: dict[str, Program] = {}


def program(fused: int, graphs: int | None = 1, **compile_options: Any) -> Callable[..., Any]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[fn.__name__] = Program(fn, fused, graphs, compile_options)
        return fn

    return register


def make_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(4)]
    return [x.requires_grad_(i < 3) for i, x in enumerate(inputs)]


def kl(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
    wanted = (t @ t.mT).softmax(-1)
    return F.kl_div((q @ k.mT).log_softmax(-1), wanted, reduction="none").sum(-1)


# ----------------------------------------------------------------------------------- writes
@program(fused=1)
def leaf_modified_later(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    key = k * 2  # modified in place below: legal, as eager saves only what its matmul saved
    wanted = (t @ t.mT).softmax(-1)
    with torch.no_grad():
        got = (q @ key.mT).log_softmax(-1)
    rows = F.kl_div(got, wanted, reduction="none").sum(-1)
    key.add_(1)
    return rows + key.sum(-1)


@program(fused=0)
def leaf_modified_between(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    key = t.clone()
    got = (q.detach() @ key.mT).log_softmax(-1)
    key.mul_(3)
    wanted = (key @ t.mT).softmax(-1)
    return F.kl_div(got, wanted, reduction="none").sum(-1) + q.sum(-1)


@program(fused=1)
def view_of_leaf_modified(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    teacher = t.clone()
    rows = kl(q, k, teacher)
    teacher[..., 0].zero_()
    return rows + teacher.sum(-1)


@program(fused=1)
def setitem_on_leaf(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    teacher = t.clone()
    rows = kl(q, k, teacher)
    teacher[:, 0] = 1.0
    return rows + teacher.sum(-1)


@program(fused=1)
def leaf_written_as_out(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    teacher = t.clone()
    rows = kl(q, k, teacher)
    torch.add(t, 1.0, out=teacher)
    return rows + teacher.sum(-1)


@program(fused=1)
def leaf_in_foreach(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    teacher = t.clone()
    rows = kl(q, k, teacher)
    torch._foreach_mul_([teacher], 0.5)
    return rows + teacher.sum(-1)


@program(fused=1)
def leaf_activated_in_place(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    teacher = t.clone()
    rows = kl(q, k, teacher)
    F.relu(teacher, True)
    return rows + teacher.sum(-1)


@program(fused=0)
def input_modified_later(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    rows = kl(q, k, t)
    t.mul_(0.99).add_(0.01)  # a moving average of the teacher, in the same graph
    return rows


@program(fused=1)
def leaf_modified_before(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    teacher = t.clone()
    teacher[..., 0] += 1
    return kl(q, k, teacher)


@program(fused=1)
def scores_modified_in_place(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.5
    scores.div_(2)
    wanted = (t @ t.mT).softmax(-1)
    return F.kl_div(scores.log_softmax(-1), wanted, reduction="none").sum(-1)


@program(fused=1)
def scores_written_through_a_view(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[..., 0] = 0.0
    wanted = (t @ t.mT).softmax(-1)
    return F.kl_div(scores.log_softmax(-1), wanted, reduction="none").sum(-1)


@program(fused=1)
def scores_filled_through_a_view(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    scores = q @ k.mT
    first = scores[..., 0]
    first.fill_(0.0)
    wanted = (t @ t.mT).softmax(-1)
    return F.kl_div(scores.log_softmax(-1), wanted, reduction="none").sum(-1)


@program(fused=1)
def row_weights_modified_later(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    weights = t[..., :1].exp()
    wanted = (t @ t.mT).softmax(-1)
    values = F.kl_div((q @ k.mT).log_softmax(-1).detach(), wanted, reduction="none") * weights
    weights.zero_()
    return values.sum(-1) + q.sum(-1)


@program(fused=1)
def operands_of_one_projection(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    a, b = torch.cat([q, k], -1).chunk(2, -1)
    wanted = (t @ t.mT).softmax(-1)
    return F.kl_div((a @ b.mT).log_softmax(-1), wanted, reduction="none").sum(-1)


@program(fused=1)
def probabilities_modified_after(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
    wanted = (t @ t.mT).softmax(-1)
    got = (q @ k.mT).log_softmax(-1)
    rows = (wanted * (wanted.log() - got)).sum(-1)
    other = wanted.clone()
    other.mul_(2)
    return rows, other


# ---------------------------------------------------------------------------- gradient modes
@program(fused=1)
def teacher_without_grad(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = (v @ t.mT).softmax(-1)
    return F.kl_div((q @ k.mT).log_softmax(-1), wanted, reduction="batchmean")


@program(fused=1)
def grad_switched_in_the_middle(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    scores = v @ t.mT
    torch.set_grad_enabled(True)
    got = (q @ k.mT).log_softmax(-1)
    return F.kl_div(got, scores.softmax(-1), reduction="none").sum(-1)


@program(fused=1)
def monitored_without_grad(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
    got = (q @ k.mT).log_softmax(-1)
    with torch.no_grad():
        monitor = F.kl_div(got, (t @ t.mT).softmax(-1), reduction="batchmean")
    return (q * k).sum(), monitor


@program(fused=1)
def one_side_detached(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    wanted = (v @ t.mT).softmax(-1).detach()
    return F.kl_div((q @ k.mT).log_softmax(-1), wanted, reduction="sum")


# ------------------------------------------------------------------------ higher-order operators
@program(fused=1)
def checkpoint_body(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return checkpoint(kl, q, k, t, use_reentrant=False).mean()


@program(fused=2)
def checkpoint_of_a_layer(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + (x @ k.mT).softmax(-1) @ v, kl(x, k, t)

    x, first = checkpoint(layer, q, use_reentrant=False)
    _, second = checkpoint(layer, x, use_reentrant=False)
    return first.mean() + second.mean()


class Doubled(torch.autograd.Function):
    """Identity whose gradient is twice what autograd would have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@program(fused=1)
def autograd_function_upstream(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return kl(Doubled.apply(q), k, t)


@program(fused=0)
def autograd_function_on_scores(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    got = Doubled.apply(q @ k.mT).log_softmax(-1)
    return F.kl_div(got, (t @ t.mT).softmax(-1), reduction="none").sum(-1)


@program(fused=0)
def autograd_function_on_probabilities(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    got = Doubled.apply((q @ k.mT).log_softmax(-1))
    return F.kl_div(got, (t @ t.mT).softmax(-1), reduction="none").sum(-1)


@program(fused=0)
def mapped(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.vmap(kl)(q, k, t)


@program(fused=0)
def mapped_over_heads(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.vmap(kl, in_dims=(1, 1, None), out_dims=1)(q, k, t[:, 0])


@program(fused=1)
def conditional_beside(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    rows = kl(q, k, t)
    return torch.cond(t.sum() > 0, lambda x: x * 2, lambda x: x.clone(), (rows,))


@program(fused=0)
def conditional_body(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    def with_kl(q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        return F.kl_div((q @ k).log_softmax(-1), (t @ k).softmax(-1), reduction="none").sum(-1)

    key = k.transpose(-1, -2).contiguous()
    return torch.cond(t.sum() > 0, with_kl, lambda q, k, t: (q * t).sum(-1), (q, key, t))


@program(fused=1)
def loop_beside(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    count = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        _, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (count, t))
    return kl(q, k, x)


@program(fused=1)
def inner_function_compiled(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    return torch.compile(kl)(q, k, t).mean()


# --------------------------------------------------------------------------------- other code
@program(fused=1)
def dropout_on_operands(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    torch.manual_seed(3)
    return kl(F.dropout(q, 0.5), k, t) + F.dropout(v, 0.5).sum(-1)


@program(fused=0)
def dropout_on_probabilities(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    torch.manual_seed(3)
    wanted = F.dropout((t @ t.mT).softmax(-1), 0.5)
    return F.kl_div((q @ k.mT).log_softmax(-1), wanted, reduction="none").sum(-1)


@program(fused=1)
def dropout_beside_the_kl(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
    torch.manual_seed(3)
    got = (q @ k.mT).softmax(-1)
    wanted = (t @ t.mT).softmax(-1)
    rows = (wanted * (wanted.log() - got.log())).sum(-1)
    return rows, F.dropout(got, 0.5) @ v


@program(fused=1, options={"streamkl.inner": "eager"})  # AOTAutograd removes unused code itself
def unused_random_numbers(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
    torch.manual_seed(3)
    got = (q @ k.mT).softmax(-1)
    wanted = (t @ t.mT).softmax(-1)
    rows = (wanted * (wanted.log() - got.log())).sum(-1)
    F.dropout(got, 0.5)
    return rows, F.dropout(got, 0.5) @ v


@program(fused=1, graphs=2)
def graph_break_before(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    q = q * 2
    torch._dynamo.graph_break()
    return kl(q, k, t)


@program(fused=1, graphs=2)
def graph_break_between(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    wanted = (t @ t.mT).softmax(-1)
    torch._dynamo.graph_break()
    return F.kl_div((q @ k.mT).log_softmax(-1), wanted, reduction="none").sum(-1)


@program(fused=1, graphs=None)
def branch_on_data(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    rows = kl(q, k, t)
    return rows * 2 if rows.sum() > 0 else rows


@program(fused=3)
def loop_over_layers(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    total = q.new_zeros(())
    for i in range(3):
        if i != 1:
            total = total + kl(q[:, i], k[:, i], t[:, i]).mean()
        else:
            total = total - kl(q[:, i] * 2, k[:, i], t[:, 0]).sum()
    return total


@program(fused=1)
def structured_arguments(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> dict[str, Any]:
    config = {"scale": 0.5, "names": ("q", "k"), "side": {"teacher": t}, "nothing": None}
    rows = kl(q * config["scale"], k, config["side"]["teacher"])
    return {"rows": rows, "name": config["names"][0], "count": rows.shape[-1]}


@program(fused=1)
def map_is_returned(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
    got = (q @ k.mT).softmax(-1)
    wanted = (t @ t.mT).softmax(-1)
    return (wanted * (wanted.log() - got.log())).sum(-1), got


@program(fused=2)
def map_feeds_another_loss(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    got = (q @ k.mT).softmax(-1)
    wanted = (t @ t.mT).softmax(-1)
    return (wanted * (wanted.log() - got.log())).sum(-1).mean() + got.square().mean()


@program(fused=1)
def size_read_from_the_map(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    got = (q @ k.mT).log_softmax(-1)
    wanted = (t @ t.mT).softmax(-1)
    return F.kl_div(got, wanted, reduction="sum") / (wanted.shape[0] * wanted.size(-2))


@program(fused=1)
def large_graph(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    x = t
    for i in range(400):
        x = operator.add(x, 0.001 * i) if i % 2 else x.sin()
    return kl(q, k, x)


@program(fused=1)
def python_scalars(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
    temperature = torch.tensor(2.0, dtype=torch.float64)
    wanted = (t @ t.mT / temperature).softmax(-1)
    got = (q @ k.mT / temperature).log_softmax(-1)
    return F.kl_div(got, wanted, reduction="none").sum(-1) * temperature**2


@program(fused=0)
def gradient_taken_inside(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Any:
    return torch.func.grad(lambda x: kl(x, k, t).sum())(q)
