"""Runs a graph without Inductor if it holds little but fused attention losses.

A loss that is compiled apart from its models is such a graph. A compiled graph has CPU overhead:
wrappers around both passes and an autograd node. It exceeds the GPU time of a short loss, such as
that of a BERT layer, and Inductor has nothing to make faster there (bench/notes/host.md).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.attention import ops
from torch_streamkl.attention.direct import Call
from torch_streamkl.fx_passes.fx_utils.copies import copied
from torch_streamkl.fx_passes.fx_utils.mutation import has_effect
from torch_streamkl.fx_passes.fx_utils.nodes import (
    example,
    is_call,
    is_view,
    name_of,
    named_arguments,
    nodes_in,
)
from torch_streamkl.fx_passes.fx_utils.torch_names import is_traceable_wrapper_subclass

DEVICE = "cuda"  # a CPU's blocks are compiled, too
ALONE = "streamkl_alone"  # of a graph module's metadata: what runs in its place
NOTE = "nothing is left to compile: the graph runs without Inductor"
MAX_OPERATIONS = 8  # eager ones, which take about as long as the price of a compiled graph
VIEWS = {
    "permute", "transpose", "reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze",
    "expand", "getitem",
}  # fmt: skip
ON_ROWS = {
    "mean", "sum", "amax", "add", "sub", "mul", "div", "truediv", "neg", "where", "gt", "eq",
    "logical_and", "logical_or",
}  # fmt: skip


def runs_without_inductor(gm: fx.GraphModule) -> fx.GraphModule | None:
    """Returns a GPU graph in the form that runs without Inductor, or None if it needs Inductor."""
    num_rows = sum(_num_rows(site) for site in _sites(gm.graph))
    if not num_rows or not all(_is_plain(node, num_rows) for node in gm.graph.nodes):
        return None
    graph = copied(gm.graph)
    sites = _sites(graph)
    if not all(_call_directly(site) for site in sites):
        return None
    for node in list(graph.nodes):
        if _is_chain_end(node):
            _shorten(node)
    if not _results_are_apart(graph):
        return None
    graph.eliminate_dead_code()
    calls = [node for node in graph.nodes if is_call(node)]
    if len(calls) > len(sites) + MAX_OPERATIONS:
        return None
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def _sites(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is ops.attention_kl]


def _num_rows(site: fx.Node) -> int:
    value: Any = example(site)
    size = value[0].numel()
    return size if isinstance(size, int) else 0


def _is_plain(node: fx.Node, num_rows: int) -> bool:
    """Whether a node is an input, a fused loss, a view or an operation on per-row values, and all
    sizes are numbers.
    """
    if node.op == "output" or node.target is ops.attention_kl:
        return True
    value = example(node)
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return False
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if value.device.type != DEVICE or not all(isinstance(n, int) for n in numbers):
        return False
    if node.op == "placeholder" or _site_of(node) is not None or _is_view(node):
        return True
    if has_effect(node):  # as of an argument `out`
        return False
    return name_of(node) == "detach" or (name_of(node) in ON_ROWS and value.numel() <= num_rows)


def _site_of(node: fx.Node) -> fx.Node | None:
    """Returns the call whose values a node takes."""
    site = node.args[0] if node.target is operator.getitem else None
    if not isinstance(site, fx.Node) or site.target is not ops.attention_kl or node.args[1] != 0:
        return None
    return site


def _is_view(node: fx.Node) -> bool:
    is_of_one = len(node.all_input_nodes) == 1 and node.all_input_nodes[0] is node.args[0]
    if not is_call(node) or not is_of_one or name_of(node) not in VIEWS or not is_view(node):
        return False
    x, y = example(node.all_input_nodes[0]), example(node)
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype


def _call_directly(site: fx.Node) -> bool:
    """Replaces a call for the operator's first result by one without the dispatcher."""
    named = named_arguments(site)
    given = [named.get(x.name, x.default_value) for x in ops.attention_kl._schema.arguments]
    tensors, options = given[: ops.NUM_TENSORS], given[ops.NUM_TENSORS :]
    if any(isinstance(x, (fx.Node, torch.SymInt)) for x in options):
        return False
    if any(_site_of(user) is None for user in site.users):
        return False
    with site.graph.inserting_before(site):
        value = site.graph.call_function(Call(tuple(options)), tuple(tensors))
    for user in list(site.users):
        value.meta = user.meta
        user.replace_all_uses_with(value)
        site.graph.erase_node(user)
    site.graph.erase_node(site)
    return True


def _is_chain_end(node: fx.Node) -> bool:
    return _is_view(node) and any(not _is_view(user) for user in node.users)


def _shorten(node: fx.Node) -> None:
    """Replaces a chain of views by one view, or by nothing if the last equals the first."""
    base, length = node, 0
    while _is_view(base):
        base, length = base.all_input_nodes[0], length + 1
    x, y = example(base), example(node)
    assert isinstance(x, Tensor) and isinstance(y, Tensor)
    if x.storage_offset() != y.storage_offset():
        return
    if x.shape == y.shape and x.stride() == y.stride():
        for user in list(node.users):
            if user.op != "output" or not _is_of_input(base):  # whose view is the user's
                user.replace_input_with(node, base)
    elif length > 1 and x.numel() == y.numel() and x.is_contiguous() and y.is_contiguous():
        with node.graph.inserting_before(node):
            view = node.graph.call_method("view", (base, tuple(y.shape)))
        view.meta = node.meta
        # strides of dimensions of one may be other ones
        node.replace_all_uses_with(view, delete_user_cb=lambda user: user.op != "output")


def _results_are_apart(graph: fx.Graph) -> bool:
    """Whether no two results share memory that the replaced code's did not.

    A view of what was computed may stand for a tensor of its own, which may be written to in
    place. Those of inputs, and what is detached, are the user's.
    """
    results = [x for x in nodes_in(graph.output_node().args) if not _is_of_input(x)]
    return len(set(results)) == len(results) and not any(_is_view(_attached(x)) for x in results)


def _is_of_input(node: fx.Node) -> bool:
    while node.op != "placeholder" and is_view(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _attached(node: fx.Node) -> fx.Node:
    while name_of(node) == "detach":
        node = node.all_input_nodes[0]
    return node
