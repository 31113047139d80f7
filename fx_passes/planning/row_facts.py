"""Collects what row programs have to know of the graph that expressions were read from."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.closed_forms.row_keys import NOT_RANKED, Facts
from torch_streamkl.fx_passes.fx_utils.nodes import tensor_of
from torch_streamkl.fx_passes.fx_utils.sizes import provably_equal
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.fx_passes.reading.rules.selections import top_of
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.graph import Axis, Extent, Node, Source
from torch_streamkl.program.walks import walk

aten = torch.ops.aten
LOGARITHMS = {
    aten.log.default, aten.log2.default, aten.log10.default, aten.log1p.default,
    aten.kl_div.default, aten.xlogy.Tensor, aten.special_entr.default,
}  # fmt: skip


def facts_of(reading: Reading) -> Facts:
    """Returns the facts of a graph, without the logarithms, which are those of a program."""
    made = reading.reads_products
    return Facts(why_repeated, (), made, dtype_of, reading.sizes.extent, is_ranked=is_ranked)


def logarithms_of(reading: Reading) -> dict[fx.Node, list[Node]]:
    """Returns the expressions of probabilities whose logarithm nodes take, by node."""
    takers = (n for n in reading.arrays if n.target in LOGARITHMS)
    return {n: _of_probabilities(n, reading) for n in takers}


def logarithms_in(
    nodes: Container[fx.Node], every: Mapping[fx.Node, list[Node]]
) -> tuple[Node, ...]:
    """Returns the logarithms that these nodes take.

    Other code may take those of the same probabilities: here they may be computed from scores.
    """
    return tuple(dict.fromkeys(x for n, own in every.items() if n in nodes for x in own))


def _of_probabilities(node: fx.Node, reading: Reading) -> list[Node]:
    """The exponents of probabilities that an operation takes the logarithm of."""
    is_loss = node.target == aten.kl_div.default
    argument = node.args[1] if is_loss or node.target == aten.xlogy.Tensor else node.args[0]
    if is_loss and node.kwargs.get("log_target", False):
        return []
    x = reading.expression(argument)
    found, todo = list[Node](), [x] if x is not None else []
    while todo:
        y = todo.pop()
        if y.op == "exp":
            found.append(y.args[0])
        elif y.op in ("product", "div") or y.op in ("clamp_min", "clamp_max", "where"):
            todo += y.args
        elif y.op == "linear":
            constant, terms = terms_of(y)
            todo += [t for _, t in terms] if constant == 0.0 and len(terms) == 1 else []
    return [z for z in found if any(s.op == "log_softmax" for s in walk([z]))]


def _top_of(ids: Node) -> tuple[fx.Node, int] | None:
    return top_of(ids.value.name) if isinstance(ids.value, Source) else None


def is_ranked(ids: Node) -> bool:
    """Returns whether ids are those of a top-k of the graph."""
    return _top_of(ids) is not None


def why_repeated(ids: Node, entries: Axis, keys: Axis) -> str:
    """Explains why a row of ids may have one twice: they are no top-k of keys along that axis."""
    found = _top_of(ids)
    if found is None:
        return NOT_RANKED
    top, dim = found
    places = [d for d, at in enumerate(ids.args) if entries in at.axes]
    if places != [dim]:
        return NOT_RANKED
    if entries.size == 0:
        return "no entry of a row is gathered"  # their mean has no gradient, not NaN
    length: Any = tensor_of(top.args[0]).shape[dim]
    whole: Any = keys.size.size if isinstance(keys.size, Extent) else keys.size
    is_within = isinstance(length, int) and isinstance(whole, int) and length <= whole
    if not is_within and not provably_equal(length, whole):
        return "ids of more keys than there are"  # eager code raises
    return ""


def dtype_of(source: object) -> torch.dtype:
    """Returns the type of a captured tensor."""
    name = source.name if isinstance(source, Source) else source
    value = name.meta.get("val") if isinstance(name, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else torch.float32
