"""Row programs in plain torch: tensors whose axes have the names that functions use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DIMS = {"key": -1, "head": 1}


class Naive:
    """A tensor [batch, heads or 1, rows, keys or 1], of which ``keep`` take part in sums."""

    def __init__(self, x: Tensor, keep: Tensor) -> None:
        self.x, self.keep = x, keep

    def of(self, x: Tensor) -> Naive:
        return Naive(x, self.keep)

    def _everywhere(self) -> Tensor:
        x = self.x if self.x.is_floating_point() else self.x.double()
        return x.expand(*x.shape[:2], *self.keep.shape[2:])

    def sum(self, axis: str) -> Naive:
        if axis == "head":
            return self.of(self.x.sum(1, keepdim=True))
        x = self._everywhere()
        return self.of(torch.where(self.keep, x, 0.0).sum(-1, keepdim=True))

    def mean(self, axis: str) -> Naive:
        assert axis == "head"
        return self.of(self.x.mean(1, keepdim=True))

    def logsumexp(self, axis: str) -> Naive:
        assert axis == "key"
        x = torch.where(self.keep, self._everywhere(), -math.inf)
        return self.of(x.logsumexp(-1, keepdim=True))

    def log_softmax(self, axis: str) -> Naive:
        return self.of(self._everywhere() - self.logsumexp(axis).x)

    def softmax(self, axis: str) -> Naive:
        x = torch.where(self.keep, self._everywhere(), -math.inf)
        return self.of(x.softmax(-1))

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Naive:
            return self.of(getattr(self.x, name)(*map(plain, args), **kwargs))

        return call

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Naive:
        given = {name: plain(x) for name, x in (kwargs or {}).items()}
        one = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Naive))
        return one.of(f(*map(plain, args), **given))


def plain(x: Any) -> Any:
    return x.x if isinstance(x, Naive) else x


_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
for _name in (*_TWO, *(f"r{name}" for name in _TWO), "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(
        Naive,
        f"__{_name}__",
        lambda self, other, n=f"__{_name}__": self.of(getattr(self.x, n)(plain(other))),
    )
# torch's // has no derivative
Naive.__floordiv__ = lambda self, other: self.of(  # type: ignore[attr-defined]
    torch.div(self.x, plain(other), rounding_mode="floor")
)
for _name in ("neg", "invert", "abs"):
    setattr(Naive, f"__{_name}__", lambda self, n=f"__{_name}__": self.of(getattr(self.x, n)()))


class Names:
    """What the function gets."""

    def __init__(self, values: Mapping[str, Tensor], keep: Tensor) -> None:
        self.__dict__.update({name: Naive(x, keep) for name, x in values.items()})
