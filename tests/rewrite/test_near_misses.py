"""Programs that only look like a fusable divergence keep their value; the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare, refusals
from tests.support.covering import every
from tests.support.named_inputs import given
from tests.support.programs import Program

Case = Callable[..., Any]


def maps(sq: Tensor, sk: Tensor, tq: Tensor, tk: Tensor) -> tuple[Tensor, Tensor]:
    return sq @ sk.mT / 3.0, tq @ tk.mT / 3.0


of_maps = given("sq sk tq tk pad", {"s t": maps})


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool).tril()


# ------------------------------------------------------- not fused: (program, part of the reason)
@of_maps
def softmax_over_queries_on_one_side(s, t):
    return F.kl_div(s.log_softmax(-2), t.softmax(-1), reduction="batchmean")


@of_maps
def softmax_over_heads(s, t):
    return F.kl_div(s.log_softmax(1), t.softmax(1), reduction="batchmean")


@of_maps
def weights_along_keys(s, t):
    el = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
    return (el * torch.linspace(0, 1, el.shape[-1])).sum(-1).mean()


@of_maps
def key_mask_after_softmax(s, t, pad):
    el = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
    return (el * pad[:, None, None, :]).sum() / pad.sum()


@of_maps
def causal_mask_after_softmax(s, t):
    p = t.softmax(-1).masked_fill(~causal(t), 0.0)
    return (p * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1).mean()


@of_maps
def dropout_on_probabilities(s, t):
    return F.kl_div(
        s.log_softmax(-1), F.dropout(t.softmax(-1), 0.5, training=True), reduction="batchmean"
    )


def _at_keys(sq, sk, tq, tk, ids, weight=1.0):
    """Entries of the student at ids of the teacher's largest, which are made anyway."""
    s, t = maps(sq, sk, tq, tk)
    logs, top = s.log_softmax(-1), t.softmax(-1).topk(3, dim=-1)
    return -(logs.gather(-1, ids(top.indices)) * top.values * weight).sum(-1).mean()


def keys_that_may_repeat(sq, sk, tq, tk, pad):
    return _at_keys(sq, sk, tq, tk, lambda ids: ids // 2)


def keys_and_one_of_them_again(sq, sk, tq, tk, pad):
    return _at_keys(sq, sk, tq, tk, lambda ids: torch.cat([ids[..., :2], ids[..., :1]], -1))


@of_maps
def keys_of_the_largest_queries(s, t):
    ids = t.softmax(-1).topk(3, dim=-2).indices.mT
    ids = ids[..., : s.shape[-2], :].contiguous()
    return (t.gather(-2, ids.mT) - s.log_softmax(-1).gather(-2, ids.mT)).square().sum(-1).mean()


def weights_of_ranks(sq, sk, tq, tk, pad):
    """A tensor of as many entries as were chosen: it says nothing of a key."""
    return _at_keys(sq, sk, tq, tk, lambda ids: ids, torch.tensor([0.5, 0.3, 0.2]))


@of_maps
def the_largest_but_one(s, t):
    top = t.softmax(-1).topk(3, dim=-1)
    logs = s.log_softmax(-1).gather(-1, top.indices)
    return -(top.values * logs)[..., 1:].sum(-1).mean()


@of_maps
def the_largest_of_summed_rows(s, t):
    """Other keys in each row."""
    top = t.softmax(-1).topk(3, dim=-1)
    logs = s.log_softmax(-1).gather(-1, top.indices)
    return (top.values * logs).sum(-2).square().sum(-1).mean() - (top.values * logs).sum(1).mean()


@of_maps
def the_largest_of_flattened_rows(s, t):
    top = t.softmax(-1).topk(2, dim=-1)
    logs = s.log_softmax(-1).gather(-1, top.indices)
    pairs = (top.values * logs).flatten(-2).unflatten(-1, (2, -1))
    return -pairs.sum(-1).mean()


@of_maps
def max_over_keys(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").amax(-1).mean()


@of_maps
def elements_are_returned(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")


@of_maps
def some_of_the_keys(s, t):
    el = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
    return el[..., 1:].sum(-1).mean()


@of_maps
def relu_of_scores(s, t):
    return F.kl_div(s.relu().log_softmax(-1), t.softmax(-1), reduction="batchmean")


@of_maps
def keys_are_shuffled(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1).flip(-1), reduction="batchmean")


@of_maps
def squared_rows_before_the_sum(s, t):
    el = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
    return el.sum(1).pow(2).sum()


@of_maps
def teacher_is_an_input(s, t):
    probabilities = torch.linspace(1, 2, t.shape[-1]).softmax(-1).expand_as(t)
    return F.kl_div(s.log_softmax(-1), probabilities, reduction="batchmean")


@of_maps
def entropy_alone(s):
    return -(s.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()


def window(x: Tensor, width: int = 3) -> Tensor:
    return causal(x).triu(1 - width)


def within_the_window(sq, sk, tq, tk, pad, *, student=-1e9, keep=window, tail=0.0):
    """A sum over the student's window of a teacher that sees all earlier keys."""
    s, t = maps(sq, sk, tq, tk)
    p = t.masked_fill(~causal(t), -1e9).softmax(-1)
    q = s.masked_fill(~window(s), student).softmax(-1)
    m = (0.5 * (p + q) + 1e-6).log()
    kept = p * ((p + 1e-6).log() - m) * keep(s)
    if tail:
        kept = kept + tail * q * ((q + 1e-6).log() - m)
    return kept.sum(-1).mean()


def a_window_with_a_moderate_value(*args):
    return within_the_window(*args, student=-5.0)


def a_window_stricter_than_both(*args):
    return within_the_window(*args, keep=lambda s: window(s, 2))


def a_window_wider_than_the_student_s(*args):
    return within_the_window(*args, keep=causal)


def a_window_on_one_of_two_terms(*args):
    return within_the_window(*args, tail=1.0)


@of_maps
def masks_of_which_neither_has_the_other(s, t):
    later = causal(t).mT
    p = t.masked_fill(~later, -1e9).softmax(-1)
    q = s.masked_fill(~causal(s), -1e9).softmax(-1)
    return (p * ((p + 1e-6).log() - (q + 1e-6).log()) * causal(s)).sum(-1).mean()


@of_maps
def maps_are_inputs(sq):
    q, p = sq.square() + 0.1, (sq - 1.0).square() + 0.1
    torch._dynamo.graph_break()
    return (p * (p.clamp_min(1e-6).log() - q.clamp_min(1e-6).log())).sum(-1).mean()


@of_maps
def a_ratio_of_inputs(sq):
    q, p = sq.square() + 0.1, (sq - 1.0).square() + 0.1
    torch._dynamo.graph_break()
    return (p * (p / q).log()).sum(-1).mean()


@of_maps
def one_map_is_an_input(s, tq):
    p = tq.new_ones(s.shape[-1]) / s.shape[-1]
    p = torch.stack([p] * s.shape[-2]).expand_as(s).contiguous()
    torch._dynamo.graph_break()
    q = s.softmax(-1)
    return (p * (p.log() - q.log())).sum(-1).mean()


@of_maps
def divergence_of_blocks(s, t):
    s, t = (x.softmax(-1).unflatten(-1, (-1, 2)).sum(-1) for x in (s, t))
    return (t * (t.log() - s.log())).sum(-1).mean()


@of_maps
def divergence_of_every_second_key(s, t):
    s, t = (x.softmax(-1).unflatten(-1, (2, -1)).sum(-2) for x in (s, t))
    return (t * (t.log() - s.log())).sum(-1).mean()


@of_maps
def divergence_inside_of_blocks(s, t):
    s, t = (x.softmax(-1).unflatten(-1, (-1, 2)) for x in (s, t))
    s, t = (x / x.sum(-1, keepdim=True) for x in (s, t))
    return (t * (t.log() - s.log())).sum(-1).mean()


@of_maps
def divergence_of_blocks_of_all_rows(s, t):
    """Blocks of the flattened map begin in the middle of a row."""
    s, t = (x.softmax(-1).reshape(*x.shape[:2], -1, 4).sum(-1) for x in (s, t))
    return (t * (t.log() - s.log())).sum(-1).mean()


LEFT_ALONE: list[tuple[Case, str]] = [
    (maps_are_inputs, "not made in this graph"),
    (a_ratio_of_inputs, "not made in this graph"),
    (one_map_is_an_input, "not made in this graph"),
    (softmax_over_queries_on_one_side, "different dimensions"),
    (softmax_over_heads, "a dimension that both operands of the scores have"),
    (dropout_on_probabilities, "dropout"),
    (keys_that_may_repeat, "gather"),
    (keys_and_one_of_them_again, "gather"),
    (keys_of_the_largest_queries, "gather"),
    (weights_of_ranks, "gather"),
    (the_largest_of_summed_rows, "gather"),
    (the_largest_of_flattened_rows, "gather"),
    (max_over_keys, "amax"),
    (elements_are_returned, "leaves the graph"),
    (some_of_the_keys, "only some of the keys"),
    (divergence_of_every_second_key, "reshape that splits the keys"),
    (divergence_of_blocks_of_all_rows, "reshape"),
]


@pytest.mark.parametrize(
    ("program", "reason"), every(2, LEFT_ALONE), ids=lambda x: getattr(x, "__name__", "")
)
def test_is_left_alone_for_a_reason(program: Case, reason: str) -> None:
    outcome = compare(program, Program().inputs()).check()
    assert outcome.num_fused == 0, str(outcome.report)
    assert any(reason in r for r in outcome.reasons), outcome.reasons
    assert outcome.report.num_remaining > 0, str(outcome.report)


# no divergence of the operators: row programs compute what is written
ROW_PROGRAMS: list[tuple[Case, str]] = [
    (a_window_with_a_moderate_value, "a mask on keys is applied after the softmax"),
    (a_window_stricter_than_both, "a mask on keys is applied after the softmax"),
    (a_window_wider_than_the_student_s, "masked differently"),
    (masks_of_which_neither_has_the_other, "masked differently"),
    (weights_along_keys, "weights that vary along the keys"),
    (the_largest_but_one, "gather"),
    (keys_are_shuffled, "flip"),
    (key_mask_after_softmax, "a mask on keys is applied after the softmax"),
    (causal_mask_after_softmax, "a mask on keys is applied after the softmax"),
    (relu_of_scores, "relu is applied to scores"),
    (squared_rows_before_the_sum, "a sum over rows"),
    (teacher_is_an_input, "not made from scores"),
    (divergence_of_blocks, "reshape that splits the keys"),
]


@pytest.mark.parametrize(
    ("program", "reason"), every(2, ROW_PROGRAMS), ids=lambda x: getattr(x, "__name__", "")
)
def test_is_a_row_program_for_a_reason(program: Case, reason: str) -> None:
    outcome = compare(program, Program().inputs()).check()
    assert outcome.kinds == {"row_program"}, str(outcome.report)
    assert outcome.num_fused == len(outcome.report.sites), str(outcome.report)
    reasons = refusals(program, Program().inputs())
    assert any(reason in r for r in reasons), reasons


# divergences of the operators after all, over other keys
DIVERGENCES = [a_window_on_one_of_two_terms, divergence_inside_of_blocks]


@pytest.mark.parametrize("program", DIVERGENCES, ids=lambda x: x.__name__)
def test_is_a_divergence(program: Case) -> None:
    outcome = compare(program, Program().inputs()).check()
    assert outcome.kinds == {"attention_kl"}, str(outcome.report)


def test_logarithms_alone_are_no_site() -> None:
    def ratios(sq, sk, tq, tk, pad):  # as of probabilities of actions, with advantages
        return (sq.sin() * (sq.abs().log() - sq.cosh().log()).exp()).sum(-1).mean()

    outcome = compare(ratios, Program().inputs()).check()
    assert outcome.report.sites == []


def test_an_entropy_is_no_divergence() -> None:
    outcome = compare(entropy_alone, Program().inputs()).check()
    assert outcome.kinds == {"row_program"}, str(outcome.report)
    assert outcome.report.remaining == []
    assert refusals(entropy_alone, Program().inputs()) == []


@of_maps
def an_entropy_that_is_watched(s):
    p = s.softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean()  # NaN in eager code where a probability underflows
    return entropy, entropy.isnan()


def test_a_sum_that_is_no_divergence_is_left_to_inductor_for_a_reason() -> None:
    """It is no loss that ``streamkl.strict`` was told to fuse."""
    outcome = compare(
        an_entropy_that_is_watched, Program().inputs(), options={"streamkl.strict": True}
    )
    (site,) = outcome.check().report.sites
    assert "isnan reads the sum" in site.reason and not site.skipped
    assert "isnan reads the sum" in str(outcome.report)
    assert outcome.report.num_unfused == 0


# -------------------- fused or not, the value is the user's
@of_maps
def swapped_arguments(s, t):
    return F.kl_div(t.log_softmax(-1), s.softmax(-1), reduction="batchmean")


@of_maps
def probabilities_with_log_target(s, t):
    return F.kl_div(s.softmax(-1), t.softmax(-1), reduction="mean", log_target=True)


@of_maps
def probabilities_as_input(s, t):
    return F.kl_div(s.softmax(-1), t.softmax(-1), reduction="sum")


@of_maps
def log_probabilities_as_target(s, t):
    return F.kl_div(s.log_softmax(-1), t.log_softmax(-1).neg(), reduction="sum")


@of_maps
def double_softmax(s, t):
    return F.kl_div(s.softmax(-1).log_softmax(-1), t.softmax(-1), reduction="batchmean")


@of_maps
def double_softmax_on_both_sides(s, t):
    s, t = s.softmax(-1) / 2, t.softmax(-1) / 2
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


@of_maps
def different_masks(s, t):
    s = s.masked_fill(~causal(s), -1e9)
    return F.kl_div(t.log_softmax(-1), s.softmax(-1), reduction="batchmean")


@of_maps
def different_masks_leave_infinity(s, t):
    s = s.masked_fill(~causal(s), float("-inf"))
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


@of_maps
def different_mask_values(s, t):
    return F.kl_div(
        s.masked_fill(~causal(s), -5.0).log_softmax(-1),
        t.masked_fill(~causal(t), -1e4).softmax(-1),
        reduction="sum",
    )


@of_maps
def moderate_mask_value(s, t):
    s, t = (x.masked_fill(~causal(x), -4.0) for x in (s, t))
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")


@of_maps
def scale_after_a_moderate_mask(s, t):
    s, t = (x.masked_fill(~causal(x), -4.0) * 0.5 for x in (s, t))
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")


@of_maps
def another_reader_of_log_probabilities(s, t):
    logs = s.log_softmax(-1)
    nll = -logs.diagonal(dim1=-2, dim2=-1).mean()
    return F.kl_div(logs, t.softmax(-1), reduction="batchmean") + nll


@of_maps
def temperature_on_one_side(s, t):
    return F.kl_div(s.log_softmax(-1), (t / 4).softmax(-1), reduction="batchmean")


@of_maps
def a_half_detached_divergence(s, t):
    q = s.softmax(-1)
    return (q * (q.log().detach() - t.log_softmax(-1))).sum(-1).mean()


@of_maps
def a_detached_weight(s, t):
    q = s.softmax(-1).detach()
    return (q * (s.log_softmax(-1) - t.log_softmax(-1))).sum(-1).mean()


@of_maps
def negated(s, t):
    return -F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


@of_maps
def unnormalised_sum_of_heads(s, t):
    return F.kl_div(s[:, 0].log_softmax(-1), t.softmax(-1).sum(1), reduction="batchmean")


@of_maps
def kl_div_broadcasts(s, t):
    return F.kl_div(s.log_softmax(-1), t[:, :1].softmax(-1), reduction="batchmean")


@of_maps
def cross_entropy_takes_dimension_one(s, t):
    return F.cross_entropy(s, t.softmax(1))


@of_maps
def square_map_against_its_transpose(s, t):
    return F.kl_div(s.mT.log_softmax(-1), t.softmax(-1), reduction="batchmean")


@of_maps
def rows_reweighted_by_the_divergence(s, t):
    rows = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)
    return (rows * rows.detach()).mean() + rows.amax()


def a_fully_masked_row(sq, sk, tq, tk, pad):
    keep = causal(sq[..., :1] @ sq[..., :1].mT).tril(-1)  # the first row has no key
    s, t = (x.masked_fill(~keep, torch.finfo(x.dtype).min) for x in maps(sq, sk, tq, tk))
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)


def a_fully_masked_row_in_cross_entropy(sq, sk, tq, tk, pad):
    keep = causal(sq[..., :1] @ sq[..., :1].mT).tril(-1)
    s, t = (x.masked_fill(~keep, torch.finfo(x.dtype).min) for x in maps(sq, sk, tq, tk))
    return -(t.softmax(-1) * s.log_softmax(-1)).sum(-1)


def masked_twice(sq, sk, tq, tk, pad, *, fill=-1e9, again=lambda x, keep: x * keep):
    """The first row has no key: its probabilities are uniform, and the mask drops them again."""
    keep = causal(sq[..., :1] @ sq[..., :1].mT).tril(-1)
    s, t = (x.masked_fill(~keep, fill) for x in maps(sq, sk, tq, tk))
    return again(-t.softmax(-1) * s.log_softmax(-1), keep).sum(-1)


def masked_twice_with_the_lowest_number(*args):
    return masked_twice(*args, fill=torch.finfo(torch.float32).min)


def masked_twice_with_a_moderate_value(*args):
    return masked_twice(*args, fill=-5.0)


def masked_twice_by_masked_fill(*args):
    return masked_twice(*args, fill=-1e4, again=lambda x, keep: x.masked_fill(~keep, 0.0))


def masked_twice_by_where(*args):
    return masked_twice(*args, again=lambda x, keep: torch.where(keep, x, 0.0))


def rows_without_keys_dropped(*args):
    def dropped(x: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep.any(-1, keepdim=True), x, 0.0)

    return masked_twice(*args, fill=torch.finfo(torch.float32).min, again=dropped)


def a_part_of_the_mask_again(sq, sk, tq, tk, pad):
    keys = pad[:, None, None, :]
    keep = keys & causal(sq[..., :1] @ sq[..., :1].mT).tril(-1)
    s, t = (x.masked_fill(~keep, -1e9) for x in maps(sq, sk, tq, tk))
    return (-t.softmax(-1) * s.log_softmax(-1) * keys).sum(-1)


def probabilities_masked_again(sq, sk, tq, tk, pad):
    keep = causal(sq[..., :1] @ sq[..., :1].mT).tril(-1)
    s, t = (x.masked_fill(~keep, -1e9) for x in maps(sq, sk, tq, tk))
    p, q = t.softmax(-1) * keep, s.softmax(-1)
    return (q * ((q + 1e-6).log() - (p + 1e-6).log())).sum(-1)


def keys_change_afterwards(sq, sk, tq, tk, pad):
    keys = sk * 1.0
    s, t = maps(
        sq.detach(), keys, tq, tk
    )  # eager keeps the queries for the backward, not the keys
    loss = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    with torch.no_grad():
        keys.add_(1.0)
    return loss, keys


@of_maps
def scores_change_afterwards(s, t):
    logs = s.log_softmax(-1)
    t.mul_(2.0)
    return F.kl_div(logs, t.softmax(-1), reduction="batchmean")


KEEP_THEIR_VALUE = [
    swapped_arguments,
    probabilities_with_log_target,
    probabilities_as_input,
    log_probabilities_as_target,
    double_softmax,
    double_softmax_on_both_sides,
    different_masks,
    different_masks_leave_infinity,
    different_mask_values,
    moderate_mask_value,
    scale_after_a_moderate_mask,
    another_reader_of_log_probabilities,
    temperature_on_one_side,
    a_half_detached_divergence,
    a_detached_weight,
    negated,
    unnormalised_sum_of_heads,
    kl_div_broadcasts,
    cross_entropy_takes_dimension_one,
    square_map_against_its_transpose,
    rows_reweighted_by_the_divergence,
    a_fully_masked_row,
    a_fully_masked_row_in_cross_entropy,
    masked_twice,
    masked_twice_with_the_lowest_number,
    masked_twice_with_a_moderate_value,
    masked_twice_by_masked_fill,
    masked_twice_by_where,
    rows_without_keys_dropped,
    a_part_of_the_mask_again,
    probabilities_masked_again,
    keys_change_afterwards,
    scores_change_afterwards,
]


@pytest.mark.parametrize("gradient", ["student", "both"])
@pytest.mark.parametrize("program", KEEP_THEIR_VALUE, ids=lambda x: x.__name__)
def test_keeps_its_value(program: Case, gradient: str) -> None:
    outcome = compare(program, Program(gradient=gradient).inputs()).check()
    assert outcome.report.sites, "a site that looks like a divergence must be in the report"
    assert all(outcome.reasons), "a site that stays must say why"


def dropped_where_the_other_underflows(sq, sk, tq, tk, pad):
    s, t = maps(sq, sk, tq * 40, tk)  # many of the teacher's probabilities are exactly 0
    kept = torch.where(
        t.softmax(-1) > 0, s.softmax(-1) * (s.log_softmax(-1) - t.log_softmax(-1)), 0.0
    )
    return kept.sum(-1).mean()


def filled_where_the_other_underflows(sq, sk, tq, tk, pad):
    s, t = maps(sq, sk, tq * 40, tk)
    p = t.softmax(-1)
    return (-p * s.log_softmax(-1)).masked_fill(p <= 0, 0.0).sum(-1).mean()


@pytest.mark.parametrize(
    "program", [dropped_where_the_other_underflows, filled_where_the_other_underflows]
)
def test_probabilities_that_underflow(program: Case) -> None:
    compare(program, Program().inputs()).check()
