"""Says which axes are which dimension of a row program's tensors.

The operator knows batch, heads, rows and keys. An axis that every product has is rows if no column
operand has it, else batch and heads. Axes that only some products have, and that are summed before
the products meet, are those products' heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.closed_forms.form import NoForm, Product
from torch_streamkl.program.graph import Axis, Node

Dim = tuple[Axis, ...]


@dataclass(frozen=True)
class RowAxes:
    """Holds the axes in each dimension of the operator's tensors; heads are per product."""

    batch: Dim
    heads: tuple[Dim, ...]
    rows: Dim
    keys: Dim  # several where code splits them into blocks
    is_summed: bool  # heads are summed before products meet; else all products share them

    @property
    def numbers(self) -> dict[Dim, int]:
        """Returns the number of each axis of heads in a program, 0 for none."""
        found = {heads: i for i, heads in enumerate(dict.fromkeys(self.heads), 1)}
        return {**found, (): 0}


def product_of(x: Node, keys: Dim) -> Product:
    """Returns a product's operands: that of the rows, and that of the keys."""
    found = [set(keys) & a.axes for a in x.args]
    if sorted(map(len, found)) != [0, len(keys)]:
        raise NoForm("the sum is not over an axis of one operand of the matmul", x)
    columns = 0 if found[0] else 1
    return Product(x.args[1 - columns], x.args[columns], x.value)


def axes_of_products(products: Sequence[Product], common: Sequence[Axis], keys: Dim) -> RowAxes:
    """Returns the groups of axes; ``common`` are those of all sums, in the user's order."""
    rows_of = [x.rows.axes - set(x.contracted) for x in products]
    columns_of = [x.keys.axes - set(x.contracted) for x in products]
    every = [a | b for a, b in zip(rows_of, columns_of, strict=True)]
    if not set(common) <= set().union(*every):
        raise NoForm("a tensor gives the scores a dimension that no matmul has")
    rows = tuple(
        a
        for a in common
        if all(a in x and a not in y for x, y in zip(rows_of, columns_of, strict=True))
    )
    others = [a for a in common if a not in rows]
    own = [
        tuple(sorted(x - {*common, *keys}, key=lambda a: _place(a, product)))
        for x, product in zip(every, products, strict=True)
    ]

    rows_before = [
        a for a in common if any(a in x - y for x, y in zip(rows_of, columns_of, strict=True))
    ]

    def shared_last(heads: Iterable[Axis], of: Iterable[int]) -> Dim:
        """Puts axes that the keys lack at the end: query head h uses key head h // group."""
        return tuple(sorted(heads, key=lambda a: any(a not in columns_of[i] for i in of)))

    numbers = range(len(products))
    if any(mine and not set(rows_before) <= x for mine, x in zip(own, every, strict=True)):
        # each row would compute the products of all rows again
        raise NoForm("a sum over rows or some heads comes before the sum over the keys")
    if any(own):
        alike: dict[frozenset[Axis], Dim] = {}
        for x in own:
            sharing = [i for i in numbers if set(own[i]) == set(x)]
            alike.setdefault(frozenset(x), shared_last(x, sharing))
        return RowAxes(
            tuple(others), tuple(alike[frozenset(x)] for x in own), rows, keys, is_summed=True
        )
    rest = shared_last(others[1:], numbers)
    return RowAxes(tuple(others[:1]), (rest,) * len(products), rows, keys, is_summed=False)


def _place(axis: Axis, product: Product) -> tuple[int, str]:
    """In which dimension of an operand an axis is."""
    for operand in (product.rows, product.keys):
        for d, at in enumerate(operand.args):
            if axis in at.axes:
                return d, repr(axis)
    return len(product.rows.args), repr(axis)
