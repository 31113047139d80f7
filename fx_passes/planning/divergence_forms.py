"""Finds named divergences in expressions that are linear in log-probabilities.

`bilinear_form` returns the KL, cross-entropy or Jeffreys divergence that such an expression is a
multiple of, and the factor. `split_pairs` splits an expression of more than two distributions into
one operator call for each pair.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_streamkl.fx_passes.domain.values import Distribution
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.program.divergence_forms import polynomial
from torch_streamkl.program.divergences import DIVERGENCES, Functional
from torch_streamkl.program.graph import Node, const
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S

Monomials = dict[tuple[tuple[str, int], ...], float]


def monomials(e: Node) -> Monomials | None:
    """Returns the expression as a polynomial in its variables, or None."""
    found = polynomial(e)
    if found is None:
        return None
    return {tuple((v.op, int(v.value)) for v in m): c for m, c in found.items()}


def _coefficients(polynomial: Monomials) -> dict[tuple[int, int], float] | None:
    """Coefficients of P_a logP_b when the polynomial has only such terms."""
    result = {}
    for m, c in polynomial.items():
        if [op for op, _ in m] != ["P", "logP"]:
            return None
        result[(m[0][1], m[1][1])] = c
    return result


def bilinear_form(polynomial: Monomials, teacher: int, student: int) -> tuple[Node, float] | None:
    """Returns the canonical expression and factor of a form that is linear in the
    log-probabilities.
    """
    c = _coefficients(polynomial)
    if c is None:
        return None
    tt, ts = c.get((teacher, teacher), 0.0), c.get((teacher, student), 0.0)
    st, ss = c.get((student, teacher), 0.0), c.get((student, student), 0.0)
    for name, form in (
        ("forward_kl", (1.0, -1.0, 0.0, 0.0)),
        ("reverse_kl", (0.0, 0.0, -1.0, 1.0)),
        ("cross_entropy", (0.0, -1.0, 0.0, 0.0)),
        ("jeffreys", (1.0, -1.0, -1.0, 1.0)),
    ):
        pairs = list(zip((tt, ts, st, ss), form, strict=True))
        factor = next(x / y for x, y in pairs if y)
        if all(math.isclose(x, factor * y, rel_tol=1e-12) for x, y in pairs):
            return Functional.of(DIVERGENCES[name]).expr, factor
    terms = ((tt, P * LOG_P), (ts, P * LOG_S), (st, S * LOG_P), (ss, S * LOG_S))
    total = const(0.0)
    for x, product in terms:
        if x:
            total = total + const(x) * product
    return total, 1.0


def split_pairs(
    expr: Node, parts: Sequence[Distribution], used: Sequence[int]
) -> list[tuple[Node, int, int, float]]:
    """Splits more than two distributions into a sum of divergences, one call each."""
    polynomial = monomials(expr)
    c = None if polynomial is None else _coefficients(polynomial)
    if c is None:
        raise Unsupported(f"{len(used)} distributions are combined in one expression")
    pairs = []
    for a in used:
        others = [b for b in used if b != a and c.get((a, b), 0.0)]
        own, crossed = c.get((a, a), 0.0), sum(c[(a, b)] for b in others)
        if own and not math.isclose(own, -crossed, rel_tol=1e-9):
            raise Unsupported(
                f"{len(used)} distributions are combined into what is no sum of divergences"
            )
        for b in others:
            name = "forward_kl" if own else "cross_entropy"
            pair = (Functional.of(DIVERGENCES[name]).expr, a, b, -c[(a, b)])
            if (
                parts[a].requires_grad and not parts[b].requires_grad
            ):  # the trained side is the student: swap the roles
                reverse = Functional.of(DIVERGENCES["reverse_kl"]).expr if own else -(S * LOG_P)
                pair = (reverse, b, a, -c[(a, b)])
            pairs.append(pair)
    return pairs
