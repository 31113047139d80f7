"""The gate: loss and gradients against float64, within the naive code's own error.

A provider passes when its error is at most twice that of the naive code in the same dtype plus one
rounding to that dtype. One that fails is red, and its times are compared with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case, Inputs


def worst_error(given: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of the tensors' errors, each relative in norm; NaN where one is NaN."""
    pairs = zip(given, exact, strict=True)
    return float(torch.stack([(g.double() - e).norm() / e.norm() for g, e in pairs]).max())


def total_error(given: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Of all tensors together: some may be zero but for rounding."""
    pairs = list(zip(given, exact, strict=True))
    off = torch.stack([(g.double() - e).square().sum() for g, e in pairs]).sum()
    norm = torch.stack([e.double().square().sum() for _, e in pairs]).sum()
    return float((off / norm).sqrt())


@dataclass(frozen=True)
class Verdict:
    """Relative errors of one provider: of the loss, and of the gradients."""

    loss_error: float | None  # None when only a part of the heads was checked
    gradient_error: float
    loss_budget: float
    gradient_budget: float

    @property
    def is_green(self) -> bool:
        """NaN is red."""
        loss_ok = self.loss_error is None or self.loss_error <= self.loss_budget
        return loss_ok and self.gradient_error <= self.gradient_budget

    @property
    def status(self) -> dict[str, str]:
        """Empty, or red and why."""
        if self.is_green:
            return {}
        loss = "not checked" if self.loss_error is None else f"{self.loss_error:.1e}"
        detail = (
            f"loss off by {loss} (allowed {self.loss_budget:.1e}), "
            f"gradients by {self.gradient_error:.1e} (allowed {self.gradient_budget:.1e})"
        )
        return {"status": "red", "detail": detail}

    def row(self) -> dict[str, Any]:
        """For a record whose rows are of their own kind."""
        return vars(self) | self.status


@dataclass(frozen=True)
class Truth:
    """The exact loss and gradients of one input set, and what a provider may be off by."""

    loss: float
    gradients: Sequence[Tensor]
    loss_budget: float
    gradient_budget: float
    error: Callable[[Sequence[Tensor], Sequence[Tensor]], float] = worst_error

    @classmethod
    def of(
        cls,
        exact: tuple[float, Sequence[Tensor]],
        naive: tuple[float, Sequence[Tensor]],  # the error of its loss instead of the loss
        dtype: torch.dtype,
        error: Callable[[Sequence[Tensor], Sequence[Tensor]], float] = worst_error,
    ) -> Truth:
        rounding = torch.finfo(dtype).eps
        budget = 2 * error(naive[1], exact[1]) + rounding / 2
        return cls(*exact, 2 * naive[0] / abs(exact[0]) + rounding, budget, error)

    def judge(self, loss: float | None, gradients: Sequence[Tensor]) -> Verdict:
        loss_error = None if loss is None else abs(loss - self.loss) / abs(self.loss)
        error = self.error(gradients, self.gradients)
        return Verdict(loss_error, error, self.loss_budget, self.gradient_budget)


def truth_of(case: Case, inputs: Inputs) -> Truth:
    """Piece by piece, so that float64 fits where the naive code does not."""
    dtype = inputs[0].dtype
    losses, gradients = _by_pieces(case, inputs, torch.float64)
    naive_losses, naive_gradients = _by_pieces(case, inputs, dtype)
    # Errors of pieces are added without their signs: a total that is right by luck is no budget.
    off = math.fsum(abs(a - b) for a, b in zip(naive_losses, losses, strict=True))
    return Truth.of((math.fsum(losses), gradients), (off, naive_gradients), dtype)


def _by_pieces(
    case: Case, inputs: Inputs, dtype: torch.dtype
) -> tuple[list[float], tuple[Tensor, ...]]:
    tensors = tuple(x.detach().to(dtype) for x in case.gated(inputs))
    totals = tuple(torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in tensors)
    naive, losses = case.naive(), []
    for (piece, share), (total, _) in zip(case.pieces(tensors), case.pieces(totals), strict=True):
        student = [x.detach().requires_grad_() for x in piece[:2]]
        loss = naive(*student, *piece[2:]) * (share * case.gate_scale)
        losses.append(loss.item() / case.gate_scale)
        for whole, gradient in zip(total, torch.autograd.grad(loss, student), strict=False):
            whole += gradient
    return losses, totals[:2]
