"""Compares and multiplies sizes that may be symbolic, without adding guards."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from torch_streamkl.fx_passes.fx_utils.torch_names import FloorDiv, free_unbacked_symbols

Size = int | torch.SymInt
UNKNOWN_SIZE = 1 << 13  # of a dimension that only data decides: taken for large


def expression(size: Size) -> Any:
    """Returns a value to compare sizes by: the integer or the symbolic expression."""
    if isinstance(size, torch.SymInt):
        node = size.node
        constant = node.maybe_as_int()
        return constant if constant is not None else simplified(node.expr)
    return size


@functools.lru_cache(maxsize=4096)
def simplified(expr: sympy.Expr) -> sympy.Expr:
    """Simplifies divisions without remainder in an expression: ``(b * h) // b`` is h."""

    def divided(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
        exact = sympy.cancel(a / b)
        return exact if sympy.fraction(exact)[1] == 1 and exact.is_integer else FloorDiv(a, b)

    return expr.replace(FloorDiv, divided) if expr.has(FloorDiv) else expr


def provably_equal(a: Size, b: Size) -> bool:
    """Returns whether sizes are provably equal, without adding a guard on symbolic shapes."""
    x, y = expression(a), expression(b)
    return bool(x == y or x - y == 0)


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Returns whether shapes are provably equal."""
    return len(a) == len(b) and all(map(provably_equal, a, b))


def hint_of(size: Size) -> int | None:
    """Returns a size as it is now, without a guard; None if only data decides it."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return None if hint is None else int(hint)


def size_hint(size: Size) -> int:
    """Returns a size, or what a dynamic one was when the graph was made."""
    hint = hint_of(size)
    return UNKNOWN_SIZE if hint is None else hint


def numel(value: Tensor) -> int:
    """Counts a tensor's elements, by hints of symbolic sizes."""
    return math.prod(map(size_hint, value.shape))


def shown_shape(x: Tensor) -> tuple[int | str, ...]:
    """Returns a shape for a report: symbols as texts."""
    return tuple(n if isinstance(n, int) else str(n) for n in x.shape)


def is_one(size: Size) -> bool:
    """Returns whether a size is 1, without adding a guard."""
    return expression(size) == 1


def is_zero(size: Size) -> bool:
    """Returns whether a size is 0, without adding a guard."""
    return expression(size) == 0


def quotient(a: Size, b: Size) -> Size | None:
    """Returns a / b if it is provably an integer, else None."""
    x, y = expression(a), expression(b)
    if isinstance(x, int) and isinstance(y, int):
        return a // b if y and x % y == 0 else None
    result = x / y
    if getattr(result, "is_integer", False) is not True and not isinstance(result, int):
        return None
    return a // b


def is_unknown(size: Size) -> bool:
    """Returns whether a size depends on data: the number of rows that a boolean index selects."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def bytes_text(count: float) -> str:
    """Returns a number of bytes as users read it."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"
