"""Recognises the forms of a divergence that one pass computes, or that kernels specialise for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_streamkl.program.graph import SMALLEST, Node, const, constant
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S, is_weight, log_variable, multiple
from torch_streamkl.program.walks import rebuilt, walk, with_args


def is_lifted(e: Node) -> bool:
    """Returns whether an expression is a probability and an epsilon far above the smallest
    numbers.
    """
    if e.op != "add":
        return False
    a, b = e.args
    return is_weight(a) and b.op == "const" and SMALLEST <= b.value < math.inf


Polynomial = dict[tuple[Node, ...], float]  # by the variables that a term multiplies


def polynomial(e: Node) -> Polynomial | None:
    """Returns the expression as a polynomial in its variables, or None."""
    found: dict[Node, Polynomial] = {}
    for x in walk([e]):
        args = [found[a] for a in x.args]
        result: Polynomial = {}
        match x.op:
            case "const":
                result = {(): x.value}
            case "P" | "S" | "logP" | "logS":
                result = {(x,): 1.0}
            case "add" | "sub" | "neg":
                signs = {"add": (1.0, 1.0), "sub": (1.0, -1.0), "neg": (-1.0,)}[x.op]
                for sign, part in zip(signs, args, strict=True):
                    for m, c in part.items():
                        result[m] = result.get(m, 0.0) + sign * c
            case "mul":
                for m1, c1 in args[0].items():
                    for m2, c2 in args[1].items():
                        m = tuple(sorted(m1 + m2, key=lambda v: (v.op, v.value)))
                        result[m] = result.get(m, 0.0) + c1 * c2
            case "div" if set(args[1]) == {()}:
                result = {m: c / args[1][()] for m, c in args[0].items()}
            case _:
                return None
        found[x] = {m: c for m, c in result.items() if c != 0.0}
    return found[e]


@dataclass(frozen=True)
class Bilinear:
    """Holds the coefficients of a divergence that is linear in the log-probabilities:

    ``sum_j P_j (tt logP_j + ts logS_j) + S_j (st logP_j + ss logS_j) + t P_j + s S_j``.
    """

    tt: float = 0.0
    ts: float = 0.0
    st: float = 0.0
    ss: float = 0.0
    t: float = 0.0
    s: float = 0.0

    @property
    def has_teacher_moment(self) -> bool:
        return self.tt != 0.0 or self.ts != 0.0

    @property
    def has_student_moment(self) -> bool:
        return self.st != 0.0 or self.ss != 0.0


_BILINEAR_FIELDS: dict[tuple[Node, ...], str] = {
    (P, LOG_P): "tt", (P, LOG_S): "ts", (S, LOG_P): "st", (S, LOG_S): "ss", (P,): "t", (S,): "s",
}  # fmt: skip


def bilinear(e: Node) -> Bilinear | None:
    """Returns the six coefficients when the expression is linear in the log-probabilities, else
    None.
    """
    terms = polynomial(e)
    if terms is None or not set(terms) <= set(_BILINEAR_FIELDS):
        return None
    return Bilinear(**{_BILINEAR_FIELDS[k]: v for k, v in terms.items()})


def squares(e: Node) -> float | None:
    """Returns the factor c of an expression c (P - S)^2, else None."""
    terms = polynomial(e) or {}
    factor = terms.get((P, P), 0.0)
    square = {(P, P): factor, (P, S): -2.0 * factor, (S, S): factor}
    return factor if factor and terms == square else None


def square_terms(factor: float | None) -> tuple[Node, Node] | None:
    """Returns df/dlogS and df/dlogP of c (P - S)^2."""
    if factor is None:
        return None
    return S * (const(-2.0 * factor) * (P - S)), P * (const(2.0 * factor) * (P - S))


@dataclass(frozen=True)
class GuardedBilinear:
    """Holds the form of a clamped expression for rows whose log-probabilities lie above the
    floors.
    """

    form: Bilinear
    teacher_floor: float
    student_floor: float


@dataclass(frozen=True)
class LiftedQuotient:
    """W (log(W + own_eps) - log(V + other_eps)): W is P, V is S (``by_teacher``), or S and P."""

    own_eps: float
    other_eps: float
    by_teacher: bool


def without_clamps(e: Node, floors: dict[Node, float]) -> Node:
    """Returns the expression without lower clamps of probabilities; raises ``floors`` to these."""

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        log = (
            x.args[0]
            if x.args and x.args[0] in floors
            else log_variable(x.args[0])
            if x.args
            else None
        )
        if x.op != "clamp_min" or x.args[1].op != "const" or log is None:
            return with_args(x, args)
        c = x.args[1].value
        floor = c if log is x.args[0] else math.log(c) if c > 0 else -math.inf
        floors[log] = max(floors[log], floor)
        return x.args[0]

    return rebuilt([e], change)[e]


def where_clamped(e: Node, branch: int, floors: set[float]) -> Node:
    """Returns the expression with a branch of each ``where(logS > floor, ...)``, or >=; adds
    floors.
    """

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if x.op == "where" and x.args[0].op in ("gt", "ge"):
            log, floor = x.args[0].args
            if log is LOG_S and floor.op == "const":
                floors.add(floor.value)
                return args[branch]
        return with_args(x, args)

    return rebuilt([e], change)[e]


KINKS = {"ge", "gt", "le", "lt", "ne", "sign", "abs", "clamp_min", "clamp_max"}


def mixture_terms(e: Node) -> tuple[Node, Node] | None:
    """Returns df/dlogS and df/dlogP of f = b P (logP - logM) + c S (logS - logM) with M = b P + c
    S.

    They are f's own terms of S and of P: what M's derivative adds to both cancels.
    """
    mixtures = [x for x in walk([e]) if x.op == "logaddexp"]
    splits = mixture_shares(mixtures[0]) if len(mixtures) == 1 and e.op == "add" else None
    if splits is None:
        return None
    shares = [multiple(x)[0] for x in e.args]
    if not all(math.isclose(x, y, rel_tol=1e-12) for x, y in zip(splits, shares, strict=True)):
        return None
    pairs = zip(shares, ((P, LOG_P), (S, LOG_S)), strict=True)
    of_p, of_s = (const(b) * (weight * (log - mixtures[0])) for b, (weight, log) in pairs)
    return (of_s, of_p) if e is of_p + of_s else None


def mixture_shares(e: Node) -> tuple[float, float] | None:
    """Matches log(b P + c S) and returns b and c."""
    if e.op != "logaddexp":
        return None
    a, b = (constant(x.args[-1]) if x.op == "add" else None for x in e.args)
    if a is None or b is None or e.args != (LOG_P + a, LOG_S + b):
        return None
    return math.exp(a), math.exp(b)


# a GPU has an instruction for each, or two
_SHORT = {"P", "S", "logP", "logS", "const", "add", "sub", "mul", "neg", "abs", "sign"}
_SHORT |= {"clamp_min", "clamp_max", "ge", "gt", "le", "lt", "where"}


def is_short(e: Node) -> bool:
    """Returns whether kernels compute an expression of half-precision inputs without series of
    terms.
    """
    every = walk([e], lambda x: mixture_shares(x) is None)
    return all(
        x.op in _SHORT
        or mixture_shares(x) is not None
        or (x.op in ("log", "div") and is_lifted(x.args[-1]))
        for x in every
    )
