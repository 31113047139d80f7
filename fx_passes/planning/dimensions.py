"""Maps two distributions over the same keys onto one operator call.

NOTE [Axes]
An axis is a dimension of a matmul's result: an identity within its scores, with an extent. A
tensor's dimension is a product of digits of axes (domain/layout.py). Ranks, dimension numbers and
equal sizes prove nothing.

Teacher and student correspond position by position in the user's tensor, after broadcasting. The
digits of a position have equal extents on both sides (the same number, or the same symbolic size),
or one side has none and is broadcast along the other's. Then its value is constant there, and a
sum over the position counts the extent.

The operator pairs, in its batch, head and query dimensions, equal digits only. A tensor that lacks
a digit is expanded along it, in the operator's order. The operator defines two exceptions:
- keys with fewer heads: query head h uses key head h // group. So the digits that keys lack are
  left to grouping if they are the last ones of the query heads;
- a teacher averaged over heads: student head h has the teacher heads h * n to h * n + n - 1, so
  the averaged digits come after the head digits. Their order is free.
For this, digits are split until every operand has each of them whole or not at all. If that is
impossible, as with 2 key heads for 6 query heads that the program takes as 3 x 2, the call is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.domain.layout import Dim, Layout, Piece, axes_of
from torch_streamkl.fx_passes.domain.masks import AxisCondition, AxisTensor
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.domain.values import Distribution
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, is_zero, provably_equal, quotient

BOTH, ROW_ONLY, KEY_ONLY, ABSENT = "both", "row", "key", "absent"


@dataclass(frozen=True)
class Digit:
    """Describes a part of a row dimension; ``pieces[side]`` is None if a side is constant along
    it.
    """

    dim: int  # of the user's tensor
    size: Size
    pieces: tuple[Piece | None, Piece | None]  # teacher, student


@dataclass(frozen=True)
class SideGeometry:
    """Describes the digits of one side of the call."""

    distribution: Distribution
    rows: TensorRef  # the operand with the query rows
    keys: TensorRef  # the operand with the keys
    kinds: tuple[str, ...]  # per digit: which operand varies along it
    averaged: tuple[Piece, ...] = ()  # digits of the heads it is averaged over, in operator order


@dataclass(frozen=True)
class Slot:
    """Names a position in the operator's tensor by ``kind``.

    "digit" is a digit of the geometry, and "averaged" one of a side. "key" and "dim" are pieces of
    the keys or of the contracted dimension. "one" is a dimension of size 1 without a place.
    """

    kind: str
    index: int = 0


@dataclass(frozen=True)
class Geometry:
    """Assigns digits to the operator's dimensions, as indices into ``digits``."""

    digits: tuple[Digit, ...]
    batch: tuple[int, ...]
    heads: tuple[int, ...]
    query: int | None  # None: a single query row
    teacher: SideGeometry
    student: SideGeometry

    def side(self, side: int) -> SideGeometry:
        return (self.teacher, self.student)[side]

    def digits_of(self, piece: Piece, side: int) -> list[tuple[Slot, Size]]:
        """Returns the digits that a piece of a row axis is made of, the leading one first, or
        raises Unsupported.
        """
        found = [(Slot("digit", i), d.pieces[side]) for i, d in enumerate(self.digits)]
        found += [(Slot("averaged", i), p) for i, p in enumerate(self.side(side).averaged)]
        within = [(slot, p) for slot, p in found if p is not None and _covers(piece, p)]
        order = leading_first([p for _, p in within])
        if not is_split_of([within[i][1] for i in order], piece):
            raise Unsupported(
                "an operand has rows that the divergence does not use, or in other groups"
            )
        return [(within[i][0], within[i][1].size) for i in order]


def geometry(
    teacher: Distribution,
    teacher_layout: Layout,
    student: Distribution,
    student_layout: Layout,
    key_dim: int,
    others: Sequence[TensorRef] = (),
) -> Geometry:
    """Returns the geometry of the pair, or raises Unsupported.

    ``others`` are further operands of the student's side.
    """
    num_keys = [d.scores.size(d.axis) for d in (teacher, student)]
    if not provably_equal(*num_keys):
        raise Unsupported("teacher and student have different keys")
    if any(
        is_zero(p.size) for layout in (teacher_layout, student_layout) for d in layout for p in d
    ):
        raise Unsupported("the scores have a dimension without entries")
    digits: list[Digit] = []
    for dim, (t, s) in enumerate(zip(teacher_layout, student_layout, strict=True)):
        if dim != key_dim:
            digits += _digits(dim, t, s)
    operands = tuple(_operands(d) for d in (teacher, student))
    kinds = [_kinds(o, digits, side) for side, o in enumerate(operands)]
    query = _query(kinds, digits, (teacher, student))
    held = (operands[0], (*operands[1], *others))
    refined: list[Digit] = []
    place: int | None = None
    for i, digit in enumerate(digits):
        parts = _refined(digit, held)
        if i == query:
            if len(parts) > 1:
                raise Unsupported("several heads share their query rows")
            place = len(refined)
        refined += parts
    sides = tuple(
        SideGeometry(d, *operands[i], _kinds(operands[i], refined, i), _averaged(d, operands[i]))
        for i, d in enumerate((teacher, student))
    )
    rest = [i for i in range(len(refined)) if i != place]
    heads = _heads(rest, refined, sides)
    batch = tuple(i for i in rest if i not in heads)
    return Geometry(tuple(refined), batch, heads, place, *sides)


def _digits(dim: int, t: Dim, s: Dim) -> list[Digit]:
    """Computes the common refinement of one dimension."""
    if not t or not s:
        return [Digit(dim, p.size, (p if t else None, p if s else None)) for p in t or s]
    result: list[Digit] = []
    left, right = list(t), list(s)
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if provably_equal(a.size, b.size):
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
            raise Unsupported("teacher and student rows are flattened in ways that do not match")
        result.append(Digit(dim, a.size, (a, Piece(b.axis, a.size, b.stride * inner))))
        right.insert(0, Piece(b.axis, inner, b.stride))
    if left or right:
        raise Unsupported("teacher and student rows are flattened in ways that do not match")
    return result


def _refined(digit: Digit, operands: Sequence[Sequence[TensorRef]]) -> list[Digit]:
    """The digit split where an operand of a side has only a part of it."""
    for piece, held in zip(digit.pieces, operands, strict=True):
        inner = None if piece is None else _cut(piece, held)
        if inner is not None:
            outer = quotient(digit.size, inner)
            assert outer is not None
            t, s = digit.pieces
            leading = Digit(digit.dim, outer, (_leading(t, inner), _leading(s, inner)))
            last = Digit(digit.dim, inner, (_last(t, inner), _last(s, inner)))
            return [*_refined(leading, operands), *_refined(last, operands)]
    return [digit]


def _cut(piece: Piece, operands: Sequence[TensorRef]) -> Size | None:
    """Size of the trailing part of a digit that some operand has without the rest, or lacks."""
    end = piece.stride * piece.size
    held = [p for o in operands for d in o.layout for p in d if p.axis == piece.axis]
    for edge in (e for p in held for e in (p.stride, p.stride * p.size)):
        if quotient(piece.stride, edge) is not None or quotient(edge, end) is not None:
            continue  # where the digit begins or ends, or outside
        inner = quotient(edge, piece.stride)
        if inner is None or quotient(end, edge) is None:
            raise Unsupported(
                "heads are shared in groups other than those that they are split into"
            )
        return inner
    return None


def _leading(piece: Piece | None, inner: Size) -> Piece | None:
    if piece is None:
        return None
    outer = quotient(piece.size, inner)
    assert outer is not None
    return Piece(piece.axis, outer, piece.stride * inner)


def _last(piece: Piece | None, inner: Size) -> Piece | None:
    return None if piece is None else Piece(piece.axis, inner, piece.stride)


def _averaged(distribution: Distribution, operands: Sequence[TensorRef]) -> tuple[Piece, ...]:
    """The digits of an average, those that the keys have first: the rest is left to grouping."""
    pieces = [
        part.pieces[0]
        for p in distribution.averaged
        for part in _refined(Digit(0, p.size, (p, None)), (operands, ()))
    ]
    _, keys = operands
    return tuple(
        sorted((p for p in pieces if p is not None), key=lambda p: not _has(keys.layout, p))
    )


def _operands(distribution: Distribution) -> tuple[TensorRef, TensorRef]:
    """Returns the operands with the query rows and with the keys."""
    key = distribution.scores
    holders = [o for o in (key.lhs, key.rhs) if distribution.axis in axes_of(o.layout)]
    if len(holders) != 1:
        raise Unsupported("the softmax is over a dimension that both operands of the scores have")
    (keys,) = holders
    return (key.rhs if keys is key.lhs else key.lhs), keys


def _kinds(
    operands: tuple[TensorRef, TensorRef], digits: Sequence[Digit], side: int
) -> tuple[str, ...]:
    rows, keys = (x.layout for x in operands)
    names = {(True, True): BOTH, (True, False): ROW_ONLY, (False, True): KEY_ONLY}
    pieces = [d.pieces[side] for d in digits]
    return tuple(
        ABSENT if p is None else names.get((_has(rows, p), _has(keys, p)), ABSENT) for p in pieces
    )


def _has(layout: Layout, piece: Piece) -> bool:
    """Whether a tensor varies along a digit of an axis."""
    return any(p.axis == piece.axis and _overlaps(p, piece) for d in layout for p in d)


def _overlaps(held: Piece, piece: Piece) -> bool:
    """Digits of one axis overlap unless one lies wholly below the other."""
    below = quotient(piece.stride, held.size * held.stride)
    above = quotient(held.stride, piece.size * piece.stride)
    return below is None and above is None


def _covers(held: Piece, piece: Piece) -> bool:
    """Whether a digit lies within a piece of its axis."""
    return (
        held.axis == piece.axis
        and quotient(piece.stride, held.stride) is not None
        and quotient(held.size * held.stride, piece.size * piece.stride) is not None
    )


def leading_first(pieces: Sequence[Piece]) -> list[int]:
    """Returns positions of the pieces of one axis by falling stride."""

    def rank(i: int) -> int:
        stride = pieces[i].stride
        others = (p for j, p in enumerate(pieces) if j != i)
        return sum(quotient(p.stride, pieces[i].size * stride) is not None for p in others)

    return sorted(range(len(pieces)), key=rank)


def is_split_of(pieces: Sequence[Piece], whole: Piece) -> bool:
    """Returns whether pieces, the leading one first, are the digits of a piece without gap or
    overlap.
    """
    ends = [p.size * p.stride for p in pieces]
    starts = [p.stride for p in pieces]
    wanted = [whole.size * whole.stride, *starts]
    return len(pieces) > 0 and all(map(provably_equal, wanted, [*ends, whole.stride]))


def _query(
    kinds: Sequence[Sequence[str]], digits: Sequence[Digit], pair: Sequence[Distribution]
) -> int | None:
    """The last digit that only the query operand of both sides has.

    Where all heads share their keys, these are such digits too: a causal mask says which it is.
    """
    rows = [i for i, both in enumerate(zip(*kinds, strict=True)) if set(both) == {ROW_ONLY}]
    if len(rows) > 1:
        banded = [set(_axes_of_conditions(d)) for d in pair]
        of_masks = [
            i
            for i in rows
            if any(p and p.axis in b for p, b in zip(digits[i].pieces, banded, strict=True))
        ]
        rows = of_masks or rows
    if rows:
        return rows[-1]
    if any(ROW_ONLY in side for side in kinds):
        raise Unsupported("teacher and student do not share a dimension of query rows")
    return None


def _axes_of_conditions(distribution: Distribution) -> Iterator[int]:
    for literal in read(distribution.scores).mask:
        if isinstance(literal, AxisCondition):
            yield from (axis for axis, _ in literal.coefficients)


def _heads(
    rest: Sequence[int], digits: Sequence[Digit], sides: Sequence[SideGeometry]
) -> tuple[int, ...]:
    """Returns the last digit, and digits before it if queries of several heads share keys.

    One is left for the batch, unless they are one dimension after another, a batch of size 1. And
    as many are as a mask or bias asks for that varies along some of them only.
    """
    heads = tuple(rest[-1:])
    found = [heads]
    while len(rest) > len(heads):
        first, before = heads[0], rest[-len(heads) - 1]
        is_one_dim = 0 < digits[before].dim == digits[first].dim
        if len(rest) - len(heads) == 1 and not is_one_dim:
            break
        shares = (ROW_ONLY, ABSENT)
        if not any(s.kinds[first] in shares and s.kinds[before] == BOTH for s in sides):
            break
        heads = (before, *heads)
        found.append(heads)
    if len(found) == 1:
        return heads
    long = [i for i in rest if not is_one(digits[i].size)]
    varying = [
        [piece is not None and _has(x, piece) for piece in (digits[i].pieces[side] for i in long)]
        for side, s in enumerate(sides)
        for x in _beside_scores(s.distribution)
    ]

    def is_whole(heads: tuple[int, ...]) -> bool:
        start = sum(i not in heads for i in long)
        return all(len(set(part)) <= 1 for v in varying for part in (v[:start], v[start:]))

    return next((x for x in reversed(found) if is_whole(x)), heads)


def _beside_scores(distribution: Distribution) -> Iterator[Layout]:
    """Layouts of the masks and biases that are tensors."""
    form = read(distribution.scores)
    yield from (x.layout for x in form.mask if isinstance(x, AxisTensor))
    yield from (bias.tensor.layout for bias in form.biases)
