"""Finds losses of LM heads whose logits other code reads.

The operator computes the logits in parts, and so they are computed twice. The products of an LM
head take most of the time, unlike those of attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import fx

from torch_streamkl.fx_passes.closed_forms.earliest import Divergence
from torch_streamkl.fx_passes.closed_forms.form import LINEAR, Side
from torch_streamkl.fx_passes.closed_forms.row_sites import products_in
from torch_streamkl.fx_passes.fx_utils.errors import NotWorthIt
from torch_streamkl.fx_passes.fx_utils.nodes import name_of, said_name, tensor_of
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.planning.losses import Losses
from torch_streamkl.fx_passes.planning.profitability import mib_of, why_twice_is_left
from torch_streamkl.fx_passes.reading.positions import source_name

Products = Mapping[frozenset[object], list[fx.Node]]  # the user's, by the names of their operands


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
    products, alive = _products_of_users(losses), set(graph.nodes)
    for divergence in heads:
        reason = _why_left(divergence, products, alive)
        if reason:
            found[divergence.node.name] = NotWorthIt(reason)
    return found


def _why_left(divergence: Divergence, products: Products, alive: set[fx.Node]) -> str:
    stays: dict[Side, list[fx.Node]] = {}
    for call in divergence.calls:
        for side in call.sides:
            stays[side] = [n for n in products.get(side.product.names, ()) if n in alive]
    users = {u for nodes in stays.values() for n in nodes for u in n.users}
    readers = {"the caller" if u.op == "output" else said_name(u) for u in users}
    if not readers:
        return ""
    saved = sum(mib_of(side.product) for side, nodes in stays.items() if not nodes)
    return why_twice_is_left(saved, readers, tensor_of(divergence.node).device.type)


def _products_of_users(losses: Losses) -> Products:
    found: dict[frozenset[object], list[fx.Node]] = defaultdict(list)
    for node in losses.trace.graph.nodes:
        expr = losses.reading.expression(node)
        outer = losses.trace.outer.get(node)
        if outer is None or expr is None or name_of(node) not in MATMULS:
            continue
        for product in products_in([expr]):
            found[frozenset(map(source_name, product.args)) - {None}].append(outer)
    return found
