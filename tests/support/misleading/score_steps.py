"""What happens to scores between their product and their softmax, and to probabilities after it.

A constant that is added to all scores of a row vanishes in a softmax, and nowhere else; a value
may be absent as an infinity and not as a NaN; a cast may widen or round.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import INFINITY, misleading, plain, register, student


def hidden(x):
    """Keys that a causal mask excludes."""
    return ~torch.ones(x.shape[-2:], dtype=torch.bool).tril(x.shape[-1] - x.shape[-2])


def filled(x, value=-INFINITY):
    return x.masked_fill(hidden(x), value)


def by_expectation(of_sum, s, p):
    return (of_sum.logsumexp(-1) - (p * s).sum(-1)).mean()


def both(change):
    return lambda s, t: kd(change(s), change(t))


# --------------------------------------------------------------------- a constant is added
# fmt: off
misleading("W5", {
    "shift_before_tanh": both(lambda x: torch.tanh(x + 1) * 5),
    "shift_before_tanh_of_the_teacher": lambda s, t: kd(
        torch.tanh(s) * 5, torch.tanh(t - 2) * 5),
    "shift_before_a_moderate_fill": both(lambda x: filled(x + 5, 0.0)),
    "shift_before_a_fill_by_where": both(lambda x: torch.where(~hidden(x), x + 5, 0.0)),
    "shift_before_a_fill_on_one_side": lambda s, t: kd(filled(s - 5, 0.0), filled(t, 0.0)),
    "shift_in_an_expectation": lambda s, p_t: by_expectation(s, s + 5, p_t),
    "shift_in_a_log_sum_exp": lambda s, p_t: by_expectation(s + 5, s, p_t),
    "shift_in_an_expectation_of_logits": lambda z, p_zt: by_expectation(z, z + 5, p_zt),
    "shift_before_relu": both(lambda x: (x + 1).relu()),
    "shift_before_a_clamp": both(lambda x: (x + 1).clamp(-2, 2)),
    "shift_by_rows_before_a_fill": both(lambda x: filled(x - x.amax(-1, keepdim=True), 0.0)),
    "shift_by_rows_before_tanh": both(lambda x: torch.tanh(x - x.amax(-1, True))),
})
plain({
    "shift_before_softmax": lambda s, t: kd(s + 5, t - 3),
    "shift_before_a_fill_with_infinity": lambda s, t: kd(filled(s + 5), filled(t)),
    "shift_after_tanh": lambda s, t: kd(torch.tanh(s) * 5 + 1, torch.tanh(t) * 5),
    "shift_before_scale": lambda raw, raw_t: kd((raw + 1) * 0.3, (raw_t - 1) / 2),
    "shift_that_varies_along_keys": lambda s, t: kd(
        s + 0.1 * (j := torch.arange(s.shape[3], dtype=s.dtype)), t - 0.1 * j),
    "shift_in_both_terms": lambda s, p_t: by_expectation(s + 5, s + 5, p_t),
}, fuses=1)
plain({
    "shift_by_rows_before_softmax": lambda s, t: kd(
        s - s.amax(-1, keepdim=True), t - t.amax(-1, keepdim=True).detach()),
})
# fmt: on


# ----------------------------------------------------------------------- nan, infinity
def elements(s, t):
    return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")


def of_logs(log_s, t):
    return F.kl_div(log_s, t.softmax(-1), reduction="none").sum(-1)


def only(chosen, other=0.0):
    return lambda x: torch.where(chosen(x), x, other)


def empty_rows_made_zero(s, t):
    keep = (~hidden(s)).tril(-4)
    s, t = (x.masked_fill(~keep, -INFINITY) for x in (s, t))
    p = t.softmax(-1).nan_to_num(0.0)
    return (p * (t.log_softmax(-1) - s.log_softmax(-1)).nan_to_num(0.0)).sum(-1).mean()


def finite_scores_are_filled(s, t):
    s = filled(s)
    return kd(s.masked_fill(~s.isinf(), 0.0).masked_fill(s.isinf(), -1.0), t)


# fmt: off
misleading("W9", {
    "padding_of_words_made_finite": lambda h, w, zt: of_logs(
        F.pad(h @ w[:48].T, (0, 16), value=-INFINITY).log_softmax(-1).nan_to_num(neginf=-100.0),
        zt).mean(),
    "infinity_made_finite_in_scores": lambda s, t: of_logs(
        filled(s).log_softmax(-1).nan_to_num(neginf=-50.0), t),
    "infinite_elements_made_finite": lambda s, t: (
        elements(filled(s), t).nan_to_num(posinf=7.0).sum(-1)),
    "infinite_rows_made_finite": lambda s, t: (
        rows_of(filled(s), t).nan_to_num(posinf=7.0).mean()),
    "infinite_scores_made_finite": both(lambda x: filled(x).nan_to_num(neginf=-2.0)),
})
misleading("W11", {
    "only_infinite_scores_are_kept": both(only(Tensor.isinf)),
    "only_infinite_scores_of_the_student_are_kept": lambda s, t: kd(only(Tensor.isinf)(s), t),
    "only_missing_scores_are_kept": lambda s, t: kd(
        only(Tensor.isnan, 1.0)(s), torch.where(t.isnan(), t, t.sin())),
    "finite_scores_are_filled": finite_scores_are_filled,
    "missing_elements_are_filled": lambda s, t: (
        elements(x := filled(s), t).masked_fill(x.isnan(), 0.0).sum(-1)),
    "kept_where_the_other_side_is_infinite": lambda s, t: torch.where(
        (y := filled(t)).isinf(), (x := elements(s, y)) + 1.0, x).sum(-1),
})
plain({
    "nothing_to_make_finite": lambda log_s, t: of_logs(log_s.nan_to_num(), t).mean(),
    "infinite_elements_are_filled": lambda s, t: (
        (q := filled(t)).softmax(-1) * (q.log_softmax(-1) - (x := filled(s)).log_softmax(-1))
    ).masked_fill(x.isinf(), 0.0).sum(-1).mean(),
}, fuses=1)
# fmt: on
plain({"empty_rows_made_zero": empty_rows_made_zero})


# ---------------------------------------------------------------------------------- casts
def rounded(x, dtype):
    return x.to(dtype).to(x.dtype)


CAST = {
    "probabilities": lambda log_s, p_t, dtype: F.kl_div(
        log_s, rounded(p_t, dtype), reduction="batchmean"),
    "scores": lambda s, t, dtype: kd(rounded(s, dtype), rounded(t, dtype)),
    "logits": lambda z, zt, dtype: kd(z, rounded(zt, dtype)),
}  # fmt: skip
OF_CASTS = {"probabilities": "log_s p_t", "scores": "s t", "logits": "z zt"}
# fmt: off
for _dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16):
    for _what, _fn in CAST.items():
        _of = str(_dtype).removeprefix("torch.")
        register(f"{_what}_through_{_of}", functools.partial(_fn, dtype=_dtype),
                 OF_CASTS[_what], fault="W10", place=("casts", _of, _what))
misleading("W10", {
    "scores_through_int8": lambda s, t: kd(
        s, (t * 16).round().to(torch.int8).to(t.dtype) / 16),
    "scores_through_float32": both(lambda x: x.float().double()),
    "operands_through_float8": lambda s, qt, kt: kd(
        s, student(qt, rounded(kt, torch.float8_e4m3fn))),
})
# fmt: on
plain({"scores_widened": both(Tensor.double)}, fuses=1, dtype=torch.float32)
plain({
    "softmax_in_float32": lambda s, t: F.kl_div(
        s.log_softmax(-1, dtype=torch.float32), t.softmax(-1, dtype=torch.float32),
        reduction="sum"),
}, fuses=1, dtype=torch.bfloat16)  # fmt: skip
# ------------------------------------------------------------------------ masks and sizes
# fmt: off
misleading("X14", {
    "one_row_under_a_mask_of_many": lambda s, t, x: kd(
        *(torch.where(torch.arange(48) >= torch.arange(x.shape[0])[:, None], y, -1e9)
          for y in (s, t))),
    "one_row_with_a_bias_of_many": lambda s, t, b: kd(s + b.detach(), t + b.detach()),
    "one_row_masked_by_padding_of_many": lambda s, t, x: rows_of(
        *(torch.where(torch.ones(x.shape[0], 48, dtype=torch.bool).tril(5), y, -INFINITY)
          for y in (s, t))).sum(),
}, shapes=dict.fromkeys(("q", "qt"), (2, 2, 1, 8)))
misleading("X14", {
    "one_batch_under_a_mask_of_two": lambda q_b1, k_b1, qt_b1, kt_b1, keep: kd(
        *(torch.where(keep[:, None, None, :], x, -1e9)
          for x in (student(q_b1, k_b1), student(qt_b1, kt_b1)))),
    "one_head_under_a_bias_of_two": lambda q_h1, k_h1, qt_h1, kt_h1, b: rows_of(
        student(q_h1, k_h1) + (two := torch.stack([b, b.sin()]).detach()),
        student(qt_h1, kt_h1) + two).sum(0).mean(),
})
plain({
    "padded_keys": lambda s, t, keep: kd(
        *(x.masked_fill(~keep[:, None, None, :], -1e9) for x in (s, t))),
    "causal_rows": both(lambda x: filled(x, -1e9)),
    "softcapped": both(lambda x: 5 * torch.tanh(x / 5)),
}, fuses=1)
plain({
    "one_row_under_its_own_mask": both(lambda x: torch.where(torch.arange(48) >= 7, x, -1e9)),
}, shapes=dict.fromkeys(("q", "qt"), (2, 2, 1, 8)))
# fmt: on
