"""Heads, batches and sizes that are equal by accident, regrouped, averaged, or reduced apart."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import KEYS, QUERIES, misleading, plain, student

DIM = 8


def heads(num_q: int, num_k: int | None = None, *, of: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes of one side: the student's, or with ``of`` "t" the teacher's."""
    return {
        f"q{of}": (2, num_q, QUERIES, DIM),
        f"k{of}": (2, num_k or num_q, KEYS, DIM),
    }


SIX = heads(6) | heads(6, of="t")


# ----------------------------------------------------------------------- one sum is another
@misleading("W7", name="sums_over_batches_of_one_and_two_dynamic", dynamic=True)
@misleading("W7")
def sums_over_batches_of_one_and_two(q, k, qt_b1, kt_b1):
    lt, ls = student(qt_b1, kt_b1).log_softmax(-1), student(q, k).log_softmax(-1)
    pt = lt.exp()
    return ((pt * lt).sum((0, -1)) - (pt * ls).sum((0, -1))).mean()


@misleading("W7")
def sums_over_heads_of_one_and_two(q, k, qt_h1, kt_h1):
    lt, ls = student(qt_h1, kt_h1).log_softmax(-1), student(q, k).log_softmax(-1)
    pt = lt.exp()
    return ((pt * lt).sum((1, -1)) - (pt * ls).sum((1, -1))).mean()


@misleading("W7")
def sums_of_tokens_of_one_and_many(h, w, ht1, wt):
    lt, ls = (ht1 @ wt.T).log_softmax(-1), (h @ w.T).log_softmax(-1)
    pt = lt.exp()
    return (pt * lt).sum() - (pt * ls).sum()


@misleading("W7")
def sums_of_everything_with_one_teacher(q, k, qt_b1, kt_b1):
    lt, ls = student(qt_b1, kt_b1).log_softmax(-1), student(q, k).log_softmax(-1)
    pt = lt.exp()
    return (pt * lt).sum() - (pt * ls).sum()


@misleading("W7")
def means_over_batches_of_one_and_two(q, k, qt_b1, kt_b1):
    lt, ls = student(qt_b1, kt_b1).log_softmax(-1), student(q, k).log_softmax(-1)
    pt = lt.exp()
    return ((pt * lt).sum(-1).sum(0) - (pt * ls).sum(-1).sum(0)).mean()


@plain(fuses=1)
def one_teacher_for_the_batch(q, k, qt_b1, kt_b1):
    lt, ls = student(qt_b1, kt_b1).log_softmax(-1), student(q, k).log_softmax(-1)
    return (lt.exp() * (lt - ls)).sum(-1).mean()


@plain()
def one_teacher_head_for_all(q, k, qt_h1, kt_h1):
    return kd(student(q, k), student(qt_h1, kt_h1).expand(-1, 2, -1, -1))


@plain(fuses=1)
def two_sums_over_equal_batches(s, t):
    lt, ls = t.log_softmax(-1), s.log_softmax(-1)
    pt = lt.exp()
    return ((pt * lt).sum((0, -1)) - (pt * ls).sum((0, -1))).mean()


# -------------------------------------------------------------------------- heads in groups
@misleading("X1", shapes=SIX)
def heads_grouped_in_two_orders(q, k, qt, kt):
    s = student(q, k).unflatten(1, (3, 2))
    return kd(s, student(qt, kt).unflatten(1, (2, 3)).transpose(1, 2))


@misleading("X1", shapes=SIX)
def heads_of_one_side_reordered(q, k, qt, kt):
    t = student(qt, kt).unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2)
    return kd(student(q, k), t)


@misleading(
    "X1",
    name="mean_over_the_outer_groups_dynamic",
    shapes=heads(3) | heads(6, of="t"),
    dynamic=True,
)
@misleading("X1", shapes=heads(3) | heads(6, of="t"), fuses=1)
def mean_over_the_outer_groups(s, t):
    p = t.softmax(-1).view(2, 2, 3, QUERIES, KEYS).mean(1)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@misleading("X1", shapes=heads(2) | heads(6, of="t"))
def mean_over_the_three_outer_groups(s, t):
    p = t.softmax(-1).unflatten(1, (3, 2)).mean(1)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@misleading("X1", shapes=heads(6, 2) | heads(6, of="t"))
def grouped_queries_in_two_orders(q, k, qt, kt):
    s = (q.unflatten(1, (3, 2)).transpose(1, 2) @ k[:, :, None].mT) * 0.3
    return kd(s, student(qt, kt).unflatten(1, (2, 3)))


@misleading("X1", shapes=heads(6) | {"qt": (6, 2, QUERIES, DIM), "kt": (6, 2, KEYS, DIM)})
def batch_and_heads_swapped(s, t):
    return kd(s, t.transpose(0, 1))


@plain("mean_of_four_heads_against_one", shapes=heads(1) | heads(4, of="t"), fuses=1)
@misleading("X2", name="mean_of_two_heads_against_two", shapes=heads(2) | heads(2, of="t"))
@misleading(
    "X2", name="mean_of_heads_against_queries_of_one_key", shapes=heads(4, 1) | heads(4, of="t")
)
@misleading(
    "X2", name="mean_of_three_heads_against_two", shapes=heads(2) | heads(3, of="t"), fuses=1
)
@misleading(
    "X2",
    name="mean_of_four_heads_against_two_dynamic",
    shapes=heads(2) | heads(4, of="t"),
    dynamic=True,
)
@misleading("X2", shapes=heads(2) | heads(4, of="t"), fuses=1)
def mean_of_four_heads_against_two(s, t):
    p = t.softmax(-1).mean(1, keepdim=True)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@misleading(
    "X2",
    name="mean_of_grouped_heads_against_two_dynamic",
    shapes=heads(2) | heads(4, 2, of="t"),
    dynamic=True,
)
@misleading("X2", shapes=heads(2) | heads(4, 2, of="t"), fuses=1)
def mean_of_grouped_heads_against_two(q, k, qt, kt):
    p = student(qt, kt.repeat_interleave(2, 1)).softmax(-1).mean(1, keepdim=True)
    return F.kl_div(student(q, k).log_softmax(-1), p, reduction="batchmean")


@misleading("X2", shapes=heads(2) | heads(4, of="t"))
def mean_of_four_heads_expanded_to_two(s, t):
    p = t.softmax(-1).mean(1, keepdim=True).expand(-1, 2, -1, -1)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@misleading("X2", shapes=heads(4) | heads(2, of="t"))
def sum_of_heads_against_more(s, t):
    p = t.softmax(-1).sum(1, keepdim=True) / 2
    lt = p.log()
    return (p * (lt - s.log_softmax(-1))).sum(-1).mean()


@misleading("X3", shapes=heads(6) | heads(6, 2, of="t"))
def two_key_heads_in_groups_of_three(q, k, qt, kt):
    t = student(qt, kt.repeat_interleave(3, 1)).unflatten(1, (3, 2))
    return kd(student(q, k).unflatten(1, (3, 2)), t)


@misleading("X3", shapes=heads(6) | heads(6, 3, of="t"))
def three_key_heads_in_groups_of_two(q, k, qt, kt):
    t = student(qt, kt.repeat_interleave(2, 1)).unflatten(1, (2, 3))
    return kd(student(q, k).unflatten(1, (2, 3)), t)


@misleading("X3", shapes=heads(6) | heads(6, 2, of="t"))
def key_heads_repeated_as_a_whole(q, k, qt, kt):
    return kd(student(q, k), student(qt, kt.repeat(1, 3, 1, 1)))


@misleading("X3", shapes=heads(6, 3) | heads(6, 2, of="t"))
def both_sides_grouped_unlike(q, k, qt, kt):
    s, t = student(q, k.repeat_interleave(2, 1)), student(qt, kt.repeat_interleave(3, 1))
    return kd(s.unflatten(1, (3, 2)), t.unflatten(1, (3, 2)))


@plain(shapes=SIX, fuses=1)
def heads_grouped_in_one_order(s, t):
    return kd(s.unflatten(1, (3, 2)), t.unflatten(1, (3, 2)))


@plain(shapes=heads(6) | heads(6, 2, of="t"), fuses=1)
def grouped_key_heads(q, k, qt, kt):
    return kd(student(q, k), student(qt, kt.repeat_interleave(3, 1)))


@plain("mean_over_the_inner_groups_dynamic", shapes=heads(2) | heads(6, of="t"), dynamic=True)
@plain(shapes=heads(2) | heads(6, of="t"), fuses=1)
def mean_over_the_inner_groups(s, t):
    p = t.softmax(-1).unflatten(1, (2, 3)).mean(2)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@plain(shapes=heads(4) | heads(2, of="t"))
def means_of_both_sides(q, k, qt, kt):
    p, s = student(qt, kt).softmax(-1).mean(1), student(q, k).softmax(-1).mean(1)
    return F.kl_div(s.log(), p, reduction="batchmean")


@plain("map_dynamic", dynamic=True, fuses=1)
@plain(
    "one_of_everything",
    shapes=dict.fromkeys(("q", "qt"), (1, 1, 1, DIM)) | dict.fromkeys(("k", "kt"), (1, 1, 1, DIM)),
)
@plain("one_head", shapes={n: (2, 1, *s[2:]) for n, s in SIX.items()}, fuses=1)
@plain(shapes=heads(4, 1) | heads(4, 1, of="t"), fuses=1)
def queries_of_one_key_head(s, t):
    return kd(s, t)


@plain("no_batch", shapes=dict.fromkeys(("q", "qt", "k", "kt"), (0, 2, 5, DIM)))
@plain(shapes=dict.fromkeys(("q", "qt"), (2, 2, 0, DIM)))
def no_queries(s, t):
    return rows_of(s, t).sum()


# --------------------------------------------------------- statistics of another layout
@misleading("X10", name="log_sum_exp_of_swapped_heads_dynamic", dynamic=True)
@misleading("X10")
def log_sum_exp_of_swapped_heads(s, t):
    logs = s - s.transpose(0, 1).logsumexp(-1, True)
    return (t.softmax(-1) * (t.log_softmax(-1) - logs)).sum(-1)


@misleading("X10")
def log_sum_exp_of_swapped_heads_beside_an_expectation(q, k, qt, kt):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    return s.transpose(0, 1).logsumexp(-1) - (p * s).sum(-1)


@misleading("X10")
def expectation_of_swapped_heads(q, k, qt, kt):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    return s.logsumexp(-1) - (p * s).sum(-1).transpose(0, 1)


@misleading("X10")
def weighted_log_sum_exp_of_swapped_heads(q, k, qt, kt, x):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    rows = s.transpose(0, 1).logsumexp(-1) - (p * s).sum(-1)
    return (rows[0, 1] * x).sum()


@misleading("X10")
def sum_of_exponentials_of_swapped_heads(s, t):
    e = s.exp()
    p = e / e.transpose(0, 1).sum(-1, True)
    return (p * (s.log_softmax(-1) - t.log_softmax(-1))).sum(-1)


@misleading("X10")
def logarithm_of_a_sum_of_swapped_heads(s, t):
    logs = s - s.exp().transpose(0, 1).sum(-1, True).log()
    return (t.softmax(-1) * (t.log_softmax(-1) - logs)).sum(-1)


@misleading("X10")
def maximum_of_swapped_heads(s, t):
    e = (s - s.transpose(0, 1).amax(-1, True)).exp()
    p = e / e.sum(-1, True)
    return (p * (s.log_softmax(-1) - t.log_softmax(-1))).sum(-1)


@misleading("X10", shapes=dict.fromkeys(("q", "k", "qt", "kt"), (2, 2, 12, DIM)))
def log_sum_exp_along_queries(s, t):
    logs = s - s.logsumexp(-2, True).mT
    return (t.softmax(-1) * (t.log_softmax(-1) - logs)).sum(-1)


@misleading("X10")
def probabilities_of_swapped_heads(s, t):
    return rows_of(s.transpose(0, 1), t)


@misleading("X10", shapes=dict.fromkeys(("q", "k", "qt", "kt"), (2, 2, 12, DIM)))
def heads_swapped_with_queries(s, t):
    return rows_of(s[:, :, :2].transpose(1, 2), t[:, :, :2])


@plain(fuses=1)
def both_with_swapped_heads(s, t):
    return kd(s.transpose(0, 1), t.transpose(0, 1))


@plain()
def log_sum_exp_swapped_there_and_back(s, t):
    logs = s - s.transpose(0, 1).logsumexp(-1, True).transpose(0, 1)
    return (t.softmax(-1) * (t.log_softmax(-1) - logs)).sum(-1).mean()


# --------------------------------------------------------------------------- divisors
def _divided(q: Tensor, k: Tensor, qt: Tensor, kt: Tensor, of_t: object, of_s: object) -> Tensor:
    lt, ls = student(qt, kt).log_softmax(-1), student(q, k).log_softmax(-1)
    pt = lt.exp()
    return ((pt * lt).sum((-1, -2)) / of_t - (pt * ls).sum((-1, -2)) / of_s).mean()


@misleading("X15", name="divided_by_two_sizes")
@misleading("X15", dynamic=True)
def divided_by_two_sizes_dynamic(q, k, qt, kt):
    return _divided(q, k, qt, kt, q.size(2), k.size(2))


@misleading("X15", dynamic=True)
def divided_by_a_size_and_its_double_dynamic(q, k, qt, kt):
    return _divided(q, k, qt, kt, q.size(2), 2 * q.size(2))


@misleading("X15", dynamic=True)
def divided_by_batch_and_heads_dynamic(q, k, qt, kt):
    return _divided(q, k, qt, kt, q.size(2) * 3, k.size(3))


@misleading("X15", dynamic=True)
def divided_by_tokens_and_words_dynamic(h, w, ht, wt):
    lt, ls = (ht @ wt.T).log_softmax(-1), (h @ w.T).log_softmax(-1)
    pt = lt.exp()
    return (pt * lt).sum() / h.size(0) - (pt * ls).sum() / w.size(0)


@plain(dynamic=True, fuses=1)
def divided_by_one_size_dynamic(q, k, qt, kt):
    return _divided(q, k, qt, kt, q.size(2), q.size(2))


@plain(dynamic=True, fuses=1)
def head_dynamic(z, t):
    return kd(z, t)
