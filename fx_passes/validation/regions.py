"""Which part of the two graphs to run for one changed value, and from which inputs on.

NOTE [Leaves of a check]
A check runs the user's code from some leaves to the value that was replaced, and the replacement
from the same leaves. The leaves are what the replacement reads of the user's graph, cut off from
the network behind them and drawn at random. That must not tear apart what belongs together: where
one leaf is computed from another, or from what the region also computes, by cheap operations
(views, casts, masks, a detach), it is no leaf but is computed, in both runs. What is not
floating point (masks, labels, positions) is always computed as far back as that goes, because a
rewrite may rely on how a mask was made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import written_by
from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of, storage_of
from torch_streamkl.fx_passes.validation.changes import Change, Comparison
from torch_streamkl.fx_passes.validation.options import NotChecked
from torch_streamkl.fx_passes.validation.sizes import Sizes

# what a check does not look behind for the origin of a leaf
HEAVY = {
    "matmul", "bmm", "mm", "einsum", "baddbmm", "addmm", "linear", "__matmul__", "__rmatmul__",
    "scaled_dot_product_attention", "multi_head_attention_forward", "embedding", "embedding_bag",
    "layer_norm", "rms_norm", "group_norm", "batch_norm", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "bilinear", "cdist",
}  # fmt: skip
RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "normal_", "uniform_", "exponential_")
MAX_NODES = 2000


@dataclass(frozen=True)
class Region:
    """The nodes of both graphs to run, in order, and the nodes whose values they start from."""

    change: Change
    leaves: tuple[fx.Node, ...]  # nodes of the user's graph
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]


def find_region(change: Change, graphs: Comparison) -> Region:
    """The least region around a change in which every relation between its inputs is kept."""
    computed: set[str] = set()
    if change.after.name in graphs.kept:
        computed |= _cone(graphs.before[change.after.name])
    while True:
        after, leaves = _walk(change.after, graphs.kept - computed)
        before, others = _walk(change.before, frozenset(x.name for x in leaves))
        leaves |= others
        after |= _with_writes(graphs.after, after, leaves, change.after, graphs.kept - computed)
        names = frozenset(x.name for x in leaves)
        before |= _with_writes(graphs.before, before, leaves, change.before, names)
        inside = {n.name for n in before | after}
        names = frozenset(x.name for x in (*leaves, *_read_by(before | after)))
        found = [graphs.before.get(n) or graphs.after[n] for n in sorted(names - inside)]
        torn = _torn(found, inside) - computed
        if not torn:
            break
        computed |= torn
    if any(draws_random(n) and n.name not in graphs.kept for n in found):
        raise NotChecked("it draws random numbers")
    in_order = (
        _with_modes(graphs.before.values(), before),
        _with_modes(graphs.after.values(), after),
    )
    return Region(change, tuple(found), *in_order)


def replacement_of(change: Change, graphs: Comparison) -> set[fx.Node]:
    """The nodes of the new graph that are not in the user's and that make a changed value."""
    return _walk(change.after, graphs.kept)[0]


def is_leaf(node: fx.Node) -> bool:
    """A node that is never run: an input, a known number, or what is drawn at random."""
    if node.op in ("placeholder", "get_attr"):
        return True
    return Sizes().is_known(example(node)) or _is_opaque(node)


def _is_opaque(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if name_of(node) == "getitem" and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        return not isinstance(example(source), Tensor) and _is_opaque(source)
    return draws_random(node)


def draws_random(node: fx.Node) -> bool:
    name = name_of(node)
    if name == "dropout":
        p, training = (
            node.kwargs.get(key, node.args[i] if len(node.args) > i else None)
            for i, key in ((1, "p"), (2, "training"))
        )
        return not (p == 0.0 or training is False)
    return any(word in name for word in RANDOM)


def _hidden_writes(node: fx.Node) -> list[fx.Node]:
    """What an operation writes to though no name tells: tables of embeddings, statistics."""
    name = name_of(node)
    if name in ("embedding", "embedding_bag"):
        place = 3 if name == "embedding" else 4
        norm = node.args[place] if len(node.args) > place else node.kwargs.get("max_norm")
        return node.all_input_nodes if norm is not None else []
    return node.all_input_nodes if name in ("batch_norm", "instance_norm") else []


def _sets_state(node: fx.Node) -> bool:
    """Whether a node changes a mode for those that follow: gradients, autocast."""
    return name_of(node) in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


def _with_modes(nodes: Iterable[fx.Node], chosen: set[fx.Node]) -> tuple[fx.Node, ...]:
    """The chosen nodes in order, and the changes of modes that they run under."""
    kept: list[fx.Node] = []
    recording = torch.is_grad_enabled()  # at the start of the graph
    last: list[bool] = [recording]  # the mode of the operation before
    for node in nodes:
        name = name_of(node)
        if name == "_set_grad_enabled":
            recording = bool(node.args[0])
        elif name == "_exit_autocast" and kept and kept[-1] is node.args[0]:
            kept.pop()
        elif _sets_state(node):
            kept.append(node)
        elif node in chosen:
            if recording != last[-1]:
                kept.append(_latest_mode(node, recording))
                last.append(recording)
            kept.append(node)
    while kept and _sets_state(kept[-1]):
        kept.pop()
    return tuple(kept)


def _latest_mode(node: fx.Node, recording: bool) -> fx.Node:
    """The last node before this one that sets whether gradients are recorded."""
    while name_of(node) != "_set_grad_enabled" or node.args[0] is not recording:
        node = node.prev
    return node


def _walk(start: fx.Node, stops: frozenset[str]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes from a node backwards to ``stops`` and to leaves, and which of these it met."""
    inside: set[fx.Node] = set()
    met: set[fx.Node] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node in inside or node in met:
            continue
        if node.name in stops or is_leaf(node):
            met.add(node)
            continue
        inside.add(node)
        if len(inside) > MAX_NODES:
            raise NotChecked(f"more than {MAX_NODES} operations between its inputs and its value")
        stack.extend(node.all_input_nodes)
    return inside, met


def _read_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {a for n in nodes for a in n.all_input_nodes}


def _cone(node: fx.Node) -> set[str]:
    """A node and what it is computed from by cheap operations, down to heavy ones and inputs."""
    found: set[str] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current.name in found:
            continue
        found.add(current.name)
        if not is_leaf(current) and name_of(current) not in HEAVY:
            stack.extend(current.all_input_nodes)
    return found


def _torn(leaves: list[fx.Node], inside: set[str]) -> set[str]:
    """What has to be computed, so that no relation between leaves is lost."""
    names = {x.name for x in leaves}
    cones = {x: _cone(x) for x in leaves if not is_leaf(x)}
    torn: set[str] = set()
    graph = [n for x in leaves[:1] for n in x.graph.nodes]
    cheap = {n.name for n in graph if not is_leaf(n) and name_of(n) not in HEAVY}
    for leaf, cone in cones.items():
        behind = cone - {leaf.name}
        for source in leaf.all_input_nodes if name_of(leaf) in HEAVY else []:
            behind |= _cone(source)
        others = (inside | names) - {leaf.name}
        shared = any(behind & (other - {x.name}) for x, other in cones.items() if x is not leaf)
        value = example(leaf)
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if behind & others or shared or (not is_float and len(cone) > 1):
            torn |= {leaf.name} | (behind & cheap)
    return torn


def _with_writes(
    graph: dict[str, fx.Node],
    inside: set[fx.Node],
    leaves: set[fx.Node],
    last: fx.Node,
    stops: frozenset[str],
) -> set[fx.Node]:
    """Writes to what the nodes read, which have no data edge to them, and their inputs."""
    added: set[fx.Node] = set()
    while True:
        touched = {storage_of(n) for n in (*inside, *added, *leaves)} - {None}
        found = False
        for node in graph.values():
            if node is last:
                break
            if node in inside or node in added:
                continue
            targets = written_by(node) + _hidden_writes(node)
            if any(storage_of(target) in touched for target in targets):
                more, met = _walk(node, stops - {node.name})
                added |= more
                leaves |= {x for x in met if x.name in stops or is_leaf(x)}
                found = True
        if not found:
            return added
