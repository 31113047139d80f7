"""Reads the largest element of a row, and its place, as a program's maxima.

A kernel's maximum ignores NaN, but the log-sum-exp next to it does not. A maximum of probabilities
is ``exp(max(scores) - lse(scores))``, unless a mask may hide scores: where it hides a row, the
log-sum-exp loses the count of its keys. No maximum has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.row_checks import is_filled
from torch_streamkl.fx_passes.closed_forms.row_sites import (
    Place,
    has_products,
    is_entered,
    is_of_keys,
)
from torch_streamkl.program.canonical import ADDED, choose, compare, subtracted
from torch_streamkl.program.functions import exponential, function
from torch_streamkl.program.graph import (
    ARGMAX,
    CONTRACT,
    FLOAT,
    INT,
    LOGSUMEXP,
    MAX,
    Axis,
    Node,
    apply,
    const,
    index,
)
from torch_streamkl.program.reductions import reduced, remade, rounded, substitute
from torch_streamkl.program.shifts import HIDES
from torch_streamkl.program.walks import rebuilt, rebuilt_root, walk

OF_OTHERS = "a maximum over the keys leaves the elements"


def with_largest(
    roots: Sequence[Node],
    keys: frozenset[Place],
    narrow: Callable[[Node], torch.dtype | None],
) -> list[Node]:
    """Returns roots in which maxima over keys are NaN where eager code has it.

    No probability is above 1, which rounding would make it: the square root of what it leaves of
    1 would be NaN. ``narrow`` is the type that a product is rounded to in eager code, if it is a
    narrow one. Raises NoForm for a maximum of something else than scores and probabilities.
    """

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if x.kind not in (MAX, ARGMAX) or not is_of_keys(x, keys):
            return remade(x, args)
        return _largest(x) if x.kind == MAX else _place(x, narrow)

    made = rebuilt(roots, change, lambda x: not is_of_keys(x, keys))
    return [made[x] for x in roots]


def _largest(maximum: Node) -> Node:
    axis, body = maximum.value.axis, maximum.args[0]
    if body.flows:
        return maximum  # the step says why not
    is_probability = body.op == "exp" and body.args[0].op == "log_softmax"
    log = body.args[0] if is_probability else body
    if log.op != "log_softmax":
        return choose(function("isnan", _log_sum_exp(body, maximum)), const(math.nan), maximum)
    if log.value != axis:
        raise NoForm(OF_OTHERS, maximum)
    scores = log.args[0]
    if not _may_hide(scores, axis):
        largest = subtracted(reduced(MAX, axis, scores), reduced(LOGSUMEXP, axis, scores))
        largest = apply("clamp_max", largest, 0.0)
        return exponential(largest) if is_probability else largest
    largest = apply("clamp_max", maximum, 1.0 if is_probability else 0.0)
    return choose(_has_numbers(scores, maximum), largest, const(math.nan))


def _log_sum_exp(elements: Node, found: Node) -> Node:
    """The log-sum-exp of elements as they are, over the axis of a maximum or its place."""
    axis = found.value.axis
    lse = reduced(LOGSUMEXP, axis, elements)
    is_one = lse.kind == LOGSUMEXP
    if not is_one or lse.args[0] is not substitute(elements, {axis: index(lse.value.axis)}):
        raise NoForm(OF_OTHERS, found)
    return lse


def _has_numbers(scores: Node, found: Node) -> Node:
    """Whether the softmax of a row has numbers."""
    return compare("gt", const(math.inf), function("abs", _log_sum_exp(scores, found)))


def _may_hide(scores: Node, axis: Axis) -> bool:
    """Whether something may hide some scores of a row."""
    inside = walk([scores], is_entered)
    return is_filled(scores, HIDES) or any(
        x.op == "where" or (x.op == "capture" and x.dtype == FLOAT and axis in x.axes)
        for x in inside
    )


def _place(place: Node, narrow: Callable[[Node], torch.dtype | None]) -> Node:
    """The place of a maximum: of a row without numbers that of the first NaN, as torch has it."""
    axis, body = place.value.axis, place.args[0]
    log = body.args[0] if body.op == "exp" else body
    if log.op != "log_softmax":
        return reduced(ARGMAX, axis, _as_stored(body, narrow))
    if log.value != axis:
        raise NoForm(OF_OTHERS, place)
    scores = log.args[0]
    found = reduced(ARGMAX, axis, _as_stored(scores, narrow))
    return choose(_has_numbers(scores, place), found, const(0.0, INT))


def _as_stored(scores: Node, narrow: Callable[[Node], torch.dtype | None]) -> Node:
    """Scores of which the largest is one of eager code's largest, up to its own roundings.

    A narrow type makes different products equal, of which torch takes the first: so a product is
    rounded. What scales it and rounds again keeps the order, or makes equal what was not, so that
    a largest one stays one. A sum of several terms keeps no order. It is not rounded at all: its
    largest is as large as what eager code finds among the sums that it has rounded.
    """

    def is_score(x: Node) -> bool:
        return is_entered(x) and x.dtype == FLOAT

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        dtype = narrow(x) if x.op == CONTRACT else None
        return remade(x, args) if dtype is None else rounded(x, str(dtype).removeprefix("torch."))

    has_sum = False
    for x in walk([scores], is_score):
        if x.dtype != FLOAT:
            continue  # a mask
        numbers = [x.value[0], *x.value[1]] if x.op == "linear" else []
        if x.op not in (CONTRACT, "linear", "where", "const") and has_products(x):
            raise NoForm("argmax of what is no score", x)
        if any(abs(n) >= HIDES for n in numbers) or x.value == ADDED:
            raise NoForm("argmax of scores next to a large number", x)
        has_sum |= len(numbers) > 2
    return scores if has_sum else rebuilt_root(scores, change, is_score)
