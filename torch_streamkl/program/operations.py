"""Defines the table of operations: meaning in torch, derivative, text for Triton, range of values.

A derivative is a rule `(build, node, argument, t) -> t * d(node)/d(argument)`, which makes nodes
with ``build``. It serves both directions, since a pointwise derivative multiplies a tangent and an
adjoint alike. At kinks it is what torch's autograd gives: 1/2 and 1/2 where minimum and maximum
tie, 0 for relu, abs and a norm at 0, and at the bound of a clamp: NOTE [The bound of a clamp] in
meanings.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_streamkl.program import ranges
from torch_streamkl.program.meanings import (
    TIES_ARE_CUT,
    clamp_max,
    clamp_min,
    div0,
    logaddexp,
    mul0,
    norm,
    softplus,
)

if TYPE_CHECKING:
    from torch_streamkl.program.graph import Node

Build = Callable[..., "Node"]  # (operation, *nodes or numbers)
Rule = Callable[[Build, "Node", int, "Node"], "Node"]
Factor = Callable[[Build, "Node", "Node"], "Node"]


@dataclass(frozen=True)
class Operation:
    """Defines one operation: a row of the table."""

    arity: int
    run: Callable[..., Tensor]
    triton: str
    rule: Rule | None = None  # none: its result does not depend smoothly on anything
    result: str = "float"  # "same" is the widest dtype of the arguments
    is_finite: bool | None = None  # None: where all arguments are
    is_commutative: bool = False
    triton_int: str = ""  # the text for integers, where it is another
    bools: str = ""  # the operation that it is of conditions, as torch has it
    range: Callable[[Sequence[ranges.Range]], ranges.Range] | ranges.Range = ranges.EVERY


_TYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def exact(value: float) -> Tensor:
    """Returns a number in float64, on the CPU whatever the default device is."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def of_numbers(op: str, values: list[float], dtypes: list[str]) -> float:
    """Returns a pointwise operation on constants."""
    with unset_fake_temporarily():  # a fake operator may be the first to ask
        tensors = [exact(v).to(_TYPES[d]) for v, d in zip(values, dtypes, strict=True)]
        return float(OPERATIONS[op].run(*tensors))


# ------------------------------------------------------------------------- derivatives


def _linear(*signs: int) -> Rule:
    def rule(f: Build, node: Node, arg: int, t: Node) -> Node:
        return t if signs[arg] > 0 else f("neg", t)

    return rule


def _mul(f: Build, node: Node, arg: int, t: Node) -> Node:
    # an exponential is its own derivative, and so is a product with one
    return node if t is node.args[arg] else f("mul", t, node.args[1 - arg])


def _div(f: Build, node: Node, arg: int, t: Node) -> Node:
    quotient = f("div0", t, node.args[1])
    return quotient if arg == 0 else f("neg", f("mul", quotient, node))


def _log_div(f: Build, node: Node, arg: int, t: Node) -> Node:
    quotient = f("div0", t, node.args[arg])
    return quotient if arg == 0 else f("neg", quotient)


def _by(factor: Factor) -> Rule:
    """t times a function of node and argument."""

    def rule(f: Build, node: Node, arg: int, t: Node) -> Node:
        return f("mul", t, factor(f, node, node.args[arg]))

    return rule


def _over(divisor: Factor) -> Rule:
    """t over a function of node and argument."""

    def rule(f: Build, node: Node, arg: int, t: Node) -> Node:
        return f("div0", t, divisor(f, node, node.args[arg]))

    return rule


def _where_rule(f: Build, node: Node, arg: int, t: Node) -> Node:
    return f("where", node.args[0], *((t, 0.0) if arg == 1 else (0.0, t)))


def _extremum(loses: str) -> Rule:
    def rule(f: Build, node: Node, arg: int, t: Node) -> Node:
        a, b = node.args
        mine, other = (a, b) if arg == 0 else (b, a)
        shared = f("where", f("eq", a, b), f("mul", t, 0.5), t)
        return f("where", f(loses, mine, other), 0.0, shared)

    return rule


_OR_EQUAL = {"gt": "ge", "lt": "le"}


def _clamp_rule(inside: str, outside: str) -> Rule:
    """Of comparisons in which x is strictly inside, and outside."""
    inner, outer = (inside, _OR_EQUAL[outside]) if TIES_ARE_CUT else (_OR_EQUAL[inside], outside)

    def rule(f: Build, node: Node, arg: int, t: Node) -> Node:
        takes = f(inner if arg == 0 else outer, *node.args)
        return f("where", takes, t, 0.0)

    return rule


def _relu_rule(f: Build, node: Node, arg: int, t: Node) -> Node:
    is_cut = f("le", node.args[0], 0.0)  # NaN is not
    return f("where", is_cut, 0.0, t)


def _sqrt_rule(f: Build, node: Node, arg: int, t: Node) -> Node:
    """Of a probability, which is 0 where a key is masked, half of its root."""
    if t is node.args[0]:
        return f("mul", node, 0.5)
    return f("div0", t, f("mul", node, 2.0))


def _norm_rule(f: Build, node: Node, arg: int, t: Node) -> Node:
    slope = f("div0", t, f("mul", node, 2.0))
    return f("where", f("eq", node, 0.0), 0.0, slope)


def _power_rule(f: Build, node: Node, arg: int, t: Node) -> Node:
    slope = f("pow", node.args[0], node.value - 1.0)
    return f("mul", t, f("mul", slope, node.value))


def _remainder_rule(f: Build, node: Node, arg: int, t: Node) -> Node:
    if arg == 0:
        return t
    return f("neg", f("mul", t, f("floor_divide", *node.args)))


def _logaddexp_rule(f: Build, node: Node, arg: int, t: Node) -> Node:
    """The share of each; a half where they are equal, infinities included."""
    a, b = node.args
    mine, other = (a, b) if arg == 0 else (b, a)
    share = f("sigmoid", f("sub", mine, other))
    share = f("where", f("eq", a, b), 0.5, share)
    return f("mul", t, share)


def _erf_slope(f: Build, node: Node, x: Node) -> Node:
    bell = f("exp", f("neg", f("mul", x, x)))
    return f("mul", bell, 2.0 / math.sqrt(math.pi))


def _one_plus_square(f: Build, node: Node, x: Node) -> Node:
    return f("add", 1.0, f("mul", node, node))


def _one_minus_square(f: Build, node: Node, x: Node) -> Node:
    return f("sub", 1.0, f("mul", node, node))


def _one_minus(f: Build, node: Node, x: Node) -> Node:
    return f("mul", node, f("sub", 1.0, node))


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
    text = f"{{0}} {symbol} {{1}}"
    return Operation(2, run, text, None, "bool", True, commutes, range=ranges.UNIT)


def _rounding(dtype: torch.dtype, name: str) -> Operation:
    text = f"{{0}}.to(tl.{name}).to(tl.float32)"
    return Operation(1, lambda a: a.to(dtype).to(a.dtype), text, None, range=ranges.SAME)


def _floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="floor")


OPERATIONS: dict[str, Operation] = {
    "add": Operation(
        2,
        lambda a, b: a + b,
        "{0} + {1}",
        _linear(1, 1),
        "same",
        None,
        True,
        bools="or",
        range=ranges.sum_range,
    ),
    "sub": Operation(
        2, lambda a, b: a - b, "{0} - {1}", _linear(1, -1), "same", range=ranges.difference_range
    ),
    "mul": Operation(
        2,
        lambda a, b: a * b,
        "{0} * {1}",
        _mul,
        "same",
        None,
        True,
        bools="and",
        range=ranges.product_range,
    ),
    "mul0": Operation(
        2,
        mul0,
        "tl.where(({0} == 0) | ({1} == 0), 0.0, {0} * {1})",
        _mul,
        "float",
        False,
        True,
        range=ranges.product_range,
    ),
    "div": Operation(2, lambda a, b: a / b, "{0} / {1}", _div),
    "div0": Operation(2, div0, "tl.where({0} == 0, 0.0, {0} / {1})", _div, is_finite=False),
    "floor_divide": Operation(
        2, _floor_divide, _FLOOR_DIVIDE, None, "same", False, triton_int=_FLOOR_DIVIDE_INT
    ),
    "remainder": Operation(2, torch.remainder, _REMAINDER, _remainder_rule, "same", False),
    "neg": Operation(
        1, lambda a: -a, "-{0}", _linear(-1), "same", range=lambda of: (-of[0][1], -of[0][0])
    ),
    # casts, from what has less: conditions to integers, both to floats
    "int": Operation(
        1, lambda a: a.to(torch.int64), "{0}.to(tl.int32)", None, "int", True, range=ranges.SAME
    ),
    "float": Operation(1, lambda a: a * 1.0, "{0} * 1.0", None, is_finite=True, range=ranges.SAME),
    # what a product of a narrow type is
    "bfloat16": _rounding(torch.bfloat16, "bfloat16"),
    "float16": _rounding(torch.float16, "float16"),
    "exp": Operation(
        1,
        torch.exp,
        "tl.exp({0})",
        _by(lambda f, n, x: n),
        is_finite=True,
        range=ranges.increasing(ranges.exponential),
    ),
    "exp2": Operation(
        1,
        torch.exp2,
        "tl.math.exp2({0})",
        _by(lambda f, n, x: f("mul", n, math.log(2.0))),
        is_finite=True,
        range=ranges.NOT_NEGATIVE,
    ),
    "expm1": Operation(
        1,
        torch.expm1,
        _EXPM1,
        _by(lambda f, n, x: f("add", n, 1.0)),
        is_finite=True,
        range=lambda of: (-1.0, math.inf),
    ),
    "log": Operation(
        1,
        torch.log,
        "tl.log({0})",
        _over(lambda f, n, x: x),
        is_finite=False,
        range=ranges.increasing(ranges.logarithm),
    ),
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
        _over(lambda f, n, x: f("add", x, 1.0)),
        is_finite=False,
    ),
    "logaddexp": Operation(2, logaddexp, _LOGADDEXP, _logaddexp_rule, is_commutative=True),
    "sqrt": Operation(1, torch.sqrt, "tl.sqrt({0})", _sqrt_rule, range=ranges.NOT_NEGATIVE),
    "norm": Operation(1, norm, "tl.sqrt({0})", _norm_rule, range=ranges.NOT_NEGATIVE),
    "pow": Operation(1, torch.pow, "", _power_rule, is_finite=False),  # of its value
    "abs": Operation(
        1, torch.abs, "tl.abs({0})", _by(lambda f, n, x: f("sign", x)), "same", range=ranges.even
    ),
    "sign": Operation(
        1, torch.sign, _SIGN, None, "same", True, triton_int=_SIGN_OF_INT, range=ranges.SIGNED_UNIT
    ),
    "floor": Operation(1, torch.floor, "tl.floor({0})", None, "same"),
    "ceil": Operation(1, torch.ceil, "tl.ceil({0})", None, "same"),
    "trunc": Operation(1, torch.trunc, _TRUNC, None, "same"),
    "tanh": Operation(
        1, torch.tanh, _TANH, _by(_one_minus_square), is_finite=True, range=ranges.SIGNED_UNIT
    ),
    "sigmoid": Operation(
        1, torch.sigmoid, _SIGMOID, _by(_one_minus), is_finite=True, range=ranges.UNIT
    ),
    "erf": Operation(
        1, torch.erf, "tl.erf({0})", _by(_erf_slope), is_finite=True, range=ranges.SIGNED_UNIT
    ),
    "sin": Operation(
        1, torch.sin, "tl.sin({0})", _by(lambda f, n, x: f("cos", x)), range=ranges.SIGNED_UNIT
    ),
    "cos": Operation(
        1,
        torch.cos,
        "tl.cos({0})",
        _by(lambda f, n, x: f("neg", f("sin", x))),
        range=ranges.SIGNED_UNIT,
    ),
    "tan": Operation(1, torch.tan, "tl.sin({0}) / tl.cos({0})", _by(_one_plus_square)),
    "sinh": Operation(1, torch.sinh, _SINH, _by(lambda f, n, x: f("cosh", x))),
    "cosh": Operation(
        1,
        torch.cosh,
        "0.5 * (tl.exp({0}) + tl.exp(-{0}))",
        _by(lambda f, n, x: f("sinh", x)),
        range=lambda of: (1.0, math.inf),
    ),
    "softplus": Operation(
        1, softplus, _SOFTPLUS, _by(lambda f, n, x: f("sigmoid", x)), range=ranges.NOT_NEGATIVE
    ),
    "relu": Operation(
        1,
        torch.relu,
        _RELU,
        _relu_rule,
        "same",
        triton_int="tl.maximum({0}, 0)",
        range=ranges.increasing(lambda x: x, 0.0),
    ),
    "minimum": Operation(
        2,
        torch.minimum,
        _MINIMUM,
        _extremum("gt"),
        "same",
        None,
        True,
        bools="and",
        range=ranges.each(min),
    ),
    "maximum": Operation(
        2,
        torch.maximum,
        _MAXIMUM,
        _extremum("lt"),
        "same",
        None,
        True,
        bools="or",
        range=ranges.each(max),
    ),
    # NOTE [The bound of a clamp] in meanings.py
    "clamp_min": Operation(
        2,
        clamp_min,
        _MAXIMUM,
        _clamp_rule("gt", "lt"),
        "same",
        bools="or",
        range=ranges.each(max),
    ),
    "clamp_max": Operation(
        2,
        clamp_max,
        _MINIMUM,
        _clamp_rule("lt", "gt"),
        "same",
        bools="and",
        range=ranges.each(min),
    ),
    "where": Operation(
        3,
        torch.where,
        "tl.where({0}, {1}, {2})",
        _where_rule,
        "same",
        range=lambda of: ranges.hull(of[1:]),
    ),
    "detach": Operation(1, lambda a: a.detach(), "{0}", None, "same", range=ranges.SAME),
    "lt": _comparison("<", lambda a, b: a < b),
    "le": _comparison("<=", lambda a, b: a <= b),
    "gt": _comparison(">", lambda a, b: a > b),
    "ge": _comparison(">=", lambda a, b: a >= b),
    "eq": _comparison("==", lambda a, b: a == b, True),
    "ne": _comparison("!=", lambda a, b: a != b, True),
    "and": _comparison("&", lambda a, b: a & b, True),
    "or": _comparison("|", lambda a, b: a | b, True),
    "isnan": Operation(1, torch.isnan, "{0} != {0}", None, "bool", True, range=ranges.UNIT),
    "isinf": Operation(
        1, torch.isinf, "tl.abs({0}) == float('inf')", None, "bool", True, range=ranges.UNIT
    ),
    "not": Operation(1, lambda a: ~a, "{0} == 0", None, "bool", True, range=ranges.UNIT),
}

MAX_POWER = 64.0


def check_power(exponent: float) -> None:
    """Checks that a program can have an exponent."""
    if not math.isfinite(exponent) or abs(exponent) > MAX_POWER:
        raise ValueError(
            f"exponents of pow must lie in [-{MAX_POWER:g}, {MAX_POWER:g}], got {exponent}"
        )
