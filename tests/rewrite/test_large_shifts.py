"""What is added to scores and is large: over real numbers a softmax ignores it, rounding does not.

Scores next to 1e9 have no digits left, and next to the lowest number they are nothing: a row whose
keys all have it is uniform in eager code. A program that is compiled computes the same.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparing import compare
from tests.support.losses import kd
from tests.support.named_inputs import given

LOWEST = torch.finfo(torch.float64).min
# s, t: scores; m: 1 and 0 by key; r: values per row, some of them large
of_scores = given("h w ht wt m r", {"s t": lambda h, w, ht, wt: (h @ w.T, ht @ wt.T)})


def softmax_by_hand(s, t, r):
    x = s + r
    e = (x - x.amax(-1, keepdim=True)).exp()
    p = t.softmax(-1)
    return (p * (p.log() - (e / e.sum(-1, keepdim=True)).log())).sum()


def labels_and_the_entropy(s, r):
    logs = (s + r).log_softmax(-1)
    labels = torch.tensor([1, 2, 3, 0, 5, 7])[:, None]
    return -logs.gather(-1, labels).sum() - (logs.exp() * logs).sum()


def rows_that_a_mask_removes(s, t, r):
    removed = torch.zeros_like(r).masked_fill(torch.arange(6)[:, None] < 3, LOWEST)
    return kd(s + removed, t + removed)


def rows_that_a_mask_of_one_side_removes(s, t, r):
    return kd(s + torch.zeros_like(r).masked_fill(torch.arange(6)[:, None] < 3, LOWEST), t)


def a_mask_that_no_key_passes(s, t):
    mask = (torch.arange(6) + 3)[:, None] < torch.arange(-3, 6) - 3
    return kd(s + torch.zeros_like(s).masked_fill(~mask, LOWEST), t)


def a_mask_of_a_teacher_that_no_key_passes(s, t):
    mask = (torch.arange(6) - 9)[:, None] >= torch.arange(9)
    return (t.masked_fill(~mask, -1e9).log_softmax(-1).exp() * s.log_softmax(-1)).sum()


def cross_entropy_of_opposites(s, t, hidden):
    x = s + hidden
    return (x.logsumexp(-1) - ((t + hidden).softmax(-1) * x).sum(-1)).sum()


def scaled_scores_and_their_opposite(s, t, m):
    hidden = (1 - m) * -1e14
    return F.cross_entropy(s * m + hidden, (t * m + hidden).softmax(-1))


def lowest_number_times_two_factors(s, t, r):
    mask = torch.arange(6)[:, None] - torch.arange(9) == 4
    x = torch.where(mask, s, LOWEST) * 0.4 * r[4, 0]
    return F.cross_entropy(x, torch.where(mask, t, LOWEST).softmax(-1))


PROGRAMS = {
    "values_per_row": lambda s, t, r: kd(s + r, t + r),
    "and a temperature": lambda s, t, r: kd((s + r) / 2, (t + r) / 2),
    "of a softmax by hand": softmax_by_hand,
    "of squared logarithms": lambda s, t, r: (
        t.softmax(-1) * (s + r).log_softmax(-1).square()
    ).sum(),
    "labels_and_the_entropy_of_values_per_row": labels_and_the_entropy,
    "before a mask": lambda s, t, m, r: kd(
        (s + r.clamp(min=-1e6)).masked_fill(m == 0, -1e9), t.masked_fill(m == 0, -1e9)
    ),
    "before a tanh": lambda s, t, r: kd((s + r).tanh() * 3, (t + r).tanh() * 3),
    "rows that a mask removes": rows_that_a_mask_removes,
    "rows that a mask of one side removes": rows_that_a_mask_of_one_side_removes,
    "rows that a tensor removes": lambda s, t, m: kd(
        s + (1 - m[:6, None]) * LOWEST, t + (1 - m[:6, None]) * LOWEST
    ),
    "a_mask_that_no_key_passes": a_mask_that_no_key_passes,
    "of a teacher": a_mask_of_a_teacher_that_no_key_passes,
    "a number": lambda s, t: kd(s - 1e30, t),
    "a sum of a tensor": lambda s, t, r: kd(s + r.clamp(min=-1e14).sum(), t),
    "a multiple of a sum": lambda s, t, m: kd(s + 1e30 * m.sum(), t),
    "a teacher of one large number": lambda s, t: (
        torch.full_like(t, LOWEST).softmax(-1) * s.log_softmax(-1)
    ).sum(),
    "opposite of a mask": lambda s, t: cross_entropy_of_opposites(
        s, t, (1 - (torch.arange(9) != 1).double()) * -1e14
    ),
    "opposite of a tensor": lambda s, t, m: cross_entropy_of_opposites(s, t, (1 - m) * -1e14),
    "of scaled scores": scaled_scores_and_their_opposite,
    "lowest_number_times_two_factors": lowest_number_times_two_factors,
}
# what is large is taken away again: eager code has the digits that were left
TAKEN_AWAY = {
    "then it is taken away": lambda s, t: kd((s + 1e18) * 2 - 2e18, t),
    "next to scores of both": lambda s, t: kd(s + (t + 1e18) - 1e18, t),
    "values per row": lambda s, t, r: kd((s + r) - r, t),
    "a tensor of both sides": lambda s, t, m: (
        t.softmax(-1) * ((s + (1 - m) * -1e20) - (t + (1 - m) * -1e20))
    ).sum(),
    "a mask of both sides": lambda s, t, m: F.mse_loss(
        s + torch.where(m > 0, 0.0, -1e20), t + torch.where(m > 0, 0.0, -1e20)
    ),
    "next to probabilities": lambda s, t: (
        t.softmax(-1) * (s.softmax(-1) + 1e18 - 1e18 + 1e-3).log()
    ).sum(),
    "one next to small numbers": lambda s, t: (
        t.softmax(-1) * ((s.softmax(-1) * 1e-18 + 1 - 1) * 1e18 + 1e-3).log()
    ).sum(),
    "a number that a type does not hold": lambda s, t: kd(s * 1e-200 * 1e-200 * 1e300, t),
}


def heads(*shapes):
    return [torch.randn(*n, dtype=torch.float64) for n in shapes]


@pytest.mark.parametrize("name", [*PROGRAMS, *TAKEN_AWAY])
def test_what_is_added_to_scores_is_as_large_as_eager_has_it(name):
    m = (torch.arange(9) != 1).double()
    r = torch.tensor([0.0, -1e14, 0.0, LOWEST / 4, 2.0, -1e5], dtype=torch.float64)[:, None]
    inputs = [*heads((6, 5), (9, 5), (6, 3), (9, 3)), m, r]
    program = of_scores((PROGRAMS | TAKEN_AWAY)[name])
    outcome = compare(program, inputs, verify="never", largest_score=8.0).check()
    assert outcome.num_fused or name in TAKEN_AWAY, outcome.report


def a_range_of_bytes_begins_where_torch_has_it(h, w):
    places = torch.arange(-3, h.size(0) - 3, dtype=torch.uint8)
    scores = (h / 4) @ w.T  # 253 times the logarithm of nearly 1 would have few digits
    return (scores.softmax(-1) * places[:, None] * scores.log_softmax(-1)).sum()


def a_number_of_the_program_that_is_asked_whether_it_is_one(h, w):
    p = (h @ w.T).softmax(-1)
    return (p.log() * p.mean().nan_to_num()).sum()


def last_entries_of_symbolic_size_removed(h, w):
    x, t = h @ w.T, h.sin() @ w.T
    x[..., -2:] = -math.inf
    return (x.softmax(-1) * t.log_softmax(-1)).sum()


@pytest.mark.parametrize(
    ("program", "tokens", "dynamic", "fused"),
    [
        (a_range_of_bytes_begins_where_torch_has_it, 1, False, True),
        (a_number_of_the_program_that_is_asked_whether_it_is_one, 1, None, None),
        (last_entries_of_symbolic_size_removed, 6, True, True),
    ],
)
def test_numbers_of_heads(program, tokens, dynamic, fused):
    given = heads((tokens, 5), (7, 5))
    outcome = compare(program, given, verify="never", dynamic=dynamic, largest_score=8.0).check()
    assert fused is None or bool(outcome.num_fused) == fused, outcome.report
