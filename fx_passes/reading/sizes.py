"""Interns the sizes of a trace: each of its symbolic expressions is one `Extent`.

Axes compare their sizes all the time. An extent is equal to itself alone, so that no comparison
looks at an expression, and none adds a guard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils import sizes
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.torch_names import statically_known_true
from torch_streamkl.fx_passes.reading.index_values import LARGEST_EXTENT
from torch_streamkl.fx_passes.reading.positions import MaskedRows, Positions
from torch_streamkl.program.canonical import linear, terms_of
from torch_streamkl.program.graph import INT, Extent, Node, Size, Source, const, size_of


class Sizes:
    """Holds the extents of one trace, and multiplies and divides sizes."""

    def __init__(self) -> None:
        self._known: dict[Any, Extent] = {}
        self._products: dict[tuple[Size, ...], Size] = {}
        self._quotients: dict[tuple[Size, Size], Size | None] = {}
        self._same: dict[Any, Any] = {}  # symbols of counts that are equal
        self.selected: dict[Extent, MaskedRows] = {}  # rows of masks, by how many they select

    def of(self, size: sizes.Size) -> Size:
        """Returns a size as axes have it: a number, or the extent of its expression."""
        if isinstance(size, int):
            return size
        expression = self._expression(size)
        if isinstance(expression, int) or expression.is_Integer:
            return int(expression)
        if expression not in self._known:
            same = self._guarded(expression, size)
            self._known[expression] = same or Extent(str(expression), size, *_bounds(size))
        return self._known[expression]

    def _guarded(self, expression: Any, size: torch.SymInt) -> Extent | None:
        """Returns a known size that is the same by a guard: ``2 * (s // 2)`` and s, that met."""
        for other, extent in self._known.items():
            is_plain = isinstance(expression, sympy.Symbol) and isinstance(other, sympy.Symbol)
            if not is_plain and expression.free_symbols & other.free_symbols:
                if statically_known_true(size == extent.size):
                    return extent
        return None

    def _expression(self, size: sizes.Size) -> Any:
        found = sizes.expression(size)
        return found.xreplace(self._same) if self._same and not isinstance(found, int) else found

    def expression(self, size: torch.SymInt) -> Node:
        """Returns a size as an expression: sums of sizes as sums."""
        expression = self._expression(size)
        if isinstance(expression, int) or expression.is_Integer:
            return const(int(expression), INT)
        if expression in self._known or not isinstance(expression, sympy.Add):
            return size_of(self.of(size))
        terms = []
        for term in expression.args:
            c, rest = term.as_coeff_Mul()
            if not c.is_Integer:
                return size_of(self.of(size))
            one = size.node.shape_env.create_symintnode(rest, hint=None) if rest != 1 else 1
            terms.append((float(c), size_of(self.of(one))))
        return linear(0.0, terms)

    def equate(self, size: sizes.Size, extent: Size) -> None:
        """Says that a size, of rows that a mask selects, is the same as another one of them."""
        expression = self._expression(size)
        if isinstance(extent, Extent) and isinstance(expression, sympy.Symbol):
            other = self._expression(torch_size(extent))
            if expression not in other.free_symbols:
                self._same[expression] = other

    def equal_names(self, expression: Any) -> list[str]:
        """Returns the texts of an expression, and of the sizes that are the same."""
        equal = [symbol for symbol, other in self._same.items() if other == expression]
        return [str(expression), *map(str, equal)]

    def are_equal(self, a: Size, b: Size) -> bool:
        """Returns whether sizes are provably equal."""
        if a is b or a == b:
            return True
        return not isinstance(a, int) and not isinstance(b, int) and self.quotient(a, b) == 1

    def are_guarded(self, a: Size, b: Size) -> bool:
        """Returns whether guards of the graph say that sizes are equal."""
        return statically_known_true(torch_size(a) == torch_size(b))

    def is_nonnegative(self, x: Node) -> bool:
        """Returns whether a sum of sizes is provably at least 0: ``n - (n - 1)``, say."""
        number, terms = terms_of(x)
        sizes_of = [(int(c), t.value.size) for c, t in terms if t.op == "size"]
        if len(sizes_of) < len(terms):
            return False
        total = sum((c * size for c, size in sizes_of), int(number))
        return bool(statically_known_true(total >= 0))

    def extent(self, source: object, d: int) -> Size | None:
        """Returns the size of a dimension of a captured tensor, None if it is not known."""
        name = source.name if isinstance(source, Source) else None
        if isinstance(name, Positions):
            return next((n for n, rows in self.selected.items() if rows == name.rows), None)
        value = example(name) if isinstance(name, fx.Node) else None
        return self.of(value.shape[d]) if isinstance(value, torch.Tensor) else None

    def product(self, factors: Iterable[Size]) -> Size:
        key = tuple(factors)
        if len(key) == 1:
            return key[0]
        if key not in self._products:
            self._products[key] = self.of(math.prod(map(torch_size, key)))
        return self._products[key]

    def quotient(self, a: Size, b: Size) -> Size | None:
        """Returns a / b where it is provably an integer."""
        if a is b or b == 1:
            return 1 if a is b else a
        if (a, b) not in self._quotients:
            found = sizes.quotient(torch_size(a), torch_size(b))
            self._quotients[a, b] = None if found is None else self.of(found)
        return self._quotients[a, b]


def _bounds(size: torch.SymInt) -> tuple[int, float]:
    """The range of a size: a symbol without a limit is as large as memory allows."""
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    low = int(bounds.lower) if bounds.lower.is_Integer else 0
    high = int(bounds.upper) if bounds.upper.is_Integer else LARGEST_EXTENT
    return max(low, 0), float(min(high, LARGEST_EXTENT))


def torch_size(x: Size) -> sizes.Size:
    """Returns a size as torch has it: the one that was interned."""
    found: sizes.Size = x.size if isinstance(x, Extent) else x
    return found


def is_at_most(a: Size, b: Size) -> bool:
    """Returns whether a size is provably at most another one."""
    return a is b or bool(statically_known_true(torch_size(a) <= torch_size(b)))
