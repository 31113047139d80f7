"""How two distributions over the same keys map onto one operator call.

The row dimensions of the user's tensor are split into digits that both sides agree on, and the
digits are assigned to the operator's batch, heads and query dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.domain.layout import Dim, Layout, Piece, axes_of
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.domain.values import Distribution
from torch_streamkl.fx_passes.fx_utils.blocked import Blocked
from torch_streamkl.fx_passes.fx_utils.sizes import Size, product, quotient, same

BOTH, ROW_ONLY, KEY_ONLY, ABSENT = "both", "row", "key", "absent"


@dataclass(frozen=True)
class Digit:
    """Part of a row dimension; ``pieces[side]`` is None where a side does not vary along it."""

    dim: int  # of the user's tensor
    size: Size
    pieces: tuple[Piece | None, Piece | None]  # teacher, student


@dataclass(frozen=True)
class SideGeometry:
    """One side of the call."""

    distribution: Distribution
    rows: TensorRef  # the operand with the query rows
    keys: TensorRef  # the operand with the keys
    kinds: tuple[str, ...]  # per digit: which operand varies along it


@dataclass(frozen=True)
class Geometry:
    """Assignment of digits to the operator's dimensions; indices into ``digits``."""

    digits: tuple[Digit, ...]
    batch: tuple[int, ...]
    heads: tuple[int, ...]
    query: int | None  # None: a single query row
    teacher: SideGeometry
    student: SideGeometry

    def size(self, indices: Sequence[int]) -> Size:
        return product(self.digits[i].size for i in indices)


def geometry(
    teacher: Distribution,
    teacher_layout: Layout,
    student: Distribution,
    student_layout: Layout,
    key_dim: int,
) -> Geometry:
    """Geometry of the pair, or Blocked."""
    digits: list[Digit] = []
    for dim, (t, s) in enumerate(zip(teacher_layout, student_layout, strict=True)):
        if dim != key_dim:
            digits += _digits(dim, t, s)
    sides = tuple(
        _side(d, [digit.pieces[i] for digit in digits]) for i, d in enumerate((teacher, student))
    )
    query = _query(sides)
    rest = [i for i in range(len(digits)) if i != query]
    heads = _heads(rest, sides)
    batch = tuple(i for i in rest if i not in heads)
    return Geometry(tuple(digits), batch, heads, query, *sides)


def _digits(dim: int, t: Dim, s: Dim) -> list[Digit]:
    """The common refinement of one dimension."""
    if not t or not s:
        return [Digit(dim, p.size, (p if t else None, p if s else None)) for p in t or s]
    result: list[Digit] = []
    left, right = list(t), list(s)
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if same(a.size, b.size):
            result.append(Digit(dim, a.size, (a, b)))
            continue
        # the larger piece is split: its leading digit has the size of the smaller one
        inner = quotient(a.size, b.size)
        if inner is not None:
            result.append(Digit(dim, b.size, (Piece(a.axis, b.size, a.stride * inner), b)))
            left.insert(0, Piece(a.axis, inner, a.stride))
            continue
        inner = quotient(b.size, a.size)
        if inner is None:
            raise Blocked("teacher and student rows are flattened in ways that do not match")
        result.append(Digit(dim, a.size, (a, Piece(b.axis, a.size, b.stride * inner))))
        right.insert(0, Piece(b.axis, inner, b.stride))
    if left or right:
        raise Blocked("teacher and student rows are flattened in ways that do not match")
    return result


def _side(distribution: Distribution, pieces: Sequence[Piece | None]) -> SideGeometry:
    key = distribution.scores
    operands = (key.lhs, key.rhs)
    holders = [o for o in operands if distribution.axis in axes_of(o.layout)]
    if len(holders) != 1:
        raise Blocked("the softmax is over a dimension that both operands of the scores have")
    keys = holders[0]
    rows = operands[1] if keys is operands[0] else operands[0]
    kinds = []
    for piece in pieces:
        in_rows = piece is not None and _has(rows, piece)
        in_keys = piece is not None and _has(keys, piece)
        kinds.append(
            BOTH
            if in_rows and in_keys
            else ROW_ONLY
            if in_rows
            else KEY_ONLY
            if in_keys
            else ABSENT
        )
    return SideGeometry(distribution, rows, keys, tuple(kinds))


def _has(operand: TensorRef, piece: Piece) -> bool:
    """Whether an operand varies along a digit of an axis."""
    return any(p.axis == piece.axis and _overlaps(p, piece) for d in operand.layout for p in d)


def _overlaps(held: Piece, piece: Piece) -> bool:
    """Digits of one axis overlap unless one lies wholly below the other."""
    below = quotient(piece.stride, held.size * held.stride)
    above = quotient(held.stride, piece.size * piece.stride)
    return below is None and above is None


def _query(sides: Sequence[SideGeometry]) -> int | None:
    """The last digit that only the query operand of both sides has."""
    teacher, student = sides
    rows = [
        i
        for i, pair in enumerate(zip(teacher.kinds, student.kinds, strict=True))
        if set(pair) == {ROW_ONLY}
    ]
    if rows:
        return rows[-1]
    if any(ROW_ONLY in side.kinds for side in sides):
        raise Blocked("teacher and student do not share a dimension of query rows")
    return None


def _heads(rest: Sequence[int], sides: Sequence[SideGeometry]) -> tuple[int, ...]:
    """The last digit, and with it the one before where queries of several heads share keys."""
    if not rest:
        return ()
    heads = [rest[-1]]
    if len(rest) > 2 and any(
        side.kinds[rest[-1]] in (ROW_ONLY, ABSENT) and side.kinds[rest[-2]] == BOTH
        for side in sides
    ):
        heads.insert(0, rest[-2])
    return tuple(heads)
