"""Products that autocast makes in a narrower type than their operands, or of two types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.covering import every
from tests.support.losses import kd as divergence
from torch_streamkl.fx_passes import backend

OPTIONS = {"streamkl.verify": "never", "streamkl.inner": "aot_eager", "streamkl.min_mib": 0.0}
TYPES = (torch.bfloat16, torch.float16)


def inputs() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    q, k, r, s = (torch.randn(2, 3, n, 4, generator=make) for n in (5, 7, 5, 7))
    return [q.requires_grad_(), k.requires_grad_(), r, s]


def run(step: Callable[..., Tensor]) -> tuple[list[Tensor], list[Tensor], backend.Report]:
    """The value and gradients in eager mode and compiled."""
    results = []
    torch._dynamo.reset()
    with backend.collected() as report:
        for fn in (step, torch.compile(step, backend="streamkl", options=OPTIONS)):
            given = inputs()
            value = fn(*given)
            gradients = torch.autograd.grad(value.float().sum(), given[:2])
            results.append([value.detach(), *gradients])
    eager, compiled = results
    return eager, compiled, report


COMPARISONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "with the largest": lambda s, t: torch.where(
        s >= s.amax(-1, keepdim=True).detach(), s.log_softmax(-1), 0.0
    ),
    "with the other side": lambda s, t: (s > t) * s.softmax(-1),
    "of probabilities": lambda s, t: torch.where(t.softmax(-1) > 0.1, s.softmax(-1), 0.0),
    "for equality": lambda s, t: (s == t) * s.softmax(-1) + t.softmax(-1) * s,
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", COMPARISONS)
def test_scores_that_autocast_rounds_are_not_compared(name: str, dtype: torch.dtype) -> None:
    """A comparison sees what they were rounded to: two of them may be equal."""

    def step(q: Tensor, k: Tensor, r: Tensor, s: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return COMPARISONS[name](q @ k.mT, r @ s.mT).sum(-1)

    eager, compiled, report = run(step)
    assert not report.failures
    assert report.num_fused == 0
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)


def test_comparisons_behind_autocast() -> None:
    def step(q: Tensor, k: Tensor, r: Tensor, s: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a, b = q @ k.mT, r @ s.mT
        return COMPARISONS["with the largest"](a.float(), b.float()).sum(-1)

    eager, compiled, report = run(step)
    assert report.num_fused == 0
    assert torch.equal(eager[0], compiled[0])


def entropy(s: Tensor, t: Tensor) -> Tensor:
    logs = s.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()


def squares(s: Tensor, t: Tensor) -> Tensor:
    return ((s.softmax(-1) - t.softmax(-1)) ** 2).sum(-1).mean()


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda q, k: q @ k.bfloat16().mT,
    "matmul, the other": lambda q, k: q.bfloat16() @ k.mT,
    "einsum": lambda q, k: torch.einsum("bhnd,bhmd->bhnm", q, k.bfloat16()),
    "baddbmm": lambda q, k: torch.baddbmm(
        torch.zeros(1), q.flatten(0, 1), k.bfloat16().flatten(0, 1).mT
    ).unflatten(0, q.shape[:2]),
    "linear": lambda q, k: F.linear(q, k[0, 0].bfloat16()),
    "linear with a bias": lambda q, k: F.linear(q, k[0, 0].bfloat16(), k[0, 0, :, 0]),
}


@pytest.mark.parametrize("loss", every(2, [divergence, entropy, squares]))
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_two_types(name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Autocast takes them; the analysis runs the code without it."""

    def step(q: Tensor, k: Tensor, r: Tensor, s: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a, b = PRODUCTS[name](q, k), PRODUCTS[name](r, s)
        return loss(a.float(), b.float())

    eager, compiled, report = run(step)
    assert not report.failures
    assert report.num_fused == 1, str(report)
    for a, b in zip(eager, compiled, strict=True):
        assert (a - b).norm() <= 2.0**-5 * a.norm()
