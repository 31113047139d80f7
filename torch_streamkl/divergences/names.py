"""Checks a divergence's name and guards, and returns the expression that the operators take."""

from __future__ import annotations

from typing import Any, Literal

from torch_streamkl import checks
from torch_streamkl.compiler_marks import assume_constant_result
from torch_streamkl.program.divergences import NAMES, named

Divergence = Literal["forward_kl", "reverse_kl", "cross_entropy", "jeffreys", "js", "tv"]
Reduction = Literal["none", "mean", "sum", "batchmean"]
DEFAULT_BETA = 0.5
GUARDS = ("student_eps", "teacher_eps", "student_clamp", "teacher_clamp")
OPTIONS = ("divergence", "beta", *GUARDS)  # of `divergence_text`
# other names that people know them by
ALIASES = {
    "ce": "cross_entropy",
    "fkl": "forward_kl",
    "gjs": "js",
    "gkd": "js",
    "jensen_shannon": "js",
    "jsd": "js",
    "kl": "forward_kl",
    "kl_div": "forward_kl",
    "kld": "forward_kl",
    "kldiv": "forward_kl",
    "rkl": "reverse_kl",
    "soft_cross_entropy": "cross_entropy",
    "symmetric_kl": "jeffreys",
    "total_variation": "tv",
    "tvd": "tv",
}


def divergence_text(divergence: str, beta: float, *guards: float) -> str:
    """Returns the expression of a divergence as users name it; raises on meaningless
    combinations.
    """
    checks.one_of("divergence", divergence, NAMES, ALIASES)
    checks.in_unit_interval("beta", beta)
    if divergence != "js" and beta.__float__() != DEFAULT_BETA:
        raise ValueError(
            f"beta is the teacher's share in divergence='js' and means nothing for "
            f"{divergence!r}, got {beta}"
        )
    for name, guard in zip(GUARDS, guards, strict=True):
        checks.in_unit_interval(name, guard)
    if divergence == "tv" and any(guards):
        raise ValueError(
            "divergence 'tv' takes no logarithm, so eps and clamp do not apply, got "
            f"{dict(zip(GUARDS, guards, strict=True))}"
        )
    # Under torch.compile(dynamic=True) every float is a symbol, default values too. __float__
    # makes a constant of it: the expression is part of the operator's call.
    constants = [guard.__float__() for guard in guards]
    text: str = functional_text(divergence, beta.__float__(), *constants)
    return text


@assume_constant_result
def functional_text(divergence: str, beta: float, *guards: float) -> str:
    """Returns `divergence_text` unchecked; a constant to torch.compile, which cannot parse."""
    return named(divergence, beta, *guards).text


def text_of(options: Any) -> str:
    """Returns `divergence_text` of the options of a call."""
    return divergence_text(*(getattr(options, name) for name in OPTIONS))
