"""Reads sums, maxima and softmaxes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from torch_streamkl.fx_passes.reading import arrays, types
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, applied, number_of, rule
from torch_streamkl.fx_passes.reading.rules.views import RESHAPES, SAME
from torch_streamkl.program.canonical import choose, compare, linear, product, scaled, subtracted
from torch_streamkl.program.functions import exponential, function, quotient
from torch_streamkl.program.graph import (
    ANY,
    ARGMAX,
    FLOAT,
    INT,
    LOGSUMEXP,
    MAX,
    SUM,
    Node,
    const,
    size_of,
)
from torch_streamkl.program.reductions import reduced
from torch_streamkl.program.walks import walk

aten = torch.ops.aten
COMPARISONS = {
    getattr(getattr(aten, name), kind) for name in ("eq", "ne") for kind in ("Tensor", "Scalar")
}


def over(kind: str, x: Array, dims: Sequence[int], keepdim: bool = False) -> Array:
    """Returns a reduction, over keys before rows: keys are what a softmax is over."""
    dims = [d % len(x.dims) for d in dims]
    expr = x.expr if kind == ANY else number_of(x.expr)
    axes = [a for d in sorted(dims, reverse=True) for a in x.dims[d]]
    if len(axes) > 1:
        keys = {y.value for y in walk([expr]) if y.op == "log_softmax"}
        axes.sort(key=lambda a: a not in keys)
    for axis in axes:
        expr = reduced(kind, axis, expr)
    kept = [() if d in dims else y for d, y in enumerate(x.dims) if keepdim or d not in dims]
    return Array(expr, tuple(kept), x.sizes)


def count_of(x: Array, dims: Sequence[int]) -> Node:
    """Returns how many elements dimensions have."""
    return product(const(1.0), *(size_of(a.size or 1) for d in dims for a in x.dims[d]))


def averaged(x: Array, dims: Sequence[int], keepdim: bool = False) -> Array:
    """Returns a mean."""
    count = count_of(x, dims)
    return over(SUM, x, dims, keepdim).map(lambda e: quotient(e, count))


def _cast_first(call: Call) -> Array:
    """The input of a reduction with a type of its own, to which torch casts it: NOTE [Types]."""
    x, to, than = call.array("self"), call.get("dtype"), call.dtype_of("self")
    if to is None or than is None or not (to.is_floating_point and than.is_floating_point):
        return x
    if not types.is_narrower(to, than):
        return x
    if call.node not in call.reader.reading.reads_products:
        raise NoRule(f"an input is rounded to {str(to).removeprefix('torch.')}")
    call.observes("rounding")
    return x.map(lambda e: types.cast(e, to, than))


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(call: Call) -> Array:
    """Reads a sum."""
    x = _cast_first(call)
    return over(SUM, x, call.dims(), call.keepdim)


@rule(aten.mean.default, aten.mean.dim)
def mean(call: Call) -> Array:
    """Reads a mean."""
    x = _cast_first(call)
    return averaged(x, call.dims(), call.keepdim)


@rule(aten.nansum.default)
def nansum(call: Call) -> Array:
    """Reads a sum without what is NaN."""
    call.observes("nansum")
    x = call.array("self").map(
        lambda e: choose(function("isnan", e), const(0.0), e) if e.dtype == "float" else e
    )
    return over(SUM, x, call.dims(), call.keepdim)


@rule(aten.amax.default, aten.amin.default)
def amax(call: Call) -> Array:
    """Reads a maximum or minimum."""
    x = call.array("self").map(number_of)
    dims, keepdim = call.dims(), call.keepdim
    if call.node.target == aten.amax.default:
        return over(MAX, x, dims, keepdim)
    found = over(MAX, x.map(lambda e: scaled(-1.0, e)), dims, keepdim)
    return found.map(lambda e: scaled(-1.0, e))


@rule(aten.max.dim)
def max_along(call: Call) -> tuple[Array | None, ...]:
    """Reads maxima, and where they are."""
    x = call.array("self")
    d = call.dim()
    kept = call.keepdim or not x.dims
    places = [u for u in call.node.users if u.target is operator.getitem and u.args[1] == 1]
    is_read = places and x.dims and not any(map(_are_positions, places))
    found = _places(call, x, d, kept) if is_read else None
    return over(MAX, x, [d] if x.dims else [], kept), found


@rule(aten.argmax.default)
def argmax(call: Call) -> Array:
    """Reads the places of the first maxima. Those that other code reads at are a tensor."""
    x = call.array("self")
    if not x.dims or (not call.has("dim") and len(x.dims) > 1):
        raise NoRule("argmax along several dimensions")
    found = _places(call, x, call.dim(-1) if call.has("dim") else 0, call.keepdim)
    if _are_positions(call.node):
        assert isinstance(call.value, torch.Tensor)
        call.reader.reading.places[call.node] = call.reader.fitted(call.node, found, call.value)
        raise NoRule("argmax gives positions at which something is read")
    return found


def _places(call: Call, x: Array, d: int, keepdim: bool) -> Array:
    if x.expr.dtype != FLOAT:
        raise NoRule("argmax of what is no floating-point number")
    x = arrays.with_one_axis(x, d)
    if not x.dims[d]:
        x = x.map(lambda e: const(0.0, INT))
    return over(ARGMAX, x, [d], keepdim)


def _are_positions(node: fx.Node) -> bool:
    """Whether an operation may read something at the positions that a tensor holds."""
    users = [u for u in node.users if u.op != "output"]
    return any(
        _are_positions(u) if u.target in SAME | RESHAPES else u.target not in COMPARISONS
        for u in users
    )


@rule(aten.max.default)
def max_of_all(call: Call) -> Array:
    """Reads the maximum of all elements."""
    x = call.array("self")
    return over(MAX, x, range(len(x.dims)))


@rule(aten.logsumexp.default)
def logsumexp(call: Call) -> Array:
    """Reads a log-sum-exp."""
    x = call.array("self")
    return over(LOGSUMEXP, x, call.dims(), call.keepdim)


def log_softmax_of(x: Array, d: int) -> Array:
    """Returns the log-softmax along a dimension."""
    x = arrays.with_one_axis(x, d).map(number_of)
    if not x.dims[d]:
        return x.map(lambda e: const(0.0))
    (axis,) = x.dims[d]

    def of(e: Node) -> Node:
        if axis in e.axes or not e.is_finite:
            return subtracted(e, reduced(LOGSUMEXP, axis, e))
        return scaled(-1.0, reduced(LOGSUMEXP, axis, const(0.0)))  # a large e would absorb it

    return x.map(of)


def _softmax(call: Call) -> Array:
    x = _cast_first(call)
    return log_softmax_of(x, call.dim()) if x.dims else x.map(lambda e: const(0.0))


@rule(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(call: Call) -> Array:
    """Reads a log-softmax."""
    return _softmax(call)


@rule(aten.softmax.int, aten._softmax.default)
def softmax(call: Call) -> Array:
    """Reads a softmax."""
    return _softmax(call).map(exponential)


def norm_of(x: Array, order: float, dims: Sequence[int], keepdim: bool) -> Array:
    """Returns the norm of vectors along dimensions."""
    if order == 2.0:
        squares = x.map(lambda e: product(e, e))
        return over(SUM, squares, dims, keepdim).map(lambda e: function("norm", e))
    sizes = x.map(applied("abs"))
    if order == 1.0:
        return over(SUM, sizes.map(lambda e: x.expr if x.expr.range[0] >= 0 else e), dims, keepdim)
    if order == math.inf:
        return over(MAX, sizes, dims, keepdim)
    raise NoRule(f"a norm of order {order:g}")


@rule(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar)
def norm(call: Call) -> Array:
    """Reads a norm, also in its older form."""
    x = call.array("self").map(number_of)
    order = call.known("p" if call.has("p") else "ord", 2)
    return norm_of(x, float(order), call.dims(), call.keepdim)


@rule(aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord)
def matrix_norm(call: Call) -> Array:
    """Reads the Frobenius norm of matrices."""
    x, order = call.array("self").map(number_of), call.known("ord", "fro")
    if order != "fro":
        raise NoRule(f"a matrix norm of order {order}")
    return norm_of(x, 2.0, call.known("dim", (-2, -1)), call.keepdim)


@rule(aten.linalg_norm.default, aten.linalg_norm.ord_str)
def linalg_norm(call: Call) -> Array:
    """Reads the norm of vectors, or that of all elements."""
    x, order, dims = call.array("self").map(number_of), call.known("ord"), call.known("dim")
    count = len(x.dims) if dims is None else len(dims)
    if order is not None and (count > 1 and order != "fro"):
        raise NoRule(f"a matrix norm of order {order}")
    order = 2.0 if order in (None, "fro") else float(order)
    return norm_of(x, order, call.dims(), call.keepdim)


@rule(aten.trace.default)
def trace(call: Call) -> Array:
    """Reads the sum of a matrix' diagonal."""
    x = call.array("self").map(number_of)
    rows, columns = (arrays.position(d) for d in x.dims)
    at_both = x.map(lambda e: choose(compare("eq", rows, columns), e, const(0.0)))
    return over(SUM, at_both, [0, 1])


@rule(aten.var.correction, aten.var.dim, aten.std.correction, aten.std.dim)
def variance(call: Call) -> Array:
    """Reads a variance or standard deviation."""
    x = call.array("self")
    dims, keepdim = call.dims(), call.keepdim
    name = "unbiased" if call.has("unbiased") else "correction"
    correction = call.known(name) if call.has(name) else 1
    centered = call.pointwise(subtracted, x, averaged(x, dims, keepdim=True))
    squares = over(SUM, centered.map(lambda e: product(e, e)), dims, keepdim)
    count = linear(-float(correction), [(1.0, count_of(x, dims))])
    found = squares.map(lambda e: quotient(e, count))
    is_root = call.node.target in (aten.std.correction, aten.std.dim)
    # the gradient of torch's deviation is 0 where all values are equal, that of a root infinite
    return found.map(applied("norm")) if is_root else found
