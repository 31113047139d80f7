"""Writes mixtures of two distributions in one way: their weights sum to 1.

``logaddexp(logP, logS)`` less log 2, and the logarithm of 0.5 P + 0.5 S, are the same mixture. So
a Jensen-Shannon divergence is found however it was written, and kernels have one for it.
"""

from __future__ import annotations

import math

from torch_streamkl.fx_passes.closed_forms.formulas import Polynomial, is_log, is_weight, number_of
from torch_streamkl.program.canonical import linear, terms_of
from torch_streamkl.program.divergences import named
from torch_streamkl.program.functions import log_add_exp
from torch_streamkl.program.graph import Node

ROUNDING = 2.0**-22  # of a logarithm in float32
TINY = 1e-12


def weights_of(x: Node) -> dict[Node, float] | None:
    """Returns the logarithms of the weights of a mixture, by its log-probabilities."""
    if x.op != "logaddexp":
        return None
    found: dict[Node, float] = {}
    for y in x.args:
        constant, terms = terms_of(y)
        if len(terms) != 1 or terms[0][0] != 1.0 or not is_log(terms[0][1]):
            return None
        found[terms[0][1]] = constant
    return found if len(found) == len(x.args) == 2 else None


def normalised(polynomial: Polynomial) -> Polynomial:
    """Returns a polynomial whose mixtures have weights that sum to 1."""
    total: Polynomial = {}

    def add(monomial: tuple[Node, ...], c: float) -> None:
        key = tuple(sorted(monomial, key=lambda y: y.digest))
        total[key] = total.get(key, 0.0) + c

    for monomial, c in polynomial.items():
        mixtures = [x for x in monomial if weights_of(x) is not None]
        shift = _shift(mixtures[0]) if len(mixtures) == 1 else 0.0
        if not shift:
            add(monomial, c)
            continue
        (mixture,) = mixtures
        rest = list(monomial)
        rest.remove(mixture)
        weights = weights_of(mixture) or {}
        same = log_add_exp(*(linear(w - shift, [(1.0, y)]) for y, w in weights.items()))
        add((*rest, same), c)
        add(tuple(rest), c * shift)
    scale = max((abs(c) for c in total.values()), default=0.0)
    return {m: c for m, c in total.items() if abs(c) > TINY * scale}


def _shift(mixture: Node) -> float:
    """The logarithm of the sum of a mixture's weights, 0 where it is a rounding."""
    weights = weights_of(mixture)
    assert weights is not None
    shift = math.log(sum(map(math.exp, weights.values())))
    return shift if abs(shift) > ROUNDING else 0.0


def jensen_shannon(
    polynomial: Polynomial, teacher: int, student: int
) -> tuple[Node, float] | None:
    """Returns the named divergence that a polynomial is a multiple of, and the factor."""
    mixtures = {x for m in polynomial for x in m if weights_of(x) is not None}
    if len(mixtures) != 1 or len(polynomial) != 4:
        return None
    (mixture,) = mixtures
    weights = {number_of(y): math.exp(w) for y, w in (weights_of(mixture) or {}).items()}
    if set(weights) != {teacher, student}:
        return None
    factors, own = list[float](), dict[int, float]()
    for m, c in polynomial.items():
        probabilities = [x for x in m if is_weight(x)]
        if len(m) != 2 or len(probabilities) != 1:
            return None
        number = number_of(probabilities[0])
        other = next(x for x in m if x is not probabilities[0])
        if is_log(other) and number_of(other) == number:
            own[number] = c
            factors.append(c / weights[number])
        elif other is mixture:
            factors.append(-c / weights[number])
        else:
            return None
    total = sum(own.values())
    if len(own) != 2 or not all(math.isclose(x, total, rel_tol=ROUNDING) for x in factors):
        return None
    return named("js", own[teacher] / total).expr, total
