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
_FORWARD_MODE = "the code runs in forward mode, for which fused operators have no derivative"
_LIKE_A_DIVERGENCE = ("kl_div", "cross_entropy", "log_softmax", "logsumexp", "softmax")


def why_unsupported(graph: fx.Graph) -> str:
    """Explains in the user's terms why the graph cannot be rewritten; empty if it can be
    analysed.
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
        if node.target in _GRADIENTS or (
            node.op == "call_method" and node.target in _GRADIENT_METHODS
        ):
            return f"{name} in the compiled code asks for gradients of its tensors"
        if name_of(node) in _LIKE_A_DIVERGENCE and is_traceable_wrapper_subclass(example(node)):
            return f"the probabilities are in a tensor subclass, {type(example(node)).__name__}"
    return ""
