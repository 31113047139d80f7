"""Builds scores, or attention, from the operands of matmul, linear and einsum."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain.layout import (
    Dim,
    Layout,
    Piece,
)
from torch_streamkl.fx_passes.domain.scores import Bias, ScoreKey, Scores
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.domain.values import CONTRACTED, Attention, Elements
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import name_of
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    is_one,
    product,
    provably_equal,
    quotient,
    shape_of,
)

REINTERPRETED = torch.ops.aten.view.dtype
REPEATED_EQUALLY = torch.ops.aten.repeat_interleave.self_int
Refer = Callable[[fx.Node, Layout], TensorRef]  # the analysis knows whether gradient flows


def scores_of_matmul(
    lhs: fx.Node, rhs: fx.Node, out_shape: Sequence[Size], refer: Refer
) -> Scores:
    """Reads ``lhs @ rhs``."""
    lhs_shape, rhs_shape = shape_of(lhs), shape_of(rhs)
    if len(lhs_shape) < 2 or len(rhs_shape) < 2:
        raise Unsupported("a product with a vector is not a score matrix")
    rank = len(out_shape)
    dims: list[Dim] = [
        () if is_one(size) else (Piece(d, size),) for d, size in enumerate(out_shape)
    ]
    contracted: Dim = (Piece(CONTRACTED, lhs_shape[-1]),)

    def batch_dims(shape: Sequence[Size]) -> list[Dim]:
        skipped = rank - len(shape)
        return [() if is_one(size) else dims[skipped + d] for d, size in enumerate(shape[:-2])]

    lhs_layout = (*batch_dims(lhs_shape), dims[-2], contracted)
    rhs_layout = (*batch_dims(rhs_shape), contracted, dims[-1])
    return _scores(refer(lhs, lhs_layout), refer(rhs, rhs_layout), tuple(dims))


def scores_of_linear(
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    out_shape: Sequence[Size],
    refer: Refer,
) -> Scores:
    """Reads ``F.linear``: every leading dimension of x is a row dimension."""
    dims: list[Dim] = [
        () if is_one(size) else (Piece(d, size),) for d, size in enumerate(out_shape)
    ]
    contracted: Dim = (Piece(CONTRACTED, shape_of(x)[-1]),)
    scores = _scores(
        refer(x, (*dims[:-1], contracted)), refer(weight, (dims[-1], contracted)), tuple(dims)
    )
    return scores if bias is None else scores.then(Bias(refer(bias, (dims[-1],))))


def scores_of_einsum(
    equation: str, operands: Sequence[fx.Node], out_shape: Sequence[Size], refer: Refer
) -> Scores:
    """Reads a two-operand einsum without repeated labels, contracted over labels of both
    operands.
    """
    left, _, out = _without_dots(equation, [len(shape_of(x)) for x in operands]).partition("->")
    labels = left.split(",")
    if len(labels) != 2 or "->" not in equation:
        raise Unsupported(
            f"einsum '{equation}' is not a product of two operands with an explicit result"
        )
    if any(len(set(text)) != len(text) for text in (*labels, out)):
        raise Unsupported(f"einsum '{equation}' repeats a label")
    summed = [c for c in labels[0] if c not in out]
    if any(c not in labels[1] for c in summed) or any(
        c not in out and c not in summed for c in labels[1]
    ):
        raise Unsupported(f"einsum '{equation}' sums a label of one operand only")
    if not summed:
        raise Unsupported(f"einsum '{equation}' contracts nothing")
    sizes = [dict(zip(t, shape_of(x), strict=True)) for t, x in zip(labels, operands, strict=True)]
    if not all(provably_equal(sizes[0][c], sizes[1][c]) for c in summed):
        raise Unsupported(f"einsum '{equation}' broadcasts a label that it contracts")
    dims: dict[str, Dim] = {
        c: () if is_one(size) else (Piece(d, size),)
        for d, (c, size) in enumerate(zip(out, out_shape, strict=True))
    }
    for index, c in enumerate(summed):
        dims[c] = (Piece(CONTRACTED - index, shape_of(operands[0])[labels[0].index(c)]),)
    layouts = [
        tuple(
            () if is_one(size) else dims[c] for c, size in zip(text, shape_of(node), strict=True)
        )
        for text, node in zip(labels, operands, strict=True)
    ]
    return _scores(
        refer(operands[0], layouts[0]),
        refer(operands[1], layouts[1]),
        tuple(dims[c] for c in out),
    )


def _without_dots(equation: str, ranks: Sequence[int]) -> str:
    """Replaces ``...`` in an equation by labels, the last of the leading dimensions."""
    equation = equation.replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if "..." not in equation or len(terms) != len(ranks):
        return equation
    hidden = [
        rank - len(t.replace("...", "")) if "..." in t else 0
        for t, rank in zip(terms, ranks, strict=True)
    ]
    free = [c for c in string.ascii_letters if c not in equation][: max(hidden)]
    terms = [
        t.replace("...", "".join(free[len(free) - n :]))
        for t, n in zip(terms, hidden, strict=True)
    ]
    return ",".join(terms) + arrow + out.replace("...", "".join(free))


def _scores(lhs: TensorRef, rhs: TensorRef, dims: Layout) -> Scores:
    sizes = tuple((p.axis, p.size) for dim in dims for p in dim)
    return Scores(ScoreKey(peeled(lhs), peeled(rhs), sizes), dims)


def attention_of(probabilities: Elements, values: fx.Node, refer: Refer) -> Attention | None:
    """Reads ``probabilities @ values``, if keys are the last dimension of plain probabilities."""
    distribution, rank = probabilities.probability(), probabilities.rank
    shape = shape_of(values)
    if (
        distribution is None
        or probabilities.key_dim != rank - 1
        or len(shape) < 2
        or len(shape) > rank
    ):
        return None
    layout = probabilities.layouts[0]
    batch = layout[rank - len(shape) : -2]
    dims = [() if is_one(size) else dim for dim, size in zip(batch, shape[:-2], strict=True)]
    if not lay.has_shape((*dims, layout[-1]), shape[:-1]):
        return None  # the values have a batch that the probabilities are broadcast along
    operand = refer(values, (*dims, layout[-1], (Piece(CONTRACTED, shape[-1]),)))
    return Attention(probabilities, peeled(operand), tuple(range(rank)))


def attention_of_einsum(
    equation: str, probabilities: Elements, values: fx.Node, refer: Refer
) -> Attention | None:
    """Reads attention by labels: keys are summed, and a label of the values replaces them."""
    distribution, shape = probabilities.probability(), shape_of(values)
    ranks = [probabilities.rank, len(shape)]
    left, _, out = _without_dots(equation, ranks).partition("->")
    mine, theirs = left.split(",") if left.count(",") == 1 else ("", "")
    if distribution is None or [len(mine), len(theirs)] != ranks:
        return None
    key = mine[probabilities.key_dim]
    rows = [c for c in mine if c != key]
    own = [c for c in theirs if c not in mine]
    if any(len(set(text)) != len(text) for text in (mine, theirs, out)) or len(own) != 1:
        return None
    if key not in theirs or sorted(out) != sorted([*rows, *own]):
        return None
    layout = probabilities.layouts[0]
    if is_one(shape[theirs.index(key)]) and layout[probabilities.key_dim]:
        return None  # the values of one key, which einsum takes for those of all
    dims: dict[str, Dim] = dict(zip(mine, layout, strict=True))
    dims[own[0]] = (Piece(CONTRACTED, shape[theirs.index(own[0])]),)
    found = [() if is_one(n) else dims[c] for c, n in zip(theirs, shape, strict=True)]
    if not lay.has_shape(tuple(found), shape):
        return None  # the probabilities are broadcast along a dimension of the values
    operand = refer(values, tuple(found))
    return Attention(probabilities, peeled(operand), tuple([*rows, *own].index(c) for c in out))


def peeled(operand: TensorRef) -> TensorRef:
    """Returns the operand before transposes, casts and repeated heads, which operators handle."""
    while True:
        below = _below(operand)
        if below is None:
            return operand
        operand = below


def _below(operand: TensorRef) -> TensorRef | None:
    node, layout = operand.node, operand.layout
    if (
        node.op != "call_function"
        or operand.steps
        or not node.args
        or not isinstance(node.args[0], fx.Node)
    ):
        return None
    source = node.args[0]
    arguments: Any = node.args[1:]  # what they are depends on the operation
    if not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    shape, rank = shape_of(source), len(shape_of(node))
    found: Layout | None = None
    match name_of(node):
        case "transpose":
            a, b = (int(d) % rank for d in arguments[:2])
            order = list(range(rank))
            order[a], order[b] = order[b], order[a]
            found = lay.permute(layout, order)
        case "permute":
            order = [int(d) % rank for d in arguments[0]]
            found = tuple(layout[order.index(d)] for d in range(rank))
        case "t" | "numpy_T" | "mT" | "adjoint":
            reversed_all = name_of(node) == "numpy_T"
            order = (
                list(reversed(range(rank)))
                if reversed_all
                else [*range(rank - 2), rank - 1, rank - 2]
            )
            found = lay.permute(layout, order)
        case "to" | "_to_copy" | "contiguous" | "alias" | "clone":
            found = layout if _is_upcast(source, node) else None
        case "unsqueeze":
            dim = int(arguments[0]) % rank
            found = (*layout[:dim], *layout[dim + 1 :]) if layout[dim] == () else None
        case "expand":
            found = _unexpanded(layout, shape)
        case "slice" if all(map(provably_equal, shape, shape_of(node))):
            found = layout  # x[:, None] takes whole slices where sizes are symbolic
        case "view" | "reshape" | "_unsafe_view" | "flatten" if node.target != REINTERPRETED:
            found = lay.reshape(layout, shape)
        case "repeat_interleave" if node.target == REPEATED_EQUALLY:
            found = _without_repeats(layout, shape)
    if found is None or not lay.has_shape(found, shape) or not _contracts_alike(layout, found):
        return None
    return replace(operand, node=source, layout=found)


def _contracts_alike(layout: Layout, below: Layout) -> bool:
    """Whether products are still summed over as many entries: those of a repeated one count."""
    contracted = [[p.size for d in x for p in d if p.axis < 0] for x in (layout, below)]
    return provably_equal(*(product(sizes) for sizes in contracted))


def _is_upcast(source: fx.Node, node: fx.Node) -> bool:
    """The same values on the same device: products of the narrow type are exact in float32."""
    a, b = source.meta["val"], node.meta["val"]
    if a.device != b.device or b.dtype == torch.float64:
        return False
    return bool(a.dtype == b.dtype or torch.promote_types(a.dtype, b.dtype) == b.dtype)


def _unexpanded(layout: Layout, shape: Sequence[Size]) -> Layout:
    skipped = len(layout) - len(shape)
    return tuple(() if is_one(size) else layout[skipped + d] for d, size in enumerate(shape))


def _without_repeats(layout: Layout, shape: Sequence[Size]) -> Layout | None:
    """Removes repeat_interleave: each dimension keeps the leading digit of its axis."""
    if len(layout) != len(shape):
        return None
    result: list[Dim] = []
    for dim, size in zip(layout, shape, strict=True):
        if provably_equal(lay.dim_size(dim), size):
            result.append(dim)
            continue
        repeats = quotient(lay.dim_size(dim), size)
        split = lay.reshape((dim,), (size, repeats)) if repeats is not None else None
        if split is None:
            return None
        result.append(split[0])
    return tuple(result)
