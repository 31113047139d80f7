"""Inserts the operator of entries of a product at ids, and their log-probabilities."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from torch_streamkl.bounds import checked_ids
from torch_streamkl.fx_passes.closed_forms.chosen import (
    Chosen,
    ChosenIds,
    ChosenValue,
    flat_axis,
)
from torch_streamkl.fx_passes.closed_forms.entries import Entries, EntryValue
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import tensor_of
from torch_streamkl.fx_passes.lowering.writer import Writer
from torch_streamkl.topk.log_probs import entry_log_probs
from torch_streamkl.topk.logits import entry_logits


def emit(
    writer: Writer, every: Sequence[Entries], chosen: Sequence[Chosen]
) -> dict[object, fx.Node]:
    """Inserts the calls, and returns values with a dimension for each of their axes.

    The ids of log-probabilities that a program leaves have one for all ids of a row.
    """
    ids = {x: _ids(writer, x) for x in dict.fromkeys([*every, *(c.entries for c in chosen)])}
    found: dict[object, fx.Node] = {}
    for n, entries in enumerate(every):
        hidden, weight = _operands(writer, entries)
        x = writer.build.call(entry_logits, hidden, weight, ids[entries])
        if tensor_of(x).dtype.itemsize < 4:  # as the per-row values; logits are rounded by now
            x = writer.build.method("float", x)
        found[EntryValue(n)] = _in_axes(writer, entries, x)
    for n, c in enumerate(chosen):
        entries = c.entries
        if c.scale is not None:
            hidden, weight = _operands(writer, entries)
            call = writer.build.call(entry_log_probs, hidden, weight, ids[entries], c.scale)
            x = writer.build.call(operator.getitem, call, 0)
            found[ChosenValue(n)] = _in_axes(writer, entries, x)
        else:
            shape = tuple(map(writer.extent, (*entries.rows, flat_axis(entries))))
            found[ChosenIds(n)] = writer.build.method("reshape", ids[entries], shape)
    return found


def _operands(writer: Writer, entries: Entries) -> tuple[fx.Node, fx.Node]:
    product = entries.product
    hidden = writer.tensor(product.rows, (entries.rows, product.contracted), expand=(0,))
    weight = writer.tensor(product.keys, ((entries.key,), product.contracted))
    dtypes = {tensor_of(x).dtype for x in (hidden, weight)}
    if len(dtypes) > 1 or not all(d.is_floating_point and d.itemsize > 1 for d in dtypes):
        raise Unsupported(f"entries at ids of operands of {sorted(map(str, dtypes))}")
    return hidden, weight


def _in_axes(writer: Writer, entries: Entries, x: fx.Node) -> fx.Node:
    return writer.build.method("reshape", x, tuple(map(writer.extent, entries.axes)))


def _ids(writer: Writer, entries: Entries) -> fx.Node:
    build = writer.build
    ids = writer.tensor(entries.ids, (entries.rows, entries.places), expand=(0, 1))
    if tensor_of(ids).dtype not in (torch.int32, torch.int64):
        ids = build.method("to", ids, torch.int64)
    return build.call(checked_ids, ids, writer.extent(entries.key), 1)


def emit_chosen(writer: Writer, every: Sequence[Chosen]) -> dict[object, fx.Node]:
    """Inserts the log-probabilities: NOTE [Log-probabilities of entries]."""
    return {
        ChosenValue(n): _log_probabilities(writer, n, c) for n, c in enumerate(every) if c.parts
    }


def _log_probabilities(writer: Writer, number: int, chosen: Chosen) -> fx.Node:
    build, axes = writer.build, [(a,) for a in chosen.rows]
    rows, every = range(len(axes)), range(len(axes) + 1)
    scores = writer.tensor(chosen.scores, (*axes, chosen.entries.places), expand=every)
    rest = writer.tensor(chosen.rest, axes, expand=rows)
    again = _named_before(build, writer.values[ChosenIds(number)])
    for _ in chosen.others:
        again = build.method("unsqueeze", again, -2)
    once = build.method("masked_fill", scores, again, -math.inf)
    row = build.call(torch.cat, [once, build.method("unsqueeze", rest, -1)], -1)
    high = build.method("amax", build.method("detach", row), -1, True)
    total = build.method("logsumexp", build.call(torch.sub, row, high), -1, True)
    found = build.call(torch.sub, build.call(torch.sub, scores, high), total)
    return build.method("reshape", found, tuple(map(writer.extent, chosen.axes)))


def _named_before(build: Builder, ids: fx.Node) -> fx.Node:
    """Whether an id stands in its row before."""
    ordered = build.call(torch.sort, ids, stable=True)
    values, order = (build.call(operator.getitem, ordered, i) for i in (0, 1))
    values = build.call(torch.nn.functional.pad, values, (1, 0), value=-1)
    is_equal = build.call(torch.eq, build.call(torch.diff, values), 0)
    return build.call(torch.scatter, is_equal, -1, order, is_equal)
