"""Finds losses of LM heads whose logits other code reads.

The operator computes the logits in parts, and so they are computed twice. The products of an LM
head take most of the time, unlike those of attention.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from torch_streamkl.fx_passes.closed_forms.earliest import Divergence
from torch_streamkl.fx_passes.closed_forms.form import LINEAR, Side
from torch_streamkl.fx_passes.fx_utils.errors import NotWorthIt
from torch_streamkl.fx_passes.fx_utils.nodes import said_name, tensor_of
from torch_streamkl.fx_passes.planning.losses import Losses
from torch_streamkl.fx_passes.planning.profitability import mib_of, why_twice_is_left


def computed_twice(
    graph: fx.Graph, losses: Losses, fused: Iterable[fx.Node], given: float | None
) -> dict[str, NotWorthIt]:
    """Returns which losses of a rewritten graph are not worth it, by name, and why.

    ``fused`` are the values, in the trace, that operators compute. ``given`` is the option
    `streamkl.min_mib`: with it, a loss is fused all the same.
    """
    chosen, found = set(fused), dict[str, NotWorthIt]()
    heads = [
        d
        for d in losses.divergences
        if d.inner in chosen and all(c.operator == LINEAR for c in d.calls)
    ]
    if given is not None or not heads:
        return found
    alive = set(graph.nodes)
    for divergence in heads:
        reason = _why_left(divergence, losses, alive)
        if reason:
            found[divergence.node.name] = NotWorthIt(reason)
    return found


def _why_left(divergence: Divergence, losses: Losses, alive: Collection[fx.Node]) -> str:
    stays: dict[Side, list[fx.Node]] = {}
    for call in divergence.calls:
        for side in call.sides:
            found = losses.product_types.get(side.product.names)
            stays[side] = [n for n in found.made if n in alive] if found else []
    users = {u for nodes in stays.values() for n in nodes for u in n.users}
    readers = {"the caller" if u.op == "output" else said_name(u) for u in users}
    if not readers:
        return ""
    saved = sum(mib_of(side.product) for side, nodes in stays.items() if not nodes)
    return why_twice_is_left(saved, readers, tensor_of(divergence.node).device.type)
