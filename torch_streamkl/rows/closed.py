"""Recognises row programs that are a divergence which `attention_kl` or `linear_kl` computes.

With P and S the softmaxes of two plain products, times a number each, a program that is
``sum_j f(P_j, S_j, log P_j, log S_j)`` is what `attention_kl` and `linear_kl` compute. One meaning
has one implementation (named.py): one pass where f allows it, Hopper kernels, few queries.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch_streamkl.divergences.functional import (
    LOG_P,
    LOG_S,
    Expr,
    Functional,
    P,
    S,
    apply,
    const,
    mixture_terms,
    render,
)
from torch_streamkl.rows.problem import RowProblem
from torch_streamkl.rows.program import LOGSUMEXP, SUM, Keys, Program


@dataclass(frozen=True)
class Side:
    """A softmax of a program."""

    dot: int
    scale: float
    normaliser: int  # the number of its log-sum-exp
    is_detached: bool


@dataclass(frozen=True)
class ClosedForm:
    """f as the operators take it, and what its sides are."""

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
    if not any(problem.program.dot_heads):
        is_fit = problem.batch == 1
    else:
        sizes = (*q.shape, *k.shape, *other_q.shape, *other_k.shape)
        is_fit = q.shape[1] == other_q.shape[1] and all(x > 0 for x in sizes)
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
    value = program.reductions[program.outputs[0]]
    sides = [_side(program, number) for number in program.logsumexps]
    if value.kind != SUM or None in sides:
        return None
    first, second = (s for s in sides if s is not None)
    if {first.dot, second.dot} != {0, 1} or not _agree(program, value.node, (first, second)):
        return None
    # the side without gradients is the teacher's
    teacher, student = (second, first) if second.is_detached else (first, second)
    logs = {teacher.normaliser: LOG_P, student.normaliser: LOG_S}
    expr = _Reader(program, logs).read(value.node)
    return None if expr is None else ClosedForm(teacher, student, render(_teacher_first(expr)))


def _teacher_first(e: Expr) -> Expr:
    """A Jensen-Shannon divergence with its terms in the order in which it is known."""
    if e.op == "add" and mixture_terms(swapped := Expr("add", e.args[::-1])) is not None:
        return swapped
    return e


def _side(program: Program, number: int) -> Side | None:
    """A log-sum-exp of a product times a number."""
    scale, is_detached = 1.0, False
    node = program.nodes[program.reductions[number].node]
    while node.op != "dot":
        match node.op:
            case "detach":
                is_detached = True
                node = program.nodes[node.args[0]]
            case "mul" | "div":
                a, b = (program.nodes[x] for x in node.args)
                if node.op == "mul" and a.op == "const":
                    a, b = b, a
                if b.op != "const" or not 0.0 < abs(b.value) < math.inf:
                    return None
                scale *= b.value if node.op == "mul" else 1.0 / b.value
                node = a
            case _:
                return None
    return Side(int(node.value), scale, number, is_detached)


def _agree(program: Program, root: int, sides: tuple[Side, Side]) -> bool:
    """Whether every use of a product is the side's score: with gradient, or without.

    Scores are one node each (`Graph`), so that another score of a product is another node.
    """
    scores = {program.reductions[s.normaliser].node for s in sides}
    stack, seen = [root], set()
    while stack:
        i = stack.pop()
        if i in scores or i in seen:
            continue
        seen.add(i)
        if program.nodes[i].op in ("dot", "detach"):
            return False
        stack += program.nodes[i].args
    return True


MAX_OPERATIONS = 128  # more are a row program, whose values are computed once


class _Reader:
    """An element as an expression over P, S and their logarithms.

    Division, roots, and logarithms of what may be 0 are not read: a row program says what a
    product with an infinity is, `attention_kl` what one with a probability of 0 is.
    """

    def __init__(self, program: Program, logs: dict[int, Expr]) -> None:
        self.program, self.logs = program, logs
        self.known: dict[int, Expr | None] = {}
        self.sizes: dict[int, int] = {}

    def read(self, index: int) -> Expr | None:
        for i in range(index + 1):  # operands stand before what is made of them
            if i not in self.known:
                self._read_operation(i)
        return self.known[index]

    def _read_operation(self, index: int) -> None:
        """An expression is a tree, in which a value that is used twice stands twice."""
        args = self.program.nodes[index].args
        self.sizes[index] = 1 + sum(self.sizes[a] for a in args)
        fits = self.sizes[index] <= MAX_OPERATIONS
        self.known[index] = self._read(index) if fits else None

    def _read(self, index: int) -> Expr | None:
        node = self.program.nodes[index]
        if node.op == "const":
            return const(node.value) if math.isfinite(node.value) else None
        if node.op == "sub" and (log := self._logarithm(*node.args)) is not None:
            return log
        args = [self.known[a] for a in node.args] if node.op in _READ else [None]
        found = [a for a in args if a is not None]
        if len(found) != len(args):
            return None
        match node.op:
            case "mul" | "mul0":
                return _product(*found)
            case "clamp_min":
                return apply("max", *found) if found[1].op == "const" else None
            case "log":
                return _log(found[0])
        if node.op == "add" and found[0].op == "const":
            found.reverse()
        return apply(node.op, *found)

    def _logarithm(self, a: int, b: int) -> Expr | None:
        """score - its own log-sum-exp."""
        node = self.program.nodes[b]
        number = int(node.value)
        if node.op != "reduction" or number not in self.logs:
            return None
        return self.logs[number] if self.program.reductions[number].node == a else None


_READ = ("add", "sub", "mul", "mul0", "neg", "exp", "abs", "clamp_min", "log")


def _product(a: Expr, b: Expr) -> Expr:
    """With its numbers in front."""
    for x, y in ((a, b), (b, a)):
        if x.op == "mul" and x.args[0].op == "const":
            return apply("mul", x.args[0], _product(x.args[1], y))
    return apply("mul", b, a) if b.op == "const" else apply("mul", a, b)


def _log(a: Expr) -> Expr | None:
    """Reads the logarithm of a mixture of P and S, or of a probability that something keeps above
    0.
    """
    if a.op in ("P", "S", "exp"):
        return apply("log", a)
    if a.op == "max" and a.args[1].op == "const" and a.args[1].value > 0.0:
        return apply("log", a) if _is_read_log(a.args[0]) else None
    if a.op != "add":
        return None
    if _is_read_log(a):
        return apply("log", a)
    splits = dict(_share(x) for x in a.args)
    if set(splits) != {P, S} or min(splits.values()) <= 0.0:
        return None
    terms = (apply("add", x, const(math.log(splits[y]))) for x, y in ((LOG_P, P), (LOG_S, S)))
    return apply("logaddexp", *terms)


def _is_read_log(a: Expr) -> bool:
    """A probability, or one plus a positive number."""
    if a.op == "add":
        x, y = a.args if a.args[1].op == "const" else a.args[::-1]
        return x in (P, S) and y.op == "const" and y.value > 0.0
    return a in (P, S)


def _share(x: Expr) -> tuple[Expr, float]:
    """A distribution and its factor, if it is that."""
    if x.op == "mul" and x.args[0].op == "const":
        return x.args[1], x.args[0].value
    return x, 1.0
