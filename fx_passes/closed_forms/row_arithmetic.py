"""Adds, multiplies and takes logarithms of steps, in an order that is sound in floating point."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from torch_streamkl.program.graph import FLOAT, Node, apply, cast, const, constant
from torch_streamkl.program.identities import exponentials_in
from torch_streamkl.program.shifts import HIDES
from torch_streamkl.program.steps import is_inside
from torch_streamkl.program.walks import walk


def folded(op: str, args: Sequence[Node]) -> Node:
    """Returns an operation of two arguments on any number of them."""
    return functools.reduce(functools.partial(apply, op), args)


def added(terms: Sequence[tuple[float, Node]], constant: float, dtype: str = FLOAT) -> Node:
    """Returns a sum: what is added first, then what is subtracted. One of integers is exact."""
    ordered = sorted(terms, key=lambda item: item[0] < 0.0)
    total: Node | None = None
    if (not ordered or ordered[0][0] < 0.0) and constant > 0.0:
        total, constant = const(constant, dtype), 0.0
    for c, x in ordered:
        x = cast(x, dtype)
        if abs(c) != 1.0:
            x = apply("mul", x, const(abs(c), dtype))
        if total is None:
            total = x if c > 0.0 else apply("neg", x)
        else:
            total = apply("add" if c > 0.0 else "sub", total, x)
    if total is None:
        return const(constant, dtype)
    if constant:
        total = apply("add" if constant > 0.0 else "sub", total, const(abs(constant), dtype))
    return total


def multiplied(factors: Sequence[Node], dtype: str = FLOAT) -> Node:
    """Returns a product: of per-row values apart, probabilities first, what may be infinite last.

    The logarithm of a key that is filled with the lowest number is nearly that number: it
    would be infinite times what is a bit more than 1, where 0 times it is 0.
    """
    factors = [cast(f, dtype) for f in factors]
    of_rows = [f for f in factors if not f.by_key]
    of_keys = [f for f in factors if f.by_key]
    of_keys.sort(key=lambda f: (not f.is_finite, f.op != "exp"))
    return folded("mul", [folded("mul", group) for group in (of_keys, of_rows) if group])


def logarithm(x: Node, *, are_exact: bool) -> Node:
    """Returns the logarithm: of a probability what its score gives it, -inf where it is masked.

    A mask of finite numbers makes probabilities 0 as one of -inf does.
    """
    more = _beyond_one(x)
    log = apply("log", x) if more is None else apply("log1p", more)
    over, under = exponentials_in(x)
    for factors, limit in ((over, -math.inf), (under, math.inf)):
        for factor in factors:
            if are_exact or _may_be_masked(factor.args[0]):
                is_zero = apply("eq", factor, const(0.0))
                log = apply("where", is_zero, const(limit), log)
    return log


def _beyond_one(x: Node) -> Node | None:
    """What a sum has next to 1, where small numbers lose their digits; None if it has no 1.

    A small number that is added to 1 - p has its digits where p is 1, and would lose them here.
    """
    if x.op not in ("add", "sub"):
        return None
    a, b = x.args
    if x.op == "add" and 1.0 in (constant(a), constant(b)):
        return a if constant(b) == 1.0 else b
    if constant(a) == 1.0:
        return apply("neg", b)
    more = _beyond_one(a) if constant(b) is None else None
    return None if more is None else apply(x.op, more, b)


def _may_be_masked(exponent: Node) -> bool:
    """Whether a number, or a tensor of keys, may hide some scores in an exponent."""
    for node in walk([exponent], is_inside):
        if node.op == "const" and HIDES <= abs(node.value) < math.inf:
            return True
        if node.op == "capture" and node.dtype == FLOAT and node.by_key:
            return True
    return False
