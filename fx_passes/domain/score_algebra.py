"""Applies operations that change which scores exist: padding, sums over heads, slices, rows."""

from __future__ import annotations

from dataclasses import replace

from torch_streamkl.fx_passes.domain.layout import (
    Dim,
    Layout,
    Piece,
    axes_of,
    axis_dim,
    has_shape,
    merged,
)
from torch_streamkl.fx_passes.domain.masks import (
    AxisCondition,
    AxisExcept,
    AxisLiteral,
    AxisTensor,
)
from torch_streamkl.fx_passes.domain.row_selection import RowSelection
from torch_streamkl.fx_passes.domain.scores import (
    Bias,
    Factor,
    Masking,
    Pad,
    Product,
    Scale,
    ScoreKey,
    Scores,
    ScoreStep,
    Shift,
    axes_of_step,
)
from torch_streamkl.fx_passes.domain.tensor_ref import Step, TensorRef
from torch_streamkl.fx_passes.domain.values import CONTRACTED
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, provably_equal


def padded(scores: Scores, size: Size) -> Scores:
    """Pads scores with -inf after the last one of their last dimension: vocabulary entries
    that this side lacks.
    """
    key, (*rows, last) = scores.key, scores.layout
    if len(last) != 1 or axis_dim(scores.layout, last[0].axis) != len(rows):
        raise Unsupported("scores are padded along a dimension that is not one axis of them")
    axis = last[0].axis
    sizes = tuple((a, size if a == axis else s) for a, s in key.sizes)
    key = replace(key.then(Pad(axis, size)), sizes=sizes)
    return Scores(key, (*rows, (Piece(axis, size),)))


def summed_over(scores: Scores, dim: int, *, mean: bool) -> tuple[ScoreKey, Dim]:
    """Sums scores over a batch dimension: the axis joins the contraction."""
    key, pieces = scores.key, scores.layout[dim]
    operands = (key.lhs, key.rhs)
    if len(pieces) != 1 or axis_dim(scores.layout, pieces[0].axis) != dim:
        raise Unsupported("scores are averaged over part of a dimension")
    axis = pieces[0].axis
    size = key.size(axis)
    steps = tuple(_summed_step(step, axis, size) for step in key.steps)
    if any(axis_dim(o.layout, axis) is None for o in operands):
        raise Unsupported("scores are averaged over their own rows or keys")
    lowest = min((p.axis for o in operands for d in o.layout for p in d), default=0)
    contracted = Piece(min(lowest, CONTRACTED) - 1, pieces[0].size)
    lhs, rhs = (
        replace(
            o,
            layout=tuple((contracted,) if any(p.axis == axis for p in d) else d for d in o.layout),
        )
        for o in operands
    )
    sizes = tuple((a, s) for a, s in key.sizes if a != axis)
    summed = replace(key, lhs=lhs, rhs=rhs, sizes=sizes, steps=steps)
    if not mean:
        return summed, ()
    if not isinstance(size, int):
        raise Unsupported("scores are averaged over a dimension of unknown size")
    return summed.then(Scale(1.0 / size)), ()


def _summed_step(step: ScoreStep, axis: int, size: Size) -> ScoreStep:
    """Converts an operation on each of the summed scores to one on their sum."""
    if isinstance(step, Scale):
        return step
    if isinstance(step, Shift) and isinstance(size, int):
        return Shift(step.number * size)
    if isinstance(step, Factor):
        if axis in axes_of(step.tensor.layout):
            raise Unsupported("scores are averaged over their own rows or keys")
        return step
    raise Unsupported("scores are averaged over heads after a mask, a bias or a softcap")


def part(
    key: ScoreKey, layout: Layout, dim: int, start: Size, length: Size | None
) -> tuple[ScoreKey, Layout]:
    """Reads ``scores.narrow(dim, start, length)``, or ``scores.select(dim, start)`` without a
    length.
    """
    pieces = layout[dim]
    if pieces == ():
        return key, layout if length is not None else (*layout[:dim], *layout[dim + 1 :])
    if len(pieces) != 1 or axis_dim(layout, pieces[0].axis) != dim:
        raise Unsupported("a flattened dimension of the scores is sliced")
    axis = pieces[0].axis
    if length is not None and provably_equal(length, pieces[0].size):
        return key, layout
    steps = tuple(_part_of_step(step, axis, start, length) for step in key.steps)
    lhs, rhs = (part_of_operand(o, axis, start, length) for o in (key.lhs, key.rhs))
    if length is None:
        sizes = tuple((a, s) for a, s in key.sizes if a != axis)
        dims: Layout = (*layout[:dim], *layout[dim + 1 :])
    else:
        sizes = tuple((a, length if a == axis else s) for a, s in key.sizes)
        dims = _resized(layout, axis, length)
    return replace(key, lhs=lhs, rhs=rhs, sizes=sizes, steps=steps), dims


def _part_of_step(step: ScoreStep, axis: int, start: Size, length: Size | None) -> ScoreStep:
    match step:
        case Product():
            lhs, rhs = (part_of_operand(o, axis, start, length) for o in (step.lhs, step.rhs))
            return replace(step, lhs=lhs, rhs=rhs)
        case Factor() | Bias() if axis in axes_of_step(step):
            raise Unsupported("scores are sliced after a tensor was added or multiplied")
        case Pad(axis=padded) if padded == axis:
            raise Unsupported("some of the keys are used after the scores were padded")
        case Masking():
            mask = frozenset(_part_of_literal(x, axis, start, length) for x in step.mask)
            return replace(step, mask=mask)
    return step


def _resized(layout: Layout, axis: int, size: Size) -> Layout:
    return tuple(
        (() if is_one(size) else (Piece(axis, size),)) if any(p.axis == axis for p in d) else d
        for d in layout
    )


def part_of_operand(operand: TensorRef, axis: int, start: Size, length: Size | None) -> TensorRef:
    """Returns the part of an operand that a slice of an axis leaves."""
    if axis not in axes_of(operand.layout):
        return operand
    dim = axis_dim(operand.layout, axis)
    if dim is None:
        raise Unsupported("part of a repeated or flattened dimension of an operand is used")
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
            raise Unsupported("scores are sliced after some of their keys were overwritten")
        return literal
    if isinstance(literal, AxisTensor):
        if axis in axes_of(literal.layout):
            raise Unsupported("scores are sliced after a tensor mask was applied")
        return literal
    moved = literal.constant + dict(literal.coefficients).get(axis, 0) * start
    kept = tuple((a, c) for a, c in literal.coefficients if length is not None or a != axis)
    return AxisCondition(kept, moved)


def selected_rows(
    key: ScoreKey, layout: Layout, dim: int, selection: RowSelection
) -> tuple[ScoreKey, Layout]:
    """Returns scores of the rows that are selected of the dimensions from ``dim`` on."""
    end = dim + len(selection.sizes)
    indexed = layout[dim:end]
    pieces = merged(tuple(p for d in indexed for p in d))
    axes = [p.axis for p in pieces]
    whole = all(is_one(p.stride) and provably_equal(p.size, key.size(p.axis)) for p in pieces)
    exact = whole and has_shape(indexed, selection.sizes)
    if not pieces or not exact or len(set(axes)) != len(axes):
        raise Unsupported("rows are selected of part of the rows, or of dimensions of size one")
    if any(set(axes) & axes_of_step(x) for x in key.steps if not isinstance(x, Product)):
        raise Unsupported("rows are selected of scores after a mask or a tensor was applied")
    first = max(a for a, _ in key.sizes) + 1
    new: Layout = tuple(
        () if is_one(size) else (Piece(first + i, size),) for i, size in enumerate(selection.shape)
    )
    lhs, rhs = _selected(key.lhs, key.rhs, pieces, new, selection)
    steps = []
    for step in key.steps:
        if isinstance(step, Product):
            one, other = _selected(step.lhs, step.rhs, pieces, new, selection)
            step = replace(step, lhs=one, rhs=other)
        steps.append(step)
    kept = tuple((a, s) for a, s in key.sizes if a not in axes)
    made = tuple((p.axis, p.size) for d in new for p in d)
    key = replace(key, sizes=(*kept, *made), steps=tuple(steps), lhs=lhs, rhs=rhs)
    return key, (*layout[:dim], *new, *layout[end:])


def _selected(
    lhs: TensorRef, rhs: TensorRef, pieces: Dim, new: Layout, selection: RowSelection
) -> tuple[TensorRef, TensorRef]:
    """The operands with the rows that are selected of the axes of ``pieces``."""
    axes = {p.axis for p in pieces}
    holders = [x for x in (lhs, rhs) if axes_of(x.layout) & axes]
    if len(holders) != 1:
        raise Unsupported("rows are selected of a dimension that both operands of the scores have")
    operand = holders[0]
    held = [d for d, dim_pieces in enumerate(operand.layout) if axes_of((dim_pieces,)) & axes]
    first, num_held = held[0], len(held)
    in_operand = merged(tuple(p for d in operand.layout[first : first + num_held] for p in d))
    if in_operand != pieces or held != list(range(first, first + num_held)):
        raise Unsupported("rows are selected of dimensions that the operand has in another order")
    step = Step("rows", first, selection=selection, num_dims=num_held)
    layout = (*operand.layout[:first], *new, *operand.layout[first + num_held :])
    changed = replace(operand, layout=layout, steps=(*operand.steps, step))
    return (changed, rhs) if operand is lhs else (lhs, changed)
