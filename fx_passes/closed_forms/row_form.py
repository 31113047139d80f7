"""Represents sums over keys as a row program, and what is computed of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_streamkl.fx_passes.closed_forms.chosen import Chosen, ChosenValue
from torch_streamkl.fx_passes.closed_forms.entries import Entries
from torch_streamkl.fx_passes.closed_forms.form import Product, RowValue
from torch_streamkl.fx_passes.closed_forms.row_groups import Dim, RowAxes
from torch_streamkl.fx_passes.closed_forms.row_leaves import Captured
from torch_streamkl.program.graph import LOGSUMEXP, Node
from torch_streamkl.program.walks import walk
from torch_streamkl.rows.program import Program, program_of


@dataclass(frozen=True)
class RowReduction:
    """Describes a value of rows that a program returns: a reduction, with axes for dimensions.

    The axes are those of batch, heads and rows, and of blocks of keys.
    """

    number: int  # of the program's reduction
    axes: tuple[Dim, ...]
    grad_flows: bool
    is_float: bool  # else it counts


@dataclass(frozen=True)
class RowForm:
    """Represents sums over keys as one row program, and what is computed of its rows' values.

    ``around`` has an expression for each root, in which `RowValue` n is ``values[n]``.
    """

    program: Program | None  # None: of entries alone
    products: tuple[Product, ...]
    axes: RowAxes
    captures: tuple[Captured, ...]
    values: tuple[RowReduction, ...]
    around: tuple[Node, ...]
    entries: tuple[Entries, ...] = ()  # values at ids that are computed apart
    chosen: tuple[Chosen, ...] = ()  # log-probabilities of these

    @property
    def of_rows(self) -> tuple[Node, ...]:
        """Returns all expressions of the rows' values: those of the roots first."""
        return (*self.around, *(x for c in self.chosen for x in c.parts))

    @property
    def read_of_rows(self) -> list[Node]:
        """Returns what has no keys: what the program reads, and expressions of rows."""
        return [*(c.value for c in self.captures), *self.of_rows]

    def program_of_root(self, n: int) -> Program | None:
        """Returns the part of the program that computes one root: other roots may need more."""
        names = _names_in([self.around[n]])
        if self.program is None or any(isinstance(x, ChosenValue) for x in names):
            return self.program  # log-probabilities of entries read values of their own
        found = sorted({self.values[x.number].number for x in names if isinstance(x, RowValue)})
        whole = self.program
        parts = [whole.reduced[c] for c in found]
        return program_of(whole.dot_heads, whole.captures, parts, whole.keys)[0]

    def kinds_of_root(self, n: int) -> set[str]:
        """Returns the kinds of reductions that a root reads: none if it is of entries alone."""
        names = _names_in([self.around[n]])
        chosen = [self.chosen[x.number] for x in names if isinstance(x, ChosenValue)]
        names += _names_in([part for c in chosen for part in c.parts])
        if self.program is None:
            return set()
        numbers = {self.values[x.number].number for x in names if isinstance(x, RowValue)}
        kinds = {self.program.reductions[n].kind for n in numbers}
        return kinds | {LOGSUMEXP for c in chosen if c.scale is not None}

    @property
    def requires_grad(self) -> bool:
        return any(x.grad_flows for x in self.values)

    @property
    def replaced(self) -> tuple[Product, ...]:
        """Returns all products that need not be there as a whole: those of entries, too."""
        return (*self.products, *(x.product for x in self.every_entries))

    @property
    def every_entries(self) -> tuple[Entries, ...]:
        """Returns the entries, also those of log-probabilities."""
        return tuple(dict.fromkeys([*self.entries, *(c.entries for c in self.chosen)]))


def _names_in(roots: Sequence[Node]) -> list[object]:
    """Names what expressions of the rows' values read."""
    return [x.value.name for x in walk(roots) if x.op == "capture"]
