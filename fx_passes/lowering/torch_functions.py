"""Lists the torch functions that compute operations of expressions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

UNARY: dict[str, Callable[..., Any]] = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log,
    "log1p": torch.log1p, "sqrt": torch.sqrt, "abs": torch.abs, "sign": torch.sign,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "erf": torch.erf, "sin": torch.sin, "cos": torch.cos,
    "tan": torch.tan, "sinh": torch.sinh, "cosh": torch.cosh, "relu": torch.relu,
    "softplus": torch.nn.functional.softplus, "isnan": torch.isnan, "isinf": torch.isinf,
    "not": torch.logical_not,
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "div": torch.div, "eq": torch.eq, "gt": torch.gt, "ge": torch.ge,
    "remainder": torch.remainder, "floor_divide": torch.floor_divide,
    "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
    "minimum": torch.minimum, "maximum": torch.maximum,
}  # fmt: skip
# of a tensor and a number what operations are of a number and a tensor, which torch has not
TURNED: dict[str, Callable[..., Any]] = {
    "eq": torch.eq, "gt": torch.lt, "ge": torch.le,
    "clamp_min": torch.clamp_min, "clamp_max": torch.clamp_max,
}  # fmt: skip
OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "div": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod,
}  # fmt: skip
