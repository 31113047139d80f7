"""Finds logits and attention probabilities that a graph returns: a loss on them is not seen."""

from __future__ import annotations

import math

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import (
    example,
    location_of,
    name_of,
    num_bytes,
    tensors_read,
)
from torch_streamkl.fx_passes.fx_utils.op_names import CASTS, MATMULS, OPERAND_VIEWS
from torch_streamkl.fx_passes.fx_utils.sizes import Size, hint_of, shown_shape
from torch_streamkl.fx_passes.reporting.report import Outside

SOFTMAXES = {"softmax", "log_softmax"}
BEHIND_SOFTMAX = CASTS | OPERAND_VIEWS | {"dropout", "masked_fill", "add", "mul", "truediv", "div"}
SOFTCAP = {"tanh", "mul", "truediv", "div"}
# an LM head is far wider than any projection inside of a layer, which have up to 4, seldom 5
VOCABULARY_PER_WIDTH = 6


def graph_outputs(graph: fx.Graph) -> list[Outside]:
    """Returns outputs of the graph from which a distillation loss could be computed."""
    found = []
    for node in graph.find_nodes(op="output")[0].all_input_nodes if len(graph.nodes) else []:
        value = example(node)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            continue
        what = "logits" if _is_logits(node) else "attention map" if _is_map(node) else ""
        if what:
            found.append(Outside(what, shown_shape(value), num_bytes(node), location_of(node)[0]))
    return found


def _is_logits(node: fx.Node) -> bool:
    """Whether a node is the result of a linear layer with far more outputs than inputs."""
    source = _before(node, CASTS | OPERAND_VIEWS | SOFTCAP)
    made = example(source)
    inputs = tensors_read(source)
    if name_of(source) not in MATMULS or not isinstance(made, Tensor) or len(inputs) < 2:
        return False
    vocab, width = _size(made.shape[-1]), _size(inputs[0].shape[-1])
    rows = math.prod(_size(s) for s in inputs[0].shape[:-1])
    # a weight, not scores: every row of the output has one row of the input
    is_weight = inputs[1].dim() == 2 and rows * vocab == math.prod(map(_size, made.shape))
    return is_weight and vocab >= VOCABULARY_PER_WIDTH * width


def _is_map(node: fx.Node) -> bool:
    """Whether a node is a softmax of a product of two batched tensors."""
    softmax = _before(node, CASTS | OPERAND_VIEWS | {"dropout"})
    if name_of(softmax) not in SOFTMAXES:
        return False
    scores = _before(softmax.all_input_nodes[0], BEHIND_SOFTMAX)
    inputs = tensors_read(scores)
    return name_of(scores) in MATMULS and len(inputs) > 1 and inputs[1].dim() > 2


def _before(node: fx.Node, names: set[str]) -> fx.Node:
    """Follows a chain of these operations along their first operands to its beginning."""
    while name_of(node) in names and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _size(size: Size) -> int:
    return hint_of(size) or 0
