"""Finds graphs whose inputs nn.DataParallel gathered from its replicas.

It calls the replicas in threads, which Dynamo does not trace. So their logits are inputs of the
graph that has the loss, as after any other graph break, and nothing can be fused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, fx

from torch_streamkl.fx_passes.reporting.report import Site

GATHERED = "nn.DataParallel runs the model in threads, outside of this graph"
HINT = (
    "start the program with torchrun, one process for each GPU, and DistributedDataParallel: "
    "there losses fuse; or let it see one GPU, as CUDA_VISIBLE_DEVICES=0 does"
)
_ELSEWHERE = re.compile("not made.* in this graph")


def named(sites: Iterable[Site], origins: Iterable[fx.Node | None]) -> list[Site]:
    """Returns the sites, with nn.DataParallel as the reason where it gathered an input of their
    graph.

    ``origins`` are the sites' nodes in Dynamo's graph, as far as they are known.
    """
    graphs = {x.graph for x in origins if x is not None}
    if not any(_is_gathered(x) for graph in graphs for x in graph.find_nodes(op="placeholder")):
        return list(sites)
    return [
        replace(x, reason=GATHERED, hint=HINT) if _ELSEWHERE.search(x.reason) else x for x in sites
    ]


def _is_gathered(placeholder: fx.Node) -> bool:
    # of Dynamo, as long as it compiles: the real tensor, which fake ones have no history of
    given = getattr(placeholder.meta.get("grapharg"), "_example", None)
    value = given() if callable(given) and not isinstance(given, Tensor) else given
    history = value.grad_fn if isinstance(value, Tensor) else None
    return type(history).__name__ == "GatherBackward"
