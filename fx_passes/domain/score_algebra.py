"""Rules that change scores: scales, softcap, biases, masks, sums over them, slices of them."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from torch_streamkl.fx_passes.domain.layout import Dim, Layout, Piece, axes_of, axis_dim
from torch_streamkl.fx_passes.domain.masks import (
    AxisCondition,
    AxisExcept,
    AxisLiteral,
    AxisTensor,
    Mask,
)
from torch_streamkl.fx_passes.domain.tensor_ref import Step, TensorRef
from torch_streamkl.fx_passes.domain.values import (
    ABSORBING,
    CONTRACTED,
    Bias,
    Factor,
    ScoreKey,
    Scores,
)
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, same


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
        or (key.biases and factor.tensor.layout)
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
    if key.mask is not None or any(axis in axes_of(x.tensor.layout) for x in key.factors):
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


def with_bias(scores: Scores, tensor: TensorRef, weight: float = 1.0) -> Scores:
    """scores + weight * tensor."""
    key = scores.key
    if key.padded is not None:
        raise Blocked("a tensor is added to scores after they were padded")
    if key.mask is not None and key.fill > ABSORBING:
        raise Blocked("a tensor is added to scores after they were masked with a moderate value")
    return scores.with_key(biases=(*key.biases, Bias(tensor, weight)), added=True)


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
        axis in axes_of(f.tensor.layout) for f in key.factors
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
    if any(axis in axes_of(x.tensor.layout) for x in tensors):
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


def _part_of_operand(operand: TensorRef, axis: int, start: Size, length: Size | None) -> TensorRef:
    if axis not in axes_of(operand.layout):
        return operand
    dim = axis_dim(operand.layout, axis)
    if dim is None:
        raise Blocked("part of a repeated or flattened dimension of an operand is used")
    if length is None:
        layout = (*operand.layout[:dim], *operand.layout[dim + 1 :])
        return replace(operand, layout=layout, steps=(*operand.steps, Step("select", dim, start)))
    layout = _resized(operand.layout, axis, length)
    return replace(
        operand, layout=layout, steps=(*operand.steps, Step("narrow", dim, start, length))
    )


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
    tensors: list[Factor | Bias] = [*key.factors, *key.biases]
    others = [*(x.tensor.layout for x in tensors), *(x.layout for x in masks)]
    if (
        any(set(axes) & axes_of(x) for x in others)
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
    changed = replace(operand, layout=operand_layout, steps=(*operand.steps, step))
    sizes = (*((a, s) for a, s in key.sizes if a not in axes), (axis, count))
    lhs, rhs = (changed if x is operand else x for x in (key.lhs, key.rhs))
    key = replace(key, sizes=sizes, lhs=lhs, rhs=rhs)
    return key, (*layout[:dim], new, *layout[dim + mask_rank :])
