"""Finds and compares expressions that are equal but for the names of their axes."""

from __future__ import annotations

from collections.abc import Sequence

from torch_streamkl.fx_passes.closed_forms.row_sites import name_of
from torch_streamkl.program.graph import CONTRACT, Axis, Node, index
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.reductions import substitute
from torch_streamkl.program.walks import walk

UNORDERED = ("product", CONTRACT, "and", "or")


def numbered(x: Node, order: Sequence[Axis], kind: str) -> tuple[Node, tuple[Axis, ...]]:
    """Returns an expression whose axes are numbered in an order, and these: equal ones are one."""
    names = tuple(Axis((kind, i), a.size) for i, a in enumerate(order))
    return substitute(x, dict(zip(order, map(index, names), strict=True))), names


def free_axes(product: Node) -> list[Axis]:
    """Returns the axes of a product, in the order in which its operands have them."""
    order = [y.value for y in walk(product.args) if y.op == "index" and y.value in product.axes]
    return list(dict.fromkeys(order))


class Forms:
    """Numbers expressions by their form; ``bare``: by that of their values without gradient."""

    def __init__(self, bare: bool = False) -> None:
        self.bare = bare
        self._known: dict[Node, int] = {}
        self._numbers: dict[object, int] = {}

    def of(self, x: Node) -> int:
        for y in walk([x], lambda y: y not in self._known):
            if y not in self._known:
                key = y.op, self._value(y), self._arguments(y)
                self._known[y] = self._numbers.setdefault(key, len(self._numbers))
        return self._known[x]

    def _arguments(self, x: Node) -> tuple[object, ...]:
        known = [self._known[a] for a in x.args]
        if x.op == "linear":
            return tuple(sorted(zip(x.value[1], known, strict=True)))
        commutes = x.op in UNORDERED or (x.op in OPERATIONS and OPERATIONS[x.op].is_commutative)
        return tuple(sorted(known) if commutes else known)

    def _value(self, x: Node) -> object:
        """What else an expression is, without the names of axes."""
        match x.op:
            case "index" | "log_softmax":
                return x.value.size
            case "reduce":
                return x.kind, x.value.axis.size
            case "contract":
                return tuple(sorted(str(a.size) for a in x.value))
            case "linear":
                return x.value[0]
            case "capture" if self.bare:
                return name_of(x)
            case "where" if self.bare:  # whether a mask was added
                return None
        return x.value
