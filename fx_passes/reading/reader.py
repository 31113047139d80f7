"""Reads an ATen graph into expressions: an array for every tensor of the graph.

NOTE [What is captured]
A result is captured, which is always right, if its operation has no rule, or the rule does not
read this call. `Reading.reasons` has the reason. Limits on depth and size are such reasons too, so
that reading takes linear time. A captured tensor that is made of products of this graph exists in
memory: `Reading.reads_products`.

NOTE [Gradient flow]
Whether gradient flows is a property of captured tensors. Each result is held against what autograd
recorded of its node: where it recorded nothing, no part of the expression has gradient; where it
recorded a gradient and the expression has none, the result is captured.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.bounds import ignored_label
from torch_streamkl.fx_passes.capture.retrace import Trace, node_of
from torch_streamkl.fx_passes.fx_utils.mutation import (
    under_no_grad,
    written_by,
    written_storages,
)
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    memory_of,
    name_of,
    storage_of,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.fx_utils.shape_reads import is_of_a_shape
from torch_streamkl.fx_passes.fx_utils.sizes import is_unknown
from torch_streamkl.fx_passes.fx_utils.torch_names import FakeTensor
from torch_streamkl.fx_passes.reading import arrays, types
from torch_streamkl.fx_passes.reading.arrays import Array, NoView
from torch_streamkl.fx_passes.reading.constants import Constants
from torch_streamkl.fx_passes.reading.gradients import Trained, recorded_gradients, trained
from torch_streamkl.fx_passes.reading.numbering import Numbering
from torch_streamkl.fx_passes.reading.positions import MaskedRows, key_of
from torch_streamkl.fx_passes.reading.registry import RULES, Call, NoRule, Result, truth_of
from torch_streamkl.fx_passes.reading.rules import MODULES
from torch_streamkl.fx_passes.reading.sizes import Sizes
from torch_streamkl.fx_passes.reading.writes import Writes
from torch_streamkl.program.graph import FLOAT, INT, Extent, Node, Size, Source, capture, const
from torch_streamkl.program.reductions import detached

aten = torch.ops.aten
SUMS_OF_ALL = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
UNFORESEEN = "its rule failed"
TOO_LARGE = "an expression that is too large to be analysed"
MAX_DEPTH = 1024  # of an expression
MAX_LEVEL = 64  # of reductions in reductions
MAX_TERMS = 512  # of a sum or product
assert MODULES
Record = Callable[[fx.Node], bool]


@dataclass
class Reading:
    """Holds what was read of a graph.

    ``arrays`` has an array for every node that is a tensor, a tuple for several results.
    ``reasons`` says why a result was captured, for those that were. ``reads_products`` are nodes
    that are computed from matmuls of this graph. ``observers`` are operations that tell NaN or
    infinity from numbers, or that became a number: there, identities of real numbers may differ
    from what eager computes. ``indices`` has the operation and dimension of what is read at
    positions, by `positions.key_of` of them: torch raises where they are out of range. ``places``
    are the captured places of maxima, as what they are.
    """

    arrays: dict[fx.Node, Result] = field(default_factory=dict)
    reasons: dict[fx.Node, str] = field(default_factory=dict)
    observers: dict[fx.Node, str] = field(default_factory=dict)
    reads_products: set[fx.Node] = field(default_factory=set)
    sizes: Sizes = field(default_factory=Sizes)
    indices: dict[Node, tuple[str, int]] = field(default_factory=dict)
    places: dict[fx.Node, Array] = field(default_factory=dict)
    index_sizes: dict[Node, set[Size]] = field(default_factory=dict)  # of what they are read from
    vanished: dict[fx.Node, Collection[tuple[object, int]]] = field(default_factory=dict)

    def ignored_at(self, at: Node) -> int | None:
        """Returns the label that reads nothing in eager code; None if positions are no labels.

        Views of labels, as of flattened ones, have other positions in the same tensor.
        """
        found = self.indices.get(key_of(at))
        if found is not None:
            return ignored_label(found[0])
        tensors = [(key, of) for key, (of, _) in self.indices.items() if key.op == "capture"]
        every = {of for key, of in tensors if at.op == "capture" and key.value == at.value}
        return ignored_label(every.pop()) if len(every) == 1 else None

    def loses_gradient(self, node: fx.Node) -> bool:
        """Returns whether a tensor has a gradient by eager code, which is 0, and none as read.

        The sum of a softmax is a number, and a softmax ignores what is added to all scores of a
        row: whatever has gradient in them has to be in the rest, too.
        """
        if not self.vanished:
            return False
        behind = ancestors(node)
        kept = trained([self.array(node).expr])
        return any(
            n in behind and not kept.issuperset(names) for n, names in self.vanished.items()
        )

    @functools.cached_property
    def widest(self) -> dict[object, torch.dtype]:
        """Returns the widest type of what is computed of a captured tensor, by the tensor's name.

        Products count no more, whatever type they and the tensor are promoted to.
        """
        found: dict[object, torch.dtype] = {}
        made_of: dict[fx.Node, set[object]] = {}  # names
        for node in self.arrays:
            x = self.expression(node)
            if x is None or node in self.reads_products:
                continue
            names = {x.value.name} if x.op == "capture" else set[object]()
            made_of[node] = names.union(*(made_of.get(a, ()) for a in node.all_input_nodes))
            dtype = tensor_of(node).dtype
            if dtype.is_floating_point and dtype.itemsize > 1:  # torch promotes no float8
                for name in made_of[node]:
                    found[name] = torch.promote_types(found.get(name, dtype), dtype)
        return found

    def expression(self, node: object) -> Node | None:
        """Returns the expression of a node with one result, None of anything else."""
        found = self.arrays.get(node) if isinstance(node, fx.Node) else None
        return found.expr if isinstance(found, Array) else None

    def array(self, node: fx.Node) -> Array:
        """Returns the array of a node with one result."""
        found = self.arrays[node]
        assert isinstance(found, Array)
        return found


def read(
    graph: fx.Graph | fx.GraphModule,
    records: Record = lambda node: False,
    written: Collection[int | None] = (),
    unrecorded: Collection[fx.Node] = (),
    made_as: Mapping[fx.Node, torch.dtype] = MappingProxyType({}),
) -> Reading:
    """Reads a pre-dispatch ATen graph, whose nodes have fake values as ``meta["val"]``.

    ``records`` says whether autograd recorded a gradient of a node. ``written`` is memory that
    code outside of the graph writes to, ``unrecorded`` are nodes that autograd does not record,
    beside those of which the graph itself says so. ``made_as`` has the types of products where
    they are not those of the graph: autocast decides them, of which a trace has nothing.
    """
    return Reader(graph, records, written, unrecorded, made_as).run()


def read_trace(trace: Trace) -> Reading:
    """Reads what `capture.retrace` traced, with what Dynamo recorded of the user's nodes."""
    source = next(iter(trace.origin.values()), None)
    if source is None:
        return read(trace.graph)
    off = under_no_grad(source.graph)
    unrecorded = {n for n in trace.graph.nodes if node_of(trace, n) in off}
    records = recorded_gradients(trace).__getitem__
    values = {n: example(user) for n, user in trace.outer.items() if name_of(n) in MATMULS}
    made_as = {n: value.dtype for n, value in values.items() if isinstance(value, Tensor)}
    return read(trace.graph, records, written_storages(source.graph), unrecorded, made_as)


class Reader:
    """Reads one graph, node by node."""

    def __init__(
        self,
        graph: fx.Graph | fx.GraphModule,
        records: Record,
        written: Collection[int | None],
        unrecorded: Collection[fx.Node],
        made_as: Mapping[fx.Node, torch.dtype],
    ) -> None:
        self.made_as = made_as
        self.graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
        self.module = self.graph.owning_module
        self.reading = Reading()
        self.sizes, self.observers = self.reading.sizes, self.reading.observers
        self.unrecorded = {*unrecorded, *under_no_grad(self.graph)}
        self.records = records
        self.written_storages = {*written, *written_storages(self.graph)}
        self.numbering = Numbering(self.written_storages, self.records)
        self.writes = Writes(self)
        self.constants = Constants(self)
        self.selections: dict[object, tuple[MaskedRows, int, Size]] = {}
        self.trained = Trained()

    def run(self) -> Reading:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                is_attribute = node.op == "get_attr"
                held = getattr(self.module, str(node.target), None) if is_attribute else None
                held = held if isinstance(held, Tensor) else None
                self.numbering.visit(node, held)
                self._leaf(node, held)
            elif node.op == "call_function":
                self.numbering.visit(node)
                self._visit(node)
        return self.reading

    # ------------------------------------------------------------------------- values

    def array(self, x: object) -> Array:
        """Returns an argument as an expression, at the time of the call."""
        if isinstance(x, fx.Node):
            value = x.meta.get("val")
            if isinstance(value, Tensor):
                return self.writes.current(x)
            if isinstance(value, torch.SymInt):
                return self._number(self.sizes.expression(value))
            if isinstance(value, (torch.SymFloat, torch.SymBool)):
                return self._number(capture(Source(x)))
            x = value
        if isinstance(x, torch.SymInt):
            return self._number(self.sizes.expression(x))
        if isinstance(x, bool):
            return self._number(truth_of(x))
        if isinstance(x, int) and types.LARGEST_POSITION < abs(x) != sys.maxsize:  # end of a slice
            raise NoRule("an integer with more digits than float64 has")
        if isinstance(x, (int, float)):
            return self._number(const(x, INT if isinstance(x, int) else FLOAT))
        raise NoRule(f"an argument is {type(x).__name__}, neither a tensor nor a number")

    def size(self, x: object) -> Size:
        """Returns an integer argument."""
        value = x.meta.get("val") if isinstance(x, fx.Node) else x
        if isinstance(value, (int, torch.SymInt)):
            return self.sizes.of(value)
        raise NoRule("a size or position that is a value of the program")

    def _number(self, x: Node) -> Array:
        return Array(x, (), self.sizes)

    def _leaf(self, node: fx.Node, held: Tensor | None) -> None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) and held is not None:
            value = node.meta["val"] = held
        if not isinstance(value, Tensor):
            return
        if held is not None and self._is_number(held, node):
            is_bool = held.dtype == torch.bool
            x = truth_of(bool(held)) if is_bool else const(held.item(), types.kind_of(held.dtype))
            self._keep(node, Array(x, ((),) * value.dim(), self.sizes))
        else:
            self._keep(node, self.captured(node))

    def _is_number(self, held: Tensor, node: fx.Node) -> bool:
        """Whether a tensor of the graph's module is a number that nothing writes."""
        return (
            held.numel() == 1
            and not isinstance(held, FakeTensor)
            and not held.is_complex()
            and storage_of(node) not in self.written_storages
        )

    def captured(self, node: fx.Node, value: Tensor | None = None) -> Array:
        """Returns a tensor of the user's program as it is at this time.

        It has the axes that tensors of its shape have.
        """
        value = node.meta["val"] if value is None else value
        assert isinstance(value, Tensor)
        name = self.numbering.canonical.get(node, node)
        dims = arrays.leaf_dims([self.sizes.of(n) for n in value.shape])
        flows = value.dtype.is_floating_point and self.has_gradient(node)
        dtype = FLOAT if value.is_complex() else types.kind_of(value.dtype)
        bounds = (-float("inf"), float("inf")) if dtype == FLOAT else types.bounds_of(value.dtype)
        source = Source(name, self.writes.version(node), flows)
        at = [arrays.position(d) for d in dims]
        return Array(capture(source, dtype, at=at, bounds=bounds), dims, self.sizes)

    def has_gradient(self, node: fx.Node) -> bool:
        """Returns whether a tensor has a gradient at this time: a write may have given it one."""
        return self.records(node) or storage_of(node) in self.writes.flowing

    # ------------------------------------------------------------------------- operations

    def _visit(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        has_tensors = isinstance(value, Tensor) or (
            isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in value)
        )
        is_product = name_of(node) in MATMULS
        made_of = [] if is_of_a_shape(node) else node.all_input_nodes
        if is_product or any(a in self.reading.reads_products for a in made_of):
            self.reading.reads_products.add(node)
        targets = written_by(node)
        if targets and self.records(node) and not self.writes.hides(node):
            self.writes.flowing |= memory_of(targets)
        if not has_tensors:
            self.writes.unread(targets)
            return
        if node.target is operator.getitem:
            self._keep(node, self._item(node))
            return
        same = self.numbering.canonical[node]
        if same is not node and not targets and same in self.reading.arrays:
            self._keep(node, self.reading.arrays[same])
            if same in self.reading.reasons:
                self.reading.reasons[node] = self.reading.reasons[same]
            return
        result = self._read(node, value, bool(targets))
        self._keep(node, result)
        if targets:
            self.writes.write(node, targets, result)

    def _read(self, node: fx.Node, value: object, writes: bool) -> Result:
        try:
            if writes and self.writes.hides(node):
                raise NoRule("a tensor that has a gradient is modified in place under no_grad")
            rule = RULES.get(node.target)
            if rule is None:
                raise NoRule(f"{name_of(node)} has no rule")
            return self._held(node, self.applied(node), value)
        except Exception as error:  # what is captured is right, whatever a rule has not foreseen
            found = self.constants.meaning(node)
            if found is not None:
                return found
            is_foreseen = isinstance(error, (NoRule, NoView))
            reason = str(error) if is_foreseen else f"{UNFORESEEN}: {type(error).__name__} {error}"
            self.reading.reasons[node] = reason
            if not isinstance(value, Tensor):
                return (None,) * len(value)  # type: ignore[arg-type]  # a tuple of tensors
            return self.unread(node, value)

    def unread(self, node: fx.Node, value: Tensor) -> Array:
        """Returns a result that is captured, after a write with the version that this makes."""
        self.writes.unread(written_by(node))
        return self.captured(node, value)

    def applied(self, node: fx.Node) -> Result:
        """Applies a node's rule to the values that its arguments have at this time."""
        rule = RULES[node.target]
        result = rule(Call(self, node))
        if isinstance(result, Array) and is_number(result.expr):
            inputs = map(self.reading.expression, _read_by(node))
            if any(x is not None and not is_number(x) for x in inputs):
                self.observers.setdefault(node, "folded")
        return result

    def _item(self, node: fx.Node) -> Array:
        source, place = node.args
        assert isinstance(source, fx.Node)
        results = self.reading.arrays.get(source)
        found = results[place] if isinstance(results, tuple) else None  # type: ignore[index]
        if found is None:
            reason = self.reading.reasons.get(source, f"a result of {name_of(source)} has no rule")
            self.reading.reasons[node] = reason
            return self.captured(node)
        try:
            return self.fitted(node, found, node.meta["val"])
        except NoRule as error:
            self.reading.reasons[node] = str(error)
            return self.captured(node)

    def _held(self, node: fx.Node, result: Result, value: Any) -> Result:
        """The result as torch recorded it: its shape, type and gradient, within limits."""
        if isinstance(result, tuple):
            pairs = zip(result, value, strict=True)
            return tuple(None if x is None else self._shaped(x, v) for x, v in pairs)
        return self.fitted(node, result, value)

    def fitted(self, node: fx.Node, x: Array, value: Tensor) -> Array:
        """Returns a result as torch recorded it: NOTE [Gradient flow]."""
        x = self._shaped(x, value)
        if x.expr.flows and not self.records(node):
            return x.map(detached)
        is_filled = bool(written_by(node))  # autograd records a write of a number
        is_recorded = value.dtype.is_floating_point and self.records(node)
        # what is written over as a whole has no gradient here
        lost = self._lost(node, x.expr) if is_recorded and not is_filled else None
        is_sum = node.target in SUMS_OF_ALL and is_number(x.expr)
        if lost and (x.expr.flows or is_sum):
            self.reading.vanished[node] = lost
            return x
        gone = [v for a in node.all_input_nodes if (v := self.reading.vanished.get(a)) is not None]
        if is_recorded and gone and is_number(x.expr):  # 1e-6 more than a number that has vanished
            self.reading.vanished[node] = set().union(*gone)
            return x
        if is_recorded and not x.expr.flows and not is_filled and not self._is_written_later(node):
            raise NoRule("a gradient flows through what is a constant")
        return x

    def _lost(self, node: fx.Node, x: Node) -> frozenset[tuple[object, int]]:
        """Returns the tensors with gradient that a result was computed from, and has not."""
        return self.trained.lost(map(self.reading.expression, node.all_input_nodes), x)

    def _is_written_later(self, node: fx.Node) -> bool:
        """Whether a tensor that is made of no other has the gradient of what is written to it."""
        is_leaf = any(name_of(user) == "requires_grad_" for user in node.users)
        return not is_leaf and not _read_by(node) and storage_of(node) in self.written_storages

    def _shaped(self, x: Array, value: Tensor) -> Array:
        shape = [self.sizes.of(n) for n in value.shape]
        if len(x.dims) != len(shape):
            raise NoRule(f"a result with {len(x.dims)} dimensions in place of {len(shape)}")
        for d, n in enumerate(shape):
            is_count = is_unknown(value.shape[d]) and isinstance(x.size(d), Extent)
            if x.dims[d] and not is_count and not self.sizes.are_equal(x.size(d), n):
                raise NoRule(f"a result of size {x.size(d)} in place of {n}")
        x = arrays.expanded(x, shape)
        expr = types.stored(x.expr, value.dtype)
        is_long = expr.op in ("linear", "product") and len(expr.args) > MAX_TERMS
        if expr.depth > MAX_DEPTH or expr.level > MAX_LEVEL or is_long:
            raise NoRule(TOO_LARGE)
        return replace(x, expr=expr)

    def _keep(self, node: fx.Node, result: Result) -> None:
        self.reading.arrays[node] = result
        self.writes.note(node)


def is_number(x: Node) -> bool:
    """Returns whether an expression is known: a number, true or false."""
    return x.op == "const" or (x.op in ("and", "or") and not x.args)


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The tensors whose values an operation reads: not those that only lend their shape."""
    is_made = is_of_a_shape(node) or name_of(node) in ("fill_", "zero_")
    return [] if is_made else node.all_input_nodes
