"""A teacher that follows its student, updated in the compiled step after the loss.

Operators that make their gradients in the forward read nothing after it. Others would read the new
weights in the backward, so the divergence stays.
"""

import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.losses import kd, rows_of_kl
from tests.support.table import Table

TOKENS, VOCAB, WIDTH = 14, 50, 12
STEPS = Table(
    "x w xt wt", {"s t": lambda x, w, xt, wt: (F.linear(x, w), F.linear(xt, wt))}, sites=1
)


def inputs():
    make = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (VOCAB, WIDTH)) * 2
    return [torch.randn(s, generator=make).requires_grad_(i < 2) for i, s in enumerate(shapes)]


def foreach_in_two(wt, w):
    torch._foreach_mul_([wt], 0.9)
    torch._foreach_add_([wt], [w], alpha=0.1)


UPDATES = {
    "lerp": lambda wt, w: wt.lerp_(w, 0.1),
    "mul_add": lambda wt, w: wt.mul_(0.9).add_(w, alpha=0.1),
    "foreach": lambda wt, w: torch._foreach_lerp_([wt], [w], 0.1),
    "foreach in two": foreach_in_two,
    "copy": lambda wt, w: wt.copy_(0.9 * wt + 0.1 * w),
    "data": lambda wt, w: wt.data.mul_(0.9),
}


@STEPS.each(UPDATES, step=2)
def updates_behind_the_loss(update, s, t, w, wt):
    value = rows_of_kl(s, t).mean()
    with torch.no_grad():
        update(wt, w)
    return value, wt * 1


def attention(x, w, xt, wt):
    q, k, t, u = (a.view(-1, 2, WIDTH // 2).transpose(0, 1) for a in (x, w, xt, wt))
    return kd(q @ k.mT, t @ u.mT)


def with_labels(x, w, xt, wt):
    s = F.linear(x, w)
    return kd(s, F.linear(xt, wt)) + F.cross_entropy(s, torch.arange(TOKENS))


def two_losses(x, w, xt, wt):
    """Of one head: a gradient of the head for each would have to be kept."""
    t = F.linear(xt, wt)
    return rows_of_kl(F.linear(x, w), t).mean() + rows_of_kl(F.linear(x * 0.5, w), t).mean()


def selected(x, w, xt, wt):
    some = torch.tensor([3, 0, -1, 3])
    return kd(F.linear(x, w)[some], F.linear(xt, wt)[some])


LOSSES = {
    "selected": (selected, 1),
    "squares": (lambda x, w, xt, wt: rows_of_kl(x @ w.T, xt @ wt.T).square().mean(), 0),
    "with labels": (with_labels, 0),
    "two losses": (two_losses, 0),
    "attention": (attention, 0),
}


@STEPS.each(LOSSES, step=2)
def losses_in_front_of_the_update(loss, x, w, xt, wt):
    value = loss(x, w, xt, wt)
    with torch.no_grad():
        wt.lerp_(w, 0.1)
    return value, wt * 1


@STEPS(sites=0)
def written_between_scores_and_loss(xt, wt, x, w):
    t = F.linear(xt, wt)
    wt.mul_(0.5)
    return kd(F.linear(x, w), t)


@STEPS(sites=0)
def written_between_rows_and_sum(s, t, wt):
    value = rows_of_kl(s, t)
    wt.mul_(0.5)
    return value.mean()


@STEPS(sites=1)
def written_between_two_losses(s, t, x, w, xt, wt):
    first = rows_of_kl(s, t).mean()
    wt.mul_(0.5)
    return first + rows_of_kl(F.linear(x, w), F.linear(xt, wt)).mean()


@STEPS()
def hidden_states_are_written(s, t, xt):
    value = rows_of_kl(s, t).mean()
    xt.mul_(0.5)
    return value


@STEPS()
def part_of_the_head_is_written(s, t, wt):
    value = rows_of_kl(s, t).mean()
    wt.view(-1)[::2].zero_()
    return value


@STEPS.parametrized()
def test_equals_eager(row):
    outcome = compare(row.program, inputs(), inner="aot_eager").check()
    assert outcome.num_fused == row.sites, outcome.report
    if row.name.startswith("updates"):
        assert not outcome.report.num_remaining
    for site in outcome.report.sites if row.name.startswith("losses") else []:
        if not site.fused:
            assert "modified in place after the scores are computed" in site.reason
            assert "after backward()" in site.hint


def test_several_steps():
    """The teacher goes where eager's goes."""

    def train(compiled):
        x, w, xt, wt = inputs()

        def step():
            loss = rows_of_kl(F.linear(x, w), F.linear(xt, wt)).mean()
            with torch.no_grad():
                wt.lerp_(w, 0.1)
            return loss

        call = compile_rewritten(step, inner="aot_eager") if compiled else step
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
