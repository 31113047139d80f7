"""Chooses which part of the two graphs to run for a changed value, and from which inputs on.

NOTE [Leaves of a check]
A check runs the user's code from some leaves to the value that was replaced, and the replacement
from the same leaves. The leaves are what the replacement reads of the user's graph, cut off from
the network before them and drawn at random. That must not separate what belongs together. If one
leaf is computed from another, or from what the region also computes, by cheap operations (views,
casts, masks, a detach), it is no leaf but is computed, in both runs. Tensors that are not floating
point (masks, labels, positions) are always computed from as far back as possible, because a
rewrite may rely on how a mask was computed. So is a table that is computed from nothing, such as a
bias of positions, which teacher and student may each compute for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import draws_random
from torch_streamkl.fx_passes.fx_utils.nodes import example, name_of, reached, storage_of
from torch_streamkl.fx_passes.validation.changes import Change, Comparison, Graph
from torch_streamkl.fx_passes.validation.kinds import HEAVY, is_leaf, sets_state
from torch_streamkl.fx_passes.validation.options import NotChecked

MAX_NODES = 2000


@dataclass(frozen=True)
class Region:
    """Holds the nodes of both graphs to run, in order, and the nodes that they start from."""

    change: Change
    leaves: tuple[fx.Node, ...]  # nodes of the user's graph
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]


def find_region(change: Change, graphs: Comparison) -> Region:
    """Returns the least region around a change that keeps every relation between its inputs."""
    computed: set[str] = set()
    if change.after.name in graphs.kept:
        computed |= _cone(graphs.before.nodes[change.after.name])
    while True:
        after, leaves = _walk(change.after, graphs.kept - computed)
        before, others = _walk(change.before, frozenset(x.name for x in leaves))
        leaves |= others
        after |= _with_writes(graphs.after, after, leaves, change.after, graphs.kept - computed)
        names = frozenset(x.name for x in leaves)
        before |= _with_writes(graphs.before, before, leaves, change.before, names)
        inside = {n.name for n in before | after}
        names = frozenset(x.name for x in (*leaves, *_read_by(before | after)))
        found = [
            graphs.before.nodes.get(n) or graphs.after.nodes[n] for n in sorted(names - inside)
        ]
        torn = _torn(found, inside, graphs.before.cheap)
        torn |= {x.name for x in leaves} & inside  # a leaf of one graph, computed in the other
        torn -= computed
        if not torn:
            break
        computed |= torn
    if any(draws_random(n) and n.name not in graphs.kept for n in found):
        raise NotChecked("it draws random numbers")
    in_order = (
        _with_modes(graphs.before, before),
        _with_modes(graphs.after, after),
    )
    return Region(change, tuple(found), *in_order)


def replacement_of(change: Change, graphs: Comparison) -> set[fx.Node]:
    """Returns the new graph's added nodes that compute a changed value."""
    return _walk(change.after, graphs.kept)[0]


def _with_modes(graph: Graph, chosen: set[fx.Node]) -> tuple[fx.Node, ...]:
    """Returns the chosen nodes in order, and the changes of modes that they run under."""
    kept: list[fx.Node] = []
    recording = torch.is_grad_enabled()  # at the start of the graph
    last: list[bool] = [recording]  # the mode of the operation before
    in_order = sorted((*chosen, *graph.modes), key=lambda n: graph.position[n.name])
    for node in in_order:
        name = name_of(node)
        if name == "_set_grad_enabled":
            recording = bool(node.args[0])
        elif name == "_exit_autocast" and kept and kept[-1] is node.args[0]:
            kept.pop()
        elif sets_state(node):
            kept.append(node)
        elif node in chosen:
            if recording != last[-1]:
                kept.append(_latest_mode(node, recording))
                last.append(recording)
            kept.append(node)
    while kept and sets_state(kept[-1]):
        kept.pop()
    return tuple(kept)


def _latest_mode(node: fx.Node, recording: bool) -> fx.Node:
    """Returns the last earlier node that sets whether gradients are recorded."""
    while name_of(node) != "_set_grad_enabled" or node.args[0] is not recording:
        node = node.prev
    return node


def _walk(start: fx.Node, stops: frozenset[str]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Returns the nodes from a node backwards to ``stops`` and leaves, and those it met."""

    def is_met(node: fx.Node) -> bool:
        return node.name in stops or is_leaf(node)

    found = reached([start], lambda n: [] if is_met(n) else n.all_input_nodes)
    met = set(filter(is_met, found))
    if len(found - met) > MAX_NODES:
        raise NotChecked(f"more than {MAX_NODES} operations between its inputs and its value")
    return found - met, met


def _read_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {a for n in nodes for a in n.all_input_nodes}


def _cone(node: fx.Node) -> set[str]:
    """Returns a node and what it is computed from by cheap operations, down to inputs and
    expensive ones.
    """

    def cheap(n: fx.Node) -> list[fx.Node]:
        return [] if is_leaf(n) or name_of(n) in HEAVY else n.all_input_nodes

    return {n.name for n in reached([node], cheap)}


def _torn(leaves: list[fx.Node], inside: set[str], cheap: frozenset[str]) -> set[str]:
    """Finds what has to be computed, so that no relation between leaves is lost."""
    names = {x.name for x in leaves}
    cones = {x: _cone(x) for x in leaves if not is_leaf(x)}
    torn: set[str] = set()
    for leaf, cone in cones.items():
        ancestors_of_leaf = cone - {leaf.name}
        for source in leaf.all_input_nodes if name_of(leaf) in HEAVY else []:
            ancestors_of_leaf |= _cone(source)
        others = (inside | names) - {leaf.name}
        shared = any(
            ancestors_of_leaf & (other - {x.name}) for x, other in cones.items() if x is not leaf
        )
        value = example(leaf)
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        is_constant = cone <= cheap  # the program may make the same table in several places
        if ancestors_of_leaf & others or shared or is_constant or (not is_float and len(cone) > 1):
            torn |= {leaf.name} | (ancestors_of_leaf & cheap)
    return torn


def _with_writes(
    graph: Graph,
    inside: set[fx.Node],
    leaves: set[fx.Node],
    last: fx.Node,
    stops: frozenset[str],
) -> set[fx.Node]:
    """Adds in-place writes to memory that the nodes read, and the inputs of these writes."""
    added: set[fx.Node] = set()
    end = graph.position[last.name]
    before = [(node, memory) for node, memory in graph.writes if graph.position[node.name] < end]
    while True:
        touched = {storage_of(n) for n in (*inside, *added, *leaves)}
        missing = [
            node
            for node, memory in before
            if memory & touched and node not in inside and node not in added
        ]
        if not missing:
            return added
        for node in missing:
            more, met = _walk(node, stops - {node.name})
            added |= more
            leaves |= met
