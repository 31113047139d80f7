"""Compares two results as strictly as naive code of the same dtype allows.

NOTE [Tolerance of a check]
No tolerance is fixed. The reference is the user's code in float64. A replacement may differ from
it by four times the error of the user's code in its own dtype, plus one rounding of the result:
both round the same numbers, in another order. But a run can be exact by luck. So before a
difference is reported, the reference runs a few times more, with every intermediate result moved
up or down by one rounding of the dtype that it has in the program, and exponentials by roundings
of the exponent. The largest error of these runs counts as the error of the user's code. It grows
if large numbers cancel: in a sum to one number, in a difference of losses. A gradient whose terms
cancel to 0 is exact in all of these runs. Another order of its sums has an error of a rounding of
the largest term, in the type in which sums are accumulated (gradient_terms.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_streamkl.fx_passes.validation.running import Result

MULTIPLE = 4  # of the error of the user's code


@dataclass
class Tolerance:
    """Holds, by result, how far the user's code is from float64."""

    error: dict[str, float] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)  # the largest of each gradient
    is_right: Tensor | None = None  # of integers, which of another number are right, too

    def add(self, naive: Result, exact: Result) -> None:
        for name, x, y in _pairs(naive, exact):
            self.error[name] = max(self.error.get(name, 0.0), distance(x, y, x))

    def add_terms(self, sizes: Result) -> None:
        gradients = Result(None, sizes.gradients, {})
        for name, x in _named(gradients):
            if x is not None:
                self.terms[name] = max(self.terms.get(name, 0.0), largest(x))

    def allowed(self, name: str, naive: Tensor, exact: Tensor) -> float:
        last_digit = torch.finfo(naive.dtype).eps * largest(exact)
        accumulated = torch.promote_types(naive.dtype, torch.float32)
        of_terms = torch.finfo(accumulated).eps * self.terms.get(name, 0.0)
        return MULTIPLE * (self.error.get(name, 0.0) + of_terms) + last_digit


def difference(ours: Result, naive: Result, exact: Result, slack: Tolerance) -> str:
    """Describes the first difference, with the figures; empty if there is none."""
    reason = _structure(ours, naive)
    if reason:
        return reason
    for name, x, y, z in _triples(ours, naive, exact):
        if not y.dtype.is_floating_point:
            # where float64 decides otherwise than the dtype, either is right
            is_right = (x == y) | (x == z)
            is_right = is_right if slack.is_right is None else is_right | slack.is_right
            if not bool(is_right.all()):
                return f"{name}: {int((x != y).sum())} of {x.numel()} entries differ"
            continue
        error, allowed = distance(x, z, y), slack.allowed(name, y, z)
        if not error <= allowed:
            return (
                f"{name} is off by {error:.2g} of {largest(z):.2g}, where the code as it is "
                f"written is off by {slack.error.get(name, 0.0):.2g}"
            )
        if not _same_infinities(x, y, z):
            return f"{name} is infinite in other places"
    return ""


def is_informative(exact: Result) -> bool:
    """Returns whether a result has numbers to compare."""
    value = exact.value
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return True
    finite = value.isfinite()
    if value.numel() and not bool(finite.any()):
        return bool(value.isinf().all())
    return all(
        g is None or not g.numel() or bool(g.isfinite().any()) for g in exact.gradients.values()
    )


def _structure(ours: Result, naive: Result) -> str:
    x, y = ours.value, naive.value
    if isinstance(y, Tensor) != isinstance(x, Tensor):
        return f"the value is {type(x).__name__} in place of {type(y).__name__}"
    if not isinstance(y, Tensor):
        return "" if x == y else f"the value is {x} in place of {y}"
    if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
        return (
            f"the value is {x.dtype} {tuple(x.shape)} on {x.device} in place of "
            f"{y.dtype} {tuple(y.shape)} on {y.device}"
        )
    if bool(ours.gradients) != bool(naive.gradients):
        return "the value has " + ("a gradient" if ours.gradients else "no gradient") + " now"
    for name, gradient in naive.gradients.items():
        mine = ours.gradients[name]
        if (gradient is None) != (mine is None):
            return (
                f"the gradient of {name} is " + ("None" if mine is None else "not None") + " now"
            )
    if ours.written.keys() != naive.written.keys():
        return "other inputs are modified in place"
    return ""


def _named(result: Result) -> Iterator[tuple[str, Tensor | None]]:
    yield "the value", result.value if isinstance(result.value, Tensor) else None
    for name, gradient in result.gradients.items():
        yield f"the gradient of {name}", gradient
    for name, written in result.written.items():
        yield f"the input {name}", written


def _pairs(a: Result, b: Result) -> Iterator[tuple[str, Tensor, Tensor]]:
    others = dict(_named(b))
    for name, x in _named(a):
        y = others.get(name)
        if x is not None and y is not None and x.shape == y.shape:
            yield name, x, y


def _triples(a: Result, b: Result, c: Result) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    others, exact = dict(_named(b)), dict(_named(c))
    for name, x in _named(a):
        y, z = others.get(name), exact.get(name)
        if x is not None and y is not None and z is not None:
            yield name, x, y, z


def distance(x: Tensor, exact: Tensor, naive: Tensor) -> float:
    """Returns the largest difference where the exact value and the user's are finite; NaN is
    far.
    """
    if not x.numel() or not x.dtype.is_floating_point:
        return 0.0
    where = exact.isfinite() & naive.isfinite()
    off = (x.double() - exact.double()).abs().nan_to_num(nan=float("inf"))
    return float(torch.where(where, off, 0.0).max())


def _same_infinities(x: Tensor, naive: Tensor, exact: Tensor) -> bool:
    """Checks that the replacement is infinite where the user's code and the reference are."""
    where = naive.isinf() & (naive.double() == exact.double())
    return bool((~where | (x.double() == exact.double())).all())


def largest(x: Tensor) -> float:
    """Returns the largest finite magnitude."""
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0
