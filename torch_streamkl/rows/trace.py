"""Traces the user's function to a program: calls it with proxies that record (elements.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.rows import functions  # noqa: F401  # fills the table of elements' functions
from torch_streamkl.rows.elements import Element
from torch_streamkl.rows.expressions import BLOCK_SUM, BOOL, FLOAT, INT, Graph, Node
from torch_streamkl.rows.program import (
    COLUMNS,
    KEY,
    LOGSUMEXP,
    MAX,
    PAIR,
    VALUES,
    Capture,
    Keys,
    Program,
    Reduction,
    canonical,
)


class Tracer:
    """Builds the program. The rewrite may use it directly, without proxies."""

    def __init__(
        self,
        dot_heads: tuple[int, ...],
        captures: tuple[Capture, ...],
        keys: Keys,
        num_heads: Mapping[int, int],
    ) -> None:
        self.graph = Graph(num_heads=num_heads)
        self.dot_heads, self.captures, self.keys = dot_heads, captures, keys
        self.num_heads = num_heads  # of each axis of heads
        self.reductions: list[Reduction] = []

    def dot(self, number: int) -> int:
        return self.graph.dot(number, self.dot_heads[number])

    def capture(self, number: int) -> int:
        x = self.captures[number]
        dtype = BOOL if x.kind == COLUMNS else x.dtype
        by_key = x.kind in (KEY, PAIR, COLUMNS, VALUES)
        return self.graph.capture(number, dtype, x.head, by_key)

    def reduce(self, kind: str, x: int) -> int:
        """Returns the node of the value of a row: a sum, log-sum-exp or maximum over its keys.

        A maximum is a constant for the derivative.
        """
        self.graph.check_no_blocks(x)
        x = self.graph.as_float(x)
        reduction = Reduction(kind, x, self.graph[x].head)
        number = self._number(reduction)
        if kind == LOGSUMEXP:
            return self.graph.log_sum_exp(number, reduction.head, x)
        node = self.graph.reduction(number, reduction.head)
        return self.graph.apply("detach", node) if kind == MAX else node

    def block_sum(self, x: int, size: int) -> int:
        """Returns the node of sums over blocks of ``size`` keys, of each row."""
        self.graph.check_no_blocks(x)
        x = self.graph.as_float(x)
        reduction = Reduction(BLOCK_SUM, x, self.graph[x].head, size)
        return self.graph.block_sum(self._number(reduction), reduction.head)

    def _number(self, reduction: Reduction) -> int:
        if reduction not in self.reductions:
            self.reductions.append(reduction)
        return self.reductions.index(reduction)

    def program(self, outputs: list[int]) -> Program:
        """Returns the program with these reductions, given as nodes, as its outputs."""
        return _canonical(
            self.dot_heads,
            self.captures,
            tuple(self.graph.nodes),
            tuple(self.reductions),
            tuple(int(self.graph[x].value) for x in outputs),
            self.keys,
        )


@functools.lru_cache(maxsize=1024)
def _canonical(*parts: Any) -> Program:
    """A program is recorded anew in every call, and has its form and text from the first."""
    return canonical(Program(*parts))


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
    """Holds a program, and what is computed from its outputs for each row."""

    program: Program
    nodes: tuple[Node, ...]
    roots: list[int]
    reductions: list[int]  # what the nodes call the program's outputs
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
    for name in values:
        if name in constants and tracer.graph[values[name]._index].dtype == FLOAT:
            values[name] = values[name]._apply("detach", values[name])
    for name in POSITIONS:
        values[name] = Element(tracer, tracer.graph.index(name))
    if seqlen is not None:
        values["row_index"] = values["row_index"] % seqlen
    returned = function(Elements(values))
    outputs = returned if isinstance(returned, Mapping) else {"value": returned}
    if not outputs:
        raise ValueError("a row program must return at least one value of rows")
    graph = tracer.graph
    for name, x in outputs.items():
        if not isinstance(x, Element) or graph[x._index].by_key:
            raise ValueError(
                f'{name} must be a value of rows, after a sum or logsumexp over "key", got '
                f"{'an element' if isinstance(x, Element) else type(x).__name__}"
            )
    sums = [i for i, node in enumerate(graph.nodes) if node.op in ("reduction", BLOCK_SUM)]
    if not sums:
        raise ValueError('a row program must have a sum or logsumexp over "key"')
    roots = [_connected(graph, x._index, sums) for x in outputs.values()]
    first = _outermost(graph, roots) or sums[:1]
    return Traced(
        tracer.program(first),
        tuple(graph.nodes),
        roots,
        [int(graph[x].value) for x in first],
        list(outputs) if isinstance(returned, Mapping) else None,
    )


def _outermost(graph: Graph, roots: list[int]) -> list[int]:
    """The reductions that per-row values are computed from."""
    return [i for i in graph.used_by(roots) if graph[i].op in ("reduction", BLOCK_SUM)]


def _connected(graph: Graph, x: int, sums: list[int]) -> int:
    """A value that depends on some sum, so that it has a gradient: 0 where it is a number.

    0 times a sum is one; with another factor it would have a gradient.
    """
    if graph[x].dtype != FLOAT or _outermost(graph, [x]):
        return x
    own = [i for i in sums if graph[i].op == "reduction" and graph[i].head in (0, graph[x].head)]
    if not own:
        return x
    nothing = graph.add(graph[own[0]]._replace(op="mul0", args=(graph.const(0.0), own[0])))
    return graph.add(graph[x]._replace(op="add", args=(x, nothing), value=0.0))


def dtype_of(x: Tensor) -> str:
    """Returns the dtype of a captured tensor's elements."""
    if x.dtype == torch.bool:
        return BOOL
    return FLOAT if x.is_floating_point() else INT
