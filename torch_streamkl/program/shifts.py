"""Decides what is added to all scores of a row and leaves a softmax as it is in floating point.

Over real numbers everything does. But scores next to 1e9 have no digits left, and next to the
lowest number they are nothing: a softmax of them is uniform. So code that drops what is added, or
moves it elsewhere, asks here first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torch_streamkl.program.canonical import LARGEST_SHIFT, terms_of
from torch_streamkl.program.graph import BOOL, CONTRACT, FLOAT, Axis, Node
from torch_streamkl.program.ranges import times
from torch_streamkl.program.walks import walk

LARGE = 1e3  # what a tensor of 1 and 0 is multiplied with to be a mask
HIDES = 64.0  # what stands in place of a score, or is added to it, to hide its key is larger


def is_small(c: float, x: Node, scores: Collection[Node] = ()) -> bool:
    """Returns whether scores keep their digits next to ``c * x``.

    So they do next to what is bounded, and next to what is made of products and their reductions,
    which are as large as scores are. So are reductions of ``scores``, the terms that the rest is
    added to, where they are captured tensors. Any other captured tensor may be of any size.
    """
    if all(abs(times(c, bound)) <= LARGEST_SHIFT for bound in x.range):
        return True
    if abs(c) > LARGEST_SHIFT:
        return False
    own = {y.value for y in walk(scores) if y.op == "capture"}
    for y in walk([x], lambda y: not _is_condition_or_score(y, own)):
        if not all(abs(number) <= LARGEST_SHIFT for number in _numbers(y)):
            return False
        if y.op == "capture" and y.dtype == FLOAT:
            return False
    return True


def _numbers(x: Node) -> Sequence[float]:
    """The numbers of a sum, or of a constant."""
    if x.op == "linear":
        return (x.value[0], *x.value[1])
    return (x.value,) if x.op == "const" else ()


def _is_condition_or_score(x: Node, own: Collection[object] = ()) -> bool:
    """Whether the numbers in an expression say nothing of its size: a reduction is of scores."""
    if x.dtype == BOOL or x.op in (CONTRACT, "capture"):
        return True
    return x.op == "reduce" and any(
        y.op == CONTRACT or (y.op == "capture" and y.value in own) for y in walk(x.args)
    )


def small_shifts(terms: Sequence[tuple[float, Node]], axis: Axis) -> list[tuple[float, Node]]:
    """Returns what is added to all scores along an axis alike, and is small next to them."""
    scores = [t for _, t in terms if axis in t.axes]
    return [(c, t) for c, t in terms if axis not in t.axes and is_small(c, t, scores)]


def is_shifted(score: Node, axis: Axis) -> bool:
    """Returns whether something large is added to all scores."""
    constant, terms = terms_of(score)
    small = small_shifts(terms, axis)
    return abs(constant) > LARGEST_SHIFT or any(
        axis not in t.axes and (c, t) not in small for c, t in terms
    )


def is_lost(total: Node, parts: Sequence[Node]) -> bool:
    """Returns whether a sum lacks what is large in one of its parts, next to smaller terms.

    Over real numbers ``(scores + 1e9) - 1e9`` is ``scores``. In floating point it has the digits
    that scores have next to 1e9.
    """
    constant, terms = terms_of(total)
    left = {t: abs(c) for c, t in terms}
    for x in parts:
        number, own = terms_of(x)
        if abs(constant) < abs(number) / LARGE and any(
            abs(number) > LARGEST_SHIFT * _size(c, t) for c, t in own
        ):
            return True
        for c, t in own if len(own) > 1 else ():
            if left.get(t, 0.0) >= abs(c) / LARGE or is_small(c, t):
                continue
            if t not in walk([total]):  # nor inside of a softmax, or of a mask
                return True
    return False


def multiple(c: float, x: Node) -> float:
    """Returns what a term multiplies by: ``1e9 * mask`` of integers is rounded to a type."""
    if x.op == "round" and x.args[0].op == "linear":
        return c * max(x.args[0].value[1], key=abs)
    return c


def mask_terms(x: Node) -> list[int]:
    """Returns which terms of a sum are a mask together with its constant, next to other terms.

    ``1e9 * mask - 1e9`` is 0 where nothing is hidden. Added to it last, ``bias`` keeps its digits.
    """
    constant, terms = terms_of(x)
    if abs(constant) < LARGE:
        return []
    found = [i for i, term in enumerate(terms) if abs(multiple(*term)) >= LARGE]
    return found if len(found) < len(terms) else []


def _size(c: float, x: Node) -> float:
    """How large a term is: as scores are, unless it is known."""
    size = max(abs(times(c, bound)) for bound in x.range)
    return size if size < math.inf else max(abs(c), 1.0)
