"""Heads, batches and sizes that are equal by accident, regrouped, averaged, or reduced apart."""

import functools

import torch.nn.functional as F

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import KEYS, QUERIES, misleading, plain, register, student

DIM = 8


def heads(num_q, num_qt, num_k=None, num_kt=None):
    """Shapes of student and teacher."""
    numbers = {"q": num_q, "k": num_k or num_q, "qt": num_qt, "kt": num_kt or num_qt}
    return {x: (2, n, QUERIES if "q" in x else KEYS, DIM) for x, n in numbers.items()}


def alike(*shape):
    return dict.fromkeys(("q", "k", "qt", "kt"), shape)


def kd_of(log_s, p):
    return F.kl_div(log_s, p, reduction="batchmean")


# ----------------------------------------------------------------------- one sum is another
def summed_apart(lt, ls, dims=None):
    pt = lt.exp()
    return ((pt * lt).sum(dims) - (pt * ls).sum(dims)).mean()


OVER_BATCHES = functools.partial(summed_apart, dims=(0, -1))
ONE_TEACHER = {"qt": (1, 2, QUERIES, DIM), "kt": (1, 2, KEYS, DIM)}
ONE_HEAD = {"qt": (2, 1, QUERIES, DIM), "kt": (2, 1, KEYS, DIM)}
# fmt: off
register("sums_over_batches_of_one_and_two", OVER_BATCHES, "log_t log_s", fault="W7",
         shapes=ONE_TEACHER)
register("sums_over_batches_of_one_and_two_dynamic", OVER_BATCHES, "log_t log_s", fault="W7",
         shapes=ONE_TEACHER, dynamic=True)
# fmt: on
register("two_sums_over_equal_batches", OVER_BATCHES, "log_t log_s", fuses=1)
# fmt: off
register("sums_over_heads_of_one_and_two", functools.partial(summed_apart, dims=(1, -1)),
         "log_t log_s", fault="W7", shapes=ONE_HEAD)
register("sums_of_tokens_of_one_and_many", summed_apart, "log_zt log_z", fault="W7",
         shapes={"ht": (1, 12)})
register("sums_of_everything_with_one_teacher", summed_apart, "log_t log_s", fault="W7",
         shapes=ONE_TEACHER)
misleading("W7", {
    "means_over_batches_of_one_and_two": lambda log_t, p_t, log_s: (
        (p_t * log_t).sum(-1).sum(0) - (p_t * log_s).sum(-1).sum(0)).mean(),
}, shapes=ONE_TEACHER)
plain({
    "one_teacher_for_the_batch": lambda log_t, log_s: (
        log_t.exp() * (log_t - log_s)).sum(-1).mean(),
}, shapes=ONE_TEACHER, fuses=1)
plain({
    "one_teacher_head_for_all": lambda s, t: kd(s, t.expand(-1, 2, -1, -1)),
}, shapes=ONE_HEAD)
# fmt: on


# -------------------------------------------------------------------------- heads in groups
def grouped(x, *sizes):
    return x.unflatten(1, sizes)


def swapped_groups(x, *sizes):
    return grouped(x, *sizes).transpose(1, 2)


def grouped_queries(q, k, t):
    return kd((swapped_groups(q, 3, 2) @ k[:, :, None].mT) * 0.3, grouped(t, 2, 3))


# fmt: off
misleading("X1", {
    "heads_grouped_in_two_orders": lambda s, t: kd(
        grouped(s, 3, 2), swapped_groups(t, 2, 3)),
    "heads_of_one_side_reordered": lambda s, t: kd(s, swapped_groups(t, 2, 3).flatten(1, 2)),
}, shapes=heads(6, 6))
misleading("X1", {
    "mean_over_the_outer_groups": lambda log_s, p_t: kd_of(log_s, grouped(p_t, 2, 3).mean(1)),
}, shapes=heads(3, 6), fuses=1)
misleading("X1", {
    "mean_over_the_outer_groups_dynamic": lambda log_s, p_t: kd_of(
        log_s, p_t.view(2, 2, 3, QUERIES, KEYS).mean(1)),
}, shapes=heads(3, 6), dynamic=True)
misleading("X1", {
    "mean_over_the_three_outer_groups": lambda log_s, p_t: kd_of(
        log_s, grouped(p_t, 3, 2).mean(1)),
}, shapes=heads(2, 6))
# fmt: on
misleading("X1", {"grouped_queries_in_two_orders": grouped_queries}, shapes=heads(6, 6, 2))
misleading("X1", {
    "batch_and_heads_swapped": lambda s, t: kd(s, t.transpose(0, 1)),
}, shapes=heads(6, 6) | {"qt": (6, 2, QUERIES, DIM), "kt": (6, 2, KEYS, DIM)})  # fmt: skip


def mean_of_heads(log_s, p_t):
    return kd_of(log_s, p_t.mean(1, keepdim=True))


def mean_of_grouped_heads(log_s, qt, kt):
    return mean_of_heads(log_s, student(qt, kt.repeat_interleave(2, 1)).softmax(-1))


for _name, _shapes, _options in (
    ("mean_of_four_heads_against_one", heads(1, 4), {"fuses": 1}),
    ("mean_of_two_heads_against_two", heads(2, 2), {"fault": "X2"}),
    ("mean_of_heads_against_queries_of_one_key", heads(4, 4, 1), {"fault": "X2"}),
    ("mean_of_three_heads_against_two", heads(2, 3), {"fault": "X2", "fuses": 1}),
    ("mean_of_four_heads_against_two_dynamic", heads(2, 4), {"fault": "X2", "dynamic": True}),
    ("mean_of_four_heads_against_two", heads(2, 4), {"fault": "X2", "fuses": 1}),
):
    register(_name, mean_of_heads, shapes=_shapes, **_options)
# fmt: off
misleading("X2", {
    "mean_of_grouped_heads_against_two": mean_of_grouped_heads,
}, shapes=heads(2, 4, 2, 2), fuses=1)
misleading("X2", {
    "mean_of_four_heads_expanded_to_two": lambda log_s, p_t: kd_of(
        log_s, p_t.mean(1, keepdim=True).expand(-1, 2, -1, -1)),
}, shapes=heads(2, 4))
misleading("X2", {
    "sum_of_heads_against_more": lambda log_s, p_t: (
        (p := p_t.sum(1, keepdim=True) / 2) * (p.log() - log_s)).sum(-1).mean(),
}, shapes=heads(4, 2))
# fmt: on


def repeated(q, k):
    return student(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))


def keys_in_groups(q, k, qt, kt, sizes):
    return kd(grouped(repeated(q, k), *sizes), grouped(repeated(qt, kt), *sizes))


# fmt: off
for _name, _sizes, _shapes in (
    ("two_key_heads_in_groups_of_three", (3, 2), heads(6, 6, 6, 2)),
    ("three_key_heads_in_groups_of_two", (2, 3), heads(6, 6, 6, 3)),
    ("both_sides_grouped_unlike", (3, 2), heads(6, 6, 3, 2)),
):
    register(_name, functools.partial(keys_in_groups, sizes=_sizes), "q k qt kt", fault="X3",
             shapes=_shapes)
misleading("X3", {
    "key_heads_repeated_as_a_whole": lambda s, qt, kt: kd(s, student(qt, kt.repeat(1, 3, 1, 1))),
}, shapes=heads(6, 6, 6, 2))
plain({
    "heads_grouped_in_one_order": lambda s, t: kd(grouped(s, 3, 2), grouped(t, 3, 2)),
}, shapes=heads(6, 6), fuses=1)
plain({
    "grouped_key_heads": lambda s, qt, kt: kd(s, repeated(qt, kt)),
}, shapes=heads(6, 6, 6, 2), fuses=1)
for _name, _options in (
    ("mean_over_the_inner_groups", {"fuses": 1}),
    ("mean_over_the_inner_groups_dynamic", {"dynamic": True}),
):
    register(_name, lambda log_s, p_t: kd_of(log_s, grouped(p_t, 2, 3).mean(2)),
             shapes=heads(2, 6), **_options)
plain({
    "means_of_both_sides": lambda p_s, p_t: kd_of(p_s.mean(1).log(), p_t.mean(1)),
}, shapes=heads(4, 2))
# fmt: on
for _name, _options in (
    ("map_dynamic", {"dynamic": True, "fuses": 1}),
    ("one_of_everything", {"shapes": alike(1, 1, 1, DIM)}),
    ("one_head", {"shapes": heads(1, 1), "fuses": 1}),
    ("queries_of_one_key_head", {"shapes": heads(4, 4, 1, 1), "fuses": 1}),
):
    register(_name, kd, "s t", **_options)
register("no_batch", lambda s, t: rows_of(s, t).sum(), shapes=alike(0, 2, 5, DIM))
register("no_queries", lambda s, t: rows_of(s, t).sum(),
         shapes=dict.fromkeys(("q", "qt"), (2, 2, 0, DIM)))  # fmt: skip


# --------------------------------------------------------- statistics of another layout
def forward_kl(t, log_s):
    return (t.softmax(-1) * (t.log_softmax(-1) - log_s)).sum(-1)


def reverse_kl_of(p, s, t):
    return (p * (s.log_softmax(-1) - t.log_softmax(-1))).sum(-1)


def shifted(s):
    return (s - s.transpose(0, 1).amax(-1, True)).exp()


def by_log_sum_exp(s, t):
    return forward_kl(t, s - s.transpose(0, 1).logsumexp(-1, True))


misleading("X10", {
    "log_sum_exp_of_swapped_heads": by_log_sum_exp,
    "log_sum_exp_of_swapped_heads_beside_an_expectation": lambda s, p_t: (
        s.transpose(0, 1).logsumexp(-1) - (p_t * s).sum(-1)),
    "expectation_of_swapped_heads": lambda s, p_t: (
        s.logsumexp(-1) - (p_t * s).sum(-1).transpose(0, 1)),
    "weighted_log_sum_exp_of_swapped_heads": lambda s, p_t, x: (
        (s.transpose(0, 1).logsumexp(-1) - (p_t * s).sum(-1))[0, 1] * x).sum(),
    "sum_of_exponentials_of_swapped_heads": lambda s, t: reverse_kl_of(
        s.exp() / s.exp().transpose(0, 1).sum(-1, True), s, t),
    "logarithm_of_a_sum_of_swapped_heads": lambda s, t: forward_kl(
        t, s - s.exp().transpose(0, 1).sum(-1, True).log()),
    "maximum_of_swapped_heads": lambda s, t: reverse_kl_of(
        (e := shifted(s)) / e.sum(-1, True), s, t),
    "probabilities_of_swapped_heads": lambda s, t: rows_of(s.transpose(0, 1), t),
})  # fmt: skip
register("log_sum_exp_of_swapped_heads_dynamic", by_log_sum_exp, fault="X10", dynamic=True)
# fmt: off
misleading("X10", {
    "log_sum_exp_along_queries": lambda s, t: forward_kl(t, s - s.logsumexp(-2, True).mT),
    "heads_swapped_with_queries": lambda s, t: rows_of(
        s[:, :, :2].transpose(1, 2), t[:, :, :2]),
}, shapes=alike(2, 2, 12, DIM))
plain({
    "both_with_swapped_heads": lambda s, t: kd(s.transpose(0, 1), t.transpose(0, 1)),
}, fuses=1)
plain({
    "log_sum_exp_swapped_there_and_back": lambda s, t: forward_kl(
        t, s - s.transpose(0, 1).logsumexp(-1, True).transpose(0, 1)).mean(),
})
# fmt: on


# --------------------------------------------------------------------------- divisors
def divided(log_s, log_t, of_t, of_s):
    p_t, dims = log_t.exp(), (-1, -2)
    return ((p_t * log_t).sum(dims) / of_t - (p_t * log_s).sum(dims) / of_s).mean()


def by_two_sizes(log_s, log_t):
    return divided(log_s, log_t, log_s.size(2), log_s.size(3))


register("divided_by_two_sizes", by_two_sizes, fault="X15")
# fmt: off
misleading("X15", {
    "divided_by_two_sizes_dynamic": by_two_sizes,
    "divided_by_a_size_and_its_double_dynamic": lambda log_s, log_t: divided(
        log_s, log_t, log_s.size(2), 2 * log_s.size(2)),
    "divided_by_batch_and_heads_dynamic": lambda log_s, log_t, k: divided(
        log_s, log_t, log_s.size(2) * 3, k.size(3)),
    "divided_by_tokens_and_words_dynamic": lambda log_z, log_zt: divided(
        log_z, log_zt, log_z.size(0), log_z.size(1)),
}, dynamic=True)
plain({
    "divided_by_one_size_dynamic": lambda log_s, log_t: divided(
        log_s, log_t, log_s.size(2), log_s.size(2)),
    "head_dynamic": lambda z, zt: kd(z, zt),
}, dynamic=True, fuses=1)
# fmt: on
