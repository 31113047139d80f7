"""Derives expressions by the rules of the table of operations, in both directions.

Both directions stop at reductions over keys, whose values are numbers by then. rows/derive.py
composes the gradient of a whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch_streamkl.program.graph import FLOAT, ZERO, Node, apply, constant, sum_heads
from torch_streamkl.program.operations import OPERATIONS, Build
from torch_streamkl.program.steps import expand_heads, is_inside, is_over_keys
from torch_streamkl.program.walks import walk


class HeadJacobianError(ValueError):
    """Raised for a Jacobian between per-row values of different heads, which is not kept."""


def tangent(root: Node, known: Callable[[Node], Node | None], by: Node | None = None) -> Node:
    """Returns the derivative to a variable; ``known`` says that of some expressions.

    To a per-row value ``by`` of each head it is one for each head, where the root has none.
    """
    found: dict[Node, Node] = {}
    for x in walk([root], is_inside):
        t = known(x)
        found[x] = _tangent(x, found, by) if t is None else t
    return found[root]


def _tangent(x: Node, of: dict[Node, Node], by: Node | None) -> Node:
    total = ZERO
    for position, a in enumerate(x.args):
        if constant(of[a]) == 0:
            continue
        if x.op == "reduce":
            # of R_b of a head, only that head's element is a function
            return of[a] if by is not None and by.head else sum_heads(expand_heads(of[a], a))
        rule = OPERATIONS[x.op].rule
        if rule is None:
            continue
        if by is not None and x.head and by.head and not a.head and _has_summed_heads(a, by):
            raise HeadJacobianError(
                "elements of a head use a sum over heads of what depends on each head's own "
                "per-row values; return the sum and the elements from two programs"
            )
        total = apply("add", total, rule(apply, x, position, of[a]))
    return total


def _has_summed_heads(x: Node, b: Node) -> bool:
    """Whether R_b comes into an expression through a sum over heads."""
    inside = (y for y in walk([x], is_inside) if y.op == "reduce" and not is_over_keys(y))
    return any(b in walk(y.args, is_inside) for y in inside)


def adjoints(seeds: Iterable[tuple[Node, Node]], build: Build = apply) -> dict[Node, Node]:
    """Returns the gradient of a sum to each expression, from that to some; none where it is 0."""
    found: dict[Node, Node] = {}

    def accumulate(x: Node, t: Node, user: Node) -> None:
        """Add what an expression that uses another passes on to it."""
        if constant(t) == 0:
            return
        if user.head and not x.head:
            t = sum_heads(expand_heads(t, user))
        found[x] = build("add", found[x], t) if x in found else t

    given = list(seeds)
    for x, t in given:
        accumulate(x, t, x)
    for x in reversed(walk([x for x, _ in given], is_inside)):
        if x not in found or is_over_keys(x):
            continue
        if x.op == "reduce":
            accumulate(x.args[0], found[x], x)
            continue
        rule = OPERATIONS[x.op].rule if x.op in OPERATIONS else None
        for position, a in enumerate(x.args):
            if rule is not None and a.dtype == FLOAT and a.op != "const":
                accumulate(a, rule(build, x, position, found[x]), x)
    return found
