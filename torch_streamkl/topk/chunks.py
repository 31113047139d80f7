"""Computes `linear_topk_kl` in bounded memory: matmuls into a small workspace, as `linear_kl`.

- `forward` computes values by chunks of tokens (one matmul), and the row factors from which
  `backward` computes gradients (one matmul to recompute the logits, one for each gradient).
- `forward_with_gradients` computes both by chunks of tokens, for a weighted sum whose weights are
  known (one matmul, and one for each gradient).
- A renormalised loss needs the logits of its entries only: `sparse.py`.

Several ranks that share the vocabulary exchange 2 + k numbers a token (`Exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from torch_streamkl.linear.chunks import (
    SIDE_STREAM_MIB,
    Gradients,
    GradientSums,
    block_steps,
    blocks,
    logits_buffer,
    logits_of,
    token_chunks,
    workspace_for_sums,
)
from torch_streamkl.linear.problem import NeedsGrad, max_sums, row_bytes, workspace_bytes
from torch_streamkl.linear.rows import transformed
from torch_streamkl.runtime.streams import SideStream
from torch_streamkl.runtime.workspace import MIB, padded, ranges
from torch_streamkl.topk import entries, sparse
from torch_streamkl.topk.problem import Places, RowParts, RowResults, TopkProblem

# One side's logits: 2,048 tokens of 152,064 entries. 8,192 tokens are four chunks of them and not
# five, as with the 512 MiB of `linear_kl`: 43.3 ms for 46.0 (hidden size 3584, one H100).
GPU_WORKSPACE_MIB = 640

TOKENS_OF_ENTRIES = 2**22  # numbers of one temporary of entries, of which about ten are alive


@dataclass(frozen=True)
class Exchange:
    """Says how much memory logits may take, and merges the parts of ranks' rows.

    With ranks, the workspace is that of the rank with the least, and a row that of the largest
    shard: all ranks take the same chunks.
    """

    workspace: int  # bytes
    row_bytes: int  # of one token's logits
    max_workspace_mib: int  # 0: the default
    merge: Callable[[RowParts], RowParts] = lambda parts: parts

    @staticmethod
    def of_one(problem: TopkProblem, max_workspace_mib: int) -> Exchange:
        """Returns that of a rank with the whole vocabulary."""
        workspace = workspace_of(problem, max_workspace_mib)
        return Exchange(workspace, row_bytes(problem.as_linear)[0], max_workspace_mib)

    def chunks(self, problem: TopkProblem) -> list[slice]:
        """Returns chunks of tokens whose logits fit."""
        return token_chunks(problem.as_linear, self.workspace, self.row_bytes)

    def gradient_chunks(self, problem: TopkProblem) -> list[slice]:
        """Returns those over which gradients are summed."""
        linear = problem.as_linear
        workspace = workspace_for_sums(
            linear, self.workspace, self.max_workspace_mib, self.row_bytes
        )
        return token_chunks(linear, workspace, self.row_bytes)


def workspace_of(problem: TopkProblem, max_workspace_mib: int) -> int:
    """Returns the bytes that logits may take at once: as asked for, or the default."""
    default = 0 if problem.head.hidden.device.type == "cpu" else GPU_WORKSPACE_MIB
    return workspace_bytes(problem.as_linear, max_workspace_mib or default)


def forward(problem: TopkProblem, rows: ModuleType, exchange: Exchange) -> RowResults:
    """Returns values of all rows, and what the backward needs."""
    out = RowResults.allocate(problem)
    merged = row_parts(problem, rows, exchange)
    for tokens in ranges(problem.num_tokens, max(1, TOKENS_OF_ENTRIES // problem.ids.shape[1])):
        own = RowParts(merged.high[tokens], merged.log_sum[tokens], merged.scores[tokens])
        entries.results(problem.of_tokens(tokens), own, out.of_tokens(tokens))
    return out


def row_parts(problem: TopkProblem, rows: ModuleType, exchange: Exchange) -> RowParts:
    """Returns what the logits of all rows tell."""
    if problem.is_sparse:
        parts = [_sparse_parts(problem, Places.of(problem))]
    else:
        chunks = exchange.chunks(problem)
        longest = max((c.stop - c.start for c in chunks), default=0)
        buffer = logits_buffer(problem.head, longest)
        parts = []
        for chunk in chunks:
            part = problem.of_tokens(chunk)
            logits = logits_of(part.head, buffer)
            places = Places.of(part)
            parts.append(_parts(part, rows, logits, _gathered(logits, places), places))
    return exchange.merge(_joined(problem, parts))


def _joined(problem: TopkProblem, parts: list[RowParts]) -> RowParts:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        nothing = problem.log_probs.new_empty(problem.ids.shape, dtype=problem.compute_dtype)
        return RowParts(nothing[:, 0], nothing[:, 0], nothing)
    each = ([p.high for p in parts], [p.log_sum for p in parts], [p.scores for p in parts])
    return RowParts(*map(torch.cat, each))


def backward(
    problem: TopkProblem,
    results: RowResults,
    grad: Tensor,
    needs_grad: NeedsGrad,
    rows: ModuleType,
    exchange: Exchange,
) -> Gradients:
    """Returns gradients of ``sum(grad * value)`` to hidden states, weight and bias."""
    weighted = results.times(grad.to(problem.compute_dtype))
    return gradients(problem, weighted, needs_grad, rows, exchange)


def gradients(
    problem: TopkProblem,
    results: RowResults,
    needs_grad: NeedsGrad,
    rows: ModuleType,
    exchange: Exchange,
) -> Gradients:
    """Returns the gradients that follow from those to the scores.

    It goes by blocks of the vocabulary, with all tokens if they fit, as that of `linear_kl`.
    """
    if problem.is_sparse:
        return _sparse_gradients(problem, results, needs_grad)
    linear, head = problem.as_linear, problem.head
    sums = GradientSums(linear, 0, needs_grad)
    if head.vocab_size == 0 or problem.num_tokens == 0:
        return _gradients_of(sums)
    room = exchange.workspace // head.hidden.element_size()
    tokens_step, vocab_step = steps = block_steps(linear, head.vocab_size, room)
    buffer = head.hidden.new_empty((tokens_step, padded(vocab_step)))
    for vocab, chunk in blocks(linear, head.vocab_size, steps):
        part = problem.of_vocab(vocab).of_tokens(chunk)
        logits = logits_of(part.head, buffer)
        places = Places.of(part)
        entry_logits = _gathered(logits, places)
        _hide_(part, logits, places)
        _gradient_(part, rows, logits, entry_logits, places, results.of_tokens(chunk))
        sums.add(logits, chunk, vocab)
    return _gradients_of(sums)


def forward_with_gradients(
    problem: TopkProblem,
    weight: Tensor,
    needs_grad: NeedsGrad,
    rows: ModuleType,
    exchange: Exchange,
) -> tuple[RowResults, Gradients]:
    """Returns values, and gradients of ``sum(weight * value)`` from logits that are made once."""
    if not needs_grad.student:
        return forward(problem, rows, exchange), (None, None, None)
    out = RowResults.allocate(problem)

    def results_of(part: TopkProblem, merged: RowParts, tokens: slice) -> RowResults:
        results = out.of_tokens(tokens)
        entries.results(part, merged, results)
        return results.times(weight[tokens])

    if (
        problem.is_sparse
        or (grads := gradients_of_chunks(problem, results_of, needs_grad, rows, exchange)) is None
    ):
        out = forward(problem, rows, exchange)
        grads = backward(problem, out, weight, needs_grad, rows, exchange)
    return out, grads


def gradients_of_chunks(
    problem: TopkProblem,
    results_of: Callable[[TopkProblem, RowParts, slice], RowResults],
    needs_grad: NeedsGrad,
    rows: ModuleType,
    exchange: Exchange,
) -> Gradients | None:
    """Returns gradients from logits that are made once; None if there are too many chunks.

    ``results_of`` returns the weighted gradients of some tokens' rows to their scores.
    """
    linear = problem.as_linear
    chunks = exchange.gradient_chunks(problem)
    if len(chunks) > max_sums(linear):  # NOTE [Sums over chunks] in runtime/workspace.py
        return None
    sums = GradientSums(linear, 0, needs_grad)
    longest = max((c.stop - c.start for c in chunks), default=0)
    buffer = logits_buffer(problem.head, longest)
    whole = slice(0, problem.head.vocab_size)
    has_room = exchange.workspace >= SIDE_STREAM_MIB * MIB
    side = SideStream(buffer, has_room)
    for chunk in chunks:
        part = problem.of_tokens(chunk)
        places = Places.of(part)
        side.join()  # the last chunk's gradient of the weight reads the buffer
        logits = logits_of(part.head, buffer)
        entry_logits = _gathered(logits, places)
        merged = exchange.merge(_parts(part, rows, logits, entry_logits, places))
        results = results_of(part, merged, chunk)
        _gradient_(part, rows, logits, entry_logits, places, results)
        sums.add(logits, chunk, whole, side)
    side.join()
    return _gradients_of(sums)


def _gradients_of(sums: GradientSums) -> Gradients:
    return tuple(sums.gradient(name) for name in ("hidden", "weight", "bias"))


def _parts(
    problem: TopkProblem, rows: ModuleType, logits: Tensor, entry_logits: Tensor, places: Places
) -> RowParts:
    """Returns what whole rows of logits tell. With a tail bucket, it hides those of the entries.

    That gives the probability of the tail without a difference of nearly equal numbers.
    """
    scores, _ = _entry_scores(problem, entry_logits, places)
    _hide_(problem, logits, places)
    high, log_sum = rows.log_sums(problem, logits)
    return RowParts(high, log_sum, scores)


def _hide_(problem: TopkProblem, logits: Tensor, places: Places) -> None:
    """Makes the logits of the entries -inf if the rows are sums over the other ones."""
    if problem.tail == "bucket" and logits.shape[1]:
        # padding adds 0 to some logit
        hidden = torch.where(places.inside, -torch.inf, 0.0).to(logits.dtype)
        logits.scatter_add_(1, places.index, hidden)


def _gathered(logits: Tensor, places: Places) -> Tensor:
    """Returns the logits of the entries; any number where one is not here."""
    if not logits.shape[1]:
        return logits.new_zeros(places.index.shape)
    return logits.gather(1, places.index)


def _entry_scores(
    problem: TopkProblem, entry_logits: Tensor, places: Places
) -> tuple[Tensor, Tensor | float]:
    """Returns scores of the entries, 0 where they are not here, and d(score)/d(logit)."""
    head = problem.head
    bias = None
    if head.bias is not None and head.vocab_size:
        bias = head.bias[places.index]
    y, slope = transformed(head, entry_logits, bias, problem.compute_dtype)
    scores = torch.where(places.inside, y * (1.0 / problem.temperature), 0.0)
    return scores, slope / problem.temperature


def _entry_gradient(
    problem: TopkProblem, entry_logits: Tensor, places: Places, results: RowResults
) -> Tensor:
    _, slope = _entry_scores(problem, entry_logits, places)
    return torch.where(places.inside, results.entry_grad * slope, 0.0)


def _gradient_(
    problem: TopkProblem,
    rows: ModuleType,
    logits: Tensor,
    entry_logits: Tensor,
    places: Places,
    results: RowResults,
) -> None:
    """Overwrites logits, of which those of a tail bucket's entries are hidden, by gradients."""
    if not logits.shape[1]:
        return
    d = _entry_gradient(problem, entry_logits, places, results)
    rows.gradient_(problem, logits, results.factors)
    logits.scatter_add_(1, places.index, d.to(logits.dtype))


def _sparse_parts(problem: TopkProblem, places: Places) -> RowParts:
    scores, _ = _entry_scores(problem, sparse.logits_of(problem, places), places)
    nothing = scores.new_zeros(problem.num_tokens)
    return RowParts(nothing - torch.inf, nothing, scores)


def _sparse_gradients(
    problem: TopkProblem, results: RowResults, needs_grad: NeedsGrad
) -> Gradients:
    places = Places.of(problem)
    entry_logits = results.entry_grad
    if problem.head.softcap:  # else the slope is a number
        entry_logits = sparse.logits_of(problem, places)
    d = _entry_gradient(problem, entry_logits, places, results)
    needs = (needs_grad.student_hidden, needs_grad.student_weight, needs_grad.student_bias)
    return sparse.gradients(problem, places, d, needs)
