"""Reads positions of tokens: differences of neighbours, and sums of those, that are constant.

Transformers computes the sequence number of every token as the cumulative sum of the jumps of
`position_ids`. One plain `arange` has none, of whatever size.
"""

from __future__ import annotations

import torch

from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, rule
from torch_streamkl.program.canonical import FALSE, subtracted
from torch_streamkl.program.graph import INT, const

aten = torch.ops.aten


@rule(aten.diff.default)
def diff(call: Call) -> Array:
    """Reads a difference of neighbours that is the same everywhere."""
    x = call.array("self")
    if call.known("n", 1) != 1 or call.has("append"):
        raise NoRule("diff of scores")
    d = call.dim(-1)
    shifted = arrays.sliced(x, d, 1, x.size(d))  # is not read at its end
    (after, before), _ = arrays.met(shifted, x)
    step = subtracted(after, before)
    if step.op != "const":
        raise NoRule("diff of scores")
    if call.has("prepend"):
        first = call.array("prepend")
        if first.size(d) != 1:
            raise NoRule("diff of scores")
        (own, given), _ = arrays.met(arrays.sliced(x, d, 0, 1), first)
        if subtracted(own, given) is not step:
            raise NoRule("diff of scores")
    return call.made(step, arrays.leaf_dims(call.shape))


@rule(aten.cumsum.default)
def cumsum(call: Call) -> Array:
    """Reads a cumulative sum of zeros."""
    x = call.array("self")
    if x.expr is not FALSE and not (x.expr.op == "const" and x.expr.value == 0.0):
        raise NoRule("cumsum of scores")
    if call.dtype.is_floating_point:
        return x
    return call.made(const(0.0, INT), x.dims)
