"""Combines sums over keys with each other, and with log-sum-exps.

Two sums can be combined if they are over the same axes, with the same extents, and divided by the
same sizes.
"""

from __future__ import annotations

from dataclasses import replace

from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain.element_algebra import aligned, collected, with_rank
from torch_streamkl.fx_passes.domain.values import LogSumExp, Rows
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import product, provably_equal
from torch_streamkl.program.graph import ZERO, const


def rows_combined(a: Rows, b: Rows, sign: float) -> Rows:
    """Combines a + sign * b, both summed over the same axes and divided by the same sizes.

    The rows that are left may be broadcast; what was summed over may not: a sum over a dimension
    counts its extent.
    """
    rank = max(a.elements.rank, b.elements.rank)
    a, b = _rows_with_rank(a, rank), _rows_with_rank(b.scaled(sign), rank)
    extents = [tuple(r.elements.shape[d] for d in r.reduced) for r in (a, b)]
    if (a.reduced, a.keepdim) != (b.reduced, b.keepdim) or not all(map(provably_equal, *extents)):
        raise Unsupported("two sums over different dimensions are added")
    if not provably_equal(product(a.divisors), product(b.divisors)):
        raise Unsupported("two sums that are divided by different sizes are added")
    x, y = aligned(a.elements, b.elements)
    x = x.map(lambda e: const(a.weight) * e)
    y = y.map(lambda e: const(b.weight) * e)
    terms = collected([*x.terms, *y.terms])
    return Rows(
        replace(x, terms=tuple(t for t in terms if t.expr != ZERO)),
        a.reduced,
        a.keepdim,
        1.0,
        a.divisors,
        _added(a.offsets, b.offsets),
        a.constant + b.constant,
        a.constant_within or b.constant_within,
    )


def _rows_with_rank(rows: Rows, rank: int) -> Rows:
    """The rows of elements that have leading dimensions of size 1 added."""
    extra = rank - rows.elements.rank
    if extra == 0:
        return rows
    offsets = tuple((replace(x, layout=((),) * extra + x.layout), c) for x, c in rows.offsets)
    return replace(
        rows,
        elements=with_rank(rows.elements, rank),
        reduced=tuple(d + extra for d in rows.reduced),
        offsets=offsets,
    )


def rows_and_lse(rows: Rows, value: LogSumExp, sign: float) -> Rows:
    """Combines rows + sign * log-sum-exp."""
    elements, layout = rows.elements, value.layout
    if rows.reduced != (elements.key_dim,) or rows.divisors:
        raise Unsupported("a log-sum-exp is added to a sum over more than the keys")
    placed = lay.with_rank(layout, elements.rank if rows.keepdim else elements.rank - 1)
    if placed is not None and not rows.keepdim:  # in the dimensions of the elements
        placed = lay.unsqueeze(placed, elements.key_dim)
    shape = (*elements.shape[: elements.key_dim], 1, *elements.shape[elements.key_dim + 1 :])
    if placed is None or not lay.broadcasts_to(placed, shape):
        raise Unsupported("a log-sum-exp of other rows is added to a sum over keys")
    key, shift = value.scores.split_shift()
    if shift and rows.constant_within:
        raise Unsupported("a number is added to rows of which some have no keys")
    added = ((replace(value, scores=key, layout=placed), sign),)
    constant = rows.constant + sign * shift
    return replace(rows, offsets=_added(rows.offsets, added), constant=constant)


def _added(
    a: tuple[tuple[LogSumExp, float], ...], b: tuple[tuple[LogSumExp, float], ...]
) -> tuple[tuple[LogSumExp, float], ...]:
    sums = list(a)
    for x, c in b:
        known = next((i for i, (y, _) in enumerate(sums) if x == y), None)
        if known is None:
            sums.append((x, c))
        else:
            sums[known] = (x, sums[known][1] + c)
    return tuple((x, c) for x, c in sums if c != 0.0)
