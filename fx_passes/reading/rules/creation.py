"""Reads tensors that are made of numbers and positions."""

from __future__ import annotations

import torch

from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, in_type, number_of, rule
from torch_streamkl.program.canonical import choose, compare, linear, product
from torch_streamkl.program.graph import INT, const, index

aten = torch.ops.aten


def _number(value: float) -> None:
    name = "zeros" if value == 0.0 else "ones"
    made = [getattr(aten, n).default for n in (name, f"{name}_like", f"new_{name}")]

    @rule(*made, *([aten.zero_.default] if value == 0.0 else []))
    def filled(call: Call) -> Array:
        return call.made(in_type(value, call.dtype), arrays.leaf_dims(call.shape))


_number(0.0)
_number(1.0)


@rule(aten.full.default, aten.full_like.default, aten.new_full.default, aten.scalar_tensor.default,
      aten.fill.Scalar, aten.fill.Tensor)  # fmt: skip
def full(call: Call) -> Array:
    """Reads a tensor of one number, or one that is set to it."""
    name = next(n for n in ("fill_value", "value", "s") if call.has(n))
    value = number_of(call.number(name), INT)
    x = in_type(value.value, call.dtype) if value.op == "const" else value
    return call.made(x, arrays.leaf_dims(call.shape))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(call: Call) -> Array:
    """Reads a range of numbers."""
    start, step = call.number("start", 0), call.number("step", 1)
    dims = arrays.leaf_dims(call.shape)
    at = index(dims[0][0]) if dims[0] else const(0, INT)
    return call.made(linear(0.0, [(1.0, start), (1.0, product(step, at))]), dims)


@rule(aten.eye.default, aten.eye.m)
def eye(call: Call) -> Array:
    """Reads 1 where both positions are equal."""
    dims = arrays.leaf_dims(call.shape)
    same = compare("eq", *(arrays.position(d) for d in dims))
    one, zero = (in_type(x, call.dtype) for x in (1.0, 0.0))
    return call.made(same if call.dtype == torch.bool else choose(same, one, zero), dims)


@rule(aten.fill_diagonal_.default)
def fill_diagonal(call: Call) -> Array:
    """Reads a number that is written where both positions are equal."""
    x, value = call.array("self"), call.number("fill_value")
    if len(x.dims) != 2 or call.get("wrap"):
        raise NoRule("a diagonal of more than two dimensions is written")
    here = call.made(compare("eq", *(arrays.position(d) for d in x.dims)), x.dims)
    new = in_type(value.value, call.dtype) if value.op == "const" else value
    return call.pointwise(lambda c, e: choose(c, new, e), here, x)
