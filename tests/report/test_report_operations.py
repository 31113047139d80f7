"""The report names the operation of the user's code that blocks, and what is true of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.support.more_user_losses  # noqa: F401  # adds to USER_LOSSES
import torch_streamkl
from tests.support.user_losses import USER_LOSSES
from torch_streamkl.fx_passes import backend
from torch_streamkl.fx_passes.reporting.operations import OF_NOBODY, OF_PROGRAMS, SPELLINGS
from torch_streamkl.fx_passes.reporting.report import Report

Pair = Callable[[Tensor, Tensor], Tensor]
OPTIONS: dict[str, Any] = {"streamkl.min_mib": 0.0, "streamkl.inner": "eager"}


def explained(fn: Any, *inputs: Any) -> Report:
    torch._dynamo.reset()
    inputs = inputs or tuple(USER_LOSSES["cosine"].inputs())
    return torch_streamkl.explain(fn, *inputs, options=OPTIONS)


def of_probabilities(compare: Pair) -> Callable[..., Tensor]:
    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        return compare((g @ v.T).softmax(-1), (h @ w.T).softmax(-1)).sum(-1).mean()

    return loss


def _distance(a: Tensor, b: Tensor, small: float, slope: float, by: float) -> Tensor:
    d = (a - b).abs()
    return torch.where(d < small, d * d / 2 / by, slope * (d - small / 2))


# as users write it, and as the report says
WAYS: dict[str, tuple[Pair, Pair]] = {
    "hardtanh": (
        lambda p, q: F.hardtanh(p - q, -0.1, 0.1) ** 2,
        lambda p, q: (p - q).clamp(-0.1, 0.1) ** 2,
    ),
    "relu6": (lambda p, q: F.relu6(p - q), lambda p, q: (p - q).clamp(0, 6)),
    "min": (torch.min, torch.minimum),
    "max": (torch.max, torch.maximum),
    "leaky_relu": (
        lambda p, q: F.leaky_relu(p - q, 0.1),
        lambda p, q: torch.where(p - q > 0, p - q, 0.1 * (p - q)),
    ),
    "silu": (lambda p, q: F.silu(p - q), lambda p, q: (p - q) * (p - q).sigmoid()),
    "log10": (
        lambda p, q: p * (p.log10() - q.log10()),
        lambda p, q: p * (p.log() / math.log(10) - q.log() / math.log(10)),
    ),
    "logit": (
        lambda p, q: (p.logit() - q.logit()) ** 2,
        lambda p, q: (p.log() - (1 - p).log() - (q.log() - (1 - q).log())) ** 2,
    ),
    "subtract": (lambda p, q: torch.subtract(p, q).abs(), lambda p, q: (p - q).abs()),
    "absolute": (lambda p, q: (p - q).absolute(), lambda p, q: (p - q).abs()),
    "negative": (lambda p, q: torch.negative(p) * q.log(), lambda p, q: -p * q.log()),
    "addcmul": (
        lambda p, q: torch.addcmul(p, q, q, value=-1) ** 2,
        lambda p, q: (p + -1 * q * q) ** 2,
    ),
    "addcdiv": (
        lambda p, q: torch.addcdiv(p, q, p + 1, value=-1) ** 2,
        lambda p, q: (p + -1 * q / (p + 1)) ** 2,
    ),
    "special_entr": (
        lambda p, q: -torch.special.entr(p) - p * q.log(),
        lambda p, q: torch.xlogy(p, p) - p * q.log(),
    ),
    "smooth_l1_loss": (
        lambda p, q: F.smooth_l1_loss(p, q, beta=0.5, reduction="none"),
        lambda p, q: _distance(p, q, 0.5, 1.0, 0.5),
    ),
    "huber_loss": (
        lambda p, q: F.huber_loss(p, q, delta=0.5, reduction="none"),
        lambda p, q: _distance(p, q, 0.5, 0.5, 1.0),
    ),
    "dist": (
        lambda p, q: torch.dist(p, q)[None],
        lambda p, q: ((p - q) ** 2).sum().sqrt()[None],
    ),
    "norm": (
        lambda p, q: (p - q).norm(dim=-1, keepdim=True),
        lambda p, q: ((p - q) ** 2).sum(-1, keepdim=True).sqrt(),
    ),
    "linalg_vector_norm": (
        lambda p, q: torch.linalg.vector_norm(p - q, dim=-1, keepdim=True),
        lambda p, q: ((p - q) ** 2).sum(-1, keepdim=True).sqrt(),
    ),
    "linalg_vecdot": (
        lambda p, q: torch.linalg.vecdot(p, q)[:, None],
        lambda p, q: (p * q).sum(-1, keepdim=True),
    ),
    "binary_cross_entropy": (
        lambda p, q: F.binary_cross_entropy(q, p, reduction="none"),
        lambda p, q: -(p * q.log().clamp(min=-100) + (1 - p) * (1 - q).log().clamp(min=-100)),
    ),
    "poisson_nll_loss": (
        lambda p, q: F.poisson_nll_loss(q, p, reduction="none"),
        lambda p, q: q.exp() - p * q,
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_other_spelling_is_the_same_value_and_fuses(name: str) -> None:
    written, spelled = map(of_probabilities, WAYS[name])
    inputs = USER_LOSSES["cosine"].inputs()
    torch.testing.assert_close(spelled(*inputs), written(*inputs))
    fused = explained(spelled)
    assert (fused.num_fused, len(fused.sites)) == (1, 1), fused
    report = explained(written)
    if report.num_fused:
        return  # the rewrite reads it by now
    text = str(report)
    assert re.search(rf"\b{name} (at \S+ )?is applied to", text), text
    assert SPELLINGS[name] in text and "write it as the reason says: the same value" in text
    assert OF_NOBODY not in text and "compared by code" not in text


def test_every_spelling_is_tried() -> None:
    assert set(SPELLINGS) == set(WAYS) | {"vecdot"}


APPLIED = {
    "sin": (lambda p, q: (p - q).sin() ** 2, OF_PROGRAMS),
    "expm1": (lambda p, q: (p - q).expm1() ** 2, OF_PROGRAMS),
    "floor": (lambda p, q: p * (10 * q).floor(), OF_PROGRAMS),
    "atan": (lambda p, q: (p - q).atan() ** 2, OF_NOBODY),
    "gelu": (lambda p, q: F.gelu(p - q), OF_NOBODY),
    "cosine_embedding_loss": (
        lambda p, q: F.cosine_embedding_loss(p, q, torch.ones(len(p)))[None],
        OF_NOBODY,
    ),
    "pairwise_distance": (lambda p, q: F.pairwise_distance(p, q)[:, None], OF_NOBODY),
    "min over a dimension": (lambda p, q: p * q.min(-1, keepdim=True).values, ""),
}


@pytest.mark.parametrize("name", APPLIED)
def test_what_is_true_of_an_operation(name: str) -> None:
    compare, clause = APPLIED[name]
    report = explained(of_probabilities(compare))
    if report.num_fused:
        return  # the rewrite reads it by now
    text = str(report)
    assert name in text and clause in text, text
    assert "applied to scores" not in text, "of probabilities"
    programs = "row_program computes sums over keys of your own" in text
    assert programs == (clause == OF_PROGRAMS), text


def test_parts_of_an_operation_are_not_named() -> None:
    """gumbel_softmax draws numbers, and scatters ones."""

    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        p = F.gumbel_softmax(g @ v.T, hard=True)
        return -(p * (h @ w.T).log_softmax(-1)).sum(-1).mean()

    text = str(explained(loss))
    assert "gumbel_softmax is applied to scores" in text
    assert "scatter" not in text and "exponential" not in text


def test_an_operation_that_fuses_elsewhere_is_not_blamed() -> None:
    """tanh and logaddexp are read; atan is not, nor is what needs whole rows."""

    def with_tanh(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        return F.kl_div(
            ((h @ w.T).tanh() * (h @ w.T).atan()).log_softmax(-1), (g @ v.T).softmax(-1)
        )

    def with_logaddexp(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
        return (t.exp() * (t - torch.logaddexp(s, t))).cumsum(-1).mean()

    for fn, name in ((with_tanh, "atan"), (with_logaddexp, "cumsum")):
        (site,) = explained(fn).sites
        assert site.reason.startswith(f"{name} is applied to"), site.reason


def test_a_factor_of_0_has_its_line() -> None:
    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s = h @ w.T
        s = s * 0  # here
        return F.kl_div(s.log_softmax(-1), (g @ v.T).softmax(-1), reduction="batchmean")

    (site,) = explained(loss).sites
    assert site.reason == "scores multiplied by 0" and site.unsupported_code == "s = s * 0  # here"
    assert "torch.tensor(0.0)" in site.hint


def test_a_sum_written_as_a_product_is_a_comparison() -> None:
    """An einsum of rows is fused; a product of all rows with all others is not."""

    def of_rows(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        p, q = (g @ v.T).softmax(-1), (h @ w.T).softmax(-1)
        return 1 - torch.einsum("tv,tv->t", p, q).mean()

    def of_all(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        p, q = (g @ v.T).softmax(-1), (h @ w.T).log_softmax(-1)
        return -(p @ q.T).diagonal().mean()

    (site,) = explained(of_rows).sites
    assert site.fused and site.form == "sum of P*S"
    text = str(explained(of_all))
    assert "the sum over the keys is written as a matrix product" in text
    assert "no other distribution" not in text


def test_an_exponential_of_probabilities_alone_is_no_mistake() -> None:
    (site,) = explained(of_probabilities(lambda p, q: q.exp() - p * q)).sites
    assert site.fused and not site.warning


# ------------------------------------------------------------------------ strict


def _raises(fn: Any, inputs: Any, **options: Any) -> str:
    torch._dynamo.reset()
    given = {**OPTIONS, "streamkl.strict": True, **options}
    try:
        torch.compile(fn, backend="streamkl", options=given)(*inputs)
    except backend.UnfusedError as error:
        return str(error)
    return ""


COMPARED = {
    "universal_logit_distillation": True,
    "reverse_kl": False,  # fused
    "cross_entropy_alone": False,
    "attention_alone": False,
    "rollout": False,
}


@pytest.mark.parametrize("name", COMPARED)
def test_strict_asks_for_losses_of_two_distributions(name: str) -> None:
    loss = USER_LOSSES[name]
    text = _raises(loss.fn, loss.inputs())
    assert bool(text) == COMPARED[name], text
    if text:
        assert "two distributions are compared at" in text and "needs whole rows" in text


def test_strict_accepts_what_is_skipped() -> None:
    loss = USER_LOSSES["reverse_kl"]
    assert not _raises(loss.fn, loss.inputs(), **{"streamkl.min_mib": 4096})
    squares = of_probabilities(lambda p, q: (p - q).abs() ** 3)
    inputs = USER_LOSSES["cosine"].inputs()
    assert not _raises(squares, inputs, **{"streamkl.min_mib": 4096})
    assert not _raises(squares, inputs)


def test_strict_asks_for_losses_without_logarithms() -> None:
    inputs = USER_LOSSES["cosine"].inputs()
    text = _raises(of_probabilities(lambda p, q: (p - q).atan() ** 2), inputs)
    assert "two distributions are compared at" in text
    text = _raises(lambda h, w, g, v: F.gelu((h @ w.T).softmax(-1)).sum(), inputs)
    assert not text, "one distribution alone"


def test_code_around_a_loss_that_is_not_checked_is_no_second_loss() -> None:
    """Sizes that data decide keep "always" from checking; reads of sizes are no losses."""
    keep = torch.arange(48) % 3 > 0

    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
        m = torch.logsumexp(torch.stack([s + math.log(0.5), t + math.log(0.5)]), dim=0)
        of_t = F.kl_div(m, t, reduction="none", log_target=True)
        of_s = F.kl_div(m, s, reduction="none", log_target=True)
        return (0.5 * of_t + 0.5 * of_s)[keep].sum() / keep.sum()

    torch._dynamo.reset()
    inputs = USER_LOSSES["cosine"].inputs()
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        torch_streamkl.reports() as report,
    ):
        options = {**OPTIONS, "streamkl.verify": "always"}
        torch.compile(loss, backend="streamkl", options=options)(*inputs)
    (site,) = report.sites
    assert 'streamkl.verify is "always", and it was not checked' in site.reason
    assert '{"streamkl.verify": "auto"}' in site.hint


def test_what_is_applied_to_a_product_is_not_blamed_for_being_none() -> None:
    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor) -> Tensor:
        s, t = (h @ w.T).log_softmax(-1), (g @ v.T).log_softmax(-1)
        m = torch.logsumexp(torch.stack([s, t]) + math.log(0.5), dim=0)
        return F.kl_div(m, t, reduction="batchmean", log_target=True)

    report = explained(loss)
    for site in report.sites:
        assert site.fused or "is applied to a product in a way that the rewrite" in site.reason
        assert "no matrix product" not in site.reason and "not made" not in site.reason


def test_a_graph_break_that_ends_a_divergence_is_named() -> None:
    def loss(h: Tensor, w: Tensor, g: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        rows = F.kl_div((h @ w.T).log_softmax(-1), (g @ v.T).softmax(-1), reduction="none")
        return rows[keep].sum() / keep.sum()  # here

    (site,) = explained(loss, *USER_LOSSES["cosine"].inputs(), torch.arange(48) % 3 > 0).sites
    assert "leaves the graph before it is summed over the keys: a graph break at" in site.reason
    assert "rows[keep].sum() / keep.sum()  # here" in site.reason
    assert "torch_streamkl.enable()" in site.hint
