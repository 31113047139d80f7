"""Computes `linear_kl` in bounded memory: matmuls into a small workspace, and row functions on it.

Three loops, the same on every device:

- `forward`: values, by chunks of tokens with the whole vocabulary (two matmuls);
- `backward`: gradients from saved statistics, by blocks of the vocabulary with all tokens
  where they fit: each block of a weight's gradient is then one matmul and the hidden states'
  gradient is summed over blocks (two matmuls to recompute the logits, two for the gradients of a
  side);
- `forward_with_gradients`: both at once by chunks of tokens, for a weighted sum whose weights are
  known (two matmuls and two for the gradients of a side).

The order of every sum is fixed, so results are the same bits on every run.
"""

from __future__ import annotations

import math
from dataclasses import fields
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_streamkl.divergences.row_state import RowState
from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.problem import (
    MIB,
    Chunks,
    Head,
    LinearProblem,
    NeedsGrad,
    RowValues,
    RowWeights,
    even_ranges,
    even_step,
    max_sums,
    padded,
    ranges,
    row_bytes,
    workspace_bytes,
)
from torch_streamkl.program.divergence_forms import Bilinear
from torch_streamkl.runtime.streams import SideStream

Gradients = tuple[Tensor | None, ...]  # in the order of `NeedsGrad`

TOKEN_MULTIPLE = {"cpu": 16, "cuda": 128}  # rows of a matmul tile
VOCAB_MULTIPLE = 256
# cuBLAS takes 32 MiB for every stream: with less room than this, more tokens are worth more
SIDE_STREAM_MIB = 256


def forward(
    problem: LinearProblem, max_workspace_mib: int, rows: ModuleType = linear_rows
) -> RowValues:
    """Returns values and statistics of all rows."""
    out = RowValues.allocate(problem)
    student_bytes, teacher_bytes = row_bytes(problem)
    tokens = tokens_that_fit(
        problem, workspace_bytes(problem, max_workspace_mib), student_bytes + teacher_bytes
    )
    student, teacher = (logits_buffer(head, tokens) for head in problem.heads)
    for chunk in even_ranges(problem.num_tokens, tokens, token_multiple(problem)):
        part = problem.of_tokens(chunk)
        s, t = logits_of(part.student, student), logits_of(part.teacher, teacher)
        rows.values(part, s, t, out.of_tokens(chunk))
    return out


def backward(
    problem: LinearProblem,
    values: RowValues,
    weights: RowWeights,
    needs_grad: NeedsGrad,
    max_workspace_mib: int,
    rows: ModuleType = linear_rows,
) -> Gradients:
    """Returns gradients of ``sum(weights.value * value) + sum(weights.hard * hard)`` from
    statistics.
    """
    accumulators = [GradientSums(problem, side, needs_grad) for side in (0, 1)]
    vocab_size = max(head.vocab_size for head in problem.heads)
    if vocab_size == 0:  # a rank that has none of the vocabulary
        return gradients_of(accumulators)
    item = sum(head.hidden.element_size() for head in problem.heads)
    room = workspace_bytes(problem, max_workspace_mib) // item
    fewest_vocab = -(-vocab_size // max_sums(problem))
    vocab_limit = padded(max(room // max(problem.num_tokens, 1), fewest_vocab), VOCAB_MULTIPLE)
    vocab_step = even_step(vocab_size, vocab_limit, VOCAB_MULTIPLE)
    tokens_limit = max(room // padded(vocab_step), 1)
    tokens_step = even_step(problem.num_tokens, tokens_limit, token_multiple(problem))
    if -(-problem.num_tokens // tokens_step) > max_sums(problem):
        needed = -(-problem.num_tokens // max_sums(problem)) * padded(vocab_step) * item / MIB
        raise ValueError(
            f"max_workspace_mib must be at least {math.ceil(needed)} for {problem.num_tokens} "
            f"tokens and {vocab_size} vocabulary entries in 16 bits (gradients are rounded with "
            "every chunk), "
            f"got {room * item // MIB}"
        )
    buffers = [head.hidden.new_empty((tokens_step, padded(vocab_step))) for head in problem.heads]
    for vocab in even_ranges(vocab_size, vocab_step, VOCAB_MULTIPLE):
        for chunk in even_ranges(problem.num_tokens, tokens_step, token_multiple(problem)):
            part = problem.of_vocab(vocab).of_tokens(chunk)
            s, t = (
                logits_of(head, buffer) for head, buffer in zip(part.heads, buffers, strict=True)
            )
            rows.gradient(
                part, s, t, values.of_tokens(chunk), weights.of_tokens(chunk), needs_grad
            )
            for accumulator, d_logits in zip(accumulators, (s, t), strict=True):
                accumulator.add(d_logits, chunk, vocab)
    return gradients_of(accumulators)


def forward_with_gradients(
    problem: LinearProblem,
    weights: RowWeights,
    needs_grad: NeedsGrad,
    max_workspace_mib: int,
    rows: ModuleType = linear_rows,
) -> tuple[RowValues, Gradients]:
    """Returns values, statistics and the gradients of the weighted sum."""
    if not (needs_grad.student or needs_grad.teacher):
        return forward(problem, max_workspace_mib, rows), (None,) * len(fields(NeedsGrad))
    chunks = gradient_chunks(problem, needs_grad, max_workspace_mib)
    if -(-problem.num_tokens // chunks.tokens) > max_sums(problem):  # NOTE [Sums over chunks]
        values = forward(problem, max_workspace_mib, rows)
        return values, backward(problem, values, weights, needs_grad, max_workspace_mib, rows)
    out = RowValues.allocate(problem)
    student_sums, teacher_sums = (GradientSums(problem, side, needs_grad) for side in (0, 1))
    student = logits_buffer(problem.student, chunks.tokens)
    teacher = logits_buffer(problem.teacher, chunks.teacher_tokens)
    whole_vocab = slice(0, max(head.vocab_size for head in problem.heads))
    has_room = workspace_bytes(problem, max_workspace_mib) >= SIDE_STREAM_MIB * MIB
    side = SideStream(student.device, has_room and not isinstance(student, FakeTensor))
    for chunk in even_ranges(problem.num_tokens, chunks.tokens, token_multiple(problem)):
        parts = list(ranges(chunk.stop - chunk.start, chunks.teacher_tokens))
        for part in parts:
            tokens = slice(chunk.start + part.start, chunk.start + part.stop)
            rows_of = problem.of_tokens(tokens)
            t = logits_of(rows_of.teacher, teacher)
            if part is parts[0]:
                side.join()  # the last chunk's weight gradient reads the student's buffer
                s = logits_of(problem.of_tokens(chunk).student, student)
            rows.values_and_gradient(
                rows_of, s[part], t, out.of_tokens(tokens), weights.of_tokens(tokens), needs_grad
            )
            teacher_sums.add(t, tokens, whole_vocab)
        side.fork()
        student_sums.add_to_hidden(s, chunk, whole_vocab)
        with side:
            student_sums.add_to_weight(s, chunk, whole_vocab)
        student_sums.add_to_bias(s, whole_vocab)
    side.join()
    return out, gradients_of([student_sums, teacher_sums])


def partial_state(problem: LinearProblem, max_workspace_mib: int = 0) -> tuple[RowState, Tensor]:
    """Returns the row state of a shard of the vocabulary (nats) and the log-sum-exp of its
    labelled scores.

    States of disjoint shards merge with `row_state.merge` and end in `row_state.finish`; with the
    merged statistics `backward` gives each shard's gradients.
    """
    form = problem.functional.bilinear or Bilinear()
    tokens = tokens_that_fit(
        problem, workspace_bytes(problem, max_workspace_mib), sum(row_bytes(problem))
    )
    student, teacher = (logits_buffer(head, tokens) for head in problem.heads)
    parts = []
    for chunk in even_ranges(problem.num_tokens, tokens, token_multiple(problem)):
        part = problem.of_tokens(chunk)
        parts.append(
            linear_rows.partial_state(
                part, logits_of(part.student, student), logits_of(part.teacher, teacher), form
            )
        )
    states, hard_lses = zip(*parts, strict=True)
    fields = ("m_t", "l_t", "m_s", "l_s", "a", "b")
    state = RowState(*(torch.cat([getattr(state, name) for state in states]) for name in fields))
    return state, torch.cat(hard_lses)


def gradient_chunks(
    problem: LinearProblem, needs_grad: NeedsGrad, max_workspace_mib: int
) -> Chunks:
    """Returns chunks of the forward that computes gradients: those that move the fewest bytes."""
    student_bytes, teacher_bytes = row_bytes(problem)
    workspace = workspace_bytes(problem, max_workspace_mib)
    whole = tokens_that_fit(problem, workspace, student_bytes + teacher_bytes)
    best = Chunks(whole, whole)
    if needs_grad.teacher:  # its logits become a gradient too, and live as long as the student's
        return best
    multiple = token_multiple(problem)
    for num_chunks in range(1, -(-problem.num_tokens // whole) + 1):
        tokens = padded(-(-problem.num_tokens // num_chunks), max(multiple // 8, 1))
        for parts in (1, 2, 3, 4):
            part = padded(-(-tokens // parts), max(multiple // 2, 1))
            chunks = Chunks(tokens, min(part, tokens))
            size = chunks.tokens * student_bytes + chunks.teacher_tokens * teacher_bytes
            if size <= workspace and _traffic(problem, chunks) < _traffic(problem, best):
                best = chunks
    return best


def _traffic(problem: LinearProblem, chunks: Chunks) -> float:
    """Bytes of weights that all chunks move, apart from what any choice moves.

    A chunk reads the student's weight twice, and reads and writes its gradient, which no other
    work hides: counted twice, and more where the last tile of tokens is not full. A part of the
    teacher's tokens reads the teacher's weight; a matmul of fewer rows than two tiles spends its
    time on that.
    """
    student, teacher = (head.weight.numel() * head.weight.element_size() for head in problem.heads)
    num_chunks = -(-problem.num_tokens // chunks.tokens)
    num_parts = -(-chunks.tokens // chunks.teacher_tokens)
    multiple = token_multiple(problem)
    waste = padded(chunks.tokens, multiple) / chunks.tokens
    thin = max(1.0, 2 * multiple / chunks.teacher_tokens)
    return num_chunks * (6 * waste * student + num_parts * thin * teacher)


def token_multiple(problem: LinearProblem) -> int:
    """Returns the multiple of tokens that matmuls are fast with."""
    return TOKEN_MULTIPLE.get(problem.student.hidden.device.type, 128)


def tokens_that_fit(problem: LinearProblem, workspace: int, bytes_per_token: int) -> int:
    """Returns how many tokens' logits fit the workspace."""
    limit = workspace // bytes_per_token
    if limit < 1:
        raise ValueError(
            "max_workspace_mib must hold the logits of a token, "
            f"{sum(row_bytes(problem)) / MIB:.2f} MiB with the student's and the teacher's "
            "vocabulary entries, "
            f"got {workspace // MIB}"
        )
    return even_step(problem.num_tokens, limit, token_multiple(problem))


def logits_buffer(head: Head, tokens: int) -> Tensor:
    """Allocates a buffer for the logits of some tokens."""
    return head.hidden.new_empty((tokens, padded(head.vocab_size)))


def logits_of(head: Head, buffer: Tensor) -> Tensor:
    """Computes ``hidden @ weight.T``, and what an adapter adds, in the buffer's first rows."""
    if isinstance(buffer, FakeTensor):  # of a trace: a compiler places them, and makes no copy
        size = (head.hidden.shape[0], head.vocab_size)
        out = head.hidden.new_empty_strided(size, (buffer.shape[1], 1))
    else:
        out = buffer[: head.hidden.shape[0], : head.vocab_size]
        _clear_padding(buffer, head)
    torch.mm(head.hidden, head.weight.t(), out=out)
    if head.adapter_hidden is not None and head.adapter_weight is not None:
        out.addmm_(head.adapter_hidden, head.adapter_weight.t())
    return out


def _clear_padding(buffer: Tensor, head: Head) -> None:
    # oneDNN's AMX kernels multiply what lies after the end of a row by 0: NaN if the uninitialized
    # memory there holds NaN or infinity, once the buffer is an operand (a gradient to the logits)
    if buffer.device.type == "cpu" and buffer.dtype.itemsize == 2:
        buffer[: head.hidden.shape[0], head.vocab_size :].zero_()


class GradientSums:
    """Gradients of one side, summed over chunks of tokens and blocks of the vocabulary."""

    def __init__(self, problem: LinearProblem, side: int, needs_grad: NeedsGrad) -> None:
        self.head = problem.heads[side]
        to_hidden = (needs_grad.student_hidden, needs_grad.teacher_hidden)[side]
        to_weight = (needs_grad.student_weight, needs_grad.teacher_weight)[side]
        to_bias = (needs_grad.student_bias, needs_grad.teacher_bias)[side]
        to_adapter_hidden = (needs_grad.student_adapter_hidden, needs_grad.teacher_adapter_hidden)[
            side
        ]
        to_adapter_weight = (needs_grad.student_adapter_weight, needs_grad.teacher_adapter_weight)[
            side
        ]
        # a shard without vocabulary entries adds nothing, and so does a mask that selects no row
        is_added = self.head.vocab_size and problem.num_tokens
        like = torch.empty_like if is_added else torch.zeros_like
        self.hidden = like(self.head.hidden) if to_hidden else None
        self.weight = like(self.head.weight) if to_weight else None
        self.adapter_hidden: Tensor | None = None
        self.adapter_weight: Tensor | None = None
        if to_adapter_hidden and self.head.adapter_hidden is not None:
            self.adapter_hidden = like(self.head.adapter_hidden)
        if to_adapter_weight and self.head.adapter_weight is not None:
            self.adapter_weight = like(self.head.adapter_weight)
        self.bias: Tensor | None = None
        self.bias_sum: Tensor | None = None
        if to_bias:
            assert self.head.bias is not None
            self.bias = self.head.bias
            self.bias_sum = torch.zeros(
                self.bias.shape, dtype=problem.compute_dtype, device=self.bias.device
            )

    def add(self, d_logits: Tensor, tokens: slice, vocab: slice) -> None:
        """Adds what a block of tokens and of the vocabulary contributes; blocks come in order.

        The block has as many columns as this side has of that part of the vocabulary, maybe none.
        """
        self.add_to_hidden(d_logits, tokens, vocab)
        self.add_to_weight(d_logits, tokens, vocab)
        self.add_to_bias(d_logits, vocab)

    def add_to_hidden(self, d_logits: Tensor, tokens: slice, vocab: slice) -> None:
        pairs = (
            (self.hidden, self.head.weight),
            (self.adapter_hidden, self.head.adapter_weight),
        )
        for total, weight in pairs:
            if total is not None and weight is not None and d_logits.shape[1]:
                _matmul_into(total[tokens], d_logits, weight[vocab], first=vocab.start == 0)

    def add_to_weight(self, d_logits: Tensor, tokens: slice, vocab: slice) -> None:
        pairs = (
            (self.weight, self.head.hidden),
            (self.adapter_weight, self.head.adapter_hidden),
        )
        for total, hidden in pairs:
            if total is not None and hidden is not None and d_logits.shape[1]:
                first = tokens.start == 0
                _matmul_into(total[vocab], d_logits.t(), hidden[tokens], first=first)

    def add_to_bias(self, d_logits: Tensor, vocab: slice) -> None:
        if self.bias_sum is not None:
            self.bias_sum[vocab] += d_logits.sum(0, dtype=self.bias_sum.dtype)


def _matmul_into(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)


def gradients_of(sides: list[GradientSums]) -> Gradients:
    """Collects the gradients of both sides, in the order of the operators' outputs."""
    student, teacher = sides
    d_bias = [
        None if side.bias is None or side.bias_sum is None else side.bias_sum.to(side.bias.dtype)
        for side in sides
    ]
    heads = (student.hidden, student.weight, teacher.hidden, teacher.weight)
    adapters = [x for side in sides for x in (side.adapter_hidden, side.adapter_weight)]
    return (*heads, *d_bias, *adapters)
