"""Decides what a tensor's type does to values: widening keeps them, narrowing rounds them.

NOTE [Types]
Values are real numbers. What torch computes in a narrow floating type rounds at every step, and
operators that keep float32 are as exact, so arithmetic in a narrow type is not rounded here. A
cast to a narrower type is what a user asks for, and is. Positions are exact integers: where a type
cannot hold every value that a range allows, each result is rounded (floating types) or wraps
around (integer types), as torch does.
"""

from __future__ import annotations

import math

import torch

from torch_streamkl.fx_passes.reading.registry import NoRule, in_type, number_of
from torch_streamkl.program.canonical import truth
from torch_streamkl.program.functions import function
from torch_streamkl.program.graph import BOOL, FLOAT, INT, MAX, SUM, Node, const
from torch_streamkl.program.reductions import remade, rounded
from torch_streamkl.program.walks import has_op

LARGEST_POSITION = 2.0**53  # more elements than a tensor has


def kind_of(dtype: torch.dtype) -> str:
    """Returns the type of expressions of a tensor."""
    if dtype.is_complex:
        raise NoRule("complex numbers")
    return BOOL if dtype == torch.bool else FLOAT if dtype.is_floating_point else INT


def bounds_of(dtype: torch.dtype) -> tuple[float, float]:
    """Returns the range of integers that a type holds exactly."""
    if dtype == torch.bool:
        return 0.0, 1.0
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return (-math.inf, math.inf) if limits.bits == 64 else (limits.min, limits.max)
    if dtype.itemsize == 1:
        return 0.0, 1.0  # float8 and such
    largest = round(2 / torch.finfo(dtype).eps)
    return (-math.inf, math.inf) if largest >= LARGEST_POSITION else (-largest, largest)


def is_narrower(to: torch.dtype, than: torch.dtype) -> bool:
    """Returns whether a cast between floating types rounds."""
    if to == than:
        return False
    if to.itemsize == 1 or than.itemsize == 1:  # float8 promotes with nothing
        return to.itemsize == 1
    return torch.promote_types(to, than) != to


def holds(x: Node, dtype: torch.dtype) -> bool:
    """Returns whether a type holds every value of an integer expression."""
    low, high = bounds_of(dtype)
    return low <= x.range[0] and x.range[1] <= high


def stored(x: Node, dtype: torch.dtype) -> Node:
    """Returns a value as a tensor of this type has it: NOTE [Types]."""
    name = str(dtype).removeprefix("torch.")
    kind = kind_of(dtype)
    if kind == BOOL:
        return truth(x)
    if x.dtype == BOOL:
        return number_of(x, kind)
    if kind == INT and x.dtype == FLOAT and not is_whole(x):
        raise NoRule("a number that is no integer in a tensor of integers")
    if x.dtype == INT and not _is_exact(x):
        raise NoRule("integers with more digits than float64 has")
    if kind == FLOAT and x.op == "linear" and not _multiplies_within(x, dtype):
        raise NoRule(f"values times a number that {name} does not hold")
    if kind == INT and x.op == "const":  # a folded sum is one of floating-point numbers
        return in_type(x.value, dtype)
    if (INT in (kind, x.dtype) or _is_position(x)) and not holds(x, dtype):
        if is_of_positions(x) or kind == FLOAT:
            return _rounded(x, name, kind)
        raise NoRule(f"integers that {name} may not hold")
    return x


def _is_exact(x: Node) -> bool:
    """Whether the numbers of an integer expression, and its value if it is bounded, are exact."""
    numbers = [x.value[0], *x.value[1]] if x.op == "linear" else []
    bounds = [end for end in x.range if math.isfinite(end)]
    return all(abs(n) <= LARGEST_POSITION for n in (*numbers, *bounds))


def _multiplies_within(x: Node, dtype: torch.dtype) -> bool:
    """Whether a type holds the numbers of a sum: what is multiplied with others is 0 or infinite,
    whatever it is multiplied with later.
    """
    limits, (constant, coefficients) = torch.finfo(dtype), x.value
    smallest = limits.smallest_normal * limits.eps
    sizes = [abs(c) for c in coefficients if c and math.isfinite(c)]
    if math.isfinite(constant):
        sizes.append(max(abs(constant), smallest))
    return all(smallest <= size <= limits.max for size in sizes)


def cast(x: Node, to: torch.dtype, than: torch.dtype) -> Node:
    """Returns what a cast makes of a value."""
    kind = kind_of(to)
    if kind == INT and x.dtype == FLOAT:
        if x.op == "const" and holds(x, to):
            return const(float(math.trunc(x.value)), INT)
        raise NoRule("a floating-point number is cast to an integer")
    if kind == FLOAT and x.dtype == FLOAT and is_narrower(to, than):
        return _rounded(x, str(to).removeprefix("torch."), FLOAT)
    return stored(x, to)


def _rounded(x: Node, name: str, kind: str) -> Node:
    if x.op == "const":
        found = torch.tensor(x.value, dtype=torch.float64, device="cpu").to(getattr(torch, name))
        return const(float(found), kind)
    if x.op == "where":
        args = [x.args[0], *(_rounded(a, name, kind) for a in x.args[1:])]
        return remade(x, tuple(args))
    return rounded(x, name)


_KEEPS = {"linear", "product", "where", "reduce", "float", "maximum", "minimum", "clamp_min",
          "clamp_max", "abs", "relu"}  # fmt: skip


def is_whole(x: Node) -> bool:
    """Returns whether every value is an integer, as of a sum of conditions."""
    todo, seen = [x], set[Node]()
    while todo:
        y = todo.pop()
        if y in seen or y.dtype != FLOAT or y.op in ("floor", "ceil", "trunc"):
            continue
        seen.add(y)
        numbers = [y.value] if y.op == "const" else []
        if y.op == "linear":
            numbers = [y.value[0], *y.value[1]]
        if any(not math.isfinite(n) or n != int(n) for n in numbers):
            return False
        if y.op == "const":
            continue
        if y.op not in _KEEPS or y.kind not in ("", SUM, MAX):
            return False
        todo += y.args
    return True


def is_of_positions(x: Node) -> bool:
    """Returns whether an expression has no captured tensor."""
    return not has_op(x, "capture")


def _is_position(x: Node) -> bool:
    """Whether positions were added to a floating-point number that is whole, such as 300.0."""
    return x.op == "linear" and has_op(x, "index") and is_of_positions(x) and is_whole(x)


def floor(x: Node) -> Node:
    """Returns the largest integer that is not above."""
    return x if x.dtype == INT else function("floor", x)
