"""Represents masks as conjunctions of exact index conditions and of opaque boolean tensors.

``tril``, ``arange`` comparisons, ``ones`` and ``where`` become linear conditions on indices. So a
causal mask or a window is known exactly, and is never materialized. Any other mask is an opaque
tensor. It is passed on at the size that it had before it was expanded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from torch_streamkl.fx_passes.domain.layout import Layout, Piece, axis_dim, dim_size
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression, provably_equal, shape_of


@dataclass(frozen=True)
class Affine:
    """Represents an integer tensor: a constant plus coefficient * index, over its dimensions."""

    coefficients: tuple[int, ...]
    constant: Size = 0

    def __add__(self, other: Affine) -> Affine:
        rank = max(len(self.coefficients), len(other.coefficients))
        a, b = _padded(self.coefficients, rank), _padded(other.coefficients, rank)
        return Affine(
            tuple(x + y for x, y in zip(a, b, strict=True)), self.constant + other.constant
        )

    def scaled(self, factor: int) -> Affine:
        return Affine(tuple(c * factor for c in self.coefficients), self.constant * factor)

    def shifted(self, by: Size) -> Affine:
        return Affine(self.coefficients, self.constant + by)


def _padded(coefficients: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (0,) * (rank - len(coefficients)) + coefficients


@dataclass(frozen=True)
class Linear:
    """Represents ``sum(coefficient * index) + constant >= 0`` on a tensor's indices."""

    coefficients: tuple[int, ...]
    constant: Size

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Linear)
            and self.coefficients == other.coefficients
            and provably_equal(self.constant, other.constant)
        )

    def __hash__(self) -> int:
        return hash((self.coefficients, str(expression(self.constant))))

    def negated(self) -> Linear:
        return Linear(tuple(-c for c in self.coefficients), -self.constant - 1)


@dataclass(frozen=True)
class Opaque:
    """Represents a boolean tensor of unknown values, broadcast along the dimensions ``dims``.

    ``node`` holds it before it was expanded or unsqueezed: dimension d of the mask is dimension
    ``dims[d]`` of the node's tensor, None where the mask does not vary.
    """

    node: fx.Node
    dims: tuple[int | None, ...]
    positive: bool = True

    def negated(self) -> Opaque:
        return replace(self, positive=not self.positive)


Literal = Linear | Opaque


@dataclass(frozen=True)
class BoolTensor:
    """Represents a boolean tensor: all literals hold, or (``negative``) not all of them."""

    literals: frozenset[Literal]
    rank: int
    negative: bool = False

    def inverted(self) -> BoolTensor:
        if len(self.literals) == 1 and not self.negative:
            (literal,) = self.literals
            return replace(self, literals=frozenset({literal.negated()}))
        return replace(self, negative=not self.negative)

    def indexed_dims(self) -> set[int]:
        """Returns dimensions whose index the conditions read."""
        linear = [x for x in self.literals if isinstance(x, Linear)]
        return {d for x in linear for d, c in enumerate(x.coefficients) if c != 0}

    def conjunction(self, other: BoolTensor) -> BoolTensor | None:
        """Combines two masks that both hold; None if that is not a conjunction of literals."""
        if self.negative or other.negative:
            return None
        rank = max(self.rank, other.rank)
        return BoolTensor(self.raised(rank).literals | other.raised(rank).literals, rank)

    def raised(self, rank: int) -> BoolTensor:
        """Returns the mask with leading dimensions added."""
        extra = rank - self.rank
        if extra == 0:
            return self
        return BoolTensor(
            frozenset(_with_leading(x, extra) for x in self.literals), rank, self.negative
        )


TRUE_TENSOR = BoolTensor(frozenset(), 0)
NEVER = TRUE_TENSOR.inverted()


def _with_leading(literal: Literal, extra: int) -> Literal:
    if isinstance(literal, Linear):
        return Linear((0,) * extra + literal.coefficients, literal.constant)
    return replace(literal, dims=(None,) * extra + literal.dims)


def opaque(node: fx.Node, shape: Sequence[Size]) -> BoolTensor:
    """Makes a mask of a boolean tensor whose values are unknown."""
    dims = tuple(None if expression(size) == 1 else d for d, size in enumerate(shape))
    return BoolTensor(frozenset({Opaque(node, dims)}), len(dims))


@dataclass(frozen=True)
class Choice:
    """Represents a numeric tensor with one value if a mask holds, and another if it does not."""

    mask: BoolTensor
    inside: float
    outside: float


@dataclass(frozen=True)
class AnyKey:
    """Represents ``mask.any(dim)``: rows that have a key."""

    mask: BoolTensor
    dim: int
    keepdim: bool


def rearranged(mask: BoolTensor, order: Sequence[int | None]) -> BoolTensor:
    """Returns the mask with dimension d of the result taken from ``order[d]``, None for a new
    one.
    """

    def moved(literal: Literal) -> Literal:
        if isinstance(literal, Linear):
            return Linear(
                tuple(0 if d is None else literal.coefficients[d] for d in order), literal.constant
            )
        return replace(literal, dims=tuple(None if d is None else literal.dims[d] for d in order))

    return BoolTensor(frozenset(moved(x) for x in mask.literals), len(order), mask.negative)


@dataclass(frozen=True)
class AxisCondition:
    """Represents ``sum(coefficient * index of axis) + constant >= 0``."""

    coefficients: tuple[tuple[int, int], ...]  # (axis, coefficient), sorted
    constant: Size

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, AxisCondition)
            and self.coefficients == other.coefficients
            and provably_equal(self.constant, other.constant)
        )

    def __hash__(self) -> int:
        return hash((self.coefficients, str(expression(self.constant))))


@dataclass(frozen=True)
class AxisTensor:
    """Represents an opaque mask; ``layout`` places the scores' axes in its dimensions."""

    node: fx.Node
    layout: Layout
    positive: bool = True


@dataclass(frozen=True)
class AxisExcept:
    """Requires that the index of an axis is not in ``[start, stop)``."""

    axis: int
    start: int
    stop: int


AxisLiteral = AxisCondition | AxisTensor | AxisExcept
Mask = frozenset[AxisLiteral]


def to_axes(mask: BoolTensor, layout: Layout, node_rank: Mapping[fx.Node, int]) -> Mask | None:
    """Returns the literals of a conjunction as conditions on the axes of a tensor with
    ``layout``.
    """
    if mask.negative or mask.rank > len(layout):
        return None
    literals: set[AxisLiteral] = set()
    for literal in mask.raised(len(layout)).literals:
        if isinstance(literal, Linear) and _always_holds(literal, layout):
            continue
        converted = _to_axes(literal, layout, node_rank)
        if converted is None:
            return None
        literals.add(converted)
    return frozenset(literals)


def _always_holds(literal: Linear, layout: Layout) -> bool:
    """Whether the smallest value over all indices is known not to be negative."""
    lowest = literal.constant
    for dim, coefficient in enumerate(literal.coefficients):
        if coefficient < 0:
            lowest = lowest + coefficient * (dim_size(layout[dim]) - 1)
    known = expression(lowest)
    return isinstance(known, int) and known >= 0


def _to_axes(
    literal: Literal, layout: Layout, node_rank: Mapping[fx.Node, int]
) -> AxisLiteral | None:
    if isinstance(literal, Linear):
        coefficients = []
        for dim, coefficient in enumerate(literal.coefficients):
            if coefficient == 0:
                continue
            pieces = layout[dim]
            if pieces == ():
                return None  # the mask has more entries than what it is applied to
            if len(pieces) != 1 or axis_dim(layout, pieces[0].axis) != dim:
                return None
            coefficients.append((pieces[0].axis, coefficient))
        return AxisCondition(tuple(sorted(coefficients)), literal.constant)
    dims: list[tuple[Piece, ...]] = [()] * node_rank[literal.node]
    for dim, source in enumerate(literal.dims):
        if source is not None:
            dims[source] = layout[dim]
            if not provably_equal(dim_size(layout[dim]), shape_of(literal.node)[source]):
                return None  # the mask has more entries than what it is applied to
    return AxisTensor(literal.node, tuple(dims), literal.positive)


def to_tensor(mask: Mask, layout: Layout) -> BoolTensor | None:
    """Returns the inverse of `to_axes`: a mask on axes as one of a tensor with ``layout``."""
    literals: set[Literal] = set()
    for literal in mask:
        if isinstance(literal, AxisExcept):
            return None
        if isinstance(literal, AxisCondition):
            coefficients = [0] * len(layout)
            for axis, coefficient in literal.coefficients:
                dim = axis_dim(layout, axis)
                if dim is None:
                    return None
                coefficients[dim] = coefficient
            literals.add(Linear(tuple(coefficients), literal.constant))
            continue
        dims: list[int | None] = [None] * len(layout)
        for source, pieces in enumerate(literal.layout):
            if pieces == ():
                continue
            if pieces not in layout:
                return None
            dims[layout.index(pieces)] = source
        literals.add(Opaque(literal.node, tuple(dims), literal.positive))
    return BoolTensor(frozenset(literals), len(layout))


def axes_in(literal: AxisLiteral) -> set[int]:
    """Returns the axes that a condition depends on."""
    if isinstance(literal, AxisExcept):
        return {literal.axis}
    if isinstance(literal, AxisCondition):
        return {axis for axis, _ in literal.coefficients}
    return {p.axis for dim in literal.layout for p in dim}
