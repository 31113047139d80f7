"""Rewrites a sum of a row program's values to `row_program_sum`, with gradients in its forward.

A program of an LM head computes its logits again in the backward, unless the forward knows what
each row adds to the loss. It does if the program's values only go through functions of each row,
with tensors that do not depend on them, into sums and means that end in one number. These
operations become a `RowLoss`, one by one.

Metrics, which read detached values of the same program, read those that the sum returns.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.mutation import has_effect, under_no_grad, written_by
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    argument,
    descendants,
    example,
    following,
    memory_of,
    name_of,
    needs_gradient,
    storage_of,
    tensor_of,
)
from torch_streamkl.fx_passes.fx_utils.sizes import (
    is_unknown,
    is_zero,
    provably_equal,
    same_shape,
)
from torch_streamkl.fx_passes.lowering.sites import SITE
from torch_streamkl.fx_passes.passes.row_chains import Chain, KnownTensor, chain_of
from torch_streamkl.linear import ops as linear_ops
from torch_streamkl.rows import op as row_op
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import Program


def sum_rows_in_forward(graph: fx.Graph, builder: MakeBuilder) -> list[fx.Node]:
    """Replaces sums that can be computed in the forward; returns their nodes."""
    heads = Counter(w for n in graph.nodes for w in _weights(n))
    off = under_no_grad(graph)  # nothing that is inserted is among them: it is where a sum is
    replaced = []
    for call in [n for n in graph.nodes if n.target is row_op.row_program]:
        # each sum holds a gradient of the weight from the forward to the backward: one is enough
        if not _is_eligible(call) or any(heads[w] > 1 for w in _weights(call)):
            continue
        chain = chain_of(call, off)
        if chain is None or _is_written_meanwhile(call, chain):
            continue
        build = builder(chain.total)
        with contextlib.suppress(Unsupported), build.undone_if_unsupported():
            replaced.append(_replace(call, chain, build))
    return replaced


def _weights(node: fx.Node) -> set[int | None]:
    """Returns the memory of the LM heads whose gradients a call computes."""
    if node.target in (linear_ops.linear_kl, linear_ops.linear_kl_sum):
        given = [argument(node, 1, "student_weight")]
    elif node.target is row_op.row_program:
        given = [x for x in node.args[0] if tensor_of(x).requires_grad]  # type: ignore[union-attr]
    else:
        return set()
    return memory_of(given)


def _is_eligible(call: fx.Node) -> bool:
    """Whether a call is of LM heads with at least one row, and something needs a gradient."""
    tensors: Any = [tensor_of(x) for x in call.args[0]]  # type: ignore[union-attr]
    program: Any = call.args[1]
    problem = RowProblem.of(program, tensors)
    rows, vocab = problem.num_rows, problem.num_keys
    if any(problem.program.dot_heads) or not provably_equal(problem.batch, 1):
        return False
    if problem.program.has_blocks:
        return False
    if any(is_unknown(n) or is_zero(n) for n in (rows, vocab)):
        return False  # the mean of no row is NaN, and what it is divided by is 0
    is_half = any(x.dtype == torch.float16 for x in tensors)
    return not is_half and call.args[2] is True and any(x.requires_grad for x in tensors)


def _is_written_meanwhile(call: fx.Node, chain: Chain) -> bool:
    """Whether an in-place write changes an input between the call and the sum."""
    read = {*call.all_input_nodes, *(k.node for k in chain.known if k.node is not None)}
    reads = memory_of(read)
    written = (x for node in following(call, chain.total) for x in written_by(node))
    return any(storage_of(x) is None or storage_of(x) in reads for x in written)


def _replace(call: fx.Node, chain: Chain, build: Builder) -> fx.Node:
    tensors: Any = call.args[0]
    rows = [_tensor_of_rows(k, call, build) for k in chain.known]
    needs_grad = [tensor_of(x).requires_grad for x in tensors]
    result = build.call(
        row_op.row_program_sum, tensors, rows, call.args[1], chain.loss.text, needs_grad, "auto"
    )
    result.meta[SITE] = call.meta[SITE]
    total = build.call(operator.getitem, result, 0)
    total = build.cast(total, tensor_of(chain.total).dtype)
    _move_metrics(chain, result, call, build)
    chain.total.replace_all_uses_with(total)
    for node in (chain.total, *reversed(chain.before), call):
        node.graph.erase_node(node)
    return total


def _move_metrics(chain: Chain, result: fx.Node, call: fx.Node, build: Builder) -> None:
    """Lets metrics read the values that the sum returns, and moves them after it."""
    if not chain.metrics:
        return
    program: Any = call.args[1]
    outputs = Program.of(program).outputs
    given: Any = example(result)
    first = row_op.first_value(program, given)
    moved = _moved_with(chain, call)
    read = {a for m in chain.metrics for a in ancestors(m)}
    position = {n: i for i, n in enumerate(call.graph.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    copied = {*(n for n in chain.before if n in read), *chain.metrics}
    for node in sorted({*copied, *moved}, key=position.__getitem__):
        if node not in copied:  # one may read another that is copied, or is read by it
            chain.total.prepend(node)
            continue
        others = [a for a in node.all_input_nodes if a not in copies and a is not call]
        if any(position[a] > position[chain.total] for a in others):
            raise Unsupported("a metric reads what is computed after the sum")
        if node.args[0] is call:
            number: Any = node.args[1]
            place = first + outputs.index(number)
            copies[node] = build.call(operator.getitem, result, place)
        elif name_of(node) == "detach":
            detached: Any = node.args[0]
            copies[node] = copies[detached]  # which has no gradient
        else:
            copies[node] = build.copy(node, copies)
    for metric in chain.metrics:
        metric.replace_all_uses_with(copies[metric])
        if metric not in chain.before:
            metric.graph.erase_node(metric)


def _moved_with(chain: Chain, call: fx.Node) -> list[fx.Node]:
    """Returns metrics, and what is computed of them, that stand between a call and its sum.

    They need no gradient, and nothing is written meanwhile: where they stand does not matter.
    """
    inside = {*chain.before, chain.total}
    later = descendants(u for m in chain.metrics for u in {m, *m.users} - inside)
    between = list(following(call, chain.total))
    moved = [n for n in between if n in later and n not in chain.metrics]
    others = {a for n in moved for a in n.all_input_nodes} - {*later, *chain.before}
    if moved and (
        any(n in later for n in chain.total.all_input_nodes)
        or any(has_effect(n) for n in moved)
        or any(written_by(n) for n in between)
        or any(map(needs_gradient, others))
    ):
        raise Unsupported("what reads a metric cannot be moved after the sum")
    return moved


def _tensor_of_rows(known: KnownTensor, call: fx.Node, build: Builder) -> fx.Node:
    """Views values as [1, 1, rows], or one number as [1, 1, 1]."""
    operands: Any = call.args[0]
    if known.node is None:
        value, rows = tensor_of(operands[0]), tensor_of(operands[0]).shape[2]
        one = build.call(torch.ones, (1, 1, 1), dtype=torch.float64, device=value.device)
        return build.call(torch.mul, one, build.size(rows, operands))
    x = known.node
    if tensor_of(x).dim() == 0:
        return build.method("reshape", x, (1, 1, 1))
    if not same_shape(tensor_of(x).shape, known.shape):
        x = build.method("expand", x, *(build.size(n, operands) for n in known.shape))
    return build.method("reshape", x, (1, 1, -1))
