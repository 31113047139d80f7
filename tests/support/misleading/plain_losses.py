"""Losses as they are usually written: these must stay right, and most must stay fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.support import programs
from tests.support.misleading.registry import plain, register, student

for _kind, _arguments in (("map", "q k qt kt"), ("head", "h w ht wt")):
    for _name, _spelling in programs.SPELLINGS.items():

        def _rows(a, b, at, bt, spelling=_spelling):
            return spelling(a @ b.mT * 0.3, at @ bt.mT * 0.3).sum(-1)

        narrow = {"dtype": torch.float32} if "fp32" in _name else {}
        _place = ("losses", _kind, _name)
        register(f"{_kind}_{_name}", _rows, _arguments, fuses=1, place=_place, **narrow)

    for _name, _call in programs.CALLS.items():

        def _loss(a, b, at, bt, call=_call):
            return call(a @ b.mT * 0.3, at @ bt.mT * 0.3)

        _place = ("losses", _kind, _name)
        register(f"{_kind}_{_name}", _loss, _arguments, fuses=1, place=_place)


@plain(fuses=1)
def by_log_sum_exp_and_expectation(q, k, qt, kt):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    return (s.logsumexp(-1) - (p * s).sum(-1)).mean()


@plain(fuses=1)
def reverse_with_a_clamp(s, t):
    p, r = s.softmax(-1), t.softmax(-1)
    return (p * (p.clamp_min(1e-6).log() - r.clamp_min(1e-6).log())).sum(-1).mean()


@plain(fuses=1)
def probabilities_as_both_arguments(s, t):
    return F.kl_div(s.softmax(-1), t.softmax(-1), reduction="sum")


@plain(fuses=1)
def arguments_swapped(s, t):
    return F.kl_div(t.log_softmax(-1), s.softmax(-1), reduction="batchmean")


@plain(fuses=1)
def hard_and_soft_labels(z, t, y):
    soft = F.kl_div((z / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean") * 4
    return 0.3 * F.cross_entropy(z, y) + 0.7 * soft


@plain(fuses=1)
def smoothed_hard_labels(z, t, y):
    soft = F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="batchmean")
    return F.cross_entropy(z, y, label_smoothing=0.1) + soft


@plain(fuses=1)
def softmax_of_queries(s, t):
    return F.kl_div(s.log_softmax(-2), t.softmax(-2), reduction="sum")


@plain()
def softmax_of_heads(s, t):
    return F.kl_div(s.log_softmax(1), t.softmax(1), reduction="sum")


@plain()
def top_keys_of_the_teacher(s, t):
    best = t.topk(5, dim=-1)
    return F.kl_div(
        s.gather(-1, best.indices).log_softmax(-1), best.values.softmax(-1), reduction="sum"
    )


@plain()
def squared_difference_of_maps(s, t):
    return (s.softmax(-1) - t.softmax(-1)).square().sum()


@plain(fuses=1)
def dropout_that_is_off(s, t):
    p = F.dropout(t.softmax(-1), 0.5, training=False)
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")
