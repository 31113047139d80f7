"""Follows writes in place: a write is a new value of the tensor, and of what it is a view of.

NOTE [Writes]
A write has no data edge to those who read a view or the base of the tensor. So memory has a
version, the number of writes to it so far, and each node the version for which its array holds.

- A write through a view gives the base ``where(position in the view, new, old)``; what other views
  of it hold is computed again by their rules when they are read.
- What cannot be followed is captured: ``Source(node, version)`` is that tensor at that time.
- A tensor that the graph does not make is captured after a write: its operators read it then.
- So is one whose new value is computed from a captured old one, which is in no memory any more.
  Where a write leaves a captured value as it was, memory still has it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import storage_of
from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.arrays import Array, NoView
from torch_streamkl.fx_passes.reading.positions import nodes_read
from torch_streamkl.fx_passes.reading.registry import Call, NoRule, Result
from torch_streamkl.fx_passes.reading.rules.views import (
    ORDERS,
    RESHAPES,
    SAME,
    order_of,
    part_of,
    part_written,
)

if TYPE_CHECKING:
    from torch_streamkl.fx_passes.reading.reader import Reader

aten = torch.ops.aten
DETACHED = (aten.detach.default, aten.detach_.default)
STALE = "a tensor that is modified in place through a view or in a list is used later"


class Writes:
    """Holds the versions of memory, and the arrays of tensors in it at this time."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._versions: dict[int | None, int] = {}
        self._made: dict[fx.Node, int] = {}  # the version for which an array holds
        self._current: dict[fx.Node, Array] = {}  # of nodes that were written since they ran
        self._parent: dict[fx.Node, fx.Node] = {}
        self.flowing = set[int | None]()  # memory to which something with a gradient was written

    def version(self, node: fx.Node) -> int:
        """Returns how many writes to a node's memory there were."""
        return self._versions.get(storage_of(node), 0)

    def note(self, node: fx.Node) -> None:
        """Notes a node that has run."""
        storage = storage_of(node)
        if storage is None or storage not in self.reader.written_storages:
            return
        self._made[node] = self._versions.get(storage, 0)
        same = [a for a in node.all_input_nodes if a in self._made and storage_of(a) == storage]
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            same = [a for a in node.args[0].all_input_nodes if storage_of(a) == storage]
        if same:
            self._parent[node] = same[0]

    # ------------------------------------------------------------------------- reads

    def current(self, node: fx.Node) -> Array:
        """Returns a tensor as it is at this time."""
        found = self._current.get(node)
        if found is None:
            result = self.reader.reading.arrays.get(node)
            if not isinstance(result, Array):
                raise NoRule("an argument is several tensors")
            found = result
        if node not in self._made or self._made[node] == self.version(node):
            return found
        chain = [node]
        while self._made[chain[-1]] != self.version(node) and chain[-1] in self._parent:
            chain.append(self._parent[chain[-1]])
        for view in reversed(chain):
            if self._made[view] != self.version(node):
                self._keep(view, self._again(view))
        return self._current[node]

    def _again(self, view: fx.Node) -> Array:
        """What a view holds after its base was written."""
        value = view.meta["val"]
        try:
            if view not in self._parent:
                raise NoRule(STALE)
            if written_by(view):  # the tensor that it wrote to
                return self.current(self._parent[view])
            if view.target is operator.getitem:
                source, place = view.args
                results = self.reader.applied(source)  # type: ignore[arg-type]  # a node
                x = results[place] if isinstance(results, tuple) else None  # type: ignore[index]
            else:
                found = self.reader.applied(view)
                x = found if isinstance(found, Array) else None
            if x is None:
                raise NoRule(STALE)
            return self.reader.fitted(view, x, value)
        except Exception:  # what is captured is right, whatever a rule has not foreseen
            return self.reader.captured(view, value)

    def _keep(self, node: fx.Node, x: Array) -> None:
        self._current[node] = x
        self._made[node] = self.version(node)

    # ------------------------------------------------------------------------- writes

    def hides(self, node: fx.Node) -> bool:
        """Returns whether a tensor that has a gradient is written without autograd's knowledge.

        The gradient is as without the write, also that of a base which is written through a view.
        """
        return any(self._hides(node, x) for x in written_by(node))

    def _hides(self, node: fx.Node, x: fx.Node) -> bool:
        is_hidden = node in self.reader.unrecorded
        while not (is_hidden and self.reader.has_gradient(x)):
            is_hidden |= x.target in DETACHED
            if x not in self._parent:
                return False
            x = self._parent[x]
        return True

    def unread(self, targets: Sequence[fx.Node]) -> None:
        """Notes writes of an operation without results, or that is not followed."""
        for storage in {storage_of(x) for x in targets}:
            self._versions[storage] = self._versions.get(storage, 0) + 1

    def write(self, node: fx.Node, targets: Sequence[fx.Node], result: Result) -> None:
        """Notes what an operation wrote; its result is the tensor that it wrote to."""
        is_captured = node in self.reader.reading.reasons
        if is_captured or len(targets) != 1 or not isinstance(result, Array):
            if not is_captured:
                self.unread(targets)
            self._made[node] = self.version(node)
            return
        chain, value = [(targets[0], result)], result
        x = targets[0]
        olds = {x: self.current(x)}
        while x in self._parent:
            x = self._parent[x]
            olds[x] = self.current(x)
        is_outside = x.op in ("placeholder", "get_attr")
        x = targets[0]
        try:
            while x in self._parent and not is_outside:
                value = self._written_back(x, value, olds[self._parent[x]])
                x = self._parent[x]
                chain.append((x, value))
        except (NoRule, NoView):
            chain = chain[:1]
        self.unread(targets)
        kept = itertools.takewhile(lambda x: not _reads_memory(*x, olds[x[0]]), chain)
        chain = list(kept)
        if is_outside or not chain:
            made = "the graph does not make" if is_outside else "is captured"
            self.reader.reading.reasons[node] = f"it writes to a tensor that {made}"
            captured = self.reader.captured(node)
            self.reader.reading.arrays[node] = captured
            chain = [(targets[0], captured)]
        for x, value in chain:
            self._keep(x, value)
        self._keep(node, chain[0][1])
        self._parent[node] = targets[0]

    def _written_back(self, view: fx.Node, new: Array, old: Array) -> Array:
        """What a write to a view makes of the tensor that it is a view of."""
        call = Call(self.reader, view)
        target = view.target
        if target in SAME or (written_by(view) and view in self._parent):
            return new
        if target in ORDERS:
            order = order_of(call, len(old.dims))
            dims = [new.dims[order.index(d)] for d in range(len(old.dims))]
            return call.made(new.expr, dims)
        if target in RESHAPES:
            return arrays.reshaped(new, old.shape)
        if target in (aten.select.int, aten.slice.Tensor, aten.narrow.default):
            return part_written(call, part_of(call), new, old)
        raise NoRule(STALE)


def _reads_memory(node: fx.Node, new: Array, old: Array) -> bool:
    """Whether a new value is computed from what memory held, other than being left as it was."""
    kept = old.expr if new.dims == old.dims else None  # of other dimensions it is a transposed one
    computed, branches = [], [new.expr]
    while branches:
        x = branches.pop()
        if x.op == "where":
            computed.append(x.args[0])
            branches += [branch for branch in x.args[1:] if branch != kept]
        else:
            computed.append(x)
    return storage_of(node) in map(storage_of, nodes_read(*computed))
