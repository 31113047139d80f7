"""Defines the nodes of a row program: elements (row, key) and per-row values, built once each.

A `Graph` only grows. The same operation on the same nodes is one node, constants are folded, and
what is an exact identity of real numbers is applied; `log(exp(x))` becomes `x`, which avoids the
underflow of a probability.

NOTE [Zero annihilates]
A probability that is 0 removes its key from a sum, whatever stands next to it: 0 log 0 is 0, and
so is the gradient of such a term. A product with a factor that may be infinite is therefore the
node `mul0`, which is 0 where either factor is; a quotient in a derivative is `div0`. The rule
holds for whole products: in P * d * d both products are guarded, in P * (d * d) the outer one is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from torch_streamkl.rows import operations
from torch_streamkl.rows.operations import OPERATIONS

BOOL, INT, FLOAT = "bool", "int", "float"
BLOCK_SUM = "block_sum"  # as an operation: the value of a reduction of that kind
_ORDER = (BOOL, INT, FLOAT)


class HeadsError(ValueError):
    """Elements with different numbers of heads meet."""


class Node(NamedTuple):
    """Holds one value and the operation that computes it.

    ``value`` is a constant, or the number of a dot, captured tensor or reduction. ``head`` is the
    axis of heads that it has, 0 for none: elements of one axis have as many heads. Without
    ``by_key`` it is a value of a row.
    """

    op: str
    args: tuple[int, ...] = ()
    value: float = 0.0
    dtype: str = FLOAT
    head: int = 0
    by_key: bool = False
    is_finite: bool = True


@dataclass
class Graph:
    """Nodes in the order in which they can be computed."""

    nodes: list[Node] = field(default_factory=list)
    _known: dict[Node, int] = field(default_factory=dict)
    num_heads: Mapping[int, int] = field(default_factory=dict)  # of each axis, where it is known

    @classmethod
    def of(cls, nodes: tuple[Node, ...]) -> Self:
        """Returns a graph that grows from these, by the rules of its class."""
        return cls(list(nodes), {node: i for i, node in enumerate(nodes)})

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def add(self, node: Node) -> int:
        """Returns the number of a node, which is new or known."""
        index = self._known.get(node)
        if index is None:
            self.check_no_blocks(*node.args)
            index = self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return index

    def check_no_blocks(self, *args: int) -> None:
        """Refuses to combine sums over blocks of keys with elements or per-row values."""
        if any(self.nodes[a].op == BLOCK_SUM for a in args):
            raise ValueError(
                "sums over blocks of keys are returned as they are; compute with what comes back"
            )

    def const(self, value: float, dtype: str = FLOAT, head: int = 0, by_key: bool = False) -> int:
        """Returns a number; with axes where it is the value of an expression that has them."""
        # -0.0 and 0.0 are equal and would be one node; NaN is equal to itself as an object alone
        value = math.nan if math.isnan(value) else float(value) + 0.0
        return self.add(Node("const", (), value, dtype, head, by_key, math.isfinite(value)))

    def constant(self, index: int) -> float | None:
        """Returns the value of a constant, None for anything else."""
        node = self.nodes[index]
        return node.value if node.op == "const" else None

    def dot(self, number: int, head: int) -> int:
        return self.add(Node("dot", value=number, head=head, by_key=True))

    def capture(self, number: int, dtype: str, head: int, by_key: bool) -> int:
        # a bias may hide keys
        is_finite = dtype != FLOAT or not by_key
        return self.add(Node("capture", (), number, dtype, head, by_key, is_finite))

    def reduction(self, number: int, head: int, is_finite: bool = True) -> int:
        return self.add(Node("reduction", value=number, head=head, is_finite=is_finite))

    def log_sum_exp(self, number: int, head: int, of: int) -> int:
        """Returns the value of a log-sum-exp, which is -inf in a row where all elements are."""
        return self.reduction(number, head, self.nodes[of].is_finite)

    def block_sum(self, number: int, head: int) -> int:
        """Returns a sum over blocks of keys, which is returned and in no expression."""
        return self.add(Node(BLOCK_SUM, value=number, head=head))

    def seed(self, number: int, head: int, by_key: bool = False) -> int:
        """Returns the gradient to a reduction; of a sum over blocks, that to the block of each
        key.
        """
        return self.add(Node("seed", value=number, head=head, by_key=by_key))

    def index(self, of: str) -> int:
        """Returns positions of keys ("key_index") or rows ("row_index")."""
        return self.add(Node(of, dtype=INT, by_key=of == "key_index"))

    def sum_heads(self, x: int) -> int:
        node = self.nodes[x]
        if not node.head:
            return x
        if node.op == "const" and node.head in self.num_heads:
            return self.const(node.value * self.num_heads[node.head], FLOAT, 0, node.by_key)
        return self.add(Node("sum_heads", (x,), 0.0, FLOAT, 0, node.by_key, node.is_finite))

    def apply(self, op: str, *args: int) -> int:
        """Returns a pointwise operation of `operations.OPERATIONS`."""
        op, args = self._as_operands(op, args)
        simple = self._simplified(op, args)
        if simple is not None and (simple := self._with_axes(simple, op, args)) is not None:
            return simple
        nodes = [self.nodes[a] for a in args]
        if op == "mul" and not all(n.is_finite for n in nodes):
            if not any(self._is_factor(a) for a in args):
                return self.apply("mul0", *args)
        if op == "div0" and self._is_factor(args[0]):
            return self.apply("div", *args)
        return self._made(op, args)

    def _with_axes(self, simple: int, op: str, args: tuple[int, ...]) -> int | None:
        """Broadcasts an operation's result to the axes of its arguments.

        The shape of a result does not depend on a number: 0 times an element of a head is a 0 of
        each head.
        """
        head, by_key = self.head_of(op, args), any(self.nodes[a].by_key for a in args)
        node = self.nodes[simple]
        if (node.head, node.by_key) == (head, by_key):
            return simple
        if node.op == "const":
            return self.const(node.value, node.dtype, head, by_key)
        if op == "where" and node.dtype == FLOAT:  # of a constant condition
            return self._made("add", (simple, self.const(0.0, FLOAT, head, by_key)))
        return None

    def _made(self, op: str, args: tuple[int, ...]) -> int:
        """The node of an operation as it is given."""
        nodes = [self.nodes[a] for a in args]
        operation = OPERATIONS[op]
        dtype = nodes[-1].dtype if operation.result == "same" else operation.result
        is_finite = operation.is_finite
        if is_finite is None:
            is_finite = all(n.is_finite for n in nodes)
        if op == "div" and nodes[1].by_key:  # which may be a probability that is 0
            is_finite = False
        by_key = any(n.by_key for n in nodes)
        node = Node(op, args, 0.0, dtype, self.head_of(op, args), by_key, is_finite)
        return self.add(node)

    def _is_factor(self, index: int) -> bool:
        """A finite constant other than 0, with which a product needs no guard."""
        value = self.constant(index)
        return bool(value) and math.isfinite(value or 0.0)

    def power(self, x: int, exponent: float) -> int:
        """Computes ``x ** exponent`` of a constant exponent."""
        operations.check_power(exponent)
        if exponent and self.nodes[x].op == "exp":  # a power of a probability, without underflow
            inner = self.apply("mul", self.nodes[x].args[0], self.const(exponent))
            return self.apply("exp", inner)
        match exponent:
            case 0:
                return self.const(1.0, FLOAT, self.nodes[x].head, self.nodes[x].by_key)
            case 1:
                return self.as_float(x)
            case 2:
                return self.apply("mul", x, x)
            case 3:
                return self.apply("mul", self.apply("mul", x, x), x)
            case 0.5:
                return self.apply("sqrt", x)
            case -1:
                return self.apply("div", self.const(1.0), x)
        x = self.as_float(x)
        node = self.nodes[x]
        return self.add(Node("pow", (x,), exponent, FLOAT, node.head, node.by_key, False))

    def _as_operands(self, op: str, args: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Arguments of the type that the operation has of them, as torch promotes types.

        What torch does to conditions by another operation is that one: their sum is "or".
        """
        if op in ("detach", "float", "int", "and", "or", "not"):
            return op, args
        operation = OPERATIONS[op]
        first = args[:1] if op == "where" else ()
        rest = args[len(first) :]
        widest = max((self.nodes[a].dtype for a in rest), key=_ORDER.index)
        if widest == BOOL and operation.bools:
            return operation.bools, args
        if operation.result == FLOAT or (widest == BOOL and op not in ("where", "eq", "ne")):
            # truth values are compared as numbers
            widest = INT if operation.result == BOOL else FLOAT
        return op, (*first, *(self._cast(a, widest) for a in rest))

    def _cast(self, x: int, dtype: str) -> int:
        node = self.nodes[x]
        if node.dtype == dtype:
            return x
        if node.op == "const":
            return self.const(node.value, dtype, node.head, node.by_key)
        return self._made("int" if dtype == INT else "float", (x,))

    def head_of(self, op: str, args: tuple[int, ...]) -> int:
        """Returns the axis of heads of an operation's result."""
        heads = {self.nodes[a].head for a in args} - {0}
        if len(heads) > 1:
            raise HeadsError(
                f"{op} meets elements with different numbers of heads; sum or average the heads "
                "of one first"
            )
        return heads.pop() if heads else 0

    def _simplified(self, op: str, args: tuple[int, ...]) -> int | None:
        values = [self.constant(a) for a in args]
        a, b = args[0], args[-1]
        va, vb = values[0], values[-1]
        if op in ("mul", "mul0") and 0 in (va, vb):
            return self.const(0.0, self.nodes[a].dtype)
        if all(v is not None for v in values):
            dtypes = [self.nodes[i].dtype for i in args]
            folded = operations.of_numbers(op, [v for v in values if v is not None], dtypes)
            result = OPERATIONS[op].result
            return self.const(folded, dtypes[-1] if result == "same" else result)
        match op:
            case "add" if va == 0:
                return b
            case "add" | "sub" if vb == 0:
                return a
            case "float" | "int" if self.nodes[a].dtype == op:
                return a
            case "floor" | "ceil" | "trunc" if self.nodes[a].dtype == INT:
                return a
            case "sub" if va == 0:
                return self.apply("neg", b)
            case "add" | "sub" if (shared := self._shared_probability(a, b)) is not None:
                product, probability, x, y = shared
                return self.apply(product, self.apply(op, x, y), probability)
            case "add" if (parts := self._of_row_first(a, b)) is not None:
                return self.apply("add", parts[0], self.apply("add", *parts[1:]))
            case "add" if self.nodes[b].op == "neg":
                return self.apply("sub", a, self.nodes[b].args[0])
            case "mul" | "mul0" if va == 1:
                return b
            case "mul" | "mul0" | "div" if vb == 1:
                return a
            case "mul0" if self._is_factor(a) or self._is_factor(b):
                return self.apply("mul", a, b)
            case "mul" if vb == -1:
                return self.apply("neg", a)
            case "div0" if va == 0:
                return self.const(0.0)
            case "div" if vb and math.isfinite(1.0 / vb):
                mantissa, _ = math.frexp(vb)
                return self.apply("mul", a, self.const(1.0 / vb)) if mantissa == 0.5 else None
            case "neg" if self.nodes[a].op == "neg":
                return self.nodes[a].args[0]
            case "log":
                return self._log_of(a)
            case "sqrt" if self.nodes[a].op == "exp":
                return self.power(a, 0.5)
            case "where" if va is not None:
                return args[1] if va else args[2]
            case "where" if args[1] == args[2]:
                return b
        return None

    def _log_of(self, x: int) -> int | None:
        """The logarithm of an exponential, of a product with one, or of a quotient.

        No underflow of a probability, and derivatives without a division by it.
        """
        node = self.nodes[x]
        if node.op == "exp":
            return node.args[0]
        if node.op == "div":
            a, b = node.args
            factors = self._exponential(a)
            if factors is None:
                return self.apply("log_div", a, b)
            exponent, rest = factors
            if rest is None:
                return self.apply("sub", exponent, self.apply("log", b))
            return self.apply("add", exponent, self.apply("log_div", rest, b))
        if node.op in ("mul", "mul0"):
            factors = self._exponential(x)
            if factors is not None and factors[1] is not None:
                return self.apply("add", factors[0], self.apply("log", factors[1]))
        return None

    def _exponential(self, x: int) -> tuple[int, int | None] | None:
        """The exponent of a product with an exponential, and the other factor."""
        node = self.nodes[x]
        if node.op == "exp":
            return node.args[0], None
        if node.op in ("mul", "mul0"):
            for i in (0, 1):
                if self.nodes[node.args[i]].op == "exp":
                    return self.nodes[node.args[i]].args[0], node.args[1 - i]
        return None

    def exponentials_in(self, x: int) -> tuple[list[int], list[int]]:
        """Returns the exponentials that a product or quotient has as factors: above, and below."""
        found: tuple[dict[int, None], dict[int, None]] = {}, {}  # sets in the order of discovery
        stack, seen = [(x, 0)], {(x, 0)}
        while stack:
            i, side = stack.pop()
            node = self.nodes[i]
            if node.op == "exp":
                found[side][i] = None
            if node.op not in ("mul", "mul0", "div"):
                continue
            sides = side, 1 - side if node.op == "div" else side
            for each in zip(node.args[::-1], sides[::-1], strict=True):
                if each not in seen:
                    seen.add(each)
                    stack.append(each)
        return list(found[0]), list(found[1])

    def _shared_probability(self, a: int, b: int) -> tuple[str, int, int, int] | None:
        """Factors two products with one exponential: the operation, the exponential, the other
        factors.

        The gradient of a softmax as P * g - P * sum loses digits that P * (g - sum) keeps.
        """
        x, y = self.nodes[a], self.nodes[b]
        if x.op != y.op or x.op not in ("mul", "mul0"):
            return None
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            if x.args[i] == y.args[j] and self.nodes[x.args[i]].op == "exp":
                return x.op, x.args[i], x.args[1 - i], y.args[1 - j]
        return None

    def _of_row_first(self, a: int, b: int) -> tuple[int, int, int] | None:
        """An element and two values of its row, which are added to each other first."""
        for x, row in ((a, b), (b, a)):
            inner = self.nodes[x]
            if self.nodes[row].by_key or inner.op != "add" or not inner.by_key:
                continue
            for i in (0, 1):
                if not self.nodes[inner.args[i]].by_key and self.nodes[inner.args[1 - i]].by_key:
                    return inner.args[1 - i], inner.args[i], row
        return None

    def as_float(self, x: int) -> int:
        return self._cast(x, FLOAT)

    def used_by(self, roots: list[int]) -> list[int]:
        """Returns the nodes that the roots need, in the order of computation."""
        needed, stack = set(roots), list(roots)
        while stack:
            for a in self.nodes[stack.pop()].args:
                if a not in needed:
                    needed.add(a)
                    stack.append(a)
        return sorted(needed)


class Literal(Graph):
    """A graph whose operations are those that it is given: no identity is applied, and products
    and quotients are torch's, with NaN where torch has it."""

    def apply(self, op: str, *args: int) -> int:
        op = {"mul0": "mul", "div0": "div"}.get(op, op)
        return self._made(*self._as_operands(op, args))

    def power(self, x: int, exponent: float) -> int:
        if exponent == 2:
            return self.apply("mul", x, x)
        operations.check_power(exponent)
        node = self.nodes[x]
        return self.add(Node("pow", (x,), exponent, FLOAT, node.head, node.by_key, False))
