"""Models index tensors as the program stores them: extents, dtype, slices, promotion.

NOTE [Index values]
An `Affine` is exact arithmetic on integers; a tensor is not. So every value of a rule is compared
with the tensor that it represents (`stored`):

- A dimension of extent 1 has index 0 only. It has no coefficient, and keeps none when the tensor
  is broadcast later.
- No value of an integer tensor may leave the range of its dtype, where it would wrap around, and
  every value of a floating one must be exact in it: up to 2**8 in bfloat16, 2**11 in float16,
  2**24 in float32. Otherwise the tensor is unknown, and a condition on it is an opaque mask.
- A number, and the two values of a `Choice`, are rounded to a floating dtype as torch does.

With symbolic extents this has to hold for every size. For int64 it does for any tensor that fits
in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_streamkl.fx_passes.domain.masks import (
    Affine,
    BoolTensor,
    Choice,
    Linear,
    Literal,
)
from torch_streamkl.fx_passes.domain.values import Number
from torch_streamkl.fx_passes.fx_utils.sizes import Size, expression, is_one
from torch_streamkl.fx_passes.fx_utils.torch_names import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    elementwise_dtypes,
    statically_known_true,
)
from torch_streamkl.program.operations import exact

# no tensor has as many elements along a dimension
LARGEST_EXTENT = 2**40


def stored(value: object, tensor: Tensor) -> object:
    """Returns the value as this tensor stores it, or None if that is not certain."""
    match value:
        case Affine():
            return _stored_affine(value, tensor)
        case Number():
            return promote(value, tensor.dtype)
        case Choice():
            rounded, mask = promote(value, tensor.dtype), on_tensor(value.mask, tensor.shape)
            if not isinstance(rounded, Choice) or mask is None:
                return None
            return replace(rounded, mask=mask)
        case BoolTensor():
            return on_tensor(value, tensor.shape)
    return value


def in_dtype(value: float, dtype: torch.dtype) -> float | None:
    """Returns a number in a tensor of this dtype; None where an integer type cannot hold it."""
    if dtype == torch.bool:
        return float(value != 0)
    if dtype.is_floating_point:
        return float(exact(value).to(dtype))
    if dtype.is_complex or not math.isfinite(value) or value != int(value):
        return None
    limits = torch.iinfo(dtype)
    return value if limits.min <= value <= limits.max else None


def promoted(left: object, right: object) -> torch.dtype:
    """Returns the dtype in which torch compares or combines two tensors or numbers."""
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    return elementwise_dtypes(left, right, type_promotion_kind=kind)[1]


def promote(value: Number | Choice, dtype: torch.dtype) -> Number | Choice | None:
    """Returns a number or a choice in the dtype of a comparison."""
    if isinstance(value, Number):
        number = in_dtype(value.value, dtype)
        return None if number is None else Number(number)
    inside, outside = (in_dtype(x, dtype) for x in (value.inside, value.outside))
    if inside is None or outside is None:
        return None
    return replace(value, inside=inside, outside=outside)


def is_exact(x: object, shape: Sequence[Size], dtype: torch.dtype) -> bool:
    """Returns whether all values of an index expression are exact in a dtype.

    ``x`` is an `Affine` with these extents, or an integer.
    """
    limits = _exact_range(dtype)
    if limits is None or not isinstance(x, (Affine, int, torch.SymInt)):
        return False
    low, high = _bounds(x, shape)
    return limits[0] <= low and high <= limits[1]


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


def _stored_affine(value: Affine, tensor: Tensor) -> Affine | None:
    extra = tensor.dim() - len(value.coefficients)
    if extra < 0 or tensor.dtype == torch.bool:
        return None
    coefficients = _of_indices((0,) * extra + value.coefficients, tensor.shape)
    result = Affine(coefficients, value.constant)
    return result if is_exact(result, tensor.shape, tensor.dtype) else None


def _of_indices(coefficients: Sequence[int], shape: Sequence[Size]) -> tuple[int, ...]:
    return tuple(0 if is_one(n) else c for c, n in zip(coefficients, shape, strict=True))


def on_tensor(mask: BoolTensor, shape: Sequence[Size]) -> BoolTensor | None:
    """Returns the mask of a tensor of this shape: an index along an extent of 1 is 0."""
    if mask.rank > len(shape):
        return None
    literals: set[Literal] = set()
    for literal in mask.raised(len(shape)).literals:
        if isinstance(literal, Linear):
            literal = Linear(_of_indices(literal.coefficients, shape), literal.constant)
        literals.add(literal)
    rank = mask.rank if not mask.literals else len(shape)
    return BoolTensor(frozenset(literals), rank, mask.negative)


def _exact_range(dtype: torch.dtype) -> tuple[int, int] | None:
    if dtype == torch.bool or dtype.is_complex:
        return None
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return limits.min, limits.max
    if dtype.itemsize == 1:
        return None  # float8 and such
    largest = round(2 / torch.finfo(dtype).eps)
    return -largest, largest


def _bounds(x: Affine | Size, shape: Sequence[Size]) -> tuple[int, int]:
    """No value is below the first or above the second."""
    if not isinstance(x, Affine):
        return _range_of(x)
    low, high = _range_of(x.constant)
    for c, size in zip(x.coefficients, shape, strict=True):
        last = max(_range_of(size)[1] - 1, 0)
        low, high = low + min(c * last, 0), high + max(c * last, 0)
    return low, high


def _range_of(size: Size) -> tuple[int, int]:
    """Bounds a size; a symbol without a limit is as large as memory allows."""
    known = expression(size)
    if isinstance(known, int):
        return known, known
    assert isinstance(size, torch.SymInt)
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return (
        int(bounds.lower) if bounds.lower.is_Integer else -LARGEST_EXTENT,
        min(int(bounds.upper), LARGEST_EXTENT) if bounds.upper.is_Integer else LARGEST_EXTENT,
    )
