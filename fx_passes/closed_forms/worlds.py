"""Judges what is summed over keys at allowed keys, at removed keys, and in rows without keys.

NOTE [Worlds]
A sum over keys is one expression of probabilities, but conditions may choose between several. Each
condition is decided in a world, which is what is known of a key:

- allowed: the mask holds, the row has a key, scores are finite, probabilities are positive;
- removed: the mask does not hold, the probability is 0 and its logarithm -inf, or the fill;
- empty: the mask holds at no key of the row. A finite fill makes its probabilities uniform.

At allowed keys the divergence is read. At removed keys the expression has to be 0. In an empty row
a condition either leaves nothing, or it is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch_streamkl.fx_passes.closed_forms.form import NoForm, is_of_products
from torch_streamkl.fx_passes.closed_forms.masks import meets_some_key
from torch_streamkl.fx_passes.closed_forms.row_sites import is_elementwise
from torch_streamkl.fx_passes.closed_forms.score_form import IMPROBABLE, Condition, ScoreForm
from torch_streamkl.program import operations
from torch_streamkl.program.canonical import all_of, literals, negation
from torch_streamkl.program.graph import ANY, BOOL, Axis, Node
from torch_streamkl.program.reductions import assume, opened, remade
from torch_streamkl.program.walks import has_op, rebuilt_root, walk

LOG = "logP"
LARGEST_SPREAD = 60.0  # of what is added to scores: exp(-60) and scores are far from underflow
LOG_OF_UNDERFLOWN = -800.0  # the logarithm of a probability that is 0 in every dtype
_HIDDEN = -1e8  # scores that are compared with a lower number are asked whether they are masked


@dataclass(frozen=True)
class World:
    """Holds what is known of a key."""

    key: Axis
    holds: Condition = frozenset()
    unmet: tuple[Condition, ...] = ()  # of each, not all conditions hold
    empty: tuple[Condition, ...] = ()  # which no key of the row meets
    logs: Mapping[int, float] = field(default_factory=dict)  # log-probabilities that are known
    is_allowed: bool = False
    unbounded: frozenset[int] = frozenset()  # distributions with scores that a tensor may hide


def mentions_variables(x: Node) -> bool:
    """Returns whether an expression has probabilities."""
    return has_op(x, LOG)


def distributions_in(roots: Iterable[Node]) -> set[int]:
    """Returns the numbers of the distributions whose probabilities expressions have."""
    return {int(y.value) for y in walk(roots) if y.op == LOG}


def decided(condition: Node, world: World) -> bool | None:
    """Returns whether a condition holds, None if that is not known."""
    if condition in world.holds:
        return True
    if negation(condition) in world.holds:
        return False
    match condition.op:
        case "and":
            if any(unmet <= literals(condition) for unmet in world.unmet):
                return False
            if _has_no_key(condition, world):
                return False
            found = [decided(x, world) for x in condition.args]
            return False if False in found else None if None in found else True
        case "or":
            found = [decided(x, world) for x in condition.args]
            return True if True in found else None if None in found else False
        case "not":
            inner = decided(condition.args[0], world)
            return None if inner is None else not inner
        case "reduce":
            return _has_key(condition, world)
        case "gt" | "ge" | "eq":
            return _compared(condition, world)
        case "isinf" | "isnan":
            return _is_no_number(condition, world)
    if any(unmet == {negation(condition)} for unmet in world.unmet):
        return True
    return False if any(unmet <= {condition} for unmet in world.unmet) else None


def _has_no_key(condition: Node, world: World) -> bool:
    """Whether a condition of a row says that a key meets conditions that no key meets."""
    for x in condition.args:
        if x.kind == ANY:
            known = literals(opened(x, world.key)) | (set(condition.args) - {x})
            if any(empty <= known for empty in world.empty):
                return True
    return False


def _is_no_number(condition: Node, world: World) -> bool | None:
    """Whether something is infinite, or NaN."""
    x = condition.args[0]
    if not (is_of_products(x) or mentions_variables(x)):
        return None
    if world.is_allowed:
        return None if _may_be_hidden(x, world) else False
    for unmet in world.unmet:
        x = assume(x, {all_of(*unmet): False})
    found = value_at(x, world)
    if found is None:
        return None
    return math.isinf(found) if condition.op == "isinf" else math.isnan(found)


def _may_be_hidden(x: Node, world: World) -> bool:
    """Whether an expression has probabilities that may be 0 at allowed keys."""
    return any(y.op == LOG and int(y.value) in world.unbounded for y in walk([x]))


def _has_key(condition: Node, world: World) -> bool | None:
    """Whether a condition holds at some key of the row."""
    if condition.kind != ANY:
        return None
    inner = opened(condition, world.key)
    if world.is_allowed and decided(inner, world):
        return True
    if any(empty <= literals(inner) for empty in world.empty):
        return False
    if world.empty and is_of_products(inner) and decided(inner, world) is False:
        return False
    return None


def _compared(condition: Node, world: World) -> bool | None:
    a, b = condition.args
    if is_of_products(condition) and not mentions_variables(condition):
        return _scores_compared(condition, world)
    if not mentions_variables(condition):
        return None
    x, y = value_at(a, world), value_at(b, world)
    if x is not None and y is not None:
        return bool(operations.of_numbers(condition.op, [x, y], [a.dtype, b.dtype]))
    if not world.is_allowed or _may_be_hidden(condition, world):
        return None
    for x_, y_ in ((a, b), (b, a)):  # probabilities are positive, their logarithms finite
        if y_.op != "const":
            continue
        is_probability = x_.op == "exp" and y_.value == 0.0
        is_log = abs(y_.value) == math.inf or (x_.op == LOG and y_.value <= -1e30)
        if not is_probability and not is_log:
            continue
        if condition.op == "eq":
            return False
        is_above = y_.value <= 0.0  # x is above y
        return is_above if x_ is a else not is_above
    return None


def _scores_compared(condition: Node, world: World) -> bool | None:
    """A comparison of scores with a fill: whether a key is masked."""
    a, b = condition.args
    scores, bound = (a, b) if b.op == "const" else (b, a)
    if bound.op != "const":
        return None
    if world.is_allowed:
        if abs(bound.value) != math.inf and bound.value > _HIDDEN:
            return None
        if condition.op == "eq":
            return False
        is_above = bound.value < 0.0
        return is_above if scores is a else not is_above
    for unmet in world.unmet:
        fill = assume(scores, {all_of(*unmet): False})
        if fill.op == "const":
            ends = [fill.value if x is scores else x.value for x in (a, b)]
            return bool(operations.of_numbers(condition.op, ends, ["float", "float"]))
    return None


def settled(x: Node, world: World) -> Node:
    """Returns an expression with the branches that its conditions choose in a world."""

    def change(y: Node, args: tuple[Node, ...]) -> Node:
        if y.op == "where":
            holds = decided(y.args[0], world)
            if holds is not None:
                return args[1] if holds else args[2]
        return remade(y, args)

    return rebuilt_root(x, change, is_formula)


def is_formula(x: Node) -> bool:
    """Returns whether an expression is computed from parts, and is no condition or capture."""
    return x.dtype != BOOL and is_elementwise(x)


def value_at(x: Node, world: World) -> float | None:
    """Returns an expression's number in a world, None if it is not known.

    A product is 0 if a factor is: NOTE [Zero annihilates] in program/graph.py.
    """
    found: dict[Node, float | None] = {}
    for y in walk([x], is_formula):
        found[y] = _value(y, [found.get(a) for a in y.args], world)
    return found[x]


def _value(x: Node, args: Sequence[float | None], world: World) -> float | None:
    match x.op:
        case "const":
            return float(x.value)
        case "logP":
            return world.logs.get(int(x.value))
        case "product" if 0.0 in args:
            return 0.0
        case "where":
            holds = decided(x.args[0], world)
            if holds is not None:
                return args[1] if holds else args[2]
            return args[1] if args[1] == args[2] else None
    if x.dtype == BOOL or not args or None in args:
        return None
    values = [a for a in args if a is not None]
    match x.op:
        case "linear":
            terms = zip(x.value[1], values, strict=True)
            return float(x.value[0] + sum(c * v for c, v in terms))
        case "product":
            return math.prod(values)
        case "logaddexp" if len(values) > 2:
            return None
        case "pow":
            return None
    if x.op not in operations.OPERATIONS:
        return None
    return operations.of_numbers(x.op, values, ["float"] * len(values))


def vanishes(x: Node, key: Axis, world: World | None = None) -> bool:
    """Returns whether an expression is 0 where all distributions have the same probability."""
    numbers = distributions_in([x])
    known = world or World(key)
    for p in (1.0, 0.5, 0.1, 1e-3):
        logs = dict.fromkeys(numbers, math.log(p))
        found = value_at(x, replace(known, logs=logs))
        if found is None or abs(found) > 1e-12:
            return False
    return True


# ------------------------------------------------------------------------ the judgement


@dataclass(frozen=True)
class Judgement:
    """Says what a sum over keys is: its divergence at allowed keys, and what masks do to it."""

    expr: Node
    drops_rows: bool = False  # rows without keys count as 0, whatever the fill
    within: int | None = None  # the distribution whose keys are summed, if it has fewer
    is_zero_outside: bool = True  # the divergence is 0 at the other keys, without the condition


def has_infinite_bias(form: ScoreForm) -> bool:
    """Returns whether a tensor is added to scores that may hide a key: any, or a mask of -1e4."""
    biases = (*form.biases, *form.inner_biases)
    spread = sum(abs(b.weight) * (b.value.range[1] - b.value.range[0]) for b in biases)
    return spread > LARGEST_SPREAD or any(not b.value.is_finite for b in biases)


def judged(x: Node, forms: Sequence[ScoreForm], key: Axis) -> Judgement:
    """Returns the divergence of an expression of the distributions with these scores."""
    masks = [form.mask for form in forms]
    every = frozenset[Node]().union(*masks)
    unbounded = frozenset(i for i, form in enumerate(forms) if has_infinite_bias(form))
    if unbounded and _are_hidden_together(x, forms, World(key, every)):
        unbounded = frozenset()
    if all(mask == every for mask in masks):
        return _judged_alike(x, forms, every, key, unbounded)
    allowed = World(key, holds=every, is_allowed=True, unbounded=unbounded)
    on = settled(x, allowed)
    if on is x:
        return Judgement(x)
    for i, mask in enumerate(masks):
        if mask != every:
            continue
        others = [m for m in masks if m != every]
        _check_improbable(forms)
        removed = World(key, frozenset.intersection(*others), (every,), logs=_absent(forms, [i]))
        both = World(key, unmet=(every, *others), logs=_absent(forms, range(len(forms))))
        if value_at(x, removed) == 0.0 and value_at(x, both) == 0.0:
            if not meets_some_key(mask, key):
                _check_empty(x, forms[i], World(key, unmet=(every,), empty=(every,)))
            return Judgement(on, within=i, is_zero_outside=value_at(on, removed) == 0.0)
    raise NoForm("teacher and student are masked differently", x)


def _are_hidden_together(x: Node, forms: Sequence[ScoreForm], world: World) -> bool:
    """Whether the same tensors hide keys of all distributions, and an expression is 0 there."""
    every = {(form.biases, form.inner_biases) for form in forms}
    numbers = range(len(forms))
    return len(every) == 1 and all(
        value_at(x, replace(world, logs=dict.fromkeys(numbers, log))) == 0.0
        for log in (-math.inf, LOG_OF_UNDERFLOWN)
    )


def _check_empty(x: Node, form: ScoreForm, empty: World) -> None:
    """Raises NoForm if rows without keys count: their probabilities are uniform, the operator's 0.

    Without a finite fill they are NaN in eager code.
    """
    if form.fill != -math.inf and value_at(settled(x, empty), empty) != 0.0:
        raise NoForm("rows whose keys are all masked on one side have a part in the divergence", x)


def _absent(forms: Sequence[ScoreForm], of: Sequence[int]) -> dict[int, float]:
    """The log-probabilities of removed keys."""
    return {i: -math.inf if forms[i].fill <= IMPROBABLE else math.nan for i in of}


def _judged_alike(
    x: Node,
    forms: Sequence[ScoreForm],
    mask: Condition,
    key: Axis,
    unbounded: frozenset[int],
) -> Judgement:
    on = settled(x, World(key, holds=mask, is_allowed=True, unbounded=unbounded))
    if on is x or not mask:
        return Judgement(on)
    logs = _absent(forms, range(len(forms)))
    removed = World(key, unmet=(mask,), logs=logs)
    if value_at(x, removed) != 0.0:
        raise NoForm("a condition in the sum has a value at masked keys", x)
    if all(form.fill == -math.inf for form in forms):
        return Judgement(on)  # a row without keys has NaN in eager code
    _check_improbable(forms)
    empty = World(key, unmet=(mask,), empty=(mask,))
    left = settled(x, empty)
    if left is on:
        return Judgement(on)
    if not vanishes(left, key, empty):
        raise NoForm(
            "a mask after the softmax covers only a part of a divergence that is not 0 for equal "
            "distributions",
            x,
        )
    return Judgement(on, drops_rows=not vanishes(on, key))


def _check_improbable(forms: Sequence[ScoreForm]) -> None:
    for form in forms:
        if form.mask and form.fill > IMPROBABLE:
            raise NoForm(
                f"a mask on keys is applied after the softmax, and before it with {form.fill:g}, "
                "which does not remove a key"
            )
