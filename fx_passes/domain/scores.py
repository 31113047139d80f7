"""Represents scores: dot products of two operands, and the chain of operations applied to them.

The chain is in the order in which it was written, and is normalised as each step is appended:

- A `Scale` (a factor that is a number) moves to the front, or up to the last tanh. It commutes
  with other factors and, if it is positive, with padding, and distributes over what is added or
  filled in. So there is one Scale before a tanh and one after it, and a temperature is one number.
- A `Shift` (an added number) moves after tensors that are added, and no further.
- All other steps stay in their place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from torch_streamkl.fx_passes.domain.layout import Layout, axes_of
from torch_streamkl.fx_passes.domain.masks import Mask, axes_in
from torch_streamkl.fx_passes.domain.tensor_ref import TensorRef
from torch_streamkl.fx_passes.fx_utils.sizes import Size

# A finite fill this low takes part in no softmax of float32 scores that a model can produce,
# unless every key of the row has it: adding it to a score gives the fill itself.
ABSORBING = -1e30
# Beside any score that a model makes, one this low has no probability in float32.
IMPROBABLE = -1e4
# In float32, scores next to a larger number have less than three decimals left.
LARGEST_SHIFT = 1e4


@dataclass(frozen=True)
class Factor:
    """Represents a tensor that multiplies or divides scores: a scalar, or one per row or key."""

    tensor: TensorRef
    divides: bool


@dataclass(frozen=True)
class Bias:
    """Represents weight * (a dense tensor), added to the scores."""

    tensor: TensorRef
    weight: float = 1.0
    factors: tuple[Factor, ...] = ()  # scalars that the scores were multiplied with afterwards

    @property
    def is_scaled(self) -> bool:
        return self.weight != 1.0 or bool(self.factors)


@dataclass(frozen=True)
class Product:
    """Represents weight * lhs . rhs, another product over the same rows and keys, added."""

    lhs: TensorRef
    rhs: TensorRef
    weight: float = 1.0
    factors: tuple[Factor, ...] = ()  # what the scores were multiplied with afterwards


@dataclass(frozen=True)
class Scale:
    """Represents scores * number."""

    number: float


@dataclass(frozen=True)
class Shift:
    """Represents scores + number.

    The identity for a softmax and for scores minus their own log-sum-exp, and for nothing else.
    """

    number: float


@dataclass(frozen=True)
class Tanh:
    """Represents tanh(scores)."""


@dataclass(frozen=True)
class Masking:
    """Puts ``fill`` in place of the scores if the mask does not hold, or (``added``) adds it.

    If a mask was added, gradient flows through the masked scores.
    """

    mask: Mask
    fill: float
    added: bool = False


@dataclass(frozen=True)
class Pad:
    """Appends scores of -inf to an axis, which then has ``size`` of them."""

    axis: int
    size: Size


ScoreStep = Scale | Factor | Shift | Tanh | Bias | Product | Masking | Pad
Steps = tuple[ScoreStep, ...]


@dataclass(frozen=True)
class ScoreKey:
    """Identifies a score matrix: two with equal keys hold the same numbers."""

    lhs: TensorRef
    rhs: TensorRef
    sizes: tuple[tuple[int, Size], ...]  # (axis, size)
    steps: Steps = ()
    dtype: torch.dtype | None = None  # of the product, to which a linear layer rounds its logits

    def size(self, axis: int) -> Size:
        return dict(self.sizes)[axis]

    def then(self, *steps: ScoreStep) -> ScoreKey:
        """Returns the key with operations applied to the scores."""
        chain = self.steps
        for step in steps:
            chain = appended(chain, step)
        return replace(self, steps=chain)

    def split_shift(self) -> tuple[ScoreKey, float]:
        """Returns the scores that a softmax sees, and the number that it ignores."""
        last = self.steps[-1] if self.steps else None
        if isinstance(last, Shift) and abs(last.number) <= LARGEST_SHIFT:
            return replace(self, steps=self.steps[:-1]), last.number
        return self, 0.0


@dataclass(frozen=True)
class Scores:
    """Represents a tensor of scores."""

    key: ScoreKey
    layout: Layout

    def then(self, *steps: ScoreStep) -> Scores:
        return replace(self, key=self.key.then(*steps))


def appended(steps: Steps, step: ScoreStep) -> Steps:
    """Returns the chain with one operation more, in its normal form."""
    match step:
        case Scale():
            return _scaled(steps, step.number)
        case Shift(number=0.0):
            return steps
        case Masking(mask=mask) if not mask:
            return steps  # it holds everywhere
    if not steps:
        return (step,)
    *before, last = steps
    match last, step:
        case Shift(), Shift():
            return appended(tuple(before), Shift(last.number + step.number))
        case Shift(), (Bias() | Product()):
            return (*appended(tuple(before), step), last)
        case Masking(), Masking() if _joins(last, step):
            return (*before, replace(last, mask=last.mask | step.mask))
    return (*steps, step)


def _joins(first: Masking, second: Masking) -> bool:
    """Whether two masks are one: -inf may be written or added any number of times."""
    if first.fill != second.fill or first.added != second.added:
        return False
    return not first.added or first.fill == -math.inf


def _scaled(steps: Steps, number: float) -> Steps:
    if number == 1.0:
        return steps
    if not steps or isinstance(steps[-1], Tanh):
        return (*steps, Scale(number))
    *before, last = steps
    rest = tuple(before)
    match last:
        case Scale():
            if last.number == 0.0 or number == 0.0:
                return (*steps, Scale(number))
            return _scaled(rest, last.number * number)
        case Factor():
            return (*_scaled(rest, number), last)
        case Bias() | Product():
            return (*_scaled(rest, number), replace(last, weight=last.weight * number))
        case Shift():
            return appended(_scaled(rest, number), Shift(last.number * number))
        case Masking() if number != 0.0:
            return (*_scaled(rest, number), replace(last, fill=last.fill * number))
        case Pad() if number > 0.0:
            return (*_scaled(rest, number), last)
    return (*steps, Scale(number))


def axes_of_step(step: ScoreStep) -> set[int]:
    """Returns the axes of the scores along which an operation varies."""
    match step:
        case Factor() | Bias():
            return axes_of(step.tensor.layout)
        case Product():
            return {axis for axis in axes_of(step.lhs.layout + step.rhs.layout) if axis >= 0}
        case Masking():
            return {axis for literal in step.mask for axis in axes_in(literal)}
        case Pad():
            return {step.axis}
    return set()


def leading_scale(steps: Steps) -> float:
    """Returns the number that multiplies everything after the last tanh, or from the start."""
    behind = max((i + 1 for i, step in enumerate(steps) if isinstance(step, Tanh)), default=0)
    first = steps[behind] if behind < len(steps) else None
    return first.number if isinstance(first, Scale) else 1.0


def nearly_equal(a: Steps, b: Steps) -> bool:
    """Returns whether two chains differ by no more than the rounding of their numbers."""
    return len(a) == len(b) and all(map(_nearly_the_same, a, b))


def _nearly_the_same(a: ScoreStep, b: ScoreStep) -> bool:
    match a, b:
        case Scale(number=x), Scale(number=y):
            return math.isclose(x, y, rel_tol=1e-12)
        case Shift(number=x), Shift(number=y):
            return math.isclose(x, y, rel_tol=1e-12)
        case Product(), Product():
            return math.isclose(a.weight, b.weight, rel_tol=1e-12) and (
                replace(a, weight=b.weight) == b
            )
        case Bias(), Bias():
            return math.isclose(a.weight, b.weight, rel_tol=1e-12) and (
                replace(a, weight=b.weight) == b
            )
        case Masking(), Masking():
            return math.isclose(a.fill, b.fill, rel_tol=1e-12) and replace(a, fill=b.fill) == b
    return a == b
