"""Defines the abstract values that the interpreter computes with.

Scores -> Distribution (softmax over one axis) -> Elements (an expression over the probabilities of
one or more distributions, one value per key) -> Rows (summed over the keys). Masks are in
masks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch_streamkl.fx_passes.domain.layout import Layout, Piece, Shape
from torch_streamkl.fx_passes.domain.scores import ScoreKey, Scores
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef, grad_flows
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import Size
from torch_streamkl.program.graph import BOOL, Node, intern
from torch_streamkl.program.identities import variable
from torch_streamkl.program.walks import rebuilt, replaced, walk, with_args

CONTRACTED = -1  # axis number of the first contracted dimension; further ones count down


@dataclass(frozen=True)
class Distribution:
    """Represents probabilities along one axis of a score matrix, or their mean over other axes."""

    scores: ScoreKey
    axis: int
    averaged: tuple[Piece, ...] = ()

    @property
    def requires_grad(self) -> bool:
        """Returns whether a gradient flows back to the scores from this use of them."""
        return grad_flows(self.scores)


@dataclass(frozen=True)
class RowFactor:
    """Represents a tensor without keys that multiplies values, or (``selects``) keeps whole rows.

    ``tensor`` broadcasts against the elements it was applied to, whose rank is ``rank``.
    """

    tensor: TensorRef
    rank: int
    selects: bool = False
    keeps: bool = True  # of a selecting factor: the rows where it is True stay, else the others
    divides: bool = False


@dataclass(frozen=True)
class Term:
    """Represents expression * row factors."""

    expr: Node
    factors: tuple[RowFactor, ...] = ()


@dataclass(frozen=True)
class Elements:
    """Represents one value per key: a sum of terms over the `VARIABLES` of ``parts[k]``.

    ``layouts[k]`` places the axes of distribution k in the tensor's dimensions; all of them have
    their key axis in ``key_dim``. ``shape`` is the tensor's. If a layout has nothing in a
    dimension of a size above 1, the distribution is broadcast, and a sum counts it as often.
    """

    terms: tuple[Term, ...]
    parts: tuple[Distribution, ...]
    layouts: tuple[Layout, ...]
    key_dim: int
    shape: Shape = field(compare=False)

    def __post_init__(self) -> None:
        if sum(num_operations(t.expr, MAX_OPERATIONS) for t in self.terms) > MAX_OPERATIONS:
            raise Unsupported(
                f"a formula of probabilities has more than {MAX_OPERATIONS} operations, written "
                "out without the values that it uses several times"
            )

    @property
    def rank(self) -> int:
        return len(self.layouts[0])

    def map(self, change: Callable[[Node], Node]) -> Elements:
        return replace(self, terms=tuple(replace(t, expr=change(t.expr)) for t in self.terms))

    def single(self) -> Node | None:
        """Returns the expression when there is one term without row factors."""
        return self.terms[0].expr if len(self.terms) == 1 and not self.terms[0].factors else None

    def probability(self) -> Distribution | None:
        """Returns the distribution when the value is exactly its probabilities."""
        e = self.single()
        return self.parts[int(e.value)] if e is not None and e.op == "P" else None


def prob(k: int) -> Node:
    """Makes the variable of distribution k's probabilities."""
    return variable("P", k)


def log_prob(k: int) -> Node:
    """Makes the variable of distribution k's log-probabilities."""
    return variable("logP", k)


def lse(k: int) -> Node:
    """Returns the log-sum-exp of distribution k's scores: one value per row."""
    return intern("lse", (), float(k), is_finite=False)


def within(k: int) -> Node:
    """Creates the mask of distribution k applied after the softmax: 1 at allowed keys."""
    return intern("within", (), float(k), BOOL)


def partly_within(k: int) -> Node:
    """Creates a part of distribution k's mask: 1 at keys that some of its conditions allow."""
    return intern("partly_within", (), float(k), BOOL)


# Expressions are trees: what uses a value twice has it twice, and loops would double it each time
MAX_OPERATIONS = 256


def num_operations(e: Node, limit: int) -> int:
    """Counts an expression's operations, up to a limit."""
    count, stack = 0, [e]
    while stack and count <= limit:
        current = stack.pop()
        count += bool(current.args)
        stack += current.args
    return count


VARIABLES = {"P": prob, "logP": log_prob, "lse": lse, "within": within,
             "partly_within": partly_within}  # fmt: skip


def mentions(e: Node, op: str) -> bool:
    """Returns whether an expression contains an operation."""
    return any(x.op == op for x in walk([e]))


def variables(e: Node) -> set[int]:
    """Returns indices of the distributions an expression mentions."""
    return {int(x.value) for x in walk([e]) if x.op in VARIABLES}


def where_within(e: Node, holds: bool) -> Node:
    """Returns the expression at keys at which every mask after the softmax holds, or none does."""

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if x.op == "where" and x.args[0].op in MASKS:
            return args[1 if holds else 2]
        return with_args(x, args)

    return rebuilt([e], change)[e]


MASKS = ("within", "partly_within")  # that were applied after a softmax


def conditions_in(e: Node) -> set[Node]:
    """Returns the masks that were applied after a softmax."""
    return {x for x in walk([e]) if x.op in MASKS}


def renumbered(e: Node, number: Mapping[int, int]) -> Node:
    """Returns the expression with distribution indices replaced."""

    def change(x: Node) -> Node | None:
        make = VARIABLES.get(x.op)
        return make(number.get(int(x.value), int(x.value))) if make else None

    return replaced(e, change)


def of_one_distribution(e: Node) -> Node:
    """Returns the expression with one distribution in place of all."""
    return renumbered(e, dict.fromkeys(variables(e), 0))


@dataclass(frozen=True)
class Rows:
    """Represents elements summed over the keys, and perhaps over rows as well, times a constant.

    ``reduced`` are the dimensions of the elements that were summed, the key dimension included.
    ``divisors`` are sizes that a mean or a batchmean divides by.
    """

    elements: Elements
    reduced: tuple[int, ...]
    keepdim: bool
    weight: float = 1.0
    divisors: tuple[Size, ...] = ()
    offsets: tuple[tuple[LogSumExp, float], ...] = ()  # + coefficient * log-sum-exp
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
    """Represents the log-sum-exp of scores along an axis, which ``layout`` lacks or has at size 1.

    As an offset of rows, ``layout`` is in the dimensions of the rows' elements.
    """

    scores: ScoreKey
    axis: int
    layout: Layout


@dataclass(frozen=True)
class RowMax:
    """Represents the maximum of scores along an axis, which a hand-written softmax subtracts."""

    scores: ScoreKey
    axis: int
    layout: Layout  # the axis has size 1


@dataclass(frozen=True)
class Shifted:
    """Represents scores - maximum of the row, or (``exponential``) exp of it.

    The gradient of the maximum cancels in a softmax whose sum subtracts the same maximum.
    ``maximum`` is the scores of that maximum, with their gradient, which the sum must match.
    """

    scores: Scores
    axis: int
    maximum: ScoreKey
    exponential: bool = False


@dataclass(frozen=True)
class ExpSum:
    """Represents the row sum of exp(scores - maximum), or its logarithm."""

    scores: ScoreKey
    axis: int
    layout: Layout  # the axis has size 1
    maximum: ScoreKey
    logarithm: bool = False


@dataclass(frozen=True)
class Attention:
    """Represents probabilities @ values: attention, which reads a distribution besides its
    divergence.
    """

    probabilities: Elements
    values: TensorRef  # laid out in the axes of the probabilities' scores
    # of the result: dimensions of the probabilities but the keys, in order, then of the values
    order: tuple[int, ...]


@dataclass(frozen=True)
class Number:
    """Represents a constant: every element of the tensor has this value."""

    value: float


@dataclass(frozen=True)
class Stacked:
    """Represents torch.stack of element values along a new dimension."""

    items: tuple[Elements, ...]
    dim: int


@dataclass(frozen=True)
class Parts:
    """Represents the list that chunk or split returns."""

    source: object
    dim: int
    bounds: tuple[tuple[Size, Size], ...]  # start and length of each part


@dataclass(frozen=True)
class Entries:
    """Represents the entries of selected rows, one after the other, as of masked_select."""

    rows: Scores | Elements


@dataclass(frozen=True)
class Infinite:
    """Represents a boolean tensor that is True where one of these scores is -inf, as of a bias."""

    scores: tuple[Scores, ...]
