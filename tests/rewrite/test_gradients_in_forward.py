"""Which backward passes of joint graphs move into the forward, and that results are the same."""

import contextlib

import pytest
import torch
from torch._functorch.aot_autograd import aot_export_joint_simple

from tests.support.subgraphs import (
    bodies_as_written,  # noqa: F401  # a fixture
    inductor_without_code,
)
from torch_streamkl import attention_kl
from torch_streamkl.attention import ops, query_tiles
from torch_streamkl.attention.gradients_op import attention_kl_with_gradients
from torch_streamkl.fx_passes import gradients_in_forward, inductor_passes
from torch_streamkl.fx_passes.gradients_in_forward import compute_in_forward
from torch_streamkl.topk import log_probs

ROWS = (2, 3, 9)  # of values


def rewritten(loss, other=None):
    """How many passes were moved, of a loss of row values and another tensor; results stay."""
    inputs = [torch.randn(2, 3, 9, 4, dtype=torch.float64, requires_grad=i < 3) for i in range(4)]
    args = [*inputs, torch.rand(ROWS, dtype=torch.float64) if other is None else other]

    def step(*given):
        rows = ops.attention_kl(*given[:4])[0]
        if loss is two_sites:
            return (loss(rows, ops.attention_kl(*given[3::-1])[0]),)
        return (loss(rows, given[4]),)

    graph = aot_export_joint_simple(step, tuple(args), trace_joint=True)
    detached, tangents = [x.detach() for x in args], [torch.tensor(0.7, dtype=torch.float64)]
    expected = graph(detached, tangents)
    moved = compute_in_forward(graph.graph)
    graph.graph.lint()
    graph.recompile()
    found = graph(detached, tangents)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
    targets = [n.target for n in graph.graph.nodes]
    assert targets.count(attention_kl_with_gradients) == moved
    assert targets.count(ops.attention_kl_backward) == 1 + (loss is two_sites) - moved
    return moved


def two_sites(first, second):
    return first.mean() + 2.0 * second.mean()


MASK = (torch.arange(9) < torch.tensor([9, 5])[:, None])[:, None].expand(ROWS).contiguous()
DOUBLE = {"dtype": torch.float64}
SOME_ZERO = torch.ones(ROWS, **DOUBLE)
SOME_ZERO[0, 1, 2] = 0.0
MOVED = {
    "mean": (lambda rows, _: rows.mean(),),
    "sum over a number": (lambda rows, x: rows.sum() / x, torch.tensor(3.0, **DOUBLE)),
    "weighted rows": (lambda rows, x: (rows * x).sum(),),
    "weights that broadcast": (
        lambda rows, x: (rows * x[:, None]).mean(), torch.randn(2, 9, **DOUBLE),
    ),
    "weights of fewer dimensions": (lambda rows, x: -(x * rows).mean(), torch.randn(9, **DOUBLE)),
    "rows divided": (lambda rows, x: (rows / (1 + x)).sum() / x.sum(),),
    "mean of masked rows": (lambda rows, x: rows.masked_fill(~x, 0.0).sum() / x.sum(), MASK),
    "where": (lambda rows, x: torch.where(x, rows * 3.0, 0.0).flatten(1).mean(1).mean(), MASK),
    "sequences, then batch": (lambda rows, x: ((rows * x).sum((1, 2)) / x.sum((1, 2))).mean(),),
    "transposed": (
        lambda rows, x: (rows.permute(2, 0, 1) * x).mean(), torch.rand(9, 2, 3, **DOUBLE),
    ),
    # weights of 0 keep what the backward gives there
    "rows that do not count": (lambda rows, x: (rows * x).sum(), SOME_ZERO),
}  # fmt: skip
# the weight of a row follows from its value, or the loss is not linear in it
LEFT = {
    "hard rows": lambda rows, x: (rows * (rows > x)).sum(),
    "squared": lambda rows, _: rows.square().mean(),
    "weights from values": lambda rows, x: (rows * (x * rows.detach())).sum(),
    "two losses": lambda rows, x: rows.mean() + (rows * x).sum(),
}


@pytest.mark.parametrize("name", MOVED)
def test_moved(name):
    assert rewritten(*MOVED[name]) == 1


@pytest.mark.parametrize("name", LEFT)
def test_left(name):
    assert rewritten(LEFT[name]) == 0


def test_two_sites_of_one_graph():
    assert rewritten(two_sites) == 2


def test_a_fault_of_ours_leaves_the_backward(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(gradients_in_forward._Factors, "_scaled", fail)
    assert rewritten(*MOVED["weighted rows"]) == 0
    assert "planted" in caplog.text and "stay in the backward" in caplog.text


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(inductor_without_code, id="inductor"),
        pytest.param(contextlib.nullcontext, id="its code", marks=pytest.mark.slow),
    ],
)
def test_through_inductor(code, monkeypatch):
    """A padded batch of another dtype: what training on a CPU runs."""
    moved = []
    monkeypatch.setattr(
        inductor_passes,
        "compute_in_forward",
        lambda graph: moved.append(compute_in_forward(graph)) or moved[-1],
    )
    inputs = [torch.randn(2, 2, 21, 8).bfloat16().requires_grad_(i < 2) for i in range(4)]
    counts = (torch.arange(21) < torch.tensor([21, 13])[:, None])[:, None]

    def loss(*args):
        return (attention_kl(*args, is_causal=True) * counts).sum() / counts.sum()

    expected = torch.autograd.grad(loss(*inputs), inputs[:2])
    torch._dynamo.reset()
    with code(), torch._inductor.config.patch(force_disable_caches=True):
        step = torch.compile(loss, backend="streamkl")
        found = torch.autograd.grad(step(*inputs), inputs[:2])
    assert moved == [1]
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("bodies_as_written")
def test_separate_passes_of_a_compiled_graph_are_query_tiles(monkeypatch):
    """Also where its wrapper calls a site instead of the operator."""
    called = []
    for name in ("forward", "backward"):
        original = getattr(query_tiles, name)
        monkeypatch.setattr(
            query_tiles, name, lambda *args, n=name, f=original: called.append(n) or f(*args)
        )
    inputs = [torch.randn(2, 2, 21, 8, requires_grad=i == 0) for i in range(4)]
    with torch._inductor.config.patch(force_disable_caches=True):
        step = torch.compile(lambda *x: attention_kl(*x).log1p().mean(), backend="streamkl")
        found = torch.autograd.grad(step(*inputs), inputs[:1])
    expected = torch.autograd.grad(attention_kl(*inputs).log1p().mean(), inputs[:1])
    torch.testing.assert_close(found, expected)
    assert called == ["forward", "backward"]


ENTRY_LOSSES = {
    "kl of cached entries": (
        lambda log_s, log_t: (log_t.exp() * (log_t - log_s)).sum(-1).mean(),
        1,
    ),
    "labels": (lambda log_s, _: -log_s[:, 0].mean(), 0),  # a part of the entries
    "focal": (lambda log_s, _: -((1 - log_s.exp()) ** 2 * log_s).mean(), 0),
}


@pytest.mark.parametrize("name", ENTRY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_log_probabilities_of_entries(name: str, dtype: torch.dtype) -> None:
    loss, num_moved = ENTRY_LOSSES[name]
    h, w = (torch.randn(n, 4).to(dtype).requires_grad_() for n in (6, 11))
    ids, log_t = torch.randint(11, (6, 3)), torch.randn(6, 3).log_softmax(-1)
    args = (h, w, ids, log_t)

    def step(h, w, ids, log_t):
        return (loss(log_probs.entry_log_probs(h, w, ids, 0.7)[0], log_t),)

    graph = aot_export_joint_simple(step, args, trace_joint=True)
    given = [x.detach() for x in args], [torch.tensor(0.7)]
    if dtype == torch.float64:
        given[1][0] = given[1][0].double()
    expected = graph(*given)
    moved = compute_in_forward(graph.graph)
    assert moved == (num_moved if dtype == torch.float64 else 0)
    graph.recompile()
    torch.testing.assert_close(graph(*given), expected)
