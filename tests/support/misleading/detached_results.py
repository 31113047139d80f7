"""Gradient that is switched off after the product: at scores, sums, probabilities, rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import misleading, plain, student, without_gradient


# ------------------------------------------------------------ after the product, on one side
@misleading("X7", also="qt kt")
def temperature_after_scores_without_gradient(q, k, qt, kt, tau):
    with torch.no_grad():
        t = student(qt, kt)
    return kd(student(q, k), t / tau)


@misleading("X7", also="qt kt")
def temperature_after_detached_scores(s, t, tau):
    return kd(s, t.detach() / tau)


@misleading("X7", also="ht wt")
def temperature_of_logits_without_gradient(h, w, ht, wt, tau):
    with torch.no_grad():
        t = ht @ wt.T
    return kd(h @ w.T, t / tau)


@misleading("X7", also="ht wt")
def temperature_of_both_logits_the_teacher_s_without_gradient(h, w, ht, wt, tau):
    with torch.no_grad():
        t = ht @ wt.T
    return kd(h @ w.T / tau, t / tau)


@misleading("X7", also="ht wt")
def bias_of_detached_logits(z, t, c):
    return kd(z, t.detach() + c)


@misleading("X7", also="ht wt")
def bias_of_logits_without_gradient(h, w, ht, wt, c):
    with torch.no_grad():
        t = ht @ wt.T
    return kd(h @ w.T, t + c)


@misleading("X7", also="qt kt")
def bias_of_detached_scores(s, t, b):
    return kd(s, t.detach() + b)


@misleading("X7", also="qt")
def detached_queries_and_a_trained_scale(q, k, qt, kt, ls):
    return kd(student(q, k), qt.detach() @ kt.mT * ls)


@misleading("X7", also="qt kt")
def products_without_gradient_scaled(q, k, qt, kt, ls):
    with torch.no_grad():
        s, t = q @ k.mT, qt @ kt.mT
    return kd(s * ls, t * ls)


@misleading("X7")
def one_operand_without_gradient(q, k, qt, kt, ls):
    with torch.no_grad():
        keys = k * ls
    return kd(q @ keys.mT, student(qt, kt))


@misleading("X7")
def masked_after_scores_without_gradient(q, k, qt, kt, keep):
    with torch.no_grad():
        s = student(q, k)
    s = s.masked_fill(~keep[:, None, None], -1e9)
    return kd(s, student(qt, kt).masked_fill(~keep[:, None, None], -1e9)) + q.sum()


# ------------------------------------------------------------------- after the softmax
@misleading("X8")
def weights_of_elements_without_gradient(q, k, qt, kt):
    ls, lt = student(q, k).log_softmax(-1), student(qt, kt).log_softmax(-1)
    with torch.no_grad():
        w = ls.exp().clamp_min(1e-8)
    return (w * (ls - lt)).sum(-1).mean()


@misleading("X8")
def clamped_probabilities_without_gradient(q, k, qt, kt):
    p = student(q, k).softmax(-1)
    ls, lt = student(q, k).log_softmax(-1), student(qt, kt).log_softmax(-1)
    with torch.no_grad():
        w = p.clamp_min(1e-8)
    return (w * (ls - lt)).sum(-1).mean()


@misleading("X8")
def elements_without_gradient_summed_outside(q, k, qt, kt):
    s, t = student(q, k).log_softmax(-1), student(qt, kt).softmax(-1)
    with torch.no_grad():
        x = F.kl_div(s, t, reduction="none")
    return x.sum(-1).mean() + 0 * q.sum()


@misleading("X8")
def elements_without_gradient_are_the_result(q, k, qt, kt):
    s, t = student(q, k).log_softmax(-1), student(qt, kt).softmax(-1)
    with torch.no_grad():
        x = F.kl_div(s, t, reduction="none")
    return x.sum(-1).mean()


@misleading("X8")
def rows_scaled_without_gradient(q, k, qt, kt, rw):
    rows = rows_of(student(q, k), student(qt, kt))
    with torch.no_grad():
        scaled = rows * 2.0
    return (scaled * rw).sum()


@misleading("X8")
def rows_weighted_without_gradient(q, k, qt, kt, rw):
    s, t = student(q, k).log_softmax(-1), student(qt, kt).softmax(-1)
    x = F.kl_div(s, t, reduction="none")
    with torch.no_grad():
        x = x * rw[:, None]
    return x.sum(-1).mean() + 0 * rw.sum()


@misleading("X8")
def rows_summed_without_gradient(q, k, qt, kt):
    s, t = student(q, k).log_softmax(-1), student(qt, kt).softmax(-1)
    x = F.kl_div(s, t, reduction="none")
    with torch.no_grad():
        rows = x.sum(-1)
    return x.sum(-1).mean() * rows.mean()


@misleading("X8")
def rows_of_a_loss_without_gradient_scale_it(q, k, qt, kt):
    s, t = student(q, k), student(qt, kt)
    with torch.no_grad():
        size = rows_of(s, t).mean()
    return rows_of(s, t).mean() / size


@misleading("X8")
def logs_without_gradient(q, k, qt, kt):
    p, t = student(q, k).softmax(-1), student(qt, kt)
    with torch.no_grad():
        logs = p.log()
    return (p * (logs - t.log_softmax(-1))).sum(-1).mean()


@misleading("X8")
def teacher_s_product_without_gradient(q, k, qt, kt):
    p, ls = student(q, k).softmax(-1), student(q, k).log_softmax(-1)
    with torch.no_grad():
        entropy = p * ls
    return (entropy - p * student(qt, kt).log_softmax(-1)).sum(-1).mean()


@misleading("X8")
def token_rows_without_gradient(h, w, ht, wt, tw):
    rows = rows_of(h @ w.T, ht @ wt.T)
    with torch.no_grad():
        scaled = rows * 3.0
    return (scaled * tw).sum()


@misleading("X8")
def token_elements_without_gradient(h, w, ht, wt):
    s, t = (h @ w.T).log_softmax(-1), (ht @ wt.T).softmax(-1)
    with torch.no_grad():
        x = F.kl_div(s, t, reduction="none")
    return x.sum(-1).mean()


@misleading("X8")
def weights_of_token_elements_without_gradient(h, w, ht, wt):
    ls, lt = (h @ w.T).log_softmax(-1), (ht @ wt.T).log_softmax(-1)
    with torch.no_grad():
        p = ls.exp()
    return (p * (ls - lt)).sum(-1).mean()


# ------------------------------------------------- detached log-sum-exps, sums, mixtures
@misleading("X9")
def detached_log_sum_exp(s, t):
    logs = s - s.logsumexp(-1, True).detach()
    return (t.softmax(-1) * (t.log_softmax(-1) - logs)).sum(-1).mean()


@misleading("X9")
def log_sum_exp_without_gradient(q, k, qt, kt):
    s, t = student(q, k), student(qt, kt)
    with torch.no_grad():
        total = s.logsumexp(-1, True)
    return (t.softmax(-1) * (t.log_softmax(-1) - (s - total))).sum(-1).mean()


@misleading("X9")
def detached_sum_of_exponentials(q, k, qt, kt):
    t = student(qt, kt)
    e = student(q, k).exp()
    logs = (e / e.sum(-1, True).detach()).log()
    return (t.softmax(-1) * (t.log_softmax(-1) - logs)).sum(-1).mean()


@misleading("X9")
def exponentials_without_gradient_summed(q, k, qt, kt):
    t = student(qt, kt)
    e = student(q, k).exp()
    with torch.no_grad():
        total = e.sum(-1, True)
    return (t.softmax(-1) * (t.log_softmax(-1) - (e / total).log())).sum(-1).mean()


@misleading("X9")
def detached_sum_of_exponentials_of_reverse_kl(s, t):
    e = s.exp()
    p = e / e.sum(-1, True).detach()
    return (p * (p.log() - t.log_softmax(-1))).sum(-1).mean()


@misleading("X9")
def detached_sum_of_shifted_exponentials(q, k, qt, kt):
    s = student(q, k)
    e = (s - s.amax(-1, True)).exp()
    p = e / e.sum(-1, True).detach()
    return (p * (s.log_softmax(-1) - student(qt, kt).log_softmax(-1))).sum(-1).mean()


@misleading("X9", also="qt kt")
def detached_sum_of_the_teacher_s_exponentials(s, t):
    e = t.exp()
    p = e / e.sum(-1, True).detach()
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@misleading("X9", also="qt kt")
def softmax_by_hand_of_detached_shifts(q, k, qt, kt):
    t = student(qt, kt)
    e = (t - t.amax(-1, True)).detach().exp()
    p = e / e.sum(-1, True)
    return (p * (t.log_softmax(-1) - student(q, k).log_softmax(-1))).sum(-1).mean()


@misleading("X9")
def softmax_by_hand_of_detached_scores(q, k, qt, kt):
    s = student(q, k)
    e = (s - s.amax(-1, True)).detach().exp()
    p = e / e.sum(-1, True)
    return (p * (s.log_softmax(-1) - student(qt, kt).log_softmax(-1))).sum(-1).mean()


def _skewed(ls: Tensor, lt: Tensor, how: str) -> Tensor:
    stacked = without_gradient(how, lambda: torch.stack([ls, lt]))
    m = stacked.logsumexp(0) - 0.6931471805599453
    return (lt.exp() * (lt - m)).sum(-1).mean()


@misleading("X9", name="detached_mixture_of_two_that_are_trained", also="qt kt")
@misleading("X9")
def detached_mixture(s, t):
    return _skewed(s.log_softmax(-1), t.log_softmax(-1), "detach")


@misleading("X9")
def mixture_without_gradient(q, k, qt, kt):
    return _skewed(student(q, k).log_softmax(-1), student(qt, kt).log_softmax(-1), "no_grad")


@misleading("X9")
def detached_mixture_of_logits(z, t):
    return _skewed(z.log_softmax(-1), t.log_softmax(-1), "detach")


@plain()
def skewed_mixture(s, t):
    return _skewed(s.log_softmax(-1), t.log_softmax(-1), "grad")


def _js(ls: Tensor, lt: Tensor, how: str) -> Tensor:
    half = 0.6931471805599453
    stacked = without_gradient(how, lambda: torch.stack([ls, lt]))
    m = stacked.logsumexp(0) - half
    return 0.5 * (ls.exp() * (ls - m) + lt.exp() * (lt - m)).sum(-1).mean()


@misleading("X9")
def detached_stack_of_a_mixture(s, t):
    return _js(s.log_softmax(-1), t.log_softmax(-1), "detach")


@misleading("X9")
def stack_of_a_mixture_without_gradient(q, k, qt, kt):
    return _js(student(q, k).log_softmax(-1), student(qt, kt).log_softmax(-1), "no_grad")


@misleading("X9")
def mixture_of_probabilities_detached(s, t):
    p, r = s.softmax(-1), t.softmax(-1)
    m = (0.5 * (p + r)).detach().log()
    return (p * (p.log() - m) + r * (r.log() - m)).sum(-1).mean()


@misleading("X9")
def detached_log_sum_exp_of_logits(z, t):
    logs = z - z.logsumexp(-1, True).detach()
    return (t.softmax(-1) * (t.log_softmax(-1) - logs)).sum(-1).mean()


@misleading("X9")
def detached_expectation(q, k, qt, kt):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    return (s.logsumexp(-1) - (p * s).sum(-1).detach()).mean()


@misleading("X9")
def detached_log_sum_exp_beside_an_expectation(q, k, qt, kt):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    return (s.logsumexp(-1).detach() - (p * s).sum(-1)).mean()


@misleading("X9")
def log_sum_exp_without_gradient_beside_an_expectation(q, k, qt, kt):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    with torch.no_grad():
        total = s.logsumexp(-1)
    return (total - (p * s).sum(-1)).mean()


@plain()
def one_term_of_a_mixture_detached(s, t):
    p, r = s.softmax(-1), t.softmax(-1)
    m = (0.5 * (p.detach() + r)).log()
    return (p * (p.log() - m) + r * (r.log() - m)).sum(-1).mean()


@plain(fuses=1)
def detached_maximum(s, t):
    e = (s - s.amax(-1, True).detach()).exp()
    return (t.softmax(-1) * (t.log_softmax(-1) - (e / e.sum(-1, True)).log())).sum(-1).mean()


@plain(fuses=1)
def detached_teacher_probabilities(s, t):
    p = t.softmax(-1).detach()
    return F.kl_div(s.log_softmax(-1), p, reduction="batchmean")


@plain(fuses=1)
def mixture_with_gradient(s, t):
    return _js(s.log_softmax(-1), t.log_softmax(-1), "grad")


@plain()
def whole_loss_without_gradient(q, k, qt, kt):
    with torch.no_grad():
        loss = kd(student(q, k), student(qt, kt))
    return loss * q.sum()


@plain()
def whole_loss_detached(q, k, qt, kt):
    return kd(student(q, k), student(qt, kt)).detach() * q.sum()


@plain()
def detached_weight_of_reverse_kl(s, t):
    ls, lt = s.log_softmax(-1), t.log_softmax(-1)
    return (ls.exp().detach() * (ls - lt)).sum(-1).mean()
