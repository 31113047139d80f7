"""Reads the number of rows that a boolean mask selects from the positions, not from large tensors.

Dynamo asserts at run time what it has assumed of such sizes. It reads them from the selected
logits, which would keep these alive.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.analysis.interpreter import ScoreInterpreter
from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.domain.row_selection import RowSelection
from torch_streamkl.fx_passes.fx_utils.builder import Builder, Selections
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression, is_unknown, shape_of

Counts = dict[str, tuple[fx.Node, Size]]  # by symbol: positions, and entries of a row


def symbols_of_counts(recognised: ScoreInterpreter) -> dict[str, RowSelection]:
    """Returns the selections by mask, keyed by the symbols of their row counts in the trace."""
    return {
        str(expression(shape_of(node)[dim] // width)): selection
        for node, (selection, dim, width) in recognised.counted.items()
    }


def reread_counts(
    quadratic: Iterable[fx.Node],
    trace: Trace,
    recognised: ScoreInterpreter,
    selections: Selections,
    builder: Callable[[fx.Node], Builder],
) -> None:
    """Makes run-time checks of row counts read the positions, not large tensors."""
    counts = _counts(trace, recognised, selections)
    for node in quadratic:
        value = example(node)
        for user in list(node.users):
            if user.target is not torch.ops.aten.sym_size.int or not isinstance(value, Tensor):
                continue
            size = value.shape[user.args[1]]  # type: ignore[index]  # sym_size's dimension
            found = counts.get(str(expression(size))) if is_unknown(size) else None
            if found is not None:
                _reread(user, *found, builder(user))


def _counts(trace: Trace, recognised: ScoreInterpreter, selections: Selections) -> Counts:
    """Returns the user's symbols for numbers of selected rows, or of their entries."""
    counts: Counts = {}
    for inner, (selection, dim, width) in recognised.counted.items():
        positions, node = selections.positions.get(selection), trace.outer.get(inner)
        if positions is not None and node is not None:
            value = example(node)
            assert isinstance(value, Tensor)
            counts[str(expression(value.shape[dim]))] = (positions, width)
    return counts


def _reread(size: fx.Node, positions: fx.Node, width: Size, build: Builder) -> None:
    if expression(width) == 1:
        size.args = (positions, 0)
        return
    tensors = [n for n in size.graph.nodes if n.op == "placeholder" and _is_tensor(n)]
    try:
        with build.undone_if_unsupported():
            number = build.call(torch.ops.aten.sym_size.int, positions, 0)
            entries = build.call(operator.mul, number, build.size(width, tensors))
    except Unsupported:
        return  # the size of a row is no input's: the large tensor stays, and the report says so
    size.replace_all_uses_with(entries)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(example(node), Tensor)
