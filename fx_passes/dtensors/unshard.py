"""Converts a graph of DTensors to a graph of the whole tensors that they represent.

DTensor has the semantics of one device: an operation on DTensors gives what it gives on whole
tensors, whatever their placements. So the graph is analysed with plain tensors instead. Operations
that only move data (`redistribute`, `full_tensor`, `to_local` of a tensor that every rank has) are
the identity. The rest of the program may use a rank's own part; that is not analysed.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.copies import copied
from torch_streamkl.fx_passes.fx_utils.dtensors import PLACED, dtensors_in, is_dtensor
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.fake_modes import fake_mode_of, without_guards
from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import (
    address_of,
    example,
    is_call,
    location_of,
    name_of,
    needs_gradient,
    run,
)
from torch_streamkl.fx_passes.fx_utils.opaque_nodes import opaque, same, same_detached
from torch_streamkl.fx_passes.fx_utils.sizes import provably_equal, same_shape
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    enable_python_dispatcher,
    tree_leaves,
    tree_map,
)
from torch_streamkl.fx_passes.validation.kinds import sets_state
from torch_streamkl.fx_passes.validation.running import modes_restored

OWN_ROWS = "streamkl_own_rows"  # of logits whose hidden states are what a rank has, plain
log = logging.getLogger("torch_streamkl.sharded")
_OF_REDISTRIBUTE = {"device_mesh", "placements", "async_op"}


def whole_graph(graph: fx.Graph) -> fx.Graph:
    """Returns a copy of the graph with whole tensors; nodes have the names that they had."""
    _check_writes(graph)
    result = copied(graph)
    mode = fake_mode_of(graph.nodes)
    values: dict[fx.Node, Any] = {}
    copies = dict(zip(graph.nodes, result.nodes, strict=True))
    heads = {copies[n]: _head_of_own_vocab(n) for n in graph.nodes}
    with mode, without_guards(mode), enable_python_dispatcher(), modes_restored():
        for node in result.nodes:
            if dtensors_in(example(node)):
                node.meta[PLACED] = True
            if sets_state(node):
                values[node] = _run(node, values)
                continue
            # values of the copy are replaced when all of it was seen
            recorded = example(node)
            if not dtensors_in([recorded, *map(example, node.all_input_nodes)]):
                values[node] = recorded
                continue
            head = heads[node]
            if head is not None:
                _replace(node, F.linear, tuple(copies[n] for n in head))
                node.meta[OWN_ROWS] = True
                values[node] = _run(node, values)
                continue
            values[node] = _opaque_node(node, recorded, values)
        for node in result.nodes:
            if node in values and "example_value" in node.meta and not sets_state(node):
                node.meta["example_value"] = values[node]
    return result


def _check_writes(graph: fx.Graph) -> None:
    """Raises Unsupported if a write changes memory that opaque nodes share differently than the
    program does.
    """
    shared: set[int] = set()
    for node in graph.nodes:
        values = [example(node)]
        if conversion(node):
            values += map(example, node.all_input_nodes)
        elif not dtensors_in(values):
            continue
        shared |= {_storage(x) for x in tree_leaves(values) if isinstance(x, Tensor)}
    for node in graph.nodes:
        for target in written_by(node):
            if any(_storage(x) in shared for x in tree_leaves(example(target))
                   if isinstance(x, Tensor)):  # fmt: skip
                where, _ = location_of(node)
                raise Unsupported(f"a DTensor or a part of one is modified in place, at {where}")


def _storage(x: Tensor) -> int:
    return address_of(x._local_tensor if is_dtensor(x) else x)


def _opaque_node(node: fx.Node, recorded: Any, values: dict[fx.Node, Any]) -> Any:
    """Returns the whole value of a node on DTensors, and changes the node to compute it."""
    if not is_call(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
        return _whole(recorded)  # the body of a checkpoint is rewritten as a graph of its own
    if _moves_data_only(node):
        (x,) = node.all_input_nodes[:1]
        loses_gradient = needs_gradient(x) and not needs_gradient(node)
        _replace(node, same_detached if loses_gradient else same, (x,))
        # what is plain has the memory that was recorded
        return _run(node, values) if is_dtensor(recorded) else recorded
    if is_dtensor(recorded) and conversion(node) == "":
        try:
            made = _run(node, values)
        except Exception:
            log.debug("%s is not looked into", node.name, exc_info=True)
        else:
            if _alike(made, recorded):
                return made
    elif not dtensors_in(recorded) and not isinstance(recorded, Tensor):
        return recorded  # sizes and numbers
    source, *rest = node.args if name_of(node) == "getitem" else (None,)
    if isinstance(source, fx.Node) and isinstance(values[source], tuple):
        return values[source][rest[0]]
    _replace(node, opaque, tuple(node.all_input_nodes))
    return _whole(recorded)


def _whole(value: Any) -> Any:
    def one(x: Any) -> Any:
        if not is_dtensor(x):
            return x
        return torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
        )

    return tree_map(one, value, is_leaf=is_dtensor)


def _replace(node: fx.Node, target: Any, args: tuple[fx.Node, ...]) -> None:
    node.op, node.target, node.args, node.kwargs = "call_function", target, args, {}


def conversion(node: fx.Node) -> str:
    """Names the method of DTensor that a node calls; empty for everything else."""
    name = name_of(node).removeprefix("prim").strip("_ ")
    return name if name in ("redistribute", "full_tensor", "to_local", "from_local") else ""


def _moves_data_only(node: fx.Node) -> bool:
    """Whether value and gradient are those of the whole input, in other places."""
    method = conversion(node)
    if method not in ("redistribute", "full_tensor", "to_local"):
        return False
    given, made = example(node.all_input_nodes[0]), example(node)
    arguments = _arguments(node)
    if not is_dtensor(given) or arguments is None or not _are_sums(given):
        return False
    positional, named = arguments
    if method == "redistribute":
        is_known = named.keys() <= _OF_REDISTRIBUTE and len(positional) <= 2
        return (
            is_known
            and is_dtensor(made)
            and made.device_mesh == given.device_mesh
            and _are_sums(made)
        )
    if positional or named.keys() - {"grad_placements"}:
        return False
    if method == "to_local" and not all(p.is_replicate() for p in given.placements):
        return False  # a rank's own part
    gradients = named.get("grad_placements")
    # a gradient that is summed over ranks is another one
    return gradients is None or not given.requires_grad or all(p.is_replicate() for p in gradients)


def _head_of_own_vocab(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Reads hidden states, weight and bias of ``from_local(linear(x, w.to_local(), ...))``.

    Every rank multiplies what it has of ``x`` by its vocabulary entries: whole logits as much as
    those of DTensors. None where the node is something else.
    """
    made = example(node)
    if conversion(node) != "from_local" or not is_dtensor(made) or not _are_sums(made):
        return None
    arguments = _arguments(node)
    if arguments is None or arguments[1].get("grad_placements") is not None:
        return None
    if not any(p.is_shard() for p in made.placements):
        return None
    product = node.all_input_nodes[0]
    if name_of(product) != "linear" or product.kwargs or len(product.args) not in (2, 3):
        return None
    hidden, *parts = product.args
    if not isinstance(hidden, fx.Node) or not isinstance(example(hidden), Tensor):
        return None
    heads = []
    for part in parts:
        if part is None:
            continue
        whole = _whole_of_own_part(part)
        x = example(whole) if whole is not None else None
        if whole is None or not is_dtensor(x) or x.device_mesh != made.device_mesh:
            return None
        for have, vocab in zip(made.placements, x.placements, strict=True):
            if (have.is_shard(made.dim() - 1), have.is_replicate()) != (
                vocab.is_shard(0),
                vocab.is_replicate(),
            ):
                return None
        if not provably_equal(x.shape[0], made.shape[-1]):
            return None
        heads.append(whole)
    return (_before_slices_of_all(hidden), *heads) if heads else None


def _before_slices_of_all(x: fx.Node) -> fx.Node:
    """Returns the node before slices that select everything: the analysis has no rule for them."""
    while name_of(x) == "getitem" and isinstance(x.args[0], fx.Node):
        source, index = x.args[0], x.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        before, after = example(source), example(x)
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            break
        if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
            break
        if not same_shape(before.shape, after.shape):
            break
        x = source
    return x


def _whole_of_own_part(part: Any) -> fx.Node | None:
    """Returns the DTensor that a node is the local part of, if gradients flow to that part."""
    if not isinstance(part, fx.Node) or conversion(part) != "to_local":
        return None
    whole, arguments = part.all_input_nodes[0], _arguments(part)
    if arguments is None or arguments[0]:
        return None
    gradients = arguments[1].get("grad_placements")
    x = example(whole)
    given = is_dtensor(x) and (
        not x.requires_grad or gradients is None or tuple(gradients) == tuple(x.placements)
    )
    return whole if given and not arguments[1].keys() - {"grad_placements"} else None


def _are_sums(x: Any) -> bool:
    """Whether ranks' parts are shards, copies or terms of a sum."""
    return all(
        p.is_shard() or p.is_replicate() or (p.is_partial() and p.reduce_op == "sum")
        for p in x.placements
    )


def _arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments of a method of DTensor; torch 2.11 keeps them in a closure."""
    if isinstance(node.target, str) or not name_of(node).startswith("prim"):
        return node.args[1:], dict(node.kwargs)
    code, cells = getattr(node.target, "__code__", None), getattr(node.target, "__closure__", None)
    if code is None or cells is None:
        return None
    found = dict(zip(code.co_freevars, (c.cell_contents for c in cells), strict=True))
    if not {"args_as_value", "kwargs_as_value"} <= found.keys():
        return None
    return tuple(found["args_as_value"]), dict(found["kwargs_as_value"])


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    return run(node, lambda n: values.get(n, example(n)))


def _alike(made: Any, recorded: Any) -> bool:
    return (
        isinstance(made, Tensor)
        and made.dtype == recorded.dtype
        and made.requires_grad == recorded.requires_grad
        and same_shape(made.shape, recorded.shape)
    )
