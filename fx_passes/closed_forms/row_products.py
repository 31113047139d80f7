"""Keeps products that have no keys as tensors, in a row program of other products.

The heads of an indexer have weights that a projection of the rows makes, ``w = x @ weight``.
Inside of a sum over keys, w is a value of its row: the program reads the user's tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.closed_forms.alike import free_axes, numbered
from torch_streamkl.fx_passes.closed_forms.row_sites import Place, is_entered, key_position
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.program.graph import CONTRACT, FLOAT, Axis, Node, Source, capture, index
from torch_streamkl.program.reductions import detached, remade, substitute
from torch_streamkl.program.walks import rebuilt, rebuilt_root, walk


@dataclass(frozen=True)
class RowProduct:
    """Names a product as a captured tensor, with a dimension for each of these axes."""

    product: Node
    axes: tuple[Axis, ...]


def without_row_products(roots: Sequence[Node], places: frozenset[Place]) -> list[Node]:
    """Returns expressions with captured tensors in place of products that no keys stand in."""

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if x.op != CONTRACT:
            return remade(x, args)
        if key_position(x, places) is not None or any(y.op == "capture" for y in _positions(x)):
            return x
        free = free_axes(x)
        source = Source(RowProduct(*numbered(x, free, "row")), 0, x.flows)
        return capture(source, FLOAT, at=[index(a) for a in free])

    made = rebuilt(roots, change, is_entered)
    return [made[x] for x in roots]


def _positions(product: Node) -> list[Node]:
    return walk([at for operand in product.args for at in operand.args])


def with_row_products(root: Node) -> Node:
    """Returns an expression in which those products stand again."""

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        name = source_name(x)
        if not isinstance(name, RowProduct):
            return remade(x, args) if is_entered(x) else x
        product = name.product if x.value.grad_flows else detached(name.product)
        return substitute(product, dict(zip(name.axes, x.args, strict=True)))

    return rebuilt_root(root, change, is_entered)
