"""Defines what operations are in torch, where no function of torch's own will do."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion

# NOTE [The bound of a clamp]
# Where x is a bound of a clamp, the gradient to x is 1 until torch 2.13. From torch 2.14 on it is
# 0 if the bound is a number, as with relu, and 1/2 if it is a tensor, as with maximum. So there, a
# clamp by a tensor is read as a maximum or minimum, and clamps of programs are by numbers.
TIES_ARE_CUT = TorchVersion(torch.__version__) >= "2.14"
CLAMPS = {"min": "clamp_min", "max": "clamp_max"}
CLAMPS_BY_TENSOR = {"min": "maximum", "max": "minimum"} if TIES_ARE_CUT else CLAMPS


def mul0(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies; 0 where a factor is 0: NOTE [Zero annihilates] in graph.py."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


def div0(a: Tensor, b: Tensor) -> Tensor:
    """Divides; 0 where the dividend is 0: NOTE [Zero annihilates] in graph.py."""
    return torch.where(a == 0, 0.0, a / b)


def norm(squares: Tensor) -> Tensor:
    """Returns the square root of a sum of squares: its gradient at 0 is 0, also by autograd."""
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + e^x)."""
    return torch.nn.functional.softplus(x, threshold=80.0)  # exp has no overflow below


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a + e^b), with the derivative 0 where both are -inf; that of torch's is NaN."""
    if not _is_differentiated(a, b):
        return torch.logaddexp(a, b)
    absent = (a == -math.inf) & (b == -math.inf)
    present = torch.logaddexp(a.masked_fill(absent, 0.0), b.masked_fill(absent, 0.0))
    return present.masked_fill(absent, -math.inf)


def clamp_min(x: Tensor, bound: Tensor) -> Tensor:
    """Returns the larger; ``bound`` is a number as a tensor: NOTE [The bound of a clamp]."""
    if not (TIES_ARE_CUT and _is_differentiated(x)):
        return torch.clamp_min(x, bound)
    return _cut(x > bound, x, bound)


def clamp_max(x: Tensor, bound: Tensor) -> Tensor:
    """Returns the smaller; ``bound`` is a number as a tensor: NOTE [The bound of a clamp]."""
    if not (TIES_ARE_CUT and _is_differentiated(x)):
        return torch.clamp_max(x, bound)
    return _cut(x < bound, x, bound)


def _cut(inside: Tensor, x: Tensor, bound: Tensor) -> Tensor:
    """Returns x inside of its bound, with a gradient there alone; NaN stays NaN without one."""
    return torch.where(inside, x, torch.where(x.isnan(), x.detach(), bound))


def _is_differentiated(*tensors: Tensor) -> bool:
    return any(x.requires_grad for x in tensors) or forward_ad._current_level >= 0
