"""Parses, differentiates and evaluates divergences as expressions over one key's probabilities.

A divergence of a row is a sum over keys, ``sum_j f(P_j, S_j, logP_j, logS_j)``, with the teacher's
probabilities P and the student's S. Here f is a small expression. Everything that computes a
divergence (reference, streaming, kernels) reads it from a `Functional`, so a new one is a line in
`DIVERGENCES`, and a recognised loss with eps and clamps is just another expression.

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
from torch.autograd import forward_ad

VARIABLES = ("P", "S", "logP", "logS")


@dataclass(frozen=True)
class Expr:
    """One node: a variable, a constant, or an operation on expressions.

    ``value`` is a constant's value. The rewrite, which meets more than two distributions, numbers
    its variables with it: Expr("P", (), 3.0) and Expr("logP", (), 3.0) belong to its distribution
    3.
    """

    op: str
    args: tuple[Expr, ...] = ()
    value: float = 0.0

    def __add__(self, other: Expr) -> Expr:
        return apply("add", self, other)

    def __sub__(self, other: Expr) -> Expr:
        return apply("sub", self, other)

    def __mul__(self, other: Expr) -> Expr:
        return apply("mul", self, other)

    def __truediv__(self, other: Expr) -> Expr:
        return apply("div", self, other)

    def __neg__(self) -> Expr:
        return apply("neg", self)

    def __str__(self) -> str:
        return render(self)


P, S, LOG_P, LOG_S = (Expr(name) for name in VARIABLES)


def const(value: float) -> Expr:
    """Makes a constant."""
    return Expr("const", (), float(value))


def exact(value: float) -> Tensor:
    """Returns a number in float64, on the CPU whatever the default device is."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


SMALLEST_LIFT = 2.0**-100  # of `is_lifted`
ZERO, ONE = const(0.0), const(1.0)
FLOOR_OF_EXP = -1e30  # an exponent whose exponential is 0 in every dtype we compute in

# arity of every operation; comparisons give 0 or 1
ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "exp": 1, "log": 1, "abs": 1, "sqrt": 1,
         "max": 2, "min": 2, "ge": 2, "gt": 2, "where": 3, "logaddexp": 2}  # fmt: skip
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_FROM_AST = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}


def apply(op: str, *args: Expr) -> Expr:
    """Returns an operation on expressions, with the rewrites that are exact identities of real
    numbers.

    ``log(P)`` becomes ``logP`` and ``log(max(P, c))`` becomes ``max(logP, log c)``: both avoid the
    underflow of P, and both are what the formula means.
    """
    if len(args) != ARITY[op]:
        raise ValueError(f"{op} takes {ARITY[op]} arguments, got {len(args)}")
    if all(a.op == "const" for a in args):
        return const(float(_evaluate_node(op, [exact(a.value) for a in args])))
    a, b = args[0], args[-1]
    match op:
        case "add" if a == ZERO:
            return b
        case "add" | "sub" if b == ZERO:
            return a
        case "sub" if a == b:
            return ZERO
        case "sub" if a == ZERO:
            return apply("neg", b)
        case "add" | "sub" if (total := _sum_of_multiples(op, a, b)) is not None:
            return total
        case "mul" if ZERO in args:
            return ZERO
        case "mul" if a == ONE:
            return b
        case "mul" | "div" if b == ONE:
            return a
        case "div" if a == ZERO:
            return ZERO
        case "neg" if a.op == "neg":
            return a.args[0]
        case "exp" if a.op in ("logP", "logS"):
            return Expr(a.op[3:], (), a.value)
        case "log":
            return _log(a)
        case "where" if a.op == "const":
            return args[1] if a.value else args[2]
        case "where" if args[1] == args[2]:
            return b
    return Expr(op, args)


def _sum_of_multiples(op: str, a: Expr, b: Expr) -> Expr | None:
    """Multiples of one probability as one: where that is 0, so is the product with a logarithm."""
    (c, x), (d, y) = _multiple(a), _multiple(b)
    if x != y or not is_weight(x):
        return None
    return apply("mul", const(c + d if op == "add" else c - d), x)


def _multiple(e: Expr) -> tuple[float, Expr]:
    """A number and what it multiplies."""
    if e.op == "mul" and e.args[0].op == "const":
        return e.args[0].value, e.args[1]
    if e.op == "mul" and e.args[1].op == "const":
        return e.args[1].value, e.args[0]
    if e.op == "div" and e.args[1].op == "const" and e.args[1].value:
        return 1.0 / e.args[1].value, e.args[0]
    return (-1.0, e.args[0]) if e.op == "neg" else (1.0, e)


def log_variable(e: Expr) -> Expr | None:
    """Returns logP for P, logS for S, None for anything else."""
    return Expr("log" + e.op, (), e.value) if e.op in ("P", "S") else None


def _log(a: Expr) -> Expr:
    direct = log_variable(a)
    if direct is not None:
        return direct
    if a.op in ("max", "min"):
        for x, c in (a.args, a.args[::-1]):
            log_x = log_variable(x)
            if log_x is not None and c.op == "const":
                return apply(a.op, log_x, const(math.log(c.value) if c.value > 0 else -math.inf))
    if a.op == "exp":
        return a.args[0]
    factor, of = _multiple(a)
    log_of = log_variable(of)
    if log_of is not None and factor > 0.0:
        return apply("add", const(math.log(factor)), log_of)
    return Expr("log", (a,))


def render(e: Expr) -> str:
    """Returns the text that `parse` reads back to the same expression."""
    if e.op == "const":
        return repr(e.value) if math.isfinite(e.value) else f"float('{e.value}')"
    if e.op in VARIABLES:
        return e.op
    if e.op in _INFIX:
        return f"({render(e.args[0])}{_INFIX[e.op]}{render(e.args[1])})"
    if e.op == "neg":
        return f"(-{render(e.args[0])})"
    return f"{e.op}({','.join(render(a) for a in e.args)})"


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Expr:
    """Returns the expression of a text such as ``P*(logP-max(logS,-27.6))``."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            f"a divergence expression must be a formula over {VARIABLES}, got {text!r}"
        ) from error
    return _parse_node(tree, text)


def _parse_node(node: ast.AST, text: str) -> Expr:
    match node:
        case ast.Constant(value=int() | float() as value):
            return const(value)
        case ast.Name(id=name) if name in VARIABLES:
            return Expr(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _FROM_AST:
            return apply(_FROM_AST[type(op)], _parse_node(left, text), _parse_node(right, text))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return apply("neg", _parse_node(operand, text))
        case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(value))]):
            return const(float(value))
        case ast.Call(func=ast.Name(id=name), args=args) if name in ARITY:
            return apply(name, *(_parse_node(a, text) for a in args))
    raise ValueError(
        f"a divergence expression may use {', '.join(VARIABLES)}, numbers, + - * / and "
        f"{', '.join(sorted(ARITY))}, got {ast.unparse(node)!r} in {text!r}"
    )


def derivative(e: Expr, log_variable: Expr) -> Expr:
    """Returns the derivative to logP or logS, with P = exp(logP) and torch's conventions at kinks.

    ``max(x, c)`` passes the gradient where x >= c, as ``clamp(min=c)`` does.
    """
    probability = {LOG_P: P, LOG_S: S}[log_variable]
    if e == log_variable:
        return ONE
    if e == probability:
        return probability
    if e.op in ("const", *VARIABLES, "ge", "gt"):
        return ZERO
    d = [derivative(a, log_variable) for a in e.args]
    a = e.args
    match e.op:
        case "add" | "sub":
            return apply(e.op, d[0], d[1])
        case "mul":
            return d[0] * a[1] + a[0] * d[1]
        case "div":
            return d[0] / a[1] - a[0] * d[1] / (a[1] * a[1])
        case "neg":
            return -d[0]
        case "exp":
            return e * d[0]
        case "log":
            return d[0] / a[0]
        case "abs":
            return apply(
                "where",
                apply("gt", a[0], ZERO),
                d[0],
                apply("where", apply("gt", ZERO, a[0]), -d[0], ZERO),
            )
        case "sqrt" if d[0] == a[0]:  # of a probability, which is 0 where a key is masked
            return const(0.5) * e
        case "sqrt":
            return const(0.5) * d[0] / e
        case "max":
            return apply("where", apply("ge", a[0], a[1]), d[0], d[1])
        case "min":
            return apply("where", apply("ge", a[1], a[0]), d[0], d[1])
        case "where":
            return apply("where", a[0], d[1], d[2])
        case "logaddexp":
            return apply("exp", a[0] - e) * d[0] + apply("exp", a[1] - e) * d[1]
    raise AssertionError(e.op)


def is_weight(e: Expr) -> bool:
    """Returns whether a factor is 0 exactly where its distribution gives a key no probability."""
    return e.op in ("P", "S")


def is_lifted(e: Expr) -> bool:
    """Returns whether an expression is a probability and an epsilon far above the smallest
    numbers.
    """
    if e.op != "add":
        return False
    a, b = e.args
    return is_weight(a) and b.op == "const" and SMALLEST_LIFT <= b.value < math.inf


def _evaluate_node(op: str, args: list[Tensor]) -> Tensor:
    match op:
        case "add":
            return args[0] + args[1]
        case "sub":
            return args[0] - args[1]
        case "mul":
            return args[0] * args[1]
        case "div":
            return args[0] / args[1]
        case "neg":
            return -args[0]
        case "exp":
            return args[0].exp()
        case "log":
            return args[0].log()
        case "abs":
            return args[0].abs()
        case "sqrt":
            return args[0].sqrt()
        case "max":
            # where() and not maximum(): torch.maximum halves the gradient at a tie, clamp does not
            return torch.where(args[0] >= args[1], args[0], args[1])
        case "min":
            return torch.where(args[0] <= args[1], args[0], args[1])
        case "ge":
            return (args[0] >= args[1]).to(args[0].dtype)
        case "gt":
            return (args[0] > args[1]).to(args[0].dtype)
        case "where":
            return torch.where(args[0] != 0, args[1], args[2])
        case "logaddexp":
            return _logaddexp(args[0], args[1])
    raise AssertionError(op)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a + e^b), with the derivative 0 where both are -inf; that of torch's is NaN."""
    if not (a.requires_grad or b.requires_grad or forward_ad._current_level >= 0):
        return torch.logaddexp(a, b)
    absent = (a == -math.inf) & (b == -math.inf)
    present = torch.logaddexp(a.masked_fill(absent, 0.0), b.masked_fill(absent, 0.0))
    return present.masked_fill(absent, -math.inf)


def evaluate(
    e: Expr, variables: dict[str, Tensor], memo: dict[Expr, Tensor] | None = None
) -> Tensor:
    """Returns the expression's value on tensors of one shape; a key without probability
    contributes 0.

    A product with P (or S) is 0 where P (or S) is 0, whatever the other factor: 0 * log 0 = 0.
    """
    memo = {} if memo is None else memo
    if e in memo:
        return memo[e]
    like = variables["P"]
    if e.op == "const":
        result = torch.full((), e.value, dtype=like.dtype, device=like.device)
    elif e.op in VARIABLES:
        result = variables[e.op]
    else:
        args = [evaluate(a, variables, memo) for a in e.args]
        if e.op == "mul":
            for weight, other in ((0, 1), (1, 0)):
                if is_weight(e.args[weight]) and not is_weight(e.args[other]):
                    args[other] = torch.where(
                        args[weight] == 0, torch.zeros_like(args[weight]), args[other]
                    )
        result = _evaluate_node(e.op, args)
    memo[e] = result
    return result


def evaluate_logs(e: Expr, log_t: Tensor, log_s: Tensor) -> Tensor:
    """Returns the expression's value of every key, from log-probabilities; differentiable by
    autograd.
    """
    variables = {"P": log_t.exp(), "S": log_s.exp(), "logP": log_t, "logS": log_s}
    return evaluate(e, variables).expand_as(log_t)


Monomial = tuple[int, int, int, int]  # powers of P, S, logP, logS


def _polynomial(e: Expr) -> dict[Monomial, float] | None:
    if e.op == "const":
        return {(0, 0, 0, 0): e.value} if e.value else {}
    if e.op in VARIABLES:
        p, s, log_p, log_s = (int(name == e.op) for name in VARIABLES)
        return {(p, s, log_p, log_s): 1.0}
    if e.op not in ("add", "sub", "mul", "div", "neg"):
        return None
    terms = [_polynomial(a) for a in e.args]
    if any(t is None for t in terms):
        return None
    a, b = terms[0], terms[-1]
    assert a is not None and b is not None
    result: dict[Monomial, float] = {}
    if e.op == "neg":
        result = {k: -v for k, v in a.items()}
    elif e.op in ("add", "sub"):
        result = dict(a)
        for k, v in b.items():
            result[k] = result.get(k, 0.0) + (v if e.op == "add" else -v)
    elif e.op == "mul":
        for k1, v1 in a.items():
            for k2, v2 in b.items():
                i, j, m, n = (x + y for x, y in zip(k1, k2, strict=True))
                result[i, j, m, n] = result.get((i, j, m, n), 0.0) + v1 * v2
    else:
        if set(b) != {(0, 0, 0, 0)}:
            return None
        result = {k: v / b[(0, 0, 0, 0)] for k, v in a.items()}
    return {k: v for k, v in result.items() if v != 0.0}


@dataclass(frozen=True)
class Bilinear:
    """``sum_j P_j (tt logP_j + ts logS_j) + S_j (st logP_j + ss logS_j) + t P_j + s S_j``."""

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


_BILINEAR_FIELDS: dict[Monomial, str] = {
    (1, 0, 1, 0): "tt", (1, 0, 0, 1): "ts", (0, 1, 1, 0): "st", (0, 1, 0, 1): "ss",
    (1, 0, 0, 0): "t", (0, 1, 0, 0): "s",
}  # fmt: skip


def bilinear(e: Expr) -> Bilinear | None:
    """Returns the six coefficients when the expression is linear in the log-probabilities, else
    None.
    """
    terms = _polynomial(e)
    if terms is None or not set(terms) <= set(_BILINEAR_FIELDS):
        return None
    return Bilinear(**{_BILINEAR_FIELDS[k]: v for k, v in terms.items()})


def squares(e: Expr) -> float | None:
    """Returns the factor c of an expression c (P - S)^2, else None."""
    terms = _polynomial(e) or {}
    factor = terms.get((2, 0, 0, 0), 0.0)
    square = {(2, 0, 0, 0): factor, (1, 1, 0, 0): -2.0 * factor, (0, 2, 0, 0): factor}
    return factor if factor and terms == square else None


def _square_terms(factor: float | None) -> tuple[Expr, Expr] | None:
    """df/dlogS and df/dlogP of c (P - S)^2."""
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


def _without_clamps(e: Expr, floors: dict[Expr, float]) -> Expr:
    if e.op == "max" and e.args[1].op == "const" and e.args[0] in (P, S, LOG_P, LOG_S):
        variable, c = e.args[0], e.args[1].value
        log_variable = {P: LOG_P, S: LOG_S}.get(variable, variable)
        floor = c if variable in (LOG_P, LOG_S) else (math.log(c) if c > 0 else -math.inf)
        floors[log_variable] = max(floors[log_variable], floor)
        return variable
    if not e.args:
        return e
    return apply(e.op, *(_without_clamps(a, floors) for a in e.args))


def _where_clamped(e: Expr, branch: int, floors: set[float]) -> Expr:
    """The expression with branch 1 or 2 of every ``where(logS >= floor, ...)``; adds floors."""
    if e.op == "where" and e.args[0].op == "ge":
        variable, floor = e.args[0].args
        if variable == LOG_S and floor.op == "const":
            floors.add(floor.value)
            return _where_clamped(e.args[branch], branch, floors)
    return apply(e.op, *(_where_clamped(a, branch, floors) for a in e.args)) if e.args else e


_KINKS = ("where", "ge", "gt", "max", "min", "abs")


def _has_kinks(e: Expr) -> bool:
    return e.op in _KINKS or any(map(_has_kinks, e.args))


def _has_jumps(e: Expr) -> bool:
    jumps = e.op in _KINKS and not any(a.op == "const" for a in e.args)
    return jumps or any(map(_has_jumps, e.args))


@dataclass(frozen=True)
class Functional:
    """Holds a parsed divergence with everything an implementation needs of it (see the NOTEs
    above).
    """

    text: str
    expr: Expr
    student_grad: Expr
    teacher_grad: Expr
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
            inner = bilinear(_without_clamps(expr, floors))
            if inner is not None:
                guarded = GuardedBilinear(inner, floors[LOG_P], floors[LOG_S])
        nothing = {"P": 0.0, "S": 0.0, "logP": -math.inf, "logS": -math.inf}
        with unset_fake_temporarily():  # a fake operator may be the first to ask
            absent = evaluate(expr, {k: exact(v) for k, v in nothing.items()}).item()
        factor = squares(expr)
        student_grad, teacher_grad = (
            mixture_terms(expr)
            or _square_terms(factor)
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
        _, of_p = self.expr.args[0].args  # P (logP - logM)
        return mixture_shares(of_p.args[1].args[1])

    @functools.cached_property
    def has_jumps(self) -> bool:
        """Returns whether the gradient jumps where a function of P equals one of S.

        At a clamp it jumps by no more than the clamp, which is small.
        """
        return _has_jumps(self.expr)

    @functools.cached_property
    def variation(self) -> float | None:
        """Returns the number c of an expression c |P - S|."""
        e = self.expr
        c = 1.0
        if e.op == "mul" and e.args[0].op == "const":
            c, e = e.args[0].value, e.args[1]
        return c if c and e in (apply("abs", P - S), apply("abs", S - P)) else None

    @functools.cached_property
    def quotient(self) -> LiftedQuotient | None:
        """Matches P (log(P + e) - log(S + f)), or S (log(S + f) - log(P + e)), and returns its
        numbers.
        """
        if self.expr.op != "mul" or self.expr.args[1].op != "sub":
            return None
        own, (log_own, log_other) = self.expr.args[0], self.expr.args[1].args
        if not (log_own.op == log_other.op == "log" and is_weight(own)):
            return None
        (lifted_own,), (lifted_other,) = log_own.args, log_other.args
        if not (is_lifted(lifted_own) and is_lifted(lifted_other)):
            return None
        (own_too, own_eps), (other, other_eps) = lifted_own.args, lifted_other.args
        if own_too != own or other == own:
            return None
        if own_eps.value * other_eps.value < SMALLEST_LIFT:
            return None
        return LiftedQuotient(own_eps.value, other_eps.value, own == P)

    @functools.cached_property
    def is_short(self) -> bool:
        """Returns whether its value and derivatives are expressions that `is_short` names."""
        return all(is_short(e) for e in (self.expr, self.student_grad, self.teacher_grad))

    @functools.cached_property
    def has_kinks(self) -> bool:
        """Returns whether a derivative jumps, where the rounding of a probability decides."""
        return any(_has_kinks(e) for e in (self.student_grad, self.teacher_grad))

    @functools.cached_property
    def plain_student_floor(self) -> float | None:
        """Returns the floor with h = c P where logS >= floor and h = 0 below, -inf where h = c P
        always.

        None where h is anything else. The constant c is the form's ``ts``.
        """
        floors: set[float] = set()
        above = _polynomial(_where_clamped(self.student_grad, 1, floors))
        below = _polynomial(_where_clamped(self.student_grad, 2, floors))
        if above is None or not set(above) <= {(1, 0, 0, 0)}:
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
        memo: dict[Expr, Tensor] = {}
        exprs = {"f": self.expr, "h": self.student_grad, "g": self.teacher_grad}
        return [evaluate(exprs[n], variables, memo).expand_as(variables["P"]) for n in names]


def _js(beta: float) -> Expr:
    if beta in (0.0, 1.0):  # the limits vanish; GKD and its users mean the two KLs there
        return parse(DIVERGENCES["forward_kl" if beta == 0.0 else "reverse_kl"])
    b, c = const(beta), const(1.0 - beta)
    mixture = apply(
        "logaddexp", LOG_P + const(math.log(beta)), LOG_S + const(math.log(1.0 - beta))
    )
    return b * (P * (LOG_P - mixture)) + c * (S * (LOG_S - mixture))


def mixture_terms(e: Expr) -> tuple[Expr, Expr] | None:
    """Returns df/dlogS and df/dlogP of f = b P (logP - logM) + c S (logS - logM) with M = b P + c
    S.

    They are f's own terms of S and of P: what M's derivative adds to both cancels.
    """
    if e.op != "add":
        return None
    weights = []
    for term, weight, log in ((e.args[0], P, LOG_P), (e.args[1], S, LOG_S)):
        if term.op != "mul" or term.args[0].op != "const" or term.args[1].op != "mul":
            return None
        share, (factor, difference) = term.args[0], term.args[1].args
        if factor != weight or difference.op != "sub" or difference.args[0] != log:
            return None
        weights.append((share.value, difference.args[1]))
    (b, mixture), (c, same) = weights
    if min(b, c) <= 0.0 or mixture != same:
        return None
    splits = mixture_shares(mixture)
    if splits is None or any(
        not math.isclose(x, y, rel_tol=1e-12) for x, y in zip(splits, (b, c), strict=True)
    ):
        return None
    return e.args[1], e.args[0]


def mixture_shares(e: Expr) -> tuple[float, float] | None:
    """Matches log(b P + c S) and returns b and c."""
    if e.op != "logaddexp":
        return None
    splits = []
    for term, log in zip(e.args, (LOG_P, LOG_S), strict=True):
        if term.op != "add" or term.args[0] != log or term.args[1].op != "const":
            return None
        splits.append(math.exp(term.args[1].value))
    return splits[0], splits[1]


# a GPU has an instruction for each, or two
_SHORT = {"P", "S", "logP", "logS", "const", "add", "sub", "mul", "neg", "abs"}
_SHORT |= {"max", "min", "ge", "gt", "where"}


def is_short(e: Expr) -> bool:
    """Returns whether kernels compute an expression of half-precision inputs without series of
    terms.
    """
    if mixture_shares(e) is not None:
        return True
    is_one = e.op in _SHORT or (e.op in ("log", "div") and is_lifted(e.args[-1]))
    return is_one and all(is_short(a) for a in e.args)


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
    return Functional.of(render(substitute(expr, logs.__getitem__)))


def _guard(probability: Expr, eps: float, clamp: float) -> Expr:
    inner = probability + const(eps)
    return apply("log", apply("max", inner, const(clamp)) if clamp > 0.0 else inner)


def substitute(e: Expr, log_of: Callable[[Expr], Expr]) -> Expr:
    """Returns the expression with every logP and logS replaced."""
    if e in (LOG_P, LOG_S):
        return log_of(e)
    return apply(e.op, *(substitute(a, log_of) for a in e.args)) if e.args else e
