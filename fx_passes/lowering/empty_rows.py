"""Restores eager's values and gradients for rows whose keys are all masked by a finite number."""

from __future__ import annotations

import math

import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.nodes import needs_gradient, tensor_of
from torch_streamkl.fx_passes.fx_utils.sizes import is_unknown

# NOTE [Rows without keys]
# Adding the lowest number, or -1e9, to every score of a row loses the scores in rounding: eager's
# probabilities are uniform. A fused operator's forward agrees, but it rebuilds the probabilities
# in its backward as exp(score - lse), where lse = lowest + log(num_keys) has lost the logarithm:
# they come out as 1 instead of 1 / num_keys. Such rows are common: the first rows of a causal
# sequence with padding on the left. Keys removed by a boolean mask or by -inf are free of this.


def rows_with_keys(
    build: Builder,
    added: fx.Node,
    keep: fx.Node | None,
    dtype: torch.dtype,
    *,
    all_heads: bool = False,
) -> fx.Node:
    """Marks the rows of an additive mask [..., keys] that keep some of their scores, as [..., 1].

    ``keep`` is the boolean mask that comes with it. ``all_heads``: a row counts if it does in any
    head.
    """
    if keep is not None:
        added = build.call(torch.where, keep, added, -math.inf)
    # a rounding at this size is larger than the scores of a model, which are float32 at least;
    # float16 ends earlier
    wide = torch.promote_types(dtype, torch.float32)
    lost = max(-4.0 / torch.finfo(wide).eps, torch.finfo(dtype).min)
    over = ((1, -1) if all_heads else -1, True)
    if is_unknown(tensor_of(added).shape[-1]):  # there may be no key, which has no maximum
        above = build.method("any", build.call(torch.gt, added, lost), *over)
        hidden = build.method("all", build.call(torch.eq, added, -math.inf), *over)
    else:
        highest = build.method("amax", added, *over)
        above = build.call(torch.gt, highest, lost)
        hidden = build.call(torch.eq, highest, -math.inf)
    return build.call(torch.logical_or, above, hidden)


def uniform_rows(
    build: Builder, q: fx.Node, k: fx.Node, v: fx.Node, scale: float, *, added: bool
) -> fx.Node:
    """Returns attention with equal weights for all keys, with the gradients of the replaced code.

    A mask that is added lets the gradient of the softmax through to the scores: its first-order
    term 1/N sum_j (s_j - mean s) v_j, minus its own value. A mask that is filled in does not.
    """
    mean = build.method("mean", v, -2, True)
    if not added or not (needs_gradient(q) or needs_gradient(k)):
        return mean
    centred = build.method("detach", build.call(torch.sub, v, mean))
    weighted = build.call(torch.div, centred, build.method("size", v, -2))
    moments = build.call(torch.matmul, build.method("transpose", k, -1, -2), weighted)
    slope = build.call(torch.matmul, q, build.call(torch.mul, moments, scale))
    return build.call(torch.add, mean, build.call(torch.sub, slope, build.method("detach", slope)))
