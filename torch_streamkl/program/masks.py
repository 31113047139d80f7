"""Represents masks as data by which kernels skip keys, and as conditions of an expression.

Row i is at the position of key i + num_keys - num_rows. A mask enters an expression as
``where(condition, score, fill)``, whose condition is a conjunction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_streamkl.program.canonical import (
    TRUE,
    all_of,
    any_of,
    linear,
    literals,
    negation,
)
from torch_streamkl.program.graph import Node, Size, size_of


@dataclass(frozen=True)
class Keys:
    """Says which keys a row has. Row i is at the position of key i + num_keys - num_rows.

    Blocks outside are skipped; keys that are not allowed take part in no reduction.
    """

    left: int | None = None  # keys before that position
    right: int | None = None  # keys after it; 0 is causal
    has_lengths: bool = False
    has_mask: bool = False


ALL_KEYS = Keys()


def visible_keys(
    rows: slice, shift: int, num_keys: int, left: int | None, right: int | None
) -> slice:
    """Returns the keys that a window admits for some of the rows, maybe none.

    ``shift`` is num_keys - num_rows.
    """
    start = 0 if left is None else min(num_keys, max(0, rows.start + shift - left))
    stop = num_keys if right is None else min(num_keys, rows.stop + shift + right)
    return slice(start, max(start, stop))


def shift_of(num_rows: Size, num_keys: Size) -> Node:
    """Returns how many keys stand before the first row's own."""
    return linear(0.0, [(1.0, size_of(num_keys)), (-1.0, size_of(num_rows))])


def is_within(at: Node, size: Size | None) -> bool:
    """Returns whether a position is provably one of a dimension of this size."""
    if at.op == "index" and at.value.size == size:
        return True
    return at.range[0] >= 0.0 and size is not None and at.range[1] < size_of(size).range[0]


LOWEST = -1e8  # a fill at or below it leaves a key no probability


def kept_by(score: Node) -> frozenset[Node]:
    """Returns the conditions under which a score is none of a mask's fills."""
    if score.op == "where" and score.args[2].op == "const" and score.args[2].value <= LOWEST:
        return literals(score.args[0]) | kept_by(score.args[1])
    if score.op == "linear":
        terms = zip(score.value[1], score.args, strict=True)
        return frozenset[Node]().union(*(kept_by(t) for c, t in terms if c > 0.0))
    return frozenset()


def has_score(score: Node) -> Node:
    """Returns when a score is above -inf. A row whose scores are all a finite fill is uniform."""
    if score.op == "where" and score.args[2].op == "const":
        inside = has_score(score.args[1])
        if score.args[2].value == -math.inf:
            return all_of(score.args[0], inside)
        return inside if inside is TRUE else any_of(negation(score.args[0]), inside)
    if score.op == "linear":
        terms = zip(score.value[1], score.args, strict=True)
        return all_of(*(has_score(t) for c, t in terms if c > 0.0))
    return TRUE
