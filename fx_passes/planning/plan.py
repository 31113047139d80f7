"""Plans operator calls for summed elements: the operator, its operands and options.

`plan` decides without touching the graph and raises `Unsupported` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.domain.layout import Layout
from torch_streamkl.fx_passes.domain.score_form import ScoreForm, read
from torch_streamkl.fx_passes.domain.tensor_ref import grad_flows, refs_in, same_numbers
from torch_streamkl.fx_passes.domain.values import (
    Distribution,
    Elements,
    RowFactor,
    Rows,
    renumbered,
    variables,
    where_within,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.planning.dimensions import Geometry, geometry
from torch_streamkl.fx_passes.planning.divergence_forms import (
    bilinear_form,
    monomials,
    split_pairs,
)
from torch_streamkl.fx_passes.planning.lm_heads import is_lm_head
from torch_streamkl.fx_passes.planning.masks import (
    MaskPlan,
    drops_rows_without_keys,
    masked_alike,
    plan_masks,
    plan_masks_within,
    within_of,
)
from torch_streamkl.program.divergences import FLOOR_OF_EXP, Functional, render
from torch_streamkl.program.graph import Node, apply, const
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S
from torch_streamkl.program.walks import replaced


@dataclass(frozen=True)
class Call:
    """Describes one operator call of a loss: coefficient * row factors * divergence."""

    functional: Functional
    geometry: Geometry
    is_head: bool  # of language models: `linear_kl` computes it, else `attention_kl`
    coefficient: float
    factors: tuple[RowFactor, ...]
    mask: MaskPlan


@dataclass(frozen=True)
class Plan:
    """Holds everything that the operator calls of a loss need."""

    rows: Rows
    calls: tuple[Call, ...]


def plan(rows: Rows) -> Plan:
    """Returns the calls that compute the rows, or raises Unsupported."""
    if rows.offsets:
        raise Unsupported("a log-sum-exp of the scores is left over")
    elements = rows.elements
    if not elements.terms:
        raise Unsupported("the sum over keys is a known constant")
    if rows.constant:
        raise Unsupported("a constant is part of the sum over keys")
    calls: list[Call] = []
    for term in elements.terms:
        calls += _calls(elements, term.expr, term.factors)
    return Plan(rows, tuple(calls))


@dataclass(frozen=True)
class Pair:
    """Represents coefficient * a divergence of P, logP (teacher) and S, logS (student)."""

    expr: Node
    teacher: int
    student: int
    coefficient: float = 1.0


def _calls(elements: Elements, expr: Node, factors: tuple[RowFactor, ...]) -> list[Call]:
    expr, parts, layouts = _without_duplicates(elements, expr)
    kept = where_within(expr, True)
    used = sorted(variables(kept))
    if len(used) < 2:
        raise Unsupported(
            "the sum involves one distribution only, which is an entropy and no divergence"
        )
    if len(used) == 2:
        teacher, student = _roles(kept, parts, used)
        polynomial = monomials(kept)
        form = None if polynomial is None else bilinear_form(polynomial, teacher, student)
        text, coefficient = form if form is not None else (_named(kept, teacher, student), 1.0)
        pairs = [Pair(text, teacher, student, coefficient)]
    else:
        pairs = [Pair(*pair) for pair in split_pairs(kept, parts, used)]
    shapes = [_geometry(pair, parts, layouts, elements.key_dim) for pair in pairs]
    drops_rows = False
    if expr != kept:
        if len(pairs) == 1 and not masked_alike(shapes[0]):
            return [_call_within(expr, pairs[0], shapes[0], factors)]
        keys = [parts[k].scores for k in sorted(variables(expr))]
        drops_rows = drops_rows_without_keys(expr, keys)
    return [
        _call(pair, shape, factors, drops_rows) for pair, shape in zip(pairs, shapes, strict=True)
    ]


def _geometry(
    pair: Pair, parts: Sequence[Distribution], layouts: Sequence[Layout], key_dim: int
) -> Geometry:
    teacher, student = pair.teacher, pair.student
    if parts[student].averaged:
        raise Unsupported("the probabilities of both sides are averaged over heads")
    return geometry(parts[teacher], layouts[teacher], parts[student], layouts[student], key_dim)


def _call(pair: Pair, shape: Geometry, factors: tuple[RowFactor, ...], drops_rows: bool) -> Call:
    functional = Functional.of(render(pair.expr))
    is_head = is_lm_head(shape)
    forms = _forms(shape)
    if not is_head and any(form.inner_biases for form in forms):
        raise Unsupported("a tensor is added to attention scores before a tanh")
    if not is_head and any(form.products for form in forms):
        raise Unsupported("scores are a sum of products, but of no LM head with a single adapter")
    if any(form.padded is not None for form in forms):
        if not is_head:
            raise Unsupported("scores are padded to another number of keys")
        if functional.absent != 0.0:
            raise Unsupported("keys that neither side has would contribute to the divergence")
    if math.isnan(functional.absent) and functional.closed_form is None:
        # a key that -inf is added to: operators multiply its 0 with its logarithm
        if any(form.biases for form in forms):
            raise Unsupported(
                "of a key without probability the divergence and a bias would make NaN"
            )
    mask = plan_masks(shape, functional, drops_rows, is_head=is_head)
    return Call(functional, shape, is_head, pair.coefficient, factors, mask)


def _call_within(expr: Node, pair: Pair, shape: Geometry, factors: tuple[RowFactor, ...]) -> Call:
    """Sides with different masks, of which the sum takes the keys of the stricter one."""
    key = within_of(expr)
    if key is None or key not in (pair.teacher, pair.student):
        raise Unsupported("a mask on keys is applied after the softmax")
    forms = _forms(shape)
    if any(form.padded is not None or form.inner_biases or form.products for form in forms):
        raise Unsupported(
            "scores are padded, or a tensor or product is added to them before a tanh"
        )
    functional = Functional.of(render(_named(expr, pair.teacher, pair.student)))
    mask = plan_masks_within(shape, 0 if key == pair.teacher else 1)
    return Call(functional, shape, is_lm_head(shape), 1.0, factors, mask)


def _forms(shape: Geometry) -> tuple[ScoreForm, ScoreForm]:
    """Brings the scores of teacher and student into the operator's form."""
    return read(shape.teacher.distribution.scores), read(shape.student.distribution.scores)


def _named(expr: Node, teacher: int, student: int) -> Node:
    """Writes the expression over P, logP of the teacher and S, logS of the student."""
    lowest = const(FLOOR_OF_EXP)
    names = {
        ("P", teacher): P,
        ("logP", teacher): LOG_P,
        ("within", teacher): apply("gt", LOG_P, lowest),
        ("P", student): S,
        ("logP", student): LOG_S,
        ("within", student): apply("gt", LOG_S, lowest),
    }
    return replaced(expr, lambda x: None if x.args else names.get((x.op, x.value)))


def _without_duplicates(
    elements: Elements, expr: Node
) -> tuple[Node, list[Distribution], list[Layout]]:
    """One variable per distribution, if its detached and live uses can be told apart exactly.

    The gradient of sum_j P_j logP_j through logP is sum_j dP_j = 0, so whether the log of an
    entropy term is detached does not matter as long as the weight is live. Any other mixture of
    detached and live uses has a gradient of its own; and a live log next to a detached weight has
    a gradient, if only of zeros.
    """
    parts, layouts = list(elements.parts), list(elements.layouts)
    twins: dict[int, int] = {}
    for k, (d, layout) in enumerate(zip(parts, layouts, strict=True)):
        for other in range(k):
            if other not in twins and same_numbers(parts[other], d) and layouts[other] == layout:
                twins[k] = other
    live = variables(expr)
    twins = {k: o for k, o in twins.items() if k in live and o in live and parts[k] != parts[o]}
    if not twins:
        return expr, parts, layouts
    polynomial = monomials(where_within(expr, True))
    if polynomial is None:
        raise Unsupported("a distribution is detached in one place and not in another")
    for k, other in twins.items():
        weights = {v for m in polynomial for op, v in m if op == "P" and v in (k, other)}
        crossed = {
            v
            for m in polynomial
            for op, v in m
            if op == "logP" and v in (k, other) and not _own(m, v, (k, other))
        }
        needed = [parts[v] for v in sorted(weights | crossed)]  # symbolic sizes have no hash
        v = min(weights | crossed, default=k)
        if any(x != parts[v] for x in needed) or not grad_flows(parts[v]):
            raise Unsupported("a distribution is detached in one place and not in another")
        if not all(_grad_flows_where(parts[v], parts[twin]) for twin in (k, other)):
            raise Unsupported("a distribution is detached in one place and not in another")
        parts[other] = parts[v]
        expr = renumbered(expr, {k: other})
    return expr, parts, layouts


def _grad_flows_where(a: Distribution, b: Distribution) -> bool:
    """Whether a has a gradient wherever b, the same numbers, has one."""
    return all(x.grad or not y.grad for x, y in zip(refs_in(a), refs_in(b), strict=True))


def _own(monomial: tuple[tuple[str, int], ...], v: int, twins: tuple[int, int]) -> bool:
    return len(monomial) == 2 and any(op == "P" and w in twins for op, w in monomial)


def _roles(expr: Node, parts: Sequence[Distribution], used: Sequence[int]) -> tuple[int, int]:
    """Teacher and student: the student is the one that is trained, or the one inside the log."""
    a, b = used
    if parts[a].averaged or parts[b].averaged:
        return (a, b) if parts[a].averaged else (b, a)
    if parts[a].requires_grad != parts[b].requires_grad:
        return (b, a) if parts[a].requires_grad else (a, b)
    polynomial = monomials(expr)
    if polynomial is not None:
        weights = {v for m in polynomial for op, v in m if op == "P"}
        if len(weights) == 1:
            (teacher,) = weights
            return teacher, b if teacher == a else a
    return a, b
