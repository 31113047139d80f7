"""Makes double backward raise for sums whose gradients were computed in the forward.

The backward of such a sum reads no input of the graph, and AOTAutograd refuses to differentiate
twice only if it does. So the sum gets, for each operand that the replaced code's backward reads,
the nearest input of the graph: hidden states and heads, if both sides of a product need a
gradient. An input may be written to between forward and backward, and its memory may be gone. The
sum gets no entry for such an operand; the others are enough if the graph runs unsplit. Farther
inputs would move where DDP cuts a graph.
"""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

from torch import fx

from torch_streamkl.double_backward import once
from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder
from torch_streamkl.fx_passes.fx_utils.mutation import written_storages
from torch_streamkl.fx_passes.fx_utils.nodes import (
    name_of,
    named_arguments,
    needs_gradient,
    nodes_in,
    storage_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import COPIES, DTYPES, PARTS, RESHAPES, SWAPS
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.rows import op as row_op
from torch_streamkl.rows.program import Program

SUMS = (linear_ops.linear_kl_sum, row_op.row_program_sum)
VIEWS = RESHAPES | SWAPS | PARTS | COPIES | DTYPES | {"narrow", "select", "expand", "movedim"}
# of whose backwards each factor is read by those of the others, and a term by none
TERMS = {"add", "sub", "neg", "sum", "mean"}
LINEAR = TERMS | {"mul", "div", "truediv", "matmul", "mm", "bmm", "linear"}


def refuse_second_derivatives(graph: fx.Graph, builder: MakeBuilder) -> None:
    """Makes second derivatives of a graph's sums raise."""
    calls = [n for n in graph.nodes if n.target in SUMS]
    written = written_storages(graph) if calls else set()
    for call in calls:
        for total in [n for n in call.users if n.target is operator.getitem and n.args[1] == 0]:
            if not needs_gradient(total):
                continue
            build = builder(total.next)
            inputs = []
            for operand, is_read in _operands_of(call):
                x = _nearest_read(operand, is_read)
                if x is None or storage_of(x) in written:
                    x = _no_entry(operand, build)
                inputs.append(x)
            if inputs:
                result = build.call(once, total, list(dict.fromkeys(inputs)))
                total.replace_all_uses_with(
                    result, delete_user_cb=lambda n, own=result: n is not own
                )


def _operands_of(call: fx.Node) -> list[tuple[fx.Node, bool]]:
    """Returns a call's differentiable operands, and whether the replaced backward read each."""
    if call.target is row_op.row_program_sum:
        tensors: Any = call.args[0]
        program: Any = call.args[2]
        count = 2 * len(Program.of(program).dot_heads)
        products = list(zip(tensors[:count:2], tensors[1:count:2], strict=True))
        others = [(x, True) for x in tensors[count:]]  # whatever the program does with them
    else:
        given = named_arguments(call)
        heads = [f"{side}_{kind}" for side in ("student", "teacher") for kind in ("", "adapter_")]
        products = [(given.get(f"{x}hidden"), given.get(f"{x}weight")) for x in heads]
        others = [(given.get(f"{side}_bias"), False) for side in ("student", "teacher")]
    found = [(x, needs_gradient(by)) for a, b in products for x, by in ((a, b), (b, a))]
    return [(x, is_read) for x, is_read in (*found, *others) if needs_gradient(x)]


def _nearest_read(operand: fx.Node, is_read: bool) -> fx.Node | None:
    """Returns the nearest graph input that an operand is computed from, if a backward reads it.

    What other functions than linear ones are of counts as read: they read it, or their result.
    """
    todo, seen = deque([(operand, is_read, False)]), {operand}
    while todo:
        node, is_read, is_within = todo.popleft()
        if node.op in ("placeholder", "get_attr"):
            if is_read or is_within:
                return node
            continue
        is_within = is_within or not _is_linear(node)
        for each in node.all_input_nodes:
            if each not in seen and needs_gradient(each):
                seen.add(each)
                todo.append((each, _reads(node, each, is_read), is_within))
    return None


def _is_linear(node: fx.Node) -> bool:
    is_square = len(node.all_input_nodes) < len(nodes_in(node.args))
    return name_of(node) in VIEWS | LINEAR and not is_square


def _reads(node: fx.Node, x: fx.Node, is_read: bool) -> bool:
    """Whether the backward of a linear function reads ``x``, or the value after a view of it."""
    name = name_of(node)
    if name in VIEWS:
        return is_read
    factors = [] if name in TERMS else node.all_input_nodes[:2]  # without a bias
    return any(a is not x and needs_gradient(a) for a in factors)


def _no_entry(operand: fx.Node, build: Builder) -> fx.Node:
    return build.method("clone", build.method("narrow", operand, 0, 0, 0))
