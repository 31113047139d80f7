"""Which backward passes of joint graphs move into the forward, and that results are the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
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

Loss = Callable[[Tensor, Tensor], Tensor]  # of row values [2, 3, 9] and something else
ROWS = (2, 3, 9)


def joint_graph(loss: Loss, other: Tensor) -> tuple[fx.GraphModule, list[Tensor]]:
    """The graph of a loss of `attention_kl`, forward and backward, and its arguments."""
    inputs = [torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(4)]
    for x in inputs[:3]:
        x.requires_grad_()

    def step(*args: Tensor) -> tuple[Tensor]:
        return (loss(ops.attention_kl(*args[:4])[0], args[4]),)

    args = [*inputs, other]
    graph = aot_export_joint_simple(step, tuple(args), trace_joint=True)
    return graph, args


def rewritten(loss: Loss, other: Tensor) -> int:
    """How many passes were moved; results are the same."""
    graph, args = joint_graph(loss, other)
    detached = [x.detach() for x in args]
    tangents = [torch.tensor(0.7, dtype=torch.float64)]
    expected = graph(detached, tangents)
    moved = compute_in_forward(graph.graph)
    graph.graph.lint()
    graph.recompile()
    found = graph(detached, tangents)
    for got, x in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        assert (got is None) == (x is None)
        if x is not None:
            torch.testing.assert_close(got, x, rtol=1e-10, atol=1e-12, equal_nan=True)
    targets = [n.target for n in graph.graph.nodes]
    assert targets.count(attention_kl_with_gradients) == moved
    assert targets.count(ops.attention_kl_backward) == 1 - moved
    return moved


MASK = (torch.arange(9) < torch.tensor([9, 5])[:, None])[:, None].expand(ROWS)
WIDE = {"dtype": torch.float64}
LOSSES: dict[str, tuple[Loss, Tensor]] = {
    "mean": (lambda rows, _: rows.mean(), torch.ones((), **WIDE)),
    "sum over a number": (lambda rows, x: rows.sum() / x, torch.tensor(3.0, **WIDE)),
    "weighted rows": (lambda rows, x: (rows * x).sum(), torch.randn(ROWS, **WIDE)),
    "weights that broadcast": (
        lambda rows, x: (rows * x[:, None]).mean(), torch.randn(2, 9, **WIDE),
    ),
    "weights of fewer dimensions": (lambda rows, x: -(x * rows).mean(), torch.randn(9, **WIDE)),
    "rows divided": (lambda rows, x: (rows / x).sum() / x.sum(), 1 + torch.rand(ROWS, **WIDE)),
    "mean of masked rows": (
        lambda rows, x: rows.masked_fill(~x, 0.0).sum() / x.sum(), MASK.contiguous(),
    ),
    "where": (
        lambda rows, x: torch.where(x, rows * 3.0, 0.0).flatten(1).mean(1).mean(),
        MASK.contiguous(),
    ),
    "sequences, then batch": (
        lambda rows, x: ((rows * x).sum((1, 2)) / x.sum((1, 2))).mean(), torch.rand(ROWS, **WIDE),
    ),
    "transposed": (
        lambda rows, x: (rows.permute(2, 0, 1) * x).mean(), torch.rand(9, 2, 3, **WIDE),
    ),
}  # fmt: skip
LEFT: dict[str, tuple[Loss, Tensor]] = {
    # the weight of a row follows from its value, or the loss is not linear in it
    "hard rows": (lambda rows, x: (rows * (rows > x)).sum(), torch.tensor(0.3, **WIDE)),
    "squared": (lambda rows, _: rows.square().mean(), torch.ones((), **WIDE)),
    "weights from values": (
        lambda rows, x: (rows * (x * rows.detach())).sum(), torch.rand(ROWS, **WIDE),
    ),
    "two losses": (lambda rows, x: rows.mean() + (rows * x).sum(), torch.rand(ROWS, **WIDE)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_moved(name: str) -> None:
    assert rewritten(*LOSSES[name]) == 1


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    assert rewritten(*LEFT[name]) == 0


def test_rows_that_do_not_count_may_be_infinite() -> None:
    """Weights of 0 keep what the backward gives there."""
    weight = torch.rand(ROWS, dtype=torch.float64)
    weight[0, 1, 2] = 0.0
    assert rewritten(lambda rows, x: (rows * x).sum(), weight) == 1


def test_a_fault_of_ours_leaves_the_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(gradients_in_forward._Factors, "_scaled", fail)
    assert rewritten(*LOSSES["weighted rows"]) == 0
    assert "planted" in caplog.text and "stay in the backward" in caplog.text


def test_two_sites_of_one_graph() -> None:
    x = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]

    def step(*args: Tensor) -> tuple[Tensor]:
        first, second = ops.attention_kl(*args)[0], ops.attention_kl(*args[::-1])[0]
        return (first.mean() + 2.0 * second.mean(),)

    graph = aot_export_joint_simple(step, tuple(x), trace_joint=True)
    detached, tangents = [y.detach() for y in x], [torch.ones((), dtype=torch.float64)]
    expected = graph(detached, tangents)
    assert compute_in_forward(graph.graph) == 2
    graph.recompile()
    for got, y in zip(graph(detached, tangents)[1], expected[1], strict=True):
        torch.testing.assert_close(got, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(inductor_without_code, id="inductor"),
        pytest.param(contextlib.nullcontext, id="its code", marks=pytest.mark.slow),
    ],
)
def test_through_inductor(code: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded batch of another dtype: what training on a CPU runs."""
    moved: list[int] = []
    original = inductor_passes.compute_in_forward

    def spy(graph: fx.Graph) -> int:
        moved.append(original(graph))
        return moved[-1]

    monkeypatch.setattr(inductor_passes, "compute_in_forward", spy)
    inputs = [torch.randn(2, 2, 21, 8).bfloat16() for _ in range(4)]
    for x in inputs[:2]:
        x.requires_grad_()
    counts = (torch.arange(21) < torch.tensor([21, 13])[:, None])[:, None]

    def loss(*args: Tensor) -> Tensor:
        rows = attention_kl(*args, is_causal=True)
        return (rows * counts).sum() / counts.sum()

    expected = torch.autograd.grad(loss(*inputs), inputs[:2])
    torch._dynamo.reset()
    with code(), torch._inductor.config.patch(force_disable_caches=True):
        step = torch.compile(loss, backend="streamkl")
        found = torch.autograd.grad(step(*inputs), inputs[:2])
    assert moved == [1]
    for got, x in zip(found, expected, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, x, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("bodies_as_written")
def test_separate_passes_of_a_compiled_graph_are_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its wrapper calls a site instead of the operator."""
    called: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(query_tiles, name)
        monkeypatch.setattr(
            query_tiles, name, lambda *args, n=name, f=original: called.append(n) or f(*args)
        )
    inputs = [torch.randn(2, 2, 21, 8) for _ in range(4)]
    inputs[0].requires_grad_()
    with torch._inductor.config.patch(force_disable_caches=True):
        step = torch.compile(lambda *x: attention_kl(*x).log1p().mean(), backend="streamkl")
        (found,) = torch.autograd.grad(step(*inputs), inputs[:1])
    (expected,) = torch.autograd.grad(attention_kl(*inputs).log1p().mean(), inputs[:1])
    torch.testing.assert_close(found, expected)
    assert called == ["forward", "backward"]
