"""What happens to scores between their product and their softmax, and to probabilities after it.

A constant that is added to all scores of a row vanishes in a softmax, and nowhere else; a value
may be absent as an infinity and not as a NaN; a cast may widen or round.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.losses import kd
from tests.support.losses import rows_of_kl as rows_of
from tests.support.misleading.registry import INFINITY, misleading, plain, register, student


def causal(s: Tensor) -> Tensor:
    return torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])


# --------------------------------------------------------------------- a constant is added
@misleading("W5")
def shift_before_tanh(s, t):
    return kd(torch.tanh(s + 1) * 5, torch.tanh(t + 1) * 5)


@misleading("W5")
def shift_before_tanh_of_the_teacher(s, t):
    return kd(torch.tanh(s) * 5, torch.tanh(t - 2) * 5)


@misleading("W5")
def shift_before_a_moderate_fill(s, t):
    return kd((s + 5).masked_fill(~causal(s), 0.0), (t + 5).masked_fill(~causal(t), 0.0))


@misleading("W5")
def shift_before_a_fill_by_where(s, t):
    return kd(torch.where(causal(s), s + 5, 0.0), torch.where(causal(t), t + 5, 0.0))


@misleading("W5")
def shift_before_a_fill_on_one_side(s, t):
    return kd((s - 5).masked_fill(~causal(s), 0.0), t.masked_fill(~causal(t), 0.0))


@misleading("W5")
def shift_in_an_expectation(q, k, qt, kt):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    return (s.logsumexp(-1) - (p * (s + 5)).sum(-1)).mean()


@misleading("W5")
def shift_in_a_log_sum_exp(q, k, qt, kt):
    s, p = student(q, k), student(qt, kt).softmax(-1)
    return ((s + 5).logsumexp(-1) - (p * s).sum(-1)).mean()


@misleading("W5")
def shift_in_an_expectation_of_logits(h, w, ht, wt):
    z, p = h @ w.T, (ht @ wt.T).softmax(-1)
    return (z.logsumexp(-1) - (p * (z + 5)).sum(-1)).mean()


@misleading("W5")
def shift_before_tanh_of_logits(z, t):
    return kd(torch.tanh(z + 1) * 5, torch.tanh(t + 1) * 5)


@misleading("W5")
def shift_before_relu(s, t):
    return kd((s + 1).relu(), (t + 1).relu())


@misleading("W5")
def shift_before_a_clamp(s, t):
    return kd((s + 1).clamp(-2, 2), (t + 1).clamp(-2, 2))


@misleading("W5")
def shift_by_rows_before_a_fill(s, t):
    s = (s - s.amax(-1, keepdim=True)).masked_fill(~causal(s), 0.0)
    t = (t - t.amax(-1, keepdim=True)).masked_fill(~causal(t), 0.0)
    return kd(s, t)


@misleading("W5")
def shift_by_rows_before_tanh(s, t):
    return kd(torch.tanh(s - s.amax(-1, True)), torch.tanh(t - t.amax(-1, True)))


@plain(fuses=1)
def shift_before_softmax(s, t):
    return kd(s + 5, t - 3)


@plain(fuses=1)
def shift_before_a_fill_with_infinity(s, t):
    return kd((s + 5).masked_fill(~causal(s), -INFINITY), t.masked_fill(~causal(t), -INFINITY))


@plain(fuses=1)
def shift_after_tanh(s, t):
    return kd(torch.tanh(s) * 5 + 1, torch.tanh(t) * 5)


@plain()
def shift_by_rows_before_softmax(s, t):
    return kd(s - s.amax(-1, keepdim=True), t - t.amax(-1, keepdim=True).detach())


@plain(fuses=1)
def shift_before_scale(q, k, qt, kt):
    return kd((q @ k.mT + 1) * 0.3, (qt @ kt.mT - 1) / 2)


@plain(fuses=1)
def shift_that_varies_along_keys(q, k, qt, kt):
    j = torch.arange(k.shape[2], dtype=q.dtype)
    return kd(student(q, k) + 0.1 * j, student(qt, kt) - 0.1 * j)


@plain(fuses=1)
def shift_in_both_terms(q, k, qt, kt):
    s, p = student(q, k) + 5, student(qt, kt).softmax(-1)
    return (s.logsumexp(-1) - (p * s).sum(-1)).mean()


# ----------------------------------------------------------------------- nan, infinity
@misleading("W9")
def padding_of_words_made_finite(h, w, ht, wt):
    s = F.pad(h @ w[:48].T, (0, 16), value=-INFINITY).log_softmax(-1).nan_to_num(neginf=-100.0)
    return F.kl_div(s, (ht @ wt.T).softmax(-1), reduction="batchmean")


@misleading("W9")
def infinity_made_finite_in_scores(s, t):
    s = s.masked_fill(~causal(s), -INFINITY).log_softmax(-1).nan_to_num(neginf=-50.0)
    return F.kl_div(s, t.softmax(-1), reduction="none").sum(-1)


@misleading("W9")
def infinite_elements_made_finite(s, t):
    s = s.masked_fill(~causal(s), -INFINITY)
    x = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
    return x.nan_to_num(posinf=7.0).sum(-1)


@misleading("W9")
def infinite_rows_made_finite(s, t):
    s = s.masked_fill(~causal(s), -INFINITY)
    return rows_of(s, t).nan_to_num(posinf=7.0).mean()


@misleading("W9")
def infinite_scores_made_finite(s, t):
    s, t = (x.masked_fill(~causal(x), -INFINITY).nan_to_num(neginf=-2.0) for x in (s, t))
    return kd(s, t)


@plain(fuses=1)
def nothing_to_make_finite(s, t):
    return F.kl_div(s.log_softmax(-1).nan_to_num(), t.softmax(-1), reduction="batchmean")


@plain()
def empty_rows_made_zero(s, t):
    keep = causal(s).tril(-4)
    s, t = (x.masked_fill(~keep, -INFINITY) for x in (s, t))
    p = t.softmax(-1).nan_to_num(0.0)
    return (p * (t.log_softmax(-1) - s.log_softmax(-1)).nan_to_num(0.0)).sum(-1).mean()


@misleading("W11")
def only_infinite_scores_are_kept(s, t):
    return kd(torch.where(s.isinf(), s, 0.0), torch.where(t.isinf(), t, 0.0))


@misleading("W11")
def only_infinite_scores_of_the_student_are_kept(s, t):
    return kd(torch.where(s.isinf(), s, 0.0), t)


@misleading("W11")
def only_missing_scores_are_kept(s, t):
    return kd(torch.where(s.isnan(), s, 1.0), torch.where(t.isnan(), t, t.sin()))


@misleading("W11")
def finite_scores_are_filled(s, t):
    s = s.masked_fill(~causal(s), -INFINITY)
    return kd(s.masked_fill(~s.isinf(), 0.0).masked_fill(s.isinf(), -1.0), t)


@misleading("W11")
def missing_elements_are_filled(s, t):
    s = s.masked_fill(~causal(s), -INFINITY)
    x = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
    return x.masked_fill(s.isnan(), 0.0).sum(-1)


@misleading("W11")
def kept_where_the_other_side_is_infinite(s, t):
    t = t.masked_fill(~causal(t), -INFINITY)
    x = F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none")
    return torch.where(t.isinf(), x + 1.0, x).sum(-1)


@plain(fuses=1)
def infinite_elements_are_filled(s, t):
    s, t = (x.masked_fill(~causal(x), -INFINITY) for x in (s, t))
    x = t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))
    return x.masked_fill(s.isinf(), 0.0).sum(-1).mean()


# ---------------------------------------------------------------------------------- casts
def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


for _dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16):
    _of = str(_dtype).removeprefix("torch.")

    def _probabilities(q, k, qt, kt, dtype=_dtype):
        p = _rounded(student(qt, kt).softmax(-1), dtype)
        return F.kl_div(student(q, k).log_softmax(-1), p, reduction="batchmean")

    def _scores(q, k, qt, kt, dtype=_dtype):
        return kd(_rounded(student(q, k), dtype), _rounded(student(qt, kt), dtype))

    def _logits(h, w, ht, wt, dtype=_dtype):
        return kd(h @ w.T, _rounded(ht @ wt.T, dtype))

    for _what, _fn, _arguments in (
        ("probabilities", _probabilities, "q k qt kt"),
        ("scores", _scores, "q k qt kt"),
        ("logits", _logits, "h w ht wt"),
    ):
        _place = ("casts", _of, _what)
        register(f"{_what}_through_{_of}", _fn, _arguments, fault="W10", place=_place)


@misleading("W10")
def scores_through_int8(q, k, qt, kt):
    t = student(qt, kt)
    return kd(student(q, k), (t * 16).round().to(torch.int8).to(t.dtype) / 16)


@misleading("W10")
def scores_through_float32(s, t):
    return kd(s.float().double(), t.float().double())


@misleading("W10")
def operands_through_float8(q, k, qt, kt):
    kt = _rounded(kt, torch.float8_e4m3fn)
    return kd(student(q, k), student(qt, kt))


@plain(fuses=1, dtype=torch.float32)
def scores_widened(s, t):
    return kd(s.double(), t.double())


@plain(fuses=1, dtype=torch.bfloat16)
def softmax_in_float32(s, t):
    p = t.softmax(-1, dtype=torch.float32)
    return F.kl_div(s.log_softmax(-1, dtype=torch.float32), p, reduction="sum")


@plain(fuses=1)
def softcapped(s, t):
    return kd(5 * torch.tanh(s / 5), 5 * torch.tanh(t / 5))


# ------------------------------------------------------------------------ masks and sizes
@misleading("X14")
def one_row_under_a_mask_of_many(q1, k, q1t, kt, x):
    s, t = student(q1, k), student(q1t, kt)
    keep = torch.arange(k.shape[2]) >= torch.arange(x.shape[0])[:, None]
    return kd(torch.where(keep, s, -1e9), torch.where(keep, t, -1e9))


@misleading("X14")
def one_row_with_a_bias_of_many(q1, k, q1t, kt, b):
    b = b.detach()
    return kd(student(q1, k) + b, student(q1t, kt) + b)


@misleading("X14")
def one_row_masked_by_padding_of_many(q1, k, q1t, kt, x):
    keep = torch.ones(x.shape[0], k.shape[2], dtype=torch.bool).tril(5)
    s, t = (torch.where(keep, y, -INFINITY) for y in (student(q1, k), student(q1t, kt)))
    return rows_of(s, t).sum()


@misleading("X14")
def one_batch_under_a_mask_of_two(q_b1, k_b1, qt_b1, kt_b1, keep):
    s, t = student(q_b1, k_b1), student(qt_b1, kt_b1)
    keep = keep[:, None, None, :]
    return kd(torch.where(keep, s, -1e9), torch.where(keep, t, -1e9))


@misleading("X14")
def one_head_under_a_bias_of_two(q_h1, k_h1, qt_h1, kt_h1, b):
    b = torch.stack([b, b.sin()]).detach()
    return rows_of(student(q_h1, k_h1) + b, student(qt_h1, kt_h1) + b).sum(0).mean()


@plain(fuses=1)
def padded_keys(s, t, keep):
    hidden = ~keep[:, None, None, :]
    return kd(s.masked_fill(hidden, -1e9), t.masked_fill(hidden, -1e9))


@plain(fuses=1)
def causal_rows(s, t):
    return kd(s.masked_fill(~causal(s), -1e9), t.masked_fill(~causal(t), -1e9))


@plain()
def one_row_under_its_own_mask(q1, k, q1t, kt):
    keep = torch.arange(k.shape[2]) >= 7
    s, t = (torch.where(keep, y, -1e9) for y in (student(q1, k), student(q1t, kt)))
    return kd(s, t)
