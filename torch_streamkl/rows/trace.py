"""Traces the user's function to a program: calls it with proxies that record (elements.py)."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.program import graph
from torch_streamkl.program.graph import (
    BOOL,
    FLOAT,
    INT,
    MAX,
    Node,
    cast,
    const,
    made,
    reduce,
    sum_heads,
)
from torch_streamkl.program.graph import KEY as KEYS
from torch_streamkl.program.graph import ROW as ROWS
from torch_streamkl.program.masks import Keys
from torch_streamkl.program.steps import outermost
from torch_streamkl.rows import functions  # noqa: F401  # fills the table of elements' functions
from torch_streamkl.rows.elements import Element
from torch_streamkl.rows.program import COLUMNS, Capture, Program, program_of


class Tracer:
    """Builds the program. The rewrite may use it directly, without proxies."""

    def __init__(
        self,
        dot_heads: tuple[int, ...],
        captures: tuple[Capture, ...],
        keys: Keys,
        num_heads: Mapping[int, int],
    ) -> None:
        self.dot_heads, self.captures, self.keys = dot_heads, captures, keys
        self.num_heads = num_heads  # of each axis of heads
        self.sums: list[Node] = []  # in the order in which they were written

    def dot(self, number: int) -> Node:
        return graph.dot(number, self.dot_heads[number])

    def capture(self, number: int) -> Node:
        x = self.captures[number]
        return graph.capture(number, BOOL if x.kind == COLUMNS else x.dtype, x.axes)

    def reduce(self, kind: str, x: Node, size: int = 0) -> Node:
        """Returns a value of a row: a sum, log-sum-exp or maximum over its keys.

        A maximum is a constant for the derivative. Sums over blocks have their ``size``.
        """
        value = reduce(kind, KEYS, x, size)
        self.sums.append(value)
        return graph.apply("detach", value) if kind == MAX else value

    def sum_heads(self, x: Node) -> Node:
        """Returns the sum over an element's heads, as often a number as it has them."""
        x = cast(x, FLOAT)
        if x.op == "const" and x.head in self.num_heads:
            return const(x.value * self.num_heads[x.head], FLOAT, x.axes & {ROWS, KEYS})
        return sum_heads(x)

    def program(self, outputs: Sequence[Node]) -> tuple[Program, tuple[int, ...]]:
        """Returns the program with these reductions as its outputs, and their numbers in it."""
        return program_of(self.dot_heads, self.captures, outputs, self.keys)


class Elements:
    """Gives the user's function its dots, captured tensors and positions, by name."""

    def __init__(self, values: Mapping[str, Element]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Element:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"the row program has no {name!r}; it has {', '.join(self._values)}"
            ) from None


@dataclass(frozen=True, eq=False)
class Traced:
    """Holds a program, and the per-row computation that follows its outputs."""

    program: Program
    roots: list[Node]
    numbers: dict[Node, int]  # of the program's outputs, as the roots have them
    names: list[str] | None  # None for a single value


POSITIONS = ("key_index", "row_index")


def trace(
    function: Callable[[Any], Any],
    names: list[str],
    capture_names: list[str],
    tracer: Tracer,
    constants: Container[str] = (),
    seqlen: int | None = None,
) -> Traced:
    """Returns the program of a callable. What is named as constant gets no gradient.

    ``seqlen`` is the number of rows of a sequence, where a program's rows are those of several.
    """
    values = {name: Element(tracer, tracer.dot(i)) for i, name in enumerate(names)}
    for i, name in enumerate(capture_names):
        values[name] = Element(tracer, tracer.capture(i))
    for name, x in values.items():
        if name in constants and x._node.dtype == FLOAT:
            values[name] = x._apply("detach", x)
    for name, axis in zip(POSITIONS, (KEYS, ROWS), strict=True):
        values[name] = Element(tracer, graph.index(axis))
    if seqlen is not None:
        values["row_index"] = values["row_index"] % seqlen
    returned = function(Elements(values))
    outputs = returned if isinstance(returned, Mapping) else {"value": returned}
    if not outputs:
        raise ValueError("a row program must return at least one per-row value")
    for name, x in outputs.items():
        if not isinstance(x, Element) or x._node.by_key:
            raise ValueError(
                f'{name} must be a value of rows, after a sum or logsumexp over "key", got '
                f"{'an element' if isinstance(x, Element) else type(x).__name__}"
            )
    given = [x._node for x in outputs.values()]
    sums = tracer.sums
    if not sums:
        raise ValueError('a row program must have a sum or logsumexp over "key"')
    roots = [_connected(x, sums) for x in given]
    first = outermost(roots) or sums[:1]
    program, numbers = tracer.program(first)
    return Traced(
        program,
        roots,
        dict(zip(first, numbers, strict=True)),
        list(outputs) if isinstance(returned, Mapping) else None,
    )


def _connected(x: Node, sums: list[Node]) -> Node:
    """Makes a value depend on some sum, so that a constant gets a gradient of 0.

    0 times a sum is one; with another factor it would have a gradient.
    """
    if x.dtype != FLOAT or outermost([x]):
        return x
    own = [y for y in sums if y.kind != graph.BLOCK_SUM and y.head in (0, x.head)]
    return made("add", (x, made("mul0", (const(0.0), own[0])))) if own else x


def dtype_of(x: Tensor) -> str:
    """Returns the dtype of a captured tensor's elements."""
    if x.dtype == torch.bool:
        return BOOL
    return FLOAT if x.is_floating_point() else INT
