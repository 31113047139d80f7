"""Represents a closed form: what an operator is called with, or why there is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.program.canonical import product
from torch_streamkl.program.divergences import Functional
from torch_streamkl.program.functions import quotient
from torch_streamkl.program.graph import CONTRACT, FLOAT, Axis, Node, Source
from torch_streamkl.program.walks import walk

ATTENTION, LINEAR = "attention_kl", "linear_kl"
TEACHER, STUDENT = 0, 1
NO_ENTRIES = "the scores have a dimension without entries"


class NoForm(Unsupported):
    """Raised by the step that finds no form; ``at`` is the expression that it stopped at."""

    def __init__(self, reason: str, at: Node | None = None) -> None:
        super().__init__(reason)
        self.at = at


@dataclass(frozen=True)
class NotClosed:
    """Says why a program is no closed form, and at which expression."""

    reason: str
    at: Node | None = None


def sources_in(*exprs: Node) -> dict[Source, None]:
    """Returns the captured tensors of numbers that expressions are made of, in a fixed order."""
    captured = (x for x in walk(exprs) if x.op == "capture" and x.dtype == FLOAT)
    return dict.fromkeys(x.value for x in captured)


def is_of_products(*exprs: Node) -> bool:
    """Returns whether a product is part of an expression, or of the positions that it reads."""
    return any(x.op == CONTRACT for x in walk(exprs))


def is_softmax(x: Node, key: Axis) -> bool:
    """Returns whether an expression is a softmax over an axis."""
    return x.op == "exp" and x.args[0].op == "log_softmax" and x.args[0].value == key


def operands_of(product: Node, key: Axis) -> tuple[Node, Node]:
    """Returns the operands of a product of two tensors: that of the rows, and that of the keys."""
    keys = [x for x in product.args if key in x.axes]
    if len(keys) != 1:
        raise NoForm("the softmax is over a dimension that both operands of the scores have")
    rows = next((x for x in product.args if x is not keys[0]), keys[0])
    return rows, keys[0]


@dataclass(frozen=True)
class Factor:
    """Represents a tensor that multiplies or divides scores: a scalar, or one value per row."""

    value: Node
    divides: bool = False

    def applied(self, x: Node) -> Node:
        """Returns an expression times or divided by the tensor."""
        return quotient(x, self.value) if self.divides else product(x, self.value)


@dataclass(frozen=True)
class Bias:
    """Represents weight * factors * (a tensor), added to the scores."""

    value: Node
    weight: float = 1.0
    factors: tuple[Factor, ...] = ()


@dataclass(frozen=True)
class Product:
    """Represents weight * factors * rows . keys, summed over ``contracted``.

    An operand is an element of it: which tensor, and where it is read. The positions are
    expressions of the call's axes, from which a view of the tensor follows. If it is no capture,
    the tensor is computed in the graph: probabilities are an operand.
    """

    rows: Node
    keys: Node
    contracted: tuple[Axis, ...]
    weight: float = 1.0
    factors: tuple[Factor, ...] = ()

    @property
    def names(self) -> frozenset[Any]:
        """Returns the names of its operands, without those that are computed in the graph."""
        return names_of((self.rows, self.keys))


def names_of(operands: Iterable[Node]) -> frozenset[Any]:
    """Returns the names of a product's operands, without those that are computed in the graph."""
    return frozenset(map(source_name, operands)) - {None}


@dataclass(frozen=True)
class Side:
    """Represents one side of a call: a product, and how it becomes a score.

    ``score = softcap * tanh(scale * product / softcap) + biases``; without a softcap ``score =
    scale * product + biases``. The product holds the factors. ``inner_biases`` and ``adapters``
    are added to ``scale * product``, before a tanh.
    """

    product: Product
    scale: float = 1.0
    softcap: float = 0.0
    inner_biases: tuple[Bias, ...] = ()
    biases: tuple[Bias, ...] = ()
    adapters: tuple[Product, ...] = ()
    averaged: tuple[Axis, ...] = ()  # heads whose probabilities are averaged
    num_keys: Node | None = None  # of this side, if the other has more

    @property
    def operands(self) -> tuple[Node, ...]:
        products = (self.product, *self.adapters)
        return tuple(x for p in products for x in (p.rows, p.keys))

    @property
    def added(self) -> tuple[Bias, ...]:
        return self.inner_biases + self.biases

    @property
    def requires_grad(self) -> bool:
        factors = [f.value for p in (self.product, *self.adapters) for f in p.factors]
        return any(x.flows for x in (*self.operands, *factors, *(b.value for b in self.added)))


@dataclass(frozen=True)
class Masks:
    """Represents which keys take part, in the operator's terms.

    A window's bounds are relative to the row's position, row + num_keys - num_rows, and may have
    symbolic sizes. ``fill`` is None if keys are removed.
    """

    window_left: Node | None = None
    window_right: Node | None = None
    lengths: Node | None = None  # keys below it take part, as of padded sequences
    tensors: tuple[Node, ...] = ()  # conditions that vary with the key
    segments: tuple[Node, ...] = ()  # those that compare an id of the row and of the key
    rows: tuple[Node, ...] = ()  # conditions of whole rows
    vocab: tuple[Node, ...] = ()  # conditions of the key's position alone
    fill: float | None = None

    @property
    def is_empty(self) -> bool:
        return replace(self, fill=None) == Masks()

    @property
    def dense(self) -> Masks:
        """Returns what is no window."""
        return replace(self, window_left=None, window_right=None)


@dataclass(frozen=True)
class Stricter:
    """Represents conditions of one side's mask that the other side does not have."""

    side: int
    masks: Masks


@dataclass(frozen=True)
class Axes:
    """Says which axis is which dimension of the operator's tensors, the leading one first."""

    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    query: Axis | None  # None: a single row
    key: Axis

    @property
    def queries(self) -> tuple[Axis, ...]:
        return (self.query,) if self.query else ()

    @property
    def rows(self) -> tuple[Axis, ...]:
        return (*self.batch, *self.heads, *self.queries)

    @property
    def scores(self) -> tuple[tuple[Axis, ...], ...]:
        """Returns the axes of each dimension of scores; those of queries have the first three."""
        return self.batch, self.heads, self.queries, (self.key,)


@dataclass(frozen=True)
class Call:
    """Describes one call of an operator: ``weight`` times its row values are its share.

    ``functional`` is of P, the teacher's probabilities, and S, the student's.
    """

    operator: str
    functional: Functional
    teacher: Side
    student: Side
    axes: Axes
    masks: Masks
    weight: Node  # a number, or per-row values
    stricter: Stricter | None = None

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.teacher, self.student

    @property
    def head_mean(self) -> bool:
        return bool(self.teacher.averaged)


@dataclass(frozen=True)
class ClosedForm:
    """Represents a sum over keys as operator calls: the sum of weight * rows of each.

    ``site`` is the sum with axes of its own: ``names`` has the program's names of some, and those
    that the site and its calls have. ``guarded`` are scores: where eager code takes the logarithm
    of their softmax, conditions choose something else if it is 0 by underflow.
    """

    site: Node = field(repr=False)
    calls: tuple[Call, ...]
    names: tuple[tuple[Axis, Axis], ...] = field(default=(), repr=False)
    guarded: tuple[Node, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class RowValue:
    """Names the values that the calls of a site compute, in a program around them."""

    number: int


@dataclass(frozen=True)
class Matched:
    """Holds a program and what its sums over keys are matched with."""

    root: Node = field(repr=False)
    found: dict[Node, ClosedForm | NotClosed]

    @property
    def closed(self) -> dict[Node, ClosedForm]:
        return {k: v for k, v in self.found.items() if isinstance(v, ClosedForm)}
