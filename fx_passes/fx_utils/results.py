"""Records the results of inserted calls, so that torch computes those of equal calls once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.call_keys import (
    Input,
    Kinds,
    NotEqual,
    call_key,
    tensors_in,
)
from torch_streamkl.fx_passes.fx_utils.nodes import MEMORY, address_of, example, storage_of
from torch_streamkl.fx_passes.fx_utils.torch_names import free_unbacked_symbols

# of tensors that are new; those of torch are addresses
_memories = itertools.count(-1, -1)
Memory = int | dict[int, int | None] | None


@dataclass(frozen=True)
class Known:
    """Holds a recorded value, and what `MEMORY` is of the node that has it now."""

    value: Any
    memory: Memory


class Results:
    """Finds the results of calls that were inserted into a graph.

    A result is recorded for every equal call. So nodes have memory as `storage_of` says, which is
    that of an input where the first call gave a view of it. Of several results, the node has that
    of each by torch's address.
    """

    def __init__(self) -> None:
        self._kinds = Kinds()
        # by address: the input that it is a view of, None of new tensors
        self._found: dict[object, tuple[Any, dict[int, int | None]]] = {}

    def find(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Known | None:
        """Returns the result of an equal call, None if there was none."""
        try:
            key, inputs = self._key(kind, target, args, kwargs)
        except NotEqual:
            return None
        found = self._found.get(key)
        if found is None:
            return None
        value, views = found
        memory = {
            address: next(_memories) if viewed is None else storage_of(inputs[viewed])
            for address, viewed in views.items()
        }
        return Known(value, memory[address_of(value)] if isinstance(value, Tensor) else memory)

    def note(self, node: fx.Node) -> None:
        """Notes a call and its result."""
        value = example(node)
        tensors = list(tensors_in(value))
        if not tensors or free_unbacked_symbols(tensors):
            return
        try:
            for x in tensors:
                self._kinds.of(x)
            key, inputs = self._key(node.op, node.target, node.args, node.kwargs)
        except NotEqual:
            return
        views: dict[int, int | None] = dict.fromkeys(map(address_of, tensors))
        for i, source in enumerate(inputs):
            given = example(source)
            assert isinstance(given, Tensor)
            if views.get(address_of(given), i) is None:
                views[address_of(given)] = i
        self._found[key] = value, views

    def _key(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[object, list[fx.Node]]:
        key, inputs = _key_of(self._kinds, target, args, kwargs, example)
        return (kind, key), inputs


class Runs:
    """Runs calls on other values than the recorded ones, equal ones once."""

    def __init__(self) -> None:
        self._kinds = Kinds()
        self._found: dict[object, Tensor] = {}

    def of(
        self,
        node: fx.Node,
        changed: Mapping[fx.Node, Tensor],
        run: Callable[[fx.Node], Tensor],
    ) -> Tensor:
        """Returns what ``run`` gives for a node, of whose inputs some have changed.

        Of the result nobody may ask for the memory.
        """

        def value_of(x: fx.Node) -> object:
            return changed.get(x, example(x))

        try:
            called, _ = _key_of(self._kinds, node.target, node.args, node.kwargs, value_of)
        except NotEqual:
            return run(node)
        key = node.op, called
        if key not in self._found:
            self._found[key] = run(node)
        return self._found[key]


def _key_of(
    kinds: Kinds,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    value_of: Callable[[fx.Node], object],
) -> tuple[object, list[fx.Node]]:
    """What equal calls have in common, and the nodes of the tensors that they read."""
    inputs: list[fx.Node] = []

    def about(node: fx.Node) -> object:
        value = value_of(node)
        if not isinstance(value, Tensor):
            return value
        if node not in inputs:
            inputs.append(node)
        return Input((kinds.of(value), inputs.index(node)))

    return call_key(target, args, kwargs, about), inputs


def set_memory(node: fx.Node) -> None:
    """Gives a view that torch has computed the memory of the node that it is a view of.

    The recorded value of that node may be the result of an equal call, with other memory.
    """
    value = example(node)
    if not isinstance(value, Tensor):
        return
    address = address_of(value)
    inputs = list(node.all_input_nodes)
    while inputs:
        x = inputs.pop()
        given = example(x)
        if isinstance(given, (tuple, list)):  # of which this is an item
            known: Memory = x.meta.get(MEMORY)
            if isinstance(known, dict) and address in known:
                node.meta[MEMORY] = known[address]
                return
            inputs += x.all_input_nodes
        elif isinstance(given, Tensor) and address_of(given) == address:
            if MEMORY in x.meta:
                node.meta[MEMORY] = x.meta[MEMORY]
            return
