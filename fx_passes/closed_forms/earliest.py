"""Chooses which values of a graph are computed by operators: the earliest ones that they can."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.capture.retrace import Trace
from torch_streamkl.fx_passes.closed_forms.alike import Forms
from torch_streamkl.fx_passes.closed_forms.form import (
    Call,
    ClosedForm,
    Matched,
    NotClosed,
    names_of,
)
from torch_streamkl.fx_passes.closed_forms.match import match_program
from torch_streamkl.fx_passes.closed_forms.row_facts import logarithms_of, taken_in
from torch_streamkl.fx_passes.closed_forms.row_sites import products_in
from torch_streamkl.fx_passes.closed_forms.rows import sums_over_keys
from torch_streamkl.fx_passes.fx_utils.nodes import ancestors, example, name_of
from torch_streamkl.fx_passes.fx_utils.op_names import MATMULS
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.program.graph import SUM, Node
from torch_streamkl.program.walks import fold, walk

Plans = Mapping[fx.Node, Matched | str]  # what computes a value, or why nothing does


@dataclass(frozen=True)
class Divergence:
    """Holds a node whose value operators compute.

    ``parts`` are the earliest nodes with a call of their own: several if one call computes their
    sum.
    """

    inner: fx.Node  # in the trace
    node: fx.Node  # in the user's graph
    matched: Matched
    parts: frozenset[fx.Node]  # in the trace

    @property
    def forms(self) -> tuple[ClosedForm, ...]:
        return tuple(self.matched.closed.values())

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for form in self.forms for call in form.calls)


def find_divergences(trace: Trace, reading: Reading) -> list[Divergence]:
    """Finds where to put operators: the earliest nodes whose value they can compute."""
    rows = list(_row_values(trace, reading))
    plans = {node: _planned(node, reading) for node in rows}
    covered, chosen = set[fx.Node](), dict[fx.Node, Matched]()
    parts, earliest = dict[fx.Node, frozenset[fx.Node]](), _earliest(rows, plans, trace)
    # a sum of parts that are no divergence alone, such as cross-entropy minus entropy
    for node in reversed(rows):
        made = plans[node]
        inputs = [a for a in node.all_input_nodes if a in plans]
        if node in covered or isinstance(made, str) or node not in trace.outer:
            continue
        halves = _of_one_call(node, plans, earliest, trace)
        if (
            any(isinstance(plans[a], str) for a in inputs)
            or (inputs and not any(a in trace.outer for a in inputs))
            or halves
        ):
            chosen[node], parts[node] = made, halves
            covered |= {a for a in ancestors(node) if a in plans and a is not node}
    chosen |= _earliest(rows, plans, trace, chosen, covered)
    found = [n for n in rows if n in chosen]
    own = {n: parts.get(n) or frozenset((n,)) for n in found}
    return [Divergence(n, trace.outer[n], chosen[n], own[n]) for n in found]


def _earliest(
    rows: Sequence[fx.Node],
    plans: Plans,
    trace: Trace,
    chosen: Collection[fx.Node] = (),
    covered: Collection[fx.Node] = (),
) -> dict[fx.Node, Matched]:
    """The values with a call that are computed from no other such value, nor from a chosen one.

    Those that are covered are computed by what is chosen.
    """
    found, after = dict[fx.Node, Matched](), set(chosen)
    for node in rows:
        made = plans[node]
        if any(a in found or a in after for a in node.all_input_nodes):
            after.add(node)
        elif node not in covered and node not in chosen and not isinstance(made, str):
            if node in trace.outer:
                found[node] = made
    return found


def _of_one_call(
    node: fx.Node, plans: Plans, earliest: Collection[fx.Node], trace: Trace
) -> frozenset[fx.Node]:
    """The values, each of which has a call, whose sum is one call; none if there are no such.

    Such are the halves of a Jensen-Shannon divergence. Nothing else reads one of them.
    """
    made, none = plans[node], frozenset[fx.Node]()
    if isinstance(made, str) or sum(len(form.calls) for form in made.closed.values()) != 1:
        return none
    if sum(a in plans for a in node.all_input_nodes) < 2:
        return none
    above = ancestors(node)
    parts = frozenset(above.intersection(earliest))
    inside = {trace.outer[a] for a in above if a in trace.outer}
    rows = {trace.outer[a] for a in above & plans.keys() if a in trace.outer}
    is_read = any(user not in inside for a in rows - {trace.outer[node]} for user in a.users)
    return none if is_read or len(parts) < 2 else parts


def _row_values(trace: Trace, reading: Reading) -> Iterator[fx.Node]:
    """Nodes that are sums over keys, or are linear in some."""
    exprs = dict[fx.Node, Node]()
    for node in trace.graph.nodes:
        found, value = reading.expression(node), node.meta.get("val")
        is_number = isinstance(value, Tensor) and value.dtype.is_floating_point
        if node.op == "call_function" and found is not None and is_number:
            exprs[node] = found
    known = dict.fromkeys(sums_over_keys(exprs.values()), True)
    for node, expr in exprs.items():
        if _is_linear(expr, known):
            yield node


def _is_linear(x: Node, known: dict[Node, bool]) -> bool:
    """Whether an expression is a sum over keys, or a weighted sum of some and of other values."""
    return fold(x, known, lambda y: any(known[a] for a in _added(y)), lambda y: bool(_added(y)))


def _added(x: Node) -> Sequence[Node]:
    """The arguments that an expression is linear in."""
    match x.op:
        case "linear" | "product":
            return x.args
        case "div":
            return x.args[:1]
        case "where":
            return x.args[1:]
        case "reduce" if x.kind == SUM:
            return x.args
    return ()


def _planned(node: fx.Node, reading: Reading) -> Matched | str:
    if reading.loses_gradient(node):
        return "a gradient flows through what is a constant"
    array = reading.array(node)
    matched = match_program(array.expr, [a for dim in array.dims for a in dim])
    reasons = [form.reason for form in matched.found.values() if isinstance(form, NotClosed)]
    if reasons:
        return reasons[0]
    guarded = [x for form in matched.closed.values() for x in form.guarded]
    if guarded and _takes_logarithms(node, guarded, reading):
        return "a condition asks for the logarithm of a probability that is 0 by underflow"
    return matched if matched.closed else "the sum over keys is a known constant"


def _takes_logarithms(node: fx.Node, scores: Sequence[Node], reading: Reading) -> bool:
    """Whether a node is computed from the logarithm of a softmax of these scores."""
    inside, forms = {node, *ancestors(node)}, Forms(bare=True)
    logs = walk(taken_in(inside, logarithms_of(reading, hidden=False)))
    taken = {forms.of(x.args[0]) for x in logs if x.op == "log_softmax"}
    return any(forms.of(x) in taken for x in scores)


@dataclass(frozen=True)
class ProductType:
    """Holds the types of a product: of the user's, which autocast decides, and of its operands.

    ``made`` are the user's nodes that it is the type of.
    """

    result: torch.dtype
    operands: torch.dtype
    made: tuple[fx.Node, ...] = ()


def product_types(trace: Trace, reading: Reading) -> dict[frozenset[object], ProductType]:
    """Returns the types of the user's products, by the names of their operands."""
    found: dict[frozenset[object], ProductType] = {}
    for node in trace.graph.nodes:
        expr = reading.expression(node)
        if node.op != "call_function" or expr is None or name_of(node) not in MATMULS:
            continue
        outer = trace.outer.get(node)
        made, own = example(outer or node), node.meta["val"]
        assert isinstance(own, Tensor)
        types = made.dtype if isinstance(made, Tensor) else own.dtype, own.dtype
        for x in products_in([expr]):
            names = names_of(x.args)
            before = found.get(names, ProductType(*types))
            found[names] = ProductType(
                torch.promote_types(before.result, types[0]),
                torch.promote_types(before.operands, types[1]),
                (*before.made, outer) if outer else before.made,
            )
    return found
