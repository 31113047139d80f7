"""In graphs, sums of an LM head's row programs have their gradients in the forward."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.compiling import compile_rewritten
from tests.support.table import Table

BATCH, ROWS, VOCAB, DIM = 2, 7, 61, 12


def inputs(dtype=torch.float32):
    """The student's hidden states and head, the teacher's, labels, a mask, numbers of rows."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape):
        x = torch.randn(shape, generator=make, dtype=torch.float64) * shape[-1] ** -0.5
        return x.to(dtype)

    student = [normal(BATCH, ROWS, DIM).requires_grad_(), normal(VOCAB, DIM).requires_grad_()]
    teacher = [3 * normal(BATCH, ROWS, DIM + 3), normal(VOCAB, DIM + 3)]
    labels = torch.randint(VOCAB, (BATCH, ROWS), generator=make)
    mask = (torch.rand(BATCH, ROWS, generator=make) > 0.3).to(dtype)
    return [*student, *teacher, labels, mask, torch.rand(BATCH, ROWS, generator=make).to(dtype)]


def policy(h, w, labels):
    """The log-probability of each label, and the entropy."""
    logs = F.linear(h, w).log_softmax(-1)
    chosen = logs.gather(-1, labels[..., None]).squeeze(-1)
    return chosen, -(logs.exp() * logs).sum(-1)


LOSSES = Table("h w th tw labels mask a", {"chosen entropy": policy}, dynamic=False)
STAYS = Table("h w th tw labels mask a", {"chosen entropy": policy})
of_inputs = LOSSES.of_inputs


@LOSSES()
def top_k(h, w, th, tw):
    s, t = F.linear(h, w), F.linear(th, tw)
    values, ids = t.detach().topk(8, -1)
    student = s.gather(-1, ids).float().log_softmax(-1)
    return F.kl_div(student, values.float().softmax(-1), reduction="none").sum(-1).mean()


@LOSSES()
def top_k_batchmean(h, w, th, tw):
    s, t = F.linear(h, w), F.linear(th, tw)
    values, ids = t.detach().topk(8, -1)
    student = s.gather(-1, ids).log_softmax(-1)
    return F.kl_div(student, values.softmax(-1), reduction="batchmean") * 2.0


@LOSSES(dynamic=True)
def ghost(h, w, th, tw, mask):
    s, t = F.linear(h, w).log_softmax(-1), F.linear(th, tw).log_softmax(-1)
    p, ids = t.detach().topk(8, -1)
    q = s.gather(-1, ids)
    rest_p, rest_q = 1 - p.exp().sum(-1), 1 - q.exp().sum(-1)
    kl = (p.exp() * (p - q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    return (kl * mask).sum() / (mask > 0).sum().clamp(min=1)


@LOSSES()
def k3(chosen, entropy, mask, a):
    distance = a - chosen
    each = -a * chosen + 0.1 * (distance.exp() - distance - 1) - 0.01 * entropy
    return each.masked_fill(mask == 0, 0.0).sum() / (mask > 0).sum().clamp(min=1)


@LOSSES(dynamic=True)
def two_means(chosen, entropy):
    return -chosen.mean() + 0.01 * -entropy.mean() * 2 / 3


@LOSSES()
def where_it_counts(h, w, labels, mask, a):
    chosen, entropy = policy(h.flatten(0, 1), w, labels.flatten())
    each = torch.where(mask.flatten() > 0, a.flatten() * chosen - entropy**2, 0.0)
    return each.view(BATCH, ROWS).sum() * 0.5


@LOSSES(dynamic=True)
def z_loss(h, w):
    s = F.linear(h, w)
    logs = s.log_softmax(-1)
    entropy = (logs.exp() * logs).sum(-1).mean()
    return entropy + 1e-4 * s.float().logsumexp(-1).square().mean()


@LOSSES()
def weight_is_computed_from_the_rows(chosen, entropy, a):
    return (chosen * (a - entropy.detach())).sum()


@LOSSES()
def rows_are_logged(chosen, entropy):
    return (chosen - entropy).mean(), entropy.detach().mean()


@LOSSES()
def metrics_without_gradients(h, w, labels):
    """The loss weighs rows by one metric, and returns it and two others."""
    chosen, entropy = policy(h, w, labels)
    with torch.no_grad():
        weight = (-entropy).exp()
        spread = entropy.square().mean()
    loss = (weight.detach() * chosen).mean() + 0.5 * entropy.mean()
    return loss, spread, chosen.detach().sum()


@LOSSES(dynamic=True)
def sizes_of_rows_that_other_code_reads(chosen, entropy, h):
    """They are the inputs'."""
    return (chosen - entropy).sum(), h.new_zeros(chosen.shape[0], entropy.shape[1])


@LOSSES()
def another_loss_is_added(h, w, th, tw, mask, a):
    """The sum's gradient is scaled by code that is after it."""
    kl = ghost(h, w, th, tw, mask)
    return kl * 3.0 + (h * a[..., None]).square().mean(), kl


def is_in_forward(loss, given, **options):
    outcome = compare(loss, given, **options).check()
    assert any(site.fused for site in outcome.report.sites), outcome.report
    return any("gradients in the forward" in site.runs for site in outcome.report.sites)


@LOSSES.parametrized()
def test_losses(row):
    for dtype in (torch.float32, torch.bfloat16):
        assert is_in_forward(row.program, inputs(dtype))
    assert not row.dynamic or is_in_forward(row.program, inputs(), dynamic=True)


def test_by_inductor():
    for loss in (ghost, two_means):
        assert is_in_forward(of_inputs(loss), inputs(), inner="inductor")


def test_what_requires_no_gradient():
    loss, given = of_inputs(k3), inputs()
    assert not is_in_forward(loss, [x.detach() for x in given])
    assert not is_in_forward(loss, given, training=False)
    given[1] = given[1].detach()
    assert is_in_forward(loss, given)


def test_backward_twice():
    given = inputs()
    loss = compile_rewritten(of_inputs(two_means))(*given)
    first = torch.autograd.grad(loss, given[:2], retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(loss * 3, given[:2])
    torch.testing.assert_close(second, tuple(3 * x for x in kept))
    torch.testing.assert_close(first, tuple(kept))


# ------------------------------------------------------------------ what stays in the backward
OF_ROWS = {
    "rows are returned": lambda chosen, entropy, mask: ((chosen * mask).sum(), entropy),
    "rows meet other rows": lambda chosen, entropy, mask: (
        chosen[:, :, None] * entropy[:, None, :]
    ).mean(),
    "rows are repeated": lambda chosen, entropy, mask: (
        (chosen - entropy)[..., None] * torch.stack([mask + 1, mask], -1)
    ).mean(),
    "rows in another order": lambda chosen, entropy, mask: (
        (chosen - entropy).t() * mask.t()
    ).mean(),
    "standardised": lambda chosen, entropy, mask: (entropy / chosen.detach().abs().max()).sum(),
    "two numbers": lambda chosen, entropy, mask: (chosen.mean(), entropy.sum()),
    "product of sums": lambda chosen, entropy, mask: chosen.mean() * entropy.mean(),
    "ratio of sums": lambda chosen, entropy, mask: chosen.sum() / entropy.sum(),
    "a number between sums": lambda chosen, entropy, mask: (chosen.mean() + 1.0) + entropy.mean(),
    "a function": lambda chosen, entropy, mask: (chosen - entropy).mean().sigmoid(),
    "mean of means": lambda chosen, entropy, mask: (
        ((chosen - entropy) * mask).sum(-1) / mask.sum(-1)
    ).mean(),
    "a condition on the rows": lambda chosen, entropy, mask: torch.where(
        chosen > -4.0, entropy, 0.0
    ).sum(),
    "in double": lambda chosen, entropy, mask: (chosen.double() * 3 - entropy.double()).sum(),
    "in half": lambda chosen, entropy, mask: (chosen.half() * 3 - entropy.half()).float().sum(),
}


@STAYS.each(OF_ROWS)
def of_rows(loss, chosen, entropy, mask):
    return loss(chosen, entropy, mask)


@STAYS()
def weight_needs_a_gradient(chosen, entropy, h):
    return (chosen * h.mean(-1) - entropy).sum()


@STAYS()
def a_tensor_between_sums(chosen, entropy, mask):
    """Were the mask empty, 0 times infinity would be NaN in each row."""
    return chosen.sum() / mask.sum() + entropy.mean()


@STAYS()
def divided_by_a_mask(chosen, entropy, mask, a):
    """Of no row: the loss is NaN, and eager's gradients are 0."""
    return (chosen * a - entropy).masked_fill(mask == 0, 0.0).sum() / mask.sum()


@STAYS()
def replaced_where_it_is_not_finite(chosen, entropy, mask, a):
    loss = divided_by_a_mask(chosen, entropy, mask, a)
    return torch.where(loss.isfinite(), loss, 0.0)


@STAYS()
def squared(chosen, entropy):
    total = (chosen - entropy).mean()
    return total * total


@STAYS()
def weight_is_written(chosen, entropy, mask, a):
    each = (chosen - entropy) * a.clone().mul_(2.0)
    mask.mul_(2.0)
    return (each + mask).sum()


@STAYS()
def rows_are_written(chosen, entropy, mask):
    each = chosen - entropy
    each *= mask
    return each.sum()


@STAYS()
def one_head_twice(h, w, labels):
    (first, entropy), (second, other) = policy(h, w, labels), policy(h * 0.5, w, labels)
    return (first - entropy).mean(), (second - other).sum()


@STAYS.parametrized()
def test_stays_in_the_backward(row):
    assert not is_in_forward(row.program, inputs())


def test_stays_in_float16():
    assert not is_in_forward(of_inputs(z_loss), inputs(torch.float16))


# ------------------------------------------------------------------ what is not finite in eager
def zero_in_a_denominator(chosen, entropy, mask):
    return torch.where(mask > 0, chosen / (mask * entropy), 0.0).sum()


def root_of_zero(chosen, entropy, mask):
    return torch.where(mask > 0, (chosen - chosen).sqrt(), entropy).sum()


def logarithm_of_zero(entropy, mask):
    """Times a mask's 0 it is NaN."""
    return ((entropy * mask).log() * mask).sum()


def weighted(chosen, entropy, a):
    return (chosen * a - entropy).mean()


EMPTY, INFINITE, NAN = (5, ..., 0.0), (6, (0, 2), float("inf")), (6, (0, 2), float("nan"))
GUARDED = (ghost, k3, a_tensor_between_sums, divided_by_a_mask, replaced_where_it_is_not_finite)
NOT_FINITE = [
    *((loss, change) for loss in GUARDED for change in (EMPTY, None)),
    *((loss, None) for loss in (zero_in_a_denominator, root_of_zero, logarithm_of_zero)),
    (weighted, INFINITE),
    (weighted, NAN),
]


@pytest.mark.parametrize(("loss", "change"), NOT_FINITE)
def test_not_finite_where_eager_is_not(loss, change):
    """0 / 0 is NaN, and a where does not keep what it leaves out from the gradient.

    Value and gradients are 0, NaN or infinite where they are in eager.
    """
    given = inputs()
    if change:
        number, place, value = change
        given[number][place] = value
    results = []
    step = of_inputs(loss)
    for run in (step, compile_rewritten(step)):
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in given]
        total = run(*leaves)
        results.append([total, *torch.autograd.grad(total, leaves[:2])])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x.isfinite(), y.isfinite())
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x == 0, y == 0)
