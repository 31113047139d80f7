"""Defines the table of pointwise operations: what each computes and what its derivative is.

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
    triton_int: str = ""  # the text for integers, where it is another
    bools: str = ""  # the operation that it is of conditions, as torch has it


def mul0(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies; 0 where a factor is 0: NOTE [Zero annihilates] in expressions.py."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


def div0(a: Tensor, b: Tensor) -> Tensor:
    """Divides; 0 where the dividend is 0: NOTE [Zero annihilates] in expressions.py."""
    return torch.where(a == 0, 0.0, a / b)


def norm(squares: Tensor) -> Tensor:
    """Returns the square root of a sum of squares: its gradient at 0 is 0, also by autograd."""
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def _softplus(x: Tensor) -> Tensor:
    return torch.nn.functional.softplus(x, threshold=80.0)  # exp has no overflow below


_TYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def of_numbers(op: str, values: list[float], dtypes: list[str]) -> float:
    """Returns a pointwise operation on constants."""
    tensors = [exact(v).to(_TYPES[d]) for v, d in zip(values, dtypes, strict=True)]
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


def _extremum(loses: str) -> Rule:
    def rule(g: Graph, node: int, arg: int, t: int) -> int:
        a, b = g[node].args
        mine, other = (a, b) if arg == 0 else (b, a)
        shared = g.apply("where", g.apply("eq", a, b), g.apply("mul", t, g.const(0.5)), t)
        return g.apply("where", g.apply(loses, mine, other), g.const(0.0), shared)

    return rule


def _clamp_rule(inside: str, outside: str) -> Rule:
    def rule(g: Graph, node: int, arg: int, t: int) -> int:
        takes = g.apply(inside if arg == 0 else outside, *g[node].args)
        return g.apply("where", takes, t, g.const(0.0))

    return rule


def _relu_rule(g: Graph, node: int, arg: int, t: int) -> int:
    is_cut = g.apply("le", g[node].args[0], g.const(0.0))  # NaN is not
    return g.apply("where", is_cut, g.const(0.0), t)


def _norm_rule(g: Graph, node: int, arg: int, t: int) -> int:
    slope = g.apply("div0", t, g.apply("mul", node, g.const(2.0)))
    return g.apply("where", g.apply("eq", node, g.const(0.0)), g.const(0.0), slope)


def _power_rule(g: Graph, node: int, arg: int, t: int) -> int:
    exponent = g[node].value
    slope = g.power(g[node].args[0], exponent - 1.0)
    return g.apply("mul", t, g.apply("mul", slope, g.const(exponent)))


def _remainder_rule(g: Graph, node: int, arg: int, t: int) -> int:
    if arg == 0:
        return t
    return g.apply("neg", g.apply("mul", t, g.apply("floor_divide", *g[node].args)))


def _logaddexp_rule(g: Graph, node: int, arg: int, t: int) -> int:
    """The share of each; a half where they are equal, infinities included."""
    a, b = g[node].args
    mine, other = (a, b) if arg == 0 else (b, a)
    share = g.apply("sigmoid", g.apply("sub", mine, other))
    share = g.apply("where", g.apply("eq", a, b), g.const(0.5), share)
    return g.apply("mul", t, share)


def _erf_slope(g: Graph, node: int, x: int) -> int:
    bell = g.apply("exp", g.apply("neg", g.apply("mul", x, x)))
    return g.apply("mul", bell, g.const(2.0 / math.sqrt(math.pi)))


def _one_plus_square(g: Graph, node: int, x: int) -> int:
    return g.apply("add", g.const(1.0), g.apply("mul", node, node))


def _one_minus_square(g: Graph, node: int, x: int) -> int:
    return g.apply("sub", g.const(1.0), g.apply("mul", node, node))


def _one_minus(g: Graph, node: int, x: int) -> int:
    return g.apply("mul", node, g.apply("sub", g.const(1.0), node))


# NaN stays NaN, which tl.maximum alone would drop
_MAXIMUM = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_MINIMUM = "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_RELU = _MAXIMUM.replace("{1}", "0.0")
_SIGN = "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))"
_SIGN_OF_INT = "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))"
_TANH = "(1.0 - 2.0 / (1.0 + tl.exp(2.0 * {0})))"
_SIGMOID = "tl.sigmoid({0})"
_SOFTPLUS = f"({_RELU} + tl.log(1.0 + tl.exp(-tl.abs({{0}}))))"
_LOG1P = (
    "tl.where((1.0 + {0} == 1.0) | ({0} == float('inf')), {0}, "
    "tl.log(1.0 + {0}) * ({0} / ((1.0 + {0}) - 1.0)))"
)
# the larger, and what the other adds to it: their difference is NaN where both are infinite
_LOGADDEXP = (
    f"tl.where({{0}} == {{1}}, {{0}} + {math.log(2.0)!r}, {_MAXIMUM} + "
    "tl.log(1.0 + tl.exp(-tl.abs({0} - {1}))))"
)
# near 0 a series: a difference of nearly equal numbers has no digits
_EXPM1 = "1.0"
for _n in range(8, 1, -1):
    _EXPM1 = f"(1.0 + {{0}} * {1.0 / _n!r} * {_EXPM1})"
_EXPM1 = f"tl.where(tl.abs({{0}}) < 0.5, {{0}} * {_EXPM1}, tl.exp({{0}}) - 1.0)"
_SINH = "1.0"
for _n in range(8, 1, -2):
    _SINH = f"(1.0 + {{0}} * {{0}} * {1.0 / (_n * (_n + 1))!r} * {_SINH})"
_SINH = f"tl.where(tl.abs({{0}}) < 0.5, {{0}} * {_SINH}, 0.5 * (tl.exp({{0}}) - tl.exp(-{{0}})))"
# Triton's % has the sign of the dividend, torch's of the divisor
_IS_OFF = "(({0} % {1} != 0) & (({0} % {1} < 0) != ({1} < 0)))"
_REMAINDER = f"tl.where({_IS_OFF}, {{0}} % {{1}} + {{1}}, {{0}} % {{1}})"
_FLOOR_DIVIDE = (
    f"tl.where({{1}} == 0, {{0}} / {{1}}, tl.floor(({{0}} - {{0}} % {{1}}) / {{1}} + 0.5) - "
    f"tl.where({_IS_OFF}, 1.0, 0.0))"
)
_FLOOR_DIVIDE_INT = f"({{0}} // {{1}} - {_IS_OFF}.to(tl.int32))"
_TRUNC = "tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))"


def _comparison(symbol: str, run: Callable[..., Any], commutes: bool = False) -> Operation:
    return Operation(2, run, f"{{0}} {symbol} {{1}}", None, "bool", True, commutes)


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


OPERATIONS: dict[str, Operation] = {
    "add": Operation(
        2, lambda a, b: a + b, "{0} + {1}", _linear(1, 1), "same", None, True, bools="or"
    ),
    "sub": Operation(2, lambda a, b: a - b, "{0} - {1}", _linear(1, -1), "same"),
    "mul": Operation(
        2,
        lambda a, b: a * b,
        "{0} * {1}",
        _mul,
        "same",
        None,
        True,
        triton_int="{0}.to(tl.int64) * {1}",  # positions are int32
        bools="and",
    ),
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
    "floor_divide": Operation(
        2, _floor_divide, _FLOOR_DIVIDE, None, "same", False, triton_int=_FLOOR_DIVIDE_INT
    ),
    "remainder": Operation(2, torch.remainder, _REMAINDER, _remainder_rule, "same", False),
    "neg": Operation(1, lambda a: -a, "-{0}", _linear(-1), "same"),
    # casts, from what has less: conditions to integers, both to floats
    "int": Operation(1, lambda a: a.to(torch.int64), "{0}.to(tl.int32)", None, "int", True),
    "float": Operation(1, lambda a: a * 1.0, "{0} * 1.0", None, is_finite=True),
    "exp": Operation(1, torch.exp, "tl.exp({0})", _by(lambda g, n, x: n), is_finite=True),
    "exp2": Operation(
        1,
        torch.exp2,
        "tl.math.exp2({0})",
        _by(lambda g, n, x: g.apply("mul", n, g.const(math.log(2.0)))),
        is_finite=True,
    ),
    "expm1": Operation(
        1,
        torch.expm1,
        _EXPM1,
        _by(lambda g, n, x: g.apply("add", n, g.const(1.0))),
        is_finite=True,
    ),
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
        _LOG1P,
        _over(lambda g, n, x: g.apply("add", x, g.const(1.0))),
        is_finite=False,
    ),
    "logaddexp": Operation(2, torch.logaddexp, _LOGADDEXP, _logaddexp_rule, is_commutative=True),
    "sqrt": Operation(
        1,
        torch.sqrt,
        "tl.sqrt({0})",
        _over(lambda g, n, x: g.apply("mul", n, g.const(2.0))),
    ),
    "norm": Operation(1, norm, "tl.sqrt({0})", _norm_rule),
    "pow": Operation(1, torch.pow, "", _power_rule, is_finite=False),  # of its value
    "abs": Operation(1, torch.abs, "tl.abs({0})", _by(lambda g, n, x: g.apply("sign", x)), "same"),
    "sign": Operation(1, torch.sign, _SIGN, None, "same", True, triton_int=_SIGN_OF_INT),
    "floor": Operation(1, torch.floor, "tl.floor({0})", None, "same"),
    "ceil": Operation(1, torch.ceil, "tl.ceil({0})", None, "same"),
    "trunc": Operation(1, torch.trunc, _TRUNC, None, "same"),
    "tanh": Operation(1, torch.tanh, _TANH, _by(_one_minus_square), is_finite=True),
    "sigmoid": Operation(1, torch.sigmoid, _SIGMOID, _by(_one_minus), is_finite=True),
    "erf": Operation(1, torch.erf, "tl.erf({0})", _by(_erf_slope), is_finite=True),
    "sin": Operation(1, torch.sin, "tl.sin({0})", _by(lambda g, n, x: g.apply("cos", x))),
    "cos": Operation(
        1,
        torch.cos,
        "tl.cos({0})",
        _by(lambda g, n, x: g.apply("neg", g.apply("sin", x))),
    ),
    "tan": Operation(1, torch.tan, "tl.sin({0}) / tl.cos({0})", _by(_one_plus_square)),
    "sinh": Operation(1, torch.sinh, _SINH, _by(lambda g, n, x: g.apply("cosh", x))),
    "cosh": Operation(
        1,
        torch.cosh,
        "0.5 * (tl.exp({0}) + tl.exp(-{0}))",
        _by(lambda g, n, x: g.apply("sinh", x)),
    ),
    "softplus": Operation(1, _softplus, _SOFTPLUS, _by(lambda g, n, x: g.apply("sigmoid", x))),
    "relu": Operation(1, torch.relu, _RELU, _relu_rule, "same", triton_int="tl.maximum({0}, 0)"),
    "minimum": Operation(
        2, torch.minimum, _MINIMUM, _extremum("gt"), "same", None, True, bools="and"
    ),
    "maximum": Operation(
        2, torch.maximum, _MAXIMUM, _extremum("lt"), "same", None, True, bools="or"
    ),
    # gradient 1 at the bound, which differs from maximum and minimum
    "clamp_min": Operation(
        2, torch.clamp_min, _MAXIMUM, _clamp_rule("ge", "lt"), "same", bools="or"
    ),
    "clamp_max": Operation(
        2, torch.clamp_max, _MINIMUM, _clamp_rule("le", "gt"), "same", bools="and"
    ),
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
    """Checks that a program can have an exponent."""
    if not math.isfinite(exponent) or abs(exponent) > MAX_POWER:
        raise ValueError(
            f"exponents of pow must lie in [-{MAX_POWER:g}, {MAX_POWER:g}], got {exponent}"
        )
