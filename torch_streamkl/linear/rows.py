"""Computes rows of logits in plain torch: values, statistics, and gradients in place of logits.

The functions take the logits of a few tokens, `hidden @ weight.T` of each side. They go through
them in blocks of the vocabulary, so that temporaries stay small. `linear/triton/launches.py` does
the same on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.cpu import elementwise
from torch_streamkl.divergences.row_state import (
    DELTAS,
    LSES,
    RowState,
    finish,
    merge,
    state_of_scores,
    without_infinity,
)
from torch_streamkl.linear.problem import (
    NO_WEIGHTS,
    NOTHING,
    Head,
    LinearProblem,
    NeedsGrad,
    RowValues,
    RowWeights,
)
from torch_streamkl.program.divergence_forms import Bilinear
from torch_streamkl.program.divergences import evaluate, variables_of
from torch_streamkl.program.graph import Node
from torch_streamkl.runtime.workspace import ranges

BLOCK_ELEMENTS = 2**17  # of one temporary; about eight are alive


@dataclass
class Block:
    """Holds scores of a vocabulary block: y as the labels see it, the score, d(y)/d(logit)."""

    vocab: slice
    y: Tensor | None  # None where the side has none of the vocabulary entries
    score: Tensor
    slope: Tensor | float


def values(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    out: RowValues,
    weights: RowWeights = NO_WEIGHTS,
    needs_grad: NeedsGrad = NOTHING,
) -> None:
    """Computes values and statistics of rows from both sides' whole logits [num_tokens,
    vocab_size], and overwrites these by gradients that are needed.
    """
    functional = problem.functional
    state, hard_lse = partial_state(problem, student, teacher, functional.bilinear or Bilinear())
    sums = finish(state, functional.bilinear or Bilinear())
    sums.copy_to(out, *LSES)
    copy_rests(state, out)
    if functional.bilinear is not None:
        sums.copy_to(out, "value", *DELTAS)
    else:
        second_pass(problem, student, teacher, out)
    if problem.labels is not None:
        if problem.temperature == 1.0:  # the same scores
            hard_lse = sums.student_lse
        out.hard_lse.copy_(hard_lse)
        label_y = label_scores(problem, student, hard_lse.dtype)
        out.hard.copy_(hard_values(problem, label_y, hard_lse))
    else:
        out.hard_lse.zero_()
    if needs_grad.any:
        gradient(problem, student, teacher, out, weights, needs_grad)


def copy_rests(state: RowState, out: RowValues) -> None:
    """Copies rounding errors of log-sum-exps: NOTE [Rounding of log-sum-exps] in problem.py."""
    for rest, high, total, lse in (
        (out.student_rest, state.m_s, state.l_s, out.student_lse),
        (out.teacher_rest, state.m_t, state.l_t, out.teacher_lse),
    ):
        lost = (high - lse).add_(total.log())
        rest.copy_(
            torch.where(lost.isfinite(), lost, 0.0)
        )  # without any vocabulary entry there is none


def partial_state(
    problem: LinearProblem, student: Tensor, teacher: Tensor, form: Bilinear
) -> tuple[RowState, Tensor]:
    """Computes the row state over the given entries, and the log-sum-exp of the student's y."""
    shape = (problem.num_tokens,)
    like = student.new_empty((), dtype=problem.compute_dtype)
    state = RowState.empty(shape, like)
    hard_lse = like.new_full(shape, -math.inf)
    for s, t in _blocks(problem, student, teacher):
        if problem.labels is not None and s.y is not None:
            hard_lse = torch.logaddexp(hard_lse, torch.logsumexp(s.y, -1))
        finite = (
            s.y is not None
            and t.y is not None
            and problem.student.bias is None
            and problem.teacher.bias is None
        )
        state = merge(
            state, state_of_scores(t.score, s.score, form, finite=finite, overwrite=False), form
        )
    return state, hard_lse


def gradient(
    problem: LinearProblem,
    student: Tensor,
    teacher: Tensor,
    rows: RowValues,
    weights: RowWeights,
    needs_grad: NeedsGrad,
) -> None:
    """Overwrites logits by their gradients; the teacher's only if it needs one."""
    functional = problem.functional
    for s, t in _blocks(problem, student, teacher):
        if functional.bilinear is not None and not needs_grad.teacher:
            d_student = _bilinear_gradient(functional.bilinear, s.score, t.score, rows)
            d_teacher = d_student
        else:
            variables = _variables(s.score, t.score, rows)
            memo: dict[Node, Tensor] = {}
            h = evaluate(functional.student_grad, variables, memo)
            g = evaluate(functional.teacher_grad, variables, memo)
            d_student = h - variables["S"] * rows.student_delta[:, None]
            d_teacher = g - variables["P"] * rows.teacher_delta[:, None]
        if needs_grad.student and s.y is not None:
            d = _weighted(d_student, weights.value, problem.temperature)
            if weights.hard is not None:
                d = d + _weighted(_hard_gradient(problem, s, rows), weights.hard)
            _store(d, s, student)
        if needs_grad.teacher and t.y is not None:
            _store(_weighted(d_teacher, weights.value, problem.temperature), t, teacher)


def _bilinear_gradient(form: Bilinear, s: Tensor, t: Tensor, rows: RowValues) -> Tensor:
    """Computes h - S * delta of a functional that is linear in the log-probabilities.

    h = ts P + S (st log P + ss log S + ss + s).
    """
    log_s, log_t = _log_probabilities(s, t, rows)
    level = (form.ss + form.s - rows.student_delta)[:, None]
    if form.has_student_moment:
        p_s = elementwise.exp(log_s)
        moment = log_s.mul_(form.ss) if form.ss else torch.zeros_like(p_s)
        d = moment.add_(log_t, alpha=form.st).add_(level).mul_(p_s).masked_fill_(p_s == 0, 0.0)
    else:
        d = elementwise.exp_(log_s).mul_(level)
    return d.add_(elementwise.exp_(log_t), alpha=form.ts) if form.ts else d


def _log_probabilities(s: Tensor, t: Tensor, rows: RowValues) -> tuple[Tensor, Tensor]:
    return (
        _minus_lse(s, without_infinity(rows.student_lse), rows.student_rest),
        _minus_lse(t, without_infinity(rows.teacher_lse), rows.teacher_rest),
    )


def _minus_lse(scores: Tensor, lse: Tensor, rest: Tensor) -> Tensor:
    """Computes ``scores - lse``, corrected by the rounding error of lse."""
    return (scores - lse[:, None]).sub_(rest[:, None])


def _store(d_score: Tensor, block: Block, logits: Tensor) -> None:
    if isinstance(block.slope, Tensor) or block.slope != 1.0:
        d_score = d_score.mul_(block.slope)
    logits[:, block.vocab].copy_(d_score)


def _weighted(grad: Tensor, weight: Tensor | None, temperature: float = 1.0) -> Tensor:
    """Multiplies the gradient by its row's weight, in place."""
    if weight is None:
        return grad.zero_()
    grad.mul_((weight / temperature)[:, None])
    # a row that does not count adds nothing, even where its own gradient is not finite
    return grad.masked_fill_((weight == 0)[:, None], 0.0) if bool((weight == 0).any()) else grad


def second_pass(problem: LinearProblem, student: Tensor, teacher: Tensor, out: RowValues) -> None:
    """Computes value and deltas of a functional with a second pass, from the log-sum-exps."""
    for total in (out.value, out.student_delta, out.teacher_delta):
        total.zero_()
    for s, t in _blocks(problem, student, teacher):
        f, h, g = problem.functional.sums(_variables(s.score, t.score, out))
        out.value.add_(f.sum(-1))
        out.student_delta.add_(h.sum(-1))
        out.teacher_delta.add_(g.sum(-1))


def _variables(s: Tensor, t: Tensor, rows: RowValues) -> dict[str, Tensor]:
    log_s, log_t = _log_probabilities(s, t, rows)
    return variables_of(log_t, log_s, elementwise.exp)


def hard_values(
    problem: LinearProblem, label_y: tuple[Tensor, Tensor], hard_lse: Tensor
) -> Tensor:
    """Computes the cross-entropy of the labels from their `label_scores`.

    It is NaN for a label that is no vocabulary entry.
    """
    y, is_in_vocab = label_y
    value = torch.where(is_in_vocab, hard_lse - y, math.nan)
    return torch.where(problem.is_labelled(), value, 0.0)


def label_scores(
    problem: LinearProblem, student: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns y of each row's label, and whether it is one of the given vocabulary entries."""
    assert problem.labels is not None
    head, vocab_entry = problem.student, problem.labels.long() - problem.vocab_start
    is_in_vocab = (vocab_entry >= 0) & (vocab_entry < head.vocab_size)
    vocab_entry = torch.where(is_in_vocab, vocab_entry, 0)[:, None]
    y = transformed(
        head,
        student.gather(1, vocab_entry),
        None if head.bias is None else head.bias[vocab_entry],
        dtype,
    )[0]
    return y.squeeze(1), is_in_vocab


def _hard_gradient(problem: LinearProblem, block: Block, rows: RowValues) -> Tensor:
    assert problem.labels is not None and block.y is not None
    vocab_entry = (
        torch.arange(block.vocab.start, block.vocab.stop, device=block.y.device)
        + problem.vocab_start
    )
    if problem.temperature == 1.0:
        log_p = _minus_lse(block.y, rows.hard_lse, rows.student_rest)
    else:
        log_p = block.y - rows.hard_lse[:, None]
    p = elementwise.exp_(log_p)
    p = p - (problem.labels[:, None] == vocab_entry).to(p.dtype)
    return torch.where(problem.is_labelled()[:, None], p, 0.0)


def _blocks(
    problem: LinearProblem, student: Tensor, teacher: Tensor
) -> Iterator[tuple[Block, Block]]:
    """Yields blocks of the vocabulary; none crosses the end of the smaller vocabulary."""
    sizes = (problem.student.vocab_size, problem.teacher.vocab_size)
    step = max(64, BLOCK_ELEMENTS // max(1, problem.num_tokens))
    for start, stop in ((0, min(sizes)), (min(sizes), max(sizes))):
        for part in ranges(stop - start, step):
            vocab = slice(start + part.start, start + part.stop)
            yield (
                _block(problem, problem.student, student, vocab),
                _block(problem, problem.teacher, teacher, vocab),
            )


def _block(problem: LinearProblem, head: Head, logits: Tensor, vocab: slice) -> Block:
    dtype = problem.compute_dtype
    if vocab.start >= head.vocab_size:
        missing = logits.new_full(
            (logits.shape[0], vocab.stop - vocab.start), -math.inf, dtype=dtype
        )
        return Block(vocab, None, missing, 0.0)
    y, slope = transformed(
        head, logits[:, vocab], None if head.bias is None else head.bias[vocab], dtype
    )
    score = y if problem.temperature == 1.0 else y / problem.temperature
    return Block(vocab, y, score, slope)


def transformed(
    head: Head, logits: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | float]:
    """Computes y and d(y)/d(logit)."""
    y = logits.to(dtype)
    if bias is not None:
        y = y + bias.to(dtype)
    if head.scale != 1.0:
        y = y * head.scale
    if not head.softcap:
        return y, head.scale
    capped = torch.tanh(y / head.softcap)
    return capped * head.softcap, head.scale * (1.0 - capped * capped)
