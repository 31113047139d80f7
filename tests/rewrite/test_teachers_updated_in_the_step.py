"""A teacher that follows its student, updated in the compiled step after the loss.

Operators that make their gradients in the forward read nothing after it. Others would read the new
weights in the backward, so the divergence stays.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare
from tests.support.covering import every

TOKENS, VOCAB, WIDTH = 14, 50, 12
Update = Callable[[Tensor, Tensor], object]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def lerp(wt: Tensor, w: Tensor) -> None:
    wt.lerp_(w, 0.1)


def mul_add(wt: Tensor, w: Tensor) -> None:
    wt.mul_(0.9).add_(w, alpha=0.1)


def foreach(wt: Tensor, w: Tensor) -> None:
    torch._foreach_lerp_([wt], [w], 0.1)


def foreach_in_two(wt: Tensor, w: Tensor) -> None:
    torch._foreach_mul_([wt], 0.9)
    torch._foreach_add_([wt], [w], alpha=0.1)


def copy(wt: Tensor, w: Tensor) -> None:
    wt.copy_(0.9 * wt + 0.1 * w)


def data(wt: Tensor, w: Tensor) -> None:
    wt.data.mul_(0.9)


UPDATES = (lerp, mul_add, foreach, foreach_in_two, copy, data)


def rows(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    s, t = F.linear(x, w), F.linear(xt, wt)
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


def mean(*inputs: Tensor) -> Tensor:
    return rows(*inputs).mean()


def selected(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    some = torch.tensor([3, 0, -1, 3])
    s, t = F.linear(x, w)[some], F.linear(xt, wt)[some]
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


def squares(*inputs: Tensor) -> Tensor:
    return rows(*inputs).square().mean()


def with_labels(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    s, t = F.linear(x, w), F.linear(xt, wt)
    soft = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    return soft + F.cross_entropy(s, torch.arange(TOKENS))


def two_losses(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    """Of one head: a gradient of the head for each would have to be kept."""
    return rows(x, w, xt, wt).mean() + rows(x * 0.5, w, xt, wt).mean()


def attention(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    q, k, t, u = (a.view(-1, 2, WIDTH // 2).transpose(0, 1) for a in (x, w, xt, wt))
    s, t = q @ k.mT, t @ u.mT
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


LOSSES: dict[Loss, int] = {
    mean: 1,
    selected: 1,
    squares: 0,
    with_labels: 0,
    two_losses: 0,
    attention: 0,
}


def inputs() -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (VOCAB, WIDTH), (TOKENS, WIDTH), (VOCAB, WIDTH))
    return [torch.randn(s, generator=make).requires_grad_(i < 2) for i, s in enumerate(shapes)]


def run(loss: Loss, update: Update, inner: str = "aot_eager") -> Outcome:
    def step(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> tuple[Tensor, Tensor]:
        value = loss(x, w, xt, wt)
        with torch.no_grad():
            update(wt, w)
        return value, wt * 1

    return compare(step, inputs(), inner=inner)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("update", every(2, UPDATES), ids=lambda f: f.__name__)
def test_updates_behind_the_loss(update: Update, inner: str) -> None:
    outcome = run(mean, update, inner).check()
    assert outcome.num_fused == 1, outcome.report
    assert not outcome.report.num_remaining


@pytest.mark.parametrize("loss", every(2, LOSSES), ids=lambda f: f.__name__)
def test_losses_in_front_of_the_update(loss: Loss) -> None:
    outcome = run(loss, lerp).check()
    assert outcome.num_fused == LOSSES[loss], outcome.report
    for site in outcome.report.sites:
        if not site.fused:
            assert "modified in place after the scores are computed" in site.reason
            assert "after backward()" in site.hint


def between_scores_and_loss(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    t = F.linear(xt, wt)
    wt.mul_(0.5)
    return F.kl_div(F.linear(x, w).log_softmax(-1), t.softmax(-1), reduction="batchmean")


def between_rows_and_sum(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    value = rows(x, w, xt, wt)
    wt.mul_(0.5)
    return value.mean()


def between_two_losses(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    first = rows(x, w, xt, wt).mean()
    wt.mul_(0.5)
    return first + rows(x, w, xt, wt).mean()


def hidden_states(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    value = rows(x, w, xt, wt).mean()
    xt.mul_(0.5)
    return value


def part_of_the_head(x: Tensor, w: Tensor, xt: Tensor, wt: Tensor) -> Tensor:
    value = rows(x, w, xt, wt).mean()
    wt.view(-1)[::2].zero_()
    return value


@pytest.mark.parametrize(
    ("step", "num_fused"),
    [
        (between_scores_and_loss, 0),
        (between_rows_and_sum, 0),
        (between_two_losses, 1),
        (hidden_states, 1),
        (part_of_the_head, 1),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_writes(step: Loss, num_fused: int) -> None:
    outcome = compare(step, inputs(), inner="aot_eager").check()
    assert outcome.num_fused == num_fused, outcome.report


def test_several_steps() -> None:
    """The teacher goes where eager's goes."""

    def train(compiled: bool) -> tuple[list[float], Tensor]:
        x, w, xt, wt = inputs()

        def step() -> Tensor:
            loss = mean(x, w, xt, wt)
            with torch.no_grad():
                wt.lerp_(w, 0.1)
            return loss

        options = {"streamkl.inner": "aot_eager"}
        call = torch.compile(step, backend="streamkl", options=options) if compiled else step
        optimizer = torch.optim.SGD([x, w], lr=0.5)
        losses = []
        for _ in range(4):
            loss = call()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, wt

    torch._dynamo.reset()
    (ours, ours_wt), (eager, eager_wt) = train(True), train(False)
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(ours_wt, eager_wt)
