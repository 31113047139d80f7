"""Derives a row program's gradients symbolically (NOTE [The algebra] in program.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch_streamkl.rows.expressions import Graph, Node
from torch_streamkl.rows.operations import OPERATIONS
from torch_streamkl.rows.program import LOGSUMEXP, MAX, Program


class HeadJacobianError(ValueError):
    """A Jacobian between per-row values of different heads, which is not kept."""


HEAD_OPERATIONS = ("sum_heads", "expand_heads")


@dataclass(frozen=True)
class Sum:
    """A sum over keys that a pass of the forward gathers, over blocks of them if c is one."""

    level: int
    node: int
    head: int
    reduction: int  # K_cb: c. Of a reduction of kind sum: itself
    by: int = -1  # K_cb: b; -1 of a reduction
    size: int = 0  # keys of a block


@dataclass(frozen=True)
class ForwardPlan:
    """Plans what the passes of the forward compute."""

    nodes: tuple[Node, ...]
    num_passes: int
    jacobians: tuple[Sum, ...]


@dataclass(frozen=True)
class BackwardPlan:
    """Gradients to dot products and captured tensors, as elements."""

    nodes: tuple[Node, ...]
    dots: tuple[int | None, ...]
    captures: tuple[int | None, ...]


@functools.lru_cache(maxsize=256)
def forward_plan(program: Program, is_differentiated: bool) -> ForwardPlan:
    """Returns reductions by level; with the Jacobians where a gradient will be wanted."""
    if not is_differentiated:
        return ForwardPlan(program.nodes, max(program.levels), ())
    graph = Graph.of(program.nodes)
    jacobians = []
    varies = _varying(program)
    for c, reduction in enumerate(program.reductions):
        for b in range(len(program.reductions)):
            if program.levels[b] >= program.levels[c] or not (varies[b] and varies[c]):
                continue
            node = _tangent(graph, program, reduction.node, b)
            if graph.constant(node) == 0:
                continue
            level = program.levels[c]
            if reduction.kind == LOGSUMEXP:  # its own value is known one pass later
                node, level = graph.apply("mul", _softmax(graph, program, c), node), level + 1
            jacobians.append(Sum(level, node, graph[node].head, c, b, reduction.size))
    passes = max(*program.levels, *(j.level for j in jacobians), 1)
    return ForwardPlan(tuple(graph.nodes), passes, tuple(jacobians))


def _varying(program: Program) -> list[bool]:
    """Marks the reductions that something which may need a gradient enters."""
    of_nodes: list[bool] = []
    found: list[bool] = []

    def reduction(number: int) -> bool:
        while len(found) <= number:
            c = program.reductions[len(found)]
            found.append(c.kind != MAX and of_nodes[c.node])
        return found[number]

    for node in program.nodes:
        match node.op:
            case "dot" | "capture":
                varies = node.dtype == "float"
            case "reduction":
                varies = reduction(int(node.value))
            case op:
                is_smooth = op in HEAD_OPERATIONS or (
                    op in OPERATIONS and OPERATIONS[op].rule is not None
                )
                varies = is_smooth and any(of_nodes[a] for a in node.args)
        of_nodes.append(varies)
    return [reduction(c) for c in range(len(program.reductions))]


def _softmax(graph: Graph, program: Program, c: int) -> int:
    """exp(e_c - R_c)."""
    reduction = program.reductions[c]
    value = graph.log_sum_exp(c, reduction.head, reduction.node)
    return graph.apply("exp", graph.apply("sub", reduction.node, value))


def _tangent(graph: Graph, program: Program, root: int, b: int) -> int:
    """d(root)/dR_b, for each head of R_b where the root has none."""
    zero, head = graph.const(0.0), program.reductions[b].head
    tangents: dict[int, int] = {}
    for i in graph.used_by([root]):
        node = graph[i]
        if node.op == "reduction" and node.value == b:
            tangents[i] = graph.const(1.0)
            continue
        total = zero
        for position, a in enumerate(node.args):
            t = tangents[a]
            if graph.constant(t) == 0:
                continue
            if node.op == "sum_heads":
                # of R_b of a head, only that head's element is a function
                total = t if head else graph.sum_heads(_with_heads(graph, t, a))
                break
            rule = OPERATIONS[node.op].rule
            if rule is None:
                continue
            if node.head and head and not graph[a].head and _has_summed_heads(graph, a, b):
                raise HeadJacobianError(
                    "elements of a head use a sum over heads of what depends on each head's own "
                    "per-row values; return the sum and the elements from two programs"
                )
            total = graph.apply("add", total, rule(graph, i, position, t))
        tangents[i] = total
    return tangents[root]


def _has_summed_heads(graph: Graph, index: int, b: int) -> bool:
    """Whether R_b comes into a node through a sum over heads."""
    for i in graph.used_by([index]):
        if graph[i].op == "sum_heads":
            inside = (graph[j] for j in graph.used_by([i]))
            if any(n.op == "reduction" and n.value == b for n in inside):
                return True
    return False


def _with_heads(graph: Graph, x: int, like: int) -> int:
    """An element for each head of another, so that a sum over heads counts it for each."""
    if graph[x].head or not graph[like].head:
        return x
    node = Node("expand_heads", (x, like), 0.0, "float", graph[like].head, True)
    return graph.add(node)


@functools.lru_cache(maxsize=256)
def backward_plan(program: Program) -> BackwardPlan:
    """Returns the gradient of ``sum_c r_c R_c`` to what is not a value of a row, r_c being its
    seed.
    """
    graph = Graph.of(program.nodes)
    adjoints: dict[int, int] = {}

    def accumulate(index: int, t: int, user: int) -> None:
        """Add what a node that uses the one of this index passes on."""
        if graph.constant(t) == 0:
            return
        if graph[user].head and not graph[index].head:
            t = graph.sum_heads(_with_heads(graph, t, user))
        t = t if index not in adjoints else graph.apply("add", adjoints[index], t)
        adjoints[index] = t

    for c, reduction in enumerate(program.reductions):
        if reduction.kind == MAX:
            continue
        seed = graph.seed(c, reduction.head, by_key=reduction.size > 0)
        if reduction.kind == LOGSUMEXP:
            seed = graph.apply("mul", seed, _softmax(graph, program, c))
        accumulate(reduction.node, seed, reduction.node)
    zero = graph.const(0.0)
    for i in range(len(program.nodes) - 1, -1, -1):
        t = adjoints.get(i, zero)
        node = graph[i]
        if graph.constant(t) == 0 or node.op in ("reduction", "dot", "capture"):
            continue
        if node.op == "sum_heads":
            accumulate(node.args[0], t, i)
            continue
        for position, a in enumerate(node.args):
            rule = OPERATIONS[node.op].rule if node.op in OPERATIONS else None
            if rule is not None and graph[a].dtype == "float":
                accumulate(a, rule(graph, i, position, t), i)
    found: dict[tuple[str, int], int] = {}
    for i, node in enumerate(program.nodes):
        t = adjoints.get(i, zero)
        if node.op in ("dot", "capture") and graph.constant(t) != 0:
            found[node.op, int(node.value)] = _with_heads(graph, t, i)
    return BackwardPlan(
        tuple(graph.nodes),
        tuple(found.get(("dot", i)) for i in range(len(program.dot_heads))),
        tuple(found.get(("capture", i)) for i in range(len(program.captures))),
    )
