"""Checks what forbids the rewrite of a whole graph, whatever it computes."""

from __future__ import annotations

import torch
from torch import fx
from torch.autograd import forward_ad

from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of
from torch_streamkl.fx_passes.fx_utils.torch_names import is_traceable_wrapper_subclass

# these see gradients of intermediate tensors, which a fused operator does not have
_GRADIENTS = {torch.autograd.grad, torch.autograd.backward}
_GRADIENT_METHODS = {"backward", "register_hook", "retain_grad"}
_CREATE_GRAPH = {torch.autograd.grad: 4, torch.autograd.backward: 3, "backward": 3}  # its position
_WITH_GRADIENTS = "{} in the compiled code asks for gradients of its tensors"
_FORWARD_MODE = "the code runs in forward mode, for which fused operators have no derivative"
_LIKE_A_DIVERGENCE = ("kl_div", "cross_entropy", "log_softmax", "logsumexp", "softmax")


def why_unsupported(graph: fx.Graph) -> str:
    """Explains in the user's terms why the graph cannot be rewritten; empty if it can be
    analysed.
    """
    reason = why_bodies_are_unsupported(graph)
    if reason:
        return reason
    for node in graph.nodes:
        name = name_of(node)
        if _asks_for_gradients(node):
            return _WITH_GRADIENTS.format(name)
        if name in _LIKE_A_DIVERGENCE and is_traceable_wrapper_subclass(example(node)):
            return f"the probabilities are in a tensor subclass, {type(example(node)).__name__}"
    return ""


def why_bodies_are_unsupported(graph: fx.Graph) -> str:
    """Explains why not even the bodies of the graph's checkpoints can be rewritten; empty if they
    can be.

    First derivatives in the graph are no reason: a fused operator in a body has them.
    """
    if forward_ad._current_level >= 0:  # which Dynamo guards on
        return _FORWARD_MODE
    for node in graph.nodes:
        name = name_of(node)
        if "_vmap_increment_nesting" in name:
            return "the code runs under torch.vmap"
        if "_grad_increment_nesting" in name or "_jvp_increment_nesting" in name:
            return "the code runs under a transform of torch.func"
        if "_enter_dual_level" in name or "_make_dual" in name:
            return _FORWARD_MODE
        if _asks_for_gradients(node) and _has_second_derivatives(node):
            return _WITH_GRADIENTS.format(name)
    return ""


def _asks_for_gradients(node: fx.Node) -> bool:
    return node.target in _GRADIENTS or (
        node.op == "call_method" and node.target in _GRADIENT_METHODS
    )


def _has_second_derivatives(node: fx.Node) -> bool:
    """Whether gradients are asked for that have gradients themselves."""
    position = _CREATE_GRAPH.get(node.target)
    if position is None:
        return False
    return bool(node.kwargs.get("create_graph") or any(node.args[position : position + 1]))
