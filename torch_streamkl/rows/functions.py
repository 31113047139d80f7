"""Defines the functions of a row program's elements, each with the arguments that torch's has.

Types follow torch: conditions, integers and floats are promoted as tensors of these types are, and
a Python number counts as its own type.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_streamkl.program import operations
from torch_streamkl.program.graph import (
    BLOCK_SUM,
    BOOL,
    FLOAT,
    INT,
    LOGSUMEXP,
    SUM,
    apply,
    cast,
    const,
    constant,
)
from torch_streamkl.program.meanings import CLAMPS, CLAMPS_BY_TENSOR
from torch_streamkl.rows.elements import (
    ALIASES,
    FUNCTIONS,
    Element,
    condition_of,
    node_of,
    number_of,
)

if TYPE_CHECKING:
    from torch_streamkl.rows.trace import Tracer

# ------------------------------------------------------------------------ arithmetic

_OF_NUMBERS = {"sub", "neg", "abs", "relu", "floor", "ceil", "trunc", "remainder",
               "floor_divide", "clamp_min", "clamp_max"}  # fmt: skip


def _applied(op: str, x: Element, *others: Any) -> Element:
    """Applies an operation of the table; raises if torch has none for booleans."""
    if op in _OF_NUMBERS:
        are = [node_of(x._tracer, a).dtype == BOOL for a in (x, *others)]
        if all(are) or (op == "sub" and any(are)):
            raise TypeError(f"{op} takes numbers, as torch's, got a condition; use & | ^ ~")
    return x._apply(op, x, *others)


def _unary(op: str) -> Callable[..., Element]:
    def function(input: Element) -> Element:
        return _applied(op, input)

    return function


def _binary(op: str) -> Callable[..., Element]:
    def function(input: Element, other: Any) -> Element:
        return _applied(op, input, other)

    return function


def _times(x: Any, alpha: Any, tracer: Tracer) -> Any:
    number, _ = number_of("alpha", alpha)
    if number == 1 and not isinstance(alpha, float):
        return x
    scaled = Element(tracer, node_of(tracer, x))
    if scaled._dtype == BOOL:
        raise TypeError(f"alpha takes numbers, got a condition for alpha={alpha!r}")
    return scaled._apply("mul", x, alpha)


def _add(input: Element, other: Any, *, alpha: Any = 1) -> Element:
    return _applied("add", input, _times(other, alpha, input._tracer))


def _sub(input: Element, other: Any, *, alpha: Any = 1) -> Element:
    return _applied("sub", input, _times(other, alpha, input._tracer))


def _rsub(input: Element, other: Any, alpha: Any = 1) -> Element:
    first = Element(input._tracer, node_of(input._tracer, other))
    return _applied("sub", first, _times(input, alpha, input._tracer))


def _div(input: Element, other: Any, *, rounding_mode: str | None = None) -> Element:
    match rounding_mode:
        case None:
            return input._apply("div", input, other)
        case "floor":
            return _applied("floor_divide", input, other)
        case "trunc":
            divisor = Element(input._tracer, node_of(input._tracer, other))
            if {input._dtype, divisor._dtype} <= {BOOL, INT}:
                sizes = (x if x._dtype == BOOL else _applied("abs", x) for x in (input, divisor))
                quotient = _applied("floor_divide", *sizes)
                is_negative = (input < 0) ^ (divisor < 0)
                return _where(is_negative, _applied("neg", quotient), quotient)
            return _applied("trunc", input._apply("div", input, other))
    raise ValueError(f"rounding_mode must be None, 'floor' or 'trunc', got {rounding_mode!r}")


def _pow(input: Element, exponent: Any) -> Element:
    tracer = input._tracer
    if isinstance(exponent, Element):
        base = constant(input._node)
        if base is None:
            raise NotImplementedError(
                "a row program cannot express pow with an exponent that varies and a base that "
                "does, too"
            )
        if {input._dtype, exponent._dtype} <= {BOOL, INT}:
            raise NotImplementedError(
                "a row program cannot express a power of integers with an exponent that varies, "
                f"which torch rounds to integers; write {base} ** x with a float for {base:g}"
            )
        if not 0.0 < base < math.inf:
            raise ValueError(f"the base of a power must be positive and finite, got {base}")
        if base == 2.0:
            return exponent._apply("exp2", exponent)
        return (exponent * math.log(base))._apply("exp", exponent * math.log(base))
    number, dtype = number_of("the exponent of pow", exponent)
    if input._dtype == "float" or dtype == "float":
        return Element(tracer, apply("pow", cast(input._node, FLOAT), number))
    if number < 0:
        raise ValueError(f"integers have no negative powers, got {exponent}")
    operations.check_power(number)
    one = Element(tracer, const(1.0, INT, input._node.axes))
    return functools.reduce(_binary("mul"), [input] * int(number), one)


def _square(input: Element) -> Element:
    return _pow(input, 2)


def _sign(input: Element) -> Element:
    return input if input._dtype == BOOL else input._apply("sign", input)


def _rpow(exponent: Element, base: Any) -> Element:
    return _pow(Element(exponent._tracer, node_of(exponent._tracer, base)), exponent)


def _clamp(input: Element, min: Any = None, max: Any = None) -> Element:
    if min is None and max is None:
        raise TypeError("clamp of an element must have a min or a max, got None for both")
    for bound, side in ((min, "min"), (max, "max")):
        if bound is not None:
            ops = CLAMPS_BY_TENSOR if isinstance(bound, Element) else CLAMPS
            input = _applied(ops[side], input, bound)
    return input


def _clamp_min(input: Element, min: Any) -> Element:
    return _clamp(input, min)


def _clamp_max(input: Element, max: Any) -> Element:
    return _clamp(input, max=max)


def _reversed(function: Callable[..., Element]) -> Callable[[Element, Any], Element]:
    def method(self: Element, other: Any) -> Element:
        return function(Element(self._tracer, node_of(self._tracer, other)), self)

    return method


# ------------------------------------------------------------------------ conditions


def _where(condition: Element, input: Any, other: Any) -> Element:
    return condition_of(condition, "where")._apply("where", condition, input, other)


def _where_self(input: Element, condition: Any, other: Any) -> Element:
    """Implements the method x.where(condition, other)."""
    return input._apply("where", condition_of(condition, "where"), input, other)


def _masked_fill(input: Element, mask: Element, value: Any) -> Element:
    """Implements masked_fill; the value takes the type of the elements."""
    condition_of(mask, "masked_fill")
    if not isinstance(value, Element) and input._dtype != "float":
        number, _ = number_of("the value of masked_fill", value)
        if input._dtype == INT and not number.is_integer():  # infinity is none
            raise TypeError(f"masked_fill of integers takes an integer, got {value!r}")
        value = bool(number) if input._dtype == BOOL else int(number)
    return input._apply("where", mask, value, input)


def _bitwise(op: str, symbol: str) -> Callable[..., Element]:
    def function(input: Element, other: Any) -> Element:
        return input._apply(op, condition_of(input, symbol), condition_of(other, symbol))

    return function


def _not(input: Element) -> Element:
    return input._apply("not", condition_of(input, "~"))


def _truth(x: Any) -> Any:
    """Whether a number is not 0."""
    if not isinstance(x, Element):
        return bool(number_of("a condition", x)[0])
    return x if x._dtype == BOOL else x._apply("ne", x, 0)


def _logical(op: str) -> Callable[..., Element]:
    def function(input: Element, other: Any) -> Element:
        return input._apply(op, _truth(input), _truth(other))

    return function


# ------------------------------------------------------------------------ composed


def _softplus(input: Element, beta: Any = 1.0, threshold: Any = 20.0) -> Element:
    """Implements softplus, which is the identity above the threshold."""
    factor, bound = number_of("beta", beta)[0], number_of("threshold", threshold)[0]
    if not 0.0 < factor < math.inf:
        raise ValueError(f"beta of softplus must be positive and finite, got {beta!r}")
    scaled = input * factor
    smooth = scaled._apply("softplus", scaled) / factor
    return _where(scaled > bound, input, smooth)


def _logsigmoid(input: Element) -> Element:
    x = -(input * 1.0)
    return -x._apply("softplus", x)


def _xlogy(input: Element, other: Any) -> Element:
    log = input._apply("log", other)
    is_nothing = (input == 0) & input._apply("le", other, 0)
    return input._apply("mul0", input, _where(is_nothing, 0.0, log))


def _scaled_log(base: float) -> Callable[..., Element]:
    def function(input: Element) -> Element:
        return input._apply("log", input) * (1.0 / math.log(base))

    return function


# ------------------------------------------------------------------------ over keys and heads

_AXES = {"sum": '"key" or "head"', "mean": '"head"'}


def _over(name: str, axis: Any, dim: Any) -> Any:
    if axis is not None and dim is not None:
        raise TypeError(f"{name} of an element takes one axis, got {axis!r} and {dim!r}")
    axis = dim if axis is None else axis
    legal = ["key"] * (name != "mean") + ["head"] * (name in _AXES)
    if not isinstance(axis, str) or axis not in legal:
        rule = _AXES.get(name, '"key"')
        raise ValueError(f"{name} of an element must be over {rule}, got {axis!r}")
    return axis


def _sum(
    input: Element, over: Any = None, keepdim: bool = True, *, dim: Any = None, block: Any = None
) -> Element:
    """Sums over keys, blocks of them, or heads; the axis stays, whatever ``keepdim`` says."""
    tracer = input._tracer
    if block is not None:
        _sums_of_blocks("sum", over if over is not None else dim, block)
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"block must be a positive number of keys, got {block!r}")
        return Element(tracer, tracer.reduce(BLOCK_SUM, input._node, block))
    if _over("sum", over, dim) == "head":
        return Element(tracer, tracer.sum_heads(input._node))
    return Element(tracer, tracer.reduce(SUM, input._node))


def _sums_of_blocks(name: str, over: Any, block: Any) -> None:
    if block is not None and (name != "sum" or over != "key"):
        raise ValueError(f'{name} by blocks must be a sum over "key", got {over!r}')


def _mean(
    input: Element, over: Any = None, keepdim: bool = True, *, dim: Any = None, block: Any = None
) -> Element:
    _sums_of_blocks("mean", over, block)
    tracer, head = input._tracer, input._node.head
    _over("mean", over, dim)
    total = Element(tracer, tracer.sum_heads(input._node))
    return total * (1.0 / tracer.num_heads[head]) if head else total


def _lse(name: str, input: Element, over: Any, dim: Any) -> Element:
    _over(name, over, dim)
    return Element(input._tracer, input._tracer.reduce(LOGSUMEXP, input._node))


def _logsumexp(
    input: Element, over: Any = None, keepdim: bool = True, *, dim: Any = None, block: Any = None
) -> Element:
    _sums_of_blocks("logsumexp", over, block)
    return _lse("logsumexp", input, over, dim)


def _log_softmax(input: Element, over: Any = None, *, dim: Any = None) -> Element:
    return input - _lse("log_softmax", input, over, dim)


def _softmax(input: Element, over: Any = None, *, dim: Any = None) -> Element:
    difference = input - _lse("softmax", input, over, dim)
    return difference._apply("exp", difference)


# ------------------------------------------------------------------------ names

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY = ("exp", "exp2", "expm1", "log", "log1p", "sqrt", "abs", "floor", "ceil", "trunc",
         "tanh", "sigmoid", "erf", "sin", "cos", "tan", "sinh", "cosh", "relu", "detach",
         "float", "neg")  # fmt: skip
BINARY = ("mul", "minimum", "maximum", "floor_divide", "remainder", "logaddexp", *COMPARISONS)
FUNCTIONS |= {
    **{name: _unary(name) for name in UNARY},
    **{name: _binary(name) for name in BINARY},
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "div": _div,
    "square": _square,
    "sign": _sign,
    "rsqrt": lambda input: 1.0 / input._apply("sqrt", input),
    "reciprocal": lambda input: 1.0 / input,
    "log2": _scaled_log(2.0),
    "log10": _scaled_log(10.0),
    "xlogy": _xlogy,
    "pow": _pow,
    "rpow": _rpow,
    "clamp": _clamp,
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "where": _where,
    "where_self": _where_self,
    "masked_fill": _masked_fill,
    "bitwise_and": _bitwise("and", "&"),
    "bitwise_or": _bitwise("or", "|"),
    "bitwise_xor": _bitwise("ne", "^"),
    "bitwise_not": _not,
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("ne"),
    "logical_not": lambda input: ~_truth(input),
    "isnan": lambda input: input != input,
    "isinf": lambda input: _applied("abs", input * 1.0) == math.inf,
    "isfinite": lambda input: _applied("abs", input * 1.0) < math.inf,
    "softplus": _softplus,
    "logsigmoid": _logsigmoid,
    "sum": _sum,
    "mean": _mean,
    "logsumexp": _logsumexp,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
}
OPERATION_NAMES = {*FUNCTIONS, *ALIASES}  # that elements have as methods, and torch as functions

# "binary" operators have a reversed one
OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor",
}  # fmt: skip
for _name, _op in OPERATORS.items():
    # one argument: Python gives `pow` a third
    setattr(Element, f"__{_name}__", lambda self, other, _f=FUNCTIONS[_op]: _f(self, other))
    setattr(Element, f"__r{_name}__", _reversed(FUNCTIONS[_op]))
for _name in COMPARISONS:
    setattr(Element, f"__{_name}__", lambda self, other, _f=FUNCTIONS[_name]: _f(self, other))
for _name, _op in {"neg": "neg", "invert": "bitwise_not", "abs": "abs"}.items():
    setattr(Element, f"__{_name}__", lambda self, _f=FUNCTIONS[_op]: _f(self))
