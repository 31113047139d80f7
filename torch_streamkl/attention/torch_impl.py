"""Implements attention in plain torch, block by block: the CPU's path, in bounded memory anywhere.

Forward streams blocks of keys through the row state; where the functional is not linear in the
log-probabilities a second pass sums it (NOTE [One pass or two] in program/divergences.py).
Backward recomputes the probabilities block by block. Beyond inputs and gradients the memory is a
few blocks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.attention.problem import (
    AttentionProblem,
    RowStatistics,
    Side,
    bottom_right_offset,
)
from torch_streamkl.cpu import elementwise
from torch_streamkl.divergences.row_state import (
    RowState,
    far_below,
    finish,
    masked_keys_state,
    merge,
    state_of_scores,
    without_infinity,
)
from torch_streamkl.launches.launch import StreamingBlocks, torch_blocks
from torch_streamkl.program.divergence_forms import Bilinear


@dataclass(frozen=True)
class Rows:
    """One block of query rows: ranges over batch, student heads and queries."""

    batch: slice
    heads: slice
    queries: slice

    def of(self, x: Tensor) -> Tensor:
        return x[self.batch, self.heads, self.queries]


@dataclass
class RowGradient:
    """The gradients to the values of a block of rows [batch, heads, queries, 1]."""

    grad: Tensor
    has_zeros: bool  # may have them


@dataclass
class ScoreBlock:
    """Scores of one side for a block of rows and keys, masked, and d(score)/d(q.k)."""

    scores: Tensor  # [batch, heads, queries, keys]
    slope: Tensor | float
    is_finite: bool  # known of those of allowed keys


@dataclass
class Mask:
    """Marks the allowed keys of a block, [batch or 1, heads or 1, queries or 1, keys or 1]."""

    allowed: Tensor

    @functools.cached_property
    def limit(self) -> Tensor:
        """Returns inf where a key is allowed, -inf elsewhere."""
        return elementwise.limits(self.allowed)


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
    blocks = torch_blocks(problem)
    left = list(_row_blocks(problem, blocks))
    if problem.head_mean:
        for rows in left:
            _head_mean_lse(problem, blocks, rows, _teacher_rows(problem, rows), stats)
    else:
        left = _first_pass(problem, blocks, left, value, stats)
    for rows in left:
        _second_pass(problem, blocks, rows, _teacher_rows(problem, rows), value, stats)


def _first_pass(
    problem: AttentionProblem,
    blocks: StreamingBlocks,
    row_blocks: list[Rows],
    value: Tensor,
    stats: RowStatistics,
) -> list[Rows]:
    """Log-sum-exps, and values and sums where they have a closed form; the blocks without one."""
    functional = problem.functional
    guard, form = functional.guarded, functional.closed_form or Bilinear()
    state = RowState.allocate(value)
    low_t, low_s = value.new_full((2, *value.shape), math.inf).unbind(0)
    num_allowed = torch.zeros_like(value)
    for rows in row_blocks:
        lowest = None if guard is None else (rows.of(low_t), rows.of(low_s))
        found = _row_state(problem, blocks, rows, form, lowest, rows.of(num_allowed))
        for whole, piece in zip(state.tensors(), found.tensors(), strict=True):
            rows.of(whole).copy_(piece)
    if problem.mask_value != -math.inf:
        state, below = _with_masked_keys(problem, state, num_allowed, form)
        low_t.masked_fill_(below, -math.inf)
        low_s.masked_fill_(below, -math.inf)
    sums = finish(state, form, _sink_of(problem.student), _sink_of(problem.teacher))
    stats.student_lse.copy_(sums.student_lse)
    stats.teacher_lse.copy_(sums.teacher_lse)
    if functional.closed_form is None:
        return row_blocks
    value.copy_(sums.value)
    stats.student_delta.copy_(sums.student_delta)
    stats.teacher_delta.copy_(sums.teacher_delta)
    if guard is None:
        return []
    above = low_t - sums.teacher_lse >= guard.teacher_floor
    above &= low_s - sums.student_lse >= guard.student_floor
    return [rows for rows in row_blocks if not bool(rows.of(above).all())]


def _row_state(
    problem: AttentionProblem,
    blocks: StreamingBlocks,
    rows: Rows,
    form: Bilinear,
    lowest: tuple[Tensor, Tensor] | None,
    num_allowed: Tensor,
) -> RowState:
    """Row state over the allowed keys.

    Updates the rows' lowest teacher and student scores where asked, and, where the others have a
    finite score, the number of allowed keys.
    """
    state: RowState | None = None
    for keys in _key_blocks(problem, blocks, rows):
        mask = _mask_of(problem, rows, keys)
        t = score_block(problem.teacher, problem, rows, keys, mask)
        s = score_block(problem.student, problem, rows, keys, mask)
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
    """State with the keys that are not allowed counted in, and the rows where they were."""
    absent = problem.seqlen_k - num_allowed
    fill_t = _masked_fill_value(problem, problem.teacher, num_allowed)
    fill_s = _masked_fill_value(problem, problem.student, num_allowed)
    if problem.functional.absent == 0.0:
        absent.masked_fill_(far_below(state, fill_t, fill_s), 0.0)
    return merge(state, masked_keys_state(fill_t, fill_s, absent), form), absent > 0


def _count(mask: Mask | None, keys: slice, rows: Rows) -> Tensor | int:
    """Allowed keys of a block, per row."""
    if mask is None:
        return keys.stop - keys.start
    copies = (keys.stop - keys.start) // mask.allowed.shape[-1]  # it may broadcast over keys
    return _per_head(mask.allowed, rows.heads.stop - rows.heads.start).sum(-1) * copies


def _masked_fill_value(problem: AttentionProblem, side: Side, num_allowed: Tensor) -> Tensor:
    """Score of the keys that are not allowed.

    Without a sink a row of only those may as well have 0 (see reference.py).
    """
    if side.sink is not None:
        return torch.full_like(num_allowed, problem.mask_value)
    return torch.where(num_allowed > 0, problem.mask_value, 0.0).to(num_allowed.dtype)


def _lowest(scores: Tensor, mask: Mask | None) -> Tensor:
    return (
        scores if mask is None else torch.maximum(scores, -_per_head(mask.limit, scores.shape[1]))
    ).amin(-1)


def _head_mean_lse(
    problem: AttentionProblem,
    blocks: StreamingBlocks,
    rows: Rows,
    teacher_rows: Rows,
    stats: RowStatistics,
) -> None:
    """Log-sum-exps of the student's heads and of every teacher head of their groups."""
    sides = [(problem.student, rows, stats.student_lse)]
    if problem.teacher_lse is None:
        sides.append((problem.teacher, teacher_rows, stats.teacher_lse))
    else:
        teacher_rows.of(stats.teacher_lse).copy_(teacher_rows.of(problem.teacher_lse))
    for side, side_rows, out in sides:
        lse = torch.full_like(side_rows.of(out), -math.inf)
        num_allowed = torch.zeros_like(lse)
        for keys in _key_blocks(problem, blocks, rows):
            mask = _mask_of(problem, rows, keys)
            block = score_block(side, problem, side_rows, keys, mask).scores
            lse = torch.logaddexp(lse, torch.logsumexp(block, dim=-1))
            num_allowed += _count(mask, keys, side_rows)
        if problem.mask_value != -math.inf:
            lse = torch.logaddexp(
                lse,
                torch.log(problem.seqlen_k - num_allowed)
                + _masked_fill_value(problem, side, num_allowed),
            )
        sink = _sink_of(side)
        if sink is not None:
            lse = torch.logaddexp(lse, sink[side_rows.heads].expand_as(lse))
        side_rows.of(out).copy_(lse)


def _second_pass(
    problem: AttentionProblem,
    blocks: StreamingBlocks,
    rows: Rows,
    teacher_rows: Rows,
    value: Tensor,
    stats: RowStatistics,
) -> None:
    """Sums f, h and g with the log-sum-exps of the first pass."""
    lse_s = without_infinity(rows.of(stats.student_lse))
    lse_t = without_infinity(teacher_rows.of(stats.teacher_lse))
    total, h_total = torch.zeros_like(lse_s), torch.zeros_like(lse_s)
    g_total = torch.zeros_like(lse_t)
    num_allowed = torch.zeros_like(lse_s)
    for keys in _key_blocks(problem, blocks, rows):
        mask = _mask_of(problem, rows, keys)
        log_t = _log_probabilities(
            problem.teacher, problem, teacher_rows, keys, mask, lse_t
        ).scores
        log_s = _log_probabilities(problem.student, problem, rows, keys, mask, lse_s).scores
        f, h, g = deltas(problem, log_t, log_s, mask)
        total += f.sum(-1)
        h_total += h.sum(-1)
        g_total += g.sum(-1)
        num_allowed += _count(mask, keys, rows)
    if problem.mask_value != -math.inf:
        # the keys that are not allowed all look like this one
        absent = problem.seqlen_k - num_allowed
        log_t, log_s = (
            (
                _per_head(_masked_fill_value(problem, side, num_allowed), lse.shape[1]) - lse
            ).unsqueeze(-1)
            for side, lse in ((problem.teacher, lse_t), (problem.student, lse_s))
        )
        f, h, g = (
            x.squeeze(-1) for x in deltas(problem, log_t, log_s, Mask((absent > 0).unsqueeze(-1)))
        )
        total += f * absent
        h_total += h * absent
        g_total += g * _per_head(absent, g.shape[1])
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
    P, S = elementwise.exp(log_t), elementwise.exp(log_s)
    return {"P": P, "S": S, "logP": log_t, "logS": log_s}


def _per_teacher_head(
    problem: AttentionProblem, g: Tensor, log_t: Tensor, variables: dict[str, Tensor]
) -> Tensor:
    """g for every teacher head: d logP / d logP_head = P_head / (P heads) is a head's share."""
    if not problem.head_mean:
        return g
    mean = variables["logP"].clamp_min(-1e30).unsqueeze(2)
    share = (log_t.unflatten(1, (g.shape[1], -1)) - mean).exp()
    return (share * (g / share.shape[2]).unsqueeze(2)).flatten(1, 2)


def _where_allowed(mask: Mask, x: Tensor) -> Tensor:
    return torch.where(_per_head(mask.allowed, x.shape[1]), x, torch.zeros_like(x))


# to student_q, student_k, teacher_q, teacher_k, None where not needed
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class NeedsGrad:
    """Says which gradients a backward pass computes: the output mask."""

    student_q: bool
    student_k: bool
    teacher_q: bool
    teacher_k: bool

    @property
    def student(self) -> bool:
        return self.student_q or self.student_k

    @property
    def teacher(self) -> bool:
        return self.teacher_q or self.teacher_k


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


def zero_sums(problem: AttentionProblem, needs_grad: NeedsGrad) -> list[Tensor | None]:
    """Allocates zeros to which gradients are added, in the order of `Gradients`."""
    flags = (
        needs_grad.student_q,
        needs_grad.student_k,
        needs_grad.teacher_q,
        needs_grad.teacher_k,
    )
    return [
        x.new_zeros(x.shape, dtype=problem.compute_dtype) if w else None
        for x, w in zip(problem.queries_and_keys, flags, strict=True)
    ]


def in_dtypes_of_inputs(problem: AttentionProblem, sums: list[Tensor | None]) -> Gradients:
    """Returns gradients of their sums."""
    a, b, c, d = (
        None if x is None else x.to(like.dtype)
        for x, like in zip(sums, problem.queries_and_keys, strict=True)
    )
    return a, b, c, d


def sums_of_sequence(sums: list[Tensor | None], rows: slice, keys: slice) -> list[Tensor | None]:
    """Returns views of the sums that one of several packed sequences adds to."""
    ranges = (rows, keys, rows, keys)
    return [None if x is None else x[:, :, r] for x, r in zip(sums, ranges, strict=True)]


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
    blocks = torch_blocks(problem)
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
    for rows in _row_blocks(problem, blocks):
        teacher_rows = _teacher_rows(problem, rows)
        row_grad = RowGradient(rows.of(grad).unsqueeze(-1), has_zeros)
        lse_s, lse_t = rows.of(all_lse_s), teacher_rows.of(all_lse_t)
        student_delta = rows.of(stats.student_delta).unsqueeze(-1)
        teacher_delta = teacher_rows.of(stats.teacher_delta).unsqueeze(-1)
        for keys in _key_blocks(problem, blocks, rows):
            mask = _mask_of(problem, rows, keys)
            block_t = _log_probabilities(problem.teacher, problem, teacher_rows, keys, mask, lse_t)
            block_s = _log_probabilities(problem.student, problem, rows, keys, mask, lse_s)
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
                    RowGradient(_per_head(row_grad.grad, g.shape[1]), has_zeros),
                    *sums[2:],
                )


def _plain_gradient(
    problem: AttentionProblem, log_t: Tensor, log_s: Tensor, student_delta: Tensor
) -> Tensor:
    """h - S H where h = c P, or 0 below the student's floor; overwrites both."""
    floor, form = problem.functional.plain_student_floor, problem.functional.closed_form
    assert floor is not None and form is not None
    ds = elementwise.exp_(log_t).mul_(form.ts)
    if floor > -math.inf and bool(log_s.amin() < floor):
        ds.masked_fill_(log_s < floor, 0.0)
    return ds.addcmul_(elementwise.exp_(log_s), student_delta, value=-1)


def _add_gradient(
    problem: AttentionProblem,
    side: Side,
    rows: Rows,
    keys: slice,
    d_score: Tensor,
    slope: Tensor | float,
    row_grad: RowGradient,
    dq: Tensor | None,
    dk: Tensor | None,
) -> None:
    """Add what a block contributes to dQ and dK; overwrites ``d_score``."""
    d_dot = d_score.mul_(row_grad.grad * (side.scale / problem.temperature))
    if row_grad.has_zeros:
        d_dot.masked_fill_(row_grad.grad == 0, 0.0)
    if isinstance(slope, Tensor):
        d_dot.mul_(slope)
    kv_heads = _kv_heads(side, rows)
    folded = d_dot.unflatten(1, (kv_heads.stop - kv_heads.start, -1)).flatten(
        2, 3
    )  # [b, kv, g * queries, keys]
    if dq is not None:
        k = side.k[rows.batch, kv_heads, keys].to(d_dot.dtype)
        rows.of(dq).add_((folded @ k).reshape(rows.of(dq).shape))
    if dk is not None:
        dk[rows.batch, kv_heads, keys].add_(
            folded.transpose(-1, -2) @ _folded_queries(side, rows, d_dot.dtype)
        )


def score_block(
    side: Side, problem: AttentionProblem, rows: Rows, keys: slice, mask: Mask | None
) -> ScoreBlock:
    """Returns scores of a block, -inf where a key is not allowed."""
    dtype = problem.compute_dtype
    kv_heads = _kv_heads(side, rows)
    k = side.k[rows.batch, kv_heads, keys].to(dtype)
    x = _folded_queries(side, rows, dtype) @ k.transpose(-1, -2)  # [b, kv, g * queries, keys]
    shape = (
        x.shape[0],
        rows.heads.stop - rows.heads.start,
        rows.queries.stop - rows.queries.start,
        x.shape[-1],
    )
    x = x.view(shape).mul_(side.scale)
    slope: Tensor | float = 1.0
    if side.softcap:
        x.div_(side.softcap).tanh_()
        slope = 1.0 - x * x
        x.mul_(side.softcap)
    if side.bias is not None:
        x.add_(_broadcast_block(side.bias, rows, keys).to(dtype))
    if side.alibi_slopes is not None:
        offset = bottom_right_offset(problem.seqlen_q, problem.seqlen_k)
        i = torch.arange(rows.queries.start, rows.queries.stop, device=x.device)[:, None] + offset
        j = torch.arange(keys.start, keys.stop, device=x.device)[None, :]
        x.sub_(side.alibi_slopes[rows.heads].to(dtype)[:, None, None] * (i - j).abs().to(dtype))
    if problem.temperature != 1.0:
        x.div_(problem.temperature)
    is_finite = side.bias is None
    if mask is not None:
        is_finite = elementwise.mask_(x, _per_head(mask.limit, x.shape[1]))
    return ScoreBlock(x, slope, is_finite)


def _log_probabilities(
    side: Side,
    problem: AttentionProblem,
    rows: Rows,
    keys: slice,
    mask: Mask | None,
    lse: Tensor,
) -> ScoreBlock:
    """Scores minus log-sum-exps, those `without_infinity`."""
    block = score_block(side, problem, rows, keys, mask)
    block.scores.sub_(lse.unsqueeze(-1))
    return block


def _folded_queries(side: Side, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Queries [batch, kv_heads, group * queries, head_dim]: grouped heads (GQA) as rows."""
    kv_heads = _kv_heads(side, rows)
    q = rows.of(side.q).to(dtype)
    return q.unflatten(1, (kv_heads.stop - kv_heads.start, -1)).flatten(2, 3)


def _kv_heads(side: Side, rows: Rows) -> slice:
    group = side.num_heads // side.num_kv_heads
    return slice(rows.heads.start // group, -(-rows.heads.stop // group))


def _teacher_rows(problem: AttentionProblem, rows: Rows) -> Rows:
    ratio = problem.teacher.num_heads // problem.num_heads
    return Rows(rows.batch, slice(rows.heads.start * ratio, rows.heads.stop * ratio), rows.queries)


def _sink_of(side: Side) -> Tensor | None:
    """[heads, 1], which broadcasts to rows."""
    if side.sink is None:
        return None
    return side.sink.to(torch.promote_types(side.sink.dtype, torch.float32))[:, None]


def _row_blocks(problem: AttentionProblem, blocks: StreamingBlocks) -> Iterator[Rows]:
    for b in range(0, problem.batch, blocks.batch):
        for h in range(0, problem.num_heads, blocks.heads):
            for i in range(0, problem.seqlen_q, blocks.queries):
                yield Rows(
                    slice(b, min(b + blocks.batch, problem.batch)),
                    slice(h, min(h + blocks.heads, problem.num_heads)),
                    slice(i, min(i + blocks.queries, problem.seqlen_q)),
                )


def _key_blocks(problem: AttentionProblem, blocks: StreamingBlocks, rows: Rows) -> Iterator[slice]:
    """Blocks of keys that the window admits for at least one of the rows."""
    offset = bottom_right_offset(problem.seqlen_q, problem.seqlen_k)
    start, stop = 0, problem.seqlen_k
    if problem.window_left is not None:
        start = max(start, rows.queries.start + offset - problem.window_left)
    if problem.window_right is not None:
        stop = min(stop, rows.queries.stop - 1 + offset + problem.window_right + 1)
    for j in range(start, stop, blocks.keys):
        yield slice(j, min(j + blocks.keys, stop))


def _mask_of(problem: AttentionProblem, rows: Rows, keys: slice) -> Mask | None:
    """The mask of a block, or None when every key is allowed."""
    offset = bottom_right_offset(problem.seqlen_q, problem.seqlen_k)
    first, last = rows.queries.start + offset, rows.queries.stop - 1 + offset
    left, right = problem.window_left, problem.window_right
    crosses_left = left is not None and keys.start < last - left
    crosses_right = right is not None and keys.stop - 1 > first + right
    allowed = None
    if crosses_left or crosses_right:
        device = problem.student.q.device
        i = torch.arange(first, last + 1, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)[None, :]
        if crosses_left and left is not None:
            allowed = j >= i - left
        if crosses_right and right is not None:
            below = j <= i + right
            allowed = below if allowed is None else allowed & below
        assert allowed is not None
        allowed = allowed[None, None]
    if problem.key_lengths is not None:
        j = torch.arange(keys.start, keys.stop, device=problem.key_lengths.device)
        within = j < problem.key_lengths[rows.batch, None, None, None]
        allowed = within if allowed is None else allowed & within
    if problem.mask is not None:
        admitted = _broadcast_block(problem.mask, rows, keys)
        allowed = admitted if allowed is None else allowed & admitted
    return None if allowed is None else Mask(allowed)


def _broadcast_block(x: Tensor, rows: Rows, keys: slice) -> Tensor:
    """The block of a tensor that broadcasts to [batch, heads, seqlen_q, seqlen_k]."""
    index = (rows.batch, rows.heads, rows.queries, keys)
    return x[tuple(r if size > 1 else slice(None) for r, size in zip(index, x.shape, strict=True))]


def _per_head(allowed: Tensor, num_heads: int) -> Tensor:
    if allowed.shape[1] in (1, num_heads):
        return allowed
    return allowed.repeat_interleave(num_heads // allowed.shape[1], dim=1)
