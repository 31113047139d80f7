"""Represents a reference to a tensor of the user's graph, and whether gradient flows to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import fx

from torch_streamkl.fx_passes.domain.layout import Layout, Piece
from torch_streamkl.fx_passes.domain.row_selection import RowSelection
from torch_streamkl.fx_passes.fx_utils.sizes import Size
from torch_streamkl.program.graph import Node

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """Describes the part of a tensor that is used: "narrow", "select", or "rows".

    "rows" is a ``selection`` of rows from ``num_dims`` dimensions that begin with ``dim``.
    """

    kind: str
    dim: int
    start: Size = 0
    length: Size = 0
    selection: RowSelection | None = None
    num_dims: int = 0


@dataclass(frozen=True)
class TensorRef:
    """Refers to a tensor: steps to the used part, places of its dimensions, and gradient flow.

    The layout places axes of the scores (and contracted axes, numbered from CONTRACTED down) in
    the dimensions left after the steps. An axis of the scores that it lacks is broadcast.

    NOTE [Gradient flow]
    ``grad`` says whether a gradient that reaches the value that holds this reference flows on to
    the tensor. It is part of identity: two values that differ in it are different values, though
    they hold the same numbers (`same_numbers`). A reference is made with what the user's tensor
    says of itself; the interpreter then holds every node's value against what the node recorded:
    where the node requires no gradient (no_grad, detach), all references of its value are cut, at
    whatever edge that happens. `lowering.operands.materialise` is the one place where a reference
    becomes a node, and detaches it accordingly.
    """

    node: fx.Node
    layout: Layout = ()
    steps: tuple[Step, ...] = ()
    grad: bool = False


def map_refs(value: T, change: Callable[[TensorRef], TensorRef]) -> T:
    """Returns the value with every reference in it changed."""
    if isinstance(value, TensorRef):
        return change(value)  # type: ignore[return-value]  # T is TensorRef
    if isinstance(value, (tuple, frozenset)):
        return type(value)(map_refs(x, change) for x in value)
    if not _may_hold_refs(value):
        return value
    changes = {}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]  # a dataclass instance
        old: Any = getattr(value, field.name)
        new = map_refs(old, change)
        if new != old:
            changes[field.name] = new
    return replace(value, **changes) if changes else value  # type: ignore[type-var]


def refs_in(value: object) -> Iterator[TensorRef]:
    """Yields all references in a value, in the order of its fields."""
    if isinstance(value, TensorRef):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for x in value:
            yield from refs_in(x)
    elif _may_hold_refs(value):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]  # a dataclass instance
            yield from refs_in(getattr(value, field.name))


def _may_hold_refs(value: object) -> bool:
    is_value = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_value and not isinstance(value, (Node, Piece, Step))


def grad_flows(value: object) -> bool:
    """Returns whether a gradient of the value reaches any tensor."""
    return any(ref.grad for ref in refs_in(value))


def cut(value: T) -> T:
    """Returns the value without gradient, as after detach or under no_grad."""
    return map_refs(value, lambda ref: replace(ref, grad=False)) if grad_flows(value) else value


def same_numbers(a: object, b: object) -> bool:
    """Returns whether two values are equal, up to gradient flow."""
    return cut(a) == cut(b)
