"""Says which axis is which dimension of the operator's tensors.

NOTE [Axes of a call]
Teacher and student are expressions of the same axes of rows, and of one axis of keys. Each of the
four operands varies along some of them. Operators pair batch, heads and rows of both sides, with
two exceptions:

- keys with fewer heads: query head h uses key head h // group. So the axes of heads that keys lack
  are left to grouping if they are the last ones of the query heads;
- a teacher averaged over heads: student head h has the teacher heads h * n to h * n + n - 1, so
  the averaged axes come after the axes of heads.

An operand that lacks an axis otherwise is expanded along it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_streamkl.fx_passes.closed_forms.form import Axes, NoForm, Side
from torch_streamkl.fx_passes.closed_forms.score_form import Condition
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.graph import BOUND, Axis
from torch_streamkl.program.walks import walk

BOTH, ROW_ONLY, KEY_ONLY, ABSENT = "both", "row", "key", "absent"
_KINDS = {(True, True): BOTH, (True, False): ROW_ONLY, (False, True): KEY_ONLY}


def kind_of(side: Side, axis: Axis) -> str:
    """Returns which operands of a side vary along an axis."""
    held = axis in side.product.rows.axes, axis in side.product.keys.axes
    return _KINDS.get(held, ABSENT)


def ordered_rows(axes: Iterable[Axis], order: Sequence[Axis] = ()) -> list[Axis]:
    """Returns axes of rows in the order of the user's dimensions.

    Bound axes are numbered from the inside: sums over dimensions begin with the last one.
    """
    place = {a: i for i, a in enumerate(order)}

    def rank(axis: Axis) -> tuple[int, int, str]:
        name = axis.name
        if axis in place:
            return 0, place[axis], ""
        if isinstance(name, tuple) and name[0] == BOUND:
            return -1, -name[1], ""  # sums are outside of what is free
        return (
            1,
            name[1] if isinstance(name, tuple) and isinstance(name[1], int) else 0,
            repr(name),
        )

    return sorted(axes, key=rank)


def in_memory_order(rows: list[Axis], side: Side, key: Axis) -> list[Axis]:
    """Returns the rows of an LM head in the order of the hidden states' dimensions."""
    x, keys = side.product.rows, side.product.keys.axes - set(side.product.contracted)
    if keys != {key} or x.op != "capture" or not set(rows) <= x.axes:
        return rows
    strides = {
        t.value: (d, -c)
        for d, at in enumerate(x.args)
        for c, t in terms_of(at)[1]
        if t.op == "index"
    }
    if not set(rows) <= strides.keys():
        return rows
    return sorted(rows, key=lambda a: strides[a])


def axes_of(
    sides: Sequence[Side], masks: Sequence[Condition], rows: list[Axis], key: Axis
) -> Axes:
    """Assigns the axes of rows to batch, heads and queries."""
    query = _query(sides, masks, rows)
    # keys that heads share are grouped by the last axes
    rest = sorted((a for a in rows if a != query), key=lambda a: _is_shared(sides, a))
    heads = _heads(sides, rest, _tensors(sides, masks))
    return Axes(tuple(a for a in rest if a not in heads), heads, query, key)


def _query(sides: Sequence[Side], masks: Sequence[Condition], rows: Sequence[Axis]) -> Axis | None:
    """The last axis that only the query operand of both sides has.

    Where all heads share their keys, these are such axes too: a causal mask says which it is.
    """
    kinds = {a: {kind_of(side, a) for side in sides} for a in rows}
    found = [a for a in rows if kinds[a] == {ROW_ONLY}]
    if len(found) > 1:
        positions = {
            t.value
            for mask in masks
            for x in mask
            if x.op == "nonnegative"
            for t in walk([x])
            if t.op == "index"
        }
        found = [a for a in found if a in positions] or found
    if found:
        return found[-1]
    if any(ROW_ONLY in k for k in kinds.values()):
        raise NoForm("teacher and student do not share a dimension of query rows")
    return None


def _is_shared(sides: Sequence[Side], axis: Axis) -> bool:
    """Whether keys lack an axis that their queries have."""
    return any(kind_of(side, axis) == ROW_ONLY for side in sides)


def _tensors(sides: Sequence[Side], masks: Sequence[Condition]) -> list[frozenset[Axis]]:
    """The axes of masks and of what is added to scores."""
    conditions = [x.axes for mask in masks for x in mask]
    return conditions + [bias.value.axes for side in sides for bias in side.added]


def _heads(
    sides: Sequence[Side], rest: Sequence[Axis], tensors: Sequence[frozenset[Axis]]
) -> tuple[Axis, ...]:
    """The last axis, and axes before it if queries of several heads share keys.

    One stays for the batch, unless it is a part of one dimension with them. And so many are heads
    that masks vary along all or none of them, and of those of the batch.
    """
    heads = tuple(rest[-1:])
    found = [heads]
    while len(rest) > len(heads):
        first, before = heads[0], rest[-len(heads) - 1]
        if len(rest) - len(heads) == 1 and not _is_one_dim(sides, before, first):
            break
        shares = (ROW_ONLY, ABSENT)
        if not any(kind_of(s, first) in shares and kind_of(s, before) == BOTH for s in sides):
            break
        heads = (before, *heads)
        found.append(heads)
    long = [a for a in rest if a.size != 1]

    def is_whole(heads: tuple[Axis, ...]) -> bool:
        parts = {a for a in long if a in heads}, {a for a in long if a not in heads}
        return all(not part & axes or part <= axes for part in parts for axes in tensors)

    return next((x for x in reversed(found) if is_whole(x)), heads)


def _is_one_dim(sides: Sequence[Side], *axes: Axis) -> bool:
    """Whether the queries of both sides have these axes in one dimension."""
    return all(
        x.op == "capture" and any(set(axes) <= at.axes for at in x.args)
        for x in (side.product.rows for side in sides)
    )
