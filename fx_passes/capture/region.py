"""Selects the nodes that may belong to a divergence: the region around its softmaxes.

A region starts at softmaxes, kl_div, their hand-written forms, and cross_entropy. It reaches
backwards to the matmuls of the scores and through the code of the masks, and forwards to the first
scalar, or the sum of two of the same distributions. Only regions are analysed, never the rest of
the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.mutation import written_by, written_memory
from torch_streamkl.fx_passes.fx_utils.nodes import (
    ancestors,
    example,
    is_call,
    is_tensor,
    name_of,
    nodes_in,
    reached,
    storage_of,
)
from torch_streamkl.fx_passes.fx_utils.op_names import (
    CASTS,
    COPIES,
    DIFFERENCES,
    LAYERS,
    MATMULS,
    OF_ROWS,
    OPERAND_VIEWS,
    PRODUCTS,
    QUOTIENTS,
    RESHAPES,
)
from torch_streamkl.fx_passes.fx_utils.opaque_nodes import opaque
from torch_streamkl.fx_passes.fx_utils.sizes import hint_of

SEEDS = OF_ROWS | {"kl_div", "cross_entropy"}
# never part of a score or a mask, and the door to the rest of the network
BARRIERS = LAYERS | {
    "gelu", "silu", "checkpoint", "all_reduce", "all_gather",
    f"{opaque.__module__}.{opaque.__name__}",
}  # fmt: skip
COMPARISONS = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity",
               "binary_cross_entropy_with_logits"}  # fmt: skip
MEASURES = {"pow", "square", "abs", "norm", "vector_norm", "matrix_norm", "linalg_vector_norm",
            "linalg_matrix_norm", "linalg_norm"}  # fmt: skip
ADDITIONS, SCALINGS = {"add", "iadd"} | DIFFERENCES, PRODUCTS | QUOTIENTS | {"neg"}
ENTRIES = {"gather", "take_along_dim"}
SUMS = {"sum", "mean", "nansum", "nanmean", "amax", "max", "norm", "var", "std"}
MAXIMA = {"amax", "max", "argmax"}
SHARE_OF_ENTRIES = 8  # at most one in 8: products with the weight rows of many ids take longer
GUARDS = CASTS | {"clamp", "clamp_min", "maximum", "add", "clip"}


@dataclass(frozen=True)
class Region:
    """Holds nodes to analyse, in graph order, and the outside nodes that they read."""

    nodes: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]


def has_seeds(graph: fx.Graph) -> bool:
    """Returns whether a graph has an operation with which an analysis could begin."""
    return any(map(_is_seed, graph.nodes))


def find_region(graph: fx.Graph) -> Region | None:
    """Returns the union of the regions of all seeds, or None when there is none."""
    seeds = [n for n in graph.nodes if _is_seed(n)]
    if not seeds:
        return None
    inside: set[fx.Node] = set()
    forward, seen = list(seeds), set(seeds)
    while forward:
        node = forward.pop()
        _add_with_inputs(node, inside)
        value = example(node)
        if isinstance(value, Tensor) and value.dim() == 0:
            continue  # after the first scalar there is only arithmetic on losses
        reached = (x for u in node.users for x in ([u] if _is_operation(u) else _filled_by(u)))
        for user in reached:
            if user not in seen and _is_operation(user) and name_of(user) not in BARRIERS:
                seen.add(user)
                if name_of(user) in MATMULS:
                    _add_with_inputs(user, inside)  # probabilities @ values
                else:
                    forward.append(user)
    _add_halves(inside)
    _add_maxima(inside)
    if not _add_writes(graph, inside):
        return None
    _drop_orphans(inside)
    _add_shapes(inside)
    _add_identities(inside)
    nodes = tuple(n for n in graph.nodes if n in inside)
    leaves = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
    return Region(nodes, tuple(leaves))


def _add_halves(inside: set[fx.Node]) -> None:
    """Adds sums of two scalars of the same distributions, as the halves of a JS divergence are.

    Sums over layers have different ones. Losses that are added to others stay outside.
    """
    reached: dict[fx.Node, list[tuple[fx.Node, set[fx.Node]]]] = {}
    for node in inside:
        value = example(node)
        if not isinstance(value, Tensor) or value.dim():
            continue
        for user in node.users:
            steps = set[fx.Node]()
            while _is_of_one_scalar(user) and len(user.users) == 1:
                steps.add(user)
                user = next(iter(user.users))
            if name_of(user) in ADDITIONS and user not in inside and _is_operation(user):
                reached.setdefault(user, []).append((node, steps))
    for total, halves in reached.items():
        if len(halves) != 2 or len({node for node, _ in halves}) < 2:
            continue
        (a, before), (b, after) = halves
        found = _distributions(a)
        if len(found) == 2 and found == _distributions(b):
            inside |= {total, *before, *after}


def _add_maxima(inside: set[fx.Node]) -> None:
    """Adds the largest scores of a row and their places, which metrics next to a loss are."""

    def users(node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if u in inside or _keeps_order(u) or _adds(u)]

    products = [n for n in inside if name_of(n) in MATMULS]
    for node in reached(products, users):
        for user in node.users:
            if name_of(user) in MAXIMA and user not in inside and _is_operation(user):
                _add_with_inputs(user, inside)
                if not is_tensor(user):
                    inside |= {u for u in user.users if name_of(u) == "getitem"}


def _keeps_order(node: fx.Node) -> bool:
    """Whether a node scales scores, masks some, or casts them."""
    names = SCALINGS | CASTS | COPIES | RESHAPES | {"getitem", "masked_fill", "where"}
    return name_of(node) in names and _is_operation(node)


def _adds(node: fx.Node) -> bool:
    """Whether a node adds something to scores, such as a bias."""
    return name_of(node) in ADDITIONS and _is_operation(node)


def _is_of_one_scalar(node: fx.Node) -> bool:
    """Whether a node scales a value, or adds a number to it, as `sum` of Python begins with 0."""
    is_number_added = name_of(node) in ADDITIONS and len(node.all_input_nodes) == 1
    return name_of(node) in SCALINGS or is_number_added


def _distributions(node: fx.Node) -> set[fx.Node]:
    """The scores whose softmax or log-softmax a value is computed from."""
    softmaxes = (n for n in ancestors(node) if name_of(n) in ("softmax", "log_softmax"))
    return {n.all_input_nodes[0] for n in softmaxes}


def _filled_by(node: fx.Node) -> list[fx.Node]:
    """The tensor that an assignment writes entries of scores to: it is read in their place.

    Per-row values are computed where they are: who reads them later reads numbers.
    """
    if name_of(node) not in ("setitem", "__setitem__"):
        return []

    def made_of(n: fx.Node) -> list[fx.Node]:
        return [] if name_of(n) in MATMULS | SEEDS | SUMS | ENTRIES else n.all_input_nodes

    made = reached(nodes_in(node.args[-1:]), made_of)
    return written_by(node) if any(name_of(n) in ENTRIES for n in made) else []


def _add_shapes(inside: set[fx.Node]) -> None:
    """Shapes that the region reads are taken inside it: only tensors and numbers can be leaves."""
    _add_read(inside, lambda node: isinstance(example(node), (tuple, list)))


def _add_read(inside: set[fx.Node], belongs: Callable[[fx.Node], bool]) -> None:
    def read(node: fx.Node) -> list[fx.Node]:
        return [a for a in node.all_input_nodes if a not in inside and belongs(a)]

    inside |= reached([a for node in inside for a in read(node)], read)


def _add_identities(inside: set[fx.Node]) -> None:
    """Adds operations that return their input, as ``x.type_as(x)``: no two inputs are one
    tensor.
    """

    def is_identity(node: fx.Node) -> bool:
        returns_input = any(example(a) is example(node) for a in node.all_input_nodes)
        return returns_input and _is_operation(node) and not written_by(node)

    _add_read(inside, is_identity)


def _drop_orphans(inside: set[fx.Node]) -> None:
    """Removes `getitem` nodes of tuples from outside: only tensors are inputs of a region."""
    for node in list(inside):
        source = node.args[0] if node.args else None
        if (
            name_of(node) == "getitem"
            and isinstance(source, fx.Node)
            and source not in inside
            and not is_tensor(source)
        ):
            inside.discard(node)


def _is_operation(node: fx.Node) -> bool:
    """Whether a node is a call that produces tensors and may be traced again."""
    if not is_call(node):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    value = example(node)
    return isinstance(value, Tensor) or (
        isinstance(value, (tuple, list))
        and len(value) > 0
        and all(isinstance(v, Tensor) for v in value)
    )


def _is_seed(node: fx.Node) -> bool:
    return _is_operation(node) and bool(
        name_of(node) in SEEDS
        or _is_softmax_by_hand(node)
        or compared_by_hand(node)
        or _compares_products(node)
        or _reads_entries(node)
    )


def _is_softmax_by_hand(node: fx.Node) -> bool:
    """Whether a node is ``exp(scores - max)``: an exponential of a matmul, up to a few steps."""
    return name_of(node) == "exp" and is_tensor(node) and _is_of_product(node)


def _compares_products(node: fx.Node) -> bool:
    """Whether a node compares two matmuls: a loss of both, or what measures their difference."""
    tensors, is_loss = node.all_input_nodes, name_of(node) in COMPARISONS
    if is_loss:
        tensors = tensors[:2]  # before weights
    if len(tensors) != 2 or not all(map(_is_of_product, tensors)):
        return False
    if is_loss:
        return True
    return name_of(node) in DIFFERENCES and any(name_of(u) in MEASURES for u in node.users)


def _reads_entries(node: fx.Node) -> bool:
    """Whether a node reads a few entries of a matmul's rows at ids, as a cached teacher has."""
    if name_of(node) not in ENTRIES or len(node.all_input_nodes) < 2:
        return False
    source, ids = node.all_input_nodes[:2]
    made, at = example(source), example(ids)
    if not (isinstance(made, Tensor) and isinstance(at, Tensor) and made.dim() == at.dim() > 1):
        return False
    vocab, count = hint_of(made.shape[-1]), hint_of(at.shape[-1])
    if vocab is None or count is None or count * SHARE_OF_ENTRIES > vocab:
        return False
    while _keeps_order(source) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    return name_of(source) in MATMULS


def _is_of_product(node: fx.Node) -> bool:
    """Whether a node is a matmul's result, up to a few steps."""
    if name_of(node) in MATMULS:
        return True
    frontier = list(node.all_input_nodes)
    for _ in range(12):
        if not frontier:
            return False
        current = frontier.pop()
        if name_of(current) in MATMULS:
            return True
        if _is_operation(current) and name_of(current) not in BARRIERS | SEEDS:
            frontier.extend(current.all_input_nodes)
    return False


def compared_by_hand(node: fx.Node) -> list[fx.Node]:
    """Returns p and q of ``p * (p.log() - q.log())`` or ``p * (p / q).log()``."""
    if name_of(node) not in PRODUCTS or len(node.all_input_nodes) != 2:
        return []
    for weight, ratio in (node.all_input_nodes, reversed(node.all_input_nodes)):
        sources = [_looking_through(x, GUARDS) for x in _compared(_looking_through(ratio, CASTS))]
        value = example(sources[0]) if len(sources) == 2 else None
        if (
            isinstance(value, Tensor)
            and value.dim() > 1
            and is_tensor(sources[1])
            and _looking_through(weight, GUARDS) in sources
        ):
            return sources
    return []


def _compared(ratio: fx.Node) -> list[fx.Node]:
    """Returns the two tensors whose ratio a node is the logarithm of, or fewer."""
    if name_of(ratio) in DIFFERENCES:
        logs = [_looking_through(x, CASTS) for x in ratio.all_input_nodes]
        return [x.all_input_nodes[0] for x in logs if name_of(x) == "log"]
    if name_of(ratio) == "log" and len(ratio.all_input_nodes) == 1:
        quotient = _looking_through(ratio.all_input_nodes[0], CASTS)
        return quotient.all_input_nodes if name_of(quotient) in QUOTIENTS else []
    return []


def _looking_through(node: fx.Node, names: set[str]) -> fx.Node:
    """Returns the tensors to which these operations, each with one tensor input, are applied."""
    while name_of(node) in names and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _add_with_inputs(node: fx.Node, inside: set[fx.Node]) -> None:
    stack = [node]
    while stack:
        current = stack.pop()
        if current in inside or not _is_operation(current) or name_of(current) in BARRIERS:
            continue
        inside.add(current)
        inputs = current.all_input_nodes
        if name_of(current) in MATMULS:
            # below an operand only what operators do themselves: transposes, casts, repeated heads
            for operand in inputs:
                while _is_view_of_operand(operand) and _is_operation(operand):
                    inside.add(operand)
                    operand = operand.all_input_nodes[0]
        else:
            stack.extend(inputs)


def _is_view_of_operand(node: fx.Node) -> bool:
    """Whether a node is a view of an operand; ``view(dtype)`` and repeats are not."""
    name = name_of(node)
    if name == "view" and any(
        isinstance(x, torch.dtype) for x in (*node.args, *node.kwargs.values())
    ):
        return False
    given = (example(a) for a in node.all_input_nodes)
    return name in OPERAND_VIEWS and sum(isinstance(x, (Tensor, tuple)) for x in given) == 1


def _add_writes(graph: fx.Graph, inside: set[fx.Node]) -> bool:
    """Adds in-place writes to the region's values, because no data edge leads from them to later
    readers.

    Returns False if one of them cannot run again. Writes to outside tensors are no part of the
    region: `aliases` finds those.
    """
    while True:
        leaves = {a for n in inside for a in n.all_input_nodes if a not in inside}
        storages = {storage_of(n) for n in inside} - {storage_of(n) for n in leaves} - {None}
        missing = [
            node for node in graph.nodes if node not in inside and storages & written_memory(node)
        ]
        if not missing:
            return True
        for node in missing:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                return False
            inside.add(node)
            for source in node.all_input_nodes:
                _add_with_inputs(source, inside)
