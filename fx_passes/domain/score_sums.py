"""Represents a sum of two products over the same rows and keys: a low-rank adapter of an LM head.

``x W^T + s (x A^T) B^T`` is one head over the features [x, s x A^T] with the weight [W, B]. The
first product stays the scores, and the second is a step of their chain, so that neither weight is
copied.
"""

from __future__ import annotations

from torch_streamkl.fx_passes.domain.layout import Layout, axes_of
from torch_streamkl.fx_passes.domain.scores import (
    Bias,
    Factor,
    Product,
    Scale,
    ScoreKey,
    Scores,
    Shift,
    Steps,
)
from torch_streamkl.fx_passes.fx_utils.sizes import provably_equal


def sum_of_heads(x: Scores, y: Scores, sign: float) -> Scores | None:
    """Combines ``x + sign * y`` if both are products of rows with one matrix of keys, else
    None.
    """
    if _is_plain(y.key.steps) and _is_linear(x.key.steps):
        return _joined(x, y.then(Scale(sign)))
    if _is_plain(x.key.steps) and _is_linear(y.key.steps):
        return _joined(y.then(Scale(sign)), x)
    return None


def _joined(x: Scores, y: Scores) -> Scores | None:
    if not _are_alike(x, y):
        return None
    steps = y.key.steps
    leading = steps[0].number if steps and isinstance(steps[0], Scale) else 1.0
    if leading == 0.0:
        return None  # the gradient of what is multiplied by 0 is 0, not none
    rest = steps[1:] if steps and isinstance(steps[0], Scale) else steps
    return x.then(Product(y.key.lhs, y.key.rhs, leading), *rest)


def _is_plain(steps: Steps) -> bool:
    """A number times the product, and what is added to that."""
    return all(isinstance(step, Bias | Product | Shift) for step in steps[1:]) and all(
        isinstance(step, Scale | Bias | Product | Shift) for step in steps[:1]
    )


def _is_linear(steps: Steps) -> bool:
    """No mask, padding or tanh, after which a product cannot be added."""
    return all(isinstance(step, Scale | Factor | Bias | Product | Shift) for step in steps)


def _are_alike(x: Scores, y: Scores) -> bool:
    """Whether the same axes are the rows, and one axis, which only the second operand has, keys.

    The keys of attention vary with batch and heads: its operator has no second product.
    """
    a, b = x.key, y.key
    if a.dtype != b.dtype or x.layout != y.layout or not _same_sizes(a, b):
        return False
    keys = _axes(a.rhs.layout)
    return (
        len(keys) == 1
        and keys == _axes(b.rhs.layout)
        and not keys & (_axes(a.lhs.layout) | _axes(b.lhs.layout))
        and {axis for axis, _ in a.sizes} - keys == _axes(a.lhs.layout) == _axes(b.lhs.layout)
    )


def _same_sizes(a: ScoreKey, b: ScoreKey) -> bool:
    mine, others = dict(a.sizes), dict(b.sizes)
    return mine.keys() == others.keys() and all(provably_equal(mine[k], others[k]) for k in mine)


def _axes(layout: Layout) -> set[int]:
    return {axis for axis in axes_of(layout) if axis >= 0}
