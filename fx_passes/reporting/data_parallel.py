"""Graphs whose inputs nn.DataParallel gathered from its replicas.

It calls them in threads, which Dynamo does not trace. So logits that they give are inputs of the
graph that has the loss, as after any other graph break, and nothing can be fused.
"""

from __future__ import annotations

from torch import Tensor, fx

GATHERED = "nn.DataParallel runs the model in threads, outside of this graph"
REMEDY = (
    "start the program with torchrun, one process for each GPU, and DistributedDataParallel: "
    "there losses fuse; or let it see one GPU, as CUDA_VISIBLE_DEVICES=0 does"
)


def is_gathered(graph: fx.Graph) -> bool:
    """Whether an input of a Dynamo graph is what nn.DataParallel gathered."""
    return any(_is_gathered(node) for node in graph.find_nodes(op="placeholder"))


def _is_gathered(placeholder: fx.Node) -> bool:
    # of Dynamo, as long as it compiles: the real tensor, which fake ones have no history of
    given = getattr(placeholder.meta.get("grapharg"), "_example", None)
    value = given() if callable(given) and not isinstance(given, Tensor) else given
    history = value.grad_fn if isinstance(value, Tensor) else None
    return type(history).__name__ == "GatherBackward"
