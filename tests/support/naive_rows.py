"""Row programs in plain torch on whole products, and the judge that holds `row_program` to them.

Functions get tensors whose axes have the names that they use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_streamkl import row_program

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

    def _normalised(self) -> Tensor:
        """Scores with -inf at keys that take no part, in rows that have a key."""
        hidden = self.keep.any(-1, keepdim=True) & ~self.keep
        return self._everywhere().masked_fill(hidden, -math.inf)

    def sum(self, axis: str, block: int | None = None) -> Naive:
        if axis == "head":
            return self.of(self.x.sum(1, keepdim=True))
        x = torch.where(self.keep, self._everywhere(), 0.0)
        if block is None:
            return self.of(x.sum(-1, keepdim=True))
        return Blocks(torch.stack([part.sum(-1) for part in x.split(block, -1)], -1), self.keep)

    def mean(self, axis: str) -> Naive:
        assert axis == "head"
        return self.of(self.x.mean(1, keepdim=True))

    def logsumexp(self, axis: str) -> Naive:
        assert axis == "key"
        x = self._normalised().logsumexp(-1, keepdim=True)
        return self.of(torch.where(self.keep.any(-1, keepdim=True), x, -math.inf))

    def log_softmax(self, axis: str) -> Naive:
        return self.of(self._everywhere() - self._normalised().logsumexp(-1, keepdim=True))

    def softmax(self, axis: str) -> Naive:
        return self.of(self._normalised().softmax(-1))

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Naive:
            return self.of(getattr(self.x, name)(*map(plain, args), **kwargs))

        return call

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Naive:
        given = {name: plain(x) for name, x in (kwargs or {}).items()}
        one = next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Naive))
        return one.of(f(*map(plain, args), **given))


class Blocks(Naive):
    """Sums over blocks of keys: they are returned as they are."""


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


Pairs = Mapping[str, tuple[Tensor, Tensor]]
Function = Callable[[Any], Any]


def naive(function: Function, dots: Pairs, **given: Any) -> dict[str, Tensor]:
    """All per-row values of a call of `row_program`."""
    (first, _), *_ = dots.values()
    is_of_lm_heads = next(iter(dots.values()))[1].dim() == 2
    values: dict[str, Tensor] = {}
    for name, (q, k) in dots.items():
        if is_of_lm_heads:
            x = (q.flatten(0, -2) @ k.mT)[None, None]
        else:
            x = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        values[name] = x
    rows, keys = x.shape[2:]
    for name, w in given.get("rows", {}).items():
        w = w.reshape(1, 1, -1) if is_of_lm_heads else w
        values[name] = w[(None,) * (3 - w.ndim)][..., None]
    for name, w in given.get("keys", {}).items():
        values[name] = w[(None,) * (3 - w.ndim)][..., None, :]
    for name, w in given.get("pairs", {}).items():
        w = w.reshape(1, 1, rows, keys) if is_of_lm_heads else w
        values[name] = w[(None,) * (4 - w.ndim)]
    for name, column in given.get("columns", {}).items():
        ids, w = column if isinstance(column, tuple) else (column, None)
        if is_of_lm_heads:
            ids, w = (y if y is None else y.reshape(1, 1, rows, -1) for y in (ids, w))
        hit = ids[..., None] == torch.arange(keys, device=x.device)
        values[name] = hit.any(-2) if w is None else (hit * w[..., None]).sum(-2)
    values["key_index"] = torch.arange(keys, device=x.device)[None, None, None]
    index = torch.arange(rows, device=x.device) % max(first.shape[-2], 1)
    values["row_index"] = index[None, None, :, None]
    default = torch.get_default_dtype()
    torch.set_default_dtype(x.dtype)  # of an index times a number
    try:
        found = _by_name(function(Names(values, _keep(x, given))))
    finally:
        torch.set_default_dtype(default)
    tensors = {}
    for name, v in found.items():
        y = v.x.expand(x.shape[0], -1, rows, -1)
        y = y if isinstance(v, Blocks) else y[..., 0]
        lead = first.shape[:-1]
        tensors[name] = y.reshape(*lead, *y.shape[3:]) if is_of_lm_heads else y
    return tensors


def _keep(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    rows, keys = x.shape[2:]
    i = torch.arange(rows, device=x.device)[:, None] + keys - rows
    j = torch.arange(keys, device=x.device)
    keep = torch.ones(x.shape[0], 1, rows, keys, dtype=torch.bool, device=x.device)
    left, right = given.get("window", (None, None))
    if given.get("is_causal"):
        right = 0
    if left is not None:
        keep = keep & (j >= i - left)
    if right is not None:
        keep = keep & (j <= i + right)
    if "key_lengths" in given:
        keep = keep & (j < given["key_lengths"][:, None, None, None])
    return keep & given["mask"] if "mask" in given else keep


def _by_name(values: Any) -> dict[str, Any]:
    return values if isinstance(values, dict) else {"value": values}


def check(
    function: Function,
    dots: Pairs,
    *,
    impl: str = "torch",
    reduction: str = "none",
    rtol: float = 1e-10,
    atol: float = 1e-11,
    **given: Any,
) -> dict[str, Tensor]:
    """`row_program` has the values and gradients of plain torch; returns its values.

    Every input that requires a gradient gets one, whatever the numbers of the function are.
    """
    tensors = {id(x): x for x in tree_leaves((dots, given)) if isinstance(x, Tensor)}
    leaves = [x for x in tensors.values() if x.requires_grad]
    found = row_program(function, dots=dots, impl=impl, reduction=reduction, **given)
    expected = naive(function, dots, **given)
    if reduction != "none":
        expected = {name: getattr(x, reduction)() for name, x in expected.items()}
    got = _by_name(found)
    assert list(got) == list(expected)
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol, equal_nan=True)
    for name, x in expected.items():
        close(got[name], x, msg=_of(name))
    if leaves:
        own = torch.autograd.grad(_total(got), leaves, retain_graph=True)
        for i, (a, b) in enumerate(zip(own, gradients_of(expected, leaves), strict=True)):
            close(a, b, msg=_of(f"gradient {i}"))
    return got


def _of(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def _total(values: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(x * _weights(x)).sum() for x in values.values()]).sum()


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(
        x.shape
    )


def gradients_of(values: Mapping[str, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum in which every row of every value has a weight of its own."""
    total = _total(values)
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
