"""Draws random values for the inputs of a region, such as a real program could have.

Every tensor has the shape, strides, dtype, device and gradient flag that the graph recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import (
    argument,
    example,
    held_by,
    is_parameter,
    name_of,
)
from torch_streamkl.fx_passes.fx_utils.torch_names import is_traceable_wrapper_subclass
from torch_streamkl.fx_passes.validation.options import NotChecked
from torch_streamkl.fx_passes.validation.sizes import Sizes


@dataclass(frozen=True)
class Draw:
    """Describes one way to draw the inputs. If a program cannot run on one, the next is tried."""

    special: bool = True  # integers that the program compares with, such as -100
    positive: bool = False  # no negative numbers: logarithms and roots of inputs
    finite: bool = False  # see NOTE [Programs that give NaN]
    first: bool | None = None  # what the first entries of masks are; None for a diagonal of each


# NOTE [Programs that give NaN]
# ``kl_div(log_p, q)`` of masked scores is 0 * inf where a mask holds, so the user's code has no
# value to compare with. Mathematics has one, the limit, and that is what an operator gives. So
# the user's code is run with a large finite number in place of -inf. Rows without any key then
# differ, and which rows these are depends on how masks are combined: of three draws with
# different first entries one must agree. Code that looks for infinite numbers finds none then.
PLAIN = (Draw(), Draw(special=False), Draw(special=False, positive=True))
ASKS_FOR_INFINITY = {"isfinite", "isinf", "isneginf", "isposinf", "nan_to_num", "nan_to_num_"}
FINITE = tuple(Draw(special=False, finite=True, first=first) for first in (None, True, False))


_COMPARISONS = {"eq", "ne", "__eq__", "__ne__"}
_ORDERS = {"lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__"}


@dataclass
class IntegerRole:
    """Describes what the program does with an integer input."""

    limit: int | None = None  # the values are indices below it
    special: set[int] = field(default_factory=set)  # values that the program asks for
    ordered: int | None = None  # it is compared with positions below it: a length


def values_of(
    leaves: Iterable[fx.Node], nodes: Iterable[fx.Node], sizes: Sizes, draw: Draw, owner: Any
) -> dict[str, Any]:
    """Draws a value for every leaf; the same draw gives the same values."""
    nodes = list(nodes)
    found: dict[str, Any] = {}
    for index, leaf in enumerate(leaves):
        value = example(leaf)
        if is_parameter(leaf) and isinstance(value, Tensor) and "example_value" not in leaf.meta:
            value = value.detach()  # exported: the rest of such a graph records no gradients
        if sizes.is_known(value):
            found[leaf.name] = sizes.known(value)
        elif leaf.op == "get_attr" and not is_parameter(leaf):
            found[leaf.name] = _constant(owner, leaf)
        elif isinstance(value, Tensor):
            role = _role_of(leaf, nodes, sizes) if _is_integer(value.dtype) else IntegerRole()
            found[leaf.name] = _random(value, sizes, draw, index, role)
        else:
            raise NotChecked(f"an input that is no tensor: {type(value).__name__}")
    return found


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _constant(owner: Any, leaf: fx.Node) -> Any:
    value = held_by(owner, leaf)
    if not isinstance(value, Tensor) or isinstance(value, torch._subclasses.FakeTensor):
        raise NotChecked(f"the constant {leaf.target} has no values yet")
    copy = value.detach().clone(memory_format=torch.preserve_format)
    return copy.requires_grad_(value.requires_grad)


def _random(value: Tensor, sizes: Sizes, draw: Draw, index: int, role: IntegerRole) -> Tensor:
    if is_traceable_wrapper_subclass(value) or value.layout != torch.strided:
        raise NotChecked(f"an input is a {type(value).__name__} of layout {value.layout}")
    shape, strides = sizes.numbers(value.shape), sizes.numbers(value.stride())
    generator = torch.Generator(value.device).manual_seed(1000 + index)
    made = _entries(shape, value.dtype, value.device, generator, draw, role)
    numel = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = torch.zeros(numel if all(shape) else 0, dtype=value.dtype, device=value.device)
    result = memory.as_strided(shape, strides)
    if 0 in (s for n, s in zip(shape, strides, strict=True) if n > 1):
        # an expanded tensor: one entry for all that share memory
        first = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
        result[first].copy_(made[first])
    else:
        result.copy_(made)
    return result.requires_grad_(value.requires_grad)


def _entries(
    shape: list[int],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    draw: Draw,
    role: IntegerRole,
) -> Tensor:
    def uniform() -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float32)

    if dtype == torch.bool:
        return _mask(shape, uniform(), draw.first)
    if dtype.is_complex:
        return torch.complex(uniform(), uniform()).to(dtype)
    if not dtype.is_floating_point:
        return _integers(shape, dtype, uniform(), draw, role)
    if sum(n > 1 for n in shape) <= 1:
        # scales, temperatures, row weights, biases: not near 0, since they may be divided by
        return (0.5 + uniform()).to(dtype)
    normal = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    # products along the last dimension have a standard deviation of about 2 at most
    normal *= min(1.0, 1.4 * shape[-1] ** -0.25)
    return (normal.abs() + 0.01 if draw.positive else normal).to(dtype)


def _mask(shape: list[int], uniform: Tensor, first: bool | None) -> Tensor:
    """Draws a random mask with a True and a False in each row and column."""
    mask = uniform > 0.3
    if first is not None:
        for dim in range(max(0, len(shape) - 2), len(shape)):
            mask.select(dim, 0).fill_(first)
        return mask
    where = _diagonals(shape, uniform.device)
    if where is not None:
        position, size = where
        mask = torch.where(position == size // 2, False, mask)
        mask = torch.where(position == 0, True, mask)
    return mask


def _diagonals(shape: list[int], device: torch.device) -> tuple[Tensor, int] | None:
    """Adds the last two indices modulo the size of the longer dimension."""
    if not shape or max(shape[-2:]) < 2:
        return None
    column = torch.arange(shape[-1], device=device)
    if len(shape) == 1:
        return column.expand(shape), shape[-1]
    row = torch.arange(shape[-2], device=device)
    size = min(n for n in shape[-2:] if n > 1)
    return ((row[:, None] + column) % size).expand(shape), size


def _integers(
    shape: list[int], dtype: torch.dtype, uniform: Tensor, draw: Draw, role: IntegerRole
) -> Tensor:
    low = 0
    high = 2 if role.limit is None else role.limit
    if role.limit is None and role.ordered is not None:
        low, high = 1, role.ordered + 1
    largest = torch.iinfo(dtype).max
    values = (low + uniform.double() * max(1, high - low)).floor().clamp(max=largest)
    result = values.to(dtype)
    if role.limit is None and role.ordered is None:
        # a mask of zeros and ones: some of each in each row
        result = _mask(shape, uniform, draw.first).to(dtype)
    if draw.special:
        smallest = torch.iinfo(dtype).min
        for rank, special in enumerate(sorted(role.special)):
            if smallest <= special <= largest and special not in (0, 1):
                chosen = (uniform * 997.0 + 0.37 * rank) % 1.0 < 0.2
                result = torch.where(chosen, special, result)
    return result


def _role_of(leaf: fx.Node, nodes: list[fx.Node], sizes: Sizes) -> IntegerRole:
    """Follows an integer input through views and casts to its uses."""
    role = IntegerRole()
    same: set[fx.Node | str] = {leaf.name}
    for node in nodes:
        inputs = [a for a in node.all_input_nodes if a.name in same]
        if not inputs:
            continue
        name = name_of(node)
        if name in ("cross_entropy", "nll_loss", "cross_entropy_loss"):
            logits = _shape(node.args[0], sizes)
            _at_most(role, logits[1 if len(logits) > 1 else 0] if logits else None)
            ignored = node.kwargs.get("ignore_index", -100)
            role.special |= {ignored} if isinstance(ignored, int) else set()
        elif name in ("gather", "take_along_dim", "index_select", "scatter", "index_add"):
            source, dim = _shape(node.args[0], sizes), node.args[1]
            if name == "take_along_dim":
                dim = argument(node, 2, "dim", 0)
            _at_most(role, source[dim] if source and isinstance(dim, int) else None)
        elif name in ("embedding", "embedding_bag"):
            weights = [_shape(a, sizes) for a in node.all_input_nodes if a.name not in same]
            _at_most(role, weights[0][0] if weights and weights[0] else None)
        elif name == "one_hot":
            count = argument(node, 1, "num_classes", -1)
            _at_most(role, count if isinstance(count, int) and count > 0 else None)
        elif name == "getitem" and node.args[0] not in inputs:
            source = _shape(node.args[0], sizes)
            places = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            for place, index in enumerate(places):
                if index in inputs and source and Ellipsis not in places:
                    _at_most(role, source[min(place, len(source) - 1)])
        elif name in _COMPARISONS | _ORDERS:
            _compared(role, node, inputs, name in _ORDERS, sizes)
        elif isinstance(value := example(node), Tensor) and _is_integer(value.dtype):
            same.add(node.name)
    return role


def _compared(
    role: IntegerRole, node: fx.Node, inputs: list[fx.Node], is_order: bool, sizes: Sizes
) -> None:
    for other in node.args:
        if isinstance(other, (int, float)) and math.isfinite(other):
            role.special |= {int(other), int(other) + 1} if is_order else {int(other)}
        elif isinstance(other, fx.Node) and other not in inputs and is_order:
            shape = _shape(other, sizes)
            if shape and not any(a.op == "placeholder" for a in other.all_input_nodes):
                role.ordered = max(shape)


def _at_most(role: IntegerRole, limit: int | None) -> None:
    if limit is not None:
        role.limit = limit if role.limit is None else min(limit, role.limit)


def _shape(node: Any, sizes: Sizes) -> list[int]:
    value = example(node) if isinstance(node, fx.Node) else None
    return sizes.numbers(value.shape) if isinstance(value, Tensor) else []
