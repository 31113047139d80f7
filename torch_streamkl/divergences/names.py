"""A divergence by name with its guards: checked, then as the expression the operators take."""

from __future__ import annotations

from torch_streamkl import checks
from torch_streamkl.compiler_marks import assume_constant_result
from torch_streamkl.divergences.functional import NAMES, named


def divergence_text(
    divergence: str,
    beta: float,
    student_eps: float,
    teacher_eps: float,
    student_clamp: float,
    teacher_clamp: float,
) -> str:
    """The expression of a divergence as users name it; raises on meaningless combinations."""
    checks.one_of("divergence", divergence, NAMES)
    checks.in_unit_interval("beta", beta)
    guards = {
        "student_eps": student_eps,
        "teacher_eps": teacher_eps,
        "student_clamp": student_clamp,
        "teacher_clamp": teacher_clamp,
    }
    for name, guard in guards.items():
        checks.in_unit_interval(name, guard)
    if divergence == "tv" and any(guards.values()):
        raise ValueError(
            f"divergence 'tv' takes no logarithm, so eps and clamp do not apply, got {guards}"
        )
    # Under torch.compile(dynamic=True) every float is a symbol, default values too. __float__
    # makes a constant of it: the expression is part of the operator's call.
    constants = [guard.__float__() for guard in guards.values()]
    text: str = functional_text(divergence, beta.__float__(), *constants)
    return text


@assume_constant_result
def functional_text(
    divergence: str,
    beta: float,
    student_eps: float,
    teacher_eps: float,
    student_clamp: float,
    teacher_clamp: float,
) -> str:
    """The same without checks; a constant to torch.compile, which cannot trace the parser."""
    return named(divergence, beta, student_eps, teacher_eps, student_clamp, teacher_clamp).text
