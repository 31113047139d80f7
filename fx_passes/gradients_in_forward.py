"""Moves gradients of an operator into its forward, if the loss allows it.

The backward operator computes the scores again: six products of an attention KL for the student,
and four of log-probabilities of entries. Four and three are enough if the weight of every value in
the loss is known in the forward. In the joint graph of forward and backward this is visible: the
gradient that reaches the values is a number (the only part that depends on the loss's own
gradient) times weights that the forward can compute. An operator "with gradients" then computes
those of the weighted sum, and the backward multiplies them by the number.

Gradients of an attention KL move on a CPU only: on a GPU, forward and backward have kernels of
their own. Those of entries do not move in float16, which may need a loss scale.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.attention import ops
from torch_streamkl.attention.gradients_op import attention_kl_with_gradients
from torch_streamkl.double_backward import double_backward_factor
from torch_streamkl.fx_passes.fx_utils.nodes import descendants, in_backward, tensor_of
from torch_streamkl.fx_passes.fx_utils.sizes import is_unknown, same_shape
from torch_streamkl.fx_passes.fx_utils.torch_names import has, optional
from torch_streamkl.registration import WITHOUT_AUTOGRAD
from torch_streamkl.topk import log_probs

log = logging.getLogger("torch_streamkl.rewrite")
WITHOUT_SORT = (
    "this torch's Inductor has no stable_topological_sort: gradients of attention KLs on "
    "a CPU, and of log-probabilities of entries, are computed in the backward, which takes longer"
)
SORT = ("torch._inductor.pattern_matcher", "stable_topological_sort")
aten, prims = torch.ops.aten, torch.ops.prims
# dimension by dimension: as good for weights that broadcast
PER_DIMENSION = {
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.permute.default,
    aten.clone.default, aten.alias.default, prims.convert_element_type.default,
    aten._to_copy.default, aten.expand.default,
}  # fmt: skip
RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
MUL = {aten.mul.Tensor, aten.mul.Scalar}
DIV = {aten.div.Tensor, aten.div.Scalar}


@dataclass(frozen=True)
class Operator:
    """Describes an operator whose backward can move: the gradient comes first, then statistics."""

    forward: Any
    backward: Any
    both: Any  # takes weights, needs_grad and the forward's arguments; gradients come last
    num_statistics: int
    is_eligible: Callable[[Tensor], bool]  # of its first input


OPERATORS = [
    Operator(
        ops.attention_kl, ops.attention_kl_backward, attention_kl_with_gradients, 2,
        lambda x: x.device.type == "cpu",
    ),
    Operator(
        log_probs.entry_log_probs, log_probs.entry_log_probs_backward,
        log_probs.entry_log_probs_with_gradients, 1, lambda x: x.dtype != torch.float16,
    ),
]  # fmt: skip
BACKWARD = {x: o for o in OPERATORS for x in (o.backward, WITHOUT_AUTOGRAD[o.backward])}


@dataclass(frozen=True)
class Weighted:
    """Represents a gradient as a number times weights that broadcast to its shape; None is 1.

    Weights have as many dimensions as the gradient.
    """

    number: fx.Node
    weight: fx.Node | None = None


def compute_in_forward(graph: fx.Graph) -> int:
    """Rewrites the joint graph if possible; returns the number of losses."""
    sort = topological_sort()
    if sort is None:  # the report says so
        return 0
    late = in_backward(graph)
    pairs = [
        (forward, node)
        for node in graph.nodes
        if node.target in BACKWARD and (forward := _forward_of(node)) is not None
    ]
    replaced = sum(_try_to_replace(forward, backward, late) for forward, backward in pairs)
    if replaced:
        sort(graph)
        graph.eliminate_dead_code()
    return replaced


def can_sort() -> bool:
    """Whether this torch has `topological_sort` where it is expected; imports nothing."""
    return has(*SORT)


def topological_sort() -> Any:
    """Returns Inductor's function that orders a graph, None if this torch has it elsewhere."""
    return optional(*SORT)


def _forward_of(backward: fx.Node) -> fx.Node | None:
    """Returns the forward call of a backward, if work may move into it."""
    statistics: Any = backward.args[1]
    if statistics.target is not operator.getitem:
        return None
    forward: fx.Node = statistics.args[0]
    found = BACKWARD[backward.target]
    known = found.forward, WITHOUT_AUTOGRAD[found.forward]
    if forward.target not in known or "recompute" in forward.meta:
        return None
    calls = [
        user
        for part in forward.users
        for user in part.users
        if user.target in BACKWARD and part.args[1] == 1
    ]
    is_eligible = found.is_eligible(tensor_of(forward.args[0]))
    return forward if is_eligible and len(calls) == 1 else None


def _try_to_replace(forward: fx.Node, backward: fx.Node, late: set[fx.Node]) -> bool:
    try:
        return _replace(forward, backward, late)
    except Exception:  # what was added has no users: the graph computes what it did
        log.warning("gradients of a loss stay in the backward", exc_info=True)
        return False


def _replace(forward: fx.Node, backward: fx.Node, late: set[fx.Node]) -> bool:
    found = BACKWARD[backward.target]
    first = 1 + found.num_statistics
    grad, needs_grad, given = backward.args[0], backward.args[first], backward.args[first + 1 :]
    assert isinstance(grad, fx.Node)
    graph, after_forward = forward.graph, descendants([forward])
    too_late = late | after_forward
    inputs: list[fx.Node] = []
    fx.map_arg(given, inputs.append)
    if not too_late.isdisjoint(inputs):
        return False
    if any(is_unknown(size) for size in tensor_of(grad).shape):
        return False  # there may be no row: the number is infinite then, and the gradients are 0
    with graph.inserting_before(backward):
        factors = _Factors(graph, late, after_forward).of(grad)
        if factors is None or tensor_of(factors.number).dim() != 0:
            return False
        number = factors.number
        if kept := _read_inputs(given, needs_grad):
            once = _call(graph, double_backward_factor, number, kept)  # see double_backward.py
            number = _call(graph, aten.mul.Tensor, number, once)
        call = _call(graph, found.both, factors.weight, needs_grad, *given)
        results: dict[fx.Node, fx.Node] = {}
        for part in backward.users:
            index = part.args[1]
            assert isinstance(index, int)
            result = _call(graph, operator.getitem, call, first + index)
            if needs_grad[index]:  # type: ignore[index]  # a list of bools
                result = _call(graph, aten.mul.Tensor, result, number)
                dtype = tensor_of(part).dtype
                if tensor_of(result).dtype != dtype:
                    result = _call(graph, prims.convert_element_type.default, result, dtype)
            results[part] = result
    for part, result in results.items():
        part.replace_all_uses_with(result)
        graph.erase_node(part)
    graph.erase_node(backward)
    forward.replace_all_uses_with(call)
    graph.erase_node(forward)
    return True


class _Factors:
    """Splits a gradient into a number and weights; adds the nodes that make them."""

    def __init__(self, graph: fx.Graph, late: set[fx.Node], after_forward: set[fx.Node]) -> None:
        self.graph, self.late, self.after_forward = graph, late, after_forward

    def of(self, node: Any) -> Weighted | None:
        """Returns the factors of a node that depends on the loss's gradient."""
        if not isinstance(node, fx.Node) or node not in self.late:
            return None
        if tensor_of(node).dim() == 0:
            return Weighted(node)
        if node.target in MUL:
            first = isinstance(node.args[0], fx.Node) and node.args[0] in self.late
            given = node.args if first else reversed(node.args)
            return self._scaled(node, aten.mul.Tensor, *given)
        if node.target in DIV and len(node.args) == 2:
            return self._scaled(node, aten.div.Tensor, *node.args)
        if node.target is aten.where.self:
            condition, x, other = node.args
            if _is_zero(x):
                return self._selected(node, condition, other, False)
            return self._selected(node, condition, x, True) if _is_zero(other) else None
        if node.target is aten.masked_fill.Scalar:
            x, condition, value = node.args
            return self._selected(node, condition, x, False) if value == 0 else None
        found = self.of(node.args[0]) if node.args else None
        if found is None:
            return None
        if node.target is aten.neg.default:
            return Weighted(self._call(aten.neg.default, found.number), found.weight)
        if node.target not in PER_DIMENSION | RESHAPES:
            return None
        weight = found.weight
        if weight is None:
            return found
        if node.target in RESHAPES and not same_shape(
            tensor_of(weight).shape, tensor_of(node.args[0]).shape
        ):
            return None  # it broadcasts
        weight = self._call(node.target, weight, *node.args[1:], **node.kwargs)
        return Weighted(found.number, weight)

    def _as_weight(self, x: fx.Node, node: fx.Node) -> fx.Node:
        """Converts a factor of a gradient, such as a mask, to the dtype and number of dimensions
        of the gradient.
        """
        if not tensor_of(x).dtype.is_floating_point:
            x = self._call(prims.convert_element_type.default, x, tensor_of(node).dtype)
        return self._with_dimensions_of(x, node)

    def _with_dimensions_of(self, x: fx.Node, node: fx.Node) -> fx.Node:
        for _ in range(tensor_of(node).dim() - tensor_of(x).dim()):
            x = self._call(aten.unsqueeze.default, x, 0)
        return x

    def _scaled(self, node: fx.Node, by: Any, x: Any, other: Any) -> Weighted | None:
        """Returns x times another factor, or divided by it."""
        found = self.of(x)
        if found is None or other in self.late:
            return None
        if _is_number(other):
            return Weighted(self._call(by, found.number, other), found.weight)
        if other in self.after_forward:
            return None
        weight = self._as_weight(other, node)
        if by is aten.div.Tensor:
            weight = self._call(aten.reciprocal.default, weight)
        if found.weight is not None:
            weight = self._call(aten.mul.Tensor, found.weight, weight)
        return Weighted(found.number, weight)

    def _selected(self, node: fx.Node, condition: Any, x: Any, is_where: bool) -> Weighted | None:
        """Returns x with 0 where a condition does not select it."""
        if condition in self.late | self.after_forward:
            return None
        found = self.of(x)
        if found is None:
            return None
        if not is_where:
            condition = self._call(aten.logical_not.default, condition)
        holds = self._as_weight(condition, node)
        if found.weight is not None:  # it may be infinite where the condition does not hold
            zero = self._call(aten.mul.Tensor, holds, 0.0)
            condition = self._with_dimensions_of(condition, node)
            holds = self._call(aten.where.self, condition, found.weight, zero)
        return Weighted(found.number, holds)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return _call(self.graph, target, *args, **kwargs)


def _read_inputs(given: Any, needs_grad: Any) -> list[fx.Node]:
    """Lists the inputs of the graph that backwards of the two products read."""
    # of a pair of operands, such as q and k of both sides, each gradient reads the other one
    read = [given[i] for i, needs in enumerate(needs_grad) if needs and needs_grad[i ^ 1]]
    return list(dict.fromkeys(x for n in read if (x := _viewed(n)) is not None))


def _viewed(node: fx.Node) -> fx.Node | None:
    """Returns the graph input that an operand is a reshaped view of."""
    while node.target in PER_DIMENSION | RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node if node.op == "placeholder" else None


def _is_number(x: Any) -> bool:
    """Whether a value is a constant, a size, or a tensor without dimensions."""
    if not isinstance(x, fx.Node):
        return True
    value = x.meta["val"]
    return not isinstance(value, Tensor) or value.dim() == 0


def _is_zero(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.target in (aten.full.default, aten.full_like.default):
        return bool(node.args[1] == 0)
    return node.target is aten.scalar_tensor.default and bool(node.args[0] == 0)


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Inserts a node with the fake value of its result, which the partitioner needs."""
    node = graph.call_function(target, args, kwargs)
    values: Any = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = next(n for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)).meta["val"]
    with mode.fake_mode:
        node.meta["val"] = target(*values[0], **values[1])
    return node
