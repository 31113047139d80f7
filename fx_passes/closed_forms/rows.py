"""Finds the matched losses of a program: its outermost sums over keys, and what is around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch_streamkl.program.canonical import linear
from torch_streamkl.program.graph import BOUND, CONTRACT, SUM, Axis, Node, index
from torch_streamkl.program.reductions import fresh_axis, opened, reduced, remade, substitute
from torch_streamkl.program.walks import rebuilt, walk


def is_outside(x: Node) -> bool:
    """Returns whether the arguments of an expression may have sums over keys."""
    return x.op not in ("capture", CONTRACT, "log_softmax")


def key_sums(roots: Iterable[Node]) -> set[Node]:
    """Returns the sums over the keys of a softmax."""
    keys: dict[Node, frozenset[Axis]] = {}  # that softmaxes inside of an expression are over
    found = set[Node]()
    for x in walk(roots, is_outside):
        if x.op == "log_softmax":
            keys[x] = frozenset((x.value,))
            continue
        inside = frozenset[Axis]().union(*(keys[a] for a in x.args)) if is_outside(x) else None
        keys[x] = inside or frozenset()
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


def restored(x: Node, names: Mapping[Axis, Axis]) -> Node:
    """Returns an expression with the names that `renamed_apart` has replaced."""
    return substitute(x, {b: index(a) for a, b in names.items()})


def joined(root: Node, failed: Iterable[Node]) -> list[tuple[list[Node], Node]]:
    """Returns sums over keys that are added, and each group of these as one sum over keys.

    Parts that are no divergence alone may be one together: cross-entropy minus entropy.
    """
    wanted, found = set(failed), list[tuple[list[Node], Node]]()
    every = key_sums([root])
    for x in walk([root], lambda x: is_outside(x) and x not in every):
        if x.op != "linear":
            continue
        groups: dict[object, list[tuple[float, Node, Node]]] = {}
        for c, t in zip(x.value[1], x.args, strict=True):
            around, inside = _unwrapped(t, every)
            sums = every.intersection(_chain(inside))
            if sums:
                key = around, tuple(y.value.axis for y in _chain(inside))
                groups.setdefault(key, []).append((c, inside, *sums))
        for group in groups.values():
            parts = [site for *_, site in group]
            if len(parts) > 1 and wanted.intersection(parts):
                found.append((parts, _one_sum([(c, t) for c, t, _ in group])))
    return found


def _unwrapped(x: Node, every: set[Node]) -> tuple[object, Node]:
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
