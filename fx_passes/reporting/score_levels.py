"""Says of expressions which axes of scores they have: a value per query and key, or per row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from torch import fx

from torch_streamkl.fx_passes.closed_forms.row_sites import is_entered
from torch_streamkl.fx_passes.reading.positions import source_name
from torch_streamkl.fx_passes.reading.reader import Reading
from torch_streamkl.fx_passes.reading.types import is_of_positions
from torch_streamkl.program.graph import CONTRACT, LOGSUMEXP, Axis, Node
from torch_streamkl.program.walks import fold, walk

Pair = tuple[frozenset[Axis], frozenset[Axis]]  # axes that one operand of a product has alone


class Level(Enum):
    """Says what a value is computed from, and what it has a value for."""

    OTHER = 0  # no product of this graph, or none that is read
    ROWS = 1  # summed over the keys
    SCORES = 2  # a value per query and key, before a softmax
    PROBABILITIES = 3  # the same after a softmax


@dataclass(frozen=True)
class _Found:
    """Holds what an expression is made of."""

    pairs: frozenset[Pair]  # of products, along whose axes it varies
    has_product: bool
    is_after_softmax: bool


class ScoreLevels:
    """Finds the levels of nodes; each expression is looked at once."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._found: dict[Node, _Found] = {}

    def of(self, node: object) -> Level:
        """Returns the level of a node of the trace."""
        x = self.reading.expression(node)
        if x is None:
            return Level.OTHER
        found = fold(x, self._found, self._of)
        if not found.has_product:
            return Level.OTHER
        if not found.pairs:
            return Level.ROWS
        return Level.PROBABILITIES if found.is_after_softmax else Level.SCORES

    def has_product(self, node: fx.Node) -> bool:
        """Returns whether a node is computed from a product, in a way that is read."""
        return self.of(node) is not Level.OTHER

    def is_known(self, node: fx.Node) -> bool:
        """Returns whether a node is computed from a product in a way that is read, or a number."""
        x = self.reading.expression(node)
        return (x is not None and is_of_positions(x)) or self.has_product(node)

    def sources_of(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Returns the captured nodes that nodes are computed from."""
        inside = walk(x for x in map(self.reading.expression, nodes) if x is not None)
        return [x for x in dict.fromkeys(map(source_name, inside)) if isinstance(x, fx.Node)]

    def keys_of(self, node: object) -> frozenset[Axis]:
        """Returns the axes that softmaxes inside of a node are over, if it still has them."""
        x = self.reading.expression(node)
        if x is None:
            return frozenset()
        return frozenset(y.value for y in walk([x], is_entered) if y.op == "log_softmax") & x.axes

    def are_chosen(self, node: fx.Node) -> bool:
        """Returns whether a node has scores of chosen keys, such as a top-k's."""
        return any(_is_chosen(x) for x in self.products_of(node))

    def are_entries(self, node: fx.Node) -> bool:
        """Returns whether a node has single entries of scores, which a mask selects."""
        products = self.products_of(node)
        rest = (set(x.value) for x in products)
        free = ([y.axes - own for y in x.args] for x, own in zip(products, rest, strict=True))
        return any(a == b and len(a) == 1 for a, b in free)

    def products_of(self, node: object) -> list[Node]:
        """Returns the products that a node is computed from."""
        x = self.reading.expression(node)
        if x is None or self.of(node) is Level.OTHER:
            return []
        return [y for y in walk([x]) if y.op == CONTRACT]

    def _of(self, x: Node) -> _Found:
        inside = [self._found[a] for a in x.args]
        pairs: Iterable[Pair] = (pair for part in inside for pair in part.pairs)
        if x.op == CONTRACT:
            a, b = (y.axes - set(x.value) for y in x.args)
            pairs = [(a - b, b - a)]
        is_softmax = x.op == "log_softmax" or x.kind == LOGSUMEXP
        return _Found(
            _free(pairs, x),
            x.op == CONTRACT or any(part.has_product for part in inside),
            is_softmax or any(part.is_after_softmax for part in inside),
        )


def _is_chosen(product: Node) -> bool:
    a, b = (x.axes - set(product.value) for x in product.args)
    positions = [at for x in product.args for at in x.args]
    return not (a - b and b - a) and any(x.op == "capture" for x in walk(positions))


def _free(pairs: Iterable[Pair], x: Node) -> frozenset[Pair]:
    """Those of which an expression has an axis of either operand."""
    return frozenset(p for p in pairs if any(p) and all(not own or own & x.axes for own in p))
