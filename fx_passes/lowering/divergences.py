"""Inserts the operators of a matched value into the user's graph."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import fx

from torch_streamkl.fx_passes.closed_forms.form import LINEAR, ClosedForm, RowValue
from torch_streamkl.fx_passes.closed_forms.rows import replaced
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import tensor_of
from torch_streamkl.fx_passes.fx_utils.sizes import is_unknown, provably_equal
from torch_streamkl.fx_passes.fx_utils.strides import with_layout_of
from torch_streamkl.fx_passes.lowering.attention_call import CallTensors, Types
from torch_streamkl.fx_passes.lowering.linear_call import HeadTensors
from torch_streamkl.fx_passes.lowering.writer import Writer
from torch_streamkl.fx_passes.planning.divergences import Divergence
from torch_streamkl.fx_passes.reading import arrays
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.canonical import linear, product
from torch_streamkl.program.graph import Node, Source, capture, index
from torch_streamkl.program.reductions import substitute


def emit(
    build: Builder,
    found: Divergence,
    reading: Reading,
    outer: Mapping[fx.Node, fx.Node],
    types: Types,
    written: Container[int | None],
) -> fx.Node:
    """Inserts the calls; the returned node has the value and metadata of the user's node.

    ``written`` is the memory that the graph writes to.
    """
    array = reading.array(found.inner)
    writer = Writer(build, reading, outer, [found.matched.root])
    changes = {
        site: _rows(writer, form, number, types)
        for number, (site, form) in enumerate(found.matched.closed.items())
    }
    around = replaced(found.matched.root, changes)
    total = writer.tensor(around, array.dims, expand=range(len(array.dims)))
    return as_user(build, total, found.node, written)


def as_user(build: Builder, x: fx.Node, node: fx.Node, written: Container[int | None]) -> fx.Node:
    """Returns a value in the type and memory layout of the user's, whose shape it must have."""
    like = tensor_of(node)
    x = build.cast(x, like.dtype)
    made = tensor_of(x)
    # a number of selected rows has a symbol of its own in the rewritten graph
    if len(made.shape) != len(like.shape) or not all(
        provably_equal(a, b) or (is_unknown(a) and is_unknown(b))
        for a, b in zip(made.shape, like.shape, strict=True)
    ):
        raise Unsupported(
            f"the fused value has shape {tuple(made.shape)}, the user's {tuple(like.shape)}"
        )
    return with_layout_of(build, x, node, written)


def _rows(writer: Writer, form: ClosedForm, number: int, types: Types) -> Node:
    """The rows of a sum over keys, as an expression of the operators' results."""
    terms = []
    for i, call in enumerate(form.calls):
        name = (RowValue(number), i)
        kind = HeadTensors if call.operator == LINEAR else CallTensors
        writer.values[name] = kind(writer, call, types).emit()
        dims = (call.axes.rows,) if call.operator == LINEAR else call.axes.scores[:3]
        at = [arrays.position(dim) for dim in dims]
        value = capture(Source(name, 0, form.site.flows), at=at)
        terms.append((1.0, product(call.weight, value)))
    own = {mine: index(original) for original, mine in form.names}
    return substitute(linear(0.0, terms), own)
