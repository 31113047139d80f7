"""In graphs, sums of an LM head's row programs have their gradients in the forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare
from tests.support.named_inputs import given

BATCH, ROWS, VOCAB, DIM = 2, 7, 61, 12
IN_FORWARD = "gradients in the forward"
Loss = Callable[..., Any]


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The student's hidden states and head, the teacher's, labels, a mask, numbers of rows."""
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=make, dtype=torch.float64) * shape[-1] ** -0.5
        return x.to(dtype)

    student = [normal(BATCH, ROWS, DIM).requires_grad_(), normal(VOCAB, DIM).requires_grad_()]
    teacher = [3 * normal(BATCH, ROWS, DIM + 3), normal(VOCAB, DIM + 3)]
    labels = torch.randint(VOCAB, (BATCH, ROWS), generator=make)
    mask = (torch.rand(BATCH, ROWS, generator=make) > 0.3).to(dtype)
    return [*student, *teacher, labels, mask, torch.rand(BATCH, ROWS, generator=make).to(dtype)]


def policy(h: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, and the entropy."""
    logs = F.linear(h, w).log_softmax(-1)
    chosen = logs.gather(-1, labels[..., None]).squeeze(-1)
    return chosen, -(logs.exp() * logs).sum(-1)


of_inputs = given("h w th tw labels mask a", {"chosen entropy": policy})


@of_inputs
def top_k(h, w, th, tw):
    s, t = F.linear(h, w), F.linear(th, tw)
    values, ids = t.detach().topk(8, -1)
    student = s.gather(-1, ids).float().log_softmax(-1)
    return F.kl_div(student, values.float().softmax(-1), reduction="none").sum(-1).mean()


@of_inputs
def top_k_batchmean(h, w, th, tw):
    s, t = F.linear(h, w), F.linear(th, tw)
    values, ids = t.detach().topk(8, -1)
    student = s.gather(-1, ids).log_softmax(-1)
    return F.kl_div(student, values.softmax(-1), reduction="batchmean") * 2.0


@of_inputs
def ghost(h, w, th, tw, mask):
    s, t = F.linear(h, w).log_softmax(-1), F.linear(th, tw).log_softmax(-1)
    p, ids = t.detach().topk(8, -1)
    q = s.gather(-1, ids)
    rest_p, rest_q = 1 - p.exp().sum(-1), 1 - q.exp().sum(-1)
    kl = (p.exp() * (p - q)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())
    return (kl * mask).sum() / (mask > 0).sum().clamp(min=1)


@of_inputs
def k3(chosen, entropy, mask, a):
    distance = a - chosen
    each = -a * chosen + 0.1 * (distance.exp() - distance - 1) - 0.01 * entropy
    return each.masked_fill(mask == 0, 0.0).sum() / (mask > 0).sum().clamp(min=1)


@of_inputs
def two_means(chosen, entropy):
    return -chosen.mean() + 0.01 * -entropy.mean() * 2 / 3


@of_inputs
def where_it_counts(h, w, labels, mask, a):
    chosen, entropy = policy(h.flatten(0, 1), w, labels.flatten())
    each = torch.where(mask.flatten() > 0, a.flatten() * chosen - entropy**2, 0.0)
    return each.view(BATCH, ROWS).sum() * 0.5


@of_inputs
def z_loss(h, w):
    s = F.linear(h, w)
    logs = s.log_softmax(-1)
    entropy = (logs.exp() * logs).sum(-1).mean()
    return entropy + 1e-4 * s.float().logsumexp(-1).square().mean()


@of_inputs
def weight_is_computed_from_the_rows(chosen, entropy, a):
    return (chosen * (a - entropy.detach())).sum()


@of_inputs
def rows_are_logged(chosen, entropy):
    return (chosen - entropy).mean(), entropy.detach().mean()


@of_inputs
def metrics_without_gradients(h, w, labels):
    """The loss weighs rows by one metric, and returns it and two others."""
    chosen, entropy = policy(h, w, labels)
    with torch.no_grad():
        weight = (-entropy).exp()
        spread = entropy.square().mean()
    loss = (weight.detach() * chosen).mean() + 0.5 * entropy.mean()
    return loss, spread, chosen.detach().sum()


LOSSES = (
    top_k,
    top_k_batchmean,
    ghost,
    k3,
    two_means,
    where_it_counts,
    z_loss,
    rows_are_logged,
    weight_is_computed_from_the_rows,
    metrics_without_gradients,
)


def compiled(loss: Loss, given: list[Tensor], **options: Any) -> Outcome:
    return compare(loss, given, options={"streamkl.min_mib": 0.0}, **options).check()


def is_in_forward(outcome: Outcome) -> bool:
    assert any(site.fused for site in outcome.report.sites), outcome.report
    return any(IN_FORWARD in site.runs for site in outcome.report.sites)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_losses(loss: Loss) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        outcome = compiled(loss, inputs(dtype))
        assert is_in_forward(outcome), outcome.report


@pytest.mark.parametrize("loss", [ghost, two_means, z_loss], ids=lambda f: f.__name__)
def test_sizes_that_vary(loss: Loss) -> None:
    assert is_in_forward(compiled(loss, inputs(), dynamic=True))


def test_by_inductor() -> None:
    for loss in (ghost, two_means):
        assert is_in_forward(compiled(loss, inputs(), inner="inductor"))


def test_without_gradients_there_is_nothing_to_move() -> None:
    assert not is_in_forward(compiled(k3, [x.detach() for x in inputs()]))
    assert not is_in_forward(compiled(k3, inputs(), training=False))


def test_of_one_operand() -> None:
    given = inputs()
    given[1] = given[1].detach()
    assert is_in_forward(compiled(k3, given))


def test_backward_twice() -> None:
    given = inputs()
    options = {"streamkl.min_mib": 0.0, "streamkl.inner": "eager"}
    loss = torch.compile(two_means, backend="streamkl", options=options)(*given)
    first = torch.autograd.grad(loss, given[:2], retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(loss * 3, given[:2])
    torch.testing.assert_close(second, tuple(3 * x for x in kept))
    torch.testing.assert_close(first, tuple(kept))


def test_behind_a_module_and_another_loss() -> None:
    """The sum's gradient is scaled by code that is after it."""

    def loss(h, w, th, tw, labels, mask, a):
        kl = ghost(h, w, th, tw, labels, mask, a)
        return kl * 3.0 + (h * a[..., None]).square().mean(), kl

    assert is_in_forward(compiled(loss, inputs()))


# ------------------------------------------------------------------ what stays in the backward


@of_inputs
def _rows_are_returned(chosen, entropy, mask):
    return (chosen * mask).sum(), entropy


@of_inputs
def _weight_needs_a_gradient(chosen, entropy, h):
    return (chosen * h.mean(-1) - entropy).sum()


@of_inputs
def _standardised(chosen, entropy):
    return (entropy / chosen.detach().abs().max()).sum()


@of_inputs
def _rows_meet_other_rows(chosen, entropy):
    return (chosen[:, :, None] * entropy[:, None, :]).mean()


@of_inputs
def _rows_are_repeated(chosen, entropy, mask, a):
    return ((chosen - entropy)[..., None] * torch.stack([a, mask], -1)).mean()


@of_inputs
def _rows_in_another_order(chosen, entropy, a):
    return ((chosen - entropy).t() * a.t()).mean()


@of_inputs
def _two_numbers(chosen, entropy):
    return chosen.mean(), entropy.sum()


@of_inputs
def _product_of_sums(chosen, entropy):
    return chosen.mean() * entropy.mean()


@of_inputs
def _ratio_of_sums(chosen, entropy):
    return chosen.sum() / entropy.sum()


@of_inputs
def _a_number_between_sums(chosen, entropy):
    return (chosen.mean() + 1.0) + entropy.mean()


@of_inputs
def _a_tensor_between_sums(chosen, entropy, mask):
    """Were the mask empty, 0 times infinity would be NaN in each row."""
    return chosen.sum() / mask.sum() + entropy.mean()


@of_inputs
def _divided_by_a_mask(chosen, entropy, mask, a):
    """Of no row: the loss is NaN, and eager's gradients are 0."""
    return (chosen * a - entropy).masked_fill(mask == 0, 0.0).sum() / mask.sum()


def _replaced_where_it_is_not_finite(h, w, th, tw, labels, mask, a):
    loss = _divided_by_a_mask(h, w, th, tw, labels, mask, a)
    return torch.where(loss.isfinite(), loss, 0.0)


@of_inputs
def _squared(chosen, entropy):
    total = (chosen - entropy).mean()
    return total * total


@of_inputs
def _behind_a_function(chosen, entropy):
    return (chosen - entropy).mean().sigmoid()


@of_inputs
def _mean_of_means(chosen, entropy, mask):
    return (((chosen - entropy) * mask).sum(-1) / mask.sum(-1)).mean()


@of_inputs
def _condition_on_the_rows(chosen, entropy):
    return torch.where(chosen > -4.0, entropy, 0.0).sum()


@of_inputs
def _weight_is_written(chosen, entropy, mask, a):
    each = (chosen - entropy) * a.clone().mul_(2.0)
    mask.mul_(2.0)
    return (each + mask).sum()


@of_inputs
def _rows_are_written(chosen, entropy, mask):
    each = chosen - entropy
    each *= mask
    return each.sum()


@of_inputs
def _in_double(chosen, entropy):
    return (chosen.double() * 3 - entropy.double()).sum()


@of_inputs
def _in_half(chosen, entropy):
    return (chosen.half() * 3 - entropy.half()).float().sum()


@of_inputs
def _one_head_twice(h, w, labels):
    (first, entropy), (second, other) = policy(h, w, labels), policy(h * 0.5, w, labels)
    return (first - entropy).mean(), (second - other).sum()


STAYS = [f for name, f in list(globals().items()) if name.startswith("_") and callable(f)]
STAYS = [f for f in STAYS if getattr(f, "__module__", "") == __name__]


@pytest.mark.parametrize("loss", STAYS, ids=lambda f: f.__name__)
def test_stays_in_the_backward(loss: Loss) -> None:
    assert not is_in_forward(compiled(loss, inputs()))


@of_inputs
def sizes_of_rows(chosen, entropy, h):
    return (chosen - entropy).sum(), h.new_zeros(chosen.shape[0], entropy.shape[1])


def test_sizes_of_the_rows_that_other_code_reads() -> None:
    """They are the inputs'."""
    assert is_in_forward(compiled(sizes_of_rows, inputs(), dynamic=True))


def test_stays_in_float16() -> None:
    assert not is_in_forward(compiled(z_loss, inputs(torch.float16)))


def gradients(loss: Loss, given: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in given]
    return list(torch.autograd.grad(loss(*leaves), [x for x in leaves if x.requires_grad]))


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        ghost,
        k3,
        _a_tensor_between_sums,
        _divided_by_a_mask,
        _replaced_where_it_is_not_finite,
    ],
    ids=lambda f: f.__name__,
)
def test_a_mask_of_no_row(loss: Loss, is_empty: bool) -> None:
    """0 / 0 is NaN; gradients are 0 or NaN where they are in eager."""
    given = inputs()
    given[5] = given[5] * 0 if is_empty else given[5]
    options = {"streamkl.min_mib": 0.0, "streamkl.inner": "eager"}
    ours = gradients(torch.compile(loss, backend="streamkl", options=options), given)
    for x, y in zip(ours, gradients(loss, given), strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x == 0, y == 0)


def _zero_in_a_denominator(h, w, labels, mask, a):
    chosen, entropy = policy(h, w, labels)
    return torch.where(mask > 0, chosen / (mask * entropy), 0.0).sum()


def _root_of_zero(h, w, labels, mask, a):
    chosen, entropy = policy(h, w, labels)
    return torch.where(mask > 0, (chosen - chosen).sqrt(), entropy).sum()


@pytest.mark.parametrize("loss", [_zero_in_a_denominator, _root_of_zero])
def test_gradients_that_are_nan_in_eager(loss: Callable[..., Tensor]) -> None:
    """A where does not keep what it leaves out from the gradient: nothing is hidden."""

    def of_all(h, w, th, tw, labels, mask, a):
        return loss(h, w, labels, mask, a)

    given = inputs()
    options = {"streamkl.min_mib": 0.0, "streamkl.inner": "eager"}
    ours = gradients(torch.compile(of_all, backend="streamkl", options=options), given)
    for x, y in zip(ours[:2], gradients(of_all, given)[:2], strict=True):
        assert y.isnan().any()
        assert torch.equal(x.isnan(), y.isnan())


def test_infinite_rows() -> None:
    """A logarithm of 0 times a mask's 0 is NaN: nothing is hidden that eager shows."""

    def loss(h, w, th, tw, labels, mask, a):
        _, entropy = policy(h, w, labels)
        return ((entropy * mask).log() * mask).sum()

    given = inputs()
    options: Any = {"streamkl.min_mib": 0.0, "streamkl.inner": "eager"}
    got = torch.compile(loss, backend="streamkl", options=options)(*given)
    assert loss(*given).isnan() and got.isnan()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite(value: float) -> None:
    """Where eager's gradients are not finite, these are not."""
    given = inputs()
    given[6][0, 2] = value
    options: Any = {"streamkl.min_mib": 0.0, "streamkl.inner": "eager"}

    def loss(h, w, th, tw, labels, mask, a):
        chosen, entropy = policy(h, w, labels)
        return (chosen * a - entropy).mean()

    fast = functools.partial(torch.compile(loss, backend="streamkl", options=options))
    for run in (loss, fast):
        x = [y.detach().requires_grad_(y.requires_grad) for y in given]
        total = run(*x)
        gradients = torch.autograd.grad(total, x[:2])
        assert not total.isfinite() and not gradients[0][0, 2].isfinite().any()
        assert gradients[0][1].isfinite().all()
