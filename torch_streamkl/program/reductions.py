"""Reduces and substitutes in canonical form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch_streamkl.program import graph
from torch_streamkl.program.canonical import (
    ADDED,
    FALSE,
    LARGEST_SHIFT,
    REDUCTIONS,
    TRUE,
    all_of,
    any_of,
    as_added,
    choose,
    compare,
    keeps_conditions,
    linear,
    literals,
    log_softmax,
    negation,
    node,
    nonnegative,
    product,
    scaled,
    subtracted,
    terms_of,
)
from torch_streamkl.program.fresh_axes import fresh_axis
from torch_streamkl.program.functions import (
    exponential,
    function,
    log_add_exp,
    logarithm,
    quotient,
)
from torch_streamkl.program.graph import (
    ANY,
    ARGMAX,
    BOUND,
    CONTRACT,
    FLOAT,
    INT,
    LOGSUMEXP,
    MAX,
    SUM,
    Axis,
    Node,
    Source,
    const,
    index,
    reduce,
    size_of,
)
from torch_streamkl.program.masks import has_score, kept_by
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.ranges import EVERY
from torch_streamkl.program.renaming import names_of, renamed
from torch_streamkl.program.shifts import LARGE, is_shifted, multiple, small_shifts
from torch_streamkl.program.walks import rebuilt, walk

Theta = Mapping[Axis, Node]
ATOMS = ("dot", "reduce", "capture", "log_softmax", CONTRACT)


def assume(x: Node, facts: Mapping[Node, bool], *, is_branch: bool = False) -> Node:
    """Returns the expression where conditions are known to hold, or not to hold.

    A branch is also computed where they are not: NOTE [Both branches are computed].
    """
    facts = {**{negation(y): not holds for y, holds in facts.items()}, **facts}

    def is_entered(y: Node) -> bool:
        return y.op not in ATOMS and not (is_branch and keeps_conditions(y))

    def change(y: Node, args: tuple[Node, ...]) -> Node:
        if y in facts:
            return TRUE if facts[y] else FALSE
        if y.op == "and" and y.args and all(facts.get(z) for z in y.args):
            return TRUE
        return remade(y, args)

    if not facts or not _has(x, facts, is_entered):
        return x
    return rebuilt([x], change, lambda y: is_entered(y) and y not in facts)[x]


MOST_SEARCHED = 256  # nodes: in larger expressions, conditions deep inside stay as they are


def _has(x: Node, facts: Mapping[Node, bool], is_entered: Callable[[Node], bool]) -> bool:
    todo, seen = [x], {x}
    while todo and len(seen) < MOST_SEARCHED:
        y = todo.pop()
        if y in facts:
            return True
        new = [a for a in y.args if a not in seen] if is_entered(y) else []
        seen.update(new)
        todo += new
    return False


# ------------------------------------------------------------------------ reductions


def reduced(kind: str, axis: Axis, body: Node) -> Node:
    """Returns a reduction over an axis, which becomes bound. What does not vary goes outside."""
    if axis not in body.axes and (body.op != "const" or axis.size is not None):
        if kind in (MAX, ANY):
            return body
        if kind == ARGMAX:
            return const(0.0, INT)
        if kind == SUM and axis.size is not None:
            return product(size_of(axis.size), body)
        if kind == LOGSUMEXP and isinstance(axis.size, int):
            return linear(math.log(axis.size), [(1.0, body)]) if axis.size else const(-math.inf)
    rule = {SUM: _sum, LOGSUMEXP: _log_sum_exp, ANY: _any}.get(kind, lambda axis, body: None)
    if (simple := rule(axis, body) or _unrolled(kind, axis, body)) is not None:
        return simple
    level = body.level + 1
    while Axis((BOUND, level), axis.size) in body.axes:  # of a reduction that this is inside of
        level += 1
    bound = Axis((BOUND, level), axis.size)
    return reduce(kind, bound, substitute(body, {axis: index(bound)}))


MOST_UNROLLED = 4  # positions along an axis that no tensor has, as of tensors that were stacked


def _unrolled(kind: str, axis: Axis, body: Node) -> Node | None:
    """A reduction over what a few expressions were stacked to: of these."""
    if not isinstance(axis.size, int) or axis.size > MOST_UNROLLED or kind not in (SUM, LOGSUMEXP):
        return None
    if any(axis in x.axes for x in walk([body]) if x.op in ("capture", CONTRACT)):
        return None
    parts = [substitute(body, {axis: const(i, INT)}) for i in range(axis.size)]
    return linear(0.0, [(1.0, x) for x in parts]) if kind == SUM else log_add_exp(*parts)


def _log_sum_exp(axis: Axis, body: Node) -> Node | None:
    """A small shift of a row leaves the log-sum-exp; that of a log-softmax is 0.

    A number stays that makes a large tensor a mask: scores next to 1e9 * mask have no digits left,
    those next to 1e9 * mask - 1e9 have.
    """
    if body.op == "log_softmax" and body.value == axis:
        return const(0.0)
    if body.op == "where":
        return _log_sum_exp_beside(axis, *body.args)
    constant, terms = terms_of(body)
    outside = small_shifts(terms, axis)
    inside = [term for term in terms if term not in outside]
    multiples = [multiple(c, t) for c, t in inside]
    is_masked = any(abs(m) >= LARGE and m * constant < 0.0 for m in multiples)
    kept = constant if is_masked or abs(constant) > LARGEST_SHIFT else 0.0
    shift = constant - kept
    if any(axis in t.axes for _, t in inside) and (shift or outside):
        lse = reduced(LOGSUMEXP, axis, linear(kept, inside))
        return linear(shift, [*outside, (1.0, lse)])
    return None


def _log_sum_exp_beside(axis: Axis, condition: Node, a: Node, b: Node) -> Node | None:
    """A log-sum-exp whose first or last element is another one, as a sink next to the keys."""
    last = axis.size - 1 if isinstance(axis.size, int) else 0
    for start, c in ((0, -1.0), (1, 1.0)) if last > 0 else ():
        here = nonnegative(linear(-1.0 if start else last - 1.0, [(c, index(axis))]))
        inside, other = (a, b) if condition is here else (b, a)
        if condition in (here, negation(here)) and other.op != "const":
            rest = fresh_axis(last)
            at = linear(float(start), [(1.0, index(rest))])
            whole = reduced(LOGSUMEXP, rest, substitute(inside, {axis: at}))
            return log_add_exp(whole, substitute(other, {axis: const(last - last * start, INT)}))
    return None


def _sum(axis: Axis, body: Node) -> Node | None:
    """Factors of the row leave the sum; a softmax sums to 1 if its row has a key."""
    constant, terms = terms_of(body)
    if constant or len(terms) != 1:
        return None
    c, x = terms[0]
    if c != 1.0:
        return scaled(c, reduced(SUM, axis, x))
    if _is_softmax(x, axis):
        kept = reduced(ANY, axis, has_score(x.args[0].args[0]))
        return choose(kept, const(1.0), const(0.0))
    if x.kind == SUM:  # over heads, and then over keys: the keys first
        free = fresh_axis(x.value.axis.size)
        inside = opened(x, free)
        if _is_softmax(inside, axis):
            return reduced(SUM, free, reduced(SUM, axis, inside))
    if x.op == CONTRACT:
        return contraction(x.args[0], x.args[1], [*x.value, axis])
    if x.op == "product":
        outside = [f for f in x.args if axis not in f.axes]
        if outside:
            inside = product(*(f for f in x.args if axis in f.axes))
            return product(*outside, reduced(SUM, axis, inside))
    if x.op == "div" and axis not in x.args[1].axes:
        return quotient(reduced(SUM, axis, x.args[0]), x.args[1])
    if x.op == "where" and x.args[2].op == "const" and x.args[2].value == 0.0:
        known = literals(x.args[0])
        outside = [k for k in known if axis not in k.axes]
        rest = all_of(*(known - set(outside)))
        if outside:
            inside = choose(rest, x.args[1], const(0.0))
            return choose(all_of(*outside), reduced(SUM, axis, inside), const(0.0))
        return _sum_of_masked(axis, x.args[0], x.args[1])
    return None


def _sum_of_masked(axis: Axis, condition: Node, y: Node) -> Node | None:
    """A sum of what a mask fills with 0; of a softmax, or of its sum over heads, with that mask
    it is 1.
    """
    known = literals(condition)
    if _is_softmax(y, axis) and kept_by(y.args[0].args[0]) == known:
        return choose(reduced(ANY, axis, condition), const(1.0), const(0.0))
    constant, terms = terms_of(y)
    if not constant and len(terms) == 1 and terms[0][0] != 1.0:
        inside = choose(condition, terms[0][1], const(0.0))
        return scaled(terms[0][0], reduced(SUM, axis, inside))
    if y.kind == SUM:
        free = fresh_axis(y.value.axis.size)
        inside = opened(y, free)
        if _is_softmax(inside, axis) and kept_by(inside.args[0].args[0]) == known:
            inside = choose(condition, inside, const(0.0))
            return reduced(SUM, free, reduced(SUM, axis, inside))
    return None


def _is_softmax(x: Node, axis: Axis) -> bool:
    return x.op == "exp" and x.args[0].op == "log_softmax" and x.args[0].value == axis


def _any(axis: Axis, body: Node) -> Node | None:
    """Whether some position meets a condition: of one on positions, the most favourable."""
    known = literals(body)
    outside = [k for k in known if axis not in k.axes]
    if outside and len(known) > len(outside):
        return all_of(*outside, reduced(ANY, axis, all_of(*(known - set(outside)))))
    if body.op == "nonnegative" and axis.size is not None:
        _, terms = terms_of(body.args[0])
        c = next((c for c, t in terms if t is index(axis)), None)
        if c is not None and sum(axis in t.axes for _, t in terms) == 1:
            last = linear(-1.0, [(1.0, size_of(axis.size))])
            return nonnegative(substitute(body.args[0], {axis: const(0.0) if c < 0 else last}))
    return None


def contraction(a: Node, b: Node, axes: Sequence[Axis]) -> Node:
    """Returns a matmul's element: the sum over axes of a product of two captured tensors.

    Numbers that the operands were multiplied with multiply the score. Both orders of the operands
    and of the axes are one node.
    """
    c, operands = 1.0, list[Node]()
    for x in (a, b):
        constant, terms = terms_of(x)
        if constant or len(terms) != 1:
            raise ValueError(f"a product of {x}, which is no captured tensor times a number")
        c *= terms[0][0]
        operands.append(terms[0][1])
    operands.sort(key=lambda x: repr(x.value))
    places = [t for x in operands for at in x.args for t in walk([at])]
    order = [t.value for t in places if t.op == "index" and t.value in axes]
    order = [*dict.fromkeys(order), *(x for x in axes if x not in order)]
    level = max(x.level for x in operands)
    bound = {x: Axis((BOUND, level + 1 + i), x.size) for i, x in enumerate(order)}
    theta = {x: index(y) for x, y in bound.items()}
    value = tuple(bound.values())
    inside = [substitute(x, theta) for x in operands]
    free = frozenset[Axis]().union(*(x.axes for x in inside)) - frozenset(value)
    return scaled(c, graph.intern(CONTRACT, tuple(inside), value, FLOAT, free))


def reopened(kind: str, reduction: Node, part: Node) -> Node:
    """Creates another reduction over the axis of one, of a part of its body."""
    bound = reduction.value.axis
    free = fresh_axis(bound.size)
    return reduced(kind, free, substitute(part, {bound: index(free)}))


def opened(reduction: Node, axis: Axis) -> Node:
    """Returns the body of a reduction as a function of an axis."""
    return substitute(reduction.args[0], {reduction.value.axis: index(axis)})


# ------------------------------------------------------------------------ substitution


def substitute(x: Node, theta: Theta) -> Node:
    """Returns an expression with index expressions in place of axes.

    This one operation is every view, slice, gather and selection. Of selected keys the
    log-softmax keeps the normaliser of all keys.
    """
    theta = {a: e for a, e in theta.items() if a in x.axes}
    if (names := names_of(x, theta)) is not None:
        return renamed(x, names)
    wanted = frozenset(theta)
    # one walk also enters reductions, unless a position has an axis that may be bound there
    places = frozenset[Axis]().union(*(e.axes for e in theta.values()))
    enters = not any(a.level for a in places)
    # the axis of a log-softmax is bound in its normaliser, under the name that it has outside
    caught = wanted | places

    def change(y: Node, args: tuple[Node, ...]) -> Node:
        if not y.axes & wanted:
            return y
        match y.op:
            case "index":
                return theta[y.value]
            case "log_softmax" if not enters or y.value in caught:
                return _substituted_log_softmax(y, theta)
            case "contract":
                names = {} if enters else {x: fresh_axis(x.size) for x in y.value}
                inner = {**theta, **{x: index(new) for x, new in names.items()}}
                a, b = args if enters else (substitute(x, inner) for x in y.args)
                return contraction(a, b, [names.get(x, x) for x in y.value])
            case "reduce":
                about, free = y.value, fresh_axis(y.value.axis.size)
                if enters:
                    body = renamed(args[0], {about.axis: free})
                else:
                    body = substitute(y.args[0], {**theta, about.axis: index(free)})
                return reduced(about.kind, free, body)
        return remade(y, args)

    def enter(y: Node) -> bool:
        is_opened = y.op in ("reduce", "log_softmax", CONTRACT)
        is_whole = enters and (y.op != "log_softmax" or y.value not in caught)
        return bool(y.axes & wanted) and (is_whole or not is_opened)

    return rebuilt([x], change, enter)[x] if theta else x


def _substituted_log_softmax(x: Node, theta: Theta) -> Node:
    axis, score = x.value, x.args[0]
    place = theta.get(axis, index(axis))
    if place.op == "index" and place.value.size == axis.size:
        others = (theta[a].axes if a in theta else {a} for a in score.axes - {axis})
        if place.value not in frozenset[Axis]().union(*others):  # else it is caught
            return log_softmax(substitute(score, theta), place.value)
    free = fresh_axis(axis.size)
    every = substitute(score, {**theta, axis: index(free)})
    if is_shifted(score, axis):  # the difference would lose the digits of its logarithm
        here = compare("eq", index(free), place)
        return reduced(SUM, free, choose(here, log_softmax(every, free), const(0.0)))
    return subtracted(substitute(score, theta), reduced(LOGSUMEXP, free, every))


def remade(x: Node, args: tuple[Node, ...]) -> Node:
    """Returns a node of canonical form with other arguments, in canonical form."""
    if args == x.args:
        return x
    match x.op:
        case "linear":
            return linear(x.value[0], list(zip(x.value[1], args, strict=True)))
        case "capture":
            axes = frozenset[Axis]() if args else x.axes
            return graph.capture(x.value, x.dtype, axes, args, x.range)
        case "log_softmax":
            return log_softmax(args[0], x.value)
        case "contract":
            return contraction(args[0], args[1], x.value)
        case "reduce":
            return reduce(x.kind, x.value.axis, args[0], x.value.size)
    if x.op == "where" and x.value == ADDED:
        return as_added(choose(*args))
    maker = _MAKERS.get(x.op)
    if maker is not None:
        return maker(*args)
    if x.op in ("gt", "ge", "eq"):
        return compare(x.op, *args)
    if x.op == "pow":
        return graph.made_power(args[0], x.value)
    if x.op in OPERATIONS:
        return function(x.op, *args)
    return node(x.op, args, x.value, x.dtype, x.range, x.is_finite)


_MAKERS: dict[str, Callable[..., Node]] = {
    "product": product,
    "div": quotient,
    "exp": exponential,
    "log": logarithm,
    "where": choose,
    "and": all_of,
    "or": any_of,
    "not": negation,
    "nonnegative": nonnegative,
    "logaddexp": log_add_exp,
}


def detached(x: Node) -> Node:
    """Returns an expression without gradient, which is a property of its captured tensors."""

    def change(y: Node, args: tuple[Node, ...]) -> Node:
        if y.op == "capture" and isinstance(y.value, Source) and y.value.grad_flows:
            source = Source(y.value.name, y.value.version)
            axes = frozenset[Axis]() if args else y.axes
            return graph.capture(source, y.dtype, axes, args, y.range)
        if y.op in ("dot", "capture") and not isinstance(y.value, Source) and y.dtype == FLOAT:
            return node("detach", [y], None, FLOAT, y.range)  # a row program's may be trained
        return y if args == y.args else remade(y, args)

    return rebuilt([x], change, lambda y: y.op != "detach")[x]


def rounded(x: Node, dtype: str) -> Node:
    """Returns a value rounded to a narrower type, or wrapped around, which is not the value."""
    low, high = -math.inf if x.range[0] < 0.0 else 0.0, math.inf if x.range[1] > 0.0 else 0.0
    return node("round", [x], dtype, x.dtype, EVERY if x.dtype == INT else (low, high))


REDUCTIONS.substitute, REDUCTIONS.reopened, REDUCTIONS.assume = substitute, reopened, assume
