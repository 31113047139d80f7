"""What is added to scores and is large: over real numbers a softmax ignores it, rounding does not.

Scores next to 1e9 have no digits left, and next to the lowest number they are nothing: a row whose
keys all have it is uniform in eager code. A program that is compiled computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.comparing import compare

Program = Callable[..., Tensor]
PROGRAMS: dict[str, Program] = {}
LOWEST = torch.finfo(torch.float64).min


def program(fn: Program) -> Program:
    PROGRAMS[fn.__name__] = fn
    return fn


def kl(s: Tensor, t: Tensor) -> Tensor:
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")


# s, t: scores; m: 1 and 0 by key; r: values per row, some of them large


@program
def values_per_row(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl(s + r, t + r)


@program
def values_per_row_and_a_temperature(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl((s + r) / 2, (t + r) / 2)


@program
def values_per_row_of_a_softmax_by_hand(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    x = s + r
    e = (x - x.amax(-1, keepdim=True)).exp()
    p = t.softmax(-1)
    return (p * (p.log() - (e / e.sum(-1, keepdim=True)).log())).sum()


@program
def values_per_row_of_squared_logarithms(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return (t.softmax(-1) * (s + r).log_softmax(-1).square()).sum()


@program
def labels_and_the_entropy_of_values_per_row(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    logs = (s + r).log_softmax(-1)
    labels = torch.tensor([1, 2, 3, 0, 5, 7])[:, None]
    return -logs.gather(-1, labels).sum() - (logs.exp() * logs).sum()


@program
def values_per_row_before_a_mask(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl((s + r.clamp(min=-1e6)).masked_fill(m == 0, -1e9), t.masked_fill(m == 0, -1e9))


@program
def values_per_row_before_a_tanh(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl((s + r).tanh() * 3, (t + r).tanh() * 3)


@program
def rows_that_a_mask_removes(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    removed = torch.zeros_like(r).masked_fill(torch.arange(6)[:, None] < 3, LOWEST)
    return kl(s + removed, t + removed)


@program
def rows_that_a_mask_of_one_side_removes(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl(s + torch.zeros_like(r).masked_fill(torch.arange(6)[:, None] < 3, LOWEST), t)


@program
def rows_that_a_tensor_removes(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    removed = (1 - m[:6, None]) * LOWEST
    return kl(s + removed, t + removed)


@program
def a_mask_that_no_key_passes(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    mask = (torch.arange(6) + 3)[:, None] < torch.arange(-3, 6) - 3
    return kl(s + torch.zeros_like(s).masked_fill(~mask, LOWEST), t)


@program
def a_number(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl(s - 1e30, t)


@program
def a_sum_of_a_tensor(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl(s + r.clamp(min=-1e14).sum(), t)


@program
def a_multiple_of_a_sum(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl(s + 1e30 * m.sum(), t)


@program
def a_teacher_of_one_large_number(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return (torch.full_like(t, LOWEST).softmax(-1) * s.log_softmax(-1)).sum()


@program
def a_mask_of_a_teacher_that_no_key_passes(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    mask = (torch.arange(6) - 9)[:, None] >= torch.arange(9)
    return (t.masked_fill(~mask, -1e9).log_softmax(-1).exp() * s.log_softmax(-1)).sum()


@program
def a_full_tensor(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    return kl(s + torch.full((9,), -1e30, dtype=s.dtype), t)


@program
def opposite_of_a_mask(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    hidden = (1 - (torch.arange(9) != 1).double()) * -1e14
    e = (t + hidden).exp()
    return (
        (s + hidden).logsumexp(-1) - (e / e.sum(-1, keepdim=True) * (s + hidden)).sum(-1)
    ).sum()


@program
def opposite_of_a_tensor(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    hidden = (1 - m) * -1e14
    x = s + hidden
    return (x.logsumexp(-1) - ((t + hidden).softmax(-1) * x).sum(-1)).sum()


@program
def opposite_of_a_tensor_of_scaled_scores(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    hidden = (1 - m) * -1e14
    return F.cross_entropy(s * m + hidden, (t * m + hidden).softmax(-1))


@program
def lowest_number_times_two_factors(s: Tensor, t: Tensor, m: Tensor, r: Tensor) -> Tensor:
    mask = torch.arange(6)[:, None] - torch.arange(9) == 4
    x = torch.where(mask, s, LOWEST) * 0.4 * r[4, 0]
    return F.cross_entropy(x, torch.where(mask, t, LOWEST).softmax(-1))


# what is large is taken away again: eager code has the digits that were left
TAKEN_AWAY: dict[str, Program] = {
    "a number": lambda s, t, m, r: kl((s + 1e30) - 1e30, t),
    "a number that is scaled": lambda s, t, m, r: kl((s + 1e18) * 2 - 2e18, t),
    "a number next to scores of both": lambda s, t, m, r: kl(s + (t + 1e18) - 1e18, t),
    "values per row": lambda s, t, m, r: kl((s + r) - r, t),
    "a tensor of both sides": lambda s, t, m, r: (
        t.softmax(-1) * ((s + (1 - m) * -1e20) - (t + (1 - m) * -1e20))
    ).sum(),
    "a mask of both sides": lambda s, t, m, r: F.mse_loss(
        s + torch.where(m > 0, 0.0, -1e20), t + torch.where(m > 0, 0.0, -1e20)
    ),
    "a number next to probabilities": lambda s, t, m, r: (
        t.softmax(-1) * (s.softmax(-1) + 1e18 - 1e18 + 1e-3).log()
    ).sum(),
    "one next to small numbers": lambda s, t, m, r: (
        t.softmax(-1) * ((s.softmax(-1) * 1e-18 + 1 - 1) * 1e18 + 1e-3).log()
    ).sum(),
    "a number that a type does not hold": lambda s, t, m, r: kl(s * 1e-200 * 1e-200 * 1e300, t),
}


@pytest.mark.parametrize("name", [*PROGRAMS, *TAKEN_AWAY])
def test_what_is_added_to_scores_is_as_large_as_eager_has_it(name: str) -> None:
    fn = (PROGRAMS | TAKEN_AWAY)[name]

    def of_heads(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor, m: Tensor, r: Tensor) -> Tensor:
        return fn(h @ w.T, ht @ wt.T, m, r)

    made = torch.Generator().manual_seed(0)
    shapes = ((6, 5), (9, 5), (6, 3), (9, 3))
    heads = [torch.randn(*n, generator=made, dtype=torch.float64) for n in shapes]
    m = (torch.arange(9) != 1).double()
    r = torch.tensor([0.0, -1e14, 0.0, LOWEST / 4, 2.0, -1e5], dtype=torch.float64)[:, None]
    inputs = [*heads, m, r]
    outcome = compare(of_heads, inputs, options={"streamkl.verify": "never"}, largest_score=8.0)
    assert outcome.check().num_fused or name in TAKEN_AWAY, outcome.report


def test_a_range_of_bytes_begins_where_torch_has_it() -> None:
    def fn(h: Tensor, w: Tensor) -> Tensor:
        places = torch.arange(-3, h.size(0) - 3, dtype=torch.uint8)
        return ((h @ w.T).softmax(-1) * places[:, None] * (h @ w.T).log_softmax(-1)).sum()

    inputs = [torch.randn(1, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)]
    options = {"streamkl.verify": "never"}
    assert compare(fn, inputs, options=options, dynamic=False, largest_score=8.0).check().num_fused


def test_a_vocabulary_without_its_last_entries_of_symbolic_size() -> None:
    def fn(h: Tensor, w: Tensor, ht: Tensor, wt: Tensor) -> Tensor:
        x = h @ w.T
        x[..., -2:] = -math.inf
        return (x.softmax(-1) * ((ht @ wt.T).log_softmax(-1))).sum()

    shapes = ((6, 5), (9, 5), (6, 3), (9, 3))
    inputs = [torch.randn(*n, dtype=torch.float64) for n in shapes]
    options = {"streamkl.verify": "never"}
    assert compare(fn, inputs, options=options, dynamic=True).check().num_fused == 1


def test_a_number_of_the_program_that_is_asked_whether_it_is_one() -> None:
    def fn(h: Tensor, w: Tensor) -> Tensor:
        p = (h @ w.T).softmax(-1)
        return (p.log() * p.mean().nan_to_num()).sum()

    inputs = [torch.randn(1, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)]
    compare(fn, inputs, options={"streamkl.verify": "never"}, largest_score=8.0).check()
