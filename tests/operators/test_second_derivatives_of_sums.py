"""A sum that has its gradients from the forward has one derivative, also in a compiled graph.

test_every_operator.py asks calls of their own in every way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.compiling import compile_rewritten
from tests.support.losses import kd as _divergence
from torch_streamkl import linear_kl
from torch_streamkl.fx_passes import backend

REFUSED = "impl='reference' for higher derivatives"


def _given() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((7, 6), (11, 6), (7, 5), (11, 5))
    a, b, c, d = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    return a, b, c, d


def test_a_mixed_derivative_by_weights_of_rows_is_refused() -> None:
    """Of the gradient to either, by the other one."""
    for first in (0, 1):
        h, w, th, tw = _given()
        given = [h.requires_grad_(), torch.ones(len(h), dtype=h.dtype, requires_grad=True)]
        total = linear_kl(h, w, th, tw, row_weight=given[1], reduction="sum")
        (g,) = torch.autograd.grad(total, given[first], create_graph=True)
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.autograd.grad(g.square().sum(), given[1 - first])


# ------------------------------------------------------------------------------- compiled graphs
# The backward of the sum reads no input of a graph, which is what AOTAutograd looks for. Where
# another term led to the inputs, the number was wrong and nothing raised.
COMPILED = "does not currently support double backward"


def vocab(h: Tensor, w: Tensor) -> Tensor:
    return _divergence(h @ w.T, w.new_ones(11, 5).cumsum(0)[:7] @ w.new_ones(5, 11))


def entries_viewed(h: Tensor, w: Tensor) -> Tensor:
    return _divergence(h.unsqueeze(0).flatten(0, 1) @ w.T, torch.zeros_like(h) @ w.detach().T)


def entries_of_a_layer(h: Tensor, w: Tensor) -> Tensor:
    """No operand that needs a gradient is an input."""
    return _divergence((h * 2.0).tanh() @ w.detach().T, torch.zeros_like(h) @ w.detach().T)


def entropy_of_entries(h: Tensor, w: Tensor) -> Tensor:
    logs = (h @ w.T).log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def maps(h: Tensor, w: Tensor) -> Tensor:
    """On a CPU Inductor gets gradients in the forward, too."""
    q, k = h[None, None], w[None, None]
    return _divergence(q @ k.mT, torch.zeros_like(q) @ k.detach().mT)


@pytest.mark.parametrize(
    ("inner", "loss"),
    [
        ("eager", vocab),
        ("eager", entries_of_a_layer),
        ("aot_eager", entries_viewed),
        ("aot_eager", entries_of_a_layer),
        ("aot_eager", entropy_of_entries),
        ("inductor", entropy_of_entries),
        ("inductor", maps),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_compiled_sum_refuses_as_well(inner: str, loss: Callable[..., Tensor]) -> None:
    h, w = _given()[0].requires_grad_(), _given()[1].requires_grad_()
    with backend.collected() as report:
        total = compile_rewritten(loss, inner=inner)(h, w)
    assert report.num_fused == 1
    assert loss is maps or "gradients in the forward" in report.details()
    torch.testing.assert_close(total, loss(h, w))
    wanted = [h] if loss is entries_of_a_layer else [h, w]
    for x, expected in zip(wanted, torch.autograd.grad(loss(h, w), wanted), strict=True):
        torch.testing.assert_close(torch.autograd.grad(total, x, retain_graph=True)[0], expected)
        (g,) = torch.autograd.grad(total, x, create_graph=True)
        for other in wanted:
            penalty = g.square().sum() + other.square().sum()
            with pytest.raises((NotImplementedError, RuntimeError), match=f"{REFUSED}|{COMPILED}"):
                torch.autograd.grad(penalty, other, retain_graph=True)


def test_a_call_in_a_graph_of_another_backend_refuses_as_well() -> None:
    """Where the head is a parameter; it does not know which other tensors are a graph's inputs."""
    h, w, th, tw = _given()
    head = nn.Parameter(w)

    def loss(h: Tensor) -> Tensor:
        return linear_kl(h.tanh(), head, th, tw, reduction="mean")

    h.requires_grad_()
    torch._dynamo.reset()
    (g,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(h), h, create_graph=True)
    with pytest.raises(RuntimeError, match=COMPILED):
        (g.square().sum() + h.square().sum()).backward()


def test_a_sum_over_shards_refuses_as_well(tmp_path: Path) -> None:
    """Of a group of one rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        h, w, th, tw = _given()
        h.requires_grad_()
        group = torch.distributed.group.WORLD
        total = linear_kl(h, w, th, tw, reduction="mean", group=group)
        (g,) = torch.autograd.grad(total, h, create_graph=True)
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.autograd.grad(g.square().sum() + h.square().sum(), h)
    finally:
        torch.distributed.destroy_process_group()
