"""Names a divergence as papers do, by its values and not by its spelling."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch_streamkl.fx_passes.closed_forms.formulas import value_at
from torch_streamkl.program.divergences import DIVERGENCES, NAMES_IN_TEXT, Functional
from torch_streamkl.program.graph import Node
from torch_streamkl.program.walks import walk

_POINTS = ((0.3, 0.2), (0.05, 0.6), (0.7, 0.01), (0.2, 0.2), (0.9, 0.5), (1e-3, 0.4))
_CLOSE = 1e-9
_CLOSE_IN_FLOAT32 = 5e-7  # such as log(torch.tensor(0.1)), where nothing is as small as an eps
_LARGEST_EPS = 0.1


def spoken(functional: Functional) -> str:
    """Returns a divergence's name, or the sum over keys that is computed."""
    known = _by_form(functional)
    if known:
        return known
    expr = functional.expr
    try:
        values = [value_at(expr, *map(math.log, point)) for point in _POINTS]
        constants = [x.value for x in walk([expr]) if x.op == "const"]
        has_eps = any(0.0 < c < _LARGEST_EPS for c in constants)
        for close in (_CLOSE,) if has_eps else (_CLOSE, _CLOSE_IN_FLOAT32):
            for name, formula in _formulas(constants):
                made = [formula(p, s) for p, s in _POINTS]
                if all(_is_close(a, b, close) for a, b in zip(made, values, strict=True)):
                    return name
    except (ValueError, OverflowError, ZeroDivisionError, KeyError):
        pass
    return _readable(functional.expr)


def is_swapped(functional: Functional) -> bool:
    """Returns whether it is P (log P - S): kl_div with probabilities as its first argument."""
    return any(
        _has_values(functional, f)
        for f in (lambda p, s: p * (math.log(p) - s), lambda p, s: s * (math.log(s) - p))
    )


def has_log_of_log(e: Node) -> bool:
    """Whether it is NaN everywhere: the logarithm of a log-probability, which is negative."""
    return any(x.op == "log" and x.args[0].op in ("logP", "logS") for x in walk([e]))


def has_exp_of_probability(functional: Functional) -> bool:
    """Whether it is kl_div with log_target=True of a probability: exp(P) (P - log S)."""
    return any(
        _has_values(functional, f)
        for f in (
            lambda p, s: math.exp(p) * (p - math.log(s)),
            lambda p, s: math.exp(s) * (s - math.log(p)),
            lambda p, s: math.exp(p) * (p - s),
            lambda p, s: math.exp(s) * (s - p),
        )
    )


def _has_values(functional: Functional, formula: Callable[[float, float], float]) -> bool:
    try:
        values = ((value_at(functional.expr, math.log(p), math.log(s)), p, s) for p, s in _POINTS)
        return all(_is_close(x, formula(p, s)) for x, p, s in values)
    except (ValueError, OverflowError, ZeroDivisionError, KeyError):
        return False


# the report names those that are trained at their target, too, with either sign
_NAMED = (*DIVERGENCES.items(), *(("reverse cross_entropy", x) for x in ("S*logP", "-(S*logP)")))


def _by_form(functional: Functional) -> str:
    """A name that the operators have for it, with the clamps of its probabilities."""
    guarded = functional.guarded
    for name, text in _NAMED:
        known = Functional.of(text)
        if known == functional:
            return name
        if guarded is not None and guarded.form == known.bilinear:
            floors = {"teacher": guarded.teacher_floor, "student": guarded.student_floor}
            used = {k: math.exp(v) for k, v in floors.items() if v > -math.inf}
            clamps = [f"{side} clamped at {least:.3g}" for side, least in used.items()]
            return ", ".join([name, *clamps])
    return ""


@dataclass(frozen=True)
class _Guard:
    """Describes what is added to a probability before its logarithm."""

    teacher: float = 0.0
    student: float = 0.0

    def logs(self, p: float, s: float) -> tuple[float, float]:
        return math.log(p + self.teacher), math.log(s + self.student)

    def __str__(self) -> str:
        said = [f", log({x} + {eps:g})" for x, eps in (("P", self.teacher), ("S", self.student))
                if eps]  # fmt: skip
        return "".join(said)


def _formulas(
    constants: list[float],
) -> Iterator[tuple[str, Callable[[float, float], float]]]:
    small = sorted({c for c in constants if 0.0 < c < _LARGEST_EPS})
    for teacher, student in itertools.product((0.0, *small), repeat=2):
        guard = _Guard(teacher, student)
        for name, formula in _DIRECT.items():
            yield f"{name}{guard}", functools.partial(_guarded, formula, guard)
    for beta in _weights(constants):
        for label, mixed in _MIXED.items():
            yield label.format(beta, 1.0 - beta), functools.partial(_at, mixed, beta)


def _guarded(
    formula: Callable[[float, float, float, float], float], guard: _Guard, p: float, s: float
) -> float:
    return formula(p, s, *guard.logs(p, s))


def _at(formula: Callable[[float, float, float], float], beta: float, p: float, s: float) -> float:
    return formula(p, s, beta)


def _weights(constants: Iterable[float]) -> list[float]:
    """Numbers that may be the weight of a mixture: as they are, or by their logarithms."""
    found = set()
    for c in constants:
        for x in (c, -c, math.exp(c) if c < 0.0 else 0.0):
            found |= {y for y in (x, 1.0 - x) if 0.0 < y < 1.0}
    rounded = {round(x, 10) for x in found}
    return sorted(rounded)


def _js(p: float, s: float, b: float) -> float:
    m = math.log(b * p + (1.0 - b) * s)
    return b * p * (math.log(p) - m) + (1.0 - b) * s * (math.log(s) - m)


def _is_close(a: float, b: float, close: float = _CLOSE) -> bool:
    return abs(a - b) <= close * max(1.0, abs(a))


_DIRECT: dict[str, Callable[[float, float, float, float], float]] = {
    "forward_kl": lambda p, s, lp, ls: p * (lp - ls),
    "reverse_kl": lambda p, s, lp, ls: s * (ls - lp),
    "cross_entropy": lambda p, s, lp, ls: -p * ls,
    "jeffreys": lambda p, s, lp, ls: p * (lp - ls) + s * (ls - lp),
}
_MIXED: dict[str, Callable[[float, float, float], float]] = {
    "js, beta={:g}": _js,
    "skewed forward_kl, KL(P || {0:g} P + {1:g} S)": lambda p, s, b: (
        p * (math.log(p) - math.log(b * p + (1.0 - b) * s))
    ),
    "skewed reverse_kl, KL(S || {0:g} P + {1:g} S)": lambda p, s, b: (
        s * (math.log(s) - math.log(b * p + (1.0 - b) * s))
    ),
    "forward_kl + reverse_kl, weights {0:g} and {1:g}": lambda p, s, b: (
        b * p * (math.log(p) - math.log(s)) + (1.0 - b) * s * (math.log(s) - math.log(p))
    ),
}
_LONGEST = 72


def _readable(e: Node) -> str:
    """The sum over keys as it is computed, in the notation of formulas; never a page."""
    text = _written(e)[0]
    if len(text) > _LONGEST:
        text = text[: _LONGEST - 3] + "..."
    return f"sum of {text}"


_SUM, _PRODUCT, _ATOM = 0, 1, 2  # how tightly the outermost operation of a text binds


def _written(e: Node) -> tuple[str, int]:
    if e.op == "const":
        return f"{e.value:g}", _ATOM if e.value >= 0 else _SUM
    if not e.args:
        return e.op, _ATOM
    if e.op == "neg":
        return f"-{_at_least(e.args[0], _PRODUCT)}", _SUM
    if e.op in ("mul", "div"):
        a, b = e.args
        if e.op == "mul" and a.op == "const" and a.value == -1.0:
            return f"-{_at_least(b, _PRODUCT)}", _SUM
        sign = "*" if e.op == "mul" else "/"
        right = _at_least(b, _PRODUCT if e.op == "mul" else _ATOM)
        return f"{_at_least(a, _PRODUCT)}{sign}{right}", _PRODUCT
    if e.op in ("add", "sub"):
        a, b = e.args
        left, right = _written(a)[0], _at_least(b, _PRODUCT if e.op == "sub" else _SUM)
        if e.op == "add" and left.startswith("-") and not right.startswith("-"):
            left, right = right, left
        if e.op == "add" and right.startswith("-"):
            return f"{left} - {right[1:]}", _SUM
        return f"{left} {'+' if e.op == 'add' else '-'} {right}", _SUM
    return f"{NAMES_IN_TEXT.get(e.op, e.op)}({', '.join(_written(a)[0] for a in e.args)})", _ATOM


def _at_least(e: Node, level: int) -> str:
    text, binds = _written(e)
    return text if binds >= level else f"({text})"
