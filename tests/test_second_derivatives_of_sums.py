"""A sum that has its gradients from the forward: one derivative, whichever way it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_streamkl import linear_kl, row_program

Sum = Callable[[Tensor], Tensor]
REFUSED = "impl='reference' for higher derivatives"


def _given() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((7, 6), (11, 6), (7, 5), (11, 5))
    a, b, c, d = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    return a, b, c, d


def _kl() -> tuple[Sum, Sum]:
    _, w, th, tw = _given()
    w.requires_grad_()

    def naive(h: Tensor) -> Tensor:
        s, t = (h @ w.T).log_softmax(-1), (th @ tw.T).log_softmax(-1)
        return (t.exp() * (t - s)).sum(-1).mean()

    return lambda h: linear_kl(h, w, th, tw, reduction="mean"), naive


def _program() -> tuple[Sum, Sum]:
    _, w, _, _ = _given()
    w.requires_grad_()

    def entropy(e):  # type: ignore[no-untyped-def]
        logs = e.s.log_softmax("key")
        return -(logs.exp() * logs).sum("key")

    def naive(h: Tensor) -> Tensor:
        logs = (h @ w.T).log_softmax(-1)
        return -(logs.exp() * logs).sum(-1).mean()

    return lambda h: row_program(entropy, dots={"s": (h, w)}, reduction="mean"), naive


SUMS = {"linear_kl": _kl, "row_program": _program}
functional = torch.autograd.functional


def _penalty(total: Sum, h: Tensor) -> Tensor:
    h = h.requires_grad_()
    (g,) = torch.autograd.grad(total(h) + 0.5 * h.square().sum(), h, create_graph=True)
    return torch.autograd.grad((g * g).sum(), h)[0]


def _penalty_of_inputs(total: Sum, h: Tensor) -> None:
    h = h.requires_grad_()
    (g,) = torch.autograd.grad(total(h) + 0.5 * h.square().sum(), h, create_graph=True)
    (g * g).sum().backward(inputs=[h])


def _unused(total: Sum, h: Tensor) -> object:
    h = h.requires_grad_()
    (g,) = torch.autograd.grad(total(h), h, create_graph=True)
    return torch.autograd.grad(g.square().sum(), h, allow_unused=True)


SECOND = {
    "hvp": lambda total, h: functional.hvp(total, h, torch.ones_like(h)),
    "hessian": functional.hessian,
    "penalty": _penalty,
    "penalty of inputs": _penalty_of_inputs,
    "unused": _unused,
}


@pytest.mark.parametrize("how", SECOND)
@pytest.mark.parametrize("name", SUMS)
def test_a_second_derivative_is_refused(name: str, how: str) -> None:
    """Autograd runs what leads to the inputs that it is asked for, and nothing else."""
    with pytest.raises(NotImplementedError, match=REFUSED):
        SECOND[how](SUMS[name]()[0], _given()[0])


def test_a_mixed_derivative_by_weights_of_rows_is_refused() -> None:
    """Of the gradient to either, by the other one."""
    for first in (0, 1):
        h, w, th, tw = _given()
        given = [h.requires_grad_(), torch.ones(len(h), dtype=h.dtype, requires_grad=True)]
        total = linear_kl(h, w, th, tw, row_weight=given[1], reduction="sum")
        (g,) = torch.autograd.grad(total, given[first], create_graph=True)
        with pytest.raises(NotImplementedError, match=REFUSED):
            torch.autograd.grad(g.square().sum(), given[1 - first])


def _jvp(total: Sum, h: Tensor) -> Tensor:
    value: Tensor = functional.jvp(total, h, torch.ones_like(h))[1]
    return value


def _norm_of_a_scaled_gradient(total: Sum, h: Tensor) -> Tensor:
    """GradNorm: the derivative by the factor of the sum."""
    h, factor = h.requires_grad_(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(factor * total(h), h, create_graph=True)
    return torch.autograd.grad(g.norm(), factor)[0]


@pytest.mark.parametrize("how", [_jvp, _norm_of_a_scaled_gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", SUMS)
def test_a_first_derivative_is_given(name: str, how: Callable[[Sum, Tensor], Tensor]) -> None:
    ours, naive = SUMS[name]()
    h = _given()[0]
    torch.testing.assert_close(how(ours, h.clone()), how(naive, h.clone()))
