"""Interns the sizes of a trace: each of its symbolic expressions is one `Extent`.

Axes compare their sizes all the time. An extent is equal to itself alone, so that no comparison
looks at an expression, and none adds a guard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch_streamkl.fx_passes.fx_utils import sizes
from torch_streamkl.fx_passes.reading.arrays import Sizes
from torch_streamkl.program.graph import Extent, Size


class SymbolicSizes(Sizes):
    """Holds the extents of one trace, and multiplies and divides them."""

    def __init__(self) -> None:
        self._known: dict[Any, Extent] = {}

    def of(self, size: sizes.Size) -> Size:
        """Returns a size as axes have it: a number, or the extent of its expression."""
        expression = sizes.expression(size)
        if isinstance(expression, int) or expression.is_Integer:
            return int(expression)
        if expression not in self._known:
            self._known[expression] = Extent(str(expression), size)
        return self._known[expression]

    def product(self, factors: Iterable[Size]) -> Size:
        return self.of(math.prod(map(_size, factors)))

    def quotient(self, a: Size, b: Size) -> Size | None:
        if a is b or b == 1:
            return 1 if a is b else a
        found = sizes.quotient(_size(a), _size(b))
        return None if found is None else self.of(found)


def _size(x: Size) -> sizes.Size:
    """The size that was interned."""
    found: sizes.Size = x.size if isinstance(x, Extent) else x
    return found
