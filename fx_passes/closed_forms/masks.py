"""Says what the conditions of a mask are to an operator: windows, lengths, tensors, rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch_streamkl.fx_passes.closed_forms.form import Axes, Masks, NoForm, is_of_products
from torch_streamkl.fx_passes.closed_forms.score_form import Condition
from torch_streamkl.fx_passes.reading.sizes import is_at_most
from torch_streamkl.program.canonical import TRUE, all_of, linear, nonnegative, terms_of
from torch_streamkl.program.graph import (
    INT,
    Axis,
    Node,
    const,
    constant,
    index,
)
from torch_streamkl.program.masks import is_within, shift_of
from torch_streamkl.program.reductions import substitute
from torch_streamkl.program.walks import has_op, walk


@dataclass(frozen=True)
class Band:
    """Represents ``by_row * row + by_key * key + rest >= 0``."""

    by_row: float
    by_key: float
    rest: Node


def band_of(condition: Node, axes: Axes) -> Band | None:
    """Returns a condition as one on the positions of a row and a key, None if it is no such."""
    if condition.op != "nonnegative":
        return None
    constant_, terms = terms_of(condition.args[0])
    own = {t.value: c for c, t in terms if t.op == "index"}
    rest = linear(constant_, [(c, t) for c, t in terms if not _is_own(t, axes)])
    if rest.axes & {axes.key, axes.query}:
        return None
    by_row = own.get(axes.query, 0.0) if axes.query is not None else 0.0
    return Band(by_row, own.get(axes.key, 0.0), rest)


def _is_own(x: Node, axes: Axes) -> bool:
    return x.op == "index" and x.value in (axes.key, axes.query)


def is_of_sizes(x: Node) -> bool:
    """Returns whether a number is made of sizes and constants."""
    return all(y.op in ("const", "size", "linear", "product") for y in walk([x]))


def offset_of(axes: Axes) -> Node:
    """Returns num_keys - num_rows: how many keys stand before the first row's own."""
    assert axes.key.size is not None
    rows = axes.query.size if axes.query is not None else 1
    assert rows is not None
    return shift_of(rows, axes.key.size)


def masks_of(conditions: Iterable[Node], axes: Axes, fill: float | None = None) -> Masks:
    """Returns the conditions of a mask in the operator's terms."""
    found = Masks(fill=fill)
    for condition in sorted(conditions, key=lambda x: x.digest):
        found = _with(found, condition, axes)
    return found


def _with(masks: Masks, condition: Node, axes: Axes) -> Masks:
    if is_of_products(condition) or has_op(condition, "log_softmax"):
        raise NoForm("a mask that is computed from scores", condition)
    band = band_of(condition, axes)
    if axes.key not in condition.axes:
        return replace(masks, rows=(*masks.rows, condition))
    if band is None:
        if _is_of_position(condition, axes.key):
            return replace(masks, vocab=(*masks.vocab, condition))
        if _is_of_segments(condition, axes):
            return replace(masks, segments=(*masks.segments, condition))
        return replace(masks, tensors=(*masks.tensors, condition))
    by_row = -band.by_key if axes.query is None else band.by_row
    if (by_row, band.by_key) == (1.0, -1.0) and is_of_sizes(band.rest):
        right = linear(0.0, [(1.0, band.rest), (-1.0, offset_of(axes))])
        return replace(masks, window_right=_tighter(masks.window_right, right))
    if (by_row, band.by_key) == (-1.0, 1.0) and is_of_sizes(band.rest):
        left = linear(0.0, [(1.0, band.rest), (1.0, offset_of(axes))])
        return replace(masks, window_left=_tighter(masks.window_left, left))
    if is_of_sizes(band.rest) and not band.by_row:
        return replace(masks, vocab=(*masks.vocab, condition))
    if not band.by_row and band.by_key == -1.0 and masks.lengths is None:
        if band.rest.axes <= set(axes.batch):
            return replace(masks, lengths=linear(1.0, [(1.0, band.rest)]))
    return replace(masks, tensors=(*masks.tensors, condition))


def _tighter(a: Node | None, b: Node) -> Node:
    if a is None or a is b:
        return b
    x, y = constant(a), constant(b)
    if x is None or y is None:
        raise NoForm("two windows of unknown size", b)
    return a if x <= y else b


def _is_of_position(condition: Node, key: Axis) -> bool:
    """Whether a condition asks for the key's position alone, as entries of a vocabulary."""
    return condition.axes == {key} and not has_op(condition, "capture")


def _is_of_segments(condition: Node, axes: Axes) -> bool:
    """Whether an id of the row equals an id of the key."""
    if condition.op != "eq" or any(x.op != "capture" for x in condition.args):
        return False
    a, b = condition.args
    return len({axes.key in x.axes for x in (a, b)}) == 2 and a.value == b.value


def conditions_of(masks: Masks, axes: Axes) -> Condition:
    """Returns the conditions again, from the operator's terms."""
    found = [*masks.tensors, *masks.segments, *masks.rows, *masks.vocab]
    key = index(axes.key)
    row = const(0.0) if axes.query is None else index(axes.query)
    position = linear(0.0, [(1.0, row), (1.0, offset_of(axes))])
    if masks.window_left is not None:
        ends = [(1.0, key), (-1.0, position), (1.0, masks.window_left)]
        found.append(nonnegative(linear(0.0, ends)))
    if masks.window_right is not None:
        ends = [(-1.0, key), (1.0, position), (1.0, masks.window_right)]
        found.append(nonnegative(linear(0.0, ends)))
    if masks.lengths is not None:
        found.append(nonnegative(linear(-1.0, [(1.0, masks.lengths), (-1.0, key)])))
    return frozenset(x for x in found if x is not all_of())


def num_keys_of(condition: Node, key: Axis) -> Node | None:
    """Returns n of ``key < n``, a number or a size; None for other conditions.

    It is one that cannot exceed the number of keys: padding by a negative width crops.
    """
    if condition.op != "nonnegative":
        return None
    constant_, terms = terms_of(condition.args[0])
    rest = [(c, t) for c, t in terms if t is not index(key)]
    if len(rest) == len(terms) or (-1.0, index(key)) not in terms:
        return None
    bound = linear(constant_ + 1.0, rest)
    if bound.op not in ("const", "size") or key.size is None:
        return None
    size = int(bound.value) if bound.op == "const" else bound.value
    return bound if is_at_most(size, key.size) else None


def meets_some_key(conditions: Iterable[Node], key: Axis) -> bool:
    """Returns whether every row provably has a key that meets all conditions on positions.

    Such a key is the first one, or one at which a condition just holds.
    """
    conditions = list(conditions)
    candidates = [const(0, INT)]
    for condition in conditions:
        c0, terms = terms_of(condition.args[0]) if condition.op == "nonnegative" else (0.0, [])
        signs = [c for c, t in terms if t is index(key)]
        if len(signs) == 1 and abs(signs[0]) == 1.0:
            rest = [(-c * signs[0], t) for c, t in terms if t is not index(key)]
            candidates.append(linear(-c0 * signs[0], rest))
    return any(
        is_within(at, key.size) and substitute(all_of(*conditions), {key: at}) is TRUE
        for at in candidates
    )
