"""Losses that no divergence of the kernels is: row programs, and what only looks like one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support.misleading.registry import (
    INFINITY,
    KEYS,
    QUERIES,
    plain,
    register,
    student,
    without_gradient,
)

LOWEST = torch.finfo(torch.float64).min


def _keep():
    return torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)


# ------------------------------------------------------------ detach and no_grad, everywhere
def _weighted(s, t, w):
    p, q = t.softmax(-1), s.softmax(-1)
    return (w * p * (p.log() - q.log())).sum(-1).mean()


for _how in ("no_grad", "detach"):
    # fmt: off
    _EDGES = {
        "the_teacher": lambda q, k, qt, kt, kb, how: _weighted(
            student(q, k), without_gradient(how, student, qt, kt), kb),
        "the_weight": lambda q, k, qt, kt, kb, how: _weighted(
            student(q, k), student(qt, kt), without_gradient(how, torch.exp, kb)),
        "the_student": lambda q, k, qt, kt, kb, how: _weighted(
            without_gradient(how, student, q, k), student(qt, kt), kb),
        "one_operand": lambda q, k, qt, kt, kb, how: _weighted(
            student(without_gradient(how, torch.sin, q), k), student(qt, kt), kb),
        "the_probability": lambda q, k, qt, kt, kb, how: (
            kb * without_gradient(how, torch.softmax, student(q, k), -1)
            * (student(q, k).log_softmax(-1) - student(qt, kt).log_softmax(-1))).sum(-1).mean(),
        "the_logarithm": lambda q, k, qt, kt, kb, how: (
            kb * student(q, k).softmax(-1)
            * without_gradient(how, torch.log_softmax, student(q, k), -1)
            * student(qt, kt).softmax(-1)).sum(-1).mean(),
        "the_normaliser": lambda q, k, qt, kt, kb, how: (
            lambda p, r: (p / without_gradient(how, torch.sum, p, -1, True)
                          * (p.log() - r.log())).sum(-1).mean())(
            student(q, k).softmax(-1) * kb.sigmoid(), student(qt, kt).softmax(-1)),
        "the_elements": lambda q, k, qt, kt, kb, how: (
            without_gradient(how, torch.mul, student(q, k).softmax(-1), kb)
            + kb * student(q, k).softmax(-1) * student(qt, kt).log_softmax(-1)).sum(-1).mean(),
        "the_rows": lambda q, k, qt, kt, kb, how: (
            without_gradient(how, torch.sum, student(q, k).softmax(-1) * kb, -1)
            * (student(q, k).softmax(-1) * student(qt, kt).log_softmax(-1) * kb).sum(-1)).mean(),
        "the_loss": lambda q, k, qt, kt, kb, how: q.sum() + without_gradient(
            how, _weighted, student(q, k), student(qt, kt), kb),
    }
    # fmt: on
    for _name, _fn in _EDGES.items():
        for _also in ("", "qt kt"):

            def _program(q, k, qt, kt, kb, fn=_fn, how=_how):
                return fn(q, k, qt, kt, kb, how)

            _label = f"row_program_{_how}_of_{_name}_{'both' if _also else 'student'}"
            _place = ("edges", _how, _name, _also)
            register(_label, _program, "q k qt kt kb", also=_also, place=_place)


# ------------------------------------------------------------ weights, masks and where they act
@plain("keys_weighted_with_sizes_that_vary", dynamic=True)
@plain(fuses=1, also="kb")
def keys_weighted_after_the_softmax(s, t, kb):
    return _weighted(s, t, kb)


@plain(fuses=1)
def keys_weighted_and_renormalised(s, t, kb, keep):
    p, r = (x.softmax(-1) * keep[:, None, None] for x in (s, t))
    p, r = (x / (x.sum(-1, keepdim=True) + 1e-9) for x in (p, r))
    return (r * ((r + 1e-9).log() - (p + 1e-9).log())).sum(-1).mean()


@plain(fuses=1)
def square_weights_along_rows_and_along_keys(q, k, qt, kt, rw):
    """One vector as weights of rows and, in a square map, of keys."""
    s, t = student(q, k[..., :QUERIES, :]), student(qt, kt[..., :QUERIES, :])
    el = t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))
    return (el * rw * rw[:, None]).sum(-1).mean()


@plain()
def a_map_weighted_by_its_transpose(q, k, qt, kt, rw):
    s, t = student(q, k[..., :QUERIES, :]), student(qt, kt[..., :QUERIES, :])
    p = t.softmax(-1)
    return (p * p.mT * s.log_softmax(-1)).sum(-1).mean()


@plain()
def scores_against_their_own_transpose(q, qt):
    s = q @ q.mT * 0.3
    return ((s + s.mT.relu()).log_softmax(-1) * (qt @ qt.mT).softmax(-1)).sum(-1).mean()


@plain(fuses=1)
def a_mask_on_the_scores_by_their_value(s, t):
    p = torch.where(t <= -1e-3, torch.zeros_like(t), t.softmax(-1))
    return -(p * s.log_softmax(-1)).sum(-1).mean()


@plain(fuses=1)
def rows_without_keys_are_uniform(q, k, qt, kt, keep, rows):
    """Every key of some rows has the lowest number, so that eager's softmax is uniform."""
    allowed = keep[:, None, None, :] & rows[:, None, :, None]
    s, t = (x.masked_fill(~allowed, LOWEST) for x in (student(q, k), student(qt, kt)))
    return -(t.softmax(-1) * s.softmax(-1).square()).sum(-1).mean()


@plain(fuses=1)
def rows_without_keys_by_addition(q, k, qt, kt, keep, rows):
    allowed = keep[:, None, None, :] & rows[:, None, :, None]
    low = (~allowed).to(q.dtype) * -1e9
    s, t = student(q, k) + low, student(qt, kt) + low
    return -(t.softmax(-1) * s.softmax(-1).square()).sum(-1).mean()


@plain(fuses=1)
def rows_without_keys_of_minus_infinity(s, t, kb, rows):
    s = s.masked_fill(~_keep(), -INFINITY)
    el = t.softmax(-1) * s.softmax(-1) * kb
    return (el.sum(-1) * rows[:, None]).sum()


@plain(fuses=1)
def masks_before_and_after(q, k, qt, kt, keep):
    s, t = (x.masked_fill(~_keep(), LOWEST) for x in (student(q, k), student(qt, kt)))
    el = t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))
    return (el * keep[:, None, None, :]).sum(-1).mean()


@plain(fuses=1)
def a_mask_of_equal_extents(q, k, qt, kt, rows):
    """A mask of rows that has as many entries as there are keys."""
    s, t = student(q, k[..., :QUERIES, :]), student(qt, kt[..., :QUERIES, :])
    el = t.softmax(-1).square() * s.softmax(-1)
    return (el * rows[:, None, :, None]).sum() + (el * rows[:, None, None, :]).sum()


@plain(fuses=1)
def an_exact_zero_beside_an_infinity(q, k, qt, kt):
    s, t = (x.masked_fill(~_keep(), -INFINITY) for x in (student(q, k), student(qt, kt)))
    p, logs = t.softmax(-1), s.log_softmax(-1)
    return torch.where(p > 0, p * p * logs, 0.0).sum(-1).mean()


# ------------------------------------------------------------ in-place writes
@plain()
def elements_are_written(s, t, kb):
    el = t.softmax(-1) * s.log_softmax(-1)
    el *= kb
    return el.sum(-1).mean()


@plain()
def elements_are_written_through_a_view(s, t, kb):
    el = t.softmax(-1) * s.log_softmax(-1) * kb
    el[..., 0] = 0.0
    return el.sum(-1).mean()


@plain()
def the_weight_is_written_afterwards(q, k, qt, kt, x):
    w = torch.ones(KEYS, dtype=q.dtype)
    with torch.no_grad():
        el = student(qt, kt).softmax(-1) * student(q, k).log_softmax(-1) * w
        w.zero_()
    return el.sum(-1).mean() + w.sum() + q.sum()


@plain()
def the_weight_is_written_before(q, k, qt, kt, x):
    w = torch.ones(KEYS, dtype=q.dtype)
    w[:5] = 0.25
    el = student(qt, kt).softmax(-1) * student(q, k).log_softmax(-1) * w
    return el.sum(-1).mean()


@plain()
def the_weight_is_written_between(q, k, qt, kt, x):
    w = torch.ones(KEYS, dtype=q.dtype)
    with torch.no_grad():
        first = (student(qt, kt).softmax(-1) * student(q, k).log_softmax(-1) * w).sum(-1).mean()
        w.mul_(3.0)
    return first + (student(qt, kt).softmax(-1) * student(q, k).log_softmax(-1) * w).sum(-1).mean()


@plain()
def the_operand_is_written_afterwards(q, k, qt, kt, kb):
    el = student(qt, kt).softmax(-1) * student(q, k).log_softmax(-1) * kb
    rows = el.sum(-1)
    with torch.no_grad():
        kt.mul_(0.5)
    return rows.mean() + kt.sum()


@plain()
def the_sum_is_written(s, t, kb):
    rows = (t.softmax(-1) * s.log_softmax(-1) * kb).sum(-1)
    rows[:, 0] = 1.0
    return rows.mean()


# ------------------------------------------------------------ heads
def _indexer(q, k, qt, kt, hs):
    t = student(qt, kt).softmax(-1).sum(1)
    t = t / t.sum(-1, keepdim=True)
    s = (student(q, k).relu() * hs[:, None, None]).sum(1)
    return t, s


@plain(fuses=1, also="hs")
def an_indexer(q, k, qt, kt, hs):
    t, s = _indexer(q, k, qt, kt, hs)
    return (t * ((t + 1e-10).log() - (s.softmax(-1) + 1e-10).log())).sum(-1).mean()


@plain(
    "an_indexer_of_other_heads",
    also="hs",
    shapes={"q": (2, 4, QUERIES, 8), "k": (2, 4, KEYS, 8), "hs": (4,)},
)
@plain(fuses=1, also="hs qt kt")
def an_indexer_whose_teacher_is_trained(q, k, qt, kt, hs):
    t, s = _indexer(q, k, qt, kt, hs)
    return F.kl_div(s.log_softmax(-1), t, reduction="sum")


@plain(also="hs", shapes={"k": (2, 1, KEYS, 8)})
def an_indexer_with_shared_keys(q, k, qt, kt, hs):
    t, s = _indexer(q, k.expand(-1, 2, -1, -1), qt, kt, hs)
    return F.kl_div(s.log_softmax(-1), t, reduction="sum")


@plain()
def each_head_against_the_mean(q, k, qt, kt):
    p = student(q, k).softmax(-1)
    return (p * (p.log() - p.mean(1, keepdim=True).log())).sum(-1).mean()


@plain()
def a_sum_of_heads_of_what_does_not_vary(q_h1, k_h1, qt, kt):
    s = student(q_h1, k_h1).expand(-1, 2, -1, -1)
    t = student(qt, kt).softmax(-1).sum(1)
    return (t * s.relu().sum(1).log_softmax(-1)).sum(-1).mean()


@plain()
def a_sum_over_queries_of_probabilities(s, t):
    p, r = s.softmax(-1).mean(2), t.softmax(-1).mean(2)
    return (r * (r.log() - p.log())).sum(-1).mean()


@plain()
def a_sum_over_queries_of_one_side(s, t):
    p, r = s.softmax(-1), t.softmax(-1).mean(2, keepdim=True)
    return (r * (r.log() - p.log())).sum(-1).mean()


@plain()
def heads_of_one_side_only(q, k, qt_h1, kt_h1, kb):
    s, t = student(q, k), student(qt_h1, kt_h1)
    return (kb * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()


@plain()
def a_batch_of_one(q, k, qt_b1, kt_b1, kb):
    s, t = student(q, k), student(qt_b1, kt_b1)
    return (kb * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()


@plain(shapes={"q": (2, 2, 6, 8), "k": (2, 2, 6, 8), "qt": (2, 2, 6, 8), "kt": (2, 2, 6, 8)})
def heads_flattened_in_another_order(q, k, qt, kt):
    s = student(q, k).flatten(0, 1)
    t = student(qt, kt).transpose(0, 1).flatten(0, 1)
    return (t.softmax(-1).square() * s.log_softmax(-1)).sum(-1).mean()


@plain()
def rows_and_heads_flattened(q, k, qt, kt, kb):
    s, t = (x.reshape(-1, KEYS) for x in (student(q, k), student(qt, kt)))
    return (kb * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()


# ------------------------------------------------------------ other axes
@plain()
def normalised_over_queries(s, t, kb):
    return (kb * t.softmax(-2) * s.log_softmax(-1)).sum(-1).mean()


@plain()
def normalised_over_queries_on_both_sides(s, t, rw):
    return (rw[:, None] * t.softmax(-2) * s.log_softmax(-2)).sum(-2).mean()


@plain()
def summed_over_queries_first(s, t, rw):
    return (rw[:, None] * t.softmax(-1) * s.log_softmax(-1)).sum(-2).square().sum(-1).mean()


@plain()
def normalised_in_turn(s, t):
    p = s.exp()
    for _ in range(2):
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(-2, keepdim=True)
    return (p * t.softmax(-1)).sum(-1).mean()


@plain()
def normalised_over_everything(s, t):
    p = (s - s.logsumexp((-2, -1), keepdim=True)).exp()
    return (p * t.softmax(-1)).sum((-2, -1)).mean()


@plain()
def mean_of_all_scores_is_taken(s, t):
    s = (s - s.mean()) / s.std()
    return (t.softmax(-1).square() * s.log_softmax(-1)).sum(-1).mean()


@plain()
def scores_standardised_by_row(s, t):
    s = (s - s.mean(-1, keepdim=True)) / (s.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    return (t.softmax(-1).square() * s.log_softmax(-1)).sum(-1).mean()


# ------------------------------------------------------------ operations and their kinks
_OPERATIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "abs": torch.abs,
    "square": torch.square,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_of_nothing": lambda x: x.clamp(min=-1e9),
    "power": lambda x: x.softmax(-1) ** 0.7,
    "negative_power": lambda x: (1.0 + x.exp()) ** -1.5,
    "reciprocal": lambda x: 1.0 / (2.0 + x.sigmoid()),
    "rsqrt": lambda x: (1.0 + x.exp()).rsqrt(),
    "log1p": lambda x: x.exp().log1p(),
    "log2": lambda x: (1.0 + x.exp()).log2(),
    "expm1": torch.expm1,
    "erf": torch.erf,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "sin": torch.sin,
    "round": torch.round,
    "sign": torch.sign,
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
    "hardtanh": F.hardtanh,
    "nan_to_num": torch.nan_to_num,
    "to_half_and_back": lambda x: x.half().double(),
    "rounded_to_float32": lambda x: x.float().double(),
    "masked_by_itself": lambda x: torch.where(x > 0.2, x, x.detach() * 0.5),
    "selected_by_comparison": lambda x: x * (x > 0.0),
    "tril": torch.tril,
    "diagonal": lambda x: x - torch.diag_embed(x.diagonal(dim1=-2, dim2=-1), 0, -2, -1)[..., :1],
    "double_negation": lambda x: x.neg().neg(),
    "broadcast_against_rows": lambda x: x - x.logsumexp(-1, keepdim=True).detach(),
    "maximum_subtracted": lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    "maximum_subtracted_detached": lambda x: (x - x.amax(-1, keepdim=True).detach()).exp(),
}  # fmt: skip
for _name, _operation in _OPERATIONS.items():

    def _of_student(q, k, qt, kt, kb, operation=_operation):
        s, t = operation(student(q, k)), student(qt, kt)
        return (kb * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()

    def _without_softmax(q, k, qt, kt, kb, operation=_operation):
        s, t = operation(student(q, k)), student(qt, kt)
        return (kb * t.softmax(-1) * s).sum(-1).square().mean()

    for _kind, _fn in (("", _of_student), ("_alone", _without_softmax)):
        _label, _place = f"row_program_of_{_name}{_kind}", ("operations", _name, _kind)
        register(_label, _fn, "q k qt kt kb", place=_place)


# ------------------------------------------------------------ what stands after and next to
@plain()
def a_sum_whose_sign_is_read(s, t, kb):
    rows = (kb * t.softmax(-1) * s.log_softmax(-1)).sum(-1)
    return torch.where(rows > 0, rows, 2 * rows).mean()


@plain()
def elements_are_returned_beside_the_sum(s, t, kb):
    el = kb * t.softmax(-1) * s.log_softmax(-1)
    return el.sum(-1).mean(), el


@plain()
def the_map_is_used_by_attention(q, k, v, qt, kt, kb):
    p = student(q, k).softmax(-1)
    loss = (kb * student(qt, kt).softmax(-1) * p.square()).sum(-1).mean()
    return loss + (p @ v).square().mean()


@plain()
def rows_feed_the_next_loss(s, t, kb):
    rows = (kb * t.softmax(-1) * s.log_softmax(-1)).sum(-1, keepdim=True)
    return (t.softmax(-1) * (s * rows.sigmoid()).log_softmax(-1)).sum(-1).mean()


@plain()
def a_total_feeds_the_next_loss(s, t, kb):
    total = (kb * t.softmax(-1) * s.log_softmax(-1)).sum()
    return (t.softmax(-1) * (s * total.sigmoid()).log_softmax(-1) * kb).sum(-1).mean()


@plain()
def two_losses_of_one_map(s, t, kb):
    first = (kb * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()
    second = ((s.softmax(-1) - t.softmax(-1)) ** 2).sum(-1).mean()
    return first + second, second


@plain()
def rows_with_keepdim_and_means(s, t, kb, rw):
    el = kb * t.softmax(-1) * s.log_softmax(-1)
    return (el.mean(-1, keepdim=True) * rw[:, None]).sum() + el.sum((0, 3)).mean() * rw.sum()


@plain()
def a_mean_over_everything(s, t):
    return F.mse_loss(s.softmax(-1), t.softmax(-1))


@plain()
def a_loss_without_reduction(s, t, kb):
    el = F.mse_loss(s.softmax(-1), t.softmax(-1), reduction="none")
    return (el * kb).sum((-2, -1))


@plain()
def absolute_differences(s, t):
    return F.l1_loss(s.softmax(-1), t.softmax(-1), reduction="sum")


@plain()
def cosine_of_maps(s, t):
    p, r = s.softmax(-1), t.softmax(-1)
    return (1 - F.cosine_similarity(p, r, dim=-1)).mean()


@plain()
def normalised_by_the_two_norm(s, t):
    p, r = (F.normalize(x.softmax(-1), dim=-1) for x in (s, t))
    return (p * r).sum(-1).mean()


@plain()
def a_softmax_of_a_softmax(q, k, qt, kt):
    s, t = (x.softmax(-1) for x in (student(q, k), student(qt, kt)))
    return F.kl_div((s / 0.5).log_softmax(-1), (t / 0.5).softmax(-1), reduction="batchmean")


@plain()
def words_weighted(h, w, ht, wt, c):
    s, t = F.linear(h, w, c), F.linear(ht, wt)
    return (c.exp() * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()


@plain()
def words_weighted_with_labels_beside(h, w, ht, wt, c, y):
    s, t = F.linear(h, w), F.linear(ht, wt)
    soft = (c.exp() * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()
    return soft + F.cross_entropy(s, y)


@plain()
def a_word_taken_out(h, w, ht, wt, y):
    s, t = F.linear(h, w), F.linear(ht, wt)
    hit = torch.zeros_like(s).scatter_(1, y[:, None], 1).bool()
    p, r = (x.masked_fill(hit, -1000.0) for x in (s, t))
    return (r.softmax(-1) * (r.log_softmax(-1) - p.log_softmax(-1)) * ~hit).sum(-1).mean()


@plain()
def log_probabilities_of_labels(h, w, y, tw):
    logs = F.linear(h, w).log_softmax(-1)
    picked = logs.gather(-1, y[:, None]).squeeze(-1)
    return -(picked * tw).mean() - 0.1 * (logs.exp() * logs).sum(-1).mean()


@plain()
def labels_of_several_words(h, w, y, tw):
    logs = F.linear(h, w).log_softmax(-1)
    ids = torch.stack([y, y, y.flip(0)], 1)  # some of them twice
    hit = torch.zeros_like(logs, dtype=torch.bool).scatter_(1, ids, True)
    return (torch.where(hit, logs, 0.0).sum(-1) * tw).mean() - (logs.exp() * logs).mean()


@plain()
def several_words_are_gathered(h, w, y, tw):
    logs = F.linear(h, w).log_softmax(-1)
    picked = logs.gather(-1, torch.stack([y, y, y.flip(0)], 1))
    return -(picked.sum(-1) * tw).mean() - 0.1 * (logs.exp() * logs).sum(-1).mean()


@plain()
def labels_that_are_written(h, w, y, tw):
    logs, ids = F.linear(h, w).log_softmax(-1), y[:, None] * 1
    with torch.no_grad():
        picked = logs.gather(-1, ids).squeeze(-1)
        ids.zero_()
    return -(picked * tw).mean() - (logs.exp() * logs).mean() + ids.sum()


@plain()
def words_written_into_a_mask(h, w, y, tw):
    logs = F.linear(h, w).log_softmax(-1)
    hit = torch.zeros_like(logs)
    hit.scatter_(1, y[:, None], 1.0)
    hit[:, 0] = 0.5
    return ((hit * logs).sum(-1) * tw).mean()


@plain()
def one_hot_labels(h, w, y, tw):
    logs = F.linear(h, w).log_softmax(-1)
    return -((F.one_hot(y, w.shape[0]) * logs).sum(-1) * tw).mean()


@plain()
def ids_of_queries_instead_of_keys(q, k, qt, kt):
    s, t = student(q, k[..., :QUERIES, :]), student(qt, kt[..., :QUERIES, :])
    ids = torch.arange(QUERIES).flip(0)[None, None, None].expand(2, 2, 1, -1)
    hit = torch.zeros_like(s, dtype=torch.bool).scatter_(2, ids, True)
    return (hit * t.softmax(-1) * s.log_softmax(-1)).sum(-1).mean()


@plain(dynamic=True)
def causal_and_weighted_with_sizes_that_vary(s, t, kb):
    keep = torch.ones(s.shape[-2:], dtype=torch.bool).tril()
    s, t = (x.masked_fill(~keep, LOWEST) for x in (s, t))
    return _weighted(s, t, kb)


@plain(dynamic=True)
def a_mean_of_heads_with_sizes_that_vary(q, k, qt, kt, hs):
    t, s = _indexer(q, k, qt, kt, hs)
    return (t * s.log_softmax(-1)).mean(-1).mean()


@plain(dtype=torch.float32)
def weights_in_float64(s, t, kb):
    p, r = s.softmax(-1), t.softmax(-1)
    return (kb.double() * r * p.log()).sum(-1).mean()


@plain(dtype=torch.bfloat16)
def narrow_scores_compared(s, t):
    return (torch.where(t > 0.1, t, 0.0).softmax(-1) * s.log_softmax(-1)).sum(-1).mean()
