"""Rewrites a weighted sum of `linear_kl` rows to `linear_kl_sum`, with gradients in its forward.

The per-token operator computes the logits again in the backward: six matmuls for the student. Four
are enough if the weight of each token in the loss is known in the forward. It is known if the
tokens' values pass only through views, casts, row weights and row masks into a sum or mean. The
same operations on ones give the weights.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder
from torch_streamkl.fx_passes.fx_utils.mutation import under_no_grad, written_memory
from torch_streamkl.fx_passes.fx_utils.nodes import (
    example,
    following,
    is_call,
    memory_of,
    name_of,
    needs_gradient,
    nodes_in,
    storage_of,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import (
    COPIES,
    DTYPES,
    PERMUTATIONS,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
)
from torch_streamkl.fx_passes.fx_utils.sizes import is_unknown, provably_equal, same_shape
from torch_streamkl.fx_passes.lowering.sites import SITE
from torch_streamkl.linear import ops as linear_ops

SAME_SHAPE = COPIES | DTYPES
VIEWS = RESHAPES | SAME_SHAPE
SCALINGS = PRODUCTS | QUOTIENTS | {"neg", "mul_", "div_", "imul", "itruediv"}
REDUCTIONS = {"sum", "mean"}
LEAST_FACTOR = 1e-12
GRADIENTS = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight")
BIASES = ("student_bias", "teacher_bias")


@dataclass(frozen=True)
class Chain:
    """Collects the operations on the tokens' values until they are a scalar.

    The scalar may be multiplied by numbers, and by tensors such as a mask's sum. They are part of
    the weights, so that the gradients that the forward computes are those of the loss: the
    backward has nothing to multiply them by.
    """

    steps: tuple[fx.Node, ...]
    total: fx.Node  # the sum or mean
    scalings: tuple[fx.Node, ...] = ()  # by ``factor`` and ``tensors`` together
    factor: float = 1.0
    tensors: tuple[tuple[fx.Node, bool], ...] = ()  # and whether they divide

    @property
    def result(self) -> fx.Node:
        """Returns what the operator's sum takes the place of."""
        return (self.total, *self.scalings)[-1]


def sum_in_forward(graph: fx.Graph, builder: MakeBuilder) -> list[fx.Node]:
    """Replaces sums that can be computed in the forward; returns their nodes."""
    calls = [n for n in graph.nodes if n.target is linear_ops.linear_kl]
    weights = [_storage(n.args[1]) for n in calls]
    off = under_no_grad(graph)
    replaced = []
    for call, weight in zip(calls, weights, strict=True):
        # each sum holds a gradient of the weight from the forward to the backward: one is enough
        if weights.count(weight) > 1 or not _is_eligible(call):
            continue
        chain = _chain(call, off)
        if chain is not None and not _is_written_meanwhile(call, chain):
            replaced.append(_replace(call, chain, builder(chain.result)))
    return replaced


def _is_written_meanwhile(call: fx.Node, chain: Chain) -> bool:
    """Whether weights or masks change after the steps: the sum and the backward read them."""
    if not chain.steps:
        return False
    carried = {*call.users, *chain.steps}
    read = (a for n in chain.steps for a in n.all_input_nodes if a not in carried)
    return _are_written(read, chain.steps[0].prev)


def _are_written(tensors: Iterable[fx.Node], after: fx.Node) -> bool:
    memory = memory_of(tensors)
    return any(memory & written_memory(n) for n in following(after))


def _is_eligible(call: fx.Node) -> bool:
    dtypes = {tensor_of(call.args[i]).dtype for i in range(4)}
    return torch.float16 not in dtypes and any(_needs_grad(call))


def _needs_grad(call: fx.Node) -> list[bool]:
    tensors = [*call.args[:4], *(call.kwargs.get(name) for name in BIASES)]
    adapters = [call.kwargs.get(name) for name in linear_ops.ADAPTER_NAMES]
    tensors += adapters if any(adapters) else []
    return [needs_gradient(x) for x in tensors]


def _chain(call: fx.Node, off: Collection[fx.Node]) -> Chain | None:
    """Returns the operations from the operator's rows to a scalar; None if not linear in them.

    ``off`` are those that autograd does not record: of a view, its fake value does not say so.
    """
    if len(call.users) != 1:
        return None
    (current,) = call.users
    steps: list[fx.Node] = []
    while len(current.users) == 1:
        previous, (current,) = current, current.users
        name = name_of(current)
        if name in REDUCTIONS:
            is_whole = _reduces_all(current, previous)
            return _scaled(tuple(steps), current, off) if is_whole else None
        if current in off or not _is_linear(current, previous):
            return None
        steps.append(current)
    return None


def _scaled(steps: tuple[fx.Node, ...], total: fx.Node, off: Collection[fx.Node]) -> Chain:
    """Returns a chain with what its sum is multiplied by, before others read it."""
    scalings: list[fx.Node] = []
    tensors: list[tuple[fx.Node, bool]] = []
    factor, current = 1.0, total
    while len(current.users) == 1:
        previous, (current,) = current, current.users
        number, is_quotient = _number(current, previous), name_of(current) in QUOTIENTS
        if number is None or current in off or tensor_of(current).dtype != tensor_of(total).dtype:
            break
        if isinstance(number, fx.Node):
            if _are_written([number], current):
                break
            tensors.append((number, is_quotient))
        else:
            by = 1.0 / number if is_quotient else number
            if not LEAST_FACTOR <= abs(factor * by) <= 1.0 / LEAST_FACTOR:
                break  # the weights of rows would underflow or be infinite
            factor *= by
        scalings.append(current)
    return Chain(steps, total, tuple(scalings), factor, tuple(tensors))


def _number(node: fx.Node, x: fx.Node) -> fx.Node | float | None:
    """Returns the number other than 0, or the tensor, that a node multiplies or divides x by."""
    name = name_of(node)
    is_scaling = is_call(node) and name in PRODUCTS | QUOTIENTS and not node.kwargs
    if not is_scaling or len(node.args) != 2 or needs_gradient(node) != needs_gradient(x):
        return None
    given = [a for a in node.args if a is not x]
    if len(given) != 1 or (name in QUOTIENTS and node.args[0] is not x):
        return None
    number = given[0]
    if isinstance(number, fx.Node):
        return number if _is_scalar(number, tensor_of(x)) else None
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return None
    return float(number) or None


def _is_scalar(node: fx.Node, x: Tensor) -> bool:
    """Whether a node is a tensor of one number without a gradient, whose quotients are exact.

    In 16 bits the weight of every row would be rounded as the loss is.
    """
    value = example(node)
    if not isinstance(value, Tensor) or value.dim() != 0 or needs_gradient(node):
        return False
    if value.dtype in (torch.bool, torch.float16):  # whose range has no LEAST_FACTOR
        return False
    return value.device == x.device and x.dtype.itemsize > 2


def _is_linear(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node is a view of ``x``, x times weights of its shape, or x where a mask holds."""
    name, others = name_of(node), [a for a in node.all_input_nodes if a is not x]
    value = example(node)
    if not isinstance(value, Tensor) or not is_call(node):
        return False
    if nodes_in(node.args).count(x) != 1 or nodes_in(node.kwargs):
        return False  # x * x, whichever of them is given by name; and ``out=``
    if not value.dtype.is_floating_point or any(needs_gradient(a) for a in others):
        return False
    if needs_gradient(node) != needs_gradient(x):
        return False  # under no_grad
    if name in PERMUTATIONS and node.kwargs:
        return False  # `_undone` reads the dimensions by position
    if name in VIEWS | PERMUTATIONS:
        return node.args[0] is x and provably_equal(value.numel(), tensor_of(x).numel())
    if name not in (*SCALINGS, "masked_fill", "masked_fill_", "where") or not same_shape(
        value.shape, tensor_of(x).shape
    ):
        return False
    if name in SCALINGS:
        in_numerator = node.args[0] is x or name in PRODUCTS
        return in_numerator and "rounding_mode" not in node.kwargs
    if name in ("masked_fill", "masked_fill_"):
        return node.args[0] is x and node.args[2:] == (0,)
    if name == "where":
        branches = list(node.args[1:])
        return len(branches) == 2 and node.args[0] is not x and x in branches and 0 in branches
    return False


def _reduces_all(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node is a sum or mean over every dimension."""
    whole = node.args[:1] == (x,) and tensor_of(node).dim() == 0 and "dtype" not in node.kwargs
    return whole and needs_gradient(node) == needs_gradient(x)


def _replace(call: fx.Node, chain: Chain, build: Builder) -> fx.Node:
    ones = _ones(call, build)
    factors = _factors(chain, build)
    weight = _row_weights(call, chain, ones, build)
    for factor in factors:
        weight = build.call(factor.function, weight, factor.of_rows)
    needs_grad = _needs_grad(call)
    inputs = dict(zip(GRADIENTS, call.args[:4], strict=True)) | dict(call.kwargs)
    result = build.call(
        linear_ops.linear_kl_sum, **inputs, row_weight=weight, needs_grad=needs_grad
    )
    result.meta[SITE] = call.meta[SITE]
    total = build.call(operator.getitem, result, 0)
    if is_unknown(tensor_of(ones).shape[0]):
        total = _unless_no_row(total, chain, ones, build)
    total = build.cast(total, tensor_of(chain.total).dtype)
    for factor in factors:
        total = build.call(factor.function, total, factor.of_sum)
    chain.result.replace_all_uses_with(total)
    for node in (
        *reversed(chain.scalings), chain.total, *reversed(chain.steps), *call.users, call
    ):  # fmt: skip
        node.graph.erase_node(node)
    return total


def _unless_no_row(total: fx.Node, chain: Chain, ones: fx.Node, build: Builder) -> fx.Node:
    """Makes the mean NaN if there is no row; the head then gets no gradient.

    The gradients that the sum keeps are 0 then, and what they are multiplied with, such as the
    gradient of a quotient by the number of rows, may be infinite.
    """
    of_none = math.nan if name_of(chain.total) == "mean" else 0.0
    return build.call(torch.where, build.call(torch.any, ones), total, of_none)


def _ones(call: fx.Node, build: Builder) -> fx.Node:
    """Inserts a one for each row."""
    (rows,) = call.users
    value = tensor_of(rows)
    size = value.shape[0]
    count = size if isinstance(size, int) else build.method("size", call.args[0], 0)
    return build.call(torch.ones, (count,), dtype=value.dtype, device=value.device)


def _row_weights(call: fx.Node, chain: Chain, ones: fx.Node, build: Builder) -> fx.Node:
    """Applies the steps to ones, which gives the weights of rows in their order."""
    (rows,) = call.users
    copies = {rows: ones}
    current = ones
    sources = []
    for node in chain.steps:
        sources.append(current)
        current = build.copy(node, copies)
        copies[node] = current
    if name_of(chain.total) == "mean":
        current = build.call(torch.div, current, build.method("numel", current))
    if chain.factor != 1.0:
        current = build.call(torch.mul, current, chain.factor)
    if not any(name_of(node) in PERMUTATIONS for node in chain.steps):
        return build.method("flatten", current)
    for node, source in reversed(list(zip(chain.steps, sources, strict=True))):
        if name_of(node) in PERMUTATIONS:
            current = _undone(build, node, current)
        elif name_of(node) in VIEWS - SAME_SHAPE:
            current = build.method("reshape_as", current, source)
    return current


@dataclass(frozen=True)
class _Factor:
    """Holds what multiplies or divides the weights of the rows, and what does the sum itself."""

    function: Callable[..., Tensor]
    of_rows: fx.Node
    of_sum: fx.Node


def _factors(chain: Chain, build: Builder) -> list[_Factor]:
    """Gives tensors to the rows while their product is in range; the sum has 1 in their place.

    From the tensor on that takes it out of range, the sum itself is multiplied. The weights of
    rows would make other values of a sum that is divided by 0, infinity or NaN.
    """
    if not chain.tensors:
        return []
    total, found = tensor_of(chain.total), []
    product = build.call(torch.ones, (), dtype=total.dtype, device=total.device)
    in_range = build.call(torch.ones, (), dtype=torch.bool, device=total.device)
    for tensor, divides in chain.tensors:
        function: Callable[..., Tensor] = torch.div if divides else torch.mul
        product = build.call(function, product, tensor)
        size = build.call(torch.abs, product)
        for compare, bound in ((torch.ge, LEAST_FACTOR), (torch.le, 1.0 / LEAST_FACTOR)):
            inside = build.call(compare, size, bound)
            in_range = build.call(torch.logical_and, in_range, inside)
        of_rows = build.call(torch.where, in_range, tensor, 1)
        of_sum = build.call(torch.where, in_range, 1, tensor)
        found.append(_Factor(function, of_rows, of_sum))
    return found


def _undone(build: Builder, node: fx.Node, x: fx.Node) -> fx.Node:
    if name_of(node) != "permute":
        return build.method(name_of(node), x, *node.args[1:])
    given: Any = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
    order = [int(d) % len(given) for d in given]
    return build.method("permute", x, tuple(order.index(d) for d in range(len(order))))


def _storage(node: Any) -> int:
    found = storage_of(node)
    assert found is not None
    return found
