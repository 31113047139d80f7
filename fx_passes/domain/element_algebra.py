"""Combines values with one entry per key: expressions over probabilities, and their sums.

Binary operations align two tensors by position. Two uses of one distribution are the same variable
only if they have its axes in the same dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from torch_streamkl.fx_passes.domain import layout as lay
from torch_streamkl.fx_passes.domain.layout import Layout, Shape, axis_dim
from torch_streamkl.fx_passes.domain.masks import BoolTensor, Mask, axes_in, to_axes
from torch_streamkl.fx_passes.domain.score_form import read
from torch_streamkl.fx_passes.domain.scores import IMPROBABLE, Pad, Scores
from torch_streamkl.fx_passes.domain.values import (
    Distribution,
    Elements,
    LogSumExp,
    RowFactor,
    Rows,
    Term,
    conditions_in,
    log_prob,
    lse,
    mentions,
    partly_within,
    prob,
    renumbered,
    variables,
    where_within,
    within,
)
from torch_streamkl.fx_passes.fx_utils.errors import Unsupported
from torch_streamkl.fx_passes.fx_utils.sizes import is_one, product
from torch_streamkl.program.divergences import FLOOR_OF_EXP
from torch_streamkl.program.graph import ONE, ZERO, Node, apply, const

OF_BLOCKS = "sums over blocks of them are per-row values and blocks, of row programs alone"


def softmax(scores: Scores, dim: int, *, log: bool) -> Elements:
    """Returns probabilities (or their logarithms) along a dimension of the scores."""
    return _elements(log_prob(0) if log else prob(0), scores, dim)


def raw_scores(scores: Scores, dim: int) -> Elements:
    """Returns the scores themselves as log-probability + log-sum-exp."""
    _, shift = scores.key.split_shift()
    value = log_prob(0) + lse(0)
    return _elements(value + const(shift) if shift else value, scores, dim)


def _elements(expr: Node, scores: Scores, dim: int) -> Elements:
    distribution, shape = _distribution(scores, dim), lay.sizes_of(scores.layout)
    return Elements((Term(expr),), (distribution,), (scores.layout,), dim, shape)


def _distribution(scores: Scores, dim: int) -> Distribution:
    pieces = scores.layout[dim]
    if len(pieces) != 1 or axis_dim(scores.layout, pieces[0].axis) != dim:
        raise Unsupported("softmax over a dimension that is not one axis of the scores")
    if any(isinstance(x, Pad) and x.axis != pieces[0].axis for x in scores.key.steps):
        raise Unsupported("softmax over the rows of padded scores")
    key, _ = scores.key.split_shift()
    return Distribution(key, pieces[0].axis)


def aligned(a: Elements, b: Elements) -> tuple[Elements, Elements]:
    """Returns both values over one list of distributions and one shape, that of the two
    broadcast.
    """
    rank = max(a.rank, b.rank)
    a, b = with_rank(a, rank), with_rank(b, rank)
    if a.key_dim != b.key_dim:
        raise Unsupported("two distributions over different dimensions are combined")
    shape = lay.broadcast(a.shape, b.shape)
    if shape is None:
        raise Unsupported("two distributions whose sizes are not known to be equal are combined")
    parts, layouts = list(a.parts), list(a.layouts)
    number: dict[int, int] = {}
    for k, (distribution, layout) in enumerate(zip(b.parts, b.layouts, strict=True)):
        for known, (other, other_layout) in enumerate(zip(parts, layouts, strict=True)):
            if other == distribution and other_layout == layout:
                number[k] = known
                break
        else:
            number[k] = len(parts)
            parts.append(distribution)
            layouts.append(layout)
    b_terms = tuple(replace(t, expr=renumbered(t.expr, number)) for t in b.terms)
    common = (tuple(parts), tuple(layouts), a.key_dim, shape)
    return Elements(a.terms, *common), Elements(b_terms, *common)


def with_rank(a: Elements, rank: int) -> Elements:
    """Adds leading dimensions of size 1."""
    extra = rank - a.rank
    if extra == 0:
        return a
    return replace(
        a,
        layouts=tuple(((),) * extra + x for x in a.layouts),
        key_dim=a.key_dim + extra,
        shape=(1,) * extra + a.shape,
    )


def combined(op: str, a: Elements, b: Elements) -> Elements:
    """Returns a binary operation on two values."""
    a, b = aligned(a, b)
    if op in ("add", "sub"):
        minus = [replace(t, expr=-t.expr) for t in b.terms] if op == "sub" else list(b.terms)
        return replace(a, terms=collected([*a.terms, *minus]))
    if op == "mul":
        terms = [
            Term(_product(x.expr, y.expr), x.factors + y.factors) for x in a.terms for y in b.terms
        ]
        return replace(a, terms=collected(terms))
    x, y = a.single(), b.single()
    if op == "div" and y is not None:
        return a.map(lambda e: e / y)
    if x is None or y is None:
        raise Unsupported(f"{op} of values that carry row weights")
    return replace(a, terms=(Term(apply(op, x, y)),))


def collected(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Returns terms with equal row factors as one term."""
    sums: dict[tuple[RowFactor, ...], Node] = {}
    for term in terms:
        sums[term.factors] = sums[term.factors] + term.expr if term.factors in sums else term.expr
    return tuple(Term(expr, factors) for factors, expr in sums.items() if expr != ZERO) or (
        Term(ZERO),
    )


def unary(op: str, a: Elements) -> Elements:
    """Applies neg, exp, log, abs or sqrt to a value."""
    if op == "neg":
        return a.map(lambda e: -e)
    e = a.single()
    if e is None:
        raise Unsupported(f"{op} of values that carry row weights")
    if op == "log":
        return replace(a, terms=(Term(_log(e)),))
    if op == "exp":
        e = _without_lse(e)
    return replace(a, terms=(Term(apply(op, e)),))


def _log(e: Node) -> Node:
    """The logarithm, of a product as a sum: where a probability underflows its score has one."""
    coefficient, factors = _factors(e)
    powers = [_power(f) for f in factors]
    known = [prob for prob, _ in powers if prob is not None]
    if coefficient <= 0.0 or not factors or len(known) < len(factors):
        return apply("log", e)
    if coefficient == 1.0 and len(factors) == 1 and powers[0][1] == 1.0:
        return apply("log", e)
    total = const(math.log(coefficient)) if coefficient != 1.0 else ZERO
    for base, (_, exponent) in zip(known, powers, strict=True):
        log = apply("log", base)
        total = total + (log if exponent == 1.0 else const(exponent) * log)
    return total


def _power(e: Node) -> tuple[Node | None, float]:
    """Splits off a probability and its exponent: 1, or 1/2 inside of a square root."""
    if e.op == "P":
        return e, 1.0
    if e.op == "sqrt":
        base, exponent = _power(e.args[0])
        return base, exponent / 2
    return None, 1.0


def takes_part(a: Elements) -> Elements:
    """Returns the condition that a key has a probability: ``logP > lowest`` for padded scores."""
    if not any(isinstance(x, Pad) for d in a.parts for x in d.scores.steps):
        return a.map(lambda _: ONE)
    if len(a.parts) != 1 or a.single() is None:
        raise Unsupported("a condition on padded probabilities and others")
    return replace(a, terms=(Term(apply("gt", log_prob(0), const(FLOOR_OF_EXP))),))


def needs_probability(a: Elements, condition: Node | None) -> bool:
    """Returns whether every addend has the condition's probability as a factor."""
    e = a.single()
    numbers = set() if condition is None else variables(condition)
    if e is None or len(numbers) != 1:
        return False
    wanted = prob(numbers.pop())
    kept = where_within(e, True)
    return all(wanted in _factors(addend)[1] for _, addend in _distributed(kept, 1.0))


def kept_where(a: Elements, condition: Node | None, *, inverted: bool) -> Elements:
    """Returns the value where a condition on probabilities holds (or does not), 0 elsewhere."""
    e = a.single()
    if e is None or condition is None:
        raise Unsupported("a condition on probabilities and values that carry row weights")
    branches = (ZERO, e) if inverted else (e, ZERO)
    return replace(a, terms=(Term(apply("where", condition, *branches)),))


def _product(a: Node, b: Node) -> Node:
    """a * b; a probability makes a condition on itself, ``P * where(P > 0, x, 0)``, needless."""
    for x, y in ((a, b), (b, a)):
        if y.op == "where" and y.args[0].op == "gt" and y.args[2] == ZERO:
            asked = y.args[0].args[0]
            if asked.op in ("P", "logP") and prob(int(asked.value)) in _factors(x)[1]:
                return x * y.args[1]
    return a * b


def _distributed(e: Node, sign: float) -> list[tuple[float, Node]]:
    """Writes the expression as a sum: distributes products over sums."""
    if e.op == "mul":
        for inner, other in ((0, 1), (1, 0)):
            if e.args[inner].op in ("add", "sub", "neg"):
                parts = _addends(e.args[inner], sign)
                return [y for s, x in parts for y in _distributed(x * e.args[other], s)]
    if e.op in ("add", "sub", "neg"):
        return [y for s, x in _addends(e, sign) for y in _distributed(x, s)]
    return [(sign, e)]


def not_negative(a: Elements) -> bool:
    """Returns whether the value is a positive multiple of probabilities."""
    e = a.single()
    if e is None:
        return False
    coefficient, factors = _factors(where_within(e, True))
    return coefficient >= 0.0 and [f.op for f in factors] == ["P"]


def _without_lse(e: Node) -> Node:
    if mentions(e, "lse"):
        raise Unsupported("exp of raw scores")
    return e


def with_constant(op: str, a: Elements, value: float, *, reverse: bool = False) -> Elements:
    """Returns a binary operation with a number; ``reverse`` has the number first."""
    c = const(value)
    if op in ("mul", "div") and not reverse:
        return a.map(lambda e: apply(op, e, c))
    if op == "mul":
        return a.map(lambda e: c * e)
    single = a.single()
    if single is None:
        raise Unsupported(f"{op} of a number and values that carry row weights")
    return replace(a, terms=(Term(apply(op, c, single) if reverse else apply(op, single, c)),))


def with_row_factor(a: Elements, factor: RowFactor) -> Elements:
    """Multiplies every entry of a row by the row's factor."""
    return replace(a, terms=tuple(replace(t, factors=(*t.factors, factor)) for t in a.terms))


def chosen(condition: Node, a: Elements, b: Elements, c: Elements) -> Elements:
    """Reads where(condition, a, b); variables of the condition are those of ``c``."""
    x, y, z = a.single(), b.single(), c.single()
    if x is None or y is None or z is None:
        raise Unsupported("where on values that carry row weights")
    return replace(a, terms=(Term(apply("where", condition, x, y)),))


def masked_after(
    a: Elements,
    mask: BoolTensor,
    node_rank: Mapping[fx.Node, int],
    factor: Callable[[], RowFactor],
) -> Elements:
    """Returns entries set to 0 where the mask does not hold.

    Conditions on rows alone keep or drop whole rows. Conditions on keys have to be the mask of one
    distribution, and no other may lack a key that they keep, or part of every distribution's mask:
    see NOTE [Masks after the softmax] in planning/masks.py. Anything else changes the sum.
    """
    conditions = [_conditions(mask, layout, a.shape, node_rank) for layout in a.layouts]
    forms = [read(d.scores) for d in a.parts]
    own = [form.mask for form in forms]
    beyond = [c - known for c, known in zip(conditions, own, strict=True)]
    if not _on_keys(a, conditions) or (any(beyond) and not _on_keys(a, beyond)):
        return with_row_factor(a, factor()) if any(beyond) else a
    equal = [k for k, x in enumerate(forms) if conditions[k] == own[k] and x.fill <= IMPROBABLE]
    if not any(beyond):
        if all(form.fill == -math.inf for form in forms):
            return a  # what the mask drops has no probability
        condition = within(equal[0]) if equal else partly_within(0)
    elif (
        equal
        and not a.parts[equal[0]].averaged
        and all(known <= c for c, known in zip(conditions, own, strict=True))
    ):
        condition = within(equal[0])
    else:
        raise Unsupported("a mask on keys is applied after the softmax")
    return a.map(lambda e: apply("where", condition, e, ZERO))


def _conditions(
    mask: BoolTensor, layout: Layout, shape: Shape, node_rank: Mapping[fx.Node, int]
) -> Mask:
    if mask.rank > len(shape):
        raise Unsupported("a mask with more dimensions is applied after the softmax")
    indexed = mask.raised(len(shape)).indexed_dims()
    if any(layout[d] == () and not is_one(shape[d]) for d in indexed):
        raise Unsupported("a mask varies along a dimension that a distribution is broadcast along")
    found = to_axes(mask, layout, node_rank)
    if found is None:
        raise Unsupported(
            "a mask that is not a conjunction of conditions is applied after the softmax"
        )
    return found


def _on_keys(a: Elements, masks: Sequence[Mask]) -> bool:
    """Whether a distribution's mask in the list has a condition on its keys."""
    pairs = zip(a.parts, masks, strict=True)
    return any(d.axis in axes_in(condition) for d, mask in pairs for condition in mask)


def _num_dims(layout: Layout, axis: int) -> int:
    """In how many dimensions an axis is."""
    return sum(any(piece.axis == axis for piece in dim) for dim in layout)


def viewed(a: Elements, change: Callable[[Layout], Layout | None], what: str) -> Elements:
    """Applies a view operation to every layout; the keys stay one dimension."""
    if any(t.factors for t in a.terms):
        raise Unsupported(f"{what} of values that carry row weights")
    layouts = []
    for layout in a.layouts:
        changed = change(layout)
        if changed is None:
            raise Unsupported(f"{what} that mixes the axes of the scores")
        layouts.append(changed)
    key_dims = {axis_dim(x, d.axis) for x, d in zip(layouts, a.parts, strict=True)}
    if len(key_dims) != 1 or None in key_dims:
        pairs = zip(layouts, a.parts, strict=True)
        if any(_num_dims(x, d.axis) > 1 for x, d in pairs):
            raise Unsupported(f"{what} that splits the keys: {OF_BLOCKS}")
        raise Unsupported(f"{what} that touches the keys")
    (key_dim,) = key_dims
    assert key_dim is not None
    shape: Shape | None = lay.sizes_of(layouts[0])
    for layout in layouts[1:]:
        shape = None if shape is None else lay.broadcast(shape, lay.sizes_of(layout))
    if shape is None:
        raise Unsupported(f"{what} of distributions whose sizes are not known to be equal")
    return replace(a, layouts=tuple(layouts), key_dim=key_dim, shape=shape)


def reduced(a: Elements, dims: Sequence[int], keepdim: bool, mean: bool) -> Rows | Elements:
    """Returns a sum or mean over dimensions: rows if keys are among them, else averaged heads."""
    if a.key_dim not in dims:
        return averaged(a, dims, keepdim, mean)
    divisors = tuple(a.shape[d] for d in dims) if mean else ()
    terms, offsets, constant = [], [], 0.0
    share = _share_within(a)
    if share is not None and tuple(dims) == (a.key_dim,):
        rows = replace(a, terms=())
        return Rows(rows, (a.key_dim,), keepdim, 1.0, divisors, (), share, constant_within=True)
    for term in a.terms:
        expr, term_offsets, term_constant = split_constants(term.expr)
        if term.factors and (term_offsets or term_constant):
            raise Unsupported("row weights on a log-sum-exp")
        if expr != ZERO:
            terms.append(replace(term, expr=expr))
        offsets += [(_lse_of(a, k), c) for k, c in term_offsets]
        constant += term_constant
    if (offsets or constant) and tuple(dims) != (a.key_dim,):
        raise Unsupported("a log-sum-exp is summed over rows together with the keys")
    elements = replace(a, terms=tuple(terms))
    return Rows(elements, tuple(sorted(dims)), keepdim, 1.0, divisors, tuple(offsets), constant)


def _lse_of(a: Elements, k: int) -> LogSumExp:
    """Returns the log-sum-exp of a part's scores, in the dimensions of the elements."""
    part = a.parts[k]
    layout = lay.without(a.layouts[k], a.key_dim)
    return LogSumExp(part.scores, part.axis, layout)


def _share_within(a: Elements) -> float | None:
    """c of ``c * P`` with its own mask applied again: the sum is c, or 0 in rows without keys."""
    e = a.single()
    if e is None or where_within(e, False) != ZERO:
        return None
    coefficient, factors = _factors(where_within(e, True))
    if [f.op for f in factors] != ["P"]:
        return None
    return coefficient if conditions_in(e) == {within(int(factors[0].value))} else None


def split_constants(e: Node) -> tuple[Node, list[tuple[int, float]], float]:
    """Returns the expression without its parts whose sum over keys is known.

    They are P (1) and P * lse (lse).
    """
    rest, offsets, constant = ZERO, [], 0.0
    for sign, addend in _addends(e, 1.0):
        coefficient, factors = _factors(addend)
        coefficient *= sign
        names = sorted(f.op for f in factors)
        if names == ["P"]:
            constant += coefficient
        elif names == ["P", "lse"]:
            offsets += [(int(f.value), coefficient) for f in factors if f.op == "lse"]
        elif mentions(addend, "lse"):
            raise Unsupported("raw scores in a sum that is not an expectation of them")
        else:
            rest = rest + addend if sign > 0 else rest - addend
    return rest, offsets, constant


def _addends(e: Node, sign: float) -> list[tuple[float, Node]]:
    """The expression as a sum, products distributed over sums where a raw score is involved."""
    if e.op in ("add", "sub"):
        return _addends(e.args[0], sign) + _addends(e.args[1], sign if e.op == "add" else -sign)
    if e.op == "neg":
        return _addends(e.args[0], -sign)
    if e.op == "mul" and mentions(e, "lse"):
        for inner, other in ((0, 1), (1, 0)):
            if e.args[inner].op in ("add", "sub", "neg"):
                return [(s, x * e.args[other]) for s, x in _addends(e.args[inner], sign)]
    return [(sign, e)]


def _factors(e: Node) -> tuple[float, list[Node]]:
    """Splits a product into its constant and its remaining factors."""
    if e.op == "const":
        return e.value, []
    if e.op == "mul":
        (c1, f1), (c2, f2) = _factors(e.args[0]), _factors(e.args[1])
        return c1 * c2, f1 + f2
    if e.op == "div" and e.args[1].op == "const":
        c, f = _factors(e.args[0])
        return c / e.args[1].value, f
    if e.op == "neg":
        c, f = _factors(e.args[0])
        return -c, f
    return 1.0, [e]


def averaged(a: Elements, dims: Sequence[int], keepdim: bool, mean: bool) -> Elements:
    """Returns probabilities summed over heads: a multiple of their mean, itself a distribution."""
    distribution = a.probability()
    layout = a.layouts[0] if distribution is not None else ()
    if distribution is None or a.parts != (distribution,):
        raise Unsupported(
            "a sum over rows of values that are not plain probabilities, before the sum over keys"
        )
    pieces = tuple(p for d in dims for p in layout[d])
    if distribution.averaged:
        raise Unsupported("probabilities are averaged twice")
    count = product(a.shape[d] for d in dims)
    if not isinstance(count, int):
        raise Unsupported("probabilities are averaged over a dimension of unknown size")
    kept = tuple(() if d in dims else x for d, x in enumerate(layout) if keepdim or d not in dims)
    sizes = tuple(1 if d in dims else x for d, x in enumerate(a.shape) if keepdim or d not in dims)
    mixed = replace(distribution, averaged=pieces)
    key_dim = a.key_dim if keepdim else a.key_dim - sum(d < a.key_dim for d in dims)
    expr = prob(0) if mean else const(float(count)) * prob(0)
    return Elements((Term(expr),), (mixed,), (kept,), key_dim, sizes)
