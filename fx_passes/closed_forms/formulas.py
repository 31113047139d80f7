"""Writes the formula of a divergence as people do, from a polynomial of its distributions."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.worlds import LOG
from torch_streamkl.fx_passes.fx_utils.torch_names import unset_fake_temporarily
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.divergences import Functional, evaluate, render
from torch_streamkl.program.graph import ONE, Node, apply, const
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S
from torch_streamkl.program.operations import OPERATIONS, exact
from torch_streamkl.program.walks import length_of, rebuilt_root, walk

Monomial = tuple[Node, ...]  # what a term multiplies, sorted by digest
Polynomial = dict[Monomial, float]
LONGEST = 500  # operations of a formula that is text
# operations that grow where arguments vanish, and the first of these
GROWS = {"log": 0, "log_div": 0, "div": 1, "div0": 1, "sqrt": 0}


def is_log(x: Node) -> bool:
    """Returns whether an expression is the logarithm of a distribution."""
    return x.op == LOG


def is_weight(x: Node) -> bool:
    """Returns whether an expression is the probabilities of a distribution."""
    return x.op == "exp" and x.args[0].op == LOG


def number_of(x: Node) -> int:
    """Returns which distribution an expression is of."""
    return int((x.args[0] if x.args else x).value)


def written(polynomial: Polynomial, teacher: int, student: int) -> Node:
    """Returns a product of sums, or a sum by probabilities: P * terms + S * terms + the rest."""
    names = {teacher: (P, LOG_P), student: (S, LOG_S)}
    product = _product_of_sums(polynomial, teacher, names)
    if product is not None:
        return product
    common = set.intersection(*(set(m) for m in polynomial))
    groups: dict[Node | None, list[tuple[float, Node]]] = {}
    for m, c in polynomial.items():
        atoms = sorted(m, key=lambda x: _order(x, teacher))
        weight = next((x for x in atoms if is_weight(x)), None)
        if weight is None:
            weight = next((x for x in atoms if x in common and not is_log(x)), None)
        if weight is not None:
            atoms.remove(weight)
        term = const(1.0)
        for x in atoms:
            term = term * _written(x, names)
        groups.setdefault(weight, []).append((c, term))
    order = sorted(groups, key=lambda w: (2, False) if w is None else _order(w, teacher))
    factor = _common_factor({w: groups[w] for w in order}, names)
    if factor is not None:
        return factor
    total = const(0.0)
    for weight in order:
        terms = groups[weight]
        size = {abs(c) for c, _ in terms}
        common_factor = size.pop() if len(size) == 1 else 1.0
        inner = _total([(c / common_factor, x) for c, x in terms], names)
        if weight is not None:
            inner = _written(weight, names) * inner
        total = total + const(common_factor) * inner
    return total


def _common_factor(
    groups: Mapping[Node | None, Sequence[tuple[float, Node]]],
    names: Mapping[int, tuple[Node, Node]],
) -> Node | None:
    """A product of two sums, as ``(P + eps) * (log(P + eps) - log(S + eps))``."""
    if len(groups) < 2:
        return None
    first, *others = groups.values()
    weights = [1.0]
    for terms in others:
        known = {x: c for c, x in terms}
        ratios = {known.get(x, 0.0) / c for c, x in first}
        if len(known) != len(first) or len(ratios) != 1 or 0.0 in ratios:
            return None
        weights += ratios
    pairs = zip(weights, (ONE if w is None else _written(w, names) for w in groups), strict=True)
    return _total(list(pairs), names) * _total(first, names)


# NOTE [Products of sums]
# Where P and S are nearly equal, the terms of (P - S)^2 are much larger than it, and their
# rounding errors may be, too: the sum is negative then, and a square root of it NaN. Terms of two
# factors each have a symmetric matrix of coefficients. They are a product of two sums,
# (u . x) (v . x), if the matrix is (u v' + v u') / 2.
def _product_of_sums(
    polynomial: Polynomial, teacher: int, names: Mapping[int, tuple[Node, Node]]
) -> Node | None:
    """What is common to all terms times (a sum * a sum), if a polynomial is that."""
    common = list(next(iter(polynomial)))
    for m in polynomial:
        common = [x for x in common if common.count(x) <= m.count(x)]
    matrix: dict[tuple[Node, Node], float] = {}
    for m, c in polynomial.items():
        rest = list(m)
        for x in common:
            rest.remove(x)
        if len(rest) > 2:
            return None
        a, b = [*rest, ONE, ONE][:2]
        matrix[a, b] = matrix[b, a] = c if a is b else 0.5 * c
    factors = sorted({a for a, _ in matrix}, key=lambda x: _order(x, teacher))
    sums = _sums_of(matrix, factors)
    if sums is None:
        return None
    nodes = {x: x if x is ONE else _written(x, names) for x in factors}
    left, right = (_total([(c, nodes[x]) for x, c in s.items()], names) for s in sums)
    total = ONE
    for x in sorted(common, key=lambda x: _order(x, teacher)):
        total = total * _written(x, names)
    return total * (left * right)


def _sums_of(
    matrix: Mapping[tuple[Node, Node], float], factors: Sequence[Node]
) -> list[dict[Node, float]] | None:
    """Two sums of more than a term each, by the coefficients of what they add."""

    def row(a: Node, scale: float) -> dict[Node, float]:
        return {x: scale * matrix[a, x] for x in factors if (a, x) in matrix}

    a = factors[0]
    square = matrix.get((a, a))
    if square is not None:  # of a sum: other products of sums with such a term are rare
        u = row(a, 1.0 / square)
        sums = [u, {x: square * c for x, c in u.items()}]
    else:
        b = next(x for x in factors if (a, x) in matrix)
        v = row(a, 2.0)
        sums = [row(b, 1.0 / matrix[a, b]), v]
    if any(len(s) < 2 for s in sums):
        return None
    u, v = sums
    for x, y in itertools.product(factors, repeat=2):
        pair = 0.5 * (u.get(x, 0.0) * v.get(y, 0.0) + u.get(y, 0.0) * v.get(x, 0.0))
        if not math.isclose(pair, matrix.get((x, y), 0.0), rel_tol=1e-9):
            return None
    return sums


def _order(x: Node, teacher: int) -> tuple[int, bool]:
    kind = 0 if is_weight(x) else 1 if is_log(x) else 2
    return kind, kind < 2 and number_of(x) != teacher


def _total(terms: Sequence[tuple[float, Node]], names: Mapping[int, tuple[Node, Node]]) -> Node:
    """A sum as people write it: P before S, and what is subtracted last."""
    first = {x: i for i, (p, log) in enumerate(names.values()) for x in (p, log)}

    def rank(term: tuple[float, Node]) -> tuple[bool, int, str]:
        return term[0] < 0.0, first.get(term[1], 2), repr(term[1])

    total = const(0.0)
    for c, x in sorted(terms, key=rank):
        part = x if abs(c) == 1.0 else const(abs(c)) * x
        total = total - part if c < 0.0 else total + part
    return total


def _written(x: Node, names: Mapping[int, tuple[Node, Node]]) -> Node:
    """An expression in canonical form as one of the operations that divergences have."""
    return rebuilt_root(x, lambda y, args: _written_one(y, args, names))


def _written_one(x: Node, args: Sequence[Node], names: Mapping[int, tuple[Node, Node]]) -> Node:
    match x.op:
        case "const":
            return const(x.value)
        case "logP":
            return names[int(x.value)][1]
        case "linear":
            constant, terms = terms_of(x)
            written = zip((c for c, _ in terms), args, strict=True)
            return _total(list(written), names) + const(constant)
        case "product":
            total = args[0]
            for a in args[1:]:
                total = total * a
            return total
        case "logaddexp" if len(args) == 2:
            teacher = next(iter(names.values()))[1]
            return apply("logaddexp", *sorted(args, key=lambda a: teacher not in walk([a])))
        case "logaddexp":
            raise NoForm("a mixture of more than two distributions", x)
        case "minimum" | "maximum" if set(args) == {P, S}:
            sign = const(-1.0 if x.op == "minimum" else 1.0)
            return const(0.5) * (P + S + sign * apply("abs", P - S))
        case "pow":
            return apply("exp", apply("log", args[0]) * const(x.value))
        case "not":
            return args[0]  # its `where` swaps the branches
        case "where" if x.args[0].op == "not":
            return apply("where", args[0], args[2], args[1])
    if x.op == "round":
        raise NoForm(f"probabilities are rounded to {x.value}", x)
    if x.op not in OPERATIONS:
        raise NoForm(f"the formula has {x.op}, an operation that divergences have not", x)
    return apply(x.op, *args)


@functools.lru_cache(maxsize=1024)  # models repeat a loss in their layers
def value_at(formula: Node, log_p: float, log_s: float) -> float:
    """Returns a divergence at one key, of the logarithms of its probabilities."""
    with unset_fake_temporarily():
        logs = {"logP": exact(log_p), "logS": exact(log_s)}
        return float(evaluate(formula, {"P": logs["logP"].exp(), "S": logs["logS"].exp(), **logs}))


# NOTE [What is left of 1]
# Kernels of divergences keep one log-sum-exp of a row, and compute a probability as the
# exponential of a difference of large numbers: next to scores of 90 it may be 1 + 4e-6. That is
# good enough for what changes slowly with it. The gradient of log(1 - p + 1e-6) would be 1e5 times
# too large, of either sign. A row program keeps the maximum and the logarithm of the sum apart.
NEAR_ONE = "the formula divides by what a probability leaves of 1, or takes its logarithm"
NEARLY_ZERO = 1e-2  # beside the value at a probability of 1/2
LOGS = 0.0, math.log(0.5), -math.inf  # of the probabilities at which arguments are looked at


@functools.lru_cache(maxsize=256)
def divides_rest_of_one(formula: Node) -> bool:
    """Whether a divergence grows where a probability is nearly 1: NOTE [What is left of 1]."""
    arguments = [a for x in walk([formula]) if x.op in GROWS for a in x.args[GROWS[x.op] :]]
    of_probabilities = [a for a in arguments if any(y.op in ("P", "S", "exp") for y in walk([a]))]
    return any(
        _vanishes_at_one(argument, log_p, log_s)
        for argument in of_probabilities
        for log_p, log_s in itertools.product(LOGS, repeat=2)
    )


def _vanishes_at_one(argument: Node, log_p: float, log_s: float) -> bool:
    """Whether an argument is nearly 0, and not if a probability of 1 were 1/2."""
    half = LOGS[1]
    moved = [(half, log_s)] * (log_p == 0.0) + [(log_p, half)] * (log_s == 0.0)
    value = abs(value_at(argument, log_p, log_s))
    return any(value < NEARLY_ZERO * abs(value_at(argument, *logs)) for logs in moved)


def functional_of(formula: Node) -> Functional:
    """Returns a divergence as implementations have it."""
    if length_of(formula) > LONGEST:
        raise NoForm("the formula has too many operations for a divergence", formula)
    if divides_rest_of_one(formula):
        raise NoForm(NEAR_ONE, formula)
    try:
        return Functional.of(render(formula))
    except (ValueError, KeyError) as reason:
        raise NoForm(f"the formula has an operation that divergences have not: {reason}") from None
