"""Traces a region again to pre-dispatch ATen, in which spellings are few; for analysis only.

The graph that is compiled is always the user's own, with nodes replaced. The re-traced graph loses
autograd functions, checkpoint regions and autocast, so it is analysed and discarded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from torch_streamkl.fx_passes.capture.equal_calls import Copied, EqualCalls, may_share
from torch_streamkl.fx_passes.capture.preconditions import why_unsupported
from torch_streamkl.fx_passes.capture.region import Region, find_region
from torch_streamkl.fx_passes.fx_utils.call_keys import NotEqual
from torch_streamkl.fx_passes.fx_utils.errors import SIZES_OF_DATA, Unsupported
from torch_streamkl.fx_passes.fx_utils.fake_modes import fake_mode_of, without_guards
from torch_streamkl.fx_passes.fx_utils.mutation import nodes_with_gradient, written_storages
from torch_streamkl.fx_passes.fx_utils.nodes import OF_SPECIAL, example, is_parameter, name_of
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
    get_proxy_mode,
    get_proxy_slot,
    is_traceable_wrapper_subclass,
    key_get,
    make_fx,
    tree_leaves,
    tree_map,
)

_SUBCLASS = "computed_by_a_tensor_subclass"


@dataclass(frozen=True)
class Trace:
    """Holds the ATen graph of a region, and how its nodes belong to the user's nodes."""

    graph: fx.Graph
    origin: dict[fx.Node, fx.Node]  # ATen node -> the user's node that it came from
    outer: dict[fx.Node, fx.Node]  # ATen node -> the user's node with the same value
    module: fx.GraphModule  # owner of constants that the graph refers to
    learned: frozenset[fx.Node]  # the user's nodes whose gradient a result needs

    def is_learned(self, node: fx.Node | None) -> bool:
        """Returns whether a user's node may be a loss: without any gradient, as in evaluation,
        every one may.
        """
        return not self.learned or node in self.learned


def node_of(trace: Trace, node: fx.Node) -> fx.Node | None:
    """Returns the user's node that a node of the trace has its value or its origin from."""
    return trace.outer.get(node) or trace.origin.get(node)


def outer_node(node: fx.Node, outer: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Returns the user's node that holds an ATen node's value."""
    found = outer.get(node)
    if found is None:
        name = name_of(node)
        if _SUBCLASS in node.meta:
            raise Unsupported(
                f"the scores are computed by a tensor subclass, {node.meta[_SUBCLASS]}, in "
                "operations of its own"
            )
        if name.endswith("_"):
            raise Unsupported(f"the loss reads a tensor that {name} wrote in place")
        raise Unsupported(f"the loss needs {name}, an intermediate value of another operation")
    return found


def _copied(region: Region) -> tuple[fx.Graph, dict[fx.Node, fx.Node], list[fx.Node]]:
    """Returns a graph of the region's nodes, their copies, and the tensors that it reads."""
    slice_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    tensor_leaves = []
    for leaf in region.leaves:
        if leaf.op == "get_attr" and not is_parameter(leaf):
            copies[leaf] = slice_graph.get_attr(str(leaf.target))
        else:
            copies[leaf] = slice_graph.placeholder(leaf.name)
            tensor_leaves.append(leaf)
    for node in region.nodes:
        copies[node] = slice_graph.node_copy(node, copies.__getitem__)
    slice_graph.output([copies[n] for n in region.nodes])
    return slice_graph, copies, tensor_leaves


class _Recorder(fx.Interpreter):
    """Runs a copy of a region under make_fx, each of equal calls once: NOTE [Equal calls].

    ``origin`` and ``outer`` are those of a `Trace`, with the names of its nodes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        graph: fx.Graph,
        sources: Mapping[fx.Node, fx.Node],
        mode: FakeTensorMode,
    ) -> None:
        super().__init__(module, graph=graph)
        self.sources, self.mode = sources, mode
        self.origin: dict[str, fx.Node] = {}
        self.outer: dict[str, fx.Node] = {}
        self.calls: EqualCalls | None = None
        nodes = [*sources.values(), *(a for n in sources.values() for a in n.all_input_nodes)]
        written = written_storages(nodes[0].graph)
        self.may_share, self.is_written = may_share(dict.fromkeys(nodes), written), bool(written)

    def trace(self, *inputs: Any) -> Any:
        """Returns all results of the region: what make_fx calls."""
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self.tracer = proxy_mode.tracer
        self.calls = EqualCalls(self.tracer, self.is_written) if self.may_share else None
        results = self.run(*inputs)

        def proxy(x: Any) -> Any:
            if isinstance(x, Copied):
                return fx.Proxy(x.node, self.tracer) if x.tensor is None else x.tensor
            return x

        return map_aggregate(results, proxy)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        if n.op != "output" and self.calls is not None:
            for a in n.all_input_nodes:
                self.env[a] = self.calls.tensor(self.env[a])
        given = super().fetch_args_kwargs_from_env(n)
        return _of_one_type(given) if name_of(n) in MATMULS else given

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in OF_SPECIAL:  # one rule for both
            target = getattr(torch, OF_SPECIAL[target])
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> object:
        source = self.sources.get(n)
        if source is None:
            return super().run_node(n)
        symbols = source.meta.get("unbacked_bindings")
        if self.calls is None or symbols:
            return self._traced(n, source, symbols)[0]
        try:
            key, inputs = self.calls.key(n, self.env)
            found = self.calls.copied(key, inputs)
            found = found or self.calls.recorded(key, inputs, n, source)
        except NotEqual:
            return self._traced(n, source, symbols)[0]
        if found is None:
            result, new = self._traced(n, source, symbols)
            self.calls.note(key, inputs, new, result)
            return result
        result, new = found
        self._note(result, new, source)
        return result

    def _traced(
        self, n: fx.Node, source: fx.Node, symbols: Mapping[Any, Any] | None
    ) -> tuple[object, list[fx.Node]]:
        before = next(iter(reversed(self.tracer.graph.nodes)), None)
        if symbols:
            self.mode.epoch += 1  # else a tensor remembers what it gave Dynamo
        result = super().run_node(n)
        every = reversed(self.tracer.graph.nodes)
        new = list(itertools.takewhile(lambda x: x is not before, every))[::-1]
        if symbols and any(map(_selects, new)):
            _take_symbols(self.mode, symbols, result)
        self._note(result, new, source)
        return result, new

    def _note(self, result: object, new: Sequence[fx.Node], source: fx.Node) -> None:
        self.origin.update({x.name: source for x in new})
        node = None
        if isinstance(result, Copied):
            node, result = result.node, result.tensor
        if isinstance(result, Tensor):
            slot = get_proxy_slot(result, self.tracer, None)
            node = None if slot is None else slot.proxy.node
        if node is not None:
            # what returns its input, such as x.contiguous(), has that one's value
            self.outer.setdefault(node.name, source)


def capture(owner: fx.GraphModule, graph: fx.Graph) -> tuple[Trace, Region] | str:
    """Returns the part of a graph that can be analysed; or why none can, "" if there is none."""
    reason = why_unsupported(graph)
    region = None if reason else find_region(graph)
    if region is None:
        return reason
    try:
        return trace_region(owner, region), region
    except Unsupported as blocked:
        return str(blocked)


def trace_region(owner: fx.GraphModule, region: Region) -> Trace:
    """Runs the region's nodes on their recorded fake inputs under make_fx.

    Raises Unsupported if torch needs a size that only data decide.
    """
    graph, copies, tensor_leaves = _copied(region)
    fakes = [example(leaf) for leaf in tensor_leaves]
    mode = fake_mode_of((*region.leaves, *region.nodes))
    recorder = _Recorder(owner, graph, {copies[n]: n for n in region.nodes}, mode)
    with mode, without_guards(mode), torch.enable_grad():
        try:
            traced = make_fx(
                recorder.trace,
                tracing_mode="real",
                pre_dispatch=True,
                _allow_non_fake_inputs=True,
            )(*fakes)
        except GuardOnDataDependentSymNode as error:
            raise Unsupported(SIZES_OF_DATA) from error
        except RuntimeError as error:
            if "don't support automatic differentiation" not in str(error):
                raise
            raise Unsupported(
                "a result is written with out=, which records no gradient"
            ) from error
    nodes = {n.name: n for n in traced.graph.nodes}
    for name, source in recorder.origin.items():
        given = filter(is_traceable_wrapper_subclass, map(example, source.all_input_nodes))
        for value in given if name in nodes else ():
            nodes[name].meta[_SUBCLASS] = type(value).__name__
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    outer = {nodes[name]: source for name, source in recorder.outer.items() if name in nodes}
    outer.update(dict(zip(placeholders, tensor_leaves, strict=True)))
    return Trace(
        graph=traced.graph,
        origin={nodes[name]: source for name, source in recorder.origin.items() if name in nodes},
        outer=outer,
        module=traced,
        learned=frozenset(nodes_with_gradient(region.nodes[0].graph)),
    )


def _of_one_type(given: tuple[Any, Any]) -> tuple[Any, Any]:
    """Arguments of a product, which autocast gives one type, in the widest of theirs."""
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    dtypes = {x.dtype for x in tensors if x.dtype.is_floating_point}
    if len(dtypes) < 2 or len(dtypes) < len({x.dtype for x in tensors}):
        return given
    widest = functools.reduce(torch.promote_types, dtypes)

    def widened(x: object) -> object:
        return x.to(widest) if isinstance(x, Tensor) and x.dtype != widest else x

    made: tuple[Any, Any] = tree_map(widened, given)
    return made


def _selects(node: fx.Node) -> bool:
    """Whether the entries of a tensor decide how many rows the result has."""
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def _take_symbols(mode: FakeTensorMode, bindings: Mapping[Any, Any], result: object) -> None:
    """Renames new data-dependent sizes to the user's symbols, whose equalities are known."""
    assert mode.shape_env is not None
    for symbol, path in bindings.items():
        made = key_get(result, path)
        if not isinstance(made, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            continue
        fresh = made.node._expr
        if isinstance(fresh, sympy.Symbol) and free_unbacked_symbols(made) and fresh != symbol:
            mode.shape_env._rename_unbacked_to(fresh, symbol)
