"""Describes the rows that `x[mask]`, `x[i, j]`, `masked_select` and `gather` select.

NOTE [Selected rows]
A selection replaces consecutive dimensions of scores, of ``sizes``, by dimensions of ``shape``. It
commutes with everything that is done to each row alone, so it moves to the operand of the scores
that has those dimensions: ``(h @ w)[mask]`` is ``h[mask] @ w``. There it is the operation that the
user wrote, applied to the smaller tensor. So negative and repeated positions, gradients that add
up, and errors for positions out of range stay what they are in the user's code.

Two selections are equal if the same operation selects them by the same tensors, from dimensions of
the same sizes: ``x.view(4, 3)[i, j]`` and ``x.view(2, 6)[i, j]`` are different rows. Equal counts
prove nothing, because two masks may select as many rows by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from torch_streamkl.fx_passes.domain.layout import Shape
from torch_streamkl.fx_passes.domain.masks import BoolTensor, Opaque
from torch_streamkl.fx_passes.fx_utils.sizes import expression

# A boolean tensor over all of the dimensions: the rows where it is True, in their order. The
# tensor of MASK_ENTRIES has a last dimension more, along which it is constant (`masked_select`).
MASK, MASK_ENTRIES = "mask", "mask_entries"
POSITIONS = "positions"  # an integer tensor for each of the dimensions, broadcast together
INDEX_SELECT = "index_select"  # a vector of positions, none of them negative
GATHER = "gather"  # positions along dimension ``along``, constant along a last dimension more


@dataclass(frozen=True, eq=False)
class RowSelection:
    """Represents the selected rows of dimensions ``sizes``, as dimensions ``shape``.

    ``tensors`` are nodes of the trace. ``condition`` is the meaning of a mask, by which two
    selections are found to be equal; ``tensors`` is then the mask of the first.
    """

    kind: str
    tensors: tuple[fx.Node, ...]
    sizes: Shape
    shape: Shape
    along: int = 0
    condition: BoolTensor | None = None

    def key(self) -> tuple[object, ...]:
        # the size of a single dimension is the operand's
        groups = self.sizes if len(self.sizes) > 1 else ()
        sizes = tuple(str(expression(size)) for size in groups)
        return (self.kind, self.tensors, self.along, self.condition, sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowSelection) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    @property
    def is_mask(self) -> bool:
        return self.kind in (MASK, MASK_ENTRIES)

    def condition_tensors(self) -> Iterator[fx.Node]:
        """Returns the tensors that the condition is about."""
        if self.condition is not None:
            yield from (x.node for x in self.condition.literals if isinstance(x, Opaque))
