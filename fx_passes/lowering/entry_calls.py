"""Inserts the operator of entries of a product at ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from torch_streamkl.bounds import checked_ids
from torch_streamkl.fx_passes.closed_forms.entries import Entries, EntryValue
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import tensor_of
from torch_streamkl.fx_passes.lowering.writer import Writer
from torch_streamkl.topk.logits import entry_logits


def emit(writer: Writer, every: Sequence[Entries]) -> dict[object, fx.Node]:
    """Inserts the calls, and returns values with a dimension for each of their axes."""
    return {EntryValue(n): _emit(writer, entries) for n, entries in enumerate(every)}


def _emit(writer: Writer, entries: Entries) -> fx.Node:
    build, product = writer.build, entries.product
    hidden = writer.tensor(product.rows, (entries.rows, product.contracted), expand=(0,))
    weight = writer.tensor(product.keys, ((entries.key,), product.contracted))
    ids = writer.tensor(entries.ids, (entries.rows, entries.places), expand=(0, 1))
    dtypes = {tensor_of(x).dtype for x in (hidden, weight)}
    if len(dtypes) > 1 or not all(d.is_floating_point and d.itemsize > 1 for d in dtypes):
        raise Unsupported(f"entries at ids of operands of {sorted(map(str, dtypes))}")
    if tensor_of(ids).dtype not in (torch.int32, torch.int64):
        ids = build.method("to", ids, torch.int64)
    ids = build.call(checked_ids, ids, writer.extent(entries.key), 1)
    found = build.call(entry_logits, hidden, weight, ids)
    if tensor_of(found).dtype.itemsize < 4:  # as the per-row values; logits are rounded by now
        found = build.method("float", found)
    shape = tuple(map(writer.extent, entries.axes))
    return build.method("reshape", found, shape)
