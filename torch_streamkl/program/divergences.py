"""Defines divergences: programs of the probabilities of one key and their logarithms.

A divergence of a row is a sum over keys, ``sum_j f(P_j, S_j, logP_j, logS_j)``, with the
teacher's probabilities P and the student's S. Here f is an expression of the graph. All code that
computes a divergence (reference, streaming, kernels) reads it from a `Functional`, so a new one is
a line in `DIVERGENCES`, and a recognised loss with eps and clamps is just another expression.

NOTE [One pass or two]
An expression that is linear in the log-probabilities (`Bilinear`) needs one pass over the keys:
its row sums come from running moments. Any other needs the two log-sum-exps first and the sums
second. A lower clamp that no key of the row reaches is inactive, and then the clamped expression
equals its `unguarded` form; `GuardedBilinear` holds that form and the floors to test the row
minima against.

NOTE [Squares]
The sum of ``c (P - S)^2`` comes from one pass, too, and not as a small difference of large sums:
what is squared are differences with the ratio of the row sums so far, and the sums are moved when
that moves (kernels/row_state.py). Other polynomials of degree two take two passes.

NOTE [Row gradient]
With h_j = df/dlogS_j and H = sum_j h_j, the gradient of the row's value to the student's score is
h_j - S_j H, because logS_j = s_j - lse(s). The teacher's likewise with g_j = df/dlogP_j and G.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_streamkl.program.derive import tangent
from torch_streamkl.program.divergence_forms import (
    KINKS,
    Bilinear,
    GuardedBilinear,
    LiftedQuotient,
    bilinear,
    is_lifted,
    is_short,
    mixture_shares,
    mixture_terms,
    polynomial,
    square_terms,
    squares,
    where_clamped,
    without_clamps,
)
from torch_streamkl.program.graph import BOOL, ONE, SMALLEST, Node, apply, const
from torch_streamkl.program.identities import (
    LOG_P,
    LOG_S,
    VARIABLES,
    P,
    S,
    log_variable,
    multiple,
    variable,
)
from torch_streamkl.program.operations import OPERATIONS, exact
from torch_streamkl.program.walks import replaced, walk

FLOOR_OF_EXP = -1e30  # an exponent whose exponential is 0 in every dtype we compute in

# the operations that the text of a divergence has, by the names that it has for them
_CALLS = {"max": "clamp_min", "min": "clamp_max"}
_CALLS |= {op: op for op in ("exp", "log", "abs", "sqrt", "ge", "gt", "where", "logaddexp")}
NAMES_IN_TEXT = {op: name for name, op in _CALLS.items()}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_FROM_AST = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}


def render(e: Node) -> str:
    """Returns the text that `parse` reads back to the same expression."""
    args = [render(a) for a in e.args]
    if e.op == "const":
        return repr(e.value) if math.isfinite(e.value) else f"float('{e.value}')"
    if e.op in _INFIX:
        return f"({args[0]}{_INFIX[e.op]}{args[1]})"
    match e.op:
        case "neg":
            return f"(-{args[0]})"
        case "float":
            return args[0]
        case "log_div":
            return f"log(({args[0]}/{args[1]}))"
    return f"{NAMES_IN_TEXT.get(e.op, e.op)}({','.join(args)})" if args else e.op


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Node:
    """Returns the expression of a text such as ``P*(logP-max(logS,-27.6))``."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            f"a divergence expression must be a formula over {VARIABLES}, got {text!r}"
        ) from error
    return _parse_node(tree, text)


def _parse_node(node: ast.AST, text: str) -> Node:
    match node:
        case ast.Constant(value=int() | float() as value):
            return const(value)
        case ast.Name(id=name) if name in VARIABLES:
            return variable(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _FROM_AST:
            return apply(_FROM_AST[type(op)], _parse_node(left, text), _parse_node(right, text))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return apply("neg", _parse_node(operand, text))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(value))]):
            return const(float(value))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS:
            return apply(_CALLS[name], *(_parse_node(a, text) for a in args))
    raise ValueError(
        f"a divergence expression may use {', '.join(VARIABLES)}, numbers, + - * / and "
        f"{', '.join(sorted(_CALLS))}, got {ast.unparse(node)!r} in {text!r}"
    )


def derivative(e: Node, log: Node) -> Node:
    """Returns the derivative to logP or logS, with P = exp(logP) and torch's conventions at kinks.

    ``max(x, c)`` has the gradient of ``clamp(min=c)``: NOTE [The bound of a clamp] in meanings.py.
    """

    def known(x: Node) -> Node | None:
        if x is log:
            return ONE
        return x if log_variable(x) is log else None

    return tangent(e, known)


def evaluate(
    e: Node, variables: dict[str, Tensor], memo: dict[Node, Tensor] | None = None
) -> Tensor:
    """Returns the expression's value on tensors of one shape; a key without probability
    contributes 0.

    A product is 0 where a factor is, as 0 * log 0 = 0: NOTE [Zero annihilates] in graph.py.
    """
    memo = {} if memo is None else memo
    like = variables["P"]
    for x in walk([e]):
        if x in memo:
            continue
        if x.op == "const":
            dtype = torch.bool if x.dtype == BOOL else like.dtype
            memo[x] = torch.full((), x.value, dtype=dtype, device=like.device)
        elif not x.args:
            memo[x] = variables[x.op]
        elif x.op == "float":
            memo[x] = memo[x.args[0]].to(like.dtype)
        else:
            args = [memo[a] for a in x.args]
            if x.is_guarded:  # the other factor is 0 instead, and has no gradient there
                args = [
                    y if a.is_finite else torch.where(other == 0, torch.zeros_like(other), y)
                    for a, y, other in zip(x.args, args, args[::-1], strict=True)
                ]
            memo[x] = OPERATIONS[x.op].run(*args)
    return memo[e]


def variables_of(
    log_t: Tensor, log_s: Tensor, exp: Callable[[Tensor], Tensor] = torch.exp
) -> dict[str, Tensor]:
    """Returns the variables of a divergence, by name."""
    return {"P": exp(log_t), "S": exp(log_s), "logP": log_t, "logS": log_s}


def evaluate_logs(e: Node, log_t: Tensor, log_s: Tensor) -> Tensor:
    """Returns the expression's value of every key, from log-probabilities; differentiable by
    autograd.
    """
    return evaluate(e, variables_of(log_t, log_s)).expand_as(log_t)


@dataclass(frozen=True)
class Functional:
    """Holds a parsed divergence with everything an implementation needs of it (see the NOTEs
    above).
    """

    text: str
    expr: Node
    student_grad: Node
    teacher_grad: Node
    bilinear: Bilinear | None
    guarded: GuardedBilinear | None
    absent: float
    squares: float | None
    _memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: str) -> Functional:
        expr = parse(text)
        guarded = None
        form = bilinear(expr)
        if form is None:
            floors = {LOG_P: -math.inf, LOG_S: -math.inf}
            inner = bilinear(without_clamps(expr, floors))
            if inner is not None:
                guarded = GuardedBilinear(inner, floors[LOG_P], floors[LOG_S])
        nothing = {"P": 0.0, "S": 0.0, "logP": -math.inf, "logS": -math.inf}
        with unset_fake_temporarily():  # a fake operator may be the first to ask
            absent = evaluate(expr, {k: exact(v) for k, v in nothing.items()}).item()
        factor = squares(expr)
        student_grad, teacher_grad = (
            mixture_terms(expr)
            or square_terms(factor)
            or (derivative(expr, LOG_S), derivative(expr, LOG_P))
        )
        return Functional(
            render(expr),
            expr,
            student_grad,
            teacher_grad,
            form,
            guarded,
            absent,
            factor,
        )

    @property
    def compares(self) -> bool:
        """Returns whether probabilities are compared, other than to ask whether they are 0."""
        every = (x for x in walk([self.expr]) if x.op in ("gt", "ge", "eq", "lt", "le", "ne"))
        return any(x.args[1] is not const(FLOOR_OF_EXP) for x in every)

    @property
    def closed_form(self) -> Bilinear | None:
        """Returns what one pass computes: for every row, or for those that reach no clamp."""
        return self.guarded.form if self.guarded else self.bilinear

    @functools.cached_property
    def mixture(self) -> tuple[float, float] | None:
        """Matches JS and returns its b and c: b P (logP - logM) + c S (logS - logM) with M = b P +
        c S.
        """
        if mixture_terms(self.expr) is None:
            return None
        return next(filter(None, map(mixture_shares, walk([self.expr]))))

    @functools.cached_property
    def has_jumps(self) -> bool:
        """Returns whether the gradient jumps where a function of P equals one of S.

        At a clamp it jumps by no more than the clamp, which is small.
        """
        return any(
            x.op in KINKS and not any(a.op == "const" for a in x.args) for x in walk([self.expr])
        )

    @functools.cached_property
    def variation(self) -> float | None:
        """Returns the number c of an expression c |P - S|."""
        c, e = multiple(self.expr)
        return c if c and e in (apply("abs", P - S), apply("abs", S - P)) else None

    @functools.cached_property
    def quotient(self) -> LiftedQuotient | None:
        """Matches P (log(P + e) - log(S + f)), or S (log(S + f) - log(P + e)), and returns its
        numbers.
        """
        eps = {x.args[0]: x.args[1].value for x in walk([self.expr]) if is_lifted(x)}
        if set(eps) != {P, S} or eps[P] * eps[S] < SMALLEST:
            return None
        for own, other in ((P, S), (S, P)):
            log_own, log_other = (apply("log", x + eps[x]) for x in (own, other))
            if self.expr is own * (log_own - log_other):
                return LiftedQuotient(eps[own], eps[other], own is P)
        return None

    @functools.cached_property
    def is_short(self) -> bool:
        """Returns whether its value and derivatives are expressions that `is_short` names."""
        return all(is_short(e) for e in (self.expr, self.student_grad, self.teacher_grad))

    @functools.cached_property
    def has_kinks(self) -> bool:
        """Returns whether a derivative jumps, where the rounding of a probability decides."""
        return any(x.op in KINKS for x in walk([self.student_grad, self.teacher_grad]))

    @functools.cached_property
    def plain_student_floor(self) -> float | None:
        """Returns the floor with h = c P where logS >= floor and h = 0 below, -inf where h = c P
        always.

        None where h is anything else. The constant c is the form's ``ts``.
        """
        floors: set[float] = set()
        above = polynomial(where_clamped(self.student_grad, 1, floors))
        below = polynomial(where_clamped(self.student_grad, 2, floors))
        if above is None or not set(above) <= {(P,)}:
            return None
        if not floors:
            return -math.inf
        return floors.pop() if above and below == {} and len(floors) == 1 else None

    def sums(self, variables: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns f, h = df/dlogS and g = df/dlogP of every key (shapes as the variables)."""
        f, h, g = self.terms("fhg", variables)
        return f, h, g

    def terms(self, names: str, variables: dict[str, Tensor]) -> list[Tensor]:
        """Returns the named ones among f, h and g, in that order."""
        memo: dict[Node, Tensor] = {}
        exprs = {"f": self.expr, "h": self.student_grad, "g": self.teacher_grad}
        return [evaluate(exprs[n], variables, memo).expand_as(variables["P"]) for n in names]


def _js(beta: float) -> Node:
    if beta in (0.0, 1.0):  # the limits vanish; GKD and its users mean the two KLs there
        return parse(DIVERGENCES["forward_kl" if beta == 0.0 else "reverse_kl"])
    b, c = const(beta), const(1.0 - beta)
    mixture = apply(
        "logaddexp", LOG_P + const(math.log(beta)), LOG_S + const(math.log(1.0 - beta))
    )
    return b * (P * (LOG_P - mixture)) + c * (S * (LOG_S - mixture))


DIVERGENCES = {
    "forward_kl": "P*(logP-logS)",
    "reverse_kl": "S*(logS-logP)",
    "cross_entropy": "-(P*logS)",
    "jeffreys": "P*(logP-logS)+S*(logS-logP)",
    "tv": "0.5*abs(P-S)",
}
NAMES = (*DIVERGENCES, "js")


@functools.lru_cache(maxsize=256)
def named(
    divergence: str,
    beta: float = 0.5,
    student_eps: float = 0.0,
    teacher_eps: float = 0.0,
    student_clamp: float = 0.0,
    teacher_clamp: float = 0.0,
) -> Functional:
    """Returns the functional of a named divergence with guards on the probabilities before the
    log.

    A guard replaces ``logP`` by ``log(max(P + eps, clamp))``; the weights P and S stay as they
    are.
    """
    expr = _js(beta) if divergence == "js" else parse(DIVERGENCES[divergence])
    logs = {
        LOG_P: _guard(P, teacher_eps, teacher_clamp),
        LOG_S: _guard(S, student_eps, student_clamp),
    }
    return Functional.of(render(replaced(expr, logs.get)))


def _guard(probability: Node, eps: float, clamp: float) -> Node:
    inner = probability + const(eps)
    return apply("log", apply("clamp_min", inner, clamp) if clamp > 0.0 else inner)
