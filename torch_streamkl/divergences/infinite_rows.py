"""Gives rows of infinite value the gradients of naive code, for the reference.

The student may exclude a key that the teacher has; the forward KL is then infinite. Its gradient
to the student's scores is still S - P, and the teacher's is infinity minus infinity. Autograd
would multiply both by the row's incoming gradient, and 0 times infinity is NaN: a caller who
excludes such a row would lose the gradients of all others. Here a row whose incoming gradient is 0
adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_streamkl.program.divergences import Functional, variables_of


def with_infinite_rows(
    functional: Functional,
    sums: Callable[[Tensor, Tensor], Tensor],
    teacher: tuple[Tensor, Tensor],
    student: tuple[Tensor, Tensor],
    counted: Tensor,
) -> Tensor:
    """Returns ``sums`` of the log-probabilities of both sides, with a gradient for infinite rows.

    An infinite row has a first derivative only.
    """
    (log_t, lse_t), (log_s, lse_s) = teacher, student
    with torch.no_grad():
        value = sums(log_t, log_s)
        lost = value.isinf()
        h, g = functional.terms("hg", variables_of(log_t, log_s))
        h, g = (torch.where(counted, x, 0.0) for x in (h, g))
    kept_t, kept_s = (x.masked_fill(lost.unsqueeze(-1), 0.0) for x in (log_t, log_s))
    rows = torch.where(lost, value, sums(kept_t, kept_s))
    derivative = _first_order(log_t, lse_t, g) + _first_order(log_s, lse_s, h)
    return rows + torch.where(lost, derivative, 0.0)


def _first_order(log_p: Tensor, lse: Tensor, d: Tensor) -> Tensor:
    """Returns 0 for every row, with d as the derivative by the log-probabilities."""
    present, is_finite = log_p.isfinite(), d.isfinite()
    moves = _zero(log_p.masked_fill(~present, 0.0))
    largest = torch.finfo(d.dtype).max
    infinite = moves * largest * largest  # its derivative is infinite, and 0 where nothing comes
    finite_d = d.masked_fill(~is_finite, 0.0)
    terms = torch.where(is_finite, moves * finite_d, infinite)
    # a key that this side excludes has its log-sum-exp all the same
    of_absent = finite_d.masked_fill(present, 0.0).sum(-1)
    return terms.sum(-1) - of_absent * _zero(lse.masked_fill(lse == -torch.inf, 0.0))


def _zero(x: Tensor) -> Tensor:
    """Returns 0, with 1 as its derivative."""
    return x - x.detach()
