"""Finds tensors that are known to be positive, from the operations that computed them."""

from __future__ import annotations

import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils.nodes import named_arguments

aten = torch.ops.aten

POSITIVE = {aten.exp.default, aten.softplus.default, aten.sigmoid.default}
CLAMPS = {aten.clamp.default, aten.clamp_min.default, aten.clip.default}
KEEP_SIGN = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.reciprocal.default,
    aten.rsqrt.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.sqrt.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.to.dtype,
    aten._to_copy.default,
    aten.unsqueeze.default,
    aten.view.default,
    aten.reshape.default,
}
PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}


def is_positive(x: object) -> bool:
    """Returns whether a node of the trace, or a number, is positive for all inputs.

    Up to underflow: exp may give 0, where eager has 0 * -inf or a uniform row.
    """
    if isinstance(x, (int, float)):
        return x > 0
    if not isinstance(x, fx.Node) or x.op != "call_function":
        return False
    value = x.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return bool(value.node.expr.is_positive)
    a = named_arguments(x)
    if x.target in POSITIVE:
        return True
    if x.target in CLAMPS:
        return is_positive(a.get("min"))
    if x.target in PRODUCTS:
        return is_positive(a["self"]) and is_positive(a["other"])
    return x.target in KEEP_SIGN and is_positive(a["self"])
