"""Finds the matched losses of a program: its outermost sums over keys, and what is around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch_streamkl.program.canonical import linear
from torch_streamkl.program.graph import BOUND, CONTRACT, SUM, Axis, Node, index
from torch_streamkl.program.reductions import fresh_axis, opened, reduced, remade, substitute
from torch_streamkl.program.walks import rebuilt, walk

_OUTSIDE = ("capture", CONTRACT, "log_softmax")  # what is inside of them is no value of a row


def is_key_sum(x: Node) -> bool:
    """Returns whether a sum is over the keys of a softmax."""
    if x.op != "reduce" or x.value.kind != SUM:
        return False
    return any(y.op == "log_softmax" and y.value == x.value.axis for y in walk(x.args))


def keys_first(root: Node) -> Node:
    """Returns a program whose sums over keys are inside of those over rows and heads."""

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        x = remade(x, args)
        return _swapped(x) if is_key_sum(x) else x

    return rebuilt([root], change, lambda x: x.op not in _OUTSIDE)[root]


def _swapped(x: Node) -> Node:
    """A sum over keys of a sum over rows as a sum over rows of one over keys."""
    axes = list[Axis]()
    body = x
    while body.op == "reduce" and body.value.kind == SUM:
        axes.append(fresh_axis(body.value.axis.size))
        body = opened(body, axes[-1])
    key = axes.pop(0)
    if not axes or not any(y.op == "log_softmax" and y.value == key for y in walk([body])):
        return x
    body = reduced(SUM, key, body)
    for axis in reversed(axes):
        body = reduced(SUM, axis, body)
    return body


def sites(root: Node) -> list[Node]:
    """Returns the outermost sums over keys."""
    order = walk([root], lambda x: x.op not in _OUTSIDE and not is_key_sum(x))
    return [x for x in order if is_key_sum(x)]


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


def restored(x: Node, names: Mapping[Axis, Axis]) -> Node:
    """Returns an expression with the names that `renamed_apart` has replaced."""
    return substitute(x, {b: index(a) for a, b in names.items()})


def joined(root: Node, failed: Iterable[Node]) -> list[tuple[Node, Node]]:
    """Returns sums of several sums over keys, and each as one sum over keys.

    Parts that are no divergence alone may be one together: cross-entropy minus entropy.
    """
    wanted, found = set(failed), list[tuple[Node, Node]]()
    for x in walk([root], lambda x: x.op not in _OUTSIDE and not is_key_sum(x)):
        if x.op != "linear":
            continue
        terms = list(zip(x.value[1], x.args, strict=True))
        parts = [(c, t) for c, t in terms if any(is_key_sum(y) for y in _chain(t))]
        if len(parts) < 2 or not any(y in wanted for _, t in parts for y in _chain(t)):
            continue
        for shape in dict.fromkeys(_shape(t) for _, t in parts):
            group = [(c, t) for c, t in parts if _shape(t) == shape]
            if len(group) > 1:
                found.append((linear(0.0, group), _one_sum(group)))
    return found


def _chain(x: Node) -> list[Node]:
    """A sum, the sum that it is of, and so on."""
    found = list[Node]()
    while x.op == "reduce" and x.value.kind == SUM:
        found.append(x)
        x = x.args[0]
    return found


def _shape(x: Node) -> tuple[object, ...]:
    return tuple(y.value.axis for y in _chain(x))


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
