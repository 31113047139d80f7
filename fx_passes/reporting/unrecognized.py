"""Explains why a score- or logit-sized tensor is part of no recognized loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.nodes import (
    descendants,
    example,
    location_of,
    name_of,
    nearest,
    said_name,
    tensors_read,
)
from torch_streamkl.fx_passes.fx_utils.op_names import OF_ROWS, ORDERED, STREAMED
from torch_streamkl.fx_passes.fx_utils.shape_reads import reads_values
from torch_streamkl.fx_passes.fx_utils.sizes import is_one, numel
from torch_streamkl.fx_passes.reporting.hints import ADVICE, hint_for
from torch_streamkl.fx_passes.reporting.large_tensors import (
    LOSSES,
    PRODUCTS,
    SCATTERS,
    WRITES,
)
from torch_streamkl.fx_passes.reporting.operations import is_unread, why_not
from torch_streamkl.fx_passes.reporting.reasons import AS_PRODUCT
from torch_streamkl.fx_passes.reporting.text import shown, with_hint, without_hint

AT_A_BREAK = next(x.hint for x in ADVICE if x.pattern == "graph break at ")
IN_A_BODY = "the code around it"  # reads the outputs of the body of a higher-order operator
OURS = "streamkl"  # in the names of our operators
VAGUE = ": one distribution alone, or compared by code that is no known divergence"
COMPARES = {
    "cosine_similarity", "normalize", "norm", "vector_norm", "matrix_norm", "linalg_vector_norm",
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "pow", "square", "cdist",
}  # fmt: skip
BESIDE_A_LOSS = (
    "an operator finds places of maxima in scores of a fused loss, or as its labels, if they are "
    "scaled, biased or masked at most"
)
SUMS = {"sum", "mean", "amax", "max", "logsumexp", "cross_entropy", "kl_div", "nll_loss"}


def reasons_of(
    nodes: Iterable[fx.Node], at_break: str | None, is_said: Callable[[str], bool]
) -> list[str]:
    """Returns one sentence for every group of tensors that meet the same reader, with its hint.

    ``at_break`` is where a graph break ends the graph, if one does, or `IN_A_BODY`. What is said
    elsewhere is left out.
    """
    found: dict[str, None] = {}
    said: set[fx.Node] = set()
    for node, read in _first_reads(nodes, said):
        if read.reader is not None:
            said |= descendants([read.reader])
        text = _sentence(node, read.reader, read.path, at_break)
        if text and not is_said(without_hint(text)[0]):
            found[text] = None
    return list(found)


def readers_beside(nodes: Iterable[fx.Node], at_break: str | None = None) -> list[str]:
    """Returns who reads the tensors that a fused loss no longer needs, as sentences."""
    found: dict[str, None] = {}
    said: set[fx.Node] = set()
    for node, read in _first_reads(nodes, said):
        reader = read.reader
        if reader is not None and reader.op != "output" and OURS not in name_of(reader):
            place = shown(location_of(reader)[0])
            by = f"{called(reader)} at {place}, which is not fused"
            found[f"{_origin_text(node, read.path)} is also read by {by}"] = None
        for last in read.seen:
            if any(user.op == "output" for user in last.users):
                where = f"{called(last)} at {shown(location_of(last)[0])}"
                by = f"read by {at_break}" if at_break else "returned by the compiled function"
                found[f"{where} is also {by}"] = None
    return list(found)


def _origin_text(node: fx.Node, path: Iterable[fx.Node]) -> str:
    """Names a tensor by the softmax that leads to its reader, or is before it."""
    first = _softmax_of(node, path) or node
    return f"{called(first)} at {shown(location_of(first)[0])}"


def _softmax_of(node: fx.Node, path: Iterable[fx.Node]) -> fx.Node | None:
    return next((n for n in path if name_of(n) in OF_ROWS), None) or _softmax_before(node)


@dataclass(frozen=True)
class _Read:
    """Holds who reads a tensor, by which nodes, and what else was looked at."""

    reader: fx.Node | None
    path: list[fx.Node]  # from the tensor to what is read, each computed from the one before
    seen: Collection[fx.Node]


def _first_reads(nodes: Iterable[fx.Node], said: set[fx.Node]) -> Iterator[tuple[fx.Node, _Read]]:
    """Yields the tensors that are not on the way of one before; ``said`` are those that are."""
    for node in nodes:
        if node not in said:
            read = _telling_reader(node)
            said.update(read.seen)
            yield node, read


def _telling_reader(node: fx.Node) -> _Read:
    """The first reader that is more than arithmetic per entry, and what lies between.

    What compares tensors or needs whole rows tells more than a product with values does.
    """
    value = example(node)
    before: dict[fx.Node, fx.Node | None] = {node: None}
    queue = [node]
    fallback: tuple[fx.Node, fx.Node] | None = None
    product: tuple[fx.Node, fx.Node] | None = None
    while queue:
        current = queue.pop(0)
        for user in current.users:
            if user in before or not reads_values(user, current):
                continue
            if user.op == "output":
                fallback = fallback or (user, current)
                continue
            if _is_telling(user):
                if name_of(user) not in PRODUCTS:
                    return _Read(user, _chain(current, before), before)
                product = product or (user, current)
                continue
            made = example(user)
            if isinstance(made, Tensor) and isinstance(value, Tensor):
                if numel(made) * 2 < numel(value):
                    fallback = fallback or (user, current)
                    continue
            before[user] = current
            queue.append(user)
    found = product or fallback
    if found is None:
        return _Read(None, [node], before)
    return _Read(found[0], _chain(found[1], before), before)


def _chain(last: fx.Node, before: Mapping[fx.Node, fx.Node | None]) -> list[fx.Node]:
    """Returns the nodes that lead to one: the value of each is computed from the one before."""
    found = [last]
    while (earlier := before[found[-1]]) is not None:
        found.append(earlier)
    return found[::-1]


def _is_telling(user: fx.Node) -> bool:
    name = name_of(user)
    if OURS in name:
        return True
    if name in WRITES:
        return True
    known = name in ORDERED | PRODUCTS | COMPARES | LOSSES | SCATTERS | {"gather"}
    return known or isinstance(user.target, torch._ops.HigherOrderOperator)


def _sentence(
    node: fx.Node, reader: fx.Node | None, path: list[fx.Node], at_break: str | None
) -> str:
    rows = _softmax_of(node, path)
    where = _origin_text(node, path)
    if reader is None:
        return f"{where} is as large as scores, and no loss reads it"
    if reader.op == "output":
        if at_break == IN_A_BODY:
            return ""  # said of what is around the body
        if at_break:
            return with_hint(f"{where} is read by {at_break}", AT_A_BREAK)
        return f"{where} is returned by the compiled function"
    if name_of(reader) == "getitem" and not isinstance(example(reader.all_input_nodes[0]), Tensor):
        reader = reader.all_input_nodes[0]  # one of several results, of a max over a dimension
    name, at = called(reader), shown(location_of(reader)[0])
    feeds = f"{where} feeds {name} at {at}"
    kind = name_of(reader)
    if kind == STREAMED:
        return _hinted(f"{feeds}: {BESIDE_A_LOSS}", f"{kind} of scores")
    if kind in ORDERED:
        return _hinted(f"{feeds}, which needs whole rows", f"{kind} of scores")
    if isinstance(reader.target, torch._ops.HigherOrderOperator):
        return (
            _hinted(f"{where} goes into {name} at {at}", name)
            if name == FUNCTION
            else (f"{where} goes into {name} at {at}")
        )
    if OURS in kind:
        return f"{where} is dense, and read by the fused operator"
    if kind in WRITES and reader.args[0] in path:
        return _hinted(f"{where} is overwritten in place at {at}", f"in-place {kind} of scores")
    if kind in WRITES:
        return f"{where} is written into another tensor at {at}"
    if kind in PRODUCTS and _is_sum_over_keys(node, reader):
        return _hinted(f"{feeds}: {AS_PRODUCT}", AS_PRODUCT)
    if kind in PRODUCTS and rows is not None and _is_of_distributions(node, reader):
        return f"{feeds}: a product of whole distributions, which no fused operator has"
    if kind in PRODUCTS:
        what = "attention probabilities" if rows is not None else "scores"
        return f"{feeds}: {what} that are compared with no other distribution"
    if kind == "gather" and _has_one_id(reader):
        return f"{feeds}, which reads one entry of each row"
    if kind in ("gather", "index_select", "take_along_dim") or _indexes(reader):
        return _hinted(f"{feeds}, which reads single entries of each row", "gather of scores")
    if kind in SCATTERS:
        return f"{where} is a dense target, written by {name}"
    if kind == "cross_entropy":
        return f"{feeds}: cross-entropy with labels alone, no teacher's distribution"
    if rows is None and kind == "kl_div":
        return ""  # the loss has a reason of its own
    if rows is None:
        return f"{feeds} without a softmax: no divergence"
    unread = next((n for n in (*path[1:], reader) if is_unread(n)), None)
    if unread is None:
        return f"{feeds}{VAGUE}"
    operation = name_of(unread)
    place = shown(location_of(unread)[0])
    if rows in path and unread in path and path.index(unread) < path.index(rows):
        where = f"{called(node)} at {shown(location_of(node)[0])}"
    made = "what is computed of " * ({rows, node}.isdisjoint(unread.all_input_nodes)) + where
    return _hinted(f"{called(unread)} at {place} is applied to {made}{why_not(operation)}",
                   f"{operation} of scores")  # fmt: skip


def _softmax_before(node: fx.Node) -> fx.Node | None:
    """Finds the nearest softmax that a tensor is computed from, with no product in between."""

    def made_of(n: fx.Node) -> list[fx.Node]:
        inputs = n.all_input_nodes
        inputs = [a for a in inputs if reads_values(n, a)]
        return [a for a in inputs if a.op != "placeholder" and name_of(a) not in PRODUCTS]

    found = (n for n in nearest(node, made_of) if n is not node)
    return next((n for n in found if name_of(n) in OF_ROWS), None)


def _is_sum_over_keys(node: fx.Node, reader: fx.Node) -> bool:
    """Whether a product sums over the keys of two distributions, as einsum("tv,tv->t", p, q)."""
    sizes = [numel(x) for x in tensors_read(reader)]
    made, value = example(reader), example(node)
    if not isinstance(made, Tensor) or not isinstance(value, Tensor):
        return False
    are_both = len(sizes) == 2 and all(2 * n >= numel(value) for n in sizes)
    return are_both and 4 * numel(made) <= numel(value) and len({*reader.all_input_nodes}) == 2


def _is_of_distributions(node: fx.Node, reader: fx.Node) -> bool:
    """Whether a product is of two tensors of the size of scores, such as a Gram matrix of them."""
    value, read = example(node), tensors_read(reader)
    if not isinstance(value, Tensor):
        return False
    if len(read) == 1:
        read *= 2
    return len(read) == 2 and all(2 * numel(x) >= numel(value) for x in read)


def _has_one_id(reader: fx.Node) -> bool:
    """Whether a gather reads one entry of each row, which no row has twice."""
    made = example(reader)
    return isinstance(made, Tensor) and made.dim() > 1 and is_one(made.shape[-1])


def _indexes(reader: fx.Node) -> bool:
    """Whether it reads entries by ids or a position, and not a slice or whole rows."""
    if name_of(reader) != "getitem":
        return False
    index = reader.args[1] if isinstance(reader.args[1], tuple) else (reader.args[1],)
    return any(isinstance(x, fx.Node | list) for x in index) or isinstance(index[-1], int)


def _hinted(sentence: str, reason: str) -> str:
    return with_hint(sentence, hint_for(reason))


CHECKPOINT, FUNCTION = "a checkpoint", "a custom autograd.Function"
_HIGHER_ORDER = {
    "autograd_function_apply": FUNCTION,
    "tag_activation_checkpoint": CHECKPOINT,
    "wrap_with_autocast": "an autocast region",
    "map_impl": "map",
}


def called(node: fx.Node) -> str:
    """Returns the name that a user knows an operation by."""
    name = said_name(node)
    return _HIGHER_ORDER.get(name, name)
