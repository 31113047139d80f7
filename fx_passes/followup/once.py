"""Sums with gradients from the forward say what they are of: a second derivative is an error.

Their backward reads no input of the graph, which is what AOTAutograd looks for before it refuses
to differentiate twice. What it gets is the nearest input to each operand: hidden states and heads,
which the replaced code's backward reads. Farther ones would move where DDP cuts a graph.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable

from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.mutation import written_storages
from torch_streamkl.fx_passes.fx_utils.nodes import example, storage_of
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.once import once
from torch_streamkl.rows import op as row_op

MakeBuilder = Callable[[fx.Node], Builder]
SUMS = (linear_ops.linear_kl_sum, row_op.row_program_sum)


def refuse_second_derivatives(graph: fx.Graph, builder: MakeBuilder) -> None:
    """Tell the sums of a graph what they are of."""
    written = written_storages(graph)
    for call in [n for n in graph.nodes if n.target in SUMS]:
        inputs = [x for x in _inputs_of(call) if storage_of(x) not in written]
        for total in [n for n in call.users if n.target is operator.getitem and n.args[1] == 0]:
            if inputs and _needs_gradient(total):
                build = builder(total.next)
                result = build.call(once, total, inputs)
                total.replace_all_uses_with(
                    result, delete_user_cb=lambda n, own=result: n is not own
                )


def _inputs_of(call: fx.Node) -> list[fx.Node]:
    """The inputs of the graph that operands of a call are, or are computed from: nearest ones."""
    operands = [x for x in call.all_input_nodes if _needs_gradient(x)]
    return list(dict.fromkeys(x for n in operands if (x := _nearest_input(n)) is not None))


def _nearest_input(node: fx.Node) -> fx.Node | None:
    todo, seen = deque([node]), {node}
    while todo:
        node = todo.popleft()
        if node.op in ("placeholder", "get_attr"):
            return node
        for each in node.all_input_nodes:
            if each not in seen and _needs_gradient(each):
                seen.add(each)
                todo.append(each)
    return None


def _needs_gradient(node: fx.Node) -> bool:
    value = example(node)
    return isinstance(value, Tensor) and value.requires_grad
