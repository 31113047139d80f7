"""Says which calls are equal: what torch computes for one is right for the other.

Layers of a network call the same operations on like tensors. Torch takes about a millisecond for
the fake result of a call, and five for one with symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torch_streamkl.fx_passes.fx_utils.torch_names import FakeTensor

_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class NotEqual(Exception):
    """Says that a call is equal to no other one."""


class Kinds:
    """Numbers tensors by their metadata; raises NotEqual if more may matter than metadata.

    That is so for constants, tensors that are no fake ones, and subclasses.
    """

    def __init__(self, with_scalars: bool = True) -> None:
        self.with_scalars = with_scalars
        self._numbers: dict[object, int] = {}
        self._known: dict[int, tuple[Tensor, int]] = {}  # by id, which a tensor that is kept has

    def of(self, x: Tensor) -> int:
        """Returns the number of a tensor's metadata."""
        known = self._known.get(id(x))
        if known is None:
            kind = self._numbers.setdefault(self.metadata(x), len(self._numbers))
            known = self._known[id(x)] = x, kind
        return known[1]

    def metadata(self, x: Tensor) -> object:
        """Returns what tensors of one kind have in common."""
        is_plain = type(x) is FakeTensor and x.constant is None and x.layout is torch.strided
        if not is_plain or x.is_complex() or not (self.with_scalars or x.dim()):
            raise NotEqual
        sizes = map(_size, (*x.shape, *x.stride(), x.storage_offset()))
        return x.dim(), *sizes, x.dtype, x.device, x.requires_grad, x.is_inference()


def call_key(
    target: Any, args: Any, kwargs: Mapping[str, Any], value_of: Callable[[fx.Node], object]
) -> object:
    """Returns what equal calls have in common, given that of their inputs; or raises NotEqual."""

    def part(x: Any) -> object:
        if isinstance(x, fx.Node):
            return constant_key(value_of(x))
        if isinstance(x, (tuple, list)):
            return type(x), tuple(map(part, x))
        if isinstance(x, slice):
            return slice, part(x.start), part(x.stop), part(x.step)
        return constant_key(x)

    return target, part(args), tuple((k, part(v)) for k, v in sorted(kwargs.items()))


class Input(tuple[int, int]):
    """Holds a tensor's kind, and which of a call's tensors it is."""

    __slots__ = ()


def constant_key(x: object) -> object:
    """Returns what equal constants have in common: 1, 1.0 and True are three."""
    if isinstance(x, Input):
        return x
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(constant_key, x))
    if isinstance(x, torch.SymInt):
        return torch.SymInt, _size(x)
    if x is None or x is ... or isinstance(x, _CONSTANTS):
        return type(x), repr(x) if isinstance(x, float) else x
    raise NotEqual


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yields the tensors of a result, also of lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from tensors_in(x)


def _size(x: Any) -> object:
    if not isinstance(x, torch.SymInt):
        return x
    if x.node.is_nested_int():
        raise NotEqual
    return x.node.expr
