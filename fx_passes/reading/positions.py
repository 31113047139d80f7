"""Names the positions that a mask selects."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Positions:
    """Names the positions along a dimension at which a mask holds: a column of its `nonzero`."""

    mask: fx.Node
    dim: int

    def __repr__(self) -> str:
        return f"{self.mask}.nonzero[{self.dim}]"
