"""What a trainer does around a compiled loss: checkpoints, hooks, steps, batches of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_streamkl import linear_kl, row_program
from torch_streamkl.fx_passes import backend

Loss = Callable[..., Tensor]
IN_FORWARD = "gradients in the forward"


def given(*needs: bool) -> list[Tensor]:
    """Hidden states and a head of each side."""
    make = torch.Generator().manual_seed(0)
    shapes = ((7, 6), (11, 6), (7, 5), (11, 5))
    made = [torch.randn(s, generator=make, dtype=torch.float64) for s in shapes]
    return [
        x.requires_grad_(need)
        for x, need in zip(made, (*needs, *[False] * (4 - len(needs))), strict=True)
    ]


def divergence(h: Tensor, w: Tensor, th: Tensor, tw: Tensor) -> Tensor:
    return F.kl_div((h @ w.T).log_softmax(-1), (th @ tw.T).softmax(-1), reduction="batchmean")


def entropy(h: Tensor, w: Tensor, th: Tensor, tw: Tensor) -> Tensor:
    logs = (h @ w.T).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def maps(h: Tensor, w: Tensor, th: Tensor, tw: Tensor) -> Tensor:
    q, k, tq, tk = (x[None, None] for x in (h, w, th, tw))
    return F.kl_div((q @ k.mT).log_softmax(-1), (tq @ tk.mT).softmax(-1), reduction="batchmean")


def compiled(loss: Loss, inner: str, dynamic: bool | None = None) -> Any:
    torch._dynamo.reset()
    options = {"streamkl.inner": inner, "streamkl.min_mib": 0.0}
    return torch.compile(loss, backend="streamkl", options=options, dynamic=dynamic)


def alike(run: Callable[[Loss], Any], loss: Loss, inner: str, **kwargs: Any) -> None:
    expected = run(loss)
    with backend.collected() as report:
        torch.testing.assert_close(run(compiled(loss, inner, **kwargs)), expected)
    assert report.num_fused
    assert loss is maps or IN_FORWARD in report.details()


LOSSES = [divergence, entropy]
INNERS = ["eager", "aot_eager"]


# ------------------------------------------------------- what sees that a graph is compiled
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("loss", [*LOSSES, maps])
def test_a_graph_that_is_compiled_within_a_checkpoint(inner: str, loss: Loss) -> None:
    """The checkpoint counts what is saved, and the analysis and the check run the user's code."""

    def run(f: Loss) -> list[Tensor]:
        tensors = given(True, True)
        total = checkpoint(f, *tensors, use_reentrant=False)
        return [total.detach(), *torch.autograd.grad(total, tensors[:2])]

    alike(run, loss, inner)


def test_hooks_of_saved_tensors_see_those_of_the_program() -> None:
    """Not the fake ones of the analysis, which are no arrays."""

    def pack(x: Tensor) -> np.ndarray[Any, Any]:
        return x.detach().numpy().copy()

    def run(f: Loss) -> list[Tensor]:
        tensors = given(True, True)
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
            total = f(*tensors)
        return [total.detach(), *torch.autograd.grad(total, tensors[:2])]

    alike(run, divergence, "eager")


# ------------------------------------------------- what is written to before the backward runs
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_that_alone_learns_takes_a_step_before_the_backward(inner: str, loss: Loss) -> None:
    """Eager code has kept the hidden states, and not the head."""

    def run(f: Loss) -> Tensor:
        tensors = given(False, True)
        total, later = f(*tensors), f(*[x * 0.5 for x in tensors[:1]], *tensors[1:])
        (first,) = torch.autograd.grad(total, tensors[1])
        with torch.no_grad():
            tensors[1].sub_(first)
        return torch.autograd.grad(later, tensors[1])[0]

    alike(run, loss, inner)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["hidden states", "a view of them", "twice them", "a bias"])
def test_an_operand_that_no_backward_reads_is_written_to(
    inner: str, dynamic: bool, name: str
) -> None:
    """An auxiliary loss with a frozen head, and the next layer adds to the states in place."""
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "hidden states": lambda h, w: h @ w.T,
        "a view of them": lambda h, w: h.view(7, 2, 3).flatten(1) @ w.T,
        "twice them": lambda h, w: (h * 2.0) @ w.T,
        "a bias": lambda h, w: F.linear(h.detach(), w, h.sum(1)[:1] * torch.arange(11) / 9),
    }

    def loss(h: Tensor, w: Tensor, th: Tensor, tw: Tensor) -> Tensor:
        scores, others = ways[name](h, w), th @ tw.T
        return F.kl_div(scores.log_softmax(-1), others.softmax(-1), reduction="batchmean")

    def run(f: Loss) -> Tensor:
        leaf, *others = given(True)
        h = leaf * 1.0
        total = f(h, *others)
        h.add_(1.0)
        return torch.autograd.grad(total + h.sum(), leaf)[0]

    alike(run, loss, inner, dynamic=dynamic)


# ----------------------------------------------------------------------- several gradients at once
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_batched_gradients_of_a_compiled_sum(inner: str, loss: Loss) -> None:
    def run(f: Loss) -> tuple[Tensor, ...]:
        tensors = given(True, True)
        batch = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
        return torch.autograd.grad(f(*tensors), tensors[:2], batch, is_grads_batched=True)

    alike(run, loss, inner)


# ------------------------------------------------- a cross-entropy next to a teacher that learns
@pytest.mark.parametrize("which", [0, 1])
def test_a_shared_cross_entropy_gives_its_teacher_nothing(which: int) -> None:
    """Not zeros, for which the check of the site refused mutual learning and R-Drop."""
    labels = torch.arange(7)

    def loss(h: Tensor, w: Tensor, th: Tensor, tw: Tensor) -> tuple[Tensor, Tensor]:
        scores = h @ w.T
        kl = F.kl_div(scores.log_softmax(-1), (th @ tw.T).softmax(-1), reduction="batchmean")
        return kl, F.cross_entropy(scores, labels)

    def run(f: Callable[..., Any]) -> list[Any]:
        tensors = given(True, True, True, True)
        total = f(*tensors)[which]
        return [total.detach(), *torch.autograd.grad(total, tensors, allow_unused=True)]

    expected = run(loss)
    with backend.collected() as report:
        found = run(compiled(loss, "eager"))
    assert report.num_fused == 1, str(report)
    assert "cross-entropy at" not in report.details()
    assert [x is None for x in found] == [x is None for x in expected]
    assert (found[-1] is None) == (which == 1)
    for x, y in zip(found, expected, strict=True):
        if x is not None:
            torch.testing.assert_close(x, y)


# ------------------------------------------------------------------------------------ direct calls
def element(e: Any) -> Any:
    logs = e.s.log_softmax("key")
    return -(logs.exp() * logs).sum("key")


DIRECT: list[tuple[Loss, Loss]] = [
    (divergence, lambda *x: linear_kl(*x, reduction="mean")),
    (entropy, lambda h, w, *_: row_program(element, dots={"s": (h, w)}, reduction="mean")),
]


@pytest.mark.parametrize(("naive", "direct"), DIRECT, ids=["linear_kl", "row_program"])
def test_a_direct_call_whose_head_takes_a_step(naive: Loss, direct: Loss) -> None:
    tensors = given(False, True)
    (expected,) = torch.autograd.grad(naive(*tensors), tensors[1])
    total = direct(*tensors)
    with torch.no_grad():
        tensors[1].zero_()
    torch.testing.assert_close(torch.autograd.grad(total, tensors[1])[0], expected)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(("naive", "direct"), DIRECT, ids=["linear_kl", "row_program"])
def test_a_direct_call_under_compiled_autograd(naive: Loss, direct: Loss, inner: str) -> None:
    """It adds up what the sum and its refusal of second derivatives give an operand."""
    tensors = given(True, True)
    expected = torch.autograd.grad(naive(*tensors), tensors[:2])
    torch._dynamo.reset()
    total = direct(*tensors)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: total.backward(), backend=inner)()
    for x, y in zip(tensors, expected, strict=False):
        torch.testing.assert_close(x.grad, y)
