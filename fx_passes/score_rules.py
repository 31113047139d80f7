"""Rules that make and change scores: matmuls, operands, scales, softcap, biases, masks, slices."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torch_streamkl.fx_passes import layout as lay
from torch_streamkl.fx_passes.layout import Dim, Layout, Piece, axes_of, axis_dim
from torch_streamkl.fx_passes.masks import AxisCondition, AxisExcept, AxisLiteral, AxisTensor, Mask
from torch_streamkl.fx_passes.sizes import Size, is_one, quotient, same
from torch_streamkl.fx_passes.values import (
    ABSORBING,
    CONTRACTED,
    Attention,
    Bias,
    Blocked,
    Elements,
    Factor,
    Operand,
    ScoreKey,
    Scores,
    Step,
)


def shape_of(node: fx.Node) -> Sequence[Size]:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value.shape


def scores_of_matmul(
    lhs: fx.Node, rhs: fx.Node, out_shape: Sequence[Size], *, transposed: bool = False
) -> Scores:
    """``lhs @ rhs``; with ``transposed`` rhs is [..., j, d] (a linear layer's weight)."""
    lhs_shape, rhs_shape = shape_of(lhs), shape_of(rhs)
    if len(lhs_shape) < 2 or len(rhs_shape) < 2:
        raise Blocked("a product with a vector is not a score matrix")
    rank = len(out_shape)
    dims: list[Dim] = [
        () if is_one(size) else (Piece(d, size),) for d, size in enumerate(out_shape)
    ]
    contracted: Dim = (Piece(CONTRACTED, lhs_shape[-1]),)

    def batch_dims(shape: Sequence[Size]) -> list[Dim]:
        skipped = rank - len(shape)
        return [() if is_one(size) else dims[skipped + d] for d, size in enumerate(shape[:-2])]

    lhs_layout = (*batch_dims(lhs_shape), dims[-2], contracted)
    rhs_tail = (dims[-1], contracted) if transposed else (contracted, dims[-1])
    rhs_layout = (*batch_dims(rhs_shape), *rhs_tail)
    return _scores(Operand(lhs, lhs_layout), Operand(rhs, rhs_layout), tuple(dims))


def scores_of_linear(
    x: fx.Node, weight: fx.Node, bias: fx.Node | None, out_shape: Sequence[Size]
) -> Scores:
    """``F.linear``: every leading dimension of x is a row dimension."""
    dims: list[Dim] = [
        () if is_one(size) else (Piece(d, size),) for d, size in enumerate(out_shape)
    ]
    contracted: Dim = (Piece(CONTRACTED, shape_of(x)[-1]),)
    scores = _scores(
        Operand(x, (*dims[:-1], contracted)), Operand(weight, (dims[-1], contracted)), tuple(dims)
    )
    return scores if bias is None else scores.with_key(biases=(Bias(bias, (dims[-1],)),))


def scores_of_einsum(
    equation: str, operands: Sequence[fx.Node], out_shape: Sequence[Size]
) -> Scores:
    """A two-operand einsum without repeated labels, contracted over labels of both operands."""
    left, _, out = _without_dots(equation, [len(shape_of(x)) for x in operands]).partition("->")
    labels = left.split(",")
    if len(labels) != 2 or "->" not in equation:
        raise Blocked(
            f"einsum '{equation}' is not a product of two operands with an explicit result"
        )
    if any(len(set(text)) != len(text) for text in (*labels, out)):
        raise Blocked(f"einsum '{equation}' repeats a label")
    summed = [c for c in labels[0] if c not in out]
    if any(c not in labels[1] for c in summed) or any(
        c not in out and c not in summed for c in labels[1]
    ):
        raise Blocked(f"einsum '{equation}' sums a label of one operand only")
    if not summed:
        raise Blocked(f"einsum '{equation}' contracts nothing")
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
        Operand(operands[0], layouts[0]),
        Operand(operands[1], layouts[1]),
        tuple(dims[c] for c in out),
    )


def _without_dots(equation: str, ranks: Sequence[int]) -> str:
    """The equation with labels in place of ``...``, the last of the leading dimensions."""
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


def _scores(lhs: Operand, rhs: Operand, dims: Layout) -> Scores:
    sizes = tuple((p.axis, p.size) for dim in dims for p in dim)
    return Scores(ScoreKey(peeled(lhs), peeled(rhs), sizes), dims)


def attention_of(probabilities: Elements, values: fx.Node) -> Attention | None:
    """``probabilities @ values`` where the keys are the last dimension of plain probabilities."""
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
    operand = Operand(values, (*dims, layout[-1], (Piece(CONTRACTED, shape[-1]),)))
    return Attention(probabilities, peeled(operand))


def peeled(operand: Operand) -> Operand:
    """The operand below transposes, casts and head repetition, which operators do themselves."""
    while True:
        below = _below(operand)
        if below is None:
            return operand
        operand = below


def _below(operand: Operand) -> Operand | None:
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
    match _op_name(node):
        case "transpose":
            a, b = (int(d) % rank for d in arguments[:2])
            order = list(range(rank))
            order[a], order[b] = order[b], order[a]
            found = lay.permute(layout, order)
        case "permute":
            order = [int(d) % rank for d in arguments[0]]
            found = tuple(layout[order.index(d)] for d in range(rank))
        case "t" | "numpy_T" | "mT" | "adjoint":
            reversed_all = _op_name(node) == "numpy_T"
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
        case "slice" if all(map(same, shape, shape_of(node))):
            found = layout  # x[:, None] takes whole slices where sizes are symbolic
        case "view" | "reshape" | "_unsafe_view" | "flatten":
            found = lay.reshape(layout, shape)
        case "repeat_interleave":
            found = _without_repeats(layout, shape)
    if found is None or len(found) != len(shape):
        return None
    return Operand(source, found)


def _op_name(node: fx.Node) -> str:
    target = node.target
    return (
        target._schema.name.partition("::")[2]
        if isinstance(target, torch._ops.OpOverload)
        else str(target)
    )


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
    """Below repeat_interleave: each dimension keeps the leading digit of its axis."""
    result: list[Dim] = []
    for dim, size in zip(layout, shape, strict=True):
        if same(lay.dim_size(dim), size):
            result.append(dim)
            continue
        repeats = quotient(lay.dim_size(dim), size)
        split = lay.reshape((dim,), (size, repeats)) if repeats is not None else None
        if split is None:
            return None
        result.append(split[0])
    return tuple(result)


def scaled(scores: Scores, factor: float) -> Scores:
    """scores * factor."""
    key = scores.key
    if factor == 0.0:
        raise Blocked("scores multiplied by 0")
    if key.fill != 0.0 and factor < 0:
        raise Blocked("masked scores multiplied by a negative number")
    biases = tuple(replace(b, weight=b.weight * factor) for b in key.biases)
    fill = key.fill if key.fill <= ABSORBING else key.fill * factor
    scale = key.scale if key.capped else key.scale * factor
    return scores.with_key(scale=scale, capped=key.capped * factor, biases=biases, fill=fill)


def multiplied(scores: Scores, factor: Factor) -> Scores:
    """scores * tensor (or / tensor): a scalar, or one value per row or per key."""
    key = scores.key
    if (
        key.capped
        or (key.mask is not None and key.fill > ABSORBING)
        or (key.biases and factor.layout)
    ):
        raise Blocked(
            "scores multiplied by a tensor after a softcap, a bias or a finite mask value"
        )
    biases = tuple(replace(b, factors=(*b.factors, factor)) for b in key.biases)
    return scores.with_key(factors=(*key.factors, factor), biases=biases)


def padded(scores: Scores, size: Size) -> Scores:
    """Scores with -inf behind the last one of their last dimension: words that this side lacks."""
    key, (*rows, last) = scores.key, scores.layout
    if (
        len(last) != 1
        or axis_dim(scores.layout, last[0].axis) != len(rows)
        or key.padded is not None
    ):
        raise Blocked("scores are padded along a dimension that is not one axis of them")
    axis = last[0].axis
    if key.mask is not None or any(axis in axes_of(x.layout) for x in key.factors):
        raise Blocked("scores are padded after they were masked or multiplied by a tensor")
    sizes = tuple((a, size if a == axis else s) for a, s in key.sizes)
    return Scores(replace(key, sizes=sizes, padded=axis), (*rows, (Piece(axis, size),)))


def with_tanh(scores: Scores) -> Scores:
    """tanh(scores); times a constant it is a softcap."""
    key = scores.key
    if key.padded is not None:
        raise Blocked("tanh of scores that were padded before")
    if key.capped or key.biases or key.mask is not None:
        raise Blocked("tanh of scores that were capped, biased or masked before")
    return scores.with_key(capped=1.0)


def with_bias(scores: Scores, node: fx.Node, layout: Layout, weight: float = 1.0) -> Scores:
    """scores + weight * tensor."""
    key = scores.key
    if key.padded is not None:
        raise Blocked("a tensor is added to scores after they were padded")
    if key.mask is not None and key.fill > ABSORBING:
        raise Blocked("a tensor is added to scores after they were masked with a moderate value")
    return scores.with_key(biases=(*key.biases, Bias(node, layout, weight)), added=True)


def masked(scores: Scores, mask: Mask, fill: float, *, added: bool = False) -> Scores:
    """scores where the mask holds and ``fill`` elsewhere (``added``: it was added to them)."""
    key = scores.key
    if fill != -float("inf") and fill <= ABSORBING:
        fill = ABSORBING
    if added and fill > ABSORBING:
        raise Blocked(
            f"an additive mask value of {fill:g} does not remove a key; it is kept as a bias"
        )
    if key.mask is None:
        return scores.with_key(mask=mask, fill=fill, added=key.added or added)
    if mask <= key.mask and fill == key.fill and not added:
        return scores
    if fill == key.fill and not added:
        return scores.with_key(mask=key.mask | mask)
    if fill > ABSORBING or key.fill > ABSORBING:
        raise Blocked(f"two masks with different values, {key.fill:g} and {fill:g}")
    # keys of a row without any allowed key may now be at -inf or at the lowest number
    return scores.with_key(
        mask=key.mask | mask, fill=ABSORBING, exact_fill=False, added=key.added or added
    )


def summed_over(scores: Scores, dim: int, *, mean: bool) -> tuple[ScoreKey, Dim]:
    """Scores summed over a batch dimension: the axis joins the contraction."""
    key, pieces = scores.key, scores.layout[dim]
    if key.mask is not None or key.biases or key.capped:
        raise Blocked("scores are averaged over heads after a mask, a bias or a softcap")
    operands = (key.lhs, key.rhs)
    if len(pieces) != 1 or axis_dim(scores.layout, pieces[0].axis) != dim:
        raise Blocked("scores are averaged over part of a dimension")
    axis = pieces[0].axis
    if any(axis_dim(o.layout, axis) is None for o in operands) or any(
        axis in axes_of(f.layout) for f in key.factors
    ):
        raise Blocked("scores are averaged over a dimension that only one operand has")
    lowest = min((p.axis for o in operands for d in o.layout for p in d), default=0)
    contracted = Piece(min(lowest, CONTRACTED) - 1, pieces[0].size)
    lhs, rhs = (
        replace(
            o,
            layout=tuple((contracted,) if any(p.axis == axis for p in d) else d for d in o.layout),
        )
        for o in operands
    )
    size = key.size(axis)
    weight = 1.0
    if mean:
        if not isinstance(size, int):
            raise Blocked("scores are averaged over a dimension of unknown size")
        weight = 1.0 / size
    sizes = tuple((a, s) for a, s in key.sizes if a != axis)
    return replace(key, lhs=lhs, rhs=rhs, sizes=sizes, scale=key.scale * weight), ()


def part(
    key: ScoreKey, layout: Layout, dim: int, start: Size, length: Size | None
) -> tuple[ScoreKey, Layout]:
    """``scores.narrow(dim, start, length)``, or ``scores.select(dim, start)`` without a length."""
    pieces = layout[dim]
    if pieces == ():
        return key, layout if length is not None else (*layout[:dim], *layout[dim + 1 :])
    if len(pieces) != 1 or axis_dim(layout, pieces[0].axis) != dim:
        raise Blocked("a flattened dimension of the scores is sliced")
    axis = pieces[0].axis
    if length is not None and same(length, pieces[0].size):
        return key, layout
    if axis == key.padded:
        raise Blocked("some of the keys are used after the scores were padded")
    tensors: list[Factor | Bias] = [*key.factors, *key.biases]
    if any(axis in axes_of(x.layout) for x in tensors):
        raise Blocked("scores are sliced after a tensor was added or multiplied")
    lhs, rhs = (_part_of_operand(o, axis, start, length) for o in (key.lhs, key.rhs))
    mask = (
        None
        if key.mask is None
        else frozenset(_part_of_literal(x, axis, start, length) for x in key.mask)
    )
    if length is None:
        sizes = tuple((a, s) for a, s in key.sizes if a != axis)
        dims: Layout = (*layout[:dim], *layout[dim + 1 :])
    else:
        sizes = tuple((a, length if a == axis else s) for a, s in key.sizes)
        dims = _resized(layout, axis, length)
    return replace(key, lhs=lhs, rhs=rhs, sizes=sizes, mask=mask), dims


def _resized(layout: Layout, axis: int, size: Size) -> Layout:
    return tuple(
        (() if is_one(size) else (Piece(axis, size),)) if any(p.axis == axis for p in d) else d
        for d in layout
    )


def _part_of_operand(operand: Operand, axis: int, start: Size, length: Size | None) -> Operand:
    if axis not in axes_of(operand.layout):
        return operand
    dim = axis_dim(operand.layout, axis)
    if dim is None:
        raise Blocked("part of a repeated or flattened dimension of an operand is used")
    if length is None:
        layout = (*operand.layout[:dim], *operand.layout[dim + 1 :])
        return Operand(operand.node, layout, (*operand.steps, Step("select", dim, start)))
    layout = _resized(operand.layout, axis, length)
    return Operand(operand.node, layout, (*operand.steps, Step("narrow", dim, start, length)))


def _part_of_literal(
    literal: AxisLiteral, axis: int, start: Size, length: Size | None
) -> AxisLiteral:
    if isinstance(literal, AxisExcept):
        if axis == literal.axis:
            raise Blocked("scores are sliced after some of their keys were overwritten")
        return literal
    if isinstance(literal, AxisTensor):
        if axis in axes_of(literal.layout):
            raise Blocked("scores are sliced after a tensor mask was applied")
        return literal
    moved = literal.constant + dict(literal.coefficients).get(axis, 0) * start
    kept = tuple((a, c) for a, c in literal.coefficients if length is not None or a != axis)
    return AxisCondition(kept, moved)


def selected_rows(
    key: ScoreKey, layout: Layout, dim: int, mask: fx.Node, mask_rank: int, count: Size
) -> tuple[ScoreKey, Layout]:
    """``scores[mask]``: rows that a boolean index over mask_rank dimensions from dim selects."""
    indexed = layout[dim : dim + mask_rank]
    pieces = [p for d in indexed for p in d]
    axes = [p.axis for p in pieces]
    whole = all(is_one(p.stride) and same(p.size, key.size(p.axis)) for p in pieces)
    if not pieces or not whole or len(set(axes)) != len(axes):
        raise Blocked("a boolean index on part of the rows, or on dimensions of size one")
    holders = [o for o in (key.lhs, key.rhs) if axes_of(o.layout) & set(axes)]
    if len(holders) != 1:
        raise Blocked("a boolean index on a dimension that both operands of the scores have")
    operand = holders[0]
    held = [d for d, dim_pieces in enumerate(operand.layout) if axes_of((dim_pieces,)) & set(axes)]
    first, num_held = held[0], len(held)
    in_operand = [p for d in operand.layout[first : first + num_held] for p in d]
    if in_operand != pieces or held != list(range(first, first + num_held)):
        raise Blocked("a boolean index on dimensions that the operand has in another order")
    masks = [x for x in key.mask or () if isinstance(x, AxisTensor)]
    others: list[Factor | Bias | AxisTensor] = [*key.factors, *key.biases, *masks]
    if (
        any(set(axes) & axes_of(x.layout) for x in others)
        or any(
            set(axes) & {a for a, _ in x.coefficients}
            for x in key.mask or ()
            if isinstance(x, AxisCondition)
        )
        or any(x.axis in axes for x in key.mask or () if isinstance(x, AxisExcept))
    ):
        raise Blocked("a boolean index on scores after a mask or a tensor was applied")
    axis = max(a for a, _ in key.sizes) + 1
    new: Dim = (Piece(axis, count),)
    step = Step("rows", first, length=count, mask=mask, mask_rank=num_held)
    operand_layout = (*operand.layout[:first], new, *operand.layout[first + num_held :])
    changed = Operand(operand.node, operand_layout, (*operand.steps, step))
    sizes = (*((a, s) for a, s in key.sizes if a not in axes), (axis, count))
    lhs, rhs = (changed if x is operand else x for x in (key.lhs, key.rhs))
    key = replace(key, sizes=sizes, lhs=lhs, rhs=rhs)
    return key, (*layout[:dim], new, *layout[dim + mask_rank :])
