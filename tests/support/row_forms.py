"""Makes row programs of what is read, and holds each against eager values and gradients.

Values are of the program's naive definition (rows/reference.py) in float64.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field, replace

import torch

from tests.support.evaluate_program import evaluate
from tests.support.read_programs import (
    Case,
    _difference,
    _gradients,
    _leaves,
    _Run,
    _sizes,
    _tolerance,
    capture,
    in_float64,
    widened,
)
from torch_streamkl.fx_passes.closed_forms.chosen import ChosenIds, ChosenValue
from torch_streamkl.fx_passes.closed_forms.entries import EntryValue
from torch_streamkl.fx_passes.closed_forms.form import NoForm, NotClosed, RowValue
from torch_streamkl.fx_passes.closed_forms.row_facts import facts_of, logarithms_of, taken_in
from torch_streamkl.fx_passes.closed_forms.row_form import RowForm
from torch_streamkl.fx_passes.closed_forms.row_program import row_form
from torch_streamkl.fx_passes.reading.reader import read
from torch_streamkl.program.graph import Extent, Source
from torch_streamkl.program.reductions import contraction, substitute
from torch_streamkl.program.walks import walk
from torch_streamkl.rows import reference
from torch_streamkl.rows.problem import RowProblem


def computed(form, tensors, sizes):
    """The values of rows that a form's program computes, by their sources in `around`."""

    def size(a):
        known = sizes.get(a, a.size)
        return known if isinstance(known, int) else sizes[known]

    def placed(x, dims, whole=()):
        order = [a for d in dims for a in d]
        value = evaluate(x, tensors, sizes, order)
        shape = []
        for i, d in enumerate(dims):
            held = i in whole or any(a in x.axes for a in d)
            n = 1
            for a in d:
                n *= size(a)
            if not held and d:
                value = value.flatten(len(shape), len(shape) + len(d) - 1)
                value = value.narrow(len(shape), 0, 1)
            elif d:
                value = value.flatten(len(shape), len(shape) + len(d) - 1)
            else:
                value = value.unsqueeze(len(shape))
            shape.append(n)
        return value

    tensors = tensors | ids_of_chosen(form, tensors, sizes)
    if form.program is None:
        found = entries_of(form, tensors, sizes)
        return found | chosen_of(form, tensors | found, sizes)
    axes = form.axes
    given = []
    for product, heads in zip(form.products, axes.heads, strict=True):
        rows = product.rows
        given.append(placed(rows, [axes.batch, heads, axes.rows, product.contracted], (0, 1, 2)))
        shared = list(heads)
        while shared and shared[-1] not in product.keys.axes:
            shared.pop()
        keys = product.keys
        dims = [axes.batch, tuple(shared), axes.keys, product.contracted]
        given.append(placed(keys, dims, (0, 1)))
    given = [x.double() for x in given]
    for c in form.captures:
        x = placed(c.value, c.dims)
        given.append(x.double() if x.is_floating_point() else x)
    results = reference.forward(RowProblem.of(form.program.text, given))
    slots = dict(zip(form.program.outputs, results, strict=True))
    found = {}
    for number, value in enumerate(form.values):
        x = slots[value.number]
        shape = [size(a) for d in value.axes for a in d]
        x = x.reshape(shape)
        source = Source(RowValue(number), 0, value.grad_flows)
        found[source] = x if value.grad_flows else x.detach()
    found |= entries_of(form, tensors, sizes)
    return found | chosen_of(form, tensors | found, sizes)


def ids_of_chosen(form, tensors, sizes):
    """The ids that a program leaves out of a row, by their sources in captures."""
    found = {}
    for number, x in enumerate(form.chosen):
        rows = x.entries.rows
        ids = evaluate(x.entries.ids, tensors, sizes, [*rows, *x.entries.places])
        found[Source(ChosenIds(number), 0)] = ids.flatten(len(rows)).long()
    return found


def chosen_of(form, tensors, sizes):
    """The log-probabilities of entries, by their sources in `around`."""
    found = {}
    ids = ids_of_chosen(form, tensors, sizes)
    for number, x in enumerate(form.chosen):
        num_rows = len(x.rows)
        scores = evaluate(x.scores, tensors, sizes, x.axes)
        rest = evaluate(x.rest, tensors, sizes, x.rows)
        each = ids[Source(ChosenIds(number), 0)]
        again = (each[..., None] == each[..., None, :]).tril(-1).any(-1)
        for _ in x.others:
            again = again.unsqueeze(-2)
        flat = scores.flatten(num_rows).masked_fill(again, -math.inf)
        lse = torch.cat([flat, rest[..., None]], -1).logsumexp(-1)
        value = scores - lse.reshape(*lse.shape, *([1] * len(x.entries.places)))
        found[Source(ChosenValue(number), 0, x.flows)] = value if x.flows else value.detach()
    return found


def entries_of(form, tensors, sizes):
    """The values of entries at ids, by their sources in `around`."""
    found = {}
    for number, x in enumerate(form.entries):
        rows, keys = x.product.rows, x.product.keys
        element = contraction(rows, substitute(keys, {x.key: x.ids}), x.product.contracted)
        value = evaluate(element, tensors, sizes, x.axes)
        found[Source(EntryValue(number), 0, x.flows)] = value if x.flows else value.detach()
    return found


@dataclass
class Made:
    """What became of a program's results."""

    forms: list[RowForm | NotClosed] = field(default_factory=list)
    wrong: str = ""


def made_of(case):
    """Captures and reads a program, and makes a row program of each of its results."""
    torch.manual_seed(0)
    gm = capture(case.fn, _leaves(case.inputs), case.dynamic, case.wide)
    if case.wide:
        with in_float64():
            return _of_graph(gm, widened(case.inputs))
    return _of_graph(gm, case.inputs)


def _of_graph(gm, inputs):
    torch.manual_seed(0)
    first, leaves, again = _Run(gm), _leaves(inputs), _leaves(inputs)
    with torch.enable_grad():
        first.run(*leaves)
    reading = read(gm, first.records.__getitem__)
    (results,) = next(n for n in gm.graph.nodes if n.op == "output").args
    made = Made()
    facts = replace(facts_of(reading), logarithms=taken_in(gm.graph.nodes, logarithms_of(reading)))
    arrays = [reading.array(n) for n in results]
    for x in arrays:
        try:
            made.forms.append(row_form([x.expr], [a for d in x.dims for a in d], facts))
        except NoForm as reason:
            made.forms.append(NotClosed(str(reason), reason.at))
    sources = dict.fromkeys(x.value for x in walk([x.expr for x in arrays]) if x.op == "capture")
    torch.manual_seed(0)
    second = _Run(gm, list(sources))
    with torch.enable_grad():
        second.run(*again)
    sizes = {k: v for k, v in _sizes(gm, reading, second).items() if isinstance(k, Extent)}
    for node, x, form in zip(results, arrays, made.forms, strict=True):
        if isinstance(form, NotClosed) or made.wrong:
            continue
        made.wrong = _wrong(gm, first.copies[node], leaves, again, (x, form), second, sizes)
    return made


def _wrong(
    gm,
    expected,
    leaves,
    again,
    found,
    run,
    sizes,
):
    x, form = found
    tensors = {**run.tensors, **computed(form, run.tensors, sizes)}
    order = [a for d in x.dims for a in d]
    value = evaluate(form.around[0], tensors, sizes, order).reshape(expected.shape).double()
    exact = max(_tolerance(gm), 1e-9)
    if wrong := _difference(expected, value, exact):
        return wrong
    with torch.enable_grad():
        return _gradients([expected], leaves, [value], again, exact)


def rewrites():
    """The forms of tests/rewrite/test_row_program*.py."""
    module = importlib.import_module("tests.rewrite.test_row_program_rewrites")
    for fn in (*module.FORMS, *module.LARGEST, module.mse_of_scores):
        for gradient in ("student", "all"):
            yield Case(f"{fn.__name__} {gradient}", fn, module.inputs(gradient, torch.float64))
