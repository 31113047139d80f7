"""Collects what row programs have to know of the graph that expressions were read from."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.closed_forms.entries import SINGLE_ENTRIES
from torch_streamkl.fx_passes.closed_forms.row_keys import NOT_RANKED, Facts
from torch_streamkl.fx_passes.fx_utils.nodes import tensor_of
from torch_streamkl.fx_passes.fx_utils.sizes import provably_equal
from torch_streamkl.fx_passes.reading.arrays import Array
from torch_streamkl.fx_passes.reading.positions import key_of, source_name
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.fx_passes.reading.rules.selections import top_of
from torch_streamkl.fx_passes.reading.sizes import torch_size
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.graph import Axis, Node, Size, Source
from torch_streamkl.program.walks import has_op

aten = torch.ops.aten
# of which argument an operation takes the logarithm, and where that is -inf
LOGARITHMS = {
    aten.log.default: (0, 0.0), aten.log2.default: (0, 0.0), aten.log10.default: (0, 0.0),
    aten.log1p.default: (0, -1.0), aten.xlogy.Tensor: (1, 0.0), aten.xlogy.Scalar_Self: (1, 0.0),
}  # fmt: skip


def facts_of(reading: Reading) -> Facts:
    """Returns the facts of a graph, without the logarithms, which are those of a program."""

    def index_size(at: Node) -> Size | None:
        sizes = reading.index_sizes.get(key_of(at), set())
        return next(iter(sizes)) if len(sizes) == 1 else None

    return Facts(why_repeated, reading.reads_products, dtype_of, reading.sizes.extent, index_size)


def logarithms_of(reading: Reading, *, hidden: bool = True) -> dict[fx.Node, list[Node]]:
    """Returns the expressions of probabilities whose logarithm nodes take, by node.

    ``hidden`` ones are those of ``x log x``, which is 0 where the logarithm is infinite.
    """
    places = {target: place for target, (place, _) in LOGARITHMS.items()}
    if hidden:
        places |= {aten.kl_div.default: 1, aten.special_entr.default: 0}
    takers = (n for n in reading.arrays if n.target in places)
    return {
        n: _of_probabilities(n.args[places[n.target]], reading)  # type: ignore[index]
        for n in takers
        if (hidden or not _is_hidden(n, reading)) and not n.kwargs.get("log_target", False)
    }


def taken_in(nodes: Container[fx.Node], every: Mapping[fx.Node, list[Node]]) -> tuple[Node, ...]:
    """Returns the logarithms, or log-softmaxes, that these nodes take of all that nodes do.

    Other code may take those of the same probabilities: here they may be computed from scores.
    """
    return tuple(dict.fromkeys(x for n, own in every.items() if n in nodes for x in own))


def log_softmaxes_of(reading: Reading) -> dict[fx.Node, list[Node]]:
    """Returns the log-softmaxes that nodes read as such, by node: eager code has numbers there."""
    found: dict[fx.Node, list[Node]] = {}
    for n in reading.arrays:
        x = reading.expression(n)
        if x is None or x.op != "log_softmax" or _is_logarithm(n, reading):
            continue
        for reader in n.users:
            if not _is_the_same(reader, x, reading):
                found.setdefault(reader, []).append(x)
    return found


def _is_the_same(node: fx.Node, x: Node, reading: Reading) -> bool:
    """Whether a node is a view of a log-softmax, or its exponential."""
    y = reading.expression(node)
    return y is not None and (y.op == x.op or (y.op == "exp" and y.args[0].op == x.op))


def _is_logarithm(node: fx.Node, reading: Reading) -> bool:
    """Whether a log-softmax is the logarithm of a probability, or a view of it."""
    while node.target not in LOGARITHMS:
        same = [a for a in node.all_input_nodes if _is_log_softmax(reading.expression(a))]
        if not same:
            return False
        node = same[0]
    return True


def _is_log_softmax(x: Node | None) -> bool:
    return x is not None and x.op == "log_softmax"


def _of_probabilities(argument: object, reading: Reading) -> list[Node]:
    """The exponents of probabilities that an operation takes the logarithm of."""
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
    return [z for z in found if has_op(z, "log_softmax")]


def _is_hidden(node: fx.Node, reading: Reading) -> bool:
    """Whether a node is ``xlogy(x, x)``."""
    if node.target != aten.xlogy.Tensor:
        return False
    x, y = (reading.arrays.get(a) for a in node.args)  # type: ignore[arg-type]
    return isinstance(x, Array) and isinstance(y, Array) and (x.expr, x.dims) == (y.expr, y.dims)


def why_repeated(ids: Node, entries: Axis, keys: Axis) -> str:
    """Explains why a row of ids may have one twice: they are no top-k of keys along that axis."""
    found = top_of(source_name(ids))
    if found is None:
        return NOT_RANKED
    top, dim = found
    places = [d for d, at in enumerate(ids.args) if entries in at.axes]
    if places != [dim]:  # as of a sum over other rows, at the ids of one
        return SINGLE_ENTRIES
    if entries.size == 0:
        return "no entry of a row is gathered"  # their mean has no gradient, not NaN
    length: Any = tensor_of(top.args[0]).shape[dim]
    assert keys.size is not None
    whole = torch_size(keys.size)
    is_within = isinstance(length, int) and isinstance(whole, int) and length <= whole
    if not is_within and not provably_equal(length, whole):
        return "ids of more keys than there are"  # eager code raises
    return ""


def dtype_of(source: object) -> torch.dtype:
    """Returns the type of a captured tensor."""
    name = source.name if isinstance(source, Source) else source
    value = name.meta.get("val") if isinstance(name, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else torch.float32
