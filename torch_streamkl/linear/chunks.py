"""Computes `linear_kl` in bounded memory: matmuls into a small workspace, and row functions on it.

Three loops serve every device:

- `forward` computes values, by chunks of tokens with the whole vocabulary (two matmuls).
- `backward` computes gradients from saved statistics, by blocks of the vocabulary, with all tokens
  if they fit. Each block of a weight's gradient is then one matmul, and the hidden states'
  gradient is summed over blocks (two matmuls to recompute the logits, two for the gradients of a
  side).
- `forward_with_gradients` computes both by chunks of tokens, for a weighted sum whose weights are
  known (two matmuls, and two for the gradients of a side).

The order of every sum is fixed, so results have the same bits on every run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_streamkl.linear import rows as linear_rows
from torch_streamkl.linear.problem import (
    OUTPUTS,
    PARTS,
    Head,
    LinearProblem,
    NeedsGrad,
    RowValues,
    RowWeights,
    max_sums,
    row_bytes,
    workspace_bytes,
)
from torch_streamkl.runtime.streams import NO_SIDE, SideStream
from torch_streamkl.runtime.workspace import MIB, Chunks, even_ranges, even_step, padded, ranges
from torch_streamkl.spec import SIDES

Gradients = tuple[Tensor | None, ...]  # in the order of `NeedsGrad`

# Rows of a matmul tile. On an H100 chunks of 832 tokens take 1.1 to 1.2 of the time of 1,024:
# cuBLAS fills no tile with them, and chooses slower kernels (bench/notes/lm_heads.md).
TOKEN_MULTIPLE = {"cpu": 16, "cuda": 256}
VOCAB_MULTIPLE = 256
# cuBLAS takes 32 MiB for every stream: with less room than this, more tokens are worth more
SIDE_STREAM_MIB = 256
MAX_PARTS = 4  # of a chunk, for the teacher's logits
# Fitted to chunks of three heads on an H100 (bench/notes/lm_heads.md). What a chunk moves
# takes as long as so many passes over the student's weight; so many rows of a matmul take as long
# as one pass over its weight.
STUDENT_PASSES, ROWS_OF_A_PASS = 7, 46


def is_one_chunk(problem: LinearProblem, max_workspace_mib: int) -> bool:
    """Returns whether the logits of all tokens fit into the workspace at once."""
    return problem.num_tokens * sum(row_bytes(problem)) <= workspace_bytes(
        problem, max_workspace_mib
    )


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
    """Computes gradients of ``sum(weights.value * value) + sum(weights.hard * hard)``."""
    accumulators = [GradientSums(problem, side, needs_grad) for side in (0, 1)]
    vocab_size = max(head.vocab_size for head in problem.heads)
    if vocab_size == 0:  # a rank that has none of the vocabulary
        return gradients_of(accumulators)
    item = sum(head.hidden.element_size() for head in problem.heads)
    room = workspace_bytes(problem, max_workspace_mib) // item
    tokens_step, vocab_step = steps = block_steps(problem, vocab_size, room)
    if -(-problem.num_tokens // tokens_step) > max_sums(problem):
        needed = -(-problem.num_tokens // max_sums(problem)) * padded(vocab_step) * item / MIB
        raise ValueError(
            f"max_workspace_mib must be at least {math.ceil(needed)} for {problem.num_tokens} "
            f"tokens and {vocab_size} vocabulary entries in 16 bits (gradients are rounded with "
            "every chunk), "
            f"got {room * item // MIB}"
        )
    buffers = [head.hidden.new_empty((tokens_step, padded(vocab_step))) for head in problem.heads]
    for vocab, chunk in blocks(problem, vocab_size, steps):
        part = problem.of_vocab(vocab).of_tokens(chunk)
        s, t = (logits_of(head, buffer) for head, buffer in zip(part.heads, buffers, strict=True))
        rows.gradient(part, s, t, values.of_tokens(chunk), weights.of_tokens(chunk), needs_grad)
        for accumulator, d_logits in zip(accumulators, (s, t), strict=True):
            accumulator.add(d_logits, chunk, vocab)
    return gradients_of(accumulators)


def block_steps(problem: LinearProblem, vocab_size: int, room: int) -> tuple[int, int]:
    """Chooses the tokens and vocabulary entries of a block of the backward.

    ``room`` is how many logits of each side fit into the workspace.
    """
    fewest_vocab = -(-vocab_size // max_sums(problem))
    vocab_limit = padded(max(room // max(problem.num_tokens, 1), fewest_vocab), VOCAB_MULTIPLE)
    vocab_step = even_step(vocab_size, vocab_limit, VOCAB_MULTIPLE)
    tokens_limit = max(room // padded(vocab_step), 1)
    return even_step(problem.num_tokens, tokens_limit, token_multiple(problem)), vocab_step


def blocks(
    problem: LinearProblem, vocab_size: int, steps: tuple[int, int]
) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of the vocabulary and of tokens."""
    for vocab in even_ranges(vocab_size, steps[1], VOCAB_MULTIPLE):
        for chunk in even_ranges(problem.num_tokens, steps[0], token_multiple(problem)):
            yield vocab, chunk


def forward_with_gradients(
    problem: LinearProblem,
    weights: RowWeights,
    needs_grad: NeedsGrad,
    max_workspace_mib: int,
    rows: ModuleType = linear_rows,
) -> tuple[RowValues, Gradients]:
    """Returns values, statistics and the gradients of the weighted sum."""
    if not needs_grad.any:
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
    side = SideStream(student, has_room)
    for chunk in even_ranges(problem.num_tokens, chunks.tokens, token_multiple(problem)):
        parts = list(ranges(chunk.stop - chunk.start, chunks.teacher_tokens))
        for part in parts:
            tokens = slice(chunk.start + part.start, chunk.start + part.stop)
            rows_of = problem.of_tokens(tokens)
            t = logits_of(rows_of.teacher, teacher)
            if part is parts[0]:
                side.join()  # the last chunk's weight gradient reads the student's buffer
                s = logits_of(problem.of_tokens(chunk).student, student)
            rows.values(
                rows_of, s[part], t, out.of_tokens(tokens), weights.of_tokens(tokens), needs_grad
            )
            teacher_sums.add(t, tokens, whole_vocab)
        student_sums.add(s, chunk, whole_vocab, side)
    side.join()
    return out, gradients_of([student_sums, teacher_sums])


class Sizes(NamedTuple):
    """Holds what chunks are chosen by; pairs are of student and teacher."""

    num_tokens: int
    row_bytes: tuple[int, int]  # of one token's logits
    weight_bytes: tuple[int, int]
    workspace: int
    multiple: int  # of tokens
    max_sums: int
    whole: int  # tokens that fit with the logits of both sides


def gradient_chunks(
    problem: LinearProblem, needs_grad: NeedsGrad, max_workspace_mib: int
) -> Chunks:
    """Chooses the chunks of the forward with gradients: those that take the least time."""
    student_bytes, teacher_bytes = row_bytes(problem)
    # a teacher's gradient lives in the place of its logits, as long as the student's
    least_bytes = student_bytes + teacher_bytes // (1 if needs_grad.teacher else MAX_PARTS)
    workspace = workspace_for_sums(
        problem, workspace_bytes(problem, max_workspace_mib), max_workspace_mib, least_bytes
    )
    whole = tokens_that_fit(problem, workspace, student_bytes + teacher_bytes)
    if needs_grad.teacher:
        return Chunks(whole, whole)
    student, teacher = (head.weight.numel() * head.weight.element_size() for head in problem.heads)
    sizes = Sizes(
        problem.num_tokens,
        (student_bytes, teacher_bytes),
        (student, teacher),
        workspace,
        token_multiple(problem),
        max_sums(problem),
        whole,
    )
    if any(isinstance(n, torch.SymInt) for n in (problem.num_tokens, student, teacher)):
        return _cheapest.__wrapped__(sizes)  # of a trace; such sizes have no hash
    return _cheapest(sizes)


@functools.lru_cache(maxsize=256)  # every step asks, and many tokens have many chunks
def _cheapest(sizes: Sizes) -> Chunks:
    student_bytes, teacher_bytes = sizes.row_bytes
    best = Chunks(sizes.whole, sizes.whole)
    least = _cost(sizes, best)
    for num_chunks in range(1, -(-sizes.num_tokens // sizes.whole) + 1):
        tokens = padded(-(-sizes.num_tokens // num_chunks), sizes.multiple)
        tokens = min(tokens, sizes.num_tokens)
        for parts in range(1, MAX_PARTS + 1):
            part = padded(-(-tokens // parts), max(sizes.multiple // 4, 1))
            chunks = Chunks(tokens, min(part, tokens))
            size = chunks.tokens * student_bytes + chunks.teacher_tokens * teacher_bytes
            if size <= sizes.workspace and (cost := _cost(sizes, chunks)) < least:
                best, least = chunks, cost
    return best


def _cost(sizes: Sizes, chunks: Chunks) -> tuple[bool, float]:
    """Returns whether there are too many chunks, and bytes that take as long as the matmuls.

    A chunk reads the student's weight twice, and reads and writes its gradient, which no other
    work hides. A part of the teacher's tokens reads the teacher's weight; a matmul of fewer rows
    than two tiles spends its time on that. The last tile of a matmul may not be full.
    """
    (student, teacher), multiple = sizes.weight_bytes, sizes.multiple
    lengths = [x.stop - x.start for x in even_ranges(sizes.num_tokens, chunks.tokens, multiple)]
    parts = [x.stop - x.start for length in lengths for x in ranges(length, chunks.teacher_tokens)]
    thin = max(1.0, 2 * multiple / chunks.teacher_tokens)
    moved = STUDENT_PASSES * len(lengths) * student + len(parts) * thin * teacher
    student_rows, teacher_rows = (sum(padded(n, multiple) for n in x) for x in (lengths, parts))
    multiplied = (3 * student_rows * student + teacher_rows * teacher) / ROWS_OF_A_PASS
    return len(lengths) > sizes.max_sums, moved + multiplied


def workspace_for_sums(
    problem: LinearProblem, workspace: int, max_workspace_mib: int, bytes_per_token: int
) -> int:
    """Returns the workspace of chunks over which gradients are summed.

    The default grows with the tokens where it would make too many chunks. Their gradients would
    need all logits again, in a backward (NOTE [Sums over chunks] in runtime/workspace.py).
    """
    if max_workspace_mib:
        return workspace
    tokens = padded(-(-problem.num_tokens // max_sums(problem)), token_multiple(problem))
    return max(workspace, tokens * bytes_per_token)


def token_multiple(problem: LinearProblem) -> int:
    """Returns the multiple of tokens for which matmuls are fast."""
    return TOKEN_MULTIPLE.get(problem.student.hidden.device.type, 128)


def tokens_that_fit(
    problem: LinearProblem,
    workspace: int,
    bytes_per_token: int,
    what: str = " with the student's and the teacher's vocabulary entries",
) -> int:
    """Counts the tokens whose logits fit into the workspace."""
    limit = workspace // max(bytes_per_token, 1)
    if limit < 1:
        raise ValueError(
            "max_workspace_mib must hold the logits of a token, "
            f"{bytes_per_token / MIB:.2f} MiB{what}, got {workspace // MIB}"
        )
    return even_step(problem.num_tokens, limit, token_multiple(problem))


def token_chunks(
    problem: LinearProblem, workspace: int, bytes_per_token: int, what: str = ""
) -> list[slice]:
    """Returns chunks of tokens whose logits fit into the workspace."""
    step = tokens_that_fit(problem, workspace, bytes_per_token, what)
    return list(even_ranges(problem.num_tokens, step, token_multiple(problem)))


def logits_buffer(head: Head, tokens: int) -> Tensor:
    """Allocates a buffer for the logits of some tokens."""
    return head.hidden.new_empty((tokens, padded(head.vocab_size)))


def logits_of(head: Head, buffer: Tensor) -> Tensor:
    """Computes ``hidden @ weight.T``, plus an adapter's product, in the buffer's first rows."""
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
    """Holds the gradients of one side, summed over token chunks and blocks of the vocabulary."""

    def __init__(self, problem: LinearProblem, side: int, needs_grad: NeedsGrad) -> None:
        self.head = problem.heads[side]
        # a shard without vocabulary entries adds nothing, and so does a mask that selects no row
        is_added = self.head.vocab_size and problem.num_tokens
        like = torch.empty_like if is_added else torch.zeros_like
        self.sums: dict[str, Tensor] = {}
        for name in PARTS:
            x: Tensor | None = getattr(self.head, name)
            if x is None or not getattr(needs_grad, f"{SIDES[side]}_{name}"):
                continue
            of_bias = torch.zeros_like(x, dtype=problem.compute_dtype) if name == "bias" else None
            self.sums[name] = like(x) if of_bias is None else of_bias

    def add(
        self, d_logits: Tensor, tokens: slice, vocab: slice, side: SideStream = NO_SIDE
    ) -> None:
        """Adds a block of tokens and of the vocabulary; blocks come in order.

        The block has as many columns as this side has of that part of the vocabulary, maybe none.
        The weight's gradient is summed on the side stream.
        """
        side.fork()
        self.add_to_hidden(d_logits, tokens, vocab)
        with side:
            self.add_to_weight(d_logits, tokens, vocab)
        self.add_to_bias(d_logits, vocab)

    def add_to_hidden(self, d_logits: Tensor, tokens: slice, vocab: slice) -> None:
        for kind in ("", "adapter_"):
            total, weight = self.sums.get(f"{kind}hidden"), getattr(self.head, f"{kind}weight")
            if total is not None and d_logits.shape[1]:
                _matmul_into(total[tokens], d_logits, weight[vocab], first=vocab.start == 0)

    def add_to_weight(self, d_logits: Tensor, tokens: slice, vocab: slice) -> None:
        for kind in ("", "adapter_"):
            total, hidden = self.sums.get(f"{kind}weight"), getattr(self.head, f"{kind}hidden")
            if total is not None and d_logits.shape[1]:
                first = tokens.start == 0
                _matmul_into(total[vocab], d_logits.t(), hidden[tokens], first=first)

    def add_to_bias(self, d_logits: Tensor, vocab: slice) -> None:
        if (total := self.sums.get("bias")) is not None:
            total[vocab] += d_logits.sum(0, dtype=total.dtype)

    def gradient(self, name: str) -> Tensor | None:
        """Returns a gradient in the dtype of what it belongs to."""
        total = self.sums.get(name)
        return None if total is None else total.to(getattr(self.head, name).dtype)


def _matmul_into(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)


def gradients_of(sides: list[GradientSums]) -> Gradients:
    """Collects the gradients of both sides, in the order of the operators' outputs."""
    return tuple(sides[SIDES.index(side)].gradient(part) for side, part in OUTPUTS)
