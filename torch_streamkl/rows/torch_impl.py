"""Runs row programs in plain torch, by blocks of rows and keys, in bounded memory.

program.py has the algebra of the forward and backward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_streamkl.program import meanings
from torch_streamkl.program.graph import ARGMAX
from torch_streamkl.program.steps import Step
from torch_streamkl.rows import derive, losses, tile
from torch_streamkl.rows.losses import RowLoss
from torch_streamkl.rows.problem import ALL, RowProblem, Slices, part
from torch_streamkl.rows.program import KEY, PAIR, ROW, VALUES, Program
from torch_streamkl.rows.tile import RowValues, Values
from torch_streamkl.runtime.workspace import (
    CPU_SHARE_OF_WEIGHTS,
    DEFAULT_WORKSPACE_MIB,
    MIB,
    even_step,
    ranges,
)

DotProducts = Callable[[RowProblem, int, Slices], Tensor]
BLOCK_ELEMENTS = 1 << 18  # of a tile, all heads counted: what a core's cache holds a few of
MAX_KEYS = 1024  # of a tile
# a GPU waits for the launches of small blocks: 32 MiB for each value of a tile
ON_GPU, KEYS_ON_GPU = 32, 16


@dataclass
class Result:
    """Holds every reduction, the two parts of log-sum-exps, and the Jacobians that are not 0.

    If kernels materialize sums over heads, it also holds those that the backward would recompute.
    """

    reductions: list[Tensor]
    parts: list[tuple[Tensor, Tensor]]
    jacobians: list[Tensor]
    materialized: list[Tensor] = field(default_factory=list)

    @property
    def flat(self) -> list[Tensor]:
        """Returns all tensors, as the operator returns them."""
        parts = (x for pair in self.parts for x in pair)
        return [*self.reductions, *parts, *self.jacobians, *self.materialized]

    @staticmethod
    def of(program: Program, tensors: Sequence[Tensor]) -> Result:
        """Selects from all tensors of a call that is differentiated."""
        count, pairs = len(program.reductions), len(program.logsumexps)
        rest = tensors[count:]
        parts = [(rest[2 * i], rest[2 * i + 1]) for i in range(pairs)]
        rest = rest[2 * pairs :]
        num_jacobians = len(derive.forward_plan(program, True).jacobians)
        return Result(
            list(tensors[:count]), parts, list(rest[:num_jacobians]), list(rest[num_jacobians:])
        )

    def parts_of(self, program: Program, c: int) -> tuple[Tensor, Tensor] | None:
        """Returns the largest element and logarithm of the rest of a log-sum-exp; None for a
        sum.
        """
        if c not in program.logsumexps:
            return None
        return self.parts[program.logsumexps.index(c)]

    def of_rows(self, batch: slice, rows: slice) -> Result:
        """Returns views of some rows, without materialized nodes."""
        return Result(
            [part(x, batch, ALL, rows) for x in self.reductions],
            [(part(a, batch, ALL, rows), part(b, batch, ALL, rows)) for a, b in self.parts],
            [part(x, batch, ALL, rows) for x in self.jacobians],
        )

    def usable(self, program: Program, batch: slice, rows: slice) -> RowValues:
        """Returns all reductions of some rows in the form that elements use."""
        found: RowValues = {}
        for c, value in enumerate(self.reductions):
            parts = self.parts_of(program, c)
            cut = None if parts is None else (parts[0][batch, :, rows], parts[1][batch, :, rows])
            is_sum = program.reductions[c].is_added
            found[c] = tile.usable(value[batch, :, rows], cut, is_sum)
        return found


def _mul0(a: Tensor, b: Tensor) -> Tensor:
    product = a * b
    return meanings.mul0(a, b) if _has_nan(product) else product


def _div0(a: Tensor, b: Tensor) -> Tensor:
    quotient = a / b
    return meanings.div0(a, b) if _has_nan(quotient) else quotient


def _has_nan(x: Tensor) -> bool:
    """Whether there may be NaN: in the sum, which is less work than to look for it."""
    return bool(x.sum().isnan())


# 0 times a number is 0 without being told so, and what is not a number is rare. A GPU would wait
ON_CPU: dict[str, Callable[..., Tensor]] = {"mul0": _mul0, "div0": _div0}


def _evaluate(
    problem: RowProblem,
    nodes: Sequence[Step],
    roots: Sequence[int],
    at: Slices,
    reductions: RowValues,
    seeds: Values,
    dot: DotProducts = tile.dots,
) -> list[Tensor]:
    run = None if problem.is_on_gpu else ON_CPU
    return tile.evaluate(problem, nodes, roots, at, reductions, seeds, dot, run=run)


def _keys_of_block(problem: RowProblem) -> int:
    most = MAX_KEYS * (KEYS_ON_GPU if problem.is_on_gpu else 1)
    return max(1, min(problem.num_keys, most))


def row_blocks(problem: RowProblem) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of batch and rows: none where the data has selected none."""
    keys, factor = _keys_of_block(problem), ON_GPU if problem.is_on_gpu else 1
    budget = max(1, factor * BLOCK_ELEMENTS // (keys * max(1, problem.max_heads)))
    rows = max(1, min(problem.num_rows, budget))
    batch = max(1, budget // rows)
    for b in range(0, problem.batch, batch):
        for i in range(0, problem.num_rows, rows):
            yield (
                slice(b, min(b + batch, problem.batch)),
                slice(i, min(i + rows, problem.num_rows)),
            )


def key_blocks(problem: RowProblem, batch: slice, rows: slice) -> Iterator[Slices]:
    """Yields blocks of keys that some row of the block may have."""
    keys, step = problem.keys_of(rows), _keys_of_block(problem)
    for j in range(keys.start, keys.stop, step):
        yield batch, rows, slice(j, min(j + step, keys.stop))


def forward(problem: RowProblem, is_differentiated: bool) -> Result:
    """Computes all reductions, with one pass over the keys for each level of sums that use earlier
    sums.
    """
    plan = derive.forward_plan(problem.program, is_differentiated)
    result = allocate(problem, is_differentiated)
    for batch, rows in row_blocks(problem):
        _forward_of(problem, plan, result, batch, rows)
    return result


def _forward_of(
    problem: RowProblem,
    plan: derive.ForwardPlan,
    result: Result,
    batch: slice,
    rows: slice,
    dot: DotProducts = tile.dots,
) -> None:
    """Makes all passes of a block of rows."""
    known: RowValues = {}
    for level in range(1, plan.num_passes + 1):
        gathered, parts = _pass(problem, plan, level, batch, rows, known, dot)
        for slot, value in gathered.items():
            if slot < len(result.reductions):
                is_sum = problem.program.reductions[slot].is_added
                known[slot] = tile.usable(value, parts.get(slot), is_sum)
                result.reductions[slot][batch, :, rows] = value
                for x, target in zip(
                    parts.get(slot, ()),
                    result.parts_of(problem.program, slot) or (),
                    strict=True,
                ):
                    target[batch, :, rows] = x
            else:
                target = result.jacobians[slot - len(result.reductions)]
                target[batch, :, rows] = value


def allocate(problem: RowProblem, is_differentiated: bool) -> Result:
    """Returns results that nothing is written to so far."""
    plan = derive.forward_plan(problem.program, is_differentiated)
    q = problem.like

    def empty(head: int, size: int = 0, dtype: torch.dtype = problem.compute_dtype) -> Tensor:
        # blocks of which a row has no key are not written
        make = q.new_zeros if size else q.new_empty
        return make(problem.value_shape(head, size), dtype=dtype)

    return Result(
        [empty(r.head, r.size, problem.dtype_of(r.kind)) for r in problem.program.reductions],
        [
            (empty(problem.program.reductions[c].head), empty(problem.program.reductions[c].head))
            for c in problem.program.logsumexps
        ],
        # in r_b = sum_c r_c K_cb of a nested softmax, what is left is a small part of the terms
        [empty(j.head, j.size, torch.float64) for j in plan.jacobians],
    )


def _pass(
    problem: RowProblem,
    plan: derive.ForwardPlan,
    level: int,
    batch: slice,
    rows: slice,
    known: RowValues,
    dot: DotProducts,
) -> tuple[Values, dict[int, tuple[Tensor, Tensor]]]:
    """Gathers what one pass computes, by number: reductions, then Jacobians; parts of
    log-sum-exps.
    """
    program = problem.program
    count = len(program.reductions)
    sums: dict[int, tuple[int, int]] = {}  # slot: node and axis of heads
    sizes: dict[int, int] = {}  # of the blocks that slots are summed over, if any
    maxima: dict[int, tuple[int, int]] = {}
    for c, reduction in enumerate(program.reductions):
        if program.levels[c] == level:
            into = sums if reduction.is_added else maxima
            into[c] = (reduction.node, reduction.head)
            sizes[c] = reduction.size
    for slot, jacobian in enumerate(plan.jacobians, start=count):
        if jacobian.level == level:
            sums[slot] = (jacobian.node, jacobian.head)
            sizes[slot] = jacobian.size
    if not sums and not maxima:
        return {}, {}
    roots = [node for node, _ in (*sums.values(), *maxima.values())]

    def full(
        head: int, value: float, dtype: torch.dtype = problem.compute_dtype, size: int = 0
    ) -> Tensor:
        shape = [batch.stop - batch.start, problem.num_heads(head), rows.stop - rows.start]
        shape += [problem.num_blocks(size)] if size else []
        return problem.like.new_full(shape, value, dtype=dtype)

    totals = {
        slot: full(
            head, 0.0, problem.compute_dtype if slot < count else torch.float64, sizes[slot]
        )
        for slot, (_, head) in sums.items()
    }
    peaks = {slot: full(head, -math.inf) for slot, (_, head) in maxima.items()}
    row_sums = {
        slot: full(head, 0.0) for slot, (_, head) in maxima.items() if slot in program.logsumexps
    }
    places = {
        slot: full(head, 0, torch.int64)
        for slot, (_, head) in maxima.items()
        if program.reductions[slot].kind == ARGMAX
    }
    for at in key_blocks(problem, batch, rows):
        keep = tile.allowed(problem, at)
        elements = _evaluate(problem, plan.nodes, roots, at, known, {}, dot)
        num_keys = at[2].stop - at[2].start
        for slot, x in zip((*sums, *maxima), elements, strict=True):
            if slot in totals:
                x = x.expand(*totals[slot].shape[:3], num_keys)
                x = x if keep is None else torch.where(keep, x, 0.0)
                tile.add(x, at[2].start, sizes[slot], totals[slot])
            else:
                x = x.expand(*peaks[slot].shape, num_keys)
                x = x if keep is None else torch.where(keep, x, -math.inf)
                if slot in places:
                    tile.add_place(x, at[2].start, peaks[slot], places[slot])
                    continue
                peak = torch.maximum(peaks[slot], x.amax(-1))
                base = torch.where(peak.isinf(), 0.0, peak)  # inf - inf is NaN
                if slot in row_sums:
                    row_sums[slot] *= (peaks[slot] - base).exp()
                    row_sums[slot] += (x - base[..., None]).exp().sum(-1)
                peaks[slot] = peak
    parts = {slot: (peaks[slot], row_sum.log()) for slot, row_sum in row_sums.items()}
    totals |= {slot: peak for slot, peak in peaks.items() if slot not in row_sums} | places
    for slot, (peak, row_sum) in parts.items():
        totals[slot] = torch.where(peak == -math.inf, -math.inf, peak + row_sum)
    return totals, parts


def row_gradients(
    problem: RowProblem, result: Result, grads: Sequence[Tensor | None]
) -> dict[int, Tensor]:
    """Returns r_c of every reduction that the gradients of the outputs reach."""
    program = problem.program
    jacobians = derive.forward_plan(program, True).jacobians
    r: dict[int, Tensor] = {}

    def accumulate(c: int, value: Tensor) -> None:
        heads = problem.num_heads(program.reductions[c].head)
        rest = value.shape[2:]
        value = value.sum(1, keepdim=True) if heads == 1 else value.expand(-1, heads, *rest)
        r[c] = r[c] + value if c in r else value

    for c, grad in zip(program.outputs, grads, strict=True):
        if grad is not None:
            accumulate(c, grad.double())
    for c in range(len(program.reductions) - 1, -1, -1):
        for jacobian, value in zip(jacobians, result.jacobians, strict=True):
            if jacobian.reduction == c and c in r:
                value = torch.where(r[c] == 0, r[c], r[c] * value)  # also next to an infinity
                accumulate(jacobian.by, value.sum(-1) if jacobian.size else value)
    return {c: x.to(problem.compute_dtype) for c, x in r.items()}


def cotangents_of(
    problem: RowProblem, result: Result, grads: Sequence[Tensor | None]
) -> dict[int, Tensor]:
    """Returns the gradient to every reduction, 0 where none comes."""
    seeds = row_gradients(problem, result, grads)
    for c, reduction in enumerate(problem.program.reductions):
        if c not in seeds:
            shape = problem.value_shape(reduction.head, reduction.size)
            seeds[c] = result.reductions[c].new_zeros(shape)
    return seeds


def backward(
    problem: RowProblem,
    result: Result,
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Returns gradients to operands, two for each dot, and captured tensors: one pass over the
    keys.
    """
    seeds = cotangents_of(problem, result, grads)
    sums = _Gradients(problem, needs_grad)
    for batch, rows in row_blocks(problem) if sums.nodes else ():
        known = result.usable(problem.program, batch, rows)
        seed = {c: x[batch, :, rows] for c, x in seeds.items()}
        for at in key_blocks(problem, batch, rows):
            for i, d in sums.add(at, known, seed).items():
                _add_operand_gradients(problem, i, at, d, sums.out[2 * i], sums.out[2 * i + 1])
    return sums.finished


class _Gradients:
    """Sums gradients to operands, two for each dot, and to captured tensors."""

    def __init__(self, problem: RowProblem, needs_grad: Sequence[bool]) -> None:
        self.problem, self.plan = problem, derive.backward_plan(problem.program)
        self.count, self.tensors = 2 * len(problem.operands), problem.differentiable
        self.out: list[Tensor | None] = [
            x.new_zeros(x.shape, dtype=problem.compute_dtype) if need else None
            for x, need in zip(self.tensors, needs_grad, strict=False)
        ]
        self.dots = {
            i: node
            for i, node in enumerate(self.plan.dots)
            if node is not None
            and (self.out[2 * i] is not None or self.out[2 * i + 1] is not None)
        }
        self.captures = {
            i: node
            for i, node in enumerate(self.plan.captures)
            if node is not None and self.out[self.count + i] is not None
        }
        self.nodes = [*self.dots.values(), *self.captures.values()]

    def add(
        self, at: Slices, known: RowValues, seed: Values, dot: DotProducts = tile.dots
    ) -> dict[int, Tensor]:
        """Add a tile's gradients to captured tensors; those to dot products, by number."""
        keep = tile.allowed(self.problem, at)
        elements = _evaluate(self.problem, self.plan.nodes, self.nodes, at, known, seed, dot)
        if keep is not None:
            elements = [torch.where(keep, x, 0.0) for x in elements]
        for i, x in zip(self.captures, elements[len(self.dots) :], strict=True):
            target = self.out[self.count + i]
            assert target is not None
            _add_capture_gradient(self.problem, i, at, x, target)
        return dict(zip(self.dots, elements, strict=False))

    @property
    def finished(self) -> list[Tensor | None]:
        """Returns the gradients in the dtypes of their tensors."""
        return in_dtypes_of(self.out, self.tensors)


def in_dtypes_of(grads: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns gradients in the dtypes of their tensors."""
    return [None if g is None else g.to(x.dtype) for g, x in zip(grads, tensors, strict=True)]


def loss_and_gradients(
    problem: RowProblem, loss: RowLoss, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
) -> losses.LossResult:
    """Computes what each row adds to a loss, and the loss's gradients: LM heads by chunks of
    tokens.

    The logits of a chunk are made once. Their gradient takes their place, 0 at keys that are in no
    block. (Maps of one head without a batch have such keys, and are summed as LM heads are.)
    """
    program = problem.program
    plan = derive.forward_plan(program, True)
    result, sums = allocate(problem, True), _Gradients(problem, needs_grad)
    batch, keys = slice(0, 1), problem.num_keys
    for chunk in ranges(problem.num_rows, _tokens_of_chunk(problem)):
        whole = (batch, chunk, slice(0, keys))
        logits = [tile.dots(problem, i, whole) for i in range(len(problem.operands))]

        def dot(_: RowProblem, i: int, at: Slices) -> Tensor:
            rows = slice(at[1].start - chunk.start, at[1].stop - chunk.start)  # noqa: B023
            return logits[i][:, :, rows, at[2]]  # noqa: B023

        for _, part_of in row_blocks(problem.of_block(*whole)):
            rows = slice(chunk.start + part_of.start, chunk.start + part_of.stop)
            _forward_of(problem, plan, result, batch, rows, dot)
            block = (batch, rows, slice(0, keys))
            own = {c: x[batch, :, rows] for c, x in enumerate(result.reductions)}
            grads = losses.gradients(problem, loss, own, tensors, block)
            part_problem, part_result = problem.of_block(*block), result.of_rows(batch, rows)
            seed = row_gradients(
                part_problem, part_result, [grads.get(c) for c in program.outputs]
            )
            for c, x in own.items():
                seed.setdefault(c, torch.zeros_like(x))
            known = result.usable(program, batch, rows)
            for at in key_blocks(problem, batch, rows) if sums.nodes else ():
                for i, d in sums.add(at, known, seed, dot).items():
                    dot(problem, i, at).copy_(d)
            seen = problem.keys_of(rows)
            for outside in (slice(0, seen.start), slice(seen.stop, keys)):
                for i in sums.dots:
                    dot(problem, i, (batch, rows, outside)).zero_()
        for i in sums.dots:
            _add_operand_gradients(
                problem, i, whole, logits[i], sums.out[2 * i], sums.out[2 * i + 1]
            )
    reductions = dict(enumerate(result.reductions))
    return losses.result_of(problem, loss, reductions, tensors, sums.finished)


def _tokens_of_chunk(problem: RowProblem) -> int:
    """Returns a chunk's tokens as `linear_kl` does: their logits are as large as a share of the
    weights.
    """
    q = problem.like
    room = DEFAULT_WORKSPACE_MIB.get(q.device.type, DEFAULT_WORKSPACE_MIB["cuda"]) * MIB
    if q.device.type == "cpu":
        weights = sum(k.numel() * k.element_size() for _, k in problem.operands)
        room = max(room, weights // CPU_SHARE_OF_WEIGHTS)
    row = max(1, problem.num_keys) * problem.compute_dtype.itemsize * len(problem.operands)
    return even_step(problem.num_rows, max(1, room // row), 16)


def _add_operand_gradients(
    problem: RowProblem, i: int, at: Slices, d: Tensor, dq: Tensor | None, dk: Tensor | None
) -> None:
    q, k = tile.operand_blocks(problem, i, at)
    heads = problem.operands[i][0].shape[1]
    rows, keys = at[1].stop - at[1].start, at[2].stop - at[2].start
    d = d.expand(q.shape[0], heads, rows, keys).reshape(q.shape[0], k.shape[1], q.shape[2], keys)
    if dq is not None:
        dq[at[0], :, at[1]] += (d @ k).view(q.shape[0], heads, rows, k.shape[3])
    if dk is not None:
        dk[at[0], :, at[2]] += d.mT @ q


def _add_capture_gradient(
    problem: RowProblem, i: int, at: Slices, d: Tensor, target: Tensor
) -> None:
    """Adds a tile's gradient to a captured tensor: summed over the dimensions that it broadcasts
    along.
    """
    declared = problem.program.captures[i]
    rows, keys = at[1].stop - at[1].start, at[2].stop - at[2].start
    heads = problem.num_heads(declared.head)
    d = d.expand(at[0].stop - at[0].start, heads, rows, keys)
    match declared.kind:
        case kind if kind == ROW:
            into, d = part(target, at[0], ALL, at[1]), d.sum(-1)
        case kind if kind == KEY:
            into, d = part(target, at[0], ALL, at[2]), d.sum(-2)
        case kind if kind == PAIR:
            into = part(target, at[0], ALL, at[1], at[2])
        case kind if kind == VALUES:
            places = tile.column_places(problem, i, at)
            into = part(target, at[0], ALL, at[1])
            padded = torch.cat([d, d.new_zeros(*d.shape[:-1], 1)], -1)
            d = padded.gather(-1, places.expand(*d.shape[:-1], -1))
        case _:
            return
    into += d.sum_to_size(into.shape)
