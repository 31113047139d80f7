"""Traces equal calls once: the layers of a network call the same operations on like tensors.

NOTE [Equal calls]
To trace a call to ATen takes a millisecond, five with symbolic sizes: torch makes fake tensors and
proxies for every operation. Calls are equal if their functions, constants, and the metadata of
their tensors are. The second one gets copies of the nodes that the first became, with its own
inputs. Their ``meta["val"]`` is the first one's: shape, type and strides are right, the memory is
not its own. So a call is traced if memory matters:

- something writes to its result, or to one of its tensors, or might: `may_share`;
- a tensor is a constant, no fake one, or a subclass;
- sizes of the result are read from data.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.call_keys import (
    Input,
    Kinds,
    NotEqual,
    call_key,
    tensors_in,
)
from torch_streamkl.fx_passes.fx_utils.nodes import example, storage_of
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    disable_proxy_modes_tracing,
    free_unbacked_symbols,
    get_proxy_slot,
    track_tensor,
)

_MATMUL = (torch.matmul, operator.matmul, "matmul", "__matmul__")
Inputs = dict[fx.Node, Any]  # tensors, or copies, by their nodes in the trace


@dataclass(eq=False)
class Copied:
    """Stands for a tensor: its node in the trace, and a traced tensor with the same metadata.

    ``tensor`` is itself, from when a call that is traced has needed it.
    """

    node: fx.Node
    like: Tensor
    tensor: Tensor | None = None


@dataclass(frozen=True)
class Traced:
    """Holds the nodes that a call became, the nodes of its inputs, and its results.

    A result is a node, a tensor like it, and the number of the input that it is; or a list.
    """

    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    results: Any


def may_share(nodes: Iterable[fx.Node], written: Iterable[int | None]) -> bool:
    """Returns whether nobody writes to these tensors, but to scalars such as a total of losses."""
    written = set(written)
    for node in nodes if written else ():
        value = example(node)
        is_scalar = isinstance(value, Tensor) and value.dim() == 0
        if not is_scalar and storage_of(node) in written:
            return False
    return True


class EqualCalls:
    """Knows what the calls of a trace became.

    ``scalars_are_written``: each scalar has memory of its own.
    """

    def __init__(self, tracer: Any, scalars_are_written: bool) -> None:
        self.tracer = tracer
        self._traced: dict[object, Traced] = {}
        self._kinds = Kinds(with_scalars=not scalars_are_written)

    # ------------------------------------------------------------------------- what is equal

    def key(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[object, Inputs]:
        """Returns what equal calls have in common, and the inputs by their nodes in the trace.

        Raises NotEqual if there can be no other one.
        """
        inputs: Inputs = {}

        def about(x: Any) -> object:
            if isinstance(x, (tuple, list)):
                return tuple(map(about, x))
            if not isinstance(x, (Tensor, Copied)):
                return x
            kind = self._kinds.of(x.like if isinstance(x, Copied) else x)
            made = self.node_of(x)
            inputs.setdefault(made, x)
            return Input((kind, list(inputs).index(made)))

        return call_key(node.target, node.args, node.kwargs, lambda n: about(values[n])), inputs

    def node_of(self, value: Tensor | Copied) -> fx.Node:
        """Returns the node of a tensor in the trace."""
        if isinstance(value, Copied):
            if value.tensor is None:
                return value.node
            value = value.tensor
        slot = get_proxy_slot(value, self.tracer, None)
        if slot is None:
            raise NotEqual
        node: fx.Node = slot.proxy.node
        return node

    # ------------------------------------------------------------------------- copies

    def copied(self, key: object, inputs: Inputs) -> tuple[Any, list[fx.Node]] | None:
        """Returns results of an equal call and the new nodes, None if none was traced."""
        found = self._traced.get(key)
        if found is None:
            return None
        made = dict(zip(found.inputs, inputs, strict=True))
        added = []
        for node in found.nodes:
            new = self.tracer.graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, lambda n: made.get(n, n)),
                fx.map_arg(node.kwargs, lambda n: made.get(n, n)),
                name=node.name,
            )
            new.meta.update(node.meta)
            made[node] = new
            added.append(new)
        given = list(inputs.values())

        def result(x: Any) -> Any:
            if isinstance(x, list):
                return tuple(map(result, x))
            node, like, number = x
            if number is None:
                return Copied(made[node], like)
            self._rename(given[number], made[node])  # as torch does
            return given[number]

        return result(found.results), added

    def recorded(
        self, key: object, inputs: Inputs, node: fx.Node, source: fx.Node
    ) -> tuple[Copied, list[fx.Node]] | None:
        """Returns a product as Dynamo recorded it, if it has the inputs that Dynamo saw.

        It is one operation. To trace it takes a tenth of a second with symbolic sizes.
        """
        value, known = example(source), [example(x) for x in source.all_input_nodes]
        given = list(inputs.values())
        if node.target not in _MATMUL or node.kwargs or len(node.args) != len(given):
            return None
        kinds = [self._kinds.of(x.like if isinstance(x, Copied) else x) for x in given]
        tensors = [x for x in (*known, value) if isinstance(x, Tensor)]
        if len(tensors) != 3 or kinds != [self._kinds.of(x) for x in tensors[:2]]:
            return None
        *operands, result = tensors
        if len({x.dtype for x in tensors}) > 1 or free_unbacked_symbols(result):
            return None
        if result.requires_grad != any(x.requires_grad for x in operands):
            return None
        self._kinds.of(result)
        made = self.tracer.graph.create_node(
            "call_function", torch.ops.aten.matmul.default, tuple(inputs), name="matmul"
        )
        made.meta["val"] = result
        self._traced[key] = Traced([made], list(inputs), (made, result, None))
        return Copied(made, result), [made]

    def _rename(self, value: Tensor | Copied, node: fx.Node) -> None:
        """Lets a tensor be the result of an operation that returns its input."""
        if isinstance(value, Copied):
            value.node = node
            if value.tensor is None:
                return
            value = value.tensor
        track_tensor(value, fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer)

    def note(self, key: object, inputs: Inputs, nodes: Sequence[fx.Node], result: Any) -> None:
        """Notes what a call became, if an equal one becomes the same."""
        values = [n.meta.get("val") for n in nodes]
        if any(n.op != "call_function" for n in nodes) or any(map(free_unbacked_symbols, values)):
            return
        # sizes are those of any tensor with these sizes
        own = [n for n, v in zip(nodes, values, strict=True) if not _is_number(v)]
        known = {*inputs, *own}
        given = [self.tensor(x) for x in inputs.values()]

        def results(x: Any) -> Any:
            if isinstance(x, Tensor):
                self._kinds.of(x)
                number = next((i for i, y in enumerate(given) if x is y), None)
                return self.node_of(x), x, number
            if isinstance(x, (tuple, list)):
                return [results(y) for y in x]
            raise NotEqual

        try:
            for value in itertools.chain(*(tensors_in(n.meta.get("val")) for n in own)):
                self._kinds.metadata(value)
            found = results(result)
        except NotEqual:
            return
        for node in own:
            if not all(a in known or _is_number(a.meta.get("val")) for a in node.all_input_nodes):
                return
        self._traced[key] = Traced(own, list(inputs), found)

    def tensor(self, value: Any) -> Any:
        """Returns a value to trace with: of a copy, a tensor that has its node."""
        if type(value) is tuple:
            return tuple(map(self.tensor, value))
        if not isinstance(value, Copied):
            return value
        if value.tensor is None:
            like = value.like
            with disable_proxy_modes_tracing():
                value.tensor = like.detach().requires_grad_(like.requires_grad)
                self._rename(value, value.node)
        return value.tensor


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))
