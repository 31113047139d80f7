"""The gate: loss and gradients against float64, within the naive code's own error.

A provider passes when its error is at most twice that of the naive code in the same dtype plus one
rounding to that dtype. One that fails is red, and its times are compared with nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import Case, Inputs


@dataclass(frozen=True)
class Truth:
    """The exact loss and gradients of one input set, and what a provider may be off by."""

    loss: float
    gradients: tuple[Tensor, ...]
    loss_budget: float
    gradient_budget: float


@dataclass(frozen=True)
class Verdict:
    """Relative errors of one provider: of the loss, and the larger of the gradients' (in norm)."""

    loss_error: float | None  # None when only a part of the heads was checked
    gradient_error: float
    loss_budget: float
    gradient_budget: float

    @property
    def is_green(self) -> bool:
        """NaN is red."""
        loss_ok = self.loss_error is None or self.loss_error <= self.loss_budget
        return loss_ok and self.gradient_error <= self.gradient_budget


def truth_of(case: Case, inputs: Inputs) -> Truth:
    """Piece by piece, so that float64 fits where the naive code does not."""
    dtype = inputs[0].dtype
    losses, gradients = _by_pieces(case, inputs, torch.float64)
    naive_losses, naive_gradients = _by_pieces(case, inputs, dtype)
    loss = math.fsum(losses)
    # Errors of pieces are added without their signs: a total that is right by luck is no budget.
    naive_loss_error = math.fsum(
        abs(a - b) for a, b in zip(naive_losses, losses, strict=True)
    ) / abs(loss)
    rounding = torch.finfo(dtype).eps
    return Truth(
        loss,
        gradients,
        2 * naive_loss_error + rounding,
        2 * _worst(naive_gradients, gradients) + rounding / 2,
    )


def judge(case: Case, truth: Truth, loss: Tensor, gradients: tuple[Tensor, ...]) -> Verdict:
    """Errors of a provider's loss and gradients of the student's two inputs."""
    parts = tuple(g.double() for g in case.gated(gradients))
    loss_error = abs(loss.item() - truth.loss) / abs(truth.loss) if case.gates_everything else None
    return Verdict(
        loss_error, _worst(parts, truth.gradients), truth.loss_budget, truth.gradient_budget
    )


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
        for sum_of_pieces, gradient in zip(
            total[:2], torch.autograd.grad(loss, student), strict=True
        ):
            sum_of_pieces += gradient
    return losses, totals[:2]


def _worst(gradients: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    return max(((g - t).norm() / t.norm()).item() for g, t in zip(gradients, truth, strict=True))
