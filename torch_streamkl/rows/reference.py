"""Specifies row programs naively: all elements at once, differentiated by autograd."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.program.graph import ARGMAX, BLOCK_SUM, LOGSUMEXP, MAX, Node
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.steps import Schedule
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.tile import RowValue, RowValues, Values, allowed, evaluate, whole

# NOTE [Zero annihilates] in program/graph.py, for autograd: a gradient of 0 stays 0 next to an
# infinite slope. Next to a finite one its own derivative is the slope, as torch's jvp asks.


def _product(a: Tensor, b: Tensor) -> Tensor:
    is_lost = ((a == 0) | (b == 0)) & ~(a * b).isfinite()
    return torch.where(is_lost, 0.0, a) * torch.where(is_lost, 0.0, b)


# the derivative to each argument, of the arguments and the result
SLOPES: dict[str, Callable[..., Sequence[Tensor]]] = {
    "exp": lambda x, out: [out],
    "log": lambda x, out: [1.0 / x],
    "log_div": lambda a, b, out: [1.0 / a, -1.0 / b],
    "sqrt": lambda x, out: [0.5 / out],
    "mul": lambda a, b, out: [b, a],
    "mul0": lambda a, b, out: [b, a],
    "div": lambda a, b, out: [1.0 / b, -out / b],
}


class _Guarded(torch.autograd.Function):
    """Computes an operation of the table, or a power, whose exponent stands for the operation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: str | float, *args: Tensor) -> Tensor:
        out: Tensor = OPERATIONS[op].run(*args) if isinstance(op, str) else args[0] ** op
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.op, *args = inputs
        ctx.save_for_backward(*args, output)
        ctx.save_for_forward(*args, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint gives them a single time
        pairs = zip(saved, _slopes(ctx.op, saved), strict=False)
        return None, *(_product(grad, slope).sum_to_size(x.shape) for x, slope in pairs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Tensor:
        pairs = zip(tangents, _slopes(ctx.op, ctx.saved_tensors), strict=True)
        return functools.reduce(torch.add, (_product(t, slope) for t, slope in pairs))


def _slopes(op: str | float, saved: Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(op, str):
        slopes = SLOPES[op]
        return slopes(*saved)
    return [op * saved[0] ** (op - 1.0)]


GUARDED: dict[str, Callable[..., Any]] = {
    **{op: functools.partial(_Guarded.apply, op) for op in SLOPES},
    "pow": lambda x, exponent: _Guarded.apply(exponent, x),
}


def forward(problem: RowProblem) -> list[Tensor]:
    """Returns the outputs, [batch, heads or 1, rows] each, and [..., blocks] of sums over
    blocks.
    """
    program, at = problem.program, whole(problem)
    keep = allowed(problem, at)
    values: RowValues = {}
    results: Values = {}
    for c, reduction in enumerate(program.reductions):
        (x,) = evaluate(problem, program.nodes, [reduction.node], at, values, {}, run=GUARDED)
        heads = problem.num_heads(reduction.head)
        shape = (problem.batch, heads, problem.num_rows, problem.num_keys)
        x = x.expand(shape)
        if reduction.kind == LOGSUMEXP:
            if keep is not None:
                x = torch.where(keep, x, -math.inf)
            is_empty = (x == -math.inf).all(-1)
            x = torch.where(is_empty[..., None], 0.0, x)
            peak = x.amax(-1).detach()
            peak = torch.where(peak.isinf(), 0.0, peak)  # inf - inf is NaN
            row_sum = (x - peak[..., None]).logsumexp(-1)
            lse = peak + row_sum
            results[c] = torch.where(is_empty, -math.inf, lse)
            zero_if_empty = (torch.where(is_empty, 0.0, y) for y in (peak, row_sum))
            values[c] = RowValue(results[c], *zero_if_empty)
        elif reduction.kind == ARGMAX:
            x = x if keep is None else torch.where(keep, x, -math.inf)
            results[c] = x.detach().argmax(-1)
        elif reduction.kind == MAX:
            x = x if keep is None else torch.where(keep, x, -math.inf)
            results[c] = x.amax(-1).detach()
            values[c] = RowValue(torch.where(results[c] == -math.inf, 0.0, results[c]))
        else:
            if keep is not None:
                x = torch.where(keep, x, 0.0)
            if reduction.kind == BLOCK_SUM:
                each = x.split(reduction.size, -1)
                results[c] = torch.stack([part.sum(-1) for part in each], -1)
                continue
            results[c] = x.sum(-1)
            values[c] = RowValue(results[c])
    return [_connected(problem, results[c]) for c in program.outputs]


def _connected(problem: RowProblem, value: Tensor) -> Tensor:
    """Connects a value to every tensor, so that all of them get a gradient, which may be 0."""
    for x in problem.differentiable:
        if x.requires_grad and value.is_floating_point():
            value = value + x[:0].sum().to(value.dtype)
    return value


def of_rows(
    problem: RowProblem, roots: Sequence[Node], values: dict[Node, Tensor]
) -> list[Tensor]:
    """Returns per-row values that are computed from reductions, differentiated by autograd."""
    schedule = Schedule()
    rest = [schedule[x] for x in roots if x not in values]
    if not rest:
        return [values[x] for x in roots]
    rows = {schedule.reduction(x): RowValue(value) for x, value in values.items()}
    found = evaluate(problem, schedule.steps, rest, whole(problem), rows, {}, run=GUARDED)
    size = (problem.batch, -1, problem.num_rows)
    shaped = (x.expand(problem.batch, -1, -1, 1)[..., 0].expand(size) for x in found)
    return [values[x] if x in values else next(shaped) for x in roots]
