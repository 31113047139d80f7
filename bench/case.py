"""Defines what is measured: a case, its problem on a device, and how exact results are judged.

A `Case` says what is computed: sizes, naive code, and exact gradients to compare with. A `Problem`
is a case on a device, as one provider computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Loss = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]
Build = Callable[["Case", "Problem"], "Loss | Problem"]
PIECE = 2**25  # elements that an error is computed of at a time


class Unavailable(Exception):
    """A provider cannot compute a case: a package is missing, or it has no such form."""


def _nothing() -> None:
    pass


@dataclass
class Problem:
    """A scalar loss, what it is called with, and whose gradients a step gives."""

    device: torch.device
    loss: Loss
    sets: list[Inputs]  # steps take them in turn
    model: Any = None  # whose parameters get the gradients, instead of the inputs
    teacher: Any = None  # of the model
    finish: Callable[[], object] = _nothing  # an optimiser's step
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # the forward
    part: Callable[[list[Tensor]], list[Tensor]] = list  # of the gradients, what a rank computes
    flops: tuple[float, float] | None = None  # forward and backward, instead of the case's
    is_judged: bool = True  # whether it computes the case's loss

    def step(
        self, number: int = 0, mark: Callable[[], object] = _nothing
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs forward, ``mark()``, backward; returns the loss and the gradients."""
        inputs = self.sets[number % len(self.sets)]
        if self.model is not None:
            self.model.zero_grad(set_to_none=True)
        with self.around():
            loss = self.loss(*inputs)
        mark()
        if self.model is None:
            leaves = [x for x in inputs if x.requires_grad]
            return loss.detach(), list(torch.autograd.grad(loss, leaves))
        loss.backward()
        self.finish()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return loss.detach(), gradients


@dataclass(frozen=True)
class Case:
    """What is computed. The label names it; cases of one sweep differ in one size."""

    name: str
    source: str = ""  # where the shape comes from

    family = ""
    size = "seqlen"  # the field that `--sizes` sets
    is_shared = True  # all providers have the same inputs
    is_exact = True  # `truth` has exact gradients; or the first provider's are compared with
    fits_together = True  # all providers fit into memory, and are timed in turn
    gate_scale = 1.0  # the whole's gradient over that of the gated part alone

    @property
    def label(self) -> str:
        return self.name

    @property
    def section(self) -> str:
        """Where RESULTS.md shows it."""
        return self.family

    @property
    def sweep(self) -> tuple[str, int]:
        """The curve that the case is a point of, and its place on it."""
        return self.name, getattr(self, self.size, 0)

    def shape(self) -> str:
        return ""

    def resized(self, size: int) -> Case:
        """The same case with so many tokens."""
        return replace(self, **{self.size: size})

    def direct(self, options: dict[str, Any]) -> Loss:
        """The operator called by hand."""
        raise Unavailable("no operator has this loss")

    def program(self, options: dict[str, Any]) -> Loss:
        """`row_program` called by hand."""
        raise Unavailable("nobody has written this row program")

    def own(self) -> dict[str, Build]:
        """Providers that only this case has."""
        return {}

    def flops(self) -> tuple[float, float]:
        """The least arithmetic of forward and backward; 0 where nobody counts."""
        return 0.0, 0.0

    def problem(self, device: torch.device, sets: int = 1) -> Problem:
        """Inputs on a device, and naive code."""
        return Problem(device, self.naive(), [self._inputs(device, i) for i in range(sets)])

    def naive(self) -> Loss:
        raise NotImplementedError

    def _inputs(self, device: torch.device, seed: int) -> Inputs:
        raise NotImplementedError

    def pieces(
        self, inputs: Inputs, block: int | None = None
    ) -> Iterator[tuple[Loss, Inputs, float]]:
        """Naive code, slices of the inputs, and their shares: weighted losses add up."""
        raise NotImplementedError

    def gated(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the gate looks at of the inputs, or of the gradients: usually everything."""
        return tuple(tensors)

    def budget(self, device: torch.device) -> float:
        """What a provider may be off by the first one, where nothing exact is known."""
        return math.inf

    def truth(self, problem: Problem) -> Truth:
        """Exact loss and gradients, piece by piece: float64 fits where naive code does not."""
        inputs = problem.sets[0]
        dtype = inputs[0].dtype
        losses, gradients = self._by_pieces(inputs, torch.float64)
        naive_losses, naive_gradients = self._by_pieces(inputs, dtype)
        # Errors of pieces are added without signs: a total that is right by luck is no budget.
        off = math.fsum(abs(a - b) for a, b in zip(naive_losses, losses, strict=True))
        return Truth.of((math.fsum(losses), gradients), (off, naive_gradients), dtype)

    def _by_pieces(self, inputs: Inputs, dtype: torch.dtype) -> tuple[list[float], list[Tensor]]:
        """Losses and gradients of naive code in a dtype, which are added in float64."""
        wide = [
            x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for x in self.gated(inputs)
        ]
        losses = []
        for naive, piece, share in self.pieces(tuple(wide)):
            given = (x.to(dtype) if x.is_floating_point() else x for x in piece)
            loss = naive(*given) * (share * self.gate_scale)
            loss.backward()
            losses.append(loss.item() / self.gate_scale)
        return losses, [x.grad for x in wide if x.grad is not None]


# ----------------------------------------------------------------------------------------- gate
def worst_error(given: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the largest of the tensors' errors, relative in norm; NaN where one is NaN."""
    errors = [total_error([g], [e]) for g, e in zip(given, exact, strict=True)]
    return max(errors, key=lambda error: (math.isnan(error), error))


def total_error(given: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the error of all tensors together: some may be zero but for rounding.

    It is computed where ``given`` is, in pieces: float64 copies of gradients may not fit.
    """
    off = norm = 0.0
    for g, e in zip(given, exact, strict=True):
        parts = (x.detach().flatten().split(PIECE) for x in (g, e))
        for mine, its in zip(*parts, strict=True):
            wide = its.to(mine.device).double()
            off += float((mine.double() - wide).square().sum())
            norm += float(wide.square().sum())
    return math.sqrt(off / norm) if norm else math.nan


@dataclass(frozen=True)
class Truth:
    """The exact loss and gradients of one input set, and what a provider may be off by.

    A provider passes when its error is at most twice that of the naive code in the same dtype plus
    one rounding to that dtype. One that fails is red, and its times are compared with nothing.
    """

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

    def judge(self, loss: float | None, gradients: Sequence[Tensor]) -> dict[str, Any]:
        """Fields of a row; without a loss (a part was checked) gradients alone decide."""
        off = None if loss is None else abs(loss - self.loss) / abs(self.loss)
        wrong = self.error(gradients, self.gradients)
        found: dict[str, Any] = {
            "loss_error": off, "loss_budget": self.loss_budget,
            "gradient_error": wrong, "gradient_budget": self.gradient_budget,
        }  # fmt: skip
        loss_ok = off is None or off <= self.loss_budget
        if loss_ok and wrong <= self.gradient_budget:  # NaN is red
            return found
        shown = "not checked" if off is None else f"{off:.1e}"
        detail = (
            f"loss off by {shown} (allowed {self.loss_budget:.1e}), "
            f"gradients by {wrong:.1e} (allowed {self.gradient_budget:.1e})"
        )
        return found | {"status": "red", "detail": detail}


def random_tensors(
    shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype, seed: int = 0,
    scales: Sequence[float] = (), learning: int = 2,
) -> Inputs:  # fmt: skip
    """Normal tensors, of which the first ones get gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    made = (
        torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)
        for shape, scale in zip(shapes, scales or [1.0] * len(shapes), strict=True)
    )
    return tuple(x.requires_grad_(i < learning) for i, x in enumerate(made))


def blocks(rows: int, block: int) -> Iterator[tuple[slice, float]]:
    """Slices that have every row once, and their shares."""
    for first in range(0, rows, block):
        last = min(first + block, rows)
        yield slice(first, last), (last - first) / rows


def mean_of(call: Loss, *, reduction: str = "mean", **options: Any) -> Loss:
    """Calls an operator; where it returns per-row values, torch averages them."""

    def loss(*inputs: Tensor) -> Tensor:
        value = call(*inputs, reduction=reduction, **options)
        return value if value.ndim == 0 else value.mean()

    return loss


def as_wide(x: Tensor) -> Tensor:
    """Returns float32, or what is wider already: as Transformers treats scores."""
    return x if x.dtype == torch.float64 else x.float()
