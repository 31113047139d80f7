"""Implements `attention_kl` in plain torch, block by block: bounded memory on every device.

The forward streams blocks of keys through the row state. If the functional is not linear in the
log-probabilities, a second pass sums it (NOTE [One pass or two] in program/divergences.py). The
backward recomputes the probabilities block by block. Beyond inputs and gradients, the memory is a
few blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.attention.problem import (
    AttentionProblem,
    Gradients,
    NeedsGrad,
    RowStatistics,
    Side,
    in_dtypes_of_inputs,
    sums_of_sequence,
    zero_sums,
)
from torch_streamkl.attention.torch_scores import (
    Blocks,
    Mask,
    QueryBlock,
    folded_queries,
    per_head,
)
from torch_streamkl.cpu import elementwise
from torch_streamkl.divergences.row_state import (
    DELTAS,
    LSES,
    RowState,
    far_below,
    finish,
    masked_keys_state,
    merge,
    rest_of,
    state_of_scores,
    without_infinity,
)
from torch_streamkl.program.divergence_forms import Bilinear
from torch_streamkl.program.divergences import variables_of


@dataclass
class RowGradient:
    """Holds the gradients to the values of a block of rows [batch, heads, queries, 1]."""

    grad: Tensor
    has_zeros: bool  # may have them


@dataclass(frozen=True)
class LseRemainders:
    """Holds the rounding errors of the log-sum-exps in RowStatistics, in the same shapes."""

    student: Tensor
    teacher: Tensor


def forward(problem: AttentionProblem) -> tuple[Tensor, RowStatistics]:
    """Returns per-row values and what the backward needs, in the compute dtype."""
    value, stats = RowStatistics.allocate(problem)
    if problem.is_packed:
        for row_range, _, sequence in problem.sequences():
            _forward_sequence(sequence, value[:, :, row_range], stats.at_rows(row_range))
    else:
        _forward_sequence(problem, value, stats)
    return value, stats


def _forward_sequence(problem: AttentionProblem, value: Tensor, stats: RowStatistics) -> None:
    # What is per row is computed for all rows at once: for the rows of one block its many small
    # operations would take longer than those on the scores.
    blocks = Blocks(problem)
    left = list(blocks.rows())
    # the values are summed with what rounding takes from the log-sum-exps, which is not kept
    rests = LseRemainders(torch.zeros_like(stats.student_lse), torch.zeros_like(stats.teacher_lse))
    if problem.head_mean:
        for rows in left:
            _head_mean_lse(blocks, rows, stats, rests)
    else:
        left = _first_pass(blocks, left, value, stats, rests)
    for rows in left:
        _second_pass(blocks, rows, value, stats, rests)


def _first_pass(
    blocks: Blocks,
    row_blocks: list[QueryBlock],
    value: Tensor,
    stats: RowStatistics,
    rests: LseRemainders,
) -> list[QueryBlock]:
    """Computes log-sum-exps, values and deltas with a closed form; lists blocks without one."""
    problem, functional = blocks.problem, blocks.problem.functional
    guard, form = functional.guarded, functional.closed_form or Bilinear()
    state = RowState.allocate(value)
    low_t, low_s = value.new_full((2, *value.shape), math.inf).unbind(0)
    num_allowed = torch.zeros_like(value)
    for rows in row_blocks:
        lowest = None if guard is None else (rows.of(low_t), rows.of(low_s))
        found = _row_state(blocks, rows, form, lowest, rows.of(num_allowed))
        for whole, piece in zip(state.tensors(), found.tensors(), strict=True):
            rows.of(whole).copy_(piece)
    if problem.mask_value != -math.inf:
        state, below = _with_masked_keys(problem, state, num_allowed, form)
        low_t.masked_fill_(below, -math.inf)
        low_s.masked_fill_(below, -math.inf)
    sums = finish(state, form, _sink_of(problem.student), _sink_of(problem.teacher))
    sums.copy_to(stats, *LSES)
    rests.student.copy_(sums.student_rest)
    rests.teacher.copy_(sums.teacher_rest)
    if functional.closed_form is None:
        return row_blocks
    value.copy_(sums.value)
    sums.copy_to(stats, *DELTAS)
    if guard is None:
        return []
    above = low_t - sums.teacher_lse >= guard.teacher_floor
    above &= low_s - sums.student_lse >= guard.student_floor
    return [rows for rows in row_blocks if not bool(rows.of(above).all())]


def _row_state(
    blocks: Blocks,
    rows: QueryBlock,
    form: Bilinear,
    lowest: tuple[Tensor, Tensor] | None,
    num_allowed: Tensor,
) -> RowState:
    """Computes the row state over the allowed keys.

    If asked, it updates the rows' lowest teacher and student scores, and the number of allowed
    keys for rows whose other keys have a finite score.
    """
    problem = blocks.problem
    state: RowState | None = None
    for keys, mask in blocks.keys(rows):
        t = blocks.scores(problem.teacher, rows, keys, mask)
        s = blocks.scores(problem.student, rows, keys, mask)
        if lowest is not None:
            for low, x in zip(lowest, (t, s), strict=True):
                torch.minimum(low, _lowest(x.scores, mask), out=low)
        if problem.mask_value != -math.inf:
            num_allowed += _count(mask, keys, rows)
        finite = t.is_finite and s.is_finite
        found = state_of_scores(
            t.scores, s.scores, form, finite=finite, has_masked=mask is not None
        )
        state = found if state is None else merge(state, found, form)
    return RowState.empty(tuple(num_allowed.shape), num_allowed) if state is None else state


def _with_masked_keys(
    problem: AttentionProblem, state: RowState, num_allowed: Tensor, form: Bilinear
) -> tuple[RowState, Tensor]:
    """Adds the keys that are not allowed to a state, and marks the rows that had any."""
    absent = problem.seqlen_k - num_allowed
    fill_t = _masked_fill_value(problem, problem.teacher, num_allowed)
    fill_s = _masked_fill_value(problem, problem.student, num_allowed)
    if problem.functional.absent == 0.0:
        absent.masked_fill_(far_below(state, fill_t, fill_s), 0.0)
    return merge(state, masked_keys_state(fill_t, fill_s, absent), form), absent > 0


def _count(mask: Mask | None, keys: slice, rows: QueryBlock) -> Tensor | int:
    """Counts the allowed keys of a block, per row."""
    if mask is None:
        return keys.stop - keys.start
    copies = (keys.stop - keys.start) // mask.allowed.shape[-1]  # it may broadcast over keys
    return per_head(mask.allowed, rows.heads.stop - rows.heads.start).sum(-1) * copies


def _masked_fill_value(problem: AttentionProblem, side: Side, num_allowed: Tensor) -> Tensor:
    """Returns the score of the keys that are not allowed.

    In a row of only those, without a sink, it may as well be 0 (see reference.py).
    """
    if side.sink is not None:
        return torch.full_like(num_allowed, problem.mask_value)
    # two numbers would be float32 in torch.where
    return torch.zeros_like(num_allowed).masked_fill_(num_allowed > 0, problem.mask_value)


def _lowest(scores: Tensor, mask: Mask | None) -> Tensor:
    return (
        scores if mask is None else torch.maximum(scores, -per_head(mask.limit, scores.shape[1]))
    ).amin(-1)


def _head_mean_lse(
    blocks: Blocks, rows: QueryBlock, stats: RowStatistics, rests: LseRemainders
) -> None:
    """Computes log-sum-exps of the student's heads and of all teacher heads of their groups."""
    problem, teacher_rows = blocks.problem, blocks.teacher_rows(rows)
    sides = [(problem.student, rows, stats.student_lse, rests.student)]
    if problem.teacher_lse is None:
        sides.append((problem.teacher, teacher_rows, stats.teacher_lse, rests.teacher))
    else:
        teacher_rows.of(stats.teacher_lse).copy_(teacher_rows.of(problem.teacher_lse))
    for side, side_rows, out, rest in sides:
        state = torch.full_like(side_rows.of(out), -math.inf), torch.zeros_like(side_rows.of(out))
        num_allowed = torch.zeros_like(state[0])
        for keys, mask in blocks.keys(rows):
            state = _with_scores(state, blocks.scores(side, side_rows, keys, mask).scores, 1.0)
            num_allowed += _count(mask, keys, side_rows)
        if problem.mask_value != -math.inf:
            absent = problem.seqlen_k - num_allowed
            level = _masked_fill_value(problem, side, num_allowed)
            level = torch.where(absent > 0, level, -math.inf)
            state = _with_scores(state, level.unsqueeze(-1), absent)
        sink = _sink_of(side)
        if sink is not None:
            state = _with_scores(state, sink[side_rows.heads].expand_as(state[0])[..., None], 1.0)
        high, total = state
        base, log_normalizer = without_infinity(high), total.log()
        side_rows.of(out).copy_(base + log_normalizer)
        lost = rest_of(base, log_normalizer)
        side_rows.of(rest).copy_(torch.where(lost.isfinite(), lost, 0.0))


def _with_scores(
    state: tuple[Tensor, Tensor], scores: Tensor, copies: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Adds more scores [..., keys] to a maximum and a sum of exponentials relative to it."""
    high, total = state
    higher = torch.maximum(high, scores.amax(-1))
    base = without_infinity(higher)
    added = elementwise.exp(scores - base.unsqueeze(-1)).sum(-1) * copies
    return higher, total * (high - base).exp() + added


def _second_pass(
    blocks: Blocks,
    rows: QueryBlock,
    value: Tensor,
    stats: RowStatistics,
    rests: LseRemainders,
) -> None:
    """Sums f, h and g with the log-sum-exps of the first pass."""
    problem, teacher_rows = blocks.problem, blocks.teacher_rows(rows)
    lse_s = without_infinity(rows.of(stats.student_lse))
    lse_t = without_infinity(teacher_rows.of(stats.teacher_lse))
    has_kinks = problem.functional.has_kinks
    rest_s, rest_t = rows.of(rests.student), teacher_rows.of(rests.teacher)
    total, h_total = torch.zeros_like(lse_s), torch.zeros_like(lse_s)
    g_total = torch.zeros_like(lse_t)
    num_allowed = torch.zeros_like(lse_s)
    for keys, mask in blocks.keys(rows):
        log_t = blocks.log_probabilities(problem.teacher, teacher_rows, keys, mask, lse_t).scores
        log_s = blocks.log_probabilities(problem.student, rows, keys, mask, lse_s).scores
        # a jump of the gradient is where the backward has it, whose log-probabilities are these
        as_backward = deltas(problem, log_t, log_s, mask)[1:] if has_kinks else None
        log_t.sub_(rest_t.unsqueeze(-1))
        log_s.sub_(rest_s.unsqueeze(-1))
        f, *sums = deltas(problem, log_t, log_s, mask)
        h, g = as_backward or sums
        total += f.sum(-1)
        h_total += h.sum(-1)
        g_total += g.sum(-1)
        num_allowed += _count(mask, keys, rows)
    if problem.mask_value != -math.inf:
        # the keys that are not allowed all look like this one
        absent = problem.seqlen_k - num_allowed
        log_t, log_s = (
            (
                per_head(_masked_fill_value(problem, side, num_allowed), lse.shape[1]) - lse - rest
            ).unsqueeze(-1)
            for side, lse, rest in (
                (problem.teacher, lse_t, rest_t),
                (problem.student, lse_s, rest_s),
            )
        )
        f, h, g = (
            x.squeeze(-1) for x in deltas(problem, log_t, log_s, Mask((absent > 0).unsqueeze(-1)))
        )
        total += f * absent
        h_total += h * absent
        g_total += g * per_head(absent, g.shape[1])
    rows.of(value).copy_(total)
    rows.of(stats.student_delta).copy_(h_total)
    teacher_rows.of(stats.teacher_delta).copy_(g_total)


def deltas(
    problem: AttentionProblem, log_t: Tensor, log_s: Tensor, mask: Mask | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns f, h and g of every key."""
    variables = _variables(problem, log_t, log_s)
    f, h, g = problem.functional.terms("fhg", variables)
    if mask is not None:
        f, h, g = (_where_allowed(mask, x) for x in (f, h, g))
    return f, h, _per_teacher_head(problem, g, log_t, variables)


def _variables(problem: AttentionProblem, log_t: Tensor, log_s: Tensor) -> dict[str, Tensor]:
    """Returns the values a functional is evaluated on, the teacher averaged over heads if
    asked.
    """
    if problem.head_mean:
        group = log_t.unflatten(1, (log_s.shape[1], -1))
        peak = group.amax(2, keepdim=True).clamp_min_(-1e30)
        log_t = (torch.log(elementwise.exp_(group - peak).mean(2)) + peak.squeeze(2)).contiguous()
    return variables_of(log_t, log_s, elementwise.exp)


def _per_teacher_head(
    problem: AttentionProblem, g: Tensor, log_t: Tensor, variables: dict[str, Tensor]
) -> Tensor:
    """Returns g for every teacher head: d logP / d logP_head is P_head / (P heads)."""
    if not problem.head_mean:
        return g
    mean = variables["logP"].clamp_min(-1e30).unsqueeze(2)
    share = (log_t.unflatten(1, (g.shape[1], -1)) - mean).exp()
    return (share * (g / share.shape[2]).unsqueeze(2)).flatten(1, 2)


def _where_allowed(mask: Mask, x: Tensor) -> Tensor:
    return torch.where(per_head(mask.allowed, x.shape[1]), x, torch.zeros_like(x))


def backward(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, needs_grad: NeedsGrad
) -> Gradients:
    """Returns gradients to student_q, student_k, teacher_q, teacher_k for per-row gradients
    ``grad``.
    """
    return in_dtypes_of_inputs(problem, _backward_sums(problem, stats, grad, needs_grad))


def forward_with_gradients(
    problem: AttentionProblem, row_weight: Tensor | None, needs_grad: NeedsGrad
) -> tuple[Tensor, RowStatistics, Gradients]:
    """Computes `forward`, and the gradients of the weighted sum of its values, in the compute
    dtype.
    """
    value, stats = forward(problem)
    grad = torch.ones_like(value) if row_weight is None else row_weight
    sums = _backward_sums(problem, stats, grad, needs_grad)
    return value, stats, (sums[0], sums[1], sums[2], sums[3])


def _backward_sums(
    problem: AttentionProblem, stats: RowStatistics, grad: Tensor, needs_grad: NeedsGrad
) -> list[Tensor | None]:
    sums = zero_sums(problem, needs_grad)
    if problem.is_packed:
        for rows, keys, sequence in problem.sequences():
            views = sums_of_sequence(sums, rows, keys)
            _backward_sequence(sequence, stats.at_rows(rows), grad[:, :, rows], needs_grad, views)
    else:
        _backward_sequence(problem, stats, grad, needs_grad, sums)
    return sums


def _backward_sequence(
    problem: AttentionProblem,
    stats: RowStatistics,
    grad: Tensor,
    needs_grad: NeedsGrad,
    sums: list[Tensor | None],
) -> None:
    blocks = Blocks(problem)
    grad = grad.to(problem.compute_dtype)
    is_plain = (
        problem.functional.plain_student_floor is not None
        and problem.functional.closed_form is not None
        and not needs_grad.teacher
        and not problem.head_mean
    )
    # rows that do not count add nothing, even where their own gradients are not finite
    has_zeros = grad.device.type != "cpu" or bool((grad == 0).any())
    all_lse_s = without_infinity(stats.student_lse)
    all_lse_t = without_infinity(stats.teacher_lse)
    for rows in blocks.rows():
        teacher_rows = blocks.teacher_rows(rows)
        row_grad = RowGradient(rows.of(grad).unsqueeze(-1), has_zeros)
        lse_s, lse_t = rows.of(all_lse_s), teacher_rows.of(all_lse_t)
        student_delta = rows.of(stats.student_delta).unsqueeze(-1)
        teacher_delta = teacher_rows.of(stats.teacher_delta).unsqueeze(-1)
        for keys, mask in blocks.keys(rows):
            block_t = blocks.log_probabilities(problem.teacher, teacher_rows, keys, mask, lse_t)
            block_s = blocks.log_probabilities(problem.student, rows, keys, mask, lse_s)
            if is_plain:
                slope = block_s.slope
                ds = _plain_gradient(problem, block_t.scores, block_s.scores, student_delta)
                _add_gradient(problem, problem.student, rows, keys, ds, slope, row_grad, *sums[:2])
                continue
            variables = _variables(problem, block_t.scores, block_s.scores)
            names = "h" * needs_grad.student + "g" * needs_grad.teacher
            terms = problem.functional.terms(names, variables)
            if mask is not None:
                terms = [_where_allowed(mask, x) for x in terms]
            if needs_grad.student:
                ds = torch.addcmul(terms[0], variables["S"], student_delta, value=-1)
                slope = block_s.slope
                _add_gradient(problem, problem.student, rows, keys, ds, slope, row_grad, *sums[:2])
            if needs_grad.teacher:
                g = _per_teacher_head(problem, terms[-1], block_t.scores, variables)
                own = block_t.scores.exp() if problem.head_mean else variables["P"]
                dt = torch.addcmul(g, own, teacher_delta, value=-1)
                _add_gradient(
                    problem,
                    problem.teacher,
                    teacher_rows,
                    keys,
                    dt,
                    block_t.slope,
                    RowGradient(per_head(row_grad.grad, g.shape[1]), has_zeros),
                    *sums[2:],
                )


def _plain_gradient(
    problem: AttentionProblem, log_t: Tensor, log_s: Tensor, student_delta: Tensor
) -> Tensor:
    """Computes h - S * delta with h = c P, or 0 below the student's floor; overwrites both."""
    floor, form = problem.functional.plain_student_floor, problem.functional.closed_form
    assert floor is not None and form is not None
    ds = elementwise.exp_(log_t).mul_(form.ts)
    if floor > -math.inf and bool(log_s.amin() < floor):
        ds.masked_fill_(log_s < floor, 0.0)
    return ds.addcmul_(elementwise.exp_(log_s), student_delta, value=-1)


def _add_gradient(
    problem: AttentionProblem,
    side: Side,
    rows: QueryBlock,
    keys: slice,
    d_score: Tensor,
    slope: Tensor | float,
    row_grad: RowGradient,
    dq: Tensor | None,
    dk: Tensor | None,
) -> None:
    """Adds the terms of one block to dQ and dK; overwrites ``d_score``."""
    d_dot = d_score.mul_(row_grad.grad * (side.scale / problem.temperature))
    if row_grad.has_zeros:
        d_dot.masked_fill_(row_grad.grad == 0, 0.0)
    if isinstance(slope, Tensor):
        d_dot.mul_(slope)
    kv_heads = side.kv_heads(rows.heads)
    folded = d_dot.unflatten(1, (kv_heads.stop - kv_heads.start, -1)).flatten(
        2, 3
    )  # [b, kv, g * queries, keys]
    if dq is not None:
        k = side.k[rows.batch, kv_heads, keys].to(d_dot.dtype)
        rows.of(dq).add_((folded @ k).reshape(rows.of(dq).shape))
    if dk is not None:
        dk[rows.batch, kv_heads, keys].add_(
            folded.transpose(-1, -2) @ folded_queries(side, rows, d_dot.dtype)
        )


def _sink_of(side: Side) -> Tensor | None:
    """Returns the sink of each head as [heads, 1], which broadcasts to rows."""
    if side.sink is None:
        return None
    return side.sink.to(torch.promote_types(side.sink.dtype, torch.float32))[:, None]
