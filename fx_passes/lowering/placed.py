"""Arranges tensors of the user's graph by the axes that their dimensions run through."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example, tensor_of
from torch_streamkl.fx_passes.reading.arrays import Dim
from torch_streamkl.fx_passes.reading.sizes import torch_size
from torch_streamkl.program.graph import Axis, Size

NO_PLACE = "an operand varies along a dimension that its place in the operator cannot have"


@dataclass(frozen=True)
class Placed:
    """Holds a tensor, and for each of its dimensions the axes that it runs through.

    A number, of Python or of the graph, has no dimensions.
    """

    node: Any
    dims: tuple[Dim, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(a for dim in self.dims for a in dim)

    @property
    def value(self) -> Any:
        """Returns the recorded value: a fake tensor, or a number."""
        return example(self.node) if isinstance(self.node, fx.Node) else self.node

    @property
    def is_number(self) -> bool:
        return not isinstance(self.value, Tensor)


class Arranging:
    """Inserts views that bring tensors into other dimensions."""

    def __init__(self, build: Builder, tensors: Sequence[fx.Node]) -> None:
        self.build, self.tensors = build, list(tensors)  # where symbolic sizes are read

    def inserted_size(self, size: Size | None) -> int | fx.Node:
        assert size is not None
        return self.build.size(torch_size(size), self.tensors)

    @property
    def device(self) -> torch.device:
        """Returns the device of the tensors."""
        for node in self.tensors:
            return tensor_of(node).device
        raise Unsupported("a mask without any tensor")

    # ------------------------------------------------------------------------- dimensions

    def split(self, x: Placed, kept: Collection[Dim] = ()) -> Placed:
        """Returns a tensor with a dimension for each axis, but for dimensions that are kept."""
        node, dims = x.node, list[Dim]()
        for dim in x.dims:
            if len(dim) < 2 or dim in kept:
                dims.append(dim)
                continue
            sizes = [self.inserted_size(a.size) for a in dim]
            at = len(dims)
            node = self.build.method("unflatten", node, at, tuple(sizes))
            dims += [(a,) for a in dim]
        return Placed(node, tuple(dims))

    def squeezed(self, x: Placed) -> Placed:
        """Returns a tensor without its dimensions of size 1."""
        node, dims = x.node, list(x.dims)
        for d in reversed(range(len(dims))):
            if not dims[d]:
                node = self.build.method("squeeze", node, d)
                del dims[d]
        return Placed(node, tuple(dims))

    def ordered(self, x: Placed, order: Sequence[Axis]) -> Placed:
        """Returns a tensor whose dimensions follow an order of axes."""
        place = {a: i for i, a in enumerate(order)}
        wanted = sorted(range(len(x.dims)), key=lambda d: place[x.dims[d][0]])
        return Placed(self.permuted(x.node, wanted), tuple(x.dims[d] for d in wanted))

    def permuted(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == list(range(len(order))):
            return x
        moved = [d for d, o in enumerate(order) if d != o]
        if len(moved) == 2:
            return self.build.method("transpose", x, *moved)
        return self.build.method("permute", x, tuple(order))

    def aligned(self, *given: Placed) -> tuple[list[Any], tuple[Dim, ...]]:
        """Returns tensors that broadcast together, and the dimensions that they have then."""
        axes = list(dict.fromkeys(a for x in given for a in x.axes))
        every = {dim for x in given for dim in x.dims if dim}
        kept = {
            dim for dim in every if all(dim in x.dims or not set(dim) & set(x.axes) for x in given)
        }
        rest = [a for a in axes if not any(a in dim for dim in kept)]
        longest = max(given, key=lambda x: len(x.axes))
        order = [*longest.axes, *(a for a in axes if a not in longest.axes)]
        dims = sorted([*kept, *((a,) for a in rest)], key=lambda dim: order.index(dim[0]))
        found = []
        for x in given:
            if x.is_number or not dims:
                found.append(self.squeezed(x).node if not x.is_number else x.node)
                continue
            x = self.ordered(self.squeezed(self.split(x, kept)), [a for d in dims for a in d])
            found.append(self._with_ones(x, dims))
        return found, tuple(dims)

    def _with_ones(self, x: Placed, dims: Sequence[Dim]) -> fx.Node:
        missing = [dim not in x.dims for dim in dims]
        leading = next((i for i, m in enumerate(missing) if not m), len(missing))
        if not any(missing[leading:]) and x.dims:
            return x.node  # broadcasting adds leading dimensions
        if not x.dims:
            return x.node
        index = tuple(None if m else slice(None) for m in missing)
        made: fx.Node = self.build.call(operator.getitem, x.node, index)
        return made

    def arranged(
        self, x: Placed, dims: Sequence[Dim], expand: Collection[int] = (), partly: str = ""
    ) -> fx.Node:
        """Returns a tensor with these dimensions.

        A dimension of whose axes it has none is of size 1, or whole if it is to be expanded. Of
        one of which it has some, the others are expanded; or ``partly`` is why it is refused.
        """
        if x.dims == tuple(dims):
            return x.node
        every = [a for dim in dims for a in dim]
        if not set(x.axes) <= set(every) or len(set(x.axes)) < len(x.axes):
            raise Unsupported(NO_PLACE)
        x = self._unsplit(self.squeezed(x), dims)
        x = self.ordered(x, every)
        present = set(x.axes)
        node, rank = x.node, 0
        groups: list[tuple[int, int]] = []
        missing: dict[int, Axis] = {}  # of dimensions that are expanded
        own = list(x.dims)
        for i, dim in enumerate(dims):
            start = rank
            is_partial = bool(present & set(dim)) and not set(dim) <= present
            if is_partial and partly:
                raise Unsupported(partly)
            for a in dim if present & set(dim) or i in expand else ():
                if own and own[0] and a == own[0][0]:
                    own.pop(0)
                    rank += 1
                elif a not in present:
                    missing[rank] = a
                    rank += 1
            groups.append((start, rank))
        for d in sorted(missing):
            node = self.build.method("unsqueeze", node, d)
        if missing:
            sizes = [
                self.inserted_size(missing[d].size) if d in missing else -1 for d in range(rank)
            ]
            node = self.build.method("expand", node, *sizes)
        return self._grouped(node, groups)

    def _unsplit(self, x: Placed, dims: Sequence[Dim]) -> Placed:
        """Splits dimensions but for those whose axes stay neighbours in one dimension."""

        def stays(dim: Dim) -> bool:
            for wanted in dims:
                if dim[0] in wanted:
                    at = wanted.index(dim[0])
                    return wanted[at : at + len(dim)] == dim
            return False

        return self.split(x, [dim for dim in x.dims if dim and stays(dim)])

    def _grouped(self, x: fx.Node, groups: Sequence[tuple[int, int]]) -> fx.Node:
        """Flattens each group of neighbouring dimensions; an empty group has size 1."""
        for start, stop in reversed(groups):
            if stop - start > 1:
                x = self.build.method("flatten", x, start, stop - 1)
            elif stop == start:
                x = self.build.method("unsqueeze", x, start)
        return x
