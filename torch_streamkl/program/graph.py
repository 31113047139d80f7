"""Defines the expression graph: immutable nodes with axes, each of which exists once.

A node is an operation on nodes. Nodes that compute the same by the same operations are one object
(hash-consing), so equality is identity. `apply` creates a node as it is written, with the
identities that also hold for floating-point numbers (identities.py). canonical.py has the normal
form over real numbers, by which programs are recognised.

NOTE [Zero annihilates]
A probability of 0 removes its key from a sum, whatever its other factors are: 0 log 0 is 0, and so
is the gradient of such a term. So a product is 0 if a factor is. `is_guarded` tells the products
that need a check: those with a factor that may be infinite. A quotient in a derivative is `div0`.
The rule holds for whole products: in P * d * d both products are guarded, in P * (d * d) the outer
one is. Steps of a program (rows/program.py) name a guarded product `mul0`.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch_streamkl.program import operations, ranges
from torch_streamkl.program.locks import free_after_fork
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.ranges import EVERY, UNIT, Range
from torch_streamkl.program.sources import Source as Source

BOOL, INT, FLOAT = "bool", "int", "float"
_ORDER = (BOOL, INT, FLOAT)
SUM, LOGSUMEXP, MAX, ANY = "sum", "logsumexp", "max", "any"
ARGMAX, BLOCK_SUM = "argmax", "block_sum"

SMALLEST = 2.0**-100  # what is as large is far above the smallest numbers of every type


class HeadsError(ValueError):
    """Raised if elements with different numbers of heads meet."""


class Extent:
    """Represents a size that is not a number: it equals itself alone.

    Whoever reads a graph with symbolic sizes makes one for each of its different expressions, so
    that no comparison looks at an expression again.
    """

    __slots__ = ("high", "low", "name", "size")

    def __init__(self, name: str, size: Any = None, low: int = 0, high: float = math.inf) -> None:
        self.name, self.size, self.low, self.high = name, size, low, high

    def __repr__(self) -> str:
        return self.name


Size = int | Extent


class Axis(NamedTuple):
    """Represents a variable that an expression is a function of; ``size`` is None if unknown."""

    name: Any
    size: Size | None = None

    @property
    def level(self) -> int:
        """Returns the depth that names a bound axis, 0 for any other."""
        return self.name[1] if isinstance(self.name, tuple) and self.name[0] == BOUND else 0


BOUND = "bound"
CONTRACT = "contract"  # a matmul's element: its operands, and the axes that it sums over


def num_positions(axes: Iterable[Axis]) -> int | None:
    """Returns how many positions axes have together, None if a size is no number."""
    total = 1
    for axis in axes:
        if not isinstance(axis.size, int):
            return None
        total *= axis.size
    return total


ROW, KEY = Axis("row"), Axis("key")
_HEAD = "head"


def has_keys(axes: Iterable[Axis]) -> bool:
    """Returns whether something is a function of the key."""
    return any(a.name == KEY.name for a in axes)


def head_axis(number: int) -> Axis:
    """Returns an axis of heads of a row program, which numbers them from 1."""
    return Axis((_HEAD, number))


class Reduction(NamedTuple):
    """Says what a "reduce" node does: its kind, its axis, and a block sum's keys of a block."""

    kind: str
    axis: Axis
    size: int = 0


class Node:
    """Represents one expression: an operation, its arguments, and its further data.

    ``axes`` are what it is a function of, ``range`` bounds its values where they are numbers; with
    ``is_finite`` they are not infinite if those of the leaves are not. ``digest`` is equal in
    every process, and for each order of a commutative operation's arguments. Leaves have a
    ``value``: a constant's, the number of a dot or capture.
    """

    __slots__ = ("__weakref__", "args", "axes", "depth", "digest", "dtype", "flows",
                 "is_finite", "kind", "level", "op", "range", "value")  # fmt: skip
    op: str
    args: tuple[Node, ...]
    value: Any
    dtype: str
    axes: frozenset[Axis]
    is_finite: bool
    range: Range
    digest: bytes
    level: int  # how deep the bound axes inside are nested (canonical.py)
    depth: int  # of the expression
    kind: str  # of a reduction, empty for any other expression
    flows: bool  # whether gradient flows to a captured tensor of a user's program

    def __reduce__(self) -> Any:
        about = self.dtype, self.axes, self.is_finite, self.range
        return intern, (self.op, self.args, self.value, *about)

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: Any) -> Node:
        return self

    def __repr__(self) -> str:
        return text(self)

    def __add__(self, other: Operand) -> Node:
        return apply("add", self, other)

    def __sub__(self, other: Operand) -> Node:
        return apply("sub", self, other)

    def __mul__(self, other: Operand) -> Node:
        return apply("mul", self, other)

    def __truediv__(self, other: Operand) -> Node:
        return apply("div", self, other)

    def __neg__(self) -> Node:
        return apply("neg", self)

    @property
    def head(self) -> int:
        """Returns the number of its axis of heads, 0 for none."""
        return next((a.name[1] for a in self.axes if _is_head(a)), 0)

    @property
    def by_key(self) -> bool:
        return has_keys(self.axes)

    @property
    def is_guarded(self) -> bool:
        """Returns whether a product has to look for factors of 0: NOTE [Zero annihilates]."""
        return (
            self.op == "mul"
            and not all(a.is_finite for a in self.args)
            and not any(is_factor(a) for a in self.args)
        )


Operand = Node | float
_nodes: weakref.WeakValueDictionary[Any, Node] = weakref.WeakValueDictionary()
_lock = free_after_fork()


def intern(
    op: str,
    args: tuple[Node, ...] = (),
    value: Any = None,
    dtype: str = FLOAT,
    axes: frozenset[Axis] = frozenset(),
    is_finite: bool = True,
    range: Range = EVERY,
) -> Node:
    """Returns the one node with these parts, which `apply` and the makers of leaves know."""
    key = (op, args, value, dtype, axes, is_finite)
    node = _nodes.get(key)
    if node is not None:
        return node
    with _lock:
        node = _nodes.get(key)
        if node is None:
            node = Node()
            node.op, node.args, node.value, node.dtype = op, args, value, dtype
            low, high = range
            node.range = (-math.inf if low != low else low, math.inf if high != high else high)
            node.axes, node.is_finite = axes, is_finite
            own = f"{op}|{value!r}" if args else f"{op}|{value!r}|{dtype}|{sorted(axes, key=repr)}"
            parts = hashlib.blake2b(own.encode(), digest_size=12)
            digests = [a.digest for a in args]
            if op in OPERATIONS and OPERATIONS[op].is_commutative:
                digests.sort()
            for digest in digests:
                parts.update(digest)
            node.digest = parts.digest()
            bound = value if op == CONTRACT else (value.axis,) if op == "reduce" else ()
            node.kind = value.kind if op == "reduce" else ""
            node.level = max((0, *(x.level for x in (*bound, *args))))
            node.depth = 1 + max((a.depth for a in args), default=0)
            is_trained = isinstance(value, Source) and value.grad_flows
            node.flows = is_trained or any(a.flows for a in args)
            _nodes[key] = node
    return node


# ------------------------------------------------------------------------ leaves


def const(value: float, dtype: str = FLOAT, axes: frozenset[Axis] = frozenset()) -> Node:
    """Returns a number; with axes where it is the value of an expression that has them."""
    # -0.0 and 0.0 are equal and would be one node; NaN is equal to itself as an object alone
    value = math.nan if math.isnan(value) else float(value) + 0.0
    bounds = EVERY if math.isnan(value) else (value, value)
    return intern("const", (), value, dtype, axes, math.isfinite(value), bounds)


ZERO, ONE = const(0.0), const(1.0)


def constant(node: Node) -> float | None:
    """Returns the value of a constant, None for anything else."""
    return float(node.value) if node.op == "const" else None


def index(axis: Axis) -> Node:
    """Returns the position along an axis, 0 along one of size 1."""
    size = axis.size
    if size == 1:
        return const(0.0, INT)
    last = size - 1.0 if isinstance(size, int) else size.high - 1.0 if size else math.inf
    return intern("index", (), axis, INT, frozenset((axis,)), True, (0.0, last))


def size_of(size: Size) -> Node:
    """Returns a size as an expression."""
    if isinstance(size, int):
        return const(size, INT)
    return intern("size", (), size, INT, range=(float(size.low), float(size.high)))


def capture(
    source: Any,
    dtype: str = FLOAT,
    axes: frozenset[Axis] = frozenset(),
    at: Sequence[Node] = (),
    bounds: Range = EVERY,
) -> Node:
    """Returns an element of a tensor, which ``source`` names, at these positions.

    Row programs number theirs, and say what axes they have; in a user's program it is a `Source`.
    A bias may hide keys, so that tensors by key may be infinite.
    """
    axes = axes.union(*(x.axes for x in at))
    is_finite = dtype != FLOAT or not (at or has_keys(axes))
    bounds = UNIT if dtype == BOOL else bounds
    return intern("capture", tuple(at), source, dtype, axes, is_finite, bounds)


def dot(number: int, head: int = 0) -> Node:
    """Returns a product of a row program's operands."""
    axes = {ROW, KEY, head_axis(head)} if head else {ROW, KEY}
    return intern("dot", (), number, FLOAT, frozenset(axes))


def seed(number: int, axes: frozenset[Axis]) -> Node:
    """Returns the gradient to a reduction; of a sum over blocks, that to the block of each key."""
    return intern("seed", (), number, FLOAT, axes)


# ------------------------------------------------------------------------ operations


class _Identities:
    """Holds what identities.py defines: it makes nodes, and nodes are made with identities."""

    power: Callable[[Node, float], Node]
    simplified: Callable[[str, Sequence[Node]], Node | None]


IDENTITIES = _Identities()


def apply(op: str, *args: Operand) -> Node:
    """Returns an operation of `operations.OPERATIONS` as it is written.

    Arguments are promoted as torch promotes types. Identities apply that change no result but by
    a rounding, and that avoid an underflow of a probability (identities.py).
    """
    if op == "pow":
        x, exponent = args
        assert isinstance(x, Node) and not isinstance(exponent, Node)
        return IDENTITIES.power(x, exponent)
    op, operands = promoted(op, [as_node(a) for a in args])
    simple = IDENTITIES.simplified(op, operands)
    if simple is not None and (simple := _broadcast(simple, op, operands)) is not None:
        return simple
    if op == "div0" and (is_factor(operands[0]) or is_away_from_zero(operands[1])):
        return apply("div", *operands)
    return made(op, operands)


def literally(op: str, *args: Operand) -> Node:
    """Returns an operation without any identity: what torch computes of it."""
    if op == "pow":
        x, exponent = args
        assert isinstance(x, Node) and not isinstance(exponent, Node)
        return literally("mul", x, x) if exponent == 2 else made_power(x, exponent)
    return made(*promoted({"div0": "div"}.get(op, op), [as_node(a) for a in args]))


def as_node(x: Operand) -> Node:
    """Returns an expression as it is, a number as a constant."""
    return x if isinstance(x, Node) else const(x)


def made(op: str, args: Sequence[Node]) -> Node:
    """Returns the node of an operation as it is given."""
    operation = OPERATIONS[op]
    axes = axes_of(op, args)
    _check_no_blocks(args)
    dtype = args[-1].dtype if operation.result == "same" else operation.result
    is_finite = operation.is_finite
    if is_finite is None:
        is_finite = all(a.is_finite for a in args)
    if op == "div" and _may_vanish(args[1]):
        is_finite = False
    bounds = operation.range
    found = bounds if isinstance(bounds, tuple) else bounds([a.range for a in args])
    return intern(op, tuple(args), None, dtype, axes, is_finite, found)


def _check_no_blocks(args: Iterable[Node]) -> None:
    if any(a.kind == BLOCK_SUM for a in args):
        raise ValueError(
            "sums over blocks of keys are returned as they are; compute with what comes back"
        )


def made_power(x: Node, exponent: float) -> Node:
    """Returns the node of a power with a constant exponent."""
    operations.check_power(exponent)
    x = cast(x, FLOAT)
    bounds = ranges.NOT_NEGATIVE if exponent % 2 == 0 or x.range[0] >= 0.0 else EVERY
    return intern("pow", (x,), float(exponent), FLOAT, x.axes, False, bounds)


def _may_vanish(divisor: Node) -> bool:
    """Whether something may divide by 0: by a probability, not by a value of a row."""
    if divisor.op == "const":
        return not divisor.value
    is_of_row = bool(divisor.axes) and not divisor.by_key
    return not (is_of_row or is_away_from_zero(divisor))


def is_away_from_zero(x: Node) -> bool:
    """Returns whether dividing by an expression is safe in every type."""
    low, high = x.range
    return low >= SMALLEST or high <= -SMALLEST


def axes_of(op: str, args: Iterable[Node]) -> frozenset[Axis]:
    """Returns the axes of an operation's result."""
    every = frozenset[Axis]().union(*(a.axes for a in args))
    if sum(map(_is_head, every)) > 1:
        raise HeadsError(
            f"{op} meets elements with different numbers of heads; sum or average the heads "
            "of one first"
        )
    return every


def _is_head(axis: Axis) -> bool:
    return isinstance(axis.name, tuple) and axis.name[0] == _HEAD


def is_factor(node: Node) -> bool:
    """Returns whether it is a finite constant other than 0: such a product needs no guard."""
    value = constant(node)
    return bool(value) and math.isfinite(value or 0.0)


def promoted(op: str, args: Sequence[Node]) -> tuple[str, tuple[Node, ...]]:
    """Returns arguments of the type that the operation has of them, as torch promotes types.

    What torch does to conditions by another operation is that one: their sum is "or".
    """
    args = tuple(args)
    operation = OPERATIONS[op]
    if len(args) != operation.arity:
        raise ValueError(f"{op} takes {operation.arity} arguments, got {len(args)}")
    if op in ("detach", "float", "int", "and", "or", "not"):
        return op, args
    first: tuple[Node, ...] = ()
    if op == "where":
        condition = args[0]
        first = (condition if condition.dtype == BOOL else apply("ne", condition, 0.0),)
    rest = args[len(first) :]
    widest = max((a.dtype for a in rest), key=_ORDER.index)
    if widest == BOOL and operation.bools:
        return operation.bools, args
    if operation.result == FLOAT or (widest == BOOL and op not in ("where", "eq", "ne")):
        # truth values are compared as numbers
        widest = INT if operation.result == BOOL else FLOAT
    return op, (*first, *(cast(a, widest) for a in rest))


def cast(x: Node, dtype: str) -> Node:
    """Returns a value in another of the three types."""
    if x.dtype == dtype:
        return x
    if x.op == "const":
        return const(x.value, dtype, x.axes)
    return made("int" if dtype == INT else "float", (x,))


def widened(*args: Node) -> tuple[Node, ...]:
    """Returns arguments of the widest type among them: a bound of 0 is one of numbers."""
    dtypes = {a.dtype for a in args}
    return tuple(cast(a, FLOAT) for a in args) if dtypes == {INT, FLOAT} else args


def _broadcast(simple: Node, op: str, args: Sequence[Node]) -> Node | None:
    """An operation's result with the axes of its arguments.

    The shape of a result does not depend on a number: 0 times an element of a head is a 0 of
    each head.
    """
    axes = axes_of(op, args)
    if simple.axes == axes:
        return simple
    if simple.op == "const":
        return const(simple.value, simple.dtype, axes)
    if op == "where" and simple.dtype == FLOAT:  # of a constant condition
        return made("add", (simple, const(0.0, FLOAT, axes)))
    return None


def reduce(kind: str, axis: Axis, x: Node, size: int = 0) -> Node:
    """Returns a sum, log-sum-exp, maximum or "any" over an axis; of blocks of ``size`` keys.

    A log-sum-exp is -inf where all elements are. "argmax" is the place of the first maximum.
    """
    x = x if kind == ANY else cast(x, FLOAT)
    _check_no_blocks((x,))
    low, high = x.range
    if kind in (SUM, BLOCK_SUM):
        low, high = 0.0 if low >= 0.0 else -math.inf, 0.0 if high <= 0.0 else math.inf
    elif kind in (LOGSUMEXP, ARGMAX):
        low, high = -math.inf, math.inf
    is_finite = x.is_finite if kind == LOGSUMEXP or axis.name not in ("row", "key") else True
    about = Reduction(kind, axis, size)
    dtype = INT if kind == ARGMAX else x.dtype
    return intern("reduce", (x,), about, dtype, x.axes - {axis}, is_finite, (low, high))


def sum_heads(x: Node) -> Node:
    """Returns the sum over the axis of heads, the element itself where it has none."""
    heads = [a for a in x.axes if _is_head(a)]
    return reduce(SUM, heads[0], x) if heads else x


def text(node: Node) -> str:
    """Returns an expression for people to read, each subexpression at most a few levels deep."""

    def written(x: Node, depth: int) -> str:
        own = "" if x.value is None else repr(x.value) if x.op != "const" else f"{x.value:g}"
        if x.op == "const":
            return own
        if not depth and x.args:
            return "..."
        inside = [written(a, depth - 1) for a in x.args]
        return f"{x.op}({', '.join([*inside, own] if own else inside)})"

    return written(node, 8)
