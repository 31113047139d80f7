"""Gradient that is switched off after the product: at scores, sums, probabilities, rows."""

import torch
import torch.nn.functional as F

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import (
    frozen,
    misleading,
    plain,
    without_gradient,
)

LOG_2 = 0.6931471805599453


def elements(log_s, p_t):
    return F.kl_div(log_s, p_t, reduction="none")


# ------------------------------------------------------------ after the product, on one side
# fmt: off
misleading("X7", {
    "temperature_after_scores_without_gradient": lambda s, frozen_t, tau: kd(s, frozen_t / tau),
    "temperature_after_detached_scores": lambda s, t, tau: kd(s, t.detach() / tau),
    "temperature_of_both_logits_the_teacher_s_without_gradient": lambda z, frozen_zt, tau: kd(
        z / tau, frozen_zt / tau),
    "bias_of_detached_logits": lambda z, zt, c: kd(z, zt.detach() + c),
    "bias_of_logits_without_gradient": lambda z, frozen_zt, c: kd(z, frozen_zt + c),
    "bias_of_detached_scores": lambda s, t, b: kd(s, t.detach() + b),
    "detached_queries_and_a_trained_scale": lambda s, qt, kt, ls: kd(s, qt.detach() @ kt.mT * ls),
    "products_without_gradient_scaled": lambda frozen_s, frozen_t, ls: kd(
        frozen_s * ls, frozen_t * ls),
}, also="qt kt ht wt")
misleading("X7", {
    "one_operand_without_gradient": lambda q, k, t, ls: kd(q @ frozen(torch.mul, k, ls).mT, t),
    "masked_after_scores_without_gradient": lambda frozen_s, t, q, keep: kd(
        *(x.masked_fill(~keep[:, None, None], -1e9) for x in (frozen_s, t))) + q.sum(),
    # which return the tensor itself, with its gradient
    "scores_cast_to_their_own_type_without_gradient": lambda s, t: kd(
        frozen(lambda: s.to(s.dtype)) * 0.5, t),
    "queries_cast_to_their_own_type_without_gradient": lambda q, k, t: kd(
        frozen(lambda: q.to(q.dtype)) @ k.mT, t),
    "queries_as_they_are_without_gradient": lambda q, k, t: kd(frozen(lambda: +q) @ k.mT, t),
    "hidden_states_of_two_dimensions_without_gradient": lambda h, w, zt: kd(
        frozen(torch.atleast_2d, h) @ w.T, zt),
    "queries_broadcast_to_their_shape_without_gradient": lambda q, k, t: kd(
        frozen(torch.broadcast_tensors, q)[0] @ k.mT, t),
})
# fmt: on
# ------------------------------------------------------------------- after the softmax
misleading(
    "X8",
    {
        "weights_of_elements_without_gradient": lambda log_s, log_t: (
            (frozen(lambda: log_s.exp().clamp_min(1e-8)) * (log_s - log_t)).sum(-1).mean()
        ),
        "clamped_probabilities_without_gradient": lambda p_s, log_s, log_t: (
            (frozen(p_s.clamp_min, 1e-8) * (log_s - log_t)).sum(-1).mean()
        ),
        "elements_without_gradient_summed_outside": lambda log_s, p_t, q: (
            frozen(elements, log_s, p_t).sum(-1).mean() + 0 * q.sum()
        ),
        "elements_without_gradient_are_the_result": lambda log_s, p_t: (
            frozen(elements, log_s, p_t).sum(-1).mean()
        ),
        "rows_scaled_without_gradient": lambda s, t, rw: (
            frozen(torch.mul, rows_of(s, t), 2.0) * rw
        ).sum(),
        "rows_weighted_without_gradient": lambda log_s, p_t, rw: (
            frozen(torch.mul, elements(log_s, p_t), rw[:, None]).sum(-1).mean() + 0 * rw.sum()
        ),
        # of a view, what is recorded says that it needs a gradient
        "rows_viewed_without_gradient": lambda s, t, q: (
            frozen(lambda x: x.reshape(x.shape), rows_of(s, t)).sum() + q.sum()
        ),
        "token_rows_viewed_without_gradient": lambda z, zt, h: (
            frozen(torch.unsqueeze, rows_of(z, zt), 0).mean() + h.sum()
        ),
        "squares_of_rows_viewed_without_gradient": lambda z, zt, h: (
            frozen(torch.unsqueeze, (z.softmax(-1) * zt.sigmoid()).sum(-1), 0).square().mean()
            + h.sum()
        ),
        "rows_summed_without_gradient": lambda log_s, p_t: (
            (x := elements(log_s, p_t)).sum(-1).mean() * frozen(x.sum, -1).mean()
        ),
        "rows_of_a_loss_without_gradient_scale_it": lambda s, t: (
            rows_of(s, t).mean() / frozen(rows_of, s, t).mean()
        ),
        "logs_without_gradient": lambda p_s, log_t: (
            (p_s * (frozen(p_s.log) - log_t)).sum(-1).mean()
        ),
        "teacher_s_product_without_gradient": lambda p_s, log_s, log_t: (
            (frozen(torch.mul, p_s, log_s) - p_s * log_t).sum(-1).mean()
        ),
        "token_rows_without_gradient": lambda z, zt, tw: (
            frozen(torch.mul, rows_of(z, zt), 3.0) * tw
        ).sum(),
        "weights_of_token_elements_without_gradient": lambda log_z, log_zt: (
            (frozen(log_z.exp) * (log_z - log_zt)).sum(-1).mean()
        ),
    },
)  # fmt: skip


# ------------------------------------------------- detached log-sum-exps, sums, mixtures
def forward_kl(t, log_s):
    return (t.softmax(-1) * (t.log_softmax(-1) - log_s)).sum(-1).mean()


def log_ratio(s, t):
    return s.log_softmax(-1) - t.log_softmax(-1)


def exponentials(s):
    return (s - s.amax(-1, True)).exp()


def over_detached_sum(e):
    return e / e.sum(-1, True).detach()


def normalised(e):
    return e / e.sum(-1, True)


# fmt: off
misleading("X9", {
    "detached_log_sum_exp": lambda s, t: forward_kl(t, s - s.logsumexp(-1, True).detach()),
    "detached_log_sum_exp_of_logits": lambda z, zt: forward_kl(
        zt, z - z.logsumexp(-1, True).detach()),
    "log_sum_exp_without_gradient": lambda s, t: forward_kl(
        t, s - frozen(s.logsumexp, -1, True)),
    "detached_sum_of_exponentials": lambda s, t: forward_kl(t, over_detached_sum(s.exp()).log()),
    "exponentials_without_gradient_summed": lambda s, t: forward_kl(
        t, ((e := s.exp()) / frozen(e.sum, -1, True)).log()),
    "detached_sum_of_exponentials_of_reverse_kl": lambda s, log_t: (
        (p := over_detached_sum(s.exp())) * (p.log() - log_t)).sum(-1).mean(),
    "detached_sum_of_shifted_exponentials": lambda s, t: (
        over_detached_sum(exponentials(s)) * log_ratio(s, t)).sum(-1).mean(),
    "softmax_by_hand_of_detached_scores": lambda s, t: (
        normalised((s - s.amax(-1, True)).detach().exp()) * log_ratio(s, t)).sum(-1).mean(),
    "mixture_of_probabilities_detached": lambda p_s, p_t: js(
        p_s, p_t, (0.5 * (p_s + p_t)).detach().log()),
    "detached_expectation": lambda s, p_t: (
        s.logsumexp(-1) - (p_t * s).sum(-1).detach()).mean(),
    "detached_log_sum_exp_beside_an_expectation": lambda s, p_t: (
        s.logsumexp(-1).detach() - (p_t * s).sum(-1)).mean(),
    "log_sum_exp_without_gradient_beside_an_expectation": lambda s, p_t: (
        frozen(s.logsumexp, -1) - (p_t * s).sum(-1)).mean(),
})
misleading("X9", {
    "detached_sum_of_the_teacher_s_exponentials": lambda log_s, t: F.kl_div(
        log_s, over_detached_sum(t.exp()), reduction="batchmean"),
    "softmax_by_hand_of_detached_shifts": lambda s, t: (
        normalised((t - t.amax(-1, True)).detach().exp()) * log_ratio(t, s)).sum(-1).mean(),
}, also="qt kt")
# fmt: on


def js(p, r, log_m):
    return (p * (p.log() - log_m) + r * (r.log() - log_m)).sum(-1).mean()


def log_mixture(how, ls, lt):
    return without_gradient(how, lambda: torch.stack([ls, lt])).logsumexp(0) - LOG_2


def skewed(how, ls, lt):
    return (lt.exp() * (lt - log_mixture(how, ls, lt))).sum(-1).mean()


def both_sides(how, ls, lt):
    m = log_mixture(how, ls, lt)
    return 0.5 * (ls.exp() * (ls - m) + lt.exp() * (lt - m)).sum(-1).mean()


# fmt: off
misleading("X9", {
    "detached_mixture": lambda log_s, log_t: skewed("detach", log_s, log_t),
    "mixture_without_gradient": lambda log_s, log_t: skewed("no_grad", log_s, log_t),
    "detached_mixture_of_logits": lambda log_z, log_zt: skewed("detach", log_z, log_zt),
    "detached_stack_of_a_mixture": lambda log_s, log_t: both_sides("detach", log_s, log_t),
    "stack_of_a_mixture_without_gradient": lambda log_s, log_t: both_sides(
        "no_grad", log_s, log_t),
})
misleading("X9", {
    "detached_mixture_of_two_that_are_trained": lambda log_s, log_t: skewed(
        "detach", log_s, log_t),
}, also="qt kt")
plain({
    "skewed_mixture": lambda log_s, log_t: skewed("grad", log_s, log_t),
    "one_term_of_a_mixture_detached": lambda p_s, p_t: js(
        p_s, p_t, (0.5 * (p_s.detach() + p_t)).log()),
    "whole_loss_without_gradient": lambda s, t, q: frozen(kd, s, t) * q.sum(),
    "whole_loss_detached": lambda s, t, q: kd(s, t).detach() * q.sum(),
    "detached_weight_of_reverse_kl": lambda log_s, log_t: (
        log_s.exp().detach() * (log_s - log_t)).sum(-1).mean(),
})
plain({
    "detached_maximum": lambda s, t: forward_kl(
        t, normalised((s - s.amax(-1, True).detach()).exp()).log()),
    "detached_teacher_probabilities": lambda log_s, p_t: F.kl_div(
        log_s, p_t.detach(), reduction="batchmean"),
    "mixture_with_gradient": lambda log_s, log_t: both_sides("grad", log_s, log_t),
}, fuses=1)
# fmt: on
