"""Translates the masks of a call's two sides into the operator's arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_streamkl.fx_passes.domain.layout import Piece
from torch_streamkl.fx_passes.domain.masks import (
    AxisCondition,
    AxisExcept,
    AxisTensor,
    Mask,
)
from torch_streamkl.fx_passes.domain.score_form import ScoreForm, read
from torch_streamkl.fx_passes.domain.scores import ABSORBING, IMPROBABLE, ScoreKey
from torch_streamkl.fx_passes.domain.values import (
    conditions_in,
    mentions,
    of_one_distribution,
    where_within,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression, is_one, provably_equal
from torch_streamkl.fx_passes.planning.dimensions import Geometry
from torch_streamkl.program.divergences import Functional, evaluate
from torch_streamkl.program.graph import ZERO, Node
from torch_streamkl.program.operations import exact

# NOTE [Masks after the softmax]
# A mask on keys that multiplies values after the softmax, or fills them with 0, is exact in two
# cases; `element_algebra.masked_after` keeps it as a condition in the expression, where(within, e,
# 0).
# 1. Every distribution was masked with it before its softmax: what it drops has no probability
#    (`drops_rows_without_keys`). Only a row without any key differs: filled with a finite number,
#    its probabilities are uniform, and the mask drops that value. Removed keys do so as well, a
#    row of them being 0.
# 2. One distribution was masked with it, and the other only with a part of its conditions:
#    the sum over the keys of the first, with the second's probabilities over more keys
#    (`plan_masks_within`). The operator removes the keys that both lack, the rest gets a bias of
#    -inf on one side, and the condition becomes a comparison of that side's log-probability. A
#    row with a key on the stricter side has one on the other, and the condition drops the rest.


@dataclass(frozen=True)
class MaskPlan:
    """Holds the masks of both sides, which are the same, in the operator's terms."""

    window_left: Size | None
    window_right: Size | None
    tensors: tuple[AxisTensor, ...]  # of the student's scores
    row_tensors: tuple[AxisTensor, ...]  # masks of whole rows
    fill: float | None
    stricter: StricterSide | None = None


@dataclass(frozen=True)
class StricterSide:
    """Holds conditions of one side's mask that the other side does not have."""

    side: int  # 0 the teacher, 1 the student
    window_left: Size | None
    window_right: Size | None
    tensors: tuple[AxisTensor, ...]


Literals = dict[tuple[object, ...], Any]  # a mask's conditions by what they mean


def masks_of(shape: Geometry, *, is_head: bool = False) -> MaskPlan:
    """Returns the masks of both sides in the operator's terms; they have to be the same.

    ``is_head``: of an LM head, whose operator leaves out vocabulary entries (`linear.emit`).
    """
    _check_overwritten(shape, is_head)
    teacher, student = _literals(shape)
    if teacher.keys() != student.keys():
        raise Unsupported("teacher and student are masked differently")
    left, right, tensors, row_tensors = _sorted_out(student)
    return MaskPlan(left, right, tensors, row_tensors, None)


def masked_alike(shape: Geometry) -> bool:
    """Returns whether both sides have the same mask."""
    teacher, student = _literals(shape)
    return teacher.keys() == student.keys()


def _check_overwritten(shape: Geometry, is_head: bool) -> None:
    for side in (shape.teacher, shape.student):
        found = [x for x in read(side.distribution.scores).mask if isinstance(x, AxisExcept)]
        if found and not is_head:
            raise Unsupported("some of the scores are overwritten with -inf through a view")


def plan_masks(
    shape: Geometry, functional: Functional, drops_rows: bool, *, is_head: bool
) -> MaskPlan:
    """Returns masks that are the same on both sides; ``drops_rows``: rows without keys count
    as 0.
    """
    teacher, student = (read(s.distribution.scores) for s in (shape.teacher, shape.student))
    masks = masks_of(shape, is_head=is_head)
    is_masked = bool(student.mask)
    if not (teacher.exact_fill and student.exact_fill) and _layers(0, shape) != _layers(1, shape):
        raise Unsupported("teacher and student have masks that overlap in different ways")
    fill = None if drops_rows else _fill(teacher, student, functional, is_masked)
    if masks.row_tensors and fill is not None:
        raise Unsupported(
            "whole rows are masked in a divergence that does not vanish for equal distributions"
        )
    if functional.absent != 0.0 and is_masked:
        raise Unsupported("masked keys would contribute to the divergence")
    return replace(masks, fill=fill)


def plan_masks_within(shape: Geometry, side: int) -> MaskPlan:
    """Plans masks if ``side`` has all conditions and more: the sum takes the keys of that side."""
    _check_overwritten(shape, is_head=False)
    sides = _literals(shape)
    stricter, other = sides[side], sides[1 - side]
    if not other.keys() <= stricter.keys():
        raise Unsupported("teacher and student are masked differently")
    _check_improbable(read(x.distribution.scores) for x in (shape.teacher, shape.student))
    left, right, tensors, row_tensors = _sorted_out(other)
    extra = {name: x for name, x in stricter.items() if name not in other}
    extra_left, extra_right, extra_tensors, extra_rows = _sorted_out(extra)
    return MaskPlan(
        left,
        right,
        tensors,
        row_tensors,
        None,
        StricterSide(side, extra_left, extra_right, (*extra_tensors, *extra_rows)),
    )


def within_of(expr: Node) -> int | None:
    """Returns the distribution whose keys alone give the expression a value, or None."""
    found = conditions_in(expr)
    if len(found) != 1 or where_within(expr, False) != ZERO:
        return None
    (condition,) = found
    return int(condition.value) if condition.op == "within" else None


def drops_rows_without_keys(expr: Node, keys: Sequence[ScoreKey]) -> bool:
    """Returns whether a mask after the softmax, common to all sides, changes empty rows."""
    forms = [read(key) for key in keys]
    if all(form.fill == -math.inf for form in forms):
        return False  # eager has NaN there
    _check_improbable(forms)
    if not _vanishes(where_within(expr, False)):
        raise Unsupported(
            "a mask after the softmax covers only a part of a divergence that is not 0 for equal "
            "distributions"
        )
    if _vanishes(where_within(expr, True)):
        return False
    if mentions(expr, "partly_within"):
        raise Unsupported(
            "a part of the mask is applied again after the softmax, to a divergence that is not 0 "
            "for equal distributions"
        )
    return True


def _check_improbable(forms: Iterable[ScoreForm]) -> None:
    for form in forms:
        if form.mask and form.fill > IMPROBABLE:
            raise Unsupported(
                f"a mask on keys is applied after the softmax, and before it with {form.fill:g}, "
                "which does not remove a key"
            )


def _sorted_out(
    literals: Literals,
) -> tuple[Size | None, Size | None, tuple[AxisTensor, ...], tuple[AxisTensor, ...]]:
    """Returns window left, window right, mask tensors and masks of whole rows."""
    left = right = None
    tensors, row_tensors = [], []
    for literal, source in literals.items():
        match literal:
            case ("window", "left", bound):
                left = source if left is None else _tighter(left, source, bound)
            case ("window", "right", bound):
                right = source if right is None else _tighter(right, source, bound)
            case ("except", *_):
                pass  # of LM heads: part of their bias
            case ("rows", *_):
                row_tensors.append(source)
            case _:
                tensors.append(source)
    return left, right, tuple(tensors), tuple(row_tensors)


def _tighter(a: Size, b: Size, _: object) -> Size:
    x, y = expression(a), expression(b)
    if isinstance(x, int) and isinstance(y, int):
        return min(a, b)
    raise Unsupported("two windows of unknown size")


def _literals(shape: Geometry) -> tuple[Literals, Literals]:
    """The conditions of both masks by what they mean in the operator's dimensions."""
    teacher, student = (read(s.distribution.scores) for s in (shape.teacher, shape.student))
    return _literals_of(0, shape, teacher.mask), _literals_of(1, shape, student.mask)


def _layers(side: int, shape: Geometry) -> list[object]:
    """The masks of a side in the order in which they were applied, and their values."""
    layers = read((shape.teacher, shape.student)[side].distribution.scores).layers
    return [(_literals_of(side, shape, layer.mask).keys(), layer.fill) for layer in layers]


def _literals_of(side: int, shape: Geometry, mask: Mask) -> Literals:
    own = (shape.teacher, shape.student)[side]
    result: Literals = {}
    for literal in mask:
        if isinstance(literal, AxisExcept):
            role = "key" if literal.axis == own.distribution.axis else f"axis {literal.axis}"
            result[("except", role, literal.start, literal.stop)] = literal
            continue
        if isinstance(literal, AxisCondition):
            name, bound = _band(literal, side, shape)
            result[("window", name, str(expression(bound)))] = bound
            continue
        dims = tuple(tuple(r for p in d for r in _roles(p, side, shape)) for d in literal.layout)
        on_keys = any(p.axis == own.distribution.axis for d in literal.layout for p in d)
        kind = "tensor" if on_keys else "rows"
        result[(kind, literal.node.name, dims, literal.positive)] = literal
    return result


def _roles(piece: Piece, side: int, shape: Geometry) -> list[object]:
    """Maps a piece of a mask to the dimensions of the operator's tensors."""
    if piece.axis == shape.side(side).distribution.axis:
        return [("key", *piece.key()[1:])]
    return [slot for slot, _ in shape.digits_of(piece, side)]


def _band(literal: AxisCondition, side: int, shape: Geometry) -> tuple[str, Size]:
    """Converts a condition on query and key index to a bound of the operator's window.

    ``j - i + c >= 0`` is ``j >= i - c``; with o = j - (i + M - N) that is o >= -(c + M - N).
    """
    own = (shape.teacher, shape.student)[side]
    key_axis = own.distribution.axis
    query = shape.digits[shape.query].pieces[side] if shape.query is not None else None
    coefficients = dict(literal.coefficients)
    cj = coefficients.pop(key_axis, 0)
    ci = coefficients.pop(query.axis, 0) if query is not None else 0
    whole = query is None or provably_equal(query.size, own.distribution.scores.size(query.axis))
    is_single = query is None or is_one(query.size)  # its index is 0
    if is_single and cj in (-1, 1):
        ci = -cj
    if coefficients or (ci, cj) not in ((-1, 1), (1, -1)) or not whole:
        raise Unsupported(
            "a mask that is a condition on indices other than a band around the diagonal"
        )
    num_keys = own.distribution.scores.size(key_axis)
    offset = num_keys - (query.size if query is not None else 1)
    return ("left", literal.constant + offset) if cj == 1 else ("right", literal.constant - offset)


def _fill(
    teacher: ScoreForm, student: ScoreForm, functional: Functional, is_masked: bool
) -> float | None:
    """The operator's mask_value: None removes keys, exact unless a whole row can be masked."""
    if not is_masked:
        return None
    fills = (teacher.fill, student.fill)
    if fills[0] != fills[1] and (max(fills) > ABSORBING or min(fills) > ABSORBING):
        raise Unsupported(
            f"teacher and student are masked with different values, {fills[0]:g} and {fills[1]:g}"
        )
    fill = max(fills)
    if fill == -math.inf:
        return None
    if fill == ABSORBING and _vanishes(functional.expr):
        return None  # a row without keys is uniform on both sides
    if not (teacher.exact_fill and student.exact_fill):
        raise Unsupported(
            "two additive masks overlap in a divergence that is not 0 for equal distributions"
        )
    return fill


def _vanishes(e: Node) -> bool:
    """Whether an expression is 0 at a key of which all distributions have the same probability."""
    if mentions(e, "lse"):
        return False
    e = of_one_distribution(e)
    for p in (1.0, 0.5, 0.1, 1e-3):
        x = exact(p)
        f = evaluate(e, {"P": x, "S": x, "logP": x.log(), "logS": x.log()})
        if abs(float(f)) > 1e-12:
            return False
    return True
