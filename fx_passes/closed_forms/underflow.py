"""Checks what conditions on probabilities do where one is 0 by underflow.

At allowed keys a probability is positive, and its logarithm finite (NOTE [Worlds]). So conditions
such as ``p > 0`` are decided. In floating point a probability may be 0 all the same. Then eager
code takes the other branch, and the operator computes the limit of the first: both have to agree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torch_streamkl.fx_passes.closed_forms.form import NoForm
from torch_streamkl.fx_passes.closed_forms.heads import Distribution, aligned
from torch_streamkl.fx_passes.closed_forms.score_form import Condition
from torch_streamkl.fx_passes.closed_forms.worlds import (
    LOG,
    LOG_OF_UNDERFLOWN,
    World,
    decided,
    distributions_in,
    is_formula,
    mentions_variables,
    value_at,
)
from torch_streamkl.program.graph import FLOAT, Axis, Node, const
from torch_streamkl.program.reductions import assume, remade
from torch_streamkl.program.walks import rebuilt_root, walk

HUGE = 1e30
LIKELY = (0.5, 0.1)  # probabilities of the other distributions


def asks_for_zero(
    expr: Node, made: Node, parts: Sequence[Distribution], holds: Condition, key: Axis
) -> tuple[Node, ...]:
    """Returns the scores of distributions for which the logarithm of 0 gives another result.

    No log-softmax is the logarithm of 0, but that of a softmax is.

    ``made`` is the expression with its conditions decided at allowed keys, where the masks hold.
    Raises NoForm if it differs from the expression where a probability is 0, whatever the
    logarithm is.
    """
    if made is expr:
        return ()
    conditions = [condition for condition in _conditions(expr) if mentions_variables(condition)]
    every, asked = distributions_in([expr]), distributions_in(conditions)
    alike = [{n for n in every if aligned(parts, n, number)} for number in sorted(asked)]
    if len(asked) > 1:  # a quotient of sums of them is NaN where all are 0
        alike.append(set().union(*alike))
    world = World(key, holds)
    if any(_differs(expr, made, of, world, LOG_OF_UNDERFLOWN) for of in alike):
        raise NoForm("a condition asks for probabilities that are 0 by underflow", expr)
    guarded = {n for of in alike if _differs(expr, made, of, world, -math.inf) for n in of}
    return tuple(parts[n].score for n in sorted(guarded))


def _differs(expr: Node, made: Node, asked: Collection[int], world: World, log: float) -> bool:
    """Whether eager code has another number, in which the logarithm of 0 is ``log``."""
    numbers = distributions_in([expr])
    for is_met in (True, False):
        eager, ours = (_of_variables(x, world, is_met) for x in (expr, made))
        for p in LIKELY:
            logs = dict.fromkeys(numbers, math.log(p))
            want = value_at(eager, replace(world, logs=logs | dict.fromkeys(asked, log)))
            ours_at = replace(world, logs=logs | dict.fromkeys(asked, LOG_OF_UNDERFLOWN))
            got = _finite_value(ours, ours_at)
            # infinity, or the largest number in its place: the loss is as good as infinite
            if want is None or got is None or not abs(want) < HUGE:
                continue
            if not math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-9):
                return True
    return False


def _finite_value(x: Node, world: World) -> float | None:
    """An expression's number, NaN if a part of it is infinite, which 0 does not annihilate."""
    parts = (value_at(y, world) for y in walk([x], is_formula))
    return math.nan if math.inf in parts else value_at(x, world)


def _conditions(x: Node) -> Iterator[Node]:
    return (y.args[0] for y in walk([x], is_formula) if y.op == "where")


def _of_variables(x: Node, world: World, is_met: bool) -> Node:
    """An expression in which all but the probabilities is known: masks hold, and any number does.

    ``is_met`` is what all conditions are that nothing is known of.
    """
    facts = {}
    for condition in _conditions(x):
        if not mentions_variables(condition):
            known = decided(condition, replace(world, is_allowed=True))
            facts[condition] = is_met if known is None else known
    x = assume(x, facts)

    def change(y: Node, args: tuple[Node, ...]) -> Node:
        is_number = y.dtype == FLOAT and not is_formula(y) and y.op != LOG
        return const(0.75) if is_number else remade(y, args)

    return rebuilt_root(x, change, is_formula)
