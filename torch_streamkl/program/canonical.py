"""Normalises expressions over real numbers, so that a program is recognised in any spelling.

The canonical form of an expression is one node. Sums are `linear` (a number and sorted
coefficients), and products have all of their factors. Comparisons of positions are ``expression >=
0``, and conditions are conjunctions. A score minus its own log-sum-exp is the atom `log_softmax`,
and a fill is the right argument of its `where`. The axis of a reduction is named by the depth of
the reductions inside, so that equal reductions are one node.

NOTE [What the normal form may change]
It is exact for real numbers. If a row has no key, or something is infinite, it may have a number
where the written expression has NaN. Kernels compute the written expression. Code that replaces
one by the other has to know that nothing observes the difference (fx_passes/planning).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_streamkl.program import operations
from torch_streamkl.program.graph import (
    BOOL,
    CONTRACT,
    FLOAT,
    INT,
    LOGSUMEXP,
    Axis,
    Extent,
    Node,
    const,
    index,
    intern,
    made,
    size_of,
    widened,
)
from torch_streamkl.program.ranges import EVERY, UNIT, Range, product_range, times
from torch_streamkl.program.walks import walk

ONE_OR_ZERO = [("const", 1.0), ("const", 0.0)]
ADDED = "added"  # the value of a `where`: NOTE [Masks that are added]
# In float32, scores next to a larger number have less than three decimals left.
LARGEST_SHIFT = 1e4
LARGEST_EXPONENT = 80.0  # e^80 is a number in every type that programs compute in
EVEN_OR_ODD = ("sinh", "cosh")
GROWING = ("exp", "exp2", "expm1", *EVEN_OR_ODD)
SINGULAR = ("log", "sqrt", "div", "pow")
ELEMENTS = (CONTRACT, "dot", "log_softmax", "logP", "logS")  # scores, and what is made of them
TINY = 1e-12  # of a coefficient that rounding has left over, relative to what cancelled


class _Reductions:
    """Holds what reductions.py defines: its bodies are sums, and sums have reductions in them."""

    substitute: Callable[[Node, Mapping[Axis, Node]], Node]
    reopened: Callable[[str, Node, Node], Node]
    assume: Callable[..., Node]


REDUCTIONS = _Reductions()


def node(
    op: str,
    args: Sequence[Node],
    value: Any = None,
    dtype: str = FLOAT,
    range: Range = EVERY,
    is_finite: bool | None = None,
) -> Node:
    """Returns a node as it is, with the axes of its arguments."""
    axes = frozenset[Axis]().union(*(a.axes for a in args))
    finite = all(a.is_finite for a in args) if is_finite is None else is_finite
    return intern(op, tuple(args), value, dtype, axes, finite, range)


# ------------------------------------------------------------------------ sums and products


def terms_of(x: Node) -> tuple[float, list[tuple[float, Node]]]:
    """Returns an expression as a number and coefficients of others."""
    if x.op == "linear":
        return x.value[0], list(zip(x.value[1], x.args, strict=True))
    return (x.value, []) if x.op == "const" else (0.0, [(1.0, x)])


def factors_of(x: Node) -> tuple[Node, ...]:
    """Returns the factors of a product, or an expression as its only one."""
    return x.args if x.op == "product" else (x,)


def linear(constant: float, terms: Sequence[tuple[float, Node]]) -> Node:
    """Returns ``constant + sum of coefficient * expression``: the form of + - and scales.

    A sum inside of it becomes part of it, unless their numbers become one that has lost the digits
    of the smaller: ``(1 - p) + 1e-8`` is not ``1.00000001 - p``, which is 0 where p is 1.
    """
    total: dict[Node, float] = {}
    largest: dict[Node, float] = {}
    is_apart = _loses_digits([constant, *(k for c, x in terms for k in _numbers_of(c, x))])
    todo = list(terms)
    while todo:
        c, x = todo.pop()
        if c == 0.0:
            continue
        if x.op == "const":
            constant += c * x.value
        elif x.op == "linear" and not (is_apart and x.value[0]):
            constant += c * x.value[0]
            todo += [(c * k, y) for k, y in zip(x.value[1], x.args, strict=True)]
        else:
            x = numeric(x)
            total[x] = total.get(x, 0.0) + c
            largest[x] = max(largest.get(x, 0.0), abs(c))
    total = {x: c for x, c in total.items() if abs(c) > TINY * largest[x]}
    constant, total = _with_log_softmax(constant, total)
    if (whole := _undivided(constant, total)) is not None:
        return whole
    if (masked := _in_masks(constant, total)) is not None:
        return masked
    if (choice := _of_two_numbers(constant, total)) is not None:
        return choice
    is_int = all(x.dtype == INT for _, x in terms) and _is_whole(constant, *total.values())
    dtype = INT if is_int else FLOAT
    if not total:
        return const(constant, dtype)
    items = sorted(total.items(), key=lambda item: item[0].digest)
    if constant == 0.0 and len(items) == 1 and items[0][1] == 1.0:
        return items[0][0]
    value = (float(constant) + 0.0, tuple(float(c) for _, c in items))
    return node("linear", [x for x, _ in items], value, dtype, _linear_range(constant, items))


def _numbers_of(c: float, x: Node) -> list[float]:
    """The numbers that a term adds to a sum."""
    if x.op == "const":
        return [c * float(x.value)]
    if x.op != "linear":
        return []
    inside = zip(x.value[1], x.args, strict=True)
    return [c * x.value[0], *(n for k, y in inside for n in _numbers_of(c * k, y))]


def _loses_digits(numbers: Sequence[float]) -> bool:
    """Whether the sum of numbers has less than five digits of the smallest, in float32."""
    parts = [abs(x) for x in numbers if x]
    if len(parts) < 2 or max(parts) > LARGEST_SHIFT or _is_whole(*parts):
        return False
    (rounded,) = struct.unpack("f", struct.pack("f", math.fsum(numbers)))
    return abs(math.fsum([rounded, *(-x for x in numbers)])) > 1e-5 * min(parts)


def _undivided(constant: float, total: Mapping[Node, float]) -> Node | None:
    """A sum with ``n * (x // n) + x % n``, which is x."""
    for rest in total:
        if rest.op != "remainder":
            continue
        x, n = rest.args
        for y, c in total.items():
            of_size = y.op == "product" and len(y.args) == 2 and n in y.args
            part = next((a for a in y.args if a is not n), y) if of_size else y
            times = float(n.value) if n.op == "const" else 1.0
            is_of_part = part.op == "floor_divide" and part.args == rest.args
            if is_of_part and (of_size or n.op == "const") and c == times * total[rest]:
                others = [(k, z) for z, k in total.items() if z is not y and z is not rest]
                return linear(constant, [*others, (total[rest], x)])
    return None


def _is_whole(*numbers: float) -> bool:
    """Returns whether numbers are integers that a float64 holds: the lowest number is none."""
    return all(abs(x) < 2.0**53 and x == int(x) for x in numbers)


def _linear_range(constant: float, items: Sequence[tuple[Node, float]]) -> Range:
    low = high = constant
    rest = dict(items)
    for x, c in items:  # an index and its own size: n - 1 - i is at least 0
        size = x.value.size if x.op == "index" else None
        if not isinstance(size, Extent):
            continue
        n = size_of(size)
        take = -c
        if rest.get(n, 0.0) * take > 0.0 and abs(rest[n]) >= abs(take):
            rest[n] -= take
            del rest[x]
            low, high = (low + take, math.inf) if take > 0 else (-math.inf, high + take)
    for x, c in rest.items():
        ends = [times(c, bound) for bound in x.range]
        low, high = low + min(ends), high + max(ends)
    return low, high


def _with_log_softmax(
    constant: float, total: dict[Node, float]
) -> tuple[float, dict[Node, float]]:
    """x - lse(x) as one atom, however it was spelt."""
    for lse in [x for x in total if x.kind == LOGSUMEXP]:
        c, size = total[lse], lse.value.axis.size
        free = {a for x in total for a in x.axes if a.size is size or a.size == size} - lse.axes
        for axis in sorted(free, key=repr):
            x = REDUCTIONS.substitute(lse.args[0], {lse.value.axis: index(axis)})
            k0, terms = terms_of(x)
            if terms and all(_cancels(total.get(t, 0.0), c * k) for k, t in terms):
                total = {y: v for y, v in total.items() if y is not lse}
                for _, t in terms:
                    total.pop(t)
                atom = log_softmax(x, axis)
                total[atom] = total.get(atom, 0.0) - c
                constant += c * k0
                break
    return constant, total


def is_removed(x: Node) -> bool:
    """Returns whether an expression is -inf where some condition does not hold."""
    return x.op == "where" and x.args[2].op == "const" and x.args[2].value == -math.inf


def _in_masks(constant: float, total: dict[Node, float]) -> Node | None:
    """A sum with a mask of -inf that was added, as what the mask is applied to.

    What has all axes of the condition stands inside of its `where`, the rest outside: shifts of a
    row are not hidden by a mask of its keys.

    NOTE [Masks that are added]
    The gradient of what is added flows at all keys, also at those that a mask removes. That of
    what a mask fills does not. So a `where` of an added mask is marked, if its scores are trained.
    """
    masks = {x: c for x, c in total.items() if c > 0.0 and is_removed(x)}
    condition = all_of(*(x.args[0] for x in masks))
    rest = [(c, x) for x, c in total.items() if x not in masks]
    filled = {x.args[0] for x in masks if x.args[1].flows and x.value != ADDED}
    if filled:
        trained = any(x.flows for _, x in rest) or any(x.value == ADDED for x in masks)
        if trained or {condition} != filled:
            return None
    if len(masks) < 2 and not (masks and any(condition.axes <= x.axes for _, x in rest)):
        return None
    inside = linear(constant, [*rest, *((c, x.args[1]) for x, c in masks.items())])
    found = choose(condition, inside, const(-math.inf))
    return found if filled else as_added(found)


def as_added(x: Node) -> Node:
    """Returns what a mask removes keys of, marked as one that the mask was added to."""
    if x.op == "linear":
        return linear(x.value[0], [(c, as_added(y)) for c, y in terms_of(x)[1]])
    if not is_removed(x) or not x.args[1].flows:
        return x
    return intern(x.op, x.args, ADDED, x.dtype, x.axes, x.is_finite, x.range)


def _of_two_numbers(constant: float, total: Mapping[Node, float]) -> Node | None:
    """A number and a multiple of a choice of two, as one choice: 1 - mask as the opposite mask.

    It is added to scores as a whole: scores next to 1e4 * mask have few digits left, next to
    1e4 * mask - 1e4 they have theirs where it is 0.
    """
    if len(total) != 1 or not constant or not math.isfinite(constant):
        return None
    ((x, c),) = total.items()
    if x.op != "where" or any(y.op != "const" or math.isinf(y.value) for y in x.args[1:]):
        return None
    a, b = (constant + c * y.value for y in x.args[1:])
    dtype = INT if x.dtype == INT and _is_whole(a, b) else FLOAT
    if a == 0.0 or b == 0.0:  # NaN is neither
        one, zero = const(1.0, dtype), const(0.0, dtype)
        return scaled(a or b, choose(x.args[0], one if a else zero, zero if a else one))
    return choose(x.args[0], const(a, dtype), const(b, dtype))


def _cancels(a: float, b: float) -> bool:
    return abs(a + b) <= TINY * abs(b)


def log_softmax(x: Node, axis: Axis) -> Node:
    """Returns the atom ``x - logsumexp(x)`` along an axis."""
    return node("log_softmax", [x], axis, range=(-math.inf, 0.0), is_finite=False)


def scaled(c: float, x: Node) -> Node:
    """Returns a multiple."""
    return linear(0.0, [(c, x)])


def subtracted(a: Node, b: Node) -> Node:
    """Returns a difference."""
    return linear(0.0, [(1.0, a), (-1.0, b)])


def numeric(x: Node) -> Node:
    """Returns a condition as 1 and 0."""
    return choose(x, const(1.0), const(0.0)) if x.dtype == BOOL else x


def product(*factors: Node) -> Node:
    """Returns a product. What multiplies 1 and 0 of a condition is a `where` of it."""
    c, found = 1.0, list[Node]()
    todo = list(factors)
    while todo:
        x = numeric(todo.pop())
        if x.op == "const":
            c *= x.value
        elif x.op == "linear" and x.value[0] == 0.0 and len(x.args) == 1:
            c *= x.value[1][0]
            todo.append(x.args[0])
        elif x.op == "product":
            todo += x.args
        else:
            found.append(x)
    if c == 0.0:
        return const(0.0)
    masks = [x for x in found if _is_mask(x)]
    if masks:
        rest = [x for x in found if x not in masks]
        return choose(all_of(*(x.args[0] for x in masks)), product(const(c), *rest), const(0.0))
    if len(found) == 1:
        return scaled(c, found[0])
    if not found:
        return const(c)
    found.sort(key=lambda x: x.digest)
    dtype = INT if all(x.dtype == INT for x in found) else FLOAT
    bounds = product_range([x.range for x in found])
    if len(found) == 2 and found[0] is found[1]:
        bounds = max(bounds[0], 0.0), bounds[1]
    return scaled(c, node("product", found, dtype=dtype, range=bounds))


def _is_mask(x: Node) -> bool:
    """Whether an expression is 1 where a condition holds, and 0 elsewhere."""
    return x.op == "where" and [(y.op, y.value) for y in x.args[1:]] == ONE_OR_ZERO


# ------------------------------------------------------------------------ conditions

TRUE = intern("and", (), None, BOOL, frozenset(), True, UNIT)
FALSE = intern("or", (), None, BOOL, frozenset(), True, UNIT)


def _joined(op: str, conditions: Sequence[Node], neutral: Node, other: Node) -> Node:
    found: dict[Node, None] = {}
    for c in conditions:
        found |= dict.fromkeys(c.args if c.op == op else (c,))
    found.pop(neutral, None)
    if other in found or any(c.op == "not" and c.args[0] in found for c in found):
        return other
    if any(c.op == "nonnegative" and negation(c) in found for c in found):
        return other
    if len(found) < 2:
        return next(iter(found), neutral)
    return node(op, sorted(found, key=lambda x: x.digest), None, BOOL, UNIT)


def all_of(*conditions: Node) -> Node:
    """Returns the conjunction."""
    return _joined("and", conditions, TRUE, FALSE)


def any_of(*conditions: Node) -> Node:
    """Returns the disjunction."""
    return _joined("or", conditions, FALSE, TRUE)


def negation(condition: Node) -> Node:
    """Returns the opposite of a condition."""
    match condition.op:
        case "not":
            return condition.args[0]
        case "nonnegative":
            return nonnegative(linear(-1.0, [(-1.0, condition.args[0])]))
        case "or":
            return all_of(*map(negation, condition.args))
        case "and" if not condition.args:
            return FALSE
    return node("not", [condition], None, BOOL, UNIT)


def nonnegative(x: Node) -> Node:
    """Returns whether an integer expression is at least 0, as positions are compared."""
    if x.range[0] >= 0.0:
        return TRUE
    if x.range[1] < 0.0:
        return FALSE
    return node("nonnegative", [x], None, BOOL, UNIT)


def truth(x: Node) -> Node:
    """Returns whether a number is not 0."""
    return x if x.dtype == BOOL else compare("ne", x, const(0.0))


def compare(op: str, a: Node, b: Node) -> Node:
    """Returns a comparison: of integers as what is not negative, of a `where` by its branches."""
    if op in ("lt", "le"):
        return compare({"lt": "gt", "le": "ge"}[op], b, a)
    if op == "ne":
        return negation(compare("eq", a, b))
    if op == "eq" and a.dtype == BOOL and b.op == "const":
        return a if b.value else negation(a)
    if op == "eq" and a is b and a.op != "const":  # so code asks for NaN
        is_number = a.dtype != FLOAT or a.is_finite
        return TRUE if is_number else negation(made("isnan", (a,)))
    for x, y in ((a, b), (b, a)):
        if x.op == "where" and {y.op, x.args[1].op, x.args[2].op} == {"const"}:
            yes, no = (compare(op, *((z, y) if x is a else (y, z))) for z in x.args[1:])
            return any_of(all_of(x.args[0], yes), all_of(negation(x.args[0]), no))
    if a.op == b.op == "const":
        holds = operations.of_numbers(op, [a.value, b.value], [a.dtype, b.dtype])
        return TRUE if holds else FALSE
    if op != "eq" and a.dtype == b.dtype == INT:
        return nonnegative(linear(-1.0 if op == "gt" else 0.0, [(1.0, a), (-1.0, b)]))
    if op == "gt" and a.range[0] > b.range[1]:
        return TRUE
    if op == "eq":
        a, b = sorted((a, b), key=lambda x: (x.op == "const", x.digest))
    return made(op, (numeric(a), numeric(b)))


def literals(condition: Node) -> frozenset[Node]:
    """Returns the conditions of a conjunction."""
    return frozenset(condition.args) if condition.op == "and" else frozenset((condition,))


def has_scores(x: Node) -> bool:
    """Returns whether an expression reads scores of its row's keys, apart from sums of them."""
    return any(y.op in ELEMENTS for y in walk([x], lambda y: y.op != "reduce"))


def keeps_conditions(x: Node) -> bool:
    """Returns whether what is inside of an operation stays as it is written in a branch.

    NOTE [Both branches are computed]
    A `where` computes both branches of each element, and the gradient of what it does not choose
    is 0 times a derivative: NaN, if that is infinite. Code avoids it by another `where` inside, as
    in ``where(x > 20, x, exp(where(x > 20, 0, x)))``; so does a fill that a score and its maximum
    share. So the argument of an exponential stays, unless it is bounded. Logarithms, quotients and
    powers of scores need no condition, because 0 annihilates in programs. Those of values of a row
    and of captured tensors stay: torch computes them.
    """
    if x.op in SINGULAR:
        return not has_scores(x)
    low, high = x.args[0].range if x.op in GROWING else UNIT
    return max(high, -low if x.op in EVEN_OR_ODD else high) > LARGEST_EXPONENT


def _rank(x: Node) -> int:
    """What stands on the right of a `where`: a number, of these 0, and before all -inf."""
    return 0 if x.op != "const" else 3 if x.value == -math.inf else 2 if x.value == 0.0 else 1


def choose(condition: Node, a: Node, b: Node) -> Node:
    """Returns ``where(condition, a, b)``, its branches as they are where it holds or does not.

    A number that fills the rest of an expression stands on the right. What a branch may lose of
    its own conditions: NOTE [Both branches are computed].
    """
    if condition is TRUE or a is b:
        return a
    if condition is FALSE:
        return b
    a, b = widened(a, b)
    if _rank(a) > _rank(b) or (condition.op == "not" and _rank(a) == _rank(b)):
        return choose(negation(condition), b, a)
    a = REDUCTIONS.assume(a, dict.fromkeys(literals(condition), True), is_branch=True)
    b = REDUCTIONS.assume(b, {condition: False}, is_branch=True)
    if b.op == "const" and a.op == "where" and a.args[2] is b and a.value != ADDED:
        return choose(all_of(condition, a.args[0]), a.args[1], b)
    if a is b:
        return a
    if b.op == "const" and b.value == -math.inf:
        constant, terms = terms_of(a)
        outside = [(c, x) for c, x in terms if not condition.axes <= x.axes]
        if math.isfinite(constant) and (constant or outside):
            inside = linear(0.0, [(c, x) for c, x in terms if condition.axes <= x.axes])
            return linear(constant, [*outside, (1.0, choose(condition, inside, b))])
    dtype = a.dtype if a.dtype == b.dtype else FLOAT
    bounds = min(a.range[0], b.range[0]), max(a.range[1], b.range[1])
    return node("where", [condition, a, b], None, dtype, bounds)
