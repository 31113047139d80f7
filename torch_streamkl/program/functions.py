"""Normalises quotients, exponentials and logarithms, and what has no form of its own."""

from __future__ import annotations

import math

from torch_streamkl.program import operations
from torch_streamkl.program.canonical import (
    FALSE,
    LARGEST_EXPONENT,
    REDUCTIONS,
    TRUE,
    choose,
    has_scores,
    is_removed,
    linear,
    node,
    numeric,
    scaled,
    subtracted,
    terms_of,
)
from torch_streamkl.program.graph import (
    BOOL,
    FLOAT,
    INT,
    LOGSUMEXP,
    SUM,
    Node,
    const,
    made,
    widened,
)
from torch_streamkl.program.operations import OPERATIONS


def quotient(a: Node, b: Node) -> Node:
    """Returns a quotient; of exponentials, by hand a softmax, the exponential of a difference."""
    a, b = numeric(a), numeric(b)
    if b.op == "const" and b.value:
        return scaled(1.0 / b.value, a)
    if b.op == "linear" and b.value[0] == 0.0 and len(b.args) == 1:
        return scaled(1.0 / b.value[1][0], quotient(a, b.args[0]))
    c, terms = terms_of(a)
    if not terms and c == 0.0:
        return a
    if c == 0.0 and len(terms) == 1 and terms[0][0] != 1.0:
        return scaled(terms[0][0], quotient(terms[0][1], b))
    if a.op == "exp":
        if b.op == "exp":
            return exponential(subtracted(a.args[0], b.args[0]))
        if b.kind == SUM and b.args[0].op == "exp":
            return exponential(subtracted(a.args[0], _log_of_sum(b)))
    return made("div", (a, b))


# ------------------------------------------------------------------------ functions


def exponential(x: Node) -> Node:
    """Returns e^x: of a logarithm its argument, of a number that a mask fills with -inf 0.

    A score that is filled stays inside: NOTE [Both branches are computed] in canonical.py.
    """
    if x.op == "log":
        return x.args[0]
    if is_removed(x) and x.args[1].range[1] <= LARGEST_EXPONENT:
        return choose(x.args[0], exponential(x.args[1]), const(0.0))
    if is_removed(x) and not has_scores(x):  # a factor that is 0 even next to its logarithm
        chosen = choose(x.args[0], x.args[1], const(0.0))
        return choose(x.args[0], function("exp", chosen), const(0.0))
    return function("exp", x)


def logarithm(x: Node) -> Node:
    """Returns the logarithm: of a product or quotient with exponentials as a sum."""
    if x.op == "exp":
        return x.args[0]
    if x.kind == SUM and x.args[0].op == "exp":
        return _log_of_sum(x)
    constant, terms = terms_of(x)
    if constant == 0.0 and all(c > 0.0 and t.op == "exp" for c, t in terms) and terms:
        logs = [linear(math.log(c), [(1.0, t.args[0])]) for c, t in terms]
        return logs[0] if len(logs) == 1 else log_add_exp(*logs)
    if constant == 0.0 and len(terms) == 1 and terms[0][0] > 0.0 and terms[0][0] != 1.0:
        return linear(math.log(terms[0][0]), [(1.0, logarithm(terms[0][1]))])
    if x.op == "div" and all(a.range[0] >= 0.0 for a in x.args):
        return subtracted(*map(logarithm, x.args))
    if x.op == "product" and all(a.range[0] >= 0.0 for a in x.args):
        if any(a.op == "exp" for a in x.args):
            return linear(0.0, [(1.0, logarithm(a)) for a in x.args])
    if x.op in ("clamp_min", "clamp_max") and x.args[0].op == "exp" and x.args[1].op == "const":
        bound = x.args[1].value
        if bound > 0.0:
            return function(x.op, x.args[0].args[0], const(math.log(bound)))
    return function("log", x)


def _log_of_sum(x: Node) -> Node:
    """The log-sum-exp that a sum of exponentials is the exponential of."""
    return REDUCTIONS.reopened(LOGSUMEXP, x, x.args[0].args[0])


def log_add_exp(*terms: Node) -> Node:
    """Returns log(e^a + e^b + ...), one spelling of the mixture in a Jensen-Shannon divergence."""
    terms = tuple(sorted(terms, key=lambda x: x.digest))
    return made("logaddexp", terms) if len(terms) == 2 else node("logaddexp", terms)


def function(op: str, *args: Node) -> Node:
    """Returns an operation of the table that has no form of its own."""
    args = tuple(map(numeric, args))
    if OPERATIONS[op].result == "same":
        args = widened(*args)
    if all(a.op == "const" for a in args):
        dtypes = [FLOAT if OPERATIONS[op].result == FLOAT else a.dtype for a in args]
        found = operations.of_numbers(op, [a.value for a in args], dtypes)
        if OPERATIONS[op].result == BOOL:
            return TRUE if found else FALSE
        return const(found)
    if op == "clamp_min" and args[0].range[0] >= args[1].range[1]:
        return args[0]
    if op == "clamp_max" and args[0].range[1] <= args[1].range[0]:
        return args[0]
    if op in ("floor_divide", "remainder") and all(a.dtype == INT for a in args):
        return _divided(op, *args)
    if OPERATIONS[op].is_commutative:
        args = tuple(sorted(args, key=lambda x: x.digest))
    return made(op, args)


def _divided(op: str, a: Node, b: Node) -> Node:
    """A quotient or remainder of positions, which are not negative, by a size."""
    is_quotient = op == "floor_divide"
    if b is const(1, INT):
        return a if is_quotient else const(0, INT)
    if b.range[0] < 1.0 or (is_quotient and a.range[0] < 0.0):
        return made(op, (a, b))
    high = a.range[1] if is_quotient else b.range[1] - 1.0
    return node(op, (a, b), None, INT, (0.0, max(high, 0.0)), True)
