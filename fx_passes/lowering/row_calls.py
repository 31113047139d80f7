"""Inserts the operator call of a row program, and what is computed of its rows' values."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence

import torch
from torch import fx

from torch_streamkl.bounds import checked_ids
from torch_streamkl.fx_passes.closed_forms.form import Product, RowValue
from torch_streamkl.fx_passes.closed_forms.row_form import RowForm
from torch_streamkl.fx_passes.closed_forms.row_groups import Dim
from torch_streamkl.fx_passes.closed_forms.row_leaves import Captured
from torch_streamkl.fx_passes.fx_utils.builder import Builder
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.nodes import storage_of, tensor_of
from torch_streamkl.fx_passes.fx_utils.strides import as_user, may_be_written
from torch_streamkl.fx_passes.lowering import entry_calls
from torch_streamkl.fx_passes.lowering.attention_call import widest_of
from torch_streamkl.fx_passes.lowering.writer import Writer
from torch_streamkl.fx_passes.planning.row_plan import ProgramPlan, RowOutput
from torch_streamkl.fx_passes.reading.positions import is_relative, is_signed, key_of
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.graph import INT
from torch_streamkl.rows import op
from torch_streamkl.rows.program import PAIR, Program


def emit(
    build: Builder,
    plan: ProgramPlan,
    reading: Reading,
    outer: Mapping[fx.Node, fx.Node],
    written: Container[int | None],
) -> dict[fx.Node, fx.Node]:
    """Inserts the call, and returns the replacement of each of the user's nodes.

    ``written`` is the memory that the graph writes to. The operator keeps its results for the
    backward. So if they may be written to, here or by who gets them from the graph, the user's
    code gets a copy. Outputs never alias each other.
    """
    form = plan.form
    inputs = [x for p in form.replaced for x in (p.rows, p.keys)]
    inputs += [c.value for c in form.captures]
    inputs += [entries.ids for entries in form.every_entries]
    writer = Writer(build, reading, outer, [*inputs, *form.of_rows])
    # which the program may read
    writer.values |= entry_calls.emit(writer, form.entries, form.chosen)
    values = _of_program(writer, form) | writer.values
    values |= entry_calls.emit_chosen(_around(writer, values), form.chosen)
    results: dict[fx.Node, fx.Node] = {}
    made: set[int | None] = set()
    for output in plan.outputs:
        x = _result(writer, form, output, values, written)
        if may_be_written(output.node, written) or storage_of(x) in made:
            x = build.method("clone", x)
        made.add(storage_of(x))
        results[output.node] = x
    return results


def _of_program(writer: Writer, form: RowForm) -> dict[object, fx.Node]:
    """Inserts the call, and returns the per-row values."""
    if form.program is None:
        return {}
    tensors: list[fx.Node] = []
    for product, heads in zip(form.products, form.axes.heads, strict=True):
        tensors += _operands(writer, form, product, heads)
    tensors = _of_one_type(writer.build, tensors)
    tensors += [_captured(writer, form, c) for c in form.captures]
    arguments = tensors, form.program.text, form.requires_grad, "auto"
    call = writer.build.call(op.row_program, *arguments)
    return _values(writer, form, form.program, call)


def _operands(writer: Writer, form: RowForm, product: Product, heads: Dim) -> list[fx.Node]:
    """The operand of the rows, and that of the keys, which query heads may share."""
    axes, along = form.axes, product.contracted
    if any(is_relative(at) for x in (product.rows, product.keys) for at in x.args):
        # eager code gathers numbers; an operand would have a vector for each query and key
        raise Unsupported("scores are gathered at relative positions")
    rows = writer.tensor(product.rows, [axes.batch, heads, axes.rows, along], expand=(0, 1, 2))
    shared = list(heads)
    while shared and shared[-1] not in product.keys.axes:
        shared.pop()
    keys = writer.tensor(
        product.keys, [axes.batch, tuple(shared), axes.keys, along], expand=(0, 1)
    )
    return [rows, keys]


def _of_one_type(build: Builder, tensors: Sequence[fx.Node]) -> list[fx.Node]:
    """Casts operands to the narrowest dtype that represents all of them exactly."""
    widest = widest_of(tensor_of(x).dtype for x in tensors)
    return [build.cast(x, widest) for x in tensors]


def _captured(writer: Writer, form: RowForm, c: Captured) -> fx.Node:
    """A captured tensor in the dimensions of its kind."""
    partly = "a mask varies along some dimensions that become one" if c.kind == PAIR else ""
    keys = form.axes.keys[0].size
    at = c.value.args[1] if keys is not None and is_signed(c.value, keys) else c.value
    found = writer.reading.indices.get(key_of(at)) if at.dtype == INT else None
    if found is None:
        return writer.tensor(c.value, c.dims, partly=partly)
    of, dim = found
    x = writer.tensor(at, c.dims, partly=partly)
    return writer.build.call(checked_ids, x, writer.extent(form.axes.keys[0]), dim, of)


def _values(
    writer: Writer, form: RowForm, program: Program, call: fx.Node
) -> dict[object, fx.Node]:
    """The per-row values, with a dimension for each of their axes."""
    build = writer.build
    results = {slot: build.call(operator.getitem, call, slot) for slot in program.outputs}
    found: dict[object, fx.Node] = {}
    for number, value in enumerate(form.values):
        axes = tuple(a for dim in value.axes for a in dim)
        x = results[value.number]
        shape = tuple(map(writer.extent, axes))
        if [len(dim) for dim in value.axes] != [1] * len(value.axes):
            x = build.method("reshape", x, shape or ())
        found[RowValue(number)] = x
    return found


def _result(
    writer: Writer,
    form: RowForm,
    output: RowOutput,
    values: Mapping[object, fx.Node],
    written: Container[int | None],
) -> fx.Node:
    """What the user's node computes of the rows' values, as the user's code has it."""
    build, like = writer.build, tensor_of(output.node)
    if not like.is_floating_point():  # what is made of counts, which a float would round
        counts = {RowValue(n) for n, value in enumerate(form.values) if not value.is_float}
        values = {
            k: build.method("to", x, torch.int64) if k in counts else x for k, x in values.items()
        }
    dims = output.dims
    x = _around(writer, values).tensor(output.around, dims, expand=range(len(dims)))
    return as_user(build, x, output.node, written)


def _around(writer: Writer, values: Mapping[object, fx.Node]) -> Writer:
    """What writes expressions of the rows' values."""
    around = Writer(writer.build, writer.reading, writer.outer, (), values)
    around.arranging.tensors = writer.arranging.tensors
    return around
