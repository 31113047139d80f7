"""Lists the torch functions that compute operations of expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from torch_streamkl.program.operations import OPERATIONS

# those that the table has under torch's own name, and others
FUNCTIONS: dict[str, Callable[..., Any]] = {
    op: x.run for op, x in OPERATIONS.items() if x.run is getattr(torch, op, None)
} | {
    "softplus": torch.nn.functional.softplus, "not": torch.logical_not, "div": torch.div,
    "eq": torch.eq, "gt": torch.gt, "ge": torch.ge, "floor_divide": torch.floor_divide,
    "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
}  # fmt: skip
# of a tensor and a number what operations are of a number and a tensor, which torch has not
TURNED: dict[str, Callable[..., Any]] = {
    "eq": torch.eq, "gt": torch.lt, "ge": torch.le,
    "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
}  # fmt: skip
# of numbers what torch functions are of tensors
OF_NUMBERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.add: operator.add, torch.sub: operator.sub, torch.mul: operator.mul,
    torch.div: operator.truediv, torch.pow: operator.pow, torch.remainder: operator.mod,
    torch.floor_divide: operator.floordiv,
}  # fmt: skip
