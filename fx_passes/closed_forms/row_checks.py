"""Refuses operations that could observe NaN or infinity that eager produces and programs do not.

It does between scores and sums what planning/readers.py does after a loss. Two values of a
program differ from eager's:

- The softmax of a row without any key is 0, and its logarithm -inf; eager has NaN. So is 0 times
  infinity. An operation that keeps NaN makes the sum NaN, so only a comparison can tell.
- The logarithm of a probability that underflows comes from its score; eager has -inf. A small
  power of it is a number; eager has 0. An operation that makes a number of infinity can tell,
  unless it gives the same for the smallest logarithms.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.row_sites import has_products, is_entered
from torch_streamkl.fx_passes.closed_forms.worlds import is_formula
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.graph import CONTRACT, FLOAT, LOGSUMEXP, MAX, SUM, Axis, Node
from torch_streamkl.program.identities import exponentials_in
from torch_streamkl.program.steps import Reduced, Step
from torch_streamkl.program.walks import walk
from torch_streamkl.rows.program import Program

COMPARISONS = {"gt": operator.gt, "ge": operator.ge, "eq": operator.eq}
BOUNDS = {"minimum", "maximum", "clamp_min", "clamp_max"}
SATURATING = {"exp", "sigmoid", "tanh", "softplus"}  # they have it long before infinity
INFINITE = {"linear", "minimum", "maximum", "where"}  # of a number and one of -inf
CUT = {*COMPARISONS, "maximum", "clamp_min"}  # nothing that was below the bound is left
UNDERFLOWN = "the logarithm of a probability that may underflow"
# what is above has not underflown: the logarithm of the smallest number, by type
SMALLEST = {torch.float16: -16.0}
SMALLEST_OF_OTHERS = -103.0


class UnderflowRead(NoForm):
    """Raised for an exponential of the logarithm of a probability, which is 0 by underflow in
    eager.
    """


@dataclass(frozen=True)
class Elements:
    """Holds opened expressions, what steps compute of them, and what is known of the graph."""

    roots: Sequence[Node]
    nodes: Mapping[Node, Node]
    logarithms: Collection[Node]  # log-softmaxes that eager code makes of probabilities
    dtypes: Collection[torch.dtype]  # of the products' operands


def smallest_of(dtypes: Collection[torch.dtype]) -> float:
    """Returns the least logarithm of what has not underflown in these types."""
    return max((SMALLEST.get(x, SMALLEST_OF_OTHERS) for x in dtypes), default=-103.0)


def precision_of(dtypes: Collection[torch.dtype]) -> float:
    """Returns the number that is lost next to 1, in float32 or in a narrower type."""
    return float(torch.finfo(torch.float16 if torch.float16 in dtypes else torch.float32).eps)


def check_readers_inside(elements: Elements, *, are_exact: bool) -> None:
    """Raises NoForm if an operation on elements would see another number than in eager."""
    order = [x for x in walk(elements.roots, is_entered) if x in elements.nodes]
    _check_types(order, elements)
    _check_comparisons(order, elements.nodes)
    _check_maxima(order, elements.nodes)
    _check_logarithms(order, elements, are_exact=are_exact)
    _check_powers(order, elements)


def _check_types(order: Sequence[Node], elements: Elements) -> None:
    """Scores of a narrow type are rounded in eager code, so that others may be equal there."""
    if all(x.itemsize >= 4 for x in elements.dtypes):
        return
    made: set[Node] = set()
    for x in order:
        if x.op == CONTRACT or any(a in made for a in x.args):
            made.add(x)
            if x.op in COMPARISONS:
                raise NoForm("scores of a narrow type are compared", x)


def _check_comparisons(order: Sequence[Node], nodes: Mapping[Node, Node]) -> None:
    may_be_nan: set[Node] = set()
    for x in order:
        if x.op in COMPARISONS:
            for i, a in enumerate(x.args):
                if a in may_be_nan and not _compares_as_nan(x, i, nodes):
                    raise NoForm(
                        "a comparison reads NaN, which eager has in a row without keys", x
                    )
        elif any(a in may_be_nan for a in x.args) or _may_be_nan(x, nodes):
            may_be_nan.add(x)


def _may_be_nan(x: Node, nodes: Mapping[Node, Node]) -> bool:
    """Whether eager has NaN, and the program a number, first here."""
    if _is_logsumexp(x):
        return x.args[0] in nodes and _may_lack_keys(x.args[0], nodes)
    return nodes[x].is_guarded or nodes[x].op == "div0"


def _may_lack_keys(scores: Node, nodes: Mapping[Node, Node]) -> bool:
    """Whether all scores of a row may be -inf: by a mask, or by a captured number of the row."""
    return not nodes[scores].is_finite or any(
        y.op == "capture" and y.dtype == FLOAT
        for x in walk([scores], is_entered)
        if x.op in INFINITE
        for a in x.args
        if not has_products(a)
        for y in walk([a], is_entered)
    )


def _is_logsumexp(x: Node) -> bool:
    return x.op == "log_softmax" or x.kind == LOGSUMEXP


def _compares_as_nan(x: Node, position: int, nodes: Mapping[Node, Node]) -> bool:
    """Whether the number that an argument is in an empty row compares as NaN does."""
    a, b = x.args[position], x.args[1 - position]
    if a.kind == LOGSUMEXP:
        return True  # -inf in eager too
    here = _in_empty_row(a, nodes)
    if here is None or b.op != "const":
        return False
    pair = (here, b.value) if position == 0 else (b.value, here)
    return not COMPARISONS[x.op](*pair)


def _in_empty_row(x: Node, nodes: Mapping[Node, Node]) -> float | None:
    """Returns what a program has where eager code has NaN, of a row without keys; None if not
    known.
    """
    if x.op in ("exp", "log", "log_softmax"):
        return {"exp": 0.0, "sub": -math.inf}.get(nodes[x].op)
    if x.op == "linear":
        constant, terms = terms_of(x)
        values = [(c, _in_empty_row(t, nodes)) for c, t in terms]
        every = [c * value for c, value in values if value is not None]
        total = sum(every, constant)
        return None if len(every) < len(values) or math.isnan(total) else total
    if x.kind == SUM and not _is_masked_along(x.args[0], x.value.axis):
        return 0.0 if _in_empty_row(x.args[0], nodes) == 0.0 else None
    if x.op == "div":  # or NaN, which it is in eager code
        return 0.0 if _in_empty_row(x.args[0], nodes) == 0.0 else None
    return None


def _is_masked_along(x: Node, axis: Axis) -> bool:
    """Whether scores may be masked along an axis of heads: NaN of one makes the sum of all NaN."""
    inside = walk([x], lambda y: is_entered(y) and has_products(y))
    return any(axis in y.axes and not has_products(y) for y in inside)


def _check_maxima(order: Sequence[Node], nodes: Mapping[Node, Node]) -> None:
    """The maximum of a row without keys is 0 in a program: it may be subtracted, no more."""
    maxima: set[Node] = set()
    for x in order:
        if x.kind == MAX:
            if x.args[0] in nodes and _may_lack_keys(x.args[0], nodes):
                maxima.add(x)
        elif any(a in maxima for a in x.args) and not _is_subtracted(x, maxima):
            raise NoForm("the maximum of a row that may have no key is more than subtracted", x)


def _is_subtracted(x: Node, maxima: Collection[Node]) -> bool:
    if x.op != "linear":
        return False
    _, terms = terms_of(x)
    return all(c < 0.0 for c, t in terms if t in maxima) and any(t not in maxima for _, t in terms)


def _check_logarithms(order: Sequence[Node], elements: Elements, *, are_exact: bool) -> None:
    nodes, smallest = elements.nodes, smallest_of(elements.dtypes)
    logs: set[Node] = set()  # of what may underflow
    behind: set[Node] = set()
    # of those, what is no sum or difference of logarithms: by how much they are scaled, if known
    scaled: dict[Node, float] = {}
    for x in order:
        asks = x.op in COMPARISONS or x.op in BOUNDS
        for a, b in (x.args, x.args[::-1]) if asks else ():
            if a in behind and not (a in logs and _constant(b) >= smallest):
                raise NoForm(f"{x.op} of {UNDERFLOWN}", x)
        if (x.op == "div" or (x.op == "pow" and x.value < 0)) and x.args[-1] in behind:
            raise NoForm(f"the inverse of {UNDERFLOWN}", x)
        if x.op in SATURATING or _is_logsumexp(x):
            if x.args[0] in scaled:
                is_steep = scaled[x.args[0]] * smallest < math.log(precision_of(elements.dtypes))
                if not (are_exact and is_steep):
                    name = "logsumexp" if _is_logsumexp(x) else x.op
                    raise UnderflowRead(f"{name} of {UNDERFLOWN}", x)
            if x.op == "log_softmax" and x in elements.logarithms:
                logs.add(x)
                behind.add(x)
        elif x.op == "log" and x.args[0] in nodes and any(exponentials_in(nodes[x.args[0]])):
            logs.add(x)
            behind.add(x)
        elif any(a in behind for a in x.args) and x.op not in CUT:
            behind.add(x)
            scale = _scale(x, behind, scaled)
            if scale is not None:
                scaled[x] = scale


def _scale(x: Node, behind: Collection[Node], scaled: Mapping[Node, float]) -> float | None:
    """By how much an expression scales logarithms, 0 if it does something else with them.

    None if it is a sum or difference of them.
    """
    if x.kind == SUM:
        return scaled.get(x.args[0], 1.0)
    if x.op != "linear":
        return 0.0
    terms = [(c, t) for c, t in terms_of(x)[1] if t in behind]
    if all(abs(c) == 1.0 and t not in scaled for c, t in terms):
        return None
    return min(c * scaled.get(t, 1.0) if c > 0.0 else 0.0 for c, t in terms)


def _check_powers(order: Sequence[Node], elements: Elements) -> None:
    """A power of a probability has none of its underflow: eager has 0 ** 0.01, a program 0.4."""
    exponents: dict[Node, float] = {}
    smallest, precision = smallest_of(elements.dtypes), precision_of(elements.dtypes)
    for x in order:
        if x.op not in ("pow", "sqrt") or x.args[0] not in elements.nodes:
            continue
        if elements.nodes[x.args[0]].op != "exp":
            continue
        exponent = exponents.get(x.args[0], 1.0) * (0.5 if x.op == "sqrt" else x.value)
        exponents[x] = exponent
        if exponent and abs(exponent) * smallest > math.log(precision):
            raise NoForm("a small power of a probability that may underflow", x)


def _constant(x: Node) -> float:
    return float(x.value) if x.op == "const" else -math.inf


def is_filled(scores: Node, least: float) -> bool:
    """Returns whether a finite number of at least this size replaces scores, or is added to them.

    A tensor of rows and keys without a gradient may be a mask that is added.
    """

    def is_large(number: float) -> bool:
        return least <= abs(number) < math.inf

    for x in walk([scores], is_formula):
        if x.op == "const" and is_large(x.value):
            return True
        if x.op == "linear":
            constant, terms = terms_of(x)
            free = [c for c, t in terms if not has_products(t)]
            if any(map(is_large, (constant, *free))):
                return True
        if x.op == "capture" and x.dtype == FLOAT and not x.flows and len(x.axes) > 1:
            return True
    return False


# ------------------------------------------------------------------------ of whole programs

# what gives NaN and infinity of the same arguments as eager code does
PLAIN = {"dot", "capture", "const", "key_index", "row_index", "reduction", "float", "detach"}
PLAIN |= {"add", "sub", "neg", "mul", "exp", "where", "and", "or", "not", "abs", "eq", "ge", "gt"}
PLAIN |= {"lt", "le", "ne"}


def is_as_special(program: Program, dtypes: Collection[torch.dtype]) -> bool:
    """Returns whether the outputs are NaN or infinite exactly where eager's are.

    So it is without masks of -inf, logarithms and quotients: of finite scores both have numbers,
    and where a score is none, no row with it has one. A log-sum-exp of infinity is infinite in
    eager code alone, and float16 has it earlier.
    """
    largest = _largest(program)
    return (
        torch.float16 not in dtypes
        and all((n.op in PLAIN and n.is_finite) or _is_scale(program, n) for n in program.nodes)
        and all(r.kind == SUM or r.node in largest for r in _returned(program))
        and all(r.kind != MAX or r.node in largest for r in program.reductions)
        and not any(_adds_values_per_row(program, n) for n in program.nodes)
    )


def _returned(program: Program) -> list[Reduced]:
    return [program.reductions[c] for c in program.outputs]


def _largest(program: Program) -> set[int]:
    """The elements of which a program returns the maximum and the log-sum-exp.

    Their difference is what is used: a number for finite scores, and else NaN, as in eager code.
    """
    found = {(r.node, r.kind) for r in _returned(program)}
    return {node for node, kind in found if kind == MAX and (node, LOGSUMEXP) in found}


def _adds_values_per_row(program: Program, node: Step) -> bool:
    """Whether a captured value of each row is added to elements: -inf takes all keys of a row.

    The row is then one without keys, of which eager code has NaN.
    """
    if node.op not in ("add", "sub") or not node.by_key:
        return False
    inside = [program.nodes[a] for a in node.args if not program.nodes[a].by_key]
    while inside:
        step = inside.pop()
        if step.op == "capture" and step.dtype == FLOAT:
            return True
        inside += [program.nodes[a] for a in step.args] if step.op != "reduction" else []
    return False


def is_never_infinite(program: Program, dtypes: Collection[torch.dtype]) -> bool:
    """Returns whether sums of finite scores are never infinite, neither the program's nor eager's.

    They are sums of probabilities, times what is finite: a probability is at most 1, and 0 or, in
    eager code, NaN where a row has no key.
    """
    largest = _largest(program)
    return (
        torch.float16 not in dtypes
        and all(
            n.op in PLAIN or n.op == "sum_heads" or _is_scale(program, n) for n in program.nodes
        )
        and all(_is_probability(program, n) for n in program.nodes if n.op == "exp")
        and all(r.is_added or r.node in largest for r in _returned(program))
        and all(
            program.nodes[r.node].is_finite
            if r.is_added
            else r.kind == LOGSUMEXP or r.node in largest
            for r in program.reductions
        )
    )


def _is_probability(program: Program, node: Step) -> bool:
    """Whether a formula is the exponential of a score minus its own log-sum-exp."""
    difference = program.nodes[node.args[0]]
    if difference.op != "sub" or program.nodes[difference.args[1]].op != "reduction":
        return False
    of = program.reductions[int(program.nodes[difference.args[1]].value)]
    return of.kind == LOGSUMEXP and of.node == difference.args[0]


def _is_scale(program: Program, node: Step) -> bool:
    """Whether a formula is a quotient by a number other than 0."""
    divisor = program.nodes[node.args[1]] if node.op == "div" else None
    return divisor is not None and divisor.op == "const" and divisor.value != 0.0
