"""Applies the identities that also hold in floating point, as a node is created.

They fold constants, avoid the underflow of a probability (``log(exp(x))`` is ``x``), and keep the
digits of differences. None of them reorders a sum of more than a row's own values.

The leaves of a divergence are P and S, the probabilities of a key, and their logarithms. To the
identities, P is an exponential whose exponent is logP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_streamkl.program import operations, ranges
from torch_streamkl.program.graph import (
    FLOAT,
    IDENTITIES,
    INT,
    ZERO,
    Node,
    apply,
    cast,
    const,
    constant,
    intern,
    made_power,
)
from torch_streamkl.program.operations import OPERATIONS

LOGS = {"P": "logP", "S": "logS"}
PROBABILITIES = {log: name for name, log in LOGS.items()}
VARIABLES = ("P", "S", "logP", "logS")


def variable(name: str, number: float = 0.0) -> Node:
    """Returns a probability or its logarithm; ``number`` tells several distributions apart."""
    bounds = ranges.UNIT if name in LOGS else (-math.inf, 0.0)
    return intern(name, (), float(number), FLOAT, frozenset(), name in LOGS, bounds)


P, S, LOG_P, LOG_S = map(variable, VARIABLES)


def log_variable(node: Node) -> Node | None:
    """Returns logP for P, logS for S, None for anything else."""
    return variable(LOGS[node.op], node.value) if node.op in LOGS else None


def is_weight(node: Node) -> bool:
    """Returns whether a factor is 0 exactly where its distribution gives a key no probability."""
    return node.op in LOGS


def simplified(op: str, args: Sequence[Node]) -> Node | None:
    """Returns what an operation is by an identity, None where there is none."""
    values = [constant(a) for a in args]
    a, b = args[0], args[-1]
    va, vb = values[0], values[-1]
    if op == "mul" and 0 in (va, vb):
        return const(0.0, a.dtype)
    if all(v is not None for v in values):
        dtypes = [x.dtype for x in args]
        folded = operations.of_numbers(op, [v for v in values if v is not None], dtypes)
        result = OPERATIONS[op].result
        return const(folded, dtypes[-1] if result == "same" else result)
    match op:
        case "add" | "sub":
            return _simplified_sum(op, a, b)
        case "mul" | "mul0" if va == 1:
            return b
        case "mul" | "div" if vb == 1:
            return a
        case "mul" if vb == -1:
            return apply("neg", a)
        case "div0" | "div" if va == 0 and (op == "div0" or not b.axes):
            return ZERO
        case "div" if vb and math.isfinite(1.0 / vb):
            mantissa, _ = math.frexp(vb)
            return apply("mul", a, 1.0 / vb) if mantissa == 0.5 else None
        case "neg" if a.op == "neg":
            return a.args[0]
        case "exp" if a.op in PROBABILITIES:
            return variable(PROBABILITIES[a.op], a.value)
        case "log":
            return _log_of(a)
        case "sqrt" if a.op == "exp":
            return power(a, 0.5)
        case "where" if va is not None:
            return args[1] if va else args[2]
        case "where" if args[1] is args[2]:
            return b
        case "float" | "int" if a.dtype == op:
            return a
        case "floor" | "ceil" | "trunc" if a.dtype == INT:
            return a
    return None


def _simplified_sum(op: str, a: Node, b: Node) -> Node | None:
    va, vb = constant(a), constant(b)
    if op == "add" and va == 0:
        return b
    if vb == 0:
        return a
    if op == "sub" and va == 0:
        return apply("neg", b)
    if op == "sub" and a is b and not a.axes:  # of a divergence, where nothing is infinite alone
        return ZERO
    if (total := _sum_of_multiples(op, a, b)) is not None:
        return total
    if (shared := _shared_probability(a, b)) is not None:
        probability, x, y = shared
        return apply("mul", apply(op, x, y), probability)
    if op == "add" and (parts := _of_row_first(a, b)) is not None:
        return apply("add", parts[0], apply("add", *parts[1:]))
    if op == "add" and b.op == "neg":
        return apply("sub", a, b.args[0])
    return None


def power(x: Node, exponent: float) -> Node:
    """Computes ``x ** exponent`` of a constant exponent."""
    operations.check_power(exponent)
    if exponent and x.op == "exp":  # a power of a probability, without underflow
        return apply("exp", apply("mul", x.args[0], exponent))
    match exponent:
        case 0:
            return const(1.0, FLOAT, x.axes)
        case 1:
            return cast(x, FLOAT)
        case 2:
            return apply("mul", x, x)
        case 3:
            return apply("mul", apply("mul", x, x), x)
        case 0.5:
            return apply("sqrt", x)
        case -1:
            return apply("div", 1.0, x)
    return made_power(x, exponent)


def multiple(e: Node) -> tuple[float, Node]:
    """Returns a number and what it multiplies."""
    if e.op == "mul" and e.args[0].op == "const":
        return e.args[0].value, e.args[1]
    if e.op == "mul" and e.args[1].op == "const":
        return e.args[1].value, e.args[0]
    if e.op == "div" and e.args[1].op == "const" and e.args[1].value:
        return 1.0 / e.args[1].value, e.args[0]
    return (-1.0, e.args[0]) if e.op == "neg" else (1.0, e)


def _sum_of_multiples(op: str, a: Node, b: Node) -> Node | None:
    """Multiples of one probability as one: where that is 0, so is the product with a logarithm."""
    (c, x), (d, y) = multiple(a), multiple(b)
    if x is not y or not is_weight(x):
        return None
    return apply("mul", c + d if op == "add" else c - d, x)


def exponent_of(x: Node) -> Node | None:
    """Returns the exponent of an exponential, which a probability is."""
    return x.args[0] if x.op == "exp" else log_variable(x)


def _log_of(x: Node) -> Node | None:
    """The logarithm of an exponential, of a product with one, of a quotient, or of a clamp.

    No underflow of a probability, and derivatives without a division by it.
    """
    exponent, rest = _exponential(x)
    if exponent is not None and rest is None:
        return exponent
    if x.op in ("clamp_min", "clamp_max"):
        inner, bound = exponent_of(x.args[0]), constant(x.args[1])
        if inner is not None and bound is not None and (x.op == "clamp_min" or bound >= 0.0):
            return apply(x.op, inner, math.log(bound) if bound > 0.0 else -math.inf)
    if x.op == "div":
        a, b = x.args
        exponent, rest = _exponential(a)
        if exponent is None:
            return apply("log_div", a, b)
        if rest is None:
            return apply("sub", exponent, apply("log", b))
        return apply("add", exponent, apply("log_div", rest, b))
    if exponent is not None and rest is not None and not (constant(rest) or 1.0) <= 0.0:
        return apply("add", exponent, apply("log", rest))
    return None


def _exponential(x: Node) -> tuple[Node | None, Node | None]:
    """The exponent of a product with an exponential, and the other factor."""
    if (exponent := exponent_of(x)) is not None:
        return exponent, None
    if x.op == "mul":
        for factor, other in (x.args, x.args[::-1]):
            if (exponent := exponent_of(factor)) is not None:
                return exponent, other
    return None, None


def exponentials_in(x: Node) -> tuple[list[Node], list[Node]]:
    """Returns the exponentials that a product or quotient has as factors: above, and below."""
    found: tuple[dict[Node, None], dict[Node, None]] = {}, {}  # sets in the order of discovery
    stack, seen = [(x, 0)], {(x, 0)}
    while stack:
        node, side = stack.pop()
        if node.op == "exp":
            found[side][node] = None
        if node.op not in ("mul", "div"):
            continue
        sides = side, 1 - side if node.op == "div" else side
        for each in zip(node.args[::-1], sides[::-1], strict=True):
            if each not in seen:
                seen.add(each)
                stack.append(each)
    return list(found[0]), list(found[1])


def _shared_probability(a: Node, b: Node) -> tuple[Node, Node, Node] | None:
    """Factors two products with one exponential: the exponential, and the other factors.

    The gradient of a softmax as P * g - P * sum loses digits that P * (g - sum) keeps.
    """
    if a.op != "mul" or b.op != "mul" or a.is_guarded != b.is_guarded:
        return None
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        if a.args[i] is b.args[j] and a.args[i].op == "exp":
            return a.args[i], a.args[1 - i], b.args[1 - j]
    return None


def _of_row_first(a: Node, b: Node) -> tuple[Node, Node, Node] | None:
    """An element and two values of its row, which are added to each other first."""
    for inner, row in ((a, b), (b, a)):
        if row.by_key or inner.op != "add" or not inner.by_key:
            continue
        for x, y in (inner.args, inner.args[::-1]):
            if not x.by_key and y.by_key:
                return y, x, row
    return None


IDENTITIES.power, IDENTITIES.simplified = power, simplified
