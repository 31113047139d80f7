"""Two sums over keys that are added are one divergence, where nothing else reads one of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare


def log_target(mixture: Tensor, x: Tensor) -> Tensor:
    return F.kl_div(mixture, x, reduction="batchmean", log_target=True)


def compared(loss: Callable[..., object]) -> Outcome:
    make = torch.Generator().manual_seed(0)
    sizes = (6, 4), (11, 4), (6, 5), (11, 5)
    h, w, g, v = (torch.randn(s, generator=make).requires_grad_() for s in sizes)
    return compare(loss, [h, w, g.detach(), v.detach()]).check()


def halves(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    t, s = (g @ v.T).log_softmax(-1), (h @ w.T).log_softmax(-1)
    mixture = torch.logaddexp(t, s) - math.log(2)
    return log_target(mixture, t), log_target(mixture, s)


def both_ways(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    t, s = g @ v.T, h @ w.T
    forward = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    return forward, F.kl_div(t.log_softmax(-1), s.softmax(-1), reduction="batchmean")


TOTALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "halved after": lambda a, b: 0.5 * (a + b),
    "halved before": lambda a, b: 0.5 * a + 0.5 * b,
    "divided": lambda a, b: a / 2 + b / 2,
    "by their mean": lambda a, b: (a + b) / 2,
}


@pytest.mark.parametrize("name", TOTALS)
def test_halves_of_js_are_one_call(name: str) -> None:
    (site,) = compared(lambda *x: TOTALS[name](*halves(*x))).report.sites
    assert (site.kind, site.form) == ("linear_kl", "js, beta=0.5")


def test_both_directions_are_one_call() -> None:
    (site,) = compared(lambda *x: sum(both_ways(*x))).report.sites
    assert (site.kind, site.form) == ("linear_kl", "jeffreys")


def test_a_half_that_is_read_alone_is_computed_alone() -> None:
    def logged(*x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = halves(*x)
        return 0.5 * (a + b), a.detach()

    report = compared(logged).report
    assert report.num_fused == 2 and "js" not in {site.form for site in report.sites}


def test_a_half_that_another_loss_multiplies_is_computed_alone() -> None:
    def product(*x: Tensor) -> Tensor:
        a, b = halves(*x)
        return a + b + a * b

    assert compared(product).report.num_fused == 2


def test_losses_of_two_layers_stay_two() -> None:
    def layers(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        def loss(h: Tensor, g: Tensor) -> Tensor:
            return F.kl_div((h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1), reduction="sum")

        return loss(h, g) + loss(h * 2, g * 2)

    assert compared(layers).report.num_fused == 2


def test_halves_beside_entropies_of_their_rows_share_a_program() -> None:
    def watched(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        t, s = (g @ v.T).log_softmax(-1), (h @ w.T).log_softmax(-1)
        mixture = torch.logaddexp(t, s) - math.log(2)
        entropy = -(s.exp() * s).sum(-1).detach()
        return 0.5 * (log_target(mixture, t) + log_target(mixture, s)), entropy

    assert {site.kind for site in compared(watched).report.sites} == {"row_program"}
