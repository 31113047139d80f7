"""Applies the user's own row selection to an operand of the scores.

See NOTE [Selected rows] in domain/row_selection.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import outer_node
from torch_streamkl.fx_passes.domain.layout import Shape
from torch_streamkl.fx_passes.domain.row_selection import (
    GATHER,
    INDEX_SELECT,
    MASK_ENTRIES,
    RowSelection,
)
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.sizes import Size, is_one, provably_equal, shape_of


def selected(
    build: Builder,
    x: fx.Node,
    dim: int,
    num_dims: int,
    selection: RowSelection,
    outer: Mapping[fx.Node, fx.Node],
) -> fx.Node:
    """Selects rows of ``x`` from ``num_dims`` dimensions from ``dim`` on."""
    tensors = [outer_node(n, outer) for n in selection.tensors]
    made_of = [outer[n] for n in selection.condition_tensors() if n in outer]
    build.selecting.append((tensors, made_of))
    if selection.is_mask:
        (mask,) = tensors
        positions = build.positions(
            selection, mask, lambda made: _mask_of_rows(made, mask, selection)
        )
        return build.method("index_select", _flat(build, x, dim, num_dims), dim, positions)
    _count_positions(build, selection, tensors)
    if selection.kind == INDEX_SELECT:
        return build.method("index_select", _flat(build, x, dim, num_dims), dim, *tensors)
    x = _regrouped(build, x, dim, num_dims, selection.sizes)
    if selection.kind == GATHER:
        (index,) = tensors
        return _gathered(build, x, dim, build.method("select", index, -1, 0), selection)
    # transposed positions give transposed rows, of which fake tensors of torch do not know
    tensors = [t if _is_contiguous(t) else build.method("contiguous", t) for t in tensors]
    return build.call(operator.getitem, x, (*(slice(None),) * dim, *tensors))


def _mask_of_rows(build: Builder, mask: fx.Node, selection: RowSelection) -> fx.Node:
    """Returns the mask with one entry per row."""
    if selection.kind != MASK_ENTRIES:
        return mask
    rows = build.method("select", mask, -1, 0)
    have = _shape(rows)
    if len(have) == len(selection.sizes) and all(map(provably_equal, have, selection.sizes)):
        return rows
    return build.method("expand", rows, *(build.size(s, [mask]) for s in selection.sizes))


def _count_positions(build: Builder, selection: RowSelection, tensors: list[fx.Node]) -> None:
    """Finds where to read sizes that are symbols, as those of ``torch.where(mask)``."""
    for i, size in enumerate(selection.shape):
        if isinstance(size, int):
            continue
        negative_dim = i - len(selection.shape) - (selection.kind == GATHER)
        for inner, tensor in zip(selection.tensors, tensors, strict=True):
            shape = shape_of(inner)
            if -negative_dim <= len(shape) and provably_equal(shape[negative_dim], size):
                build.count(size, tensor, negative_dim)


def _flat(build: Builder, x: fx.Node, dim: int, num_dims: int) -> fx.Node:
    return build.method("flatten", x, dim, dim + num_dims - 1) if num_dims > 1 else x


def _regrouped(build: Builder, x: fx.Node, dim: int, num_dims: int, sizes: Shape) -> fx.Node:
    """Dimensions of an operand as those that the user's code selects from."""
    have = _shape(x)[dim : dim + num_dims]
    if len(have) == len(sizes) and all(map(provably_equal, have, sizes)):
        return x
    tensor, x = x, _flat(build, x, dim, num_dims)
    if len(sizes) == 1:
        return x
    return build.method("unflatten", x, dim, tuple(build.size(s, [tensor]) for s in sizes))


def _gathered(
    build: Builder, x: fx.Node, dim: int, index: fx.Node, selection: RowSelection
) -> fx.Node:
    """Inserts a ``gather`` along one dimension of the rows, for all other dimensions of ``x``."""
    num_rows = len(selection.sizes)
    sizes: list[int | fx.Node] = []
    for d, size in enumerate(_shape(x)):
        is_row = dim <= d < dim + num_rows
        sizes.append(-1 if is_row else build.size(size, [x]))
        if not is_row:
            index = build.method("unsqueeze", index, d)
    index = build.method("expand", index, *sizes)
    return build.method("gather", x, dim + selection.along, index)


def _is_contiguous(node: fx.Node) -> bool:
    """Checks contiguity, as far as it is known without a guard."""
    value = example(node)
    assert isinstance(value, Tensor)
    expected: Size = 1
    for size, stride in reversed(list(zip(value.shape, value.stride(), strict=True))):
        if not is_one(size) and not provably_equal(stride, expected):
            return False
        expected = expected * size
    return True


def _shape(node: fx.Node) -> Shape:
    value = example(node)
    assert isinstance(value, Tensor)
    return tuple(value.shape)
