"""Scales, temperatures, biases, sinks and weights that are trained, shared, detached, or not.

What a student and a teacher share can be one expression written twice, of which one records no
gradient: those are two values.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import (
    frozen,
    misleading,
    plain,
    register,
    student,
    without_gradient,
)


def with_sink(q, k, x):
    return torch.cat([student(q, k), x[None, :, None, None].expand(*q.shape[:-1], 1)], -1)


# how a side's scores use something learned, and what it is
OF_BOTH = {
    "scale": ("ls", lambda a, b, x: a @ b.mT * x),
    "scale_exp": ("ls", lambda a, b, x: a @ b.mT * x.exp()),
    "temperature": ("tau", lambda a, b, x: a @ b.mT / x),
}
LEARNED = {
    ("map", "q k qt kt"): {
        **OF_BOTH,
        "scale_of_q": ("ls", lambda q, k, x: (q * x) @ k.mT),
        "temperature_clamped": ("tau", lambda q, k, x: q @ k.mT / x.clamp(min=0.01)),
        "bias": ("b", lambda q, k, x: student(q, k) + x),
        "bias_doubled": ("b", lambda q, k, x: student(q, k) + x.mul(2.0)),
        "key_bias": ("kb", lambda q, k, x: student(q, k) + x),
        "sink": ("sink", with_sink),
    },
    ("head", "h w ht wt"): {
        **OF_BOTH,
        "bias": ("c", F.linear),
        "bias_added": ("c", lambda h, w, x: h @ w.T + x),
        "bias_doubled": ("c", lambda h, w, x: F.linear(h, w, x.mul(2.0))),
    },
}


def _of_sides(a, b, at, bt, x, *, scores, how, of):
    t = without_gradient(how, scores, at, bt, x)
    return kd(scores(a, b, x if of == "shared" else torch.ones_like(x)), t)


for (_kind, _operands), _made in LEARNED.items():
    for _name, (_learned, _scores) in _made.items():
        for _how in ("no_grad", "detach", "grad"):
            for _of in ("shared", "of_the_teacher"):
                register(
                    f"{_kind}_{_name}_{_of}_{_how}",
                    functools.partial(_of_sides, scores=_scores, how=_how, of=_of),
                    f"{_operands} {_learned}",
                    place=("sides", f"{_kind}_{_name}", _of, _how),
                    fault="" if _how == "grad" else "W1" if "_" in _name else "W2",
                )


def weight_shared(s, t, w):
    first = frozen(lambda: (rows_of(s.detach(), t) * w.exp()).sum())
    return (rows_of(s, t) * w.exp()).sum() + first


def elements(log_s, p_t):
    return F.kl_div(log_s, p_t, reduction="none")


def scores_of(change, a, b, scale=1.0):
    return change(a) @ change(b).mT * scale


def relative_bias(raw, table):
    i = torch.arange(raw.shape[2])[:, None] - torch.arange(raw.shape[3])
    return raw + table[i.clamp(-4, 4) + 4].permute(2, 0, 1)


# one expression on both sides, with a gradient on the student's alone
register("weight_of_rows_shared_with_one_without_gradient", weight_shared, "s t rw", fault="W1")
register("weight_of_tokens_shared_with_one_without_gradient", weight_shared, "z zt tw", fault="W1")
# fmt: off
misleading("W1", {
    "weight_of_rows_normalised_without_gradient": lambda s, t, rw: (
        (rows_of(s, t) * rw.exp()).sum() / frozen(lambda: rw.exp().sum())),
    "weight_in_elements_normalised_without_gradient": lambda log_s, p_t, rw: (
        elements(log_s, p_t) * rw.exp()[:, None]).sum() / frozen(lambda: rw.exp()[:, None].sum()),
    "weight_of_one_product_without_gradient": lambda log_s, log_t, p_t, rw: (
        frozen(lambda: p_t * log_t * rw.exp()[:, None]) - p_t * log_s * rw.exp()[:, None]).sum(),
    "weight_of_one_sum_without_gradient": lambda log_s, log_t, p_t, rw: (
        frozen(lambda: (p_t * log_t).sum(-1) * rw.exp()) - (p_t * log_s).sum(-1) * rw.exp()).sum(),
    "weight_of_the_teacher_without_gradient": lambda log_s, log_t, p_t, rw: (
        frozen(lambda: p_t * rw.exp()[:, None]) * log_t - p_t * rw.exp()[:, None] * log_s).sum(),
    "divisor_in_elements_seen_without_gradient": lambda log_s, p_t, rw: (
        elements(log_s, p_t) / rw.exp()[:, None]).sum() + frozen(lambda: rw.exp()[:, None].mean()),
    "keys_doubled_on_both_sides": lambda q, k, qt: kd(
        q @ k.mul(2.0).mT, frozen(lambda: qt @ k.mul(2.0).mT)),
    "teacher_is_the_student_without_gradient": lambda q, k: kd(
        scores_of(torch.sin, q, k, 0.5), frozen(scores_of, torch.sin, q, k)),
    "head_normalised_on_both_sides": lambda h, w, ht: kd(
        h @ F.normalize(w, dim=-1).T, frozen(lambda: ht @ F.normalize(w, dim=-1)[:, :12].T)),
})
misleading("W1", {
    "operands_widened_on_both_sides": lambda q, k: kd(
        scores_of(Tensor.double, q, k, 0.3), frozen(scores_of, Tensor.double, q, k)),
    "keys_widened_on_both_sides": lambda q, k, qt: kd(
        scores_of(Tensor.double, q, k), frozen(scores_of, Tensor.double, qt, k)),
}, dtype=torch.float32)
misleading("W2", {
    "scale_shared_with_a_teacher_inside_no_grad_softmax": lambda raw, raw_t, ls: elements(
        (raw * ls).log_softmax(-1), frozen(lambda: (raw_t * ls).softmax(-1))).sum(-1).mean(),
    "scale_of_a_detached_probability": lambda raw, raw_t, ls: elements(
        (raw * ls).log_softmax(-1), (raw_t * ls).softmax(-1).detach()).sum(-1).mean(),
    "scale_of_heads_shared": lambda raw, raw_t, hs: kd(
        raw * hs[:, None, None], frozen(lambda: raw_t * hs[:, None, None])),
    "scale_of_a_student_that_is_not_trained": lambda raw, raw_t, ls: kd(
        (raw * ls).detach(), raw_t * ls),
    "temperature_squared_of_a_teacher_in_no_grad": lambda z, zt, tau: (
        kd(z / tau, frozen(lambda: zt / tau)) * tau**2),
    "relative_bias_shared_by_table": lambda raw, raw_t, table: kd(
        relative_bias(raw, table), frozen(relative_bias, raw_t, table)),
    "bias_and_scale_of_a_teacher_in_no_grad": lambda raw, raw_t, ls, b: kd(
        raw * ls + b, frozen(lambda: raw_t * ls + b)),
})
misleading("W2", {
    "scale_shared_dynamic": lambda raw, raw_t, ls: kd(raw * ls, frozen(lambda: raw_t * ls)),
    "head_scale_shared_dynamic": lambda z, zt, ls: kd(z * ls, (zt * ls).detach()),
}, dynamic=True)
# fmt: on


@plain(name="scale_shared_and_not_trained", fuses=1, trained="q k")
@misleading("W1", dynamic=True)
def scale_exp_shared_dynamic(raw, raw_t, ls):
    return kd(raw * ls.exp(), frozen(lambda: raw_t * ls.exp()))


# ------------------------------------------------------------------------------ right ones
plain({
    "scale_trained_on_both_sides": lambda raw, raw_t, ls: kd(raw * ls, raw_t * ls),
    "scale_of_the_student_only": lambda raw, frozen_t, ls: kd(raw * ls, frozen_t),
    "scale_detached_on_both_sides": lambda raw, raw_t, ls: kd(
        raw * ls.detach().exp(), raw_t * ls.detach().exp()),
    "head_scale_of_the_student_only": lambda z, frozen_zt, ls: kd(z * ls, frozen_zt),
    "temperature_without_gradient_on_both_sides": lambda z, zt, tau: kd(
        z / tau.detach(), frozen(lambda: zt / tau)),
    "weights_of_rows_trained": lambda s, t, rw: (rows_of(s, t) * rw.exp()).mean(),
    "weights_of_rows_detached": lambda s, t, rw: (rows_of(s, t) * rw.exp().detach()).mean(),
    "weights_of_tokens_trained": lambda z, zt, tw: (rows_of(z, zt) * tw).sum() / tw.sum(),
    "everything_trained": lambda z, zt: kd(z, zt),
}, fuses=1)  # fmt: skip
plain({"bias_of_the_student_only": lambda s, t, b: kd(s + b, t)})
plain({
    "head_bias_not_trained_in_the_teacher": lambda h, w, ht, wt, c, ct: kd(
        F.linear(h, w, c), frozen(F.linear, ht, wt, ct)),
}, trained="h w c", fuses=1)  # fmt: skip
for _name, _operands, _which in (
    ("only_head_trained", "z zt", {"trained": "w"}),
    ("trained_teacher_of_a_head", "z zt", {"also": "ht wt"}),
    ("nothing_trained", "s t", {"trained": ""}),
    ("only_keys_trained", "s t", {"trained": "k"}),
    ("teacher_s_queries_trained", "s t", {"trained": "qt"}),
    ("trained_teacher_of_a_map", "s t", {"also": "qt kt"}),
):
    register(_name, kd, _operands, fuses=1, **_which)
