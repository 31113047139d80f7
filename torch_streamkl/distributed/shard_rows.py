"""Computes `linear_kl` on a vocabulary shard: chunk loops over tokens, and their rows in torch.

Ranks exchange row states. The state of a row on one rank is a column of ``parts`` [fields,
num_tokens]: the six fields of `row_state.RowState`. With labels it also has the log-sum-exp of the
student's y over the rank's shard, and the label's y (-inf if another rank has that entry). States
of all ranks [ranks, fields, num_tokens] merge into the statistics of whole rows, which `gradient`
reads as without shards. `linear/triton/shards.py` computes the same rows on a GPU.

- `forward`: if the functional is linear in log-probabilities, it exchanges the states of all rows
  in one all-gather. Any other functional needs the merged log-sum-exps while the logits are there:
  an all-gather for each chunk, and one all-reduce of three numbers a row at the end.
- `forward_with_gradients`: an all-gather for each chunk, and if needed an all-reduce of three
  numbers a row. Meanwhile the GPU computes what the chunk before adds to the weight's gradient,
  which takes a second buffer of the student's logits.

All ranks use the same chunks, chosen for the largest shard. Gradients of hidden states are this
rank's share: the caller sums over ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from torch_streamkl.distributed import collectives
from torch_streamkl.divergences.row_state import DELTAS, LSES, RowState, finish, merge
from torch_streamkl.linear import chunks as linear_chunks
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.chunks import Gradients, GradientSums, logits_buffer, logits_of
from torch_streamkl.linear.problem import LinearProblem, NeedsGrad, RowValues, RowWeights, max_sums
from torch_streamkl.linear.rows import gradient
from torch_streamkl.program.divergence_forms import Bilinear
from torch_streamkl.runtime.workspace import padded

__all__ = ["empty_state", "gradient", "merged", "state", "sums"]  # as linear.triton.shards

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
    row_sums.copy_to(out, *LSES, "value", *DELTAS)
    linear_rows.copy_rests(total, out)
    if problem.labels is None:
        out.hard_lse.zero_()
        return
    if problem.temperature == 1.0:  # the same scores
        out.hard_lse.copy_(out.student_lse)
    else:
        out.hard_lse.copy_(torch.logsumexp(parts[:, STATE_FIELDS], 0))
    is_in_vocab = (problem.labels >= 0) & (problem.labels < vocab_size)
    hard = torch.where(is_in_vocab, out.hard_lse - parts[:, STATE_FIELDS + 1].amax(0), math.nan)
    out.hard.copy_(torch.where(problem.is_labelled(), hard, 0.0))


def sums(
    problem: LinearProblem, student: Tensor, teacher: Tensor, out: RowValues, totals: Tensor
) -> None:
    """Writes value and deltas over the rank's shard [3, num_tokens], from merged log-sum-exps."""
    value, student_delta, teacher_delta = totals
    local = RowValues(value, out.hard, out.statistics.clone())
    linear_rows.second_pass(problem, student, teacher, local)
    student_delta.copy_(local.student_delta)
    teacher_delta.copy_(local.teacher_delta)


@dataclass(frozen=True)
class Shard:
    """Describes this rank's vocabulary shard as a problem of its own, and how it relates to the
    other shards.
    """

    problem: LinearProblem
    group_name: str
    num_ranks: int
    student_vocab_size: int  # of the whole vocabulary
    row_bytes: tuple[int, int]  # of a token's logits of student and teacher, of the largest shard
    workspace: int  # bytes, of the rank that has the least
    rows: ModuleType  # this one, or linear.triton.shards

    @property
    def is_empty(self) -> bool:
        return all(head.vocab_size == 0 for head in self.problem.heads)

    @property
    def needs_second_pass(self) -> bool:
        return self.problem.functional.bilinear is None

    def new_parts(self, num_tokens: int) -> Tensor:
        hidden, dtype = self.problem.student.hidden, self.problem.compute_dtype
        return hidden.new_empty((num_fields(self.problem), num_tokens), dtype=dtype)

    def chunks(self, bytes_per_token: int) -> list[slice]:
        """Returns chunks of tokens whose logits fit, the same on every rank."""
        return self._chunks(self.workspace, bytes_per_token)

    def gradient_chunks(self, bytes_per_token: int) -> list[slice]:
        """Returns those over which gradients are summed."""
        workspace = linear_chunks.workspace_for_sums(
            self.problem, self.workspace, self.problem.max_workspace_mib, bytes_per_token
        )
        return self._chunks(workspace, bytes_per_token)

    def _chunks(self, workspace: int, bytes_per_token: int) -> list[slice]:
        what = " for the largest shard of the vocabulary"
        return linear_chunks.token_chunks(self.problem, workspace, bytes_per_token, what)

    def write_state(self, part: LinearProblem, s: Tensor, t: Tensor, out: Tensor) -> None:
        if self.is_empty:
            self.rows.empty_state(out)
        else:
            self.rows.state(part, s, t, out)

    def gathered(self, parts: Tensor) -> Tensor:
        """Starts to gather the states of all ranks [ranks, fields, tokens]."""
        return collectives.all_gather(parts, self.num_ranks, self.group_name)

    def merge(self, part: LinearProblem, gathered: Tensor, out: RowValues) -> None:
        parts = collectives.wait(gathered).unflatten(0, (-1, num_fields(part)))
        self.rows.merged(part, parts, self.student_vocab_size, out)

    def write_sums(
        self, part: LinearProblem, s: Tensor, t: Tensor, out: RowValues, totals: Tensor
    ) -> None:
        if self.is_empty:
            totals.zero_()
        else:
            self.rows.sums(part, s, t, out, totals)

    def add_sums(self, totals: Tensor, out: RowValues) -> None:
        """Sums value and deltas of whole rows over ranks."""
        value, student_delta, teacher_delta = collectives.wait(
            collectives.all_reduce(totals, self.group_name)
        )
        out.value.copy_(value)
        out.student_delta.copy_(student_delta)
        out.teacher_delta.copy_(teacher_delta)


def forward(shard: Shard) -> RowValues:
    """Returns values and statistics of all rows, the same on every rank."""
    problem, out = shard.problem, RowValues.allocate(shard.problem)
    chunks = shard.chunks(sum(shard.row_bytes))
    most = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    student, teacher = (logits_buffer(head, most) for head in problem.heads)
    parts = shard.new_parts(0 if shard.needs_second_pass else problem.num_tokens)
    totals = parts.new_empty((3, problem.num_tokens if shard.needs_second_pass else 0))
    for chunk in chunks:
        part, rows = problem.of_tokens(chunk), out.of_tokens(chunk)
        s, t = logits_of(part.student, student), logits_of(part.teacher, teacher)
        if shard.needs_second_pass:
            state = shard.new_parts(chunk.stop - chunk.start)
            shard.write_state(part, s, t, state)
            shard.merge(part, shard.gathered(state), rows)
            shard.write_sums(part, s, t, rows, totals[:, chunk])
        else:
            shard.write_state(part, s, t, parts[:, chunk])
    if shard.needs_second_pass:
        shard.add_sums(totals, out)
    else:
        shard.merge(problem, shard.gathered(parts), out)
    return out


def forward_with_gradients(
    shard: Shard, weights: RowWeights, needs_grad: NeedsGrad
) -> tuple[RowValues, Gradients]:
    """Returns values, statistics and this rank's gradients of the weighted sum."""
    problem = shard.problem
    if not needs_grad.any:
        return forward(shard), (None,) * 6
    # of the student two buffers, and of the teacher two if they become a gradient
    student_bytes, teacher_bytes = shard.row_bytes
    num_teacher_buffers = 2 if needs_grad.teacher else 1
    chunks = shard.gradient_chunks(2 * student_bytes + num_teacher_buffers * teacher_bytes)
    if len(chunks) == 1:
        chunks = shard.chunks(student_bytes + teacher_bytes)
    if len(chunks) > max_sums(problem):  # NOTE [Sums over chunks] in runtime/workspace.py
        values = forward(shard)
        return values, backward(shard, values, weights, needs_grad)
    out = RowValues.allocate(problem)
    sides = [GradientSums(problem, side, needs_grad) for side in (0, 1)]
    num_buffers = (min(2, len(chunks)), min(num_teacher_buffers, len(chunks)))
    most = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    student, teacher = (
        [logits_buffer(head, most) for _ in range(number)]
        for head, number in zip(problem.heads, num_buffers, strict=True)
    )
    whole_vocab = slice(0, max(head.vocab_size for head in problem.heads))
    waiting: tuple[slice, tuple[Tensor, Tensor]] | None = None

    def add_to_weights() -> None:
        if waiting is not None:
            tokens, logits = waiting
            for side, d_logits in zip(sides, logits, strict=True):
                side.add_to_weight(d_logits, tokens, whole_vocab)

    for index, chunk in enumerate(chunks):
        part, rows = problem.of_tokens(chunk), out.of_tokens(chunk)
        s = logits_of(part.student, student[index % num_buffers[0]])
        t = logits_of(part.teacher, teacher[index % num_buffers[1]])
        state = shard.new_parts(chunk.stop - chunk.start)
        shard.write_state(part, s, t, state)
        gathered = shard.gathered(state)
        add_to_weights()  # of the chunk before, while states travel
        shard.merge(part, gathered, rows)
        if shard.needs_second_pass:
            totals = state.new_empty((3, chunk.stop - chunk.start))
            shard.write_sums(part, s, t, rows, totals)
            shard.add_sums(totals, rows)
        if not shard.is_empty:
            shard.rows.gradient(part, s, t, rows, weights.of_tokens(chunk), needs_grad)
        for side, d_logits in zip(sides, (s, t), strict=True):
            side.add_to_hidden(d_logits, chunk, whole_vocab)
            side.add_to_bias(d_logits, whole_vocab)
        waiting = (chunk, (s, t))
    add_to_weights()
    return out, linear_chunks.gradients_of(sides)


def backward(
    shard: Shard, values: RowValues, weights: RowWeights, needs_grad: NeedsGrad
) -> Gradients:
    """Returns this rank's gradients, from the statistics of whole rows."""
    problem = shard.problem
    return linear_chunks.backward(
        problem, values, weights, needs_grad, problem.max_workspace_mib, shard.rows
    )


def row_bytes(problem: LinearProblem, vocab_size: tuple[int, int]) -> tuple[int, int]:
    """Returns bytes of a token's logits for shards of these sizes."""
    student, teacher = (
        padded(number) * head.hidden.element_size()
        for head, number in zip(problem.heads, vocab_size, strict=True)
    )
    return student, teacher
