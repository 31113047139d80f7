"""What the analysis knows of a tensor: the abstract values that the recogniser computes with.

Scores -> Distribution (softmax over one axis) -> Elements (an expression over the probabilities of
one or more distributions, one value per key) -> Rows (summed over the keys). Masks are in
masks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_streamkl.functional import Expr, apply
from torch_streamkl.fx_passes.domain.layout import Layout, Piece
from torch_streamkl.fx_passes.domain.masks import Mask
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef, flows
from torch_streamkl.fx_passes.fx_utils.sizes import Size

CONTRACTED = -1  # axis number of the first contracted dimension; further ones count down


@dataclass(frozen=True)
class Factor:
    """A tensor that multiplies or divides dot products: a scalar, or a value per row or key."""

    tensor: TensorRef
    divides: bool


@dataclass(frozen=True)
class Bias:
    """weight * (a dense tensor), added to the scores; the layout places the scores' axes in it."""

    tensor: TensorRef
    weight: float = 1.0
    factors: tuple[Factor, ...] = ()  # scalars that the scores were multiplied with afterwards


# A finite fill this low takes part in no softmax of float32 scores that a model can produce,
# unless every key of the row has it: adding it to a score gives the fill itself.
ABSORBING = -1e30
# Beside any score that a model makes, one this low has no probability in float32.
IMPROBABLE = -1e4


@dataclass(frozen=True)
class ScoreKey:
    """The identity of a score matrix: two with equal keys hold the same numbers.

    ``capped * tanh(scale * factors * lhs.rhs) + biases`` (without the tanh where ``capped`` is 0),
    and ``fill`` where the mask does not hold. ``exact_fill`` says whether a row without any
    allowed key is really constant (two additive masks may add up to -inf on some of its keys).
    """

    lhs: TensorRef
    rhs: TensorRef
    sizes: tuple[tuple[int, Size], ...]  # (axis, size)
    scale: float = 1.0
    factors: tuple[Factor, ...] = ()
    capped: float = 0.0
    biases: tuple[Bias, ...] = ()
    mask: Mask | None = None
    fill: float = 0.0
    exact_fill: bool = True
    padded: int | None = None  # axis that goes on behind the keys' last one, with scores of -inf
    dtype: torch.dtype | None = None  # of the product, to which a linear layer rounds its logits
    added: bool = (
        False  # a mask or bias was added to the scores: gradient flows through its masked keys
    )

    def size(self, axis: int) -> Size:
        return dict(self.sizes)[axis]


@dataclass(frozen=True)
class Scores:
    """A tensor of scores."""

    key: ScoreKey
    layout: Layout

    def with_key(self, **changes: Any) -> Scores:
        return replace(self, key=replace(self.key, **changes))


@dataclass(frozen=True)
class Distribution:
    """Probabilities along one axis of a score matrix, or their mean over other axes of it."""

    scores: ScoreKey
    axis: int
    averaged: tuple[Piece, ...] = ()

    @property
    def trained(self) -> bool:
        """Whether a gradient flows back to the scores from this use of them."""
        return flows(self.scores)


@dataclass(frozen=True)
class RowFactor:
    """A tensor without a key dimension that multiplies values, or (``selects``) keeps whole rows.

    ``tensor`` broadcasts against the elements it was applied to, whose rank is ``rank``.
    """

    tensor: TensorRef
    rank: int
    selects: bool = False
    keeps: bool = True  # of a selecting factor: the rows where it is True stay, else the others
    divides: bool = False


@dataclass(frozen=True)
class Term:
    """expression * row factors."""

    expr: Expr
    factors: tuple[RowFactor, ...] = ()


@dataclass(frozen=True)
class Elements:
    """One value per key: a sum of terms over the `VARIABLES` of ``parts[k]``.

    ``layouts[k]`` places the axes of distribution k in the tensor's dimensions; all of them have
    their key axis in ``key_dim``. ``row_index`` is a boolean index that selected rows of the
    tensor.
    """

    terms: tuple[Term, ...]
    parts: tuple[Distribution, ...]
    layouts: tuple[Layout, ...]
    key_dim: int

    @property
    def rank(self) -> int:
        return len(self.layouts[0])

    def map(self, change: Callable[[Expr], Expr]) -> Elements:
        return replace(self, terms=tuple(replace(t, expr=change(t.expr)) for t in self.terms))

    def single(self) -> Expr | None:
        """The expression when there is one term without row factors."""
        return self.terms[0].expr if len(self.terms) == 1 and not self.terms[0].factors else None

    def probability(self) -> Distribution | None:
        """The distribution when the value is exactly its probabilities."""
        e = self.single()
        return self.parts[int(e.value)] if e is not None and e.op == "P" else None


def prob(k: int) -> Expr:
    return Expr("P", (), float(k))


def log_prob(k: int) -> Expr:
    return Expr("logP", (), float(k))


def lse(k: int) -> Expr:
    """The log-sum-exp of distribution k's scores: one value per row."""
    return Expr("lse", (), float(k))


def within(k: int) -> Expr:
    """1 at the keys that distribution k's mask allows: a mask applied after the softmax."""
    return Expr("within", (), float(k))


def partly_within(k: int) -> Expr:
    """1 at the keys that some of the conditions of distribution k's mask allow."""
    return Expr("partly_within", (), float(k))


VARIABLES = ("P", "logP", "lse", "within", "partly_within")


def mentions(e: Expr, op: str) -> bool:
    return e.op == op or any(mentions(a, op) for a in e.args)


def variables(e: Expr) -> set[int]:
    """Indices of the distributions an expression mentions."""
    if e.op in VARIABLES:
        return {int(e.value)}
    found: set[int] = set()
    for a in e.args:
        found |= variables(a)
    return found


def where_within(e: Expr, holds: bool) -> Expr:
    """The expression at keys where every mask applied after the softmax holds, or none does."""
    if e.op == "where" and e.args[0].op in ("within", "partly_within"):
        return where_within(e.args[1 if holds else 2], holds)
    return apply(e.op, *(where_within(a, holds) for a in e.args)) if e.args else e


def conditions_in(e: Expr) -> set[Expr]:
    """The masks that were applied after a softmax."""
    if e.op in ("within", "partly_within"):
        return {e}
    return set().union(*(conditions_in(a) for a in e.args))


def renumbered(e: Expr, number: dict[int, int]) -> Expr:
    """The expression with distribution indices replaced."""
    if e.op in VARIABLES:
        return Expr(e.op, (), float(number[int(e.value)]))
    return apply(e.op, *(renumbered(a, number) for a in e.args)) if e.args else e


@dataclass(frozen=True)
class Rows:
    """Elements summed over the keys, and perhaps over rows as well, times a constant.

    ``reduced`` are the dimensions of the elements that were summed, the key dimension included;
    ``divisors`` are sizes that a mean or a batchmean divides by. ``shape`` is the tensor's.
    """

    elements: Elements
    reduced: tuple[int, ...]
    keepdim: bool
    weight: float = 1.0
    divisors: tuple[Size, ...] = ()
    offsets: tuple[
        tuple[Distribution, float], ...
    ] = ()  # + coefficient * log-sum-exp of its scores
    constant: float = 0.0
    constant_within: bool = False  # the constant is 0 in rows without keys

    def scaled(self, factor: float) -> Rows:
        return replace(
            self,
            weight=self.weight * factor,
            offsets=tuple((d, c * factor) for d, c in self.offsets),
            constant=self.constant * factor,
        )


@dataclass(frozen=True)
class LogSumExp:
    """log-sum-exp of scores along an axis; ``layout`` has the axis removed or of size 1."""

    scores: ScoreKey
    axis: int
    layout: Layout


@dataclass(frozen=True)
class RowMax:
    """Maximum of scores along an axis: what a softmax written by hand subtracts."""

    scores: ScoreKey
    axis: int


@dataclass(frozen=True)
class Shifted:
    """scores - maximum of the row, or (``exponential``) exp of it."""

    scores: Scores
    axis: int
    exponential: bool = False


@dataclass(frozen=True)
class ExpSum:
    """Row sum of exp(scores - maximum), or its logarithm."""

    scores: ScoreKey
    axis: int
    logarithm: bool = False


@dataclass(frozen=True)
class Attention:
    """probabilities @ values: what attention does with a distribution besides its divergence."""

    probabilities: Elements
    values: TensorRef  # laid out in the axes of the probabilities' scores


@dataclass(frozen=True)
class Number:
    """A constant: every element of the tensor has this value."""

    value: float


@dataclass(frozen=True)
class Stacked:
    """torch.stack of element values along a new dimension."""

    items: tuple[Elements, ...]
    dim: int


@dataclass(frozen=True)
class Parts:
    """The list that chunk or split returns."""

    source: object
    dim: int
    bounds: tuple[tuple[Size, Size], ...]  # start and length of each part


@dataclass(frozen=True)
class Absent:
    """A boolean tensor that is True exactly where these scores are not finite: at masked keys."""

    scores: ScoreKey
