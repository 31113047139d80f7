"""Renames axes: the substitution that keeps an expression's form, and so costs little."""

from __future__ import annotations

from collections.abc import Mapping

from torch_streamkl.program.graph import Axis, Node, index, intern
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.walks import rebuilt


def names_of(x: Node, theta: Mapping[Axis, Node]) -> dict[Axis, Axis] | None:
    """Returns the new names of axes, if a substitution does no more: no two become one."""
    names = dict[Axis, Axis]()
    for axis, place in theta.items():
        if place.op != "index" or place.value.size != axis.size:
            return None
        level = place.value.level
        if level and level <= x.level:
            return None
        names[axis] = place.value
    new = set(names.values())
    return None if len(new) < len(names) or new & (x.axes - names.keys()) else names


def renamed(x: Node, names: Mapping[Axis, Axis]) -> Node:
    """Returns an expression of other axes, which keeps its form but for the order of terms."""
    wanted = frozenset(names)
    known: dict[frozenset[Axis], frozenset[Axis]] = {}

    def change(y: Node, args: tuple[Node, ...]) -> Node:
        if not y.axes & wanted:
            return y
        value = y.value
        if y.op == "index":
            return index(names[value])
        if y.op == "log_softmax":
            value = names.get(value, value)
        elif y.op == "linear":
            pairs = sorted(zip(args, value[1], strict=True), key=lambda item: item[0].digest)
            args, value = tuple(a for a, _ in pairs), (value[0], tuple(c for _, c in pairs))
        elif y.op in ("product", "and", "or") or (
            y.op in OPERATIONS and OPERATIONS[y.op].is_commutative
        ):
            args = tuple(sorted(args, key=lambda a: (y.op == "eq" and a.op == "const", a.digest)))
        axes = known.get(y.axes)
        if axes is None:
            axes = known[y.axes] = frozenset(names.get(a, a) for a in y.axes)
        return intern(y.op, args, value, y.dtype, axes, y.is_finite, y.range)

    return rebuilt([x], change, lambda y: bool(y.axes & wanted))[x] if names else x
