"""Names the positions that a mask selects."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class MaskedRows:
    """Names the rows that a mask selects: of its dimensions from ``first`` to ``last``.

    Along the others it does not vary, as a mask of tokens that was expanded over a vocabulary. It
    is broadcast along ``lacking`` dimensions before the first, which are dimensions of the rows.
    """

    mask: fx.Node
    first: int
    last: int
    lacking: int = 0

    @property
    def rank(self) -> int:
        """Returns how many dimensions the mask selects rows of."""
        return self.lacking + self.last - self.first + 1


@dataclass(frozen=True)
class Positions:
    """Names the positions along a dimension at which a mask holds: a column of its `nonzero`."""

    rows: MaskedRows
    dim: int  # from the first one of the rows

    @property
    def mask(self) -> fx.Node:
        return self.rows.mask

    def __repr__(self) -> str:
        return f"{self.mask}.nonzero[{self.dim}]"
