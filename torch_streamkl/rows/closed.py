"""Recognises row programs that are divergences which `attention_kl` or `linear_kl` computes.

With P and S the softmaxes of two plain products, times a number each, a program ``sum_j f(P_j,
S_j, log P_j, log S_j)`` is what these operators compute. They have one implementation of it
(named.py), with one pass if f allows it, Hopper kernels, and few queries. Program and divergence
are expressions of one graph: f is the program with logP and logS for the logarithms.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch_streamkl.program.divergence_forms import mixture_terms
from torch_streamkl.program.divergences import Functional, render
from torch_streamkl.program.graph import LOGSUMEXP, SUM, Node, apply, constant, made
from torch_streamkl.program.identities import LOG_P, LOG_S, P, S, is_weight, log_variable, multiple
from torch_streamkl.program.masks import Keys
from torch_streamkl.program.walks import rebuilt, walk, with_args
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import Program


@dataclass(frozen=True)
class Side:
    """Holds one softmax of a program."""

    dot: int
    scale: float
    normaliser: int  # the number of its log-sum-exp
    is_detached: bool


@dataclass(frozen=True)
class ClosedForm:
    """Holds f as the operators take it, and the two sides."""

    teacher: Side
    student: Side
    functional: str


def form_of(problem: RowProblem) -> ClosedForm | None:
    """Returns the divergence that a problem is, if it is one."""
    form = _form(problem.program)
    if form is None:
        return None
    (q, k), (other_q, other_k) = problem.operands
    is_half = q.device.type != "cpu" and q.dtype.itemsize == 2
    if not is_half and Functional.of(form.functional).squares is not None:
        return None  # a row program rounds them less, which half precision hides
    if problem.is_of_vocab:
        is_fit = problem.batch == 1
    else:
        is_fit = q.shape[1] == other_q.shape[1]
    return form if is_fit and all(x.stride(-1) == 1 for x in (q, k, other_q, other_k)) else None


@functools.lru_cache(maxsize=1024)
def _form(program: Program) -> ClosedForm | None:
    kinds = sorted(r.kind for r in program.reductions)
    if (
        len(program.dot_heads) != 2
        or kinds != sorted([LOGSUMEXP, LOGSUMEXP, SUM])
        or len(set(program.dot_heads)) != 1
        or len(program.outputs) != 1
        or (not any(program.dot_heads) and program.keys != Keys())
    ):
        return None
    value = program.reduced[program.outputs[0]]
    sides = [_side(program, number) for number in program.logsumexps]
    if value.kind != SUM or None in sides:
        return None
    first, second = (s for s in sides if s is not None)
    if {first.dot, second.dot} != {0, 1}:
        return None
    # the side without gradients is the teacher's
    teacher, student = (second, first) if second.is_detached else (first, second)
    logs = {program.reduced[x.normaliser]: v for x, v in ((teacher, LOG_P), (student, LOG_S))}
    expr = _divergence(value.args[0], logs)
    return None if expr is None else ClosedForm(teacher, student, render(expr))


def _side(program: Program, number: int) -> Side | None:
    """Matches a log-sum-exp of one dot product times a number."""
    scale, is_detached = 1.0, False
    x = program.reduced[number].args[0]
    while x.op != "dot":
        if x.op == "detach":
            is_detached, x = True, x.args[0]
            continue
        factor, of = multiple(x)
        if of is x or x.op == "neg" or not 0.0 < abs(factor) < math.inf:
            return None
        scale, x = scale * factor, of
    return Side(int(x.value), scale, number, is_detached)


MAX_OPERATIONS = 128  # more are a row program, whose values are computed once


def _divergence(value: Node, logs: dict[Node, Node]) -> Node | None:
    """Rewrites an element as an expression over P, S and their logarithms.

    Division, roots, and logarithms of what may be 0 are not read: a row program says what a
    product with an infinity is, `attention_kl` what one with a probability of 0 is. Each product
    of the program is read as the side's score, with gradient or without, or not at all.
    """

    def is_logarithm(x: Node) -> bool:
        """Whether a node is a score minus its own log-sum-exp."""
        return x.op == "sub" and x.args[1] in logs and x.args[1].args[0] is x.args[0]

    def change(x: Node, args: tuple[Node, ...]) -> Node:
        if is_logarithm(x):
            return logs[x.args[1]]
        match x.op:
            case "mul":
                return _product(*args)
            case "add":
                return _sum(*args)
            case "log":
                return _mixture(args[0]) or apply("log", *args)
        return with_args(x, args)

    if any(x.op == "logaddexp" for x in walk([value])):
        return None
    expr = rebuilt([value], change, lambda x: not is_logarithm(x))[value]
    size: dict[Node, int] = {}
    for x in walk([expr]):  # a text is a tree, in which a value that is used twice stands twice
        size[x] = 1 + sum(size[a] for a in x.args)
        if size[x] > MAX_OPERATIONS or not _is_read(x):
            return None
    return expr


def _is_read(x: Node) -> bool:
    match x.op:
        case "P" | "S" | "logP" | "logS" | "add" | "sub" | "mul" | "neg" | "exp" | "abs":
            return True
        case "const":
            return math.isfinite(x.value)
        case "clamp_min":
            return x.args[1].op == "const"
        case "logaddexp":
            return all(_is_read(a) for a in x.args)
        case "log":
            (a,) = x.args
            if a.op == "clamp_min" and (constant(a.args[1]) or 0.0) > 0.0:
                a = a.args[0]
            return a.op == "add" and is_weight(a.args[0]) and (constant(a.args[1]) or 0.0) > 0.0
    return False


def _product(a: Node, b: Node) -> Node:
    """Builds a normalised product: numbers first, a probability last."""
    for x, y in ((a, b), (b, a)):
        if x.op == "mul" and x.args[0].op == "const":
            return apply("mul", x.args[0], _product(x.args[1], y))
    is_later = a.op != "const" and (b.op == "const" or (is_weight(b) and not is_weight(a)))
    return apply("mul", b, a) if is_later else apply("mul", a, b)


def _sum(a: Node, b: Node) -> Node:
    """Builds a normalised sum: numbers last, the teacher's term of a Jensen-Shannon divergence
    first.
    """
    if a.op == "const" or mixture_terms(made("add", (b, a))) is not None:
        a, b = b, a
    return apply("add", a, b)


def _mixture(x: Node) -> Node | None:
    """Returns the logarithm of a P + b S, if x is such a sum."""
    if x.op != "add":
        return None
    shares = {of: factor for factor, of in map(multiple, x.args)}
    if set(shares) != {P, S} or min(shares.values()) <= 0.0:
        return None
    logs = [log_variable(v) for v in (P, S)]
    terms = (log + math.log(shares[v]) for v, log in zip((P, S), logs, strict=True) if log)
    return apply("logaddexp", *terms)
