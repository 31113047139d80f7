"""Compares and promotes positions and sizes that may be symbolic."""

from __future__ import annotations

import torch

from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    elementwise_dtypes,
    statically_known_true,
)

LARGEST_EXTENT = 2**40  # more elements than a dimension has


def promoted(left: object, right: object) -> torch.dtype:
    """Returns the dtype in which torch compares or combines two tensors or numbers."""
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    return elementwise_dtypes(left, right, type_promotion_kind=kind)[1]


def first_index(start: Size | None, size: Size, length: Size) -> Size | None:
    """Returns where a slice or narrow of a dimension begins, counted from the front.

    A negative start counts from the end, and one before the first entry is the first entry, as in
    Python. None where the sign is not certain for every size.
    """
    if start is None:
        return 0
    if is_certain(start >= 0):
        return start
    from_front = start + size
    if is_certain(start < 0) and is_certain(from_front >= 0):
        return from_front
    if is_certain(from_front <= 0):
        return 0
    is_last = is_certain(start < 0) and expression(length) == expression(-start)
    return from_front if is_last else None


def is_certain(condition: bool | torch.SymBool) -> bool:
    """Returns whether a condition holds for every size, without asking for a guard."""
    return bool(statically_known_true(condition))
