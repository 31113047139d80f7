"""A run of eager code in which every operation rounds otherwise, in the backward as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FILL = 1e6  # beyond it lie numbers that stand for infinity, of which a rounding is a mask
EXPONENTIALS = ("exp", "_softmax", "_log_softmax", "logsumexp")
LOGARITHMS = ("_log_softmax", "logsumexp")


class PerturbRounding(TorchDispatchMode):
    """Moves each new floating tensor by one rounding of its dtype, up or down.

    Exponentials are moved by what a rounding of their argument does: -1e4 next to a score of 1
    leaves its probability four digits less.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or any(r.alias_info for r in func._schema.returns):
            return made
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        largest = _largest(given[0]) if name in EXPONENTIALS and given else 0.0
        return tree_map(lambda x: self._moved(x, name, largest), made)

    def _moved(self, x: Any, name: str, largest: float) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        if x.dtype.itemsize == 1:  # torch adds no float8
            return x
        draw = torch.randint(0, 2, x.shape, generator=self.generator)
        by = (2 * draw - 1) * torch.finfo(x.dtype).eps
        change = x * by
        if name in EXPONENTIALS:
            change = change + by * largest * (1.0 if name in LOGARITHMS else x)
        return torch.where(x.abs() < FILL, x + change, x).to(x.dtype)


def _largest(x: Tensor) -> float:
    sizes = x.detach().abs()
    known = sizes[(sizes < FILL).logical_and(sizes.isfinite())]
    return float(known.max()) if known.numel() and x.is_floating_point() else 0.0
