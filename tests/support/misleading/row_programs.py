"""Losses that no divergence of the kernels is: row programs, and what only looks like one."""

import functools

import torch
import torch.nn.functional as F

from tests.support.losses import kd
from tests.support.misleading.registry import (
    INFINITY,
    KEYS,
    QUERIES,
    frozen,
    plain,
    register,
    student,
    without_gradient,
)

LOWEST = torch.finfo(torch.float64).min


def causal(x):
    return torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)


def weighted(s, t, w):
    p, q = t.softmax(-1), s.softmax(-1)
    return (w * p * (p.log() - q.log())).sum(-1).mean()


def divergences(s, t):
    return t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))


def entropies(s, t):
    """One value per key."""
    return t.softmax(-1) * s.log_softmax(-1)


def rows_of(s, t, kb=1.0):
    return (kb * entropies(s, t)).sum(-1)


# ------------------------------------------------------------ detach and no_grad, everywhere
EDGES = {
    "the_teacher": lambda off, q, k, qt, kt, kb: weighted(
        student(q, k), off(student, qt, kt), kb),
    "the_weight": lambda off, q, k, qt, kt, kb: weighted(
        student(q, k), student(qt, kt), off(torch.exp, kb)),
    "the_student": lambda off, q, k, qt, kt, kb: weighted(
        off(student, q, k), student(qt, kt), kb),
    "one_operand": lambda off, q, k, qt, kt, kb: weighted(
        student(off(torch.sin, q), k), student(qt, kt), kb),
    "the_probability": lambda off, q, k, qt, kt, kb: (
        kb * off(torch.softmax, student(q, k), -1)
        * (student(q, k).log_softmax(-1) - student(qt, kt).log_softmax(-1))).sum(-1).mean(),
    "the_logarithm": lambda off, q, k, qt, kt, kb: (
        kb * student(q, k).softmax(-1) * off(torch.log_softmax, student(q, k), -1)
        * student(qt, kt).softmax(-1)).sum(-1).mean(),
    "the_normaliser": lambda off, q, k, qt, kt, kb: (
        (p := student(q, k).softmax(-1) * kb.sigmoid()) / off(torch.sum, p, -1, True)
        * (p.log() - student(qt, kt).log_softmax(-1))).sum(-1).mean(),
    "the_elements": lambda off, q, k, qt, kt, kb: (
        off(torch.mul, student(q, k).softmax(-1), kb)
        + kb * student(q, k).softmax(-1) * student(qt, kt).log_softmax(-1)).sum(-1).mean(),
    "the_rows": lambda off, q, k, qt, kt, kb: (
        off(torch.sum, student(q, k).softmax(-1) * kb, -1)
        * rows_of(student(qt, kt), student(q, k), kb)).mean(),
    "the_loss": lambda off, q, k, qt, kt, kb: q.sum() + off(
        weighted, student(q, k), student(qt, kt), kb),
}  # fmt: skip
for _how in ("no_grad", "detach"):
    for _name, _fn in EDGES.items():
        for _also in ("", "qt kt"):
            register(
                f"row_program_{_how}_of_{_name}_{'both' if _also else 'student'}",
                functools.partial(_fn, functools.partial(without_gradient, _how)),
                "q k qt kt kb",
                also=_also,
                place=("edges", _how, _name, _also),
            )


# ------------------------------------------------------------ weights, masks and where they act
def renormalised(p, keep):
    p = p * keep[:, None, None]
    return p / (p.sum(-1, keepdim=True) + 1e-9)


def allowed(keep, rows):
    """Every key of some rows has the lowest number, so that eager's softmax is uniform."""
    return keep[:, None, None, :] & rows[:, None, :, None]


def squared_student(s, t):
    return -(t.softmax(-1) * s.softmax(-1).square()).sum(-1).mean()


def of_lifted(p, r, eps):
    return (r * ((r + eps).log() - (p + eps).log())).sum(-1).mean()


register("keys_weighted_after_the_softmax", weighted, "s t kb", fuses=1, also="kb")
register("keys_weighted_with_sizes_that_vary", weighted, "s t kb", dynamic=True)
plain({
    "keys_weighted_and_renormalised": lambda p_s, p_t, keep: of_lifted(
        renormalised(p_s, keep), renormalised(p_t, keep), 1e-9),
    "a_mask_on_the_scores_by_their_value": lambda log_s, t, p_t: -(
        torch.where(t <= -1e-3, torch.zeros_like(t), p_t) * log_s).sum(-1).mean(),
    "rows_without_keys_are_uniform": lambda s, t, keep, rows: squared_student(
        *(x.masked_fill(~allowed(keep, rows), LOWEST) for x in (s, t))),
    "rows_without_keys_by_addition": lambda s, t, keep, rows: squared_student(
        *(x + (~allowed(keep, rows)).to(x.dtype) * -1e9 for x in (s, t))),
    "rows_without_keys_of_minus_infinity": lambda s, p_t, kb, rows: (
        (p_t * s.masked_fill(~causal(s), -INFINITY).softmax(-1) * kb).sum(-1) * rows[:, None]
    ).sum(),
    "masks_before_and_after": lambda s, t, keep: (
        divergences(*(x.masked_fill(~causal(x), LOWEST) for x in (s, t)))
        * keep[:, None, None, :]).sum(-1).mean(),
    "an_exact_zero_beside_an_infinity": lambda s, t: torch.where(
        (p := t.masked_fill(~causal(t), -INFINITY).softmax(-1)) > 0,
        p * p * s.masked_fill(~causal(s), -INFINITY).log_softmax(-1), 0.0).sum(-1).mean(),
}, fuses=1)  # fmt: skip


@plain(fuses=1)
def square_weights_along_rows_and_along_keys(q, k, qt, kt, rw):
    """One vector as weights of rows and, in a square map, of keys."""
    s, t = student(q, k[..., :QUERIES, :]), student(qt, kt[..., :QUERIES, :])
    return (divergences(s, t) * rw * rw[:, None]).sum(-1).mean()


@plain(fuses=1)
def a_mask_of_equal_extents(q, k, qt, kt, rows):
    """A mask of rows that has as many entries as there are keys."""
    s, t = student(q, k[..., :QUERIES, :]), student(qt, kt[..., :QUERIES, :])
    el = t.softmax(-1).square() * s.softmax(-1)
    return (el * rows[:, None, :, None]).sum() + (el * rows[:, None, None, :]).sum()


# ------------------------------------------------------------ in-place writes
@plain()
def elements_are_written_through_a_view(s, t, kb):
    el = entropies(s, t)
    el *= kb
    el[..., 0] = 0.0
    return el.sum(-1).mean()


@plain()
def the_weight_is_written_before(s, t):
    w = torch.ones(KEYS, dtype=s.dtype)
    w[:5] = 0.25
    return rows_of(s, t, w).mean()


@plain()
def the_weight_is_written_between(s, t, q):
    w = torch.ones(KEYS, dtype=s.dtype)
    first = frozen(lambda: rows_of(s, t, w).mean())
    w.mul_(3.0)
    return first + rows_of(s, t, w).mean() + q.sum()


@plain()
def the_operand_is_written_afterwards(s, t, kt, kb):
    rows = rows_of(s, t, kb)
    with torch.no_grad():
        kt.mul_(0.5)
    return rows.mean() + kt.sum()


@plain()
def the_sum_is_written(s, t, kb):
    rows = rows_of(s, t, kb)
    rows[:, 0] = 1.0
    return rows.mean()


# ------------------------------------------------------------ heads
def indexer(s, t, hs):
    t = t.softmax(-1).sum(1)
    return (s.relu() * hs[:, None, None]).sum(1), t / t.sum(-1, keepdim=True)


def of_indexer(s, t, hs):
    s, t = indexer(s, t, hs)
    return F.kl_div(s.log_softmax(-1), t, reduction="sum")


def an_indexer(s, t, hs):
    s, t = indexer(s, t, hs)
    return of_lifted(s.softmax(-1), t, 1e-10)


FOUR = {"q": (2, 4, QUERIES, 8), "k": (2, 4, KEYS, 8), "hs": (4,)}
SMALL = dict.fromkeys(("q", "k", "qt", "kt"), (2, 2, 6, 8))
register("an_indexer", an_indexer, fuses=1, also="hs")
register("an_indexer_whose_teacher_is_trained", of_indexer, fuses=1, also="hs qt kt")
register("an_indexer_of_other_heads", of_indexer, also="hs", shapes=FOUR)
register("a_mean_of_heads_with_sizes_that_vary", of_indexer, dynamic=True)
# fmt: off
plain({
    "an_indexer_with_shared_keys": lambda q, k, t, hs: of_indexer(
        student(q, k.expand(-1, 2, -1, -1)), t, hs),
}, also="hs", shapes={"k": (2, 1, KEYS, 8)})
plain({
    "heads_flattened_in_another_order": lambda s, t: (
        t.transpose(0, 1).flatten(0, 1).softmax(-1).square() * s.flatten(0, 1).log_softmax(-1)
    ).sum(-1).mean(),
}, shapes=SMALL)
plain({
    "each_head_against_the_mean": lambda p_s: (
        p_s * (p_s.log() - p_s.mean(1, keepdim=True).log())).sum(-1).mean(),
    "a_sum_of_heads_of_what_does_not_vary": lambda q_h1, k_h1, p_t: (
        p_t.sum(1) * student(q_h1, k_h1).expand(-1, 2, -1, -1).relu().sum(1).log_softmax(-1)
    ).sum(-1).mean(),
    "a_sum_over_queries_of_probabilities": lambda p_s, p_t: of_lifted(
        p_s.mean(2), p_t.mean(2), 0.0),
    "a_sum_over_queries_of_one_side": lambda p_s, p_t: of_lifted(
        p_s, p_t.mean(2, keepdim=True), 0.0),
    "heads_of_one_side_only": lambda s, qt_h1, kt_h1, kb: rows_of(
        s, student(qt_h1, kt_h1), kb).mean(),
    "a_batch_of_one": lambda s, qt_b1, kt_b1, kb: rows_of(s, student(qt_b1, kt_b1), kb).mean(),
    "rows_and_heads_flattened": lambda s, t, kb: rows_of(
        *(x.reshape(-1, KEYS) for x in (s, t)), kb).mean(),
})
# fmt: on


# ------------------------------------------------------------ other axes
def in_turn(p):
    for _ in range(2):
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(-2, keepdim=True)
    return p


def of_squares(s, p_t):
    return (p_t.square() * s.log_softmax(-1)).sum(-1).mean()


plain({
    "normalised_over_queries": lambda log_s, t, kb: (
        kb * t.softmax(-2) * log_s).sum(-1).mean(),
    "normalised_over_queries_on_both_sides": lambda s, t, rw: (
        rw[:, None] * t.softmax(-2) * s.log_softmax(-2)).sum(-2).mean(),
    "summed_over_queries_first": lambda p_t, log_s, rw: (
        rw[:, None] * p_t * log_s).sum(-2).square().sum(-1).mean(),
    "normalised_in_turn": lambda s, p_t: (in_turn(s.exp()) * p_t).sum(-1).mean(),
    "normalised_over_everything": lambda s, p_t: (
        (s - s.logsumexp((-2, -1), keepdim=True)).exp() * p_t).sum((-2, -1)).mean(),
    "mean_of_all_scores_is_taken": lambda s, p_t: of_squares((s - s.mean()) / s.std(), p_t),
    "scores_standardised_by_row": lambda s, p_t: of_squares(
        (s - s.mean(-1, keepdim=True))
        / (s.square().mean(-1, keepdim=True) + 1e-3).sqrt(), p_t),
    "a_map_weighted_by_its_transpose": lambda q, k, qt, kt: (
        (p := student(qt, kt[..., :QUERIES, :]).softmax(-1)) * p.mT
        * student(q, k[..., :QUERIES, :]).log_softmax(-1)).sum(-1).mean(),
    "scores_against_their_own_transpose": lambda q, qt: rows_of(
        (s := q @ q.mT * 0.3) + s.mT.relu(), qt @ qt.mT).mean(),
    "ids_of_queries_instead_of_keys": lambda q, k, qt, kt: rows_of(
        student(q, k[..., :QUERIES, :]), student(qt, kt[..., :QUERIES, :]),
        torch.zeros(2, 2, QUERIES, QUERIES, dtype=torch.bool).scatter_(
            2, torch.arange(QUERIES).flip(0)[None, None, None].expand(2, 2, 1, -1), True)).mean(),
})  # fmt: skip


# ------------------------------------------------------------ operations and their kinks
OPERATIONS = {
    **{name: getattr(torch, name) for name in (
        "relu", "tanh", "sigmoid", "abs", "square", "expm1", "erf", "sin", "round", "sign",
        "nan_to_num", "tril")},
    **{name: getattr(F, name) for name in (
        "softplus", "logsigmoid", "gelu", "silu", "leaky_relu", "elu", "hardtanh")},
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_of_nothing": lambda x: x.clamp(min=-1e9),
    "power": lambda x: x.softmax(-1) ** 0.7,
    "negative_power": lambda x: (1.0 + x.exp()) ** -1.5,
    "reciprocal": lambda x: 1.0 / (2.0 + x.sigmoid()),
    "rsqrt": lambda x: (1.0 + x.exp()).rsqrt(),
    "log1p": lambda x: x.exp().log1p(),
    "log2": lambda x: (1.0 + x.exp()).log2(),
    "remainder": lambda x: x % 0.5,
    "cumsum": lambda x: x.cumsum(-1),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "sort": lambda x: x.sort(-1).values,
    "maximum": lambda x: torch.maximum(x, x * 0.5),
    "minimum_of_itself": lambda x: torch.minimum(x, x),
    "minimum_of_a_number": lambda x: torch.minimum(x, torch.zeros(())),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.3),
    "threshold": lambda x: F.threshold(x, 0.1, -3.0),
    "to_half_and_back": lambda x: x.half().double(),
    "rounded_to_float32": lambda x: x.float().double(),
    "masked_by_itself": lambda x: torch.where(x > 0.2, x, x.detach() * 0.5),
    "selected_by_comparison": lambda x: x * (x > 0.0),
    "diagonal": lambda x: x - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1), 0, -2, -1)[..., :1],
    "double_negation": lambda x: x.neg().neg(),
    "broadcast_against_rows": lambda x: x - x.logsumexp(-1, keepdim=True).detach(),
    "maximum_subtracted": lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    "maximum_subtracted_detached": lambda x: (x - x.amax(-1, keepdim=True).detach()).exp(),
}  # fmt: skip


def _normalised(s, t, kb, *, operation):
    return rows_of(operation(s), t, kb).mean()


def _alone(s, t, kb, *, operation):
    return (kb * t.softmax(-1) * operation(s)).sum(-1).square().mean()


for _name, _operation in OPERATIONS.items():
    for _kind, _fn in (("", _normalised), ("_alone", _alone)):
        register(f"row_program_of_{_name}{_kind}", functools.partial(_fn, operation=_operation),
                 "s t kb", place=("operations", _name, _kind))  # fmt: skip


# ------------------------------------------------------------ what stands after and next to
def scaled_by(value, s, t):
    """The next loss, of scores that are scaled by the one before."""
    return rows_of(s * value.sigmoid(), t).mean()


plain({
    "a_sum_whose_sign_is_read": lambda s, t, kb: torch.where(
        (rows := rows_of(s, t, kb)) > 0, rows, 2 * rows).mean(),
    "elements_are_returned_beside_the_sum": lambda s, t, kb: (
        (el := kb * entropies(s, t)).sum(-1).mean(), el),
    "the_map_is_used_by_attention": lambda p_s, v, p_t, kb: (
        (kb * p_t * p_s.square()).sum(-1).mean() + (p_s @ v).square().mean()),
    "rows_feed_the_next_loss": lambda s, t, kb: scaled_by(rows_of(s, t, kb)[..., None], s, t),
    "a_total_feeds_the_next_loss": lambda s, t, kb: scaled_by(rows_of(s, t, kb).sum(), s, t),
    "two_losses_of_one_map": lambda s, t, kb: (
        rows_of(s, t, kb).mean()
        + (second := ((s.softmax(-1) - t.softmax(-1)) ** 2).sum(-1).mean()), second),
    "rows_with_keepdim_and_means": lambda s, t, kb, rw: (
        ((el := kb * entropies(s, t)).mean(-1, keepdim=True) * rw[:, None]).sum()
        + el.sum((0, 3)).mean() * rw.sum()),
    "a_mean_over_everything": lambda p_s, p_t: F.mse_loss(p_s, p_t),
    "a_loss_without_reduction": lambda p_s, p_t, kb: (
        F.mse_loss(p_s, p_t, reduction="none") * kb).sum((-2, -1)),
    "absolute_differences": lambda p_s, p_t: F.l1_loss(p_s, p_t, reduction="sum"),
    "cosine_of_maps": lambda p_s, p_t: (1 - F.cosine_similarity(p_s, p_t, dim=-1)).mean(),
    "normalised_by_the_two_norm": lambda p_s, p_t: (
        F.normalize(p_s, dim=-1) * F.normalize(p_t, dim=-1)).sum(-1).mean(),
    "a_softmax_of_a_softmax": lambda p_s, p_t: kd(p_s / 0.5, p_t / 0.5),
})  # fmt: skip


# ------------------------------------------------------------ vocabularies and their labels
def hit(z, ids):
    return torch.zeros_like(z, dtype=torch.bool).scatter_(1, ids, True)


def some_twice(y):
    return torch.stack([y, y, y.flip(0)], 1)


def with_entropy(rows, tw, logs):
    return -(rows * tw).mean() - 0.1 * (logs.exp() * logs).sum(-1).mean()


def without_label(z, zt, y):
    keep = ~hit(z, y[:, None])
    left = (x.masked_fill(~keep, -1000.0) for x in (z, zt))
    return (divergences(*left) * keep).sum(-1).mean()


def labels_that_are_written(log_z, y, tw):
    ids = y[:, None] * 1
    picked = frozen(lambda: log_z.gather(-1, ids).squeeze(-1))
    ids.zero_()
    return with_entropy(picked, tw, log_z) + ids.sum()


def words_written_into_a_mask(log_z, y, tw):
    mask = torch.zeros_like(log_z)
    mask.scatter_(1, y[:, None], 1.0)
    mask[:, 0] = 0.5
    return ((mask * log_z).sum(-1) * tw).mean()


plain({
    "words_weighted_with_labels_beside": lambda h, w, zt, c, y: rows_of(
        z := F.linear(h, w, c), zt, c.exp()).mean() + F.cross_entropy(z, y),
    "a_word_taken_out": without_label,
    "log_probabilities_of_labels": lambda log_z, y, tw: with_entropy(
        log_z.gather(-1, y[:, None]).squeeze(-1), tw, log_z),
    "labels_of_several_words": lambda log_z, y, tw: with_entropy(
        torch.where(hit(log_z, some_twice(y)), log_z, 0.0).sum(-1), tw, log_z),
    "several_words_are_gathered": lambda log_z, y, tw: with_entropy(
        log_z.gather(-1, some_twice(y)).sum(-1), tw, log_z),
    "one_hot_labels": lambda log_z, y, tw: -(
        (F.one_hot(y, log_z.shape[1]) * log_z).sum(-1) * tw).mean(),
    "labels_that_are_written": labels_that_are_written,
    "words_written_into_a_mask": words_written_into_a_mask,
})  # fmt: skip
# ------------------------------------------------------------ sizes and types
# fmt: off
plain({
    "causal_and_weighted_with_sizes_that_vary": lambda s, t, kb: weighted(
        *(x.masked_fill(~torch.ones(x.shape[-2:], dtype=torch.bool).tril(), LOWEST)
          for x in (s, t)), kb),
}, dynamic=True)
plain({
    "weights_in_float64": lambda p_s, p_t, kb: (kb.double() * p_t * p_s.log()).sum(-1).mean(),
}, dtype=torch.float32)
plain({
    "narrow_scores_compared": lambda s, t: rows_of(s, torch.where(t > 0.1, t, 0.0)).mean(),
}, dtype=torch.bfloat16)
# fmt: on
