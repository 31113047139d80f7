"""Runs calls of `linear_kl` without a token, which still take part in all exchanges of ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HIDDEN = ("student_hidden", "teacher_hidden")


def has_no_token(given: dict[str, Any]) -> bool:
    """Returns whether hidden states hold none."""
    return all(
        isinstance(given[name], Tensor) and given[name].ndim > 1 and 0 in given[name].shape[:-1]
        for name in HIDDEN
    )


def one_that_does_not_count(given: dict[str, Any]) -> dict[str, Any]:
    """Replaces no token by one token of value 0 and without gradient."""
    hidden = {name: F.pad(given[name].flatten(0, -2), (0, 0, 0, 1)) for name in HIDDEN}
    changed = {**hidden, "row_mask": hidden["student_hidden"].new_zeros(1, dtype=torch.bool)}
    if isinstance(given["labels"], Tensor):
        changed["labels"] = given["labels"].new_full((1,), given["ignore_index"])
    weight = given["row_weight"]
    if isinstance(weight, Tensor) and weight.ndim:
        changed["row_weight"] = F.pad(weight.flatten()[:0], (0, 1))
    return changed


def rows_of(value: Tensor, tokens: torch.Size) -> Tensor:
    """Drops the value of the token that `one_that_does_not_count` added."""
    return value[:0].view(tokens)


def mean_of_none(total: Tensor, reduction: str, tokens: torch.Size) -> Tensor:
    """Returns a reduction over no token: 0, and NaN for a mean, as in torch."""
    is_undefined = reduction == "mean" or (reduction == "batchmean" and tokens[0] == 0)
    return total + math.nan if is_undefined else total
