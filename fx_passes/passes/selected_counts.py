"""Reads the number of rows that a boolean mask selects from the positions, not from large tensors.

Dynamo asserts at run time what it has assumed of such sizes. It reads them from the selected
logits, which would keep these alive.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.fx_utils.builder import Builder, MakeBuilder, Selections
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import example, is_tensor
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression, is_unknown
from torch_streamkl.fx_passes.fx_utils.torch_names import FloorDiv
from torch_streamkl.fx_passes.reading.positions import MaskedRows
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.graph import Extent


def masks_of_counts(trace: Trace, reading: Reading) -> dict[str, tuple[MaskedRows, int]]:
    """Returns the rows that masks of the trace select, by the symbols of their counts.

    The symbols are those of the trace and of the user's graph. Entries that are selected are so
    many of each row.
    """
    if not reading.sizes.selected:
        return {}
    found = {
        name: (rows, 1)
        for count, rows in reading.sizes.selected.items()
        for name in reading.sizes.equal_names(expression(count.size))
    }
    for inner, node in trace.outer.items():
        made, value = inner.meta.get("val"), example(node)
        if not isinstance(made, Tensor) or not isinstance(value, Tensor):
            continue
        for size, of_user in zip(made.shape, value.shape, strict=True):
            count = reading.sizes.of(size) if is_unknown(of_user) else None
            if isinstance(count, Extent) and count in reading.sizes.selected:
                found[str(expression(of_user))] = reading.sizes.selected[count], 1
    for count, rows in reading.sizes.selected.items():
        known = expression(count.size)
        if isinstance(known, FloorDiv) and known.args[1].is_Integer:
            each = int(known.args[1])
            for name in reading.sizes.equal_names(known.args[0]):
                found.setdefault(name, (rows, each))
    return found


def reread_counts(nodes: Iterable[fx.Node], selections: Selections, builder: MakeBuilder) -> None:
    """Makes run-time checks of row counts read the positions, not what large tensors lead to."""
    for node in nodes:
        value = example(node)
        for user in list(node.users):
            if user.target is not torch.ops.aten.sym_size.int or not isinstance(value, Tensor):
                continue
            size = value.shape[user.args[1]]  # type: ignore[index]  # sym_size's dimension
            if is_unknown(size):
                _reread(user, size, selections, builder(user))


def _reread(user: fx.Node, size: Size, selections: Selections, build: Builder) -> None:
    symbols = expression(size).free_symbols
    if not any(selections.count_of(str(s)) for s in symbols):
        return
    positions, each = selections.count_of(str(expression(size))) or (None, 0)
    if each == 1:
        user.args = (positions, 0)
        return
    tensors = [n for n in user.graph.nodes if n.op == "placeholder" and is_tensor(n)]
    try:
        with build.undone_if_unsupported():
            entries = build.size(size, tensors)
    except Unsupported:
        return  # a size that is no input's: the large tensor stays, and the report says so
    user.replace_all_uses_with(entries)  # type: ignore[arg-type]  # a node: not all is known
