"""Code behind a site that asks for NaN or infinity, where eager has them and operators do not.

Eager gives NaN where a masked key has the probability 0 and the logarithm -inf, and infinity where
a probability is 0 by underflow. An operator gives the limit. Whoever replaces NaN by 0, counts it
or compares with it must see what eager has.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from torch_streamkl.fx_passes.domain.absent_keys import (
    at_absent_key,
    is_of_probabilities,
    may_be_infinite,
)
from torch_streamkl.fx_passes.domain.values import Elements
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, name_of

aten = torch.ops.aten
ASK = {"nan_to_num", "nan_to_num_", "isnan", "isfinite", "isinf", "isneginf", "isposinf"}
ASK |= {"nansum", "nanmean", "nanmedian", "nanquantile", "fmax", "fmin"}
COMPARE = {"gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal"}
COMPARE |= {"not_equal", *(f"__{x}__" for x in ("gt", "lt", "ge", "le", "eq", "ne"))}
LOGARITHMS = {aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default}


def check_nan_readers(
    node: fx.Node, inner: fx.Node, elements: Elements, values: Mapping[fx.Node, object]
) -> None:
    """Blocked where code behind ``node`` would see another number than in eager.

    ``inner`` is the same value in the trace, of which ``values`` knows what its nodes are.
    """
    readers = _readers(node)
    if not readers:
        return
    if any(may_be_infinite(part.scores) for part in elements.parts):
        why = "NaN where a key is masked (0 times the logarithm of 0) or a row has no key"
    elif any(_may_be_log_of_zero(n, values) for n in ancestors(inner)):
        why = "infinity where a probability underflows (the logarithm of 0)"
    else:
        return
    raise Blocked(f"{min(readers)} reads the divergence, and eager has {why}")


def _may_be_log_of_zero(node: fx.Node, values: Mapping[fx.Node, object]) -> bool:
    if node.target not in LOGARITHMS:
        return False
    argument = node.args[0]
    x = values.get(argument) if isinstance(argument, fx.Node) else None
    if not isinstance(x, Elements):
        return False
    e = x.single()
    lowest = 0.0 if node.target is not aten.log1p.default else -1.0
    return e is None or not is_of_probabilities(e) or not at_absent_key(e) > lowest


def _readers(node: fx.Node) -> set[str]:
    """Names of the operations behind a node that tell NaN or infinity from numbers."""
    seen, stack, found = {node}, [node], set()
    while stack:
        for user in stack.pop().users:
            name = name_of(user)
            found |= {name} & (ASK | COMPARE)
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return found
