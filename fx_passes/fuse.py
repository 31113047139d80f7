"""From summed elements to operator calls: what to call, on which operands, with which options.

`plan` decides without touching the graph and raises `Blocked` with the reason; `emit` inserts the
calls.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl import ops
from torch_streamkl.functional import (
    DIVERGENCES,
    LOG_P,
    LOG_S,
    Expr,
    Functional,
    P,
    S,
    apply,
    const,
    named,
    render,
)
from torch_streamkl.fx_passes import linear
from torch_streamkl.fx_passes.builder import Builder
from torch_streamkl.fx_passes.empty_rows import rows_with_keys, window_tensor
from torch_streamkl.fx_passes.geometry import Geometry, geometry
from torch_streamkl.fx_passes.layout import Layout, Piece
from torch_streamkl.fx_passes.masks import AxisCondition, AxisTensor
from torch_streamkl.fx_passes.operands import canonical, outer_node, placed, rows_as_user
from torch_streamkl.fx_passes.sizes import Size, expression, is_unknown, is_zero, same
from torch_streamkl.fx_passes.slicing import example
from torch_streamkl.fx_passes.values import (
    ABSORBING,
    Blocked,
    Distribution,
    Elements,
    RowFactor,
    Rows,
    ScoreKey,
    variables,
)

Monomials = dict[tuple[tuple[str, int], ...], float]


@dataclass(frozen=True)
class Call:
    """One operator call of a site: coefficient * row factors * divergence."""

    functional: Functional
    geometry: Geometry
    coefficient: float
    factors: tuple[RowFactor, ...]
    mask: MaskPlan


@dataclass(frozen=True)
class MaskPlan:
    """The masks of both sides, which are the same, in the operator's terms."""

    window_left: Size | None
    window_right: Size | None
    tensors: tuple[AxisTensor, ...]  # of the student's scores
    row_tensors: tuple[AxisTensor, ...]  # masks of whole rows
    fill: float | None


@dataclass(frozen=True)
class Plan:
    """Everything a site needs."""

    rows: Rows
    calls: tuple[Call, ...]


def plan(rows: Rows) -> Plan:
    """The calls that compute the rows, or Blocked."""
    if rows.offsets:
        raise Blocked("a log-sum-exp of the scores is left over")
    elements = rows.elements
    if not elements.terms:
        raise Blocked("the sum over keys is a known constant")
    if rows.constant:
        raise Blocked("a constant is part of the sum over keys")
    calls: list[Call] = []
    for term in elements.terms:
        calls += _calls(elements, term.expr, term.factors)
    return Plan(rows, tuple(calls))


def _calls(elements: Elements, expr: Expr, factors: tuple[RowFactor, ...]) -> list[Call]:
    expr, parts, layouts = _without_duplicates(elements, expr)
    used = sorted(variables(expr))
    pairs: list[
        tuple[Expr, int, int, float]
    ] = []  # expression over (teacher, student), coefficient
    if len(used) < 2:
        raise Blocked(
            "the sum involves one distribution only, which is an entropy and no divergence"
        )
    if len(used) == 2:
        teacher, student = _roles(expr, parts, used)
        bilinear = _monomials(expr)
        form = None if bilinear is None else _bilinear(bilinear, teacher, student)
        text, coefficient = form if form is not None else (_named(expr, teacher, student), 1.0)
        pairs.append((text, teacher, student, coefficient))
    else:
        pairs = _split_pairs(expr, parts, used)
    return [
        _call(e, parts, layouts, elements.key_dim, teacher, student, coefficient, factors)
        for e, teacher, student, coefficient in pairs
    ]


def _call(
    expr: Expr,
    parts: Sequence[Distribution],
    layouts: Sequence[Layout],
    key_dim: int,
    teacher: int,
    student: int,
    coefficient: float,
    factors: tuple[RowFactor, ...],
) -> Call:
    functional = Functional.of(render(expr))
    if parts[student].averaged:
        raise Blocked("the student's probabilities are averaged over heads")
    shape = geometry(parts[teacher], layouts[teacher], parts[student], layouts[student], key_dim)
    if parts[teacher].scores.padded is not None or parts[student].scores.padded is not None:
        if not linear.applies(shape):
            raise Blocked("scores are padded to another number of keys")
        if functional.absent != 0.0:
            raise Blocked("keys that neither side has would contribute to the divergence")
    mask = _masks(shape, functional)
    for side in (parts[teacher].scores, parts[student].scores):
        if side.capped < 0 or not math.isfinite(side.scale):
            raise Blocked("the scores have a negative softcap or an infinite scale")
    return Call(functional, shape, coefficient, factors, mask)


def _named(expr: Expr, teacher: int, student: int) -> Expr:
    """The expression over P, logP of the teacher and S, logS of the student."""
    names = {
        ("P", teacher): P,
        ("logP", teacher): LOG_P,
        ("P", student): S,
        ("logP", student): LOG_S,
    }
    if (expr.op, int(expr.value)) in names and expr.op in ("P", "logP"):
        return names[(expr.op, int(expr.value))]
    return apply(expr.op, *(_named(a, teacher, student) for a in expr.args)) if expr.args else expr


def _without_duplicates(
    elements: Elements, expr: Expr
) -> tuple[Expr, list[Distribution], list[Layout]]:
    """One variable per distribution, if its detached and live uses can be told apart exactly.

    The gradient of sum_j P_j logP_j through logP is sum_j dP_j = 0, so whether the log of an
    entropy term is detached does not matter as long as the weight is live. Any other mixture of
    detached and live uses has a gradient of its own; and a live log beside a detached weight has
    a gradient, if only of zeros.
    """
    parts, layouts = list(elements.parts), list(elements.layouts)
    twins: dict[int, int] = {}
    for k, (d, layout) in enumerate(zip(parts, layouts, strict=True)):
        for other in range(k):
            if (
                other not in twins
                and parts[other].untrained() == d.untrained()
                and layouts[other] == layout
            ):
                twins[k] = other
    live = variables(expr)
    twins = {
        k: o
        for k, o in twins.items()
        if k in live and o in live and parts[k].trained != parts[o].trained
    }
    if not twins:
        return expr, parts, layouts
    monomials = _monomials(expr)
    for k, other in twins.items():
        if monomials is None:
            raise Blocked("a distribution is detached in one place and not in another")
        weights = {v for m in monomials for op, v in m if op == "P" and v in (k, other)}
        crossed = {
            v
            for m in monomials
            for op, v in m
            if op == "logP" and v in (k, other) and not _own(m, v, (k, other))
        }
        flags = {parts[v].trained for v in weights | crossed}
        if flags != {True}:
            raise Blocked("a distribution is detached in one place and not in another")
        parts[other] = replace(parts[other], trained=flags.pop())
        expr = _replaced(expr, k, other)
    return expr, parts, layouts


def _own(monomial: tuple[tuple[str, int], ...], v: int, twins: tuple[int, int]) -> bool:
    return len(monomial) == 2 and any(op == "P" and w in twins for op, w in monomial)


def _replaced(e: Expr, k: int, other: int) -> Expr:
    if e.op in ("P", "logP"):
        return Expr(e.op, (), float(other)) if e.value == k else e
    return apply(e.op, *(_replaced(a, k, other) for a in e.args)) if e.args else e


def _roles(expr: Expr, parts: Sequence[Distribution], used: Sequence[int]) -> tuple[int, int]:
    """Teacher and student: the student is the one that is trained, or the one inside the log."""
    a, b = used
    if parts[a].averaged or parts[b].averaged:
        return (a, b) if parts[a].averaged else (b, a)
    if parts[a].trained != parts[b].trained:
        return (b, a) if parts[a].trained else (a, b)
    monomials = _monomials(expr)
    if monomials is not None:
        weights = {v for m in monomials for op, v in m if op == "P"}
        if len(weights) == 1:
            (teacher,) = weights
            return teacher, b if teacher == a else a
    return a, b


def _monomials(e: Expr) -> Monomials | None:
    """The expression as a polynomial in its variables, or None."""
    if e.op == "const":
        return {(): e.value} if e.value else {}
    if e.op in ("P", "logP"):
        return {((e.op, int(e.value)),): 1.0}
    if e.op not in ("add", "sub", "mul", "div", "neg"):
        return None
    parts = [_monomials(a) for a in e.args]
    if any(p is None for p in parts):
        return None
    a, b = parts[0], parts[-1]
    assert a is not None and b is not None
    result: Monomials = {}
    if e.op == "neg":
        return {m: -c for m, c in a.items()}
    if e.op in ("add", "sub"):
        for sign, part in ((1.0, a), (1.0 if e.op == "add" else -1.0, b)):
            for m, c in part.items():
                result[m] = result.get(m, 0.0) + sign * c
    elif e.op == "div":
        if set(b) != {()}:
            return None
        result = {m: c / b[()] for m, c in a.items()}
    else:
        for m1, c1 in a.items():
            for m2, c2 in b.items():
                m = tuple(sorted(m1 + m2))
                result[m] = result.get(m, 0.0) + c1 * c2
    return {m: c for m, c in result.items() if c != 0.0}


def _coefficients(monomials: Monomials) -> dict[tuple[int, int], float] | None:
    """Coefficients of P_a logP_b when the polynomial has only such terms."""
    result = {}
    for m, c in monomials.items():
        if [op for op, _ in m] != ["P", "logP"]:
            return None
        result[(m[0][1], m[1][1])] = c
    return result


def _bilinear(monomials: Monomials, teacher: int, student: int) -> tuple[Expr, float] | None:
    """Canonical expression and factor of a form that is linear in the log-probabilities."""
    c = _coefficients(monomials)
    if c is None:
        return None
    tt, ts = c.get((teacher, teacher), 0.0), c.get((teacher, student), 0.0)
    st, ss = c.get((student, teacher), 0.0), c.get((student, student), 0.0)
    for name, form in (
        ("forward_kl", (1.0, -1.0, 0.0, 0.0)),
        ("reverse_kl", (0.0, 0.0, -1.0, 1.0)),
        ("cross_entropy", (0.0, -1.0, 0.0, 0.0)),
        ("jeffreys", (1.0, -1.0, -1.0, 1.0)),
    ):
        pairs = list(zip((tt, ts, st, ss), form, strict=True))
        factor = next(x / y for x, y in pairs if y)
        if all(math.isclose(x, factor * y, rel_tol=1e-12) for x, y in pairs):
            return Functional.of(DIVERGENCES[name]).expr, factor
    terms = ((tt, P * LOG_P), (ts, P * LOG_S), (st, S * LOG_P), (ss, S * LOG_S))
    total = const(0.0)
    for x, product in terms:
        if x:
            total = total + const(x) * product
    return total, 1.0


def _split_pairs(
    expr: Expr, parts: Sequence[Distribution], used: Sequence[int]
) -> list[tuple[Expr, int, int, float]]:
    """More than two distributions: a sum of divergences, one call each."""
    monomials = _monomials(expr)
    c = None if monomials is None else _coefficients(monomials)
    if c is None:
        raise Blocked(f"{len(used)} distributions are combined in one expression")
    pairs = []
    for a in used:
        others = [b for b in used if b != a and c.get((a, b), 0.0)]
        own, crossed = c.get((a, a), 0.0), sum(c[(a, b)] for b in others)
        if own and not math.isclose(own, -crossed, rel_tol=1e-9):
            raise Blocked(
                f"{len(used)} distributions are combined into what is no sum of divergences"
            )
        for b in others:
            name = "forward_kl" if own else "cross_entropy"
            pair = (Functional.of(DIVERGENCES[name]).expr, a, b, -c[(a, b)])
            if (
                parts[a].trained and not parts[b].trained
            ):  # the trained side is the student: swap the roles
                reverse = Functional.of(DIVERGENCES["reverse_kl"]).expr if own else -(S * LOG_P)
                pair = (reverse, b, a, -c[(a, b)])
            pairs.append(pair)
    return pairs


def masks_of(shape: Geometry) -> MaskPlan:
    """The masks of both sides in the operator's terms; they have to be the same."""
    teacher, student = shape.teacher.distribution.scores, shape.student.distribution.scores
    sides = [_mask_of(key, side, shape) for side, key in enumerate((teacher, student))]
    if sides[0].keys() != sides[1].keys():
        raise Blocked("teacher and student are masked differently")
    left = right = None
    tensors, row_tensors = [], []
    for literal, source in sides[1].items():
        match literal:
            case ("window", "left", bound):
                left = source if left is None else _tighter(left, source, bound)
            case ("window", "right", bound):
                right = source if right is None else _tighter(right, source, bound)
            case ("rows", *_):
                row_tensors.append(source)
            case _:
                tensors.append(source)
    return MaskPlan(left, right, tuple(tensors), tuple(row_tensors), None)


def _masks(shape: Geometry, functional: Functional) -> MaskPlan:
    teacher, student = shape.teacher.distribution.scores, shape.student.distribution.scores
    masks = masks_of(shape)
    is_masked = bool(student.mask)
    fill = _fill(teacher, student, functional, is_masked)
    if masks.row_tensors and fill is not None:
        raise Blocked(
            "whole rows are masked in a divergence that does not vanish for equal distributions"
        )
    if functional.absent != 0.0 and is_masked:
        raise Blocked("masked keys would contribute to the divergence")
    return replace(masks, fill=fill)


def _tighter(a: Size, b: Size, _: object) -> Size:
    x, y = expression(a), expression(b)
    if isinstance(x, int) and isinstance(y, int):
        return min(a, b)
    raise Blocked("two windows of unknown size")


def _mask_of(key: ScoreKey, side: int, shape: Geometry) -> dict[tuple[object, ...], Any]:
    """The literals of a side by what they mean in the operator's dimensions."""
    own = (shape.teacher, shape.student)[side]
    result: dict[tuple[object, ...], Any] = {}
    for literal in key.mask or ():
        if isinstance(literal, AxisCondition):
            name, bound = _band(literal, side, shape)
            result[("window", name, str(expression(bound)))] = bound
            continue
        dims = tuple(tuple(_role(p, side, shape) for p in d) for d in literal.layout)
        on_keys = any(p.axis == own.distribution.axis for d in literal.layout for p in d)
        kind = "tensor" if on_keys else "rows"
        result[(kind, literal.node.name, dims, literal.positive)] = literal
    return result


def _role(piece: Piece, side: int, shape: Geometry) -> object:
    own = (shape.teacher, shape.student)[side]
    if piece.axis == own.distribution.axis:
        return "key"
    for i, digit in enumerate(shape.digits):
        if digit.pieces[side] == piece:
            return i
    return ("part", piece.key())


def _band(literal: AxisCondition, side: int, shape: Geometry) -> tuple[str, Size]:
    """A condition on query and key index as a bound of the operator's window.

    ``j - i + c >= 0`` is ``j >= i - c``; with o = j - (i + M - N) that is o >= -(c + M - N).
    """
    own = (shape.teacher, shape.student)[side]
    key_axis = own.distribution.axis
    query = shape.digits[shape.query].pieces[side] if shape.query is not None else None
    coefficients = dict(literal.coefficients)
    cj = coefficients.pop(key_axis, 0)
    ci = coefficients.pop(query.axis, 0) if query is not None else 0
    whole = query is not None and same(query.size, own.distribution.scores.size(query.axis))
    if coefficients or (ci, cj) not in ((-1, 1), (1, -1)) or not whole:
        raise Blocked(
            "a mask that is a condition on indices other than a band around the diagonal"
        )
    num_keys = own.distribution.scores.size(key_axis)
    assert query is not None
    offset = num_keys - query.size
    return ("left", literal.constant + offset) if cj == 1 else ("right", literal.constant - offset)


def _fill(
    teacher: ScoreKey, student: ScoreKey, functional: Functional, is_masked: bool
) -> float | None:
    """The operator's mask_value: None removes keys, exact unless a whole row can be masked."""
    if not is_masked:
        return None
    fills = (teacher.fill, student.fill)
    if fills[0] != fills[1] and (max(fills) > ABSORBING or min(fills) > ABSORBING):
        raise Blocked(
            f"teacher and student are masked with different values, {fills[0]:g} and {fills[1]:g}"
        )
    fill = max(fills)
    if fill == -math.inf:
        return None
    if fill == ABSORBING and _vanishes(functional):
        return None  # a row without keys is uniform on both sides
    if not (teacher.exact_fill and student.exact_fill):
        raise Blocked(
            "two additive masks overlap in a divergence that is not 0 for equal distributions"
        )
    return fill


def _vanishes(functional: Functional) -> bool:
    """Whether the divergence of a uniform row from itself is 0."""
    for p in (1.0, 0.5, 0.1, 1e-3):
        x = torch.tensor(p, dtype=torch.float64)
        f, _, _ = functional.sums({"P": x, "S": x, "logP": x.log(), "logS": x.log()})
        if abs(float(f)) > 1e-12:
            return False
    return True


def describe(planned: Plan) -> tuple[str, str]:
    """Kind and form of a site for the report."""
    forms = []
    for call in planned.calls:
        form = _spoken(call.functional)
        if call.mask.window_left is not None:
            form += ", sliding window"
        elif call.mask.window_right is not None:
            form += ", causal" if is_zero(call.mask.window_right) else ", keys up to a diagonal"
        if call.mask.tensors:
            form += ", masked"
        if call.geometry.teacher.distribution.averaged:
            form += ", teacher averaged over heads"
        forms.append(form)
    heads = all(linear.applies(call.geometry) for call in planned.calls)
    return "linear_kl" if heads else "attention_kl", "; ".join(forms)


def _spoken(functional: Functional) -> str:
    """A divergence by its name where it has one, else as the expression that is computed."""
    guarded = functional.guarded
    for name, text in DIVERGENCES.items():
        known = Functional.of(text)
        if known == functional:
            return name
        if guarded is not None and guarded.form == known.bilinear:
            floors = {"teacher": guarded.teacher_floor, "student": guarded.student_floor}
            used = {k: math.exp(v) for k, v in floors.items() if v > -math.inf}
            clamps = [f"{side} clamped at {least:.3g}" for side, least in used.items()]
            return ", ".join([name, *clamps])
    return "js" if functional == named("js") else functional.text


def emit(build: Builder, planned: Plan, like: Tensor, outer: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Insert the calls; the returned node has the value, shape and dtype of ``like``."""
    rows = planned.rows
    total: fx.Node | None = None
    for call in planned.calls:
        term = _emit_call(build, call, outer, rows)
        coefficient = call.coefficient * rows.weight
        if coefficient != 1.0:
            term = build.call(torch.mul, term, coefficient)
        total = term if total is None else build.call(torch.add, total, term)
    assert total is not None
    if tuple(rows.reduced) == (rows.elements.key_dim,):
        if not rows.keepdim:
            total = build.method("squeeze", total, rows.elements.key_dim)
    else:
        total = build.method("sum", total, dim=tuple(rows.reduced), keepdim=rows.keepdim)
    tensors = [outer_node(o.node, outer) for c in planned.calls for o in _operands(c)]
    if rows.divisors:
        total = build.call(torch.div, total, build.product(rows.divisors, tensors))
    value = example(total)
    assert isinstance(value, Tensor)
    if value.dtype != like.dtype:
        total = build.method("to", total, like.dtype)
    result = example(total)
    assert isinstance(result, Tensor)
    # a number of selected rows has a symbol of its own in the rewritten graph
    if len(result.shape) != len(like.shape) or not all(
        same(a, b) or (is_unknown(a) and is_unknown(b))
        for a, b in zip(result.shape, like.shape, strict=True)
    ):
        raise Blocked(
            f"the fused value has shape {tuple(result.shape)}, the user's {tuple(like.shape)}"
        )
    return total


def _operands(call: Call) -> list[Any]:
    return [
        o
        for side in (call.geometry.student, call.geometry.teacher)
        for o in (side.rows, side.keys)
    ]


def _emit_call(
    build: Builder, call: Call, outer: Mapping[fx.Node, fx.Node], rows: Rows
) -> fx.Node:
    shape = call.geometry
    tensors = [outer_node(o.node, outer) for o in _operands(call)]
    if linear.applies(shape):
        value = linear.emit(build, shape, call.functional, outer)
        value = rows_as_user(
            build, value, shape, rows.elements.rank, rows.elements.key_dim, tensors
        )
        return _with_factors(build, value, call, outer)
    inputs: dict[str, fx.Node] = {}
    options: dict[str, Any] = {"functional": call.functional.text}
    dtype = _compute_dtype(call, outer)
    for side, name in enumerate(("teacher", "student")):
        own = (shape.teacher, shape.student)[side]
        key = own.distribution.scores
        inputs[f"{name}_q"] = canonical(
            build,
            own.rows,
            side,
            shape,
            tensors,
            outer,
            is_keys=False,
            dtype=dtype,
            factors=key.factors,
        )
        inputs[f"{name}_k"] = canonical(
            build, own.keys, side, shape, tensors, outer, is_keys=True, dtype=dtype
        )
        options[f"{name}_scale"] = key.scale * key.capped if key.capped else key.scale
        if key.capped:
            options[f"{name}_softcap"] = key.capped
        bias = add_up_biases(build, key, side, shape, tensors, outer)
        if bias is not None:
            options[f"{name}_bias"] = bias
    if shape.teacher.distribution.averaged:
        options["head_mean"] = True
    options |= _mask_options(build, call, tensors, outer)
    if options["functional"] == Functional.of(DIVERGENCES["forward_kl"]).text:
        del options["functional"]
    order = ("student_q", "student_k", "teacher_q", "teacher_k")
    result = build.call(ops.attention_kl, *(inputs[n] for n in order), **options)
    value = build.call(operator.getitem, result, 0)
    value = _without_empty_rows(build, value, call, options, tensors, dtype)
    for literal in call.mask.row_tensors:
        keep = placed(build, outer_node(literal.node, outer), literal.layout, 1, shape, tensors)
        keep = build.method("squeeze", keep, -1)
        value = build.call(
            torch.where, keep, *((value, 0.0) if literal.positive else (0.0, value))
        )
    value = rows_as_user(build, value, shape, rows.elements.rank, rows.elements.key_dim, tensors)
    return _with_factors(build, value, call, outer)


def _without_empty_rows(
    build: Builder,
    value: fx.Node,
    call: Call,
    options: Mapping[str, Any],
    tensors: list[fx.Node],
    dtype: torch.dtype,
) -> fx.Node:
    """No gradient to rows of which a dense additive mask leaves nothing: they are uniform."""
    shape = call.geometry
    biases = [options[n] for n in ("teacher_bias", "student_bias") if n in options]
    result = example(value)
    if not biases or not (isinstance(result, Tensor) and result.requires_grad):
        return value
    keep = window_tensor(build, shape, call.mask.window_left, call.mask.window_right, tensors)
    if "mask" in options:
        mask = options["mask"]
        keep = mask if keep is None else build.call(torch.logical_and, keep, mask)
    averaged = bool(shape.teacher.distribution.averaged)
    alive: fx.Node | None = None
    for bias in dict.fromkeys(biases):
        rows = rows_with_keys(build, bias, keep, dtype, all_heads=averaged)
        alive = rows if alive is None else build.call(torch.logical_and, alive, rows)
    assert alive is not None
    alive = build.method("squeeze", alive, -1)
    return build.call(torch.where, alive, value, build.method("detach", value))


def _compute_dtype(call: Call, outer: Mapping[fx.Node, fx.Node]) -> torch.dtype:
    """The type of the operands: the narrowest that all of them have exactly."""
    dtypes = []
    for operand in _operands(call):
        value = example(outer_node(operand.node, outer))
        assert isinstance(value, Tensor)
        dtypes.append(value.dtype)
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    if not widest.is_floating_point:
        raise Blocked(f"scores of {widest} operands")
    return widest


def add_up_biases(
    build: Builder,
    key: ScoreKey,
    side: int,
    shape: Geometry,
    tensors: Sequence[fx.Node],
    outer: Mapping[fx.Node, fx.Node],
) -> fx.Node | None:
    """The additive tensors of a side's scores as one that broadcasts to the operator's scores."""
    total: fx.Node | None = None
    for bias in key.biases:
        node = outer_node(bias.node, outer)
        value = example(node)
        assert isinstance(value, Tensor)
        if value.requires_grad:
            raise Blocked("a bias that is added to the scores needs a gradient")
        x = placed(build, node, bias.layout, side, shape, tensors)
        if bias.weight != 1.0:
            x = build.call(torch.mul, x, bias.weight)
        for factor in bias.factors:
            x = build.call(
                torch.div if factor.divides else torch.mul, x, outer_node(factor.node, outer)
            )
        total = x if total is None else build.call(torch.add, total, x)
    return total


def _mask_options(
    build: Builder, call: Call, tensors: Sequence[fx.Node], outer: Mapping[fx.Node, fx.Node]
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    mask = call.mask
    if mask.window_left is not None:
        options["window_left"] = build.size(mask.window_left, tensors)
    if mask.window_right is not None:
        options["window_right"] = build.size(mask.window_right, tensors)
    total: fx.Node | None = None
    for literal in mask.tensors:
        node = outer_node(literal.node, outer)
        x = placed(build, node, literal.layout, 1, call.geometry, tensors)
        if not literal.positive:
            x = build.call(torch.logical_not, x)
        total = x if total is None else build.call(torch.logical_and, total, x)
    if total is not None:
        options["mask"] = total
    if mask.fill is not None:
        options["mask_value"] = mask.fill
    return options


def _with_factors(
    build: Builder, value: fx.Node, call: Call, outer: Mapping[fx.Node, fx.Node]
) -> fx.Node:
    """Row weights and row masks, as the user's code applies them."""
    for factor in call.factors:
        node = outer_node(factor.node, outer)
        if factor.selects:
            arguments = (value, 0.0) if factor.keeps else (0.0, value)
            value = build.call(torch.where, node, *arguments)
        elif factor.divides:
            value = build.call(torch.div, value, node)
        else:
            value = build.call(torch.mul, value, node)
    return value
