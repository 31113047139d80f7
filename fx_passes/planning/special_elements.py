"""Refuses operations that could observe NaN or infinity that eager produces and programs do not.

It does between scores and sums what nan_readers.py does after a loss. Two values of a program
differ from eager's:

- The softmax of a row without any key is 0, and its logarithm -inf; eager has NaN. So is 0 times
  infinity. An operation that keeps NaN makes the sum NaN, so only a comparison can tell.
- The logarithm of a probability that underflows comes from its score; eager has -inf. A small
  power of it is a number; eager has 0. An operation that makes a number of infinity can tell,
  unless it gives the same for the smallest logarithms.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch

from torch_streamkl.fx_passes.domain.row_elements import Formula, formulas_in
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.program.graph import LOGSUMEXP, MAX, SUM, Node
from torch_streamkl.program.identities import exponentials_in
from torch_streamkl.program.steps import Step
from torch_streamkl.rows.program import Program

COMPARISONS = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
BOUNDS = {"minimum", "maximum", "clamp_min", "clamp_max"}
SATURATING = {"exp", "sigmoid", "tanh", "softplus"}  # they have it long before infinity
CUT = {*COMPARISONS, "maximum", "clamp_min"}  # nothing that was below the bound is left
SUMS = {"add", "sub", "neg", "detach"}
UNDERFLOWN = "the logarithm of a probability that may underflow"
# what is above has not underflown: the logarithm of the smallest number, by type
SMALLEST = {torch.float16: -16.0}
SMALLEST_OF_OTHERS = -103.0


class UnderflowRead(Unsupported):
    """Raised for an exponential of the logarithm of a probability, which is 0 by underflow in
    eager.
    """


def check_readers_inside(
    formulas: Sequence[Formula],
    nodes: Mapping[Formula, Node],
    *,
    logarithms_are_exact: bool,
) -> None:
    """Raises Unsupported if an operation on elements would see another number than in eager."""
    _check_comparisons(formulas, nodes)
    _check_maxima(formulas, nodes)
    _check_logarithms(formulas, nodes, are_exact=logarithms_are_exact)
    _check_powers(formulas, nodes)


# what gives NaN and infinity of the same arguments as eager code does
PLAIN = {"dot", "capture", "const", "key_index", "row_index", "reduction", "float", "detach"}
PLAIN |= {"add", "sub", "neg", "mul", "exp", "where", "and", "or", "not", "abs", *COMPARISONS}
PLAIN_FORMULAS = {*PLAIN, "columns", "linear", "reduce", "div"}


def is_as_special(program: Program, sums: Iterable[Formula]) -> bool:
    """Returns whether the outputs are NaN or infinite exactly where eager's are.

    So it is without masks of -inf, logarithms and quotients: of finite scores both have numbers,
    and where a score is none, no row with it has one. A log-sum-exp of infinity is infinite in
    eager code alone, and float16 has it earlier.
    """
    formulas = [f for x in sums for f in formulas_in(x)]
    dtypes = {dtype for f in formulas if f.op == "dot" for dtype in f.data.dtypes}
    return (
        torch.float16 not in dtypes
        and all((n.op in PLAIN and n.is_finite) or _is_scale(program, n) for n in program.nodes)
        and all(program.reductions[c].kind == SUM for c in program.outputs)
        and all(r.kind != MAX for r in program.reductions)
        and all(f.op in PLAIN_FORMULAS for f in formulas)
    )


def is_never_infinite(program: Program, sums: Iterable[Formula]) -> bool:
    """Returns whether sums of finite scores are never infinite, neither the program's nor eager's.

    They are sums of probabilities, times what is finite: a probability is at most 1, and 0 or, in
    eager code, NaN where a row has no key.
    """
    formulas = [f for x in sums for f in formulas_in(x)]
    dtypes = {dtype for f in formulas if f.op == "dot" for dtype in f.data.dtypes}
    return (
        torch.float16 not in dtypes
        and all(
            n.op in PLAIN or n.op == "sum_heads" or _is_scale(program, n) for n in program.nodes
        )
        and all(_is_probability(program, n) for n in program.nodes if n.op == "exp")
        and all(program.reductions[c].is_added for c in program.outputs)
        and all(
            program.nodes[r.node].is_finite if r.is_added else r.kind == LOGSUMEXP
            for r in program.reductions
        )
        and all(f.op in PLAIN_FORMULAS for f in formulas)
    )


def _is_probability(program: Program, node: Step) -> bool:
    """Whether a formula is the exponential of a score minus its own log-sum-exp."""
    difference = program.nodes[node.args[0]]
    if difference.op != "sub" or program.nodes[difference.args[1]].op != "reduction":
        return False
    of = program.reductions[int(program.nodes[difference.args[1]].value)]
    return of.kind == LOGSUMEXP and of.node == difference.args[0]


def _is_scale(program: Program, node: Step) -> bool:
    """Whether a formula is a quotient by a number other than 0."""
    divisor = program.nodes[node.args[1]] if node.op == "div" else None
    return divisor is not None and divisor.op == "const" and divisor.value != 0.0


def _check_comparisons(formulas: Sequence[Formula], nodes: Mapping[Formula, Node]) -> None:
    may_be_nan: set[Formula] = set()
    for f in formulas:
        if f.op in COMPARISONS:
            for i, a in enumerate(f.args):
                if a in may_be_nan and not _compares_as_nan(f, i, nodes):
                    raise Unsupported(
                        "a comparison reads NaN, which eager has in a row without keys"
                    )
        elif any(a in may_be_nan for a in f.args) or _may_be_nan(f, nodes):
            may_be_nan.add(f)


def _check_maxima(formulas: Sequence[Formula], nodes: Mapping[Formula, Node]) -> None:
    """The maximum of a row without keys is 0 in a program: it may be subtracted, no more."""
    maxima: set[Formula] = set()
    for f in formulas:
        is_maximum = f.op == "reduce" and f.data.kind == "max"
        if (is_maximum and not nodes[f.args[0]].is_finite) or (
            f.op == "detach" and f.args[0] in maxima
        ):
            maxima.add(f)
        elif any(a in maxima for a in f.args) and (f.op != "sub" or f.args[0] in maxima):
            raise Unsupported("the maximum of a row that may have no key is more than subtracted")


def _check_logarithms(
    formulas: Sequence[Formula], nodes: Mapping[Formula, Node], *, are_exact: bool
) -> None:
    logs: set[Formula] = set()  # of what may underflow
    behind: set[Formula] = set()
    # of those, what is no sum or difference of logarithms: by how much they are scaled, if known
    scaled: dict[Formula, float] = {}
    for f in formulas:
        asks = f.op in COMPARISONS or f.op in BOUNDS
        for a, b in (f.args, f.args[::-1]) if asks else ():
            if a in behind and not (a in logs and _constant(b) >= _smallest(a)):
                raise Unsupported(f"{f.op} of {UNDERFLOWN}")
        if _is_inverse(f) and f.args[-1] in behind:
            raise Unsupported(f"the inverse of {UNDERFLOWN}")
        if f.op in SATURATING or _is_logsumexp(f):
            if f.args[0] in scaled and not (are_exact and _is_steep(f, scaled[f.args[0]])):
                raise UnderflowRead(f"{f.op} of {UNDERFLOWN}")
        elif (f.op == "log" and _has_exponential(f.args[0], nodes)) or (
            f.op == "detach" and f.args[0] in logs
        ):
            logs.add(f)
            behind.add(f)
        elif any(a in behind for a in f.args) and f.op not in CUT:
            behind.add(f)
            if f.op not in SUMS or any(a in scaled for a in f.args):
                scaled[f] = _scale(f) * min(scaled.get(a, 1.0) for a in f.args if a in behind)


def _has_exponential(x: Formula, nodes: Mapping[Formula, Node]) -> bool:
    return x in nodes and any(exponentials_in(nodes[x]))


def _scale(f: Formula) -> float:
    """By how much an operation scales logarithms; 0 where it does something else."""
    if f.op in SUMS or (f.op == "reduce" and f.data.kind == "sum" and not f.data.divisors):
        return 1.0
    if f.op in ("mul", "div") and len({_constant(a) for a in f.args}) == 2:
        by = next((a.data for a in f.args[::-1] if a.op == "const"), 0.0)
        return float(by if f.op == "mul" else 1.0 / by) if by > 0.0 else 0.0
    return 0.0


def _is_steep(f: Formula, scale: float) -> bool:
    """Whether the exponential of a logarithm that scaled is nothing where that underflows."""
    return scale * _smallest(f) < math.log(_precision(f))


def _check_powers(formulas: Sequence[Formula], nodes: Mapping[Formula, Node]) -> None:
    """A power of a probability has none of its underflow: eager has 0 ** 0.01, a program 0.4."""
    exponents: dict[Formula, float] = {}
    for f in formulas:
        if f.op not in ("pow", "sqrt") or f.args[0] not in nodes:
            continue
        if nodes[f.args[0]].op != "exp":
            continue
        exponent = exponents.get(f.args[0], 1.0) * (0.5 if f.op == "sqrt" else f.data)
        exponents[f] = exponent
        if exponent and abs(exponent) * _smallest(f) > math.log(_precision(f)):
            raise Unsupported("a small power of a probability that may underflow")


def _may_be_nan(f: Formula, nodes: Mapping[Formula, Node]) -> bool:
    """Whether eager has NaN, and the program a number, first here."""
    if _is_logsumexp(f):
        return not nodes[f.args[0]].is_finite
    return f in nodes and (nodes[f].is_guarded or nodes[f].op == "div0")


def _is_logsumexp(f: Formula) -> bool:
    return f.op == "reduce" and f.data.kind == "logsumexp"


def _is_inverse(f: Formula) -> bool:
    return f.op == "div" or (f.op == "pow" and f.data < 0)


def _smallest(f: Formula) -> float:
    dtypes = [dtype for dot in f.dots for dtype in dot.dtypes]
    return max(SMALLEST.get(dtype, SMALLEST_OF_OTHERS) for dtype in dtypes)


def _precision(f: Formula) -> float:
    """Returns the number that is lost next to 1, in float32 or in a narrower type."""
    dtypes = {dtype for dot in f.dots for dtype in dot.dtypes}
    return float(torch.finfo(torch.float16 if torch.float16 in dtypes else torch.float32).eps)


def _constant(f: Formula) -> float:
    return float(f.data) if f.op == "const" else -math.inf


def _compares_as_nan(f: Formula, position: int, nodes: Mapping[Formula, Node]) -> bool:
    """Whether the number that an argument is in an empty row compares as NaN does."""
    a, b = f.args[position], f.args[1 - position]
    here = {"exp": 0.0, "sub": -math.inf}.get(nodes[a].op)
    if _is_logsumexp(a):
        return True  # -inf in eager too
    if here is None or b.op != "const":
        return False
    pair = (here, b.data) if position == 0 else (b.data, here)
    return bool(COMPARISONS[f.op](*pair)) == (f.op == "ne")
