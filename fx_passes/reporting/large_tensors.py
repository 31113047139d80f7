"""Finds every score- or logit-sized tensor that a graph materializes, whatever computes or reads
it.

The analysis of losses follows what it recognises. This module looks at sizes alone, so that the
report never misses what the analysis does not know: products of two matrices that are much larger
than both, targets scattered into zeros, masks of that size, and what is computed from them, in the
bodies of custom autograd.Functions and checkpoints as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.region import BARRIERS
from torch_streamkl.fx_passes.fx_utils.mutation import has_effect
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    is_call,
    location_of,
    name_of,
    num_bytes,
    said_name,
    storage_of,
    subgraphs_of,
    tensor_of,
    tensors_read,
)
from torch_streamkl.fx_passes.fx_utils.op_names import CASTS, MATMULS, OF_ROWS, OPERAND_VIEWS
from torch_streamkl.fx_passes.fx_utils.sizes import (
    UNKNOWN_SIZE,
    bytes_text,
    numel,
    shown_shape,
    size_hint,
)
from torch_streamkl.fx_passes.reporting.graph_outputs import VOCABULARY_PER_WIDTH
from torch_streamkl.fx_passes.reporting.report import Remaining

OF_AN_INPUT = "made of an input of this size"
SMALLER = 8  # times, and a tensor is no longer as large as the scores that it is made of
MUCH_LARGER = 2  # times what a product of two activations is computed from
EXPANDED = 4  # times the operands of a broadcast operation, or the ids of a scattered target
PRODUCTS = MATMULS | {"cdist", "tensordot", "_scaled_mm", "inner"}
SCATTERS = {"one_hot", "scatter", "scatter_", "scatter_add", "scatter_add_"}
WRITES = {"setitem", "__setitem__", "index_put", "index_put_"}
BROADCASTS = {"mul", "sub", "add", "truediv", "div", "minimum", "maximum", "pow"}
LOSSES = {"cross_entropy", "kl_div"}  # which make a tensor of their input's size inside
READS_ROWS = OF_ROWS | LOSSES | {"sort", "topk", "argsort"}
_VIEWS = OPERAND_VIEWS - {"repeat_interleave"}
_LOOPS = {"scan": "scan", "map_impl": "map", "while_loop": "while_loop"}
_STEPS = 12  # from a product to its softmax


def unread_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Finds the nodes that no result needs: every compiler drops them."""
    unread: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not has_effect(node) and all(user in unread for user in node.users):
            unread.add(node)
    return unread


def readers_text(
    node: fx.Node, unread: Collection[fx.Node] = (), read_by: str | None = None
) -> str:
    """Says who reads a tensor, and what a user could do about an output.

    ``read_by`` says who reads the outputs, where that is not the caller of a compiled function.
    """
    readers = [u for u in node.users if u not in unread]
    names = sorted({said_name(u) for u in readers if u.op != "output"})
    said = [f"read by {', '.join(names)}"] if names else []
    is_output = any(u.op == "output" for u in readers)
    if is_output and read_by is not None:
        said.append(f"read by {read_by}")
    elif is_output:
        saved = bytes_text(num_bytes(node))
        said.append(f"returned, or used after a graph break; {saved} less without that")
    return ", ".join(said) or "nothing reads it"


def graphs_of(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    """Yields the graph and those of its bodies, which higher-order operators run."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield module.graph


@dataclass
class ScoreShapes:
    """Finds shapes of the score- and logit-sized tensors that the user's program computes."""

    shapes: set[tuple[int, ...]] = field(default_factory=set)
    largest: int = 0  # entries of the largest of them

    @staticmethod
    def of(gm: fx.GraphModule) -> ScoreShapes:
        found = ScoreShapes()
        for graph in graphs_of(gm):
            for node in graph.nodes:
                value: object = _written_target(node)
                if value is None and is_origin(node):
                    value = example(node)
                if isinstance(value, Tensor):
                    found.shapes.add(_squeezed(value))
                    found.largest = max(found.largest, numel(value))
        return found

    def is_far_smaller(self, shape: Sequence[object]) -> bool:
        """Returns whether a tensor computed from an input, such as a table, is far below score
        size.
        """
        sizes = [n if isinstance(n, int) else UNKNOWN_SIZE for n in shape]
        return math.prod(sizes) * SMALLER <= self.largest

    def holds(self, value: Tensor) -> bool:
        """Returns whether it has the shape of scores, or that of scores of one head or batch."""
        shape = _squeezed(value)
        return any(
            shape == x or (len(shape) > 1 and shape == x[-len(shape) :]) for x in self.shapes
        )


def large_tensors(
    gm: fx.GraphModule,
    known: ScoreShapes,
    listed: Sequence[Remaining] = (),
    at_break: str | None = None,
) -> list[tuple[Remaining, fx.Node]]:
    """Finds what the graph makes of these sizes, except what is ``listed`` already.

    ``at_break`` is where a graph break ends the graph, if one does.
    """
    rest = Counter((x.name, x.location, x.shape) for x in listed)
    loops = _loops_of(gm)
    found = []
    for graph in graphs_of(gm):
        unread = unread_nodes(graph)
        for node in _made(graph, known, unread):
            value = tensor_of(node)
            if known.is_far_smaller(value.shape) and not _is_of_product(node):
                continue
            shape = shown_shape(value)
            location = location_of(node)[0]
            key = (node.name, location, shape)
            if rest[key] > 0:
                rest[key] -= 1
                continue
            is_body = graph is not gm.graph
            reason = readers_text(node, unread, "the code around it" if is_body else at_break)
            if graph in loops:
                reason += f"; one in every iteration of {loops[graph]}"
            made = Remaining(node.name, shape, location, reason, "", num_bytes(node))
            found.append((made, node))
    return found


def _loops_of(gm: fx.GraphModule) -> dict[fx.Graph, str]:
    """Returns the graphs that loops run, with the names of the loops."""
    return {
        body.graph: _LOOPS[name_of(node)]
        for graph in graphs_of(gm)
        for node in graph.nodes
        if name_of(node) in _LOOPS
        for body in subgraphs_of(node)
    }


def _made(graph: fx.Graph, known: ScoreShapes, unread: set[fx.Node]) -> Iterator[fx.Node]:
    """Nodes with memory of their own that is as large as scores."""
    sizes: dict[fx.Node, int] = {}  # of the scores that a node is computed from
    memory = {_memory_of(n) for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    for node in graph.nodes:
        if not is_call(node):
            continue
        before = max((sizes.get(a, 0) for a in node.all_input_nodes), default=0)
        value = example(node)
        if not isinstance(value, Tensor):
            if before:
                sizes[node] = before
            continue
        size = numel(value)
        follows = before and name_of(node) not in PRODUCTS | BARRIERS and 2 * size >= before
        if not follows and (is_vector(value) or not (is_origin(node) or known.holds(value))):
            continue
        sizes[node] = size
        storage = _memory_of(node)
        if storage in memory if storage is not None else name_of(node) in _VIEWS:
            continue
        memory.add(storage)
        if node not in unread:
            yield node


def _written_target(node: fx.Node) -> Tensor | None:
    """The tensor made in the graph into which a few entries of each row are written."""
    target = node.args[0] if node.args else None
    if name_of(node) not in WRITES or not isinstance(target, fx.Node):
        return None
    value = example(target)
    if not isinstance(value, Tensor) or is_vector(value) or target.op == "placeholder":
        return None
    if tensors_read(target):
        return None
    given = tensors_read(node)[1:]
    is_dense = numel(value) >= EXPANDED * max(map(numel, given), default=numel(value))
    return value if is_dense else None


def is_origin(node: fx.Node) -> bool:
    """Returns whether a node computes a score- or logit-sized tensor from smaller ones, or an
    input.
    """
    value = example(node)
    if not is_call(node) or not isinstance(value, Tensor):
        return False
    name = name_of(node)
    inputs = tensors_read(node)
    if name in OF_ROWS or _is_softmax_by_hand(node):
        return not is_vector(value) and _is_of_an_input(node)
    if is_vector(value) or not inputs:
        return False
    size, largest = numel(value), max(map(numel, inputs))
    if name in SCATTERS:
        given = [numel(x) for x in inputs if x.shape != value.shape]
        return bool(given) and size >= EXPANDED * max(given)
    if name in PRODUCTS and len(inputs) == 1:  # cdist(x, x)
        inputs *= 2
    if not value.is_floating_point() or len(inputs) < 2:
        return False
    if name in PRODUCTS:
        return _is_large_product(node, inputs)
    is_outer = not any(is_vector(x) for x in inputs)
    return name in BROADCASTS and is_outer and size >= EXPANDED * largest


def _is_softmax_by_hand(node: fx.Node) -> bool:
    return name_of(node) == "exp" and any(name_of(u) == "sum" for u in node.users)


def _is_large_product(node: fx.Node, inputs: Sequence[Tensor]) -> bool:
    value = tensor_of(node)
    if name_of(node) in ("addmm", "baddbmm"):
        inputs = inputs[1:]
    if any(is_vector(x) for x in inputs[:2]):
        return False  # an outer product, such as the angles of rotary positions
    rows, columns = inputs[0], inputs[1]
    size = numel(value)
    if size > numel(rows) and _feeds_rows(node):
        return True
    is_vocabulary = columns.dim() == 2 and (
        size_hint(value.shape[-1]) >= VOCABULARY_PER_WIDTH * _width(node, rows)
    )
    is_weight = isinstance(columns, torch.nn.Parameter)
    larger = size >= MUCH_LARGER * max(numel(rows), numel(columns))
    return is_vocabulary or (larger and not is_weight)


def _width(node: fx.Node, rows: Tensor) -> int:
    """Returns the hidden size that a linear layer reads.

    A low-rank adapter has two layers: that of what the first one reads.
    """
    width = size_hint(rows.shape[-1])
    before = node.all_input_nodes[0]
    while name_of(before) in _VIEWS | CASTS | {"dropout"} and before.all_input_nodes:
        before = before.all_input_nodes[0]
    if name_of(before) in PRODUCTS and before.all_input_nodes:
        read = example(before.all_input_nodes[0])
        if isinstance(read, Tensor) and read.dim():
            width = max(width, size_hint(read.shape[-1]))
    return width


def _feeds_rows(node: fx.Node) -> bool:
    """Whether a softmax, or what else needs whole rows, reads a product up to a few steps."""
    frontier, value = [(node, 0)], tensor_of(node)
    seen = {node}
    while frontier:
        current, steps = frontier.pop()
        for user in current.users:
            if name_of(user) in READS_ROWS:
                return True
            made = example(user)
            if user in seen or steps == _STEPS or not isinstance(made, Tensor):
                continue
            if name_of(user) not in PRODUCTS and numel(made) * 2 >= numel(value):
                seen.add(user)
                frontier.append((user, steps + 1))
    return False


def _is_of_an_input(node: fx.Node) -> bool:
    """Whether the values along a row come from an input as they are, and from no product."""
    value, current = example(node), node
    for _ in range(_STEPS):
        before = [
            a
            for a in current.all_input_nodes
            if isinstance(x := example(a), Tensor) and isinstance(value, Tensor)
            and numel(x) >= numel(value)
        ]  # fmt: skip
        if not before:
            return False
        current = before[0]
        if current.op == "placeholder":
            return True
        if name_of(current) in PRODUCTS:
            return False
    return False


def _memory_of(node: fx.Node) -> int | None:
    """Identity of a tensor's memory, None where it has none of its own to compare."""
    try:
        return storage_of(node)
    except (NotImplementedError, RuntimeError):  # of torch.func's wrappers
        return None


def _is_of_product(node: fx.Node) -> bool:
    return any(name_of(a) in PRODUCTS for a in ancestors(node) if a.op != "placeholder")


def is_vector(value: Tensor) -> bool:
    """Returns whether at most one dimension is larger than 1."""
    return sum(size_hint(n) != 1 for n in value.shape) < 2


def _squeezed(value: Tensor) -> tuple[int, ...]:
    return tuple(n for n in map(size_hint, value.shape) if n != 1)
