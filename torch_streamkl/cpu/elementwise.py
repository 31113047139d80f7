"""Computes elementwise operations several times faster on a CPU than the obvious code does.

On other devices the obvious code runs: the fast paths read values, which would wait for a GPU.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Of exp, by dtype: arguments below give numbers that are denormal, or nearly.
_LEAST = {torch.float32: -87.0, torch.float64: -708.0}


def exp(x: Tensor) -> Tensor:
    """Computes e^x; on a CPU, results that would be denormal are 0, as on GPUs.

    A block with arguments below -87 takes 7 to 20 times as long there, and with -inf three times.
    """
    least = _least_where_needed(x)
    return x.exp() if least is None else _flushed(x.clamp_min(least), least)


def exp_(x: Tensor) -> Tensor:
    """Computes `exp` in place."""
    least = _least_where_needed(x)
    return x.exp_() if least is None else _flushed(x.clamp_min_(least), least)


def _least_where_needed(x: Tensor) -> float | None:
    if x.device.type != "cpu":
        return None
    least = _LEAST[x.dtype]
    return least if x.numel() and bool(x.amin() < least) else None  # NaN stays


def _flushed(clamped: Tensor, least: float) -> Tensor:
    return F.threshold(clamped.exp_(), _exp_of(least, clamped.dtype), 0.0, inplace=True)


@functools.cache
def _exp_of(x: float, dtype: torch.dtype) -> float:
    vector = torch.full((64,), x, dtype=dtype, device="cpu")  # as a vector is computed
    return float(vector.exp()[0])


def limits(allowed: Tensor) -> Tensor:
    """Returns the limits that `mask_` takes: inf where a key is allowed, -inf elsewhere."""
    limit = torch.full(allowed.shape, -math.inf, device=allowed.device)
    return limit.masked_fill_(allowed, math.inf)


def mask_(x: Tensor, limit: Tensor) -> bool:
    """Puts -inf where a key is not allowed; returns whether all other elements are finite for
    sure.
    """
    if x.device.type == "cpu" and bool(x.sum().isfinite()):
        torch.minimum(x, limit, out=x)  # would keep NaN, which is not there
        return True
    x.masked_fill_(limit < 0, -math.inf)
    return False
