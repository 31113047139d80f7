"""Evaluates elements of one block of rows and keys, in plain torch.

A tile is [batch, heads, rows, keys], each 1 where a value does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.steps import Step, used_by
from torch_streamkl.rows.problem import ALL, RowProblem, Slices, part
from torch_streamkl.rows.program import COLUMNS, KEY, PAIR, ROW

# of reductions, or gradients to them, by number: [batch, heads, rows], and blocks of block_sums
Values = dict[int, Tensor]


@dataclass(frozen=True)
class RowValue:
    """Holds a reduction as elements use it, a log-sum-exp in its two parts (program.py)."""

    value: Tensor
    peak: Tensor | None = None
    row_sum: Tensor | None = None

    def taken_from(self, x: Tensor) -> Tensor:
        """Returns elements minus the value of their row."""
        if self.peak is None or self.row_sum is None:
            return x - self.value[..., None]
        return (x - self.peak[..., None]) - self.row_sum[..., None]


RowValues = dict[int, RowValue]


def whole(problem: RowProblem) -> Slices:
    """Returns all rows and keys as one block."""
    return slice(0, problem.batch), slice(0, problem.num_rows), slice(0, problem.num_keys)


def operand_blocks(problem: RowProblem, number: int, at: Slices) -> tuple[Tensor, Tensor]:
    """Returns both operands of a dot; row operands grouped by the head of the columns.

    [batch, kv heads, heads of a group * rows, dim] and [batch, kv heads, keys, dim].
    """
    q, k = problem.operands[number]
    q, k = part(q, at[0], ALL, at[1]), part(k, at[0], ALL, at[2])
    dtype = problem.compute_dtype
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    return q.reshape(q.shape[0], k.shape[1], rows, q.shape[3]).to(dtype), k.to(dtype)


def dots(problem: RowProblem, number: int, at: Slices) -> Tensor:
    """Returns dot products [batch, heads, rows, keys]."""
    q, k = operand_blocks(problem, number, at)
    heads = problem.operands[number][0].shape[1]
    rows = at[1].stop - at[1].start
    return (q @ k.mT).view(q.shape[0], heads, rows, k.shape[2])


def allowed(problem: RowProblem, at: Slices) -> Tensor | None:
    """Returns keys that take part, None for all of them."""
    keys = problem.program.keys
    device = problem.like.device
    result: Tensor | None = None

    def restrict(result: Tensor | None, by: Tensor) -> Tensor:
        return by if result is None else result & by

    j = torch.arange(at[2].start, at[2].stop, device=device)
    if keys.left is not None or keys.right is not None:
        shift = problem.num_keys - problem.num_rows
        i = torch.arange(at[1].start, at[1].stop, device=device)[:, None] + shift
        if keys.left is not None:
            result = restrict(result, (j >= i - keys.left)[None, None])
        if keys.right is not None:
            result = restrict(result, (j <= i + keys.right)[None, None])
    if problem.lengths is not None:
        lengths = part(problem.lengths, at[0])
        result = restrict(result, j < lengths[:, None, None, None])
    if problem.mask is not None:
        result = restrict(result, part(problem.mask, at[0], ALL, at[1], at[2]))
    return result


def capture(problem: RowProblem, number: int, at: Slices) -> Tensor:
    """Returns a captured tensor as elements."""
    x, declared = problem.captures[number], problem.program.captures[number]
    dtype = {"float": problem.compute_dtype, "int": torch.int64}.get(declared.dtype, x.dtype)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype)

    match declared.kind:
        case kind if kind == ROW:
            return cast(part(x, at[0], ALL, at[1])[..., None])
        case kind if kind == KEY:
            return cast(part(x, at[0], ALL, at[2])[..., None, :])
        case kind if kind == PAIR:
            return cast(part(x, at[0], ALL, at[1], at[2]))
    places = column_places(problem, number, at)
    size = (*places.shape[:-1], at[2].stop - at[2].start + 1)
    if declared.kind == COLUMNS:
        return torch.zeros(size, dtype=torch.bool, device=x.device).scatter(-1, places, True)[
            ..., :-1
        ]
    values = cast(part(x, at[0], ALL, at[1])).expand(places.shape)
    return values.new_zeros(size).scatter_add(-1, places, values)[..., :-1]


def column_places(problem: RowProblem, number: int, at: Slices) -> Tensor:
    """Returns the positions of ids in the block of keys; ids outside get the size of the block."""
    ids = part(problem.ids_of(number), at[0], ALL, at[1])
    inside = (ids >= at[2].start) & (ids < at[2].stop)
    return torch.where(inside, ids - at[2].start, at[2].stop - at[2].start).long()


def block_sums(x: Tensor, first: int, size: int, dtype: torch.dtype) -> tuple[slice, Tensor]:
    """Returns elements from the key ``first`` on, added up by blocks: which blocks, and their
    sums.

    The first and the last of the blocks may have other keys elsewhere: a block may be far longer
    than what is here of it.
    """
    count = x.shape[-1]
    blocks = slice(first // size, -(-(first + count) // size))
    head = min(-first % size, count)
    after = head + (count - head) // size * size
    before, whole, rest = x.tensor_split((head, after), -1)
    sums = [part.sum(-1, keepdim=True, dtype=dtype) for part in (before, rest)]
    inside = [whole.unflatten(-1, (-1, size)).sum(-1, dtype=dtype)] if after > head else []
    return blocks, torch.cat([*sums[: head > 0], *inside, *sums[1 : 1 + (count > after)]], -1)


def add(x: Tensor, first: int, size: int, total: Tensor) -> None:
    """Adds elements from the key ``first`` on to the sums of their rows, or of their blocks."""
    if not size:
        total += x.sum(-1, dtype=total.dtype)
        return
    blocks, sums = block_sums(x, first, size, total.dtype)
    total[..., blocks] += sums


def add_place(x: Tensor, first: int, peak: Tensor, place: Tensor) -> None:
    """Updates the largest elements of rows and their first places by those from a key on.

    NaN is the largest, as it is for torch.
    """
    value, at = x.max(-1)
    is_larger = (value > peak) | (value.isnan() & ~peak.isnan())
    place.copy_(torch.where(is_larger, at + first, place))
    peak.copy_(torch.where(is_larger, value, peak))


def usable(value: Tensor, parts: tuple[Tensor, Tensor] | None, is_sum: bool) -> RowValue:
    """Returns a reduction as elements use it.

    The log-sum-exp of no keys is -inf; what is subtracted from elements is 0 then, so that the
    exponential of their difference is 0 as well. A maximum is only subtracted.
    """
    if is_sum:
        return RowValue(value)
    is_empty = value == -math.inf
    if parts is None:
        return RowValue(torch.where(is_empty, 0.0, value))
    return RowValue(value, *(torch.where(is_empty, 0.0, x) for x in parts))


def held(number: float, dtype: torch.dtype) -> float:
    """Returns a number as a type holds it: a lowest number times 2 is -inf."""
    if dtype.is_floating_point and abs(number) > torch.finfo(dtype).max:
        return math.copysign(math.inf, number)
    return number


def evaluate(
    problem: RowProblem,
    nodes: Sequence[Step],
    roots: Sequence[int],
    at: Slices,
    reductions: RowValues,
    seeds: Values,
    dot: Callable[[RowProblem, int, Slices], Tensor] = dots,
    captured: Callable[[RowProblem, int, Slices], Tensor] = capture,
    run: dict[str, Callable[..., Tensor]] | None = None,
) -> list[Tensor]:
    """Returns the wanted nodes of a tile.

    ``reductions`` and ``seeds`` are of the rows of the block. ``run`` replaces operations.
    """
    device, dtype = problem.like.device, problem.compute_dtype
    results: dict[int, Tensor] = {}
    last_use: dict[int, int] = {}
    order = used_by(nodes, roots)
    for i in order:
        for a in nodes[i].args:
            last_use[a] = i
    keep = set(roots)
    for i in order:
        node = nodes[i]
        number = int(node.value) if node.op not in ("const", "pow") else 0
        match node.op:
            case "const":
                # a tensor that is made of a number is copied to a GPU, which the CPU waits for
                kind = {"bool": torch.bool, "int": torch.int64}.get(node.dtype, dtype)
                size = (1, problem.num_heads(node.head), 1, 1) if node.head else ()
                x = torch.full(size, held(node.value, kind), dtype=kind, device=device)
            case "dot":
                x = dot(problem, number, at)
            case "capture":
                x = captured(problem, number, at)
            case "reduction":
                x = reductions[number].value[..., None]
            case "seed" if node.by_key:
                blocks = torch.arange(at[2].start, at[2].stop, device=device)
                x = seeds[number][..., blocks // problem.program.reductions[number].size]
            case "seed":
                x = seeds[number][..., None]
            case "key_index":
                x = torch.arange(at[2].start, at[2].stop, device=device)
            case "row_index":
                x = torch.arange(at[1].start, at[1].stop, device=device)[:, None]
            case "sum_heads":
                x = results[node.args[0]].sum(1, keepdim=True)
            case "expand_heads":
                x = results[node.args[0]]
                if x.ndim:
                    x = x.expand(*x.shape[:1], problem.num_heads(node.head), *x.shape[2:])
                else:
                    x = x.expand(1, problem.num_heads(node.head), 1, 1)
            case "float":
                x = results[node.args[0]].to(dtype)
            case "sub" if nodes[node.args[1]].op == "reduction":
                row = reductions[int(nodes[node.args[1]].value)]
                x = row.taken_from(results[node.args[0]])
            case "sub" if nodes[node.args[0]].op == "reduction":
                row = reductions[int(nodes[node.args[0]].value)]
                x = -row.taken_from(results[node.args[1]])
            case "pow":
                x = (run or {}).get("pow", torch.pow)(results[node.args[0]], node.value)
            case op:
                function = (run or {}).get(op, OPERATIONS[op].run)
                x = function(*(results[a] for a in node.args))
        results[i] = x
        for a in set(node.args):
            if last_use[a] == i and a not in keep:
                del results[a]
    return [results[i] for i in roots]
