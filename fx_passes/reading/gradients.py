"""Knows which tensors with gradient an expression is made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch_streamkl.program.graph import Node, Source
from torch_streamkl.program.walks import walk

Name = tuple[object, int]  # of a captured tensor, and its version


def trained(exprs: Iterable[Node]) -> set[Name]:
    """Returns the captured tensors with gradient in expressions."""
    return set().union(*map(_name_of, walk(exprs)))


class Trained:
    """Finds what `trained` does, for the expressions of a graph: they share their parts."""

    def __init__(self) -> None:
        self._found: dict[Node, frozenset[Name]] = {}

    def of(self, x: Node) -> frozenset[Name]:
        """Returns the captured tensors with gradient in an expression."""
        for part in walk([x], lambda y: y not in self._found):
            if part not in self._found:
                within = (self._found[a] for a in part.args)
                self._found[part] = frozenset(_name_of(part)).union(*within)
        return self._found[x]

    def lost(self, given: Iterable[Node | None], x: Node) -> frozenset[Name]:
        """Returns those of operands that cancel in a result; none if the result names others."""
        before = frozenset[Name]().union(*(self.of(e) for e in given if e is not None))
        after = self.of(x)
        return before - after if after <= before else frozenset()


def _name_of(x: Node) -> set[Name]:
    source = x.value
    if x.op != "capture" or not x.flows or not isinstance(source, Source):
        return set()
    return {(source.name, source.version)} if source.grad_flows else set()
