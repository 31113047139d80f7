"""Runs row programs by blocks of rows with materialized scores: launches and matmuls.

The workspace is bounded. A block has as many rows as fit. In the backward of LM heads it has as
many vocabulary entries as fit, with all tokens, so that each block of a weight's gradient is one
matmul. A gradient to dot products without heads is materialized in the place of the dot products.
Sums over heads from the forward are kept for the backward if they are small.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor

from torch_streamkl.rows import derive, losses, tile, torch_impl
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import RowProblem, Slices, part
from torch_streamkl.rows.program import COLUMNS, VALUES, Program
from torch_streamkl.rows.torch_impl import Result
from torch_streamkl.rows.triton import launches as row_kernels
from torch_streamkl.rows.triton.cotangents import cotangents_of
from torch_streamkl.rows.triton.gradients import Gradients
from torch_streamkl.rows.triton.launches import MAX_DIM, slots_of
from torch_streamkl.rows.triton.materialized import (
    BACKWARD,
    DIFFERENTIATED,
    FORWARD,
    Block,
    dots_of,
    multiplied,
    new_buffer,
    nodes_of,
    nodes_to_materialize,
    read_twice,
)
from torch_streamkl.runtime.streams import SideStream
from torch_streamkl.runtime.workspace import (
    DEFAULT_WORKSPACE_MIB,
    MAX_LOW_PRECISION_SUMS,
    MIB,
    Chunks,
    even_ranges,
    even_step,
    padded,
)

ATTENTION_WORKSPACE_MIB = 64
WORKSPACE_MIB_WITH_KEPT = (
    42  # where sums over heads are kept: an indexer at 4096 stays below 200 in all
)
KEPT_MIB = 64  # of sums over heads, in float32: a teacher of one sequence of 4096
KEPT_SHARE = 0.25  # of the operands' bytes, which live until the backward, too
MOST_PARTS = 16  # of a chunk
# Bytes of a part's materialized nodes relative to the chunk's logits, at most: beyond,
# parts would be so short that the product that is saved is lost in them. A teacher's cached
# top-k ids have 2.5, and win (bench/notes/row_programs.md)
MOST_OF_PARTS = 3
PART_BYTES = 2**30  # that a part's launches and tails are counted as: 0.3 ms of an H200's memory


def why_unsupported(problem: RowProblem, is_differentiated: bool) -> str:
    """Explains why a problem cannot run with materialized scores; empty if it can."""
    program = problem.program
    if problem.compute_dtype == torch.float64:
        return "kernels compute in float32, and operands are float64"
    if any(c.kind in (COLUMNS, VALUES) and c.head for c in program.captures):
        return "columns that differ between heads have no kernels"
    for (q, _), head in zip(problem.operands, program.dot_heads, strict=True):
        if head and q.shape[-1] > MAX_DIM:
            return f"operands have at most {MAX_DIM} dimensions in kernels, got {q.shape[-1]}"
    for which in (DIFFERENTIATED, BACKWARD) if is_differentiated else (FORWARD,):
        if any(n.op == "sum_heads" and not n.by_key for n in nodes_of(program, which)):
            return "sums over heads of per-row values have no kernels"
    axes = sorted(set(program.dot_heads) - {0})  # what has no heads is multiplied by torch
    of_axes = [row_kernels.why_unsupported_on_gpu(problem, dots_of(program, x)) for x in axes]
    return next((x for x in of_axes or [row_kernels.why_unsupported_on_gpu(problem, ())] if x), "")


def _bytes_of_each(
    problem: RowProblem,
    which: str,
    roots: tuple[tuple[int, int], ...],
    kept: Container[int] = (),
) -> dict[int, int]:
    """Returns the bytes of each materialized node, for one row and key, without gradients."""
    nodes, found = nodes_of(problem.program, which), {}
    for i in nodes_to_materialize(problem.program, which, roots):
        node = nodes[i]
        if i in kept:
            continue
        if node.op == "dot":
            found[i] = problem.operands[int(node.value)][0].element_size()
        elif node.op == "capture" and problem.program.captures[int(node.value)].kind == COLUMNS:
            found[i] = 1
        else:
            found[i] = 4
    return found


def _bytes_of(
    problem: RowProblem,
    which: str,
    roots: tuple[tuple[int, int], ...],
    kept: Container[int],
) -> int:
    """Counts the bytes of all materialized nodes for one row and key, with the
    gradients that reuse no dot product.
    """
    return max(sum(_bytes_of_each(problem, which, roots, kept).values()), 2)


def kept_tensors(problem: RowProblem) -> tuple[int, ...]:
    """Returns the sums over heads, as nodes, that the backward reads instead of computing them
    again.

    Those of the most products come first.
    """
    program, nodes = problem.program, problem.program.nodes
    operands = sum(x.numel() * x.element_size() for pair in problem.operands for x in pair)
    room = min(KEPT_MIB * MIB, int(KEPT_SHARE * operands))
    room //= 4 * problem.batch * problem.num_rows * padded(problem.num_keys)

    def products(i: int) -> int:
        axis = nodes[nodes[i].args[0]].head
        dims = zip(problem.operands, program.dot_heads, strict=True)
        return problem.num_heads(axis) * sum(q.shape[-1] for (q, _), head in dims if head == axis)

    return tuple(sorted(read_twice(program), key=products, reverse=True)[:room])


def allocate(problem: RowProblem, is_differentiated: bool) -> Result:
    """Allocates results, uninitialised."""
    result = torch_impl.allocate(problem, is_differentiated)
    if is_differentiated:
        result.materialized = [new_buffer(problem, torch.float32) for _ in kept_tensors(problem)]
    return result


def _workspace(problem: RowProblem, has_kept: bool) -> int:
    device = problem.like.device.type
    mib = DEFAULT_WORKSPACE_MIB.get(device, DEFAULT_WORKSPACE_MIB["cuda"])
    if not problem.is_of_vocab:
        return MIB * min(mib, WORKSPACE_MIB_WITH_KEPT if has_kept else ATTENTION_WORKSPACE_MIB)
    return MIB * mib * 15 // 16  # the rest is for places of ids and per-row values


def _row_blocks(
    problem: RowProblem, bytes_of_pair: int, has_kept: bool
) -> Iterator[tuple[slice, slice, slice]]:
    """Yields blocks of batch elements and rows, with all keys."""
    keys = slice(0, problem.num_keys)
    room = max(1, _workspace(problem, has_kept) // (bytes_of_pair * padded(problem.num_keys)))
    batch = max(1, min(problem.batch, room // problem.num_rows))
    for b in range(0, problem.batch, batch):
        for rows in even_ranges(problem.num_rows, max(1, room // batch), 128):
            yield slice(b, min(b + batch, problem.batch)), rows, keys


def forward(problem: RowProblem, is_differentiated: bool) -> Result:
    """Makes all passes of a block of rows before the next block: they share its materialized
    scores.
    """
    program, which = problem.program, DIFFERENTIATED if is_differentiated else FORWARD
    result = allocate(problem, is_differentiated)
    kept = dict(zip(kept_tensors(problem), result.materialized, strict=False))
    passes = _passes(program, derive.forward_plan(program, is_differentiated))
    roots = tuple((node, axis) for slots, axis in passes for node, _ in slots.values())
    for at in _row_blocks(problem, _bytes_of(problem, which, roots, kept), bool(kept)):
        block = Block(problem, which, result, {}, at, kept, is_first=True)
        for slots, axis in passes:
            block.sums(slots, axis, {})
    return result


def _passes(
    program: Program, plan: derive.ForwardPlan
) -> list[tuple[dict[int, tuple[int, str]], int]]:
    """Returns what each pass over the keys gathers, for the heads of an axis."""
    passes: list[tuple[dict[int, tuple[int, str]], int]] = []
    for level in range(1, plan.num_passes + 1):
        slots = slots_of(program, plan, level)
        for axis in sorted({axis for _, _, axis in slots.values()}, reverse=True):
            passes.append(({s: x[:2] for s, x in slots.items() if x[2] == axis}, axis))
    return passes


def backward(
    problem: RowProblem,
    result: Result,
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Returns gradients to operands and captured tensors, block by block."""
    seeds = row_kernels.cotangents_of(problem, result, grads)
    out = Gradients(problem, needs_grad)
    nodes = nodes_of(problem.program, BACKWARD)
    each = tuple((n, nodes[n].head) for n in (*out.dots.values(), *out.captures.values()))
    kept = dict(zip(kept_tensors(problem), result.materialized, strict=True))
    if each:
        size = _bytes_of(problem, BACKWARD, each, kept)
        blocks = _vocab_blocks if problem.is_of_vocab else _row_blocks
        for at in blocks(problem, size, bool(kept)):
            out.add(Block(problem, BACKWARD, result, seeds, at, kept))
    rest = torch_impl.backward(problem, result, grads, out.rest) if any(out.rest) else None
    return out.finished(rest)


def loss_and_gradients(
    problem: RowProblem, loss: RowLoss, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
) -> losses.LossResult:
    """Computes what each row adds to a loss, and the loss's gradients, from logits that are made
    once.

    Logits that get a gradient are of a chunk of tokens. Their gradient takes their place, and a
    matmul adds it to the weight's. Other tensors, such as ids, are of a part of the chunk.
    """
    result, out = allocate(problem, True), Gradients(problem, needs_grad)
    sizes = _chunks(problem, out)
    if sizes is None:
        return _in_two_passes(problem, loss, tensors, needs_grad)
    batch, keys = slice(0, 1), slice(0, problem.num_keys)
    chunks = list(even_ranges(problem.num_rows, sizes.tokens, 128))
    longest = problem.of_block(batch, slice(0, max(c.stop - c.start for c in chunks)), keys)
    buffers = {i: new_buffer(longest, problem.operands[i][0].dtype) for i in out.dots}
    side = SideStream(problem.like)
    for chunk in chunks:
        side.join()  # the last chunk's gradients of weights read the logits' place
        rows_of = problem.of_block(batch, chunk, keys)
        logits = {
            i: multiplied(rows_of, i, part(x, batch, slice(0, rows_of.num_rows)))
            for i, x in buffers.items()
        }
        for own in even_ranges(rows_of.num_rows, sizes.teacher_tokens, 128):
            at = (batch, slice(chunk.start + own.start, chunk.start + own.stop), keys)
            given = {i: part(x, batch, own) for i, x in logits.items()}
            _add_rows(problem, result, loss, tensors, out, at, given)
        side.fork()
        for i, d in logits.items():
            out.add_to_rows(i, d, (batch, chunk, keys))
        with side:
            for i, d in logits.items():
                out.add_to_columns(i, d, (batch, chunk, keys))
    side.join()
    reductions = dict(enumerate(result.reductions))
    return losses.result_of(problem, loss, reductions, tensors, out.finished(None))


def _add_rows(
    problem: RowProblem,
    result: Result,
    loss: RowLoss,
    tensors: Sequence[Tensor],
    out: Gradients,
    at: Slices,
    logits: dict[int, Tensor],
) -> None:
    """Computes values of some rows, and by dot their gradients in place of the logits."""
    program = problem.program
    given = {
        i: logits[int(n.value)]
        for i, n in enumerate(program.nodes)
        if n.op == "dot" and int(n.value) in logits
    }
    first = Block(problem, DIFFERENTIATED, result, {}, at, {})
    first.share(given, {})
    for slots, axis in _passes(program, derive.forward_plan(program, True)):
        first.sums(slots, axis, {})
    of_rows = result.of_rows(at[0], at[1])
    seeds = cotangents_of(problem, of_rows, loss, tensors, at)
    last = Block(problem, BACKWARD, result, {}, at, {})
    last.share(first.own_tensors, seeds)
    for i, node in out.captures.items():
        out.add_capture(last, i, node)
    if out.dots:
        last.element_gradients(out.dots)


def _in_two_passes(
    problem: RowProblem, loss: RowLoss, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
) -> losses.LossResult:
    """Runs forward, then backward, if chunks are too short: 16-bit sums round with each chunk.

    NOTE [Sums over chunks] in runtime/workspace.py.
    """
    result, at = forward(problem, True), tile.whole(problem)
    reductions = dict(enumerate(result.reductions))
    grads = losses.gradients(problem, loss, reductions, tensors, at)
    ordered = [grads.get(c) for c in problem.program.outputs]
    found = backward(problem, result, ordered, needs_grad)
    return losses.result_of(problem, loss, reductions, tensors, found)


def _chunks(problem: RowProblem, out: Gradients) -> Chunks | None:
    """Chooses the tokens of a chunk and of its parts: those that move the fewest bytes.

    A chunk reads the weights twice and reads and writes their gradients, which no other work
    hides: counted twice. A part reads the weights of the other dots, and has its launches.
    """
    program, element = problem.program, problem.like.element_size()
    nodes = nodes_of(program, BACKWARD)
    each = tuple((n, nodes[n].head) for n in (*out.dots.values(), *out.captures.values()))
    plan = derive.forward_plan(program, True)
    sums = [(r.node, r.head) for r in program.reductions]
    sums += [(j.node, j.head) for j in plan.jacobians]
    found = _bytes_of_each(problem, DIFFERENTIATED, tuple(sums)) | _bytes_of_each(
        problem, BACKWARD, each
    )
    of_chunk = element * len(out.dots)
    of_part = max(0, sum(found.values()) - of_chunk) + 4 * len(out.captures)
    if of_part > MOST_OF_PARTS * of_chunk:
        return None
    vocab = padded(problem.num_keys)
    room = _workspace(problem, False) // vocab
    weights = [k.numel() * k.element_size() for _, k in problem.operands]
    mine = sum(weights[i] for i in out.dots)
    best: tuple[float, Chunks | None] = (math.inf, None)
    for parts in range(1, MOST_PARTS + 1) if of_part else (1,):
        tokens = min(int(room // max(of_chunk + of_part / parts, 1)), problem.num_rows)
        if tokens < parts:
            continue
        tokens = even_step(problem.num_rows, tokens, 128)
        num_chunks = -(-problem.num_rows // tokens)
        cost = num_chunks * (6 * mine + parts * (sum(weights) - mine + PART_BYTES))
        if cost < best[0]:
            best = cost, Chunks(tokens, -(-tokens // parts))
    chunks = best[1]
    most = MAX_LOW_PRECISION_SUMS if element == 2 else problem.num_rows
    is_possible = chunks is not None and -(-problem.num_rows // chunks.tokens) <= most
    return chunks if is_possible else None


def _vocab_blocks(
    problem: RowProblem, bytes_of_pair: int, has_kept: bool = False
) -> Iterator[tuple[slice, slice, slice]]:
    """Yields blocks of the vocabulary, with all tokens if they fit: one matmul per gradient."""
    room = _workspace(problem, has_kept) // bytes_of_pair
    fewest = -(-problem.num_keys // MAX_LOW_PRECISION_SUMS)
    vocab = padded(max(room // problem.num_rows, fewest), 256)
    vocab = even_step(problem.num_keys, vocab, 256)
    tokens = max(1, room // padded(vocab))
    for keys in even_ranges(problem.num_keys, vocab, 256):
        for rows in even_ranges(problem.num_rows, tokens, 128):
            yield slice(0, problem.batch), rows, keys
