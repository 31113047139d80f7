"""Reads what is summed over keys as divergences of pairs of distributions.

An expression of log-probabilities is written as a polynomial in its probabilities, logarithms and
whatever else it is made of. Per-row values are factors of its terms. What belongs to one factor is
a divergence, or a sum of divergences with one operator call each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.formulas import (
    Polynomial,
    is_log,
    is_weight,
    number_of,
    value_at,
    written,
)
from torch_streamkl.fx_passes.closed_forms.heads import Distribution, aligned
from torch_streamkl.fx_passes.closed_forms.mixtures import jensen_shannon, normalised
from torch_streamkl.fx_passes.closed_forms.worlds import LOG, distributions_in
from torch_streamkl.fx_passes.reading.gradients import trained
from torch_streamkl.program.canonical import choose, product
from torch_streamkl.program.divergences import FLOOR_OF_EXP, named
from torch_streamkl.program.functions import quotient
from torch_streamkl.program.graph import BOOL, ONE, Axis, Node, apply, const
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S, variable
from torch_streamkl.program.reductions import remade
from torch_streamkl.program.walks import rebuilt_root, walk

TINY = 1e-12
AFTER_SOFTMAX = "a mask on keys is applied after the softmax"


@dataclass(frozen=True)
class Pair:
    """Represents coefficient * a divergence of P, logP (teacher) and S, logS (student)."""

    expr: Node
    teacher: int
    student: int
    coefficient: float = 1.0


# ------------------------------------------------------------------------ polynomials


def by_factor(x: Node, key: Axis) -> dict[Node, Polynomial]:
    """Returns an expression as polynomials by the per-row values that they are multiplied with."""
    found: dict[Node, dict[Node, Polynomial]] = {}
    has_variables: dict[Node, bool] = {}
    for y in walk([x]):
        has_variables[y] = y.op == LOG or any(has_variables[a] for a in y.args)

    def enter(y: Node) -> bool:
        if y.op == "where":
            if key in y.args[0].axes and not has_variables[y.args[0]]:
                raise NoForm(AFTER_SOFTMAX, y.args[0])
            return has_variables[y] and not has_variables[y.args[0]]
        return has_variables[y] and (
            y.op in ("linear", "product") or (y.op == "div" and not has_variables[y.args[1]])
        )

    for y in walk([x], enter):
        if not has_variables[y]:
            if key in y.axes:
                raise NoForm(AFTER_SOFTMAX, y)
            found[y] = {ONE: {(): y.value}} if y.op == "const" else {y: {(): 1.0}}
        elif not enter(y):
            _check_atom(y, has_variables)
            found[y] = {ONE: {(y,): 1.0}}
        else:
            made = _combined(y, [found[a] for a in y.args])
            if made is None:  # as it is written
                _check_atom(y, has_variables)
                made = {ONE: {(y,): 1.0}}
            found[y] = made
    return {f: p for f, p in found[x].items() if p}


def _check_atom(x: Node, has_variables: Mapping[Node, bool]) -> None:
    """Raises NoForm if a value of a row is part of a function of probabilities."""
    for y in walk([x], lambda y: has_variables[y]):
        if not has_variables[y] and y.op != "const":
            reason = "a value of the row is part of a function of probabilities"
            raise NoForm(AFTER_SOFTMAX if y.dtype == BOOL else reason, y)


MOST_TERMS = 64  # of a polynomial; one of more is no sum of divergences


def _combined(x: Node, args: list[dict[Node, Polynomial]]) -> dict[Node, Polynomial] | None:
    """An operation on polynomials, None if it has too many terms."""
    sizes = [sum(map(len, part.values())) for part in args]
    if (math.prod(sizes) if x.op == "product" else sum(sizes)) > MOST_TERMS:
        return None
    match x.op:
        case "linear":
            total: dict[Node, Polynomial] = {ONE: {(): x.value[0]}} if x.value[0] else {}
            for c, part in zip(x.value[1], args, strict=True):
                total = _sum(total, _product({ONE: {(): c}}, part))
            return total
        case "product":
            total = {ONE: {(): 1.0}}
            for part in args:
                total = _product(total, part)
            return total
        case "div":
            return _product({quotient(ONE, x.args[1]): {(): 1.0}}, args[0])
    keep = x.args[0]  # a condition of the row
    yes, no = choose(keep, ONE, const(0.0)), choose(keep, const(0.0), ONE)
    return _sum(_product({yes: {(): 1.0}}, args[1]), _product({no: {(): 1.0}}, args[2]))


def _sum(a: dict[Node, Polynomial], b: dict[Node, Polynomial]) -> dict[Node, Polynomial]:
    total = {factor: dict(p) for factor, p in a.items()}
    for factor, polynomial in b.items():
        own = total.setdefault(factor, {})
        for m, c in polynomial.items():
            old = own.get(m, 0.0)
            own[m] = old + c
            if abs(own[m]) <= TINY * max(abs(old), abs(c)):
                del own[m]
    return total


def _product(a: dict[Node, Polynomial], b: dict[Node, Polynomial]) -> dict[Node, Polynomial]:
    total: dict[Node, Polynomial] = {}
    for f, p in a.items():
        for g, q in b.items():
            terms: Polynomial = {}
            for m, c in p.items():
                for n, d in q.items():
                    key = tuple(sorted(m + n, key=lambda y: y.digest))
                    terms[key] = terms.get(key, 0.0) + c * d
            total = _sum(total, {product(f, g): terms})
    return total


def variables_of(polynomial: Polynomial) -> list[int]:
    """Returns the distributions that a polynomial has."""
    return sorted(distributions_in(y for m in polynomial for y in m))


def _coefficients(polynomial: Polynomial) -> dict[tuple[int, int], float] | None:
    """Coefficients of P_a logP_b where there are only such terms."""
    found = {}
    for m, c in polynomial.items():
        weights, logs = [x for x in m if is_weight(x)], [x for x in m if is_log(x)]
        if len(m) != 2 or len(weights) != 1 or len(logs) != 1:
            return None
        found[number_of(weights[0]), number_of(logs[0])] = c
    return found


# ------------------------------------------------------------------------ detached twins


def without_twins(
    polynomial: Polynomial, parts: Sequence[Distribution]
) -> tuple[Polynomial, list[Distribution]]:
    """Returns one variable a distribution, if detached and live uses can be told apart exactly.

    The gradient of sum_j P_j logP_j through logP is sum_j dP_j = 0, so whether the log of an
    entropy term is detached does not matter as long as the weight is live. Any other mixture of
    detached and live uses has a gradient of its own; and a live log next to a detached weight has
    a gradient, if only of zeros.
    """
    parts, used = list(parts), variables_of(polynomial)
    for position, k in enumerate(used):
        for other in used[:position]:
            if parts[k] != parts[other] and aligned(parts, other, k):
                polynomial, parts = _joined(polynomial, parts, k, other)
    return polynomial, parts


def _joined(
    polynomial: Polynomial, parts: list[Distribution], k: int, other: int
) -> tuple[Polynomial, list[Distribution]]:
    twins = (k, other)
    simple = all(is_weight(x) or is_log(x) for m in polynomial for x in m)
    needed = {number_of(x) for m in polynomial for x in m if is_weight(x)} if simple else set()
    for m in polynomial if simple else ():
        for x in m:
            own = len(m) == 2 and any(is_weight(y) and number_of(y) in twins for y in m)
            if is_log(x) and not own:
                needed.add(number_of(x))
    needed &= set(twins)
    live = [v for v in twins if _flows_more(parts[v], [parts[w] for w in twins])]
    if not simple or len(needed) > 1 or not (needed or set(twins)) & set(live):
        raise NoForm(_why_twins(polynomial, parts, twins))
    v = min(needed, default=k)
    parts[other] = parts[v]
    renamed: Polynomial = {}
    for m, c in polynomial.items():
        m = tuple(sorted((_renumbered(x, {k: other}) for x in m), key=lambda y: y.digest))
        renamed[m] = renamed.get(m, 0.0) + c
    return renamed, parts


def _why_twins(
    polynomial: Polynomial, parts: Sequence[Distribution], twins: tuple[int, int]
) -> str:
    """Says why two uses of a distribution are not one: a condition on it has no gradient."""
    atoms = [x for m in polynomial for x in m]
    for x in walk(atoms):
        if x.op == "where" and x.args[1].op != x.args[2].op:
            inside = distributions_in([x.args[0]]) & set(twins)
            fill = next((a.value for a in x.args[1:] if a.op == "const"), None)
            if fill is not None and any(not parts[k].requires_grad for k in inside):
                return f"values after the softmax are filled with {fill:g}"
    return "a distribution is detached in one place and not in another"


def _flows_more(part: Distribution, twins: Sequence[Distribution]) -> bool:
    """Whether a distribution has a gradient wherever one of the others has."""
    own = trained([part.score])
    return bool(own) and all(trained([x.score]) <= own for x in twins)


def _renumbered(x: Node, number: Mapping[int, int]) -> Node:
    def change(y: Node, args: tuple[Node, ...]) -> Node:
        if y.op == LOG:
            return variable(LOG, number.get(int(y.value), int(y.value)))
        return remade(y, args)

    return rebuilt_root(x, change)


# ------------------------------------------------------------------------ divergences


def pairs_of(polynomial: Polynomial, parts: Sequence[Distribution]) -> list[Pair]:
    """Returns the divergences that a polynomial is the sum of."""
    used = variables_of(polynomial)
    if len(used) == 1 and len(parts) > 1:  # at some rows alone, next to a divergence at others
        return [_of_one(polynomial, used[0], parts)]
    if len(used) < 2:
        raise NoForm(
            "the sum involves one distribution only, which is an entropy and no divergence"
        )
    if len(used) > 2:
        return _split(polynomial, parts, used)
    teacher, student = _roles(polynomial, parts, used)
    polynomial = normalised(polynomial)
    mixture = jensen_shannon(polynomial, teacher, student)
    if mixture is not None:
        return [Pair(mixture[0], teacher, student, mixture[1])]
    c = _coefficients(polynomial)
    if c is not None:
        expr, factor = _bilinear(c, teacher, student)
        return [Pair(expr, teacher, student, factor)]
    expr = written(polynomial, teacher, student)
    if all(c > 0.0 for c in polynomial.values()) and _is_negative(expr):
        negative = {m: -c for m, c in polynomial.items()}
        return [Pair(written(negative, teacher, student), teacher, student, -1.0)]
    return [Pair(expr, teacher, student)]


def _is_negative(expr: Node) -> bool:
    """Whether a formula is negative, as P log S is: a divergence times -1."""
    points = ((0.3, 0.2), (0.05, 0.6), (0.7, 0.01), (1e-3, 0.4))
    with contextlib.suppress(KeyError, ValueError):
        return all(value_at(expr, math.log(p), math.log(s)) < 0.0 for p, s in points)
    return False


def _of_one(polynomial: Polynomial, own: int, parts: Sequence[Distribution]) -> Pair:
    """A sum of one distribution as a divergence from another of its rows, which it does not read.

    Where a target is a number at some rows, such as those that a shift has padded.
    """
    others = [i for i in range(len(parts)) if i != own and not aligned(parts, i, own)]
    if not others or any(parts[i].averaged for i in (own, others[0])):
        raise NoForm(
            "the sum involves one distribution only, which is an entropy and no divergence"
        )
    expr = written(polynomial, others[0], own)
    return Pair(expr, others[0], own)


def _roles(
    polynomial: Polynomial, parts: Sequence[Distribution], used: Sequence[int]
) -> tuple[int, int]:
    """Teacher and student: the student is the one that is trained, or the one inside the log."""
    a, b = used
    if parts[a].averaged or parts[b].averaged:
        return (a, b) if parts[a].averaged else (b, a)
    if parts[a].requires_grad != parts[b].requires_grad:
        return (b, a) if parts[a].requires_grad else (a, b)
    weights = {number_of(x) for m in polynomial for x in m if is_weight(x)}
    if len(weights) == 1 and all(is_weight(x) or is_log(x) for m in polynomial for x in m):
        (teacher,) = weights
        return teacher, b if teacher == a else a
    return a, b


def _bilinear(
    c: Mapping[tuple[int, int], float], teacher: int, student: int
) -> tuple[Node, float]:
    """The KL, cross-entropy or Jeffreys divergence that a form is a multiple of; the factor."""
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
        if all(math.isclose(x, factor * y, rel_tol=TINY) for x, y in pairs):
            return named(name).expr, factor
    total = const(0.0)
    for x, term in ((tt, P * LOG_P), (ts, P * LOG_S), (st, S * LOG_P), (ss, S * LOG_S)):
        if x:
            total = total + const(x) * term
    return total, 1.0


def _split(
    polynomial: Polynomial, parts: Sequence[Distribution], used: Sequence[int]
) -> list[Pair]:
    """Splits more than two distributions into a sum of divergences, one call each."""
    c = _coefficients(polynomial)
    if c is None:
        raise NoForm(f"{len(used)} distributions are combined in one expression")
    pairs = []
    for a in used:
        others = [b for b in used if b != a and c.get((a, b), 0.0)]
        own, crossed = c.get((a, a), 0.0), sum(c[a, b] for b in others)
        if own and not math.isclose(own, -crossed, rel_tol=1e-9):
            raise NoForm(
                f"{len(used)} distributions are combined into what is no sum of divergences"
            )
        for b in others:
            name = "forward_kl" if own else "cross_entropy"
            pair = Pair(named(name).expr, a, b, -c[a, b])
            if parts[a].requires_grad and not parts[b].requires_grad:
                # the trained side is the student: swap the roles
                reverse = named("reverse_kl").expr if own else -(S * LOG_P)
                pair = Pair(reverse, b, a, -c[a, b])
            pairs.append(pair)
    return pairs


# ------------------------------------------------------------------------ formulas as they are run


def within(pair: Pair, stricter: int) -> Pair:
    """Returns a divergence that has a value only at the keys of one distribution."""
    log = LOG_P if stricter == pair.teacher else LOG_S
    expr = apply("where", apply("gt", log, FLOOR_OF_EXP), pair.expr, 0.0)
    return replace(pair, expr=const(pair.coefficient) * expr, coefficient=1.0)
