"""Reads arithmetic and functions of one or two values."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import name_of, reached, tensors_read
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.reading import types
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.registry import (
    Call,
    NoRule,
    added,
    applied,
    number_of,
    rule,
)
from torch_streamkl.program.canonical import (
    all_of,
    any_of,
    choose,
    compare,
    linear,
    negation,
    product,
    scaled,
    subtracted,
)
from torch_streamkl.program.functions import (
    exponential,
    function,
    log_add_exp,
    logarithm,
    quotient,
)
from torch_streamkl.program.graph import BOOL, FLOAT, Node, const, made_power
from torch_streamkl.program.meanings import CLAMPS, CLAMPS_BY_TENSOR
from torch_streamkl.program.operations import MAX_POWER

aten = torch.ops.aten
Unary = Callable[[Node], Node]


def _log1p(x: Node) -> Node:
    return logarithm(linear(1.0, [(1.0, x)]))


def _log_to(base: float) -> Unary:
    return lambda x: scaled(1.0 / math.log(base), logarithm(x))


def _silu(x: Node) -> Node:
    return product(x, function("sigmoid", x))


def negative(x: Node) -> Node:
    """Returns -x."""
    return scaled(-1.0, x)


UNARY: dict[object, Unary] = {
    aten.exp.default: exponential,
    aten.log.default: logarithm,
    aten.log2.default: _log_to(2.0),
    aten.log10.default: _log_to(10.0),
    aten.log1p.default: _log1p,
    aten.neg.default: negative,
    aten.negative.default: negative,
    aten.absolute.default: applied("abs"),
    aten.fix.default: applied("trunc"),
    aten.sgn.default: applied("sign"),
    aten.reciprocal.default: lambda x: quotient(const(1.0), x),
    aten.rsqrt.default: lambda x: quotient(const(1.0), function("sqrt", x)),
    aten.square.default: lambda x: product(x, x),
    aten.silu.default: _silu,
    aten.log_sigmoid.default: lambda x: negative(function("softplus", negative(x))),
    aten.exp2.default: lambda x: exponential(scaled(math.log(2.0), x)),
    aten.positive.default: lambda x: x,
    aten.special_entr.default: lambda x: negative(product(x, logarithm(x))),
} | {
    getattr(aten, name).default: applied(name)
    for name in (
        *("sqrt", "abs", "tanh", "sigmoid", "relu", "erf", "sin", "cos", "tan", "sinh", "cosh"),
        *("expm1", "floor", "ceil", "trunc", "sign"),
    )
}


def _unary(call: Call) -> Array:
    make = UNARY.get(call.node.target) or UNARY[getattr(aten, call.name).default]
    return call.array("self").map(lambda e: make(number_of(e)))


for _overload in UNARY:
    rule(_overload)(_unary)


def binary(*overloads: object) -> Callable[[Callable[[Node, Node], Node]], None]:
    """Registers what an operation makes of two numbers; of conditions they are 1 and 0."""

    def register(make: Callable[[Node, Node], Node]) -> None:
        def read(call: Call) -> Array:
            x, y = call.arrays("self", "other")
            return call.pointwise(lambda a, b: make(number_of(a), number_of(b)), x, y)

        rule(*overloads)(read)

    return register


binary(aten.minimum.default, aten.min.other)(applied("minimum"))
binary(aten.maximum.default, aten.max.other)(applied("maximum"))
binary(aten.logaddexp.default)(log_add_exp)
binary(aten.remainder.Tensor, aten.remainder.Scalar)(applied("remainder"))
binary(aten.floor_divide.default)(applied("floor_divide"))


@rule(aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor, aten.multiply.Scalar)
def multiply(call: Call) -> Array:
    """Reads a product; of conditions it is their conjunction."""

    def times(a: Node, b: Node) -> Node:
        both = a.dtype == BOOL and b.dtype == BOOL
        return all_of(a, b) if both else product(number_of(a), number_of(b))

    return call.pointwise(times, *call.arrays("self", "other"))


def _sum(call: Call, sign: float, first: str = "self", second: str = "other") -> Array:
    x, y, alpha = call.array(first), call.array(second), call.number("alpha", 1)

    def add(a: Node, b: Node) -> Node:
        if a.dtype == BOOL and b.dtype == BOOL:
            return any_of(a, b)
        a, b = number_of(a), number_of(b)
        if alpha.op == "const":
            return added(a, b, sign * alpha.value)
        return added(a, product(alpha, b), sign)

    return call.pointwise(add, x, y)


@rule(aten.add.Tensor, aten.add.Scalar)
def add(call: Call) -> Array:
    """Reads a sum."""
    return _sum(call, 1.0)


@rule(aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor, aten.subtract.Scalar)
def subtract(call: Call) -> Array:
    """Reads a difference."""
    return _sum(call, -1.0)


@rule(aten.rsub.Tensor, aten.rsub.Scalar)
def subtract_from(call: Call) -> Array:
    """Reads ``other - alpha * self``."""
    return _sum(call, -1.0, "other", "self")


@rule(aten.div.Tensor, aten.div.Scalar, aten.divide.Tensor, aten.divide.Scalar,
      aten.true_divide.Tensor, aten.true_divide.Scalar, aten.div.Tensor_mode,
      aten.div.Scalar_mode)  # fmt: skip
def divide(call: Call) -> Array:
    """Reads a quotient, which may be rounded down or to zero."""
    mode = call.get("rounding_mode")
    x, y = call.arrays("self", "other")
    if mode is None:
        return call.pointwise(lambda a, b: quotient(number_of(a), number_of(b)), x, y)
    if mode == "floor" or all(z.expr.range[0] >= 0.0 for z in (x, y)):
        return call.pointwise(applied("floor_divide"), x, y)
    if not call.dtype.is_floating_point:
        raise NoRule("integers are divided towards zero")
    return call.pointwise(lambda a, b: function("trunc", quotient(a, b)), x, y)


def power_of(x: Node, exponent: float) -> Node:
    """Returns a power with a known exponent."""
    x = number_of(x)
    if x.op == "exp":
        return exponential(scaled(exponent, x.args[0]))
    match exponent:
        case 0.0:
            return const(1.0, x.dtype)
        case 1.0:
            return x
        case 2.0 | 3.0 | 4.0:
            return product(*[x] * int(exponent))
        case 0.5:
            return function("sqrt", x)
        case -0.5:
            return quotient(const(1.0), function("sqrt", x))
        case -1.0:
            return quotient(const(1.0), x)
    if abs(exponent) > MAX_POWER:
        raise NoRule(f"a power of {exponent:g}, whose exponent is large")
    return made_power(x, exponent)


@rule(aten.pow.Tensor_Scalar)
def power(call: Call) -> Array:
    """Reads a power."""
    exponent = call.known("exponent")
    return call.array("self").map(lambda e: power_of(e, float(exponent)))


@rule(aten.pow.Scalar)
def power_of_number(call: Call) -> Array:
    """Reads ``number ** tensor``."""
    base = call.known("self")
    if not base > 0:
        raise NoRule("a power of a number that is not positive")
    return call.array("exponent").map(lambda e: exponential(scaled(math.log(base), number_of(e))))


_OF_TENSORS = (
    aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.clip.Tensor,
)  # fmt: skip


@rule(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clip.default,
      *_OF_TENSORS)  # fmt: skip
def clamp(call: Call) -> Array:
    """Reads bounds, which may be tensors."""
    x = call.array("self")
    ops = CLAMPS_BY_TENSOR if call.node.target in _OF_TENSORS else CLAMPS
    for name, op in ops.items():
        if call.has(name):
            x = call.pointwise(applied(op), x, call.array(name))
    call.observes("clamp")
    return x


@rule(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def x_log_y(call: Call) -> Array:
    """Reads x log y, which is 0 where x is."""

    def made(a: Node, b: Node) -> Node:
        a, b = number_of(a), number_of(b)
        values = product(a, logarithm(b))
        if _vanishes_with_gradient(a):
            return values
        # torch's gradient to x is 0 where both are 0, not the infinite logarithm
        zero = const(0.0)
        both = all_of(compare("eq", a, zero), negation(compare("gt", b, zero)))
        return choose(both, zero, values)

    return call.pointwise(made, *call.arrays("self", "other"))


def _vanishes_with_gradient(x: Node) -> bool:
    """Whether an element that is 0 has a gradient of 0 as well, as a probability has."""
    stack, seen = [x], {x}
    while stack:
        y = stack.pop()
        if not y.flows or y.op == "exp":
            continue
        is_multiple = y.op == "linear" and y.value[0] == 0.0 and len(y.args) == 1
        if not is_multiple and y.op not in ("product", "div", "pow", "sqrt", "where"):
            return False
        factors = {"div": y.args[:1], "where": y.args[1:]}.get(y.op, y.args)
        stack += [a for a in factors if a not in seen]
        seen.update(factors)
    return True


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def interpolate(call: Call) -> Array:
    """Reads ``self + weight * (end - self)``."""

    def mix(a: Node, b: Node, w: Node) -> Node:
        if w.op == "const":
            return linear(0.0, [(1.0 - w.value, a), (w.value, b)])
        return linear(0.0, [(1.0, a), (1.0, product(w, subtracted(b, a)))])

    return call.pointwise(mix, *call.arrays("self", "end", "weight"))


@rule(aten.addcmul.default, aten.addcdiv.default)
def add_product(call: Call) -> Array:
    """Reads ``self + value * tensor1 * tensor2``, or the quotient of both."""
    value = call.number("value", 1)
    make = product if call.name == "addcmul" else quotient

    def add(x: Node, a: Node, b: Node) -> Node:
        return linear(0.0, [(1.0, number_of(x)), (1.0, product(value, make(a, b)))])

    return call.pointwise(add, *call.arrays("self", "tensor1", "tensor2"))


@rule(aten.elu.default, aten.leaky_relu.default)
def below_zero(call: Call) -> Array:
    """Reads a function that is the identity above 0."""
    if call.name == "leaky_relu":
        slope = float(call.known("negative_slope", 0.01))
        return call.array("self").map(lambda x: _above_zero(x, scaled(slope, x)))
    alpha, scale, inner = (float(call.known(n, 1)) for n in ("alpha", "scale", "input_scale"))

    def elu(x: Node) -> Node:
        low = scaled(alpha, linear(-1.0, [(1.0, exponential(scaled(inner, x)))]))
        return scaled(scale, _above_zero(x, low))

    return call.array("self").map(elu)


def _above_zero(x: Node, below: Node) -> Node:
    return choose(compare("gt", x, const(0.0)), x, below)


@rule(aten.softplus.default)
def soft_plus(call: Call) -> Array:
    """Reads log(1 + e^x)."""
    beta, threshold = call.known("beta", 1), call.known("threshold", 20)
    if beta <= 0 or beta * threshold < 20:
        raise NoRule("softplus with a low threshold")

    def made(x: Node) -> Node:
        return scaled(1.0 / beta, function("softplus", scaled(float(beta), x)))

    return call.array("self").map(made)


@rule(aten.dropout.default)
def dropout(call: Call) -> Array:
    """Reads dropout that does nothing."""
    if call.get("p") != 0.0 and call.get("train"):
        raise NoRule("dropout draws random numbers")
    return call.array("input")


@rule(aten.nan_to_num.default)
def nan_to_num(call: Call) -> Array:
    """Reads ``nan_to_num``, which replaces what is no number."""
    call.observes("nan_to_num")
    limits = torch.finfo(call.dtype)
    usual = {"nan": 0.0, "posinf": limits.max, "neginf": limits.min}
    nan, high, low = (call.known(n) if call.has(n) else x for n, x in usual.items())

    def replaced(x: Node) -> Node:
        is_infinite, is_nan = function("isinf", x), function("isnan", x)
        sided = choose(function("gt", x, const(0.0)), const(high), const(low))
        return choose(is_nan, const(nan), choose(is_infinite, sided, x))

    return call.array("self").map(replaced)


@rule(aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.other, aten.type_as.default,
      aten.to.dtype_layout, aten.copy_.default)  # fmt: skip
def cast(call: Call) -> Array:
    """Reads a cast, also of what is written over another tensor: NOTE [Types]."""
    source = "src" if call.has("src") else "self"
    x, than = call.array(source), call.dtype_of(source)
    assert than is not None
    to, kind = call.dtype, types.kind_of(call.dtype)
    rounds = kind == FLOAT and x.expr.dtype == FLOAT and types.is_narrower(to, than)
    reads_products = call.node in call.reader.reading.reads_products
    if rounds and not reads_products and not types.is_of_positions(x.expr):
        raise NoRule(f"an input is rounded to {str(to).removeprefix('torch.')}")
    if rounds:
        call.observes("rounding")
    if rounds and reads_products and _is_type_of_products(call, to):
        return x
    return x.map(lambda e: types.cast(e, to, than))


def _is_type_of_products(call: Call, dtype: torch.dtype) -> bool:
    """Whether all products that a result is made of have a type, or their operands.

    A cast back to it, as in ``softmax(scores, dtype=torch.float32).to(q.dtype)``, rounds no more
    than the scores or inputs were rounded: an operator that keeps float32 is as exact.
    """
    if dtype.itemsize == 1:
        return False
    reads, made_as = call.reader.reading.reads_products, call.reader.made_as

    def made_of(n: fx.Node) -> list[fx.Node]:
        return [] if name_of(n) in MATMULS else [a for a in n.all_input_nodes if a in reads]

    for n in reached([call.node], made_of):
        if name_of(n) not in MATMULS:
            continue
        made = made_as.get(n, n.meta["val"].dtype)
        if made != dtype and any(x.dtype != dtype for x in tensors_read(n)):
            return False
    return True
