"""Keeps the running state of a row: what one pass over keys accumulates, and how states merge.

Per side a maximum m and a sum of exponentials l; per direction a moment relative to the maxima,

    a = sum_j exp(t_j - m_t) (tt (t_j - m_t) + ts (s_j - m_s)),    b likewise weighted by the
    student.

Keeping moments relative to the maxima costs nothing (both differences are computed for the
exponentials anyway) and avoids the cancellation of two large numbers. Two states over disjoint
keys merge exactly, so a row may be split over blocks, programs, GPUs or shards of a vocabulary.
`kernels/row_state.py` holds the same functions for Triton.

NOTE [Masked keys far below]
Masks that are filled with a finite number leave keys in the softmax, and their probabilities lie
below every clamp. Where the number is FAR below the row's maximum on both sides these are exactly
0, and a functional that is 0 there (``absent``; h and g are, then) sums to the same without the
keys. They are left out, as if the number were -inf: a padded row keeps its closed form, and
finfo.min does not overflow in moments. Sinks only make probabilities smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.cpu import elementwise
from torch_streamkl.program.divergence_forms import Bilinear

LSES, DELTAS = ("student_lse", "teacher_lse"), ("student_delta", "teacher_delta")
FAR = 1e3  # nats: the exponential of its negative is 0 in every dtype we compute in


@dataclass
class RowState:
    """Holds the state of a set of rows; every tensor has the rows' shape."""

    m_t: Tensor
    l_t: Tensor
    m_s: Tensor
    l_s: Tensor
    a: Tensor
    b: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.m_t, self.l_t, self.m_s, self.l_s, self.a, self.b)

    @staticmethod
    def allocate(like: Tensor) -> RowState:
        """Allocates uninitialised tensors, each with memory of its own (those of `empty` share
        theirs).
        """
        return RowState(*(torch.empty_like(like) for _ in fields(RowState)))

    @staticmethod
    def empty(shape: tuple[int, ...], like: Tensor) -> RowState:
        low = like.new_full(shape, -math.inf)
        zero = like.new_zeros(shape)
        return RowState(low, zero, low, zero, zero, zero)


def state_of_scores(
    t: Tensor,
    s: Tensor,
    form: Bilinear,
    *,
    finite: bool,
    has_masked: bool = False,
    overwrite: bool = True,
) -> RowState:
    """Returns the state of a block of scores [..., rows, keys]; overwrites both unless told not
    to.

    ``finite`` promises that no score is -inf but those that both sides have at the same keys
    where it ``has_masked`` ones, which saves the guards.
    """
    m_t, m_s = t.amax(-1), s.amax(-1)
    if not finite or has_masked:
        base_t, base_s = without_infinity(m_t), without_infinity(m_s)
    else:
        base_t, base_s = m_t, m_s
    base_t, base_s = base_t.unsqueeze(-1), base_s.unsqueeze(-1)
    dt, ds = (t.sub_(base_t), s.sub_(base_s)) if overwrite else (t - base_t, s - base_s)
    zero = torch.zeros_like(m_t)
    if form.has_teacher_moment and not form.has_student_moment:
        et = elementwise.exp(dt)
        a = _moment(et, dt, ds, form.tt, form.ts, finite, has_masked, out=dt)
        return RowState(m_t, et.sum(-1), m_s, elementwise.exp_(ds).sum(-1), a, zero)
    et, es = elementwise.exp(dt), elementwise.exp(ds)
    how = (finite, has_masked)
    a = _moment(et, dt, ds, form.tt, form.ts, *how) if form.has_teacher_moment else zero
    b = _moment(es, dt, ds, form.st, form.ss, *how) if form.has_student_moment else zero
    return RowState(m_t, et.sum(-1), m_s, es.sum(-1), a, b)


def _moment(
    weight: Tensor,
    dt: Tensor,
    ds: Tensor,
    ct: float,
    cs: float,
    finite: bool,
    has_masked: bool,
    out: Tensor | None = None,
) -> Tensor:
    # sum(w * (ct dt + cs ds)); w = 0 next to an infinite difference contributes 0
    if ct == -cs:
        x = torch.sub(dt, ds, out=out)
        if ct != 1.0:
            x.mul_(ct)
    elif ct == 0.0:
        x = ds * cs
    elif cs == 0.0:
        x = dt * ct
    else:
        x = (dt * ct).add_(ds, alpha=cs)
    if finite and has_masked:
        x.nan_to_num_(0.0)  # faster than to look for weights of 0
    x.mul_(weight)
    if not finite:
        x.masked_fill_(weight == 0, 0.0)
    return x.sum(-1)


def merge(x: RowState, y: RowState, form: Bilinear) -> RowState:
    """Returns the state of the union of two disjoint sets of keys."""
    m_t, m_s = torch.maximum(x.m_t, y.m_t), torch.maximum(x.m_s, y.m_s)
    base_t, base_s = without_infinity(m_t), without_infinity(m_s)
    l_t = l_s = a = b = torch.zeros_like(m_t)
    for z in (x, y):
        shift_t, shift_s = z.m_t - base_t, z.m_s - base_s
        w_t, w_s = shift_t.exp(), shift_s.exp()
        l_t = l_t + z.l_t * w_t
        l_s = l_s + z.l_s * w_s
        if form.has_teacher_moment:
            a = a + _rebased(z.a, z.l_t, w_t, form.tt, shift_t, form.ts, shift_s)
        if form.has_student_moment:
            b = b + _rebased(z.b, z.l_s, w_s, form.st, shift_t, form.ss, shift_s)
    return RowState(m_t, l_t, m_s, l_s, a, b)


def _rebased(
    moment: Tensor,
    row_sum: Tensor,
    weight: Tensor,
    ct: float,
    shift_t: Tensor,
    cs: float,
    shift_s: Tensor,
) -> Tensor:
    shift = torch.zeros_like(row_sum)
    if ct:
        shift = shift + ct * shift_t
    if cs:
        shift = shift + cs * shift_s
    # A weight that underflows makes every probability of these keys 0: an infinite moment, of keys
    # that the other side excludes, must not survive it.
    vanishes = (row_sum == 0) | (weight == 0)
    return torch.where(vanishes, torch.zeros_like(row_sum), (moment + row_sum * shift) * weight)


def masked_keys_state(fill_t: Tensor, fill_s: Tensor, count: Tensor) -> RowState:
    """Returns the state of ``count`` keys of each row that all have the same score, one on each
    side.
    """
    fill_t, fill_s = (torch.where(count > 0, level, -math.inf) for level in (fill_t, fill_s))
    zero = torch.zeros_like(count)
    return RowState(fill_t, count, fill_s, count, zero, zero)


def far_below(state: RowState, fill_t: Tensor, fill_s: Tensor) -> Tensor:
    """Marks rows whose probabilities of keys with these scores are 0.

    NOTE [Masked keys far below].
    """
    return (state.m_t - fill_t >= FAR) & (state.m_s - fill_s >= FAR)


@dataclass
class RowSums:
    """Holds log-sum-exps, values and deltas of rows: sum_j df/dlogS_j and sum_j df/dlogP_j.

    The rests are what rounding has taken from the log-sum-exps: NOTE [Rounding of log-sum-exps] in
    linear/problem.py.
    """

    student_lse: Tensor
    teacher_lse: Tensor
    value: Tensor
    student_delta: Tensor
    teacher_delta: Tensor
    student_rest: Tensor
    teacher_rest: Tensor

    def copy_to(self, out: Any, *names: str) -> None:
        """Copies those of these names to where an operator returns them."""
        for name in names:
            getattr(out, name).copy_(getattr(self, name))


def finish(
    state: RowState,
    form: Bilinear,
    student_sink: Tensor | None = None,
    teacher_sink: Tensor | None = None,
) -> RowSums:
    """Returns the closed form of a bilinear functional's row sums; a sink is one more logit in a
    denominator.

    Depths are log-sum-exps relative to the maximum: large scores must not absorb them.
    """
    if student_sink is not None or teacher_sink is not None:
        # a sink above every key becomes the maximum: exp(sink - m) must not overflow
        low, zero = torch.full_like(state.m_t, -math.inf), torch.zeros_like(state.m_t)
        levels = [
            low if sink is None else sink.expand_as(low) for sink in (teacher_sink, student_sink)
        ]
        state = merge(state, RowState(levels[0], zero, levels[1], zero, zero, zero), form)
    base_t, total_t = _denominator(state.m_t, state.l_t, teacher_sink)
    base_s, total_s = _denominator(state.m_s, state.l_s, student_sink)
    log_normalizer_t, log_normalizer_s = _log_normalizer(total_t), _log_normalizer(total_s)
    # Where P is nearly S, one logarithm: two that are nearly equal would leave their roundings.
    # Elsewhere a ratio may overflow, and their difference is good.
    ratio = total_t / total_s
    near = (ratio > 0.5) & (ratio < 2.0)
    log_normalizer_diff = torch.where(near, torch.log(ratio), log_normalizer_t - log_normalizer_s)
    scale_t, scale_s = torch.exp(-log_normalizer_t), torch.exp(-log_normalizer_s)
    row_sum_t, row_sum_s = state.l_t * scale_t, state.l_s * scale_s
    zero = torch.zeros_like(base_t)
    e_t = e_s = (
        zero  # E_P[tt logP + ts logS], E_S[st logP + ss logS], over the row sum of the keys
    )
    if form.has_teacher_moment:
        e_t = state.a * scale_t - row_sum_t * _combine(
            form.tt, form.ts, log_normalizer_t, log_normalizer_s, log_normalizer_diff
        )
        e_t = torch.where(row_sum_t == 0, zero, e_t)
    if form.has_student_moment:
        e_s = state.b * scale_s - row_sum_s * _combine(
            form.st, form.ss, log_normalizer_t, log_normalizer_s, log_normalizer_diff
        )
        e_s = torch.where(row_sum_s == 0, zero, e_s)
    return RowSums(
        student_lse=_lse(base_s, log_normalizer_s, state.l_s, student_sink),
        teacher_lse=_lse(base_t, log_normalizer_t, state.l_t, teacher_sink),
        student_rest=rest_of(base_s, log_normalizer_s),
        teacher_rest=rest_of(base_t, log_normalizer_t),
        value=e_t + e_s + form.t * row_sum_t + form.s * row_sum_s,
        student_delta=e_s + form.ts * row_sum_t + (form.ss + form.s) * row_sum_s,
        teacher_delta=e_t + (form.tt + form.t) * row_sum_t + form.st * row_sum_s,
    )


def _denominator(m: Tensor, row_sum: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    base = without_infinity(m)
    return base, row_sum if sink is None else row_sum + torch.exp(sink - base)


def _log_normalizer(total: Tensor) -> Tensor:
    return torch.where(total == 0, torch.zeros_like(total), torch.log(total))


def _lse(base: Tensor, log_normalizer: Tensor, row_sum: Tensor, sink: Tensor | None) -> Tensor:
    lse = base + log_normalizer
    return (
        lse
        if sink is not None
        else torch.where(row_sum == 0, torch.full_like(lse, -math.inf), lse)
    )


def rest_of(base: Tensor, log_normalizer: Tensor) -> Tensor:
    """Returns the rounding error of ``base + log_normalizer``."""
    return (base - (base + log_normalizer)) + log_normalizer


def _combine(
    x: float,
    y: float,
    log_normalizer_t: Tensor,
    log_normalizer_s: Tensor,
    log_normalizer_diff: Tensor,
) -> Tensor:
    """Returns x log_normalizer_t + y log_normalizer_s, using their difference, which is known more
    exactly.
    """
    if x == 0.0:
        return y * log_normalizer_s
    if y == 0.0:
        return x * log_normalizer_t
    return (
        x * log_normalizer_diff
        if x == -y
        else x * log_normalizer_diff + (x + y) * log_normalizer_s
    )


def without_infinity(m: Tensor) -> Tensor:
    """Returns a maximum or log-sum-exp of rows, 0 for those whose scores are all -inf."""
    return m.masked_fill(m == -math.inf, 0.0)
