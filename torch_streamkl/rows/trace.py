"""The user's callable becomes a program: elements are proxies that record what is done to them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.rows.expressions import BLOCK_SUM, BOOL, FLOAT, INT, Graph, Node
from torch_streamkl.rows.operations import OPERATIONS
from torch_streamkl.rows.program import (
    COLUMNS,
    KEY,
    LOGSUMEXP,
    MAX,
    PAIR,
    SUM,
    VALUES,
    Capture,
    Keys,
    Program,
    Reduction,
    canonical,
)


class Tracer:
    """The program under construction. The rewrite may use it as it is, without proxies."""

    def __init__(
        self,
        dot_heads: tuple[int, ...],
        captures: tuple[Capture, ...],
        keys: Keys,
        num_heads: Mapping[int, int],
    ) -> None:
        self.graph = Graph()
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
        """The node of the value of a row: a sum, log-sum-exp or maximum over its keys.

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
        """The node of sums over blocks of ``size`` keys, of each row."""
        self.graph.check_no_blocks(x)
        x = self.graph.as_float(x)
        reduction = Reduction(BLOCK_SUM, x, self.graph[x].head, size)
        return self.graph.block_sum(self._number(reduction), reduction.head)

    def _number(self, reduction: Reduction) -> int:
        if reduction not in self.reductions:
            self.reductions.append(reduction)
        return self.reductions.index(reduction)

    def program(self, outputs: list[int]) -> Program:
        """The program with these reductions, given as nodes, as its outputs."""
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


class Element:
    """One value for each row and key, or for each row after a reduction over keys."""

    def __init__(self, tracer: Tracer, index: int) -> None:
        self._tracer, self._index = tracer, index

    def _apply(self, op: str, *args: Any) -> Element:
        indices = [_index(self._tracer, a) for a in args]
        return Element(self._tracer, self._tracer.graph.apply(op, *indices))

    def __bool__(self) -> bool:
        raise TypeError(
            "an element of a row program has no truth value while it is traced; use torch.where, "
            "and & | ~ between conditions"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        operation = _FUNCTIONS.get(name)
        if operation is None:
            raise NotImplementedError(_cannot(name))
        return lambda *args, **kwargs: operation(self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Element:
        name = getattr(function, "__name__", str(function)).strip("_")
        name = _ALIASES.get(name, name)
        if name not in _FUNCTIONS:
            raise NotImplementedError(_cannot(name))
        tracer = next(a._tracer for a in args if isinstance(a, Element))
        first, *rest = args
        if not isinstance(first, Element):
            first = Element(tracer, _index(tracer, first))
        result: Element = _FUNCTIONS[name](first, *rest, **(kwargs or {}))
        return result

    def __neg__(self) -> Element:
        return self._apply("neg", self)

    def __invert__(self) -> Element:
        return self._apply("not", _condition(self, "~"))

    def __pow__(self, exponent: Any) -> Element:
        return _pow(self, exponent)

    def __abs__(self) -> Element:
        return self._apply("abs", self)


def _binary(op: str, is_reversed: bool = False) -> Callable[[Element, Any], Element]:
    def method(self: Element, other: Any) -> Element:
        if op in ("and", "or"):
            _condition(self, op)
            if isinstance(other, Element):
                _condition(other, op)
        return self._apply(op, *((other, self) if is_reversed else (self, other)))

    return method


_INFIX = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "and": "and", "or": "or"}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
for _name, _op in _INFIX.items():
    setattr(Element, f"__{_name}__", _binary(_op))
    setattr(Element, f"__r{_name}__", _binary(_op, is_reversed=True))
for _name in _COMPARISONS:
    setattr(Element, f"__{_name}__", _binary(_name))
Element.__hash__ = object.__hash__  # type: ignore[method-assign]  # comparisons make elements


def _cannot(name: str) -> str:
    known = ", ".join(sorted(_FUNCTIONS))
    return (
        f"a row program cannot express {name}; it has arithmetic, comparisons, & | ~ and {known}"
    )


def _condition(x: Any, where: str) -> Element:
    if not isinstance(x, Element) or x._tracer.graph[x._index].dtype != BOOL:
        raise TypeError(f"{where} takes conditions, got a number; compare it first")
    return x


def _index(tracer: Tracer, value: Any) -> int:
    """The node of an element or a number."""
    if isinstance(value, Element):
        if value._tracer is not tracer:
            raise ValueError("elements of two row programs cannot be combined")
        return value._index
    is_number = isinstance(value, (float, int))
    if not is_number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(
            "elements combine with elements and numbers; declare a tensor in rows, keys, pairs or "
            f"columns, got {type(value).__name__}"
        )
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(
            "a tensor of one number that needs a gradient must be declared in rows, so that it "
            "gets one"
        )
    number = float(value)
    if math.isnan(number):
        raise ValueError("a row program has no NaN constants")
    return tracer.graph.const(number)


# ------------------------------------------------------------------------ named functions


def _plain(op: str) -> Callable[..., Element]:
    arity = OPERATIONS[op].arity

    def function(x: Element, *args: Any, inplace: bool = False) -> Element:
        if len(args) != arity - 1 or inplace:
            raise TypeError(f"{op} takes {arity} argument(s) and is never in place")
        return x._apply(op, x, *args)

    return function


def _reduction(name: str) -> Callable[..., Element]:
    def function(
        x: Element, over: Any = None, *, dim: Any = None, block: int | None = None
    ) -> Element:
        tracer, graph = x._tracer, x._tracer.graph
        over = over if over is not None else dim
        if block is not None:
            if over != "key" or name != "sum":
                raise ValueError(f'{name} by blocks must be a sum over "key", got {over!r}')
            if isinstance(block, bool) or not isinstance(block, int) or block < 1:
                raise ValueError(f"block must be a positive number of keys, got {block!r}")
            return Element(tracer, tracer.block_sum(x._index, block))
        if over == "head" and name in ("sum", "mean"):
            total = graph.sum_heads(graph.as_float(x._index))
            if name == "mean" and graph[x._index].head:
                count = tracer.num_heads[graph[x._index].head]
                total = graph.apply("mul", total, graph.const(1.0 / count))
            return Element(tracer, total)
        if over != "key" or name == "mean":
            legal = {"sum": '"key" or "head"', "mean": '"head"', "logsumexp": '"key"'}[name]
            raise ValueError(f"{name} of an element must be over {legal}, got {over!r}")
        kind = SUM if name == "sum" else LOGSUMEXP
        return Element(tracer, tracer.reduce(kind, x._index))

    return function


def _log_softmax(x: Element, over: Any = None, *, dim: Any = None) -> Element:
    lse: Element = _FUNCTIONS["logsumexp"](x, over, dim=dim)
    return x._apply("sub", x, lse)


def _softmax(x: Element, over: Any = None, *, dim: Any = None) -> Element:
    return x._apply("exp", _log_softmax(x, over, dim=dim))


def _pow(x: Element, exponent: Any) -> Element:
    if isinstance(exponent, Element):
        raise NotImplementedError("a row program cannot express pow with an exponent that varies")
    graph = x._tracer.graph
    return Element(x._tracer, graph.power(graph.as_float(x._index), float(exponent)))


def _clamp(x: Element, min: Any = None, max: Any = None) -> Element:
    for bound, op in ((min, "clamp_min"), (max, "clamp_max")):
        if bound is not None:
            x = x._apply(op, x, bound)
    return x


def _where(x: Element, a: Any, b: Any) -> Element:
    """torch.where(condition, a, b), and x.where(condition, b) as a tensor has it."""
    condition: Any = x
    if x._tracer.graph[x._index].dtype != BOOL:
        condition, a = a, x
    return x._apply("where", _condition(condition, "where"), a, b)


def _masked_fill(x: Element, mask: Element, value: float) -> Element:
    return x._apply("where", _condition(mask, "masked_fill"), value, x)


def _xlogy(x: Element, y: Any) -> Element:
    return x._apply("mul0", x, x._apply("log", y))


_PLAIN = ("exp", "log", "sqrt", "abs", "sign", "tanh", "sigmoid", "log1p", "relu", "minimum",
          "maximum", "detach", "float", "add", "sub", "mul", "div", *_COMPARISONS)  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Element]] = {
    **{name: _plain(name) for name in _PLAIN},
    "neg": lambda x: -x,
    "square": lambda x: x * x,
    "rsqrt": lambda x: 1.0 / x._apply("sqrt", x),
    "reciprocal": lambda x: 1.0 / x,
    "log2": lambda x: x._apply("log", x) * (1.0 / math.log(2.0)),
    "xlogy": _xlogy,
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min),
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "where": _where,
    "masked_fill": _masked_fill,
    "softplus": lambda x: x._apply("softplus", x),
    "logsigmoid": lambda x: -x._apply("softplus", -x),
    "logaddexp": lambda x, y: _logaddexp(x, y),
    "sum": _reduction("sum"),
    "mean": _reduction("mean"),
    "logsumexp": _reduction("logsumexp"),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
}  # fmt: skip
_ALIASES = {"log_sigmoid": "logsigmoid", "true_divide": "div", "multiply": "mul", "clip": "clamp",
            "subtract": "sub", "divide": "div", "negative": "neg", "absolute": "abs",
            "special_xlogy": "xlogy", "truediv": "div", "rsub": "sub"}  # fmt: skip


OPERATION_NAMES = {*_FUNCTIONS, *_ALIASES}  # that elements have as methods, and torch as functions


def _logaddexp(x: Element, y: Any) -> Element:
    def apply(op: str, *args: Any) -> Element:
        return x._apply(op, *args)

    peak = apply("detach", apply("maximum", x, y))
    exps = [apply("exp", apply("sub", each, peak)) for each in (x, y)]
    return apply("add", peak, apply("log", apply("add", *exps)))


class Elements:
    """What the user's callable gets: dots and captured tensors by name, and positions."""

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
    """A program, and what is computed from its outputs for each row."""

    program: Program
    nodes: tuple[Node, ...]
    wanted: list[int]
    reductions: list[int]  # what the nodes call the program's outputs
    names: list[str] | None  # None for a single value


POSITIONS = ("key_index", "row_index")


def trace(
    function: Callable[[Any], Any],
    names: list[str],
    capture_names: list[str],
    tracer: Tracer,
    constants: Container[str] = (),
) -> Traced:
    """The program of a callable. What is named as constant gets no gradient."""
    values = {name: Element(tracer, tracer.dot(i)) for i, name in enumerate(names)}
    for i, name in enumerate(capture_names):
        values[name] = Element(tracer, tracer.capture(i))
    for name in values:
        if name in constants and tracer.graph[values[name]._index].dtype == FLOAT:
            values[name] = values[name]._apply("detach", values[name])
    for name in POSITIONS:
        values[name] = Element(tracer, tracer.graph.index(name))
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
    wanted = [x._index for x in outputs.values()]
    first = _outermost(graph, wanted)
    if not first:
        raise ValueError('a row program must have a sum or logsumexp over "key"')
    return Traced(
        tracer.program(first),
        tuple(graph.nodes),
        wanted,
        [int(graph[x].value) for x in first],
        list(outputs) if isinstance(returned, Mapping) else None,
    )


def _outermost(graph: Graph, wanted: list[int]) -> list[int]:
    """The reductions that values of rows are computed from."""
    return [i for i in graph.used_by(wanted) if graph[i].op in ("reduction", BLOCK_SUM)]


def dtype_of(x: Tensor) -> str:
    """What a captured tensor's elements are."""
    if x.dtype == torch.bool:
        return BOOL
    return FLOAT if x.is_floating_point() else INT
