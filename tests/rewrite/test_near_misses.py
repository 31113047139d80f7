"""Programs that only look like a fusable divergence keep their value; the report says why.

What each reason says is in tests/report/test_reasons.py, with a program for each.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare, refusals
from tests.support.losses import elements_of_kl, kd, rows_of_kl
from tests.support.named_inputs import given
from tests.support.programs import Program


def maps(sq, sk, tq, tk):
    return sq @ sk.mT / 3.0, tq @ tk.mT / 3.0


of_maps = given("sq sk tq tk pad", {"s t": maps})


def causal(x):
    return torch.ones(x.shape[-2:], dtype=torch.bool).tril()


def kl_of(t, s):
    return (t * (t.log() - s.log())).sum(-1).mean()


# ------------------------------------------------------------------------- keys that are chosen
def at_keys(s, t, *, ids=lambda ids: ids, weight=1.0):
    """Entries of the student at ids of the teacher's largest, which are made anyway."""
    logs, top = s.log_softmax(-1), t.softmax(-1).topk(3, dim=-1)
    return -(logs.gather(-1, ids(top.indices)) * top.values * weight).sum(-1).mean()


def largest(s, t, count=3):
    top = t.softmax(-1).topk(count, dim=-1)
    return top.values * s.log_softmax(-1).gather(-1, top.indices)


def the_largest_of_summed_rows(s, t):
    """Other keys in each row."""
    terms = largest(s, t)
    return terms.sum(-2).square().sum(-1).mean() - terms.sum(1).mean()


# ------------------------------------------------------------- a mask on what the softmax returned
def window(x, width=3):
    return causal(x).triu(1 - width)


def within_the_window(s, t, *, student=-1e9, keep=window, tail=0.0):
    """A sum over the student's window of a teacher that sees all earlier keys."""
    p = t.masked_fill(~causal(t), -1e9).softmax(-1)
    q = s.masked_fill(~window(s), student).softmax(-1)
    m = (0.5 * (p + q) + 1e-6).log()
    kept = p * ((p + 1e-6).log() - m) * keep(s)
    if tail:
        kept = kept + tail * q * ((q + 1e-6).log() - m)
    return kept.sum(-1).mean()


def masks_of_which_neither_has_the_other(s, t):
    p = t.masked_fill(~causal(t).mT, -1e9).softmax(-1)
    q = s.masked_fill(~causal(s), -1e9).softmax(-1)
    return (p * ((p + 1e-6).log() - (q + 1e-6).log()) * causal(s)).sum(-1).mean()


# ------------------------------------------------------------------------------- keys in blocks
def divergence_inside_of_blocks(s, t):
    s, t = (x.softmax(-1).unflatten(-1, (-1, 2)) for x in (s, t))
    return kl_of(*(x / x.sum(-1, keepdim=True) for x in (t, s)))


def maps_are_inputs(sq):
    q, p = sq.square() + 0.1, (sq - 1.0).square() + 0.1
    torch._dynamo.graph_break()
    return kl_of(p.clamp_min(1e-6), q.clamp_min(1e-6))


def one_map_is_an_input(s, tq):
    p = (tq.new_ones(s.shape) / s.shape[-1]).contiguous()
    torch._dynamo.graph_break()
    return kl_of(p, s.softmax(-1))


def teacher_is_an_input(s, t):
    probabilities = torch.linspace(1, 2, t.shape[-1]).softmax(-1).expand_as(t)
    return F.kl_div(s.log_softmax(-1), probabilities, reduction="batchmean")


def a_softmax_over_queries(s, t):
    return F.kl_div(s.log_softmax(-2), t.softmax(-1), reduction="batchmean")


# what is not fused, and a part of the reason
LEFT = {
    "maps are inputs": (maps_are_inputs, "not made in this graph"),
    "the largest element": (
        lambda s, t: elements_of_kl(s, t).amax(-1).mean(), "gradient of a maximum",
    ),
    "one map is an input": (one_map_is_an_input, "not made in this graph"),
    "a softmax over queries": (a_softmax_over_queries, "different dimensions"),
    "keys that may repeat": (partial(at_keys, ids=lambda ids: ids // 2), "gather"),
    "keys and one of them again": (
        partial(at_keys, ids=lambda ids: torch.cat([ids[..., :2], ids[..., :1]], -1)), "gather",
    ),
    # a tensor of as many entries as were chosen: it says nothing of a key
    "weights of ranks": (partial(at_keys, weight=torch.tensor([0.5, 0.3, 0.2])), "gather"),
    "the largest of summed rows": (the_largest_of_summed_rows, "gather"),
    "the largest of flattened rows": (
        lambda s, t: -largest(s, t, 2).flatten(-2).unflatten(-1, (2, -1)).sum(-1).mean(), "gather",
    ),
    "every second key": (
        lambda s, t: kl_of(*(x.softmax(-1).unflatten(-1, (2, -1)).sum(-2) for x in (t, s))),
        "reshape that splits the keys",
    ),
    "blocks that begin in the middle of a row": (
        lambda s, t: kl_of(
            *(x.softmax(-1).reshape(*x.shape[:2], -1, 4).sum(-1) for x in (t, s))
        ), "reshape",
    ),
}  # fmt: skip
# no divergence of the operators, for a reason: row programs compute what is written
ROW_PROGRAMS = {
    "a window with a moderate value": (
        partial(within_the_window, student=-5.0), "a mask on keys is applied after the softmax",
    ),
    "a window stricter than both": (
        partial(within_the_window, keep=partial(window, width=2)),
        "a mask on keys is applied after the softmax",
    ),
    "a window wider than the student's": (
        partial(within_the_window, keep=causal), "masked differently",
    ),
    "masks of which neither has the other": (
        masks_of_which_neither_has_the_other, "masked differently",
    ),
    "the largest but one": (lambda s, t: -largest(s, t)[..., 1:].sum(-1).mean(), "gather"),
    "shuffled keys": (
        lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1).flip(-1), reduction="sum"), "flip",
    ),
    "a padding after the softmax": (
        lambda s, t, pad: (elements_of_kl(s, t) * pad[:, None, None, :]).sum() / pad.sum(),
        "a mask on keys is applied after the softmax",
    ),
    "squares before the sum over rows": (
        lambda s, t: elements_of_kl(s, t).sum(1).pow(2).sum(), "a sum over rows",
    ),
    "a teacher that is an input": (teacher_is_an_input, "not made from scores"),
    "blocks of keys": (
        lambda s, t: kl_of(*(x.softmax(-1).unflatten(-1, (-1, 2)).sum(-1) for x in (t, s))),
        "reshape that splits the keys",
    ),
}  # fmt: skip
# divergences of the operators after all, over other keys
DIVERGENCES = {
    "a window on one of two terms": partial(within_the_window, tail=1.0),
    "inside of blocks": divergence_inside_of_blocks,
}


@pytest.mark.parametrize("name", LEFT)
def test_is_left_alone_for_a_reason(name):
    program, reason = LEFT[name]
    outcome = compare(of_maps(program), Program().inputs()).check()
    assert outcome.num_fused == 0, str(outcome.report)
    assert any(reason in r for r in outcome.reasons), outcome.reasons
    assert outcome.report.num_remaining > 0, str(outcome.report)


@pytest.mark.parametrize("name", ROW_PROGRAMS)
def test_is_a_row_program_for_a_reason(name):
    program, reason = ROW_PROGRAMS[name]
    outcome = compare(of_maps(program), Program().inputs()).check_fused(remaining=None)
    assert outcome.kinds == {"row_program"}, str(outcome.report)
    reasons = refusals(of_maps(program), Program().inputs())
    assert any(reason in r for r in reasons), reasons


@pytest.mark.parametrize("name", DIVERGENCES)
def test_is_a_divergence(name):
    outcome = compare(of_maps(DIVERGENCES[name]), Program().inputs()).check()
    assert outcome.kinds == {"attention_kl"}, str(outcome.report)


def test_logarithms_alone_are_no_site():
    def ratios(sq, sk, tq, tk, pad):  # as of probabilities of actions, with advantages
        return (sq.sin() * (sq.abs().log() - sq.cosh().log()).exp()).sum(-1).mean()

    assert compare(ratios, Program().inputs()).check().report.sites == []


def test_a_sum_that_is_no_divergence_is_left_to_inductor_for_a_reason():
    """It is no loss that ``streamkl.strict`` was told to fuse."""

    @of_maps
    def an_entropy_that_is_watched(s):
        p = s.softmax(-1)
        entropy = -(p * p.log()).sum(-1).mean()  # NaN in eager code where a probability is 0
        return entropy, entropy.isnan()

    outcome = compare(an_entropy_that_is_watched, Program().inputs(), strict=True)
    (site,) = outcome.check().report.sites
    assert "isnan reads the sum" in site.reason and not site.skipped
    assert "isnan reads the sum" in str(outcome.report)
    assert outcome.report.num_unfused == 0


# -------------------- fused or not, the value is the user's
def different_mask_values(s, t):
    return kd(s.masked_fill(~causal(s), -5.0), t.masked_fill(~causal(t), -1e4))


def moderate_mask_value(s, t, *, scale=1.0):
    return kd(*(x.masked_fill(~causal(x), -4.0) * scale for x in (s, t)))


def log_probabilities_as_target(s, t):
    return F.kl_div(s.log_softmax(-1), t.log_softmax(-1).neg(), reduction="sum")


def a_teacher_s_head_for_all(s, t):
    return kd(s, t[:, :1])


def keys_change_afterwards(sq, sk, tq, tk):
    keys = sk * 1.0  # eager keeps the queries for the backward, not the keys
    s, t = maps(sq.detach(), keys, tq, tk)
    loss = kd(s, t)
    with torch.no_grad():
        keys.add_(1.0)
    return loss, keys


def another_reader_of_log_probabilities(s, t):
    logs = s.log_softmax(-1)
    nll = -logs.diagonal(dim1=-2, dim2=-1).mean()
    return F.kl_div(logs, t.softmax(-1), reduction="batchmean") + nll


def rows_reweighted_by_the_divergence(s, t):
    rows = rows_of_kl(s, t)
    return (rows * rows.detach()).mean() + rows.amax()


def times(x, keep):
    return x * keep


def masked_twice(s, t, *, fill=-1e9, again=times):
    """The first row has no key: its probabilities are uniform, and the mask drops them again."""
    keep = causal(s).tril(-1)
    s, t = (x.masked_fill(~keep, fill) for x in (s, t))
    return again(-t.softmax(-1) * s.log_softmax(-1), keep).sum(-1)


def a_part_of_the_mask_again(s, t, pad):
    keys = pad[:, None, None, :]
    s, t = (x.masked_fill(~(keys & causal(x).tril(-1)), -1e9) for x in (s, t))
    return (-t.softmax(-1) * s.log_softmax(-1) * keys).sum(-1)


def probabilities_masked_again(s, t):
    keep = causal(s).tril(-1)
    s, t = (x.masked_fill(~keep, -1e9) for x in (s, t))
    p, q = t.softmax(-1) * keep, s.softmax(-1)
    return (q * ((q + 1e-6).log() - (p + 1e-6).log())).sum(-1)


LOWEST = torch.finfo(torch.float32).min
KEEP_THEIR_VALUE = {
    "a mask of one side": lambda s, t: rows_of_kl(s.masked_fill(~causal(s), -torch.inf), t),
    "log-probabilities as target": log_probabilities_as_target,
    "different mask values": different_mask_values,
    "keys change afterwards": keys_change_afterwards,
    "another reader of log-probabilities": another_reader_of_log_probabilities,
    "a moderate mask value": moderate_mask_value,
    "a scale after a moderate mask": partial(moderate_mask_value, scale=0.5),
    "a teacher's head for all": a_teacher_s_head_for_all,
    "cross-entropy takes dimension one": lambda s, t: F.cross_entropy(s, t.softmax(1)),
    "a square map against its transpose": lambda s, t: kd(s.mT, t),
    "rows reweighted by the divergence": rows_reweighted_by_the_divergence,
    "a fully masked row": lambda s, t: rows_of_kl(
        *(x.masked_fill(~causal(x).tril(-1), LOWEST) for x in (s, t))
    ),
    "masked twice": masked_twice,
    "with the lowest number": partial(masked_twice, fill=LOWEST),
    "with a moderate value": partial(masked_twice, fill=-5.0),
    "by masked_fill": partial(
        masked_twice, fill=-1e4, again=lambda x, keep: x.masked_fill(~keep, 0.0)
    ),
    "by where": partial(masked_twice, again=lambda x, keep: torch.where(keep, x, 0.0)),
    "rows without keys dropped": partial(
        masked_twice,
        fill=LOWEST,
        again=lambda x, keep: torch.where(keep.any(-1, keepdim=True), x, 0.0),
    ),
    "a part of the mask again": a_part_of_the_mask_again,
    "probabilities masked again": probabilities_masked_again,
}


ROWS = [  # one gradient of each is quick
    pytest.param(name, gradient, marks=[] if (i + j) % 2 else [pytest.mark.slow])
    for i, name in enumerate(KEEP_THEIR_VALUE)
    for j, gradient in enumerate(("student", "both"))
]


@pytest.mark.parametrize(("name", "gradient"), ROWS)
def test_keeps_its_value(name, gradient):
    program = of_maps(KEEP_THEIR_VALUE[name])
    outcome = compare(program, Program(gradient=gradient).inputs()).check()
    assert outcome.report.sites, "a site that looks like a divergence must be in the report"
    assert all(outcome.reasons), "a site that stays must say why"


def dropped_where_the_other_underflows(s, t):
    log_s, p = s.log_softmax(-1), (t * 40).softmax(-1)  # many of the teacher's are exactly 0
    return torch.where(p > 0, log_s.exp() * (log_s - (t * 40).log_softmax(-1)), 0.0).sum(-1).mean()


def filled_where_the_other_underflows(s, t):
    p = (t * 40).softmax(-1)
    return (-p * s.log_softmax(-1)).masked_fill(p <= 0, 0.0).sum(-1).mean()


@pytest.mark.parametrize(
    "program", [dropped_where_the_other_underflows, filled_where_the_other_underflows]
)
def test_probabilities_that_underflow(program):
    compare(of_maps(program), Program().inputs()).check()
