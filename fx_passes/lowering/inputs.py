"""Says what the torch code of an expression is made of, where that is not all of its arguments."""

from __future__ import annotations

from torch_streamkl.program.graph import SUM, Axis, Node


def axes_of(x: Node) -> list[Axis]:
    """Returns the axes of a reduction, and of sums in a sum."""
    axes = [x.value.axis]
    while x.kind == x.args[0].kind == SUM:
        x = x.args[0]
        axes.append(x.value.axis)
    return axes


def inputs_of(x: Node) -> tuple[Node, ...]:
    """Returns what is written before an operation.

    Of a sum of sums it is what the innermost has. Of what is not negative, and of the logarithm of
    1 and more, it is the terms of a sum.
    """
    while x.kind == SUM and x.args[0].kind == SUM:
        x = x.args[0]
    if is_log1p(x) or (x.op == "nonnegative" and x.args[0].op == "linear"):
        x = x.args[0]
    return x.args


def is_log1p(x: Node) -> bool:
    """Returns whether an expression is the logarithm of 1 and more."""
    return x.op == "log" and x.args[0].op == "linear" and x.args[0].value[0] == 1.0
