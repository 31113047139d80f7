"""Makes views of inputs again in the backward, so that a write in between raises.

Inductor saves a view as a tensor of its own, whose version no write to the input changes. If the
input is written to between forward and backward, autograd would not notice, and the gradient would
be wrong. Our operators take views of tensors that the user's code does not view, such as a hidden
state with leading dimensions of 1.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_streamkl.fx_passes.fx_utils.nodes import in_backward
from torch_streamkl.registration import NAMESPACE


def save_inputs_for_views(graph: fx.Graph) -> None:
    """Lets the partition of a joint graph save inputs instead of views that our backward reads."""
    late = in_backward(graph)
    for node in late:
        if getattr(node.target, "namespace", None) == NAMESPACE:
            for operand in node.all_input_nodes:
                _save_input(operand, late)


def _save_input(node: fx.Node, late: set[fx.Node]) -> None:
    views = []
    while node not in late and getattr(node.target, "is_view", False):
        views.append(node)
        base = node.args[0]
        assert isinstance(base, fx.Node)
        node = base
    if node.op == "placeholder":
        for view in views:
            view.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
