"""Checks that a value describes its tensor: its axes have the tensor's extents.

Torch broadcasts silently, so what a rule says of an operation's inputs need not hold for its
result. So every value is compared with the shape of its tensor, whichever rule it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_streamkl.fx_passes.domain.layout import sizes_of
from torch_streamkl.fx_passes.domain.scores import Scores
from torch_streamkl.fx_passes.domain.values import Elements, ExpSum, LogSumExp, RowMax, Shifted
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import (
    Size,
    is_one,
    is_unknown,
    provably_equal,
)


def fitted(value: object, shape: Sequence[Size]) -> object:
    """Returns the value of a tensor of this shape; raises Unsupported if it has another.

    Scores and what is reduced from them have all their axes in the tensor; a tensor that is larger
    is not the scores. Values after the softmax may be broadcast, and know their shape.
    """
    match value:
        case Scores() | LogSumExp() | RowMax() | ExpSum():
            if not _all_equal(sizes_of(value.layout), shape):
                raise Unsupported("scores are broadcast to more entries than they have")
        case Shifted():
            fitted(value.scores, shape)
        case Elements():
            sizes = [sizes_of(x) for x in value.layouts]
            if not all(_all_equal(x, shape, broadcast=True) for x in sizes):
                raise Unsupported("values after the softmax are in a tensor of another shape")
            known = zip(value.shape, shape, strict=True)
            return replace(value, shape=tuple(a if is_unknown(a) else b for a, b in known))
    return value


def _all_equal(sizes: Sequence[Size], shape: Sequence[Size], *, broadcast: bool = False) -> bool:
    """Whether the sizes are the shape's, or (``broadcast``) 1.

    Every use of a boolean index has a symbol of its own for the number of rows, of which the
    analysis keeps the first.
    """
    return len(sizes) == len(shape) and all(
        provably_equal(a, b) or (broadcast and is_one(a)) or (is_unknown(a) and is_unknown(b))
        for a, b in zip(sizes, shape, strict=True)
    )
