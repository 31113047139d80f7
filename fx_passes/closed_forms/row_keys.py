"""Makes the axes of a row program's keys, and holds what the user's graph says of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.repeated_ids import SINGLE_ENTRIES
from torch_streamkl.fx_passes.closed_forms.row_sites import (
    Binding,
    Place,
    key_position,
    products_in,
)
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.graph import Axis, Node, Size, num_positions


@dataclass(frozen=True)
class Facts:
    """Says what expressions do not: of the user's graph that they were read from.

    ``logarithms`` are expressions of logarithms of probabilities, which are -inf in eager code
    where a probability underflows; ``log_softmaxes`` are numbers there. ``made_of_products`` are
    captured tensors that are computed from matmuls.
    """

    made_of_products: Collection[Any]
    extent: Callable[[Any, int], Any]  # of the dimensions of captured tensors
    index_size: Callable[[Node], Size | None]  # of the one dimension that is read at positions
    logarithms: tuple[Node, ...] = ()
    log_softmaxes: tuple[Node, ...] = ()
    product_types: Mapping[frozenset[Any], Any] = field(default_factory=dict)  # by operands


def keys_of(
    bindings: Sequence[Binding], places: frozenset[Place], facts: Facts
) -> tuple[Axis, ...]:
    """Makes axes for the keys of what is bound: one, or those of blocks and of the keys inside."""
    plain: list[Any] = []
    chosen: list[Any] = []
    blocks: dict[int, int] = {}  # how many, by their size
    for b in bindings:
        for product in b.products:
            place = key_position(product, places)
            at = product.args[place[0]].args[place[1]] if place is not None else None
            if place is None or at is None or b.axis not in at.axes:
                continue
            size = _block_size(at)
            if size:
                blocks[size] = _num_keys(at)
            elif at.op != "capture":
                plain.append(b.axis.size)
            else:  # all keys are those of the operand
                chosen.append(facts.extent(product.args[place[0]].value, place[1]))
    if blocks:
        return _split_keys(blocks)
    for size in (*plain, *chosen):
        return (fresh_axis(size),)
    raise NoForm("a sum of what is not made from scores")


def check_single_keys(
    roots: Sequence[Node],
    bindings: Sequence[Binding],
    places: frozenset[Place],
    keys: tuple[Axis, ...],
    facts: Facts,
) -> None:
    """Raises NoForm if a key that is read alone may be none of those that are summed.

    In a program it is the one key of the sum whose position is equal. If code sums some of the
    keys only, positions count from the first of these, and others may be beyond them.
    """
    summed = {b.axis for b in bindings}
    singles: list[tuple[Node, bool]] = []  # and whether it is a key that is summed, unless shifted
    is_shifted, count = False, keys[0].size if len(keys) == 1 else num_positions(keys)
    for product in products_in(roots):
        place = key_position(product, places)
        if place is None:
            continue
        side, d = place
        operand = product.args[side]
        at = operand.args[d]
        constant, terms = terms_of(at)
        if summed & at.axes and all(t.op == "index" for _, t in terms):
            is_shifted |= constant != 0.0 or (len(terms) == 1 and terms[0][0] != 1.0)
        else:
            sizes = facts.extent(operand.value, d), facts.index_size(at)
            singles.append((product, count is not None and count in sizes))
    for product, is_summed in singles:
        if is_shifted or not is_summed:
            raise NoForm(SINGLE_ENTRIES, product)


def _block_size(at: Node) -> int:
    """The size of blocks, of a position of ``size * block + index``; 0 for any other position."""
    constant, terms = terms_of(at)
    if len(terms) != 2 or constant:
        return 0
    if any(t.op == "product" and any(f.op == "size" for f in t.args) for _, t in terms):
        raise NoForm("blocks of keys of a size that varies")
    (c, outer), (one, inner) = sorted(terms, key=lambda item: -item[0])
    is_plain = outer.op == inner.op == "index" and one == 1.0
    return int(c) if is_plain and inner.value.size == c else 0


def _num_keys(at: Node) -> int:
    size = 1
    for _, t in terms_of(at)[1]:
        if not isinstance(t.value.size, int):
            raise NoForm("blocks of keys of a size that varies")
        size *= t.value.size
    return size


def _split_keys(blocks: dict[int, int]) -> tuple[Axis, ...]:
    """Axes of keys of which each size of blocks is a product of the last ones."""
    (total,) = set(blocks.values()) if len(set(blocks.values())) == 1 else (0,)
    sizes, found = [total, *sorted(blocks, reverse=True), 1], list[Axis]()
    for outer, inner in itertools.pairwise(sizes):
        if not total or outer % inner:
            raise NoForm(
                "an axis of the scores is split into parts of sizes that do not divide it"
            )
        if outer != inner:
            found.append(fresh_axis(outer // inner))
    return tuple(found)
