"""Finds and compares expressions that are equal but for the names of their axes."""

from __future__ import annotations

from collections.abc import Sequence

from torch_streamkl.fx_passes.closed_forms.row_sites import name_of
from torch_streamkl.program.canonical import terms_of
from torch_streamkl.program.graph import CONTRACT, Axis, Node, index
from torch_streamkl.program.operations import OPERATIONS
from torch_streamkl.program.reductions import substitute
from torch_streamkl.program.walks import fold, walk

UNORDERED = ("product", CONTRACT, "and", "or")


def numbered(x: Node, order: Sequence[Axis], kind: str) -> tuple[Node, tuple[Axis, ...]]:
    """Returns an expression whose axes are numbered in an order, and these: equal ones are one."""
    names = tuple(Axis((kind, i), a.size) for i, a in enumerate(order))
    return substitute(x, dict(zip(order, map(index, names), strict=True))), names


def free_axes(product: Node) -> list[Axis]:
    """Returns the axes of a product, in the order in which its operands have them."""
    order = [y.value for y in walk(product.args) if y.op == "index" and y.value in product.axes]
    return list(dict.fromkeys(order))


def matched(x: Node, y: Node, names: dict[Axis, Axis]) -> bool:
    """Returns whether two products, or positions, are one but for the names of their axes."""
    if x.op != y.op or len(x.args) != len(y.args):
        return False
    match x.op:
        case "index":
            return _named(x.value, y.value, names)
        case "capture":
            if name_of(x) != name_of(y):
                return False
        case "contract":
            if len(x.value) != len(y.value):
                return False
            if not all(_named(a, b, names) for a, b in zip(x.value, y.value, strict=True)):
                return False
        case "linear":  # whose terms are sorted by the names of their axes, too
            (constant, terms), (other, others) = terms_of(x), terms_of(y)
            return constant == other and _are_matched(terms, others, names)
        case _:
            if x.value != y.value:
                return False
    return all(matched(a, b, names) for a, b in zip(x.args, y.args, strict=True))


def _are_matched(
    terms: list[tuple[float, Node]], others: list[tuple[float, Node]], names: dict[Axis, Axis]
) -> bool:
    """Whether terms are others, in some order; adds to the names if they are."""
    if not terms:
        return not others
    (c, x), *rest = terms
    for i, (d, y) in enumerate(others):
        found = dict(names)
        if c == d and matched(x, y, found):
            if _are_matched(rest, others[:i] + others[i + 1 :], found):
                names.update(found)
                return True
    return False


def _named(a: Axis, b: Axis, names: dict[Axis, Axis]) -> bool:
    if a.size != b.size or names.setdefault(a, b) != b:
        return False
    return sum(other == b for other in names.values()) == 1


class Forms:
    """Numbers expressions by their form; ``bare``: by that of their values without gradient."""

    def __init__(self, bare: bool = False) -> None:
        self.bare = bare
        self._known: dict[Node, int] = {}
        self._numbers: dict[object, int] = {}

    def of(self, x: Node) -> int:
        return fold(x, self._known, self._number)

    def _number(self, x: Node) -> int:
        key = x.op, self._value(x), self._arguments(x)
        return self._numbers.setdefault(key, len(self._numbers))

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
