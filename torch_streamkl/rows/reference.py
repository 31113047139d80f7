"""Specifies row programs naively: all elements at once, differentiated by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.program.graph import BLOCK_SUM, LOGSUMEXP, MAX, Node
from torch_streamkl.program.steps import Schedule
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.tile import RowValue, RowValues, Values, allowed, evaluate, whole

# NOTE [Zero annihilates] in program/graph.py, for autograd: a gradient of 0 stays 0 next to an
# infinite slope.


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


class _Function(torch.autograd.Function):
    """Computes exp, log, sqrt by name, or a power, with the gradients of row programs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, function: str | float) -> Tensor:
        out: Tensor = getattr(torch, function)(x) if isinstance(function, str) else x**function
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.function = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _product(grad, _slope(ctx)), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _product(tangent, _slope(ctx))


def _slope(ctx: Any) -> Tensor:
    x, out = ctx.saved_tensors
    slope: Tensor
    match ctx.function:
        case "exp":
            slope = out
        case "log":
            slope = 1.0 / x
        case "sqrt":
            slope = 0.5 / out
        case exponent:
            slope = exponent * x ** (exponent - 1.0)
    return slope


class _Product(torch.autograd.Function):
    """Computes a product or quotient of two tensors, with 0 times anything 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, is_quotient: bool, is_guarded: bool) -> Tensor:
        if is_quotient:
            return a / b
        return _product(a, b) if is_guarded else a * b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, ctx.is_quotient, _ = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors
        if ctx.is_quotient:
            ga = _product(grad, 1.0 / b)
            gb = -_product(ga, a / b)
        else:
            ga, gb = _product(grad, b), _product(grad, a)
        return ga.sum_to_size(a.shape), gb.sum_to_size(b.shape), None, None

    @staticmethod
    def jvp(ctx: Any, ta: Tensor, tb: Tensor, *_: None) -> Tensor:
        a, b = ctx.saved_tensors
        if ctx.is_quotient:
            return _product(ta, 1.0 / b) - _product(_product(tb, 1.0 / b), a / b)
        return _product(ta, b) + _product(tb, a)


GUARDED: dict[str, Callable[..., Any]] = {
    "exp": lambda x: _Function.apply(x, "exp"),
    "log": lambda x: _Function.apply(x, "log"),
    "log_div": lambda a, b: _Function.apply(_Product.apply(a, b, True, False), "log"),
    "sqrt": lambda x: _Function.apply(x, "sqrt"),
    "pow": lambda x, exponent: _Function.apply(x, exponent),
    "mul": lambda a, b: _Product.apply(a, b, False, False),
    "mul0": lambda a, b: _Product.apply(a, b, False, True),
    "div": lambda a, b: _Product.apply(a, b, True, False),
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
    """With a gradient to every tensor, which may be 0, as the other implementations have it."""
    tensors = (*(x for pair in problem.operands for x in pair), *problem.captures)
    for x in tensors:
        if x.requires_grad:
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
