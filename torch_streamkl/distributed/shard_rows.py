"""Computes rows of a vocabulary shard in plain torch: state, merged state, and second pass.

The state of a row on one rank is a column of ``parts`` [fields, num_tokens]: the six fields of
`row_state.RowState`. With labels it also has the log-sum-exp of the student's y over the rank's
shard, and the label's y (-inf if another rank has that entry). States of all ranks [ranks, fields,
num_tokens] merge into the statistics of whole rows, which `gradient` reads as without shards.
`linear/triton/shards.py` does the same on a GPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_streamkl.divergences.row_state import RowState, finish, merge
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.problem import LinearProblem, RowValues
from torch_streamkl.linear.rows import gradient
from torch_streamkl.program.divergence_forms import Bilinear

__all__ = ["empty_state", "gradient", "merged", "state", "sums"]

STATE_FIELDS = 6
LABEL_FIELDS = 2


def num_fields(problem: LinearProblem) -> int:
    """Counts the fields of a row's state."""
    return STATE_FIELDS + (0 if problem.labels is None else LABEL_FIELDS)


def state(problem: LinearProblem, student: Tensor, teacher: Tensor, parts: Tensor) -> None:
    """Writes the state of rows from both sides' logits of the rank's vocabulary shard."""
    form = problem.functional.bilinear or Bilinear()
    row_state, hard_lse = linear_rows.partial_state(problem, student, teacher, form)
    for row, field in zip(parts, row_state.tensors(), strict=False):
        row.copy_(field)
    if problem.labels is None:
        return
    parts[STATE_FIELDS].copy_(hard_lse)
    if problem.student.vocab_size == 0:
        parts[STATE_FIELDS + 1].fill_(-math.inf)
        return
    y, is_in_vocab = linear_rows.label_scores(problem, student, parts.dtype)
    parts[STATE_FIELDS + 1].copy_(torch.where(is_in_vocab, y, -math.inf))


def empty_state(parts: Tensor) -> None:
    """Writes the state of rows of a rank without vocabulary entries."""
    low = parts.new_tensor([-math.inf, 0.0, -math.inf, 0.0, 0.0, 0.0, -math.inf, -math.inf])
    parts.copy_(low[: parts.shape[0], None])


def merged(problem: LinearProblem, parts: Tensor, vocab_size: int, out: RowValues) -> None:
    """Merges states to statistics of whole rows, cross-entropies, and values of the state.

    ``vocab_size`` is the size of the student's whole vocabulary.
    """
    form = problem.functional.bilinear or Bilinear()
    states = [RowState(*part[:STATE_FIELDS].unbind(0)) for part in parts]
    total = states[0]
    for other in states[1:]:
        total = merge(total, other, form)
    row_sums = finish(total, form)
    out.student_lse.copy_(row_sums.student_lse)
    out.teacher_lse.copy_(row_sums.teacher_lse)
    linear_rows.copy_rests(total, out)
    out.value.copy_(row_sums.value)
    out.student_delta.copy_(row_sums.student_delta)
    out.teacher_delta.copy_(row_sums.teacher_delta)
    if problem.labels is None:
        out.hard_lse.zero_()
        return
    if problem.temperature == 1.0:  # the same scores
        out.hard_lse.copy_(out.student_lse)
    else:
        out.hard_lse.copy_(torch.logsumexp(parts[:, STATE_FIELDS], 0))
    is_in_vocab = (problem.labels >= 0) & (problem.labels < vocab_size)
    hard = torch.where(is_in_vocab, out.hard_lse - parts[:, STATE_FIELDS + 1].amax(0), math.nan)
    out.hard.copy_(torch.where(problem.labels != problem.ignore_index, hard, 0.0))


def sums(
    problem: LinearProblem, student: Tensor, teacher: Tensor, out: RowValues, totals: Tensor
) -> None:
    """Writes value and deltas over the rank's shard [3, num_tokens], from merged log-sum-exps."""
    value, student_delta, teacher_delta = totals
    local = RowValues(value, out.hard, out.statistics.clone())
    linear_rows.second_pass(problem, student, teacher, local)
    student_delta.copy_(local.student_delta)
    teacher_delta.copy_(local.teacher_delta)
