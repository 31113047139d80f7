"""Compares a compiled program's results with eager's, entry by entry, against float64.

NOTE [Tolerance of verify()]
The reference is the user's program in float64. An entry of a compiled result may differ from it by
a multiple of the error that the program in its own dtypes has there, plus one rounding. But a run
can be exact by luck in an entry, and a float64 program is its own reference. So before a
difference is reported, the program runs a few times more in eager mode with every operation
rounded otherwise (rounding.py), and the largest error of these runs counts. The largest error of a
tensor is held to a smaller multiple than the error of one entry, for which there are few samples.
A single number, such as a loss, is held to twice the largest error of NUM_ROUNDINGS runs: naive
bfloat16 code is off by 1 % there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_streamkl.fx_passes.validation.compare import MULTIPLE, largest
from torch_streamkl.fx_passes.verification.values import Results, Structure

NUMBER_MULTIPLE = 2
ENTRY_MULTIPLE = 32  # of the largest of a few samples of an entry's error
UNSEEN_ROUNDINGS = 4.0  # of the operations of a program, if only its arguments are rounded
DEFINED = "the compiled program gives the defined value (docs/reference/numerics.md)"
UNKNOWN = "cannot be compared"


@dataclass(frozen=True)
class Compared:
    """Holds one result: its size in every run, and how far the runs are from float64."""

    name: str  # "output 0", "gradient of argument 1", "gradient of weight", "argument 2 after"
    eager: float | None  # the number itself, or the norm of a tensor; None where there is none
    compiled: float | None
    exact: float | None
    eager_error: float
    compiled_error: float
    difference: str = ""  # empty when the compiled program is as right as eager
    note: str = ""  # why eager is no measure for it, or for a part of it
    num_entries: int = 1  # numbers that were compared

    @property
    def agrees(self) -> bool:
        return not self.difference and not self.note


@dataclass
class Runs:
    """Holds all runs of a program, and the errors of eager code."""

    eager: Results
    compiled: Results
    exact: Results
    defined: Results | None = None  # in float64 with a finite number for -inf
    error: dict[str, Tensor] = field(default_factory=dict)  # by result, of every entry
    others: list[Results] = field(default_factory=list)  # rounded otherwise

    def __post_init__(self) -> None:
        self.add_error(self.eager)

    def add(self, other: Results, *, is_rounded: bool) -> None:
        """Adds another run in eager mode, with operations or only arguments rounded otherwise.

        Arguments alone do not show what operations round where their results nearly cancel.
        """
        self.others.append(other)
        self.add_error(other, least=0.0 if is_rounded else UNSEEN_ROUNDINGS)

    def add_error(self, run: Results, least: float = 0.0) -> None:
        """Records an error, of at least so many roundings of a result's largest entry."""
        for name, z in self.exact.values.items():
            x, exact = _numbers(run.values.get(name)), _numbers(z)
            if x is None or exact is None or x.shape != exact.shape:
                continue
            off = (x - exact).abs()
            if least and exact.numel():
                off = off.clamp(min=least * _eps(run.values[name]) * float(largest(exact)))
            off = torch.where(off.isfinite(), off, 0.0)
            self.error[name] = torch.maximum(self.error.get(name, off), off)


def compare(runs: Runs) -> list[Compared]:
    """Returns a record of every result; containers are recorded where they differ."""
    x, y = runs.eager.values, runs.compiled.values
    found = [_compared(runs, name) for name in dict.fromkeys([*x, *y])]
    return [c for c in found if c is not None]


def _compared(runs: Runs, name: str) -> Compared | None:
    x, y, z = (r.values.get(name, _NONE) for r in (runs.eager, runs.compiled, runs.exact))
    difference, note, count, off = _kinds(x, y), "", int(x is not None), 0.0
    error = runs.error.get(name)
    needs = [r.needs_grad.get(name) for r in (runs.eager, runs.compiled)]
    if isinstance(x, Structure) and isinstance(y, Structure) and not difference:
        return None
    if not difference and needs[0] != needs[1]:
        difference = f"the compiled one requires {'a' if needs[1] else 'no'} gradient"
    if not difference and _numbers(x) is not None:
        difference, note, off, count = _of_numbers(runs, name)
    elif not difference and not _is_one_of(y, x, z, *(r.values.get(name) for r in runs.others)):
        difference = f"{y!r} in place of {x!r}"[:80]
    eager_off = float(error.max()) if error is not None and error.numel() else 0.0
    sizes = (_size(x), _size(y), _size(z))
    return Compared(name, *sizes, eager_off, off, difference, note, count)


class _None:
    def __repr__(self) -> str:
        return "nothing"


_NONE = _None()


def _kinds(x: Any, y: Any) -> str:
    """Describes how two results differ before their numbers are compared."""
    if x is _NONE or (x is None and y is not None):
        return "eager has none"
    if y is _NONE or (y is None and x is not None):
        return "the compiled program has none"
    if isinstance(x, Structure) or isinstance(y, Structure):
        is_same = x == y
    elif isinstance(x, Tensor) and isinstance(y, Tensor):
        is_same = (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
    else:
        is_same = type(x) is type(y)
    return "" if is_same else f"{_described(y)} in place of {_described(x)}"


def _described(x: Any) -> str:
    if isinstance(x, Structure):
        return x.text
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)} on {x.device}"
    return type(x).__name__


def _numbers(x: Any) -> Tensor | None:
    """Returns floating-point results in float64; None for all others."""
    if isinstance(x, bool) or not isinstance(x, (float, complex, Tensor)):
        return None
    if not isinstance(x, Tensor):
        x = torch.tensor(x)
        x = x.to(torch.promote_types(x.dtype, torch.float64))
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        return None
    if x.is_nested:
        return torch.cat([part.flatten() for part in x.unbind()]).double()
    return x.double()


def _eps(x: Any) -> float:
    # a number of Python was one of a tensor before
    dtype = x.dtype if isinstance(x, Tensor) else torch.get_default_dtype()
    return torch.finfo(dtype).eps


def _is_one_of(y: Any, *others: Any) -> bool:
    """Whether discrete results are those of a run: where roundings decide, each may be right."""
    if not isinstance(y, Tensor):
        return any(type(y) is type(x) and y == x for x in others)
    same = torch.zeros(y.shape, dtype=torch.bool, device=y.device)
    for x in others:
        if isinstance(x, Tensor) and x.shape == y.shape:
            same |= x == y
    return bool(same.all())


def _of_numbers(runs: Runs, name: str) -> tuple[str, str, float, int]:
    """Compares numbers: what differs, what eager cannot measure, the error, and the count."""
    raw = runs.eager.values[name]
    x, y = _numbers(raw), _numbers(runs.compiled.values[name])
    z = _numbers(runs.exact.values.get(name))
    assert x is not None and y is not None
    if z is None or z.shape != x.shape:
        return "float64 has none", "", 0.0, 0
    d = None if runs.defined is None else _numbers(runs.defined.values.get(name))
    d = z if d is None or d.shape != x.shape else torch.where(z.isnan(), d, z)
    regular = x.isfinite() & z.isfinite()
    usual = torch.where(regular, z, 0.0)
    error = runs.error.get(name, torch.zeros_like(z))
    eps = _eps(raw)
    near = ENTRY_MULTIPLE * error + MULTIPLE * eps * d.abs()
    multiple = NUMBER_MULTIPLE if x.numel() == 1 else MULTIPLE
    far = multiple * (float(error.max()) if error.numel() else 0.0) + eps * largest(usual)
    away = torch.where(regular, (y - z).abs(), 0.0)
    off = float(away.nan_to_num(nan=torch.inf).max()) if away.numel() else 0.0
    if bool((regular & ~y.isfinite()).any()):
        wrong = regular & ~y.isfinite()
        return _counted("NaN or infinite in place of a number", wrong), "", off, x.numel()
    if not off <= far:
        return "too far off", "", off, x.numel()
    if bool((away > near).any()):
        worst = int((away - near).argmax())
        values = f"{float(y.flatten()[worst]):.4g} in place of {float(z.flatten()[worst]):.4g}"
        return _counted(f"too far off: {values}", away > near), "", off, x.numel()
    same = (y == x) | (y.isnan() & x.isnan())
    odd = ~regular & ~same  # eager or float64 is no number, and the compiled result is another one
    if not bool(odd.any()):
        return "", "", off, x.numel()
    count = x.numel() - int(odd.sum())
    return (*_irregular(x, y, d, odd, far), off, count)


def _irregular(x: Tensor, y: Tensor, d: Tensor, odd: Tensor, far: float) -> tuple[str, str]:
    """Compares entries that are NaN or infinite in eager code or float64; returns a difference and
    a note.
    """
    wrong = odd & (x.isfinite() | y.isnan())
    if bool(wrong.any()):
        return _counted("a number, NaN or infinity in place of another", wrong), ""
    bound = far + ENTRY_MULTIPLE * torch.finfo(torch.float32).eps * d.abs()
    known = odd & d.isfinite()
    if bool((known & ~((y - d).abs() <= bound)).any()):
        return _counted("too far off, where eager is NaN or infinite", known), ""
    if bool((odd & x.isinf() & ~d.isfinite()).any()):
        return _counted("a number in place of an infinite one", odd & x.isinf()), ""
    what = "NaN" if bool((odd & x.isnan()).any()) else "infinite"
    if bool((odd & ~known).any()):
        return "", _counted(f"eager is {what} here, and so is float64: {UNKNOWN}", odd & ~known)
    return "", _counted(f"eager is {what} here, {DEFINED}", odd)


def _counted(text: str, where: Tensor) -> str:
    return text if where.numel() == 1 else f"{text} ({int(where.sum())} of {where.numel()})"


def _size(x: Any) -> float | None:
    if isinstance(x, Tensor) and x.is_nested:
        x = _numbers(x)
    if isinstance(x, Tensor) and not x.is_complex():
        return float(x) if x.numel() == 1 else float(x.double().norm())
    return float(x) if isinstance(x, (int, float)) else None
