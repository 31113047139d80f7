"""Losses that are no divergence of the kernels become row programs, as exact as eager's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import Outcome, compare
from tests.support.covering import every
from tests.support.named_inputs import given
from torch_streamkl.fx_passes.explain import explain
from torch_streamkl.rows import torch_impl

BATCH, HEADS, ROWS, KEYS, DIM = 2, 3, 7, 9, 4


def inputs(
    gradient: str = "student", dtype: torch.dtype = torch.float32, keys: int = KEYS
) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make, dtype=torch.float64).to(dtype)

    pairs = [normal(BATCH, HEADS, n, DIM) for n in (ROWS, keys, ROWS, keys)]
    weight = normal(keys).abs() + 0.5
    trained = {"student": pairs[:2], "teacher": pairs[2:], "all": [*pairs, weight]}[gradient]
    for x in trained:
        x.requires_grad_()
    pad = torch.arange(keys) < torch.tensor([[keys], [keys // 2]])
    return [*pairs, weight, pad]


def scores(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> tuple[Tensor, Tensor]:
    return sq @ sk.mT * 0.5, tq @ tk.mT * 0.5


of_scores = given("sq sk tq tk w pad", {"s t": scores})


@of_scores
def weights_of_keys(s, t, w):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").mul(w).sum(-1).mean()


@of_scores
def renormalised(s, t, pad):
    p, r = (x.softmax(-1) * pad[:, None, None] for x in (s, t))
    p, r = (x / (x.sum(-1, keepdim=True) + 1e-6) for x in (p, r))
    return (r * ((r + 1e-6).log() - (p + 1e-6).log())).sum(-1).mean()


@of_scores
def mse_of_maps(s, t, w):
    s, t = (x.softmax(-1) for x in (s, t))
    return F.mse_loss(s, t) + F.kl_div(s.log() * w, t, reduction="sum")


@of_scores
def cosine_of_maps(s, t, w):
    s, t = (x.softmax(-1) for x in (s, t))
    cosine = (F.normalize(s, dim=-1) * F.normalize(t, dim=-1)).sum(-1)
    return (1 - cosine).mean() - (w * t * s.log()).sum(-1).mean()


@of_scores
def minimum_of_maps(s, t):
    s, t = (x.softmax(-1) for x in (s, t))
    return -(torch.minimum(s, t) * s.log()).sum(-1).mean()


@of_scores
def powers_of_maps(s, t):
    s, t = (x.softmax(-1) for x in (s, t))
    return (s**0.3 * t**1.7 * (s.log() - t.log())).sum(-1).mean()


@of_scores
def indexer(s, t):
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    t = t.masked_fill(~keep, torch.finfo(t.dtype).min).softmax(-1).sum(1)
    t = t / t.sum(-1, keepdim=True)
    s = s.relu().sum(1).masked_fill(~keep, torch.finfo(s.dtype).min)
    return (t * ((t + 1e-6).log() - s.log_softmax(-1))).sum(-1).mean()


@of_scores
def linear_attention(s, t, sq, sk):
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
    s = (sq.exp() @ sk.exp().mT).masked_fill(~keep, 0.0)
    s = s / (s.sum(-1, keepdim=True) + 1e-6)
    t = t.masked_fill(~keep, float("-inf")).softmax(-1)
    return -(t * s.clamp_min(1e-6).log()).sum(-1).mean()


@of_scores
def softmax_twice(s, t):
    s, t = (x.softmax(-1) / 0.5 for x in (s, t))
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


@of_scores
def standardised_scores(s, t, w):
    s, t = (
        (x - x.mean(-1, keepdim=True)) * (x.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
        for x in (s, t)
    )
    return (w * t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1).mean()


@of_scores
def keys_by_their_score(s, t):
    p = torch.where(t <= -1e-3, torch.zeros_like(t), t.softmax(-1))
    return -(p * s.log_softmax(-1)).sum(-1).mean()


def mse_of_scores(sq, sk, tq, tk, w, pad):
    """TinyBERT's loss: scores that a mask has lowered count as 0."""
    bias = (1.0 - pad[:, None, None].to(sq.dtype)) * -10000.0
    s, t = (x + bias for x in scores(sq, sk, tq, tk))
    s, t = (torch.where(x <= -1e2, torch.zeros_like(x), x) for x in (s, t))
    return F.mse_loss(s, t)


@of_scores
def largest_subtracted(s, t, w):
    e = (t - t.amax(-1, keepdim=True).detach()).exp() * w
    p = e / e.sum(-1, keepdim=True).clamp_min(1e-6)
    return (p * (p.clamp_min(1e-6).log() - s.log_softmax(-1))).sum(-1).mean()


@of_scores
def of_the_first_query(s, t):
    """What a class token attends to, the mean of all heads."""
    s, t = (x.softmax(-1)[:, :, 0].mean(1) for x in (s, t))
    s, t = (F.normalize(x.clamp(1e-5, 0.996), p=1, dim=-1) for x in (s, t))
    return F.kl_div(s.log(), t, reduction="batchmean")


def of_some_rows_and_heads(sq, sk, tq, tk, w, pad):
    keep = torch.ones(ROWS, sk.shape[-2], dtype=torch.bool).tril(1)
    s, t = (x.masked_fill(~keep, -1e4).softmax(-1) for x in scores(sq, sk, tq, tk))
    s, t = (x[:, 1:, 2:-1].narrow(1, 0, 2) for x in (s, t))
    return (w * (s - t) ** 2).sum(-1) / 3 - (t * (s + 1e-3).log() * w).sum(-1)


def of_a_row_of_flattened_products(sq, sk, tq, tk, w, pad):
    def product(q: Tensor, k: Tensor) -> Tensor:
        return torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, q.shape[:2])

    s, t = (product(q, k).softmax(-1)[:, :, -1] for q, k in ((sq, sk), (tq, tk)))
    return (w * (s - t).abs()).sum(-1).mean()


@of_scores
def of_some_keys_of_one_sample(s, t):
    s, t = (x[1][..., -6:].relu() for x in (s, t))
    return (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1)[:, ::2]


@of_scores
def heads_that_are_multiplied(s, t):
    """A sum of logarithms: where a head's probability underflows it is -inf, as in eager code."""
    s, t = (x.softmax(-1)[:, :, 0].log().sum(1).softmax(-1) for x in (s, t))
    return F.kl_div((s + 1e-3).log(), t, reduction="batchmean")


@of_scores
def elements_are_written(s, t, w):
    el = w * t.softmax(-1) * s.log_softmax(-1)
    el[..., 0] = 0.0
    return el.sum(-1).mean()


@of_scores
def against_its_transpose(sq):
    s = sq @ sq.mT
    return (s.softmax(-1) * (s + s.mT.relu()).log_softmax(-1)).sum(-1).mean()


@of_scores
def rows_of_what_a_tensor_has_met(s, t, sq, w):
    bias = sq.mean(-1, keepdim=True).detach() * w
    return ((t + bias).softmax(-1)[:, :, 1:] ** 2 * s.log_softmax(-1)[:, :, 1:]).sum(-1).mean()


@of_scores
def part_of_flattened_heads(s, t):
    s, t = (x.softmax(-1).flatten(0, 1)[1:4] for x in (s, t))
    return (t**2 * s.log()).sum(-1).mean()


FORMS: list[Callable[..., Tensor]] = [
    weights_of_keys,
    renormalised,
    mse_of_maps,
    cosine_of_maps,
    minimum_of_maps,
    powers_of_maps,
    indexer,
    linear_attention,
    softmax_twice,
    standardised_scores,
    keys_by_their_score,
    largest_subtracted,
    of_the_first_query,
    of_some_rows_and_heads,
    of_a_row_of_flattened_products,
    of_some_keys_of_one_sample,
    heads_that_are_multiplied,
    elements_are_written,
    part_of_flattened_heads,
]


DIVERGENCES = (mse_of_maps, minimum_of_maps, powers_of_maps, part_of_flattened_heads)


def streamed(program: Any, given: list[Any], **options: Any) -> Outcome:
    """Compare, and require that all of it is fused and nothing score-sized is left.

    Functions of the probabilities of both sides alone are divergences, all others row programs.
    """
    outcome = compare(program, given, **options).check()
    kinds = {site.kind for site in outcome.report.sites if site.fused}
    named = "attention_kl" if program in DIVERGENCES else "row_program"
    assert named in kinds, str(outcome.report)
    assert outcome.num_fused == len(outcome.report.sites), str(outcome.report)
    assert outcome.report.num_remaining == 0, str(outcome.report)
    return outcome


@pytest.mark.parametrize("gradient", ["student", "teacher", "all"])
@pytest.mark.parametrize("form", every(2, FORMS), ids=lambda f: f.__name__)
def test_forms(form: Any, gradient: str) -> None:
    streamed(form, inputs(gradient))


@pytest.mark.parametrize("form", every(3, FORMS, 0), ids=lambda f: f.__name__)
def test_without_gradient(form: Any) -> None:
    streamed(form, inputs(), training=False)


@pytest.mark.parametrize("form", every(3, FORMS, 1), ids=lambda f: f.__name__)
def test_through_aot_autograd(form: Any) -> None:
    streamed(form, inputs("all"), inner="aot_eager")


@pytest.mark.parametrize("form", every(3, FORMS, 2), ids=lambda f: f.__name__)
def test_with_sizes_that_vary(form: Any) -> None:
    outcome = compare(form, inputs("all"), dynamic=True).check()
    assert not outcome.report.failures


@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_narrow_types(form: Any, dtype: torch.dtype) -> None:
    compare(form, inputs("all", dtype)).check()


@pytest.mark.parametrize(("dtype", "sites"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_scores_of_a_narrow_type_are_not_compared(dtype: torch.dtype, sites: int) -> None:
    """Eager code compares what was rounded: others may be equal there, or the larger ones."""

    def program(sq, sk, tq, tk, w, pad):
        s, t = scores(sq, sk, tq, tk)
        return (s.softmax(-1) * (s > t)).square().sum(-1).mean()

    outcome = compare(program, inputs("all", dtype)).check()
    assert outcome.num_fused == sites, str(outcome.report)
    assert all("of a narrow type are compared" in r for r in outcome.reasons), outcome.reasons


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("how", ["filled", "added"])
def test_rows_in_which_every_key_is_masked(how: str, low: float) -> None:
    """Eager's softmax is uniform there, or that of the scores, and so are its gradients."""

    def program(sq, sk, tq, tk, w, pad):
        masked = torch.zeros(ROWS, KEYS, dtype=torch.bool)
        masked[2], masked[3, :4] = True, True
        s, t = (
            x.masked_fill(masked, low) if how == "filled" else x + masked * low
            for x in scores(sq, sk, tq, tk)
        )
        return -(w * t.softmax(-1) * s.softmax(-1).square()).sum(-1)

    compare(program, inputs("all")).check()


def test_losses_that_share_scores_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(sq, sk, tq, tk, w, pad):
        s, t = scores(sq, sk, tq, tk)
        p, r = s.softmax(-1), t.softmax(-1)
        return (w * (p - r) ** 2).sum(-1).mean() - 0.1 * (w * r * s.log_softmax(-1)).sum(-1).mean()

    outcome = streamed(program, inputs("all"))
    assert outcome.num_fused == 2
    calls = []
    forward = torch_impl.forward
    monkeypatch.setattr(torch_impl, "forward", lambda *args: calls.append(args) or forward(*args))
    options = {"streamkl.inner": "eager", "streamkl.verify": "never"}
    torch._dynamo.reset()
    torch.compile(program, backend="streamkl", options=options)(*inputs("all"))
    assert len(calls) == 1


def test_a_sum_and_a_part_of_it_are_one_program() -> None:
    def program(sq, sk, tq, tk, w, pad):
        s, t = scores(sq, sk, tq, tk)
        rows = (w * t.softmax(-1) * s.log_softmax(-1)).sum(-1)
        return rows.mean() - rows[:, :, 0].sum() + rows[1:].square().sum()

    assert streamed(program, inputs("all")).num_fused == 1


def test_a_result_that_is_written_to() -> None:
    def program(sq, sk, tq, tk, w, pad):
        s, t = scores(sq, sk, tq, tk)
        rows = (w * t.softmax(-1) * s.log_softmax(-1)).sum(-1)
        rows[:, 0] = 1.0
        return rows.mean()

    streamed(program, inputs("all"), inner="aot_eager")


@pytest.mark.parametrize("gradient", ["student", "all"])
def test_squared_errors_of_scores(gradient: str) -> None:
    given = [
        x.repeat(1, 1, 8, 1).detach().requires_grad_(x.requires_grad) if x.dim() == 4 else x
        for x in inputs(gradient)
    ]
    given[4], given[5] = given[4].repeat(8), given[5].repeat(1, 8)
    streamed(mse_of_scores, given)


def test_squared_errors_of_projected_states_stay() -> None:
    def program(h, w, ht, wt):
        return F.mse_loss(F.linear(h, w), F.linear(ht, wt))

    make = torch.Generator().manual_seed(0)
    given = [torch.randn(s, generator=make) for s in ((6, 8), (8, 8), (6, 12), (8, 12))]
    outcome = compare(program, [x.requires_grad_() for x in given]).check()
    assert outcome.num_fused == 0 and not outcome.report.sites, str(outcome.report)


# ------------------------------------------------------------ masks that are ids
@pytest.mark.parametrize("how", ["added", "filled"])
def test_a_divergence_whose_mask_is_made_of_ids_needs_none(how: str) -> None:
    """Decoupled distillation: its mask of labels would be as large as the scores."""

    def program(sq, sk, tq, tk, w, pad):
        s, t = scores(sq, sk, tq, tk)
        label = (torch.arange(ROWS) % 3).expand(BATCH, HEADS, ROWS).unsqueeze(-1)
        hit = torch.zeros_like(s).scatter_(-1, label, 1.0).bool()
        s, t = (
            x - 1000.0 * hit if how == "added" else x.masked_fill(hit, -torch.inf) for x in (s, t)
        )
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")

    streamed(program, inputs("student"))
    streamed(program, inputs("all"))
    alone = compare(program, inputs(), options={"streamkl.row_programs": False}).check()
    assert {site.kind for site in alone.report.sites if site.fused} == {"attention_kl"}


# ------------------------------------------------------------ keys that a top-k names
@of_scores
def of_the_teacher_s_largest(s, t):
    top = t.softmax(-1).topk(3)
    return -(top.values * s.log_softmax(-1).gather(-1, top.indices)).sum(-1).mean()


@of_scores
def renormalised_among_the_largest(s, t, pad):
    values, ids = t.masked_fill(~pad[:, None, None], -1e9).topk(4, dim=-1)
    return F.kl_div(s.gather(-1, ids).log_softmax(-1), values.softmax(-1), reduction="batchmean")


@of_scores
def largest_and_the_rest(s, t):
    """The mass of the other keys as one more of them."""
    s, t = (x.log_softmax(-1) for x in (s, t))
    ids = t.detach().topk(3, -1)[1]
    s, t = s.gather(-1, ids), t.gather(-1, ids)
    rest = 1 - t.exp().sum(-1), 1 - s.exp().sum(-1)
    return (t.exp() * (t - s)).sum(-1) + rest[0] * (rest[0].log() - rest[1].log())


@of_scores
def of_heads_summed_before(s, t, w):
    index = s.relu().sum(1) - w
    ids = index.topk(3, dim=-1).indices
    hit = torch.zeros_like(index, dtype=torch.bool).scatter(-1, ids, True)
    p = t.masked_fill(~hit[:, None], float("-inf")).softmax(-1).sum(1).gather(-1, ids)
    p = p / p.sum(-1, keepdim=True)
    logs = index.gather(-1, ids).log_softmax(-1)
    return F.kl_div(logs.clip(-100, 0), p.log().clip(-100, 0), log_target=True, reduction="sum")


LARGEST = [
    of_the_teacher_s_largest,
    renormalised_among_the_largest,
    largest_and_the_rest,
    of_heads_summed_before,
]


@pytest.mark.parametrize("gradient", ["student", "teacher", "all"])
@pytest.mark.parametrize("form", LARGEST, ids=lambda f: f.__name__)
def test_keys_that_a_top_k_names(form: Any, gradient: str) -> None:
    """What the top-k is of is made for it; all else is a program."""
    outcome = compare(form, inputs(gradient)).check()
    assert {site.kind for site in outcome.report.sites if site.fused} == {"row_program"}
    assert outcome.num_fused == len(outcome.report.sites), str(outcome.report)
    compare(form, inputs(gradient), dynamic=True).check()
    compare(form, inputs(gradient, torch.bfloat16)).check()


def test_ids_that_are_written_after_their_top_k() -> None:
    def program(sq, sk, tq, tk, w, pad):
        s, t = scores(sq, sk, tq, tk)
        values, ids = t.topk(3, dim=-1)
        first = s.log_softmax(-1).gather(-1, ids)
        ids[..., 1] = ids[..., 0]
        return (values.exp() * (first - s.log_softmax(-1).gather(-1, ids))).sum(-1).mean()

    outcome = compare(program, inputs(), training=False).check()
    assert outcome.num_fused == 0, str(outcome.report)


# ------------------------------------------------------------ not fused
@of_scores
def scores_are_returned(s, t, w):
    return (w * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean(), s, t


@of_scores
def both_axes_are_normalised(s, t, w):
    p = s.exp()
    p = p / p.sum(-1, keepdim=True)
    p = p / p.sum(-2, keepdim=True)
    return (t.softmax(-1) * p.log() * w).sum(-1).mean()


@of_scores
def nan_is_asked_for(s, t, w, pad):
    s = s.masked_fill(~pad[:, None, None], float("-inf"))
    rows = (w * t.softmax(-1) * s.softmax(-1)).sum(-1)
    return rows.nan_to_num(3.0).mean() + torch.isnan(rows).sum()


@of_scores
def a_cumulative_sum(s, t, w):
    return (t.softmax(-1) - s.softmax(-1)).cumsum(-1).square().sum(-1).mean() + (
        w * t.softmax(-1) * s.log_softmax(-1).cumsum(-1)
    ).sum()


@of_scores
def some_keys_behind_the_softmax(s, t):
    """What is left does not sum to 1."""
    s, t = (x.softmax(-1)[..., 1:] for x in (s, t))
    return (t**2 * s.log()).sum(-1).mean()


@of_scores
def the_other_side_is_an_input_that_is_trained(t, sq, sk):
    torch._dynamo.graph_break()
    return F.kl_div((sq @ sk.mT).log_softmax(-1), t.softmax(-1), reduction="sum")


LEFT_ALONE: list[tuple[Callable[..., Any], str]] = [
    (scores_are_returned, ""),
    (both_axes_are_normalised, ""),
    (nan_is_asked_for, ""),
    (a_cumulative_sum, ""),
    (some_keys_behind_the_softmax, ""),
    (the_other_side_is_an_input_that_is_trained, "not made"),
]


@pytest.mark.parametrize(
    ("program", "reason"), every(2, LEFT_ALONE), ids=lambda x: getattr(x, "__name__", "")
)
def test_is_left_alone(program: Any, reason: str) -> None:
    outcome = compare(program, inputs("all")).check()
    assert outcome.num_fused == 0, str(outcome.report)
    assert all(reason in r for r in outcome.reasons), outcome.reasons


def test_the_report_says_that_there_is_no_kernel() -> None:
    report = explain(weights_of_keys, *inputs()).details()
    assert "row_program: a sum over keys of 2 products" in report
    assert "in plain torch, by blocks of rows and keys: bounded memory, no kernels" in report


def test_the_cache_of_compiled_graphs_tells_programs_apart() -> None:
    """The program is an argument of the call, so two programs are two graphs."""

    def program(power, sq, sk, tq, tk, w, pad):
        s, t = scores(sq, sk, tq, tk)
        return (w * t.softmax(-1) ** power * s.log_softmax(-1)).sum(-1).mean()

    for power in (1.5, 2.5):
        streamed(functools.partial(program, power), inputs("all"), inner="inductor")
