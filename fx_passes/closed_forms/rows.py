"""Finds the matched losses of a program: its outermost sums over keys, and what is around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch_streamkl.program.canonical import linear, product, quotient
from torch_streamkl.program.graph import BOUND, CONTRACT, SUM, Axis, Node, index
from torch_streamkl.program.reductions import fresh_axis, opened, reduced, remade, substitute
from torch_streamkl.program.walks import rebuilt, walk


def is_outside(x: Node) -> bool:
    """Returns whether the arguments of an expression may have sums over keys."""
    return x.op not in ("capture", CONTRACT, "log_softmax")


def key_sums(roots: Iterable[Node]) -> set[Node]:
    """Returns the sums over the keys of a softmax.

    What a logarithm of probabilities is normalised along, as over heads, are no keys.
    """
    keys: dict[Node, frozenset[Axis]] = {}  # that softmaxes inside of an expression are over
    found = set[Node]()
    for x in walk(roots, lambda x: x.op not in ("capture", CONTRACT)):
        entered = x.args if x.op not in ("capture", CONTRACT) else ()
        keys[x] = frozenset[Axis]().union(*(keys[a] for a in entered))
        if x.op == "log_softmax" and not keys[x]:
            keys[x] = frozenset((x.value,))
        if x.op == "reduce":
            if x.value.kind == SUM and x.value.axis in keys[x]:
                found.add(x)
            keys[x] -= {x.value.axis}
    return found


def keys_first(root: Node) -> Node:
    """Returns a program whose sums over keys are inside of those over rows and heads."""
    wanted = key_sums([root])
    if not any(x.args[0].op == "reduce" and x.args[0].value.kind == SUM for x in wanted):
        return root

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        return _swapped(remade(x, args)) if x in wanted else remade(x, args)

    return rebuilt([root], change, is_outside)[root]


def _swapped(x: Node) -> Node:
    """A sum over keys of a sum over rows as a sum over rows of one over keys."""
    axes, body = list[Axis](), x
    while body.op == "reduce" and body.value.kind == SUM:
        axes.append(fresh_axis(body.value.axis.size))
        body = opened(body, axes[-1])
    if len(axes) < 2:
        return x
    key = axes.pop(0)
    if not any(y.op == "log_softmax" and y.value == key for y in walk([body])):
        return x
    body = reduced(SUM, key, body)
    for axis in reversed(axes):
        body = reduced(SUM, axis, body)
    return body


def sites(root: Node) -> list[Node]:
    """Returns the outermost sums over keys."""
    wanted = key_sums([root])
    order = walk([root], lambda x: is_outside(x) and x not in wanted)
    return [x for x in order if x in wanted]


def renamed_apart(site: Node) -> tuple[Node, dict[Axis, Axis]]:
    """Returns a site with new axes in place of those that sums around it have bound.

    Whatever is made of it may bind axes of the same depth.
    """
    names = {
        a: fresh_axis(a.size)
        for a in sorted(site.axes, key=lambda a: -a.level)
        if isinstance(a.name, tuple) and a.name[0] == BOUND
    }
    return substitute(site, {a: index(b) for a, b in names.items()}), names


@dataclass(frozen=True)
class Joined:
    """Represents sums over keys that are added, as one sum over keys in their place."""

    total: Node  # that they are terms of
    replacement: Node  # the same with one sum
    parts: tuple[Node, ...]
    whole: Node  # what the terms become


def joined(root: Node, failed: Iterable[Node]) -> list[Joined]:
    """Returns the sums over keys that are added to one that is no divergence alone.

    Such parts may be a divergence together: cross-entropy minus entropy.
    """
    wanted, found = set(failed), list[Joined]()
    every = key_sums([root])
    for x in walk([root], lambda x: is_outside(x) and x not in every):
        if x.op != "linear":
            continue
        groups: dict[object, list[tuple[float, Node, Node]]] = {}
        terms = list(zip(x.value[1], x.args, strict=True))
        for c, t in terms:
            around, inside = _unwrapped(t, every)
            sums = every.intersection(_chain(inside))
            if sums:
                key = around, tuple(y.value.axis for y in _chain(inside))
                groups.setdefault(key, []).append((c, t, *sums))
        for (around, _), group in groups.items():  # type: ignore[misc]  # keys are pairs
            parts = tuple(site for *_, site in group)
            if len(parts) < 2 or not wanted.intersection(parts):
                continue
            whole = _one_sum([(c, _unwrapped(t, every)[1]) for c, t, _ in group])
            rest = [(c, t) for c, t in terms if not any(t is y for _, y, _ in group)]
            replacement = linear(x.value[0], [*rest, (1.0, _wrapped(around, whole))])
            found.append(Joined(x, replacement, parts, whole))
    return found


def replaced(root: Node, changes: Mapping[Node, Node]) -> Node:
    """Returns a program with other expressions of rows in place of some."""

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        return changes[x] if x in changes else remade(x, args)

    return rebuilt([root], change, lambda x: is_outside(x) and x not in changes)[root]


def _wrapped(around: tuple[object, ...] | None, x: Node) -> Node:
    if around is None:
        return x
    kind, *others = around
    factors = [y for y in others if isinstance(y, Node)]
    return quotient(x, factors[0]) if kind == "div" else product(*factors, x)


def _unwrapped(x: Node, every: set[Node]) -> tuple[tuple[object, ...] | None, Node]:
    """What a sum over keys is divided by or multiplied with, and the sum."""
    if x.op == "div":
        return ("div", x.args[1]), x.args[0]
    if x.op == "product":
        sums = [y for y in x.args if every.intersection(_chain(y))]
        if len(sums) == 1:
            return ("product", *(y for y in x.args if y is not sums[0])), sums[0]
    return None, x


def _chain(x: Node) -> list[Node]:
    """A sum, the sum that it is of, and so on."""
    found = list[Node]()
    while x.op == "reduce" and x.value.kind == SUM:
        found.append(x)
        x = x.args[0]
    return found


def _one_sum(group: list[tuple[float, Node]]) -> Node:
    """A sum of sums over the same axes as one sum."""
    axes = [fresh_axis(y.value.axis.size) for y in _chain(group[0][1])]
    bodies = []
    for c, x in group:
        for axis in axes:
            x = opened(x, axis)
        bodies.append((c, x))
    body = linear(0.0, bodies)
    for axis in reversed(axes):
        body = reduced(SUM, axis, body)
    return body
