"""Reduces one value per token: which tokens count, their factors, what a sum is divided by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_streamkl import checks


def per_token(
    row_mask: Tensor | None,
    row_weight: Tensor | None,
    tokens: tuple[int, ...],
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """Checks a mask and factors of tokens; returns one element per token, None for what is not."""
    counted = factor = None
    if row_mask is not None:
        counted = _expanded(checks.row_mask(row_mask, tokens, device), tokens)
    if row_weight is not None:
        factor = _expanded(
            checks.check_broadcast("row_weight", row_weight, tokens, device), tokens
        )
        if factor.is_complex():
            raise TypeError(f"row_weight must be real, got {factor.dtype}")
    return counted, factor


def needed_gradients(tensors: Iterable[Tensor | None]) -> list[bool]:
    """Says which of a call's tensors get a gradient."""
    return [x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors]


def _expanded(x: Tensor, tokens: tuple[int, ...]) -> Tensor:
    return x.expand(tokens).reshape(-1)


@dataclass(frozen=True)
class TokenReduction:
    """Says how a call reduces its values; ``tokens`` are the shape of all of them."""

    reduction: str
    tokens: tuple[int, ...]
    counted: Tensor | None  # [num_tokens], boolean; None counts all
    factor: Tensor | None  # [num_tokens]

    def weights(self, *hidden: Tensor) -> Tensor:
        """Returns the factor of each token's value in the reduction, in the dtype of values."""
        is_double = torch.float64 in [x.dtype for x in hidden]
        dtype = torch.float64 if is_double else torch.float32
        weight = hidden[0].new_ones(hidden[0].shape[0], dtype=dtype)
        if self.factor is not None:
            weight = self.factor.to(dtype)
        if self.counted is not None:
            weight = torch.where(self.counted, weight, 0.0)
        return weight / denominator(self.counted, self.reduction, self.tokens)

    def reduced(self, value: Tensor) -> Tensor:
        """Returns the reduction of one value per token."""
        factor = self.factor
        if self.counted is not None:
            value = torch.where(self.counted, value, 0.0)
            if factor is not None:  # which may be infinite where it does not count
                factor = torch.where(self.counted, factor, 0.0)
        if factor is not None:
            value = _weighted(value, factor.to(value.dtype))
        if self.reduction == "none":
            return value.view(self.tokens)
        return value.sum() / denominator(self.counted, self.reduction, self.tokens)


def _weighted(value: Tensor, weight: Tensor) -> Tensor:
    """Returns ``value * weight``, and 0 for a row of weight 0 whose value is not finite."""
    lost = (weight == 0) & ~value.isfinite()
    product = value.masked_fill(lost, 0.0) * weight
    if weight.requires_grad:
        # the gradient to that weight is the row's value, as everywhere: sqrt(w) is 0 at 0 and
        # has an infinite derivative, whose sign is that of the value
        root = torch.where(lost, weight, 1.0).sqrt()
        root = torch.where(value == -math.inf, -root, root)
        product = product + torch.where(lost, root, 0.0)
    return product


def denominator(counted: Tensor | None, reduction: str, tokens: tuple[int, ...]) -> Tensor | int:
    """Returns what a reduction divides the sum by."""
    match reduction:
        case "mean":
            num_tokens = math.prod(tokens)
            return num_tokens if counted is None else counted.sum().clamp(min=min(1, num_tokens))
        case "batchmean":
            return tokens[0]
    return 1
