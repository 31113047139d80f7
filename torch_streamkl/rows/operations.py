"""The table of pointwise operations: what each computes and what its derivative is.

A derivative is a rule `(graph, node, argument, t) -> t * d(node)/d(argument)`. It serves both
directions, since a pointwise derivative multiplies a tangent and an adjoint alike. At kinks it is
what torch's autograd gives: 1/2 and 1/2 where minimum and maximum tie, 1 at the bound of a clamp,
0 for relu, abs and a norm at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_streamkl.divergences.functional import exact

if TYPE_CHECKING:
    from torch_streamkl.rows.expressions import Graph

Rule = Callable[["Graph", int, int, int], int]


@dataclass(frozen=True)
class Operation:
    """A row of the table."""

    arity: int
    run: Callable[..., Tensor]
    triton: str
    rule: Rule | None = None  # none: its result does not depend smoothly on anything
    result: str = "float"  # "same" is the widest dtype of the arguments
    is_finite: bool | None = None  # None: where all arguments are
    is_commutative: bool = False


def mul0(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


def div0(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == 0, 0.0, a / b)


def norm(squares: Tensor) -> Tensor:
    """The square root of a sum of squares: its gradient at 0 is 0, also by autograd."""
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def _softplus(x: Tensor) -> Tensor:
    return torch.clamp_min(x, 0.0) + torch.log1p(torch.exp(-x.abs()))


def of_numbers(op: str, values: list[float]) -> float:
    """A pointwise operation on constants."""
    tensors: list[Any] = [exact(v) for v in values]
    if op == "where":
        tensors[0] = tensors[0].bool()
    return float(OPERATIONS[op].run(*tensors))


# ------------------------------------------------------------------------- derivatives


def _linear(*signs: int) -> Rule:
    def rule(g: Graph, node: int, arg: int, t: int) -> int:
        return t if signs[arg] > 0 else g.apply("neg", t)

    return rule


def _mul(g: Graph, node: int, arg: int, t: int) -> int:
    return g.apply("mul", t, g[node].args[1 - arg])


def _div(g: Graph, node: int, arg: int, t: int) -> int:
    quotient = g.apply("div0", t, g[node].args[1])
    return quotient if arg == 0 else g.apply("neg", g.apply("mul", quotient, node))


def _log_div(g: Graph, node: int, arg: int, t: int) -> int:
    quotient = g.apply("div0", t, g[node].args[arg])
    return quotient if arg == 0 else g.apply("neg", quotient)


def _by(factor: Callable[[Graph, int, int], int]) -> Rule:
    """t times a function of node and argument."""

    def rule(g: Graph, node: int, arg: int, t: int) -> int:
        return g.apply("mul", t, factor(g, node, g[node].args[arg]))

    return rule


def _over(divisor: Callable[[Graph, int, int], int]) -> Rule:
    """t over a function of node and argument."""

    def rule(g: Graph, node: int, arg: int, t: int) -> int:
        return g.apply("div0", t, divisor(g, node, g[node].args[arg]))

    return rule


def _where_rule(g: Graph, node: int, arg: int, t: int) -> int:
    zero, condition = g.const(0.0), g[node].args[0]
    if arg == 0:
        return zero
    return g.apply("where", condition, *((t, zero) if arg == 1 else (zero, t)))


def _extremum(compare: str) -> Rule:
    def rule(g: Graph, node: int, arg: int, t: int) -> int:
        a, b = g[node].args
        mine, other = (a, b) if arg == 0 else (b, a)
        tie = g.apply("where", g.apply("eq", a, b), g.apply("mul", t, g.const(0.5)), g.const(0.0))
        return g.apply("where", g.apply(compare, mine, other), t, tie)

    return rule


def _clamp_rule(compare: str) -> Rule:
    def rule(g: Graph, node: int, arg: int, t: int) -> int:
        x, bound = g[node].args
        inside = g.apply(compare, x, bound)
        zero = g.const(0.0)
        return g.apply("where", inside, *((t, zero) if arg == 0 else (zero, t)))

    return rule


def _relu_rule(g: Graph, node: int, arg: int, t: int) -> int:
    return g.apply("where", g.apply("gt", g[node].args[0], g.const(0.0)), t, g.const(0.0))


def _norm_rule(g: Graph, node: int, arg: int, t: int) -> int:
    slope = g.apply("div0", t, g.apply("mul", node, g.const(2.0)))
    return g.apply("where", g.apply("eq", node, g.const(0.0)), g.const(0.0), slope)


def _power_rule(g: Graph, node: int, arg: int, t: int) -> int:
    exponent = g[node].value
    slope = g.power(g[node].args[0], exponent - 1.0)
    return g.apply("mul", t, g.apply("mul", slope, g.const(exponent)))


def _one_minus_square(g: Graph, node: int, x: int) -> int:
    return g.apply("sub", g.const(1.0), g.apply("mul", node, node))


def _one_minus(g: Graph, node: int, x: int) -> int:
    return g.apply("mul", node, g.apply("sub", g.const(1.0), node))


_SIGN = "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))"
_TANH = "(1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))"


def _comparison(symbol: str, run: Callable[..., Any], commutes: bool = False) -> Operation:
    return Operation(2, run, f"{{0}} {symbol} {{1}}", None, "bool", True, commutes)


OPERATIONS: dict[str, Operation] = {
    "add": Operation(2, lambda a, b: a + b, "{0} + {1}", _linear(1, 1), "same", None, True),
    "sub": Operation(2, lambda a, b: a - b, "{0} - {1}", _linear(1, -1), "same"),
    "mul": Operation(2, lambda a, b: a * b, "{0} * {1}", _mul, "same", None, True),
    "mul0": Operation(
        2,
        mul0,
        "tl.where(({0} == 0) | ({1} == 0), 0.0, {0} * {1})",
        _mul,
        "float",
        False,
        True,
    ),
    "div": Operation(2, lambda a, b: a / b, "{0} / {1}", _div),
    "div0": Operation(2, div0, "tl.where({0} == 0, 0.0, {0} / {1})", _div, is_finite=False),
    "neg": Operation(1, lambda a: -a, "-{0}", _linear(-1), "same"),
    "float": Operation(1, lambda a: a * 1.0, "{0} * 1.0", None, is_finite=True),
    "exp": Operation(1, torch.exp, "tl.exp({0})", _by(lambda g, n, x: n), is_finite=True),
    "log": Operation(1, torch.log, "tl.log({0})", _over(lambda g, n, x: x), is_finite=False),
    "log_div": Operation(  # the logarithm of a quotient
        2,
        lambda a, b: torch.log(a / b),
        "tl.log({0} / {1})",
        _log_div,
        is_finite=False,
    ),
    "log1p": Operation(
        1,
        torch.log1p,
        "tl.where(1.0 + {0} == 1.0, {0}, tl.log(1.0 + {0}) * ({0} / ((1.0 + {0}) - 1.0)))",
        _over(lambda g, n, x: g.apply("add", x, g.const(1.0))),
        is_finite=False,
    ),
    "sqrt": Operation(
        1,
        torch.sqrt,
        "tl.sqrt({0})",
        _over(lambda g, n, x: g.apply("mul", n, g.const(2.0))),
    ),
    "norm": Operation(1, norm, "tl.sqrt({0})", _norm_rule),
    "pow": Operation(1, torch.pow, "", _power_rule, is_finite=False),  # of its value
    "abs": Operation(1, torch.abs, "tl.abs({0})", _by(lambda g, n, x: g.apply("sign", x)), "same"),
    "sign": Operation(1, torch.sign, _SIGN, None, "float", True),
    "tanh": Operation(1, torch.tanh, _TANH, _by(_one_minus_square), is_finite=True),
    "sigmoid": Operation(1, torch.sigmoid, "tl.sigmoid({0})", _by(_one_minus), is_finite=True),
    "softplus": Operation(
        1,
        _softplus,
        "(tl.maximum({0}, 0.0) + tl.log(1.0 + tl.exp(-tl.abs({0}))))",
        _by(lambda g, n, x: g.apply("sigmoid", x)),
    ),
    "relu": Operation(1, torch.relu, "tl.maximum({0}, 0.0)", _relu_rule),
    "minimum": Operation(
        2, torch.minimum, "tl.minimum({0}, {1})", _extremum("lt"), "float", None, True
    ),
    "maximum": Operation(
        2, torch.maximum, "tl.maximum({0}, {1})", _extremum("gt"), "float", None, True
    ),
    # gradient 1 at the bound, which differs from maximum and minimum
    "clamp_min": Operation(2, torch.clamp_min, "tl.maximum({0}, {1})", _clamp_rule("ge")),
    "clamp_max": Operation(2, torch.clamp_max, "tl.minimum({0}, {1})", _clamp_rule("le")),
    "where": Operation(3, torch.where, "tl.where({0}, {1}, {2})", _where_rule, "same"),
    "detach": Operation(1, lambda a: a.detach(), "{0}", None, "same"),
    "lt": _comparison("<", lambda a, b: a < b),
    "le": _comparison("<=", lambda a, b: a <= b),
    "gt": _comparison(">", lambda a, b: a > b),
    "ge": _comparison(">=", lambda a, b: a >= b),
    "eq": _comparison("==", lambda a, b: a == b, True),
    "ne": _comparison("!=", lambda a, b: a != b, True),
    "and": _comparison("&", lambda a, b: a & b, True),
    "or": _comparison("|", lambda a, b: a | b, True),
    "not": Operation(1, lambda a: ~a, "{0} == 0", None, "bool", True),
}

MAX_POWER = 64.0


def check_power(exponent: float) -> None:
    """An exponent that a program can have."""
    if not math.isfinite(exponent) or abs(exponent) > MAX_POWER:
        raise ValueError(
            f"exponents of pow must lie in [-{MAX_POWER:g}, {MAX_POWER:g}], got {exponent}"
        )
