"""Bounds the values of operations: the range of each from those of its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Range = tuple[float, float]
EVERY: Range = (-math.inf, math.inf)


def times(a: float, b: float) -> float:
    """Multiplies bounds: 0 times infinity is 0."""
    return 0.0 if a == 0.0 or b == 0.0 else a * b


def sum_range(of: Sequence[Range]) -> Range:
    """Returns the range of a sum."""
    return sum(low for low, _ in of), sum(high for _, high in of)


def difference_range(of: Sequence[Range]) -> Range:
    """Returns the range of a difference."""
    (a, b), (c, d) = of
    return a - d, b - c


def product_range(of: Sequence[Range]) -> Range:
    """Returns the range of a product."""
    low, high = 1.0, 1.0
    for a, b in of:
        ends = [times(x, y) for x in (low, high) for y in (a, b)]
        low, high = min(ends), max(ends)
    return low, high


def increasing(function: Callable[[float], float], low: float = -math.inf) -> Any:
    """Returns the rule of an increasing function, which is constant below ``low``."""

    def of(ranges: Sequence[Range]) -> Range:
        ((a, b),) = ranges
        return function(max(a, low)), function(max(b, low))

    return of


def exponential(x: float) -> float:
    """Returns e^x, infinity where that is no number."""
    return math.exp(x) if x < 709.0 else math.inf


def logarithm(x: float) -> float:
    """Returns log x, -infinity where that is no number."""
    return math.log(x) if x > 0.0 else -math.inf


def hull(of: Sequence[Range]) -> Range:
    """Returns the range of one of several values."""
    return min(low for low, _ in of), max(high for _, high in of)


def each(choose: Callable[..., float]) -> Callable[[Sequence[Range]], Range]:
    """Returns the rule of a minimum or maximum."""
    return lambda of: (choose(low for low, _ in of), choose(high for _, high in of))


def even(of: Sequence[Range]) -> Range:
    """Returns the range of a magnitude."""
    ((a, b),) = of
    return (0.0 if a <= 0.0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))


NOT_NEGATIVE: Range = (0.0, math.inf)
UNIT: Range = (0.0, 1.0)
SIGNED_UNIT: Range = (-1.0, 1.0)
SAME = increasing(lambda x: x)
