"""Writes arithmetic of tensors and numbers, in types as wide as expressions ask for.

Torch's functions promote by what they are given: a tensor of integers would be divided in the
default type, and narrow integers wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.lowering.placed import Arranging, Placed
from torch_streamkl.fx_passes.lowering.torch_functions import OF_NUMBERS
from torch_streamkl.program.graph import BOOL, FLOAT, INT, Node
from torch_streamkl.program.shifts import mask_terms
from torch_streamkl.program.walks import has_op


class Arithmetic:
    """Inserts operations on placed tensors; ``values`` are results of operators, by name."""

    def __init__(self, arranging: Arranging, values: Mapping[object, fx.Node]) -> None:
        self.arranging, self.build, self.values = arranging, arranging.build, values

    def scalar(self, number: Any, dtype: str) -> fx.Node:
        """Returns a number as a tensor of at least 32 bits, as arithmetic on narrower types has.

        AOTAutograd makes tensors of symbolic floats where they meet a tensor in arithmetic.
        Anywhere else, as in `torch.full`, it makes them constants: a compilation for each value.
        """
        kind = {BOOL: torch.bool, INT: torch.int64}.get(dtype, self._wide)
        if not isinstance(number, fx.Node):
            return self.build.call(
                torch.full, (), number, dtype=kind, device=self.arranging.device
            )
        one = self.build.call(torch.ones, (), dtype=kind, device=self.arranging.device)
        return self.build.call(torch.mul, one, number)

    def as_tensors(self, args: Sequence[Placed], dtype: str) -> list[Placed]:
        """Returns arguments with tensors for numbers, which some functions do not take first."""
        return [Placed(self.scalar(a.node, dtype)) if a.is_number else a for a in args]

    @property
    def _wide(self) -> torch.dtype:
        """The type of numbers that are made of integers: at least that of the user's tensors."""
        given = (*self.arranging.tensors, *self.values.values())
        types = {getattr(example(n), "dtype", None) for n in given}
        return torch.float64 if torch.float64 in types else torch.float32

    def in_wide(self, x: Node, args: Sequence[Placed]) -> Sequence[Placed]:
        """Returns the arguments of an operation, with integers as floating-point numbers where it
        has no others: torch would compute in the default type, which may be narrow. Arithmetic of
        integers is that of int64: expressions are exact, narrow types wrap around.
        """
        given = [a for a in args if not a.is_number]
        if x.dtype == INT or x.op == "nonnegative":
            return [self._exact(a) for a in args]
        if x.dtype != FLOAT or not given or any(a.value.is_floating_point() for a in given):
            return args
        first = args[: 1 if x.op == "where" else 0]  # the condition
        return [*first, *(self._floating(a) for a in args[len(first) :])]

    def _exact(self, a: Placed) -> Placed:
        if a.is_number or a.value.dtype in (torch.bool, torch.int64):
            return a
        is_narrow = not a.value.is_floating_point()
        return Placed(self.build.method("long", a.node), a.dims) if is_narrow else a

    def _floating(self, a: Placed) -> Placed:
        if a.is_number:
            return Placed(self.scalar(a.node, FLOAT))
        return Placed(self.build.method("to", a.node, self._wide), a.dims)

    def pointwise(self, call: Callable[..., Any], args: Sequence[Placed]) -> Placed:
        """Returns a function of tensors that are broadcast by their axes."""
        given, dims = self.arranging.aligned(*args)
        if all(a.is_number for a in args):  # of sizes: torch's functions take no numbers alone
            given = [self.scalar(given[0], FLOAT), *given[1:]]
        return Placed(self.build.call(call, *given), dims)

    def of_numbers(self, call: Callable[..., Any], *numbers: Any) -> Any:
        """Returns a function of numbers, in the graph where one of them is."""
        call = OF_NUMBERS.get(call, call)
        if any(isinstance(n, fx.Node) for n in numbers):
            return self.build.call(call, *numbers)
        return call(*numbers)

    def folded(self, call: Callable[..., Any], args: Sequence[Placed]) -> Placed:
        """Returns an operation that joins its arguments: numbers first, then narrower tensors."""
        numbers = [a for a in args if a.is_number]
        tensors = sorted((a for a in args if not a.is_number), key=lambda a: len(a.axes))
        total: Placed | None = None
        for a in numbers:
            both = None if total is None else self.of_numbers(call, total.node, a.node)
            total = a if total is None else Placed(both)
        for a in reversed(tensors) if len(tensors) < 3 else tensors:
            total = a if total is None else self._pointwise_ordered(call, total, a)
        assert total is not None
        return total

    def _pointwise_ordered(self, call: Callable[..., Any], a: Placed, b: Placed) -> Placed:
        return self.pointwise(call, [b, a] if a.is_number else [a, b])

    def not_negative(self, x: Node, args: Sequence[Placed]) -> Placed:
        """Returns whether a sum of integers is at least 0, as a comparison of two sums.

        A difference of captured tensors, or of one and a number, may wrap around.
        """
        if x.op != "linear":
            return self.pointwise(torch.ge, [*args, Placed(0)])
        constant, coefficients = x.value
        sides: tuple[list[tuple[float, Placed]], ...] = [], []
        has_tensors = [False, False]
        for c, a, y in zip(coefficients, args, x.args, strict=True):
            sides[c < 0.0].append((abs(c), a))
            has_tensors[c < 0.0] |= has_op(y, "capture")
        is_left = not sides[0] or (bool(sides[1]) and not has_tensors[0])
        numbers = (constant, 0.0) if is_left else (0.0, -constant)
        left, right = map(self.sum, numbers, sides, (INT, INT))
        call, pair = (torch.le, [right, left]) if left.is_number else (torch.ge, [left, right])
        return self.pointwise(call, pair)

    def linear(self, x: Node, args: Sequence[Placed]) -> Placed:
        """Returns a sum; a mask in it is made first, so that others keep their digits."""
        constant, coefficients = x.value
        terms = list(zip(coefficients, args, strict=True))
        masks = mask_terms(x)
        if not masks:
            return self.sum(constant, terms, x.dtype)
        others = [term for i, term in enumerate(terms) if i not in masks]
        mask = self.sum(constant, [terms[i] for i in masks], x.dtype)
        return self.sum(0.0, [*others, (1.0, mask)], x.dtype)

    def sum(self, constant: float, terms: Iterable[tuple[float, Placed]], dtype: str) -> Placed:
        """Returns a number and multiples of others, positive ones first."""
        is_int = dtype == INT
        pairs = sorted(terms, key=lambda p: p[0] < 0.0)
        total: Placed | None = None
        for c, a in pairs:
            factor = c if total is None else abs(c)
            term = a if factor == 1 else self.scaled(a, int(factor) if is_int else factor)
            if total is None:
                total = term
            else:
                total = self.joined(torch.add if c > 0 else torch.sub, total, term)
        number = int(constant) if is_int else constant
        if total is None:
            return Placed(number)
        if constant:
            total = self.joined(torch.add, total, Placed(number))
        return total

    def scaled(self, a: Placed, c: Any) -> Placed:
        """Returns a multiple."""
        if isinstance(c, float) and not a.is_number and not a.value.is_floating_point():
            a = self._floating(a)
        return self.joined(torch.mul, a, Placed(c))

    def joined(self, call: Callable[..., Any], a: Placed, b: Placed) -> Placed:
        """Returns a function of two tensors or numbers."""
        if a.is_number and b.is_number:
            return Placed(self.of_numbers(call, a.node, b.node))
        if a.is_number and call is torch.sub:  # torch.sub takes no number first
            return self.pointwise(torch.rsub, [b, a])
        return self._pointwise_ordered(call, a, b)

    def norm(self, x: Placed) -> Placed:
        """Returns the square root of a sum of squares, whose gradient at 0 is 0."""
        is_zero = self.build.call(torch.eq, x.node, 0)
        positive = self.build.method("masked_fill", x.node, is_zero, 1.0)
        root = self.build.call(torch.sqrt, positive)
        return Placed(self.build.method("masked_fill", root, is_zero, 0.0), x.dims)

    def rounded(self, x: Placed, dtype: torch.dtype) -> Placed:
        """Returns a tensor of the same type without the digits that a narrower one has not."""
        value = x.value
        if not isinstance(value, Tensor) or value.dtype == dtype:
            return x
        narrow = self.build.method("to", x.node, dtype)
        return Placed(self.build.method("to", narrow, value.dtype), x.dims)
